"""What a store with a byte budget holds and may evict: sizes, leases, pins and room set aside. No I/O, no clock.

A policy ranks (``policies``), and chains say who may go (``chains``): never a block with one behind it that is here,
nor what is leased, pinned, being stored, or before something that is. So presence stays prefix-closed under every
policy, and the next victim is found in O(log entries).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from skymemory.errors import ValueTooLarge
from skymemory.eviction.policies import DEFAULT_POLICY, policy_named
from skymemory.kv.block import Place
from skymemory.store.base import (
    Buffer,
    LoadTicket,
    OpenTickets,
    Places,
    StoreTicket,
    check_items,
    check_keys,
    check_places,
)
from skymemory.store.prefix_order import Chains
from skymemory.units import format_size


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One value. Equal only to itself: a value stored anew under the same key is another entry."""

    size_bytes: int


class Shelf:
    """Accounts for at most ``budget_bytes``. Whoever uses it holds a lock around every call.

    Raises:
        InvalidInput: no such policy.
    """

    def __init__(self, budget_bytes: int, pin_budget_bytes: int, policy: str = DEFAULT_POLICY) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.entries: dict[bytes, Entry] = {}
        self.chains = Chains(self._may_go)
        self.kept: set[bytes] = set()
        """Keys whose values a later release wrote: not read, not replaced, and they take their room."""
        self._places: dict[bytes, Place] = {}
        """What writers said of what is here."""
        self._policy = policy_named(policy, self._depth)
        self._loads: OpenTickets[LoadTicket] = OpenTickets()
        self._stores: OpenTickets[StoreTicket] = OpenTickets()
        self._leases: dict[LoadTicket, list[bytes]] = {}
        """What each open load holds."""
        self._rooms: dict[StoreTicket, list[tuple[bytes, int]]] = {}
        """What each open store holds, with its size in bytes."""
        self._reserved_bytes = 0
        self._pin_budget_bytes = pin_budget_bytes
        self._pins: dict[bytes, float] = {}
        self._pin_ends: list[tuple[float, bytes]] = []
        """A heap; what ``_pins`` says otherwise of is stale."""
        self._pinned_bytes = 0

    def __len__(self) -> int:
        return len(self.entries)

    def _may_go(self, key: bytes, yes: bool) -> None:
        (self._policy.free if yes else self._policy.hold)(key)

    def _depth(self, key: bytes) -> int:
        place = self._places.get(key)
        return self.chains.depth(key) if place is None else place.depth

    # --- what is here ---

    def put(self, key: bytes, size_bytes: int, place: Place | None = None) -> None:
        """A value is here, in place of what was; a pin on that is gone with it. A place that is known stays so."""
        self._unpin(key)
        if place is not None:
            self._places[key] = place
        old = self.entries.get(key)
        self.used_bytes += size_bytes - (old.size_bytes if old else 0)
        self.entries[key] = Entry(size_bytes)
        self._policy.noted(key)
        if old is None:
            self.chains.came(key)

    def keep(self, key: bytes, size_bytes: int) -> None:
        """A value of a later release is here: it takes room, and is neither read, replaced nor evicted."""
        self.kept.add(key)
        self.used_bytes += size_bytes

    def remove(self, key: bytes) -> bool:
        return self._remove(key, evicted=False)

    def _remove(self, key: bytes, evicted: bool) -> bool:
        entry = self.entries.get(key)
        if entry is None:
            return False
        self._unpin(key)
        self.take_place(key)
        del self.entries[key]
        self.used_bytes -= entry.size_bytes
        self._policy.gone(key, evicted)
        self.chains.left(key)
        return True

    def take_place(self, key: bytes) -> Place | None:
        """The place of an evicted block, if its writer said it; forgotten here with this call."""
        return self._places.pop(key, None)

    def use(self, keys: Sequence[bytes]) -> list[bytes]:
        """They were asked for. Returns those that are here, in the order of their use: the first of ``keys`` last."""
        used = [key for key in reversed(keys) if key in self.entries]
        for key in used:
            self._policy.used(key)
        return used

    def touch(self, keys: Sequence[bytes]) -> list[bytes]:
        """The first becomes the most recent; that is no use of it. Returns as ``use`` does."""
        touched = [key for key in reversed(keys) if key in self.entries]
        for key in touched:
            self._policy.noted(key)
        return touched

    # --- tickets ---

    def open_load(self, keys: Sequence[bytes], now_s: float, lease_s: float) -> LoadTicket:
        """A lease on those of ``keys`` that are here. Raises InvalidInput for what is no key."""
        ticket = LoadTicket(check_keys(keys), now_s + lease_s)
        self._loads.add(ticket, now_s)
        self.lease(ticket)
        return ticket

    def take_load(self, ticket: LoadTicket) -> None:
        """It is being completed; InvalidInput unless it is open. Its lease goes on until ``end_lease``."""
        self._loads.take(ticket)

    def close_load(self, ticket: LoadTicket) -> None:
        """It is given up, or done with."""
        self._loads.discard(ticket)
        self.end_lease(ticket)

    def open_store(
        self, items: Sequence[tuple[bytes, Buffer]], places: Places, now_s: float, lease_s: float, store_name: str
    ) -> tuple[StoreTicket, list[bool]]:
        """Room for ``items``: per item whether there is.

        Raises InvalidInput for what is no item, and ValueTooLarge for one that the budget could never hold.
        """
        items = check_items(items)
        for _, value in items:
            if (size_bytes := size_of(value)) > self.budget_bytes:
                raise ValueTooLarge(
                    f"a value of {format_size(size_bytes)} does not fit the {store_name} store's budget of "
                    f"{format_size(self.budget_bytes)}: raise the budget or store smaller values"
                )
        ticket = StoreTicket(items, now_s + lease_s, places=check_places(items, places))
        self._stores.add(ticket, now_s)
        ticket.state = given = self.set_aside(ticket, now_s)
        return ticket, given

    def take_store(self, ticket: StoreTicket, now_s: float) -> list[bool]:
        """It is being completed, which raises InvalidInput unless it is open: per item whether it has room still."""
        self._stores.take(ticket)
        if isinstance(ticket.state, list) and self.has_room(ticket, now_s):
            return list(ticket.state)
        return [False] * len(ticket.items)

    @property
    def open_tickets(self) -> int:
        """Loads and stores that have begun and not ended."""
        return len(self._loads) + len(self._stores)

    # --- what must stay ---

    def lease(self, ticket: LoadTicket) -> None:
        """Those of its keys that are here stay until ``end_lease``, or until it expires."""
        self.chains.learn(ticket.keys)
        self._leases[ticket] = [key for key in ticket.keys if key in self.entries]
        for key in self._leases[ticket]:
            self.chains.hold(key)

    def end_lease(self, ticket: LoadTicket) -> None:
        for key in self._leases.pop(ticket, ()):
            self.chains.free(key)

    def pin(self, key: bytes, until_s: float, now_s: float) -> bool:
        """False where it is absent or would be over the pin budget; ``until_s`` not after ``now_s`` unpins."""
        self._expire(now_s)
        entry = self.entries.get(key)
        if entry is None:
            return False
        if until_s <= now_s:
            self._unpin(key)
            return True
        others_bytes = self._pinned_bytes - (entry.size_bytes if key in self._pins else 0)
        self._unpin(key)
        if others_bytes + entry.size_bytes > self._pin_budget_bytes:
            return False
        self._pins[key] = until_s
        self._pinned_bytes += entry.size_bytes
        heapq.heappush(self._pin_ends, (until_s, key))
        if len(self._pin_ends) > 2 * len(self._pins) + 64:
            self._pin_ends = [(end_s, pinned) for pinned, end_s in self._pins.items()]
            heapq.heapify(self._pin_ends)
        self.chains.hold(key)
        return True

    def _unpin(self, key: bytes) -> None:
        if self._pins.pop(key, None) is not None:
            self._pinned_bytes -= self.entries[key].size_bytes
            self.chains.free(key)

    # --- room ---

    def set_aside(self, ticket: StoreTicket, now_s: float) -> list[bool]:
        """Room for the items of ``ticket``, until ``end_store`` or until it expires: per item whether there is. What
        has to go for it is here until then (``in_the_way``), so that a store which fails costs nothing.
        """
        self._expire(now_s)
        self._learn(ticket)
        room: list[tuple[bytes, int]] = []
        self._rooms[ticket] = room
        given = [key not in self.kept for key, _ in ticket.items]
        wanted = [(key, size_of(value)) for (key, value), yes in zip(ticket.items, given, strict=True) if yes]
        for item in wanted:
            self._reserve(item, room)
        if self._is_room(0):
            return given
        self.end_store(ticket)  # not for all of them: one after the other
        self._rooms[ticket] = room = []
        for at, (key, value) in enumerate(ticket.items):
            given[at] = given[at] and self._is_room(size_of(value), self.chains.before(key))
            if given[at]:
                self._reserve((key, size_of(value)), room)
        return given

    def _reserve(self, item: tuple[bytes, int], room: list[tuple[bytes, int]]) -> None:
        room.append(item)
        self._reserved_bytes += item[1]
        self.chains.hold(item[0])

    def _learn(self, ticket: StoreTicket) -> None:
        """What is before each item: by the writer's word, or else the item before it in the call."""
        above: bytes | None = None
        for (key, _), place in zip(ticket.items, ticket.places, strict=True):
            before = above if place is None else place.parent
            if before is not None:
                self.chains.learn((before, key))
            above = key

    def in_the_way(self, items: Sequence[tuple[bytes, int]]) -> tuple[int, list[bytes]]:
        """Of these, for which room was set aside, with their sizes: how many of the first can be put, and what has to
        go for them first, by ``evict`` and in this order. Not all can where what was to go is leased or pinned by now.
        """
        for count in range(len(items), 0, -1):
            sizes = dict(items[:count])
            replaced_bytes = sum(self.entries[key].size_bytes for key in sizes if key in self.entries)
            excess_bytes = self.used_bytes - replaced_bytes + sum(sizes.values()) - self.budget_bytes
            victims = self._victims(excess_bytes)
            if victims is not None:
                return count, victims
        return 0, []

    def over_budget(self, now_s: float) -> list[bytes]:
        """What is to go by ``evict``, in this order, for the budget to hold as far as it can."""
        self._expire(now_s)
        return self._victims(self.used_bytes - self.budget_bytes, partly=True) or []

    def evict(self, victim: bytes) -> None:
        self.used_bytes -= self.entries.pop(victim).size_bytes
        self.chains.left(victim)
        self._policy.gone(victim, evicted=True)

    def _is_room(self, size_bytes: int, behind: bytes | None = None) -> bool:
        """Whether so much more can be freed than is set aside, without ``behind`` and what is before that."""
        if behind is not None:
            self.chains.hold(behind)
        victims = self._victims(self.used_bytes + self._reserved_bytes + size_bytes - self.budget_bytes)
        if behind is not None:
            self.chains.free(behind)
        return victims is not None

    def _victims(self, excess_bytes: int, partly: bool = False) -> list[bytes] | None:
        """Who would go to free so many bytes, first to last. None: not so many can be freed, unless ``partly`` does."""
        victims: list[bytes] = []
        while excess_bytes > 0:
            victim = self._policy.victim()
            if victim is None:
                break
            excess_bytes -= self.entries[victim].size_bytes
            victims.append(victim)
            self._policy.hold(victim)  # as if it were gone: what is before it may be next
            self.chains.left(victim)
        for victim in reversed(victims):
            self.chains.came(victim)
            self._policy.free(victim)
        return None if excess_bytes > 0 and not partly else victims

    def has_room(self, ticket: StoreTicket, now_s: float) -> bool:
        """Whether its room is still set aside."""
        return ticket in self._rooms and ticket.expires_s > now_s

    def end_store(self, ticket: StoreTicket) -> None:
        for key, size_bytes in self._rooms.pop(ticket, ()):
            self._reserved_bytes -= size_bytes
            self.chains.free(key)

    def pending(self, now_s: float) -> set[bytes]:
        """Keys that room is set aside for."""
        return {key for ticket, items in self._rooms.items() if ticket.expires_s > now_s for key, _ in items}

    def _expire(self, now_s: float) -> None:
        for load in [ticket for ticket in self._leases if ticket.expires_s <= now_s]:
            self.end_lease(load)
        for store in [ticket for ticket in self._rooms if ticket.expires_s <= now_s]:
            self.end_store(store)
        while self._pin_ends and self._pin_ends[0][0] <= now_s:
            until_s, key = heapq.heappop(self._pin_ends)
            if self._pins.get(key) == until_s:
                self._unpin(key)


def size_of(value: Buffer) -> int:
    return value.nbytes if isinstance(value, memoryview) else len(value)
