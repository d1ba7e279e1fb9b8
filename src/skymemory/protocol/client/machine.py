"""State machine of the client: reads, writes and questions to satellites. It does no I/O and reads no clock.

==============================  ================================================================
``get``, ``put``, ``ask``       begin an operation and return its number
``bursts_to_send``              batches, each with the satellite whose beam it takes
``receive_runs``                packets have arrived
``receive_placed``              DATA that the transport has placed in buffers
``next_timer_s``                when to call ``handle_timer`` at the latest
``handle_timer``                retransmit, ask other satellites, or give up
``next_event``                  an operation has ended
==============================  ================================================================
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import NamedTuple

from skymemory import native
from skymemory.constellation.links import LinkClass, Links
from skymemory.constellation.torus import SatelliteId
from skymemory.errors import MalformedPacket
from skymemory.metrics import Counters
from skymemory.native import Ack, Landing, Rows, Run, Tally
from skymemory.placement.locate import Moves
from skymemory.protocol import messages
from skymemory.protocol.auth import FLAG_AUTHENTICATED, Authority, ClientGate, answer_number
from skymemory.protocol.client.gateway import Access, Gateway, access_named
from skymemory.protocol.client.liveness import UNLIMITED, FailureDetector, Peers, Probes
from skymemory.protocol.client.requests import ALWAYS_SENT, STALE_S, InFlight, Operation, PacketRequest
from skymemory.protocol.client.transfer import (
    CHUNK_OVERHEAD_BYTES,
    Absence,
    Burst,
    ReadTransfer,
    ReplicatedRead,
    ReplicatedWrite,
    StandIns,
    Striping,
    TransferReport,
    ValueInfo,
    WaitingBursts,
    Where,
    WriteKeepalive,
    WriteTransfer,
    can_hold,
    landing_of,
    verified,
)
from skymemory.protocol.clock import FollowedClock, MoveClock, SkyMap
from skymemory.protocol.congestion import link_window_bytes
from skymemory.protocol.messages import Capabilities, Dead, Selection, pack_steps, unpack_dead
from skymemory.protocol.wire import (
    CREDIT_UNIT_BYTES,
    FLAG_SETTLED,
    Buffer,
    Op,
    SegmentBatch,
    SkyHeader,
    Status,
    made_at_s,
    parse_packet,
    since_s,
)
from skymemory.reasons import Miss

Transfer = ReadTransfer | WriteTransfer
_SOUND = b"\0"
_WINDOW_BYTES, _CREDIT_BYTES = 3 << 20, 1 << 20
_ARRIVES_WITHIN_S = 1.0
_MIN_BURST_CHUNKS = 10
_MAX_GONE = 1 << 16
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
class ClientConfig:
    """Configuration of a client, the ground host number ``ground``. ``window_bytes`` may be in flight to it;
    ``credit_bytes`` is the assumed receive buffer of a satellite; 0: the transport's limit.
    """

    ground: int
    access: Access = "ideal"
    window_bytes: int = 0
    credit_bytes: int = 0
    expected_rtt_s: float = 0.0
    give_up_s: float = 0.8
    """Silence after which a satellite is considered dead."""
    read_burst_chunks: int = 64
    hedge_round_trips: float = 1.5
    """Round trips after which the next copy is also asked; 0: all at once."""
    authority: Authority | None = field(default=None, repr=False)
    links: Links | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "access", access_named(self.access))

    def with_windows(self, window_bytes: int, credit_bytes: int) -> ClientConfig:
        return replace(
            self, window_bytes=self.window_bytes or window_bytes, credit_bytes=self.credit_bytes or credit_bytes
        )

    def beam_limits(self, kind: LinkClass) -> tuple[float, int]:
        """Return the bytes/s of a beam's slowest link, and the most bytes in flight."""
        if self.links is None:
            return UNLIMITED
        beam, isl = self.links.bytes_per_s(kind), self.links.bytes_per_s("isl")
        # A satellite has four links to others, and a host on board has no beam.
        if self.access == "onboard":
            beam = 4 * isl
        elif self.access == "gateway":
            beam = min(beam, 4 * isl)
        if beam == math.inf:
            return UNLIMITED
        return beam, link_window_bytes(beam, self.expected_rtt_s, self.links.buffer_bytes)


@dataclass(frozen=True, slots=True)
class Finished:
    """End of an operation (``get``, ``put`` or ``ask``). A read value's bytes are in the ``out`` that ``get`` got."""

    number: int  # as ``get``, ``put`` or ``ask`` returned it; 0 for the fast path
    ok: bool  # False also if a value is not stored; ``report.failure`` is the reason
    report: TransferReport
    body: bytes = b""  # the satellite's answer to ``ask``; empty for a transfer or a failure
    info: ValueInfo | None = None  # description of the value read or written; None for ``ask``


_PLAIN_CHUNKS = 128
_PLAIN_ROUND_TRIP_S = 0.0005


class PlainRead(NamedTuple):
    """GET of the fast path: the transport sends ``packet`` and receives into ``landing``, the reader's memory.
    ``moves``: the box's.
    """

    info: ValueInfo
    satellite: SatelliteId
    request_id: int
    packet: Buffer
    landing: Landing
    moves: Moves
    begun_s: float


class PlainWrite(NamedTuple):
    """SETs of the fast path, which the transport sends itself."""

    transfer: WriteTransfer
    satellite: SatelliteId
    request_id: int
    batch: SegmentBatch
    moves: Moves
    begun_s: float


@lru_cache(maxsize=256)
def _steps_of_all(chunks: int, servers: int) -> bytes:
    return pack_steps(range(0, chunks, servers))


def _continues_despite_other_version(request: PacketRequest, transfer: ReadTransfer) -> bool:
    if not isinstance(transfer, ReplicatedRead):
        return False
    return not transfer.missing or transfer.redirect(request.indices, request.satellite, Miss.OTHER_VERSION)


# The life of a read:
#
#   get → _waiting_reads → bursts_to_send → _send_gets     GETs, as far as the window of incoming data admits
#   receive_placed                                         DATA: chunks are in place; the last chunk ends the read
#   _on_missing → transfer.absent                          MISS: ask where else the chunks may be, or end it
#   handle_timer → repeat_or_give_up → _on_request_failed  silence: ask stand-ins or copies, or end it
#   _end_operation → next_event
#
# A write is the same with ``_waiting_writes``, ``_send_sets`` (SETs, as far as each beam's window admits) and
# ``_on_stored`` (ACK). A question has one request and no transfer; its answer ends it. Invariant: an operation is in
# ``_operations`` from ``_register_operation`` to ``_end_operation`` or ``cancel``. During that time, either a request
# of it is in flight or it is in ``_waiting_reads`` or ``_waiting_writes``.


class ClientMachine:
    def __init__(self, config: ClientConfig, sky: SkyMap, clock: MoveClock, first_request_id: int = 1) -> None:
        self.config = config = config.with_windows(_WINDOW_BYTES, _CREDIT_BYTES)
        self.counters = Counters()
        self._sky = sky
        self._clock = FollowedClock(clock, self.counters)
        self._gateway = None if config.access == "ideal" else Gateway(config.access, sky, self.counters)
        ways = config.beam_limits("up"), config.beam_limits("down")
        self._peers = Peers(config.window_bytes, config.credit_bytes, config.expected_rtt_s, *ways)
        self._beam_down_bytes = ways[1][1]
        self._handover_gap_s = config.links.handover_gap_s if config.links is not None else 0.0
        self._sending_paused_until_s = -math.inf
        self._detector = FailureDetector(sky, self._peers, self._gateway, self.counters)
        self.breaker = self._detector.breaker
        self._in_flight = InFlight(
            self._peers, self._gateway, config.give_up_s, config.ground, config.authority, first_request_id
        )
        self._gate: ClientGate | None = None
        """Gate for answers; None: answers need no MACs."""
        if config.authority is not None and config.authority.proves_answers:
            self._gate = ClientGate(config.authority, self.counters)
        self._keepalive = WriteKeepalive()
        self._operations: dict[int, Operation] = {}
        self._waiting_writes: deque[Operation] = deque()
        self._waiting_reads: deque[Operation] = deque()
        self._probe_operations: set[int] = set()
        self._pings_beside: dict[SatelliteId, int] = {}
        self._dead_values: deque[Dead] = deque(maxlen=_MAX_GONE)
        self._events: deque[Finished] = deque()
        self._next_number = 1
        self.revision = 0
        """Count of calls that may cause something to be sent."""

    # --- operations ---

    def moves(self, now_s: float) -> Moves:
        return self._clock.moves(now_s)

    def moves_at(self, time_s: float) -> Moves:
        return self._clock.at(time_s)

    def moves_before(self, now_s: float, most: int) -> list[Moves]:
        return self._clock.moves_before(now_s, most)

    def get(self, info: ValueInfo, out: memoryview | Rows, now_s: float, replicas: int = 1) -> int:
        """Begin to read a value into ``out``: writable and at least as long, or rows of exactly the value.

        Raises:
            InvalidInput: ``out`` does not hold the value, or ``info`` is impossible.
        """
        # At most a quarter of the window for each satellite, so that several answer at the same time.
        burst_bytes = self._peers.inbound.size_bytes // 4
        if self._beam_down_bytes:
            burst_bytes = min(burst_bytes, self._beam_down_bytes // 4)
        burst_chunks = max(1, min(self.config.read_burst_chunks, burst_bytes // max(1, info.chunk_bytes)))
        copies = self._get_copies(info.strategy, info.servers, info.set_moves, replicas)
        moves = self._clock.to_read_at(info.set_moves, now_s)
        if replicas > 1:
            hedged = ReplicatedRead(info, out, copies, moves, burst_chunks, self.config.hedge_round_trips)
            return self._begin_transfer(hedged, now_s)
        return self._begin_transfer(ReadTransfer(info, out, copies[0], moves, burst_chunks), now_s)

    # Most values are small and near. If nothing else is under way and no satellite is suspected, their reads and writes
    # need no operation: the transport sends what ``plain_get`` or ``plain_put`` has packed, receives what arrives at
    # once, and passes it to ``end_plain_get`` or ``end_plain_put``. If that does not complete it, an operation takes
    # over.

    def plain_get(self, info: ValueInfo, out: memoryview | Rows, now_s: float) -> PlainRead | None:
        """Pack a read for the fast path: on a single near satellite, with nothing else under way. None: impossible."""
        one_packet = (info.servers == 1 or info.chunks == 1) and info.chunks <= _PLAIN_CHUNKS
        if not one_packet or not can_hold(out, info.value_bytes) or not self._may_use_plain_path():
            return None
        moves = self._clock.to_read_at(info.set_moves, now_s)
        satellite = self._sky.servers_at(info.strategy, info.servers, info.set_moves, moves)[0]
        if not self._is_near(satellite, now_s):
            return None
        info.check()
        body = info.key + _steps_of_all(info.chunks, info.servers)
        request_id, packet = self._in_flight.pack_get(satellite, body, self.moves(now_s), now_s)
        return PlainRead(info, satellite, request_id, packet, landing_of(info, out), moves, now_s)

    def end_plain_get(self, read: PlainRead, tallies: Sequence[Tally], now_s: float) -> Finished | int:
        """Return the end of a plain read, or its operation's number."""
        info = read.info
        if len(tallies) == 1:
            request_id, echo_us, _, placed_chunks, duplicates, corrupt, foreign = tallies[0]
            complete = request_id == read.request_id and placed_chunks == info.chunks
            if complete and not (duplicates or corrupt or foreign) and verified(info, read.landing):
                self._peers.peer(read.satellite).on_answer(since_s(echo_us, now_s), now_s)
                return self._end_plain(TransferReport(info.value_bytes, info.chunks, 1), info, read.begun_s, now_s)
        copies = self._get_copies(info.strategy, info.servers, info.set_moves, 1)
        transfer = ReadTransfer(info, read.landing[5], copies[0], read.moves, info.chunks)
        transfer.on_all_requested(read.landing)
        number = self._continue_as_operation(transfer, read)
        self.receive_placed(tallies, now_s)
        return number

    def plain_put(self, key: bytes, value: Buffer, striping: Striping, now_s: float) -> PlainWrite | None:
        """Pack a write for the fast path, as ``plain_get``."""
        size_bytes = memoryview(value).nbytes
        chunks, (_, strategy, servers, _) = striping.chunks_of(size_bytes), striping
        if not (servers == 1 or chunks == 1) or not 0 < chunks <= _PLAIN_CHUNKS or not self._may_use_plain_path():
            return None
        moves = self.moves(now_s)
        satellite = self._sky.servers_at(strategy, servers, moves, moves)[0]
        fits = size_bytes + chunks * CHUNK_OVERHEAD_BYTES <= self._peers.outbound(satellite).open_bytes
        if not fits or not self._is_near(satellite, now_s):
            return None
        copies = self._get_copies(strategy, servers, moves, 1)
        transfer = WriteTransfer.of(key, value, striping, moves, copies[0])
        request_id, batch = self._in_flight.pack_set(transfer, satellite, moves, now_s)
        return PlainWrite(transfer, satellite, request_id, batch, moves, now_s)

    def end_plain_put(self, write: PlainWrite, runs: list[Run], now_s: float) -> Finished | int | None:
        """Return the end of a plain write, or its operation's number; None if more ACKs are expected."""
        transfer = write.transfer
        acks = [native.open_ack(run) if len(run) <= segment_bytes else None for run, segment_bytes in runs]
        if acks and all(ack is not None and self._acknowledges(write, ack) for ack in acks):
            for ack in filter(None, acks):
                _, _, echo_us, slot_moves, plane_moves, credit, _, first, stride, count = ack
                round_trip_s = since_s(echo_us, now_s)
                self._peers.peer(write.satellite).on_answer(round_trip_s, now_s)
                self._clock.report(write.satellite, (slot_moves, plane_moves), round_trip_s or 0.0, now_s)
                self._peers.outbound(write.satellite).offer(credit * CREDIT_UNIT_BYTES)
                transfer.acknowledge(range(first, first + stride * count, stride))
            if transfer.missing:
                return None
            return self._end_plain(transfer.report, transfer.info, write.begun_s, now_s)
        transfer.pending.clear()
        number = self._continue_as_operation(transfer, write)
        self._keepalive.on_write_begin(number, transfer, write.begun_s)
        self.receive_runs(runs, now_s)
        return number

    def _acknowledges(self, write: PlainWrite, ack: Ack) -> bool:
        request_id, ground, _, _, _, _, key, first, stride, count = ack
        in_value = first + stride * (count - 1) < write.transfer.info.chunks
        matches = key == write.transfer.info.key and ground == self.config.ground
        return matches and in_value and request_id == write.request_id

    def _may_use_plain_path(self) -> bool:
        busy = self._operations or self._in_flight.packets or self._gateway is not None
        unsafe = self.config.authority is not None or not self.breaker.closed or self._peers.suspects
        return not busy and not unsafe

    def _is_near(self, satellite: SatelliteId, now_s: float) -> bool:
        peer = self._peers.peer(satellite)
        return peer.round_trip.latest_s <= _PLAIN_ROUND_TRIP_S and peer.heard_s + STALE_S >= now_s

    def _end_plain(self, report: TransferReport, info: ValueInfo, begun_s: float, now_s: float) -> Finished:
        self._detector.succeeded(now_s)
        report.requests, report.seconds = 1, now_s - begun_s
        return Finished(0, True, report, b"", info)

    def _continue_as_operation(self, transfer: Transfer, plain: PlainRead | PlainWrite) -> int:
        """Return the number of an operation that continues a plain request under its id."""
        operation, indices = self._register_operation(transfer, plain.begun_s), range(transfer.info.chunks)
        satellite, moves, begun_s = plain.satellite, plain.moves, plain.begun_s
        request = self._in_flight.begin(operation, satellite, indices, moves, begun_s, plain.request_id)
        request.sent_s = begun_s
        return operation.number

    def put(
        self, key: bytes, value: Buffer, striping: Striping, now_s: float, set_moves: Moves | None = None
    ) -> tuple[int, ValueInfo]:
        """Begin to write a value; the caller keeps ``value`` unchanged until the end.

        ``set_moves`` places it as if written after these moves. A box with dead satellites is displaced.

        Raises:
            ValueTooLarge: a chunk that no datagram carries, or a value beyond the wire's 4 GiB.
        """
        moves = self.moves(now_s) if set_moves is None else set_moves
        if self._peers.suspects and (chunks := striping.chunks_of(memoryview(value).nbytes)):
            _, strategy, servers, replicas = striping
            striping = striping._replace(strategy=self._around_suspects(strategy, servers, moves, chunks, replicas))
        copies = self._get_copies(striping.strategy, striping.servers, moves, striping.replicas)
        transfer = WriteTransfer.of(key, value, striping, moves, copies[0])
        if striping.replicas > 1:
            transfer = ReplicatedWrite.of_copies(transfer, copies, moves)
        if self._gateway is not None and self._peers.up_bytes_s < math.inf:
            self._update_gateway(now_s)
            # The shared beam is a queue: the burst with the longest flight leaves first, and the others follow
            # meanwhile.
            transfer.pending = WaitingBursts(sorted(transfer.pending, key=self._get_flight_s, reverse=True))
        return self._begin_transfer(transfer, now_s), transfer.info

    def _around_suspects(self, strategy: int, servers: int, moves: Moves, chunks: int, replicas: int = 1) -> int:
        return self._sky.displacement_around(strategy, servers, moves, chunks, replicas, self._peers.suspects)

    def boxes_around_suspects(self, strategy: int, servers: int, now_s: float) -> list[SatelliteId]:
        """Return the satellites of the boxes displaced around suspects, to which values are written now."""
        if not self._peers.suspects:
            return []
        moves = self.moves(now_s)
        boxes = (
            self._sky.placement(self._around_suspects(strategy, number, moves, number), number).box_satellites(moves)
            for number in {1, servers}
        )
        return [satellite for box in boxes for satellite in box]

    def ask(self, op: Op, body: bytes, satellite: SatelliteId, now_s: float, *, once: bool = False) -> int:
        """Begin a question ``op`` to a satellite. Return its number. With ``once``, it is not retransmitted."""
        operation = self._register_operation(op, now_s)
        if op not in ALWAYS_SENT and self._detector.refuses(satellite):
            self._end_operation(operation, Miss.UNREACHABLE, now_s)
            return operation.number
        if op not in ALWAYS_SENT and self._peers.peer(satellite).lacks(op, now_s):
            self._end_operation(operation, Miss.UNSUPPORTED, now_s)
            return operation.number
        self._update_gateway(now_s)
        if operation.number not in self._operations:
            return operation.number
        request = self._in_flight.begin(operation, satellite, [], self.moves(now_s), now_s)
        request.body = body
        if once:
            request.once, request.deadline_s = True, now_s + self.config.give_up_s
        self._in_flight.transmit([request], now_s)
        return operation.number

    def cancel(self, number: int) -> None:
        operation = self._operations.pop(number, None)
        self.revision += 1
        if operation is not None:
            self._keepalive.on_write_end(number, 0.0)
            self._in_flight.drop(operation)
        elif self._events:
            self._events = deque(event for event in self._events if event.number != number)

    def next_event(self) -> Finished | None:
        return self._events.popleft() if self._events else None

    @property
    def any_gone(self) -> bool:
        return bool(self._dead_values)

    def take_gone(self) -> list[Dead]:
        dead_values = list(self._dead_values)
        self._dead_values.clear()
        return dead_values

    @property
    def idle(self) -> bool:
        return self._operations.keys() <= self._probe_operations

    def _register_operation(self, work: Transfer | Op, now_s: float) -> Operation:
        if isinstance(work, Op):
            operation = Operation(self._next_number, work, None, now_s, TransferReport(satellites=1))
        else:
            op = Op.GET if isinstance(work, ReadTransfer) else Op.SET
            operation = Operation(self._next_number, op, work, now_s, work.report)
        self._next_number += 1
        self.revision += 1
        self._operations[operation.number] = operation
        return operation

    def _begin_transfer(self, transfer: Transfer, now_s: float) -> int:
        operation = self._register_operation(transfer, now_s)
        self._enqueue(operation)
        return operation.number

    def _enqueue(self, operation: Operation) -> None:
        """Let an operation send its pending bursts when windows admit; small reads overtake large reads."""
        if not operation.queued:
            operation.queued = True
            if not isinstance(operation.transfer, ReadTransfer):
                self._waiting_writes.append(operation)
            elif len(operation.transfer.pending) > 1:
                self._waiting_reads.append(operation)
            else:  # soon done: it does not wait for the requests of large values
                self._waiting_reads.appendleft(operation)

    def _end_operation(self, operation: Operation, failure: Miss | None, now_s: float, body: bytes = b"") -> None:
        """End an operation and queue its event; probes have no event. ``failure`` None is success, which closes the
        breaker.
        """
        if self._operations.pop(operation.number, None) is None:
            return
        if self._keepalive.on_write_end(operation.number, now_s):  # satellites may have dropped its first chunks
            failure = failure or Miss.INTERRUPTED
        self._in_flight.drop(operation)
        is_probe = operation.number in self._probe_operations
        self._probe_operations.discard(operation.number)
        if not failure:
            self._detector.succeeded(now_s)
        elif failure is Miss.TIMEOUT and not is_probe:
            self._detector.timed_out(operation.started_s, now_s)
        if is_probe:
            return
        operation.report.seconds, operation.report.failure = now_s - operation.started_s, failure
        info = operation.transfer.info if operation.transfer is not None else None
        if failure:
            self.counters.add("operations_failed", label=failure)
        self._events.append(Finished(operation.number, not failure, operation.report, body, info))

    # --- where chunks are ---

    def _update_gateway(self, now_s: float) -> None:
        """Choose the gateway again. Sending pauses after a change; with no satellite in sight, all operations fail."""
        if self._gateway is not None and self._gateway.update(self._clock, now_s):
            self._peers.rerouted()
            if self._handover_gap_s:
                self._sending_paused_until_s = now_s + self._handover_gap_s
        if self._gateway is not None and self._gateway.dark:
            # It may be minutes until a satellite rises: for a cache, a miss now is better than a value then.
            for operation in list(self._operations.values()):
                self._end_operation(operation, Miss.OUT_OF_SIGHT, now_s)
            self._in_flight.packets.clear()

    def _get_flight_s(self, burst: Burst) -> float:
        return self._sky.links_s(self._in_flight.beam(burst.satellite), burst.satellite)

    def _get_copies(self, strategy: int, servers: int, set_moves: Moves, replicas: int) -> list[Where]:
        def copy(replica: int) -> Where:
            return lambda moves: self._sky.servers_at(strategy, servers, set_moves, moves, replica)

        return [copy(replica) for replica in range(replicas)]

    def everywhere(self, info: ValueInfo, now_s: float) -> list[Moves]:
        return self._clock.everywhere(now_s, info.set_moves, self._sky.placement(info.strategy, info.servers))

    def _get_stand_ins(self, transfer: ReadTransfer, now_s: float) -> StandIns:
        return StandIns(partial(self.everywhere, transfer.info, now_s), self._peers.quiet)

    def _get_places_of_write(self, transfer: WriteTransfer, now_s: float) -> set[SatelliteId]:
        """Return satellites that may store chunks of this write, now or after a move meanwhile."""
        info, replicas = transfer.info, len(transfer.acknowledged) // transfer.info.chunks
        return {
            satellite
            for moves in {self.moves(now_s), self.moves_at(now_s + _ARRIVES_WITHIN_S)}
            for copy in self._get_copies(info.strategy, info.servers, info.set_moves, replicas)
            for satellite in copy(moves)[: info.chunks]
        }

    # --- packets to send ---

    @property
    def wants_to_send(self) -> bool:
        return bool(self._waiting_writes) or bool(self._waiting_reads) or bool(self._in_flight.packets)

    def datagrams_to_send(self, now_s: float) -> list[tuple[SegmentBatch, SatelliteId]]:
        return [batch for burst in self.bursts_to_send(now_s) for batch in burst]

    def bursts_to_send(self, now_s: float) -> Iterator[list[tuple[SegmentBatch, SatelliteId]]]:
        """Yield batches with their beams, as far as the windows admit. Exhaust the iterator."""
        in_flight = self._in_flight
        self._update_gateway(now_s)
        if now_s < self._sending_paused_until_s:
            return
        self._sending_paused_until_s = -math.inf
        if in_flight.packets:  # questions and retransmissions first
            yield in_flight.take_packets()
        self._send_reads(now_s)
        for _ in range(len(self._waiting_writes)):  # each once: what the windows stop is queued again
            operation = self._waiting_writes.popleft()
            operation.queued = False
            transfer = operation.transfer
            if operation.number not in self._operations or not isinstance(transfer, WriteTransfer):
                continue
            if self._detector.refuses(None):
                self._end_operation(operation, Miss.UNREACHABLE, now_s)
                continue
            self._keepalive.on_write_begin(operation.number, transfer, now_s)
            for _ in self._send_sets(operation, transfer, now_s):
                if in_flight.packets:
                    yield in_flight.take_packets()
            if operation.number in self._operations and transfer.pending:
                self._enqueue(operation)
        if in_flight.packets:
            yield in_flight.take_packets()

    def _send_reads(self, now_s: float) -> None:
        """Send GETs of waiting reads in order, until a window stops a read."""
        while self._waiting_reads:
            operation = self._waiting_reads[0]
            transfer = operation.transfer
            if operation.number in self._operations and isinstance(transfer, ReadTransfer):
                if self._detector.refuses(None):
                    self._end_operation(operation, Miss.UNREACHABLE, now_s)
                else:
                    self._send_gets(operation, transfer, now_s)
                if operation.number in self._operations and transfer.pending:
                    return
            self._waiting_reads.popleft()
            operation.queued = False

    def _send_gets(self, operation: Operation, transfer: ReadTransfer, now_s: float) -> None:
        """Send GETs of pending bursts, as far as windows admit; chunks of suspects are read elsewhere, or the read
        fails.
        """
        moves, suspects = self.moves(now_s), self._peers.suspects
        # Only when a suspect was added since the last check; a replicated read asks another copy below.
        if transfer.checked_suspects != suspects.added and not isinstance(transfer, ReplicatedRead):
            silent = len(suspects) > 0 and any(
                burst.satellite in suspects and not transfer.is_one_of_many(burst.indices) for burst in transfer.pending
            )
            if silent and not transfer.avoid(suspects, self._get_stand_ins(transfer, now_s)):
                self._end_operation(operation, Miss.UNREACHABLE, now_s)
                return
            transfer.checked_suspects = suspects.added
        size_each = transfer.info.chunk_bytes + CHUNK_OVERHEAD_BYTES
        key, window = transfer.info.key, self._peers.inbound
        requests = []
        while transfer.pending:
            satellite, indices, steps = transfer.pending[0]
            size_bytes = len(indices) * size_each
            if satellite in suspects:
                transfer.pending.popleft()
                if transfer.redirect(indices, satellite, Miss.UNREACHABLE, self._get_stand_ins(transfer, now_s)):
                    continue
                self._end_operation(operation, Miss.UNREACHABLE, now_s)
                return
            lane = self._in_flight.lane(satellite)
            if not window.admits(size_bytes) or (lane is not None and not lane.admits(size_bytes)):
                break
            transfer.pending.popleft()
            request = self._in_flight.begin(operation, satellite, indices, moves, now_s)
            request.body = key + steps if steps else b""
            requests.append(request)
        if requests:
            self._in_flight.transmit(requests, now_s)

    def _send_sets(self, operation: Operation, transfer: WriteTransfer, now_s: float) -> Iterator[None]:
        """Send SETs of pending bursts, as far as each beam's window admits; yield after each."""
        pending, suspects, peers, gateway = transfer.pending, self._peers.suspects, self._peers, self._gateway
        one_beam = gateway is not None and not gateway.direct
        moves = self.moves(now_s)
        size_each = transfer.info.chunk_bytes + CHUNK_OVERHEAD_BYTES
        # Behind a gateway, another beam may carry them now.
        pending.resume(gateway is not None or transfer.checked_suspects != suspects.added)
        transfer.checked_suspects = suspects.added
        while (burst := pending.first()) is not None:
            satellite, indices = burst.satellite, burst.indices
            if suspects and satellite in suspects:
                if not transfer.waive(indices):
                    self._end_operation(operation, Miss.UNREACHABLE, now_s)
                    return
                if transfer.missing == 0:
                    self._end_operation(operation, None, now_s)
                    return
                pending.drop(len(indices))
                continue
            window = peers.outbound(self._in_flight.beam(satellite))
            fits = min(len(indices), (window.size_bytes - window.in_flight_bytes) // size_each)
            # Prefer to wait over sending many small bursts; but with nothing in flight, no answer would open the
            # window.
            least = min(len(indices), _MIN_BURST_CHUNKS)
            if window.rate_bytes_s < math.inf:  # a slow link holds few: keep it busy
                least = min(least, max(1, window.limit_bytes // (4 * size_each)))
            if fits < least:
                if window.in_flight_bytes:
                    pending.put_aside(window)
                    if one_beam:  # no other beam is left to send to
                        break
                    continue
                fits = max(1, fits)
            pending.drop(fits)
            request = self._in_flight.begin(operation, satellite, indices[:fits], moves, now_s)
            self._in_flight.transmit([request], now_s)
            yield

    # --- packets received ---

    def receive_batch(self, data: Buffer, segment_bytes: int, now_s: float) -> None:
        self.receive_runs([(memoryview(data), segment_bytes)], now_s)

    def receive_runs(self, runs: list[Run], now_s: float) -> None:
        """Process received packets; DATA of awaited reads is copied to its place natively."""
        if self._gate is not None:
            runs = self._gate.admit(runs)
        at = 0
        while at < len(runs):
            tallies = native.place_runs(runs, at, self._in_flight.awaited)
            self.receive_placed(tallies, now_s)
            at += sum(tally[2] for tally in tallies)
            if at < len(runs):
                self._receive_packets(*runs[at], now_s)
                at += 1

    @property
    def awaited(self) -> dict[int, Landing]:
        return self._in_flight.awaited if self._gate is None or self._gate.admits_plain_data else {}

    def receive_placed(self, tallies: Sequence[Tally], now_s: float) -> None:
        """Account for DATA already copied to the readers' buffers; end reads that are complete or failed."""
        # All runs are counted before any operation ends, because its end drops its requests.
        awaited_runs: list[tuple[PacketRequest, ReadTransfer, Tally]] = []
        for tally in tallies:
            request = self._in_flight.by_id.get(tally[0])
            if request is not None and isinstance(transfer := request.operation.transfer, ReadTransfer):
                awaited_runs.append((request, transfer, tally))
                transfer.on_chunks_placed(*tally[3:6])
                if transfer.pending:
                    self._enqueue(request.operation)
        endings: dict[Operation, Miss | None] = {}
        for request, transfer, (_, echo_us, _, placed_chunks, duplicates, corrupt, foreign) in awaited_runs:
            size_each = transfer.info.chunk_bytes + CHUNK_OVERHEAD_BYTES
            self._in_flight.count_answered(request, (placed_chunks + duplicates) * size_each)
            if request.gap_since_s is not None and transfer.has(request.indices):
                self._in_flight.completed(request, now_s)
            proves_life = placed_chunks > 0 or self._gate is None
            if corrupt:
                self.counters.add("packets_malformed", corrupt)
            elif proves_life:
                self._record_answer(request, echo_us, now_s)
            if foreign and not _continues_despite_other_version(request, transfer):
                endings[request.operation] = Miss.OTHER_VERSION
            elif foreign and transfer.missing:
                self._in_flight.retire(request)
                self._enqueue(request.operation)
            elif transfer.missing and not proves_life:
                continue
            elif transfer.missing:
                if not transfer.arrived[request.indices[-1]]:
                    self._in_flight.extend(request, now_s)
                elif transfer.has(request.indices):
                    self._in_flight.retire(request)
                else:
                    # Satellites answer in order: what is missing before the last chunk was lost or overtaken.
                    self._in_flight.hurry(request, now_s)
            elif request.operation not in endings:
                endings[request.operation] = None if verified(transfer.info, transfer.landing) else Miss.CORRUPT
        for operation, failure in endings.items():
            self._end_operation(operation, failure, now_s)

    def _receive_packets(self, view: memoryview, segment_bytes: int, now_s: float) -> None:
        """Process mixed packets, joined by receive offload."""
        if segment_bytes <= 0 or not len(view):
            self.counters.add("packets_malformed")
            return
        awaited = self._in_flight.awaited
        for at in range(0, len(view), segment_bytes):
            packet = view[at : at + segment_bytes]
            # By frequency: DATA for an awaited read, plain ACKs, then everything else.
            if len(view) > segment_bytes and (tallies := native.place_runs([(packet, len(packet))], 0, awaited)):
                self.receive_placed(tallies, now_s)
            elif (ack := native.open_ack(packet)) is not None:
                self._receive_ack(ack, packet, now_s)
            elif native.verify_segments(packet, len(packet)) != _SOUND:
                self.counters.add("packets_malformed")
            else:
                try:
                    self._receive_control(packet, now_s)
                except MalformedPacket:
                    self.counters.add("packets_malformed")

    def _receive_ack(self, ack: Ack, packet: memoryview, now_s: float) -> None:
        request_id, ground, echo_us, slot_moves, plane_moves, credit, key, first, stride, count = ack
        request = self._in_flight.by_id.get(request_id)
        if request is None or ground != self.config.ground:
            self.counters.add("packets_unexpected")
            return
        if self._is_latest_answer(request, packet):
            round_trip_s = self._record_answer(request, echo_us, now_s)
            self._clock.report(request.satellite, (slot_moves, plane_moves), round_trip_s, now_s)
        transfer = request.operation.transfer
        if not isinstance(transfer, WriteTransfer):
            self.counters.add("packets_unexpected")
        elif key == transfer.info.key:
            self._on_stored(request, transfer, range(first, first + stride * count, stride), credit, now_s)

    def _receive_control(self, view: memoryview, now_s: float) -> None:
        """Process any other packet whose checksums are right."""
        packet = parse_packet(view)
        header = packet.header
        speaker = SatelliteId(header.source.plane, header.source.slot)
        if header.op is Op.GONE and header.ground == self.config.ground:
            if self._gate is None or self._peers.peer(speaker).is_new_notice(answer_number(view)):
                self._dead_values.extend(unpack_dead(packet.body))
            return
        if header.flags & FLAG_AUTHENTICATED:  # a gate would have removed the MAC
            raise MalformedPacket("an answer with a MAC, from satellites of which none is expected")
        request = self._in_flight.by_id.get(header.request_id)
        proves_nothing = self._gate is not None and header.op is Op.DATA
        if request is None or header.ground != self.config.ground:
            self.counters.add("packets_unexpected")
            if header.ground == self.config.ground and not proves_nothing:
                number = None if self._gate is None else answer_number(view)
                self._peers.heard_late(speaker, since_s(header.timestamp_us, now_s), now_s, number)
            return
        if proves_nothing:
            self._receive_answer(request, header, packet.body, now_s)
            return
        if speaker == request.satellite:
            if not self._is_latest_answer(request, view):  # overtaken by a later answer, or a replay
                self._receive_overtaken_answer(request, header, packet.body, now_s)
                return
            round_trip_s = self._record_answer(request, header.timestamp_us, now_s)
        elif self._gate is not None and not self._may_speak_for(speaker, request, header.status):
            self.counters.add("packets_unexpected")
            return
        else:  # a satellite on the path, which could not pass it on
            round_trip_s = since_s(header.timestamp_us, now_s) or 0.0
            self._peers.peer(speaker).on_answer(None, now_s)
        self._clock.report(speaker, (header.slot_moves, header.plane_moves), round_trip_s, now_s)
        if header.op is Op.PONG or header.status is Status.REFUSED:
            request.operation.report.clock_ahead_s = made_at_s(view, now_s) - (now_s - round_trip_s / 2)
        if header.op is Op.PONG:
            request.peer.on_capabilities(Capabilities.of_figures(messages.unpack_housekeeping(packet.body)), now_s)
        self._receive_answer(request, header, packet.body, now_s)

    def _receive_answer(self, request: PacketRequest, header: SkyHeader, body: memoryview, now_s: float) -> None:
        operation, transfer = request.operation, request.operation.transfer
        if header.op is Op.UNREACHABLE and header.status is Status.REFUSED:
            self._end_operation(operation, Miss.REFUSED, now_s)
        elif header.op is Op.UNREACHABLE:
            # Its neighbours know that it is dead before its silence is long enough.
            if header.status is Status.NO_ROUTE and request.peer.heard_s < request.begun_s:
                self._peers.suspects.add(request.satellite, now_s)
            self._on_request_failed(request, Miss.UNREACHABLE, now_s)
        elif header.op is Op.UNSUPPORTED:
            _, known = Capabilities.unpack_unsupported(body)
            request.peer.on_capabilities(known, now_s)
            request.peer.on_unsupported(operation.op, now_s)
            self._on_request_failed(request, Miss.UNSUPPORTED, now_s)
        elif header.op is Op.BUSY:
            request.window.lost(now_s, request.peer.round_trip.smoothed_s)
        elif isinstance(transfer, WriteTransfer) and header.op is Op.ACK:
            selection = Selection.unpack(body)
            if selection.key != transfer.info.key:
                return
            if header.status is not Status.OK:
                self._on_request_failed(request, Miss.FULL, now_s)
            else:
                self._on_stored(request, transfer, selection.indices(), header.credit, now_s)
        elif isinstance(transfer, ReadTransfer) and header.op is Op.MISS:
            self._on_missing(request, transfer, header, Selection.unpack(body), now_s)
        elif transfer is None and header.op is _ANSWERS.get(operation.op):
            self._end_operation(operation, None, now_s, bytes(body))
        elif transfer is None and operation.op is Op.GET and header.op is Op.MISS:
            self._end_operation(operation, Miss.MISSING, now_s)
        else:
            self.counters.add("packets_unexpected")

    def _may_speak_for(self, speaker: SatelliteId, request: PacketRequest, status: Status) -> bool:
        """Return True if ``speaker``, a satellite on the path, may answer so: only the beam, which checks commands, may
        refuse.
        """
        return status is not Status.REFUSED or speaker == self._in_flight.beam(request.satellite)

    def _receive_overtaken_answer(
        self, request: PacketRequest, header: SkyHeader, body: memoryview, now_s: float
    ) -> None:
        """Process an answer older than another: only ACKs still count."""
        if header.op is Op.ACK and header.status is Status.OK:
            self._receive_answer(request, header, body, now_s)
        else:
            self.counters.add("packets_unexpected")

    def _is_latest_answer(self, request: PacketRequest, answer: memoryview) -> bool:
        """Return True if an answer is newer than the request's earlier answers, not a replay; always True without
        authentication.
        """
        if self._gate is None:
            return True
        number = answer_number(answer)
        request.peer.is_new(number)
        if number <= request.answer_number:
            return False
        request.answer_number = number
        return True

    def _record_answer(self, request: PacketRequest, echo_us: int, now_s: float) -> float:
        elapsed_s = since_s(echo_us, now_s)
        request.peer.on_answer(elapsed_s, now_s)
        request.link.moved_s = now_s
        return elapsed_s or 0.0

    def _on_stored(
        self, request: PacketRequest, transfer: WriteTransfer, indices: Sequence[int], credit: int, now_s: float
    ) -> None:
        newly_stored = transfer.acknowledge(transfer.of_request(indices, request.indices))
        if not newly_stored and self._gate is not None:  # perhaps a replay, which must not postpone the deadline
            return
        self._in_flight.count_answered(request, newly_stored * (transfer.info.chunk_bytes + CHUNK_OVERHEAD_BYTES))
        request.window.offer(credit * CREDIT_UNIT_BYTES)
        if request.in_flight_bytes == 0:
            self._in_flight.completed(request, now_s)
        if transfer.missing == 0:
            self._end_operation(request.operation, None, now_s)
        elif request.in_flight_bytes == 0:
            self._in_flight.retire(request)
        elif transfer.acknowledged[request.indices[-1]]:
            self._in_flight.hurry(request, now_s)
        else:
            self._in_flight.extend(request, now_s)

    def _on_missing(
        self, request: PacketRequest, transfer: ReadTransfer, header: SkyHeader, selection: Selection, now_s: float
    ) -> None:
        """Handle a MISS: search the chunks elsewhere, or end the read."""
        # Only what this request asked for: a forged or stale MISS must not affect other chunks.
        requested = set(request.indices)
        indices = [index for index in selection.indices() if index in requested]
        if selection.key != transfer.info.key or not indices:
            return
        self._in_flight.count_given_up(request, len(indices) * (transfer.info.chunk_bytes + CHUNK_OVERHEAD_BYTES))
        answer = Absence(
            request.satellite,
            self._clock.nearby(now_s),
            partial(self.everywhere, transfer.info, now_s),
            bool(header.flags & FLAG_SETTLED),
            (header.slot_moves, header.plane_moves),
            request.begun_s,
            now_s,
        )
        if failure := transfer.absent(indices, answer):
            self._end_operation(request.operation, failure, now_s)
            return
        absent = set(indices)
        request.indices = [index for index in request.indices if index not in absent]
        request.body = b""
        if transfer.has(request.indices):
            self._in_flight.retire(request)
        self._enqueue(request.operation)

    def _on_request_failed(self, request: PacketRequest, failure: Miss, now_s: float) -> None:
        """Read a failed request's chunks elsewhere or leave them to copies; otherwise end the operation."""
        transfer = request.operation.transfer
        if isinstance(transfer, ReadTransfer):
            # If no satellite was heard, others would not answer either: the timeout ends the read.
            reachable = failure is not Miss.TIMEOUT or self._peers.any_heard_since(request.begun_s)
            stand_ins = self._get_stand_ins(transfer, now_s) if reachable else None
            saved = transfer.redirect(request.indices, request.satellite, failure, stand_ins)
            failure = failure if saved else transfer.why_ended(request.indices, failure)
        else:
            saved = transfer is not None and transfer.waive(request.indices)
        if not saved:
            self._end_operation(request.operation, failure, now_s)
            return
        self._in_flight.retire(request)
        if isinstance(transfer, WriteTransfer) and transfer.missing == 0:
            self._end_operation(request.operation, None, now_s)
        else:
            self._enqueue(request.operation)

    # --- timers ---

    def next_timer_s(self) -> float | None:
        timer_s = min(self._in_flight.next_timer_s(), self._detector.next_s, self._keepalive.next_s)
        if self._sending_paused_until_s > -math.inf and self.wants_to_send:
            timer_s = min(timer_s, self._sending_paused_until_s)
        return timer_s if timer_s < math.inf else None

    @property
    def probing(self) -> bool:
        return self._detector.next_s < math.inf

    def handle_timer(self, now_s: float) -> None:
        self._update_gateway(now_s)
        if now_s >= self._sending_paused_until_s:
            self._sending_paused_until_s = -math.inf
        for request in self._in_flight.overdue(now_s):
            if self._in_flight.by_id.get(request.request_id) is not request:
                continue  # its operation has ended meanwhile
            if self._in_flight.hedge(request, now_s):
                self._enqueue(request.operation)
                continue
            satellite, centre = request.satellite, self._sky.centre_at(self.moves(now_s))
            # Is this satellite dead, or the gateway, or everything? Probes find out while the request is repeated.
            if request.operation.number not in self._probe_operations:
                self._send_probes(
                    self._detector.overdue(satellite, request.begun_s, request.sent_s, centre, now_s), now_s
                )
            if failure := self._in_flight.repeat_or_give_up(request, self.moves(now_s), now_s):
                self._on_request_failed(request, failure, now_s)
            elif request.operation.transfer is None and request.operation.op not in ALWAYS_SENT:
                self._ping_beside_question(satellite, now_s)
        if now_s >= self._keepalive.next_s:
            late, announcements = self._keepalive.take_due(now_s, self._get_places_of_write)
            for satellite, body in announcements:  # unacknowledged
                self.cancel(self.ask(Op.RETAIN, body, satellite, now_s, once=True))
            for number in late:
                self._end_operation(self._operations[number], Miss.INTERRUPTED, now_s)
        if now_s >= self._detector.next_s:
            self._send_probes(self._detector.take_due_probes(self._sky.centre_at(self.moves(now_s)), now_s), now_s)

    def _ping_beside_question(self, satellite: SatelliteId, now_s: float) -> None:
        if self._pings_beside.get(satellite) not in self._probe_operations:
            self._pings_beside[satellite] = self._send_probes([(satellite, False)], now_s)

    def _send_probes(self, probes: Probes, now_s: float) -> int:
        number = 0
        for satellite, once in probes:
            number = self.ask(Op.PING, b"", satellite, now_s, once=once)
            self._probe_operations.add(number)
        return number
