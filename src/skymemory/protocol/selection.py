"""Which chunks of a key a packet speaks of: the body of GET, ACK, MISS and BUSY."""

from __future__ import annotations

import bisect
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from skymemory.errors import InvalidInput, MalformedPacket
from skymemory.protocol.messages import Buffer

MAX_SELECTION_BITS = 1 << 16
"""Steps of one selection: bounds what one GET can ask for before anything is allocated."""

_SELECTION = struct.Struct(">32sIII")
_STEPS = struct.Struct(">III")


def pack_steps(indices: range) -> bytes:
    """What follows the key in the selection of exactly these: it is the same for every key."""
    count = len(indices)
    if not 1 <= count <= MAX_SELECTION_BITS:
        raise InvalidInput(f"a selection over {count} steps: expected 1 to {MAX_SELECTION_BITS}")
    return _STEPS.pack(indices[0] + 1, indices.step, count) + ((1 << count) - 1).to_bytes((count + 7) // 8, "little")


@dataclass(frozen=True, slots=True)
class Selection:
    """Some chunks of one key: those of ``first, first + stride, …`` whose bit is set (bit 0 is the lowest of byte 0).

    A server of ``S`` holds chunks ``server, server + S, …``, so one selection names all that a satellite should send.
    """

    key: bytes
    first: int
    stride: int
    count: int
    bitmap: bytes

    @classmethod
    def of(cls, key: bytes, indices: Sequence[int], stride: int = 1) -> Selection:
        """The selection of exactly ``indices`` (0-based, ascending, congruent modulo ``stride``).

        Raises:
            InvalidInput: none, not on one grid, or spread over more than ``MAX_SELECTION_BITS`` steps.
        """
        if not indices:
            raise InvalidInput("a selection of no chunks: expected at least one")
        first = indices[0]
        count = (indices[-1] - first) // stride + 1
        if count > MAX_SELECTION_BITS:
            raise InvalidInput(f"a selection over {count} steps: expected {MAX_SELECTION_BITS} at most")
        if len(indices) == count and stride > 0 and list(indices) == list(range(first, indices[-1] + 1, stride)):
            return cls(key, first, stride, count, ((1 << count) - 1).to_bytes((count + 7) // 8, "little"))
        bits = bytearray((count + 7) // 8)
        for index in indices:
            step, rest = divmod(index - first, stride)
            if rest or not 0 <= step < count:
                raise InvalidInput(f"chunk {index} is not on the grid {first} + {stride}·n")
            bits[step >> 3] |= 1 << (step & 7)
        return cls(key, first, stride, count, bytes(bits))

    @classmethod
    def cover(cls, key: bytes, indices: Iterable[int]) -> list[Selection]:
        """Selections that together are exactly ``indices``, in any order: one unless they are spread very far."""
        ordered = list(indices)
        if 1 < len(ordered) <= MAX_SELECTION_BITS and ordered[0] < ordered[1]:
            step = ordered[1] - ordered[0]
            even = range(ordered[0], ordered[0] + step * len(ordered), step)
            if ordered == list(even):  # as nearly always
                return [cls.of(key, even, step)]
        ordered = sorted(set(ordered))
        stride = max(1, math.gcd(*(index - ordered[0] for index in ordered))) if ordered else 1
        selections, begin = [], 0
        while begin < len(ordered):
            end = bisect.bisect_left(ordered, ordered[begin] + stride * MAX_SELECTION_BITS)
            selections.append(cls.of(key, ordered[begin:end], stride))
            begin = end
        return selections

    def indices(self) -> list[int]:
        if self.bitmap.count(0xFF) == self.count >> 3 and int.from_bytes(self.bitmap, "little") + 1 == 1 << self.count:
            return list(range(self.first, self.first + self.stride * self.count, self.stride))
        steps = np.flatnonzero(np.unpackbits(np.frombuffer(self.bitmap, np.uint8), bitorder="little")[: self.count])
        return [self.first + self.stride * step for step in steps.tolist()]

    def pack(self) -> bytes:
        return _SELECTION.pack(self.key, self.first + 1, self.stride, self.count) + self.bitmap

    @classmethod
    def unpack(cls, body: Buffer) -> Selection:
        if len(body) < _SELECTION.size:
            raise MalformedPacket(f"selection of {len(body)} bytes: expected at least {_SELECTION.size}")
        key, first, stride, count = _SELECTION.unpack_from(body)
        bitmap = bytes(body[_SELECTION.size :])
        if first < 1 or stride < 1 or not 1 <= count <= MAX_SELECTION_BITS or len(bitmap) != (count + 7) // 8:
            raise MalformedPacket(f"selection from {first} by {stride}, {count} bits in {len(bitmap)} bytes")
        if first + stride * (count - 1) > 0xFFFFFFFF or not any(bitmap):
            raise MalformedPacket(f"selection from {first} by {stride}, {count} bits: beyond any value, or of nothing")
        return cls(key, first - 1, stride, count, bitmap)
