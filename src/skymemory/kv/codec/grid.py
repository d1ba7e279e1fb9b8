"""A channel's numbers to whole numbers of steps and back: ``cachegen``'s rounding, the only part that loses anything.

Steps are as large as a channel's own spread, so it matters where their grid lies and what a cell is read back as:

- the grid of a channel is moved by eighths of a step (its *phase*) so that the channel's mean is a grid point: the
  commonest numbers then share one cell, rather than two;
- away from that mean numbers are commoner on the near side of their cell, so a cell is read back as a point nearer to
  the mean by a part of a step (the *pull*), the same for the whole section: the one that leaves the least error.

Measured on a trained model's values in steps of two deviations: a tenth of a bit per number and a fifth of the squared
error less. Both are the encoder's choice and in the payload; the pull moves no number by more than ``PULL_LIMIT``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]

PHASES = 8
"""Parts of a step by which a grid can be moved."""
_PULL_PARTS = 64
MAX_PULL = 16
PULL_LIMIT = MAX_PULL / _PULL_PARTS
"""A quarter of a step: beyond the half of rounding no number moves by more on its account."""


@dataclass(frozen=True, slots=True)
class Snapped:
    """Numbers on grids: whole numbers (channels, tokens), phases (channels,) below PHASES, and a pull in 64ths."""

    quotients: Ints
    phases: Bytes
    pull: int


def snap(scaled: Floats) -> Snapped:
    """``scaled`` (channels, tokens), in steps, to the nearest points of grids through the channels' means."""
    means = scaled.mean(axis=1, dtype=np.float64)
    phases = (np.rint((means - np.floor(means)) * PHASES).astype(np.int64) % PHASES).astype(np.uint8)
    shifts = (phases / np.float32(PHASES)).astype(np.float32)[:, None]
    quotients = np.rint(scaled - shifts).astype(np.int32)
    sides = _sides(quotients)
    apart = int(np.count_nonzero(sides))
    outward = float((sides * (quotients + shifts - scaled)).sum(dtype=np.float64)) / max(1, apart)
    return Snapped(quotients, phases, min(MAX_PULL, max(0, round(outward * _PULL_PARTS))))


def unsnap(snapped: Snapped) -> Floats:
    """The numbers in steps (channels, tokens) that ``snapped`` stands for."""
    shifts = (snapped.phases / np.float32(PHASES)).astype(np.float32)[:, None]
    scaled = snapped.quotients + shifts
    if snapped.pull:
        scaled -= _sides(snapped.quotients) * np.float32(snapped.pull / _PULL_PARTS)
    return scaled.astype(np.float32, copy=False)


def packed_bytes(channels: int) -> int:
    """Bytes of ``channels`` phases: three bits each."""
    return -(-3 * channels // 8)


def pack(phases: Bytes) -> bytes:
    """Phases in three bits each, the first in the highest bits; zeros to the end of the last byte."""
    return np.packbits(np.unpackbits(phases[:, None], axis=1)[:, 5:].ravel()).tobytes()


def unpack(data: memoryview, channels: int) -> Bytes:
    """The phases that ``pack`` made ``packed_bytes(channels)`` of."""
    bits = np.unpackbits(np.frombuffer(data, np.uint8), count=3 * channels).reshape(channels, 3)
    found: Bytes = (bits[:, 0] << 2 | bits[:, 1] << 1 | bits[:, 2]).astype(np.uint8)
    return found


def _sides(quotients: Ints) -> npt.NDArray[np.int8]:
    """On which side of its channel's mean grid point each is: -1, 0 or 1. The same where it is written and read."""
    centres = np.rint(quotients.sum(axis=1, dtype=np.int64) / quotients.shape[1]).astype(np.int64)
    sides: npt.NDArray[np.int8] = np.sign(quotients - centres[:, None]).astype(np.int8)
    return sides
