"""The contract of every tier: 32-byte keys to values of bytes, in batches, loads and stores in two phases.

One contract suite (``tests/contract/store_contract.py``) runs over every implementation. Rules that
hold for all of them:

- **Keys** are ``bytes`` of length 32 (a block hash, or ``kv.block.key_hash`` of a name); else InvalidInput.
- **Order matters.** A sequence of keys is a chain: an earlier key is worth more than a later one, so that
  eviction takes the last blocks of a chain first and presence stays prefix-closed.
- **The writer says where a block stands**: ``places``, one for each item, from the block's depth in its prompt and the
  block before it; None (or no places at all) where that is not known, or the value is no block. Only an index needs
  it, to be fast; what is found never depends on it, nor on what was asked before.
- **A miss is a value.** Absent, evicted, corrupt and unreachable all come back as ``None``; ``complete_load``
  raises for none of them. What went wrong is in the ticket's report and a counter in ``stats()``.
- **Views are snapshots.** A returned view never changes while the caller holds it, whatever is put, deleted
  or evicted. ``release(ticket)`` says that the caller has copied what it needs: only then may the memory
  behind the views be used again.
- **Values are copied.** After ``complete_store`` returns, the caller may change or free what it passed in.
- **No eviction in vain.** Where room for a value cannot be made, nothing is evicted for it.
- **A lease protects.** From ``prepare_load`` until ``complete_load`` (or ``release``, or the lease's end) the
  keys that were there are not evicted; nor are those being stored, between the two phases of a store. Two tiers
  promise less. Redis evicts by its own rules and leases nothing. Satellites get the lease in one unacknowledged packet
  and lease at most a quarter of their memory: what does not fit, or whose packet was lost, may be evicted. Either is a
  miss of that load.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, runtime_checkable

from skymemory.errors import InvalidInput
from skymemory.kv.block import Place

if TYPE_CHECKING:
    from typing import Self


Buffer = bytes | bytearray | memoryview
"""What a value may be passed as; always C-contiguous bytes."""

Places = Sequence[Place | None]
"""Of each item of a store its place in its prompt; empty: of none."""

KEY_BYTES = 32
LEASE_S = 30.0
"""How long a lease protects at most: a client that died must not pin memory for ever."""

ABANDONED_S = 10 * LEASE_S
"""So long after its lease a ticket may still be completed (as a miss, or in vain)."""


class Presence(enum.Enum):
    """What a tier says of a key. PENDING: a store of it has begun and not ended; a load now is a miss."""

    MISS = 0
    HIT = 1
    PENDING = 2


@dataclass(frozen=True, slots=True)
class KeyReport:
    """Where one key's value came from. ``tier`` is empty on a miss, and ``size_bytes`` 0."""

    tier: str = ""
    size_bytes: int = 0
    seconds: float = 0.0
    retransmitted: int = 0
    reason: str = ""
    """Why it is a miss: "absent", "corrupt", "unreachable" …; empty on a hit."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One load, key by key in the order asked."""

    keys: tuple[KeyReport, ...]
    seconds: float

    @property
    def size_bytes(self) -> int:
        return sum(key.size_bytes for key in self.keys)

    @property
    def retransmitted(self) -> int:
        """Datagrams (or whatever the tier resends) asked for again."""
        return sum(key.retransmitted for key in self.keys)


@dataclass(slots=True, eq=False)
class LoadTicket:
    """A lease on ``keys``. ``report`` is there once ``complete_load`` has returned."""

    keys: tuple[bytes, ...]
    expires_s: float
    """In the store's own clock."""
    report: LoadReport | None = None
    state: object = field(default=None, repr=False)
    """The implementation's own."""


@dataclass(slots=True, eq=False)
class StoreTicket:
    """Room set aside for ``items``."""

    items: tuple[tuple[bytes, Buffer], ...]
    expires_s: float
    seconds: float = 0.0
    """Time that ``complete_store`` took, once it has returned."""
    state: object = field(default=None, repr=False)
    places: tuple[Place | None, ...] = ()
    """As many as ``items``."""
    unanswered: frozenset[bytes] = frozenset()
    """Once ``complete_store`` has returned: those that were not refused, but had no answer."""

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

    def prefix(self, keys: Sequence[bytes]) -> int:
        """Number of leading keys that are all there (HIT), correct with holes behind them."""

    def prepare_load(self, keys: Sequence[bytes]) -> LoadTicket:
        """Lease ``keys``: those there now stay until the load completes. Keys may repeat."""

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        """Read-only views in the order of ``ticket.keys``; None is a miss.

        Once per ticket, else InvalidInput. Fills ``ticket.report``.
        """

    def release(self, ticket: LoadTicket) -> None:
        """Give up a lease, or the views of a completed load. May be repeated."""

    def prepare_store(self, items: Sequence[tuple[bytes, Buffer]], places: Places = ()) -> StoreTicket:
        """Set room aside. A value that could never fit raises ValueTooLarge naming the limit."""

    def complete_store(self, ticket: StoreTicket) -> list[bool]:
        """Per item: stored and acknowledged. False where there was no room or no answer (``ticket.unanswered``). Once
        per ticket.
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
        """Remove, leases and pins notwithstanding (views handed out stay true). True where it was there and can no
        longer be read, False where it was not there, None where that is unknown: a holder has not answered.
        """

    def stats(self) -> dict[str, int | float]:
        """Counters and gauges, units in their names."""

    def estimate_load_s(self, keys: Sequence[bytes], now_s: float) -> float:
        """Seconds that loading ``keys`` would take at ``now_s``; infinite when one is known to be absent."""

    def close(self) -> None:
        """Free what is held. May be repeated; anything else afterwards raises InvalidInput."""

    def __enter__(self) -> Self:
        """``with open_store(...) as store:`` closes it at the end."""

    def __exit__(self, *raised: object) -> None: ...


@runtime_checkable
class Prefetching(Protocol):
    """What some tiers can do beside: bring values to where they will be wanted, before they are."""

    def prefetch(self, keys: Sequence[bytes], at: float) -> list[bool]:
        """Have the values of ``keys`` near at the time ``at`` (seconds, the store's own clock: Unix time).

        Per key: whether it will be. False where it is absent or could not be brought; it is then where it was.
        """


def bring_near(store: Store | Prefetching, keys: Sequence[bytes], at: float) -> list[bool]:
    """``prefetch`` of any tier: in one that knows no near and far, what is there is near."""
    if isinstance(store, Prefetching):
        return store.prefetch(keys, at)
    return [presence is Presence.HIT for presence in store.lookup(keys)]


@runtime_checkable
class Evicting(Protocol):
    """What some tiers can do beside: tell what they evict for want of room, so that another tier may take it."""

    on_evict: Callable[[bytes, bytes, Place | None], object] | None
    """Called with key, value and place (None: not known), just before it is gone and with the tier's lock held: it must
    be quick, and must not call the tier. What is deleted, replaced or forgotten by closing is not evicted.
    """


@runtime_checkable
class Expiring(Protocol):
    """What some tiers can do beside: forget values after a time."""

    def expire(self, keys: Sequence[bytes], ttl_s: float) -> list[bool]:
        """Have values forgotten after ``ttl_s`` seconds (infinite: no more). True where that is promised."""


@runtime_checkable
class Keeping(Protocol):
    """What some tiers can do beside: know what a later release stored there, which they neither read nor write over."""

    def keeps(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether a later release's value was seen under each of these. Asks nobody."""


def keeps(store: Store | Keeping, keys: Sequence[bytes]) -> list[bool]:
    """``keeps`` of any tier: of one that cannot say, none."""
    return store.keeps(keys) if isinstance(store, Keeping) else [False] * len(keys)


class TwoPhase:
    """What all implementations have the same way: ``get_many`` and ``put_many`` out of the two phases, and ``with``."""

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
    """``items`` as a tuple; InvalidInput unless keys are keys and values are contiguous bytes. Empty views are ``b""``,
    whatever their shape: one with a zero in it can be read as no other.
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
    """``ttl_s``; InvalidInput for what is no number: it is neither before nor after any time."""
    if math.isnan(ttl_s):
        raise InvalidInput(f"a time of {ttl_s} s: expected a number of seconds, math.inf for no end")
    return ttl_s


# The loads, or the stores, of one store that have begun and not ended.


_Ticket = TypeVar("_Ticket", LoadTicket, StoreTicket)


class OpenTickets(Generic[_Ticket]):
    """Tickets, each of which is taken once. May be used from any thread; takes no other lock."""

    def __init__(self) -> None:
        self._open: set[_Ticket] = set()
        self._ending: set[_Ticket] = set()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._open) + len(self._ending)

    def add(self, ticket: _Ticket, now_s: float) -> None:
        """It begins. Those that nobody has completed long after their lease are dropped: their values must not be kept
        for ever.
        """
        with self._lock:
            for abandoned in [one for one in self._open if one.expires_s + ABANDONED_S < now_s]:
                self._open.discard(abandoned)
            self._open.add(ticket)

    def take(self, ticket: _Ticket) -> None:
        """It is being completed, for the first and only time; else InvalidInput."""
        with self._lock:
            if ticket not in self._open:
                kind = "load" if isinstance(ticket, LoadTicket) else "store"
                raise InvalidInput(f"this {kind} ticket is not open: each is completed once, by its own store")
            self._open.discard(ticket)

    @contextmanager
    def ending(self, ticket: _Ticket) -> Iterator[None]:
        """``take`` it, but let it count until it is done."""
        with self._lock:
            self._ending.add(ticket)  # first: nobody may see it in neither
        try:
            self.take(ticket)
            yield
        finally:
            with self._lock:
                self._ending.discard(ticket)

    def discard(self, ticket: _Ticket) -> None:
        """It is given up, or was completed already."""
        with self._lock:
            self._open.discard(ticket)

    def holding(self, now_s: float) -> list[_Ticket]:
        """Those whose lease has not ended."""
        with self._lock:
            return [ticket for ticket in self._open | self._ending if ticket.expires_s > now_s]

    def clear(self) -> None:
        with self._lock:
            self._open.clear()
            self._ending.clear()
