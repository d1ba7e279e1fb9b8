"""Memory of a store that a device copies from and into by itself: a thread page-locks it, piece by piece.

The pieces are locked from the first on. A copy must not cross from one into the next, so it is cut there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from skymemory.store.base import InPlace

_log = logging.getLogger(__name__)

_PIECE_BYTES = 256 << 20


class PageLocker(Protocol):
    """Device that copies page-locked memory by itself."""

    def lock_pages(self, address: int, size_bytes: int) -> None:
        """Page-lock memory. Raises RuntimeError if the device refuses."""

    def unlock_pages(self, address: int) -> None: ...

    def settle(self) -> None:
        """Wait for all queued copies."""


class CpuPages:
    """A CPU copies any memory."""

    def lock_pages(self, address: int, size_bytes: int) -> None: ...

    def unlock_pages(self, address: int) -> None: ...

    def settle(self) -> None: ...


class CudaPages:
    """Page-locks for a CUDA device."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def lock_pages(self, address: int, size_bytes: int) -> None:
        import torch

        portable = 1  # for all devices of the process
        with torch.cuda.device(self._device):
            _check_cuda(torch.cuda.cudart().cudaHostRegister(address, size_bytes, portable))

    def unlock_pages(self, address: int) -> None:
        import torch

        with torch.cuda.device(self._device):
            _check_cuda(torch.cuda.cudart().cudaHostUnregister(address))

    def settle(self) -> None:
        import torch

        torch.cuda.synchronize(self._device)


def _check_cuda(error: Any) -> None:
    if int(error):
        raise RuntimeError(f"CUDA: {error}")


class LockedMemory:
    """Memory of ``store``, page-locked for ``device`` until ``close``. After a change of its owner other memory is."""

    def __init__(self, store: InPlace, device: PageLocker, piece_bytes: int = _PIECE_BYTES) -> None:
        self._store = store
        self._device = device
        self._piece_bytes = piece_bytes
        self._changed = threading.Condition()
        self._memory: memoryview | None = None
        self._tensor: Any = None
        self._locked_bytes = 0
        self._copying = 0
        self._pieces: list[tuple[int, memoryview]] = []
        """Address of each locked piece, with its memory, which stays mapped."""
        self._thread: threading.Thread | None = None
        self._closed = False
        with self._changed:
            self._follow()

    def _follow(self) -> None:
        memory = self._store.memory
        if memory is self._memory or self._closed:
            return
        import torch

        self._memory, self._tensor, self._locked_bytes = memory, torch.frombuffer(memory, dtype=torch.uint8), 0
        arguments = (memory, self._tensor.data_ptr(), self._thread)
        self._thread = threading.Thread(target=self._lock, args=arguments, name="page-lock", daemon=True)
        self._thread.start()

    def _lock(self, memory: memoryview, address: int, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        self._unlock()
        for begin in range(0, len(memory), self._piece_bytes):
            end = min(begin + self._piece_bytes, len(memory))
            if self._memory is not memory:
                return
            try:
                self._device.lock_pages(address + begin, end - begin)
            except RuntimeError as error:
                _log.warning("values pass through a buffer: the device cannot copy the store's memory (%s)", error)
                return
            self._pieces.append((address + begin, memory))
            with self._changed:
                if self._memory is memory:
                    self._locked_bytes = end
                self._changed.notify_all()

    def _unlock(self) -> None:
        # No new copy begins: this is another thread's memory no more.
        with self._changed:
            self._changed.wait_for(lambda: not self._copying)
        if self._pieces:
            self._device.settle()
        while self._pieces:
            address, _ = self._pieces.pop()
            self._device.unlock_pages(address)

    @property
    def is_whole(self) -> bool:
        """True once all of the memory is locked."""
        with self._changed:
            self._follow()
            return self._memory is not None and self._locked_bytes == len(self._memory)

    def wait(self, timeout_s: float) -> bool:
        """Wait until all of the memory is locked; False if it is not in time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._memory is not None and self._locked_bytes == len(self._memory), timeout_s
            )

    @contextmanager
    def parts(self, value: memoryview) -> Iterator[list[Any]]:
        """Yield ``value``'s bytes as tensors to copy one by one, each in a locked piece; none if a part is not locked.
        They are locked until the copies that were queued inside ``with`` are done.
        """
        with self._changed:
            self._follow()
            parts = self._find(value)
            self._copying += 1
        try:
            yield parts
        finally:
            with self._changed:
                self._copying -= 1
                self._changed.notify_all()

    def _find(self, value: memoryview) -> list[Any]:
        if not self._locked_bytes or not value.nbytes:
            return []
        address: int = np.frombuffer(value, np.uint8).__array_interface__["data"][0]
        begin = address - self._tensor.data_ptr()
        end = begin + value.nbytes
        if begin < 0 or end > self._locked_bytes:
            return []
        first_cut = (begin // self._piece_bytes + 1) * self._piece_bytes
        cuts = [begin, *range(first_cut, end, self._piece_bytes), end]
        return [self._tensor[start:stop] for start, stop in pairwise(cuts)]

    def close(self) -> None:
        """Unlock all; no copy may be queued any more."""
        with self._changed:
            self._closed, self._memory, self._locked_bytes = True, None, 0
            thread = self._thread
        if thread is not None:
            thread.join()
        self._unlock()
        self._tensor = None
