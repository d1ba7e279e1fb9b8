"""RadixIndex, case by case; the property tests compare it with a naive twin."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from tests.index.records import records_of

from skymemory.errors import InvalidInput
from skymemory.index.journal import JournalState, decode_records, replay, replay_all
from skymemory.index.radix import BlockInfo, RadixIndex
from skymemory.kv.block import hash_blocks

INFO = BlockInfo(481, 2_883_648, 0xDEADBEEF, 1_700_000_000.25, -3, 2, "rotation_hop", 10, b"c" * 32)


def chain(length: int, seed: int = 0) -> list[bytes]:
    return hash_blocks(bytes(32), np.random.default_rng(seed).integers(0, 1000, length), 1)


def filled(hashes: list[bytes]) -> RadixIndex:
    index = RadixIndex()
    assert index.add(hashes, [INFO] * len(hashes)) == len(hashes)
    return index


def copy_of(index: RadixIndex) -> RadixIndex:
    """One made of the other's records, of all at once or one by one."""
    copy, one_by_one, log = RadixIndex(), RadixIndex(), b"".join(records_of(index))
    assert replay_all(log, copy, JournalState()) == len(log)
    for record in decode_records(log)[0]:
        replay(record, one_by_one)
    assert sorted(records_of(copy)) == sorted(records_of(one_by_one))
    return copy


def test_empty() -> None:
    index = RadixIndex()
    assert (len(index), index.longest_prefix(chain(5)), index.longest_prefix([])) == (0, 0, 0)
    assert index.get(chain(1)[0]) is None
    assert not index.remove(chain(1)[0])
    assert index.remove_context(b"") == list(index) == records_of(index) == []
    assert len(copy_of(index)) == 0


def test_longest_prefix_of_every_length() -> None:
    hashes, other = chain(50), chain(50, seed=1)
    index = filled(hashes)
    for cut in range(51):
        assert index.longest_prefix(hashes[:cut]) == cut
        assert index.longest_prefix(hashes[:cut] + other) == cut


def test_every_single_hole_stops_the_prefix_and_filling_it_opens_it_again() -> None:
    hashes = chain(20)
    index = filled(hashes)
    for hole in range(20):
        assert index.remove(hashes[hole])
        assert not index.remove(hashes[hole])
        assert index.longest_prefix(hashes) == hole
        assert index.add([hashes[hole]], [INFO], hole, hashes[hole - 1] if hole else None) == 1
        assert index.longest_prefix(hashes) == 20


def test_blocks_in_any_order_end_up_in_one_run() -> None:
    hashes = chain(200)
    orders = {
        "forwards": list(range(200)),
        "backwards": list(range(199, -1, -1)),
        "random": np.random.default_rng(3).permutation(200).tolist(),
    }
    for order in orders.values():
        index = RadixIndex()
        for at in order:
            index.add([hashes[at]], [INFO], at, hashes[at - 1] if at else None)
        assert index.longest_prefix(hashes) == 200
        assert len(records_of(index)) == 1


def test_holes_leave_at_most_one_more_run_each_and_filling_leaves_none() -> None:
    hashes = chain(100)
    index = filled(hashes)
    for _ in range(3):
        for hole in range(3, 100, 7):
            index.remove(hashes[hole])
        assert len(records_of(index)) == 15
        for hole in range(3, 100, 7):
            index.add([hashes[hole]], [INFO], hole, hashes[hole - 1])
    assert len(records_of(index)) == 1


def test_branches_share_their_prefix() -> None:
    system = chain(10)
    left, right = chain(10, 1), chain(10, 2)
    index = filled(system)
    index.add(left, [INFO] * 10, 10, system[-1])
    index.add(right, [INFO] * 10, 5, system[4])
    assert index.longest_prefix(system + left) == 20
    assert index.longest_prefix(system[:5] + right) == 15
    index.remove(system[7])
    assert index.longest_prefix(system + left) == 7
    assert index.longest_prefix(system[:5] + right) == 15, "a branch before the hole"
    index.remove(system[0])
    assert index.longest_prefix(system[:5] + right) == 0
    assert len(index) == 28 and index.longest_prefix(system[1:5]) == 4, "what is behind a hole is kept"


def test_a_known_block_gets_the_new_info() -> None:
    hashes = chain(3)
    index = filled(hashes)
    moved = dataclasses.replace(INFO, slot_moves=7, servers=81, strategy="hop", context=b"")
    assert index.add(hashes[:2], [moved, moved]) == 0
    assert [index.get(one) for one in hashes] == [moved, moved, INFO]
    assert hashes[0] in index
    assert len(index) == 3


def test_infos_come_back_exactly() -> None:
    extremes = [
        BlockInfo(0, 0, 0, 0.0, 0, 0, "", 0),
        BlockInfo(2**32 - 1, 2**64 - 1, 2**32 - 1, -1e300, 2**31 - 1, -(2**31), "s" * 255, 2**32 - 1, b"c" * 65535),
        dataclasses.replace(INFO, set_at_s=0.1 + 0.2),
    ]
    hashes = chain(3)
    index = RadixIndex()
    index.add(hashes, extremes)
    again = copy_of(index)
    assert [index.get(one) for one in hashes] == [again.get(one) for one in hashes] == extremes


def test_remove_context_takes_all_of_it_and_nothing_else() -> None:
    mine, theirs = chain(30, 1), chain(30, 2)
    index = filled(mine)
    other = dataclasses.replace(INFO, context=b"other")
    index.add(theirs, [other] * 30)
    assert index.remove_context(b"absent") == []
    assert index.remove_context(INFO.context) == mine[::-1], "deepest first"
    assert sorted(index) == sorted(theirs)
    assert index.longest_prefix(theirs) == 30
    assert index.longest_prefix(mine) == 0
    index.clear()
    assert len(index) == 0


@pytest.mark.parametrize(
    ("hashes", "infos", "start", "parent"),
    [
        ([b"a" * 32], [], 0, None),
        ([b"a" * 32], [INFO], -1, b"p" * 32),
        ([b"a" * 32], [INFO], 2**32 - 1, b"p" * 32),
        ([b"a" * 32], [INFO], 1, None),
        ([b"a" * 32], [INFO], 0, b"p" * 32),
        ([b"a" * 31], [INFO], 0, None),
        (["a" * 32], [INFO], 0, None),
        ([["list"]], [INFO], 0, None),
        ([b"a" * 32], [INFO], 1, b"short"),
        ([b"a" * 32, b"a" * 32], [INFO, INFO], 0, None),
        ([b"a" * 32], [INFO], 1, b"a" * 32),
        ([b"a" * 32], [dataclasses.replace(INFO, chunks=-1)], 0, None),
        ([b"a" * 32], [dataclasses.replace(INFO, value_bytes=2**64)], 0, None),
        ([b"a" * 32], [dataclasses.replace(INFO, slot_moves=2**31)], 0, None),
        ([b"a" * 32], [dataclasses.replace(INFO, set_at_s=float("nan"))], 0, None),
        ([b"a" * 32], [dataclasses.replace(INFO, servers=-1)], 0, None),
        ([b"a" * 32], [dataclasses.replace(INFO, strategy="ü")], 0, None),
        ([b"a" * 32], [dataclasses.replace(INFO, context="text")], 0, None),
        # b"k" * 32 is known at depth 1, its parent b"j" * 32 at depth 0; b"w" * 32 waits at depth 4 for b"v" * 32.
        ([b"k" * 32], [INFO], 2, b"j" * 32),
        ([b"k" * 32], [INFO], 1, b"p" * 32),
        ([b"k" * 32], [INFO], 0, None),
        ([b"a" * 32, b"k" * 32], [INFO, INFO], 0, None),
        ([b"a" * 32], [INFO], 2, b"j" * 32),
        ([b"v" * 32], [INFO], 0, None),
        ([b"a" * 32], [INFO], 5, b"v" * 32),
    ],
)
def test_contradictions_are_refused_and_change_nothing(hashes: Any, infos: Any, start: int, parent: Any) -> None:
    index = RadixIndex()
    index.add([b"j" * 32, b"k" * 32], [INFO, INFO])
    index.add([b"w" * 32], [INFO], 4, b"v" * 32)
    before = records_of(index)
    with pytest.raises(InvalidInput):
        index.add(hashes, infos, start, parent)
    assert records_of(index) == before


@pytest.mark.parametrize("hashes", [[b"a" * 32, b"a" * 32], [b"a" * 32, b"b" * 32, b"a" * 32]])
def test_a_chain_that_repeats_a_block_is_refused_as_such(hashes: list[bytes]) -> None:
    with pytest.raises(InvalidInput, match="the same block twice"):
        RadixIndex().add(hashes, [INFO] * len(hashes))


def test_an_index_replayed_from_its_records_goes_on_working() -> None:
    hashes = chain(40)
    index = filled(hashes)
    index.remove(hashes[10])
    index.remove(hashes[30])
    again = copy_of(index)
    assert again.longest_prefix(hashes) == 10
    again.add([hashes[10]], [INFO], 10, hashes[9])
    assert again.longest_prefix(hashes) == 30
    assert len(records_of(again)) == 2
    assert index.longest_prefix(hashes) == 10, "nothing is shared"


def test_held_bytes_fade_with_what_is_set_after_them() -> None:
    index, size = RadixIndex(), INFO.value_bytes
    index.capacity_bytes = 10.0 * size
    old, new = chain(5), chain(200, seed=1)
    index.add(old, [dataclasses.replace(INFO, servers=1)] * 5)
    assert 4.0 * size < index.bytes_by_servers()[1] < 5.0 * size
    index.add(new, [dataclasses.replace(INFO, servers=9)] * 200)
    held = index.bytes_by_servers()
    assert held[1] < 1
    assert held[9] == pytest.approx(size / (1 - np.exp(-0.1)), rel=1e-6)
    for key in new:
        index.remove(key)
    assert index.bytes_by_servers()[9] == 0
