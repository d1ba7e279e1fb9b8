"""What an answer means for the operation that asked: bytes placed, chunks acknowledged or missing, windows, clocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from skymemory.constellation.torus import SatelliteId
from skymemory.errors import MalformedPacket
from skymemory.metrics import Counters
from skymemory.native import Ack, Tally
from skymemory.placement.locate import Moves
from skymemory.protocol import messages
from skymemory.protocol.auth import FLAG_AUTHENTICATED
from skymemory.protocol.capabilities import Capabilities
from skymemory.protocol.client.outbox import Operation, Request
from skymemory.protocol.client.peers import Links
from skymemory.protocol.client.requests import InFlight
from skymemory.protocol.client.transfer import (
    CHUNK_OVERHEAD_BYTES,
    Absence,
    Burst,
    ReadTransfer,
    ReplicatedRead,
    StandIns,
    ValueInfo,
    WriteTransfer,
)
from skymemory.protocol.clock import FollowedClock
from skymemory.protocol.messages import Selection
from skymemory.protocol.satellite.tombstones import Dead, unpack_dead
from skymemory.protocol.wire import CREDIT_UNIT_BYTES, FLAG_SETTLED, Op, SkyHeader, Status, made_at_s, since_s

_REMEMBERED_GONE = 1 << 16
_ANSWERS: dict[Op, Op] = {
    Op.GET: Op.DATA,
    Op.HAS: Op.PRESENCE,
    Op.EVICT: Op.EVICTED,
    Op.PING: Op.PONG,
    Op.LIST: Op.LISTED,
    Op.ADVANCE: Op.ADVANCED,
    Op.RETAIN: Op.RETAINED,
    Op.FORGET: Op.EVICTED,
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """An operation has ended: well (no ``failure``) or not."""

    operation: Operation
    failure: str = ""
    body: bytes = b""


class Answers:
    """Reads what satellites answer. ``resume`` is told of operations that have something to send again."""

    def __init__(
        self,
        in_flight: InFlight,
        links: Links,
        clock: FollowedClock,
        counters: Counters,
        ground: int,
        resume: Callable[[Operation], None],
        everywhere: Callable[[ValueInfo, float], Sequence[Moves]],
    ) -> None:
        self._in_flight = in_flight
        self._links = links
        self._clock = clock
        self._everywhere = everywhere
        self._counters = counters
        self._ground = ground
        self._resume = resume
        self.gone: deque[Dead] = deque(maxlen=_REMEMBERED_GONE)
        """Values that satellites say are dead, until somebody takes them."""

    def data(self, tallies: Sequence[Tally], now_s: float) -> list[Verdict]:
        """What was in runs of DATA that have been placed."""
        heard: list[tuple[Request, ReadTransfer, Tally]] = []
        for tally in tallies:
            request = self._in_flight.find(tally[0])
            if request is not None and isinstance(transfer := request.operation.transfer, ReadTransfer):
                heard.append((request, transfer, tally))
                transfer.placed(*tally[3:6])
                if transfer.pending:
                    self._resume(request.operation)
        ended: dict[int, Verdict] = {}
        for request, transfer, (_, echo_us, _, placed, duplicates, corrupt, foreign) in heard:
            size_each = transfer.info.chunk_bytes + CHUNK_OVERHEAD_BYTES
            self._in_flight.answered(request, (placed + duplicates) * size_each)
            if corrupt:
                self._counters.add("packets_malformed", corrupt)
            else:
                self._heard(request, echo_us, now_s)
            operation = request.operation
            if foreign:
                ended[operation.number] = Verdict(operation, "other version")
            elif transfer.missing:
                self._expect_rest(request, transfer, now_s)
            elif operation.number not in ended:
                ended[operation.number] = Verdict(operation, "" if transfer.verified() else "corrupt")
        return list(ended.values())

    def _expect_rest(self, request: Request, transfer: ReadTransfer, now_s: float) -> None:
        if not transfer.arrived[request.indices[-1]]:
            self._in_flight.extend(request, now_s)
        elif transfer.has(request.indices):
            self._in_flight.retire(request)
        else:
            # Satellites answer in order: what is missing before the last chunk was lost or overtaken.
            self._in_flight.hurry(request, now_s)

    def control(self, view: memoryview, now_s: float) -> Verdict | None:
        """One packet whose checksums have been verified."""
        try:
            packet = messages.parse_packet(view)
            header = packet.header
            if header.op is Op.GONE and header.ground == self._ground:
                self.gone.extend(unpack_dead(packet.body))
                return None
            request = self._in_flight.find(header.request_id)
            if header.flags & FLAG_AUTHENTICATED:  # a gate would have taken the MAC off
                raise MalformedPacket("an answer with a MAC that nobody checks")
            speaker = SatelliteId(header.source.plane, header.source.slot)
            if request is None or header.ground != self._ground:
                self._counters.add("packets_unexpected")
                if header.ground == self._ground:
                    self._links.heard_late(speaker, since_s(header.timestamp_us, now_s), now_s)
                return None
            if speaker == request.satellite:
                round_trip_s = self._heard(request, header.timestamp_us, now_s)
            else:  # one on the way, which could not pass it on
                round_trip_s = since_s(header.timestamp_us, now_s) or 0.0
                self._links.peer(speaker).heard(None, now_s)
            self._clock.told(speaker, (header.slot_moves, header.plane_moves), round_trip_s, now_s)
            if header.op is Op.PONG:
                request.operation.report.clock_ahead_s = made_at_s(view, now_s) - (now_s - round_trip_s / 2)
                request.peer.declares(Capabilities.of_figures(messages.unpack_housekeeping(packet.body)), now_s)
            return self._control(request, header, packet.body, now_s)
        except MalformedPacket:
            self._counters.add("packets_malformed")
            return None

    def _control(self, request: Request, header: SkyHeader, body: memoryview, now_s: float) -> Verdict | None:
        transfer = request.operation.transfer
        if header.op is Op.UNREACHABLE:
            if header.status is Status.REFUSED:
                return Verdict(request.operation, "refused")
            return self.lost(request, "unreachable", now_s)
        if header.op is Op.UNSUPPORTED:
            _, known = Capabilities.unpack_unsupported(body)
            request.peer.declares(known, now_s)
            request.peer.cannot(request.op, now_s)
            return self.lost(request, "unsupported", now_s)
        if header.op is Op.BUSY:
            request.window.lost(now_s, self._links.round_trip(request.satellite).smoothed_s)
        elif isinstance(transfer, WriteTransfer) and header.op is Op.ACK:
            return self._acknowledged(request, transfer, header, Selection.unpack(body), now_s)
        elif isinstance(transfer, ReadTransfer) and header.op is Op.MISS:
            return self._missed(request, transfer, header, Selection.unpack(body), now_s)
        elif transfer is None and header.op is _ANSWERS.get(request.op):
            return Verdict(request.operation, body=bytes(body))
        elif transfer is None and request.op is Op.GET and header.op is Op.MISS:
            return Verdict(request.operation, "missing")
        else:
            self._counters.add("packets_unexpected")
        return None

    def acknowledged(self, ack: Ack, now_s: float) -> Verdict | None:
        """A plain ACK, checked and read."""
        request_id, ground, echo_us, slot_moves, plane_moves, credit, key, first, stride, count = ack
        request = self._in_flight.find(request_id)
        if request is None or ground != self._ground:
            self._counters.add("packets_unexpected")
            return None
        round_trip_s = self._heard(request, echo_us, now_s)
        self._clock.told(request.satellite, (slot_moves, plane_moves), round_trip_s, now_s)
        transfer = request.operation.transfer
        if not isinstance(transfer, WriteTransfer):
            self._counters.add("packets_unexpected")
            return None
        if key != transfer.info.key:
            return None
        return self._stored(request, transfer, range(first, first + stride * count, stride), credit, now_s)

    def _acknowledged(
        self, request: Request, transfer: WriteTransfer, header: SkyHeader, selection: Selection, now_s: float
    ) -> Verdict | None:
        if selection.key != transfer.info.key:
            return None
        if header.status is not Status.OK:
            return self.lost(request, "full", now_s)
        return self._stored(request, transfer, selection.indices(), header.credit, now_s)

    def lost(self, request: Request, failure: str, now_s: float) -> Verdict | None:
        """Its satellite will not answer as we wish: the end, unless there are copies of what it was about."""
        transfer = request.operation.transfer
        if isinstance(transfer, ReadTransfer):
            anybody = failure != "timeout" or self._links.heard_anybody_since(request.begun_s)
            others = StandIns(partial(self._everywhere, transfer.info, now_s), self._links.quiet) if anybody else None
            saved = transfer.redirect(request.indices, request.satellite, failure, others)
            failure = transfer.silence or failure
        else:
            saved = transfer is not None and transfer.waive(request.indices)
        if not saved:
            return Verdict(request.operation, failure)
        self._in_flight.retire(request)
        if isinstance(transfer, WriteTransfer) and transfer.missing == 0:
            return Verdict(request.operation)
        self._resume(request.operation)
        return None

    def _stored(
        self, request: Request, transfer: WriteTransfer, indices: Sequence[int], credit: int, now_s: float
    ) -> Verdict | None:
        fresh = transfer.acknowledge(transfer.of_request(indices, request.indices))
        self._in_flight.answered(request, fresh * (transfer.info.chunk_bytes + CHUNK_OVERHEAD_BYTES))
        request.window.offer(credit * CREDIT_UNIT_BYTES)
        if transfer.missing == 0:
            return Verdict(request.operation)
        if request.in_flight_bytes == 0:
            self._in_flight.retire(request)
        elif transfer.acknowledged[request.indices[-1]]:
            self._in_flight.hurry(request, now_s)
        else:
            self._in_flight.extend(request, now_s)
        return None

    def _missed(
        self, request: Request, transfer: ReadTransfer, header: SkyHeader, selection: Selection, now_s: float
    ) -> Verdict | None:
        asked = set(request.indices)
        indices = [index for index in selection.indices() if index in asked]
        if selection.key != transfer.info.key or not indices:
            return None
        self._in_flight.refused(request, len(indices) * (transfer.info.chunk_bytes + CHUNK_OVERHEAD_BYTES))
        answer = Absence(
            request.satellite,
            self._clock.nearby(now_s),
            partial(self._everywhere, transfer.info, now_s),
            bool(header.flags & FLAG_SETTLED),
            (header.slot_moves, header.plane_moves),
            request.begun_s,
            now_s,
        )
        if failure := transfer.absent(indices, answer):
            return Verdict(request.operation, failure)
        absent = set(indices)
        request.indices = [index for index in request.indices if index not in absent]
        request.body = b""
        if transfer.has(request.indices):
            self._in_flight.retire(request)
        self._resume(request.operation)
        return None

    def _heard(self, request: Request, echo_us: int, now_s: float) -> float:
        """A checked answer came: the satellite lives. Returns the round trip it took, as far as that can be told."""
        elapsed_s = since_s(echo_us, now_s)
        request.peer.heard(elapsed_s, now_s)
        return elapsed_s or 0.0


# From what a transfer has yet to ask for or to send to requests on their way, as far as the windows let it.


_LEAST_BURST_CHUNKS = 10
"""A window that admits fewer chunks is waited for, unless nothing is on its way."""


class Bursts:
    """Hands bursts to the outbox. A satellite that is taken for dead ends a write that needs it at once, and a read if
    those that had its chunks before have them no more.
    """

    def __init__(
        self, links: Links, in_flight: InFlight, everywhere: Callable[[ValueInfo, float], Sequence[Moves]]
    ) -> None:
        self._links = links
        self._everywhere = everywhere
        self._in_flight = in_flight

    def ask(self, operation: Operation, transfer: ReadTransfer, moves: Moves, now_s: float) -> Verdict | None:
        """All that the window lets us ask for, packed together. What is asked for is not cut, what is sent may be."""
        size_each = transfer.info.chunk_bytes + CHUNK_OVERHEAD_BYTES
        key, window = transfer.info.key, self._links.inbound
        suspects = self._links.suspects
        if transfer.checked_suspects != suspects.added and not isinstance(transfer, ReplicatedRead):
            silent = len(suspects) > 0 and any(
                burst.satellite in suspects and not transfer.is_one_of_many(burst.indices) for burst in transfer.pending
            )
            if silent and not transfer.avoid(suspects, self._stand_ins(transfer, now_s)):
                return Verdict(operation, "unreachable")
            transfer.checked_suspects = suspects.added
        requests = []
        while transfer.pending:
            satellite, indices, steps = transfer.pending[0]
            size_bytes = len(indices) * size_each
            if satellite in suspects:
                transfer.pending.popleft()
                if transfer.redirect(indices, satellite, "unreachable", self._stand_ins(transfer, now_s)):
                    continue
                return Verdict(operation, "unreachable")
            if not window.admits(size_bytes):
                break
            transfer.pending.popleft()
            body = key + steps if steps else b""
            requests.append(
                self._in_flight.begin(operation, satellite, Op.GET, indices, body, size_bytes, moves, now_s)
            )
        if requests:
            self._in_flight.transmit(requests, now_s)
        return None

    def _stand_ins(self, transfer: ReadTransfer, now_s: float) -> StandIns:
        return StandIns(partial(self._everywhere, transfer.info, now_s), self._links.quiet)

    def send(
        self, operation: Operation, transfer: WriteTransfer, moves: Moves, now_s: float
    ) -> Iterator[Verdict | None]:
        """Burst after burst, with a stop at each: None, or how it has ended."""
        stalled: deque[Burst] = deque()
        size_each = transfer.info.chunk_bytes + CHUNK_OVERHEAD_BYTES
        while transfer.pending:
            burst = transfer.pending.popleft()
            satellite, indices = burst.satellite, burst.indices
            if satellite in self._links.suspects:
                if not transfer.waive(indices):
                    yield Verdict(operation, "unreachable")
                    return
                if transfer.missing == 0:
                    yield Verdict(operation)
                    return
                continue
            fits = self._admitted(burst, size_each)
            if not fits:
                stalled.append(burst)
                continue
            if fits < len(indices):
                transfer.pending.appendleft(Burst(satellite, indices[fits:]))
                indices = indices[:fits]
            self._in_flight.send(operation, satellite, Op.SET, indices, b"", fits * size_each, moves, now_s)
            yield None
        transfer.pending.extendleft(reversed(stalled))

    def _admitted(self, burst: Burst, size_each: int) -> int:
        """How many chunks of the burst the window lets go now."""
        wanted = len(burst.indices)
        window = self._in_flight.window(Op.SET, burst.satellite)
        fits = min(wanted, window.open_bytes // size_each)
        if fits >= min(wanted, _LEAST_BURST_CHUNKS):
            return fits
        return 0 if window.in_flight_bytes else max(1, fits)
