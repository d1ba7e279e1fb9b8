"""One layer's keys or values as whole numbers to a section of bytes and back: ``cachegen``'s lossless half.

Channels that vary about as much share a class, and each class its own table: the numbers of a class are cut into
low bits, which are as good as random and stored as they are, and a high part, which gets the table. A high part beyond
±``_FAR`` is an escape, whose whole number follows at the end.

Runs of a section, in this order: kind (class and way) per channel · base per channel · per class, from the smallest:
high parts, then low bits · escaped numbers. Within a class channel by channel, token by token.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from skymemory.errors import MalformedPacket
from skymemory.kv.codec import deltas
from skymemory.kv.codec.entropy import Reader, Writer

Ints = npt.NDArray[np.int32]

_CLASSES = 48
"""Class 0: all differences are 0. Class c from 1 on: on average below 2 ** ((c − 5) / 2) away from 0."""
_LIMITS = 2.0 ** ((np.arange(1, _CLASSES) - 5) / 2)
_LEAST_NUMBERS = 1024
"""A table costs about 20 bytes: classes of fewer numbers are thrown together with the next."""
_FAR = 31
_ESCAPE = 2 * _FAR + 1


def encode_section(quotients: Ints) -> bytes:
    """``quotients`` (channels, tokens), each within ±2 ** 21, as bytes."""
    ways, bases, differences = deltas.split(quotients)
    classes = _classes(differences)
    writer = Writer()
    writer.symbols(classes * len(deltas.GROUPS) + ways)
    writer.numbers(bases)
    escaped = []
    for number in np.unique(classes):
        if number:
            run = differences[classes == number].ravel()
            low_bits = _low_bits(int(number))
            high = run >> low_bits
            far = np.abs(high) > _FAR
            near = ~far
            writer.symbols(np.where(near, high + _FAR, _ESCAPE))
            writer.bits(run[near] & (1 << low_bits) - 1, low_bits)
            escaped.append(run[far])
    writer.numbers(np.concatenate(escaped) if escaped else np.empty(0, np.int32))
    return writer.section()


def decode_section(section: memoryview, channels: int, tokens: int) -> Ints:
    """The quotients (channels, tokens) of a section; MalformedPacket where it is not one of theirs."""
    reader = Reader(section)
    classes, ways = np.divmod(reader.symbols(channels), len(deltas.GROUPS))
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
        where = tuple(np.concatenate(parts) for parts in zip(*escapes, strict=True))
        differences[where] = reader.numbers(len(where[0]))
    reader.end()
    return deltas.join(ways.astype(np.uint8), bases, differences)


def _classes(differences: Ints) -> Ints:
    """The class of each channel, small classes thrown together with the next larger one that is there."""
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
    """Low bits cut off the numbers of a class: as many as leave an average of 4 or so."""
    return max(0, (number - 5) // 2 - 2)
