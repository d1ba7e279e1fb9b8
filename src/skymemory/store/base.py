"""Contract of every tier: batches of 32-byte keys and byte values; loads and stores in two phases.

One contract suite (``tests/contract/store_contract.py``) runs over every implementation. Rules for all of them:

- **Keys** are ``bytes`` of length 32 (a block hash, or ``kv.block.key_hash`` of a name); else InvalidInput.
- **Order matters.** A sequence of keys is a chain: an earlier key is worth more than a later key. Eviction takes the
  last blocks of a chain first, so that presence stays prefix-closed.
- **The writer gives places**: ``places`` holds, per item, the block's depth in its prompt and the previous block. It is
  None (or ``places`` is empty) if that is unknown or the value is not a block. Places only make an index faster:
  results never depend on them, and never on earlier calls.
- **A miss is a value.** Absent, evicted, corrupt and unreachable all return ``None``; ``complete_load`` raises for none
  of them. The reason is in the ticket's report and a counter in ``stats()``.
- **Views are snapshots.** A returned view never changes while the caller holds it, even if its key is put, deleted or
  evicted. ``release(ticket)`` says that the caller has copied what it needs; only then is the memory under the views
  reused.
- **Values are copied.** After ``complete_store`` returns, the caller may change or free what it passed in.
- **No needless eviction.** If eviction cannot make room for a value, nothing is evicted for it.
- **A lease protects.** The keys that were present at ``prepare_load`` are not evicted until ``complete_load``,
  ``release`` or the end of the lease. Keys being stored are protected between the two phases of a store. Two tiers
  promise less. Redis evicts by its own rules and leases nothing. Satellites get the lease in one unacknowledged packet
  and lease at most a quarter of their memory: a value that does not fit, or whose packet was lost, may be evicted. Both
  cases are a miss of that load.
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

if TYPE_CHECKING:
    from typing import Self


Buffer = bytes | bytearray | memoryview
"""Types of a value; always C-contiguous bytes."""

Places = Sequence[Place | None]
"""Place of each item in its prompt; empty if unknown for all."""

KEY_BYTES = 32
LEASE_S = 30.0
"""Longest protection by a lease: a client that died must not pin memory forever."""

ABANDONED_S = 10 * LEASE_S
"""Time after its lease in which a ticket may still be completed (as a miss, or not stored)."""


class Presence(enum.Enum):
    """Presence of a key. PENDING: a store of it has begun but not ended; a load now is a miss."""

    MISS = 0
    HIT = 1
    PENDING = 2


@dataclass(frozen=True, slots=True)
class KeyReport:
    """Source of one key's value. On a miss, ``tier`` is empty and ``size_bytes`` is 0."""

    tier: str = ""
    size_bytes: int = 0
    seconds: float = 0.0
    retransmitted: int = 0
    reason: str = ""
    """Reason of a miss: "absent", "corrupt", "unreachable" …; empty on a hit."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Report of one load, in the order of its keys."""

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
    """Lease on ``keys``. ``complete_load`` sets ``report``."""

    keys: tuple[bytes, ...]
    expires_s: float
    """Time on the store's own clock."""
    report: LoadReport | None = None
    state: object = field(default=None, repr=False)
    rows: Sequence[Rows | None] = field(default=(), repr=False)
    """Destination of each value, set before ``complete_load``; a tier may receive the value there."""
    placed: Mapping[int, int] = field(default_factory=dict)
    """CRC-32, by position, of the values received undamaged in their rows; ``complete_load`` returns only their heads.
    Rows of other values may be overwritten all the same.
    """


@dataclass(slots=True, eq=False, weakref_slot=True)
class StoreTicket:
    """Reservation of room for ``items``."""

    items: tuple[tuple[bytes, Buffer], ...]
    expires_s: float
    seconds: float = 0.0
    state: object = field(default=None, repr=False)
    places: tuple[Place | None, ...] = ()
    unanswered: frozenset[bytes] = frozenset()
    """Keys not stored because no answer came; they were not refused."""
    reason: str = ""
    """Reason, in words for users, why some items are not stored; else, or if unknown, empty."""

    def __post_init__(self) -> None:
        self.places = self.places or (None,) * len(self.items)


@runtime_checkable
class Store(Protocol):
    """Tier of the hierarchy. Every method may be called from any thread."""

    @property
    def name(self) -> str:
        """Return the tier's name in reports and metrics: "memory", "constellation" …"""

    def lookup(self, keys: Sequence[bytes]) -> list[Presence]:
        """Return the presence of each key, without refreshing or protecting it."""

    def sizes(self, keys: Sequence[bytes]) -> list[int | None]:
        """Return the bytes of each value, without loading it; None if absent or unknown."""

    @property
    def leases(self) -> bool:
        """Return True if leases always protect: what is present at a load's start is present at its completion."""

    def prefix(self, keys: Sequence[bytes]) -> int:
        """Return the number of leading keys that are all present (HIT); later holes do not matter."""

    def prepare_load(self, keys: Sequence[bytes]) -> LoadTicket:
        """Lease ``keys``: those present stay until the load completes. Keys may repeat."""

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        """Return read-only views in the order of ``ticket.keys``, None for a miss; set ``ticket.report``.

        Raises:
            InvalidInput: the ticket was completed before, or belongs to another store.
        """

    def release(self, ticket: LoadTicket) -> None:
        """End a lease, or the use of the views of a completed load. May be called again."""

    def prepare_store(self, items: Sequence[tuple[bytes, Buffer]], places: Places = ()) -> StoreTicket:
        """Reserve room. Raises ValueTooLarge, with the limit, for a value that can never fit."""

    def complete_store(self, ticket: StoreTicket) -> list[bool]:
        """Return, per item, True if it is stored and acknowledged. False: no room, or no answer
        (``ticket.unanswered``).

        Raises:
            InvalidInput: the ticket was completed before, or belongs to another store.
        """

    def get_many(self, keys: Sequence[bytes]) -> list[memoryview | None]:
        """Run both phases of a load."""

    def put_many(self, items: Sequence[tuple[bytes, Buffer]], places: Places = ()) -> list[bool]:
        """Run both phases of a store."""

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark ``keys`` as just used, the first as the most recent. Absent keys are ignored."""

    def pin(self, keys: Sequence[bytes], ttl_s: float) -> list[bool]:
        """Protect from eviction for ``ttl_s`` seconds (0 or less unpins). False: absent, or over the pin budget."""

    def delete(self, keys: Sequence[bytes]) -> list[bool | None]:
        """Remove values despite leases and pins; returned views stay valid. Per key: True if it was present and can no
        longer be read, False if absent, None if unknown because a holder did not answer.
        """

    def stats(self) -> dict[str, int | float]:
        """Return counters and gauges; names contain units."""

    def estimate_load_s(self, keys: Sequence[bytes], now_s: float) -> float:
        """Estimate the seconds for loading ``keys``; infinite if a key is known to be absent."""

    def close(self) -> None:
        """Free all resources. May be called again; other calls then raise InvalidInput."""

    def __enter__(self) -> Self:
        """Return the store; ``with open_store(...) as store:`` closes it."""

    def __exit__(self, *raised: object) -> None: ...


@runtime_checkable
class Prefetching(Protocol):
    """Optional interface: move values in advance to where they will be needed."""

    def prefetch(self, keys: Sequence[bytes], at: float) -> list[bool]:
        """Move the values of ``keys`` near before the time ``at`` (Unix seconds, the store's clock). Per key: True if
        its value will be near; False if it is absent, or could not be moved and stays in its place.
        """


def bring_near(store: Store | Prefetching, keys: Sequence[bytes], at: float) -> list[bool]:
    """Call ``prefetch`` of any tier; in a tier without distances, every present value is near."""
    if isinstance(store, Prefetching):
        return store.prefetch(keys, at)
    return [presence is Presence.HIT for presence in store.lookup(keys)]


@runtime_checkable
class Evicting(Protocol):
    """Optional interface: report evicted values, so that another tier can take them."""

    on_evict: Callable[[bytes, bytes, Place | None], object] | None
    """Callback with key, value and place (None: unknown) during an eviction, with the tier's lock held: it must be
    quick and must not call the tier. Not called for values deleted, replaced or lost by closing.
    """


@runtime_checkable
class Expiring(Protocol):
    """Optional interface: expire values."""

    def expire(self, keys: Sequence[bytes], ttl_s: float) -> list[bool]:
        """Drop values after ``ttl_s`` seconds (infinite: never). True per key if promised."""


@runtime_checkable
class Lasting(Expiring, Protocol):
    """Optional interface: report lifetimes. A new value under the same key has none."""

    def left_s(self, keys: Sequence[bytes]) -> list[float]:
        """Return the seconds until each value expires; infinite if it never does, or is absent."""


@runtime_checkable
class Keeping(Protocol):
    """Optional interface: know the values of a later release, which are neither read nor overwritten."""

    def keeps(self, keys: Sequence[bytes]) -> list[bool]:
        """Return True per key if a later release's value was seen under it. Asks no server."""


@runtime_checkable
class AtOnce(Protocol):
    """Optional interface: answer without waiting for a disk or another thread, so that a caller that must not be
    blocked needs no thread for the call.
    """

    def at_once(self) -> AbstractContextManager[bool]:
        """Hold the store. If this yields True, lookups, leases, estimates and ``release`` do not block."""

    def load_now(self, ticket: LoadTicket) -> list[memoryview | None] | None:
        """Run ``complete_load`` if all values are in memory; else return None and leave the ticket unchanged."""


def keeps(store: Store | Keeping, keys: Sequence[bytes]) -> list[bool]:
    """Call ``keeps`` of any tier; False for all keys if the tier lacks it."""
    return store.keeps(keys) if isinstance(store, Keeping) else [False] * len(keys)


class TwoPhase:
    """Base of all implementations: ``get_many`` and ``put_many`` from the two phases, and ``with``."""

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
    """Return ``keys`` as a tuple; raise InvalidInput unless each is 32 bytes."""
    for key in keys:
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            actual = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
            raise InvalidInput(f"a store key must be {KEY_BYTES} bytes, got {actual}: use kv.block.key_hash for names")
    return tuple(keys)


def check_items(items: Sequence[tuple[bytes, Buffer]]) -> tuple[tuple[bytes, Buffer], ...]:
    """Return ``items`` as a tuple; raise InvalidInput unless each is a valid key and contiguous bytes. Empty views
    become ``b""``, because a view with a zero in its shape cannot be cast.
    """
    check_keys([key for key, _ in items])
    return tuple([(key, _check_value(value)) for key, value in items])


def _check_value(value: Buffer) -> Buffer:
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
    return value if size_bytes else b""


def check_places(items: Sequence[tuple[bytes, Buffer]], places: Places) -> tuple[Place | None, ...]:
    """Return ``places`` as a tuple with an entry per item; else raise InvalidInput."""
    if places and len(places) != len(items):
        raise InvalidInput(f"{len(places)} places for {len(items)} items: expected one for each, or none at all")
    for place in places:
        if not (place is None or isinstance(place, Place)):
            raise InvalidInput(f"a place must be a kv.block.Place or None, got {type(place).__name__}")
    return tuple(places) or (None,) * len(items)


def check_ttl(ttl_s: float) -> float:
    """Return ``ttl_s``; raise InvalidInput for NaN."""
    if math.isnan(ttl_s):
        raise InvalidInput(f"a time of {ttl_s} s: expected a number of seconds, or math.inf for no limit")
    return ttl_s


_Ticket = TypeVar("_Ticket", LoadTicket, StoreTicket)


class OpenTickets(Generic[_Ticket]):
    """Open loads, or open stores, of one store; each ticket is taken once. Thread-safe; takes no other lock."""

    def __init__(self) -> None:
        self._open: OrderedDict[_Ticket, None] = OrderedDict()
        self._ending: set[_Ticket] = set()
        self._late: WeakSet[_Ticket] = WeakSet()
        """Dropped tickets. Their callers may still complete them: a clock may have been set."""
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._open) + len(self._ending)

    def add(self, ticket: _Ticket, now_s: float) -> None:
        """Add a ticket; drop tickets not completed long after their lease, so that they keep no values in memory."""
        with self._lock:
            self._drop_abandoned(now_s)
            self._open[ticket] = None

    def _drop_abandoned(self, now_s: float) -> None:
        """Drop tickets from the front up to the first that is not abandoned, which moves to the end."""
        while self._open:
            ticket = next(iter(self._open))
            if ticket.expires_s + ABANDONED_S >= now_s:
                self._open.move_to_end(ticket)
                return
            del self._open[ticket]
            self._late.add(ticket)

    def take(self, ticket: _Ticket) -> None:
        """Take the ticket for its only completion. Raises InvalidInput if it is not open."""
        with self._lock:
            if ticket not in self._open and ticket not in self._late:
                kind = "load" if isinstance(ticket, LoadTicket) else "store"
                raise InvalidInput(f"this {kind} ticket is not open: each is completed once, by its own store")
            self._open.pop(ticket, None)
            self._late.discard(ticket)

    @contextmanager
    def ending(self, ticket: _Ticket) -> Iterator[None]:
        """Take the ticket, but count it as open until the ``with`` block ends."""
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
        """Count a ticket that begins and ends inside the ``with`` block."""
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
        """Return the tickets with an unexpired lease."""
        with self._lock:
            return [ticket for ticket in set(self._open) | self._ending if ticket.expires_s > now_s]

    def clear(self) -> None:
        with self._lock:
            self._open.clear()
            self._ending.clear()
            self._late.clear()


_LEARN_FROM_BYTES = 1 << 20
"""Least load to learn from: a smaller load measures the call or a round trip, not the medium."""


class ReadRate:
    """Read rate of a tier, learned from its loads: a moving average, with weight 1/4 for the last."""

    def __init__(self, bytes_per_s: float = 1e9) -> None:
        self.bytes_per_s = bytes_per_s

    def learn(self, size_bytes: int, seconds: float) -> None:
        if size_bytes >= _LEARN_FROM_BYTES and seconds > 0:
            self.bytes_per_s += (size_bytes / seconds - self.bytes_per_s) / 4


class RemoteStore(TwoPhase):
    """Base of stores with values in other processes: tickets reserve nothing, and each call is checked first."""

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
        """Return False: Redis leases nothing, and satellites lease only a part of their memory."""
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
        """Return a ticket that is not open yet, and the time."""
        items = check_items(items)
        self._check(())
        for _, value in items:
            self._check_size(memoryview(value).nbytes)
        now_s = self._clock()
        return StoreTicket(items, now_s + LEASE_S, places=check_places(items, places)), now_s

    def _check_size(self, size_bytes: int) -> None:
        """Raise ValueTooLarge for a value that can never fit."""

    def _pending(self) -> set[bytes]:
        return {key for ticket in self._stores.holding(self._clock()) for key, _ in ticket.items}

    def _check(self, keys: Sequence[bytes]) -> tuple[bytes, ...]:
        """Return the keys. Raises InvalidInput for a bad key or a closed store, WrongProcess in a forked child."""
        if self._closed or self._owner.elsewhere:
            self._owner.check()
            raise InvalidInput(f"the {self._name} store is closed: open a new one")
        return check_keys(keys)


_KEPT_BUFFERS = 4
ALIGNED = 64
"""Alignment of values in bytes. ``malloc`` aligns to 16: reading into such memory crosses a cache line with every other
vector, and takes a quarter longer.
"""


class BufferPool:
    """Pool of buffers for received values: touching fresh memory costs more than filling it. Thread-safe."""

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []
        self._lock = Lock()

    def take(self, size_bytes: int) -> np.ndarray:
        """Return an aligned buffer of at least this size, contents undefined."""
        with self._lock:
            for at, buffer in enumerate(self._free):
                if len(buffer) >= size_bytes:
                    return self._free.pop(at)
        return aligned_buffer(size_bytes)

    def give_back(self, buffer: np.ndarray) -> None:
        """Return a buffer to the pool; no view of it may be in use."""
        with self._lock:
            self._free.append(buffer)
            if len(self._free) > _KEPT_BUFFERS:
                self._free.sort(key=len)
                del self._free[0]


_ALIGNED_FROM_BYTES = 128 << 10
"""Least size that is aligned; for a smaller value, the call outweighs the alignment."""


_TOUCHED_FROM_BYTES = 4 << 20
"""Least size of a buffer whose pages are touched in advance; socket buffers are smaller. The kernel maps a page at its
first write: in fresh memory a receiver stops for that repeatedly, and loses packets.
"""


def value_buffer(size_bytes: int) -> memoryview:
    """Return new memory for one value; aligned if it is large."""
    if size_bytes < _ALIGNED_FROM_BYTES:
        return memoryview(bytearray(size_bytes))
    return aligned_buffer(size_bytes).data[:size_bytes]


def aligned_buffer(size_bytes: int) -> np.ndarray:
    """Return new memory of at least one byte, aligned to ``ALIGNED``."""
    buffer = np.empty(max(size_bytes, 1) + ALIGNED, dtype=np.uint8)
    begin = -buffer.ctypes.data % ALIGNED
    if size_bytes >= _TOUCHED_FROM_BYTES:
        buffer[:: mmap.PAGESIZE] = 0
    return buffer[begin : begin + max(size_bytes, 1)]


def aligned_bytes(size_bytes: int) -> int:
    """Return ``size_bytes`` rounded up: the distance from one value to the next."""
    return -(-size_bytes // ALIGNED) * ALIGNED


_STRIPES = 4096
"""Number of version counters. Versions are per stripe, not per key: a collision only costs a promotion."""


class KeyLocks:
    """Locks on keys: two writers of a key run one after the other, and a value moving between tiers cannot undo a put
    or a delete. Thread-safe, not reentrant.

    Puts and deletes wait for their keys (``exclusive``); moves between tiers take only the free keys (``try_lock``). A
    load notes the versions of its keys: what it read is promoted only if they are unchanged.
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
        """Hold all of ``keys`` for a put or delete; yield False if waiting takes longer than ``patience_s``."""
        if not self.take(keys, patience_s):
            yield False
            return
        try:
            yield True
        finally:
            self.give_back(keys)

    def take(self, keys: Sequence[bytes], patience_s: float = math.inf) -> bool:
        """Lock like ``exclusive``, until ``give_back``; return True if locked."""
        with self._freed:
            if not self._busy.isdisjoint(keys):
                timeout_s = patience_s if patience_s < math.inf else None
                if not self._freed.wait_for(lambda: self._busy.isdisjoint(keys), timeout_s):
                    return False
            self._busy.update(keys)
            return True

    def give_back(self, keys: Sequence[bytes]) -> None:
        """Unlock keys of ``take``; each may have a new value."""
        with self._freed:
            for key in set(keys):
                self._versions[_stripe(key)] += 1
            self._busy.difference_update(keys)
            self._freed.notify_all()

    @contextmanager
    def try_lock(self, keys: Iterable[bytes], versions: dict[bytes, int] | None = None) -> Iterator[set[bytes]]:
        """Lock and yield those of ``keys`` that are free and still have the given ``versions``."""
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
