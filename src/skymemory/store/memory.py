"""The naive tier: a dictionary in this process, with a byte budget, least recently used out first.

It is the second implementation of the contract and the judge of the others: small enough to be seen right.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from skymemory.errors import InvalidInput, ValueTooLarge
from skymemory.metrics import Counters
from skymemory.store.base import (
    LEASE_S,
    Buffer,
    KeyReport,
    LoadReport,
    LoadTicket,
    Presence,
    StoreTicket,
    TwoPhase,
    check_items,
    check_keys,
    forget_abandoned,
)
from skymemory.units import format_size


class MemoryStore(TwoPhase):
    """Values in memory, at most ``budget_bytes`` of them (not counting Python's own overhead).

    ``pin_fraction`` of the budget may be pinned. ``clock`` gives seconds, compared only with itself.
    """

    def __init__(
        self,
        budget_bytes: int = 1 << 30,
        *,
        name: str = "memory",
        lease_s: float = LEASE_S,
        pin_fraction: float = 0.5,
        read_bytes_per_s: float = 10e9,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if budget_bytes <= 0:
            raise InvalidInput(f"the memory store needs a budget above 0 bytes, got {budget_bytes}")
        self._name = name
        self._budget_bytes = budget_bytes
        self._lease_s = lease_s
        self._pin_budget_bytes = int(budget_bytes * pin_fraction)
        self._read_bytes_per_s = read_bytes_per_s
        self._clock = clock
        self._lock = threading.RLock()
        self._values: OrderedDict[bytes, bytes] = OrderedDict()  # least recently used first
        self._used_bytes = 0
        self._loads: set[LoadTicket] = set()
        self._stores: set[StoreTicket] = set()
        self._pins: dict[bytes, float] = {}
        self._counters = Counters()
        self._closed = False
        self.on_evict: Callable[[bytes, bytes], object] | None = None

    @property
    def name(self) -> str:
        return self._name

    def lookup(self, keys: Sequence[bytes]) -> list[Presence]:
        keys = check_keys(keys)
        with self._open():
            pending = {key for ticket in self._alive_stores() for key, _ in self._granted(ticket)}
            return [
                Presence.HIT if key in self._values else Presence.PENDING if key in pending else Presence.MISS
                for key in keys
            ]

    def prefix(self, keys: Sequence[bytes]) -> int:
        keys = check_keys(keys)
        with self._open():
            return next((i for i, key in enumerate(keys) if key not in self._values), len(keys))

    def prepare_load(self, keys: Sequence[bytes]) -> LoadTicket:
        ticket = LoadTicket(check_keys(keys), self._clock() + self._lease_s)
        with self._open():
            forget_abandoned(self._loads, self._clock())
            self._loads.add(ticket)
        return ticket

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        with self._open():
            started_s = self._clock()
            if ticket not in self._loads:
                raise InvalidInput("this load ticket is not open: each is completed once, by its own store")
            self._loads.discard(ticket)
            values = [self._values.get(key) for key in ticket.keys]
            self._use(ticket.keys)
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
            self._loads.discard(ticket)

    def prepare_store(self, items: Sequence[tuple[bytes, Buffer]]) -> StoreTicket:
        items = check_items(items)
        for _, value in items:
            if (size_bytes := _size(value)) > self._budget_bytes:
                raise ValueTooLarge(
                    f"a value of {format_size(size_bytes)} does not fit the {self._name} store's budget of "
                    f"{format_size(self._budget_bytes)}: raise the budget or store smaller values"
                )
        with self._open():
            granted = [False] * len(items)
            ticket = StoreTicket(items, self._clock() + self._lease_s, state=granted)
            forget_abandoned(self._stores, self._clock())
            self._stores.add(ticket)
            for position, (_, value) in enumerate(items):
                granted[position] = self._make_room(_size(value), keep={key for key, _ in items[:position]})
                if not granted[position]:
                    self._counters.add("refused")
            return ticket

    def complete_store(self, ticket: StoreTicket) -> list[bool]:
        with self._open():
            started_s = self._clock()
            if ticket not in self._stores:
                raise InvalidInput("this store ticket is not open: each is completed once, by its own store")
            alive = ticket in self._alive_stores()
            granted = self._granted(ticket) if alive else ()
            self._stores.discard(ticket)
            for key, value in granted:
                self._remove(key)
                self._values[key] = bytes(value)
                self._used_bytes += len(self._values[key])
            self._use([key for key, _ in ticket.items])
            self._counters.add("stored", len(granted))
            ticket.seconds = self._clock() - started_s
            return list(ticket.state) if alive and isinstance(ticket.state, list) else [False] * len(ticket.items)

    def touch(self, keys: Sequence[bytes]) -> None:
        keys = check_keys(keys)
        with self._open():
            self._use(keys)

    def pin(self, keys: Sequence[bytes], ttl_s: float) -> list[bool]:
        keys = check_keys(keys)
        with self._open():
            return [self._pin(key, ttl_s) for key in keys]

    def delete(self, keys: Sequence[bytes]) -> list[bool]:
        keys = check_keys(keys)
        with self._open():
            return [self._remove(key) for key in keys]

    def stats(self) -> dict[str, int | float]:
        with self._lock:
            return {
                **{f"{name}_total": value for name, value in self._counters.as_dict().items()},
                "entries": len(self._values),
                "used_bytes": self._used_bytes,
                "budget_bytes": self._budget_bytes,
                "open_leases": len(self._loads) + len(self._stores),
            }

    def estimate_load_s(self, keys: Sequence[bytes], now_s: float) -> float:
        keys = check_keys(keys)
        with self._open():
            sizes = [len(self._values[key]) if key in self._values else math.inf for key in keys]
            return sum(sizes) / self._read_bytes_per_s

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._values.clear()
            self._loads.clear()
            self._stores.clear()
            self._pins.clear()
            self._used_bytes = 0

    def _open(self) -> threading.RLock:
        """The lock, for a ``with`` statement; InvalidInput once closed."""
        if self._closed:
            raise InvalidInput(f"the {self._name} store is closed: open a new one")
        return self._lock

    def _use(self, keys: Sequence[bytes]) -> None:
        """The first key becomes the most recent, so the end of a chain is evicted before its beginning."""
        for key in reversed(keys):
            if key in self._values:
                self._values.move_to_end(key)

    def _remove(self, key: bytes) -> bool:
        value = self._values.pop(key, None)
        self._pins.pop(key, None)
        self._used_bytes -= len(value) if value is not None else 0
        return value is not None

    def _pin(self, key: bytes, ttl_s: float) -> bool:
        if key not in self._values:
            return False
        now_s = self._clock()
        self._pins = {pinned: until_s for pinned, until_s in self._pins.items() if until_s > now_s and pinned != key}
        if ttl_s <= 0:
            return True
        if sum(len(self._values[pinned]) for pinned in (*self._pins, key)) > self._pin_budget_bytes:
            return False
        self._pins[key] = now_s + ttl_s
        return True

    def _alive_stores(self) -> list[StoreTicket]:
        now_s = self._clock()
        return [ticket for ticket in self._stores if ticket.expires_s > now_s]

    @staticmethod
    def _granted(ticket: StoreTicket) -> tuple[tuple[bytes, Buffer], ...]:
        granted = ticket.state if isinstance(ticket.state, list) else []
        return tuple(item for item, given in zip(ticket.items, granted, strict=True) if given)

    def _make_room(self, size_bytes: int, keep: set[bytes]) -> bool:
        """Evict until ``size_bytes`` more fit; False, and nothing evicted, if that cannot be."""
        now_s = self._clock()
        self._loads = {ticket for ticket in self._loads if ticket.expires_s > now_s}
        leased = {key for ticket in self._loads for key in ticket.keys}
        reserved_bytes = sum(_size(value) for ticket in self._alive_stores() for _, value in self._granted(ticket))
        excess_bytes = self._used_bytes + reserved_bytes + size_bytes - self._budget_bytes
        victims: list[bytes] = []
        for key, value in self._values.items():
            if excess_bytes <= 0:
                break
            if key not in leased and key not in keep and self._pins.get(key, 0.0) <= now_s:
                victims.append(key)
                excess_bytes -= len(value)
        if excess_bytes > 0:
            return False
        for key in victims:
            if self.on_evict is not None:
                self.on_evict(key, self._values[key])
            self._remove(key)
        self._counters.add("evicted", len(victims))
        return True


def _size(value: Buffer) -> int:
    return value.nbytes if isinstance(value, memoryview) else len(value)
