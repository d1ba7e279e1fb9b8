"""Contract of every tier, checked by ``tests/contract/store_contract.py``: loads and stores in two phases.

- **Keys** are 32 ``bytes`` (a block hash, or ``kv.block.key_hash`` of a name); else InvalidInput.
- **Order matters.** Keys form a chain: eviction takes its last blocks first, so that presence stays prefix-closed.
- **Places** (a block's depth and predecessor) only speed up an index: results never depend on them.
- **A miss is None.** ``complete_load`` never raises for it; the ticket's report has the reason, ``stats()`` a counter.
- **Views are snapshots.** Until ``release(ticket)`` a view never changes, even if its key is put, deleted or evicted.
- **Values are copied.** After ``complete_store`` the caller may change what it passed in.
- **No needless eviction.** If eviction cannot make room for a value, nothing is evicted.
- **A lease protects** the keys present at ``prepare_load`` from eviction until ``complete_load``, ``release`` or its
  end; keys being stored are protected between the phases. But Redis leases nothing, and satellites lease at most a
  quarter of their memory, by an unacknowledged packet.
"""

from __future__ import annotations

import enum
import math
import mmap
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from threading import Condition, Lock
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, runtime_checkable
from weakref import WeakSet

import numpy as np

from skymemory.errors import InvalidInput
from skymemory.forks import Owner
from skymemory.kv.block import Place
from skymemory.native import Rows
from skymemory.reasons import Miss

if TYPE_CHECKING:
    from typing import Self


Buffer = bytes | bytearray | memoryview
"""Types of a value; always C-contiguous."""

Places = Sequence[Place | None]

KEY_BYTES = 32
LEASE_S = 30.0
"""Longest lease: a client that died must not pin memory forever."""

ABANDONED_S = 10 * LEASE_S
"""Time after its lease in which a ticket may still be completed."""


class Presence(enum.Enum):
    """Presence of a key. PENDING: being stored; a load now misses."""

    MISS = 0
    HIT = 1
    PENDING = 2


@dataclass(frozen=True, slots=True)
class KeyReport:
    """Report on the load of a key: tier that supplied it, bytes, seconds, chunks requested again; on a miss, the
    reason.
    """

    tier: str = ""
    size_bytes: int = 0
    seconds: float = 0.0
    retransmitted: int = 0
    reason: Miss | None = None


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Reports on a load's keys, in the ticket's order, and the seconds of all together."""

    keys: tuple[KeyReport, ...]
    seconds: float

    @property
    def size_bytes(self) -> int:
        return sum(key.size_bytes for key in self.keys)

    @property
    def retransmitted(self) -> int:
        return sum(key.retransmitted for key in self.keys)


@dataclass(slots=True, eq=False, weakref_slot=True)
class LoadTicket:
    """Load begun: until ``expires_s`` (the store's clock) its keys are protected from eviction. ``complete_load`` sets
    ``report``; ``state`` is private to the store.
    """

    keys: tuple[bytes, ...]
    expires_s: float
    report: LoadReport | None = None
    state: object = field(default=None, repr=False)
    rows: Sequence[Rows | None] = field(default=(), repr=False)
    """Destination of each value (None: a new buffer), if the tier supports it."""
    placed: Mapping[int, int] = field(default_factory=dict)
    """CRC-32 of each value written into its rows, by position in ``keys``; only its header is returned. Rows of other
    values may be overwritten.
    """


@dataclass(slots=True, eq=False, weakref_slot=True)
class StoreTicket:
    """Store begun: room for ``items`` is reserved until ``expires_s``. ``seconds``: time that it took; ``state`` is
    private to the store.
    """

    items: tuple[tuple[bytes, Buffer], ...]
    expires_s: float
    seconds: float = 0.0
    state: object = field(default=None, repr=False)
    places: tuple[Place | None, ...] = ()
    unanswered: frozenset[bytes] = frozenset()
    """Keys that failed without an answer."""
    reason: str = ""
    """Reason in words if some items are not stored; empty if unknown."""
    rooms: list[memoryview | None] = field(default_factory=list, repr=False)
    """Room of each item of ``InPlace.prepare_rooms``; the caller sets to None what it leaves unwritten."""
    crcs: dict[int, int] = field(default_factory=dict, repr=False)
    """CRC-32 of the value in each room, by position, where the caller knows it."""

    def __post_init__(self) -> None:
        self.places = self.places or (None,) * len(self.items)


@runtime_checkable
class Store(Protocol):
    """Tier of the hierarchy. Every method may be called from any thread."""

    @property
    def name(self) -> str:
        """Return the tier's name in reports and metrics."""

    def lookup(self, keys: Sequence[bytes]) -> list[Presence]:
        """Return the presence of each key, refreshing none."""

    def sizes(self, keys: Sequence[bytes]) -> list[int | None]:
        """Return the bytes of each value; None if absent or unknown."""

    @property
    def leases(self) -> bool:
        """Return True if leases always protect."""

    def prefix(self, keys: Sequence[bytes]) -> int:
        """Count the leading keys present."""

    def prepare_load(self, keys: Sequence[bytes]) -> LoadTicket:
        """Lease ``keys``, which may repeat."""

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        """Return read-only views in the order of ``ticket.keys``, None for a miss; set ``ticket.report``. Raises
        InvalidInput for a ticket completed before, or of another store.
        """

    def release(self, ticket: LoadTicket) -> None:
        """End a lease, or the use of a load's views. May be called again."""

    def prepare_store(self, items: Sequence[tuple[bytes, Buffer]], places: Places = ()) -> StoreTicket:
        """Reserve room. Raises ValueTooLarge for a value that can never fit."""

    def complete_store(self, ticket: StoreTicket) -> list[bool]:
        """Return True per item if acknowledged. False: no room, or no answer (``ticket.unanswered``). Raises as
        ``complete_load``.
        """

    def get_many(self, keys: Sequence[bytes]) -> list[memoryview | None]:
        """Run both phases of a load."""

    def put_many(self, items: Sequence[tuple[bytes, Buffer]], places: Places = ()) -> list[bool]:
        """Run both phases of a store."""

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark ``keys`` as just used, the first as the most recent."""

    def pin(self, keys: Sequence[bytes], ttl_s: float) -> list[bool]:
        """Protect from eviction for ``ttl_s`` seconds (0 or less unpins). False: absent, or over the pin budget."""

    def delete(self, keys: Sequence[bytes]) -> list[bool | None]:
        """Remove values despite leases and pins. True: no longer readable; False: absent; None: a holder did not
        answer.
        """

    def stats(self) -> dict[str, int | float]:
        """Return counters and gauges; names contain units."""

    def estimate_load_s(self, keys: Sequence[bytes], now_s: float) -> float:
        """Estimate the seconds to load ``keys``; infinite if a key is absent."""

    def close(self) -> None:
        """Free all resources; later calls raise InvalidInput, except ``close``."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *raised: object) -> None: ...


@runtime_checkable
class Prefetching(Protocol):
    """Optional interface: move values in advance to their readers."""

    def prefetch(self, keys: Sequence[bytes], at: float) -> list[bool]:
        """Move values near before ``at`` (Unix seconds); False if not moved."""


def bring_near(store: Store | Prefetching, keys: Sequence[bytes], at: float) -> list[bool]:
    """Prefetch; in a tier without distances, present values are near."""
    if isinstance(store, Prefetching):
        return store.prefetch(keys, at)
    return [presence is Presence.HIT for presence in store.lookup(keys)]


@runtime_checkable
class Evicting(Protocol):
    """Optional interface: report evicted values, so that another tier can take them."""

    on_evict: Callable[[bytes, bytes, Place | None], object] | None
    """Callback with key, value and place, under the tier's lock: it must not call the tier. Not for values deleted,
    replaced or lost by closing.
    """


class Hierarchy(Protocol):
    """Farther tiers, as a nearest tier sees them that other processes use, too. Calls may wait for those tiers."""

    def lookup(self, keys: Sequence[bytes]) -> list[Presence]: ...

    def sizes(self, keys: Sequence[bytes]) -> list[int | None]: ...

    def fill_nearest(self, keys: Sequence[bytes]) -> None:
        """Copy the values that farther tiers have into the nearest."""

    def on_nearest_stored(self, places: Mapping[bytes, Place]) -> None:
        """Store these blocks, which another process has stored in the nearest tier, in the farther tiers, later."""

    def put_many(self, items: Sequence[tuple[bytes, Buffer]], places: Places = ()) -> list[bool]: ...

    def delete(self, keys: Sequence[bytes]) -> list[bool | None]: ...

    def estimate_load_s(self, keys: Sequence[bytes], now_s: float) -> float: ...


@runtime_checkable
class Shared(Protocol):
    """Optional interface: other processes use the tier without its hierarchy."""

    below: Hierarchy | None
    """The hierarchy whose nearest tier it is."""

    def end_sharing(self) -> None:
        """Serve other processes no more."""


@runtime_checkable
class Expiring(Protocol):
    """Optional interface: expire values."""

    def expire(self, keys: Sequence[bytes], ttl_s: float) -> list[bool]:
        """Drop values after ``ttl_s`` seconds (infinite: never). True per key if promised."""


@runtime_checkable
class Lasting(Expiring, Protocol):
    """Optional interface: report lifetimes. A new value under the same key has none."""

    def left_s(self, keys: Sequence[bytes]) -> list[float]:
        """Return the seconds until each value expires; infinite if never or absent."""


@runtime_checkable
class Keeping(Protocol):
    """Optional interface: know values of a later release, which are neither read nor overwritten."""

    def keeps(self, keys: Sequence[bytes]) -> list[bool]:
        """Return True per key if such a value was seen before."""


@runtime_checkable
class AtOnce(Protocol):
    """Optional interface: answer without blocking, so that the caller needs no thread."""

    def at_once(self) -> AbstractContextManager[bool]:
        """Hold the store. If this yields True, lookups, leases, estimates and ``release`` do not block."""

    def load_now(self, ticket: LoadTicket) -> list[memoryview | None] | None:
        """Run ``complete_load`` if all values are in memory; else return None, changing nothing."""


@runtime_checkable
class InPlace(Protocol):
    """Optional interface: write values where they stay. Views of values stay as they are while they are referenced."""

    @property
    def memory(self) -> memoryview:
        """Return the memory of all values: another object once it is other memory."""

    def prepare_rooms(self, sizes: Sequence[tuple[bytes, int]], places: Places = ()) -> StoreTicket:
        """Reserve room, to be written before ``complete_store`` and never after (``StoreTicket.rooms``)."""


def keeps(store: Store | Keeping, keys: Sequence[bytes]) -> list[bool]:
    """Call ``keeps`` of any tier; False if it lacks it."""
    return store.keeps(keys) if isinstance(store, Keeping) else [False] * len(keys)


class TwoPhase:
    """Base of stores: runs both phases for ``get_many`` and ``put_many``."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        raise TypeError(f"{type(self).__name__} does not define close")

    def prepare_load(self, keys: Sequence[bytes]) -> LoadTicket:
        raise TypeError(f"{type(self).__name__} does not define prepare_load")

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        raise TypeError(f"{type(self).__name__} does not define complete_load")

    def prepare_store(self, items: Sequence[tuple[bytes, Buffer]], places: Places = ()) -> StoreTicket:
        raise TypeError(f"{type(self).__name__} does not define prepare_store")

    def complete_store(self, ticket: StoreTicket) -> list[bool]:
        raise TypeError(f"{type(self).__name__} does not define complete_store")

    def get_many(self, keys: Sequence[bytes]) -> list[memoryview | None]:
        return self.complete_load(self.prepare_load(keys))

    def put_many(self, items: Sequence[tuple[bytes, Buffer]], places: Places = ()) -> list[bool]:
        return self.complete_store(self.prepare_store(items, places))


def check_keys(keys: Sequence[bytes]) -> tuple[bytes, ...]:
    """Return a tuple; InvalidInput unless each key is 32 bytes."""
    for key in keys:
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            actual = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
            raise InvalidInput(f"a store key must be {KEY_BYTES} bytes, got {actual}: use kv.block.key_hash for names")
    return tuple(keys)


def check_items(items: Sequence[tuple[bytes, Buffer]]) -> tuple[tuple[bytes, Buffer], ...]:
    """Return a tuple; InvalidInput for a bad item."""
    check_keys([key for key, _ in items])
    return tuple([(key, _check_value(value)) for key, value in items])


def _check_value(value: Buffer) -> Buffer:
    """Return a value to store; InvalidInput unless bytes-like and contiguous."""
    if not isinstance(value, bytes | bytearray | memoryview):
        raise InvalidInput(f"a stored value must be bytes-like, got {type(value).__name__}")
    if not isinstance(value, memoryview):
        return value
    try:
        contiguous, size_bytes = value.c_contiguous, value.nbytes
    except ValueError as error:
        raise InvalidInput("a stored value must be bytes, got a memoryview that was released") from error
    if not contiguous:
        raise InvalidInput("a stored value must be contiguous: copy the memoryview with bytes() first")
    return value if size_bytes else b""  # an empty view with zeros in its shape cannot be cast


def check_places(items: Sequence[tuple[bytes, Buffer]], places: Places) -> tuple[Place | None, ...]:
    if places and len(places) != len(items):
        raise InvalidInput(f"{len(places)} places for {len(items)} items: expected one for each, or none at all")
    for place in places:
        if not (place is None or isinstance(place, Place)):
            raise InvalidInput(f"a place must be a kv.block.Place or None, got {type(place).__name__}")
    return tuple(places) or (None,) * len(items)


def check_ttl(ttl_s: float) -> float:
    if math.isnan(ttl_s):
        raise InvalidInput(f"a time of {ttl_s} s: expected a number of seconds, or math.inf for no limit")
    return ttl_s


_Ticket = TypeVar("_Ticket", LoadTicket, StoreTicket)


class OpenTickets(Generic[_Ticket]):
    """Open loads or stores of one store; each ticket is taken once. Thread-safe; takes no other lock."""

    def __init__(self) -> None:
        self._open: OrderedDict[_Ticket, None] = OrderedDict()
        self._ending: set[_Ticket] = set()
        # Dropped tickets, which may still be completed: a clock may have been set.
        self._late: WeakSet[_Ticket] = WeakSet()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._open) + len(self._ending)

    def add(self, ticket: _Ticket, now_s: float) -> None:
        """Add a ticket; abandoned tickets, which keep values in memory, are dropped."""
        with self._lock:
            self._drop_abandoned(now_s)
            self._open[ticket] = None

    def _drop_abandoned(self, now_s: float) -> None:
        """Drop abandoned tickets, up to the first that is not, which moves to the end: later calls check the others."""
        while self._open:
            ticket = next(iter(self._open))
            if ticket.expires_s + ABANDONED_S >= now_s:
                self._open.move_to_end(ticket)
                return
            del self._open[ticket]
            self._late.add(ticket)

    def take(self, ticket: _Ticket) -> None:
        """Take the ticket for its only completion; InvalidInput unless open."""
        with self._lock:
            if ticket not in self._open and ticket not in self._late:
                kind = "load" if isinstance(ticket, LoadTicket) else "store"
                raise InvalidInput(f"this {kind} ticket is not open: each is completed once, by its own store")
            self._open.pop(ticket, None)
            self._late.discard(ticket)

    @contextmanager
    def ending(self, ticket: _Ticket) -> Iterator[None]:
        """Take the ticket for completion, but count it as open inside ``with``."""
        with self._lock:
            self._ending.add(ticket)  # add before taking, so that the ticket is always in one of the sets
        try:
            self.take(ticket)
            yield
        finally:
            with self._lock:
                self._ending.discard(ticket)

    @contextmanager
    def at_once(self, ticket: _Ticket, now_s: float) -> Iterator[None]:
        """Count the ticket of a store in a single call inside ``with``."""
        with self._lock:
            self._drop_abandoned(now_s)
            self._ending.add(ticket)
        try:
            yield
        finally:
            with self._lock:
                self._ending.discard(ticket)

    def discard(self, ticket: _Ticket) -> None:
        with self._lock:
            self._open.pop(ticket, None)
            self._late.discard(ticket)

    def holding(self, now_s: float) -> list[_Ticket]:
        with self._lock:
            return [ticket for ticket in set(self._open) | self._ending if ticket.expires_s > now_s]

    def clear(self) -> None:
        with self._lock:
            self._open.clear()
            self._ending.clear()
            self._late.clear()


_LEARN_FROM_BYTES = 1 << 20  # least load to learn from: a smaller load measures a round trip, not the medium


class ReadRate:
    """Moving average of a store's read rate."""

    def __init__(self, bytes_per_s: float = 1e9) -> None:
        self.bytes_per_s = bytes_per_s

    def learn(self, size_bytes: int, seconds: float) -> None:
        if size_bytes >= _LEARN_FROM_BYTES and seconds > 0:
            self.bytes_per_s += (size_bytes / seconds - self.bytes_per_s) / 4


class RemoteStore(TwoPhase):
    """Base of stores with values in other processes: tickets reserve nothing."""

    def __init__(self, name: str, now_s: Callable[[], float]) -> None:
        self._name = name
        self._clock = now_s
        self._loads: OpenTickets[LoadTicket] = OpenTickets()
        self._stores: OpenTickets[StoreTicket] = OpenTickets()
        self._rate = ReadRate()
        self._closed = False
        self._owner = Owner(f"the {name} store")

    @property
    def name(self) -> str:
        return self._name

    @property
    def leases(self) -> bool:
        return False

    def prepare_load(self, keys: Sequence[bytes]) -> LoadTicket:
        now_s = self._clock()
        ticket = LoadTicket(self._check(keys), now_s + LEASE_S)
        self._loads.add(ticket, now_s)
        return ticket

    def prepare_store(self, items: Sequence[tuple[bytes, Buffer]], places: Places = ()) -> StoreTicket:
        ticket, now_s = self._store_ticket(items, places)
        self._stores.add(ticket, now_s)
        return ticket

    def _store_ticket(self, items: Sequence[tuple[bytes, Buffer]], places: Places) -> tuple[StoreTicket, float]:
        items = check_items(items)
        self._check(())
        for _, value in items:
            self._check_size(memoryview(value).nbytes)
        now_s = self._clock()
        return StoreTicket(items, now_s + LEASE_S, places=check_places(items, places)), now_s

    def _check_size(self, size_bytes: int) -> None: ...

    def _pending(self) -> set[bytes]:
        return {key for ticket in self._stores.holding(self._clock()) for key, _ in ticket.items}

    def _check(self, keys: Sequence[bytes]) -> tuple[bytes, ...]:
        """Return the keys; InvalidInput for a bad key or a closed store, WrongProcess in a forked child."""
        if self._closed or self._owner.elsewhere:
            self._owner.check()
            raise InvalidInput(f"the {self._name} store is closed: open a new one")
        return check_keys(keys)


_KEPT_BUFFERS = 4
ALIGNED = 64
"""Alignment of values in bytes: reading into 16-byte alignment (``malloc``) takes 25 % longer."""


class BufferPool:
    """Pool of reusable receive buffers: page faults of fresh memory cost more than filling it. Thread-safe."""

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []
        self._lock = Lock()

    def take(self, size_bytes: int) -> np.ndarray:
        """Return an aligned buffer of at least this size, undefined."""
        with self._lock:
            for at, buffer in enumerate(self._free):
                if len(buffer) >= size_bytes:
                    return self._free.pop(at)
        return aligned_buffer(size_bytes)

    def give_back(self, buffer: np.ndarray) -> None:
        """Take a buffer back; no view may be in use."""
        with self._lock:
            self._free.append(buffer)
            if len(self._free) > _KEPT_BUFFERS:
                self._free.sort(key=len)
                del self._free[0]


_ALIGNED_FROM_BYTES = 128 << 10  # least size worth aligning


# Least size of a buffer with pages touched in advance: page faults while receiving lose packets.
_TOUCHED_FROM_BYTES = 4 << 20


def value_buffer(size_bytes: int) -> memoryview:
    if size_bytes < _ALIGNED_FROM_BYTES:
        return memoryview(bytearray(size_bytes))
    return aligned_buffer(size_bytes).data[:size_bytes]


def aligned_buffer(size_bytes: int) -> np.ndarray:
    buffer = np.empty(max(size_bytes, 1) + ALIGNED, dtype=np.uint8)
    begin = -buffer.ctypes.data % ALIGNED
    if size_bytes >= _TOUCHED_FROM_BYTES:
        buffer[:: mmap.PAGESIZE] = 0
    return buffer[begin : begin + max(size_bytes, 1)]


def aligned_bytes(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNED) * ALIGNED


_STRIPES = 4096  # number of version counters, shared by keys: a collision only costs a promotion


class KeyLocks:
    """Locks on keys, not reentrant: puts and deletes wait (``exclusive``); moves between tiers take only free keys
    (``try_lock``) with unchanged versions, and so cannot undo them. Thread-safe.
    """

    def __init__(self) -> None:
        self._freed = Condition()
        self._busy: set[bytes] = set()
        self._versions = [0] * _STRIPES

    def versions(self, keys: Iterable[bytes]) -> dict[bytes, int]:
        with self._freed:
            return {key: self._versions[_stripe(key)] for key in keys}

    @contextmanager
    def exclusive(self, keys: Sequence[bytes], patience_s: float = math.inf) -> Iterator[bool]:
        """Hold ``keys`` for a put or delete; yield False after waiting ``patience_s``."""
        if not self.take(keys, patience_s):
            yield False
            return
        try:
            yield True
        finally:
            self.give_back(keys)

    def take(self, keys: Sequence[bytes], patience_s: float = math.inf) -> bool:
        """Lock ``keys`` for a put or delete, until ``give_back``; False on timeout."""
        with self._freed:
            if not self._busy.isdisjoint(keys):
                timeout_s = patience_s if patience_s < math.inf else None
                if not self._freed.wait_for(lambda: self._busy.isdisjoint(keys), timeout_s):
                    return False
            self._busy.update(keys)
            return True

    def give_back(self, keys: Sequence[bytes]) -> None:
        with self._freed:
            for key in set(keys):
                self._versions[_stripe(key)] += 1
            self._busy.difference_update(keys)
            self._freed.notify_all()

    @contextmanager
    def try_lock(self, keys: Iterable[bytes], versions: dict[bytes, int] | None = None) -> Iterator[set[bytes]]:
        """Lock, without waiting, the ``keys`` that are free and unchanged since ``versions``; yield them."""
        with self._freed:
            mine = {
                key
                for key in keys
                if key not in self._busy and (versions is None or versions.get(key) == self._versions[_stripe(key)])
            }
            self._busy |= mine
        try:
            yield mine
        finally:
            with self._freed:
                self._busy -= mine
                self._freed.notify_all()


def _stripe(key: bytes) -> int:
    return int.from_bytes(key[:2], "big") % _STRIPES
