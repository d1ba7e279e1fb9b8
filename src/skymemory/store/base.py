"""The contract of every tier: 32-byte keys to values of bytes, in batches, loads and stores in two phases.

One contract suite (``tests/contract/store_contract.py``) runs over every implementation. Rules that
hold for all of them:

- **Keys** are ``bytes`` of length 32 (a block hash, or ``kv.block.key_hash`` of a name); else InvalidInput.
- **Order matters.** A sequence of keys is a chain: an earlier key is worth more than a later one, so that
  eviction takes the last blocks of a chain first and presence stays prefix-closed.
- **The writer gives places**: ``places``, one for each item, are the block's depth in its prompt and the block before
  it; None (or no places at all) where that is unknown, or the value is not a block. They only make an index faster;
  what is found never depends on them, nor on earlier calls.
- **A miss is a value.** Absent, evicted, corrupt and unreachable all return ``None``; ``complete_load`` raises for
  none of them. The reason is in the ticket's report and a counter in ``stats()``.
- **Views are snapshots.** A returned view never changes while the caller holds it, whatever is put, deleted
  or evicted. ``release(ticket)`` says that the caller has copied what it needs: only then is the memory behind the
  views reused.
- **Values are copied.** After ``complete_store`` returns, the caller may change or free what it passed in.
- **No needless eviction.** Where room for a value cannot be made, nothing is evicted for it.
- **A lease protects.** From ``prepare_load`` until ``complete_load`` (or ``release``, or the lease's end) the
  keys that were present are not evicted; nor are those being stored, between the two phases of a store. Two tiers
  promise less. Redis evicts by its own rules and leases nothing. Satellites get the lease in one unacknowledged packet
  and lease at most a quarter of their memory: what does not fit, or whose packet was lost, may be evicted. Either is a
  miss of that load.
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
"""The place of each item in its prompt; empty: unknown for all."""

KEY_BYTES = 32
LEASE_S = 30.0
"""How long a lease protects at most: a client that died must not pin memory forever."""

ABANDONED_S = 10 * LEASE_S
"""How long after its lease a ticket may still be completed (as a miss, or not stored)."""


class Presence(enum.Enum):
    """PENDING: a store of the key has begun and not ended; a load now is a miss."""

    MISS = 0
    HIT = 1
    PENDING = 2


@dataclass(frozen=True, slots=True)
class KeyReport:
    """The source of one key's value. ``tier`` is empty on a miss, and ``size_bytes`` 0."""

    tier: str = ""
    size_bytes: int = 0
    seconds: float = 0.0
    retransmitted: int = 0
    reason: str = ""
    """Of a miss: "absent", "corrupt", "unreachable" …; empty on a hit."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One load, key by key in the order of the call."""

    keys: tuple[KeyReport, ...]
    seconds: float

    @property
    def size_bytes(self) -> int:
        return sum(key.size_bytes for key in self.keys)

    @property
    def retransmitted(self) -> int:
        """Datagrams (or other units of the tier) that were retransmitted."""
        return sum(key.retransmitted for key in self.keys)


@dataclass(slots=True, eq=False, weakref_slot=True)
class LoadTicket:
    """A lease on ``keys``. ``report`` is set by ``complete_load``."""

    keys: tuple[bytes, ...]
    expires_s: float
    """By the store's own clock."""
    report: LoadReport | None = None
    state: object = field(default=None, repr=False)
    """For the implementation."""
    rows: Sequence[Rows | None] = field(default=(), repr=False)
    """Set before ``complete_load``, one for each key: where its value is wanted. A tier may receive it there."""
    placed: Mapping[int, int] = field(default_factory=dict)
    """The values that are in their rows, undamaged: by position, each with its CRC-32. Of these ``complete_load``
    returns the heads. The rows of others may have been written to all the same.
    """


@dataclass(slots=True, eq=False, weakref_slot=True)
class StoreTicket:
    """Room reserved for ``items``."""

    items: tuple[tuple[bytes, Buffer], ...]
    expires_s: float
    seconds: float = 0.0
    """Duration of ``complete_store``."""
    state: object = field(default=None, repr=False)
    places: tuple[Place | None, ...] = ()
    """One for each of ``items``."""
    unanswered: frozenset[bytes] = frozenset()
    """Keys that ``complete_store`` could not store for want of an answer; they were not refused."""
    reason: str = ""
    """Why not all is stored, in words for users; empty: not known, or all is."""

    def __post_init__(self) -> None:
        self.places = self.places or (None,) * len(self.items)


@runtime_checkable
class Store(Protocol):
    """A tier. Every method may be called from any thread."""

    @property
    def name(self) -> str:
        """The tier's name in reports and metrics: "memory", "constellation" …"""

    def lookup(self, keys: Sequence[bytes]) -> list[Presence]:
        """Presence of each key; refreshes nothing and protects nothing."""

    def sizes(self, keys: Sequence[bytes]) -> list[int | None]:
        """Bytes of each value that is present, without loading it; None: absent, or not known without loading it."""

    @property
    def leases(self) -> bool:
        """Whether a lease always protects: what is present when a load begins is there when it completes."""

    def prefix(self, keys: Sequence[bytes]) -> int:
        """Number of leading keys that are all present (HIT), correct with holes behind them."""

    def prepare_load(self, keys: Sequence[bytes]) -> LoadTicket:
        """Lease ``keys``: those present now stay until the load completes. Keys may repeat."""

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        """Read-only views in the order of ``ticket.keys``; None is a miss.

        Once per ticket, else InvalidInput. Fills ``ticket.report``.
        """

    def release(self, ticket: LoadTicket) -> None:
        """End a lease, or the use of the views of a completed load. May be repeated."""

    def prepare_store(self, items: Sequence[tuple[bytes, Buffer]], places: Places = ()) -> StoreTicket:
        """Reserve room. A value that can never fit raises ValueTooLarge naming the limit."""

    def complete_store(self, ticket: StoreTicket) -> list[bool]:
        """Per item, whether it is stored and acknowledged. False: no room, or no answer (``ticket.unanswered``). Once
        per ticket, else InvalidInput.
        """

    def get_many(self, keys: Sequence[bytes]) -> list[memoryview | None]:
        """Both phases of a load."""

    def put_many(self, items: Sequence[tuple[bytes, Buffer]], places: Places = ()) -> list[bool]:
        """Both phases of a store."""

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark as just used, the first key as the most recent; absent keys are ignored."""

    def pin(self, keys: Sequence[bytes], ttl_s: float) -> list[bool]:
        """Protect from eviction for ``ttl_s`` seconds (0 or less unpins). False: absent, or over the pin budget."""

    def delete(self, keys: Sequence[bytes]) -> list[bool | None]:
        """Remove, in spite of leases and pins (returned views stay valid). True where it was present and can no longer
        be read, False where it was absent, None where that is unknown: a holder has not answered.
        """

    def stats(self) -> dict[str, int | float]:
        """Counters and gauges, units in their names."""

    def estimate_load_s(self, keys: Sequence[bytes], now_s: float) -> float:
        """Estimated seconds for loading ``keys`` at ``now_s``; infinite when one is known to be absent."""

    def close(self) -> None:
        """Free all resources. May be repeated; other calls then raise InvalidInput."""

    def __enter__(self) -> Self:
        """``with open_store(...) as store:`` closes it."""

    def __exit__(self, *raised: object) -> None: ...


@runtime_checkable
class Prefetching(Protocol):
    """Optional: bring values to where they will be needed, ahead of time."""

    def prefetch(self, keys: Sequence[bytes], at: float) -> list[bool]:
        """Have the values of ``keys`` near at the time ``at`` (seconds, the store's own clock: Unix time).

        Per key, whether it will be. False where it is absent or could not be moved; then it stays where it was.
        """


def bring_near(store: Store | Prefetching, keys: Sequence[bytes], at: float) -> list[bool]:
    """``prefetch`` of any tier; in one without distances, what is present is near."""
    if isinstance(store, Prefetching):
        return store.prefetch(keys, at)
    return [presence is Presence.HIT for presence in store.lookup(keys)]


@runtime_checkable
class Evicting(Protocol):
    """Optional: report evicted values, so that another tier can take them."""

    on_evict: Callable[[bytes, bytes, Place | None], object] | None
    """Called with key, value and place (None: unknown) while the value is being evicted and the tier's lock is held: it
    must be quick, and must not call the tier. Not for values that are deleted, replaced or lost by closing.
    """


@runtime_checkable
class Expiring(Protocol):
    """Optional: expire values."""

    def expire(self, keys: Sequence[bytes], ttl_s: float) -> list[bool]:
        """Drop values after ``ttl_s`` seconds (infinite: never). True where that is promised."""


@runtime_checkable
class Lasting(Expiring, Protocol):
    """Optional: say how long values will last. Another value stored under a key has no lifetime."""

    def left_s(self, keys: Sequence[bytes]) -> list[float]:
        """Seconds until each value expires; infinite: never, or it is absent."""


@runtime_checkable
class Keeping(Protocol):
    """Optional: know which values a later release stored; they are neither read nor overwritten."""

    def keeps(self, keys: Sequence[bytes]) -> list[bool]:
        """Per key, whether a later release's value was seen under it. Asks no server."""


@runtime_checkable
class AtOnce(Protocol):
    """Optional: answer where nothing has to be waited for, neither a disk nor another thread. So a caller that must not
    be held up by a tier needs no thread between them.
    """

    def at_once(self) -> AbstractContextManager[bool]:
        """Hold the store. Where that yields True, lookups, leases, estimates and ``release`` wait for nothing."""

    def load_now(self, ticket: LoadTicket) -> list[memoryview | None] | None:
        """``complete_load`` of a ticket whose values are all in memory. None: they are not; the ticket is as before."""


def keeps(store: Store | Keeping, keys: Sequence[bytes]) -> list[bool]:
    """``keeps`` of any tier; none for a tier without it."""
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
    """``keys`` as a tuple; InvalidInput unless each is 32 bytes."""
    for key in keys:
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            what = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
            raise InvalidInput(f"a store key must be {KEY_BYTES} bytes, got {what}: use kv.block.key_hash for names")
    return tuple(keys)


def check_items(items: Sequence[tuple[bytes, Buffer]]) -> tuple[tuple[bytes, Buffer], ...]:
    """``items`` as a tuple; InvalidInput unless keys are keys and values are contiguous bytes. Empty views become
    ``b""``: one with a zero in its shape cannot be cast.
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
    """``places`` as a tuple, one for each of ``items``; else InvalidInput."""
    if places and len(places) != len(items):
        raise InvalidInput(f"{len(places)} places for {len(items)} items: expected one for each, or none at all")
    for place in places:
        if not (place is None or isinstance(place, Place)):
            raise InvalidInput(f"a place must be a kv.block.Place or None, got {type(place).__name__}")
    return tuple(places) or (None,) * len(items)


def check_ttl(ttl_s: float) -> float:
    """``ttl_s``; InvalidInput for NaN."""
    if math.isnan(ttl_s):
        raise InvalidInput(f"a time of {ttl_s} s: expected a number of seconds, or math.inf for no limit")
    return ttl_s


_Ticket = TypeVar("_Ticket", LoadTicket, StoreTicket)


class OpenTickets(Generic[_Ticket]):
    """The loads, or the stores, of one store that have begun and not ended; each ticket is taken once. Thread-safe;
    takes no other lock.
    """

    def __init__(self) -> None:
        self._open: OrderedDict[_Ticket, None] = OrderedDict()
        self._ending: set[_Ticket] = set()
        self._late: WeakSet[_Ticket] = WeakSet()
        """Dropped; their callers may still have them, for a clock may have been set."""
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._open) + len(self._ending)

    def add(self, ticket: _Ticket, now_s: float) -> None:
        """It begins. Tickets not completed long after their lease are dropped: they must not keep values in memory."""
        with self._lock:
            self._drop_abandoned(now_s)
            self._open[ticket] = None

    def _drop_abandoned(self, now_s: float) -> None:
        """From the front, to the first that is not abandoned; the next call looks behind it."""
        while self._open:
            ticket = next(iter(self._open))
            if ticket.expires_s + ABANDONED_S >= now_s:
                self._open.move_to_end(ticket)
                return
            del self._open[ticket]
            self._late.add(ticket)

    def take(self, ticket: _Ticket) -> None:
        """It is being completed, for the first and only time; else InvalidInput."""
        with self._lock:
            if ticket not in self._open and ticket not in self._late:
                kind = "load" if isinstance(ticket, LoadTicket) else "store"
                raise InvalidInput(f"this {kind} ticket is not open: each is completed once, by its own store")
            self._open.pop(ticket, None)
            self._late.discard(ticket)

    @contextmanager
    def ending(self, ticket: _Ticket) -> Iterator[None]:
        """``take`` it, but count it until it is done."""
        with self._lock:
            self._ending.add(ticket)  # first, so that it is always in one of them
        try:
            self.take(ticket)
            yield
        finally:
            with self._lock:
                self._ending.discard(ticket)

    @contextmanager
    def at_once(self, ticket: _Ticket, now_s: float) -> Iterator[None]:
        """It begins and ends here: count it meanwhile."""
        with self._lock:
            self._drop_abandoned(now_s)
            self._ending.add(ticket)
        try:
            yield
        finally:
            with self._lock:
                self._ending.discard(ticket)

    def discard(self, ticket: _Ticket) -> None:
        """It is abandoned, or was completed already."""
        with self._lock:
            self._open.pop(ticket, None)
            self._late.discard(ticket)

    def holding(self, now_s: float) -> list[_Ticket]:
        """Tickets whose lease has not ended."""
        with self._lock:
            return [ticket for ticket in set(self._open) | self._ending if ticket.expires_s > now_s]

    def clear(self) -> None:
        with self._lock:
            self._open.clear()
            self._ending.clear()
            self._late.clear()


_LEARN_FROM_BYTES = 1 << 20
"""Smaller loads measure the call, or a round trip, rather than the medium."""


class ReadRate:
    """A tier's bytes per second, learned from its loads: a moving average in which the last load counts a quarter."""

    def __init__(self, bytes_per_s: float = 1e9) -> None:
        self.bytes_per_s = bytes_per_s

    def learn(self, size_bytes: int, seconds: float) -> None:
        if size_bytes >= _LEARN_FROM_BYTES and seconds > 0:
            self.bytes_per_s += (size_bytes / seconds - self.bytes_per_s) / 4


class RemoteStore(TwoPhase):
    """Base of stores whose values other processes hold: tickets that reserve nothing, and a check before each call."""

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
        """Redis leases nothing; satellites lease a part of their memory."""
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
        """Not open yet; and the time."""
        items = check_items(items)
        self._check(())
        for _, value in items:
            self._check_size(memoryview(value).nbytes)
        now_s = self._clock()
        return StoreTicket(items, now_s + LEASE_S, places=check_places(items, places)), now_s

    def _check_size(self, size_bytes: int) -> None:
        """Raises ValueTooLarge for a value that can never fit."""

    def _pending(self) -> set[bytes]:
        """Keys that an open ticket is storing."""
        return {key for ticket in self._stores.holding(self._clock()) for key, _ in ticket.items}

    def _check(self, keys: Sequence[bytes]) -> tuple[bytes, ...]:
        """The keys; InvalidInput for what is no key or once closed, WrongProcess in a forked child."""
        if self._closed or self._owner.elsewhere:
            self._owner.check()
            raise InvalidInput(f"the {self._name} store is closed: open a new one")
        return check_keys(keys)


_KEPT_BUFFERS = 4
ALIGNED = 64
"""Alignment of values in bytes. ``malloc`` gives 16: reading into such memory crosses a cache line with every other
vector, and takes a quarter longer.
"""


class BufferPool:
    """Buffers for received values, reused: touching fresh memory for the first time costs more than filling it. Keeps a
    few free ones. Thread-safe.
    """

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []
        self._lock = Lock()

    def take(self, size_bytes: int) -> np.ndarray:
        """At least ``size_bytes`` bytes, contents undefined, aligned."""
        with self._lock:
            for at, buffer in enumerate(self._free):
                if len(buffer) >= size_bytes:
                    return self._free.pop(at)
        return aligned_buffer(size_bytes)

    def give_back(self, buffer: np.ndarray) -> None:
        """No view of it is in use any more."""
        with self._lock:
            self._free.append(buffer)
            if len(self._free) > _KEPT_BUFFERS:
                self._free.sort(key=len)
                del self._free[0]


_ALIGNED_FROM_BYTES = 128 << 10
"""Where the alignment of a smaller value matters, the call matters more."""


_TOUCHED_FROM_BYTES = 4 << 20
"""The kernel maps a page when it is first written: in fresh memory a receiver stops for that again and again, and loses
what its socket has no room for. Sockets have room for less than this.
"""


def value_buffer(size_bytes: int) -> memoryview:
    """New memory for one value, of this size; aligned if it is large."""
    if size_bytes < _ALIGNED_FROM_BYTES:
        return memoryview(bytearray(size_bytes))
    return aligned_buffer(size_bytes).data[:size_bytes]


def aligned_buffer(size_bytes: int) -> np.ndarray:
    """New memory, at least a byte, that begins at a multiple of ``ALIGNED``."""
    buffer = np.empty(max(size_bytes, 1) + ALIGNED, dtype=np.uint8)
    begin = -buffer.ctypes.data % ALIGNED
    if size_bytes >= _TOUCHED_FROM_BYTES:
        buffer[:: mmap.PAGESIZE] = 0
    return buffer[begin : begin + max(size_bytes, 1)]


def aligned_bytes(size_bytes: int) -> int:
    """Bytes from the beginning of a value to that of the next."""
    return -(-size_bytes // ALIGNED) * ALIGNED


_STRIPES = 4096
"""Versions are kept by stripe, not by key: a collision costs a promotion, nothing else."""


class KeyLocks:
    """Locks on keys: of two writers one has written before the other begins, and a value moving between tiers cannot
    undo a put or a delete. Thread-safe, not reentrant.

    Puts and deletes wait for their keys (``exclusive``); moves (promotion, demotion, write-back) take those that are
    free (``try_lock``). A load notes the versions of its keys: what it read is promoted only if they are unchanged.
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
        """Wait for all of ``keys`` and hold them, to put or delete; after ``patience_s`` yield False instead."""
        if not self.take(keys, patience_s):
            yield False
            return
        try:
            yield True
        finally:
            self.give_back(keys)

    def take(self, keys: Sequence[bytes], patience_s: float = math.inf) -> bool:
        """As ``exclusive``, until ``give_back``; whether they are held."""
        with self._freed:
            if not self._busy.isdisjoint(keys):
                timeout_s = patience_s if patience_s < math.inf else None
                if not self._freed.wait_for(lambda: self._busy.isdisjoint(keys), timeout_s):
                    return False
            self._busy.update(keys)
            return True

    def give_back(self, keys: Sequence[bytes]) -> None:
        """Of what ``take`` holds; another value may be under each of them."""
        with self._freed:
            for key in set(keys):
                self._versions[_stripe(key)] += 1
            self._busy.difference_update(keys)
            self._freed.notify_all()

    @contextmanager
    def try_lock(self, keys: Iterable[bytes], versions: dict[bytes, int] | None = None) -> Iterator[set[bytes]]:
        """Hold those of ``keys`` that are free and still have the given ``versions``; yields them."""
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
