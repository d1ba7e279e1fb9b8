"""Wrappers of a store: write admission, tenants' quotas, a limited read rate; and a store for asyncio."""

from __future__ import annotations

import asyncio
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from threading import Lock
from typing import ParamSpec, Self, TypeVar

from skymemory.errors import InvalidInput
from skymemory.forks import OwnLock
from skymemory.metrics import Counters
from skymemory.pacing import TokenBucket
from skymemory.reasons import Miss
from skymemory.store.base import (
    LEASE_S,
    Buffer,
    LoadTicket,
    Places,
    Presence,
    Store,
    StoreTicket,
    TwoPhase,
    bring_near,
    check_items,
    check_keys,
    check_places,
    keeps,
)
from skymemory.units import format_size


class Wrapped(TwoPhase):
    """Base of all wrappers: passes every call on."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @property
    def name(self) -> str:
        return self.store.name

    def lookup(self, keys: Sequence[bytes]) -> list[Presence]:
        return self.store.lookup(keys)

    def sizes(self, keys: Sequence[bytes]) -> list[int | None]:
        return self.store.sizes(keys)

    @property
    def leases(self) -> bool:
        return self.store.leases

    def prefix(self, keys: Sequence[bytes]) -> int:
        return self.store.prefix(keys)

    def prepare_load(self, keys: Sequence[bytes]) -> LoadTicket:
        return self.store.prepare_load(keys)

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        return self.store.complete_load(ticket)

    def release(self, ticket: LoadTicket) -> None:
        self.store.release(ticket)

    def prepare_store(self, items: Sequence[tuple[bytes, Buffer]], places: Places = ()) -> StoreTicket:
        return self.store.prepare_store(items, places)

    def complete_store(self, ticket: StoreTicket) -> list[bool]:
        return self.store.complete_store(ticket)

    def touch(self, keys: Sequence[bytes]) -> None:
        self.store.touch(keys)

    def pin(self, keys: Sequence[bytes], ttl_s: float) -> list[bool]:
        return self.store.pin(keys, ttl_s)

    def delete(self, keys: Sequence[bytes]) -> list[bool | None]:
        return self.store.delete(keys)

    def prefetch(self, keys: Sequence[bytes], at: float) -> list[bool]:
        return bring_near(self.store, keys, at)

    def keeps(self, keys: Sequence[bytes]) -> list[bool]:
        return keeps(self.store, keys)

    def stats(self) -> dict[str, int | float]:
        return self.store.stats()

    def estimate_load_s(self, keys: Sequence[bytes], now_s: float) -> float:
        return self.store.estimate_load_s(keys, now_s)

    def close(self) -> None:
        self.store.close()


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Ticket of the chosen items; True for each item that is."""

    inner: StoreTicket
    chosen: list[bool]


class Selecting(Wrapped):
    """Base of wrappers that store only the items that ``select`` chooses; ``stored`` gets those stored."""

    def select(self, items: Sequence[tuple[bytes, Buffer]]) -> list[bool]:
        return [True] * len(items)

    def stored(self, items: Sequence[tuple[bytes, Buffer]]) -> None: ...

    def prepare_store(self, items: Sequence[tuple[bytes, Buffer]], places: Places = ()) -> StoreTicket:
        items, places = check_items(items), check_places(items, places)
        chosen = self.select(items)
        inner = self.store.prepare_store(
            [item for item, go in zip(items, chosen, strict=True) if go],
            [place for place, go in zip(places, chosen, strict=True) if go],
        )
        return StoreTicket(items, inner.expires_s, state=_Chosen(inner, chosen), places=places)

    def complete_store(self, ticket: StoreTicket) -> list[bool]:
        """Complete the store of the chosen items; others count as not stored."""
        state = ticket.state
        if not isinstance(state, _Chosen):
            raise InvalidInput("this store ticket is not open: each is completed once, by its own store")
        inner, ticket.state = state.inner, None
        outcomes = iter(self.store.complete_store(inner))
        done = [go and next(outcomes) for go in state.chosen]
        ticket.seconds, ticket.state, ticket.unanswered = inner.seconds, inner.state, inner.unanswered
        ticket.reason = inner.reason
        self.stored([item for item, ok in zip(ticket.items, done, strict=True) if ok])
        return done


_PROBES = struct.Struct(">IIII")
_BITS_PER_KEY = 16


class Sketch:
    """Approximate set of the last ``capacity`` to ``2 * capacity`` keys (hashes): two Bloom filters that take turns. Of
    new keys, 1 in 400 counts as seen.
    """

    def __init__(self, capacity: int = 1 << 16) -> None:
        if capacity < 1:
            raise InvalidInput(f"a sketch of {capacity} keys: expected 1 or more")
        self._capacity = capacity
        self._bits = -(-_BITS_PER_KEY * capacity // 8) * 8
        self._now, self._before = bytearray(self._bits // 8), bytearray(self._bits // 8)
        self._added = 0

    def check_and_add(self, key: bytes) -> bool:
        """Return True if the key was seen lately; add it."""
        places = [word % self._bits for word in _PROBES.unpack_from(key)]
        now, before = (all(bits[at >> 3] >> (at & 7) & 1 for at in places) for bits in (self._now, self._before))
        if not now:
            # The younger filter is full: it becomes the older filter, whose keys are forgotten.
            if self._added == self._capacity:
                self._now, self._before = bytearray(self._bits // 8), self._now
                self._added = 0
            for at in places:
                self._now[at >> 3] |= 1 << (at & 7)
            self._added += 1
        return now or before


class AdmittingStore(Selecting):
    """Wrapper for write admission: stores a value whose key is offered a second time, or present. Most prompts are seen
    once; only blocks that prompts share are offered again.
    """

    def __init__(self, store: Store, sketch: Sketch | None = None) -> None:
        super().__init__(store)
        self._sketch = sketch or Sketch()
        self._counters = Counters()
        self._lock = threading.Lock()

    def select(self, items: Sequence[tuple[bytes, Buffer]]) -> list[bool]:
        keys = [key for key, _ in items]
        states = self.store.lookup(keys)
        with self._lock:
            offered = [self._sketch.check_and_add(key) for key in keys]
        admitted = [was or present is not Presence.MISS for was, present in zip(offered, states, strict=True)]
        self._counters.add("writes_not_admitted", admitted.count(False))
        return admitted

    def stats(self) -> dict[str, int | float]:
        return {**self.store.stats(), **self._counters.as_dict()}


class TenantStore(Selecting):
    """Quota in bytes of a tenant, on a store shared by tenants of a process.

    A tenant over its quota evicts its own oldest values, neither leased nor pinned, after the new value is stored: a
    refused put costs nothing, but the quota is exceeded by up to that put. Values count until the store confirms their
    removal.
    """

    def __init__(
        self, store: Store, tenant: str, quota_bytes: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if quota_bytes <= 0:
            raise InvalidInput(f"tenant {tenant!r}: a quota of {format_size(quota_bytes)}: expected more than 0")
        super().__init__(store)
        self.tenant = tenant
        self.quota_bytes = quota_bytes
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # bytes of each value, the oldest first
        self.used_bytes = 0
        self._clock = clock
        self._leases: dict[object, tuple[tuple[bytes, ...], float]] = {}  # keys and end, by load
        self._pins: dict[bytes, float] = {}  # end of each pin
        self._counters = Counters()
        self._lock = OwnLock(f"the store of tenant {tenant!r}")

    def select(self, items: Sequence[tuple[bytes, Buffer]]) -> list[bool]:
        """Choose as many first blocks as the quota holds; none while removals are unconfirmed."""
        sizes = {key: memoryview(value).nbytes for key, value in items}
        with self._lock:
            self._evict_excess()
            protected_bytes = sum(self._sizes.get(key, 0) for key in self._protected() - sizes.keys())
            room_bytes = self.quota_bytes - protected_bytes if self.used_bytes <= self.quota_bytes else 0
            chosen, wanted_bytes = set[bytes](), 0
            for key, size in sizes.items():
                if wanted_bytes + size > room_bytes:
                    break
                wanted_bytes += size
                chosen.add(key)
            self._counters.add("refused_for_quota", len(sizes) - len(chosen), self.tenant)
        return [key in chosen for key, _ in items]

    def stored(self, items: Sequence[tuple[bytes, Buffer]]) -> None:
        with self._lock:
            for key, value in reversed(items):  # the first block becomes the most recent: a chain loses its end first
                self._forget([key])
                self._sizes[key] = memoryview(value).nbytes
                self.used_bytes += self._sizes[key]
            self._evict_excess({key for key, _ in items})

    def _end_leases(self, now_s: float) -> None:
        self._leases = {load: lease for load, lease in self._leases.items() if lease[1] > now_s}

    def _protected(self) -> set[bytes]:
        now_s = self._clock()
        self._end_leases(now_s)
        self._pins = {key: until_s for key, until_s in self._pins.items() if until_s > now_s}
        return {key for keys, _ in self._leases.values() for key in keys} | self._pins.keys()

    def _evict_excess(self, new: frozenset[bytes] | set[bytes] = frozenset()) -> None:
        """Evict the oldest values above the quota, sparing ``new``."""
        if self.used_bytes <= self.quota_bytes:
            return
        spared = self._protected() | new
        victims: list[bytes] = []
        excess_bytes = self.used_bytes - self.quota_bytes
        for key, size in self._sizes.items():
            if excess_bytes <= 0:
                break
            if key not in spared:
                victims.append(key)
                excess_bytes -= size
        if victims:
            removed = sum(outcome is not None for outcome in self.delete(victims))
            self._counters.add("evicted_for_quota", removed, self.tenant)

    def prepare_load(self, keys: Sequence[bytes]) -> LoadTicket:
        keys, beginning = check_keys(keys), object()  # stands for the load until it has a ticket
        with self._lock:  # before the store's own lease: nothing may be evicted in between
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
        """Complete the load; forget values that the store lacks, and make the others most recent."""
        values = self.store.complete_load(ticket)
        reports = ticket.report.keys if ticket.report is not None else ()
        with self._lock:
            self._leases.pop(ticket, None)
            self._forget(
                [key for key, report in zip(ticket.keys, reports, strict=False) if report.reason is Miss.ABSENT]
            )
            for key in reversed(ticket.keys):
                if key in self._sizes:
                    self._sizes.move_to_end(key)
        return values

    def delete(self, keys: Sequence[bytes]) -> list[bool | None]:
        """Delete values; unconfirmed removals still count."""
        keys = check_keys(keys)
        with self._lock:
            outcomes = self.store.delete(keys)
            self._forget([key for key, outcome in zip(keys, outcomes, strict=True) if outcome is not None])
            return outcomes

    def stats(self) -> dict[str, int | float]:
        own = {"tenant_used_bytes": self.used_bytes, "tenant_quota_bytes": self.quota_bytes}
        return {**self.store.stats(), **self._counters.as_dict(), **own}

    def _forget(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.used_bytes -= self._sizes.pop(key, 0)
            self._pins.pop(key, None)


class RateLimited(Wrapped):
    """Wrapper that delays loads to an average of ``bytes_per_s``: a token bucket of ``burst_s`` seconds of bytes."""

    def __init__(
        self,
        store: Store,
        bytes_per_s: float,
        *,
        burst_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if not bytes_per_s > 0 or burst_s < 0:
            raise InvalidInput(f"a rate must be above 0 and a burst not negative, got {bytes_per_s} and {burst_s}")
        super().__init__(store)
        self.bytes_per_s = bytes_per_s
        self._clock, self._sleep = clock, sleep
        self._lock = Lock()
        self._link = TokenBucket(1.0, burst_s)  # tokens are seconds of the link

    @property
    def backlog_s(self) -> float:
        with self._lock:
            return max(0.0, -self._link.refill(self._clock()))

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        values = super().complete_load(ticket)
        size_bytes = sum(
            rows.size_bytes if rows is not None and at in ticket.placed else len(value)
            for at, (value, rows) in enumerate(zip_longest(values, ticket.rows))
            if value is not None
        )
        with self._lock:
            # Counted from when the link was free, not from when this thread woke: waking late wastes no bandwidth.
            now_s = self._clock()
            until_s = now_s - self._link.spend(size_bytes / self.bytes_per_s, now_s)
        while (left_s := until_s - self._clock()) > 0:
            self._sleep(left_s)
        return values

    def estimate_load_s(self, keys: Sequence[bytes], now_s: float) -> float:
        return self.backlog_s + super().estimate_load_s(keys, now_s)


_How = ParamSpec("_How")
_Answer = TypeVar("_Answer")


class AsyncStore:
    """Store for asyncio: calls run in threads; closes ``store``. A call cancelled before its thread starts does
    nothing; later it continues.
    """

    def __init__(self, store: Store, threads: int = 32) -> None:
        self.store = store
        self._pool = ThreadPoolExecutor(threads, f"skymemory-{store.name}")

    async def get_many(self, keys: Sequence[bytes]) -> list[memoryview | None]:
        return await self._call(self.store.get_many, keys)

    async def put_many(self, items: Sequence[tuple[bytes, Buffer]], places: Places = ()) -> list[bool]:
        """Store values, which must not change until this returns."""
        return await self._call(self.store.put_many, items, places)

    async def lookup(self, keys: Sequence[bytes]) -> list[Presence]:
        return await self._call(self.store.lookup, keys)

    async def sizes(self, keys: Sequence[bytes]) -> list[int | None]:
        return await self._call(self.store.sizes, keys)

    async def prefix(self, keys: Sequence[bytes]) -> int:
        return await self._call(self.store.prefix, keys)

    async def delete(self, keys: Sequence[bytes]) -> list[bool | None]:
        return await self._call(self.store.delete, keys)

    async def touch(self, keys: Sequence[bytes]) -> None:
        await self._call(self.store.touch, keys)

    async def pin(self, keys: Sequence[bytes], ttl_s: float) -> list[bool]:
        return await self._call(self.store.pin, keys, ttl_s)

    async def _call(self, call: Callable[_How, _Answer], *how: _How.args, **named: _How.kwargs) -> _Answer:
        return await asyncio.wrap_future(self._pool.submit(call, *how, **named))

    async def close(self) -> None:
        """Wait for calls in progress, then close the store."""
        await asyncio.to_thread(self._pool.shutdown)
        self.store.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()
