"""The general key-value interface: text keys to any bytes, in any store.

What is stored begins with a value header that holds the name, so a value that came under the wrong key is noticed and
a list can be made without an index.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from skymemory.errors import LaterVersion, MalformedPacket
from skymemory.kv.block import key_hash
from skymemory.kv.codec.raw import RAW
from skymemory.kv.value import LATER_VERSION, ValueHeader, unpack_value
from skymemory.store.base import Buffer, Store
from skymemory.store.sealed import is_sealed

NAMESPACE = hashlib.sha256(b"skymemory named values 1").digest()

SEALED = "sealed"
"""The reason of a miss where a sealed value was read without keys."""


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
        ValueTooLarge: it can never fit; the message names the limit.
    """
    view = memoryview(data).cast("B")
    header = ValueHeader(RAW.codec_id, len(view), len(view), name=name)
    ticket = store.prepare_store([(named_key(name), header.pack() + view)])
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
