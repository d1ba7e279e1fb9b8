"""Owner of a host arena: the store whose values all processes of this computer read where they lie.

Clients read without asking (``native/host_reader.c``). The owner alone writes the directory: it gives out room, enters
values, evicts. A value's memory is reused once it left the directory and no client's page holds it.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from mmap import mmap
from pathlib import Path
from typing import Literal

from skymemory import native
from skymemory.errors import InvalidInput, MissingExtra
from skymemory.eviction import DEFAULT_POLICY
from skymemory.kv.block import Place
from skymemory.metrics import Counters
from skymemory.reasons import Miss
from skymemory.store.accounting import BudgetedStore, Inventory, size_of
from skymemory.store.base import (
    LEASE_S,
    Buffer,
    Hierarchy,
    KeyReport,
    LoadReport,
    LoadTicket,
    StoreTicket,
    check_keys,
)
from skymemory.store.host.arena import OwnedArena, is_held, reader_of
from skymemory.store.host.extents import Extents, rounded
from skymemory.store.host.layout import CHECKED, EXPIRES, ArenaShape

_FORGOTTEN_S = 30.0
"""Time after its lease in which a reservation may still be committed."""


@dataclass(slots=True)
class Extent:
    """Bytes of one value in the arena."""

    offset: int
    size_bytes: int


@dataclass(slots=True)
class Client:
    """Process that maps the arena. ``connected`` ends with its socket; its holds count until its process ends."""

    number: int
    path: Path
    page: mmap
    connected: bool = True
    seen_uses: int = 0
    reservations: dict[int, Reservation] = field(default_factory=dict)
    orphans: list[Extent] = field(default_factory=list)
    """Room reserved when its socket ended: it may still write there, until it connects again or ends."""


@dataclass(slots=True)
class Reservation:
    """Room for a client's writes: its own until it commits, gives up or ends."""

    ticket: StoreTicket
    granted: list[bool]
    extents: list[Extent | None]


class ArenaStore(BudgetedStore):
    """Store of values in shared memory.

    ``keep``: values stay when this process ends, for the next owner of ``folder``.

    Raises:
        InvalidInput: no budget, no such policy, too little shared memory, or another process owns ``folder``.
        MissingExtra: without the compiled helper.
    """

    def __init__(
        self,
        folder: Path,
        budget_bytes: int,
        *,
        name: str = "host",
        policy: str = DEFAULT_POLICY,
        keep: bool = False,
        lease_s: float = LEASE_S,
        pin_fraction: float = 0.5,
        read_bytes_per_s: float = 10e9,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not native.NATIVE:
            raise MissingExtra(
                "the host store needs the compiled helper: install a wheel, or a C compiler and build it"
            )
        inventory = Inventory(budget_bytes, int(budget_bytes * pin_fraction), policy)
        super().__init__(name, inventory, lease_s, clock, Counters())
        self._below: Hierarchy | None = None
        self._keep = keep
        self._read_bytes_per_s = read_bytes_per_s
        self._arena = OwnedArena(folder, ArenaShape(budget_bytes))
        self._directory = native.HostDirectory(self._arena.directory)
        self._clients: dict[int, Client] = {}
        self._held_since_s: dict[bytes, float] = {}
        """Keys that clients hold, so not evicted, and since when."""
        self._extents: dict[bytes, Extent] = {}
        self._keys: dict[int, bytes] = {}
        """Key of the value at each offset."""
        self._quarantined: dict[int, int] = {}
        """Offset and size of extents that left the directory while a client held them."""
        self._next_number = 1
        try:
            self._free = self._recover()
            self._own = self._new_client()
            self._reader = reader_of(self._arena.directory, self._arena.values, self._own.path)
        except BaseException:
            self._arena.let_go()
            raise

    # --- start and end ---

    def _recover(self) -> Extents:
        """Enter what an earlier owner has left, and its clients that still live."""
        found = sorted(self._directory.entries(), key=lambda entry: int(entry[1]))
        used: list[tuple[int, int]] = []
        end = 0
        for key, offset, size_bytes, check in found:
            # When a value expires is lost with the owner that knew it.
            if (
                check & EXPIRES
                or offset < end
                or self._inventory.used_bytes + size_bytes > self._inventory.budget_bytes
            ):
                self._directory.take(key)
                continue
            self._extents[key] = Extent(offset, size_bytes)
            self._keys[offset] = key
            self._inventory.put(key, size_bytes)
            used.append((offset, rounded(size_bytes)))
            end = offset + rounded(size_bytes)
        for number in self._arena.pages():
            path = self._arena.folder / "pages" / f"{number}"
            if is_held(path):
                self._add_client(number, path).connected = False
            else:
                path.unlink(missing_ok=True)
            self._next_number = max(self._next_number, number + 1)
        # What is held but in no entry was quarantined: its size is not known, so all to the next value is.
        # A hold within a value, or beyond the arena, is of a reader that will find it void.
        inside = [range(offset + 1, offset + length) for offset, length in used]
        lost = {
            offset
            for offset in self._held_offsets() - self._keys.keys()
            if offset < self._arena.shape.values_bytes and not any(offset in extent for extent in inside)
        }
        begins = sorted({*self._keys, *lost, self._arena.shape.values_bytes})
        ends = dict(used)
        for offset, after in itertools.pairwise(begins):
            if offset in lost:
                self._quarantined[offset] = after - offset
                ends[offset] = after - offset
        used = list(ends.items())
        return Extents(self._arena.shape.values_bytes, used)

    def close(self) -> None:
        if self._lock.owner.elsewhere:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._arena.close(self._keep)

    @property
    def below(self) -> Hierarchy | None:
        return self._below

    @below.setter
    def below(self, hierarchy: Hierarchy | None) -> None:
        self._below = hierarchy
        self._on_below()

    def _on_below(self) -> None: ...

    def count_fault(self) -> None:
        with self._lock:
            self._counters.add("faults")

    def drop_expired(self) -> None:
        """Drop values whose lifetime has ended: clients read without asking."""
        with self._open():
            pass

    def has_forgotten(self, client: Client) -> bool:
        """Return True if a reservation of the client has been open for longer than any store takes."""
        with self._lock:
            oldest_s = self._clock() - _FORGOTTEN_S
            return any(reservation.ticket.expires_s < oldest_s for reservation in client.reservations.values())

    @property
    def folder(self) -> Path:
        return self._arena.folder

    @property
    def instance(self) -> bytes:
        return self._arena.instance

    @property
    def arena_bytes(self) -> int:
        return self._arena.shape.values_bytes

    # --- clients ---

    def _new_client(self) -> Client:
        number = self._next_number
        self._next_number += 1
        return self._add_client(number, self._arena.new_page(number))

    def _add_client(self, number: int, path: Path) -> Client:
        with open(path, "r+b") as file:
            client = Client(number, path, mmap(file.fileno(), 0))
        self._clients[number] = client
        return client

    def connect(self, number: int = 0, instance: bytes = b"") -> Client:
        """Return a new client, or this arena's disconnected client of this number."""
        with self._open():
            client = self._clients.get(number)
            if client is None or client.connected or instance != self.instance:
                client = self._new_client()
            client.connected = True
            orphans, client.orphans = client.orphans, []
            self._free_extents(orphans)
            return client

    def disconnect(self, client: Client) -> None:
        """Free what the client reserved. Its holds count while its process lives."""
        with self._lock:
            client.connected = False
            for number in list(client.reservations):
                reservation = client.reservations.pop(number)
                self._inventory.end_store(reservation.ticket)
                client.orphans += [extent for extent in reservation.extents if extent is not None]
            self._drop_ended()

    def _drop_ended(self) -> None:
        for number, client in list(self._clients.items()):
            if not client.connected and not is_held(client.path):
                del self._clients[number]
                client.path.unlink(missing_ok=True)
                self._free_extents(client.orphans)

    def _held_offsets(self, clients: Iterable[Client] | None = None) -> set[int]:
        clients = self._clients.values() if clients is None else clients
        held: set[int] = self._directory.held_offsets([client.page for client in clients])
        return held

    def _learn_of_clients(self) -> None:
        """Count clients' uses; protect what they hold from eviction for a lease's time."""
        now_s = self._clock()
        self._drop_ended()
        others = [client for client in self._clients.values() if client is not self._own]
        for client in others:
            client.seen_uses, offsets = self._directory.uses(client.page, client.seen_uses)
            self._inventory.use([self._keys[offset] for offset in offsets if offset in self._keys])
        held = {self._keys[offset] for offset in self._held_offsets(others) if offset in self._keys}
        for key in [key for key in self._held_since_s if key not in held]:
            if self._held_since_s.pop(key) < math.inf:
                self._inventory.order.free(key)
        for key in held:
            is_new = key not in self._held_since_s
            since_s = self._held_since_s.setdefault(key, now_s)
            if is_new:
                self._inventory.order.hold(key)
            elif since_s + self._lease_s < now_s:
                self._held_since_s[key] = math.inf
                self._inventory.order.free(key)
        self._free_quarantined()

    # --- room ---

    def _free_extents(self, extents: Sequence[Extent]) -> None:
        """Free extents no longer in the directory; quarantine those that a client holds."""
        if not extents:
            return
        held = self._held_offsets()
        for extent in extents:
            if extent.offset in held:
                self._quarantined[extent.offset] = rounded(extent.size_bytes)
            else:
                self._free.free(extent.offset, rounded(extent.size_bytes))

    def _free_quarantined(self) -> None:
        if self._quarantined:
            held = self._held_offsets()
            for offset in [offset for offset in self._quarantined if offset not in held]:
                self._free.free(offset, self._quarantined.pop(offset))

    def _allocate(self, size_bytes: int) -> Extent | None:
        """Return room, evicting more than the budget demands if free room is in pieces; None without."""
        offset = self._free.allocate(rounded(size_bytes))
        if offset is None:
            self._drop_ended()
            self._free_quarantined()
            offset = self._free.allocate(rounded(size_bytes))
        while offset is None:
            victims = self._inventory.victims_for(1)
            if not victims:
                return None
            self._evict(victims)
            self._counters.add("evicted_for_shape", len(victims))
            offset = self._free.allocate(rounded(size_bytes))
        return Extent(offset, size_bytes)

    def _evict(self, victims: Sequence[bytes]) -> None:
        freed: list[Extent] = []
        for key in victims:
            self._inventory.evict(key)
            place = self._inventory.take_place(key)
            extent = self._extents.pop(key)
            if self.on_evict is not None:
                self.on_evict(key, bytes(self._bytes_of(extent)), place)
            self._leave(key, extent)
            freed.append(extent)
        self._free_extents(freed)
        self._counters.add("evicted", len(victims))

    def _bytes_of(self, extent: Extent) -> memoryview:
        return memoryview(self._arena.values)[extent.offset : extent.offset + extent.size_bytes]

    def _leave(self, key: bytes, extent: Extent) -> None:
        self._directory.take(key)
        del self._keys[extent.offset]
        if self._held_since_s.pop(key, math.inf) < math.inf:
            self._inventory.order.free(key)

    def _enter(self, key: bytes, extent: Extent, crc: int, place: Place | None) -> bool:
        """Enter a value that is written. False: the directory is full, and nothing in it can be evicted."""
        while not self._directory.put(key, extent.offset, extent.size_bytes, crc):
            victims = self._inventory.victims_for(1)
            if not victims:
                return False
            self._evict(victims)
        old = self._extents.get(key)
        self._extents[key] = extent
        if old is not None:
            del self._keys[old.offset]
            self._free_extents([old])
        self._keys[extent.offset] = key
        self._inventory.put(key, extent.size_bytes, place)
        self._counters.add("stored")
        return True

    # --- loads of this process ---

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        with self._open():
            started_s = self._clock()
            self._inventory.take_load(ticket)
            self._inventory.end_lease(ticket)
            views = self._reader.hold(ticket.keys)
            self._inventory.use(list(dict.fromkeys(ticket.keys)))
            values: list[memoryview | None] = []
            reasons: list[Miss | None] = []
            for key, view in zip(ticket.keys, views, strict=True):
                reason = reason_of(view)
                if view and not view.checked and not self._check(key, view):
                    reason = Miss.CORRUPT
                values.append(memoryview(view) if view and reason is None else None)
                reasons.append(reason)
            misses = values.count(None)
            self._counters.add("hits", len(values) - misses)
            self._counters.add("misses", misses)
            seconds = self._clock() - started_s
            ticket.report = LoadReport(
                tuple(
                    KeyReport(reason=reason) if value is None else KeyReport(self._name, value.nbytes, seconds)
                    for value, reason in zip(values, reasons, strict=True)
                ),
                seconds,
            )
            return values

    def _check(self, key: bytes, view: native.HostView) -> bool:
        """Compare a value with its checksum; a damaged value is dropped."""
        if view.is_sound():
            self._directory.mark(key, view.offset, CHECKED, True)
            return True
        self._counters.add("corrupt")
        extent = self._extents.get(key)
        if extent is not None and extent.offset == view.offset:
            self._remove(key)
        return False

    def check_next(self, keys: Sequence[bytes]) -> None:
        """Compare values with their checksums, so that clients need not."""
        for key in keys:
            with self._open():
                for view in self._reader.hold([key]):
                    if view and not view.checked:
                        self._check(key, view)

    # --- stores of this process ---

    def complete_store(self, ticket: StoreTicket) -> list[bool]:
        with self._open():
            started_s = self._clock()
            granted = self._inventory.take_store(ticket, started_s)
            items = {key: value for (key, value), ok in zip(ticket.items, granted, strict=True) if ok}
            places = {key: place for (key, _), place in zip(ticket.items, ticket.places, strict=True)}
            if self._inventory.excess_bytes > 0:  # the reservation counts
                self._learn_of_clients()
            count, victims = self._inventory.in_the_way([(key, size_of(value)) for key, value in items.items()])
            self._counters.add("refused", len(items) - count)
            self._evict(victims)
            done = set()
            for key in list(items)[:count]:
                if self._store(key, items[key], places[key]):
                    done.add(key)
            self._inventory.end_store(ticket)
            self._inventory.touch([key for key, _ in ticket.items])
            ticket.seconds = self._clock() - started_s
            return [ok and key in done for (key, _), ok in zip(ticket.items, granted, strict=True)]

    def _store(self, key: bytes, value: Buffer, place: Place | None) -> bool:
        extent = self._allocate(size_of(value))
        if extent is None:
            self._counters.add("refused")
            return False
        crc = self._reader.write(extent.offset, value, self._reader.grant)
        if crc is not None and self._enter(key, extent, crc | CHECKED, place):
            return True
        self._free.free(extent.offset, rounded(extent.size_bytes))
        self._counters.add("refused")
        return False

    # --- stores of clients ---

    def reserve(
        self, client: Client, items: Sequence[tuple[bytes, int]], places: Sequence[Place | None]
    ) -> tuple[int, list[int | None]]:
        """Give out room for values of these sizes; return the reservation's number, and each offset or None.

        Raises ValueTooLarge as ``prepare_store``.
        """
        with self._open():
            largest = self._arena.shape.values_bytes
            sized = [(key, memoryview(self._arena.values)[: min(size, largest)]) for key, size in items]
            if self._inventory.excess_bytes + sum(size for _, size in items) > 0:
                self._learn_of_clients()
            ticket, granted = self._inventory.open_store(sized, places, self._clock(), self._lease_s, self._name)
            self._counters.add("refused", granted.count(False))
            self._evict(self._inventory.victims_for(self._inventory.excess_bytes) or [])
            extents: list[Extent | None] = []
            for (_, size), ok in zip(items, granted, strict=True):
                extents.append(self._allocate(size) if ok else None)
            granted = [extent is not None for extent in extents]
            number = self._next_number = self._next_number + 1
            client.reservations[number] = Reservation(ticket, granted, extents)
            return number, [None if extent is None else extent.offset for extent in extents]

    def commit(
        self, client: Client, number: int, crcs: Sequence[int | None]
    ) -> tuple[list[bool], dict[bytes, Place | None]]:
        """Enter the values of a reservation, by the CRC-32 of each (None: not written).

        Return True for each stored, and their places.
        """
        with self._open():
            reservation = client.reservations.get(number)
            if reservation is None:
                raise InvalidInput("this reservation is not open: each is committed once, by its client")
            if len(crcs) != len(reservation.extents):
                raise InvalidInput(f"{len(crcs)} checksums for {len(reservation.extents)} values")
            now_s = self._clock()
            in_time = self._inventory.take_store(reservation.ticket, now_s)
            done = []
            for at, (key, _) in enumerate(reservation.ticket.items):
                extent, crc = reservation.extents[at], crcs[at]
                stored = (
                    in_time[at]
                    and extent is not None
                    and crc is not None
                    and self._enter(key, extent, crc, reservation.ticket.places[at])
                )
                if stored:
                    reservation.extents[at] = None
                done.append(stored)
            self._end_reservation(client, number)
            ticket = reservation.ticket
            self._inventory.touch([key for key, _ in ticket.items])
            rows = zip(ticket.items, ticket.places, done, strict=True)
            return done, {key: place for (key, _), place, stored in rows if stored}

    def _end_reservation(self, client: Client, number: int) -> None:
        reservation = client.reservations.pop(number)
        self._inventory.end_store(reservation.ticket)
        self._free_extents([extent for extent in reservation.extents if extent is not None])

    # --- other calls ---

    def touch(self, keys: Sequence[bytes]) -> None:
        keys = check_keys(keys)
        with self._open():
            self._inventory.order.learn(keys)
            self._inventory.touch(keys)

    def delete(self, keys: Sequence[bytes]) -> list[bool | None]:
        keys = check_keys(keys)
        with self._open():
            return [self._remove(key) for key in keys]

    def _remove(self, key: bytes) -> bool:
        extent = self._extents.pop(key, None)
        if extent is None:
            return False
        self._leave(key, extent)
        self._inventory.remove(key)
        self._free_extents([extent])
        return True

    def _beginning(self, key: bytes, size_bytes: int) -> Buffer:
        with self._lock:
            extent = self._extents.get(key)
            return b"" if extent is None else bytes(self._bytes_of(extent)[:size_bytes])

    def _end(self, key: bytes) -> None:
        self._remove(key)

    def _promise(self, key: bytes, ttl_s: float) -> bool:
        promised = super()._promise(key, ttl_s)
        if promised:
            self._directory.mark(key, self._extents[key].offset, EXPIRES, ttl_s < math.inf)
        return promised

    def estimate_load_s(self, keys: Sequence[bytes], now_s: float) -> float:
        keys = check_keys(keys)
        with self._open():
            sizes = [self._extents[key].size_bytes if key in self._extents else math.inf for key in keys]
            return sum(sizes) / self._read_bytes_per_s

    def stats(self) -> dict[str, int | float]:
        with self._lock:
            return {
                **super().stats(),
                "clients": sum(client.connected for client in self._clients.values()),
                "quarantined_bytes": sum(self._quarantined.values()),
                "arena_bytes": self._free.size_bytes,
                "free_bytes": self._free.free_bytes,
                "largest_free_bytes": self._free.largest,
            }


def reason_of(view: native.HostView | Literal[False] | None) -> Miss | None:
    """Return why there is no view, if so."""
    return Miss.ABSENT if view is None else Miss.TOO_MANY_LOADS if view is False else None
