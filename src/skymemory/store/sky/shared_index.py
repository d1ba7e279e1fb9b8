"""The local radix index, shared by the processes of one computer through an append-only journal.

Every change is one record appended under a file lock; every reader replays what others appended before it looks. Where
the journal was removed and the constellation started anew, the index begins anew with it. Without a path the index
lives and dies with the process.

A journal knows whether it is complete (``index.journal``). What is torn or damaged is cut off by the first process
that sees it, and that something was lost is written in its place. So it is where a disk is full.

Where most of a journal is about what is gone, its writer puts a new one in its place that says the same in the fewest
records: written beside it, then renamed, so that a process killed at any moment leaves one of the two whole. Others,
who have the old one open, find it removed. An older release looks for that before it waits for the lock, and not
after: what it still appends to the old one, its replacer takes over into the new one.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from skymemory.errors import InvalidInput
from skymemory.forks import OwnLock
from skymemory.index.block_info import BlockInfo
from skymemory.index.journal import Record, RecordOp, Standing, decode_records, encode_record
from skymemory.index.radix import RadixIndex

COMPACT_BYTES = 1 << 20
"""A journal smaller than that stays as it is: it is replayed in a tenth of a second."""
_COMPACT_TIMES = 4
"""A larger one is written anew once it is so many times what it would be then: so its blocks cost a fourth more."""
_BLOCK_BYTES = 68
_NEW = ".new"
_LOCKS = Path("/proc/locks")
_LEAST_WAIT_S, _MOST_WAIT_S = 0.01, 2.0
"""How long those who already wait for the lock of a journal that was replaced are waited for. Each holds it for about a
millisecond; but one that was just woken up is not seen waiting any more.
"""
_KEPT_JOURNALS = 4
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


@dataclass(slots=True)
class _Replaced:
    """A journal in whose place we have put another, still open, and how much of it is in the new one."""

    fd: int
    taken_bytes: int


class SharedIndex:
    """A ``RadixIndex`` that follows its journal file. May be used from any thread.

    Raises:
        InvalidInput: there is no journal at the path that this user may write, and none can be made.
    """

    def __init__(self, path: Path | None = None, *, born: bool | None = None) -> None:
        """``born``: the constellation is known to be empty now, so a new journal begins complete. By default that is
        believed of an index without a file only.
        """
        self._index = RadixIndex()
        self._standing = Standing(path is None if born is None else born and path is None)
        self._path = path
        self._fd = -1
        self._replayed_bytes = 0
        self._compact_at_bytes = COMPACT_BYTES
        self.unwritten = 0
        """Changes, and notes of a loss, that there was no room for in the journal."""
        self._shortened = False
        """Somebody has cut records off that we had replayed; none of us does."""
        self._old: deque[_Replaced] = deque()
        self._lock = OwnLock("this index" if path is None else f"the index {path}", self.close)
        """The file's lock keeps out other processes, not the threads of this one; nor a forked child, which has it with
        the descriptor. So the child closes its copy.
        """
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._fd = os.open(path, _FLAGS, 0o600)
            except OSError as error:
                raise InvalidInput(
                    f"cannot open the index {path}: {error.strerror}: it must be a file that this user may read and "
                    "write; or do without it (?index=no in an address)"
                ) from error
            if born:
                self._write(lambda: b"" if self._replayed_bytes else self._noted(Record(RecordOp.BORN)))

    @property
    def standing(self) -> Standing:
        """What the journal says of itself, as of now."""
        with self._lock:
            self._reopen()
            self._follow()
            return self._standing

    @property
    def complete(self) -> bool:
        """``standing.complete`` as of the last look at the journal."""
        return self._standing.complete

    @property
    def unknown_records(self) -> int:
        """Records of a later release in the journal, as of the last look at it. They stay there, unread."""
        return self._standing.unknown_records

    def note_probed(self, keys_probed: int, values_adopted: int) -> None:
        """Write down what probing has brought."""
        self._write(lambda: self._noted(Record(RecordOp.PROBED, probed=(keys_probed, values_adopted))))

    def __len__(self) -> int:
        with self._lock:
            self._reopen()
            self._follow()
            return len(self._index)

    def longest_prefix(self, keys: Sequence[bytes]) -> int:
        """Leading keys that are all present; ``keys`` may begin anywhere in a chain, or be of none."""
        with self._lock:
            self._reopen()
            self._follow()
            count = self._index.longest_prefix(keys)
            # By search that is as far as places are known. From there key by key: they may not begin at a chain's first
            # block, and the places of some are not known.
            while count < len(keys) and keys[count] in self._index:
                count += 1
            return count

    def before(self, key: bytes, most: int) -> list[bytes]:
        """Up to ``most`` blocks before ``key``, the nearest first, as far as the places of blocks here are known."""
        found: list[bytes] = []
        with self._lock:
            self._reopen()
            self._follow()
            while len(found) < most and (place := self._index.place_of(key)) is not None and place[1] is not None:
                key = place[1]
                found.append(key)
        return found

    def infos(self, keys: Sequence[bytes]) -> list[BlockInfo | None]:
        """What is known of each key."""
        with self._lock:
            self._reopen()
            self._follow()
            return [self._index.get(key) for key in keys]

    def add(self, keys: Sequence[bytes], infos: Sequence[BlockInfo], start: int, parent: bytes | None) -> None:
        """Add a chain with the places that its writer gives, which replace what is known of the same blocks. Blocks
        whose place contradicts those of other blocks are entered without one.
        """

        def change() -> bytes:
            with suppress(InvalidInput):
                return self._enter(keys, infos, start, parent)
            gone = [key for key in keys if self._index.remove(key)]
            record = encode_record(RecordOp.REMOVE, gone) if gone else b""
            with suppress(InvalidInput):
                return record + self._enter(keys, infos, start, parent)
            for at, (key, info) in enumerate(zip(keys, infos, strict=True)):
                try:
                    record += self._enter([key], [info], start + at, keys[at - 1] if at else parent)
                except InvalidInput:
                    record += self._enter_unplaced(key, info)
            return record

        self._write(change)

    def add_unplaced(self, keys: Sequence[bytes], infos: Sequence[BlockInfo]) -> None:
        """Add values without their places. Places that are known stay."""
        self._write(lambda: b"".join(self._enter_unplaced(*entry) for entry in zip(keys, infos, strict=True)))

    def _enter_unplaced(self, key: bytes, info: BlockInfo) -> bytes:
        return self._enter([key], [info], *(self._index.place_of(key) or self._index.free_place(key)))

    def _enter(self, keys: Sequence[bytes], infos: Sequence[BlockInfo], start: int, parent: bytes | None) -> bytes:
        """In the index here, and the record for the others; InvalidInput, and nothing done, for a contradiction."""
        self._index.add(keys, infos, start, parent)
        return encode_record(RecordOp.ADD, keys, infos, start=start, parent=parent)

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

        return self._write(change) and done

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
        if self._old and not self._lock.owner.elsewhere:
            with self._lock:
                self._take_over()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        while self._old:
            os.close(self._old.pop().fd)

    def _noted(self, record: Record) -> bytes:
        self._standing.apply(record)
        return encode_record(record.op, probed=record.probed)

    def _write(self, change: Callable[[], bytes]) -> bool:
        """Apply a change and append its records, while no other process writes. False: there was no room for it,
        and the journal is incomplete from now on.
        """
        with self._lock:
            if self._fd < 0:
                change()
                return True
            while True:
                self._reopen()
                with self._alone():
                    if self._replaced():
                        continue  # while we waited for the lock
                    if not self._replay():
                        self._cut_off()
                    record, whole = change(), False
                    try:
                        whole = self._append(record)
                    finally:
                        if not whole:  # what others cannot read is not known here either
                            self._forget()
                    awaited = (
                        self._replayed_bytes >= self._compact_at_bytes
                        and self._compact()
                        and _lock_is_awaited(self._fd)
                    )
                if awaited:
                    self._wait_for_writers_of_the_old()
                return whole

    def _compact(self) -> bool:
        """Put a journal in the place of this one that says the same in the fewest records, if that is much less;
        whether that was done. With nobody else writing. Others take it once they find theirs removed, and so do we.
        """
        blocks, path, standing = len(self._index), self._path, self._standing
        least_bytes = COMPACT_BYTES + _COMPACT_TIMES * _BLOCK_BYTES * blocks
        self._compact_at_bytes = least_bytes
        if path is None or self._replayed_bytes < least_bytes or standing.unknown_records:
            return False
        self._compact_at_bytes = self._replayed_bytes + COMPACT_BYTES  # where it fails it is not tried at every write
        path = path.resolve()
        new = path.with_name(path.name + _NEW)
        probed = Record(RecordOp.PROBED, probed=(standing.keys_probed, standing.values_adopted))
        head = [encode_record(RecordOp.BORN)] if standing.complete else []
        head += [encode_record(probed.op, probed=probed.probed)] if standing.keys_probed else []
        try:
            new.unlink(missing_ok=True)  # of a process that was killed here
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.writelines(head)
                file.writelines(self._index.records())
            new.rename(path)
        except OSError:  # no room, or no right to: the old one is whole, and grows on
            with suppress(OSError):
                new.unlink(missing_ok=True)
            return False
        if len(self._old) == _KEPT_JOURNALS:
            os.close(self._old.popleft().fd)
        self._old.append(_Replaced(os.dup(self._fd), self._replayed_bytes))
        return True

    def _wait_for_writers_of_the_old(self) -> None:
        """Take over what those append to the journal just replaced who waited for its lock meanwhile."""
        began_s, old = time.monotonic(), self._old[-1].fd
        ended = False
        while not ended and time.monotonic() < began_s + _MOST_WAIT_S:
            time.sleep(0.001)
            if time.monotonic() > began_s + _LEAST_WAIT_S and not _lock_is_awaited(old):
                with suppress(BlockingIOError):  # the last of them is writing
                    fcntl.flock(old, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    fcntl.flock(old, fcntl.LOCK_UN)
                    ended = True
        self._take_over()

    def _take_over(self) -> None:
        """Enter here what has been appended to journals that we have replaced since."""
        for old in list(self._old):
            since = os.fstat(old.fd).st_size - old.taken_bytes
            if since <= 0:
                continue
            records, taken = decode_records(os.pread(old.fd, since, old.taken_bytes))
            old.taken_bytes += taken
            for record in records:
                if record.op is RecordOp.ADD:
                    self.add(record.hashes, record.infos, record.start, record.parent)
                elif record.op is RecordOp.REMOVE:
                    self.remove(record.hashes)
                elif record.op is RecordOp.CLEAR:
                    self.clear()
                elif record.op is RecordOp.PROBED:
                    self.note_probed(*record.probed)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process writes meanwhile."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _append(self, record: bytes) -> bool:
        """Whether there was room for it. If not, it gets a torn tail, which other processes see; OSError where not
        even that can be written.
        """
        try:
            written = os.write(self._fd, record)
        except OSError:
            written = 0
            if os.fstat(self._fd).st_size == self._replayed_bytes:
                os.ftruncate(self._fd, self._replayed_bytes + 1)  # takes no room
        if written < len(record):
            self.unwritten += 1
            return False
        self._replayed_bytes += written
        return True

    def _forget(self) -> None:
        self._index, self._standing, self._replayed_bytes = RadixIndex(), Standing(), 0
        self._compact_at_bytes = COMPACT_BYTES

    def _reopen(self) -> None:
        """Take the new journal where ours was removed. With its folder gone no constellation runs there: keep ours."""
        if self._old:
            self._take_over()
        if self._fd < 0 or self._path is None or os.fstat(self._fd).st_nlink:
            return
        try:
            fresh = os.open(self._path, _FLAGS, 0o600)
        except FileNotFoundError:
            return
        os.close(self._fd)
        self._fd = fresh
        self._forget()
        self._shortened = False

    def _replaced(self) -> bool:
        """Whether another journal has taken the place of the one that is open."""
        return self._path is not None and not os.fstat(self._fd).st_nlink and self._path.exists()

    def _follow(self) -> None:
        """Replay what has been appended since; what is torn or damaged is cut off."""
        if self._fd < 0 or os.fstat(self._fd).st_size == self._replayed_bytes or self._replay():
            return
        with self._alone():  # perhaps it was only being written
            if not self._replay():
                self._cut_off()

    def _replay(self) -> bool:
        """Apply what has been appended since; False if the journal is not whole."""
        size_bytes = os.fstat(self._fd).st_size
        if size_bytes < self._replayed_bytes:
            self._forget()
            self._shortened = True
        records, taken = decode_records(os.pread(self._fd, size_bytes - self._replayed_bytes, self._replayed_bytes))
        for record in records:
            self._index.apply(record)
            self._standing.apply(record)
        self._replayed_bytes += taken
        return not self._shortened and self._replayed_bytes == size_bytes

    def _cut_off(self) -> None:
        """Remove what cannot be replayed, and write down that something was lost."""
        os.ftruncate(self._fd, self._replayed_bytes)
        self._shortened = False
        self._append(self._noted(Record(RecordOp.LOST)))


def _lock_is_awaited(fd: int) -> bool:
    """Whether a process waits for a lock on this file, as far as the kernel lets us see."""
    inode = os.fstat(fd).st_ino
    try:
        lines = _LOCKS.read_text("ascii").splitlines()
    except OSError:
        return False
    return any("->" in line and f":{inode} " in line for line in lines)


def found_journal(path: Path) -> None:
    """Begin the complete journal of a constellation that is about to start, empty."""
    path.unlink(missing_ok=True)  # a client of the one before may have made one anew
    path.with_name(path.name + _NEW).unlink(missing_ok=True)
    SharedIndex(path, born=True).close()


def look_at_journal(path: Path) -> tuple[Standing, int] | None:
    """What a journal says of itself, and how many values it knows; None if there is none."""
    if not path.exists():
        return None
    index = SharedIndex(path)
    try:
        return index.standing, len(index)
    finally:
        index.close()
