"""A device that does what it was given late, and in any order that streams and marks allow.

An accelerator mostly does things in the order in which they were queued, so that a mark which is missing shows rarely.
This one is as contrary as it may be, and the same with the same seed.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from skymemory.engine.vllm.copier import Mark, Stream


class QueuedMark:
    """Done when the device has come so far."""

    def __init__(self, device: QueuedDevice) -> None:
        self._device = device
        self.reached = False
        self.at_s = 0.0

    def done(self) -> bool:
        self._device.go_on(1)
        return self.reached

    def wait(self) -> None:
        while not self.reached:
            self._device.go_on(1)

    def seconds_after(self, earlier: QueuedMark) -> float:
        assert self.reached and earlier.reached
        return self.at_s - earlier.at_s


class QueuedDevice:
    """Does something only when a caller waits, or by ``go_on``."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._lock = threading.RLock()
        self._streams: dict[Stream, deque[tuple[Callable[[], None], Sequence[Mark], QueuedMark]]] = {
            "compute": deque(),
            "out": deque(),
            "in": deque(),
        }

    def give(self, stream: Stream, work: Callable[[], None], *after: Mark) -> QueuedMark:
        with self._lock:
            mark = QueuedMark(self)
            self._streams[stream].append((work, after, mark))
            return mark

    def go_on(self, most: int) -> None:
        """Does up to ``most`` of what it may do."""
        with self._lock:
            for _ in range(most):
                ready = [one for one in self._streams.values() if one and all(map(_reached, one[0][1]))]
                if not ready:
                    return
                work, _, mark = self._dice.choice(ready).popleft()
                work()
                mark.reached, mark.at_s = True, time.perf_counter()

    def memory(self, size_bytes: int) -> Any:
        return torch.full((size_bytes,), 0x5A, dtype=torch.uint8)

    host_memory = memory

    def index(self, blocks: Sequence[int]) -> Any:
        return torch.tensor(blocks)

    def lock_pages(self, address: int, size_bytes: int) -> None: ...

    def unlock_pages(self, address: int) -> None: ...

    def settle(self) -> None:
        while any(self._streams.values()):
            self.go_on(1)


def _reached(mark: Mark) -> bool:
    return getattr(mark, "reached", True)
