"""One stored value into its place in the engine's memory: verified, decoded, copied once."""

from __future__ import annotations

from collections.abc import Mapping

from skymemory.cache.blocks import BlockSink
from skymemory.cache.value import ForeignBlock, open_block
from skymemory.errors import CodecUnavailable, LaterVersion, MalformedPacket
from skymemory.kv.block import BlockHash
from skymemory.kv.codec.base import Codec
from skymemory.kv.codec.raw import RAW
from skymemory.kv.layout import KVLayout
from skymemory.kv.value import LATER_VERSION

WRONG = ("corrupt", "foreign")
"""The reasons that say that the bytes are wrong, and not that this reader cannot read them."""


def place_block(
    sink: BlockSink,
    index: int,
    block_hash: BlockHash,
    value: memoryview,
    layout: KVLayout,
    readable: Mapping[int, Codec],
) -> str:
    """Hand block ``index`` over to ``sink``; why it could not be used, or empty."""
    try:
        codec_id, payload = open_block(value, block_hash, layout)
        codec = readable.get(codec_id)
        if codec is None:
            return "codec not readable"
        if codec is RAW and payload.nbytes == layout.block_bytes:
            sink.place(index, payload)
            return ""
        block = memoryview(bytearray(layout.block_bytes))
        codec.decode(payload, layout, block)
        sink.place(index, block)
    except CodecUnavailable:
        return "codec not installed"
    except ForeignBlock:
        return "foreign"
    except LaterVersion:
        return LATER_VERSION
    except MalformedPacket:
        return "corrupt"
    return ""
