"""RETAIN: keys touched, pinned until, or to be forgotten at a time; as one satellite keeps such promises.

Times are absolute (milliseconds since the Unix epoch, as the clock of the moves has them), so a repeated packet changes
nothing and a promise can travel with the chunks when they are handed over.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput, MalformedPacket
from skymemory.metrics import Counters
from skymemory.protocol.capabilities import Capabilities
from skymemory.protocol.messages import KEY_BYTES, MAX_KEYS_PER_PACKET, Buffer, Packet, pack_verdicts, unpack_verdicts
from skymemory.protocol.satellite.memory import ChunkStore
from skymemory.protocol.satellite.outbox import Departures
from skymemory.protocol.satellite.tombstones import Latecomers
from skymemory.protocol.wire import Op

_RETAIN = struct.Struct(">HBBQ")
_MOST_EXPIRIES = 1 << 16
_REPEAT_S = 0.25
_MOST_ATTEMPTS = 8
_LEASE_SHARE = 0.25
"""Of the memory: the most that may be leased, beside what is pinned."""
_LONGEST_LEASE_S = 60.0
_MOST_HOLDERS = 64
"""Of one key: as long as one of them has a lease, no other ground host needs its own."""
_LATEST_S = 1e12
"""Later times are this one, some 30,000 years on."""


class Retain(IntEnum):
    """What is asked for: the numbers of the wire."""

    TOUCH = 0
    """The first key becomes the most recently used, the last the least of them. Not answered."""
    PIN = 1
    """Not evicted until then; a time that has passed takes the pin out."""
    EXPIRE = 2
    """Forgotten then, pinned or not; a time of 0 means never. A later SET means never, too."""
    LEASE = 3
    """Not evicted until then, or until the ground host that asks has got chunks of it. Not answered."""
    WRITING = 4
    """The ground host is still storing chunks of it, here or elsewhere. Not answered."""


class Kept(IntEnum):
    """What RETAINED says of each key."""

    ABSENT = 0
    DONE = 1
    REFUSED = 2
    """The share of memory for pins, or the list of expiries, is full."""


def pack_retain(what: Retain, until_s: float, keys: Sequence[bytes]) -> bytes:
    """Body of RETAIN; ``until_s`` in seconds since the epoch."""
    if not 1 <= len(keys) <= MAX_KEYS_PER_PACKET:
        raise InvalidInput(f"{len(keys)} keys in one RETAIN: expected 1 to {MAX_KEYS_PER_PACKET}")
    until_ms = round(until_s * 1000) if 0 <= until_s <= _LATEST_S else 0 if until_s < 0 else round(_LATEST_S * 1000)
    return _RETAIN.pack(len(keys), what, 0, until_ms) + b"".join(keys)


def unpack_retain(body: Buffer) -> tuple[Retain, float, list[bytes]]:
    if len(body) < _RETAIN.size:
        raise MalformedPacket(f"RETAIN of {len(body)} bytes: expected {_RETAIN.size} and keys")
    count, what, _, until_ms = _RETAIN.unpack_from(body)
    if not 1 <= count <= MAX_KEYS_PER_PACKET or len(body) != _RETAIN.size + count * KEY_BYTES or what > Retain.WRITING:
        raise MalformedPacket(f"RETAIN {what} of {count} keys in {len(body)} bytes")
    keys = [bytes(body[at : at + KEY_BYTES]) for at in range(_RETAIN.size, len(body), KEY_BYTES)]
    return Retain(what), until_ms / 1000, keys


def pack_retained(outcomes: Sequence[Kept]) -> bytes:
    return pack_verdicts(outcomes)


def unpack_retained(body: Buffer) -> list[Kept]:
    return unpack_verdicts(body, Op.RETAINED, Kept)


@dataclass(slots=True)
class _Handed:
    """A promise on its way to the satellite that now has the chunks."""

    there: SatelliteId
    body: bytes
    due_s: float
    attempts: int = 1


class Retention:
    """The promises of one satellite. ``pin_share`` of its memory may be pinned."""

    def __init__(
        self, store: ChunkStore, departures: Departures, counters: Counters, pin_share: float, latecomers: Latecomers
    ) -> None:
        self._latecomers = latecomers
        self._store = store
        self._departures = departures
        self._counters = counters
        self._pin_bytes = int(store.limit_bytes * pin_share)
        self._pins: dict[bytes, float] = {}
        self._expiries: dict[bytes, float] = {}
        self._leases: dict[bytes, dict[int, float]] = {}
        """Of each key the ground hosts that are about to read it, and until when."""
        self._lease_bytes = int(store.limit_bytes * _LEASE_SHARE)
        self._next_s = math.inf
        self._handed: dict[int, _Handed] = {}
        """By request id, the next to be repeated first."""
        self._awaited: set[tuple[SatelliteId, bytes]] = set()
        """Whom we have told what, and wait for the answer."""
        store.gone = self._gone
        store.shield_limit_bytes, store.unshielded = self._pin_bytes, self._outgrown
        self._next_request_id = 0x40000000

    @property
    def next_s(self) -> float:
        """When ``handle_timer`` has something to do: not after it, perhaps before."""
        handed = next(iter(self._handed.values()), None)
        return self._next_s if handed is None else min(self._next_s, handed.due_s)

    def receive(self, packet: Packet, now_s: float) -> None:
        """A RETAIN for us."""
        what, until_s, keys = unpack_retain(packet.body)
        if what is Retain.TOUCH:
            for key in reversed(keys):
                self._store.refresh(key)
            return
        if what is Retain.WRITING:
            for key in keys:
                self._latecomers.still_written(key, now_s)
            return
        if what is Retain.LEASE:
            for key in keys:
                if key in self._store.shares:
                    self._lease(key, packet.header.ground, min(until_s, now_s + _LONGEST_LEASE_S), now_s)
            return
        promise = self._pin if what is Retain.PIN else self._expire
        outcomes = [promise(key, until_s, now_s) if key in self._store.shares else Kept.ABSENT for key in keys]
        self._departures.reply(packet.header, Op.RETAINED, pack_retained(outcomes), now_s)

    def _lease(self, key: bytes, ground: int, until_s: float, now_s: float) -> None:
        if until_s <= now_s or self._store.is_shielded(key):
            return
        if key not in self._leases:
            if self._store.held_bytes + self._store.share_bytes(key) > self._lease_bytes:
                self._counters.add("leases_refused")
                return
            self._store.hold(key)
        holders = self._leases.setdefault(key, {})
        if len(holders) >= _MOST_HOLDERS and ground not in holders:
            self._counters.add("leases_refused")
            return
        holders[ground] = max(until_s, holders.get(ground, 0.0))
        self._next_s = min(self._next_s, until_s)

    def served(self, key: bytes, ground: int) -> None:
        """This ground host has got chunks of the key: its lease has done its work."""
        holders = self._leases.get(key) if self._leases else None
        if holders is not None and holders.pop(ground, None) is not None and not holders:
            self._end_lease(key)

    def _end_lease(self, key: bytes) -> None:
        if self._leases.pop(key, None) is not None:
            self._store.free(key)

    def _pin(self, key: bytes, until_s: float, now_s: float) -> Kept:
        if until_s <= now_s:
            self._pins.pop(key, None)
            self._store.unshield(key)
            return Kept.DONE
        if not self._store.is_shielded(key):
            if self._store.shielded_bytes + self._store.share_bytes(key) > self._pin_bytes:
                self._counters.add("pins_refused")
                return Kept.REFUSED
            self._end_lease(key)
            self._store.shield(key)
        self._pins[key] = until_s
        self._next_s = min(self._next_s, until_s)
        return Kept.DONE

    def _outgrown(self, key: bytes) -> None:
        """What is stored under a pinned key has become more than may be pinned."""
        self._pins.pop(key, None)
        self._counters.add("pins_refused")

    def _expire(self, key: bytes, until_s: float, now_s: float) -> Kept:
        if not until_s:
            self._expiries.pop(key, None)
        elif until_s <= now_s:
            self._forget(key)
        elif len(self._expiries) >= _MOST_EXPIRIES and key not in self._expiries:
            return Kept.REFUSED
        else:
            self._expiries[key] = until_s
            self._next_s = min(self._next_s, until_s)
        return Kept.DONE

    def stored(self, key: bytes) -> None:
        """A writer stored the key anew: what was said of when to forget it is void."""
        if self._expiries:
            self._expiries.pop(key, None)

    def _gone(self, key: bytes) -> None:
        """Nothing of the key is here any more: promises went on with its chunks, if they did. What comes later under
        this key brings its own.
        """
        self._pins.pop(key, None)
        self._expiries.pop(key, None)
        self._end_lease(key)

    def handle_timer(self, now_s: float) -> None:
        if now_s >= self._next_s:
            for key in [key for key, until_s in self._pins.items() if until_s <= now_s]:
                del self._pins[key]
                self._store.unshield(key)
            for key in [key for key, until_s in self._expiries.items() if until_s <= now_s]:
                self._forget(key)
            for key, holders in list(self._leases.items()):
                self._leases[key] = left = {ground: until_s for ground, until_s in holders.items() if until_s > now_s}
                if not left:
                    self._end_lease(key)
            leases = [until_s for holders in self._leases.values() for until_s in holders.values()]
            self._next_s = min([*self._pins.values(), *self._expiries.values(), *leases], default=math.inf)
        while self._handed and (number := next(iter(self._handed))) and self._handed[number].due_s <= now_s:
            self._repeat(number, now_s)

    def _forget(self, key: bytes) -> None:
        self._counters.add("chunks_expired", self._store.remove_key(key))

    # --- promises move with the chunks ---

    def handed_over(self, there: SatelliteId, key: bytes, now_s: float) -> None:
        """Another satellite has taken chunks of this key: it must know what we promised."""
        for what, promises in ((Retain.PIN, self._pins), (Retain.EXPIRE, self._expiries)):
            until_s = promises.get(key)
            if until_s is not None and (what is Retain.EXPIRE or self._store.is_shielded(key)):
                self._hand(there, pack_retain(what, until_s, [key]), now_s)
        if key in self._leases:
            until_s = max(self._leases[key].values())
            self._departures.command(Op.RETAIN, there, 0, pack_retain(Retain.LEASE, until_s, [key]), now_s)

    def _hand(self, there: SatelliteId, body: bytes, now_s: float) -> None:
        if (there, body) in self._awaited:
            return
        self._awaited.add((there, body))
        number = self._next_request_id
        self._next_request_id = 0x40000000 | (number + 1) & 0x3FFFFFFF
        self._handed[number] = _Handed(there, body, now_s + _REPEAT_S)
        self._departures.command(Op.RETAIN, there, number, body, now_s)

    def _repeat(self, number: int, now_s: float) -> None:
        handed = self._handed.pop(number)
        if handed.attempts == _MOST_ATTEMPTS:
            self._awaited.discard((handed.there, handed.body))
            return
        handed.attempts += 1
        handed.due_s = now_s + _REPEAT_S
        self._handed[number] = handed
        self._departures.command(Op.RETAIN, handed.there, number, handed.body, now_s)

    def answered(self, packet: Packet, now_s: float) -> None:
        """RETAINED: whatever it says, the promise has arrived."""
        unpack_retained(packet.body)
        self._settle(packet.header.request_id)

    def unsupported(self, packet: Packet, now_s: float) -> None:
        """A satellite of another release does not know what we asked of it: of a promise, that is the end."""
        Capabilities.unpack_unsupported(packet.body)
        self._settle(packet.header.request_id)

    def _settle(self, request_id: int) -> None:
        handed = self._handed.pop(request_id, None)
        if handed is not None:
            self._awaited.discard((handed.there, handed.body))
