"""The codec ``cachegen``: fewer bits per number than 8-bit integers, by rounding each layer as coarsely as it bears.

After CacheGen (Liu et al., SIGCOMM 2024): keys are turned back to before their positions (``turning``), numbers are
rounded in steps that grow with the layer (``steps``, ``grid``), told token-wise from an anchor or the channel's mean
(``deltas``), and entropy-coded with tables of their own channels (``sections``, ``entropy``). Only the rounding loses
anything. A block stands for itself, and so does each of its sections: no table is shared between blocks, so that any
block can be lost.

Payload, version 2, little-endian::

    0  magic "CGEN"      4  version 2       5  dtype 1      6  level 1     7  zero 1
    8  layers 4         12  kv_heads 4     16  head_dim 4  20  block_tokens 4
    24 CRC-32 of the header with this field zero, and of the table behind it
    28 per layer its key section's bytes 4, CRC-32 4, then its value section's; then the sections in this order

A section: a step code (2 bytes) per head · base of the turn (1 byte, 0 for values) · pull (1) · the channels' phases
(three bits each) · then what ``sections`` says.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from skymemory import native
from skymemory.errors import InvalidInput, LaterVersion, MalformedPacket
from skymemory.kv.chunk import Buffer
from skymemory.kv.codec.entropy import constriction
from skymemory.kv.codec.grid import MAX_PULL, PULL_LIMIT, Snapped, pack, packed_bytes, snap, unpack, unsnap
from skymemory.kv.codec.sections import decode_section, encode_section
from skymemory.kv.codec.steps import MAX_CODE, MIN_CODE, Level, Steps, level_of, step_codes, steps_of
from skymemory.kv.codec.turning import BASES, best_base, turn
from skymemory.kv.layout import KVLayout, to_float32

_MAGIC = b"CGEN"
_VERSION = 2
_HEADER = struct.Struct("<4sBBBxIIIII")
_ENTRY = struct.Struct("<II")
_DTYPES = ("float32", "float16", "bfloat16")
_LARGEST = {"float32": 3.4028234663852886e38, "float16": 65504.0, "bfloat16": 3.3895313892515355e38}

BOUND = (0.5 + PULL_LIMIT) * 2**0.5
"""Of a step: half of one by rounding, a quarter by the pull; where a pair was turned, both of a pair's in one."""


class CacheGen:
    """One named level of it; any level decodes the payloads of all. Encoding raises InvalidInput for NaN and infinity,
    and CodecUnavailable without ``constriction``, as decoding does."""

    codec_id = 10
    lossless = False

    def __init__(self, level: str = "medium", layers: Sequence[int] = (), of: int = 0) -> None:
        """``layers``: which of a model's ``of`` layers a block has, where it has not all: steps go by the model's.
        Reading needs none of it.
        """
        self.level: Level = level_of(level)
        self._layers = tuple(layers)
        self._of = of
        self.name = "cachegen" if level == "medium" else f"cachegen-{level}"

    def check(self) -> None:
        """CodecUnavailable if its library is not installed."""
        constriction()

    def encode(self, block: memoryview, layout: KVLayout) -> bytes:
        if block.nbytes != layout.block_bytes:
            raise InvalidInput(f"a block of {block.nbytes} bytes, the layout says {layout.block_bytes}")
        flat = block.cast("B")
        size = layout.block_bytes // (2 * layout.layers)
        sections = []
        for number in range(2 * layout.layers):
            part = to_float32(flat[number * size : (number + 1) * size], layout.dtype)
            if not np.isfinite(part).all():
                raise InvalidInput("a block with numbers that are not finite cannot be stored in steps")
            numbers, base = part.reshape(layout.shape[2:]), 0
            if not number % 2:
                base = best_base(numbers)
                numbers = turn(numbers, base, -1)
            layer, layers = number // 2, layout.layers
            if self._layers:
                layer, layers = self._layers[layer], self._of
            relative_step = self.level.relative_step(layer, layers, number % 2)
            sections.append(_encode_part(numbers, relative_step, base))
        table = b"".join(_ENTRY.pack(len(section), native.crc32(section)) for section in sections)
        return b"".join((_front(layout, self.level.number, table), *sections))

    def decode(self, payload: Buffer, layout: KVLayout, out: memoryview) -> None:
        if out.nbytes != layout.block_bytes:
            raise InvalidInput(f"room for {out.nbytes} bytes, the block has {layout.block_bytes}")
        target = out.cast("B")
        size = layout.block_bytes // (2 * layout.layers)
        for number, section in enumerate(_sections(memoryview(payload).cast("B"), layout)):
            numbers = _decode_part(section, layout)
            target[number * size : (number + 1) * size] = _to_bytes(numbers, layout.dtype)


def steps_in(payload: Buffer, layout: KVLayout) -> Steps:
    """The steps (layers, 2, kv_heads) of a payload: no decoded number is farther than ``BOUND`` of its head's steps
    from the original, but for the rounding to the layout's dtype. MalformedPacket as ``decode`` raises it."""
    sections = _sections(memoryview(payload).cast("B"), layout)
    steps = [steps_of(_codes(section, layout)) for section in sections]
    return np.stack(steps).reshape(layout.layers, 2, layout.kv_heads)


def _front(layout: KVLayout, level: int, table: bytes) -> bytes:
    dtype = _DTYPES.index(layout.dtype)
    numbers = (layout.layers, layout.kv_heads, layout.head_dim, layout.block_tokens)
    blank = _HEADER.pack(_MAGIC, _VERSION, dtype, level, *numbers, 0)
    return _HEADER.pack(_MAGIC, _VERSION, dtype, level, *numbers, native.crc32(blank + table)) + table


def _sections(view: memoryview, layout: KVLayout) -> list[memoryview]:
    """The sections of a payload of this ``layout``, every one as it was written."""
    begin = _HEADER.size + 2 * layout.layers * _ENTRY.size
    if len(view) < begin:
        raise MalformedPacket(f"a cachegen payload of {len(view)} bytes, its table alone ends at {begin}")
    magic, version = bytes(view[:4]), view[4]
    if magic == _MAGIC and version > _VERSION:
        raise LaterVersion(f"a cachegen payload of version {version}, this release reads version {_VERSION}")
    if magic != _MAGIC or version != _VERSION:
        raise MalformedPacket(f"not a cachegen payload of version {_VERSION}: it begins with {bytes(view[:5]).hex()}")
    # Whatever the header says must be what this layout would have it say.
    table = bytes(view[_HEADER.size : begin])
    if view[: _HEADER.size] != _front(layout, view[6], table)[: _HEADER.size]:
        raise MalformedPacket("a cachegen payload of another layout, or one that is damaged")
    found = []
    for length, crc in _ENTRY.iter_unpack(table):
        section = view[begin : begin + length]
        if len(section) != length or native.crc32(section) != crc:
            raise MalformedPacket("a cachegen section that is cut off or damaged")
        begin += length
        found.append(section)
    if begin != len(view):
        raise MalformedPacket(f"a cachegen payload of {len(view)} bytes whose sections end at {begin}")
    return found


def _codes(section: memoryview, layout: KVLayout) -> npt.NDArray[np.int16]:
    if len(section) < 2 * layout.kv_heads:
        raise MalformedPacket(f"a cachegen section of {len(section)} bytes for {layout.kv_heads} heads")
    codes = np.frombuffer(section[: 2 * layout.kv_heads], "<i2").astype(np.int16)
    if codes.min() < MIN_CODE or codes.max() > MAX_CODE:
        raise MalformedPacket(f"cachegen step codes from {codes.min()} to {codes.max()}")
    return codes


def _encode_part(numbers: npt.NDArray[np.float32], relative_step: float, base: int) -> bytes:
    """One layer's keys or values (kv_heads, block_tokens, head_dim), turned back by ``base`` already."""
    heads, tokens, head_dim = numbers.shape
    codes = step_codes(numbers, relative_step)
    scaled = (numbers / steps_of(codes)[:, None, None]).transpose(0, 2, 1)
    snapped = snap(np.ascontiguousarray(scaled).reshape(heads * head_dim, tokens))
    front = codes.astype("<i2").tobytes() + bytes((base, snapped.pull)) + pack(snapped.phases)
    return front + encode_section(snapped.quotients)


def _decode_part(section: memoryview, layout: KVLayout) -> npt.NDArray[np.float32]:
    codes = _codes(section, layout)
    heads, tokens, head_dim = layout.shape[2:]
    channels = heads * head_dim
    at = 2 * heads
    begin = at + 2 + packed_bytes(channels)
    if len(section) < begin:
        raise MalformedPacket(f"a cachegen section of {len(section)} bytes, its front alone has {begin}")
    base, pull = section[at], section[at + 1]
    if base >= len(BASES) or (base and head_dim % 2) or pull > MAX_PULL:
        raise MalformedPacket(f"a cachegen section turned by base {base} and pulled by {pull}")
    phases = unpack(section[at + 2 : begin], channels)
    scaled = unsnap(Snapped(decode_section(section[begin:], channels, tokens), phases, pull))
    numbers = scaled.reshape(heads, head_dim, tokens).transpose(0, 2, 1)
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = np.multiply(numbers, steps_of(codes)[:, None, None], dtype=np.float32, order="C")
        numbers = turn(numbers, base, 1)
    largest = np.float32(_LARGEST[layout.dtype])
    return np.clip(numbers, -largest, largest)


def _to_bytes(numbers: npt.NDArray[np.float32], dtype: str) -> bytes:
    """Rounded to nearest, ties to even; the inverse of ``to_float32`` for what is finite."""
    if dtype != "bfloat16":
        return numbers.astype("<f4" if dtype == "float32" else "<f2").tobytes()
    wide = np.ascontiguousarray(numbers).view(np.uint32)
    odd = wide >> np.uint32(16) & np.uint32(1)
    return (wide + (odd + np.uint32(0x7FFF)) >> np.uint32(16)).astype("<u2").tobytes()


CACHEGEN = CacheGen()
