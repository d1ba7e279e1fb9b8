"""Keys turned back to where their rotary position embedding found them: a part of ``cachegen``.

Rotary embeddings (Su et al., 2021) turn each pair of a key's channels by an angle that grows with the token's position.
What a channel has in common with all tokens, its mean, is turned with it, and then looks like change. Turning a
block's keys back by their place *in the block* leaves each pair turned by one angle for the whole block, so means are
means again. Pairs are channels i and i + head_dim / 2, as Llama and its relatives in transformers have them.

A codec knows no model, so the encoder tries the usual bases and takes the one that leaves the least change, if any
does; a byte of the payload says which. Turning loses nothing but the last bit of a float32.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

BASES = (0.0, 1e4, 5e5, 1e6)
"""By number in the payload. 0: not turned; 1e4: Llama, Llama 2, Mistral 7B v0.1; 5e5: Llama 3; 1e6: Qwen 2, Mistral."""
_WORTH = 0.95
"""A base is taken if it brings the sum of the channels' variances below this part of what it is."""


def best_base(keys: Floats) -> int:
    """The number of the base by which ``keys`` (kv_heads, block_tokens, head_dim) vary least once turned back."""
    _, tokens, head_dim = keys.shape
    if head_dim % 2 or tokens < 2:
        return 0
    exact = keys.astype(np.float64)
    first, second = exact[..., : head_dim // 2], exact[..., head_dim // 2 :]
    # Turning keeps the sum of the squares, so what varies is that less what the means have.
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
    """``keys`` turned forward (direction 1) or back (-1) by the angles of their tokens' places in the block."""
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
