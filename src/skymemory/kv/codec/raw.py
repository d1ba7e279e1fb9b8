"""The identity: a block's 16-bit or 32-bit numbers as they are."""

from __future__ import annotations

from skymemory.errors import InvalidInput, MalformedPacket
from skymemory.kv.chunk import Buffer
from skymemory.kv.layout import KVLayout


class RawCodec:
    """Lossless; the payload is the block."""

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
