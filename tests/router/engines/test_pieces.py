"""Batches of events piece by piece: the same as at once, and never much at a time."""

from __future__ import annotations

import os
import random
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skymemory.conductor.prefix_index.events import AllCleared, BlocksRemoved, BlocksStored, Event, EventBatch
from skymemory.conductor.prefix_index.precise import PreciseIndex
from skymemory.router.engines import wire
from skymemory.router.engines.feed import Feed
from skymemory.router.engines.wire import (
    BLOCKS,
    MAX_BLOCKS,
    MAX_MESSAGE_BYTES,
    PIECE_TOKENS,
    MalformedEvents,
    Tally,
    TooLong,
    decode,
    pieces,
)

pack = msgspec.msgpack.encode
NAMES = (
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
)


def a_list(count: int) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big")


def in_blocks(events: list[Event]) -> Iterator[Any]:
    """The same whether events are cut or not."""
    for event in events:
        if isinstance(event, AllCleared):
            yield "cleared"
        elif isinstance(event, BlocksRemoved):
            yield from (("removed", each, event.medium, event.group) for each in event.hashes)
        else:
            size, parent = event.block_tokens, event.parent
            for at, each in enumerate(event.hashes):
                keys = None if event.extra_keys is None else event.extra_keys[at]
                tokens = list(event.tokens[at * size : (at + 1) * size])
                yield ("stored", each, parent, tokens, size, event.medium, event.adapter, keys, event.group)
                parent = each if event.tokens else None


def read(payload: bytes) -> tuple[list[Any], int, int]:
    """What `pieces` reports: its blocks, events that are unknown, and that are unusable."""
    decoded = list(pieces(payload))
    events = [each for each in decoded if each is not None and not isinstance(each, Tally)]
    return list(in_blocks(events)), decoded.count(Tally.UNKNOWN), decoded.count(Tally.UNUSABLE)


def a_batch(dice: random.Random) -> Any:
    """As an engine of any version might publish it."""
    names = [dice.choice((dice.getrandbits(64), dice.randbytes(32), dice.randrange(100))) for _ in range(200)]
    events: list[Any] = []
    for _ in range(dice.randrange(6)):
        blocks, size = dice.choice((0, 1, 3, 150)), dice.choice((1, 2, 16, 300))
        tokens = [dice.choice((dice.randrange(100), dice.randrange(1 << 17))) for _ in range(blocks * size)]
        if dice.random() < 0.2:
            tokens = []
        keys = dice.choice((None, [dice.choice((None, [], ["salt"], ["a", 1, {"b": [2]}])) for _ in range(blocks)]))
        stored = [
            "BlockStored",
            names[:blocks],
            dice.choice((None, names[-1])),
            tokens,
            size,
            dice.choice((None, 7)),
            dice.choice((None, "GPU", "CPU", "STORAGE")),
            dice.choice((None, "lora")),
            keys,
            dice.choice((None, 0, 1)),
            None,
            4096,
            dice.choice((None, "LOCAL", "REMOTE")),
            [{}],
        ]
        removed = ["BlockRemoved", names[:blocks], dice.choice((None, "CPU")), None, "REMOTE"]
        moved = ["BlockMoved", [[1, {"x": "y" * 300}], 1.5, True]]
        cut = (stored[: dice.randrange(6, 15)], removed[: dice.randrange(2, 6)])
        event: Any = dice.choice((*cut, ["AllBlocksCleared"], moved))
        if dice.random() < 0.4 and event[0].startswith("BlockS"):
            fields = list(zip(NAMES, event, strict=False))
            dice.shuffle(fields)
            event = dict(fields)
        events.append(event)
    return dice.choice(([1.5, events], [1.5, events, 0], {"ts": 1.5, "rank": [0], "events": events}))


@pytest.mark.brief()
def test_a_batch_in_pieces_says_what_it_says_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(5)
    for _ in range(80):
        payload = pack(a_batch(dice))
        whole = decode(0, payload)
        wanted = (list(in_blocks(list(whole.batch.events))), whole.unknown, whole.unusable)
        for short in (len(payload), 0):
            monkeypatch.setattr(wire, "SHORT_BYTES", short)
            assert read(payload) == wanted


def test_damaged_batches_are_read_alike_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(11)
    monkeypatch.setattr(wire, "SHORT_BYTES", 0)
    stored = ["BlockStored", [b"n" * 32, 9], b"p", [5, 6, 7, 70_000], 2, 1, "GPU", "a", [["a", "s"], None], 0]
    whole = pack([1.0, [stored, ["BlockRemoved", [b"n" * 32], "GPU"], ["AllBlocksCleared"]], 0])
    alike = refused = 0
    for _ in range(3000):
        damaged = bytearray(whole)
        for _ in range(dice.randint(1, 4)):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        payload = bytes(damaged[: dice.randint(1, len(damaged)) if dice.random() < 0.2 else len(damaged)])
        with suppress(MalformedEvents):
            decoded = decode(0, payload)
            assert read(payload) == (list(in_blocks(list(decoded.batch.events))), decoded.unknown, decoded.unusable)
            alike += 1
            continue
        try:
            read(payload)
        except MalformedEvents:
            refused += 1
    assert alike > 200 and refused > 1000


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for payload in (data, b"\x92\xcb" + bytes(8) + data, b"\x92\x01\x91\x96\xabBlockStored" + data):
        with suppress(MalformedEvents):
            list(wire._Long(payload).pieces())


def test_blocks_that_are_not_as_long_as_ours_are_cut_without_a_trace() -> None:
    """Of an engine's chunk that ends within a block of ours, what follows has no place: also in the next piece."""
    tokens = np.arange(100, 100 + 6 * 10).tolist()
    event = BlocksStored(list(range(1, 7)), None, tokens, 10, "CPU")
    indexes = []
    for cut in ([event], list(wire._cut(event))):
        index = PreciseIndex(4)
        index.follow(0, "m")
        index.apply(0, EventBatch(0, cut))
        indexes.append((index.table_rows, index.orphans(0), index.counters.as_dict()))
    assert indexes[0] == indexes[1] and indexes[0][0] > 0


@pytest.fixture(autouse=True)
def small_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "cut_without_a_trace" in request.node.name:
        monkeypatch.setattr(wire, "BLOCKS", 2)


def bomb_removed(size: int) -> bytes:
    return b"\x92\x01\x91\x92\xacBlockRemoved" + a_list(size) + b"\x01" * size


def bomb_stored(size: int) -> bytes:
    third = size // 3
    ones = a_list(third) + b"\x01" * third
    return (
        b"\x92\x01\x91\x99\xabBlockStored"
        + ones
        + b"\xc0"
        + ones
        + b"\x01\xc0\xc0\xc0"
        + a_list(third)
        + b"\x90" * third
    )


def bomb_cleared(size: int) -> bytes:
    return b"\x92\x01" + a_list(size // 18) + b"\x91\xb0AllBlocksCleared" * (size // 18)


def bomb_nested(size: int) -> bytes:
    return b"\x92\x01" + b"\x91" * size


class Recorder:
    """An index that takes down how much it was given, call by call."""

    def __init__(self) -> None:
        self.given: list[int] = []
        self.ends = 0
        self.followed = 0

    def follow(self, slot: int, model: str) -> None:
        self.followed += 1

    def resume_empty(self, slot: int, sequence: int) -> None: ...

    def apply(self, slot: int, batch: EventBatch, replayed: bool = False, more: bool = False) -> None:
        self.given.append(sum(1 if isinstance(each, AllCleared) else len(each.hashes) for each in batch.events))
        self.ends += not more

    def trouble(self, slot: int) -> str:
        return ""

    def forget(self, slot: int) -> None: ...


@pytest.mark.brief(every=3)
@pytest.mark.parametrize("bomb", [bomb_removed, bomb_stored, bomb_cleared, bomb_nested])
def test_a_long_message_is_taken_a_little_at_a_time_in_little_memory(bomb: Any) -> None:
    index = Recorder()
    feed = Feed("s", 0, "m", index)
    payload = bomb(50_000)
    tracemalloc.start()
    feed.offer(0, payload, 0.0)
    calls = 1
    while feed.busy:
        before = len(index.given)
        feed.go_on(0.0)
        calls += 1
        assert len(index.given) - before <= 1, "one look at the clock after each"
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert max(index.given, default=0) <= BLOCKS
    assert most < 2 * len(payload) + (1 << 20), "what engines send takes ten times as much when it is decoded"
    if bomb is bomb_nested:
        assert feed.counts.malformed == feed.counts.losses == 1
    else:
        assert calls > 10


def test_more_blocks_than_any_cache_has_are_refused_before_they_are_applied() -> None:
    index = Recorder()
    feed = Feed("s", 0, "m", index)
    feed.offer(0, bomb_removed(MAX_BLOCKS + 1))
    assert (feed.counts.too_long, index.given, feed.counts.losses) == (1, [], 1)
    feed.offer(1, pack([1.0, [["BlockRemoved", [1]]]]))
    assert index.given == [1] and not feed.busy
    many = pack([1.0, [["BlockRemoved", list(range(50_000))]] * 6])
    feed.offer(2, many)
    assert feed.counts.too_long == 2 and sum(index.given) <= MAX_BLOCKS + 1


def test_what_is_too_long_is_not_read_and_what_was_held_is_forgotten() -> None:
    index = Recorder()
    feed = Feed("s", 0, "m", index)
    feed.offer(0, pack([1.0, [["BlockRemoved", [1]]]]))
    followed = index.followed
    feed.offer(1, bytes(MAX_MESSAGE_BYTES + 1))
    assert (feed.counts.too_long, feed.counts.malformed, feed.counts.losses) == (1, 0, 1)
    assert index.followed == followed + 1 and "at most" in feed.errors["too long"]
    with pytest.raises(TooLong):
        next(pieces(bytes(MAX_MESSAGE_BYTES + 1)))


def test_a_new_life_of_the_engine_ends_what_was_half_read() -> None:
    feed = Feed("s", 0, "m", Recorder())
    for drop in (feed.restarted, feed.unsure, feed.from_the_start):
        feed.offer(feed.order.next or 0, bomb_removed(10_000), 0.0)
        assert feed.busy
        drop()
        assert not feed.busy


def test_an_engine_with_a_prompt_of_131_072_tokens_is_followed() -> None:
    blocks, size = 8_192, 16
    hashes = [os.urandom(8) for _ in range(blocks)]
    tokens = [60_000 + at % 5_000 for at in range(blocks * size)]
    payload = pack([1.0, [["BlockStored", hashes, None, tokens, size, None, "GPU"]]])
    assert len(payload) > 10 * wire.SHORT_BYTES
    index = PreciseIndex(size)
    feed = Feed("s", 0, "m", index)
    feed.offer(0, payload)
    assert feed.counts.stored_blocks == index.blocks_of(0) == blocks
    assert max(len(each.tokens) for each in pieces(payload) if isinstance(each, BlocksStored)) <= PIECE_TOKENS
