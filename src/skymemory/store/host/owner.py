"""Owner of a host arena: the store whose values all processes of this computer read where they lie.

Clients read without asking (``native/host_reader.c``). The owner alone writes the directory: it gives out room, enters
values, evicts. A value's memory is reused once it left the directory and no client's page holds it.
"""

from __future__ import annotations

import itertools
import math
import time
import zlib
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from mmap import mmap
from pathlib import Path
from typing import Literal

from skymemory import native
from skymemory.errors import InvalidInput, MissingExtra, ValueTooLarge
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
from skymemory.store.host.extents import ALIGNED, Extents, rounded
from skymemory.store.host.layout import CHECKED, SLOTS, ArenaShape
from skymemory.store.host.messages import place_of

_MOST_ROOM_BYTES, _ROOMS = 8 << 20, 32
"""Most room in the slots of a client, and slots with room of one size."""
_FOREVER_S = 1e9
"""Lifetime from which on a value does not expire: 30 years."""
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
    rooms: dict[int, Extent] = field(default_factory=dict)
    """Room in its slots."""
    orphans: list[Extent] = field(default_factory=list)
    """Room reserved when its socket ended: it may still write there, until it connects again or ends."""


@dataclass(slots=True)
class Reservation:
    """Room for a client's writes: its own until it commits, gives up or ends."""

    ticket: StoreTicket
    granted: list[bool]
    extents: list[Extent | None]


@dataclass(frozen=True, slots=True)
class Post:
    """Value that a client wrote into a slot."""

    at_ns: int
    slot: int
    room: Extent
    key: bytes
    size_bytes: int
    crc: int
    place: Place | None
    before: bytes | None
    """Key before it in its chain, if known."""


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
        self._gives_rooms, self._entering = True, False
        self.entered: deque[tuple[bytes, Place | None]] = deque()
        """What clients have stored, for the server."""
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
        now_ns, now_s = time.monotonic_ns(), self._clock()
        for key, offset, size_bytes, _, end_ns in found:
            if (
                (end_ns and (end_ns <= now_ns or not self._arena.has_times))
                or offset < end
                or self._inventory.used_bytes + size_bytes > self._inventory.budget_bytes
            ):
                self._directory.take(key)
                continue
            self._extents[key] = Extent(offset, size_bytes)
            self._keys[offset] = key
            self._inventory.put(key, size_bytes)
            if end_ns:
                self._inventory.lifetimes.give(key, now_s + (end_ns - now_ns) / 1e9)
            used.append((offset, rounded(size_bytes)))
            end = offset + rounded(size_bytes)
        for number in self._arena.pages():
            self._add_client(number, self._arena.folder / "pages" / f"{number}").connected = False
            self._next_number = max(self._next_number, number + 1)
        used += self._recover_slots(used)
        used += self._recover_quarantined(sorted(used))
        return Extents(self._arena.shape.values_bytes, used)

    def _recover_quarantined(self, used: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Quarantine what is held but neither entered nor posted. Its size is not known: all to the next extent.

        A hold within a value, or beyond the arena, is of a reader that will find it void.
        """
        living = [client for client in self._clients.values() if is_held(client.path)]
        begins, end = [begin for begin, _ in used], self._arena.shape.values_bytes
        lost = set[int]()
        for offset in self._held_offsets(living):
            at = bisect_right(begins, offset)
            if offset < end and (not at or sum(used[at - 1]) <= offset):
                lost.add(offset)
        for offset, after in itertools.pairwise(sorted({*begins, *lost, end})):
            if offset in lost:
                self._quarantined[offset] = after - offset
        return list(self._quarantined.items())

    def _recover_slots(self, used: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Take room in slots back; return the room of values there, which are entered later."""
        occupied, found = sorted(used), list[tuple[int, int]]()
        for client in self._clients.values():
            with suppress(ValueError):  # another release's page
                for slot in range(SLOTS):
                    self._directory.take_room(client.page, slot)
            for post in self._posts_of(client):
                offset, room_bytes = post.room.offset, post.room.size_bytes
                at = bisect_left(occupied, (offset, 0))
                ends = occupied[at - 1][0] + occupied[at - 1][1] if at else 0
                begins = occupied[at][0] if at < len(occupied) else self._arena.shape.values_bytes
                if offset < ends or offset + room_bytes > begins or post.size_bytes > room_bytes or offset % ALIGNED:
                    self._directory.end_post(client.page, post.slot)  # the owner before has entered it
                    continue
                occupied.insert(at, (offset, room_bytes))
                found.append((offset, room_bytes))
                client.rooms[post.slot] = post.room
        return found

    def close(self) -> None:
        if self._lock.owner.elsewhere:
            return
        with self._lock:
            if self._closed:
                return
            self.end_rooms()
            self._closed = True
            if not self._keep and len(self._clients) > 1:
                self._give_memory_back()
            self._arena.close(self._keep)
            del self._reader, self._directory
            for client in self._clients.values():
                client.page.close()
            self._arena.unmap()

    def _give_memory_back(self) -> None:
        """Free the memory of all values that no client holds: they may go on to map the files that are removed."""
        for key in self._extents:
            self._directory.take(key)
        held = self._held_offsets()
        kept = {extent.offset: rounded(extent.size_bytes) for extent in self._extents.values()} | self._quarantined
        self._arena.give_memory_back(sorted((offset, kept[offset]) for offset in held & kept.keys()))

    @property
    def below(self) -> Hierarchy | None:
        return self._below

    @below.setter
    def below(self, hierarchy: Hierarchy | None) -> None:
        self._below = hierarchy
        self._on_below()

    def _on_below(self) -> None: ...

    def end_sharing(self) -> None: ...

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
        ended = [client for client in self._clients.values() if not client.connected and not is_held(client.path)]
        if not ended or self._entering:
            return
        for client in ended:
            self._take_rooms(client, SLOTS)
        self._enter_posts()
        for client in ended:
            del self._clients[client.number]
            client.path.unlink(missing_ok=True)
            self._free_extents([*client.orphans, *client.rooms.values()])

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
            self._learn_of_clients()
            for client in self._clients.values():
                self._take_rooms(client, SLOTS)
            offset = self._free.allocate(rounded(size_bytes))
        while offset is None and (victims := self._victims_for(size_bytes)):
            self._evict(victims)
            self._counters.add("evicted_for_shape", len(victims))
            offset = self._free.allocate(rounded(size_bytes))
        return None if offset is None else Extent(offset, size_bytes)

    def _can_allocate(self, size_bytes: int) -> bool:
        """Return False if holds and pins leave no room in one piece, whatever is evicted."""
        return self._free.largest >= 2 * rounded(size_bytes) or self._victims_for(size_bytes) is not None

    def _victims_for(self, size_bytes: int) -> list[bytes] | None:
        """Return what has to be evicted until a free extent has room; None if none ever has."""
        size_bytes = rounded(size_bytes)
        if self._free.has_room(size_bytes):
            return []
        held = self._held_offsets()
        most_bytes = size_bytes
        while True:
            victims = self._inventory.victims_up_to(most_bytes)
            extents = [self._extents[key] for key in victims]
            freed = [(extent.offset, 0 if extent.offset in held else rounded(extent.size_bytes)) for extent in extents]
            count = self._free.count_until_room(size_bytes, freed)
            if count is not None:
                return victims[:count]
            if sum(extent.size_bytes for extent in extents) < most_bytes:
                return None
            most_bytes *= 8

    def _evict(self, victims: Sequence[bytes]) -> None:
        freed: list[Extent] = []
        for key in victims:
            self._inventory.evict(key)
            place = self._inventory.take_place(key)
            extent = self._extents.pop(key)
            if self.on_evict is not None and (value := self._sound_bytes(key)) is not None:
                self.on_evict(key, value, place)
            self._leave(key, extent)
            freed.append(extent)
        self._free_extents(freed)
        self._counters.add("evicted", len(victims))

    def _sound_bytes(self, key: bytes) -> bytes | None:
        (view,) = self._reader.hold([key])
        return bytes(view) if view and (view.checked or view.is_sound()) else None

    def _bytes_of(self, extent: Extent) -> memoryview:
        return memoryview(self._arena.values)[extent.offset : extent.offset + extent.size_bytes]

    def _leave(self, key: bytes, extent: Extent) -> None:
        self._directory.take(key)
        del self._keys[extent.offset]
        if self._held_since_s.pop(key, math.inf) < math.inf:
            self._inventory.order.free(key)

    def _enter(self, key: bytes, extent: Extent, crc: int, place: Place | None, by_client: bool = False) -> bool:
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
        if by_client:
            self.entered.append((key, place))
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
        return self._note_checked(key, view, view.is_sound())

    def _note_checked(self, key: bytes, view: native.HostView, is_sound: bool) -> bool:
        if is_sound:
            self._directory.mark_checked(key, view.offset)
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
                (view,) = self._reader.hold([key])
            if view and not view.checked:
                is_sound = view.is_sound()
                with self._open():
                    self._note_checked(key, view, is_sound)

    # --- stores of this process ---

    def complete_store(self, ticket: StoreTicket) -> list[bool]:
        with self._open():
            started_s = self._clock()
            granted = self._inventory.take_store(ticket, started_s)
            items = {key: value for (key, value), ok in zip(ticket.items, granted, strict=True) if ok}
            places = {key: place for (key, _), place in zip(ticket.items, ticket.places, strict=True)}
            if self._inventory.excess_bytes > 0:  # the reservation counts
                self._learn_of_clients()
                items = {key: value for key, value in items.items() if self._can_allocate(size_of(value))}
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

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Hold the lock, after entering what clients have put into slots; InvalidInput if closed."""
        with super()._open():
            if self._closed:  # meanwhile
                raise InvalidInput(f"the {self.name} store is closed: open a new one")
            if self._directory.posted([client.page for client in self._clients.values()]):
                self._enter_posts()
            yield

    def enter_posts(self) -> None:
        with self._open():
            pass

    def sleep(self) -> bool:
        """Let clients wake this process from now on; False, and nothing changes, if values wait in slots."""
        with self._lock:
            if self._closed:
                return True
            self._directory.set_awake(False)
            if self._directory.posted([client.page for client in self._clients.values()]):
                self._directory.set_awake(True)
                return False
            return True

    def wake(self) -> None:
        with self._lock:
            if not self._closed:
                self._directory.set_awake(True)

    def end_rooms(self) -> None:
        """Let clients store in slots no more."""
        with self._lock:
            if self._closed:
                return
            self._gives_rooms = False
            for client in self._clients.values():
                self._take_rooms(client, SLOTS)
            self._enter_posts()

    def _enter_posts(self) -> None:
        """Enter the values in slots, in the order of all clients' stores; give room for as many again."""
        if self._entering:
            return
        self._entering = True
        try:
            # A store that has ended before another began is seen with it, or earlier: what came since waits.
            until_ns = time.monotonic_ns()
            found = [(post, client) for client in self._clients.values() for post in self._posts_of(client)]
            for post, client in sorted(found, key=lambda pair: pair[0].at_ns):
                if post.at_ns < until_ns:
                    self._take_post(post, client)
        finally:
            self._entering = False

    def _posts_of(self, client: Client) -> list[Post]:
        posts = []
        rows = self._directory.posts(client.page)
        for at_ns, _, slot, offset, room_bytes, key, size_bytes, crc, kind, depth, parent in rows:
            try:
                place = place_of(kind, depth, parent)
                before = parent if any(parent) else None
                posts.append(Post(at_ns, slot, Extent(offset, room_bytes), key, size_bytes, crc, place, before))
            except ValueError:  # damaged
                with suppress(ValueError):
                    self._directory.end_post(client.page, slot)
        return posts

    def _take_post(self, post: Post, client: Client) -> None:
        room = client.rooms.pop(post.slot, None)
        if room is not None and not self._enter_post(room, post):
            self._counters.add("refused")
            self._free_extents([room])
        with suppress(ValueError):  # the page was damaged
            self._directory.end_post(client.page, post.slot)
        if room is not None and client.connected:
            self._give_room(client, post.slot, room.size_bytes)

    def _enter_post(self, room: Extent, post: Post) -> bool:
        if rounded(post.size_bytes) != room.size_bytes or post.crc >> 32 or post.place is None:
            return False
        inventory, now_s = self._inventory, self._clock()
        if post.before is not None:
            inventory.order.learn((post.before, post.key))
        if inventory.excess_bytes + post.size_bytes > 0:
            self._learn_of_clients()
        victims = inventory.make_room(post.key, post.size_bytes, now_s)
        ticket: StoreTicket | None = None
        if victims is None:  # beside open stores, or over an old value
            try:
                sized = self._sized([(post.key, post.size_bytes)])
                ticket, _ = inventory.open_store(sized, (post.place,), now_s, self._lease_s, self._name)
            except ValueTooLarge:
                return False
            if inventory.take_store(ticket, now_s) == [True]:
                victims = inventory.victims_for(inventory.excess_bytes) or []
        try:
            if victims is None:
                return False
            self._evict(victims)
        finally:
            if ticket is not None:
                inventory.end_store(ticket)
            elif victims is not None:
                inventory.order.free(post.key)
        return self._enter(post.key, Extent(room.offset, post.size_bytes), post.crc, post.place, by_client=True)

    def _give_rooms(self, client: Client, size_bytes: int) -> None:
        """Give a client slots with room for values of this size, unless it is large."""
        room_bytes = rounded(size_bytes)
        count = min(_ROOMS, self._most_room_bytes // room_bytes)
        missing = count - sum(room.size_bytes == room_bytes for room in client.rooms.values())
        if missing > 0:
            self._take_rooms(client, missing - (SLOTS - len(client.rooms)), but_bytes=room_bytes)
            for slot in [slot for slot in range(SLOTS) if slot not in client.rooms][:missing]:
                self._give_room(client, slot, room_bytes)

    def _give_room(self, client: Client, slot: int, room_bytes: int) -> None:
        taken_bytes = sum(room.size_bytes for room in client.rooms.values())
        if not self._gives_rooms or taken_bytes + room_bytes > 2 * self._most_room_bytes:
            return
        offset = self._free.allocate(room_bytes)
        if offset is not None:
            given = False
            with suppress(ValueError):  # the page was damaged
                given = self._directory.give_room(client.page, slot, offset, room_bytes)
            if given:
                client.rooms[slot] = Extent(offset, room_bytes)
            else:
                self._free.free(offset, room_bytes)

    @property
    def _most_room_bytes(self) -> int:
        return min(_MOST_ROOM_BYTES, self._arena.shape.values_bytes // 64)

    def _take_rooms(self, client: Client, count: int, but_bytes: int = 0) -> None:
        """Take room in up to ``count`` slots back, but no room of ``but_bytes``."""
        taken: list[Extent] = []
        for slot, room in list(client.rooms.items()):
            with suppress(ValueError):  # the page was damaged
                if len(taken) < count and room.size_bytes != but_bytes and self._directory.take_room(client.page, slot):
                    taken.append(client.rooms.pop(slot))
        self._free_extents(taken)

    def _may_enter(self, place: Place | None) -> bool:
        """Return False for a client's value that may change: farther tiers have to know of it (``withdraw``)."""
        return place is not None or self._below is None

    def _sized(self, items: Sequence[tuple[bytes, int]]) -> list[tuple[bytes, Buffer]]:
        """Return values of these sizes, without a content of their own."""
        values, largest = memoryview(self._arena.values), self._arena.shape.values_bytes
        return [(key, values[: min(size, largest)]) for key, size in items]

    def withdraw(
        self, client_number: int, number: int, crcs: Sequence[int | None]
    ) -> list[tuple[bytes, bytes | None, Place | None]]:
        """End a reservation; return its keys, with copies of the values that were written there, and places."""
        with self._open():
            client = self._clients.get(client_number)
            reservation = client.reservations.pop(number, None) if client is not None else None
            if reservation is None or len(crcs) != len(reservation.extents):
                raise InvalidInput("this reservation is not open: each is committed once, by its client")
            self._inventory.take_store(reservation.ticket, self._clock())
            self._inventory.end_store(reservation.ticket)
            written = [None if extent is None else self._bytes_of(extent) for extent in reservation.extents]
        copies = [None if view is None or crc is None else bytes(view) for view, crc in zip(written, crcs, strict=True)]
        values = [
            value if value is not None and zlib.crc32(value) == crc else None
            for value, crc in zip(copies, crcs, strict=True)
        ]
        with self._open():
            self._free_extents([extent for extent in reservation.extents if extent is not None])
        items, places = reservation.ticket.items, reservation.ticket.places
        return [(key, value, place) for (key, _), value, place in zip(items, values, places, strict=True)]

    def reserve(
        self, client: Client, items: Sequence[tuple[bytes, int]], places: Sequence[Place | None]
    ) -> tuple[int, list[int | None]]:
        """Give out room for values of these sizes; return the reservation's number, and each offset or None.

        Raises ValueTooLarge as ``prepare_store``.
        """
        with self._open():
            sized = self._sized(items)
            if self._inventory.excess_bytes + sum(size for _, size in items) > 0:
                self._learn_of_clients()
            ticket, granted = self._inventory.open_store(sized, places, self._clock(), self._lease_s, self._name)
            excess_bytes = self._inventory.excess_bytes
            if excess_bytes > 0:
                fits = [ok and self._can_allocate(size) for (_, size), ok in zip(items, granted, strict=True)]
                excess_bytes -= sum(size for (_, size), ok, fit in zip(items, granted, fits, strict=True) if ok != fit)
                granted = fits
            self._counters.add("refused", granted.count(False))
            self._evict(self._inventory.victims_for(excess_bytes) or [])
            extents: list[Extent | None] = []
            for (_, size), ok in zip(items, granted, strict=True):
                extents.append(self._allocate(size) if ok else None)
            granted = [extent is not None for extent in extents]
            number = self._next_number = self._next_number + 1
            client.reservations[number] = Reservation(ticket, granted, extents)
            return number, [None if extent is None else extent.offset for extent in extents]

    def commit(self, client: Client, number: int, crcs: Sequence[int | None]) -> list[bool]:
        """Enter the values of a reservation, by the CRC-32 of each (None: not written); return True for each stored."""
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
                place = reservation.ticket.places[at]
                stored = (
                    in_time[at]
                    and extent is not None
                    and crc is not None
                    and self._may_enter(place)
                    and self._enter(key, extent, crc, place, by_client=True)
                )
                if stored:
                    reservation.extents[at] = None
                done.append(stored)
            self._end_reservation(client, number)
            ticket = reservation.ticket
            self._inventory.touch([key for key, _ in ticket.items])
            if ticket.places[-1] is not None:
                self._give_rooms(client, size_of(ticket.items[-1][1]))  # its next blocks are as large
            return done

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
            end_ns = time.monotonic_ns() + int(max(ttl_s, 0.0) * 1e9) if ttl_s < _FOREVER_S else 0
            self._directory.set_end(key, self._extents[key].offset, end_ns)
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
                "slot_bytes": sum(
                    room.size_bytes for client in self._clients.values() for room in client.rooms.values()
                ),
                "quarantined_bytes": sum(self._quarantined.values()),
                "arena_bytes": self._free.size_bytes,
                "free_bytes": self._free.free_bytes,
                "largest_free_bytes": self._free.largest,
            }


def reason_of(view: native.HostView | Literal[False] | None) -> Miss | None:
    """Return why there is no view, if so."""
    return Miss.ABSENT if view is None else Miss.TOO_MANY_LOADS if view is False else None
