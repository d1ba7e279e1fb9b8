"""What a disk store holds and may evict: sizes, order of use, leases, pins and room set aside. No I/O, no clock.

The rules are those of ``store.memory``, the judge, without the values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from skymemory.store.base import Buffer, LoadTicket, StoreTicket


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One value. Equal only to itself: a value stored anew under the same key is another entry."""

    size_bytes: int


class Shelf:
    """Accounts for at most ``budget_bytes``. Whoever uses it holds a lock around every call."""

    def __init__(self, budget_bytes: int, pin_budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.entries: OrderedDict[bytes, Entry] = OrderedDict()
        """Least recently used first."""
        self.loads: set[LoadTicket] = set()
        self.stores: set[StoreTicket] = set()
        """Open, or being written: their room is set aside until they are discarded."""
        self._pin_budget_bytes = pin_budget_bytes
        self._pins: dict[bytes, float] = {}

    def put(self, key: bytes, size_bytes: int) -> None:
        """A value is there, in place of what was; the most recently used; a pin on that is gone with it."""
        self.remove(key)
        self.entries[key] = Entry(size_bytes)
        self.used_bytes += size_bytes

    def remove(self, key: bytes) -> bool:
        entry = self.entries.pop(key, None)
        self._pins.pop(key, None)
        self.used_bytes -= entry.size_bytes if entry else 0
        return entry is not None

    def use(self, keys: Sequence[bytes]) -> list[bytes]:
        """The first key becomes the most recent. Returns those that are there, in the order of their use."""
        used = [key for key in reversed(keys) if key in self.entries]
        for key in used:
            self.entries.move_to_end(key)
        return used

    def pin(self, key: bytes, until_s: float, now_s: float) -> bool:
        """False where it is absent or would be over the pin budget; ``until_s`` not after ``now_s`` unpins."""
        if key not in self.entries:
            return False
        self._pins = {pinned: end_s for pinned, end_s in self._pins.items() if end_s > now_s and pinned != key}
        if until_s <= now_s:
            return True
        if sum(self.entries[pinned].size_bytes for pinned in (*self._pins, key)) > self._pin_budget_bytes:
            return False
        self._pins[key] = until_s
        return True

    def is_alive(self, ticket: StoreTicket, now_s: float) -> bool:
        return ticket in self.stores and ticket.expires_s > now_s

    def pending(self, now_s: float) -> set[bytes]:
        """Keys that room was set aside for."""
        return {key for ticket in self.stores if ticket.expires_s > now_s for key, _ in granted(ticket)}

    def make_room(self, size_bytes: int, keep: Iterable[bytes], now_s: float) -> list[bytes] | None:
        """Who must go so that ``size_bytes`` more fit, removed here already; None (and nothing removed) if that
        cannot be: leased, pinned and ``keep`` stay.
        """
        self.loads = {ticket for ticket in self.loads if ticket.expires_s > now_s}
        spared = {key for ticket in self.loads for key in ticket.keys}.union(keep)
        reserved_bytes = sum(
            size_of(value) for ticket in self.stores if ticket.expires_s > now_s for _, value in granted(ticket)
        )
        excess_bytes = self.used_bytes + reserved_bytes + size_bytes - self.budget_bytes
        victims: list[bytes] = []
        for key, entry in self.entries.items():
            if excess_bytes <= 0:
                break
            if key not in spared and self._pins.get(key, 0.0) <= now_s:
                victims.append(key)
                excess_bytes -= entry.size_bytes
        if excess_bytes > 0:
            return None
        for key in victims:
            self.remove(key)
        return victims


def granted(ticket: StoreTicket) -> list[tuple[bytes, Buffer]]:
    """The items that room was found for: ``state`` says so, item by item."""
    given = ticket.state if isinstance(ticket.state, list) else [False] * len(ticket.items)
    return [item for item, yes in zip(ticket.items, given, strict=True) if yes]


def size_of(value: Buffer) -> int:
    return value.nbytes if isinstance(value, memoryview) else len(value)
