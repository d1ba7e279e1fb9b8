"""The table of prefixes, compiled and twin: equal answers to whatever is done, and no prefix without its head."""

from __future__ import annotations

import struct
from types import ModuleType

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.conductor.prefix_index.naive_index import NaivePrefixIndex
from tests.native.conftest import IMPLEMENTATIONS

from skymemory.native.twin.backend import xxh64

SLOTS = (0, 1, 63, 64, 200)
PATHS = st.lists(st.integers(0, 2), max_size=9)


def chain(path: list[int]) -> np.ndarray:
    """The chain that a path down a tree of three branches stands for; the leftmost block's hash is 0."""
    hashes, previous = [], 77
    for branch in path:
        previous = xxh64(bytes([branch]), previous)
        hashes.append(previous)
    return np.array([0 if path[: at + 1] == [0] else h for at, h in enumerate(hashes)], dtype=np.uint64)


class Tables(RuleBasedStateMachine):
    """Both tables beside the naive index."""

    def __init__(self) -> None:
        super().__init__()
        self.naive = NaivePrefixIndex(12)
        self.tables = [module.PrefixTable(12, 0xDEADBEEF1) for module in IMPLEMENTATIONS]

    @rule(slot=st.sampled_from(SLOTS), path=PATHS)
    def learn(self, slot: int, path: list[int]) -> None:
        self.naive.learn(slot, chain(path))
        for table in self.tables:
            table.learn(slot, chain(path))

    @rule(slot=st.sampled_from(SLOTS), path=PATHS, cached=st.integers(0, 5))
    def correct(self, slot: int, path: list[int], cached: int) -> None:
        if cached < len(path):
            gone = self.naive.correct(slot, chain(path), cached)
            for table in self.tables:
                assert table.drop(slot, int(chain(path)[cached])) == gone

    @rule(slot=st.sampled_from(SLOTS), capacity=st.integers(0, 20))
    def set_capacity(self, slot: int, capacity: int) -> None:
        self.naive.set_capacity(slot, capacity)
        for table in self.tables:
            table.set_capacity(slot, capacity)

    @rule(slot=st.sampled_from(SLOTS))
    def forget(self, slot: int) -> None:
        self.naive.forget(slot)
        for table in self.tables:
            table.forget(slot)

    @rule(path=PATHS)
    def match(self, path: list[int]) -> None:
        expected = self.naive.match(chain(path), SLOTS)
        for table in self.tables:
            assert table.match(chain(path), SLOTS) == expected
            assert table.match(chain(path), [500, *reversed(SLOTS), 200]) == [0, *reversed(expected), expected[-1]]

    @rule(slot=st.sampled_from(SLOTS))
    def go_through_a_dump(self, slot: int) -> None:
        dumps = {table.dump(slot) for table in self.tables}
        assert len(dumps) == 1
        for table in self.tables:
            table.load(slot, dumps.copy().pop())

    @invariant()
    def same_ages(self) -> None:
        compiled, twin = self.tables
        assert compiled.ages() == twin.ages()
        for slot in SLOTS:
            for path in ([0, 1, 2, 0], [1, 1], [2, 0, 0]):
                every = [table.used_every(slot, chain(path), 6) for table in self.tables]
                assert every[0] == every[1]
        assert [compiled.oldest(slot) for slot in SLOTS] == [twin.oldest(slot) for slot in SLOTS]

    @invariant()
    def same_size_and_prefix_closed(self) -> None:
        for table in self.tables:
            assert [table.block_count(slot) for slot in SLOTS] == [self.naive.blocks_of(slot) for slot in SLOTS]
            assert [table.capacity(slot) for slot in SLOTS] == [self.naive.capacity_of(slot) for slot in SLOTS]
            held = [set() for _ in SLOTS]
            for slot, keys in zip(SLOTS, held, strict=True):
                for place, (key, parent, _) in enumerate(struct.iter_unpack("=QII", table.dump(slot))):
                    keys.add(key)
                    assert parent == 0xFFFFFFFF or parent < place, "a block without its parent"
                    if parent == 0xFFFFFFFF:
                        assert key in {int(chain([branch])[0]) for branch in range(3)}, "a block without its head"
            assert table.blocks() == len(set().union(*held))


TestTables = Tables.TestCase
TestTables.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_thousands_of_blocks_come_and_go(impl: ModuleType) -> None:
    """Through every growth and shrinking of the compiled table's parts."""
    dice = np.random.default_rng(3)
    table, judge = impl.PrefixTable(700), IMPLEMENTATIONS[0].PrefixTable(700)
    kept = []
    for turn in range(150):
        blocks = dice.integers(0, 2**64, int(dice.integers(1, 300)), dtype=np.uint64)
        if kept and turn % 3 == 0:
            blocks = np.concatenate([kept[int(dice.integers(len(kept)))][:50], blocks])
        kept.append(blocks)
        for one in (table, judge):
            one.learn(turn % 40, blocks)
        if turn % 50 == 49:
            for one in (table, judge):
                for slot in range(turn % 7, 40):
                    one.forget(slot)
        probe = kept[int(dice.integers(len(kept)))]
        assert table.match(probe, range(40)) == judge.match(probe, range(40))
        assert table.blocks() == judge.blocks()
    for slot in range(40):
        table.forget(slot)
    assert table.blocks() == 0 and table.match(kept[-1], [0, 39]) == [0, 0]


def test_a_chain_longer_than_the_capacity_keeps_its_head(impl: ModuleType) -> None:
    table = impl.PrefixTable(5)
    blocks = np.arange(1, 10, dtype=np.uint64)
    table.learn(0, blocks)
    assert (table.match(blocks, [0]), table.block_count(0)) == ([5], 5)
    table.set_capacity(0, 2)
    assert table.match(blocks, [0]) == [2]
    table.set_capacity(0, 0)
    table.learn(0, blocks)
    assert (table.match(blocks, [0]), table.block_count(0), table.blocks()) == ([0], 0, 0)


def test_dumps_that_are_none(impl: ModuleType) -> None:
    table = impl.PrefixTable(5)
    row = struct.Struct("=QII").pack
    for bad, why in (
        (b"123", "3 bytes are no dump"),
        (row(7, 0, 0), "before its parent"),
        (row(7, 0xFFFFFFFF, 0) + row(8, 2, 0), "before its parent"),
        (row(7, 0xFFFFFFFF, 0) * 2, "twice"),
    ):
        table.learn(3, np.array([1, 2], dtype=np.uint64))
        with pytest.raises(ValueError, match=why):
            table.load(3, bad)
        assert table.block_count(3) == table.blocks() == 0
    rows = b"".join(row(key, key - 1 if key else 0xFFFFFFFF, 0) for key in range(9))
    table.load(3, rows)
    assert table.match(np.arange(9, dtype=np.uint64), [3]) == [5] == [table.block_count(3)]


def test_what_cannot_be(impl: ModuleType) -> None:
    for capacity in (-1, 2**28 + 1, 2**70):
        with pytest.raises(ValueError, match="expected 0 to 268435456"):
            impl.PrefixTable(capacity)
    with pytest.raises(ValueError, match="odd"):
        impl.PrefixTable(1, 2)
    table = impl.PrefixTable(4)
    for slot in (-1, 65_536, 2**80):
        with pytest.raises(ValueError, match="expected 0 to 65535"):
            table.learn(slot, b"")
        with pytest.raises(ValueError, match="expected 0 to 65535"):
            table.match(b"", [0, slot])
    for call in (lambda: table.match(b"1234567", [0]), lambda: table.learn(0, b"1234567")):
        with pytest.raises(ValueError, match="7 bytes are not a whole number"):
            call()
    with pytest.raises(TypeError):
        table.match(b"", ["a"])
    assert table.drop(0, 2**64) == table.drop(0, -1) == 0
    assert table.match(b"", []) == [] and table.dump(65_535) == b""


def test_the_highest_slot_beside_the_lowest(impl: ModuleType) -> None:
    table = impl.PrefixTable(4)
    blocks = np.array([9, 0, 3], dtype=np.uint64)
    table.learn(0, blocks)
    table.learn(65_535, blocks[:2])
    assert table.match(blocks, [65_535, 0, 700]) == [2, 3, 0] and table.blocks() == 3


def test_ages_of_what_was_used_again_and_of_what_had_to_go(impl: ModuleType) -> None:
    table = impl.PrefixTable(3)
    for block in (1, 2, 3):
        table.learn(0, np.array([block], dtype=np.uint64))
    table.learn(2, np.array([1], dtype=np.uint64))
    assert table.oldest(0) == 3 and [table.oldest(slot) for slot in (1, 2, 9)] == [-1] * 3
    table.learn(0, np.array([1], dtype=np.uint64))  # four chains after its last use: three binary digits
    table.learn(0, np.array([4], dtype=np.uint64))  # 2 has to go, also four chains after
    used, evicted = table.ages()
    assert (used[3], sum(used)) == (1, 1) and (evicted[3], sum(evicted)) == (1, 1)
    assert table.oldest(0) == 3
    table.forget(0)
    assert table.oldest(0) == -1 and table.ages() == (used, evicted)


def test_old_ages_count_less(impl: ModuleType) -> None:
    table, blocks = impl.PrefixTable(1 << 13), np.arange(1 << 13, dtype=np.uint64)
    for _ in range(129):
        table.learn(0, blocks)
    used, _ = table.ages()
    assert sum(used) == used[1] == 1 << 19


def test_what_is_used_every_few_chains_is_hot(impl: ModuleType) -> None:
    """A head that every other chain has, each with a tail of its own."""
    table, head = impl.PrefixTable(1000), np.arange(1, 5, dtype=np.uint64)
    for number in range(20):
        table.learn(0, np.concatenate([head, np.array([100 + number], dtype=np.uint64)]))
        table.learn(0, np.array([10_000 + number], dtype=np.uint64))
    whole = np.concatenate([head, np.array([119], dtype=np.uint64)])
    assert [table.used_every(0, whole, interval) for interval in (1, 2, 9)] == [0, 4, 4]
    assert table.used_every(3, whole, 9) == 0
    for number in range(20):
        table.learn(1, np.array([20_000 + number], dtype=np.uint64))
    assert [table.used_every(0, whole, interval) for interval in (19, 21)] == [0, 4]  # long ago
