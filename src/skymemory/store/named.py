"""The general key-value interface: text keys to any bytes, in any store; ``skymemory kv`` in Python.

What is stored begins with a value header that holds the name, so a value that came under the wrong key is noticed and
a list can be made without an index.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from skymemory.errors import InvalidInput, LaterVersion, MalformedPacket
from skymemory.kv.block import key_hash
from skymemory.kv.codec.base import RAW
from skymemory.kv.value import LATER_VERSION, ValueHeader, unpack_value
from skymemory.store.base import Buffer, Expiring, Presence, Store, check_items
from skymemory.store.sealed import is_sealed
from skymemory.store.wrappers import Wrapped

if TYPE_CHECKING:
    from skymemory.store.sky.probing import NamedValue

NAMESPACE = hashlib.sha256(b"skymemory named values 1").digest()

SEALED = "sealed"
"""The reason of a miss where a sealed value was read without keys."""

NOT_PROMISED = "it is stored, but not every satellite promised to forget it in time"
"""Why a put with a lifetime failed, though it stored."""


@runtime_checkable
class Listing(Protocol):
    """What some stores can do beside: list the named values that they hold."""

    def names(self) -> list[NamedValue]:
        """By name. Values that are sealed have none that can be read."""


@dataclass(frozen=True, slots=True)
class NamedOutcome:
    """``value`` is None after a put and on a miss; ``reason`` says why something failed."""

    ok: bool
    value: memoryview | None
    seconds: float
    retransmitted: int = 0
    reason: str = ""


def named_key(name: str) -> bytes:
    """The 32-byte key of a text key."""
    return key_hash(NAMESPACE, name)


def put_named(store: Store, name: str, data: Buffer) -> NamedOutcome:
    """Store ``data`` under ``name``, replacing what was there.

    Raises:
        InvalidInput: no name, or no bytes.
        ValueTooLarge: it can never fit; the message names the limit.
    """
    ((key, data),) = check_items([(named_key(name), data)])
    view = memoryview(data).cast("B")
    header = ValueHeader(RAW.codec_id, len(view), len(view), name=name)
    ticket = store.prepare_store([(key, header.pack() + view)])
    ok = store.complete_store(ticket)[0]
    retransmitted = ticket.state if isinstance(ticket.state, int) else 0
    return NamedOutcome(ok, None, ticket.seconds, retransmitted, "" if ok else "no room, or no answer")


def get_named(store: Store, name: str) -> NamedOutcome:
    """The bytes under ``name``; a miss where they are absent, damaged, or not what the name says."""
    ticket = store.prepare_load([named_key(name)])
    value = store.complete_load(ticket)[0]
    report = ticket.report
    seconds = report.seconds if report is not None else 0.0
    retransmitted = report.retransmitted if report is not None else 0
    if value is None:
        reason = report.keys[0].reason if report is not None else ""
        return NamedOutcome(False, None, seconds, retransmitted, reason or "absent")
    if is_sealed(value):
        return NamedOutcome(False, None, seconds, retransmitted, SEALED)
    try:
        header, payload = unpack_value(value)
    except LaterVersion:
        return NamedOutcome(False, None, seconds, retransmitted, LATER_VERSION)
    except MalformedPacket as error:
        return NamedOutcome(False, None, seconds, retransmitted, f"corrupt: {error}")
    if header.name != name:
        return NamedOutcome(False, None, seconds, retransmitted, f"foreign: its name is {header.name!r}")
    return NamedOutcome(True, payload, seconds, retransmitted)


def bare(store: Store) -> Store:
    """The store that holds the values, under the same keys, without what is wrapped around it (seals, quotas …)."""
    while isinstance(store, Wrapped):
        store = store.store
    return store


class NamedValues:
    """The values of ``store`` by text keys::

        with open_store("constellation") as store:
            values = NamedValues(store)
            values.put("report.pdf", data, ttl_s=1800)
            values.get("report.pdf")

    The store is its opener's to close. A constellation can do all of this; other stores may not be able to list, to
    pin, or to forget after a time.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def put(self, name: str, data: Buffer, *, ttl_s: float | None = None) -> NamedOutcome:
        """Store ``data`` under ``name``, replacing what was there, to be forgotten after ``ttl_s`` seconds.

        Raises:
            InvalidInput: no name, no bytes, or a lifetime that is none or that this store cannot see to; nothing is
                stored.
            ValueTooLarge: it can never fit; the message names the limit.
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
        """Whether something is stored under ``name``, without reading it."""
        return isinstance(name, str) and self._store.lookup([named_key(name)]) == [Presence.HIT]

    def delete(self, name: str) -> bool | None:
        """True where it was there and is gone, False where it was not there, None where a satellite that may hold it
        has not answered.
        """
        return self._store.delete([named_key(name)])[0]

    def pin(self, name: str, ttl_s: float) -> bool:
        """Protect from eviction for ``ttl_s`` seconds (0 unpins). False: absent, or over the budget of pins."""
        return self._store.pin([named_key(name)], ttl_s)[0]

    def expire(self, name: str, ttl_s: float) -> bool:
        """Have it forgotten after ``ttl_s`` seconds (infinite: no more). False: absent, or not all promised.

        Raises:
            InvalidInput: a lifetime that is none, or that this store cannot see to.
        """
        return self._expiring(ttl_s).expire([named_key(name)], ttl_s)[0]

    def names(self) -> list[NamedValue]:
        """What is there, by name, with sizes; without sealed values, whose names cannot be read.

        Raises:
            InvalidInput: this store cannot list.
        """
        store = bare(self._store)
        if not isinstance(store, Listing):
            raise InvalidInput(f"a {store.name} store cannot list the names in it: a constellation can")
        return store.names()

    def _expiring(self, ttl_s: float) -> Expiring:
        if not ttl_s > 0:
            raise InvalidInput(f"a value that is to live for {ttl_s} s: expected more than 0")
        store = bare(self._store)
        if not isinstance(store, Expiring):
            raise InvalidInput(f"a {store.name} store cannot forget values after a time: a constellation can")
        return store
