"""Several replicas of a router that know of each other's requests: the contract of whatever carries it between them.

A replica goes on with what it knows itself, whatever becomes of the others and of what lies between. Nothing here is
waited for by a request: deltas are sent and taken in by a task beside, in pieces so small that requests get their turn.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from skymemory.conductor.prefix_index.deltas import Delta
from skymemory.conductor.prefix_index.shared import SharedPrefixIndex
from skymemory.errors import InvalidInput
from skymemory.keys import KeyRing

MAC_BYTES = 16
_AT_ONCE = 16
"""Deltas taken in before requests get their turn: of long prompts about a millisecond."""


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """How well replicas agree. Counts are since the start."""

    kind: str
    """``redis`` or ``gossip``."""
    degraded: str
    """Why what others learn is not known here, or not there; empty: all is well."""
    sent: int
    received: int
    lost: int
    """Deltas of ours that were dropped before others had them, because too many waited."""
    refused: int
    """Messages that were damaged, not authentic, or of another kind of blocks."""


class Replicas(Protocol):
    async def start(self) -> None:
        """Begin to share, in the background.

        Raises:
            InvalidInput: an address that cannot be used. (Others that are not there are none: they may come.)
        """
        ...

    def status(self) -> ReplicaStatus: ...

    async def close(self) -> None: ...


async def take_in(index: SharedPrefixIndex, deltas: Iterable[Delta]) -> int:
    """Absorb deltas a few at a time; how many. Raises what making them raises, with those before taken in."""
    left, taken = iter(deltas), 0
    while some := list(islice(left, _AT_ONCE)):
        index.absorb(some)
        taken += len(some)
        await asyncio.sleep(0)
    return taken


def mac_of(secret: bytes, *parts: bytes) -> bytes:
    """16 bytes of HMAC-SHA-256 over the parts, each behind its length."""
    message = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hmac.digest(secret, message, "sha256")[:MAC_BYTES]


def secret_of(ring: KeyRing, key_id: int, purpose: bytes) -> bytes | None:
    """The secret that a key of the ring gives for a purpose; None where the ring has no such key."""
    key = ring.find(key_id)
    return None if key is None else key.derive(purpose)


def loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def split_address(address: str) -> tuple[str, int]:
    """``host:port`` or ``[v6]:port``.

    Raises:
        InvalidInput: anything else.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 <= int(port) <= 65_535:
        raise InvalidInput(f"address {address!r}: expected HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)
