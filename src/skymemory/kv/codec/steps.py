"""How finely the ``cachegen`` codec rounds: a step per layer, key or value and head, chosen by a named level.

A step is the distance between neighbouring numbers that can be stored (see ``grid``). It is
taken relative to how much the head's channels vary from token to token in this block, on a grid of quarter octaves
(2 ** (code / 4)), so that two bytes say it. Steps differ by third of the layers, as CacheGen's do (Liu et al., SIGCOMM
2024), and between keys and values: keys decide where a token looks, and bear less. ``medium`` was set by how far each
layer's rounding moves the predictions of the shipped small model; the others are an eighth, a half and 1.4 of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from skymemory.errors import InvalidInput

Steps = npt.NDArray[np.float32]

MIN_CODE, MAX_CODE = -480, 500
"""2 ** -120 .. 2 ** 125: normal float32 numbers."""
MAX_QUOTIENT = 1 << 20
"""No number is more than this many steps from 0: float32 still tells halves there."""


@dataclass(frozen=True, slots=True)
class Level:
    """Steps of keys and of values in the first, middle and last third of the layers, in standard deviations of a
    channel over the tokens."""

    name: str
    number: int
    keys: tuple[float, float, float]
    values: tuple[float, float, float]

    def relative_step(self, layer: int, layers: int, part: int) -> float:
        """The step of keys (part 0) or values (1) of layer ``layer`` of ``layers``, in standard deviations."""
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
    """The level called ``name``; InvalidInput if there is none."""
    if name not in LEVELS:
        raise InvalidInput(f"no cachegen level {name!r}: choose one of {', '.join(LEVELS)}")
    return LEVELS[name]


def step_codes(numbers: npt.NDArray[np.float32], relative_step: float) -> npt.NDArray[np.int16]:
    """The code of each head's step, for finite ``numbers`` (kv_heads, block_tokens, head_dim)."""
    exact = numbers.astype(np.float64)
    tokens = numbers.shape[1]
    centre = exact.mean(axis=1, keepdims=True) if tokens > 1 else 0.0
    spread = np.sqrt(np.square(exact - centre).sum(axis=1).mean(axis=1) / max(1, tokens - 1))
    tiny = 2.0 ** (MIN_CODE / 4)
    codes = np.floor(4 * np.log2(np.maximum(spread * relative_step, tiny)))
    # A head that hardly varies beside its largest number is kept to a millionth of that.
    least = np.ceil(4 * np.log2(np.maximum(np.abs(exact).max(axis=(1, 2)) / MAX_QUOTIENT, tiny)))
    chosen: npt.NDArray[np.int16] = np.minimum(np.maximum(codes, least), MAX_CODE).astype(np.int16)
    return chosen


def steps_of(codes: npt.NDArray[np.int16]) -> Steps:
    """2 ** (code / 4), the same on every machine: a power of two times one of four constants."""
    octaves, quarters = np.divmod(codes.astype(np.int32), 4)
    return np.ldexp(_QUARTERS[quarters], octaves)


_QUARTERS = np.array([1.0, 1.189207115, 1.4142135624, 1.6817928305], np.float32)
