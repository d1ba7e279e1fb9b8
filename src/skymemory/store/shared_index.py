"""The local radix index, shared by the processes of one computer through an append-only journal.

Every change is one record appended under a file lock; every reader replays what others appended before it looks. A
tail torn by a crash is cut off by the next writer. Where the journal was removed and the constellation started anew,
the index begins anew with it. Without a path the index lives and dies with the process.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from skymemory.errors import InvalidInput
from skymemory.index.block_info import BlockInfo
from skymemory.index.journal import RecordOp, decode_records, encode_record
from skymemory.index.radix import RadixIndex

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


class SharedIndex:
    """A ``RadixIndex`` that follows its journal file. May be used from any thread."""

    def __init__(self, path: Path | None = None) -> None:
        self._index = RadixIndex()
        self._path = path
        self._fd = -1
        self._replayed_bytes = 0
        self._lock = threading.Lock()
        """The file's lock keeps out other processes, not the threads of this one."""
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, _FLAGS, 0o600)

    def __len__(self) -> int:
        with self._lock:
            self._reopen()
            self._follow()
            return len(self._index)

    def longest_prefix(self, keys: Sequence[bytes]) -> int:
        """Leading keys that are all present; ``keys`` may begin anywhere in a chain."""
        with self._lock:
            self._reopen()
            self._follow()
            count = self._index.longest_prefix(keys)
            if count == 0 and keys and keys[0] in self._index:  # they do not begin at a chain's first block
                return next((at for at, key in enumerate(keys) if key not in self._index), len(keys))
            return count

    def infos(self, keys: Sequence[bytes]) -> list[BlockInfo | None]:
        """What is known of each key."""
        with self._lock:
            self._reopen()
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

    def replace(
        self, key: bytes, still: Callable[[BlockInfo], bool], changed: Callable[[BlockInfo], BlockInfo]
    ) -> bool:
        """Give a key that is there, and whose entry is ``still`` the right one, a changed entry in its place in the
        chain; whether that was done.
        """
        done = False

        def change() -> bytes:
            nonlocal done
            entry, place = self._index.get(key), self._index.place_of(key)
            if entry is None or place is None or not still(entry):
                return b""
            start, parent = place
            fresh = [changed(entry)]
            self._index.add([key], fresh, start, parent)
            done = True
            return encode_record(RecordOp.ADD, [key], fresh, start=start, parent=parent)

        self._write(change)
        return done

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
        with self._lock:
            if self._fd < 0:
                change()
                return
            self._reopen()
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                self._follow()
                if os.fstat(self._fd).st_size > self._replayed_bytes:
                    os.ftruncate(self._fd, self._replayed_bytes)  # a torn tail: its writer died
                self._append(change())
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _append(self, record: bytes) -> None:
        written = 0
        try:
            written = os.write(self._fd, record)
        finally:
            if written == len(record):
                self._replayed_bytes += written
            else:  # no room left: what others cannot read is not known here either
                self._index, self._replayed_bytes = RadixIndex(), 0

    def _reopen(self) -> None:
        """Take the new journal where ours was removed. With its folder gone no constellation runs there: keep ours."""
        if self._fd < 0 or self._path is None or os.fstat(self._fd).st_nlink:
            return
        try:
            fresh = os.open(self._path, _FLAGS, 0o600)
        except FileNotFoundError:
            return
        os.close(self._fd)
        self._fd = fresh
        self._index, self._replayed_bytes = RadixIndex(), 0

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
