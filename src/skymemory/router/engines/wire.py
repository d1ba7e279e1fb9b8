"""Decodes engines' KV events (msgpack) into ``conductor.prefix_index.events``.

vLLM and SGLang publish three frames: topic, sequence number (8 bytes, big-endian), and a batch in msgpack (msgspec's
encoding of the structs in ``vllm/distributed/kv_events.py``). Versions differ in the number of an event's fields, and
lately in whether structs are arrays or maps: both are read, missing fields have their defaults, new ones are skipped.
Unknown kinds of events are counted.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from skymemory.conductor.prefix_index.events import (
    GPU,
    REMOTE,
    AllCleared,
    Batch,
    BlocksRemoved,
    BlocksStored,
    Event,
    medium_of,
)
from skymemory.errors import SkyMemoryError

MAX_MESSAGE_BYTES = 8 * 1024 * 1024
"""Longer messages are refused; a prompt of a million tokens takes 5 MB."""
MAX_RECEIVED_BYTES = 2 * MAX_MESSAGE_BYTES
"""Longer ones make the socket drop the connection."""
MAX_EVENTS = 1 << 16
"""In one batch, which is one step of an engine."""
SEQUENCE_BYTES = 8
_TOKENS = 1 << 32
_Hash = int | bytes


class MalformedEvents(SkyMemoryError, ValueError):
    """A message that is no batch of events: from there on the engine's cache is unknown."""


class TooLong(MalformedEvents):
    """A message longer than the limit."""


class Tally(enum.Enum):
    """Events that are only counted."""

    UNKNOWN = "unknown"
    """Of an unknown kind."""
    UNUSABLE = "unusable"
    """Stored blocks that cannot be hashed: some or all of their tokens are missing."""


@dataclass(frozen=True, slots=True)
class Decoded:
    batch: Batch
    unknown: int
    unusable: int
    """``Tally``."""


class _StoredRow(msgspec.Struct, array_like=True, tag="BlockStored", gc=False):
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


class _RemovedRow(msgspec.Struct, array_like=True, tag="BlockRemoved", gc=False):
    block_hashes: list[_Hash]
    medium: str | None = None
    group_idx: int | None = None
    locality: Any = None


class _ClearedRow(msgspec.Struct, array_like=True, tag="AllBlocksCleared", gc=False):
    pass


class _StoredMap(msgspec.Struct, tag="BlockStored", gc=False):
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


class _ClearedMap(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


_Events = Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_EVENTS)]


class _BatchRow(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: _Events


class _BatchMap(msgspec.Struct, gc=False):
    ts: float
    events: _Events


class _KindRow(msgspec.Struct, array_like=True, gc=False):
    type: str


class _KindMap(msgspec.Struct, gc=False):
    type: str


_Wire = _StoredRow | _RemovedRow | _ClearedRow | _StoredMap | _RemovedMap | _ClearedMap
_batch_row = msgspec.msgpack.Decoder(_BatchRow)
_batch_map = msgspec.msgpack.Decoder(_BatchMap)
_event_row = msgspec.msgpack.Decoder(_StoredRow | _RemovedRow | _ClearedRow)
_event_map = msgspec.msgpack.Decoder(_StoredMap | _RemovedMap | _ClearedMap)
_kind_row = msgspec.msgpack.Decoder(_KindRow)
_kind_map = msgspec.msgpack.Decoder(_KindMap)
KNOWN = ("BlockStored", "BlockRemoved", "AllBlocksCleared")


def sequence_of(frames: Sequence[bytes]) -> tuple[bytes, int, bytes]:
    """Topic, sequence number and payload of a message's frames.

    Raises:
        MalformedEvents: not three frames, or a number without eight bytes.
    """
    if len(frames) != 3 or len(frames[1]) != SEQUENCE_BYTES:
        raise MalformedEvents(f"expected topic, 8 bytes and a batch, got frames of {[len(f) for f in frames[:8]]} B")
    return frames[0], int.from_bytes(frames[1], "big"), frames[2]


def decode(sequence: int, payload: bytes) -> Decoded:
    """The batch in ``payload``, decoded at once. ``pieces`` reads long ones.

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
            elif isinstance(wire, (_RemovedRow, _RemovedMap)):
                events.append(BlocksRemoved(wire.block_hashes, _medium(wire), wire.group_idx or 0))
            else:
                events.append(AllCleared())
    except (msgspec.MsgspecError, RecursionError, OverflowError, UnicodeDecodeError) as error:
        raise MalformedEvents(f"not a batch of KV events: {error}") from error
    return Decoded(Batch(sequence, events), unknown, unusable)


def _is_map(data: bytes) -> bool:
    first = data[0] if data else 0
    return first & 0xF0 == 0x80 or first in (0xDE, 0xDF)


def _event(raw: bytes) -> _Wire | None:
    """One event; None: of an unknown kind."""
    mapped = _is_map(raw)
    try:
        wire: _Wire = (_event_map if mapped else _event_row).decode(raw)
        return wire
    except msgspec.ValidationError:
        # Only its kind is decoded.
        if (_kind_map if mapped else _kind_row).decode(raw).type in KNOWN:
            raise
        return None


def _medium(wire: _StoredRow | _StoredMap | _RemovedRow | _RemovedMap) -> str:
    """The medium; a remote store is none of the server's own media, whatever its name."""
    return REMOTE if wire.locality == REMOTE else wire.medium or GPU


def token_range(tokens: Sequence[int]) -> bool:
    """Whether all are valid token numbers."""
    return not tokens or 0 <= min(tokens) <= max(tokens) < _TOKENS


def _stored(wire: _StoredRow | _StoredMap) -> BlocksStored | None:
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
