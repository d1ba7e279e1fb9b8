"""Capabilities of a node: protocol versions, operations and codecs, as stated in a PONG and in an UNSUPPORTED.

Different releases meet on the wire. A satellite states which versions it speaks and which operations it serves; one
that states nothing is of version 1. A client sends only stated operations, remembers for a while what a satellite could
not do, and never takes an unsupported operation for a dead satellite.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from skymemory.errors import MalformedPacket
from skymemory.protocol.messages import Buffer
from skymemory.protocol.wire import VERSION, Op

ASK_AGAIN_S = 60.0
"""How long a client believes that a satellite lacks an operation: a later release may replace it meanwhile."""
CODEC_IDS = (0, 8, 9, 10)
"""Ids of the codecs of this release (``kv.codec``, ``engine.quantizers``): a client on the satellite's computer reads
their payloads. The satellite itself keeps any bytes."""

_UNSUPPORTED = struct.Struct(">BBBxQQ")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """``operations`` has bit n set if command n is served, ``codecs`` likewise by codec id. If not ``stated``, they are
    those of version 1's first releases, some of which may be missing.
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
        return {"protocol_versions": versions, "operations": _signed(self.operations), "codecs": _signed(self.codecs)}

    @classmethod
    def of_figures(cls, figures: Mapping[str, int]) -> Capabilities:
        """The capabilities in a PONG; zero stands for a missing field."""
        versions = figures.get("protocol_versions", 0)
        if not 0 < versions <= 0xFFFF:
            return UNSTATED
        operations, codecs = (figures.get(name, 0) & (1 << 64) - 1 for name in ("operations", "codecs"))
        return cls(versions >> 8, versions & 0xFF, operations, codecs)

    def pack_unsupported(self, op: int) -> bytes:
        """Body of UNSUPPORTED: the number of the requested operation, and these capabilities."""
        return _UNSUPPORTED.pack(op, self.lowest_version, self.highest_version, self.operations, self.codecs)

    @classmethod
    def unpack_unsupported(cls, body: Buffer) -> tuple[int, Capabilities]:
        """The operation and the capabilities; what a later release appends is ignored."""
        if len(body) < _UNSUPPORTED.size:
            raise MalformedPacket(f"UNSUPPORTED of {len(body)} bytes: expected {_UNSUPPORTED.size}")
        op, *stated = _UNSUPPORTED.unpack_from(body)
        return op, cls(*stated)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _bits(numbers: tuple[int, ...]) -> int:
    return sum(1 << number for number in numbers)


OURS = Capabilities(VERSION, VERSION, _bits(tuple(op for op in Op if op.is_command)), _bits(CODEC_IDS))
"""The capabilities of this release."""
UNSTATED = Capabilities(1, 1, _bits(tuple(range(Op.SET, Op.CHECK + 1))), 0, stated=False)
