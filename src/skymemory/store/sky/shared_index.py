"""The radix index on the ground, shared by the processes of one computer through an append-only journal.

**Reads and writes.** Every change is one record, appended under a file lock; before each lookup a process replays
what others have appended (``_follow``). Without a path the index lives in this process only. Where the journal was
removed, because the constellation was started again, the index starts empty, too.

**Waiting.** No read waits for the file lock, and a put waits ``LOCK_WAIT_S`` at most: its holder may be a stopped
process. What cannot be written then is appended to a file beside the journal, which takes no lock. While that file
exists the index counts as incomplete, so that satellites are asked for what it does not name; the next process that
gets the lock takes it (by another name), moves its records into the journal and removes it. Earlier releases do not
read it.

**Damage.** A journal records whether it is complete (``index.journal``). The first process that sees a torn or damaged
record cuts the journal off there, and appends that records were lost. So it does where a disk is full.

**Compaction.** When most of a journal is about removed blocks, its writer replaces it by one with the fewest records:
written beside it, then renamed, so that a process killed at any moment leaves one of the two whole. Other processes
find their open one removed, and open the new one. An older release checks for that before it waits for the lock, not
after: what it still appends to the old journal, the process that replaced it copies into the new one.
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

_log = logging.getLogger(__name__)

LOCK_WAIT_S = 0.5
"""A put waits for the lock this long, once. It is held for about a millisecond at a time, longer on a busy computer."""
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.0001, 0.005
"""Between two tries to get it."""
_BESIDE, _TAKEN = ".late", ".taken"
_LOOKS = 50
"""Looks at a torn record beside the journal, that another process may just be writing."""
COMPACT_BYTES = 1 << 20
"""A smaller journal is not compacted: it is replayed in a tenth of a second."""
_COMPACT_TIMES = 4
"""A larger one is compacted when that makes it this many times smaller: so its blocks cost a fourth more."""
_BLOCK_BYTES = 68
_NEW = ".new"
_LOCKS = Path("/proc/locks")
_LEAST_WAIT_S, _MOST_WAIT_S = 0.01, 0.5
"""How long to wait for writers of earlier releases that were waiting for the lock of a journal that was replaced. Each
holds it for about a millisecond; but one that has just been woken is no longer seen waiting.
"""
_KEPT_JOURNALS = 4
_PIECE_BYTES = 8 << 20
"""A long journal is replayed in pieces of this size, so that it is never in memory whole."""
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


@dataclass(slots=True)
class _Replaced:
    """A journal that we have replaced, still open, and how many of its bytes are in the new one."""

    fd: int
    taken_bytes: int


class SharedIndex:
    """A ``RadixIndex`` that follows its journal file. Thread-safe.

    Raises:
        InvalidInput: the path has no journal that this user may write, and none can be created.
    """

    def __init__(self, path: Path | None = None, *, born: bool | None = None) -> None:
        """``born``: the constellation is known to be empty now, so a new journal is complete. By default only an index
        without a file is.
        """
        self._index = RadixIndex()
        self._state = JournalState(path is None if born is None else born and path is None)
        self._path = path
        self._fd = -1
        self._replayed_bytes = 0
        self._compact_at_bytes = COMPACT_BYTES
        self._beside = "" if path is None else f"{path}{_BESIDE}"
        self._taken = f"{self._beside}{_TAKEN}"
        self.unwritten = 0
        """Records that the disk had no room for."""
        self.written_beside = 0
        """Records that were not written into the journal, because another process held its lock."""
        self.locked_out = False
        """Another process has held the lock for longer than ``LOCK_WAIT_S``, as of the last write."""
        self._ahead = False
        """We know records that are not in the journal yet."""
        self._lost = False
        """We knew such records, and could not write them anywhere."""
        self._kept_beside = False
        """Records were beside the journal when it was replayed last."""
        self._unread = False
        """The journal has a torn tail, and a process that holds the lock: perhaps it is only being written."""
        self._shortened = False
        """The journal was cut off before records that we have replayed: not by this program, which never does that."""
        self._old: deque[_Replaced] = deque()
        self._lock = OwnLock("this index" if path is None else f"the index {path}", self.close)
        """The file's lock keeps out other processes, not the threads of this one, nor a forked child, which shares it
        with the descriptor: so the child closes its copy.
        """
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
        """Whether the journal is complete, and what probing has added to it; as of now."""
        with self._lock:
            self._follow()
            state = copy.copy(self._state)
            state.complete = self.complete
            return state

    @property
    def complete(self) -> bool:
        """Whether keys that the last lookup did not find are absent: the journal is complete, and no record was kept
        beside it then.
        """
        return self._state.complete and not (self._unread or self._lost or self._kept_beside)

    @property
    def unknown_records(self) -> int:
        """Records of a later release in the journal, as of the last lookup. They stay there, unread."""
        return self._state.unknown_records

    def record_probes(self, keys_probed: int, values_adopted: int) -> None:
        """Log what probing has cost and found."""
        self._write(lambda: self._record_state(Record(RecordOp.PROBED, probed=(keys_probed, values_adopted))))

    def __len__(self) -> int:
        with self._lock:
            self._follow()
            return len(self._index)

    def assume_capacity(self, memory_bytes: float) -> None:
        """What is entered from now on is in a memory of this size."""
        with self._lock:
            self._index.capacity_bytes = memory_bytes

    def bytes_by_servers(self) -> dict[int, float]:
        """As in ``RadixIndex``."""
        with self._lock:
            self._follow()
            return self._index.bytes_by_servers()

    def longest_prefix(self, keys: Sequence[bytes]) -> int:
        """Leading keys that are all present; ``keys`` may start anywhere in a chain, or be no chain."""
        with self._lock:
            self._follow()
            return self._index.longest_prefix(keys)

    def before(self, key: bytes, most: int) -> list[bytes]:
        """Up to ``most`` blocks before ``key``, the nearest first, as far as places are known."""
        found: list[bytes] = []
        with self._lock:
            self._follow()
            while len(found) < most and (place := self._index.place_of(key)) is not None and place[1] is not None:
                key = place[1]
                found.append(key)
        return found

    def infos(self, keys: Sequence[bytes]) -> list[BlockInfo | None]:
        """The entry of each key; None if absent."""
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
        """Add a chain with the places that its writer gives, which replace older entries of the same blocks. Blocks
        whose places contradict those of other blocks are added without places. ``patient``: as in ``_write``.
        """
        self._write(lambda: self._enter_chain(keys, infos, start, parent), patient)

    def _enter_chain(
        self, keys: Sequence[bytes], infos: Sequence[BlockInfo], start: int, parent: bytes | None
    ) -> bytes:
        with suppress(InvalidInput):
            return self._enter(keys, infos, start, parent)
        # A contradiction: drop what is known of these blocks, and try again; then block by block.
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
        gone = [key for key in keys if self._index.remove(key)]
        return encode_record(RecordOp.REMOVE, gone) if gone else b""

    def record_of(self, key: bytes, info: BlockInfo, place: Place | None) -> bytes:
        """The record that adds one value, at the place that its writer gives, or that the index now has for it; empty
        for a place that contradicts itself.
        """
        if place is not None:
            start, parent = place.depth, place.parent
        else:
            with self._lock:
                self._follow()
                start, parent = self._index.place_of(key) or self._index.free_place(key)
        with suppress(InvalidInput):
            return encode_record(RecordOp.ADD, [key], [info], start=start, parent=parent)
        return b""

    def add_record(self, record: bytes) -> bool:
        """Add what ``record_of`` gave; False, and nothing is added, where that contradicts what is known by now."""

        def change() -> bytes:
            replay_all(record, self._index, self._state)
            return record

        try:
            self._write(change, patient=True)
        except InvalidInput:
            return False
        return True

    def add_unplaced(self, keys: Sequence[bytes], infos: Sequence[BlockInfo], *, patient: bool = True) -> None:
        """Add values without their places. Places that are known stay. ``patient``: as in ``_write``."""
        self._write(lambda: b"".join(self._enter_unplaced(*entry) for entry in zip(keys, infos, strict=True)), patient)

    def _enter_unplaced(self, key: bytes, info: BlockInfo) -> bytes:
        return self._enter([key], [info], *(self._index.place_of(key) or self._index.free_place(key)))

    def _enter(self, keys: Sequence[bytes], infos: Sequence[BlockInfo], start: int, parent: bytes | None) -> bytes:
        """Add to the index here what other processes will read: the record, which is returned. InvalidInput, and no
        change, for a contradiction.
        """
        record = encode_record(RecordOp.ADD, keys, infos, start=start, parent=parent)
        replay_all(record, self._index, self._state)
        return record

    def replace(
        self, key: bytes, expected: Callable[[BlockInfo], bool], changed: Callable[[BlockInfo], BlockInfo]
    ) -> bool:
        """Compare and swap: replace the entry of a key if it is still the ``expected`` one; returns whether it was."""
        done = False

        def change() -> bytes:
            nonlocal done
            entry, place = self._index.get(key), self._index.place_of(key)
            if entry is None or place is None or not expected(entry):
                return b""
            record = self._enter([key], [changed(entry)], *place)
            done = True
            return record

        return self._write(change, patient=True) and done

    def remove(self, keys: Sequence[bytes], *, patient: bool = True) -> None:
        self._write(lambda: self._drop(keys), patient)

    def clear(self) -> None:
        """Remove everything: the constellation was started again, empty."""
        self._write(self._clear, patient=True)

    def _clear(self) -> bytes:
        self._index.clear()
        return encode_record(RecordOp.CLEAR)

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
        return encode_record(record.op, probed=record.probed)

    def _write(self, change: Callable[[], bytes], patient: bool = False) -> bool:
        """Apply a change and append its records, while no other process writes; beside the journal if its lock is not
        free. ``patient``: wait for it first, ``LOCK_WAIT_S``. False: the disk is full, and the journal is incomplete
        from now on.
        """
        give_up_s, pause_s = time.monotonic() + (LOCK_WAIT_S if patient else 0.0), _LEAST_PAUSE_S
        while True:
            with self._lock:
                if self._fd < 0:
                    change()
                    return True
                written = self._try_write(change)
                if written is None and (self.locked_out or time.monotonic() >= give_up_s):
                    if patient:
                        self._note_lock(held=True)
                    return self._write_beside(change)
            if written is not None:
                others_wait, whole = written
                if others_wait:
                    self._wait_for_writers_of_old()
                return whole
            time.sleep(pause_s)  # without our lock: other threads go on reading
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)

    def _try_write(self, change: Callable[[], bytes]) -> tuple[bool, bool] | None:
        """As ``_write_locked``; None, and no change, where another process holds the lock."""
        if self._fd < 0:
            return None
        # 1. Lock the current journal; 2. replay what others wrote; 3. change and append; 4. compact, perhaps.
        while True:
            if self._old:
                self._copy_from_replaced()
            if not self._lock_now():
                return None
            try:
                now = os.fstat(self._fd)
                removed = not now.st_nlink and self._path is not None and self._path.exists()
                if not removed:
                    self._note_lock(held=False)
                    return self._write_locked(change, now.st_size)
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            self._reopen()  # it was replaced before we had the lock

    def _lock_now(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _note_lock(self, *, held: bool) -> None:
        """Log once that writers are locked out, and once that they are not any more."""
        if held and not self.locked_out:
            _log.warning(
                "another process has held the lock of the index %s for more than %g s (is it stopped?): until it is "
                "free, satellites are asked for what the index does not name",
                self._path,
                LOCK_WAIT_S,
            )
        elif self.locked_out and not held:
            _log.warning("the lock of the index %s is free again", self._path)
        self.locked_out = held

    def _write_locked(self, change: Callable[[], bytes], size_bytes: int) -> tuple[bool, bool]:
        """With the file lock held, of a journal of this size: whether processes wait for the lock of a journal that was
        replaced here, and whether the change is in the journal.
        """
        if self._ahead:  # what is appended must follow from what is in the journal
            self._reset()
        if size_bytes != self._replayed_bytes and not self._replay(size_bytes) and not self._cut_off():
            self._reset()
            return False, False
        self._unread = False
        if self._lost or self._is_beside():
            self._take_in()
        record, whole = change(), False
        try:
            whole = not record or self._append(record)
        finally:
            if not whole:  # other processes cannot read it, so it must not be known here either
                self._reset()
        compacted = self._replayed_bytes >= self._compact_at_bytes and self._compact()
        return compacted and _lock_is_awaited(self._fd), whole

    # --- records beside the journal ---

    def _write_beside(self, change: Callable[[], bytes]) -> bool:
        """Apply a change, and append its records to the file beside the journal. False: the disk is full."""
        self._follow()
        state = copy.copy(self._state)
        record = change()
        self._state = state  # a record about the journal counts once it is in it
        if not record or not self._beside:
            return True
        if not self._ahead:  # after a power cut it must not stand beside a journal that lacks what was before it
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
        """Returns whether there was room for it; if not, the file gets a torn tail. OSError where not even that can be
        written.
        """
        while True:
            fd = os.open(path, _FLAGS | os.O_NOFOLLOW, 0o600)
            try:
                try:
                    whole = os.write(fd, record) == len(record)
                except OSError:
                    os.ftruncate(fd, os.fstat(fd).st_size + 1)
                    whole = False
                # Taken before we wrote: the process that did so has not read our record, perhaps. Twice does no harm.
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(fd), os.lstat(path)):
                        return whole
            finally:
                os.close(fd)

    def _is_beside(self) -> bool:
        """Whether records are kept beside the journal."""
        return os.path.exists(self._beside) or os.path.exists(self._taken)

    def _take_in(self) -> None:
        """Move the records beside the journal into it. With the file lock held. What was lost there makes the journal
        incomplete. A process that is killed meanwhile leaves the file to the next.
        """
        lost, self._lost = self._lost, False
        for is_new in (False, True):  # first what a process that was killed had taken
            try:
                if is_new:
                    os.rename(self._beside, self._taken)  # who writes there from now on makes another
                if not self._move_in(self._taken):
                    return  # no room: the journal has a torn tail now, and the file stays
            except FileNotFoundError:
                pass
            except OSError:
                lost = True
        if lost:
            self._append_lost()

    def _move_in(self, path: str) -> bool:
        """Move the records of this file into the journal, and remove it. False: there is no room for them."""
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        taken_bytes, removed, looks = 0, False, _LOOKS
        try:
            while True:
                data = os.pread(fd, os.fstat(fd).st_size - taken_bytes, taken_bytes)
                try:
                    records, whole_bytes = decode_records(data)
                except MalformedPacket:
                    records, whole_bytes = [], 0
                torn = whole_bytes < len(data)
                if torn and looks:
                    looks -= 1
                    time.sleep(_LEAST_PAUSE_S)
                    continue
                if not self._append(b"".join(self._repeat(record) for record in records)):
                    return False
                taken_bytes += whole_bytes
                if removed:  # what earlier releases appended before the removal is in the journal, too
                    return True
                if not data or torn:
                    if torn:
                        self._append_lost()
                    # On the disk in this order: after a power cut an old file must not be taken in again.
                    _sync(self._fd)
                    os.unlink(path)
                    _sync_folder(path)
                    removed = True
        finally:
            os.close(fd)

    def _repeat(self, record: Record) -> bytes:
        """Apply a record of another journal; returns what to append to ours."""
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
        """Replace the journal by one with the fewest records, if that is much smaller; returns whether it was. With the
        file lock held. All processes, this one too, open the new one when they find theirs removed.
        """
        blocks, path, state = len(self._index), self._path, self._state
        least_bytes = COMPACT_BYTES + _COMPACT_TIMES * _BLOCK_BYTES * blocks
        self._compact_at_bytes = least_bytes
        if path is None or self._replayed_bytes < least_bytes or state.unknown_records:
            return False
        self._compact_at_bytes = self._replayed_bytes + COMPACT_BYTES  # if it fails, not at every write again
        path = path.resolve()
        new = path.with_name(path.name + _NEW)
        probed = Record(RecordOp.PROBED, probed=(state.keys_probed, state.values_adopted))
        head = [encode_record(RecordOp.BORN)] if state.complete else []
        head += [encode_record(probed.op, probed=probed.probed)] if state.keys_probed else []
        try:
            new.unlink(missing_ok=True)  # of a process that was killed here
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.writelines(head)
                write_records(self._index, file.write)
                file.flush()
                os.fsync(file.fileno())  # after a power cut the name must not stand for less than the old one
            new.rename(path)
            _sync_folder(os.fspath(path))
        except OSError:  # disk full, or no permission: the old one is whole, and keeps growing
            with suppress(OSError):
                new.unlink(missing_ok=True)
            return False
        if len(self._old) == _KEPT_JOURNALS:
            os.close(self._old.popleft().fd)
        self._old.append(_Replaced(os.dup(self._fd), self._replayed_bytes))
        return True

    def _wait_for_writers_of_old(self) -> None:
        """Copy what processes append to the journal just replaced that were waiting for its lock."""
        began_s, ended = time.monotonic(), False
        while not ended and time.monotonic() < began_s + _MOST_WAIT_S:
            time.sleep(0.001)
            with self._lock:
                if not self._old:  # closed
                    return
                old = self._old[-1].fd
                if time.monotonic() > began_s + _LEAST_WAIT_S and not _lock_is_awaited(old):
                    with suppress(BlockingIOError):  # the last of them is writing
                        fcntl.flock(old, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        fcntl.flock(old, fcntl.LOCK_UN)
                        ended = True
        with self._lock:
            self._copy_from_replaced()

    def _copy_from_replaced(self) -> None:
        """Add what was appended to journals since we replaced them."""
        for old in list(self._old):
            since = os.fstat(old.fd).st_size - old.taken_bytes
            if since <= 0:
                continue
            records, taken = decode_records(os.pread(old.fd, since, old.taken_bytes))
            old.taken_bytes += taken
            for record in records:
                self._write(lambda record=record: self._repeat(record))  # type: ignore[misc]

    def _append(self, record: bytes) -> bool:
        """Returns whether there was room for it. If not, the journal gets a torn tail, which other processes see;
        OSError where not even that can be written.
        """
        try:
            written = os.write(self._fd, record)
        except OSError:
            # One byte more is a torn tail without data: other processes see that a record is missing.
            written = 0
            if os.fstat(self._fd).st_size == self._replayed_bytes:
                os.ftruncate(self._fd, self._replayed_bytes + 1)  # takes no space
        if written < len(record):
            self.unwritten += 1
            return False
        self._replayed_bytes += written
        return True

    def _reset(self) -> None:
        fresh = RadixIndex()
        fresh.capacity_bytes = self._index.capacity_bytes
        self._index, self._state, self._replayed_bytes = fresh, JournalState(), 0
        self._compact_at_bytes = COMPACT_BYTES
        self._ahead = False

    def _reopen(self) -> None:
        """Open the new journal: ours was removed. If its folder is gone no constellation runs there: keep ours."""
        if self._path is None:
            return
        try:
            fresh = os.open(self._path, _FLAGS, 0o600)
        except FileNotFoundError:
            return
        os.close(self._fd)
        self._fd = fresh
        self._reset()
        self._shortened = False

    def _follow(self) -> None:
        """Replay what others have appended, in the journal that is there now; cut off what is torn or damaged."""
        if self._old:
            self._copy_from_replaced()
        if self._fd < 0:
            return
        # Looked for before the journal is replayed: who takes them removes them only once they are in it.
        self._kept_beside = self._is_beside()
        if (self._kept_beside or self._lost) and self._try_write(lambda: b"") is not None:
            self._kept_beside = self._is_beside()
        now = os.fstat(self._fd)
        if not now.st_nlink:
            self._reopen()
            now = os.fstat(self._fd)
        self._unread = now.st_size != self._replayed_bytes and not self._replay(now.st_size)
        if self._unread and self._lock_now():  # else it is only being written, perhaps
            try:
                self._unread = not self._replay(os.fstat(self._fd).st_size) and not self._cut_off()
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _replay(self, size_bytes: int) -> bool:
        """Apply what others have appended, to the end of a journal of this size; False if it is not whole."""
        if size_bytes < self._replayed_bytes:
            self._reset()
            self._shortened = True
        try:
            whole = self._replay_on(size_bytes)
        except InvalidInput:  # it contradicts what is not in the journal yet: that is added to it again, by what fits
            if not self._ahead:
                raise
            self._reset()
            whole = self._replay_on(size_bytes)
        return whole and not self._shortened

    def _replay_on(self, size_bytes: int) -> bool:
        piece_bytes = _PIECE_BYTES
        while self._replayed_bytes < size_bytes:
            left_bytes = size_bytes - self._replayed_bytes
            piece = os.pread(self._fd, min(piece_bytes, left_bytes), self._replayed_bytes)
            taken = replay_all(piece, self._index, self._state)
            self._replayed_bytes += taken
            if not taken:  # damaged, or a record that is longer than the piece
                if piece_bytes >= left_bytes:
                    break
                piece_bytes *= 4
        return self._replayed_bytes == size_bytes

    def _cut_off(self) -> bool:
        """Replace what cannot be replayed by a record that records were lost, which is written over it first: so the
        journal looks whole at no moment without. False: the disk has no room for it, and the tail stays torn.
        """
        record = self._record_state(Record(RecordOp.LOST))
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_APPEND)
        try:
            whole = os.pwrite(self._fd, record, self._replayed_bytes) == len(record)
        except OSError:
            whole = False
        finally:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
        if whole:
            self._replayed_bytes += len(record)
        else:
            self.unwritten += 1
        os.ftruncate(self._fd, self._replayed_bytes if whole else self._replayed_bytes + 1)
        self._shortened = False
        return whole

    def _append_lost(self) -> None:
        self._append(self._record_state(Record(RecordOp.LOST)))


def _lock_is_awaited(fd: int) -> bool:
    """Whether a process waits for a lock on this file, as far as the kernel shows."""
    inode = os.fstat(fd).st_ino
    try:
        lines = _LOCKS.read_text("ascii").splitlines()
    except OSError:
        return False
    return any("->" in line and f":{inode} " in line for line in lines)


def _sync(fd: int) -> None:
    with suppress(OSError):  # as good as the file system can
        os.fsync(fd)


def _sync_folder(path: str) -> None:
    with suppress(OSError):
        fd = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _sync(fd)
        finally:
            os.close(fd)


def create_journal(path: Path) -> None:
    """Create the complete journal of a constellation that is about to start, empty."""
    path.unlink(missing_ok=True)  # a client of the previous constellation may have created one
    for suffix in (_NEW, _BESIDE, _BESIDE + _TAKEN):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    SharedIndex(path, born=True).close()


def inspect_journal(path: Path) -> tuple[JournalState, int] | None:
    """A journal's state and number of values; None if there is no journal."""
    if not path.exists():
        return None
    index = SharedIndex(path)
    try:
        return index.journal_state, len(index)
    finally:
        index.close()
