"""One block as a stored value: its header names the block and carries the payload's checksum.

The name is 64 characters, so that the payload begins at byte 128, aligned for any engine's copy.
"""

from __future__ import annotations

import base64

from skymemory import native
from skymemory.errors import LaterVersion, MalformedPacket
from skymemory.kv.block import BlockHash
from skymemory.kv.codec.base import Codec
from skymemory.kv.layout import KVLayout
from skymemory.kv.value import HEADER_BYTES, ValueHeader, unpack_value

NAME_BYTES = 64
PAYLOAD_AT = HEADER_BYTES + NAME_BYTES
_NAME = "block {} crc32 {:08x}"


class ForeignBlock(MalformedPacket):
    """A sound value, but not of the block, layout or loss that was asked for."""


def block_name(block_hash: BlockHash, payload_crc: int) -> str:
    """``block <43 characters of base64> crc32 <8 of hex>``: ties the payload to its block hash."""
    return _NAME.format(base64.urlsafe_b64encode(block_hash).decode().rstrip("="), payload_crc)


def block_header(block_hash: BlockHash, layout: KVLayout, codec: Codec, payload: memoryview | bytes) -> bytes:
    """The ``PAYLOAD_AT`` bytes that go in front of ``payload``."""
    name = block_name(block_hash, native.crc32(payload))
    return ValueHeader(codec.codec_id, layout.block_bytes, len(payload), layout, name).pack()


def is_sound_block(block_hash: BlockHash, value: memoryview) -> bool:
    """Whether these bytes are a stored block of this hash, undamaged; of whichever layout. What a later release wrote
    passes: it is not for us to judge, and is kept and moved as it is.
    """
    try:
        header, payload = unpack_value(value)
    except LaterVersion:
        return True
    except MalformedPacket:
        return False
    return header.name == block_name(block_hash, native.crc32(payload))


def open_block(value: memoryview, block_hash: BlockHash, layout: KVLayout) -> tuple[int, memoryview]:
    """Codec id and payload of a stored block, after every check.

    Raises MalformedPacket for damaged bytes, and its subclasses ForeignBlock for another block or layout, LaterVersion
    for what a later release wrote.
    """
    header, payload = unpack_value(value)
    if header.layout != layout:
        raise ForeignBlock(f"a block of {header.layout}, expected {layout}")
    expected = block_name(block_hash, 0)[:-8]
    if header.name[:-8] != expected:
        raise ForeignBlock(f"a value named {header.name!r}, expected {expected}…")
    if header.name[-8:] != f"{native.crc32(payload):08x}":
        raise MalformedPacket("a block's payload differs from its checksum")
    return header.codec_id, payload
