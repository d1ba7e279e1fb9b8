"""What a disk store gives without waiting: values in the kernel's memory, and nothing while another thread holds it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.cache.tiers.small_tiers import soon
from tests.contract.store_contract import key, value

from skymemory.cache.tiers.store import HierarchySettings, TieredStore
from skymemory.cache.tiers.tier import TierSettings
from skymemory.reasons import Miss
from skymemory.store import disk, disk_files
from skymemory.store.base import AtOnce, LoadTicket, Presence
from skymemory.store.disk import DiskStore
from skymemory.store.disk_files import file_name
from skymemory.store.memory import MemoryStore

SIZE = 200_000
KEYS = [key(0), key(1), key(2)]


class Clock:
    """Stands still, so that no stamp is due."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[DiskStore]:
    with DiskStore(tmp_path / "store", 1 << 22, clock=clock) as opened:
        opened.put_many([(one, value(number, SIZE)) for number, one in enumerate(KEYS)])
        ticket = opened.prepare_load(KEYS)
        if opened.load_now(ticket) is None:
            pytest.skip("this kernel or file system cannot say what it has in memory")
        opened.release(ticket)
        yield opened


def path_of(tmp_path: Path, number: int) -> Path:
    return tmp_path / "store" / "values" / file_name(key(number))


def test_it_is_a_complete_load(store: DiskStore) -> None:
    assert isinstance(store, AtOnce)
    assert not isinstance(MemoryStore(1), AtOnce)
    before = store.stats()
    ticket = store.prepare_load([KEYS[1], KEYS[0], KEYS[1]])
    assert store.load_now(ticket) == [value(1, SIZE), value(0, SIZE), value(1, SIZE)]
    assert ticket.report is not None
    assert [one.size_bytes for one in ticket.report.keys] == [SIZE] * 3
    assert store.stats()["hits_total"] == before["hits_total"] + 3
    with pytest.raises(ValueError, match="not open"):
        store.complete_load(ticket)
    store.release(ticket)
    assert store.stats()["open_leases"] == 0


@pytest.fixture
def forget(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Has the kernel answer that it does not have a file in memory.

    Not by ``posix_fadvise``: since Linux 6 the read that finds nothing begins to read ahead, and finds the value where
    this thread then loses the processor for as long as the disk takes.
    """
    forgotten: set[str] = set()

    def read_value_now(path: str, *rest: Any) -> bool:
        return path not in forgotten and disk_files.read_value_now(path, *rest)

    monkeypatch.setattr(disk, "read_value_now", read_value_now)
    return lambda path: forgotten.add(str(path))


def test_what_the_disk_must_be_asked_for_is_left_to_the_usual_call(
    store: DiskStore, tmp_path: Path, forget: Callable[[Path], None]
) -> None:
    forget(path_of(tmp_path, 2))
    ticket = store.prepare_load(KEYS)
    assert store.load_now(ticket) is None
    assert store.complete_load(ticket) == [value(number, SIZE) for number in range(3)]


@pytest.mark.parametrize("harm", ["flip", "cut", "remove", "absent"])
def test_a_miss_is_left_to_the_usual_call_which_says_why(store: DiskStore, tmp_path: Path, harm: str) -> None:
    path = path_of(tmp_path, 1)
    if harm == "flip":
        with path.open("r+b") as file:
            file.seek(1000)
            file.write(b"\xff\xfe")
    elif harm == "cut":
        os.truncate(path, 5000)
    elif harm == "remove":
        path.unlink()
    wanted = [*KEYS, key(9)] if harm == "absent" else KEYS
    ticket = store.prepare_load(wanted)
    assert store.load_now(ticket) is None
    found = store.complete_load(ticket)
    assert ticket.report is not None
    at = 3 if harm == "absent" else 1
    reasons = {"flip": "corrupt", "cut": "corrupt", "remove": "absent", "absent": "absent"}
    assert ticket.report.keys[at].reason == reasons[harm]
    assert [one is None for one in found] == [number == at for number in range(len(wanted))]


def test_a_store_that_another_thread_holds_or_that_must_expire_something_says_no(
    store: DiskStore, clock: Clock
) -> None:
    ticket = store.prepare_load(KEYS)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with store._lock:
            held.set()
            done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(60)
    with store.at_once() as free:
        assert not free
    assert store.load_now(ticket) is None
    done.set()
    holder.join()
    with store.at_once() as free:
        assert free
    store.expire([KEYS[0]], 5.0)
    clock.now_s += 5.0
    with store.at_once() as free:
        assert not free, "an expired file must be removed first"
    assert store.load_now(ticket) is None
    assert store.complete_load(ticket)[1:] == [value(1, SIZE), value(2, SIZE)]
    store.close()
    with store.at_once() as free:
        assert not free


def test_the_order_of_use_is_written_all_the_same(store: DiskStore, clock: Clock, tmp_path: Path) -> None:
    def load(number: int) -> bool:
        ticket = store.prepare_load([key(number)])
        now = store.load_now(ticket) is not None
        if not now:
            store.complete_load(ticket)
        store.release(ticket)
        return now

    clock.now_s = 10.0
    assert not load(1), "stamps are due"
    assert load(0)
    assert load(2)
    clock.now_s = 12.0
    assert not load(2)
    stamps = [path_of(tmp_path, number).stat().st_mtime_ns for number in range(3)]
    assert stamps[1] < stamps[0] < stamps[2]


class HangingDisk(DiskStore):
    """Its disk hangs once ``hangs`` is set: whatever would ask it waits, with the lock held, as a removal does."""

    hangs = False
    asked = 0

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        self.asked += 1
        with self._lock:
            while self.hangs:
                time.sleep(0.01)
        return super().complete_load(ticket)


def hierarchy(disk: DiskStore) -> TieredStore:
    settings = TierSettings(ask_deadline_s=0.3, load_deadline_s=0.3)
    return TieredStore([(MemoryStore(1 << 22), TierSettings(local=True)), (disk, settings)], HierarchySettings("never"))


def load(store: TieredStore, keys: Sequence[bytes]) -> tuple[list[memoryview | None], list[Miss | None]]:
    ticket = store.prepare_load(keys)
    found = store.complete_load(ticket)
    assert ticket.report is not None
    store.release(ticket)
    return found, [one.reason for one in ticket.report.keys]


def test_a_hierarchy_reads_from_the_kernels_memory_in_the_callers_thread_and_survives_a_disk_that_hangs(
    store: DiskStore, tmp_path: Path, forget: Callable[[Path], None]
) -> None:
    with HangingDisk(tmp_path / "other", 1 << 22, clock=Clock()) as disk, hierarchy(disk) as tiers:
        disk.put_many([(one, value(number, SIZE)) for number, one in enumerate(KEYS)])
        values = [value(number, SIZE) for number in range(3)]
        assert soon(lambda: load(tiers, KEYS)[0] == values), "stamps are due, and its thread writes them"
        asked = disk.asked
        for _ in range(5):
            assert load(tiers, KEYS) == (values, [None] * 3)
        assert disk.asked == asked, "from memory, without a thread of the tier"
        given_up = tiers.stats().get("tier_deadlines_total{disk}", 0)
        forget(tmp_path / "other" / "values" / file_name(KEYS[1]))
        disk.hangs = True
        found, reasons = load(tiers, KEYS)
        assert found == [None] * 3
        assert set(reasons) == {"deadline"}
        assert load(tiers, KEYS)[0] == [None] * 3, "the lock is held: it is not waited for"
        assert tiers.lookup(KEYS) == [Presence.MISS] * 3
        assert tiers.stats()["tier_deadlines_total{disk}"] == given_up + 1, "it is waited for once"
        disk.hangs = False
        assert soon(lambda: load(tiers, KEYS)[0] == values), "the tier comes back"
