"""What one replica of a router tells the others of its index, and how it looks as bytes.

Servers are named, for slots are each replica's own. A delta, little-endian::

    0 kind 1 (1 learnt, 2 dropped)   1 length of the name 2   3 number of blocks 4   7 name, UTF-8   then 8 per block
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from skymemory.conductor.prefix_index.base import Blocks
from skymemory.errors import InvalidInput

MAX_BLOCKS = 1 << 20
_HEAD = struct.Struct("<BHI")
_LEARNT, _DROPPED = 1, 2


@dataclass(frozen=True, slots=True, eq=False)
class Learnt:
    """A server answered: it holds this chain."""

    server: str
    blocks: Blocks


@dataclass(frozen=True, slots=True)
class Dropped:
    """A server said that it lacked this block, so that it lacks all behind it too."""

    server: str
    block: int


Delta = Learnt | Dropped


def pack_delta(delta: Delta) -> bytes:
    name = delta.server.encode("utf-8", "surrogatepass")
    if isinstance(delta, Learnt):
        hashes = np.ascontiguousarray(delta.blocks, dtype="<u8")
        return _HEAD.pack(_LEARNT, len(name), len(hashes)) + name + hashes.tobytes()
    return _HEAD.pack(_DROPPED, len(name), 1) + name + delta.block.to_bytes(8, "little")


def unpack_deltas(data: bytes) -> Iterator[Delta]:
    """The deltas that stand one after the other in ``data``.

    Raises:
        InvalidInput: bytes that are none; those before were given.
    """
    at = 0
    while at < len(data):
        if len(data) - at < _HEAD.size:
            raise InvalidInput("a delta of an index is cut off")
        kind, name_bytes, count = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        end = at + name_bytes + 8 * count
        if (
            kind not in (_LEARNT, _DROPPED)
            or count > MAX_BLOCKS
            or (kind == _DROPPED and count != 1)
            or end > len(data)
        ):
            raise InvalidInput(f"no delta of an index: kind {kind}, {count} blocks, {len(data) - at} bytes left")
        try:
            server = data[at : at + name_bytes].decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise InvalidInput(f"a delta of an index whose server has no name: {error}") from None
        hashes = np.frombuffer(data, dtype="<u8", count=count, offset=at + name_bytes).astype(np.uint64)
        yield Learnt(server, hashes) if kind == _LEARNT else Dropped(server, int(hashes[0]))
        at = end
