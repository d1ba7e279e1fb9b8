"""Codec ``cachegen``: rounds each layer as coarsely as it tolerates. Follows CacheGen (Liu et al., SIGCOMM 2024):

1. rotate keys back to before their rotary positions;
2. round numbers in steps that grow with the layer: the only lossy step;
3. encode a channel's numbers as differences from an anchor token or the channel's mean;
4. entropy-code the differences with the block's own tables (steps 2-4: ``entropy``).

Payload, version 2, little-endian::

    0  magic "CGEN"      4  version 2       5  dtype 1      6  level 1     7  zero 1
    8  layers 4         12  kv_heads 4     16  head_dim 4  20  block_tokens 4
    24 CRC-32 of the header with this field zero, and of the table after it
    28 per layer its key section's bytes 4, CRC-32 4, then its value section's; then the sections in this order

A section: a step code (2 bytes) per head · rotation base (1 byte, 0 for values) · pull (1) · the channels' phases (3
bits each) · the runs of ``entropy.encode_section``.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from skymemory import native
from skymemory.errors import InvalidInput, LaterVersion, MalformedPacket
from skymemory.kv.block import Buffer, KVLayout, to_float32
from skymemory.kv.codec.entropy import (
    MAX_PULL,
    Snapped,
    constriction,
    decode_section,
    encode_section,
    pack,
    packed_bytes,
    snap,
    unpack,
    unsnap,
)

# --- step 1: keys without their rotary position embedding ---
#
# Rotary embeddings (Su et al., 2021) rotate each pair of a key's channels by an angle proportional to the position. The
# mean of a channel over tokens rotates with it and then looks like change. Rotating a block's keys back by their
# position in the block leaves each pair rotated by the same angle for the entire block, so means are means again. Pairs
# are channels i and i + head_dim / 2, as in Llama and its relatives. A codec knows no model, so the encoder tries the
# usual bases and uses the base that leaves the least change, if any does; a byte of the payload names it. The rotation
# loses at most the last bit of a float32.


Floats = npt.NDArray[np.float32]

BASES = (0.0, 1e4, 5e5, 1e6)
"""Rotation bases by number in the payload: none; Llama, Llama 2, Mistral 7B v0.1; Llama 3; Qwen 2, Mistral."""
_WORTH = 0.95


def best_base(keys: Floats) -> int:
    """Return the number of the rotary base that explains most variation of ``keys`` (heads, tokens, head_dim) over
    tokens; 0: none.
    """
    _, tokens, head_dim = keys.shape
    if head_dim % 2 or tokens < 2:
        return 0
    exact = keys.astype(np.float64)
    first, second = exact[..., : head_dim // 2], exact[..., head_dim // 2 :]
    # A rotation keeps the sum of the squares, so the variation is that sum minus the share of the means.
    squares = float(np.square(exact).sum())
    spreads = [squares - float(np.square(exact.sum(axis=1)).sum()) / tokens]
    for number in range(1, len(BASES)):
        cosines, sines = _angles(number, tokens, head_dim)
        back = _summed(first, cosines) + _summed(second, sines), _summed(second, cosines) - _summed(first, sines)
        spreads.append(squares - float(sum(np.square(part).sum() for part in back)) / tokens)
    best = int(np.argmin(spreads))
    return best if spreads[best] < _WORTH * spreads[0] else 0


def _summed(numbers: npt.NDArray[np.float64], factors: Floats) -> npt.NDArray[np.float64]:
    summed: npt.NDArray[np.float64] = np.einsum("htp,tp->hp", numbers, factors)
    return summed


def turn(keys: Floats, base: int, direction: int) -> Floats:
    """Rotate keys by their tokens' positions like the rotary embedding (direction 1), or back (-1)."""
    if not base:
        return keys
    _, tokens, head_dim = keys.shape
    cosines, sines = _angles(base, tokens, head_dim)
    first, second = keys[..., : head_dim // 2], keys[..., head_dim // 2 :]
    sines = sines if direction > 0 else -sines
    return np.concatenate((first * cosines - second * sines, second * cosines + first * sines), axis=-1)


@functools.lru_cache(maxsize=16)
def _angles(base: int, tokens: int, head_dim: int) -> tuple[Floats, Floats]:
    rates = BASES[base] ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    angles = np.arange(tokens)[:, None] * rates
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


# Rounding: a step per layer, head and key or value, chosen by a named level.
#
# A step is the distance between neighbouring numbers that can be stored (``entropy.snap``). It is relative to how much
# the head's channels vary from token to token in this block, on a grid of quarter octaves (2 ** (code / 4)), so that
# two bytes hold it. Steps differ by third of the layers, as in CacheGen, and between keys and values: keys decide which
# tokens get attention, and tolerate less rounding. ``medium`` was set by how far each layer's rounding moves the
# predictions of the shipped small model; the others are an eighth, a half and 1.4 of it.


Steps = npt.NDArray[np.float32]

MIN_CODE, MAX_CODE = -480, 500
MAX_QUOTIENT = 1 << 20
"""Largest number of steps from 0: float32 still resolves halves there."""


@dataclass(frozen=True, slots=True)
class Level:
    """Precision level: steps for the three thirds of the layers, in a channel's standard deviations."""

    name: str
    number: int
    keys: tuple[float, float, float]
    values: tuple[float, float, float]

    def relative_step(self, layer: int, layers: int, part: int) -> float:
        return (self.keys, self.values)[part][3 * layer // layers]


LEVELS = {
    level.name: level
    for level in (
        Level("finest", 1, (0.125, 0.16, 0.08), (0.15, 0.25, 0.15)),
        Level("fine", 2, (0.5, 0.65, 0.325), (0.6, 1.0, 0.6)),
        Level("medium", 3, (1.0, 1.3, 0.65), (1.2, 2.05, 1.2)),
        Level("coarse", 4, (1.4, 1.8, 0.9), (1.7, 2.9, 1.7)),
    )
}


def level_of(name: str) -> Level:
    if name not in LEVELS:
        raise InvalidInput(f"no cachegen level {name!r}: choose one of {', '.join(LEVELS)}")
    return LEVELS[name]


def step_codes(numbers: npt.NDArray[np.float32], relative_step: float) -> npt.NDArray[np.int16]:
    """Return a step per head, ``relative_step`` times its deviation, as code for 2 ** (code / 4)."""
    exact = numbers.astype(np.float64)
    tokens = numbers.shape[1]
    centre = exact.mean(axis=1, keepdims=True) if tokens > 1 else 0.0
    spread = np.sqrt(np.square(exact - centre).sum(axis=1).mean(axis=1) / max(1, tokens - 1))
    tiny = 2.0 ** (MIN_CODE / 4)
    codes = np.floor(4 * np.log2(np.maximum(spread * relative_step, tiny)))
    # A head that hardly varies compared with its largest number is kept to a millionth of that number.
    least = np.ceil(4 * np.log2(np.maximum(np.abs(exact).max(axis=(1, 2)) / MAX_QUOTIENT, tiny)))
    chosen: npt.NDArray[np.int16] = np.minimum(np.maximum(codes, least), MAX_CODE).astype(np.int16)
    return chosen


def steps_of(codes: npt.NDArray[np.int16]) -> Steps:
    # 2 ** (code / 4), the same on every machine.
    octaves, quarters = np.divmod(codes.astype(np.int32), 4)
    return np.ldexp(_QUARTERS[quarters], octaves)


_QUARTERS = np.array([1.0, 1.189207115, 1.4142135624, 1.6817928305], np.float32)


_MAGIC = b"CGEN"
_VERSION = 2
_HEADER = struct.Struct("<4sBBBxIIIII")
_ENTRY = struct.Struct("<II")
_DTYPES = ("float32", "float16", "bfloat16")
_LARGEST = {"float32": 3.4028234663852886e38, "float16": 65504.0, "bfloat16": 3.3895313892515355e38}


class CacheGen:
    """Codec of a named level; any level decodes the payloads of all.

    InvalidInput for NaN and infinity; CodecUnavailable without ``constriction``.
    """

    codec_id = 10
    lossless = False

    def __init__(self, level: str = "medium", layers: Sequence[int] = (), of: int = 0) -> None:
        """``layers``: numbers of a block's layers if it has only some of ``of``; for encoding."""
        self.level: Level = level_of(level)
        self._layers = tuple(layers)
        self._of = of
        self.name = "cachegen" if level == "medium" else f"cachegen-{level}"

    def check(self) -> None:
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


def _front(layout: KVLayout, level: int, table: bytes) -> bytes:
    dtype = _DTYPES.index(layout.dtype)
    numbers = (layout.layers, layout.kv_heads, layout.head_dim, layout.block_tokens)
    blank = _HEADER.pack(_MAGIC, _VERSION, dtype, level, *numbers, 0)
    return _HEADER.pack(_MAGIC, _VERSION, dtype, level, *numbers, native.crc32(blank + table)) + table


def _sections(view: memoryview, layout: KVLayout) -> list[memoryview]:
    """Return a payload's sections, after checks of header and checksums."""
    begin = _HEADER.size + 2 * layout.layers * _ENTRY.size
    if len(view) < begin:
        raise MalformedPacket(f"a cachegen payload of {len(view)} bytes, its table alone ends at {begin}")
    magic, version = bytes(view[:4]), view[4]
    if magic == _MAGIC and version > _VERSION:
        raise LaterVersion(f"a cachegen payload of version {version}, this release reads version {_VERSION}")
    if magic != _MAGIC or version != _VERSION:
        raise MalformedPacket(f"not a cachegen payload of version {_VERSION}: it begins with {bytes(view[:5]).hex()}")
    # The header must be exactly what this layout gives.
    table = bytes(view[_HEADER.size : begin])
    if view[: _HEADER.size] != _front(layout, view[6], table)[: _HEADER.size]:
        raise MalformedPacket("a cachegen payload of another layout, or one that is damaged")
    sections = []
    for length, crc in _ENTRY.iter_unpack(table):
        section = view[begin : begin + length]
        if len(section) != length or native.crc32(section) != crc:
            raise MalformedPacket("a cachegen section that is cut off or damaged")
        begin += length
        sections.append(section)
    if begin != len(view):
        raise MalformedPacket(f"a cachegen payload of {len(view)} bytes whose sections end at {begin}")
    return sections


def _codes(section: memoryview, layout: KVLayout) -> npt.NDArray[np.int16]:
    if len(section) < 2 * layout.kv_heads:
        raise MalformedPacket(f"a cachegen section of {len(section)} bytes for {layout.kv_heads} heads")
    codes = np.frombuffer(section[: 2 * layout.kv_heads], "<i2").astype(np.int16)
    if codes.min() < MIN_CODE or codes.max() > MAX_CODE:
        raise MalformedPacket(f"cachegen step codes from {codes.min()} to {codes.max()}")
    return codes


def _encode_part(numbers: npt.NDArray[np.float32], relative_step: float, base: int) -> bytes:
    heads, tokens, head_dim = numbers.shape
    codes = step_codes(numbers, relative_step)
    scaled = (numbers / steps_of(codes)[:, None, None]).transpose(0, 2, 1)
    snapped = snap(np.ascontiguousarray(scaled).reshape(heads * head_dim, tokens))
    front = codes.astype("<i2").tobytes() + bytes((base, snapped.pull)) + pack(snapped.phases)
    return front + encode_section(snapped.quotients)


def _decode_part(section: memoryview, layout: KVLayout) -> npt.NDArray[np.float32]:
    """Decode a section to keys or values (heads, tokens, head_dim)."""
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
    if dtype != "bfloat16":
        return numbers.astype("<f4" if dtype == "float32" else "<f2").tobytes()
    wide = np.ascontiguousarray(numbers).view(np.uint32)
    odd = wide >> np.uint32(16) & np.uint32(1)
    return (wide + (odd + np.uint32(0x7FFF)) >> np.uint32(16)).astype("<u2").tobytes()
