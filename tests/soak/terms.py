"""What a soak is asked for and what comes of it, the values it writes, and how a recovery is judged."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

ANSWER_AFTER_S, READ_AFTER_S = 10.0, 30.0
"""When satellites answer again, and reads hit, after the end of what overloaded them."""


@dataclass(frozen=True, slots=True)
class Setting:
    """``deaths_per_day`` and ``plane_deaths_per_day`` are means; the dead return empty after minutes to an hour. A
    squeeze leaves a satellite next to no memory for seconds to half an hour: what passes by there meanwhile is evicted.
    """

    days: float
    operations: int
    full_blocks: int
    seed: int = 1
    memory_bytes: int = 1536 << 10
    loss: float = 0.01
    duplicate: float = 0.01
    reorder: float = 0.02
    corrupt: float = 0.005
    deaths_per_day: float = 10.0
    plane_deaths_per_day: float = 0.5
    squeezes_per_day: float = 12.0
    replicas: int = 1


@dataclass(slots=True)
class Outcome:
    """``wrong`` and ``open_books`` are the promises: both stay empty."""

    counted: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    open_books: list[str] = field(default_factory=list)
    books: dict[str, int] = field(default_factory=dict)
    moves: tuple[int, int] = (0, 0)
    seconds: float = 0.0


def bytes_of(key: bytes, number: int, size: int) -> bytes:
    """Version ``number`` of a value: any process can make it again."""
    return random.Random(key + number.to_bytes(4, "big")).randbytes(size)


@dataclass(frozen=True, slots=True)
class Row:
    """One second. ``cores``: processor of all hosts; ``hits`` of ``reads`` that ended in it."""

    at_s: float
    phase: str
    cores: float
    answer: int
    reads: int
    hits: int


def later(rows: Sequence[Row], seconds: float) -> list[Row]:
    """Those from so long on after the cause."""
    after = [row for row in rows if row.phase == "after"]
    return [row for row in after if row.at_s >= after[0].at_s + seconds]


def share_of_hits(rows: Sequence[Row]) -> float:
    """Of the reads that ended in these seconds."""
    return sum(row.hits for row in rows) / max(1, sum(row.reads for row in rows))
