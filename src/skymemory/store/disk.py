"""The disk tier: values as files under a byte budget, found again by the next process.

What was acknowledged survives a kill of the process at any moment; with ``sync="each"`` a power cut too. What a crash,
a bad sector or a hand broke fails a checksum: a miss, counted and dropped, never wrong bytes.
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

from skymemory.errors import InvalidInput, LaterVersion
from skymemory.eviction.policies import DEFAULT_POLICY
from skymemory.kv.block import Place
from skymemory.kv.value import LATER_VERSION
from skymemory.metrics import SharedCounters
from skymemory.store.accounting import Entry, Shelf
from skymemory.store.base import (
    LEASE_S,
    Buffer,
    KeyReport,
    LoadReport,
    LoadTicket,
    Places,
    StoreTicket,
    check_keys,
)
from skymemory.store.buffer_pool import Rooms, aligned_bytes
from skymemory.store.disk_files import FAULTS_OF_THE_FILE, StoreDirectory, read_value, stored_bytes, write_part
from skymemory.store.memory import ShelfStore

Sync = Literal["never", "each"]
"""When bytes must be on the disk itself: whenever the kernel likes, or before a store is acknowledged."""

_LEARN_FROM_BYTES = 1 << 20
"""Loads below this say more of the call than of the disk."""


class DiskStore(ShelfStore):
    """Values in files under ``path``, at most ``budget_bytes`` of them (without 64 bytes and a name each).

    One process at a time; any number of threads. ``pin_fraction`` of the budget may be pinned; pins are forgotten with
    the process. ``clock`` gives seconds, compared only with itself.

    Raises:
        InvalidInput: no budget, an unknown ``sync``, or a directory that cannot be used (``StoreDirectory``).
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
        super().__init__(name, Shelf(budget_bytes, int(budget_bytes * pin_fraction), policy), lease_s, clock)
        self._synced = sync == "each"
        self._rooms = Rooms()
        self._counters = SharedCounters()
        self._bytes_per_s = 1e9
        self._used_ns = 0
        self.on_evict: Callable[[bytes, bytes, Place | None], object] | None = None
        """What goes is read for it, before it goes: whoever asks this of a disk reads about as much as it writes."""
        self._directory = StoreDirectory(path)
        try:
            self._find_again()
        except BaseException:
            self._directory.close()
            raise

    def _find_again(self) -> None:
        """The index out of the directory; what is over the budget goes, least recently used first."""
        found = sorted(self._directory.scan(), key=lambda value: value.used_ns)
        for value in found:
            if value.later:
                self._shelf.keep(value.key, value.size_bytes)
                continue
            self._shelf.put(value.key, value.size_bytes)
            self._used_ns = max(self._used_ns, value.used_ns)
        self._counters.add("torn", self._directory.torn)
        self._evict(self._shelf.over_budget(self._clock()))

    # --- loading ---

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        with self._open():
            self._shelf.take_load(ticket)
            started_s = self._clock()
            found = {key: self._shelf.entries[key] for key in ticket.keys if key in self._shelf.entries}
            total_bytes = sum(entry.size_bytes for entry in found.values())
            ticket.state = room = self._rooms.take(sum(aligned_bytes(entry.size_bytes) for entry in found.values()))
        reads: dict[bytes, Reading] = {}
        at = 0
        for key, entry in found.items():
            reads[key] = self._read(key, entry, room.data[at : at + entry.size_bytes])
            at += aligned_bytes(entry.size_bytes)
        seconds = self._clock() - started_s
        with self._lock:
            self._shelf.end_lease(ticket)
            self._stamp(self._shelf.use(list(dict.fromkeys(ticket.keys))))
            if total_bytes >= _LEARN_FROM_BYTES and seconds > 0:
                self._bytes_per_s += (total_bytes / seconds - self._bytes_per_s) / 4
            got = [reads.get(key, LATER if key in self._shelf.kept else ABSENT) for key in ticket.keys]
            self._counters.add("hits", sum(read.view is not None for read in got))
            self._counters.add("misses", sum(read.view is None for read in got))
        ticket.report = LoadReport(tuple(self._key_report(read) for read in got), seconds)
        return [read.view for read in got]

    def _read(self, key: bytes, entry: Entry, out: memoryview) -> Reading:
        """Without the lock: the file may be replaced or removed meanwhile, which is no fault of the disk's."""
        reading = read_file(self._directory.path_text_of(key), key, out, self._clock)
        if reading.view is not None:
            return reading
        with self._lock:
            now = self._shelf.entries.get(key)
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
            self._shelf.close_load(ticket)
            room, ticket.state = ticket.state, None
        if isinstance(room, np.ndarray) and ticket.report is not None:
            self._rooms.give_back(room)

    # --- storing ---

    def prepare_store(self, items: Sequence[tuple[bytes, Buffer]], places: Places = ()) -> StoreTicket:
        """What has to go for these goes once they are written."""
        with self._open():
            ticket, given = self._shelf.open_store(items, places, self._clock(), self._lease_s, self._name)
            self._counters.add("refused", given.count(False))
            return ticket

    def complete_store(self, ticket: StoreTicket) -> list[bool]:
        with self._open():
            started_s = self._clock()
            given = self._shelf.take_store(ticket, started_s)
            items = [item for item, yes in zip(ticket.items, given, strict=True) if yes]
        places = {key: place for (key, _), place in zip(ticket.items, ticket.places, strict=True)}
        done: set[bytes] = set()
        parts = Parts(self._directory, self._synced, lambda error: self._counters.add("failed", label=error))
        sizes = {key: memoryview(value).nbytes for key, value in items}
        try:
            written = parts.write(items, lambda size_bytes: self._make_room(ticket, list(sizes.items()), size_bytes))
            with self._lock:
                if not self._closed and self._shelf.has_room(ticket, self._clock()):
                    for key, size_bytes in parts.settle(self._evict_for(written)):
                        self._shelf.put(key, size_bytes, places[key])
                        done.add(key)
                    self._stamp(self._shelf.touch([key for key, _ in ticket.items]))
            if self._synced and done:
                self._directory.sync()
        except OSError as error:  # the names could not be synced: what is not sure is not acknowledged
            self._counters.add("failed", label=name_of(error))
            done.clear()
        finally:
            with self._lock:
                self._shelf.end_store(ticket)
            parts.discard()
        self._counters.add("stored", len(done))
        ticket.seconds = self._clock() - started_s
        return [yes and key in done for (key, _), yes in zip(ticket.items, given, strict=True)]

    def _evict_for(self, written: Sequence[tuple[bytes, int]]) -> list[bytes]:
        """Keys of the first of these that have room now. With the lock held."""
        count, victims = self._shelf.in_the_way(written)
        self._counters.add("refused", len(written) - count)
        return [key for key, _ in written[:count]] if self._evict(victims) else []

    def _make_room(self, ticket: StoreTicket, items: Sequence[tuple[bytes, int]], size_bytes: int) -> bool:
        """On a full disk: what is in the way of these goes before they are written, if that makes room for so many
        bytes. Else it stays, for it would go in vain.
        """
        with self._lock:
            if self._closed or not self._shelf.has_room(ticket, self._clock()):
                return False
            _, victims = self._shelf.in_the_way(items)
            if not victims:
                return False
            freed_bytes = sum(self._shelf.entries[key].size_bytes for key in victims)
            return freed_bytes + self._directory.free_bytes() >= size_bytes and self._evict(victims)

    # --- keeping ---

    def touch(self, keys: Sequence[bytes]) -> None:
        keys = check_keys(keys)
        with self._open():
            self._shelf.chains.learn(keys)
            self._stamp(self._shelf.touch(keys))

    def delete(self, keys: Sequence[bytes]) -> list[bool | None]:
        keys = check_keys(keys)
        with self._open():
            return [self._drop(key) for key in keys]

    def _drop(self, key: bytes) -> bool | None:
        """Whether it was here and is gone; None where its file cannot be removed: it stays."""
        if key not in self._shelf.entries:
            return False
        if not self._directory.remove(self._directory.path_of(key)):
            self._counters.add("unremoved")
            return None
        return self._shelf.remove(key)

    def _evict(self, victims: Sequence[bytes]) -> bool:
        """Their files go, up to the first that cannot be removed; whether all went. With the lock held, so that nobody
        puts or deletes one of them before it was told of.
        """
        for key in victims:
            path = self._directory.path_of(key)
            told = None if self.on_evict is None else whole_value(self._directory.path_text_of(key), key)
            if not self._directory.remove(path):
                self._counters.add("unremoved")
                return False
            self._shelf.evict(key)
            place = self._shelf.take_place(key)
            self._counters.add("evicted")
            if self.on_evict is not None and told is not None:
                self.on_evict(key, told, place)
        return True

    def _stamp(self, keys: Sequence[bytes]) -> None:
        """The order of use, for the next process; later keys of ``keys`` are the more recent."""
        for key in keys:
            self._used_ns = max(self._used_ns + 1, time.time_ns())
            self._directory.stamp(key, self._used_ns)

    # --- itself ---

    def stats(self) -> dict[str, int | float]:
        with self._lock:
            return {
                **{f"{name}_total": value for name, value in self._counters.as_dict().items()},
                **self._account(),
                "later_version": len(self._shelf.kept),
            }

    def estimate_load_s(self, keys: Sequence[bytes], now_s: float) -> float:
        keys = check_keys(keys)
        with self._open():
            there = self._shelf.entries
            return sum(there[key].size_bytes if key in there else math.inf for key in keys) / self._bytes_per_s

    def close(self) -> None:
        if self._lock.owner.elsewhere:
            return
        with self._lock:
            if not self._closed:
                self._closed = True
                self._directory.close()


# One value out of its file, and what is to be thought of it if it is not there.


@dataclass(frozen=True, slots=True)
class Reading:
    """``view`` is None for a miss, and ``reason`` then says why. ``lost``: it will be no better next time."""

    view: memoryview | None
    seconds: float = 0.0
    reason: str = ""
    lost: bool = False


ABSENT = Reading(None, reason="absent")
LATER = Reading(None, reason=LATER_VERSION)


def read_file(path: str, key: bytes, out: memoryview, clock: Callable[[], float]) -> Reading:
    """The value of ``key`` into ``out``, which is just as long."""
    started_s = clock()
    try:
        whole = read_value(path, key, out)
    except OSError as error:
        reason = "absent" if error.errno == errno.ENOENT else "unreadable"
        return Reading(None, clock() - started_s, reason, error.errno in FAULTS_OF_THE_FILE)
    if not whole:
        return Reading(None, clock() - started_s, "corrupt", lost=True)
    return Reading(out.toreadonly(), clock() - started_s)


def whole_value(path: str, key: bytes) -> bytes | None:
    """A value of any size, or None where the file does not hold it."""
    try:
        size_bytes = stored_bytes(Path(path), key)
        if size_bytes is None:
            return None
        value = bytearray(size_bytes)
        return bytes(value) if read_value(path, key, memoryview(value)) else None
    except (OSError, LaterVersion):
        return None


# The values of one store on their way: written beside their places, then renamed into them.


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
