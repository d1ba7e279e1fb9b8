"""Handler of RETAIN: keys touched, pinned, leased, or to be deleted at a time.

Times are absolute (Unix ms), so a repetition changes nothing. Pins, leases and expiries follow handed-over chunks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from skymemory.constellation.torus import SatelliteId
from skymemory.protocol.messages import (
    Capabilities,
    Kept,
    Retain,
    pack_retain,
    pack_retained,
    unpack_retain,
    unpack_retained,
)
from skymemory.protocol.satellite.state import SatelliteState
from skymemory.protocol.wire import Op, Packet

_MOST_EXPIRIES = 1 << 16
_REPEAT_S = 0.25
_MOST_ATTEMPTS = 8
_LEASE_SHARE = 0.25
_LONGEST_LEASE_S = 60.0
_MOST_HOLDERS = 64


@dataclass(slots=True)
class _RetainTransfer:
    """RETAIN that follows chunks to satellite ``there``, repeated until acknowledged."""

    there: SatelliteId
    body: bytes
    due_s: float
    attempts: int = 1


class Retention:
    def __init__(self, state: SatelliteState) -> None:
        self._store = state.store
        self._history = state.history
        self._outbox = state.outbox
        self._counters = state.counters
        self._lease_limit_bytes = int(state.store.limit_bytes * _LEASE_SHARE)
        self._next_s = math.inf
        self._transfers: dict[int, _RetainTransfer] = {}
        self._awaited_acks: set[tuple[SatelliteId, bytes]] = set()
        self._next_request_id = 0x40000000 | state.config.first_request_id & 0x3FFFFFFF

    def receive(self, packet: Packet, now_s: float) -> None:
        what, until_s, keys = unpack_retain(packet.body)
        if what is Retain.TOUCH:
            for key in reversed(keys):
                self._store.refresh(key)
            return
        if what is Retain.WRITING:
            for key in keys:
                self._history.still_written(key, now_s)
            return
        if what is Retain.LEASE:
            for key in keys:
                if key in self._store.shares:
                    self._lease_key(key, packet.header.ground, min(until_s, now_s + _LONGEST_LEASE_S), now_s)
            return
        promise = self._pin_key if what is Retain.PIN else self._set_expiry
        outcomes = [promise(key, until_s, now_s) if key in self._store.shares else Kept.ABSENT for key in keys]
        self._outbox.reply(packet.header, Op.RETAINED, pack_retained(outcomes), now_s)

    def _lease_key(self, key: bytes, ground: int, until_s: float, now_s: float) -> None:
        """Lease a key to a ground host, within limits; a pinned key needs no lease."""
        if until_s <= now_s or key in self._store.pins:
            return
        holders = self._store.leases.get(key)
        if holders is None:
            full = self._store.leased_bytes + self._store.share_bytes(key) > self._lease_limit_bytes
        else:
            full = len(holders) >= _MOST_HOLDERS and ground not in holders
        if full:
            self._counters.add("leases_refused")
            return
        self._store.lease(key, ground, max(until_s, holders.get(ground, 0.0) if holders else 0.0))
        self._next_s = min(self._next_s, until_s)

    def _pin_key(self, key: bytes, until_s: float, now_s: float) -> Kept:
        if until_s <= now_s:
            self._store.unpin(key)
            return Kept.DONE
        if key not in self._store.pins:
            if self._store.pinned_bytes + self._store.share_bytes(key) > self._store.pin_limit_bytes:
                self._counters.add("pins_refused")
                return Kept.REFUSED
            self._store.end_lease(key)
        self._store.pin(key, until_s)
        self._next_s = min(self._next_s, until_s)
        return Kept.DONE

    def _set_expiry(self, key: bytes, until_s: float, now_s: float) -> Kept:
        """Delete a key at ``until_s``, at once if past; 0 cancels its expiry."""
        expiries = self._store.expiries
        if not until_s:
            expiries.pop(key, None)
        elif until_s <= now_s:
            self._delete_expired(key)
        elif len(expiries) >= _MOST_EXPIRIES and key not in expiries:
            return Kept.REFUSED
        else:
            expiries[key] = until_s
            self._next_s = min(self._next_s, until_s)
        return Kept.DONE

    def _delete_expired(self, key: bytes) -> None:
        self._counters.add("chunks_expired", self._store.remove_key(key))

    # --- Timers ---

    def next_timer_s(self) -> float:
        transfer = next(iter(self._transfers.values()), None)
        return self._next_s if transfer is None else min(self._next_s, transfer.due_s)

    def handle_timer(self, now_s: float) -> None:
        if now_s >= self._next_s:
            self._end_due_promises(now_s)
        while self._transfers and (number := next(iter(self._transfers))) and self._transfers[number].due_s <= now_s:
            self._repeat_transfer(number, now_s)

    def _end_due_promises(self, now_s: float) -> None:
        pins, expiries, leases = self._store.pins, self._store.expiries, self._store.leases
        for key in [key for key, until_s in pins.items() if until_s <= now_s]:
            self._store.unpin(key)
        for key in [key for key, until_s in expiries.items() if until_s <= now_s]:
            self._delete_expired(key)
        for key, holders in list(leases.items()):
            for ground in [ground for ground, until_s in holders.items() if until_s <= now_s]:
                self._store.release(key, ground)
        lease_times = [until_s for holders in leases.values() for until_s in holders.values()]
        self._next_s = min([*pins.values(), *expiries.values(), *lease_times], default=math.inf)

    # --- Pins, leases and expiries follow the chunks ---

    def handed_over(self, target: SatelliteId, key: bytes, now_s: float) -> None:
        """Send a handed-over key's pin, expiry and lease to its new satellite."""
        for what, promises in ((Retain.PIN, self._store.pins), (Retain.EXPIRE, self._store.expiries)):
            until_s = promises.get(key)
            if until_s is not None:
                self._send_transfer(target, pack_retain(what, until_s, [key]), now_s)
        if key in self._store.leases:  # sent once: a lost lease costs at most a miss
            until_s = max(self._store.leases[key].values())
            self._outbox.command(Op.RETAIN, target, 0, pack_retain(Retain.LEASE, until_s, [key]), now_s)

    def _send_transfer(self, target: SatelliteId, body: bytes, now_s: float) -> None:
        if (target, body) in self._awaited_acks:
            return
        self._awaited_acks.add((target, body))
        number = self._next_request_id
        self._next_request_id = 0x40000000 | (number + 1) & 0x3FFFFFFF
        self._transfers[number] = _RetainTransfer(target, body, now_s + _REPEAT_S)
        self._outbox.command(Op.RETAIN, target, number, body, now_s)

    def _repeat_transfer(self, number: int, now_s: float) -> None:
        transfer = self._transfers.pop(number)
        if transfer.attempts == _MOST_ATTEMPTS:
            self._awaited_acks.discard((transfer.there, transfer.body))
            return
        transfer.attempts += 1
        transfer.due_s = now_s + _REPEAT_S
        self._transfers[number] = transfer  # at the end: the dictionary is in the order of ``due_s``
        self._outbox.command(Op.RETAIN, transfer.there, number, transfer.body, now_s)

    def answered(self, packet: Packet, now_s: float) -> None:
        unpack_retained(packet.body)
        self._end_transfer(packet.header.request_id)

    def unsupported(self, packet: Packet, now_s: float) -> None:
        Capabilities.unpack_unsupported(packet.body)
        self._end_transfer(packet.header.request_id)

    def _end_transfer(self, request_id: int) -> None:
        transfer = self._transfers.pop(request_id, None)
        if transfer is not None:
            self._awaited_acks.discard((transfer.there, transfer.body))
