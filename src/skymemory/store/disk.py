"""Disk tier: values as files within a byte budget, found again by the next process.

An acknowledged value survives a kill of the process, and with ``sync="each"`` a power cut. A damaged file is a miss.
"""

from __future__ import annotations

import errno
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from skymemory.errors import InvalidInput, LaterVersion, no_room_reason
from skymemory.eviction import DEFAULT_POLICY
from skymemory.forks import OwnLock
from skymemory.metrics import SharedCounters
from skymemory.reasons import Miss
from skymemory.store.accounting import BudgetedStore, Inventory, StoredEntry
from skymemory.store.base import (
    LEASE_S,
    Buffer,
    BufferPool,
    KeyReport,
    LoadReport,
    LoadTicket,
    ReadRate,
    StoreTicket,
    aligned_bytes,
    check_keys,
    value_buffer,
)
from skymemory.store.disk_files import (
    FAULTS_OF_THE_FILE,
    FULL,
    StoreDirectory,
    beginning_of,
    read_value,
    read_value_now,
    stored_bytes,
    write_part,
)

Sync = Literal["never", "each"]
"""Flushing: by the kernel, or before a store is acknowledged."""
_STAMPS_S = 1.0  # interval of writing use times; a kill loses the order since then


_ROOM_S = 60.0
_ROOM_TRIES = 3  # limit of evictions for one value: freed space may be available late


class DiskStore(BudgetedStore):
    """Store of values in files under ``path``: at most ``budget_bytes``, plus 64 bytes and a name each.

    One process at a time; any number of threads. Pins end with the process. InvalidInput: no budget, an unknown
    ``sync``, or an unusable directory.
    """

    def __init__(
        self,
        path: Path,
        budget_bytes: int,
        *,
        name: str = "disk",
        policy: str = DEFAULT_POLICY,
        sync: Sync = "never",
        lease_s: float = LEASE_S,
        pin_fraction: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if budget_bytes <= 0:
            raise InvalidInput(f"the disk store needs a budget above 0 bytes, got {budget_bytes}")
        if sync not in get_args(Sync):
            raise InvalidInput(f"sync={sync!r}: expected {' or '.join(get_args(Sync))}")
        inventory = Inventory(budget_bytes, int(budget_bytes * pin_fraction), policy)
        super().__init__(name, inventory, lease_s, clock, SharedCounters())
        self._synced = sync == "each"
        self._buffers = BufferPool()
        self._rate = ReadRate()
        self._used_ns = 0  # latest use time given to a file: each gets a later time
        self._unstamped: dict[bytes, None] = {}  # keys used since use times were written, in order
        self._stamp_again_s = -math.inf
        # Bytes that the full disk proved to hold, and the time until which this limit applies.
        self._room_bytes, self._room_until_s = budget_bytes, -math.inf
        self._directory = StoreDirectory(path, synced=self._synced)
        try:
            self._scan()
        except BaseException:
            self._directory.close()
            raise

    def _scan(self) -> None:
        """Enter earlier processes' values, least recently used first; evict what exceeds the budget."""
        values = sorted(self._directory.scan(), key=lambda value: value.used_ns)
        now_s = self._clock()
        for value in values:
            if value.later:
                self._inventory.keep(value.key, value.size_bytes)
                continue
            self._inventory.put(value.key, value.size_bytes)
            if value.until_s < math.inf:
                self._inventory.lifetimes.give(value.key, now_s + value.until_s - time.time())
            self._used_ns = max(self._used_ns, value.used_ns)
        self._counters.add("torn", self._directory.torn)
        self._evict(self._inventory.over_budget(self._clock()))

    # --- loading ---

    def get_many(self, keys: Sequence[bytes]) -> list[memoryview | None]:
        """Load. A single key needs no lease: evicted meanwhile, it is read or is a miss."""
        if len(keys) != 1:
            return super().get_many(keys)
        (key,) = check_keys(keys)
        with self._open():
            entry = self._inventory.entries.get(key)
        read = ABSENT
        if entry is not None:
            read = self._read(key, entry, value_buffer(entry.size_bytes))
        with self._lock:
            if entry is not None:
                self._stamp(self._inventory.use([key]))
                self._rate.learn(entry.size_bytes, read.seconds)
            self._counters.add("misses" if read.view is None else "hits")
        return [read.view]

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        with self._open():
            self._inventory.take_load(ticket)
            started_s = self._clock()
            readable, ticket.state = self._room_for(ticket)
        # Read without the lock, so that loads of several threads run concurrently.
        reads = {key: self._read(key, entry, out) for key, entry, out in readable}
        with self._lock:
            return self._loaded(ticket, reads, started_s)

    def load_now(self, ticket: LoadTicket) -> list[memoryview | None] | None:
        """Complete the load if all values are in the page cache and the lock is free; else None, changing nothing."""
        with self.at_once() as free:
            started_s = self._clock()
            if not free or started_s >= self._stamp_again_s:  # the next load writes stamps
                return None
            readable, buffer = self._room_for(ticket)
        reads: dict[bytes, Reading] = {}
        for key, _, out in readable:
            read_started_s = self._clock()
            if not read_value_now(self._directory.path_text_of(key), key, out):
                break
            reads[key] = Reading(out.toreadonly(), self._clock() - read_started_s)
        with self.at_once() as free:
            if free and reads.keys() >= set(ticket.keys):
                self._inventory.take_load(ticket)
                ticket.state = buffer
                return self._loaded(ticket, reads, started_s, stamps_wait=True)
        self._buffers.give_back(buffer)
        return None

    def at_once(self) -> HeldNow:
        return HeldNow(self._lock, self._may_hold)

    def _may_hold(self) -> bool:
        """Return True if calls will not block. Requires the lock."""
        next_s = self._inventory.lifetimes.next_s
        return not self._closed and (next_s == math.inf or next_s > self._clock())

    def _room_for(self, ticket: LoadTicket) -> tuple[list[tuple[bytes, StoredEntry, memoryview]], np.ndarray]:
        """Return key, entry and destination of present values, and the pooled buffer."""
        entries = self._inventory.entries
        present = [(key, entries[key]) for key in dict.fromkeys(ticket.keys) if key in entries]
        buffer = self._buffers.take(sum(aligned_bytes(entry.size_bytes) for _, entry in present))
        rooms, at = [], 0
        for key, entry in present:
            rooms.append((key, entry, buffer.data[at : at + entry.size_bytes]))
            at += aligned_bytes(entry.size_bytes)
        return rooms, buffer

    def _loaded(
        self, ticket: LoadTicket, reads: dict[bytes, Reading], started_s: float, *, stamps_wait: bool = False
    ) -> list[memoryview | None]:
        """End the lease, count uses, hits and misses, and return the views. ``stamps_wait``: write no use times."""
        seconds = self._clock() - started_s
        self._inventory.end_lease(ticket)
        self._stamp(self._inventory.use(list(dict.fromkeys(ticket.keys))), wait=stamps_wait)
        outcomes = [reads.get(key, LATER if key in self._inventory.kept else ABSENT) for key in ticket.keys]
        self._rate.learn(sum(read.view.nbytes for read in reads.values() if read.view is not None), seconds)
        views = [read.view for read in outcomes]
        misses = views.count(None)
        self._counters.add("hits", len(views) - misses)
        self._counters.add("misses", misses)
        ticket.report = LoadReport(tuple([self._key_report(read) for read in outcomes]), seconds)
        return views

    def _read(self, key: bytes, entry: StoredEntry, out: memoryview) -> Reading:
        """Read without the lock: a file replaced meanwhile is read again."""
        reading = read_file(self._directory.path_text_of(key), key, out, self._clock)
        if reading.reason is None:
            return reading
        with self._lock:
            now = self._inventory.entries.get(key)
            if now is entry:
                self._counters.add("unread", label=reading.reason)
                if reading.lost:
                    self._drop(key)
                return reading
        if now is None:
            return ABSENT
        return self._read(key, now, np.empty(now.size_bytes, dtype=np.uint8).data)

    def _key_report(self, read: Reading) -> KeyReport:
        if read.view is None:
            return KeyReport(seconds=read.seconds, reason=read.reason)
        return KeyReport(self._name, read.view.nbytes, read.seconds)

    def release(self, ticket: LoadTicket) -> None:
        with self._lock:
            super().release(ticket)
            buffer, ticket.state = ticket.state, None
        if isinstance(buffer, np.ndarray) and ticket.report is not None:
            self._buffers.give_back(buffer)

    # --- storing ---

    def complete_store(self, ticket: StoreTicket) -> list[bool]:
        """Write partial files, evict, then rename the files into place."""
        with self._open():
            started_s = self._clock()
            granted = self._inventory.take_store(ticket, started_s)
            items = [item for item, ok in zip(ticket.items, granted, strict=True) if ok]
            sizes = {key: memoryview(value).nbytes for key, value in items}
            self._evict_for_disk(sum(sizes.values()), started_s)
        places = {key: place for (key, _), place in zip(ticket.items, ticket.places, strict=True)}
        done: set[bytes] = set()
        # Write without the lock, so that loads continue; evict and rename into place with it.
        parts = PartialFiles(self._directory, self._synced, lambda error: self._failed(ticket, error))
        try:
            written = parts.write(
                items, lambda size_bytes, error, tries: self._make_room(ticket, size_bytes, error, tries)
            )
            with self._lock:
                if not self._closed and self._inventory.has_room(ticket, self._clock()):
                    for key, size_bytes in parts.settle(self._evict_for(written)):
                        self._inventory.put(key, size_bytes, places[key])
                        done.add(key)
                    self._stamp(self._inventory.touch([key for key, _ in ticket.items]))
                if parts.evicted:
                    self._room_bytes, self._room_until_s = self._inventory.used_bytes, self._clock() + _ROOM_S
            if self._synced and done:
                self._directory.sync()
        except OSError as error:  # the names could not be synced, so nothing is acknowledged
            self._failed(ticket, error)
            done.clear()
        finally:
            with self._lock:
                self._inventory.end_store(ticket)
            parts.discard()
        self._counters.add("stored", len(done))
        ticket.seconds = self._clock() - started_s
        return [ok and key in done for (key, _), ok in zip(ticket.items, granted, strict=True)]

    def _failed(self, ticket: StoreTicket, error: OSError) -> None:
        self._counters.add("failed", label=name_of(error))
        ticket.reason = no_room_reason(self._directory.path, error)

    def _evict_for(self, written: Sequence[tuple[bytes, int]]) -> list[bytes]:
        count, victims = self._inventory.in_the_way(written)
        self._counters.add("refused", len(written) - count)
        return [key for key, _ in written[:count]] if self._evict(victims) else []

    def _evict_for_disk(self, size_bytes: int, now_s: float) -> None:
        if now_s < self._room_until_s:
            excess_bytes = self._inventory.used_bytes + size_bytes - self._room_bytes
            self._evict(self._inventory.victims_for(excess_bytes) or [])

    def _make_room(self, ticket: StoreTicket, size_bytes: int, error: OSError, tries: int) -> bool:
        """Evict for a value on a full disk, all or nothing; True if it may fit. ``tries``: earlier evictions for it."""
        with self._lock:
            if tries == _ROOM_TRIES or self._closed or not self._inventory.has_room(ticket, self._clock()):
                return False
            # Free space does not show quotas or inodes, and some of it may be reserved.
            is_visible = tries == 0 and error.errno != errno.EDQUOT
            needed_bytes = size_bytes - self._directory.free_bytes() if is_visible else size_bytes
            victims = self._inventory.victims_for(max(1, needed_bytes))
            return victims is not None and self._evict(victims)

    # --- keeping ---

    def touch(self, keys: Sequence[bytes]) -> None:
        keys = check_keys(keys)
        with self._open():
            self._inventory.order.learn(keys)
            self._stamp(self._inventory.touch(keys))

    def delete(self, keys: Sequence[bytes]) -> list[bool | None]:
        keys = check_keys(keys)
        with self._open():
            outcomes = [self._drop(key) for key in keys]
        if self._synced and self._directory.has_unsynced_removals:  # also of earlier evictions
            try:
                self._directory.sync()
            except OSError as error:  # after a power cut the files may be back
                self._counters.add("failed", label=name_of(error))
                return [None] * len(outcomes)
        return outcomes

    def _drop(self, key: bytes) -> bool | None:
        """Delete a value; False if absent, None if its file cannot be removed."""
        if key not in self._inventory.entries:
            return False
        if not self._directory.remove(self._directory.path_of(key)):
            self._counters.add("unremoved")
            return None
        return self._inventory.remove(key)

    def _promise(self, key: bytes, ttl_s: float) -> bool:
        until_s = time.time() + ttl_s
        recorded = key in self._inventory.entries and self._directory.expire(key, until_s, synced=self._synced)
        return recorded and super()._promise(key, ttl_s)

    def _beginning(self, key: bytes, size_bytes: int) -> Buffer:
        try:
            return beginning_of(self._directory.path_text_of(key), size_bytes)
        except OSError:
            return b""

    def _end(self, key: bytes) -> None:
        if self._drop(key) is None:  # the file stays unread; the next process tries to remove it again
            self._inventory.remove(key)

    def _evict(self, victims: Sequence[bytes]) -> bool:
        """Remove files up to the first failure. Requires the lock."""
        for key in victims:
            path = self._directory.path_of(key)
            value = None if self.on_evict is None else whole_value(self._directory.path_text_of(key), key)
            if not self._directory.remove(path):
                self._counters.add("unremoved")
                return False
            self._inventory.evict(key)
            place = self._inventory.take_place(key)
            self._counters.add("evicted")
            if self.on_evict is not None and value is not None:
                self.on_evict(key, value, place)
        return True

    def _stamp(self, keys: Sequence[bytes], *, wait: bool = False) -> None:
        for key in keys:
            self._unstamped.pop(key, None)
            self._unstamped[key] = None
        if not wait and (now_s := self._clock()) >= self._stamp_again_s:
            self._stamp_again_s = now_s + _STAMPS_S
            self._write_stamps()

    def _write_stamps(self) -> None:
        for key in self._unstamped:
            self._used_ns = max(self._used_ns + 1, time.time_ns())
            self._directory.stamp(key, self._used_ns)
        self._unstamped.clear()

    def stats(self) -> dict[str, int | float]:
        full = self._clock() < self._room_until_s
        room_bytes = min(self._room_bytes, self._inventory.budget_bytes) if full else self._inventory.budget_bytes
        return {**super().stats(), "later_version": len(self._inventory.kept), "room_bytes": room_bytes}

    def estimate_load_s(self, keys: Sequence[bytes], now_s: float) -> float:
        keys = check_keys(keys)
        with self._open():
            entries = self._inventory.entries
            return sum(entries[key].size_bytes if key in entries else math.inf for key in keys) / self._rate.bytes_per_s

    def close(self) -> None:
        if self._lock.owner.elsewhere:  # in a forked child
            return
        with self._lock:
            if not self._closed:
                self._closed = True
                self._write_stamps()
                self._directory.close()


class HeldNow:
    """Context manager that takes ``lock`` if it is free; yields True if calls will not block. (A generator takes three
    times as long.)
    """

    __slots__ = ("_held", "_lock", "_may_hold")

    def __init__(self, lock: OwnLock, may_hold: Callable[[], bool]) -> None:
        self._lock = lock
        self._may_hold = may_hold
        self._held = False

    def __enter__(self) -> bool:
        self._held = self._lock.acquire(blocking=False)
        return self._held and self._may_hold()

    def __exit__(self, *raised: object) -> None:
        if self._held:
            self._lock.release()


@dataclass(frozen=True, slots=True)
class Reading:
    """Outcome of reading a file: a view, or the reason for a miss. ``lost``: a retry will not help."""

    view: memoryview | None
    seconds: float = 0.0
    reason: Miss | None = None
    lost: bool = False


ABSENT = Reading(None, reason=Miss.ABSENT)
LATER = Reading(None, reason=Miss.LATER_VERSION)


def read_file(path: str, key: bytes, out: memoryview, clock: Callable[[], float]) -> Reading:
    started_s = clock()
    try:
        is_whole = read_value(path, key, out)
    except OSError as error:
        reason = Miss.ABSENT if error.errno == errno.ENOENT else Miss.UNREADABLE
        return Reading(None, clock() - started_s, reason, error.errno in FAULTS_OF_THE_FILE)
    if not is_whole:
        return Reading(None, clock() - started_s, Miss.CORRUPT, lost=True)
    return Reading(out.toreadonly(), clock() - started_s)


def whole_value(path: str, key: bytes) -> bytes | None:
    """Return the value of a file to be evicted; None if unreadable."""
    try:
        size_bytes = stored_bytes(Path(path), key)
        if size_bytes is None:
            return None
        value = bytearray(size_bytes)
        return bytes(value) if read_value(path, key, memoryview(value)) else None
    except (OSError, LaterVersion):
        return None


_NUMBERS = itertools.count()
MakeRoom = Callable[[int, OSError, int], bool]
"""Callback for a full disk: size, error, earlier calls for this value; True if it freed bytes."""


class PartialFiles:
    """Values of a store call, written beside their final files, then renamed. ``failed`` gets each error."""

    def __init__(self, directory: StoreDirectory, synced: bool, failed: Callable[[OSError], None]) -> None:
        self._directory = directory
        self._synced = synced
        self._failed = failed
        self._parts: dict[bytes, tuple[Path, int]] = {}
        self.evicted = False

    def write(self, items: Sequence[tuple[bytes, Buffer]], make_room: MakeRoom) -> list[tuple[bytes, int]]:
        """Write up to the first failure: the rest of a chain is useless. Return keys and sizes."""
        for key, value in items:
            data = memoryview(value).cast("B")
            try:
                self._directory.check_ours()
                part = self._write(key, data, make_room)
            except OSError as error:
                self._failed(error)
                break
            if key in self._parts:
                self._directory.remove(self._parts[key][0])
            self._parts[key] = part, data.nbytes
        return [(key, size_bytes) for key, (_, size_bytes) in self._parts.items()]

    def _write(self, key: bytes, data: memoryview, make_room: MakeRoom) -> Path:
        """Write a value's partial file; try again after evicting from a full disk, or restoring a removed folder."""
        part = self._directory.part_of(key, next(_NUMBERS))
        evictions = restored = 0
        while True:
            try:
                write_part(part, key, data, synced=self._synced)
                return part
            except OSError as error:
                if error.errno in FULL and make_room(data.nbytes, error, evictions):
                    evictions += 1
                    self.evicted = True
                elif error.errno == errno.ENOENT and not restored and self._directory.restore_values():
                    restored += 1
                else:
                    raise

    def settle(self, keys: Sequence[bytes]) -> list[tuple[bytes, int]]:
        """Rename into place up to the first failure; return keys and sizes."""
        settled: list[tuple[bytes, int]] = []
        for key in keys:
            part, size_bytes = self._parts[key]
            try:
                self._directory.check_ours()
                part.rename(self._directory.path_of(key))
            except OSError as error:
                self._failed(error)
                break
            del self._parts[key]
            settled.append((key, size_bytes))
        return settled

    def discard(self) -> None:
        for part, _ in self._parts.values():
            self._directory.remove(part)
        self._parts.clear()


def name_of(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, "unknown")
