"""Threads of one process at one store over UDP: they wait beside each other, and none for another."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from tests.cache.tiers.small_tiers import soon
from tests.contract.store_contract import key, value
from tests.store.conftest import connection, reads_under_way, standing, store_on, udp_sky, udp_sky_and_loop, udp_store

from skymemory.constellation.torus import SatelliteId
from skymemory.store.base import Presence
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.store.sky.store import ConstellationStore

GIVE_UP_S = 2.0


@contextmanager
def distant_store() -> Iterator[ConstellationStore]:
    """With the delays of its orbits."""
    with udp_sky_and_loop(delay_scale=1.0) as (plan, _):
        store = store_on(plan, SharedIndex())
        try:
            yield store
        finally:
            store.close()


@contextmanager
def one_silent(store: ConstellationStore, satellite: SatelliteId) -> Iterator[None]:
    """What this client sends to a satellite is lost."""
    client = connection(store)
    patience_s, client.machine._in_flight._give_up_s = client.machine._in_flight._give_up_s, GIVE_UP_S
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as deaf:
        deaf.bind(("127.0.0.1", 0))
        endpoint, client._satellites[satellite] = client._satellites[satellite], deaf.getsockname()
        try:
            yield
        finally:
            client._satellites[satellite] = endpoint
            client.machine._in_flight._give_up_s = patience_s


def holders(store: ConstellationStore, one: bytes) -> set[SatelliteId]:
    (info,) = store._catalog.known([one]).values()
    return set(store._holders.of(info, "now"))


def a_large_and_a_small_value(store: ConstellationStore) -> tuple[bytes, bytes, SatelliteId]:
    """Keys of both, and a satellite that has chunks of the large one alone."""
    large, small = key(1), key(2)
    assert store.put_many([(large, value(1, 100_000)), (small, value(2, 2000))]) == [True, True]
    return large, small, min(holders(store, large) - holders(store, small))


def test_reads_of_several_threads_wait_beside_each_other() -> None:
    """All of them are asked for before the first is answered."""
    with udp_sky_and_loop() as (plan, loop):
        store = store_on(plan, SharedIndex(), give_up_s=60.0)
        values = {key(number): value(number, 3000) for number in range(8)}
        assert all(store.put_many(list(values.items())))
        with ThreadPoolExecutor(8) as pool:
            with standing(loop):
                reads = [pool.submit(store.get_many, [one]) for one in values]
                assert soon(lambda: reads_under_way(store) == 8)
            assert [read.result() for read in reads] == [[one] for one in values.values()]
        store.close()


@pytest.mark.slow
@pytest.mark.seeded
def test_a_read_does_not_wait_for_one_that_waits_for_a_dead_satellite() -> None:
    with udp_store(SharedIndex()) as store:
        large, small, satellite = a_large_and_a_small_value(store)
        with one_silent(store, satellite), ThreadPoolExecutor(1) as pool:
            hung = pool.submit(store.get_many, [large])
            assert soon(lambda: reads_under_way(store) == 1)
            read = 0
            while not hung.done():
                assert store.get_many([small]) == [value(2, 2000)]
                read += 1
            assert hung.result() == [None]
            assert read > 5, "each of them would wait for the end of that one"


def test_who_is_interrupted_hands_the_socket_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with udp_store(SharedIndex()) as store:
        large, small, satellite = a_large_and_a_small_value(store)
        client = connection(store)
        receive, victims = client._receive, set[int]()

        def interrupted() -> bool:
            if threading.get_ident() in victims:
                raise KeyboardInterrupt
            return receive()

        monkeypatch.setattr(client, "_receive", interrupted)

        leader: list[int] = []

        def be_interrupted() -> str:
            leader.append(threading.get_ident())
            try:
                store.get_many([large])
            except KeyboardInterrupt:
                return "interrupted"
            return "ended"

        with ThreadPoolExecutor(2) as pool:
            with one_silent(store, satellite):
                first = pool.submit(be_interrupted)
                assert soon(lambda: client._leader is not None)
                second = pool.submit(store.get_many, [large])
                assert soon(lambda: reads_under_way(store) == 2)
                victims.update(leader)
                assert first.result() == "interrupted"
                assert second.result() == [None], "served on to its end by the other thread"
            assert not client._calls and client._leader is None and not client._unclaimed
            assert not client.machine.awaited, "no place for what may still come"
            assert store.get_many([small]) == [value(2, 2000)]


def test_of_several_that_write_one_key_at_once_one_is_read_whole() -> None:
    with distant_store() as store, ThreadPoolExecutor(4) as pool:
        for turn in range(10):
            written = [value(4 * turn + which, 40_000) for which in range(4)]
            done = pool.map(lambda one: store.put_many([(key(1), one)]), written)
            assert list(done) == [[True]] * 4
            (got,) = store.get_many([key(1)])
            assert got in written


def test_closing_ends_nothing_that_is_under_way() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with udp_store(SharedIndex()) as store, ThreadPoolExecutor(1) as pool:
        large, _, satellite = a_large_and_a_small_value(store)
        with one_silent(store, satellite):
            hung = pool.submit(store.get_many, [large])
            time.sleep(0.05)
            store.close()
            assert hung.result() == [None]
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.brief("2")
@pytest.mark.parametrize("seed", range(3))
def test_every_thread_finds_what_it_wrote(seed: int) -> None:
    """Drawn calls of six threads, each with keys of its own, beside a dict."""
    with udp_sky() as plan, store_on(plan, SharedIndex(), give_up_s=60.0) as store:

        def walk(thread: int) -> None:
            dice, there = random.Random(100 * seed + thread), dict[bytes, bytes]()
            keys = [key(10 * thread + number) for number in range(4)]
            for _ in range(40):
                call, some = dice.choice("ppgggltd"), dice.sample(keys, dice.randrange(1, 4))
                if call == "p":
                    items = [(one, value(dice.randrange(1 << 20), dice.choice([0, 1, 6144, 20_000]))) for one in some]
                    assert store.put_many(items) == [True] * len(items)
                    there.update(items)
                elif call == "g":
                    assert store.get_many(some) == [there.get(one) for one in some]
                elif call == "l":
                    assert [one is Presence.HIT for one in store.lookup(some)] == [one in there for one in some]
                elif call == "t":
                    store.touch(some)
                else:
                    assert store.delete(some) == [one in there for one in some]
                    for one in some:
                        there.pop(one, None)

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(walk, range(6)))
        client = connection(store)
        assert not client._calls and not client._unclaimed and not client.machine._operations
