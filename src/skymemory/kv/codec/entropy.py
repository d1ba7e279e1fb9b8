"""Whole numbers to about as many bits as they carry: ANS by the library ``constriction`` with empirical tables.

``Writer`` collects runs of symbols, each with the table of how often they occur, and turns them into bytes at once;
``Reader`` gives the runs back in the order they were written. Tables stand in front of the coded words::

    section:  u32 bytes of the tables · tables · u32 words of the ANS coder, little-endian
    table:    u8 first symbol · u8 symbols − 1 · per symbol how often in 4096, LEB128   (one symbol alone: no frequency)
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from skymemory.errors import CodecUnavailable, MalformedPacket

Ints = npt.NDArray[np.int32]

TOTAL = 4096
"""What the frequencies of a table add up to: few enough for two bytes each, enough for symbols of 12 bits."""
MAX_BITS = 24
"""Numbers written one by one are below 2 ** 24 either side of 0."""


@functools.cache
def constriction() -> Any:
    """The library; CodecUnavailable where it is not installed."""
    try:
        import constriction as library
    except ImportError as error:
        hint = "pip install 'skymemory[cachegen]', or use codec=\"raw\""
        raise CodecUnavailable(f"codec 'cachegen' needs constriction ({error}): {hint}") from error
    return library


class Writer:
    """Runs of symbols, to become one section."""

    def __init__(self) -> None:
        self._runs: list[tuple[Ints, Any]] = []
        self._tables = bytearray()

    def symbols(self, symbols: Ints) -> None:
        """A run of symbols 0..255, with their own table. An empty run has none."""
        if not len(symbols):
            return
        first = int(symbols.min())
        shifted = symbols - first
        counts = np.bincount(shifted)
        self._tables += bytes((first, len(counts) - 1))
        if len(counts) > 1:
            frequencies = _frequencies(counts)
            for frequency in frequencies.tolist():
                short = frequency < 128
                self._tables += bytes((frequency,) if short else (frequency & 127 | 128, frequency >> 7))
            self._runs.append((shifted, _model(frequencies)))

    def bits(self, numbers: Ints, width: int) -> None:
        """A run of numbers below 2 ** width, all as likely."""
        if width and len(numbers):
            self._runs.append((numbers, constriction().stream.model.Uniform(1 << width)))

    def numbers(self, numbers: Ints) -> None:
        """A run of any numbers of up to MAX_BITS bits and sign: how many bits each has, and then those bits."""
        folded = numbers << 1 ^ numbers >> 31
        widths = np.frexp(folded.astype(np.float64))[1].astype(np.int32)
        self.symbols(widths)
        for width in range(2, int(widths.max(initial=0)) + 1):
            self.bits(folded[widths == width] & (1 << width - 1) - 1, width - 1)

    def section(self) -> bytes:
        """Everything written so far."""
        coder = constriction().stream.stack.AnsCoder()
        for symbols, model in reversed(self._runs):
            coder.encode_reverse(np.ascontiguousarray(symbols, np.int32), model)
        words: bytes = coder.get_compressed().astype("<u4").tobytes()
        return len(self._tables).to_bytes(4, "little") + bytes(self._tables) + words


class Reader:
    """The runs of one section. Whatever is wrong with its bytes raises MalformedPacket; nothing larger than what was
    asked for is ever allocated."""

    def __init__(self, section: memoryview) -> None:
        if len(section) < 4:
            raise MalformedPacket(f"a cachegen section of {len(section)} bytes")
        end = 4 + int.from_bytes(section[:4], "little")
        if end > len(section) or (len(section) - end) % 4:
            raise MalformedPacket(f"a cachegen section of {len(section)} bytes with {end - 4} bytes of tables")
        self._tables = bytes(section[4:end])
        self._at = 0
        words = np.frombuffer(section[end:], "<u4").astype(np.uint32)
        if len(words) and not words[-1]:
            raise MalformedPacket("a cachegen section that ends in a zero word")
        self._coder = constriction().stream.stack.AnsCoder(words)

    def symbols(self, count: int) -> Ints:
        """A run of ``count`` symbols."""
        if not count:
            return np.empty(0, np.int32)
        first, last = self._byte(), self._byte()
        if first + last > 255:
            raise MalformedPacket(f"a cachegen table of symbols up to {first + last}")
        if not last:
            return np.full(count, first, np.int32)
        frequencies = np.array([self._varint() for _ in range(last + 1)], np.int64)
        if frequencies.sum() != TOTAL:
            raise MalformedPacket(f"a cachegen table whose frequencies add up to {frequencies.sum()}")
        decoded: Ints = self._coder.decode(_model(frequencies), count)
        return decoded + np.int32(first)

    def bits(self, count: int, width: int) -> Ints:
        """A run of ``count`` numbers below 2 ** width."""
        if not width or not count:
            return np.zeros(count, np.int32)
        decoded: Ints = self._coder.decode(constriction().stream.model.Uniform(1 << width), count)
        return decoded

    def numbers(self, count: int) -> Ints:
        """A run of ``count`` numbers of any size."""
        widths = self.symbols(count)
        if widths.max(initial=0) > MAX_BITS + 1:
            raise MalformedPacket(f"a cachegen number of {widths.max()} bits")
        folded = (widths > 0).astype(np.int32) << np.maximum(widths - 1, 0)
        for width in range(2, int(widths.max(initial=0)) + 1):
            chosen = np.flatnonzero(widths == width)
            folded[chosen] |= self.bits(len(chosen), width - 1)
        return folded >> 1 ^ -(folded & 1)

    def end(self) -> None:
        """Nothing may be left."""
        if self._at != len(self._tables) or not self._coder.is_empty():
            raise MalformedPacket("a cachegen section with more in it than its block has")

    def _byte(self) -> int:
        if self._at >= len(self._tables):
            raise MalformedPacket("a cachegen section whose tables end early")
        self._at += 1
        return self._tables[self._at - 1]

    def _varint(self) -> int:
        low = self._byte()
        return low if low < 128 else low & 127 | self._byte() << 7


def _model(frequencies: npt.NDArray[np.int64]) -> Any:
    return constriction().stream.model.Categorical(frequencies.astype(np.float32), perfect=False)


def _frequencies(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """``counts`` scaled to add up to TOTAL, at least 1 for what occurs; what rounding leaves is the commonest's."""
    scaled: npt.NDArray[np.int64] = counts * (TOTAL - len(counts)) // counts.sum() + (counts > 0)
    scaled[np.argmax(scaled)] += TOTAL - scaled.sum()
    return scaled
