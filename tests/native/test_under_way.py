"""Prompts that servers are computing: compiled and twin, against each other and against counting."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import takewhile
from types import ModuleType

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from numpy.typing import NDArray
from tests.conductor.strategies.fleets import a_prompt
from tests.native.conftest import IMPLEMENTATIONS


def shared_blocks(one: NDArray[np.uint64], other: NDArray[np.uint64]) -> int:
    pairs = zip(one.tolist(), other.tolist(), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_prompts_under_way_count_until_they_end_each_for_itself(impl: ModuleType) -> None:
    long, short, other = (a_prompt(*runs).blocks for runs in (((1, 8), (2, 8)), ((1, 8),), ((1, 4), (3, 2))))
    under_way = impl.UnderWay(100)
    first, second, third = under_way.add(5, long), under_way.add(5, short), under_way.add(70, other)
    assert under_way.depths(long, [5, 70, 1]) == [16, 4, 0]
    under_way.drop(first)
    assert under_way.depths(long, [5, 70]) == [8, 4], "the shorter one is still under way"
    under_way.drop(first)
    assert under_way.depths(long, [5, 70]) == [8, 4], "dropped twice is dropped once"
    under_way.drop(second)
    under_way.drop(third)
    assert under_way.depths(long, [5, 70]) == [] and under_way.blocks() == 0


def test_prompts_under_way_are_forgotten_by_slot_and_bounded(impl: ModuleType) -> None:
    under_way = impl.UnderWay(10)
    for _ in range(3):
        under_way.add(1, a_prompt((1, 30)).blocks)
        under_way.add(2, a_prompt((2, 30)).blocks)
    assert under_way.depths(a_prompt((1, 30)).blocks, [0, 1, 2]) == [0, 10, 0] and under_way.blocks() == 20
    under_way.forget(1)
    assert under_way.blocks() == 10 and under_way.depths(a_prompt((1, 30)).blocks, [1, 2]) == [0, 0]
    under_way.forget(1)


def test_prompts_under_way_against_counting(impl: ModuleType) -> None:
    """Against a count per block and slot, over random additions and ends."""
    dice = np.random.default_rng(7)
    prompts = [
        a_prompt((int(a), 5), (int(b), 5), (number, 3)).blocks
        for number, (a, b) in enumerate(zip(dice.integers(0, 3, 30), dice.integers(0, 3, 30), strict=True))
    ]
    under_way, open_now = impl.UnderWay(1000), []
    for _ in range(400):
        if open_now and dice.random() < 0.5:
            _, _, ticket = open_now.pop(int(dice.integers(len(open_now))))
            under_way.drop(ticket)
        else:
            slot = int(dice.integers(4))
            chain = prompts[int(dice.integers(30))]
            open_now.append((slot, chain, under_way.add(slot, chain)))
        asked = prompts[int(dice.integers(30))]
        expected = [
            max((shared_blocks(asked, chain) for at, chain, _ in open_now if at == slot), default=0)
            for slot in range(4)
        ]
        assert (under_way.depths(asked, range(4)) or [0] * 4) == expected


SLOTS = (0, 1, 63, 64, 200)
PIECES = st.lists(st.integers(0, 2), max_size=7)


def a_chain(pieces: list[int]) -> NDArray[np.uint64]:
    """Equal beginnings have equal hashes, and nothing else has."""
    return np.array([hash((*pieces[: at + 1], -1)) & 2**64 - 1 for at in range(len(pieces))], dtype=np.uint64)


class Alike(RuleBasedStateMachine):
    """Whatever is done to one is done to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = [module.UnderWay(5, 0xDEADBEEF1) for module in IMPLEMENTATIONS]
        self.open: list[list[int]] = []

    @rule(slot=st.sampled_from(SLOTS), pieces=PIECES)
    def add(self, slot: int, pieces: list[int]) -> None:
        self.open.append([table.add(slot, a_chain(pieces)) for table in self.tables])

    @rule(which=st.integers(0, 9), keep=st.booleans())
    def drop(self, which: int, keep: bool) -> None:
        tickets = self.open[which % len(self.open)] if self.open else [0] * len(self.tables)
        if self.open and not keep:
            del self.open[which % len(self.open)]
        for table, ticket in zip(self.tables, tickets, strict=True):
            table.drop(ticket)

    @rule(slot=st.sampled_from(SLOTS))
    def forget(self, slot: int) -> None:
        for table in self.tables:
            table.forget(slot)

    @rule(pieces=PIECES, slots=st.lists(st.sampled_from((*SLOTS, 500)), max_size=7))
    def depths(self, pieces: list[int], slots: list[int]) -> None:
        found = [table.depths(a_chain(pieces), slots) for table in self.tables]
        assert all(one == found[0] for one in found)

    @invariant()
    def counted(self) -> None:
        figures = [(len(table), table.blocks(), table.changes()) for table in self.tables]
        assert all(one == figures[0] for one in figures)


Alike.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
TestAlike = Alike.TestCase


def test_a_chain_is_not_copied_and_is_kept_alive_as_long_as_it_is_under_way(impl: ModuleType) -> None:
    table, chain = impl.UnderWay(10_000), np.arange(1, 9001, dtype=np.uint64)
    before = table.__sizeof__()
    asked = chain.copy()
    ticket = table.add(3, chain)
    del chain
    gc.collect()
    assert table.depths(asked, [3]) == [9000]
    assert table.__sizeof__() - before < 9000
    table.drop(ticket)
    assert table.depths(asked, [3]) == [] and table.blocks() == 0


@pytest.mark.parametrize(
    "bad",
    [
        lambda impl: impl.UnderWay(-1),
        lambda impl: impl.UnderWay(5, 4),
        lambda impl: impl.UnderWay(5).add(-1, b""),
        lambda impl: impl.UnderWay(5).add(65536, b""),
        lambda impl: impl.UnderWay(5).add(0, b"x" * 7),
        lambda impl: impl.UnderWay(5).depths(b"x" * 7, []),
        lambda impl: impl.UnderWay(5).depths(b"", [65536]),
    ],
)
def test_what_makes_no_sense_is_refused(impl: ModuleType, bad: Callable[[ModuleType], object]) -> None:
    with pytest.raises(ValueError):
        bad(impl)
