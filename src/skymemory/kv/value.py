"""Header of every stored value, and blocks as stored values.

Layout, little-endian, 64 bytes, then the name, then the payload::

    0  magic "SKYV"      4   version 1      5  codec id 1    6  dtype 1        7  zero 1
    8  raw_bytes 8      16   payload_bytes 8
    24 layers 4         28   kv_heads 4    32  head_dim 4   36  block_tokens 4     (all zero: not a KV block)
    40 name_bytes 2     42   value_dim 4 (zero: as head_dim)
    46 zero 14          60  CRC-32 of the header with this field zero, and of the name

Later versions keep magic and version's position only; they, an unknown dtype and a non-zero reserved byte raise
``LaterVersion``.
"""

from __future__ import annotations

import base64
import struct
from dataclasses import dataclass

from skymemory import native
from skymemory.errors import InvalidInput, LaterVersion, MalformedPacket, ValueTooLarge, not_utf8
from skymemory.kv.block import Buffer, KVLayout, OpaqueLayout

DEFAULT_CHUNK_BYTES = 6144
"""Size of the chunks (the last may be shorter). Chunk ``index`` goes to server ``index % servers``; without one chunk
the value is lost (paper §3.2).
"""
HEADER_BYTES = 64
HEADER_VERSION = 1
MAX_NAME_BYTES = 4096
MAX_RAW_BYTES = 16 * 2**30
"""Limit of decoded values, checked before anything is allocated."""

BYTES_DTYPE = "bytes"

_MAGIC = b"SKYV"
_HEADER = struct.Struct("<4sBBBxQQIIIIHI14xI")
_CRC_AT = 60
_DTYPES = (BYTES_DTYPE, "float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class ValueHeader:
    """Header of a value of ``raw_bytes`` decoded bytes, stored as ``payload_bytes``.

    ``layout``: of a KV block. ``name``: a block's (``block_name``), or a key of the general store, checked at each
    read.
    """

    codec_id: int
    raw_bytes: int
    payload_bytes: int
    layout: KVLayout | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.codec_id <= 255:
            raise InvalidInput(f"codec id {self.codec_id} is not in 0..255")
        if self.raw_bytes < 0 or self.payload_bytes < 0:
            raise InvalidInput(f"negative size: raw {self.raw_bytes}, payload {self.payload_bytes}")
        if self.raw_bytes > MAX_RAW_BYTES:
            raise ValueTooLarge(f"a value of {self.raw_bytes} bytes: the limit is {MAX_RAW_BYTES}")
        try:
            name_bytes = len(self.name.encode())
        except UnicodeEncodeError as error:
            raise not_utf8(f"name {self.name!r}", error) from None
        if name_bytes > MAX_NAME_BYTES:
            raise ValueTooLarge(f"a name of {name_bytes} bytes: the limit is {MAX_NAME_BYTES}")
        if self.layout is not None and self.layout.block_bytes != self.raw_bytes:
            raise InvalidInput(f"raw size {self.raw_bytes} is not the layout's {self.layout.block_bytes} bytes")

    @property
    def dtype(self) -> str:
        return BYTES_DTYPE if self.layout is None else self.layout.dtype

    @property
    def header_bytes(self) -> int:
        return HEADER_BYTES + len(self.name.encode())

    def pack(self) -> bytes:
        name = self.name.encode()
        numbers, value_dim = (0, 0, 0, 0), 0
        if self.layout is not None:
            numbers = (self.layout.layers, self.layout.kv_heads, self.layout.head_dim, self.layout.block_tokens)
            value_dim = self.layout.value_dim
        sizes = (self.raw_bytes, self.payload_bytes, *numbers, len(name), value_dim)
        dtype_id = _DTYPES.index(self.dtype)
        front = _HEADER.pack(_MAGIC, HEADER_VERSION, self.codec_id, dtype_id, *sizes, 0)
        return front[:_CRC_AT] + native.crc32(front + name).to_bytes(4, "little") + name


def unpack_value(value: Buffer) -> tuple[ValueHeader, memoryview]:
    """Return header and unchecked payload of a stored value. Raises MalformedPacket; LaterVersion for a later
    release's.
    """
    view = memoryview(value).cast("B")
    header = unpack_header(view)
    if header.header_bytes + header.payload_bytes != len(view):
        raise MalformedPacket(
            f"a value of {len(view)} bytes whose header says {header.header_bytes} + {header.payload_bytes}"
        )
    return header, view[header.header_bytes :]


def unpack_header(start_of_value: Buffer) -> ValueHeader:
    """Return the header from the first bytes of a value. Raises as ``unpack_value``."""
    view = memoryview(start_of_value).cast("B")
    if len(view) < HEADER_BYTES:
        raise MalformedPacket(f"a stored value has at least {HEADER_BYTES} bytes, got {len(view)}")
    magic, version, codec_id, dtype_id, raw_bytes, payload_bytes, *shape = _HEADER.unpack_from(view)
    *numbers, name_bytes, value_dim, crc = shape
    if magic != _MAGIC:
        raise MalformedPacket(f"not a stored value: it begins with {bytes(magic).hex()}, expected {_MAGIC.hex()}")
    if version > HEADER_VERSION:
        raise LaterVersion(f"stored value of version {version}, this release reads version {HEADER_VERSION}")
    if version != HEADER_VERSION:
        raise MalformedPacket(f"stored value of version {version}, this release reads version {HEADER_VERSION}")
    if name_bytes > MAX_NAME_BYTES or HEADER_BYTES + name_bytes > len(view):
        raise MalformedPacket(f"a stored value of {len(view)} bytes whose header says a name of {name_bytes}")
    front = bytearray(view[: HEADER_BYTES + name_bytes])
    front[_CRC_AT:HEADER_BYTES] = bytes(4)
    if native.crc32(front) != crc:
        raise MalformedPacket("the header of a stored value is damaged: its checksum differs")
    if dtype_id >= len(_DTYPES) or front[7] or any(front[46:_CRC_AT]):
        raise LaterVersion("the header of a stored value uses a dtype or reserved bytes unknown to this release")
    try:
        layers, kv_heads, head_dim, tokens = numbers
        layout = KVLayout(layers, kv_heads, head_dim, tokens, _DTYPES[dtype_id], value_dim) if dtype_id else None
        if layout is None and (any(numbers) or value_dim):
            raise MalformedPacket("the header of a stored value has layout numbers but says plain bytes")
        name = front[HEADER_BYTES:].decode()
        return ValueHeader(codec_id, raw_bytes, payload_bytes, layout, name)
    except (InvalidInput, UnicodeDecodeError) as error:
        raise MalformedPacket(f"the header of a stored value is inconsistent: {error}") from None


# --- a block of a KV cache as a stored value: the name has the block's hash and the payload's CRC ---

PAYLOAD_AT = HEADER_BYTES + 64
"""Offset of a block's payload: its name has 64 characters."""
_BLOCK_NAME = "block {} crc32 {:08x}"


class ForeignBlock(MalformedPacket):
    """Intact value of another block or layout than requested."""


def block_name(block_hash: bytes, payload_crc: int) -> str:
    """Return ``block <43 characters of base64> crc32 <8 of hex>``."""
    return _BLOCK_NAME.format(base64.urlsafe_b64encode(block_hash).decode().rstrip("="), payload_crc)


def block_header(block_hash: bytes, layout: KVLayout | OpaqueLayout, codec_id: int, payload: Buffer) -> bytes:
    name = block_name(block_hash, native.crc32(payload))
    return ValueHeader(codec_id, layout.block_bytes, len(payload), _written(layout), name).pack()


def _written(layout: KVLayout | OpaqueLayout) -> KVLayout | None:
    return layout if isinstance(layout, KVLayout) else None


def is_sound_block(block_hash: bytes, value: memoryview) -> bool:
    """Return True for an undamaged block of this hash. A later release's values pass: they are moved unread."""
    try:
        header, payload = unpack_value(value)
    except LaterVersion:
        return True
    except MalformedPacket:
        return False
    return header.name == block_name(block_hash, native.crc32(payload))


def crc_by_header(block_hash: bytes, value: memoryview, crc: int = 0) -> int | None:
    """Return the CRC-32 of a stored block, continued from ``crc``; None if it is no such block. The payload's CRC is
    the header's: wrong for a damaged payload.
    """
    if len(value) < PAYLOAD_AT:
        return None
    try:
        header, payload = unpack_value(value)
    except MalformedPacket:
        return None
    name, digits = header.name[:-8], header.name[-8:]
    if name != block_name(block_hash, 0)[:-8] or not set(digits) <= set("0123456789abcdef"):
        return None
    front = native.crc32(value[: header.header_bytes], crc)
    return native.crc32_combine(front, int(digits, 16), len(payload))


def open_block(value: memoryview, block_hash: bytes, layout: KVLayout | OpaqueLayout) -> tuple[int, memoryview]:
    """Return codec id and payload of a stored block, checked. Raises MalformedPacket; ForeignBlock for another block or
    layout, LaterVersion for a later release's.
    """
    header, payload = unpack_value(value)
    _check_block(header, native.crc32(payload), block_hash, layout)
    return header.codec_id, payload


def check_placed_block(
    head: memoryview, value_bytes: int, value_crc: int, block_hash: bytes, layout: KVLayout | OpaqueLayout
) -> int:
    """Check a block like ``open_block``, given its header and the CRC-32 of all its bytes; return the codec id."""
    header = unpack_header(head)
    if header.header_bytes != len(head) or header.header_bytes + header.payload_bytes != value_bytes:
        raise MalformedPacket(f"a value of {value_bytes} bytes whose header says otherwise: {header}")
    payload_crc = value_crc ^ native.crc32_combine(native.crc32(head), 0, header.payload_bytes)
    _check_block(header, payload_crc, block_hash, layout)
    return header.codec_id


def _check_block(header: ValueHeader, payload_crc: int, block_hash: bytes, layout: KVLayout | OpaqueLayout) -> None:
    if header.layout != _written(layout) or header.raw_bytes != layout.block_bytes:
        raise ForeignBlock(f"a block of {header.layout}, expected {layout}")
    expected = block_name(block_hash, 0)[:-8]
    if header.name[:-8] != expected:
        raise ForeignBlock(f"a value named {header.name!r}, expected {expected}…")
    if header.name[-8:] != f"{payload_crc:08x}":
        raise MalformedPacket("a block's payload differs from its checksum")
