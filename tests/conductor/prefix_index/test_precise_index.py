"""An index fed by engines' events: lost ones are noticed, and nothing is believed that no engine said."""

from __future__ import annotations

import numpy as np
import pytest

from skymemory import native
from skymemory.conductor.prefix_index import events
from skymemory.conductor.prefix_index.approximate import Blocks
from skymemory.conductor.prefix_index.events import AllCleared, BlocksRemoved, BlocksStored, Event, EventBatch
from skymemory.conductor.prefix_index.precise import PreciseIndex
from skymemory.conductor.request import seed
from skymemory.errors import InvalidInput

TOKENS = [*range(100, 112), 1, 2, 3, 4]
"""Four blocks of four."""


def chain(tokens: list[int] = TOKENS, adapter: str = "", salt: str = "", model: str = "m") -> Blocks:
    return native.chain_hashes(np.array(tokens, dtype="<u4").tobytes(), 16, seed(model, adapter, salt))


def stored(first: int, last: int, parent: int | bytes | None = None, **more: object) -> BlocksStored:
    """Blocks ``first`` to before ``last`` of the prompt, named 1000, 1001, … by the engine."""
    hashes = [1000 + at for at in range(first, last)]
    parent = parent if parent is not None or first == 0 else 1000 + first - 1
    return BlocksStored(hashes, parent, TOKENS[4 * first : 4 * last], 4, **more)  # type: ignore[arg-type]


def removed(*blocks: int, medium: str = "GPU") -> BlocksRemoved:
    return BlocksRemoved([1000 + at for at in blocks], medium)


@pytest.fixture
def index() -> PreciseIndex:
    made = PreciseIndex(4)
    made.follow(0, "m")
    made.follow(1, "m")
    return made


def feed(index: PreciseIndex, first: int, *events: Event, slot: int = 0) -> list[bool]:
    """Each event as a batch of its own."""
    return [index.apply(slot, EventBatch(first + at, [event])) for at, event in enumerate(events)]


def test_what_the_engine_says_is_what_is_held(index: PreciseIndex) -> None:
    assert feed(index, 0, stored(0, 2), stored(2, 4)) == [True, True]
    assert index.match(chain(), [1, 0]) == [0, 4] and index.blocks_of(0) == 4
    # Engines do not evict from the end: what is behind the gap is held, and of no use.
    feed(index, 2, removed(1))
    assert index.match(chain(), [0]) == [1] and index.blocks_of(0) == 3
    feed(index, 3, stored(1, 2))
    assert index.match(chain(), [0]) == [4]
    feed(index, 4, AllCleared())
    assert index.match(chain(), [0]) == [0] == [index.blocks_of(0)]


def test_of_two_copies_one_is_left_when_the_other_goes(index: PreciseIndex) -> None:
    # A prompt that is held whole: its last block is computed again, and the engine has it twice.
    feed(index, 0, stored(0, 4), stored(3, 4), stored(3, 4), removed(3), removed(3))
    assert index.match(chain(), [0]) == [4]
    feed(index, 5, removed(3))
    assert index.match(chain(), [0]) == [3]
    feed(index, 6, stored(3, 4), stored(3, 4), AllCleared(), stored(0, 4), removed(3))
    assert index.match(chain(), [0]) == [3], "what was cleared left no copy"


def test_an_engine_that_reports_the_last_copy_only_is_corrected_by_what_it_had_cached(index: PreciseIndex) -> None:
    feed(index, 0, stored(0, 4), stored(3, 4), removed(3))
    assert index.match(chain(), [0]) == [4], "one of two copies, as far as the numbers go"
    # It says that it had three blocks, and reports that it computed the fourth.
    feed(index, 3, stored(3, 4))
    assert index.correct(0, chain(), 3) == 0 and index.match(chain(), [0]) == [4]
    feed(index, 4, removed(3))
    assert index.match(chain(), [0]) == [3]
    assert index.correct(7, chain(), 3) == index.correct(0, chain(), 9) == 0


def test_a_gap_is_never_passed_over(index: PreciseIndex) -> None:
    feed(index, 0, stored(0, 2))
    assert not index.apply(0, EventBatch(2, [removed(1)]))
    assert index.stale(0) and index.missing(0) == 1
    assert index.match(chain(), [0]) == [0] and index.weighted(chain(), [0]) == [0.0]
    assert not index.apply(0, EventBatch(3, []))
    # Replayed from where it was lost, the waiting ones behind it, those that came twice left out.
    assert not index.apply(0, EventBatch(0, [stored(0, 4)]), replayed=True)
    assert index.apply(0, EventBatch(1, [stored(2, 3)]), replayed=True)
    assert index.apply(0, EventBatch(2, [stored(0, 4)]), replayed=True)
    assert not index.stale(0) and index.missing(0) == 4
    assert index.match(chain(), [0]) == [1] and index.counters.get("event_gaps") == 1


def test_clearing_heals_a_gap(index: PreciseIndex) -> None:
    feed(index, 0, stored(0, 4))
    assert not index.apply(0, EventBatch(5, [stored(2, 3)]))
    assert not index.apply(0, EventBatch(9, [stored(3, 4)])), "waits behind another gap"
    assert not index.apply(0, EventBatch(7, [AllCleared(), stored(0, 2)]), replayed=True)
    assert index.missing(0) == 8
    assert index.apply(0, EventBatch(8, [stored(2, 3)]), replayed=True)
    assert index.match(chain(), [0]) == [4]


def test_starting_over_finds_less_and_believes_nothing_old(index: PreciseIndex) -> None:
    feed(index, 0, stored(0, 2))
    index.apply(0, EventBatch(7, [stored(2, 4)]))
    index.resume_empty(0, 7)
    assert not index.stale(0) and index.match(chain(), [0]) == [0]
    assert index.orphans(0) == 2, "what came after waits for its parent, which may be held"
    feed(index, 8, stored(0, 2))
    assert index.match(chain(), [0]) == [4] and index.orphans(0) == 0


def test_who_listens_late_knows_that_it_missed_something(index: PreciseIndex) -> None:
    assert not index.apply(0, EventBatch(40, [stored(0, 4)]))
    assert index.missing(0) == 0 and index.match(chain(), [0]) == [0]
    index.resume_empty(0, 40)
    assert index.match(chain(), [0]) == [4] and index.missing(0) == 41


def test_an_engine_that_restarts_holds_nothing(index: PreciseIndex) -> None:
    feed(index, 0, stored(0, 2), stored(2, 4), removed(3))
    assert feed(index, 0, stored(0, 1)) == [True]
    assert index.match(chain(), [0]) == [1] and index.counters.get("engine_restarts") == 1
    feed(index, 1, stored(1, 4), stored(1, 2))
    assert not index.apply(0, EventBatch(1, [])), "restarted, and its first batch was lost"
    assert index.missing(0) == 0 and index.match(chain(), [0]) == [0]


def test_more_waits_behind_a_gap_than_is_kept(index: PreciseIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skymemory.conductor.prefix_index.precise.MAX_WAITING", 2)
    for number in (1, 2, 3):
        index.apply(0, EventBatch(number, [stored(number, number + 1)]))
    index.apply(0, EventBatch(0, [stored(0, 1)]), replayed=True)
    assert index.stale(0) and index.missing(0) == 3, "the fourth did not fit, and is asked for again"
    assert index.apply(0, EventBatch(3, [stored(3, 4)]), replayed=True) and index.match(chain(), [0]) == [4]


def test_a_block_without_its_parent_is_no_beginning(index: PreciseIndex) -> None:
    feed(index, 0, stored(2, 4), stored(1, 2, parent=1000))
    assert index.orphans(0) == 3 and index.blocks_of(0) == 0
    assert index.match(chain(TOKENS[8:]), [0]) == [0]
    feed(index, 2, removed(2), stored(0, 1))
    assert index.match(chain(), [0]) == [2], "the third was removed while it waited"
    assert index.orphans(0) == 1
    feed(index, 3 + 1, stored(2, 3))
    assert index.match(chain(), [0]) == [4] and index.orphans(0) == 0


def test_few_blocks_wait_for_their_parents(index: PreciseIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_ORPHANS", 2)
    feed(index, 0, stored(1, 4))
    assert index.orphans(0) == 2
    feed(index, 1, stored(0, 1))
    assert index.match(chain(), [0]) == [1] and index.orphans(0) == 2


def test_two_media_hold_the_same_block(index: PreciseIndex) -> None:
    feed(index, 0, stored(0, 3), stored(1, 4, medium="CPU"), stored(0, 1, medium="DISK"))
    feed(index, 0, stored(0, 1, medium="DISK"), stored(1, 2, medium="cpu"), slot=1)
    assert index.match(chain(), [0, 1]) == [4, 2]
    assert index.weighted(chain(), [1, 0, 5]) == pytest.approx([0.5 + 0.8, 3 + 0.8, 0])
    feed(index, 3, removed(1, 2))
    assert index.match(chain(), [0]) == [4] and index.weighted(chain(), [0]) == pytest.approx([1 + 3 * 0.8])
    feed(index, 4, removed(0), removed(1, medium="CPU"))
    assert index.match(chain(), [0]) == [1] and index.weighted(chain(), [0]) == pytest.approx([0.5])
    own = PreciseIndex(4, {"GPU": 2.0, "nvme": 1.5})
    own.follow(0, "m")
    feed(own, 0, stored(0, 1), stored(1, 2, medium="NVMe"))
    assert own.weighted(chain(), [0]) == [3.5]


def test_adapter_and_salt_are_in_the_key(index: PreciseIndex) -> None:
    keys = [("sql", "tenant"), ("sql",), ("sql",), ("sql",)]
    feed(index, 0, stored(0, 4, adapter="sql", extra_keys=keys))
    assert index.match(chain(adapter="sql", salt="tenant"), [0]) == [4]
    for other in (
        chain(),
        chain(adapter="sql"),
        chain(salt="tenant"),
        chain(adapter="sql", salt="sql"),
        chain(model="n"),
    ):
        assert index.match(other, [0]) == [0]
    feed(index, 0, stored(0, 2, extra_keys=[None, None]), slot=1)
    assert index.match(chain(), [1]) == [2]


def test_images_are_not_what_reads_the_same(index: PreciseIndex) -> None:
    feed(index, 0, stored(0, 4, extra_keys=[None, (("image", 3),), None, None]))
    assert index.match(chain(), [0]) == [1] and index.blocks_of(0) == 4
    feed(index, 0, stored(0, 4, extra_keys=[("image", "salt"), None, None, None]), slot=1)
    assert index.match(chain(), [1]) == [0] == index.match(chain(salt="salt"), [1])


def test_hashes_may_be_bytes_as_well_as_numbers(index: PreciseIndex) -> None:
    digests = [bytes([at]) * 32 for at in range(4)]
    assert index.apply(0, EventBatch(0, [BlocksStored(digests[:2], None, TOKENS[:8], 4)]))
    assert index.apply(0, EventBatch(1, [BlocksStored(digests[2:], digests[1], TOKENS[8:], 4)]))
    assert index.match(chain(), [0]) == [4]
    assert index.apply(0, EventBatch(2, [BlocksRemoved([digests[3]])])) and index.match(chain(), [0]) == [3]
    negative = [-5, 7]
    feed(index, 0, BlocksStored(negative, None, TOKENS[:8], 4), BlocksRemoved([2**64 - 5]), slot=1)
    assert index.match(chain(), [1]) == [0] and index.blocks_of(1) == 1


def test_blocks_of_another_size_are_an_error_that_says_so(index: PreciseIndex) -> None:
    feed(index, 0, stored(0, 2))
    with pytest.raises(InvalidInput, match=r"blocks have 8 tokens, the router's 4: set the router's .*--block-size"):
        index.apply(0, EventBatch(1, [BlocksStored([1], None, TOKENS[:8], 8)]))
    assert "8 tokens" in index.trouble(0) and index.match(chain(), [0]) == [0] and index.trouble(1) == ""
    with pytest.raises(InvalidInput, match="mixed kinds of attention"):
        index.apply(1, EventBatch(0, [BlocksStored([1], None, TOKENS[:8], 4)]))
    with pytest.raises(InvalidInput, match="extra keys of 1"):
        index.take(1, stored(0, 2, extra_keys=[None]))
    with pytest.raises(InvalidInput, match="32-bit"):
        index.take(1, BlocksStored([1], None, [1, 2, 3, 2**32], 4))
    with pytest.raises(InvalidInput, match="without a subscription"):
        index.apply(7, EventBatch(0, []))
    with pytest.raises(InvalidInput, match="block_tokens is 0"):
        PreciseIndex(0)
    index.follow(0, "m")
    assert index.trouble(0) == ""


def test_a_name_reported_for_two_blocks_leaves_nothing_behind(index: PreciseIndex) -> None:
    feed(index, 0, stored(0, 1), BlocksStored([1000], None, TOKENS[4:8], 4), removed(0))
    assert index.match(chain(), [0]) == [1] and index.match(chain(TOKENS[4:]), [0]) == [0], "what it was first"
    feed(index, 3, removed(0))
    assert index.match(chain(), [0]) == index.match(chain(TOKENS[4:]), [0]) == [0]
    assert index.table_rows == 0


def test_other_kinds_of_layers_are_left_out(index: PreciseIndex) -> None:
    feed(index, 0, stored(0, 4), stored(0, 1, group=1), BlocksRemoved([1000], group=1))
    assert index.match(chain(), [0]) == [4] and index.counters.get("events_of_other_groups") == 2


def test_nothing_is_left_of_an_engine_that_is_forgotten(index: PreciseIndex) -> None:
    feed(index, 0, stored(0, 4), stored(0, 2, medium="CPU"))
    feed(index, 0, stored(0, 1), slot=1)
    index.forget(0)
    index.forget(0)
    assert index.match(chain(), [0, 1]) == [0, 1] and index.blocks_of(0) == 0
    index.follow(0, "n")
    feed(index, 0, stored(0, 4))
    assert index.match(chain(model="n"), [0, 1]) == [4, 0] and index.match(chain(), [0, 1]) == [0, 1]
    index.learn(1, chain())
    assert index.correct(1, chain(), 0) == 0 and index.match(chain(), [1]) == [1], "only the engine says what it holds"
    index.forget(0)
    index.forget(1)
    assert index.table_rows == 0
