"""The memory tier: values in this process under a byte budget. What goes first is a policy's to say (``policies``).

A hit is a view of the value itself, not a copy: values are never changed, only replaced.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from skymemory.errors import InvalidInput
from skymemory.eviction.policies import DEFAULT_POLICY
from skymemory.forks import OwnLock
from skymemory.kv.block import Place
from skymemory.metrics import Counters
from skymemory.store.accounting import Shelf
from skymemory.store.base import (
    LEASE_S,
    Buffer,
    KeyReport,
    LoadReport,
    LoadTicket,
    Places,
    Presence,
    StoreTicket,
    TwoPhase,
    check_keys,
    check_ttl,
)

# What every store with a shelf does the same way, whatever holds its values.


class ShelfStore(TwoPhase):
    """Looking up, leasing and pinning: asked of the shelf under the store's lock, and of nobody once it is closed."""

    def __init__(self, name: str, shelf: Shelf, lease_s: float, clock: Callable[[], float]) -> None:
        self._name = name
        self._shelf = shelf
        self._lease_s = lease_s
        self._clock = clock
        self._lock = OwnLock(f"the {name} store")
        self._closed = False

    @property
    def name(self) -> str:
        return self._name

    def lookup(self, keys: Sequence[bytes]) -> list[Presence]:
        keys = check_keys(keys)
        with self._open():
            pending, there = self._shelf.pending(self._clock()), self._shelf.entries
            return [
                Presence.HIT if key in there else Presence.PENDING if key in pending else Presence.MISS for key in keys
            ]

    def prefix(self, keys: Sequence[bytes]) -> int:
        keys = check_keys(keys)
        with self._open():
            self._shelf.chains.learn(keys)
            return next((i for i, key in enumerate(keys) if key not in self._shelf.entries), len(keys))

    def prepare_load(self, keys: Sequence[bytes]) -> LoadTicket:
        with self._open():
            return self._shelf.open_load(keys, self._clock(), self._lease_s)

    def pin(self, keys: Sequence[bytes], ttl_s: float) -> list[bool]:
        keys, ttl_s = check_keys(keys), check_ttl(ttl_s)
        with self._open():
            now_s = self._clock()
            return [self._shelf.pin(key, now_s + ttl_s, now_s) for key in keys]

    def _account(self) -> dict[str, int | float]:
        """The shelf's part of ``stats``. With the lock held."""
        return {
            "entries": len(self._shelf),
            "used_bytes": self._shelf.used_bytes,
            "budget_bytes": self._shelf.budget_bytes,
            "open_leases": self._shelf.open_tickets,
        }

    def _open(self) -> OwnLock:
        """The lock, for a ``with`` statement; InvalidInput once closed."""
        if self._closed:
            raise InvalidInput(f"the {self._name} store is closed: open a new one")
        return self._lock


class MemoryStore(ShelfStore):
    """Values in memory, at most ``budget_bytes`` of them (not counting Python's own overhead).

    ``pin_fraction`` of the budget may be pinned. ``policy`` is one of ``eviction.policies.POLICIES``. ``clock`` gives
    seconds, compared only with itself.

    Raises:
        InvalidInput: no budget, or no such policy.
    """

    def __init__(
        self,
        budget_bytes: int = 1 << 30,
        *,
        name: str = "memory",
        policy: str = DEFAULT_POLICY,
        lease_s: float = LEASE_S,
        pin_fraction: float = 0.5,
        read_bytes_per_s: float = 10e9,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if budget_bytes <= 0:
            raise InvalidInput(f"the memory store needs a budget above 0 bytes, got {budget_bytes}")
        super().__init__(name, Shelf(budget_bytes, int(budget_bytes * pin_fraction), policy), lease_s, clock)
        self._read_bytes_per_s = read_bytes_per_s
        self._values: dict[bytes, bytes] = {}
        """What the shelf accounts for."""
        self._counters = Counters()
        self.on_evict: Callable[[bytes, bytes, Place | None], object] | None = None

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        with self._open():
            started_s = self._clock()
            self._shelf.take_load(ticket)
            self._shelf.end_lease(ticket)
            values = [self._values.get(key) for key in ticket.keys]
            self._shelf.use(list(dict.fromkeys(ticket.keys)))
            self._counters.add("hits", sum(value is not None for value in values))
            self._counters.add("misses", sum(value is None for value in values))
            seconds = self._clock() - started_s
            ticket.report = LoadReport(
                tuple(
                    KeyReport(reason="absent") if value is None else KeyReport(self._name, len(value), seconds)
                    for value in values
                ),
                seconds,
            )
            return [None if value is None else memoryview(value) for value in values]

    def release(self, ticket: LoadTicket) -> None:
        with self._lock:
            self._shelf.close_load(ticket)

    def prepare_store(self, items: Sequence[tuple[bytes, Buffer]], places: Places = ()) -> StoreTicket:
        with self._open():
            ticket, given = self._shelf.open_store(items, places, self._clock(), self._lease_s, self._name)
            self._counters.add("refused", given.count(False))
            return ticket

    def complete_store(self, ticket: StoreTicket) -> list[bool]:
        with self._open():
            started_s = self._clock()
            given = self._shelf.take_store(ticket, started_s)
            values = {key: bytes(value) for (key, value), yes in zip(ticket.items, given, strict=True) if yes}
            places = {key: place for (key, _), place in zip(ticket.items, ticket.places, strict=True)}
            count, victims = self._shelf.in_the_way([(key, len(value)) for key, value in values.items()])
            self._counters.add("refused", len(values) - count)
            self._evict(victims)
            done = list(values)[:count]
            for key in done:
                self._values[key] = values[key]
                self._shelf.put(key, len(values[key]), places[key])
            self._shelf.end_store(ticket)
            self._shelf.touch([key for key, _ in ticket.items])
            self._counters.add("stored", count)
            ticket.seconds = self._clock() - started_s
            return [yes and key in done for (key, _), yes in zip(ticket.items, given, strict=True)]

    def _evict(self, victims: Sequence[bytes]) -> None:
        for key in victims:
            self._shelf.evict(key)
            value, place = self._values.pop(key), self._shelf.take_place(key)
            if self.on_evict is not None:
                self.on_evict(key, value, place)
        self._counters.add("evicted", len(victims))

    def touch(self, keys: Sequence[bytes]) -> None:
        keys = check_keys(keys)
        with self._open():
            self._shelf.chains.learn(keys)
            self._shelf.touch(keys)

    def delete(self, keys: Sequence[bytes]) -> list[bool | None]:
        keys = check_keys(keys)
        with self._open():
            return [self._shelf.remove(key) and self._values.pop(key) is not None for key in keys]

    def stats(self) -> dict[str, int | float]:
        with self._lock:
            return {
                **{f"{name}_total": value for name, value in self._counters.as_dict().items()},
                **self._account(),
            }

    def estimate_load_s(self, keys: Sequence[bytes], now_s: float) -> float:
        keys = check_keys(keys)
        with self._open():
            sizes = [len(self._values[key]) if key in self._values else math.inf for key in keys]
            return sum(sizes) / self._read_bytes_per_s

    def close(self) -> None:
        if self._lock.owner.elsewhere:
            return
        with self._lock:
            self._closed = True
            self._values.clear()
            self._shelf = Shelf(self._shelf.budget_bytes, 0)
