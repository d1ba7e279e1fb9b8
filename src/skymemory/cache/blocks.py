"""What an engine lends the cache: a sink for loaded blocks, a source of blocks to store; and a load's own notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from skymemory.kv.block import BlockHash
from skymemory.store.base import LoadTicket


class BlockSink(Protocol):
    """Where loaded blocks go."""

    def place(self, index: int, block: memoryview) -> None:
        """Copy block ``index``'s raw bytes (``KVLayout.shape``, C order) out of ``block`` before returning."""


class BlockSource(Protocol):
    """Where blocks to be stored come from."""

    def read(self, index: int, out: memoryview) -> None:
        """Write block ``index``'s raw bytes (``KVLayout.shape``, C order) into ``out``."""


class PhaseClock:
    """Seconds by phase, summed, in order of first use."""

    def __init__(self, clock: Callable[[], float], seconds: dict[str, float]) -> None:
        self._clock = clock
        self.seconds = seconds

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started_s = self._clock()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + self._clock() - started_s


@dataclass(frozen=True, slots=True)
class LeasedBatch:
    """Consecutive blocks of a prompt that are fetched together."""

    start: int
    hashes: list[BlockHash]
    ticket: LoadTicket | None
    """None where the store failed to give one."""


@dataclass(slots=True)
class LoadTally:
    """What a load has come to so far."""

    tiers: list[str] = field(default_factory=list)
    """The tier of each block placed, in order."""
    failed: Counter[str] = field(default_factory=Counter)
    size_bytes: int = 0
    retransmitted: int = 0

    def tokens_by_tier(self, block_tokens: int, limit_tokens: int) -> dict[str, int]:
        """Tokens each tier supplied; what lies past ``limit_tokens`` in the last block is not counted."""
        tokens: Counter[str] = Counter()
        for index, tier in enumerate(self.tiers):
            tokens[tier] += min(limit_tokens - index * block_tokens, block_tokens)
        return dict(tokens)
