"""State of a replica of a router: its messages to others, and their state. Transports may lose messages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from skymemory.conductor.picker import Measured, Picker
from skymemory.conductor.prefix_index.replicated import SharedPrefixIndex, pack_delta, unpack_deltas
from skymemory.conductor.sharing.elsewhere import Elsewhere
from skymemory.conductor.sharing.messages import (
    VERSION,
    Changes,
    Left,
    Snapshot,
    Wanted,
    pack_message,
    unpack_message,
)
from skymemory.conductor.sharing.own_requests import OwnRequests
from skymemory.errors import InvalidInput

MESSAGE_CHANGES = 64
"""Changes in a message: about half a millisecond of work."""
DELTA_BYTES = 64 << 10
SILENT_S = 5.0
HEARTBEAT_S = 1.0
REMEMBERED_S = 60.0
"""Time for which a silent replica is reported; afterwards it is taken for stopped."""
_MAX_SILENT = 64


@dataclass(slots=True)
class Cursor:
    """What a receiver was sent: the numbers of the next change (None: a snapshot first) and of the next delta."""

    change: int | None = None
    delta: int = 0
    sent_s: float = -math.inf
    has_deltas: bool = True
    """False: it gets the deltas of the prefix index otherwise."""


@dataclass(slots=True)
class MessageCounts:
    sent: int = 0
    received: int = 0
    refused: int = 0
    snapshots: int = 0
    lost_deltas: int = 0


class ReplicaState:
    """State of a replica: its own requests, and those of others. ``own_id`` is random, new at each start."""

    def __init__(
        self, own_id: bytes, index: SharedPrefixIndex | None = None, *, silent_s: float = SILENT_S, now_s: float = 0.0
    ) -> None:
        self.own_id = own_id
        self.own = OwnRequests()
        self.counts = MessageCounts()
        self._index, self._silent_s = index, silent_s
        self._since_s = now_s
        self._last_heard_s: float | None = None
        # Replicas that fell silent, and when they were heard last.
        self._silent: dict[bytes, float] = {}
        self.elsewhere = Elsewhere(())

    def connect(self, pickers: Sequence[Picker]) -> None:
        """Watch the pickers, and book other replicas' requests in their servers."""
        self.elsewhere = Elsewhere(pickers)
        for picker in pickers:
            picker.watch = self.own
            picker.scorer.share_measured(self._measured_by(picker))

    def _measured_by(self, picker: Picker) -> Measured:
        def measured(slot: int, tokens: float, cached: float, seconds: float) -> None:
            server = next((server.name for server in picker.fleet if server.slot == slot), None)
            if server is not None:
                self.own.measured(server, tokens, cached, seconds)

        return measured

    # Sending

    def next_messages(self, cursor: Cursor, now_s: float, most: int = 16) -> list[bytes]:
        """Return what the receiver of ``cursor`` lacks, at most ``most`` messages, and advance it. Without news it is a
        sign of life each second.
        """
        messages: list[bytes] = []
        while len(messages) < most and (message := self._next_message(cursor, now_s)) is not None:
            messages.append(message)
        self.counts.sent += len(messages)
        return messages

    def _next_message(self, cursor: Cursor, now_s: float) -> bytes | None:
        changes = None if cursor.change is None else self.own.changes(cursor.change, MESSAGE_CHANGES, now_s)
        if changes is None:
            cursor.change, cursor.sent_s = self.own.log.end, now_s
            self.counts.snapshots += 1
            return pack_message(Snapshot(VERSION, self.own_id, self.own.log.end, *self.own.snapshot(now_s)))
        assert cursor.change is not None
        deltas = self._next_deltas(cursor)
        if not changes and not deltas and now_s - cursor.sent_s < HEARTBEAT_S:
            return None
        first, cursor.change, cursor.sent_s = cursor.change, cursor.change + len(changes), now_s
        return pack_message(Changes(VERSION, self.own_id, first, changes, deltas))

    def _next_deltas(self, cursor: Cursor) -> bytes:
        index = self._index
        if index is None or not cursor.has_deltas:
            return b""
        if cursor.delta < index.log_start:
            self.counts.lost_deltas += index.log_start - cursor.delta
            cursor.delta = index.log_start
        packed = bytearray()
        for delta in index.since(cursor.delta, MESSAGE_CHANGES) or ():
            packed += pack_delta(delta)
            cursor.delta += 1
            if len(packed) >= DELTA_BYTES:
                break
        return bytes(packed)

    def leaving(self) -> bytes:
        return pack_message(Left(VERSION, self.own_id))

    # Receiving

    def receive(self, data: bytes, now_s: float) -> tuple[bytes, bytes | None]:
        """Apply a message. Return its sender, and an answer to send, if any.

        Raises:
            InvalidInput: an invalid message.
        """
        try:
            message = unpack_message(data)
            reply = None if message.sender == self.own_id else self._apply(message, now_s)
        except InvalidInput:
            self.counts.refused += 1
            raise
        return message.sender, reply

    def _apply(self, message: Changes | Snapshot | Wanted | Left, now_s: float) -> bytes | None:
        self.counts.received += 1
        if isinstance(message, Left):
            self.elsewhere.remove(message.sender, now_s)
            self._silent.pop(message.sender, None)
            return None
        self._last_heard_s = now_s
        self._silent.pop(message.sender, None)
        if isinstance(message, Snapshot):
            self.elsewhere.replace(message, now_s)
        elif isinstance(message, Changes):
            if message.deltas and self._index is not None:
                self._index.absorb(unpack_deltas(message.deltas))
            if self.elsewhere.apply(message, now_s):
                return pack_message(Wanted(VERSION, self.own_id, message.sender))
        return None

    def is_wanted(self, data: bytes) -> bool:
        """Return True if a message asks this replica for a snapshot."""
        message = unpack_message(data)
        return isinstance(message, Wanted) and message.of == self.own_id

    def review(self, now_s: float) -> list[bytes]:
        """Drop what is too old; call it several times a second. Return the replicas that have just fallen silent."""
        before = {sender: replica.heard_s for sender, replica in self.elsewhere.replicas.items()}
        self.elsewhere.review(now_s, self._silent_s)
        fallen = [sender for sender in before if sender not in self.elsewhere.replicas]
        self._silent |= {sender: before[sender] for sender in fallen}
        for sender in [sender for sender, at_s in self._silent.items() if now_s - at_s > REMEMBERED_S]:
            del self._silent[sender]
        while len(self._silent) > _MAX_SILENT:
            del self._silent[next(iter(self._silent))]
        return fallen

    # Staleness

    def heard(self) -> set[str]:
        """Return the other replicas that are not silent."""
        return {sender.hex()[:8] for sender in self.elsewhere.replicas}

    def silences_s(self, now_s: float) -> dict[str, float]:
        """Return the seconds since each other replica was heard, by the first digits of its id."""
        heard = {sender: replica.heard_s for sender, replica in self.elsewhere.replicas.items()} | self._silent
        return {sender.hex()[:8]: max(0.0, now_s - at_s) for sender, at_s in heard.items()}

    def troubles(self, now_s: float) -> list[str]:
        """Return what is not known of the others."""
        if self._last_heard_s is None:
            alone_s = now_s - self._since_s
            said = f"no other router was heard since the start, {alone_s:.0f} s ago"
            return [said] if alone_s > self._silent_s else []
        return [
            f"router {sender.hex()[:8]} was last heard {now_s - at_s:.0f} s ago: its requests count no more"
            for sender, at_s in self._silent.items()
        ]
