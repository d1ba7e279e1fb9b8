"""Requests between their first sending and their last answer: deadlines, repetitions, and the windows they fill."""

from __future__ import annotations

import math
from collections.abc import Sequence

from skymemory.constellation.torus import SatelliteId
from skymemory.native import Landing
from skymemory.placement.locate import Moves
from skymemory.protocol.client.outbox import Operation, Outbox, Request
from skymemory.protocol.client.peers import Links, Peer
from skymemory.protocol.client.transfer import ReadTransfer, ReplicatedRead, WriteTransfer
from skymemory.protocol.congestion import Window
from skymemory.protocol.wire import Op

_LEAST_HEDGE_S = 0.002
_NEARLY = 0.9
ALWAYS_ASKED = (Op.PING, Op.ADVANCE)
"""Even of those who have been silent: an operator wants to know."""
_MOST_PATIENCE = 10
"""A request that is answered only in part for so many times ``give_up_s`` is given up."""
_MOST_LATE = 3
"""A satellite whose answers come late is waited for so many times ``give_up_s`` at most."""
_MOST_BACKOFF = 4
"""Repetitions come at 1, 2, 4, 4 … timeouts: the windows already slow us down, and a lossy path needs many tries."""
_LEAST_TRIES = 4
"""So often a silent satellite is asked at least: where 10 % of them are lost, three lost tries happen every day."""

_STAND_IN_TRIES = 3
"""What is asked in place of a silent satellite is silent itself after so many: a dead plane holds most of them."""
_PASSED_OVER = 3
"""A satellite that has answered so many PINGs sent with repetitions of a question, and not the question, does not know
it. At 2 % of loss each way one question in 390,000 comes to that by chance; it is then only not asked for a while."""

_MODEST_BYTES_PER_S = 200e6
"""A busy satellite (or we) may take what is queued as slowly as this before it looks like loss."""
_STALE_S = 10.0
"""A round trip measured so long ago is none: in an overload that has passed answers took seconds."""


class InFlight:
    """All requests of a ground host that are not settled. ``give_up_s``: how long a silent satellite is waited for."""

    def __init__(self, links: Links, outbox: Outbox, give_up_s: float) -> None:
        self._links = links
        self._outbox = outbox
        self._give_up_s = give_up_s
        self._requests: dict[int, Request] = {}
        self.awaited: dict[int, Landing] = {}
        """Of requests that are reads: where what answers them goes."""
        self._alarm_s = math.inf
        """No deadline is earlier; deadlines are put off far more often than they pass."""
        self._next_request_id = 1

    def find(self, request_id: int) -> Request | None:
        return self._requests.get(request_id)

    def window(self, op: Op, satellite: SatelliteId) -> Window:
        """A SET fills the beam it goes up by; answers to all else fill our own receive buffer."""
        return self._links.outbound(self._outbox.beam(satellite)) if op is Op.SET else self._links.inbound

    def send(
        self,
        operation: Operation,
        satellite: SatelliteId,
        op: Op,
        indices: Sequence[int],
        body: bytes,
        size_bytes: int,
        moves: Moves,
        now_s: float,
        once: bool = False,
    ) -> None:
        """A new request: ``size_bytes`` is what it puts on its way, up or down. ``once``: it is not repeated."""
        request = self.begin(operation, satellite, op, indices, body, size_bytes, moves, now_s)
        if once:
            request.once, request.deadline_s = True, now_s + self._give_up_s
        self.transmit([request], now_s)

    def transmit(self, requests: Sequence[Request], now_s: float) -> None:
        """Queue the packets of requests of one operation that have begun."""
        self._outbox.transmit(requests, now_s)

    def begin(
        self,
        operation: Operation,
        satellite: SatelliteId,
        op: Op,
        indices: Sequence[int],
        body: bytes,
        size_bytes: int,
        moves: Moves,
        now_s: float,
    ) -> Request:
        """``send`` without the sending."""
        window, peer = self.window(op, satellite), self._links.peer(satellite)
        if peer.heard_s + _STALE_S < now_s:
            peer.round_trip.forget()
        timeout_s = min(_patience_s(peer, window), self._give_up_s)
        if isinstance(operation.transfer, ReplicatedRead) and operation.transfer.hedge:
            timeout_s = min(timeout_s, max(operation.transfer.hedge * peer.round_trip.smoothed_s, _LEAST_HEDGE_S))
        request = Request(
            self._next_request_id,
            operation,
            satellite,
            op,
            indices,
            body,
            now_s,
            now_s + timeout_s,
            size_bytes,
            moves,
            window,
            peer,
        )
        self._next_request_id = self._next_request_id % 0xFFFFFFFF + 1
        self._alarm_s = min(self._alarm_s, request.deadline_s) if self._requests else request.deadline_s
        self._requests[request.request_id] = request
        if isinstance(operation.transfer, ReadTransfer):
            self.awaited[request.request_id] = operation.transfer.landing
        operation.requests.add(request.request_id)
        operation.report.requests += 1
        window.sent(size_bytes)
        return request

    # --- settling ---

    def answered(self, request: Request, size_bytes: int) -> None:
        """So much of it has come."""
        size_bytes = min(size_bytes, request.in_flight_bytes)
        request.in_flight_bytes -= size_bytes
        request.window.answered(size_bytes)

    def refused(self, request: Request, size_bytes: int) -> None:
        """So much of it will not come."""
        size_bytes = min(size_bytes, request.in_flight_bytes)
        request.in_flight_bytes -= size_bytes
        request.window.given_up(size_bytes)

    def retire(self, request: Request) -> None:
        """Nothing more is expected of it."""
        if self._requests.pop(request.request_id, None) is not None:
            self.awaited.pop(request.request_id, None)
            request.operation.requests.discard(request.request_id)
            self.refused(request, request.in_flight_bytes)

    def drop(self, operation: Operation) -> None:
        """Nothing more is expected of any request of this operation."""
        for request_id in operation.requests:
            request = self._requests.pop(request_id)
            self.awaited.pop(request_id, None)
            if request.in_flight_bytes:
                self.refused(request, request.in_flight_bytes)
        operation.requests.clear()

    # --- time ---

    def next_timer_s(self) -> float:
        """When to look for what is overdue: not after the first deadline, sometimes before it; infinite for nothing."""
        return self._alarm_s if self._requests else math.inf

    def overdue(self, now_s: float) -> list[Request]:
        """Each of these must be settled or sent again."""
        if now_s < self._alarm_s:
            return []
        due = [request for request in self._requests.values() if request.deadline_s <= now_s]
        later = (request.deadline_s for request in self._requests.values() if request.deadline_s > now_s)
        self._alarm_s = min(later, default=math.inf)
        return due

    def extend(self, request: Request, now_s: float) -> None:
        """It is being answered: the rest has a whole timeout from now."""
        request.deadline_s = now_s + _patience_s(request.peer, request.window)

    def hurry(self, request: Request, now_s: float) -> None:
        """Part of the answer is here and the rest seems lost: ask again soon rather than at the timeout."""
        request.deadline_s = min(request.deadline_s, now_s + self._links.grace_s(request.satellite))
        self._alarm_s = min(self._alarm_s, request.deadline_s)
        request.gap_seen = True

    def hedge(self, request: Request, now_s: float) -> bool:
        """An overdue request for what has copies: whether the next copy is to be asked, and this one waited for."""
        transfer = request.operation.transfer
        if request.hedged or not isinstance(transfer, ReplicatedRead) or request.attempts > 1 or not transfer.hedge:
            return False
        request.hedged = True
        request.deadline_s = now_s + _patience_s(request.peer, request.window)
        self._alarm_s = min(self._alarm_s, request.deadline_s)
        return transfer.ask_next(request.indices, request.satellite)

    def give_up_or_repeat(self, request: Request, moves: Moves, now_s: float) -> str:
        """An overdue request is settled or sent again; or it is hopeless, and this says why."""
        transfer = request.operation.transfer
        wanted: list[int] = []
        if transfer is not None:
            done = transfer.arrived if isinstance(transfer, ReadTransfer) else transfer.acknowledged
            wanted = [index for index in request.indices if not done[index]]
            if not wanted:
                self.retire(request)
                return ""
        satellite = request.satellite
        passed_over = transfer is None and self._passed_over(request)
        if passed_over and request.passed_over >= _PASSED_OVER:
            request.peer.cannot(request.op, now_s)
            return "unsupported"
        silent_until_s = self._links.silent_since_s(satellite, request.begun_s) + self._silence_s(request.peer)
        if now_s >= silent_until_s or now_s >= request.begun_s + _MOST_PATIENCE * self._give_up_s:
            self._suspect_all(request.operation, now_s)
            self._links.suspects.add(satellite, now_s)
            return "timeout"
        if satellite in self._links.suspects and request.op not in ALWAYS_ASKED:
            return "unreachable"  # it was found silent meanwhile by somebody who had asked before us
        if not passed_over and self._still_queued(request, now_s):
            return ""
        stands_in = isinstance(transfer, ReadTransfer) and transfer.in_place_of_silent(wanted)
        if stands_in and request.attempts >= _STAND_IN_TRIES:
            request.peer.quiet = True  # late, perhaps, and no suspect: those who need it wait for it
            return "timeout"
        if request.once:
            request.deadline_s = silent_until_s
            self._alarm_s = min(self._alarm_s, request.deadline_s)
        else:
            self._repeat(request, wanted, moves, silent_until_s, now_s)
        return ""

    def _silence_s(self, peer: Peer) -> float:
        """How long it may be silent. One that was late of late, because it is overloaded, may be as late again, and
        what was repeated may be lost meanwhile.
        """
        return max(self._give_up_s, min(_LEAST_TRIES * peer.round_trip.timeout_s(), _MOST_LATE * self._give_up_s))

    def _passed_over(self, request: Request) -> bool:
        """Whether a satellite that may not know this operation has answered what was sent with the question, or since.
        The first sending does not count: nothing was sent with it.
        """
        if not request.peer.ignores(request.op) or request.attempts == 1 or request.op in ALWAYS_ASKED:
            return False
        passed_over = self._links.answered_since(request.satellite, request.sent_s)
        request.passed_over += passed_over
        return passed_over

    def _suspect_all(self, operation: Operation, now_s: float) -> None:
        """An operation ends for want of an answer: whoever else has left it waiting for as long is as suspect."""
        for request in map(self._requests.__getitem__, operation.requests):
            since_s = self._links.silent_since_s(request.satellite, request.begun_s)
            if now_s >= since_s + _NEARLY * self._silence_s(request.peer):
                self._links.suspects.add(request.satellite, now_s)

    def _still_queued(self, request: Request, now_s: float) -> bool:
        """Whether it is late only because the satellite is busy with what it got before: it answers, and nothing that
        was sent later. Then it has a whole timeout from the last answer.
        """
        satellite = request.satellite
        if request.gap_seen or self._links.overtaken(satellite, request.sent_s):
            return False
        heard_s = self._links.silent_since_s(satellite, request.sent_s)
        request.deadline_s = heard_s + _patience_s(request.peer, request.window)
        self._alarm_s = min(self._alarm_s, request.deadline_s)
        return heard_s > request.sent_s and request.deadline_s > now_s

    def _repeat(self, request: Request, wanted: list[int], moves: Moves, silent_until_s: float, now_s: float) -> None:
        round_trip = request.peer.round_trip
        request.window.lost(now_s, round_trip.smoothed_s)
        alive = request.passed_over or request.peer.heard_s > request.sent_s
        backoff = 1 if alive else min(2 ** (request.attempts - 1), _MOST_BACKOFF)
        timeout_s = round_trip.timeout_s()
        wait_s = min(timeout_s * backoff, max(timeout_s, self._silence_s(request.peer) / _LEAST_TRIES))
        request.attempts += 1
        request.gap_seen = False
        request.deadline_s = min(now_s + wait_s, silent_until_s)
        self._alarm_s = min(self._alarm_s, request.deadline_s)
        request.operation.report.requests += 1
        request.operation.report.retransmitted_chunks += len(wanted)
        if isinstance(request.operation.transfer, ReadTransfer | WriteTransfer):
            request.indices = wanted
            request.body = b""
            request.moves = moves
        self._outbox.transmit([request], now_s)


def _patience_s(peer: Peer, window: Window) -> float:
    """How long an answer may take: the round trip, and what is on its way before it at a modest rate."""
    return peer.round_trip.timeout_s() + window.in_flight_bytes / _MODEST_BYTES_PER_S
