"""What one satellite holds of one key, its *share*: chunks by index, with references that say which copy each is."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from itertools import repeat
from typing import NamedTuple

from skymemory.protocol.wire import CHUNK_REF_BYTES, REPLICA_OFFSET, TAG_BYTES, TAG_OFFSET

ChunkName = tuple[bytes, int]
"""(key, 0-based index)."""
Chunk = tuple[bytes, bytes]
"""Packed reference and payload, as ``StoredChunk`` but plain: whole runs of them come and go."""
Share = dict[int, Chunk]

_TAG = slice(TAG_OFFSET, TAG_OFFSET + TAG_BYTES)
_SET_MOVES = slice(TAG_OFFSET + 8, TAG_OFFSET + 16)
_MOVES = struct.Struct(">ii")


class StoredChunk(NamedTuple):
    """``ref`` is the packed ``ChunkRef``, kept as bytes because it is sent as it came."""

    ref: bytes
    payload: bytes


def told_by(share: Share) -> int:
    """The lowest chunk of the latest placement. A value that was set again after moves of the box, or prefetched,
    leaves chunks of the earlier placement on the satellites that both have.
    """
    settings = {ref[_SET_MOVES] for ref, _ in share.values()}
    if len(settings) == 1:
        return min(share)
    latest = max(settings, key=lambda moves: sum(_MOVES.unpack(moves)))
    return min(index for index, (ref, _) in share.items() if ref[_SET_MOVES] == latest)


def size_bytes_of(share: Share) -> int:
    """What it counts in memory: payloads and references."""
    return sum(len(payload) for _, payload in share.values()) + CHUNK_REF_BYTES * len(share)


def as_copy(ref: bytes, replica: int) -> bytes:
    """The packed reference of the same chunk as another copy of it."""
    return ref[:REPLICA_OFFSET] + bytes([replica]) + ref[REPLICA_OFFSET + 1 :]


def others_met(key: bytes, share: Share, coming: Iterable[tuple[int, bytes]]) -> list[tuple[ChunkName, bytes]]:
    """Which chunks of a share those that are coming (index and packed reference) are other copies of, with the
    references of those that are here. Chunks of other values, or of other settings, are no copies.
    """
    met = []
    for index, ref in coming:
        here = share.get(index)
        if here is not None and here[0] != ref and here[0] == as_copy(ref, here[0][REPLICA_OFFSET]):
            met.append(((key, index), here[0]))
    return met


def names_by_tag(shares: Mapping[bytes, Share]) -> dict[bytes, list[ChunkName]]:
    """What is held, by packed placement tag: chunks of one tag always move together. Looks at every chunk."""
    groups: dict[bytes, list[ChunkName]] = {}
    for key, share in shares.items():
        tags = {ref[_TAG] for ref, _ in share.values()}
        if len(tags) == 1:  # nearly always: what a satellite has of one value is one server's part
            groups.setdefault(tags.pop(), []).extend(zip(repeat(key), share))
        else:
            for index, (ref, _) in share.items():
                groups.setdefault(ref[_TAG], []).append((key, index))
    return groups
