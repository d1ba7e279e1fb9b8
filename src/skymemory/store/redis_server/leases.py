"""Leases of keys for which EXISTS has answered 1 (see ``commands``)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from skymemory.store.base import LoadTicket, Presence, Store
from skymemory.store.named_values import unwrap_store

LEASE_S = 30.0
_MAX_LEASES = 1 << 16


class Beginning:
    """Leases of a key that are being begun. A write of the key replaces it by another, so that they are dropped."""

    calls = 0


class Leases:
    """Leases of all clients, as started loads or held values. Thread-safe."""

    def __init__(
        self,
        store: Store,
        held_bytes: int,
        clock: Callable[[], float],
        left_s: Callable[[Sequence[bytes]], Sequence[float]],  # remaining lifetimes
    ) -> None:
        self._store = store
        self._left_s = left_s
        self._protects = unwrap_store(store).leases  # else values are held here
        self._held_bytes, self._used_bytes = held_bytes, 0
        self._clock = clock
        self._leases: dict[bytes, Lease] = {}
        # Keys being leased, with the mark of their last ``begin``; a write removes it.
        self._beginning: dict[bytes, Beginning] = {}
        self._lock = threading.Lock()

    def begin(self, keys: Sequence[bytes]) -> list[bool]:
        """Lease keys; True for each that the next GET will find."""
        exists = [presence is Presence.HIT for presence in self._store.lookup(keys)]
        lifetimes_s = self._left_s(keys) if any(exists) else [0.0] * len(keys)
        return [
            is_present and self._begin(key, remaining_s)
            for key, is_present, remaining_s in zip(keys, exists, lifetimes_s, strict=True)
        ]

    def _begin(self, key: bytes, left_s: float) -> bool:
        """Lease a key, or extend its lease; False if it is absent, or without room."""
        now_s = self._clock()
        ends_s = now_s + min(LEASE_S, left_s)
        with self._lock:
            self._expire(now_s)
            lease = self._leases.get(key)
            if lease is not None and lease.value is not None:
                lease.until_s = ends_s
                self._leases[key] = self._leases.pop(key)
                return True
            if lease is None and len(self._leases) >= _MAX_LEASES:
                return False
            # Calls that begin a lease of a key at the same time share a mark, so that none undoes another's lease.
            mark = self._beginning.setdefault(key, Beginning())
            mark.calls += 1
        ticket = self._store.prepare_load([key])
        lease = Lease(ends_s, ticket)
        added = False
        try:
            if self._protects:
                # The value may have been evicted since the lookup: prepare_load protects only values that still exist.
                exists = self._store.lookup([key]) == [Presence.HIT]
            else:
                (lease.value,) = self._store.complete_load(ticket)
                exists = lease.value is not None
            added = exists and self._add(key, lease, mark)
            return added
        finally:
            with self._lock:
                mark.calls -= 1
                if not mark.calls and self._beginning.get(key) is mark:
                    del self._beginning[key]
            if not added:
                self._store.release(ticket)

    def _add(self, key: bytes, lease: Lease, mark: Beginning) -> bool:
        """Keep a new lease; False without room, or if the key was written meanwhile."""
        size_bytes = 0 if lease.value is None else lease.value.nbytes
        with self._lock:
            # If the key was written or deleted meanwhile, the loaded value may be the previous value.
            fits = self._beginning.get(key) is mark and self._used_bytes + size_bytes <= self._held_bytes
            if fits:
                self._drop(key)
                self._leases[key] = lease
                self._used_bytes += size_bytes
        return fits

    def take(self, key: bytes) -> Lease | None:
        """Remove and return the lease; the caller ends its ticket."""
        if not self._leases:
            return None
        with self._lock:
            now_s = self._clock()
            self._expire(now_s)
            lease = self._leases.get(key)
            if lease is not None and lease.until_s <= now_s:  # it may stand after leases that end later
                self._drop(key)
            return self._pop(key)

    def shorten(self, key: bytes, left_s: float) -> None:
        with self._lock:
            lease = self._leases.get(key)
            if lease is not None:
                lease.until_s = min(lease.until_s, self._clock() + left_s)

    def end(self, key: bytes) -> None:
        """Drop a key's lease; called before and after each write."""
        if not self._leases and not self._beginning:
            return
        with self._lock:
            self._beginning.pop(key, None)
            self._drop(key)

    def _expire(self, now_s: float) -> None:
        for key in [key for key, lease in self._first() if lease.until_s <= now_s]:
            self._drop(key)

    def _first(self) -> Iterator[tuple[bytes, Lease]]:
        """Yield the oldest leases, enough to drop all expired over time."""
        for number, item in enumerate(self._leases.items()):
            if number == 64:
                return
            yield item

    def _pop(self, key: bytes) -> Lease | None:
        lease = self._leases.pop(key, None)
        if lease is not None and lease.value is not None:
            self._used_bytes -= lease.value.nbytes
        return lease

    def _drop(self, key: bytes) -> None:
        lease = self._pop(key)
        if lease is not None:
            self._store.release(lease.ticket)

    @property
    def held_bytes(self) -> int:
        return self._used_bytes


@dataclass(slots=True, eq=False)
class Lease:
    """Lease of a key. ``value`` is held if the store cannot protect it."""

    until_s: float
    ticket: LoadTicket
    value: memoryview | None = None
