"""Work that no answer waits for: done when answers are out, and before anybody looks at what it changes."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

log = logging.getLogger("skymemory.router")
Work = Callable[[], object]


class Afterwards:
    """Does it at once, until ``when`` says when answers are out."""

    def __init__(self, faults: Callable[[], None] = lambda: None) -> None:
        """``faults`` is told of each exception; work that was put off has nobody else to tell."""
        self.when: Callable[[Work], object] | None = None
        """Runs what it is given soon: an event loop's ``call_soon``."""
        self._faults = faults
        self._waiting: deque[Work] = deque()

    def do(self, work: Work) -> None:
        if self.when is None:
            work()
            return
        if not self._waiting:
            self.when(self.settle)
        self._waiting.append(work)

    def settle(self) -> None:
        """All that was put off, in order."""
        while self._waiting:
            work = self._waiting.popleft()
            try:
                work()
            except Exception:
                log.exception("a request's account could not be kept")
                self._faults()


# Tasks that run until they are told to stop.


async def ended(tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    """Cancel them and wait until they are gone; what they raise meanwhile is nobody's concern any more."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
