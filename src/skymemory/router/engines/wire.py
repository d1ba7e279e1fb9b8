"""Decoder of engines' KV events (msgpack) to ``conductor.prefix_index.events``.

vLLM and SGLang publish three frames: topic, sequence number (8 bytes, big-endian), and a batch
(``vllm/distributed/kv_events.py``). Arrays and maps are read; missing fields have defaults, new fields are skipped,
unknown events are counted.

``pieces`` scans a long message in place, a few blocks at a time: it takes little memory, and its reader can pause after
each piece.

    batch     [ts, [event, ...], ...]   or the same as maps
    stored    [kind, hashes, parent, tokens, block size, ...]
                      hashes --+   tokens --+   keys --+      three cursors, each advanced by BLOCKS at a time
"""

from __future__ import annotations

import enum
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

import msgspec

from skymemory.conductor.prefix_index.events import (
    GPU,
    REMOTE,
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    Event,
    EventBatch,
    medium_of,
)
from skymemory.errors import SkyMemoryError

MAX_MESSAGE_BYTES = 8 * 1024 * 1024
"""Limit; a prompt of a million tokens takes 5 MB."""
MAX_RECEIVED_BYTES = 2 * MAX_MESSAGE_BYTES
MAX_EVENTS = 1 << 16
SHORT_BYTES = 32 << 10
"""Length decoded at once: 0.5 ms."""
BLOCKS = 64
"""Blocks in a piece: 0.6 ms in the index."""
PIECE_TOKENS = 4096
MAX_BLOCK_TOKENS = 4096
"""Limit (LMCache's chunks have 256); events with longer blocks are skipped."""
MAX_BLOCKS = 1 << 18
"""Limit per message: four million tokens in blocks of 16."""
STEPS = 4096
"""Values skipped between two pauses: 0.5 ms."""
SEQUENCE_BYTES = 8
_TOKENS = 1 << 32
_Hash = int | bytes


class MalformedEvents(SkyMemoryError, ValueError):
    """No batch of events: the engine's cache is then unknown."""


class TooLong(MalformedEvents): ...


class Tally(enum.Enum):
    UNKNOWN = "unknown"
    UNUSABLE = "unusable"  # stored blocks without tokens, which cannot be hashed


@dataclass(frozen=True, slots=True)
class Decoded:
    batch: EventBatch
    unknown: int
    unusable: int


class _StoredRow(msgspec.Struct, array_like=True, tag="BlockStored", gc=False):
    """vLLM's event of stored KV-cache blocks, as an array."""

    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: Any = None
    kv_cache_spec_sliding_window: Any = None
    locality: Any = None


class _StoredMap(msgspec.Struct, tag="BlockStored", gc=False):
    """vLLM's event of stored KV-cache blocks, as a map."""

    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None = None
    token_ids: list[int] = []
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: Any = None
    kv_cache_spec_sliding_window: Any = None
    locality: Any = None


class _RemovedMap(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: list[_Hash]
    medium: str | None = None
    group_idx: int | None = None
    locality: Any = None


class _RemovedRow(_RemovedMap, array_like=True, tag="BlockRemoved", gc=False):
    pass


class _ClearedMap(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


class _ClearedRow(_ClearedMap, array_like=True, tag="AllBlocksCleared", gc=False):
    pass


_Events = Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_EVENTS)]


class _BatchMap(msgspec.Struct, gc=False):
    ts: float
    events: _Events


class _BatchRow(_BatchMap, array_like=True, gc=False):
    pass


class _KindMap(msgspec.Struct, gc=False):
    type: str


class _KindRow(_KindMap, array_like=True, gc=False):
    pass


_Wire = _StoredRow | _StoredMap | _RemovedMap | _ClearedMap
_batch_row = msgspec.msgpack.Decoder(_BatchRow)
_batch_map = msgspec.msgpack.Decoder(_BatchMap)
_event_row = msgspec.msgpack.Decoder(_StoredRow | _RemovedRow | _ClearedRow)
_event_map = msgspec.msgpack.Decoder(_StoredMap | _RemovedMap | _ClearedMap)
_kind_row = msgspec.msgpack.Decoder(_KindRow)
_kind_map = msgspec.msgpack.Decoder(_KindMap)
KNOWN = ("BlockStored", "BlockRemoved", "AllBlocksCleared")


def sequence_of(frames: Sequence[bytes]) -> tuple[bytes, int, bytes]:
    """Return topic, sequence number and payload.

    Raises:
        MalformedEvents: not three frames, or a number without eight bytes.
    """
    if len(frames) != 3 or len(frames[1]) != SEQUENCE_BYTES:
        raise MalformedEvents(f"expected topic, 8 bytes and a batch, got frames of {[len(f) for f in frames[:8]]} B")
    return frames[0], int.from_bytes(frames[1], "big"), frames[2]


def decode(sequence: int, payload: bytes) -> Decoded:
    """Decode a short batch.

    Raises:
        MalformedEvents: no msgpack, or no batch.
    """
    try:
        raws = (_batch_map if _is_map(payload) else _batch_row).decode(payload).events
        events: list[Event] = []
        unknown = unusable = 0
        for raw in raws:
            wire = _event(bytes(raw))
            if wire is None:
                unknown += 1
            elif isinstance(wire, (_StoredRow, _StoredMap)):
                stored = _stored(wire)
                if stored is None:
                    unusable += 1
                else:
                    events.append(stored)
            elif isinstance(wire, _RemovedMap):
                events.append(BlocksRemoved(wire.block_hashes, _medium(wire), wire.group_idx or 0))
            else:
                events.append(AllCleared())
    except (msgspec.MsgspecError, RecursionError, OverflowError, UnicodeDecodeError) as error:
        raise MalformedEvents(f"not a batch of KV events: {error}") from error
    return Decoded(EventBatch(sequence, events), unknown, unusable)


def _is_map(data: bytes) -> bool:
    first = data[0] if data else 0
    return first & 0xF0 == 0x80 or first in (0xDE, 0xDF)


def _event(raw: bytes) -> _Wire | None:
    mapped = _is_map(raw)
    try:
        wire: _Wire = (_event_map if mapped else _event_row).decode(raw)
        return wire
    except msgspec.ValidationError:
        # Decode only its kind.
        if (_kind_map if mapped else _kind_row).decode(raw).type in KNOWN:
            raise
        return None


def _medium(wire: _StoredRow | _StoredMap | _RemovedMap) -> str:
    """Return the medium. A remote store is not the server's, whatever its name."""
    return REMOTE if wire.locality == REMOTE else wire.medium or GPU


def token_range(tokens: Sequence[int]) -> bool:
    return not tokens or 0 <= min(tokens) <= max(tokens) < _TOKENS


def _stored(wire: _StoredRow | _StoredMap) -> BlocksStored | None:
    """Return stored blocks; None: they are unusable."""
    tokens, medium = wire.token_ids, _medium(wire)
    if not tokens and medium_of(medium) != GPU:
        return BlocksStored(wire.block_hashes, None, (), 0, medium, group=wire.group_idx or 0)
    if wire.block_size < 1 or len(tokens) != len(wire.block_hashes) * wire.block_size:
        return None
    if not token_range(tokens):
        return None
    if wire.extra_keys is not None and len(wire.extra_keys) != len(wire.block_hashes):
        return None
    adapter = wire.lora_name or ("" if wire.lora_id is None else f"#{wire.lora_id}")
    return BlocksStored(
        hashes=wire.block_hashes,
        parent=wire.parent_block_hash,
        tokens=tokens,
        block_tokens=wire.block_size,
        medium=medium,
        adapter=adapter,
        extra_keys=wire.extra_keys,
        group=wire.group_idx or 0,
    )


# Decoding in pieces

_FIELDS = ("type", *_StoredRow.__struct_fields__)
_REMOVED_FIELDS = ("type", *_RemovedRow.__struct_fields__)
_REMOTE = msgspec.msgpack.encode(REMOTE)
_Value = TypeVar("_Value")
_text = msgspec.msgpack.Decoder(str | None)
_number = msgspec.msgpack.Decoder(int | None)
_hash = msgspec.msgpack.Decoder(int | bytes | None)
_hashes = msgspec.msgpack.Decoder(list[int | bytes])
_tokens = msgspec.msgpack.Decoder(list[int])
_keys = msgspec.msgpack.Decoder(list[list[Any] | None])
_timestamp = msgspec.msgpack.Decoder(float)

Piece = Event | Tally | None
"""An event or a part of it, a counted event, or None: a pause."""


def pieces(payload: bytes) -> Iterator[Piece]:
    """Yield events in order, and None as a chance to pause.

    Raises:
        TooLong: more than ``MAX_MESSAGE_BYTES`` (before the first piece), or ``MAX_BLOCKS``.
        MalformedEvents: no batch; valid pieces were yielded.
    """
    if len(payload) > MAX_MESSAGE_BYTES:
        raise TooLong(f"a batch of {len(payload)} B; at most {MAX_MESSAGE_BYTES} are read")
    blocks = 0
    piece: Piece
    for piece in _of_short(payload) if len(payload) <= SHORT_BYTES else _Long(payload).pieces():
        if isinstance(piece, (BlocksStored, BlocksRemoved)):
            blocks += len(piece.hashes)
            _check_blocks(blocks)
        yield piece


def _check_blocks(count: int) -> None:
    if count > MAX_BLOCKS:
        raise TooLong(f"a batch of more than {MAX_BLOCKS} blocks")


def _of_short(payload: bytes) -> Iterator[Piece]:
    decoded = decode(0, payload)
    for event in decoded.batch.events:
        if isinstance(event, AllCleared) or len(event.hashes) <= BLOCKS:
            yield event
        elif isinstance(event, BlocksRemoved):
            for at in range(0, len(event.hashes), BLOCKS):
                yield replace(event, hashes=event.hashes[at : at + BLOCKS])
        else:
            yield from _cut(event)
    yield from [Tally.UNKNOWN] * decoded.unknown
    yield from [Tally.UNUSABLE] * decoded.unusable


def _cut(event: BlocksStored) -> Iterator[Event]:
    size, keys = event.block_tokens, event.extra_keys
    for at in range(0, len(event.hashes), BLOCKS):
        end = at + BLOCKS
        yield replace(
            event,
            hashes=event.hashes[at:end],
            parent=event.hashes[at - 1] if at and event.tokens else event.parent,
            tokens=event.tokens[at * size : end * size],
            extra_keys=None if keys is None else keys[at:end],
            goes_on=at > 0,
        )


# Size of a msgpack value by its first byte, from the specification's table of formats; 0: it has a length, or is a
# container. Small integers, nil and booleans are a single byte; short text has its length in it.
_FIXED = dict.fromkeys((*range(0x80), *range(0xE0, 0x100), 0xC0, 0xC2, 0xC3), 1)
_FIXED |= {0xA0 + length: length + 1 for length in range(0x20)}
_FIXED |= {0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}
_FIXED |= {0xD4: 3, 0xD5: 4, 0xD6: 6, 0xD7: 10, 0xD8: 18}
_SIZES = bytes(_FIXED.get(first, 0) for first in range(256))
# Size of the length of byte strings, extensions (with another byte) and text, by the first byte.
_LENGTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}


class _Long:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def pieces(self) -> Iterator[Piece]:
        try:
            yield from self._batch()
        except (IndexError, msgspec.MsgspecError, RecursionError, OverflowError, UnicodeDecodeError) as error:
            raise MalformedEvents(f"not a batch of KV events: {error}") from error

    def _batch(self) -> Iterator[Piece]:
        mapped, count = self._container()
        read = 0
        for number in range(count):
            name = self._name() if mapped else ("ts", "events")[number] if number < 2 else ""
            start = self._at
            if name == "events":
                read += 1
                yield from self._events()
                continue
            yield from self._pass_over(1)
            if name == "ts":
                read += 1
                _timestamp.decode(self._data[start : self._at])
        if read != 2 or self._at != len(self._data):
            raise MalformedEvents("not a batch of KV events: expected a time and events, and nothing after them")

    def _events(self) -> Iterator[Piece]:
        mapped, count = self._container()
        if mapped or count > MAX_EVENTS:
            raise MalformedEvents(f"not a batch of KV events: {count} of them")
        for _ in range(count):
            yield from self._event()

    def _event(self) -> Iterator[Piece]:
        """Read an event: find its fields (``spans``: begin and end), then decode them."""
        mapped, count = self._container()
        spans: dict[str, tuple[int, int]] = {}
        names: tuple[str, ...] = _FIELDS
        for number in range(count):
            name = self._name() if mapped else names[number] if number < len(names) else ""
            start = self._at
            yield from self._pass_over(1)
            spans[name] = (start, self._at)
            if not mapped and number == 0 and self._get(spans, "type", _text, None) == "BlockRemoved":
                names = _REMOVED_FIELDS
        end, kind = self._at, self._get(spans, "type", _text, None)
        if kind is None:
            raise MalformedEvents("an event without its kind")
        if kind not in KNOWN:
            yield Tally.UNKNOWN
        elif kind == "AllBlocksCleared":
            yield AllCleared()
        elif "block_hashes" not in spans:
            raise MalformedEvents("an event of blocks without any")
        else:
            _check_blocks(self._enter(spans["block_hashes"]))
            medium = self._get(spans, "medium", _text, None) or GPU
            locality = self._data[slice(*spans["locality"])] if "locality" in spans else b""
            medium = REMOTE if locality == _REMOTE else medium
            group = self._get(spans, "group_idx", _number, None) or 0
            if kind == "BlockRemoved":
                yield from self._removed(spans, medium, group)
            else:
                yield from self._stored(spans, medium, group, mapped)
        self._at = end

    def _removed(self, spans: dict[str, tuple[int, int]], medium: str, group: int) -> Iterator[Piece]:
        remaining = self._enter(spans["block_hashes"])
        while remaining:
            count = min(remaining, BLOCKS)
            hashes = yield from self._take(count, _hashes)
            remaining -= count
            yield BlocksRemoved(hashes, medium, group)

    def _stored(self, spans: dict[str, tuple[int, int]], medium: str, group: int, mapped: bool) -> Iterator[Piece]:
        if not mapped and not {"parent_block_hash", "token_ids", "block_size"} <= spans.keys():
            raise MalformedEvents("stored blocks without parent, tokens or size")
        size = self._get(spans, "block_size", _number, 0)
        if size is None:
            raise MalformedEvents("blocks of no size")
        parent = self._get(spans, "parent_block_hash", _hash, None)
        number = self._get(spans, "lora_id", _number, None)
        adapter = self._get(spans, "lora_name", _text, None) or ("" if number is None else f"#{number}")
        tokens = self._enter(spans["token_ids"]) if "token_ids" in spans else 0
        tokens_at = self._at
        keys: int | None = None
        if "extra_keys" in spans and self._data[spans["extra_keys"][0]] != 0xC0:
            keys = self._enter(spans["extra_keys"])
        keys_at = self._at
        # Hashes without tokens cannot be matched with a prompt, but they show that a slower tier has blocks that the
        # index already knows by hash (`is_by_hash`).
        remaining = blocks = self._enter(spans["block_hashes"])
        is_by_hash = not tokens and medium_of(medium) != GPU
        if not is_by_hash and (
            not 1 <= size <= MAX_BLOCK_TOKENS or tokens != blocks * size or (keys is not None and keys != blocks)
        ):
            yield Tally.UNUSABLE
            return
        most = BLOCKS if is_by_hash else max(1, min(BLOCKS, PIECE_TOKENS // size))
        hashes_at = self._at
        while remaining:
            count = min(remaining, most)
            self._at = hashes_at
            hashes = yield from self._take(count, _hashes)
            hashes_at = self._at
            if is_by_hash:
                remaining -= count
                yield BlocksStored(hashes, None, (), 0, medium, group=group)
                continue
            self._at = tokens_at
            piece_tokens = yield from self._take(count * size, _tokens)
            tokens_at = self._at
            piece_keys = None
            if keys is not None:
                self._at = keys_at
                piece_keys = yield from self._take(count, _keys)
                keys_at = self._at
            if not token_range(piece_tokens):
                yield Tally.UNUSABLE
                return
            yield BlocksStored(
                hashes, parent, piece_tokens, size, medium, adapter, piece_keys, group, goes_on=remaining < blocks
            )
            parent, remaining = hashes[-1], remaining - count

    # The cursor

    def _container(self) -> tuple[bool, int]:
        """Enter a container; return True for a map, and the length."""
        first = self._data[self._at]
        self._at += 1
        if first & 0xF0 in (0x80, 0x90):
            return first < 0x90, first & 0x0F
        if 0xDC <= first <= 0xDF:
            return first >= 0xDE, self._length(2 if first in (0xDC, 0xDE) else 4)
        raise MalformedEvents(f"byte {self._at - 1}: neither a list nor a map")

    def _length(self, size: int) -> int:
        at = self._at
        if at + size > len(self._data):
            raise IndexError("it ends within a value")
        self._at = at + size
        return int.from_bytes(self._data[at : at + size], "big")

    def _name(self) -> str:
        start = self._at
        first = self._data[start]
        if not (0xA0 <= first < 0xC0 or first == 0xD9):
            raise MalformedEvents("a field whose name is not a short text")
        self._at += first - 0xA0 + 1 if first < 0xC0 else 2 + self._data[start + 1]
        return _text.decode(self._data[start : self._at]) or ""

    def _enter(self, span: tuple[int, int]) -> int:
        self._at = span[0]
        mapped, count = self._container()
        if mapped:
            raise MalformedEvents("a map where a list is expected")
        return count

    def _get(
        self, spans: dict[str, tuple[int, int]], name: str, decoder: msgspec.msgpack.Decoder[_Value], default: _Value
    ) -> _Value:
        return decoder.decode(self._data[slice(*spans[name])]) if name in spans else default

    def _take(self, count: int, decoder: msgspec.msgpack.Decoder[_Value]) -> Generator[None, None, _Value]:
        start = self._at
        yield from self._pass_over(count)
        return decoder.decode(b"\xdd" + count.to_bytes(4, "big") + self._data[start : self._at])

    def _pass_over(self, values: int) -> Iterator[None]:
        """Skip values. Entries of containers count as further values, so nesting cannot overflow a stack."""
        data, sizes, at, end = self._data, _SIZES, self._at, len(self._data)
        steps = 0
        while values:
            steps += 1
            if steps % STEPS == 0:
                yield None
            first = data[at]
            if size := sizes[first]:
                at += size
                values -= 1
                continue
            self._at = at
            if first in _LENGTHS:
                self._at += 1
                length = self._length(_LENGTHS[first])
                at = self._at + length + (0xC7 <= first <= 0xC9)
                values -= 1
            elif first == 0xC1:
                raise MalformedEvents(f"byte {at}: no msgpack value begins with 0xc1")
            else:
                mapped, count = self._container()
                values += (2 * count if mapped else count) - 1
                at = self._at
                if values > end - at:
                    raise MalformedEvents("more values than bytes")
        if at > end:
            raise IndexError("it ends within a value")
        self._at = at
