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
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Parts:
    """``failed`` hears the name of each error (``ENOSPC`` …); a value that failed is simply not settled."""

    def __init__(self, directory: StoreDirectory, synced: bool, failed: Callable[[str], None]) -> None:
        self._directory = directory
        self._synced = synced
        self._failed = failed
        self._parts: dict[bytes, tuple[Path, int]] = {}

    def write(self, items: Sequence[tuple[bytes, Buffer]], make_room: Callable[[int], bool]) -> list[tuple[bytes, int]]:
        """Key and size of each value that was written. Ends at the first that fails: what follows in a chain is worth
        nothing without it. Where the disk is full ``make_room`` may free so many bytes, and says whether it has.
        """
        for key, value in items:
            data = memoryview(value).cast("B")
            try:
                part = self._write(key, data, make_room)
            except OSError as error:
                self._failed(name_of(error))
                break
            if key in self._parts:
                self._directory.remove(self._parts[key][0])
            self._parts[key] = part, data.nbytes
        return [(key, size_bytes) for key, (_, size_bytes) in self._parts.items()]

    def _write(self, key: bytes, data: memoryview, make_room: Callable[[int], bool]) -> Path:
        part = self._directory.part_of(key, next(_NUMBERS))
        try:
            write_part(part, key, data, synced=self._synced)
        except OSError as error:
            again = error.errno in _FULL and make_room(data.nbytes)
            if not again and not (error.errno == errno.ENOENT and self._directory.make_values_anew()):
                raise
            write_part(part, key, data, synced=self._synced)
        return part

    def settle(self, keys: Sequence[bytes]) -> list[tuple[bytes, int]]:
        """Key and size of each of these values that is in its place now, in this order; up to the first that fails."""
        settled: list[tuple[bytes, int]] = []
        for key in keys:
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
