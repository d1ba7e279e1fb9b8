"""What is measured for a cost model: lengths it is fitted on, and others in between that it has to foretell."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from skymemory.errors import InvalidInput

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class PrefillCell:
    tokens: int
    share: float
    """Of the prompt, what was sent before it."""
    held_out: bool
    """Not fitted on."""


@dataclass(frozen=True, slots=True)
class DecodeCell:
    batch: int
    context: int
    """Tokens of each prompt."""
    held_out: bool


def prefill_cells(least: int, most: int, shares: Sequence[float]) -> list[PrefillCell]:
    """Lengths from ``least``, each twice the one before, up to ``most``, to be fitted on; one between any two held out.

    Raises:
        InvalidInput: fewer than three lengths, or shares that are none.
    """
    if least < 8 or most < 4 * least:
        raise InvalidInput(
            f"prompts of {least} to {most} tokens: from 8 on, and the longest at least 4 times the least"
        )
    if not shares or not all(0 <= share < 1 for share in shares):
        raise InvalidInput("shares of a prompt that are cached are 0 or more and below 1, such as 0,0.5,0.9")
    lengths = [least]
    while lengths[-1] * 2 < most:
        lengths.append(lengths[-1] * 2)
    lengths.append(most)
    between = [round((one * other) ** 0.5) for one, other in pairwise(lengths)]
    kinds = [*((length, False) for length in lengths), *((length, True) for length in between)]
    return [PrefillCell(length, share, held_out) for length, held_out in sorted(kinds) for share in shares]


def decode_cells(most_batch: int, contexts: Sequence[int]) -> list[DecodeCell]:
    """Batches of 1, 2, 4, ... up to ``most_batch``, over contexts; every batch between two of them is held out, and so
    is every second context.

    Raises:
        InvalidInput: nothing that could be told from each other.
    """
    if most_batch < 2 or len(contexts) < 2 or min(contexts) < 1 or sorted(set(contexts)) != list(contexts):
        raise InvalidInput("batches of up to 2 or more and at least two contexts, ascending, are needed")
    batches = [1]
    while batches[-1] * 2 <= most_batch:
        batches.append(batches[-1] * 2)
    fitted = [contexts[at] for at in range(0, len(contexts), 2)]
    fitted = fitted if len(fitted) > 1 else list(contexts)
    held = [one for one in contexts if one not in fitted]
    cells = [DecodeCell(batch, context, False) for batch in batches for context in fitted]
    cells += [DecodeCell(batch, context, True) for batch in batches for context in held]
    return cells + [DecodeCell(batch * 3 // 2, context, True) for batch in batches[1:-1] for context in contexts]


def typical(values: Sequence[float], statistic: str) -> float:
    """Of repeated measurements: their ``median``, or the ``fastest``, where others use the computer too."""
    return min(values) if statistic == "fastest" else statistics.median(values)


def grouped(pairs: Iterable[tuple[K, float]]) -> dict[K, list[float]]:
    """Values by their key, in the order in which keys first came."""
    groups: dict[K, list[float]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups
