"""The ground host's side without I/O: values read and written, questions asked, losses repaired.

``get``, ``put`` and ``ask`` begin an operation and return its number; ``next_event`` tells how it ended. In between the
transport calls ``receive_batch`` with what came, ``handle_timer`` when ``next_timer_s`` has passed, and sends what
``datagrams_to_send`` returns, each batch by the beam to the satellite named with it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from skymemory import native
from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput, MalformedPacket
from skymemory.metrics import Counters
from skymemory.placement.locate import Moves
from skymemory.protocol import messages
from skymemory.protocol.links import Links
from skymemory.protocol.messages import Buffer, Selection
from skymemory.protocol.motion import MoveClock, SkyMap
from skymemory.protocol.outbox import CREDIT_UNIT_BYTES, Operation, Outbox, Request
from skymemory.protocol.pacing import Window
from skymemory.protocol.segments import SegmentBatch
from skymemory.protocol.space_packet import TELEMETRY_BYTES
from skymemory.protocol.transfer import Burst, ReadTransfer, TransferReport, ValueInfo, Where, WriteTransfer
from skymemory.protocol.wire import (
    CHUNK_REF_BYTES,
    TELEMETRY_PREFIX_BYTES,
    Op,
    SkyHeader,
    Status,
)

_OVERHEAD_BYTES = TELEMETRY_PREFIX_BYTES + CHUNK_REF_BYTES
_SANE_RTT_US = 60_000_000
_MOST_PATIENCE = 10
"""A request that is answered only in part for so many times ``give_up_s`` is given up."""
_OP_AT = TELEMETRY_BYTES + 1
_REQUEST_AT = TELEMETRY_BYTES + 16


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """``window_bytes``: what may be on its way to us (our receive buffer's real size bounds it); ``credit_bytes``:
    what a satellite is taken to hold before it has said so; ``expected_rtt_s``: round trip by geometry.
    """

    ground: int
    access: Literal["los", "gateway"] = "los"
    window_bytes: int = 3 << 20
    credit_bytes: int = 1 << 20
    expected_rtt_s: float = 0.0
    give_up_s: float = 0.8
    suspect_s: float = 1.0
    read_burst_chunks: int = 64


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of operation ``number``. For ``ask``, ``body`` is the answer's; for transfers, ``report`` says all."""

    number: int
    ok: bool
    report: TransferReport
    body: bytes = b""
    header: SkyHeader | None = None
    info: ValueInfo | None = None


class ClientMachine:
    """One ground host's conversations with the constellation."""

    def __init__(self, config: ClientConfig, sky: SkyMap, clock: MoveClock) -> None:
        self.config = config
        self.counters = Counters()
        self._sky = sky
        self._clock = clock
        self._links = Links(
            config.window_bytes, config.credit_bytes, config.expected_rtt_s, config.suspect_s
        )  # fmt: skip
        self._outbox = Outbox(config.ground, config.window_bytes)
        self._operations: dict[int, Operation] = {}
        self._waiting: deque[Operation] = deque()
        self._requests: dict[int, Request] = {}
        self._events: deque[Finished] = deque()
        self._next_number = 1
        self._next_request_id = 1

    # --- operations ---

    def moves(self, now_s: float) -> Moves:
        """How far the box has moved, as the clock and the satellites' last words have it."""
        return self._clock.moves(now_s)

    def get(self, info: ValueInfo, out: memoryview, now_s: float) -> int:
        """Begin to read a value into ``out``, which must be writable and at least ``info.value_bytes`` long."""
        if len(out) < info.value_bytes or out.readonly:
            raise InvalidInput(
                f"a buffer of {len(out)} bytes for a value of {info.value_bytes}: too small or read-only"
            )
        moves = self.moves(now_s)
        burst_chunks = max(
            1, min(self.config.read_burst_chunks, self._links.inbound.size_bytes // 4 // info.chunk_bytes)
        )
        transfer = ReadTransfer(
            info, out, self._where(info.strategy, info.servers, info.set_moves), moves, burst_chunks
        )
        return self._begin(transfer, transfer.report, now_s)

    def put(
        self, key: bytes, value: Buffer, chunk_bytes: int, strategy: int, servers: int, now_s: float
    ) -> tuple[int, ValueInfo]:
        """Begin to write a value; the caller keeps ``value`` unchanged until the operation ends."""
        moves = self.moves(now_s)
        where = self._where(strategy, servers, moves)
        transfer = WriteTransfer.of(key, value, chunk_bytes, strategy, servers, moves, where)
        return self._begin(transfer, transfer.report, now_s), transfer.info

    def ask(self, op: Op, body: bytes, satellite: SatelliteId, now_s: float) -> int:
        """Begin a question to one satellite (HAS, EVICT, LIST, PING, ADVANCE): one packet there, one back."""
        operation = self._register(None, TransferReport(satellites=1), now_s)
        request = self._request(operation, satellite, op, [], body, 0, now_s)
        self._outbox.transmit(request, now_s)
        return operation.number

    def cancel(self, number: int) -> None:
        """Forget an operation; what still comes for it is ignored."""
        operation = self._operations.pop(number, None)
        if operation is not None:
            self._drop_requests(operation)

    def next_event(self) -> Finished | None:
        return self._events.popleft() if self._events else None

    # --- the verbs of the transport ---

    def receive_datagram(self, data: Buffer, now_s: float) -> None:
        self.receive_batch(data, len(data), now_s)

    def receive_batch(self, data: Buffer, segment_bytes: int, now_s: float) -> None:
        """Take packets of ``segment_bytes`` each (the last may be shorter); bad ones are counted and dropped."""
        view = memoryview(data)
        if len(view) > TELEMETRY_PREFIX_BYTES and view[_OP_AT] == Op.DATA and segment_bytes > 0:
            request = self._requests.get(int.from_bytes(view[_REQUEST_AT : _REQUEST_AT + 4], "big"))
            if request is not None and isinstance(request.operation.transfer, ReadTransfer):
                self._data(request, request.operation.transfer, view, segment_bytes, now_s)
                return
        if segment_bytes <= 0 or not len(view):
            self.counters.add("packets_malformed")
            return
        for code, at in zip(
            native.verify_segments(view, segment_bytes), range(0, len(view), segment_bytes), strict=True
        ):
            if code:
                self.counters.add("packets_malformed")
            else:
                self._control(view[at : at + segment_bytes], now_s)

    def datagrams_to_send(self, now_s: float) -> list[tuple[SegmentBatch, SatelliteId]]:
        """Batches with the satellite whose beam each takes; fills the windows first."""
        self._fill_windows(now_s)
        return self._outbox.take()

    def next_timer_s(self) -> float | None:
        return min((request.deadline_s for request in self._requests.values()), default=None)

    def handle_timer(self, now_s: float) -> None:
        for request in [request for request in self._requests.values() if request.deadline_s <= now_s]:
            if request.request_id in self._requests:
                self._overdue(request, now_s)

    # --- beginning and ending ---

    def _where(self, strategy: int, servers: int, set_moves: Moves) -> Where:
        sky = self._sky
        return lambda moves: sky.servers_at(strategy, servers, set_moves, moves)

    def _register(
        self, transfer: ReadTransfer | WriteTransfer | None, report: TransferReport, now_s: float
    ) -> Operation:
        operation = Operation(self._next_number, transfer, now_s, report, set())
        self._next_number += 1
        self._operations[operation.number] = operation
        return operation

    def _begin(self, transfer: ReadTransfer | WriteTransfer, report: TransferReport, now_s: float) -> int:
        operation = self._register(transfer, report, now_s)
        self._waiting.append(operation)
        return operation.number

    def _finish(
        self, operation: Operation, now_s: float, failure: str = "", body: bytes = b"",
        header: SkyHeader | None = None,
    ) -> None:  # fmt: skip
        if self._operations.pop(operation.number, None) is None:
            return
        self._drop_requests(operation)
        operation.report.seconds = now_s - operation.started_s
        operation.report.failure = failure
        info = operation.transfer.info if operation.transfer is not None else None
        if failure:
            self.counters.add("operations_failed", label=failure)
        self._events.append(Finished(operation.number, not failure, operation.report, body, header, info))

    def _drop_requests(self, operation: Operation) -> None:
        for request_id in operation.requests:
            request = self._requests.pop(request_id)
            self._window_of(request).given_up(request.in_flight_bytes)
        operation.requests.clear()

    # --- sending ---

    def _window_of(self, request: Request) -> Window:
        return self._window(request.op, request.satellite)

    def _window(self, op: Op, satellite: SatelliteId) -> Window:
        return self._links.outbound(self._outbox.beam(satellite)) if op is Op.SET else self._links.inbound

    def _fill_windows(self, now_s: float) -> None:
        """Send bursts of the operations in the order they began, as far as the windows let them."""
        if self.config.access == "gateway":
            self._outbox.gateway = self._sky.centre_at(self.moves(now_s))
        for _ in range(len(self._waiting)):
            operation = self._waiting.popleft()
            transfer = operation.transfer
            if operation.number not in self._operations or transfer is None:
                continue
            stalled = self._send_bursts(operation, transfer, now_s)
            if operation.number in self._operations and (transfer.pending or stalled):
                self._waiting.append(operation)

    def _send_bursts(self, operation: Operation, transfer: ReadTransfer | WriteTransfer, now_s: float) -> bool:
        """Returns whether a window stopped us."""
        stalled: deque[Burst] = deque()
        op = Op.GET if isinstance(transfer, ReadTransfer) else Op.SET
        size_each = transfer.info.chunk_bytes + _OVERHEAD_BYTES
        while transfer.pending:
            burst = transfer.pending.popleft()
            if self._links.is_suspect(burst.satellite, now_s):
                self._finish(operation, now_s, "unreachable")
                return False
            size = len(burst.indices) * size_each
            window = self._window(op, burst.satellite)
            if not window.admits(size):
                stalled.append(burst)
                if op is Op.GET:
                    break
                continue
            request = self._request(operation, burst.satellite, op, burst.indices, b"", size, now_s)
            self._outbox.transmit(request, now_s)
        transfer.pending.extendleft(reversed(stalled))
        return bool(stalled)

    def _request(
        self, operation: Operation, satellite: SatelliteId, op: Op, indices: list[int], body: bytes, size: int,
        now_s: float,
    ) -> Request:  # fmt: skip
        request = Request(
            self._next_request_id, operation, satellite, op, indices, body, now_s,
            now_s + self._links.round_trip(satellite).timeout_s(), size, self.moves(now_s),
        )  # fmt: skip
        self._next_request_id = self._next_request_id % 0xFFFFFFFF + 1
        self._requests[request.request_id] = request
        operation.requests.add(request.request_id)
        operation.report.requests += 1
        self._window_of(request).sent(size)
        return request

    # --- answers ---

    def _data(
        self, request: Request, transfer: ReadTransfer, view: memoryview, segment_bytes: int, now_s: float
    ) -> None:
        placed, duplicates, corrupt, foreign = transfer.place(view, segment_bytes)
        answered = (placed + duplicates) * (transfer.info.chunk_bytes + _OVERHEAD_BYTES)
        answered = min(answered, request.in_flight_bytes)
        request.in_flight_bytes -= answered
        self._links.inbound.answered(answered)
        if corrupt:
            self.counters.add("packets_malformed", corrupt)
        elif not foreign:
            start = TELEMETRY_BYTES
            echo_us = int.from_bytes(view[start + 24 : start + 28], "big")
            self._heard(request, echo_us, None, now_s)
        if foreign and not placed and not duplicates:
            self._finish(request.operation, now_s, "other version")
            return
        if transfer.missing == 0:
            self._finish(request.operation, now_s, "" if transfer.verified() else "corrupt")
            return
        if request.indices and transfer.arrived[request.indices[-1]]:
            # Satellites answer in order: what is missing before the last chunk was lost or overtaken.
            if all(transfer.arrived[index] for index in request.indices):
                self._retire(request)
            else:
                self._hurry(request, now_s)
        else:
            request.deadline_s = now_s + self._links.round_trip(request.satellite).timeout_s()

    def _control(self, view: memoryview, now_s: float) -> None:
        try:
            packet = messages.parse_packet(view)
        except MalformedPacket:
            self.counters.add("packets_malformed")
            return
        header = packet.header
        request = self._requests.get(header.request_id)
        if request is None or header.ground != self.config.ground:
            self.counters.add("packets_unexpected")
            return
        self._heard(request, header.timestamp_us, header, now_s)
        try:
            self._answer(request, header, packet.body, now_s)
        except MalformedPacket:
            self.counters.add("packets_malformed")

    def _answer(self, request: Request, header: SkyHeader, body: memoryview, now_s: float) -> None:
        operation, transfer = request.operation, request.operation.transfer
        if header.op is Op.UNREACHABLE:
            self._finish(operation, now_s, "unreachable")
        elif header.op is Op.BUSY:
            self._window_of(request).lost(now_s, self._links.round_trip(request.satellite).smoothed_s)
        elif isinstance(transfer, WriteTransfer):
            if header.op is Op.ACK:
                self._acknowledged(request, transfer, header, Selection.unpack(body), now_s)
        elif isinstance(transfer, ReadTransfer):
            if header.op is Op.MISS:
                self._missed(request, transfer, Selection.unpack(body), now_s)
        else:
            self._finish(operation, now_s, body=bytes(body), header=header)

    def _acknowledged(
        self, request: Request, transfer: WriteTransfer, header: SkyHeader, selection: Selection, now_s: float
    ) -> None:
        if selection.key != transfer.info.key:
            return
        if header.status is not Status.OK:
            self._finish(request.operation, now_s, "full")
            return
        fresh = transfer.acknowledge(selection.indices())
        answered = min(fresh * (transfer.info.chunk_bytes + _OVERHEAD_BYTES), request.in_flight_bytes)
        request.in_flight_bytes -= answered
        window = self._window_of(request)
        window.answered(answered)
        window.offer(header.credit * CREDIT_UNIT_BYTES)
        if transfer.missing == 0:
            self._finish(request.operation, now_s)
        elif request.in_flight_bytes == 0:
            self._retire(request)
        else:
            self._hurry(request, now_s)

    def _missed(self, request: Request, transfer: ReadTransfer, selection: Selection, now_s: float) -> None:
        if selection.key != transfer.info.key:
            return
        indices = [index for index in selection.indices() if index < transfer.info.chunks]
        freed = min(len(indices) * (transfer.info.chunk_bytes + _OVERHEAD_BYTES), request.in_flight_bytes)
        request.in_flight_bytes -= freed
        self._links.inbound.given_up(freed)
        missing = set(indices)
        request.indices = [index for index in request.indices if index not in missing]
        if not transfer.absent(indices, request.satellite, request.moves, self.moves(now_s)):
            self._finish(request.operation, now_s, "missing")
            return
        if not request.indices or all(transfer.arrived[index] for index in request.indices):
            self._retire(request)
        if request.operation not in self._waiting:
            self._waiting.append(request.operation)

    def _heard(self, request: Request, echo_us: int, header: SkyHeader | None, now_s: float) -> None:
        """A checked answer came: the satellite lives; measure the round trip; follow its count of moves."""
        elapsed_us = (int(now_s * 1e6) - echo_us) & 0xFFFFFFFF
        self._links.heard(request.satellite, elapsed_us * 1e-6 if elapsed_us < _SANE_RTT_US else None, now_s)
        if header is not None:
            told = (header.slot_moves, header.plane_moves)
            ours = self.moves(now_s)
            if told != ours:
                self._clock = self._clock.push(told[0] - ours[0], told[1] - ours[1])

    # --- repair ---

    def _retire(self, request: Request) -> None:
        if self._requests.pop(request.request_id, None) is not None:
            request.operation.requests.discard(request.request_id)
            self._window_of(request).given_up(request.in_flight_bytes)
            request.in_flight_bytes = 0

    def _hurry(self, request: Request, now_s: float) -> None:
        """Part of the answer is here and the rest seems lost: ask again soon rather than at the timeout."""
        grace_s = self._links.grace_s(request.satellite)
        request.deadline_s = min(request.deadline_s, now_s + grace_s)

    def _overdue(self, request: Request, now_s: float) -> None:
        """Not (wholly) answered in time: repeat what is missing, or give the operation up."""
        transfer = request.operation.transfer
        if transfer is None:
            wanted: list[int] = []
        else:
            done = transfer.arrived if isinstance(transfer, ReadTransfer) else transfer.acknowledged
            wanted = [index for index in request.indices if not done[index]]
            if not wanted:
                self._retire(request)
                return
        satellite = request.satellite
        silent_s = now_s - self._links.silent_since_s(satellite, request.begun_s)
        if silent_s > self.config.give_up_s or now_s - request.begun_s > _MOST_PATIENCE * self.config.give_up_s:
            self._links.suspect(satellite, now_s)
            self._finish(request.operation, now_s, "timeout")
            return
        round_trip = self._links.round_trip(satellite)
        self._window_of(request).lost(now_s, round_trip.smoothed_s)
        wait_s = round_trip.timeout_s() * min(2**request.attempts, 8)
        request.attempts += 1
        request.deadline_s = now_s + wait_s
        request.operation.report.requests += 1
        request.operation.report.retransmitted_chunks += len(wanted)
        if transfer is not None:
            request.indices = wanted
            request.moves = self.moves(now_s)
        self._outbox.transmit(request, now_s)
