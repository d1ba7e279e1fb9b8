"""Quota: so many bytes for one tenant; over them it evicts its own oldest values first, never another's.

They go once the new one is stored, so that what the store below refuses costs nothing: while a put is under way, and
until its victims are confirmed to be gone, a tenant has up to that one put more.

Tenants have keys of their own, because their salt is in the hash of every block: so a tenant's handle on a store sees
all of its writes, and no other tenant's. It counts the values that it stored until the store says that they are gone: a
read that brings nothing in an outage, or an unconfirmed deletion, does not say so.

What the tenant has leased or pinned through this handle does not go for its quota; the room for others is less by it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from skymemory.errors import InvalidInput
from skymemory.forks import OwnLock
from skymemory.metrics import Counters
from skymemory.store.base import LEASE_S, Buffer, LoadTicket, Store, check_keys
from skymemory.store.wrapped import Selecting
from skymemory.units import format_size


class TenantStore(Selecting):
    """One tenant's handle on a store. Several tenants of one process share the store, each through its own handle.
    ``clock`` gives seconds, compared only with itself.
    """

    def __init__(
        self, store: Store, tenant: str, quota_bytes: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if quota_bytes <= 0:
            raise InvalidInput(f"tenant {tenant!r}: a quota of {format_size(quota_bytes)}: expected more than nothing")
        super().__init__(store)
        self.tenant = tenant
        self.quota_bytes = quota_bytes
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        """Least recently used first."""
        self._used_bytes = 0
        self._clock = clock
        self._leases: dict[object, tuple[tuple[bytes, ...], float]] = {}
        """Keys of each open load, and when their lease ends at the latest."""
        self._pins: dict[bytes, float] = {}
        """When each ends."""
        self._counters = Counters()
        self._lock = OwnLock(f"the store of tenant {tenant!r}")

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def select(self, items: Sequence[tuple[bytes, Buffer]]) -> list[bool]:
        """As many of the chain's first blocks as the quota holds. Nothing goes for them before they are stored; but
        while what had to go for others is not confirmed to be gone, nothing more is taken.
        """
        sizes = {key: memoryview(value).nbytes for key, value in items}
        with self._lock:
            self._evict_excess()
            staying_bytes = sum(self._sizes.get(key, 0) for key in self._staying() - sizes.keys())
            room_bytes = self.quota_bytes - staying_bytes if self._used_bytes <= self.quota_bytes else 0
            chosen, wanted_bytes = set[bytes](), 0
            for key, size in sizes.items():
                if wanted_bytes + size > room_bytes:
                    break
                wanted_bytes += size
                chosen.add(key)
            self._counters.add("refused_for_quota", len(sizes) - len(chosen), self.tenant)
        return [key in chosen for key, _ in items]

    def stored(self, items: Sequence[tuple[bytes, Buffer]]) -> None:
        """Room for them is made among the tenant's own, oldest first."""
        with self._lock:
            for key, value in reversed(items):  # the first block becomes the most recent: a chain loses its end first
                self._forget([key])
                self._sizes[key] = memoryview(value).nbytes
                self._used_bytes += self._sizes[key]
            self._evict_excess({key for key, _ in items})

    def _end_leases(self, now_s: float) -> None:
        """Of loads that nobody has completed. With the lock held."""
        self._leases = {load: lease for load, lease in self._leases.items() if lease[1] > now_s}

    def _staying(self) -> set[bytes]:
        """What is leased or pinned. With the lock held."""
        now_s = self._clock()
        self._end_leases(now_s)
        self._pins = {key: until_s for key, until_s in self._pins.items() if until_s > now_s}
        return {key for keys, _ in self._leases.values() for key in keys} | self._pins.keys()

    def _evict_excess(self, new: frozenset[bytes] | set[bytes] = frozenset()) -> None:
        """With the lock held."""
        if self._used_bytes <= self.quota_bytes:
            return
        spared = self._staying() | new
        victims: list[bytes] = []
        excess_bytes = self._used_bytes - self.quota_bytes
        for key, size in self._sizes.items():
            if excess_bytes <= 0:
                break
            if key not in spared:
                victims.append(key)
                excess_bytes -= size
        if victims:
            gone = sum(one is not None for one in self.delete(victims))
            self._counters.add("evicted_for_quota", gone, self.tenant)

    def prepare_load(self, keys: Sequence[bytes]) -> LoadTicket:
        keys, beginning = check_keys(keys), object()
        with self._lock:  # before the store's own: what it leases must not go in between
            self._end_leases(self._clock())
            self._leases[beginning] = keys, self._clock() + LEASE_S
        try:
            ticket = self.store.prepare_load(keys)
            with self._lock:
                self._leases[ticket] = keys, self._clock() + LEASE_S
        finally:
            with self._lock:
                self._leases.pop(beginning, None)
        return ticket

    def release(self, ticket: LoadTicket) -> None:
        with self._lock:
            self._leases.pop(ticket, None)
        self.store.release(ticket)

    def pin(self, keys: Sequence[bytes], ttl_s: float) -> list[bool]:
        done = self.store.pin(keys, ttl_s)
        with self._lock:
            for key, pinned in zip(keys, done, strict=True):
                self._pins.pop(key, None)
                if pinned and ttl_s > 0:
                    self._pins[key] = self._clock() + ttl_s
        return done

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        """What the store says is absent is not counted any more. What it did not get may be there all the same."""
        values = self.store.complete_load(ticket)
        reports = ticket.report.keys if ticket.report is not None else ()
        with self._lock:
            self._leases.pop(ticket, None)
            self._forget([key for key, one in zip(ticket.keys, reports, strict=False) if one.reason == "absent"])
            for key in reversed(ticket.keys):
                if key in self._sizes:
                    self._sizes.move_to_end(key)
        return values

    def delete(self, keys: Sequence[bytes]) -> list[bool | None]:
        """What is not confirmed to be gone is counted as before."""
        keys = check_keys(keys)
        with self._lock:
            outcomes = self.store.delete(keys)
            self._forget([key for key, gone in zip(keys, outcomes, strict=True) if gone is not None])
            return outcomes

    def stats(self) -> dict[str, int | float]:
        own = {"tenant_used_bytes": self._used_bytes, "tenant_quota_bytes": self.quota_bytes}
        return {**self.store.stats(), **self._counters.as_dict(), **own}

    def _forget(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._used_bytes -= self._sizes.pop(key, 0)
            self._pins.pop(key, None)
