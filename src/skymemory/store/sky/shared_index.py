"""Radix index on the ground, shared by the processes of one computer through an append-only journal.

**Reads and writes.** A change is a record, appended under a file lock; each lookup first replays others' records
(``_follow``).

**Waiting.** No read waits for the file lock, a put at most ``LOCK_WAIT_S``. The record then goes to a side file without
a lock; the index is incomplete until the next holder has moved it into the journal.

**Damage.** The first process that sees a torn record cuts the journal off there and appends a record of the loss.

**Compaction.** A journal mostly about removed blocks is replaced by a minimal journal, written beside it and renamed;
others open it when they find theirs removed. What an older release still appends to the old journal is copied.
"""

from __future__ import annotations

import copy
import fcntl
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from skymemory.errors import InvalidInput, MalformedPacket
from skymemory.forks import OwnLock
from skymemory.index.journal import (
    JournalState,
    Record,
    RecordOp,
    decode_records,
    encode_record,
    replay_all,
    write_records,
)
from skymemory.index.radix import BlockInfo, RadixIndex
from skymemory.kv.block import Place
from skymemory.pacing import Backoff

_log = logging.getLogger(__name__)

LOCK_WAIT_S = 0.5
"""Longest wait of a put for the lock."""
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.0001, 0.005
_BESIDE, _TAKEN = ".late", ".taken"
_LOOKS = 50  # attempts to read a torn record of the side file, perhaps only being written
COMPACT_BYTES = 1 << 20
"""Least size for compaction."""
_COMPACT_TIMES = 4  # least factor of compaction, which adds a fourth to the cost of a block
_BLOCK_BYTES = 68
_NEW = ".new"
_LOCKS = Path("/proc/locks")
# Wait for earlier releases' writers at a replaced journal's lock; a writer just woken is not seen.
_LEAST_WAIT_S, _MOST_WAIT_S = 0.01, 0.5
_KEPT_JOURNALS = 4
_PIECE_BYTES = 8 << 20
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


@dataclass(slots=True)
class _Replaced:
    """Journal that we have replaced, and its bytes copied."""

    fd: int
    taken_bytes: int


class SharedIndex:
    """``RadixIndex`` that follows its journal file, if any. Thread-safe. InvalidInput if it cannot be opened."""

    def __init__(self, path: Path | None = None, *, born: bool | None = None) -> None:
        """Open. ``born``: the constellation is empty, so a new journal is complete."""
        self._index = RadixIndex()
        self._state = JournalState(path is None if born is None else born and path is None)
        self._path = path
        self._fd = -1
        self._replayed_bytes = 0
        self._compact_at_bytes = COMPACT_BYTES
        self._beside = "" if path is None else f"{path}{_BESIDE}"
        self._taken = f"{self._beside}{_TAKEN}"
        self.unwritten = 0
        self.written_beside = 0
        self.locked_out = False  # True if the last write did not get the lock
        self._ahead = False  # True if we know records that the journal lacks
        self._lost = False  # True if such records could not be written anywhere
        self._kept_beside = False  # True if there was a side file at the last replay
        self._unread = False  # True if the journal has a torn tail, perhaps only being written
        self._shortened = False  # True if the journal was cut before replayed records, which this program never does
        self._old: deque[_Replaced] = deque()
        # Lock of our threads. The file lock excludes only other processes; a forked child, which shares it, closes its
        # copy.
        self._lock = OwnLock("this index" if path is None else f"the index {path}", self.close)
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._fd = os.open(path, _FLAGS, 0o600)
            except OSError as error:
                raise InvalidInput(
                    f"cannot open the index {path}: {error.strerror}: it must be a file that this user may read and "
                    "write; ?index=no in an address does without it"
                ) from error
            if born:
                self._write(lambda: b"" if self._replayed_bytes else self._record_state(Record(RecordOp.BORN)), True)

    @property
    def journal_state(self) -> JournalState:
        with self._lock:
            self._follow()
            state = copy.copy(self._state)
            state.complete = self.complete
            return state

    @property
    def complete(self) -> bool:
        """Return True if keys missed by the last lookup are absent."""
        return self._state.complete and not (self._unread or self._lost or self._kept_beside)

    @property
    def unknown_records(self) -> int:
        return self._state.unknown_records

    def record_probes(self, keys_probed: int, values_adopted: int) -> None:
        self._write(lambda: self._record_state(Record(RecordOp.PROBED, probed=(keys_probed, values_adopted))))

    def __len__(self) -> int:
        with self._lock:
            self._follow()
            return len(self._index)

    def assume_capacity(self, memory_bytes: float) -> None:
        with self._lock:
            self._index.capacity_bytes = memory_bytes

    def bytes_by_servers(self) -> dict[int, float]:
        with self._lock:
            self._follow()
            return self._index.bytes_by_servers()

    def longest_prefix(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            self._follow()
            return self._index.longest_prefix(keys)

    def before(self, key: bytes, most: int) -> list[bytes]:
        """Return known blocks before ``key``, nearest first."""
        ancestors: list[bytes] = []
        with self._lock:
            self._follow()
            while len(ancestors) < most and (place := self._index.place_of(key)) is not None and place[1] is not None:
                key = place[1]
                ancestors.append(key)
        return ancestors

    def infos(self, keys: Sequence[bytes]) -> list[BlockInfo | None]:
        with self._lock:
            self._follow()
            return self._index.infos(keys)

    def add(
        self,
        keys: Sequence[bytes],
        infos: Sequence[BlockInfo],
        start: int,
        parent: bytes | None,
        *,
        patient: bool = True,
    ) -> None:
        """Add a chain at its writer's places, replacing older entries; contradictory places are dropped."""
        self._write(lambda: self._enter_chain(keys, infos, start, parent), patient)

    def _enter_chain(
        self, keys: Sequence[bytes], infos: Sequence[BlockInfo], start: int, parent: bytes | None
    ) -> bytes:
        with suppress(InvalidInput):
            return self._enter(keys, infos, start, parent)
        # On a contradiction, drop the entries of these blocks and try again; then block by block.
        record = self._drop(keys)
        with suppress(InvalidInput):
            return record + self._enter(keys, infos, start, parent)
        for at, (key, info) in enumerate(zip(keys, infos, strict=True)):
            try:
                record += self._enter([key], [info], start + at, keys[at - 1] if at else parent)
            except InvalidInput:
                record += self._enter_unplaced(key, info)
        return record

    def _drop(self, keys: Sequence[bytes]) -> bytes:
        removed = [key for key in keys if self._index.remove(key)]
        return encode_record(Record(RecordOp.REMOVE, removed)) if removed else b""

    def record_of(self, key: bytes, info: BlockInfo, place: Place | None) -> bytes:
        """Return the record that adds a value; empty if contradictory."""
        if place is not None:
            start, parent = place.depth, place.parent
        else:
            with self._lock:
                self._follow()
                start, parent = self._index.place_of(key) or self._index.free_place(key)
        with suppress(InvalidInput):
            return encode_record(Record(RecordOp.ADD, [key], [info], start, parent))
        return b""

    def add_record(self, record: bytes) -> bool:
        """Add a record; False, unchanged, if it contradicts the index."""

        def change() -> bytes:
            replay_all(record, self._index, self._state)
            return record

        try:
            self._write(change, patient=True)
        except InvalidInput:
            return False
        return True

    def add_unplaced(self, keys: Sequence[bytes], infos: Sequence[BlockInfo], *, patient: bool = True) -> None:
        self._write(lambda: b"".join(self._enter_unplaced(*entry) for entry in zip(keys, infos, strict=True)), patient)

    def _enter_unplaced(self, key: bytes, info: BlockInfo) -> bytes:
        return self._enter([key], [info], *(self._index.place_of(key) or self._index.free_place(key)))

    def _enter(self, keys: Sequence[bytes], infos: Sequence[BlockInfo], start: int, parent: bytes | None) -> bytes:
        """Add entries by replaying their record, as others will. InvalidInput, unchanged, on a contradiction."""
        record = encode_record(Record(RecordOp.ADD, keys, infos, start, parent))
        replay_all(record, self._index, self._state)
        return record

    def replace(
        self, key: bytes, expected: Callable[[BlockInfo], bool], changed: Callable[[BlockInfo], BlockInfo]
    ) -> bool:
        """Compare and swap a key's entry; True if it was still ``expected``.

        Not tried without the lock: what its holder writes would be undone.
        """
        done = False

        def change() -> bytes:
            nonlocal done
            entry, place = self._index.get(key), self._index.place_of(key)
            if entry is None or place is None or not expected(entry):
                return b""
            record = self._enter([key], [changed(entry)], *place)
            done = True
            return record

        return self._write(change, patient=True, side_file=False) and done

    def remove(self, keys: Sequence[bytes], *, patient: bool = True) -> None:
        self._write(lambda: self._drop(keys), patient)

    def clear(self) -> None:
        self._write(self._clear, patient=True)

    def _clear(self) -> bytes:
        self._index.clear()
        return encode_record(Record(RecordOp.CLEAR))

    def close(self) -> None:
        if self._old and not self._lock.owner.elsewhere:
            with self._lock:
                self._copy_from_replaced()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        while self._old:
            os.close(self._old.pop().fd)

    def _record_state(self, record: Record) -> bytes:
        self._state.apply(record)
        return encode_record(record)

    def _write(self, change: Callable[[], bytes], patient: bool = False, *, side_file: bool = True) -> bool:
        """Apply a change and append its records; to the side file if the lock is not free (``patient``: after
        ``LOCK_WAIT_S``). False: the disk is full; or, without ``side_file``, nothing changed.
        """
        give_up_s, pauses = time.monotonic() + (LOCK_WAIT_S if patient else 0.0), Backoff(_LEAST_PAUSE_S, _MOST_PAUSE_S)
        while True:
            with self._lock:
                if self._fd < 0:
                    change()
                    return True
                written = self._try_write(change)
                if written is None and (self.locked_out or time.monotonic() >= give_up_s):
                    if patient:
                        self._note_lock(locked_out=True)
                    return side_file and self._write_beside(change)
            if written is not None:
                others_wait, is_complete = written
                if others_wait:
                    self._wait_for_writers_of_old()
                return is_complete
            time.sleep(pauses.next_s())  # without our lock: other threads continue reading

    def _try_write(self, change: Callable[[], bytes]) -> tuple[bool, bool] | None:
        """Apply and append a change if the file lock is free, else None. Returns as ``_write_locked``."""
        if self._fd < 0:
            return None
        # 1. Lock the current journal; 2. replay others' records; 3. change and append; 4. compact if needed.
        while True:
            if self._old:
                self._copy_from_replaced()
            if not self._lock_now():
                return None
            try:
                status = os.fstat(self._fd)
                removed = not status.st_nlink and self._path is not None and self._path.exists()
                if not removed:
                    self._note_lock(locked_out=False)
                    return self._write_locked(change, status.st_size)
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            self._reopen()  # it was replaced before we had the lock

    def _lock_now(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _note_lock(self, *, locked_out: bool) -> None:
        if locked_out and not self.locked_out:
            _log.warning(
                "another process has held the lock of the index %s for more than %g s (is it stopped?): until it is "
                "free, satellites are asked for what the index does not name",
                self._path,
                LOCK_WAIT_S,
            )
        elif self.locked_out and not locked_out:
            _log.warning("the lock of the index %s is free again", self._path)
        self.locked_out = locked_out

    def _write_locked(self, change: Callable[[], bytes], size_bytes: int) -> tuple[bool, bool]:
        """Apply a change, with the file lock. Return True if processes wait for a replaced journal's lock, and True if
        written.
        """
        if self._ahead:  # new records must follow from the journal's content
            self._reset()
        if size_bytes != self._replayed_bytes and not self._replay(size_bytes) and not self._cut_off():
            self._reset()
            return False, False
        self._unread = False
        if self._lost or self._is_beside():
            self._take_in()
        record, is_written = change(), False
        try:
            is_written = not record or self._append(record)
        finally:
            if not is_written:  # other processes cannot read it, so this process must not know it either
                self._reset()
        compacted = self._replayed_bytes >= self._compact_at_bytes and self._compact()
        return compacted and _lock_is_awaited(self._fd), is_written

    # --- records in the side file ---

    def _write_beside(self, change: Callable[[], bytes]) -> bool:
        """Apply a change and append it to the side file; False if the disk is full."""
        self._follow()
        state = copy.copy(self._state)
        record = change()
        self._state = state  # a record about the journal counts once it is in the journal
        if not record or not self._beside:
            return True
        if not self._ahead:  # after a power cut, the side file must not be newer than the journal that it depends on
            _sync(self._fd)
        self._ahead = True
        self.written_beside += 1
        try:
            if self._append_beside(record, self._beside):
                return True
        except FileNotFoundError:  # the folder was removed: no constellation runs there
            return True
        except OSError:
            self._lost = True
        self.unwritten += 1
        return False

    @staticmethod
    def _append_beside(record: bytes, path: str) -> bool:
        """Append. False, leaving a torn tail, without room; OSError if even that fails."""
        while True:
            fd = os.open(path, _FLAGS | os.O_NOFOLLOW, 0o600)
            try:
                try:
                    is_written = os.write(fd, record) == len(record)
                except OSError:
                    os.ftruncate(fd, os.fstat(fd).st_size + 1)
                    is_written = False
                # If the file was renamed before this write, its reader may have missed our record: write again.
                # Twice is harmless.
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(fd), os.lstat(path)):
                        return is_written
            finally:
                os.close(fd)

    def _is_beside(self) -> bool:
        return os.path.exists(self._beside) or os.path.exists(self._taken)

    def _take_in(self) -> None:
        """Move the side file's records into the journal, with the file lock; after a kill the next process does."""
        lost, self._lost = self._lost, False
        for is_new in (False, True):  # first the file renamed by a process that was killed
            try:
                if is_new:
                    os.rename(self._beside, self._taken)  # later writers create another file
                if not self._move_in(self._taken):
                    return  # no room: the journal has a torn tail now, and the file stays
            except FileNotFoundError:
                pass
            except OSError:
                lost = True
        if lost:
            self._append_lost()

    def _move_in(self, path: str) -> bool:
        """Append a side file's records to the journal, and remove it; False without room."""
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        taken_bytes, removed, attempts = 0, False, _LOOKS
        try:
            while True:
                data = os.pread(fd, os.fstat(fd).st_size - taken_bytes, taken_bytes)
                try:
                    records, whole_bytes = decode_records(data)
                except MalformedPacket:
                    records, whole_bytes = [], 0
                is_torn = whole_bytes < len(data)
                if is_torn and attempts:
                    attempts -= 1
                    time.sleep(_LEAST_PAUSE_S)
                    continue
                if not self._append(b"".join(self._repeat(record) for record in records)):
                    return False
                taken_bytes += whole_bytes
                if removed:  # earlier releases' appends before the removal are in the journal too
                    return True
                if not data or is_torn:
                    if is_torn:
                        self._append_lost()
                    # Flush in this order: after a power cut an old file must not be read in again.
                    _sync(self._fd)
                    os.unlink(path)
                    _sync_folder(path)
                    removed = True
        finally:
            os.close(fd)

    def _repeat(self, record: Record) -> bytes:
        """Apply a record of another file; return the journal's."""
        if record.op is RecordOp.ADD:
            return self._enter_chain(record.hashes, record.infos, record.start, record.parent)
        if record.op is RecordOp.REMOVE:
            return self._drop(record.hashes)
        if record.op is RecordOp.CLEAR:
            return self._clear()
        if record.op is RecordOp.PROBED:
            return self._record_state(record)
        return b""

    # --- the journal's length ---

    def _compact(self) -> bool:
        """Replace a journal mostly about removed blocks; True if done."""
        blocks, path, state = len(self._index), self._path, self._state
        least_bytes = COMPACT_BYTES + _COMPACT_TIMES * _BLOCK_BYTES * blocks
        self._compact_at_bytes = least_bytes
        if path is None or self._replayed_bytes < least_bytes or state.unknown_records:
            return False
        self._compact_at_bytes = self._replayed_bytes + COMPACT_BYTES  # if it fails, do not retry at every write
        path = path.resolve()
        new = path.with_name(path.name + _NEW)
        probed = Record(RecordOp.PROBED, probed=(state.keys_probed, state.values_adopted))
        head = [encode_record(Record(RecordOp.BORN))] if state.complete else []
        head += [encode_record(probed)] if state.keys_probed else []
        try:
            new.unlink(missing_ok=True)  # left by a process that was killed here
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.writelines(head)
                write_records(self._index, file.write)
                file.flush()
                os.fsync(file.fileno())  # after a power cut the name must not stand for less than the old journal
            new.rename(path)
            _sync_folder(os.fspath(path))
        except OSError:  # disk full, or no permission: the old journal is intact, and keeps growing
            with suppress(OSError):
                new.unlink(missing_ok=True)
            return False
        if len(self._old) == _KEPT_JOURNALS:
            os.close(self._old.popleft().fd)
        self._old.append(_Replaced(os.dup(self._fd), self._replayed_bytes))
        return True

    def _wait_for_writers_of_old(self) -> None:
        """Wait for older releases that write to the replaced journal; copy their records."""
        started_s, is_done = time.monotonic(), False
        while not is_done and time.monotonic() < started_s + _MOST_WAIT_S:
            time.sleep(0.001)
            with self._lock:
                if not self._old:  # closed
                    return
                old = self._old[-1].fd
                if time.monotonic() > started_s + _LEAST_WAIT_S and not _lock_is_awaited(old):
                    with suppress(BlockingIOError):  # the last of them is writing
                        fcntl.flock(old, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        fcntl.flock(old, fcntl.LOCK_UN)
                        is_done = True
        with self._lock:
            self._copy_from_replaced()

    def _copy_from_replaced(self) -> None:
        for old in list(self._old):
            new_bytes = os.fstat(old.fd).st_size - old.taken_bytes
            if new_bytes <= 0:
                continue
            records, read_bytes = decode_records(os.pread(old.fd, new_bytes, old.taken_bytes))
            old.taken_bytes += read_bytes
            for record in records:
                self._write(lambda record=record: self._repeat(record))  # type: ignore[misc]

    def _append(self, record: bytes) -> bool:
        """Append. False without room: the torn tail shows others the loss. OSError if even that fails."""
        try:
            written = os.write(self._fd, record)
        except OSError:
            # An extra byte is a torn tail without data: other processes see that a record is missing.
            written = 0
            if os.fstat(self._fd).st_size == self._replayed_bytes:
                os.ftruncate(self._fd, self._replayed_bytes + 1)  # takes no space
        if written < len(record):
            self.unwritten += 1
            return False
        self._replayed_bytes += written
        return True

    def _reset(self) -> None:
        index = RadixIndex()
        index.capacity_bytes = self._index.capacity_bytes
        self._index, self._state, self._replayed_bytes = index, JournalState(), 0
        self._compact_at_bytes = COMPACT_BYTES
        self._ahead = False

    def _reopen(self) -> None:
        """Open the journal that replaced ours; keep ours if the folder was removed."""
        if self._path is None:
            return
        try:
            fd = os.open(self._path, _FLAGS, 0o600)
        except FileNotFoundError:
            return
        os.close(self._fd)
        self._fd = fd
        self._reset()
        self._shortened = False

    def _follow(self) -> None:
        """Replay what others have written, in the journal or its successor; cut off a torn record."""
        if self._old:
            self._copy_from_replaced()
        if self._fd < 0:
            return
        # Checked before the journal is replayed: a process removes the side file only once its records are in the
        # journal.
        self._kept_beside = self._is_beside()
        if (self._kept_beside or self._lost) and self._try_write(lambda: b"") is not None:
            self._kept_beside = self._is_beside()
        status = os.fstat(self._fd)
        if not status.st_nlink:
            self._reopen()
            status = os.fstat(self._fd)
        self._unread = status.st_size != self._replayed_bytes and not self._replay(status.st_size)
        if self._unread and self._lock_now():  # otherwise it is perhaps only being written
            try:
                self._unread = not self._replay(os.fstat(self._fd).st_size) and not self._cut_off()
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _replay(self, size_bytes: int) -> bool:
        """Replay up to ``size_bytes``; False if damaged there."""
        if size_bytes < self._replayed_bytes:
            self._reset()
            self._shortened = True
        try:
            is_intact = self._replay_on(size_bytes)
        except InvalidInput:  # it contradicts records not in the journal yet: those are added again, as far as they fit
            if not self._ahead:
                raise
            self._reset()
            is_intact = self._replay_on(size_bytes)
        return is_intact and not self._shortened

    def _replay_on(self, size_bytes: int) -> bool:
        """Replay in pieces; False at an unreadable record."""
        piece_bytes = _PIECE_BYTES
        while self._replayed_bytes < size_bytes:
            left_bytes = size_bytes - self._replayed_bytes
            piece = os.pread(self._fd, min(piece_bytes, left_bytes), self._replayed_bytes)
            replayed_bytes = replay_all(piece, self._index, self._state)
            self._replayed_bytes += replayed_bytes
            if not replayed_bytes:  # damaged, or a record longer than the piece
                if piece_bytes >= left_bytes:
                    break
                piece_bytes *= 4
        return self._replayed_bytes == size_bytes

    def _cut_off(self) -> bool:
        """Overwrite the unreadable tail with a record of the loss."""
        record = self._record_state(Record(RecordOp.LOST))
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_APPEND)
        try:
            is_written = os.pwrite(self._fd, record, self._replayed_bytes) == len(record)
        except OSError:
            is_written = False
        finally:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
        if is_written:
            self._replayed_bytes += len(record)
        else:
            self.unwritten += 1
        os.ftruncate(self._fd, self._replayed_bytes if is_written else self._replayed_bytes + 1)
        self._shortened = False
        return is_written

    def _append_lost(self) -> None:
        self._append(self._record_state(Record(RecordOp.LOST)))


def _lock_is_awaited(fd: int) -> bool:
    inode = os.fstat(fd).st_ino
    try:
        lines = _LOCKS.read_text("ascii").splitlines()
    except OSError:
        return False
    return any("->" in line and f":{inode} " in line for line in lines)


def _sync(fd: int) -> None:
    with suppress(OSError):  # best effort: some file systems cannot
        os.fsync(fd)


def _sync_folder(path: str) -> None:
    with suppress(OSError):
        fd = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _sync(fd)
        finally:
            os.close(fd)


def create_journal(path: Path) -> None:
    """Create the complete, empty journal of a new constellation."""
    path.unlink(missing_ok=True)  # a client of the previous constellation may have created a journal
    for suffix in (_NEW, _BESIDE, _BESIDE + _TAKEN):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    SharedIndex(path, born=True).close()


def inspect_journal(path: Path) -> tuple[JournalState, int] | None:
    """Return a journal's state and number of values, if any."""
    if not path.exists():
        return None
    index = SharedIndex(path)
    try:
        return index.journal_state, len(index)
    finally:
        index.close()
