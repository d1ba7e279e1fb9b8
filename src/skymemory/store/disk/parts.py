"""The values of one store on their way: written beside their places, then renamed into them."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from skymemory.store.base import Buffer
from skymemory.store.disk.directory import StoreDirectory
from skymemory.store.disk.value_file import write_part

_NUMBERS = itertools.count()


class Parts:
    """``failed`` hears the name of each error (``ENOSPC`` …); a value that failed is simply not settled."""

    def __init__(self, directory: StoreDirectory, synced: bool, failed: Callable[[str], None]) -> None:
        self._directory = directory
        self._synced = synced
        self._failed = failed
        self._parts: dict[bytes, tuple[Path, int]] = {}

    def write(self, items: Sequence[tuple[bytes, Buffer]]) -> None:
        """Ends at the first that fails: what follows in a chain is worth nothing without it."""
        for key, value in items:
            part = self._directory.part_of(key, next(_NUMBERS))
            data = memoryview(value).cast("B")
            try:
                write_part(part, key, data, synced=self._synced)
            except OSError as error:
                self._failed(name_of(error))
                return
            if key in self._parts:
                self._directory.remove(self._parts[key][0])
            self._parts[key] = part, data.nbytes

    def settle(self) -> list[tuple[bytes, int]]:
        """Key and size of each value that is in its place now, in the order written."""
        settled: list[tuple[bytes, int]] = []
        while self._parts:
            key = next(iter(self._parts))
            part, size_bytes = self._parts[key]
            try:
                part.rename(self._directory.path_of(key))
            except OSError as error:
                self._failed(name_of(error))
                break
            del self._parts[key]
            settled.append((key, size_bytes))
        return settled

    def discard(self) -> None:
        """Remove what was not settled."""
        for part, _ in self._parts.values():
            self._directory.remove(part)
        self._parts.clear()


def name_of(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, "unknown")
