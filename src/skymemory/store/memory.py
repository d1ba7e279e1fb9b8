"""Memory tier: values in this process, within a byte budget. A hit is a view, not a copy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from skymemory.errors import InvalidInput
from skymemory.eviction import DEFAULT_POLICY
from skymemory.metrics import Counters
from skymemory.reasons import Miss
from skymemory.store.accounting import BudgetedStore, Inventory, size_of
from skymemory.store.base import (
    LEASE_S,
    Buffer,
    KeyReport,
    LoadReport,
    LoadTicket,
    StoreTicket,
    check_items,
    check_keys,
)


class MemoryStore(BudgetedStore):
    """Store of values in memory.

    ``pin_fraction`` of the budget may be pinned. ``policy``: a name in ``eviction.POLICIES``. InvalidInput: no budget,
    or no such policy.
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
        inventory = Inventory(budget_bytes, int(budget_bytes * pin_fraction), policy)
        super().__init__(name, inventory, lease_s, clock, Counters())
        self._read_bytes_per_s = read_bytes_per_s  # assumed, for estimates
        self._values: dict[bytes, bytes] = {}

    def get_now(self, keys: Sequence[bytes]) -> list[memoryview | None]:
        """Load in one step, without ticket and report."""
        keys = check_keys(keys)
        with self._open():
            self._inventory.order.learn(keys)
            return [None if value is None else memoryview(value) for value in self._used(keys)]

    def put_now(self, key: bytes, value: Buffer) -> bool:
        """Store in one step. False: no room, or others have reservations."""
        ((key, value),) = check_items([(key, value)])
        with self._open():
            victims = self._inventory.make_room(key, size_of(value), self._clock())
            if victims is None:
                return False
            try:
                value = bytes(value)
                self._evict(victims)
                self._values[key] = value
                self._inventory.put(key, len(value))
            finally:
                self._inventory.order.free(key)
            self._counters.add("stored")
            return True

    def _used(self, keys: tuple[bytes, ...]) -> list[bytes | None]:
        values = [self._values.get(key) for key in keys]
        self._inventory.use(list(dict.fromkeys(keys)))
        misses = values.count(None)
        self._counters.add("hits", len(values) - misses)
        self._counters.add("misses", misses)
        return values

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        with self._open():
            started_s = self._clock()
            self._inventory.take_load(ticket)
            self._inventory.end_lease(ticket)
            values = self._used(ticket.keys)
            seconds = self._clock() - started_s
            ticket.report = LoadReport(
                tuple(
                    KeyReport(reason=Miss.ABSENT) if value is None else KeyReport(self._name, len(value), seconds)
                    for value in values
                ),
                seconds,
            )
            return [None if value is None else memoryview(value) for value in values]

    def complete_store(self, ticket: StoreTicket) -> list[bool]:
        with self._open():
            started_s = self._clock()
            granted = self._inventory.take_store(ticket, started_s)
            # ``bytes`` copies only what is not bytes already: the caller may change its buffer afterwards.
            values = {key: bytes(value) for (key, value), ok in zip(ticket.items, granted, strict=True) if ok}
            places = {key: place for (key, _), place in zip(ticket.items, ticket.places, strict=True)}
            count, victims = self._inventory.in_the_way([(key, len(value)) for key, value in values.items()])
            self._counters.add("refused", len(values) - count)
            self._evict(victims)
            done = list(values)[:count]
            for key in done:
                self._values[key] = values[key]
                self._inventory.put(key, len(values[key]), places[key])
            self._inventory.end_store(ticket)
            self._inventory.touch([key for key, _ in ticket.items])
            self._counters.add("stored", count)
            ticket.seconds = self._clock() - started_s
            return [ok and key in done for (key, _), ok in zip(ticket.items, granted, strict=True)]

    def _evict(self, victims: Sequence[bytes]) -> None:
        for key in victims:
            self._inventory.evict(key)
            value, place = self._values.pop(key), self._inventory.take_place(key)
            if self.on_evict is not None:
                self.on_evict(key, value, place)
        self._counters.add("evicted", len(victims))

    def touch(self, keys: Sequence[bytes]) -> None:
        keys = check_keys(keys)
        with self._open():
            self._inventory.order.learn(keys)
            self._inventory.touch(keys)

    def delete(self, keys: Sequence[bytes]) -> list[bool | None]:
        keys = check_keys(keys)
        with self._open():
            return [self._inventory.remove(key) and self._values.pop(key) is not None for key in keys]

    def _beginning(self, key: bytes, size_bytes: int) -> Buffer:
        return memoryview(self._values.get(key, b""))[:size_bytes]

    def _end(self, key: bytes) -> None:
        self._inventory.remove(key)
        del self._values[key]

    def estimate_load_s(self, keys: Sequence[bytes], now_s: float) -> float:
        keys = check_keys(keys)
        with self._open():
            sizes = [len(self._values[key]) if key in self._values else math.inf for key in keys]
            return sum(sizes) / self._read_bytes_per_s

    def close(self) -> None:
        if self._lock.owner.elsewhere:  # in a forked child
            return
        with self._lock:
            self._closed = True
            self._values.clear()
            self._inventory = Inventory(self._inventory.budget_bytes, 0)
