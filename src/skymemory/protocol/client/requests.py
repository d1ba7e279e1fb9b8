"""Requests from their first packet to their last answer: packing, windows, deadlines, retransmission."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from skymemory import native
from skymemory.constellation.torus import SatelliteId
from skymemory.native import Landing
from skymemory.placement.locate import Moves
from skymemory.protocol.auth import Authority
from skymemory.protocol.client.gateway import Gateway
from skymemory.protocol.client.liveness import Peer, Peers
from skymemory.protocol.client.transfer import (
    CHUNK_OVERHEAD_BYTES,
    ReadTransfer,
    ReplicatedRead,
    TransferReport,
    WriteTransfer,
)
from skymemory.protocol.congestion import Window
from skymemory.protocol.messages import Selection
from skymemory.protocol.wire import (
    COMMAND_FORMAT,
    COMMAND_PREFIX_BYTES,
    CREDIT_UNIT_BYTES,
    GROUND_SHELL,
    HOP_LIMIT,
    MOST_CREDIT,
    SKY,
    VERSION,
    Buffer,
    Op,
    SegmentBatch,
    Status,
    command_fields,
    microseconds,
    prefixed_batch,
    single,
)
from skymemory.reasons import Miss

ALWAYS_SENT = (Op.PING, Op.ADVANCE)
_MIN_HEDGE_S = 0.002
_MAX_PARTIAL = 10
_MAX_LATE = 3
_MAX_BACKOFF = 4
_MIN_TRIES = 4
_STAND_IN_TRIES = 3
_NEARLY_SILENT = 0.9
_UNSUPPORTED_TRIES = 3
_MODEST_BYTES_PER_S = 200e6
STALE_S = 10.0

_COMMAND_PREFIX = struct.Struct(COMMAND_FORMAT + SKY.format.removeprefix(">"))
_GROUND = GROUND_SHELL << 24


@dataclass(slots=True, eq=False)
class Operation:
    """Read, write or (``transfer`` None) question. ``requests`` are its ids in flight; ``queued``: it has bursts to
    send.
    """

    number: int
    op: Op
    transfer: ReadTransfer | WriteTransfer | None
    started_s: float
    report: TransferReport
    requests: set[int] = field(default_factory=set)
    queued: bool = False


@dataclass(slots=True, eq=False)
class PacketRequest:
    """GET or SET of chunks ``indices``, or question, until answered. A repetition keeps the id: late answers count."""

    request_id: int
    operation: Operation
    satellite: SatelliteId
    indices: Sequence[int]
    begun_s: float
    deadline_s: float
    in_flight_bytes: int
    moves: Moves
    window: Window
    """Window that it fills, whatever beam a repetition takes."""
    peer: Peer
    lane: Window | None
    """Window of the beam that carries its answer down."""
    body: bytes = b""
    """Bytes after the headers; empty for a read not yet packed."""
    turn_bytes: int = 0
    """Its link's ``passed_bytes`` from which its answer can arrive."""
    once: bool = False
    attempts: int = 1
    sent_s: float = 0.0
    hedged: bool = False  # True if another copy was asked too
    heard_beside: int = 0
    """Answers to packets sent with or after its repetitions."""
    gap_seen: bool = False
    """True if parts of its answer arrived out of order."""
    gap_since_s: float | None = None
    answer_number: int = -1

    @property
    def link(self) -> Window:
        return self.lane or self.window


class InFlight:
    def __init__(
        self,
        peers: Peers,
        gateway: Gateway | None,
        give_up_s: float,
        ground: int,
        authority: Authority | None = None,
        first_request_id: int = 1,
    ) -> None:
        self.by_id: dict[int, PacketRequest] = {}
        self.awaited: dict[int, Landing] = {}
        self.packets: list[tuple[SegmentBatch, SatelliteId]] = []
        self._peers = peers
        self._gateway = gateway
        self._give_up_s = give_up_s
        self._ground = ground
        self._credit = min(peers.inbound.limit_bytes // CREDIT_UNIT_BYTES, MOST_CREDIT)
        self._authority = authority
        self._earliest_deadline_s = math.inf
        self._next_request_id = first_request_id
        self._sequence = 0

    # --- sending ---

    def beam(self, satellite: SatelliteId) -> SatelliteId:
        return satellite if self._gateway is None else self._gateway.beam(satellite)

    def lane(self, satellite: SatelliteId) -> Window | None:
        return self._peers.lane(self.beam(satellite))

    def _get_up_queue_s(self, op: Op, satellite: SatelliteId) -> float:
        if op is Op.SET or self._peers.up_bytes_s == math.inf:
            return 0.0
        return self._peers.outbound(self.beam(satellite)).in_flight_bytes / self._peers.up_bytes_s

    def begin(
        self,
        operation: Operation,
        satellite: SatelliteId,
        indices: Sequence[int],
        moves: Moves,
        now_s: float,
        request_id: int = 0,
    ) -> PacketRequest:
        """Register a request, with its deadline and its bytes in the windows; ``transmit`` sends it."""
        op, transfer, peer = operation.op, operation.transfer, self._peers.peer(satellite)
        # A SET fills the upward beam's window, everything else the receive buffer's.
        window = self._peers.outbound(self.beam(satellite)) if op is Op.SET else self._peers.inbound
        lane = None if op is Op.SET else self.lane(satellite)
        size_bytes = 0 if transfer is None else len(indices) * (transfer.info.chunk_bytes + CHUNK_OVERHEAD_BYTES)
        if peer.heard_s + STALE_S < now_s:
            peer.round_trip.forget()
        # At most ``give_up_s``: a peer that answered late may be dead by now.
        timeout_s = min(_timeout_s(peer, lane or window) + self._get_up_queue_s(op, satellite), self._give_up_s)
        if isinstance(transfer, ReplicatedRead) and transfer.hedge:
            timeout_s = min(timeout_s, max(transfer.hedge * peer.round_trip.smoothed_s, _MIN_HEDGE_S))
        request = PacketRequest(
            request_id or self._take_request_id(),
            operation,
            satellite,
            indices,
            now_s,
            now_s + timeout_s,
            size_bytes,
            moves,
            window,
            peer,
            lane,
        )
        self._earliest_deadline_s = (
            min(self._earliest_deadline_s, request.deadline_s) if self.by_id else request.deadline_s
        )
        self.by_id[request.request_id] = request
        if isinstance(transfer, ReadTransfer):
            self.awaited[request.request_id] = transfer.landing
        operation.requests.add(request.request_id)
        operation.report.requests += 1
        window.sent(size_bytes)
        if lane is not None:
            lane.sent(size_bytes)
        return request

    def transmit(self, requests: Sequence[PacketRequest], now_s: float) -> None:
        """Pack and queue an operation's requests, for chunks still missing."""
        for request in requests:
            request.sent_s = now_s
            link = request.link
            request.turn_bytes = link.passed_bytes + link.in_flight_bytes - request.in_flight_bytes
        operation = requests[0].operation
        transfer = operation.transfer
        if isinstance(transfer, WriteTransfer):
            for request in requests:
                ends = request.satellite, request.request_id
                batch = self._pack_set(transfer, request.indices, *ends, request.moves, now_s)
                self._queue_packets(batch, self.beam(request.satellite), now_s)
            return
        # Reads and questions are single packets: one native call builds them from one prefix.
        rows, beams = [], []
        for request in requests:
            if transfer is not None and not request.body:
                request.body = Selection.of(transfer.info.key, request.indices, transfer.info.servers).pack()
            beam = self.beam(request.satellite)
            rows.append(
                (_wire_address(request.satellite), _GROUND | _wire_address(beam), request.request_id, request.body)
            )
            beams.append(beam)
        first = requests[0]
        prefix = self._prefix(operation.op, first.satellite, first.request_id, first.moves, 0, now_s)
        packets = native.command_packets(prefix, self._take_sequence(len(rows)), rows)
        for packet, beam in zip(packets, beams, strict=True):
            self._queue_packets(single(packet), beam, now_s)

    def _queue_packets(self, batch: SegmentBatch, beam: SatelliteId, now_s: float) -> None:
        self.packets.append((batch if self._authority is None else self._authority.sign(batch, now_s), beam))

    def pack_get(self, satellite: SatelliteId, body: bytes, moves: Moves, now_s: float) -> tuple[int, Buffer]:
        """Return the id and packet of a GET, to register with ``begin``."""
        request_id = self._take_request_id()
        prefix = self._prefix(Op.GET, satellite, request_id, moves, 0, now_s)
        address = _wire_address(satellite)
        row = address, _GROUND | address, request_id, body
        (packet,) = native.command_packets(prefix, self._take_sequence(1), [row])
        return request_id, packet

    def pack_set(
        self, transfer: WriteTransfer, satellite: SatelliteId, moves: Moves, now_s: float
    ) -> tuple[int, SegmentBatch]:
        request_id, indices = self._take_request_id(), range(transfer.info.chunks)
        return request_id, self._pack_set(transfer, indices, satellite, request_id, moves, now_s)

    def _pack_set(
        self,
        transfer: WriteTransfer,
        indices: Sequence[int],
        satellite: SatelliteId,
        request_id: int,
        moves: Moves,
        now_s: float,
    ) -> SegmentBatch:
        refs, payloads = transfer.refs_and_payloads_of(indices)
        sequence = self._take_sequence(len(payloads))
        prefix = self._prefix(Op.SET, satellite, request_id, moves, sequence, now_s)
        return prefixed_batch(prefix, refs, payloads, sequence)

    def _prefix(
        self, op: Op, satellite: SatelliteId, request_id: int, moves: Moves, sequence: int, now_s: float
    ) -> bytes:
        """Return a command's packed headers."""
        outer = command_fields(op, sequence, COMMAND_PREFIX_BYTES + 1)
        ends = _wire_address(satellite), _GROUND | _wire_address(self.beam(satellite)), self._ground, request_id
        journey = HOP_LIMIT, 0, 0, microseconds(now_s) & 0xFFFFFFFF
        return _COMMAND_PREFIX.pack(*outer, VERSION, op, 0, Status.OK, *ends, *journey, *moves, self._credit, 0, 0)

    def _take_request_id(self) -> int:
        request_id = self._next_request_id
        self._next_request_id = request_id % 0xFFFFFFFF + 1
        return request_id

    def _take_sequence(self, count: int) -> int:
        first = self._sequence
        self._sequence = (first + count) & 0x3FFF
        return first

    def take_packets(self) -> list[tuple[SegmentBatch, SatelliteId]]:
        packets, self.packets = self.packets, []
        return packets

    # --- answers ---

    def count_answered(self, request: PacketRequest, size_bytes: int) -> None:
        size_bytes = min(size_bytes, request.in_flight_bytes)
        request.in_flight_bytes -= size_bytes
        request.window.answered(size_bytes)
        if request.lane is not None:
            request.lane.answered(size_bytes)

    def count_given_up(self, request: PacketRequest, size_bytes: int) -> None:
        size_bytes = min(size_bytes, request.in_flight_bytes)
        request.in_flight_bytes -= size_bytes
        request.window.given_up(size_bytes)
        if request.lane is not None:
            request.lane.given_up(size_bytes)

    def retire(self, request: PacketRequest) -> None:
        if self.by_id.pop(request.request_id, None) is not None:
            self.awaited.pop(request.request_id, None)
            request.operation.requests.discard(request.request_id)
            self.count_given_up(request, request.in_flight_bytes)

    def drop(self, operation: Operation) -> None:
        for request_id in operation.requests:
            request = self.by_id.pop(request_id)
            self.awaited.pop(request_id, None)
            if request.in_flight_bytes:
                self.count_given_up(request, request.in_flight_bytes)
        operation.requests.clear()

    def extend(self, request: PacketRequest, now_s: float) -> None:
        self._set_deadline(request, now_s + _timeout_s(request.peer, request.link))

    def hurry(self, request: PacketRequest, now_s: float) -> None:
        """Shorten the deadline: an earlier part of the answer seems lost."""
        self._set_deadline(request, min(request.deadline_s, now_s + self._peers.grace_s(request.satellite, now_s)))
        request.gap_seen = True
        if request.gap_since_s is None:
            request.gap_since_s = now_s

    def completed(self, request: PacketRequest, now_s: float) -> None:
        """Record an answer's last part. A lag without a loss is allowed for next time."""
        if request.gap_since_s is None:
            return
        repeated = request.attempts > 1
        if not repeated or now_s < request.sent_s + request.peer.round_trip.smoothed_s / 2:
            self._peers.overtaken_by(now_s - request.gap_since_s, now_s)
            if repeated:
                request.link.not_lost()

    # --- time ---

    def next_timer_s(self) -> float:
        return self._earliest_deadline_s if self.by_id else math.inf

    def overdue(self, now_s: float) -> list[PacketRequest]:
        if now_s < self._earliest_deadline_s:
            return []
        # The alarm may be early, because deadlines are mostly postponed. Then nothing is overdue, and the next alarm is
        # set.
        overdue = [request for request in self.by_id.values() if request.deadline_s <= now_s]
        later = (request.deadline_s for request in self.by_id.values() if request.deadline_s > now_s)
        self._earliest_deadline_s = min(later, default=math.inf)
        return overdue

    def _set_deadline(self, request: PacketRequest, deadline_s: float) -> None:
        request.deadline_s = deadline_s
        self._earliest_deadline_s = min(self._earliest_deadline_s, deadline_s)

    def hedge(self, request: PacketRequest, now_s: float) -> bool:
        """Ask the next copy for an overdue replicated read, once. Return True if asked."""
        transfer = request.operation.transfer
        if request.hedged or not isinstance(transfer, ReplicatedRead) or request.attempts > 1 or not transfer.hedge:
            return False
        request.hedged = True
        self._set_deadline(request, now_s + _timeout_s(request.peer, request.link))
        return transfer.ask_next(request.indices, request.satellite)

    def repeat_or_give_up(self, request: PacketRequest, moves: Moves, now_s: float) -> Miss | None:
        """Settle or repeat an overdue request. Return why it is given up."""
        transfer = request.operation.transfer
        wanted: list[int] = []
        if transfer is not None:
            completed = transfer.arrived if isinstance(transfer, ReadTransfer) else transfer.acknowledged
            wanted = [index for index in request.indices if not completed[index]]
            if not wanted:  # 1. its chunks arrived by another request
                self.retire(request)
                return None
        satellite = request.satellite
        ignored = transfer is None and self._was_ignored(request)
        if ignored and request.heard_beside >= _UNSUPPORTED_TRIES:
            request.peer.on_unsupported(request.operation.op, now_s)
            return Miss.UNSUPPORTED
        # 2. Silence counts from the last answer to anything: a satellite that answers others is busy, not dead.
        silent_until_s = self._peers.silent_since_s(satellite, request.begun_s) + self._get_allowed_silence_s(
            request.peer
        )
        if now_s >= silent_until_s or now_s >= request.begun_s + _MAX_PARTIAL * self._give_up_s:
            self._suspect_silent_satellites(request.operation, now_s)
            self._peers.suspects.add(satellite, now_s)
            return Miss.TIMEOUT
        if satellite in self._peers.suspects and request.operation.op not in ALWAYS_SENT:
            return Miss.UNREACHABLE  # an earlier request to it has shown it silent meanwhile
        if not ignored and self._is_still_queued(request, now_s):  # 3. its turn has not come
            return None
        stands_in = isinstance(transfer, ReadTransfer) and transfer.in_place_of_silent(wanted)
        if stands_in and request.attempts >= _STAND_IN_TRIES:
            request.peer.quiet = True  # perhaps late, and no suspect: requests that need it wait for it
            return Miss.TIMEOUT
        if request.once:  # 4. or, for a question that is sent once, the last wait
            self._set_deadline(request, silent_until_s)
        else:
            self._retransmit(request, wanted, moves, silent_until_s, now_s)
        return None

    def _retransmit(
        self, request: PacketRequest, wanted: list[int], moves: Moves, silent_until_s: float, now_s: float
    ) -> None:
        """Send a request again for chunks ``wanted``, with back-off to a silent satellite, and shrink its window."""
        round_trip = request.peer.round_trip
        request.link.lost(now_s, round_trip.smoothed_s)
        # Back-off is for dead satellites: a live satellite gets lost packets again at once.
        alive = request.heard_beside or request.peer.heard_s > request.sent_s
        backoff = 1 if alive else min(2 ** (request.attempts - 1), _MAX_BACKOFF)
        timeout_s = round_trip.timeout_s()
        wait_s = min(timeout_s * backoff, max(timeout_s, self._get_allowed_silence_s(request.peer) / _MIN_TRIES))
        self._set_deadline(request, min(now_s + wait_s, silent_until_s))
        request.attempts += 1
        request.gap_seen = False
        request.operation.report.requests += 1
        request.operation.report.retransmitted_chunks += len(wanted)
        if request.operation.transfer is not None:
            request.indices = wanted
            request.body = b""
            request.moves = moves
        self.transmit([request], now_s)

    def _get_allowed_silence_s(self, peer: Peer) -> float:
        return max(self._give_up_s, min(_MIN_TRIES * peer.round_trip.timeout_s(), _MAX_LATE * self._give_up_s))

    def _was_ignored(self, request: PacketRequest) -> bool:
        """Return True if a satellite answered a PING but not this question beside it: perhaps it does not know that
        operation.
        """
        op = request.operation.op
        if not request.peer.may_ignore(op) or request.attempts == 1 or op in ALWAYS_SENT:
            return False
        answered = self._peers.answered_since(request.satellite, request.sent_s)
        request.heard_beside += answered
        return answered

    def _suspect_silent_satellites(self, operation: Operation, now_s: float) -> None:
        for request in map(self.by_id.__getitem__, operation.requests):
            since_s = self._peers.silent_since_s(request.satellite, request.begun_s)
            if now_s >= since_s + _NEARLY_SILENT * self._get_allowed_silence_s(request.peer):
                self._peers.suspects.add(request.satellite, now_s)

    def _is_still_queued(self, request: PacketRequest, now_s: float) -> bool:
        """Return True if the satellite still answers earlier requests; the timeout then starts at its last answer."""
        satellite = request.satellite
        if request.gap_seen or self._peers.overtaken(satellite, request.sent_s):
            return False
        heard_s = self._peers.silent_since_s(satellite, request.sent_s)
        link = request.link
        if link.passed_bytes < request.turn_bytes and link.rate_bytes_s < math.inf:
            # Links are first in, first out: while answers to earlier requests still arrive, its turn has not come.
            heard_s = max(heard_s, link.moved_s)
        self._set_deadline(request, heard_s + _timeout_s(request.peer, link))
        return heard_s > request.sent_s and request.deadline_s > now_s


def _timeout_s(peer: Peer, link: Window) -> float:
    """Return the round trip, plus the time of the bytes in flight at the link's rate."""
    return peer.round_trip.timeout_s() + link.in_flight_bytes / min(link.rate_bytes_s, _MODEST_BYTES_PER_S)


def _wire_address(satellite: SatelliteId) -> int:
    return satellite.plane << 12 | satellite.slot
