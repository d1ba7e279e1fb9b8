"""One byte of answer for each thing asked about: how RETAINED and CHECKED are laid out."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import TypeVar

from skymemory.errors import MalformedPacket
from skymemory.protocol.messages import Buffer
from skymemory.protocol.wire import Op

_COUNT = struct.Struct(">HH")

Verdict = TypeVar("Verdict", bound=IntEnum)


def pack_verdicts(verdicts: Sequence[IntEnum]) -> bytes:
    return _COUNT.pack(len(verdicts), 0) + bytes(verdicts)


def unpack_verdicts(body: Buffer, op: Op, kind: type[Verdict]) -> list[Verdict]:
    """One ``kind`` per thing asked about; MalformedPacket if the body is not that of an ``op``."""
    if len(body) < _COUNT.size or len(body) != _COUNT.size + _COUNT.unpack_from(body)[0]:
        raise MalformedPacket(f"{op.name} of {len(body)} bytes: not what its count says")
    codes = bytes(body[_COUNT.size :])
    if codes and max(codes) > max(kind):
        raise MalformedPacket(f"{op.name} says {max(codes)}: expected {int(max(kind))} at most")
    return [kind(code) for code in codes]
