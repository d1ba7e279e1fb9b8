"""One suite over every index: a match, use, correction, departure. And snapshots, deltas, sharing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conductor.prefix_index.naive_index import NaivePrefixIndex

from skymemory import native
from skymemory.conductor.prefix_index.approximate import ApproximatePrefixIndex, Blocks, PrefixIndex
from skymemory.conductor.prefix_index.events import BlocksStored
from skymemory.conductor.prefix_index.precise import PreciseIndex
from skymemory.conductor.prefix_index.replicated import (
    Dropped,
    Held,
    Learnt,
    SharedPrefixIndex,
    Snapshot,
    pack_delta,
    pack_snapshot,
    restore,
    rows_of,
    take_snapshot,
    unpack_deltas,
    unpack_snapshot,
)
from skymemory.conductor.request import seed
from skymemory.errors import InvalidInput
from skymemory.native.twin import backend

TOKENS = 4


def prompt(*words: int, salt: str = "") -> tuple[list[int], Blocks]:
    """Tokens of a prompt of one block per word, and its chain."""
    tokens = [token for word in words for token in (word, word, word, word + 1)]
    raw = np.array(tokens, dtype="<u4").tobytes()
    return tokens, native.chain_hashes(raw, TOKENS * 4, seed("m", "", salt))


class SelfFed(PreciseIndex):
    """The precise index, whose engine stores what the suite would have it learn."""

    def learn(self, slot: int, blocks: Blocks) -> None:
        if slot not in self._engines:
            self.follow(slot, "m")
        tokens = next(tokens for tokens, chain in PROMPTS if chain[: len(blocks)].tolist() == blocks.tolist())
        hashes = [int(block) for block in blocks]
        self.take(slot, BlocksStored(hashes, None, tokens[: len(blocks) * TOKENS], TOKENS))


PROMPTS = [prompt(1, 2, 3, 4), prompt(1, 2, 9, 9), prompt(7, 7), prompt(1, 2, 3, 4, salt="s")]
CHAINS = [chain for _, chain in PROMPTS]
INDICES: dict[str, Callable[[], PrefixIndex]] = {
    "naive": lambda: NaivePrefixIndex(100),
    "approximate": lambda: ApproximatePrefixIndex(100),
    "approximate-python": lambda: ApproximatePrefixIndex(100, table=backend.PrefixTable),
    "precise": lambda: SelfFed(TOKENS),
}


@pytest.fixture(params=INDICES)
def index(request: pytest.FixtureRequest) -> PrefixIndex:
    return INDICES[request.param]()


def test_a_match_counts_leading_blocks_and_no_others(index: PrefixIndex) -> None:
    assert index.match(CHAINS[0], [0, 5]) == [0, 0]
    index.learn(0, CHAINS[0])
    index.learn(5, CHAINS[1])
    assert index.match(CHAINS[0], [5, 0, 9]) == [2, 4, 0]
    assert index.match(CHAINS[1], [0, 5, 5]) == [2, 4, 4]
    # Blocks in the middle of a prompt are worth nothing without those before them.
    assert index.match(CHAINS[0][1:], [0]) == [3] and index.match(CHAINS[2], [0, 5]) == [0, 0]
    assert index.match(CHAINS[3], [0]) == [0], "another salt is another chain"
    assert index.match(CHAINS[0][:0], [0]) == [0] and index.match(CHAINS[0], []) == []


def test_more_than_64_servers(index: PrefixIndex) -> None:
    for slot in range(130):
        index.learn(slot, CHAINS[0][: slot % 5])
    assert index.match(CHAINS[0], range(130)) == [slot % 5 for slot in range(130)]


def test_a_server_that_left_holds_nothing(index: PrefixIndex) -> None:
    index.learn(1, CHAINS[0])
    index.learn(2, CHAINS[0])
    assert index.blocks_of(1) == 4
    index.forget(1)
    index.forget(77)
    assert index.match(CHAINS[0], [1, 2]) == [0, 4] and index.blocks_of(1) == 0
    index.learn(1, CHAINS[2])
    assert index.match(CHAINS[2], [1]) == [2] and index.blocks_of(1) == 2


@pytest.mark.parametrize("name", ["naive", "approximate", "approximate-python"])
def test_what_the_engine_lacked_is_no_longer_believed(name: str) -> None:
    index = INDICES[name]()
    index.learn(0, CHAINS[0])
    index.learn(0, CHAINS[1])
    index.learn(0, CHAINS[2])
    assert index.correct(0, CHAINS[0], 4) == 0 == index.correct(3, CHAINS[0], 1)
    # It had one block of the first prompt, so neither the second block nor anything behind it, in both prompts.
    assert index.correct(0, CHAINS[0], 1) == 5
    assert [index.match(chain, [0]) for chain in CHAINS[:3]] == [[1], [1], [2]]
    index.learn(0, CHAINS[0])
    assert [index.match(chain, [0]) for chain in CHAINS[:2]] == [[4], [2]]


@pytest.mark.parametrize("name", ["naive", "approximate", "approximate-python"])
def test_the_end_of_a_prefix_goes_before_its_head(name: str) -> None:
    index = INDICES[name]()
    index.set_capacity(0, 5)  # type: ignore[attr-defined]
    index.learn(0, CHAINS[0])
    index.learn(0, CHAINS[2])
    assert index.match(CHAINS[0], [0]) == [3] and index.match(CHAINS[2], [0]) == [2]
    index.set_capacity(0, 3)  # type: ignore[attr-defined]
    assert index.match(CHAINS[0], [0]) == [1] and index.match(CHAINS[2], [0]) == [2]


PATHS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=30)


@settings(max_examples=150, deadline=None)
@given(PATHS, st.integers(1, 12))
def test_what_is_held_is_prefix_closed_whatever_was_learnt(paths: list[list[int]], capacity: int) -> None:
    index = ApproximatePrefixIndex(capacity)
    learnt = [prompt(*path)[1] for path in paths]
    for chain in learnt:
        index.learn(0, chain)
        held = set(rows_of(index.dump(0))["hash"].tolist())
        assert len(held) == index.blocks_of(0) <= capacity
        for other in learnt:
            inside = [int(block) in held for block in other]
            assert inside == sorted(inside, reverse=True), "a block without what comes before it"


def test_only_so_many_blocks_of_a_prompt_count() -> None:
    index = ApproximatePrefixIndex(100, max_match=3)
    index.learn(0, CHAINS[0])
    assert index.match(CHAINS[0], [0]) == [3] and index.blocks_of(0) == 3
    assert index.correct(0, CHAINS[0], 3) == 0 and index.correct(0, CHAINS[0], 2) == 1
    with pytest.raises(InvalidInput, match="max_match is 0"):
        ApproximatePrefixIndex(100, max_match=0)
    for capacity in (-1, 2**28 + 1):
        with pytest.raises(InvalidInput, match="expected 0 to 268435456"):
            ApproximatePrefixIndex(capacity)
        with pytest.raises(InvalidInput, match="expected 0 to 268435456"):
            index.set_capacity(0, capacity)


def _fleet(index: ApproximatePrefixIndex) -> dict[str, int]:
    index.set_capacity(0, 5)
    for slot, chain in ((0, CHAINS[0]), (0, CHAINS[2]), (70, CHAINS[1])):
        index.learn(slot, chain)
    return {"http://a:1": 0, "http://ü:2": 70, "empty": 3}


def test_a_router_that_restarts_keeps_its_table() -> None:
    before = ApproximatePrefixIndex(100)
    data = pack_snapshot(take_snapshot(before, "tokens 16", _fleet(before)))
    after = ApproximatePrefixIndex(50)
    # The servers came in another order, one is gone and another is new: names count, not slots.
    assert restore(after, unpack_snapshot(data), "tokens 16", {"new": 0, "http://ü:2": 1, "http://a:1": 2}) == 9
    assert [after.match(chain, [0, 1, 2]) for chain in CHAINS[:3]] == [[0, 2, 3], [0, 4, 2], [0, 0, 2]]
    assert [after.capacity_of(slot) for slot in (0, 1, 2)] == [50, 100, 5]
    after.learn(2, CHAINS[1])
    assert after.match(CHAINS[2], [2]) == [1], "the order of use was kept"
    assert after.correct(1, CHAINS[1], 1) == 3, "and what is behind what"


def test_bad_snapshots_are_refused_and_say_why() -> None:
    index = ApproximatePrefixIndex(100)
    data = pack_snapshot(take_snapshot(index, "tokens 16", _fleet(index)))
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x41
        with pytest.raises(InvalidInput, match=r"not a snapshot|version|damaged"):
            unpack_snapshot(bytes(damaged))
        with pytest.raises(InvalidInput, match=r"not a snapshot|damaged"):
            unpack_snapshot(data[:at])
    with pytest.raises(InvalidInput, match=r"kind 'tokens 16'.*'characters 64'"):
        restore(index, unpack_snapshot(data), "characters 64", {"http://a:1": 0})
    lying = Snapshot("k", {"a": Held(9, index.dump(0)), "b": Held(9, bytes(16))})
    fresh = ApproximatePrefixIndex(100)
    with pytest.raises(InvalidInput, match="before its parent"):
        restore(fresh, unpack_snapshot(pack_snapshot(lying)), "k", {"a": 0, "b": 1})
    assert fresh.blocks_of(0) == fresh.blocks_of(1) == fresh.distinct_blocks == 0


def _shared(names: list[str]) -> SharedPrefixIndex:
    slots = {name: slot for slot, name in enumerate(names)}
    return SharedPrefixIndex({slot: name for name, slot in slots.items()}.get, slots.get, 100)


def test_what_one_replica_learns_another_takes_in() -> None:
    one, other = _shared(["a", "b"]), _shared(["c", "b", "a"])
    one.learn(0, CHAINS[0])
    one.learn(0, CHAINS[1])
    one.learn(1, CHAINS[2])
    one.correct(0, CHAINS[1], 2)
    one.learn(9, CHAINS[2])  # a slot that has no server any more
    sent = b"".join(pack_delta(delta) for delta in one.since(0) or ())
    other.absorb(unpack_deltas(sent))
    assert [other.match(chain, [2, 1, 0]) for chain in CHAINS[:3]] == [[4, 0, 0], [2, 0, 0], [0, 2, 0]]
    assert (one.log_end, other.log_end) == (4, 0), "what was heard is not passed on"
    assert one.since(5) is None and one.since(4) == [] and len(one.since(1) or ()) == 3
    _shared(["x"]).absorb(unpack_deltas(sent))
    third = _shared(["a", "b"])
    third.absorb(unpack_deltas(sent))
    assert [third.dump(slot) for slot in (0, 1)] == [one.dump(slot) for slot in (0, 1)]


def test_a_log_of_deltas_that_ran_over_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skymemory.conductor.prefix_index.replicated.MAX_DELTAS", 3)
    index = _shared(["a"])
    for _ in range(5):
        index.learn(0, CHAINS[0])
    assert index.log_start == 2 and index.since(1) is None and len(index.since(2) or ()) == 3


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_bytes_that_are_no_deltas(data: bytes) -> None:
    sound = pack_delta(Learnt("a", CHAINS[0])) + pack_delta(Dropped("ü", 2**64 - 1))
    first, second = unpack_deltas(sound)
    assert isinstance(first, Learnt) and first.blocks.tolist() == CHAINS[0].tolist()
    assert second == Dropped("ü", 2**64 - 1)
    for end in range(1, len(sound)):
        if end != len(pack_delta(first)):
            with pytest.raises(InvalidInput):
                list(unpack_deltas(sound[:end]))
    with contextlib.suppress(InvalidInput):
        list(unpack_deltas(data))
