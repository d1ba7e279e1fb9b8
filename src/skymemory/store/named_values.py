"""General key-value interface: bytes under text keys, in any store. A value's header has its name."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from skymemory.errors import InvalidInput, LaterVersion, MalformedPacket
from skymemory.kv.block import key_hash
from skymemory.kv.codec.codec_base import RAW
from skymemory.kv.value import ValueHeader, unpack_header, unpack_value
from skymemory.reasons import Miss
from skymemory.store.base import Buffer, Expiring, Presence, Store, StoreTicket, check_items
from skymemory.store.sealed import is_sealed
from skymemory.store.wrappers import Wrapped

NAMESPACE = hashlib.sha256(b"skymemory named values 1").digest()


NOT_PROMISED = "it is stored, but not every satellite promised to expire it"


@dataclass(frozen=True, slots=True)
class NamedValue:
    """Entry of a list. ``chunks``: number on satellites, else 1."""

    name: str
    key: bytes
    size_bytes: int
    chunks: int = 1


@runtime_checkable
class Listing(Protocol):
    """Optional interface: list named values."""

    def names(self) -> list[NamedValue]:
        """Return the values by name, without blocks and sealed values."""


@dataclass(frozen=True, slots=True)
class NamedOutcome:
    """Result of storing or loading a named value. ``retransmitted``: chunks sent again."""

    ok: bool
    value: memoryview | None
    seconds: float
    retransmitted: int = 0
    reason: str = ""
    """Reason in words if not ``ok``."""


def named_key(name: str) -> bytes:
    return key_hash(NAMESPACE, name)


def named_value(key: bytes, start_of_value: Buffer, chunks: int = 1) -> NamedValue | None:
    """Return the list entry of a value that begins with these bytes; None if unreadable, or not ``key``'s."""
    try:
        header = unpack_header(start_of_value)
    except MalformedPacket:
        return None
    is_its_name = header.name and named_key(header.name) == key
    return NamedValue(header.name, key, header.raw_bytes, chunks) if is_its_name else None


def put_named(store: Store, name: str, data: Buffer) -> NamedOutcome:
    """Store ``data``. Raises InvalidInput without a name or bytes, ValueTooLarge if it can never fit."""
    ((key, data),) = check_items([(named_key(name), data)])
    view = memoryview(data).cast("B")
    header = ValueHeader(RAW.codec_id, len(view), len(view), name=name)
    ticket = store.prepare_store([(key, header.pack() + view)])
    ok = store.complete_store(ticket)[0]
    retransmitted = ticket.state if isinstance(ticket.state, int) else 0
    return NamedOutcome(ok, None, ticket.seconds, retransmitted, "" if ok else not_stored_reason(ticket, key))


def not_stored_reason(ticket: StoreTicket, key: bytes) -> str:
    if ticket.reason:
        return ticket.reason
    return "no answer" if key in ticket.unanswered else "no room beside what is pinned or being read"


def get_named(store: Store, name: str) -> NamedOutcome:
    """Return the bytes under ``name``; a miss if absent, damaged, or stored under another name."""
    ticket = store.prepare_load([named_key(name)])
    value = store.complete_load(ticket)[0]
    report = ticket.report
    seconds = report.seconds if report is not None else 0.0
    retransmitted = report.retransmitted if report is not None else 0
    if value is None:
        reason = report.keys[0].reason if report is not None else None
        return NamedOutcome(False, None, seconds, retransmitted, reason or Miss.ABSENT)
    payload = named_payload(value, name)
    if isinstance(payload, str):
        return NamedOutcome(False, None, seconds, retransmitted, payload)
    return NamedOutcome(True, payload, seconds, retransmitted)


def named_payload(value: memoryview, name: str) -> memoryview | str:
    """Return a stored value's payload; or, if unreadable or of another name, the reason in words."""
    if is_sealed(value):
        return Miss.SEALED
    try:
        header, payload = unpack_value(value)
    except LaterVersion:
        return Miss.LATER_VERSION
    except MalformedPacket as error:
        return f"{Miss.CORRUPT}: {error}"
    return payload if header.name == name else f"{Miss.FOREIGN}: its name is {header.name!r}"


def unwrap_store(store: Store) -> Store:
    while isinstance(store, Wrapped):
        store = store.store
    return store


class NamedValues:
    """Values of ``store`` by text keys::

        with open_store("constellation") as store:
            values = NamedValues(store)
            values.put("report.pdf", data, ttl_s=1800)
            values.get("report.pdf")

    The caller closes the store. Redis cannot list or pin; a store of several tiers cannot list or expire.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def put(self, name: str, data: Buffer, *, ttl_s: float | None = None) -> NamedOutcome:
        """Store ``data`` under ``name``, for ``ttl_s`` seconds.

        Raises InvalidInput, storing nothing: no name, no bytes, a lifetime of 0 or less, or a store without expiry;
        ValueTooLarge if it can never fit.
        """
        expiring = None if ttl_s is None else self._expiring(ttl_s)
        done = put_named(self._store, name, data)
        if done.ok and expiring is not None and ttl_s is not None and not expiring.expire([named_key(name)], ttl_s)[0]:
            return replace(done, ok=False, reason=NOT_PROMISED)
        return done

    def get(self, name: str) -> bytes | None:
        """Return the bytes under ``name``; None for a miss (``get_named`` gives its reason)."""
        value = get_named(self._store, name).value
        return None if value is None else bytes(value)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._store.lookup([named_key(name)]) == [Presence.HIT]

    def delete(self, name: str) -> bool | None:
        """Return True if deleted, False if absent, None if a satellite is silent."""
        return self._store.delete([named_key(name)])[0]

    def pin(self, name: str, ttl_s: float) -> bool:
        """Protect from eviction (0 unpins). False: absent, or over the pin budget."""
        return self._store.pin([named_key(name)], ttl_s)[0]

    def expire(self, name: str, ttl_s: float) -> bool:
        """Expire after ``ttl_s`` seconds (infinite: never). False: absent, or not promised. Raises as ``put``."""
        return self._expiring(ttl_s).expire([named_key(name)], ttl_s)[0]

    def names(self) -> list[NamedValue]:
        """Return the values by name; InvalidInput if the store cannot list."""
        store = unwrap_store(self._store)
        if not isinstance(store, Listing):
            raise InvalidInput(f"a {store.name} store cannot list names: a constellation, memory and disk can")
        return store.names()

    def _expiring(self, ttl_s: float) -> Expiring:
        """Return the innermost store; InvalidInput unless it can expire values."""
        if not ttl_s > 0:
            raise InvalidInput(f"a lifetime of {ttl_s} s: expected more than 0")
        store = unwrap_store(self._store)
        if not isinstance(store, Expiring):
            raise InvalidInput(f"a {store.name} store cannot expire values: each of its tiers alone can")
        return store
