"""Rounding, prediction and entropy coding of ``cachegen``: ANS (library ``constriction``) with empirical tables.

Runs of symbols, each with its table of frequencies; the tables precede the coded words::

    section:  u32 bytes of the tables · tables · u32 words of the ANS coder, little-endian
    table:    u8 first symbol · u8 symbols − 1 · per symbol its frequency in 4096, LEB128 (none for a single symbol)
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from skymemory.errors import CodecUnavailable, MalformedPacket
from skymemory.installation import install_command

Ints = npt.NDArray[np.int32]

TOTAL = 4096
MAX_BITS = 24


@functools.cache
def constriction() -> Any:
    try:
        import constriction as library
    except ImportError as error:
        hint = f'use codec="raw", or {install_command("cachegen")}'
        raise CodecUnavailable(f"codec 'cachegen' needs constriction ({error}): {hint}") from error
    return library


class Writer:
    """Encoder of a section: collects symbols, with tables of their frequencies, and bits, for an ANS coder."""

    def __init__(self) -> None:
        self._runs: list[tuple[Ints, Any]] = []
        self._tables = bytearray()

    def symbols(self, symbols: Ints) -> None:
        """Add symbols in 0..255, with a table of their frequencies."""
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
        if width and len(numbers):
            self._runs.append((numbers, constriction().stream.model.Uniform(1 << width)))

    def numbers(self, numbers: Ints) -> None:
        """Write numbers of up to MAX_BITS bits and sign: first the widths, then the bits."""
        folded = numbers << 1 ^ numbers >> 31
        widths = np.frexp(folded.astype(np.float64))[1].astype(np.int32)
        self.symbols(widths)
        for width in range(2, int(widths.max(initial=0)) + 1):
            self.bits(folded[widths == width] & (1 << width - 1) - 1, width - 1)

    def section(self) -> bytes:
        coder = constriction().stream.stack.AnsCoder()
        for symbols, model in reversed(self._runs):
            coder.encode_reverse(np.ascontiguousarray(symbols, np.int32), model)
        words: bytes = coder.get_compressed().astype("<u4").tobytes()
        return len(self._tables).to_bytes(4, "little") + bytes(self._tables) + words


class Reader:
    """Decoder of a section. Invalid bytes raise MalformedPacket; nothing larger than requested is allocated."""

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
        """Read the next table, and decode ``count`` symbols."""
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
        if not width or not count:
            return np.zeros(count, np.int32)
        decoded: Ints = self._coder.decode(constriction().stream.model.Uniform(1 << width), count)
        return decoded

    def numbers(self, count: int) -> Ints:
        """Decode what ``Writer.numbers`` wrote."""
        widths = self.symbols(count)
        if widths.max(initial=0) > MAX_BITS + 1:
            raise MalformedPacket(f"a cachegen number of {widths.max()} bits")
        folded = (widths > 0).astype(np.int32) << np.maximum(widths - 1, 0)
        for width in range(2, int(widths.max(initial=0)) + 1):
            chosen = np.flatnonzero(widths == width)
            folded[chosen] |= self.bits(len(chosen), width - 1)
        return folded >> 1 ^ -(folded & 1)

    def end(self) -> None:
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
    scaled: npt.NDArray[np.int64] = counts * (TOTAL - len(counts)) // counts.sum() + (counts > 0)
    scaled[np.argmax(scaled)] += TOTAL - scaled.sum()
    return scaled


# --- sections: a layer's keys or values as integers, to bytes and back ---
#
# Channels of similar variance share a class, and each class has its own table: numbers are split into low bits, which
# are nearly random and stored unchanged, and a high part, which is coded with the table. A high part beyond ±``_FAR``
# is an escape; the complete number follows at the end.
#
# Runs of a section, in order: kind (class and way) per channel · base per channel · per class, from the smallest: high
# parts, then low bits · escaped numbers. Within a class channel by channel, token by token.


# Class 0: all differences are 0. Class c: on average below 2 ** ((c − 5) / 2).
_CLASSES = 48
_LIMITS = 2.0 ** ((np.arange(1, _CLASSES) - 5) / 2)
_LEAST_NUMBERS = 1024  # least numbers of a class: a table costs about 20 bytes
_FAR = 31
_ESCAPE = 2 * _FAR + 1


def encode_section(quotients: Ints) -> bytes:
    """Encode ``quotients`` (channels, tokens), each within ±2 ** 21."""
    ways, bases, differences = split(quotients)
    classes = _classes(differences)
    writer = Writer()
    writer.symbols(classes * len(GROUPS) + ways)
    writer.numbers(bases)
    escaped = []
    for number in np.unique(classes):
        if number:
            run = differences[classes == number].ravel()
            low_bits = _low_bits(int(number))
            high = run >> low_bits
            is_far = np.abs(high) > _FAR
            is_near = ~is_far
            writer.symbols(np.where(is_near, high + _FAR, _ESCAPE))
            writer.bits(run[is_near] & (1 << low_bits) - 1, low_bits)
            escaped.append(run[is_far])
    writer.numbers(np.concatenate(escaped) if escaped else np.empty(0, np.int32))
    return writer.section()


def decode_section(section: memoryview, channels: int, tokens: int) -> Ints:
    """Return the quotients (channels, tokens); MalformedPacket for an invalid section."""
    reader = Reader(section)
    classes, ways = np.divmod(reader.symbols(channels), len(GROUPS))
    if classes.max() >= _CLASSES:
        raise MalformedPacket(f"a cachegen channel of class {classes.max()}")
    bases = reader.numbers(channels)
    differences = np.zeros((channels, tokens), np.int32)
    escapes: list[tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]] = []
    for number in np.unique(classes):
        if number:
            rows = np.flatnonzero(classes == number)
            low_bits = _low_bits(int(number))
            high = reader.symbols(len(rows) * tokens)
            if high.max() > _ESCAPE:
                raise MalformedPacket(f"a cachegen symbol {high.max()}")
            far = np.flatnonzero(high == _ESCAPE)
            run = high - _FAR << low_bits
            if low_bits:
                near = np.flatnonzero(high != _ESCAPE)
                run[near] |= reader.bits(len(near), low_bits)
            differences[rows] = run.reshape(len(rows), tokens)
            escapes.append((rows[far // tokens], far % tokens))
    if escapes:
        positions = tuple(np.concatenate(parts) for parts in zip(*escapes, strict=True))
        differences[positions] = reader.numbers(len(positions[0]))
    reader.end()
    return join(ways.astype(np.uint8), bases, differences)


def _classes(differences: Ints) -> Ints:
    """Return a class per channel, by mean difference; a small class joins the next."""
    tokens = differences.shape[1]
    sizes = np.abs(differences).sum(axis=1, dtype=np.int64)
    classes = np.searchsorted(_LIMITS * tokens, sizes, side="right").astype(np.int32) + 1
    classes = np.where(sizes == 0, 0, np.minimum(classes, _CLASSES - 1)).astype(np.int32)
    channels = np.bincount(classes, minlength=_CLASSES)
    present = [number for number in range(1, _CLASSES) if channels[number]]
    for number, following in pairwise(present):
        if channels[number] * tokens < _LEAST_NUMBERS:
            classes[classes == number] = following
            channels[following] += channels[number]
    return classes


def _low_bits(number: int) -> int:
    return max(0, (number - 5) // 2 - 2)


# --- rounding: a channel's numbers to integers (counts of steps) and back; the only lossy part ---
#
# Steps are as large as a channel's spread, so the grid's offset and the read-back points matter:
#
# - the grid of a channel is shifted by eighths of a step (its *phase*) so that the channel's mean is a grid point: the
#   most frequent numbers then share one cell rather than two;
# - away from the mean, numbers are more frequent on the side of their cell that is nearer to the mean. So a cell is
#   read back as a point nearer to the mean by a fraction of a step (the *pull*). A section has a single pull: that with
#   the least error.
#
# Measured on a trained model's values in steps of two deviations: a tenth of a bit per number and a fifth of the
# squared error less. Both are the encoder's choice and in the payload; the pull moves no number by more than a quarter
# of a step.


Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

PHASES = 8
_PULL_PARTS = 64
MAX_PULL = 16


@dataclass(frozen=True, slots=True)
class Snapped:
    """Numbers on grids: integers (channels, tokens), phases (channels,), and a pull in 64ths."""

    quotients: Ints
    phases: Bytes
    pull: int


def snap(scaled: Floats) -> Snapped:
    """Round ``scaled`` (channels, tokens) to grids through the channels' means."""
    means = scaled.mean(axis=1, dtype=np.float64)
    phases = (np.rint((means - np.floor(means)) * PHASES).astype(np.int64) % PHASES).astype(np.uint8)
    shifts = (phases / np.float32(PHASES)).astype(np.float32)[:, None]
    quotients = np.rint(scaled - shifts).astype(np.int32)
    sides = _sides(quotients)
    off_centre_count = int(np.count_nonzero(sides))
    outward = float((sides * (quotients + shifts - scaled)).sum(dtype=np.float64)) / max(1, off_centre_count)
    return Snapped(quotients, phases, min(MAX_PULL, max(0, round(outward * _PULL_PARTS))))


def unsnap(snapped: Snapped) -> Floats:
    shifts = (snapped.phases / np.float32(PHASES)).astype(np.float32)[:, None]
    scaled = snapped.quotients + shifts
    if snapped.pull:
        scaled -= _sides(snapped.quotients) * np.float32(snapped.pull / _PULL_PARTS)
    return scaled.astype(np.float32, copy=False)


def packed_bytes(channels: int) -> int:
    return -(-3 * channels // 8)


def pack(phases: Bytes) -> bytes:
    return np.packbits(np.unpackbits(phases[:, None], axis=1)[:, 5:].ravel()).tobytes()


def unpack(data: memoryview, channels: int) -> Bytes:
    bits = np.unpackbits(np.frombuffer(data, np.uint8), count=3 * channels).reshape(channels, 3)
    phases: Bytes = (bits[:, 0] << 2 | bits[:, 1] << 1 | bits[:, 2]).astype(np.uint8)
    return phases


def _sides(quotients: Ints) -> npt.NDArray[np.int8]:
    """Return the side of the channel's mean grid point, -1, 0 or 1."""
    centres = np.rint(quotients.sum(axis=1, dtype=np.int64) / quotients.shape[1]).astype(np.int64)
    sides: npt.NDArray[np.int8] = np.sign(quotients - centres[:, None]).astype(np.int8)
    return sides


# --- prediction: a channel's integers as differences ---
#
# Numbers are rounded first and predicted afterwards, so prediction is lossless and errors do not add up. A channel is a
# component of a head over the tokens of a block. There are three ways:
#
# - from the channel's mean over the block (keys are often far from 0);
# - from an anchor, the first token of every group of ``GROUPS[way]`` tokens, and anchors from the previous anchor;
# - the same with groups of one token: every number from its predecessor.
#
# Each channel uses the way with the smallest mean difference. For two-sided geometric differences the entropy grows
# with that mean, so it is the way with the fewest bits.


GROUPS = (0, 1, 10)
"""Tokens of a group by way; 0: predicted from the channel's mean."""


def split(quotients: Ints) -> tuple[npt.NDArray[np.uint8], Ints, Ints]:
    """Choose how to predict each channel. Return ways (channels,), bases (channels,) and differences (channels,
    tokens).
    """
    channels = len(quotients)
    ways = np.zeros(channels, np.uint8)
    bases, differences = _split_in_groups(quotients, GROUPS[0])
    least = _size(differences)
    for way, group in enumerate(GROUPS[1:], 1):
        other_bases, other_differences = _split_in_groups(quotients, group)
        size = _size(other_differences)
        # A tie goes to the mean, as anchors cost a base, too.
        better = np.flatnonzero(size < least)
        ways[better], least[better] = way, size[better]
        bases[better], differences[better] = other_bases[better], other_differences[better]
    return ways, bases, differences


def join(ways: npt.NDArray[np.uint8], bases: Ints, differences: Ints) -> Ints:
    """Invert ``split``. Numbers beyond 32 bits wrap around."""
    quotients = np.empty_like(differences)
    for way, group in enumerate(GROUPS):
        rows = np.flatnonzero(ways == way)
        if len(rows):
            quotients[rows] = _join_groups(bases[rows], differences[rows], group)
    return quotients


def _split_in_groups(quotients: Ints, group: int) -> tuple[Ints, Ints]:
    """Return bases and differences: from the mean (``group`` 0), or each group's first token."""
    tokens = quotients.shape[1]
    if not group:
        means = np.rint(quotients.sum(axis=1, dtype=np.int64) / tokens).astype(np.int32)
        return means, quotients - means[:, None]
    anchors = quotients[:, ::group]
    differences = quotients - np.repeat(anchors, group, axis=1)[:, :tokens]
    differences[:, group::group] = np.diff(anchors, axis=1)
    return quotients[:, 0].copy(), differences


def _join_groups(bases: Ints, differences: Ints, group: int) -> Ints:
    """Invert ``_split_in_groups``."""
    if not group:
        return differences + bases[:, None]
    anchors = np.cumsum(differences[:, ::group], axis=1, dtype=np.int32) + bases[:, None]
    if group == 1:
        return anchors
    quotients = differences + np.repeat(anchors, group, axis=1)[:, : differences.shape[1]]
    quotients[:, ::group] = anchors
    return quotients


def _size(differences: Ints) -> npt.NDArray[np.int64]:
    sizes: npt.NDArray[np.int64] = np.abs(differences).sum(axis=1, dtype=np.int64)
    return sizes
