"""The local radix index, shared by the processes of one computer through an append-only journal.

Every change is one record appended under a file lock; every reader replays what others appended before it looks. A
tail torn by a crash is cut off by the next writer. Without a path the index lives and dies with the process.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from skymemory.errors import InvalidInput
from skymemory.index.block_info import BlockInfo
from skymemory.index.journal import RecordOp, decode_records, encode_record
from skymemory.index.radix import RadixIndex


class SharedIndex:
    """A ``RadixIndex`` that follows its journal file."""

    def __init__(self, path: Path | None = None) -> None:
        self._index = RadixIndex()
        self._fd = -1
        self._replayed_bytes = 0
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def __len__(self) -> int:
        self._follow()
        return len(self._index)

    def longest_prefix(self, keys: Sequence[bytes]) -> int:
        """Leading keys that are all present; ``keys`` may begin anywhere in a chain."""
        self._follow()
        count = self._index.longest_prefix(keys)
        if count == 0 and keys and keys[0] in self._index:  # they do not begin at a chain's first block
            return next((at for at, key in enumerate(keys) if key not in self._index), len(keys))
        return count

    def infos(self, keys: Sequence[bytes]) -> list[BlockInfo | None]:
        """What is known of each key."""
        self._follow()
        return [self._index.get(key) for key in keys]

    def add(self, keys: Sequence[bytes], infos: Sequence[BlockInfo], start: int, parent: bytes | None) -> None:
        """Add a chain. Depths are a caller's hint: a chain that contradicts what is known replaces it, and where its
        parent contradicts it too, it is entered as a chain of its own.
        """

        def attempt(depth: int, before: bytes | None) -> bytes:
            self._index.add(keys, infos, depth, before)
            return encode_record(RecordOp.ADD, keys, infos, start=depth, parent=before)

        def change() -> bytes:
            try:
                return attempt(start, parent)
            except InvalidInput:
                gone = [key for key in keys if self._index.remove(key)]
                removal = encode_record(RecordOp.REMOVE, gone) if gone else b""
            for depth, before in ((start, parent), (0, None)):
                try:
                    return removal + attempt(depth, before)
                except InvalidInput:
                    continue
            return removal

        self._write(change)

    def remove(self, keys: Sequence[bytes]) -> None:
        def change() -> bytes:
            gone = [key for key in keys if self._index.remove(key)]
            return encode_record(RecordOp.REMOVE, gone) if gone else b""

        self._write(change)

    def clear(self) -> None:
        """Forget everything (the constellation started anew, empty)."""

        def change() -> bytes:
            self._index.clear()
            return encode_record(RecordOp.CLEAR)

        self._write(change)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, change: Callable[[], bytes]) -> None:
        """Apply a change and append its records, with nobody else writing meanwhile."""
        if self._fd < 0:
            change()
            return
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            self._follow()
            if os.fstat(self._fd).st_size > self._replayed_bytes:
                os.ftruncate(self._fd, self._replayed_bytes)  # a torn tail: its writer died
            record = change()
            os.write(self._fd, record)
            self._replayed_bytes += len(record)
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _follow(self) -> None:
        """Replay what has been appended since."""
        if self._fd < 0:
            return
        size_bytes = os.fstat(self._fd).st_size
        if size_bytes == self._replayed_bytes:
            return
        if size_bytes < self._replayed_bytes:
            self._index, self._replayed_bytes = RadixIndex(), 0
        tail = os.pread(self._fd, size_bytes - self._replayed_bytes, self._replayed_bytes)
        records, taken = decode_records(tail)
        for record in records:
            self._index.apply(record)
        self._replayed_bytes += taken
