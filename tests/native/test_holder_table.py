"""The table of holders, compiled and twin: equal answers to whatever is done, and to what is no call at all."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.native.conftest import IMPLEMENTATIONS

SLOTS = (0, 1, 63, 64, 200)
BLOCKS = (0, 1, 2, 64, 2**63, 2**64 - 1)
"""Few, of which two share each part of the compiled table, and the one that has a row of its own."""
MEDIA = ((3, 1.0), (0, 0.8), (15, 0.5))
a_change = {"medium": st.sampled_from([0, 3, 15]), "slot": st.sampled_from(SLOTS), "block": st.sampled_from(BLOCKS)}


class Tables(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tables = [module.HolderTable(0xDEADBEEF1) for module in IMPLEMENTATIONS]
        self.held: set[tuple[int, int, int]] = set()

    @rule(**a_change)
    def add(self, medium: int, slot: int, block: int) -> None:
        self.held.add((medium, slot, block))
        for table in self.tables:
            table.add(medium, slot, block)

    @rule(**a_change)
    def take(self, medium: int, slot: int, block: int) -> None:
        self.held.discard((medium, slot, block))
        for table in self.tables:
            table.take(medium, slot, block)

    @rule(**{**a_change, "block": st.none()}, chain=st.lists(st.sampled_from(BLOCKS), max_size=5), adds=st.booleans())
    def change_all(self, medium: int, slot: int, block: None, chain: list[int], adds: bool) -> None:
        changed = {(medium, slot, one) for one in chain}
        self.held = self.held | changed if adds else self.held - changed
        for table in self.tables:
            (table.add_all if adds else table.take_all)(medium, slot, np.array(chain, dtype=np.uint64))

    @rule(
        chain=st.lists(st.sampled_from(BLOCKS), max_size=9),
        slots=st.lists(st.sampled_from((*SLOTS, 500)), max_size=7),
        media=st.lists(st.sampled_from(MEDIA), max_size=3, unique=True),
    )
    def match(self, chain: list[int], slots: list[int], media: list[tuple[int, float]]) -> None:
        depths, sums = [], []
        for slot in slots:
            weights = [next((w for m, w in media if (m, slot, block) in self.held), None) for block in chain]
            depths.append(weights.index(None) if None in weights else len(weights))
            sums.append(sum(weight or 0.0 for weight in weights[: depths[-1]]))
        for table in self.tables:
            found = table.match(np.array(chain, dtype=np.uint64), slots, media)
            assert found[0] == depths and found[1] == pytest.approx(sums)
            assert [type(one) for one in found[1]] == [float] * len(slots)

    @invariant()
    def same_size(self) -> None:
        for table in self.tables:
            assert table.blocks() == len({(medium, block) for medium, _, block in self.held})


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
def test_a_block_in_several_media_counts_in_the_first_of_them(module: ModuleType) -> None:
    table, chain = module.HolderTable(), np.arange(5, dtype=np.uint64)
    table.add_all(3, 7, chain)
    table.add_all(0, 7, chain[1:3])
    assert table.match(chain, [7], [(0, 0.25), (3, 1.0)]) == ([5], [0.25 * 2 + 3])
    assert table.match(chain, [7], [(3, 1.0), (0, 0.25)]) == ([5], [5.0])


TestTables = Tables.TestCase
TestTables.settings = settings(
    max_examples=30, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_long_chains_of_many_slots_in_two_media() -> None:
    dice = np.random.default_rng(4)
    tables = [module.HolderTable() for module in IMPLEMENTATIONS]
    chains = [dice.integers(0, 2**64, int(length), dtype=np.uint64) for length in dice.integers(1, 500, 30)]
    for number, chain in enumerate(chains):
        for slot in dice.choice(130, 20, replace=False).tolist():
            kept = int(dice.integers(len(chain) + 1))
            for table in tables:
                for block in chain[:kept].tolist():
                    table.add(number % 2, slot, block)
                for block in chain[kept // 2 : kept // 2 + 1].tolist():
                    table.take(0, slot, block)
    media = [(0, 1.0), (1, 0.25)]
    for chain in chains:
        found = [table.match(chain, range(130), media) for table in tables]
        assert all(one == found[0] for one in found) and max(found[0][0]) > 0


def test_calls_that_are_none_change_nothing(impl: ModuleType) -> None:
    table = impl.HolderTable()
    table.add(0, 0, 7)
    for medium, slot, block in ((16, 0, 7), (-1, 0, 7), (0, 65536, 7), (0, -1, 7), (0, 0, -1), (0, 0, 2**64)):
        for verb in (table.add, table.take):
            with pytest.raises((ValueError, OverflowError)):
                verb(medium, slot, block)
    for medium, slot, blocks in ((16, 0, b""), (0, 65536, b""), (0, 0, b"1234567")):
        for verb in (table.add_all, table.take_all):
            with pytest.raises(ValueError):
                verb(medium, slot, blocks)
    chain = np.array([7], dtype=np.uint64)
    for blocks, slots, media in (
        (b"123", [0], [(0, 1.0)]),
        (chain, [65536], [(0, 1.0)]),
        (chain, [0], [(16, 1.0)]),
        (chain, [0], [(0, 1.0)] * 17),
    ):
        with pytest.raises(ValueError):
            table.match(blocks, slots, media)
    with pytest.raises(ValueError, match="odd"):
        impl.HolderTable(8)
    with pytest.raises(OverflowError):
        impl.HolderTable(-1)
    assert table.match(chain, [0, 0], [(0, 0.5)]) == ([1, 1], [0.5, 0.5]) and table.blocks() == 1
    assert table.match(chain, [], []) == ([], []) and table.match(chain, [0], []) == ([0], [0.0])


def test_a_list_that_changes_while_it_is_read_is_read_as_it_was(fast: ModuleType) -> None:
    table, media = fast.HolderTable(), [(0, 1.0)]

    class Hostile:
        def __float__(self) -> float:
            media.clear()
            table.add(0, 60_000, 9)
            return 1.0

    media[:] = [(0, Hostile()), (1, 1.0), (2, 1.0)]  # type: ignore[list-item]
    table.add(0, 0, 9)
    assert table.match(np.array([9], dtype=np.uint64), [0], media) == ([1], [1.0]) and media == []


def test_what_is_no_longer_held_takes_no_memory(fast: ModuleType) -> None:
    table = fast.HolderTable()
    empty = sys.getsizeof(table)
    for block in range(20_000):
        table.add(1, block % 64, block * 0x9E3779B97F4A7C15 & 2**64 - 1)
    full = sys.getsizeof(table)
    assert full - empty < 20_000 * 64
    for block in range(20_000):
        table.take(1, block % 64, block * 0x9E3779B97F4A7C15 & 2**64 - 1)
    assert table.blocks() == 0 and sys.getsizeof(table) == empty
