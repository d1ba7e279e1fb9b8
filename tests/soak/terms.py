"""What a soak is asked for and what comes of it, and the values it writes."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field


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
    """Version ``number`` of a value: anybody can make it again."""
    return random.Random(key + number.to_bytes(4, "big")).randbytes(size)
