"""Blocks in several media: known as long as one has them, by whatever ways engines report the farther ones."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from skymemory import native
from skymemory.conductor.prefix_index import events
from skymemory.conductor.prefix_index.approximate import Blocks
from skymemory.conductor.prefix_index.events import MEDIA, OTHER, AllCleared, BlocksRemoved, BlocksStored, medium_of
from skymemory.conductor.prefix_index.precise import WEIGHTS, PreciseIndex
from skymemory.conductor.request import seed
from skymemory.errors import InvalidInput

BLOCK = 4
TOKENS = [*range(100, 124)]
"""Six blocks."""


def chain(tokens: Sequence[int] = TOKENS) -> Blocks:
    return native.chain_hashes(np.array(tokens, dtype="<u4").tobytes(), 4 * BLOCK, seed("m", "", ""))


def stored(first: int, last: int, medium: str = "GPU") -> BlocksStored:
    """Blocks ``first`` to before ``last`` of the prompt, named 1000, 1001, … by the engine."""
    parent = 999 + first if first else None
    return BlocksStored(range(1000 + first, 1000 + last), parent, TOKENS[BLOCK * first : BLOCK * last], BLOCK, medium)


def named(*blocks: int, medium: str = "CPU") -> BlocksStored:
    """As vLLM's offloading connector reports: names, and nothing else."""
    return BlocksStored([1000 + at for at in blocks], None, (), 0, medium)


def chunk(at: int, tokens: int, parent: int | None, name: int) -> BlocksStored:
    """As LMCache reports: a block of its own size and name."""
    return BlocksStored([name], parent, TOKENS[at : at + tokens], tokens, "cpu")


def removed(*blocks: int, medium: str = "GPU") -> BlocksRemoved:
    return BlocksRemoved([1000 + at for at in blocks], medium)


@pytest.fixture
def index() -> PreciseIndex:
    made = PreciseIndex(BLOCK)
    made.follow(0, "m")
    return made


def feed(index: PreciseIndex, *events: BlocksStored | BlocksRemoved | AllCleared, slot: int = 0) -> None:
    for event in events:
        index.take(slot, event)


def test_a_block_that_only_the_host_still_has_is_found(index: PreciseIndex) -> None:
    feed(index, stored(0, 3), named(0, 1, 2), removed(2, 1))
    assert index.match(chain(), [0]) == [3] and index.weighted(chain(), [0]) == pytest.approx([1 + 2 * 0.8])
    feed(index, stored(3, 4))
    assert index.match(chain(), [0]) == [4], "what follows it finds its parent, wherever that is"
    feed(index, removed(1, medium="CPU"))
    assert index.match(chain(), [0]) == [1]
    feed(index, AllCleared())
    assert index.match(chain(), [0]) == [0] and index.table_rows == 0


def test_a_block_that_is_known_elsewhere_needs_no_parent(index: PreciseIndex) -> None:
    feed(index, stored(0, 3), removed(0), stored(1, 3, "cpu"), removed(1, 2))
    assert index.orphans(0) == 0 and index.blocks_of(0) == 2
    feed(index, stored(0, 1))
    assert index.match(chain(), [0]) == [3]


def test_a_name_never_reported_with_tokens_is_left_out(index: PreciseIndex) -> None:
    feed(index, stored(0, 1), named(0, 4))
    assert index.match(chain(), [0]) == [1] and index.counters.get("blocks_without_place") == 1


@pytest.mark.parametrize(
    ("names", "medium"),
    [
        (("GPU", "gpu", "Device", ""), "GPU"),
        (("CPU", "cpu", "CPU_TIER1", "cpu_pinned"), "CPU"),
        (("DISK", "STORAGE", "nvme", "CPU_TIER2"), "DISK"),
        (("REMOTE", "external", "shared", "Network"), "REMOTE"),
        (("tape", "CPU0", "gpu "), "OTHER"),
    ],
)
def test_media_have_one_name_however_they_are_called(index: PreciseIndex, names: Sequence[str], medium: str) -> None:
    for name in names:
        assert medium_of(name) == medium
        feed(index, stored(0, 2, name))
        assert index.match(chain(), [0]) == [2]
        feed(index, removed(0, 1, medium=names[-1]))
        assert index.match(chain(), [0]) == [0] and index.table_rows == 0


def test_weights_go_by_the_best_medium_and_the_unknown_counts_as_the_least() -> None:
    index = PreciseIndex(BLOCK, {"gpu": 1.5, "nvme": 0.25})
    index.follow(0, "m")
    feed(
        index, stored(0, 2, "storage"), stored(0, 1), stored(2, 3, "cpu"), stored(3, 4, "tape"), stored(4, 5, "remote")
    )
    assert index.weighted(chain(), [0]) == pytest.approx([1.5 + 0.25 + 0.8 + 0.25 + 0.5])
    assert index.counters.get("events_of_unknown_media") == 1
    costs = index.costs(chain(), [0, 5], {"CPU": 1.0, "DISK": 10.0, "REMOTE": 100.0, "OTHER": 1000.0})
    assert costs == [10.0 + 1.0 + 1000.0 + 100.0, 0.0], "what the GPU's memory has costs nothing"
    for weights in ({"cpu": -0.1}, {"cpu": float("nan")}):
        with pytest.raises(InvalidInput, match="expected 0 or more"):
            PreciseIndex(BLOCK, weights)


def test_chunks_of_many_blocks_are_those_blocks(index: PreciseIndex) -> None:
    feed(index, stored(0, 4), chunk(0, 8, None, 7), chunk(8, 8, 7, 8), removed(0, 1, 2, 3))
    assert index.match(chain(), [0]) == [4] and index.weighted(chain(), [0]) == pytest.approx([4 * 0.8])
    feed(index, chunk(16, 6, 8, 9))
    assert index.match(chain(), [0]) == [5], "of one and a half blocks one is held"
    feed(index, BlocksRemoved([7], "cpu"))
    assert index.match(chain(), [0]) == [0]
    feed(index, chunk(0, 8, None, 7), BlocksRemoved([9], "cpu"))
    assert index.match(chain(), [0]) == [4]
    feed(index, BlocksRemoved([7, 8], "CPU"))
    assert index.table_rows == 0 and index.trouble(0) == ""


def test_chunks_wait_for_their_parents_and_none_follows_half_a_block(index: PreciseIndex) -> None:
    feed(index, chunk(8, 8, 7, 8))
    assert index.match(chain(), [0]) == [0] and index.orphans(0) == 2
    feed(index, chunk(0, 8, None, 7))
    assert index.match(chain(), [0]) == [4] and index.orphans(0) == 0
    feed(index, AllCleared(), chunk(0, 6, None, 7), chunk(6, 8, 7, 8))
    assert index.match(chain(), [0]) == [1] and index.orphans(0) == 2
    feed(index, BlocksStored([20], None, TOKENS[:3], 3, "cpu"), BlocksStored([21], None, TOKENS[:5], 8, "cpu"))
    assert index.counters.get("blocks_without_place") == 2 and index.trouble(0) == ""
    with pytest.raises(InvalidInput, match="--block-size"):
        index.take(0, BlocksStored([1], None, TOKENS[:8], 8, "gpu"))


def test_chunks_are_where_the_gpus_blocks_of_their_tokens_are_whatever_parent_they_name(index: PreciseIndex) -> None:
    """LMCache names parent 0 where a prompt is stored on from its middle, and skips chunks that it has; it names no
    adapter. What it stores was just computed, so the GPU's events have said where that is.
    """
    adapted = native.chain_hashes(np.array(TOKENS, dtype="<u4").tobytes(), 4 * BLOCK, seed("m", "sql", ""))
    feed(index, stored(0, 2), chunk(0, 8, None, 7), stored(2, 6), chunk(8, 8, 0, 8), chunk(16, 8, 7, 9))
    feed(index, removed(*range(6)))
    assert index.match(chain(), [0]) == [6] and index.orphans(0) == 0
    names = range(2000, 2006)
    feed(index, BlocksStored(names, None, TOKENS, BLOCK, adapter="sql"))
    feed(index, chunk(0, 8, None, 17), chunk(8, 8, 17, 18), BlocksRemoved(names), BlocksRemoved([7, 8, 9], "cpu"))
    assert [index.match(one, [0]) for one in (chain(), adapted)] == [[0], [4]]
    elsewhere = [*range(500, 504), *TOKENS[:8]]
    feed(index, BlocksStored([3000, 3001, 3002], None, elsewhere, BLOCK), chunk(0, 8, 0, 27), removed(*range(6)))
    feed(index, BlocksRemoved([3001, 3002]))
    assert index.match(chain(elsewhere), [0]) == [3], "the place where these tokens were computed last"
    feed(index, chunk(8, 8, 0, 99), BlocksStored([28], 0, [1] * 8, 8, "cpu"))
    assert index.match(chain(elsewhere), [0]) == [3] and index.orphans(0) == 2


def test_a_medium_that_never_reports_evictions_is_not_believed_against_the_engine(index: PreciseIndex) -> None:
    index.follow(1, "m")
    feed(index, stored(0, 1), chunk(0, 16, None, 7), chunk(0, 16, None, 7))
    feed(index, stored(0, 1), stored(0, 4, "cpu"), removed(3, medium="cpu"), slot=1)
    assert index.match(chain(), [0, 1]) == [4, 3]
    assert index.correct(0, chain(), 1) == 3 and index.match(chain(), [0]) == [1]
    assert index.correct(1, chain(), 1) == 0 and index.match(chain(), [1]) == [3], "this one would have reported it"
    feed(index, chunk(0, 16, None, 7))
    assert index.match(chain(), [0]) == [4], "it was stored again"


def test_blocks_never_reported_removed_are_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_BEYOND_GPU", 64)
    monkeypatch.setattr(events, "MAX_RECENT", 64)
    index = PreciseIndex(BLOCK)
    index.follow(0, "m")
    for at in range(400):
        tokens = [at, *TOKENS[1:8]]
        feed(index, BlocksStored([2 * at], None, tokens[:4], 4), BlocksStored([2 * at + 1], 2 * at, tokens[4:], 4))
        feed(index, BlocksStored([10_000 + at], None, tokens, 8, "cpu"), BlocksStored([2 * at], None, (), 0, "storage"))
        feed(index, BlocksRemoved([2 * at, 2 * at + 1]))
    assert index.table_rows <= 2 * 64 and index.blocks_of(0) <= 2 * 64
    blocks = index._engines[0].blocks
    assert (
        len(blocks._runs) <= 64 and len(blocks._recent) <= 64 and blocks.orphans == 0 and len(blocks._more_copies) <= 64
    )
    assert index.match(chain([399, *TOKENS[1:8]]), [0]) == [2] and index.match(chain([0, *TOKENS[1:8]]), [0]) == [0]


def test_any_order_of_events_gives_what_sets_of_blocks_give() -> None:
    """Against a dictionary of sets: a tree of blocks over a small alphabet, stored and removed at random."""
    for number in range(12):
        dice = random.Random(number)
        index = PreciseIndex(BLOCK)
        sets = {slot: {medium: set[tuple[int, ...]]() for medium in MEDIA} for slot in (0, 1)}
        for slot in sets:
            index.follow(slot, "m")
        names: dict[tuple[int, tuple[int, ...]], int] = {}
        spelled = {"GPU": ("GPU", "gpu", ""), "CPU": ("cpu", "CPU"), "DISK": ("STORAGE", "disk"), OTHER: ("tape",)}
        for _ in range(300):
            slot = dice.choice((0, 1))
            held = sets[slot]
            path = tuple(dice.randrange(2) for _ in range(dice.randint(1, 5)))
            name = names.setdefault((slot, path), dice.getrandbits(64))
            medium = dice.choice(list(spelled))
            called = dice.choice(spelled[medium])
            known = any(path in each for each in held.values())
            move = dice.random()
            if move < 0.01:
                index.take(slot, AllCleared())
                for each in held.values():
                    each.clear()
            elif move < 0.4 and path in held[medium]:
                index.take(slot, BlocksRemoved([name], called))
                held[medium].remove(path)
            elif move < 0.7 and known and path not in held[medium] and medium != "GPU":
                index.take(slot, BlocksStored([name], None, (), 0, called))
                held[medium].add(path)
            elif path not in held[medium] and (len(path) == 1 or any(path[:-1] in each for each in held.values())):
                parent = names[slot, path[:-1]] if len(path) > 1 else None
                index.take(slot, BlocksStored([name], parent, [path[-1]] * BLOCK, BLOCK, called))
                held[medium].add(path)
            prompt = [dice.randrange(2) for _ in range(5)]
            blocks = chain([token for token in prompt for _ in range(BLOCK)])
            found, weights = index.match_weighted(blocks, [0, 1])
            for slot in (0, 1):
                depth, weight = 0, 0.0
                while depth < 5:
                    where = [each for each in MEDIA if tuple(prompt[: depth + 1]) in sets[slot][each]]
                    if not where:
                        break
                    depth, weight = depth + 1, weight + max({**WEIGHTS, OTHER: 0.5}[each] for each in where)
                assert (found[slot], weights[slot]) == (depth, pytest.approx(weight))
        held_now = {(medium, path) for each in sets.values() for medium, paths in each.items() for path in paths}
        assert index.table_rows == len(held_now)
