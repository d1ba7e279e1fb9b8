"""What an engine lends the cache: a sink for loaded blocks, a source of blocks to store, a clock by phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


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
