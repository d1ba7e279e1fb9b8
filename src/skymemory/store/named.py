"""The general key-value interface: text keys to any bytes, in any store; ``skymemory kv`` in Python.

A stored value starts with a header that holds the name, so that a value under the wrong key is detected, and names can
be listed without an index.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from skymemory.errors import InvalidInput, LaterVersion, MalformedPacket
from skymemory.kv.block import key_hash
from skymemory.kv.codec.base import RAW
from skymemory.kv.value import LATER_VERSION, ValueHeader, unpack_header, unpack_value
from skymemory.store.base import Buffer, Expiring, Presence, Store, StoreTicket, check_items
from skymemory.store.sealed import is_sealed
from skymemory.store.wrappers import Wrapped

NAMESPACE = hashlib.sha256(b"skymemory named values 1").digest()

SEALED = "sealed"
"""The reason of a miss: the value is sealed, and was read without keys."""

NOT_PROMISED = "it is stored, but not every satellite promised to expire it"
"""The reason of a failed put with a lifetime, whose value is stored."""


@dataclass(frozen=True, slots=True)
class NamedValue:
    """A named value in a list. ``chunks``: in how many it lies there; 1 outside of satellites."""

    name: str
    key: bytes
    size_bytes: int
    chunks: int = 1


@runtime_checkable
class Listing(Protocol):
    """Optional for a store: list the named values in it."""

    def names(self) -> list[NamedValue]:
        """By name, without blocks, and without sealed values, whose names cannot be read."""


@dataclass(frozen=True, slots=True)
class NamedOutcome:
    """The end of a put or a get. ``value`` is None after a put and on a miss; ``reason`` is that of a failure."""

    ok: bool
    value: memoryview | None
    seconds: float
    retransmitted: int = 0
    reason: str = ""


def named_key(name: str) -> bytes:
    """The 32-byte key of a text key."""
    return key_hash(NAMESPACE, name)


def named_value(key: bytes, start_of_value: Buffer, chunks: int = 1) -> NamedValue | None:
    """The named value of ``key`` that begins so; None for any other value, and for one whose header cannot be read."""
    try:
        header = unpack_header(start_of_value)
    except MalformedPacket:
        return None
    its_own = header.name and named_key(header.name) == key
    return NamedValue(header.name, key, header.raw_bytes, chunks) if its_own else None


def put_named(store: Store, name: str, data: Buffer) -> NamedOutcome:
    """Store ``data`` under ``name``, replacing what was there.

    Raises:
        InvalidInput: no name, or no bytes.
        ValueTooLarge: it can never fit; the message gives the limit.
    """
    ((key, data),) = check_items([(named_key(name), data)])
    view = memoryview(data).cast("B")
    header = ValueHeader(RAW.codec_id, len(view), len(view), name=name)
    ticket = store.prepare_store([(key, header.pack() + view)])
    ok = store.complete_store(ticket)[0]
    retransmitted = ticket.state if isinstance(ticket.state, int) else 0
    return NamedOutcome(ok, None, ticket.seconds, retransmitted, "" if ok else not_stored_reason(ticket, key))


def not_stored_reason(ticket: StoreTicket, key: bytes) -> str:
    """Why ``key`` is not stored, in words for users."""
    if ticket.reason:
        return ticket.reason
    return "no answer" if key in ticket.unanswered else "no room beside what is pinned or being read"


def get_named(store: Store, name: str) -> NamedOutcome:
    """The bytes under ``name``; a miss where they are absent, damaged, or stored under another name."""
    ticket = store.prepare_load([named_key(name)])
    value = store.complete_load(ticket)[0]
    report = ticket.report
    seconds = report.seconds if report is not None else 0.0
    retransmitted = report.retransmitted if report is not None else 0
    if value is None:
        reason = report.keys[0].reason if report is not None else ""
        return NamedOutcome(False, None, seconds, retransmitted, reason or "absent")
    payload = named_payload(value, name)
    if isinstance(payload, str):
        return NamedOutcome(False, None, seconds, retransmitted, payload)
    return NamedOutcome(True, payload, seconds, retransmitted)


def named_payload(value: memoryview, name: str) -> memoryview | str:
    """The bytes in a stored value, as they were put under ``name``; or the reason why it is a miss."""
    if is_sealed(value):
        return SEALED
    try:
        header, payload = unpack_value(value)
    except LaterVersion:
        return LATER_VERSION
    except MalformedPacket as error:
        return f"corrupt: {error}"
    return payload if header.name == name else f"foreign: its name is {header.name!r}"


def bare(store: Store) -> Store:
    """The innermost store, without wrappers (seals, quotas …)."""
    while isinstance(store, Wrapped):
        store = store.store
    return store


class NamedValues:
    """The values of ``store`` by text keys::

        with open_store("constellation") as store:
            values = NamedValues(store)
            values.put("report.pdf", data, ttl_s=1800)
            values.get("report.pdf")

    The caller closes the store. A constellation, memory and disk support all of this; Redis and tiers do not list,
    Redis does not pin, and tiers do not expire.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def put(self, name: str, data: Buffer, *, ttl_s: float | None = None) -> NamedOutcome:
        """Store ``data`` under ``name``, replacing what was there; it expires after ``ttl_s`` seconds.

        Raises:
            InvalidInput: no name, no bytes, a lifetime of 0 or less, or a store without expiry; nothing is stored.
            ValueTooLarge: it can never fit; the message gives the limit.
        """
        expiring = None if ttl_s is None else self._expiring(ttl_s)
        done = put_named(self._store, name, data)
        if done.ok and expiring is not None and ttl_s is not None and not expiring.expire([named_key(name)], ttl_s)[0]:
            return replace(done, ok=False, reason=NOT_PROMISED)
        return done

    def get(self, name: str) -> bytes | None:
        """The bytes under ``name``; None for a miss, of which ``get_named`` gives the reason."""
        value = get_named(self._store, name).value
        return None if value is None else bytes(value)

    def __contains__(self, name: object) -> bool:
        """Whether a value is stored under ``name``, without reading it."""
        return isinstance(name, str) and self._store.lookup([named_key(name)]) == [Presence.HIT]

    def delete(self, name: str) -> bool | None:
        """True where it was present and is gone, False where it was absent, None where a satellite that may hold it has
        not answered.
        """
        return self._store.delete([named_key(name)])[0]

    def pin(self, name: str, ttl_s: float) -> bool:
        """Protect from eviction for ``ttl_s`` seconds (0 unpins). False: absent, or over the pin budget."""
        return self._store.pin([named_key(name)], ttl_s)[0]

    def expire(self, name: str, ttl_s: float) -> bool:
        """Expire it after ``ttl_s`` seconds (infinite: never). False: absent, or not promised by all satellites.

        Raises:
            InvalidInput: a lifetime of 0 or less, or a store without expiry.
        """
        return self._expiring(ttl_s).expire([named_key(name)], ttl_s)[0]

    def names(self) -> list[NamedValue]:
        """The values by name, with sizes; without sealed ones, whose names cannot be read.

        Raises:
            InvalidInput: this store cannot list.
        """
        store = bare(self._store)
        if not isinstance(store, Listing):
            raise InvalidInput(f"a {store.name} store cannot list names: a constellation, memory and disk can")
        return store.names()

    def _expiring(self, ttl_s: float) -> Expiring:
        if not ttl_s > 0:
            raise InvalidInput(f"a lifetime of {ttl_s} s: expected more than 0")
        store = bare(self._store)
        if not isinstance(store, Expiring):
            raise InvalidInput(f"a {store.name} store cannot expire values: each of its tiers alone can")
        return store
