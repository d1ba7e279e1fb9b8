"""What a fork must not share: sockets, the index's and the disk's locks, threads, and locks that are never released."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from tests.cache.test_manager import LAYOUT, TOKENS, Engine, context, load, save
from tests.cache.tiers.small_tiers import near_and_far
from tests.contract.forked import in_child
from tests.contract.store_contract import chain, key, value
from tests.store.conftest import store_on, udp_sky

from skymemory.cache.blocks import BlockCache, Part, Parts
from skymemory.cache.cake.cake import Cake, CakeSettings
from skymemory.errors import WrongProcess
from skymemory.index.radix import BlockInfo
from skymemory.store.base import Store
from skymemory.store.disk import DiskStore
from skymemory.store.memory import MemoryStore
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.store.wrappers import TenantStore

INFO = BlockInfo(1, 10, 0, 0.0, 0, 0, "rotation_hop", 10)


def refused(*calls: Callable[[], object]) -> list[str]:
    """What these raised, which must be the clear error."""
    outcomes = []
    for call in calls:
        with pytest.raises(WrongProcess, match=r"opened by process \d+, .* open a new one here, after the fork"):
            call()
        outcomes.append("refused")
    return outcomes


def test_a_child_with_a_store_of_its_own_and_its_parent_read_at_the_same_time(tmp_path: Path) -> None:
    keys, places = chain(5)
    right = [value(at, 20_000) for at in range(5)]
    journal = tmp_path / "index"
    with udp_sky() as plan:
        store = store_on(plan, SharedIndex(journal, born=True))
        assert all(store.put_many(list(zip(keys, right, strict=True)), places))

        def child() -> list[object]:
            own = store_on(plan, SharedIndex(journal), ground=8)
            outcomes: list[object] = [own.get_many(keys) == right for _ in range(20)]
            outcomes.append(own.put_many([(key(9), b"the child's")]))
            own.close(), store.close()
            return outcomes

        missed: list[bool] = []
        assert in_child(child, lambda: missed.append(store.get_many(keys) != right)) == [*[True] * 20, [True]]
        assert missed and not any(missed)
        assert store.get_many([key(9)]) == [b"the child's"], "its index entry is seen here"
        store.close()


def test_processes_of_a_fork_write_the_index_one_after_the_other(tmp_path: Path) -> None:
    index = SharedIndex(tmp_path / "index", born=True)
    ours = iter(range(10**6))

    def child() -> list[str]:
        outcomes = refused(
            lambda: index.add([key(1)], [INFO], 0, None), lambda: len(index), lambda: index.infos([key(1)])
        )
        index.close()
        own = SharedIndex(tmp_path / "index")
        for number in range(200):
            own.add([key(10**6 + number)], [INFO], 0, None)
        return outcomes

    assert in_child(child, lambda: index.add([key(next(ours))], [INFO], 0, None)) == ["refused"] * 3
    written = next(ours)
    assert len(index) == len(SharedIndex(tmp_path / "index")) == written + 200 and index.complete


def test_a_disk_store_is_free_when_its_parent_has_closed_it_though_a_child_lives_on(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "disk", 100_000)
    store.put_many([(key(1), b"kept")])
    (begun, begins), (ending, ends) = os.pipe(), os.pipe()

    def child() -> list[str]:
        os.write(begins, b".")
        outcomes = refused(lambda: store.get_many([key(1)]), lambda: store.put_many([(key(1), b"the child's")]))
        os.read(ending, 1)
        return outcomes

    reopened: list[DiskStore] = []

    def reopen() -> None:
        if not reopened and os.read(begun, 1):
            store.close()
            reopened.append(DiskStore(tmp_path / "disk", 100_000))  # raises while another process holds the lock
            os.write(ends, b".")

    try:
        assert in_child(child, reopen) == ["refused"] * 2
    finally:
        for end in (begun, begins, ending, ends):
            os.close(end)
    assert reopened[0].get_many([key(1)]) == [b"kept"]
    reopened[0].close()


def test_a_child_begins_without_its_parents_descriptors(tmp_path: Path) -> None:
    """Else a lock would hold after the parent that took it was killed, and a port for as long as any child lives."""

    def open_now() -> set[str]:
        found = set()
        for fd in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the one that lists
                found.add(os.readlink(f"/proc/self/fd/{fd}"))
        return found

    with udp_sky() as plan:
        before = open_now()
        store = store_on(plan, SharedIndex(tmp_path / "index", born=True))
        disk = DiskStore(tmp_path / "disk", 100_000)
        opened = open_now() - before
        assert len(opened) == 5 and str(tmp_path / "index") in opened and str(tmp_path / "disk" / "lock") in opened
        assert set(in_child(lambda: sorted(open_now()))) & opened == set()
        assert opened <= open_now()
        store.close(), disk.close()


@pytest.mark.brief()
@pytest.mark.parametrize("kind", ["memory", "tenant", "udp"])
def test_a_lock_that_another_thread_held_at_the_fork_blocks_no_process(kind: str) -> None:
    with udp_sky() as plan:
        below: Store = store_on(plan) if kind == "udp" else MemoryStore()
        store = TenantStore(below, "a", 1 << 20) if kind == "tenant" else below
        lock = below._driver.lock if kind == "udp" else store._lock  # type: ignore[attr-defined]
        held, done = threading.Event(), threading.Event()

        def hold() -> None:
            with lock:
                held.set()
                done.wait(30)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(30)
        try:
            outcomes = in_child(
                lambda: [*refused(lambda: store.get_many([key(1)]), lambda: store.delete([key(1)])), store.close()],
                limit_s=5,
            )
        finally:
            done.set()
            thread.join()
        assert outcomes == ["refused", "refused", None]
        assert store.get_many([key(1)]) == [None]
        store.close()


def test_tiers_whose_threads_a_child_lacks_say_so_at_once() -> None:
    store, _near, far = near_and_far()
    far.put_many([(key(1), value(1))])

    def child() -> list[str]:
        ticket = lambda: store.prepare_load([key(1)])  # noqa: E731
        outcomes = refused(
            ticket, lambda: store.lookup([key(1)]), lambda: store.put_many([(key(2), b"x")]), store.stats
        )
        store.close()
        return outcomes

    assert in_child(child, limit_s=2) == ["refused"] * 4
    store.close()


def test_a_cache_does_not_take_a_child_for_a_miss() -> None:
    """A store's failures are misses to it; this is none."""
    cache = BlockCache(context(), LAYOUT, MemoryStore())
    assert save(cache, TOKENS) == 5
    cake = Cake(Parts([Part(cache)]), CakeSettings(step_tokens=LAYOUT.block_tokens))

    def child() -> list[str]:
        engine = Engine(TOKENS)
        return refused(
            lambda: load(cache, TOKENS),
            lambda: cache.missing(cache.hashes(TOKENS)),
            lambda: save(cache, np.arange(9)),
            lambda: cake.open(TOKENS, [engine], limit_tokens=20, budget_tokens=4),
        )

    assert in_child(child, limit_s=5) == ["refused"] * 4
    assert load(cache, TOKENS)[0].loaded_blocks == 5
    cake.close()
