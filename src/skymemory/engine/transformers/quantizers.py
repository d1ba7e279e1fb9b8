"""Codecs of 8 bits per number by optimum-quanto and by HQQ: about half of the bytes of a 16-bit cache, small loss.

A block is rows of ``head_dim`` numbers (by layer, key or value, head and token), each with a scale, so an outlier
affects one row. Payloads are little-endian; the layout determines their sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from skymemory.engine.transformers.kv_cache import TORCH_DTYPES
from skymemory.errors import CodecUnavailable, InvalidInput, MalformedPacket
from skymemory.installation import install_command
from skymemory.kv.block import KVLayout
from skymemory.kv.codec.cachegen import LEVELS, CacheGen
from skymemory.kv.codec.codec_base import RAW, Codec

_SCALE_BYTES = 4


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to this thread: for a block a second costs more than it saves."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Quanto8:
    """Codec by optimum-quanto: int8 per number, then float32 scale per row: number = int8 · scale."""

    name = "quanto8"
    codec_id = 8
    lossless = False

    @one_thread()
    def encode(self, block: memoryview, layout: KVLayout) -> bytes:
        quanto = _quanto()
        rows = _rows(block, layout)
        scale = quanto.absmax_scale(rows, qtype=quanto.qint8, axis=0)
        # A row of zeros has scale 0: any scale will do.
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        quantized = quanto.quantize_weight(rows, qtype=quanto.qint8, axis=0, scale=scale, optimized=False)
        return bytes(quantized._data.numpy().tobytes()) + _floats(quantized._scale)

    @one_thread()
    def decode(self, payload: bytes | bytearray | memoryview, layout: KVLayout, out: memoryview) -> None:
        quanto = _quanto()
        data, (scale,) = _parts(payload, layout, torch.int8, scales=1)
        quantized = quanto.WeightQBytesTensor(quanto.qint8, 0, data.shape, data.stride(), data, scale, None)
        _write(quantized.dequantize(), layout, out)


class Hqq8:
    """Codec by HQQ: uint8 per number, then float32 scale and float32 zero per row: number = (uint8 − zero) · scale."""

    name = "hqq8"
    codec_id = 9
    lossless = False

    @one_thread()
    def encode(self, block: memoryview, layout: KVLayout) -> bytes:
        data, meta = _hqq().quantize(
            _rows(block, layout),
            nbits=8,
            axis=1,
            group_size=layout.head_dim,
            # At 8 bits it takes 4 % off the error for 30 times the time.
            optimize=False,
            compute_dtype=torch.float32,
            device="cpu",
        )
        return bytes(data.numpy().tobytes()) + _floats(meta["scale"]) + _floats(meta["zero"])

    @one_thread()
    def decode(self, payload: bytes | bytearray | memoryview, layout: KVLayout, out: memoryview) -> None:
        data, (scale, zero) = _parts(payload, layout, torch.uint8, scales=2)
        meta = {
            "nbits": 8,
            "axis": 1,
            "group_size": layout.head_dim,
            "shape": data.shape,
            "scale": scale,
            "zero": zero,
            "packing": "8bit_u8",
            "view_as_float": False,
            "compute_dtype": torch.float32,
        }
        _write(_hqq().dequantize(data, meta), layout, out)


_ALL: tuple[Codec, ...] = (RAW, Quanto8(), Hqq8(), *map(CacheGen, LEVELS))
CODECS = {codec.name: codec for codec in _ALL}


def codec_of(name: str) -> Codec:
    """Return a codec ready to use. Raises CodecUnavailable if its package is missing."""
    if name not in CODECS:
        raise InvalidInput(f"no codec {name!r}: choose one of {', '.join(CODECS)}")
    if name == Quanto8.name:
        _quanto()
    if name == Hqq8.name:
        _hqq()
    chosen = CODECS[name]
    if isinstance(chosen, CacheGen):
        chosen.check()
    return chosen


def of_layers(codec: Codec, layers: Sequence[int], of: int) -> Codec:
    """Return the codec for blocks of these layers: rounding by layer needs their true numbers."""
    if isinstance(codec, CacheGen) and len(layers) < of:
        return CacheGen(codec.level.name, layers, of)
    return codec


def readable_codecs(chosen: Codec) -> list[Codec]:
    """Return the codecs that may be read: lossy only if ``chosen`` is lossy."""
    return [codec for codec in CODECS.values() if codec.lossless or not chosen.lossless]


@functools.cache
def _quanto() -> Any:
    try:
        from optimum import quanto
    except ImportError as error:
        raise CodecUnavailable(_missing("quanto8", "optimum-quanto", error)) from error
    return quanto


@functools.cache
def _hqq() -> Any:
    try:
        from hqq.core.quantize import Quantizer
    except ImportError as error:
        raise CodecUnavailable(_missing("hqq8", "hqq", error)) from error
    return Quantizer


def _missing(codec: str, package: str, error: ImportError) -> str:
    return f'codec {codec!r} needs {package} ({error}): use codec="raw", or {install_command("hf")}'


def _row_count(layout: KVLayout) -> int:
    return layout.layers * 2 * layout.kv_heads * layout.block_tokens


def _rows(block: memoryview, layout: KVLayout) -> torch.Tensor:
    """Return float32 rows."""
    if block.nbytes != layout.block_bytes:
        raise InvalidInput(f"a block of {block.nbytes} bytes, the layout says {layout.block_bytes}")
    numbers = torch.frombuffer(block, dtype=TORCH_DTYPES[layout.dtype])
    rows = numbers.view(_row_count(layout), layout.head_dim).to(torch.float32)
    if not torch.isfinite(rows.sum()) and not torch.isfinite(rows).all():
        raise InvalidInput("a block with numbers that are not finite cannot be stored in 8 bits")
    return rows


def _parts(
    payload: bytes | bytearray | memoryview, layout: KVLayout, dtype: torch.dtype, scales: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return numbers (rows, head_dim) and columns per row."""
    rows = _row_count(layout)
    numbers = rows * layout.head_dim
    view = memoryview(payload).cast("B")
    expected = numbers + scales * rows * _SCALE_BYTES
    if view.nbytes != expected:
        raise MalformedPacket(f"an 8-bit payload of {view.nbytes} bytes, the layout says {expected}")
    data = torch.frombuffer(view[:numbers], dtype=dtype).view(rows, layout.head_dim)
    columns = np.frombuffer(view[numbers:], dtype="<f4").reshape(scales, rows, 1)
    if not np.isfinite(columns).all():
        raise MalformedPacket("an 8-bit payload whose scales are not finite")
    return data, [torch.from_numpy(column) for column in columns]


def _floats(column: torch.Tensor) -> bytes:
    return bytes(column.to(torch.float32).contiguous().numpy().astype("<f4", copy=False).tobytes())


def _write(rows: torch.Tensor, layout: KVLayout, out: memoryview) -> None:
    if out.nbytes != layout.block_bytes:
        raise InvalidInput(f"room for {out.nbytes} bytes, the block has {layout.block_bytes}")
    torch.frombuffer(out, dtype=TORCH_DTYPES[layout.dtype]).copy_(rows.reshape(-1))
