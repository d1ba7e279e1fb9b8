"""Requests that other replicas have sent and that are not answered, booked in this router's servers and strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from skymemory.conductor.picker import ElsewhereRequest, Picker, Scorer, Server
from skymemory.conductor.sharing.messages import Booking, Changes, Ended, FirstByte, Measured, Snapshot
from skymemory.conductor.sharing.own_requests import MAX_BLOCKS, MAX_OPEN

MAX_REPLICAS = 64
MISSING_S = 2.0
"""Silence after which the prefills of a replica end by their estimates."""


@dataclass(slots=True, eq=False)
class _Booked:
    """Booking and its effect: the server's counts and the strategy's ticket; no server: unknown here."""

    booking: Booking
    sent_s: float
    until_s: float
    computes: bool
    server: Server | None = None
    scorer: Scorer | None = None
    ticket: object = None


@dataclass(slots=True, eq=False)
class Replica:
    """Another replica: when it was heard, the number of its next change (None: a snapshot is needed), its requests."""

    heard_s: float
    next_number: int | None = None
    booked: dict[int, _Booked] = field(default_factory=dict)


class Elsewhere:
    """State of the other replicas, by their ids."""

    def __init__(self, pickers: Sequence[Picker]) -> None:
        """A server's name is looked up in each picker's fleet, in order."""
        self._pickers = tuple(pickers)
        self.replicas: dict[bytes, Replica] = {}
        self.gaps = 0
        """Times that changes were missed."""
        self.on_removed: Callable[[bytes], None] = lambda replica: None

    def __len__(self) -> int:
        return sum(len(replica.booked) for replica in self.replicas.values())

    def heard(self, sender: bytes, now_s: float) -> Replica | None:
        """Return the replica; None if there are too many."""
        replica = self.replicas.get(sender)
        if replica is None:
            if len(self.replicas) >= MAX_REPLICAS:
                return None
            replica = self.replicas[sender] = Replica(now_s)
        replica.heard_s = max(replica.heard_s, now_s)
        return replica

    def apply(self, message: Changes, now_s: float) -> bool:
        """Apply those changes that are new. Return True if a snapshot is needed, as changes were missed."""
        replica = self.heard(message.sender, now_s)
        if replica is None:
            return False
        if replica.next_number is None or message.first > replica.next_number:
            # What was missed may have ended requests that are booked here.
            self.gaps += replica.next_number is not None
            replica.next_number = None
            return True
        for change in message.changes[replica.next_number - message.first :]:
            replica.next_number += 1
            match change:
                case Booking():
                    self._book(replica, change, now_s)
                case FirstByte():
                    self._first_byte(replica, change.number, now_s - change.age_s, is_seen=True)
                case Ended():
                    self._end(replica, change.number, now_s - change.age_s)
                case Measured():
                    self._measured(change)
        return False

    def replace(self, message: Snapshot, now_s: float) -> None:
        """Take a replica's present state, unless a later one is known."""
        replica = self.heard(message.sender, now_s)
        if replica is None or (replica.next_number is not None and message.next_number < replica.next_number):
            return
        if replica.next_number is None:  # otherwise these prefills are known
            for point in message.measured:
                self._measured(point)
        replica.next_number = message.next_number
        present = {booking.number: booking for booking in message.bookings}
        for number in [number for number in replica.booked if number not in present]:
            self._end(replica, number, now_s)
        for number, booking in present.items():
            if number not in replica.booked:
                self._book(replica, booking, now_s)
            elif not booking.computes:
                self._first_byte(replica, number, now_s)

    def remove(self, sender: bytes, now_s: float) -> None:
        """Forget a replica, and end its requests."""
        replica = self.replicas.pop(sender, None)
        if replica is not None:
            self.on_removed(sender)
            for number in list(replica.booked):
                self._end(replica, number, now_s)

    def review(self, now_s: float, silent_s: float) -> None:
        """End requests beyond their time, and forget replicas that were silent for ``silent_s``."""
        for sender, replica in list(self.replicas.items()):
            if now_s - replica.heard_s > silent_s:
                self.remove(sender, now_s)
                continue
            is_missing = now_s - replica.heard_s > MISSING_S
            for number, booked in list(replica.booked.items()):
                if booked.until_s <= now_s:
                    self._end(replica, number, now_s)
                elif is_missing and booked.computes:
                    first_s = booked.sent_s + max(booked.booking.ttft_s, booked.booking.work_s)
                    if first_s <= now_s:
                        self._first_byte(replica, number, first_s)

    def _book(self, replica: Replica, booking: Booking, now_s: float) -> None:
        if booking.number in replica.booked or len(replica.booked) >= MAX_OPEN:
            return
        sent_s = now_s - booking.age_s
        booked = _Booked(booking, sent_s, now_s + booking.left_s, booking.computes)
        replica.booked[booking.number] = booked
        server, picker = self._find(booking.server)
        if server is None or picker is None:
            return
        booked.server, booked.scorer = server, picker.scorer
        server.elsewhere += 1
        if booking.computes:
            server.elsewhere_prefilling += 1
            server.elsewhere_tokens += booking.backlog_tokens
        whole_bytes = min(len(booking.blocks), 8 * MAX_BLOCKS) // 8 * 8
        request = ElsewhereRequest(
            sent_s,
            booking.work_s,
            booking.prompt_tokens,
            max(0, booking.prompt_tokens - booking.backlog_tokens),
            booking.output_tokens or None,
            booking.streams,
            booking.computes,
            np.frombuffer(booking.blocks[:whole_bytes], dtype="<u8").astype(np.uint64),
        )
        booked.ticket = picker.scorer.sent_elsewhere(request, server, now_s)

    def _first_byte(self, replica: Replica, number: int, at_s: float, *, is_seen: bool = False) -> None:
        booked = replica.booked.get(number)
        if booked is None or not booked.computes:
            return
        booked.computes = False
        if booked.server is not None and booked.scorer is not None:
            booked.server.elsewhere_prefilling -= 1
            booked.server.elsewhere_tokens -= booked.booking.backlog_tokens
            booked.scorer.prefilled_elsewhere(booked.ticket, booked.server, at_s, is_seen=is_seen)

    def _end(self, replica: Replica, number: int, at_s: float) -> None:
        self._first_byte(replica, number, at_s)
        booked = replica.booked.pop(number, None)
        if booked is not None and booked.server is not None and booked.scorer is not None:
            booked.server.elsewhere -= 1
            booked.scorer.ended_elsewhere(booked.ticket, booked.server, at_s)

    def _measured(self, point: Measured) -> None:
        server, picker = self._find(point.server)
        if server is not None and picker is not None:
            picker.scorer.measured_elsewhere(server, point.tokens, point.cached, point.seconds)

    def _find(self, name: str) -> tuple[Server | None, Picker | None]:
        for picker in self._pickers:
            server = picker.fleet.servers.get(name)
            if server is not None:
                return server, picker
        return None, None

    def bookings(self, sender: bytes) -> Iterable[tuple[int, str, bool]]:
        """Return the number, server and whether its first byte is awaited, of each request of a replica."""
        replica = self.replicas.get(sender)
        booked = {} if replica is None else replica.booked
        return [(number, entry.booking.server, entry.computes) for number, entry in booked.items()]
