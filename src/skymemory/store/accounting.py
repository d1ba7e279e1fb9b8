"""Accounting of stores with a byte budget, on any medium.

``PrefixOrder`` knows what may be evicted, a policy (``eviction``) picks, ``Inventory`` counts bytes.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from weakref import ReferenceType, ref

from skymemory.errors import InvalidInput, ValueTooLarge
from skymemory.eviction import DEFAULT_POLICY, policy_named
from skymemory.forks import OwnLock
from skymemory.kv.block import Place
from skymemory.kv.value import HEADER_BYTES, MAX_NAME_BYTES
from skymemory.metrics import Counters
from skymemory.store.base import (
    Buffer,
    LoadTicket,
    OpenTickets,
    Places,
    Presence,
    StoreTicket,
    TwoPhase,
    check_items,
    check_keys,
    check_places,
    check_ttl,
)
from skymemory.store.named_values import NamedValue, named_value
from skymemory.units import format_size


class Deadlines:
    """Expiry time of each key, and the expired keys in order."""

    def __init__(self) -> None:
        self._until_s: dict[bytes, float] = {}
        # Heap of times and keys; entries are stale if the key has another time now.
        self._heap: list[tuple[float, bytes]] = []
        self.next_s = math.inf
        """Lower bound of all expiry times."""

    def __len__(self) -> int:
        return len(self._until_s)

    def give(self, key: bytes, until_s: float) -> None:
        self._until_s.pop(key, None)
        if until_s < math.inf:
            self._until_s[key] = until_s
            heapq.heappush(self._heap, (until_s, key))
            if len(self._heap) > 2 * len(self._until_s) + 64:  # mostly stale: rebuild
                self._heap = [(end_s, key) for key, end_s in self._until_s.items()]
                heapq.heapify(self._heap)
            self.next_s = self._heap[0][0]

    def forget(self, key: bytes) -> None:
        self._until_s.pop(key, None)

    def of(self, key: bytes) -> float:
        return self._until_s.get(key, math.inf)

    def pop_expired(self, now_s: float) -> list[bytes]:
        expired = []
        while self._heap and self._heap[0][0] <= now_s:
            end_s, key = heapq.heappop(self._heap)
            if self._until_s.get(key) == end_s:
                del self._until_s[key]
                expired.append(key)
        self.next_s = self._heap[0][0] if self._heap else math.inf
        return expired


REMEMBERED = 16_384
"""Limit of absent keys with a remembered predecessor: about 4 MB."""


class _Node:
    """Key in a chain that is present (``here``), or precedes a present or held key. ``depth``: number of keys before
    it.
    """

    __slots__ = ("before", "depth", "here", "holds")

    def __init__(self, before: bytes | None, depth: int) -> None:
        self.before = before
        self.depth = depth
        self.holds = 0
        """Protections from eviction: ``hold`` calls plus one per child."""
        self.here = False


class PrefixOrder:
    """Order of keys in their chains: eviction takes a chain's last keys first. ``set_evictable(key, evictable)`` is
    called when that changes for a present key.
    """

    def __init__(self, set_evictable: Callable[[bytes, bool], object], remembered: int = REMEMBERED) -> None:
        self._set_evictable = set_evictable
        self._nodes: dict[bytes, _Node] = {}
        # Predecessors of keys without a node, least recently named first.
        self._before: OrderedDict[bytes, bytes] = OrderedDict()
        self._remembered = remembered

    def __len__(self) -> int:
        return len(self._nodes)

    def learn(self, keys: Sequence[bytes]) -> None:
        """Learn that ``keys`` follow one another."""
        for before, key in pairwise(keys):
            node = self._nodes.get(key)
            if node is None:
                self._remember(key, before)
            elif node.before is None:
                self._adopt(key, node, before)

    def _adopt(self, key: bytes, node: _Node, before: bytes) -> None:
        """Set the unknown predecessor of ``key``, and protect that from eviction."""
        if before not in self._nodes or before == key:
            return
        if node.holds:  # calls that are not chains might form a cycle of keys, which could never be evicted
            above: bytes | None = before
            while above is not None:
                if above == key:
                    return
                above = self._nodes[above].before
        node.before, node.depth = before, self._nodes[before].depth + 1
        self.hold(before)

    def _remember(self, key: bytes, before: bytes) -> None:
        self._before.setdefault(key, before)
        self._before.move_to_end(key)
        if len(self._before) > self._remembered:
            self._before.popitem(last=False)

    def before(self, key: bytes) -> bytes | None:
        node = self._nodes.get(key)
        return self._before.get(key) if node is None else node.before

    def depth(self, key: bytes) -> int:
        node = self._nodes.get(key)
        return 0 if node is None else node.depth

    def added(self, key: bytes) -> None:
        """Record that ``key`` is stored: its predecessors are protected from eviction."""
        node = self._nodes.get(key)
        if node is None:
            node = self._new(key, ())
            if node.before is not None:
                self._hold_chain(node.before, {key})
        if not node.here:
            node.here = True
            if node.holds:
                self._set_evictable(key, False)

    def removed(self, key: bytes) -> None:
        node = self._nodes.get(key)
        if node is None or not node.here:
            return
        node.here = False
        if not node.holds:  # else it stays as a node: its successors hold the keys before it
            self._forget(key, node)

    def hold(self, key: bytes) -> None:
        """Protect ``key``, present or not, and its predecessors, until ``free``."""
        self._hold_chain(key, set())

    def _hold_chain(self, key: bytes, made: set[bytes]) -> None:
        """Protect ``key`` and its predecessors, up to the first known node, from eviction. ``made``: keys with new
        nodes; none may precede another, as a cycle could never be evicted.
        """
        current: bytes | None = key
        while current is not None:
            node = self._nodes.get(current)
            is_new = node is None
            if node is None:
                node = self._new(current, made)
                made.add(current)
            node.holds += 1
            if not is_new:
                if node.holds == 1:
                    self._set_evictable(current, False)
                return
            current = node.before

    def free(self, key: bytes) -> None:
        """Undo a ``hold``: the last makes a present key evictable, and drops an absent key."""
        current: bytes | None = key
        while current is not None:
            node = self._nodes[current]
            node.holds -= 1
            if node.holds:
                return
            if node.here:
                self._set_evictable(current, True)
                return
            del self._nodes[current]
            if node.before is not None:
                self._remember(current, node.before)
            current = node.before

    def _new(self, key: bytes, made: set[bytes] | tuple[()]) -> _Node:
        before = self._before.pop(key, None)
        if before is not None and (before == key or before in made):
            before = None
        above = self._nodes.get(before) if before is not None else None
        self._nodes[key] = node = _Node(before, 0 if before is None else 1 + (above.depth if above else 0))
        return node

    def _forget(self, key: bytes, node: _Node) -> None:
        del self._nodes[key]
        if node.before is not None:
            self._remember(key, node.before)
            self.free(node.before)


@dataclass(frozen=True, slots=True, eq=False)
class StoredEntry:
    """Entry of a value, equal only to itself."""

    size_bytes: int


class Inventory:
    """Accounts of a store: sizes, leases, pins, reservations and order of eviction, without I/O and clock. The caller
    holds a lock.
    """

    def __init__(self, budget_bytes: int, pin_budget_bytes: int, policy: str = DEFAULT_POLICY) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.entries: dict[bytes, StoredEntry] = {}
        self.order = PrefixOrder(self._set_evictable)
        self.kept: set[bytes] = set()
        """Keys of a later release's values: never read or replaced, but counted."""
        self._places: dict[bytes, Place] = {}
        self._policy = policy_named(policy, self._depth)
        self._loads: OpenTickets[LoadTicket] = OpenTickets()  # not completed
        self._stores: OpenTickets[StoreTicket] = OpenTickets()
        self._leases: dict[LoadTicket, list[bytes]] = {}  # keys that each load protects from eviction
        self._reservations: dict[StoreTicket, list[tuple[bytes, int]]] = {}  # key and bytes per item of each store
        self._reserved_bytes = 0
        # Heap of expiry times; weak references keep no ended tickets' values in memory.
        self._ticket_ends: list[tuple[float, int, ReferenceType[LoadTicket | StoreTicket]]] = []
        self._ticket_number = 0
        self._pin_budget_bytes = pin_budget_bytes
        self._pins: dict[bytes, float] = {}  # end of each pin
        self._pin_ends: list[tuple[float, bytes]] = []  # heap, with stale entries
        self._pinned_bytes = 0
        self.lifetimes = Deadlines()

    def __len__(self) -> int:
        return len(self.entries)

    def _set_evictable(self, key: bytes, evictable: bool) -> None:
        (self._policy.free if evictable else self._policy.hold)(key)

    def _depth(self, key: bytes) -> int:
        place = self._places.get(key)
        return self.order.depth(key) if place is None else place.depth

    # --- entries ---

    def put(self, key: bytes, size_bytes: int, place: Place | None = None) -> None:
        """Record that a value is stored; ends pin and lifetime of the value it replaces."""
        self._unpin(key)
        self.lifetimes.forget(key)
        if place is not None:
            self._places[key] = place
        old = self.entries.get(key)
        self.used_bytes += size_bytes - (old.size_bytes if old else 0)
        self.entries[key] = StoredEntry(size_bytes)
        self._policy.on_store_or_touch(key)
        if old is None:
            self.order.added(key)

    def keep(self, key: bytes, size_bytes: int) -> None:
        self.kept.add(key)
        self.used_bytes += size_bytes

    def remove(self, key: bytes) -> bool:
        """Remove a deleted or expired value."""
        entry = self.entries.get(key)
        if entry is None:
            return False
        self._unpin(key)
        self.lifetimes.forget(key)
        self.take_place(key)
        del self.entries[key]
        self.used_bytes -= entry.size_bytes
        self._policy.on_removal(key, evicted=False)
        self.order.removed(key)
        return True

    def evict(self, victim: bytes) -> None:
        self.used_bytes -= self.entries.pop(victim).size_bytes
        self.lifetimes.forget(victim)
        self.order.removed(victim)
        self._policy.on_removal(victim, evicted=True)

    def take_place(self, key: bytes) -> Place | None:
        return self._places.pop(key, None)

    def use(self, keys: Sequence[bytes]) -> list[bytes]:
        """Count a use. Return the present keys, reversed."""
        used = [key for key in reversed(keys) if key in self.entries]
        for key in used:
            self._policy.on_use(key)
        return used

    def touch(self, keys: Sequence[bytes]) -> list[bytes]:
        """Mark as recent, without a use. Return as ``use``."""
        touched = [key for key in reversed(keys) if key in self.entries]
        for key in touched:
            self._policy.on_store_or_touch(key)
        return touched

    # --- tickets ---

    def open_load(self, keys: Sequence[bytes], now_s: float, lease_s: float) -> LoadTicket:
        ticket = LoadTicket(check_keys(keys), now_s + lease_s)
        self._loads.add(ticket, now_s)
        self.lease(ticket)
        return ticket

    def take_load(self, ticket: LoadTicket) -> None:
        self._loads.take(ticket)

    def close_load(self, ticket: LoadTicket) -> None:
        self._loads.discard(ticket)
        self.end_lease(ticket)

    def open_store(
        self, items: Sequence[tuple[bytes, Buffer]], places: Places, now_s: float, lease_s: float, store_name: str
    ) -> tuple[StoreTicket, list[bool]]:
        """Reserve room for ``lease_s``; True per item if granted. ValueTooLarge for a value beyond the budget."""
        items = check_items(items)
        for _, value in items:
            if (size_bytes := size_of(value)) > self.budget_bytes:
                raise ValueTooLarge(
                    f"a value of {format_size(size_bytes)} does not fit the {store_name} store's budget of "
                    f"{format_size(self.budget_bytes)}: raise the budget or store smaller values"
                )
        ticket = StoreTicket(items, now_s + lease_s, places=check_places(items, places))
        self._stores.add(ticket, now_s)
        ticket.state = granted = self.reserve(ticket, now_s)
        return ticket, granted

    def take_store(self, ticket: StoreTicket, now_s: float) -> list[bool]:
        """Take the store for completion; True per item with room reserved."""
        self._stores.take(ticket)
        if isinstance(ticket.state, list) and self.has_room(ticket, now_s):
            return list(ticket.state)
        return [False] * len(ticket.items)

    @property
    def open_tickets(self) -> int:
        return len(self._loads) + len(self._stores)

    # --- leases and pins ---

    def lease(self, ticket: LoadTicket) -> None:
        self.order.learn(ticket.keys)
        self._leases[ticket] = [key for key in ticket.keys if key in self.entries]
        for key in self._leases[ticket]:
            self.order.hold(key)
        self._will_end(ticket)

    def _will_end(self, ticket: LoadTicket | StoreTicket) -> None:
        self._ticket_number += 1
        heapq.heappush(self._ticket_ends, (ticket.expires_s, self._ticket_number, ref(ticket)))
        if len(self._ticket_ends) > 2 * (len(self._leases) + len(self._reservations)) + 64:  # mostly stale: rebuild
            open_now = self._leases.keys() | self._reservations.keys()
            self._ticket_ends = [entry for entry in self._ticket_ends if entry[2]() in open_now]
            heapq.heapify(self._ticket_ends)

    def end_lease(self, ticket: LoadTicket) -> None:
        for key in self._leases.pop(ticket, ()):
            self.order.free(key)

    def pin(self, key: bytes, until_s: float, now_s: float) -> bool:
        """Pin a key; a past ``until_s`` unpins. False: absent, or over the pin budget."""
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
        if len(self._pin_ends) > 2 * len(self._pins) + 64:  # mostly stale: rebuild
            self._pin_ends = [(end_s, pinned) for pinned, end_s in self._pins.items()]
            heapq.heapify(self._pin_ends)
        self.order.hold(key)
        return True

    def _unpin(self, key: bytes) -> None:
        if self._pins.pop(key, None) is not None:
            self._pinned_bytes -= self.entries[key].size_bytes
            self.order.free(key)

    # --- reservations and eviction ---

    def reserve(self, ticket: StoreTicket, now_s: float) -> list[bool]:
        """Reserve room, evicting nothing yet; True per item if granted."""
        self._expire(now_s)
        self._learn(ticket)
        room: list[tuple[bytes, int]] = []
        self._reservations[ticket] = room
        self._will_end(ticket)
        # First try all items, which is one search for victims; only if that fails, item by item.
        granted = [key not in self.kept for key, _ in ticket.items]
        wanted = [(key, size_of(value)) for (key, value), ok in zip(ticket.items, granted, strict=True) if ok]
        for item in wanted:
            self._reserve(item, room)
        if self._is_room(0):
            return granted
        self.end_store(ticket)  # not enough room for all: item by item
        self._reservations[ticket] = room = []
        for at, (key, value) in enumerate(ticket.items):
            granted[at] = granted[at] and self._is_room(size_of(value), self.order.before(key))
            if granted[at]:
                self._reserve((key, size_of(value)), room)
        return granted

    def _reserve(self, item: tuple[bytes, int], room: list[tuple[bytes, int]]) -> None:
        room.append(item)
        self._reserved_bytes += item[1]
        self.order.hold(item[0])

    def _learn(self, ticket: StoreTicket) -> None:
        above: bytes | None = None
        for (key, _), place in zip(ticket.items, ticket.places, strict=True):
            before = above if place is None else place.parent
            if before is not None:
                self.order.learn((before, key))
            above = key

    def in_the_way(self, items: Sequence[tuple[bytes, int]]) -> tuple[int, list[bytes]]:
        """Return how many of the first items fit, and the victims to ``evict``."""
        # A chain's first blocks are worth most, so the last items are left out first.
        for count in range(len(items), 0, -1):
            sizes = dict(items[:count])
            replaced_bytes = sum(self.entries[key].size_bytes for key in sizes if key in self.entries)
            excess_bytes = self.used_bytes - replaced_bytes + sum(sizes.values()) - self.budget_bytes
            victims = self._victims(excess_bytes)
            if victims is not None:
                return count, victims
        return 0, []

    @property
    def excess_bytes(self) -> int:
        """Bytes of values and reservations beyond the budget."""
        return self.used_bytes + self._reserved_bytes - self.budget_bytes

    def victims_for(self, size_bytes: int) -> list[bytes] | None:
        return self._victims(size_bytes)

    def victims_up_to(self, size_bytes: int) -> list[bytes]:
        """Return victims that free ``size_bytes``, or all there are."""
        return self._victims(size_bytes, partly=True) or []

    def make_room(self, key: bytes, size_bytes: int, now_s: float) -> list[bytes] | None:
        """Return the victims to ``evict`` for a put without ticket; its key is held until ``order.free``. None,
        changing nothing: a ticket is needed.
        """
        if self._reservations or key in self.kept:
            return None
        if self.used_bytes + size_bytes <= self.budget_bytes:
            self.order.hold(key)
            return []
        self._expire(now_s)
        # With a ticket, the old and the new value both need room.
        if key in self.entries and not self._is_room(size_bytes, key):
            return None
        self.order.hold(key)
        count, victims = self.in_the_way([(key, size_bytes)])
        if not count:
            self.order.free(key)
            return None
        return victims  # held, because a free key would lose its known predecessor before it is put

    def over_budget(self, now_s: float) -> list[bytes]:
        self._expire(now_s)
        return self._victims(self.used_bytes - self.budget_bytes, partly=True) or []

    def _is_room(self, size_bytes: int, spared_key: bytes | None = None) -> bool:
        if spared_key is not None:
            self.order.hold(spared_key)
        victims = self._victims(self.used_bytes + self._reserved_bytes + size_bytes - self.budget_bytes)
        if spared_key is not None:
            self.order.free(spared_key)
        return victims is not None

    def _victims(self, excess_bytes: int, partly: bool = False) -> list[bytes] | None:
        """Choose victims that free ``excess_bytes``, evicting none. None if too few; with ``partly``, those."""
        victims: list[bytes] = []
        while excess_bytes > 0:
            victim = self._policy.victim()
            if victim is None:
                break
            excess_bytes -= self.entries[victim].size_bytes
            victims.append(victim)
            self._policy.hold(victim)  # as if it were removed: the block before it may be next
            self.order.removed(victim)
        for victim in reversed(victims):
            self.order.added(victim)
            self._policy.free(victim)
        return None if excess_bytes > 0 and not partly else victims

    def has_room(self, ticket: StoreTicket, now_s: float) -> bool:
        return ticket in self._reservations and ticket.expires_s > now_s

    def end_store(self, ticket: StoreTicket) -> None:
        for key, size_bytes in self._reservations.pop(ticket, ()):
            self._reserved_bytes -= size_bytes
            self.order.free(key)

    def pending(self, now_s: float) -> set[bytes]:
        return {key for ticket, items in self._reservations.items() if ticket.expires_s > now_s for key, _ in items}

    def _expire(self, now_s: float) -> None:
        """End expired leases, reservations and pins."""
        while self._ticket_ends and self._ticket_ends[0][0] <= now_s:
            ticket = heapq.heappop(self._ticket_ends)[2]()
            if isinstance(ticket, LoadTicket):
                self.end_lease(ticket)
            elif ticket is not None:
                self.end_store(ticket)
        while self._pin_ends and self._pin_ends[0][0] <= now_s:
            until_s, key = heapq.heappop(self._pin_ends)
            if self._pins.get(key) == until_s:
                self._unpin(key)


def size_of(value: Buffer) -> int:
    return value.nbytes if isinstance(value, memoryview) else len(value)


class BudgetedStore(TwoPhase):
    """Store over an ``Inventory``; subclasses hold the values. Calls raise InvalidInput once closed."""

    def __init__(
        self, name: str, inventory: Inventory, lease_s: float, clock: Callable[[], float], counters: Counters
    ) -> None:
        self._name = name
        self._inventory = inventory
        self._lease_s = lease_s
        self._clock = clock
        self._counters = counters
        self._lock = OwnLock(f"the {name} store")
        self._closed = False
        self.on_evict: Callable[[bytes, bytes, Place | None], object] | None = None  # gets key, value and place

    @property
    def name(self) -> str:
        return self._name

    def lookup(self, keys: Sequence[bytes]) -> list[Presence]:
        keys = check_keys(keys)
        with self._open():
            pending, entries = self._inventory.pending(self._clock()), self._inventory.entries
            return [
                Presence.HIT if key in entries else Presence.PENDING if key in pending else Presence.MISS
                for key in keys
            ]

    @property
    def leases(self) -> bool:
        return True

    def sizes(self, keys: Sequence[bytes]) -> list[int | None]:
        keys = check_keys(keys)
        with self._open():
            entries = [self._inventory.entries.get(key) for key in keys]
        return [None if entry is None else entry.size_bytes for entry in entries]

    def prefix(self, keys: Sequence[bytes]) -> int:
        keys = check_keys(keys)
        with self._open():
            self._inventory.order.learn(keys)
            return next((i for i, key in enumerate(keys) if key not in self._inventory.entries), len(keys))

    def prepare_load(self, keys: Sequence[bytes]) -> LoadTicket:
        with self._open():
            return self._inventory.open_load(keys, self._clock(), self._lease_s)

    def release(self, ticket: LoadTicket) -> None:
        with self._lock:
            self._inventory.close_load(ticket)

    def prepare_store(self, items: Sequence[tuple[bytes, Buffer]], places: Places = ()) -> StoreTicket:
        with self._open():
            ticket, granted = self._inventory.open_store(items, places, self._clock(), self._lease_s, self._name)
            self._counters.add("refused", granted.count(False))
            return ticket

    def pin(self, keys: Sequence[bytes], ttl_s: float) -> list[bool]:
        keys, ttl_s = check_keys(keys), check_ttl(ttl_s)
        with self._open():
            now_s = self._clock()
            return [self._inventory.pin(key, now_s + ttl_s, now_s) for key in keys]

    def expire(self, keys: Sequence[bytes], ttl_s: float) -> list[bool]:
        keys, ttl_s = check_keys(keys), check_ttl(ttl_s)
        with self._open():
            return [self._promise(key, ttl_s) for key in keys]

    def _promise(self, key: bytes, ttl_s: float) -> bool:
        present = key in self._inventory.entries
        if present:
            self._inventory.lifetimes.give(key, self._clock() + ttl_s)
        return present

    def left_s(self, keys: Sequence[bytes]) -> list[float]:
        keys = check_keys(keys)
        with self._open():
            now_s = self._clock()
            return [self._inventory.lifetimes.of(key) - now_s for key in keys]

    def _end(self, key: bytes) -> None:
        raise TypeError(f"{type(self).__name__} does not define _end")

    def names(self) -> list[NamedValue]:
        with self._open():
            keys = list(self._inventory.entries)
        values = [named_value(key, self._beginning(key, HEADER_BYTES + MAX_NAME_BYTES)) for key in keys]
        return sorted((value for value in values if value is not None), key=lambda value: value.name)

    def stored_keys(self) -> list[bytes]:
        with self._open():
            return list(self._inventory.entries)

    def _beginning(self, key: bytes, size_bytes: int) -> Buffer:
        raise TypeError(f"{type(self).__name__} does not define _beginning")

    def stats(self) -> dict[str, int | float]:
        with self._lock:
            return {
                **{f"{name}_total": value for name, value in self._counters.as_dict().items()},
                "entries": len(self._inventory),
                "used_bytes": self._inventory.used_bytes,
                "budget_bytes": self._inventory.budget_bytes,
                "open_leases": self._inventory.open_tickets,
            }

    def _open(self) -> AbstractContextManager[object]:
        """Return the lock, after removing expired values; InvalidInput if closed."""
        if self._closed:
            raise InvalidInput(f"the {self._name} store is closed: open a new one")
        lifetimes = self._inventory.lifetimes
        if lifetimes.next_s < math.inf and lifetimes.next_s <= (now_s := self._clock()):
            with self._lock:
                for key in lifetimes.pop_expired(now_s):
                    self._end(key)
                    self._counters.add("expired")
        return self._lock
