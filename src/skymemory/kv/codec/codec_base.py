"""Contract of a codec, and the measurement of its size and loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from skymemory.errors import InvalidInput, MalformedPacket
from skymemory.kv.block import Buffer, KVLayout, to_float32


class Codec(Protocol):
    """Codec of a block (raw bytes of ``KVLayout.shape``) to a payload and back.

    ``decode`` undoes ``encode`` of the same codec and layout: bit for bit if ``lossless``. ``codec_id`` is stored with
    values: its meaning never changes.
    """

    @property
    def name(self) -> str: ...

    @property
    def codec_id(self) -> int: ...

    @property
    def lossless(self) -> bool: ...

    def encode(self, block: memoryview, layout: KVLayout) -> bytes:
        """Return the payload of ``block``, never an alias. InvalidInput for a block of another size."""
        ...

    def decode(self, payload: Buffer, layout: KVLayout, out: memoryview) -> None:
        """Write the block into ``out``. MalformedPacket for another codec's or layout's payload; ``out`` is then
        undefined.
        """
        ...


@dataclass(frozen=True, slots=True)
class CodecReport:
    """Effect of a codec on a block. Errors are absolute."""

    size_bytes: int
    raw_bytes: int
    max_abs_error: float
    rms_error: float

    @property
    def ratio(self) -> float:
        return self.size_bytes / self.raw_bytes


def measure(codec: Codec, block: Buffer, layout: KVLayout) -> CodecReport:
    """Encode, decode and compare. Equal bits are no error, even infinities."""
    view = memoryview(block).cast("B")
    payload = codec.encode(view, layout)
    decoded = bytearray(layout.block_bytes)
    codec.decode(payload, layout, memoryview(decoded))
    if decoded == view:
        return CodecReport(len(payload), layout.block_bytes, 0.0, 0.0)
    before, after = to_float32(view, layout.dtype), to_float32(decoded, layout.dtype)
    same = before.view(np.uint32) == after.view(np.uint32)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.where(same, 0.0, before.astype(np.float64) - after.astype(np.float64))
    error = np.where(np.isfinite(error), np.abs(error), np.inf)
    return CodecReport(len(payload), layout.block_bytes, float(error.max()), float(np.sqrt(np.mean(error**2))))


# The identity: the 16-bit or 32-bit numbers of a block, unchanged


class RawCodec:
    """Codec that stores blocks unchanged."""

    name = "raw"
    codec_id = 0
    lossless = True

    def encode(self, block: memoryview, layout: KVLayout) -> bytes:
        if block.nbytes != layout.block_bytes:
            raise InvalidInput(f"a block of {block.nbytes} bytes, the layout says {layout.block_bytes}")
        return bytes(block)

    def decode(self, payload: Buffer, layout: KVLayout, out: memoryview) -> None:
        view = memoryview(payload).cast("B")
        if len(view) != layout.block_bytes:
            raise MalformedPacket(f"a raw payload of {len(view)} bytes, the layout says {layout.block_bytes}")
        if out.nbytes != layout.block_bytes:
            raise InvalidInput(f"room for {out.nbytes} bytes, the block has {layout.block_bytes}")
        out.cast("B")[:] = view


RAW = RawCodec()
