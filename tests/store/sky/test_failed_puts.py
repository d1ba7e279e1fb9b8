"""A put that fails destroys nothing that was there: neither the same bytes, nor another writer's."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable

import pytest
from tests.store.conftest import simulated, store_over
from tests.store.sky.test_misses import chunks_in
from tests.store.sky.test_store import rotate

from skymemory.protocol.clock import STRATEGY_CODES
from skymemory.store.base import Presence
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.transport.simulated import SimulatedConstellation

KEY = hashlib.sha256(b"put again").digest()
VALUE = random.Random(2).randbytes(20 * 6144)
OTHER = random.Random(3).randbytes(20 * 6144)
INDICES: dict[str, Callable[[], SharedIndex | None]] = {
    "complete index": SharedIndex,
    "incomplete index": lambda: SharedIndex(born=False),
    "no index": lambda: None,
}


def put_in_vain(
    sky: SimulatedConstellation, index: SharedIndex | None, value: bytes = VALUE, strategy: str = "rotation_hop"
) -> None:
    """By ground host 2, which does not reach one of the satellites that the value belongs to."""
    other = store_over(sky, 2, index, strategy=strategy)
    other.synchronise()
    moves = other._driver.machine.moves(sky.now_s)
    silent = sky.sky.placement(STRATEGY_CODES[strategy], 10).locate(4, moves, moves)
    sky.cut(("ground", 2), silent)
    assert other.put_many([(KEY, value)]) == [False]
    sky.mend(("ground", 2), silent)
    sky.settle(sky.now_s + 5.0)


@pytest.mark.brief("moves0-complete index", "moves1-incomplete index", "moves1-no index", "moves2-complete index")
@pytest.mark.parametrize("kind", INDICES)
@pytest.mark.parametrize("moves", [(0, 0), (1, 0), (2, 1)])
def test_the_same_bytes_put_in_vain_leave_what_another_has_stored(kind: str, moves: tuple[int, int]) -> None:
    sky = simulated()
    one = store_over(sky, 1, SharedIndex())
    assert one.put_many([(KEY, VALUE)]) == [True]
    rotate(sky, *moves)
    sky.settle(sky.now_s + 5.0)
    one.synchronise()
    index = INDICES[kind]()
    if kind == "complete index":
        index = one._catalog.index  # that of the same computer: one that did not know the value would not be complete
    put_in_vain(sky, index)
    assert one.get_many([KEY]) == [VALUE]


@pytest.mark.brief(every=5)
@pytest.mark.parametrize("kind", INDICES)
@pytest.mark.parametrize("size", [20 * 6144, 12 * 6144, 6144])
def test_other_bytes_put_in_vain_are_no_hit_and_the_key_is_healed_by_storing_again(kind: str, size: int) -> None:
    sky = simulated()
    index = INDICES[kind]()
    assert store_over(sky, 1, index).put_many([(KEY, OTHER[:size])]) == [True]
    put_in_vain(sky, index)
    for ground in (3, 4):
        assert store_over(sky, ground, index).get_many([KEY]) == [None]
    again = store_over(sky, 5, index)
    assert again.lookup([KEY]) == [Presence.MISS]
    assert again.put_many([(KEY, VALUE)]) == [True]
    assert store_over(sky, 6, index).get_many([KEY]) == [VALUE]


def test_other_bytes_put_in_vain_after_a_move_leave_the_whole_value_where_it_is() -> None:
    """It does not follow the box: the later one belongs in other places."""
    sky, index = simulated(), SharedIndex()
    one = store_over(sky, 1, index, strategy="hop")
    assert one.put_many([(KEY, OTHER)]) == [True]
    there = {here for here, machine in sky.satellites.items() if machine.store.shares.get(KEY)}
    rotate(sky, 5, 2)
    sky.settle(sky.now_s + 5.0)
    put_in_vain(sky, index, strategy="hop")
    one.synchronise()
    assert one.get_many([KEY]) == [OTHER]
    assert {here for here, machine in sky.satellites.items() if machine.store.shares.get(KEY)} == there


def test_what_was_put_in_vain_and_never_there_is_taken_back() -> None:
    sky = simulated()
    put_in_vain(sky, SharedIndex())
    assert chunks_in(sky, KEY) == 0
    store = store_over(sky, 3)
    assert store.lookup([KEY]) == [Presence.MISS]
    assert store.put_many([(KEY, VALUE)]) == [True] and store.get_many([KEY]) == [VALUE]
