"""A key stored again with another value: no reader finds the earlier one, nor harms the later."""

from __future__ import annotations

import hashlib

import pytest
from tests.store.conftest import simulated, store_over
from tests.store.sky.test_store import rotate

from skymemory.protocol.satellite.state import EvictionConfig
from skymemory.store.base import Presence
from skymemory.store.sky.shared_index import SharedIndex

KEY = hashlib.sha256(b"stored again").digest()


def value(version: int, size: int) -> bytes:
    return hashlib.shake_128(bytes([version])).digest(size)


@pytest.mark.brief("path0-1", "path1-3", "path2-10", "path3-1", "path0-25")
@pytest.mark.parametrize("chunks", [1, 3, 10, 25])
@pytest.mark.parametrize("path", [[(0, 0), (0, 0)], [(1, 0), (2, 0)], [(1, 0), (3, 1)], [(2, 1), (1, 0)]])
def test_who_probes_finds_the_later_value_or_none(chunks: int, path: list[tuple[int, int]]) -> None:
    sky = simulated()
    writer = store_over(sky, 1, SharedIndex())
    size = chunks * 6144
    assert writer.put_many([(KEY, value(1, size))]) == [True]
    for again, after in [path]:
        rotate(sky, *again)
        sky.settle(sky.now_s + 5)
        writer.synchronise()
        assert writer.put_many([(KEY, value(2, size))]) == [True]
        rotate(sky, *after)
        sky.settle(sky.now_s + 5)
    finder = store_over(sky, 2)
    finder.synchronise()
    assert finder.get_many([KEY]) == [value(2, size)]
    writer.synchronise()
    assert writer.get_many([KEY]) == [value(2, size)]


@pytest.mark.parametrize("moves", [(0, 0), (1, 0), (0, 1)])
def test_who_knows_the_earlier_value_does_not_harm_the_later(moves: tuple[int, int]) -> None:
    """Two computers, an index each."""
    sky = simulated()
    one, other = store_over(sky, 1, SharedIndex()), store_over(sky, 2, SharedIndex())
    assert one.put_many([(KEY, value(1, 60_000))]) == [True]
    rotate(sky, *moves)
    sky.settle(sky.now_s + 5)
    other.synchronise()
    assert other.put_many([(KEY, value(2, 60_000))]) == [True]
    for machine in sky.satellites.values():
        chunk = machine.store.peek((KEY, 4))
        if chunk is not None and chunk.payload in value(1, 60_000):
            machine.store.remove((KEY, 4))
    assert one.get_many([KEY]) == [None]
    assert other.get_many([KEY]) == [value(2, 60_000)]


def test_word_of_the_end_of_a_value_does_not_cost_the_entry_of_what_was_stored_again_since() -> None:
    """It was heard before the write, or comes during it; with the same bytes at the same moves it is of one setting."""
    sky = simulated(memory_bytes=60_000, eviction=EvictionConfig.of(["gossip"]))
    one, other = store_over(sky, 1, SharedIndex()), store_over(sky, 2, SharedIndex())
    assert one.put_many([(KEY, value(1, 120_000))]) == [True]
    sky.settle(sky.now_s + 3.0)
    for n in range(8):
        assert other.put_many([(hashlib.sha256(b"%d" % n).digest(), value(n + 2, 120_000))]) == [True]
        sky.settle(sky.now_s + 0.3)
    sky.settle(sky.now_s + 3.0)
    assert one._driver.machine._dead_values
    assert one.put_many([(KEY, value(1, 120_000))]) == [True]
    assert one.lookup([KEY]) == [Presence.HIT]
