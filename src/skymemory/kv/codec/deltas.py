"""What is left of a channel's whole numbers once each is told from another token's: ``cachegen``'s token-wise part.

Numbers are rounded first and predicted afterwards, so a prediction loses nothing and errors do not add up. A channel is
one number of one head over the tokens of a block. Three ways to tell its numbers:

- from the channel's mean over the block (keys often stand far from 0);
- from an anchor, the first token of every group of ``GROUPS[way]`` tokens, anchors from the one before;
- the same with groups of one token: every number from its predecessor.

Each channel takes the way whose differences are smallest on average: for differences that fall off evenly on both
sides of 0 (two-sided geometric) the entropy grows with that average, so it is the way of the fewest bits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]

GROUPS = (0, 1, 10)
"""Tokens of a group by way; 0: no groups, the channel's mean is what its numbers are told from."""


def split(quotients: Ints) -> tuple[npt.NDArray[np.uint8], Ints, Ints]:
    """Ways (channels,), bases (channels,) and differences (channels, tokens) of ``quotients`` (channels, tokens)."""
    channels = len(quotients)
    ways = np.zeros(channels, np.uint8)
    bases, differences = _apart(quotients, GROUPS[0])
    least = _size(differences)
    for way, group in enumerate(GROUPS[1:], 1):
        other_bases, others = _apart(quotients, group)
        size = _size(others)
        # Anchors cost what they differ by and a base all the same: a tie is the mean's.
        better = np.flatnonzero(size < least)
        ways[better], least[better] = way, size[better]
        bases[better], differences[better] = other_bases[better], others[better]
    return ways, bases, differences


def join(ways: npt.NDArray[np.uint8], bases: Ints, differences: Ints) -> Ints:
    """The quotients (channels, tokens) that ``split`` told apart. Numbers beyond 32 bits wrap around."""
    quotients = np.empty_like(differences)
    for way, group in enumerate(GROUPS):
        rows = np.flatnonzero(ways == way)
        if len(rows):
            quotients[rows] = _together(bases[rows], differences[rows], group)
    return quotients


def _apart(quotients: Ints, group: int) -> tuple[Ints, Ints]:
    tokens = quotients.shape[1]
    if not group:
        means = np.rint(quotients.sum(axis=1, dtype=np.int64) / tokens).astype(np.int32)
        return means, quotients - means[:, None]
    anchors = quotients[:, ::group]
    differences = quotients - np.repeat(anchors, group, axis=1)[:, :tokens]
    differences[:, group::group] = np.diff(anchors, axis=1)
    return quotients[:, 0].copy(), differences


def _together(bases: Ints, differences: Ints, group: int) -> Ints:
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
