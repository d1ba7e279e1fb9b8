"""What a node understands: the word at the end of a PONG, and of an UNSUPPORTED.

Releases meet on the wire. A satellite says which versions of the protocol it speaks and which operations it serves; one
that says nothing is of version 1. A client asks what the word names, remembers for a while what a satellite could not
do, and never takes an unanswered question for a dead satellite.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from skymemory.errors import MalformedPacket
from skymemory.protocol.messages import Buffer
from skymemory.protocol.wire import VERSION, Op

ASK_AGAIN_S = 60.0
"""So long a client believes that a satellite cannot do something: it may be replaced by a later release meanwhile."""
CODEC_IDS = (0, 8, 9, 10)
"""Ids of the codecs of this release (``kv.codec``, ``engine.quantizers``): a client on the satellite's computer reads
their payloads. The satellite itself keeps any bytes."""

_UNSUPPORTED = struct.Struct(">BBBxQQ")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """``operations`` has bit n set where the command n is served, ``codecs`` likewise by codec id. Without a word
    (``stated`` False) they are those of version 1's first releases, and some of those may be missing.
    """

    lowest_version: int
    highest_version: int
    operations: int
    codecs: int
    stated: bool = True

    def serves(self, op: Op) -> bool:
        return bool(self.operations >> op & 1)

    def figures(self) -> dict[str, int]:
        """As fields of a PONG."""
        versions = self.lowest_version << 8 | self.highest_version
        return {
            "protocol_versions": versions,
            "operations": _signed(self.operations),
            "codecs": _signed(self.codecs),
        }

    @classmethod
    def of_figures(cls, figures: Mapping[str, int]) -> Capabilities:
        """What a PONG says. Zero stands for a word that is not there."""
        versions = figures.get("protocol_versions", 0)
        if not 0 < versions <= 0xFFFF:
            return UNSTATED
        operations, codecs = (figures.get(name, 0) & (1 << 64) - 1 for name in ("operations", "codecs"))
        return cls(versions >> 8, versions & 0xFF, operations, codecs)

    def pack_unsupported(self, op: int) -> bytes:
        """Body of UNSUPPORTED: the number of the operation that was asked for, and the word."""
        return _UNSUPPORTED.pack(op, self.lowest_version, self.highest_version, self.operations, self.codecs)

    @classmethod
    def unpack_unsupported(cls, body: Buffer) -> tuple[int, Capabilities]:
        """The operation and the word; what a later release appends is ignored."""
        if len(body) < _UNSUPPORTED.size:
            raise MalformedPacket(f"UNSUPPORTED of {len(body)} bytes: expected {_UNSUPPORTED.size}")
        op, *word = _UNSUPPORTED.unpack_from(body)
        return op, cls(*word)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _bits(numbers: tuple[int, ...]) -> int:
    return sum(1 << number for number in numbers)


OURS = Capabilities(VERSION, VERSION, _bits(tuple(op for op in Op if op.is_command)), _bits(CODEC_IDS))
"""The word of this release."""
UNSTATED = Capabilities(1, 1, _bits(tuple(range(Op.SET, Op.CHECK + 1))), 0, stated=False)
