"""The ground host's side without I/O: values read and written, questions asked, losses repaired.

``get``, ``put`` and ``ask`` begin an operation and return its number; ``next_event`` tells how it ended. In between the
transport calls ``receive_batch`` with what came, ``handle_timer`` when ``next_timer_s`` has passed, and sends what
``datagrams_to_send`` returns, each batch by the beam to the satellite named with it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from skymemory import native
from skymemory.constellation.torus import SatelliteId
from skymemory.metrics import Counters
from skymemory.native import Landing, Run, Tally
from skymemory.placement.locate import Moves
from skymemory.protocol.auth import Authority, ClientGate
from skymemory.protocol.client.answers import Answers, Bursts, Verdict
from skymemory.protocol.client.gateway import Access, Pointing
from skymemory.protocol.client.outages import Outages
from skymemory.protocol.client.outbox import Operation, Outbox
from skymemory.protocol.client.peers import Links
from skymemory.protocol.client.requests import ALWAYS_ASKED, InFlight
from skymemory.protocol.client.transfer import (
    ReadTransfer,
    ReplicatedRead,
    ReplicatedWrite,
    TransferReport,
    ValueInfo,
    Where,
    WriteTransfer,
)
from skymemory.protocol.clock import FollowedClock, MoveClock, SkyMap
from skymemory.protocol.messages import MAX_KEYS_PER_PACKET, Buffer
from skymemory.protocol.satellite.retention import Retain, pack_retain
from skymemory.protocol.satellite.tombstones import WRITING_S, Dead
from skymemory.protocol.segments import SegmentBatch
from skymemory.protocol.wire import Op

Transfer = ReadTransfer | WriteTransfer
_SOUND = b"\0"
_ON_ITS_WAY_S = 1.0
"""What we say has arrived by then: the box may have moved meanwhile."""


class ClientMachine:
    """One ground host's conversations with the constellation."""

    def __init__(self, config: ClientConfig, sky: SkyMap, clock: MoveClock) -> None:
        self.config = config
        self.counters = Counters()
        self._sky = sky
        self._clock = FollowedClock(clock, self.counters)
        self._pointing = Pointing(config.access, sky, self.counters)
        self._links = Links(config.window_bytes, config.credit_bytes, config.expected_rtt_s)
        self._outbox = Outbox(config.ground, config.window_bytes, config.authority)
        every_packet = config.authority is not None and config.authority.every_packet
        self._gate = ClientGate(config.authority, self.counters) if every_packet and config.authority else None
        self._in_flight = InFlight(self._links, self._outbox, config.give_up_s)
        self._bursts = Bursts(self._links, self._in_flight, self._everywhere)
        self._answers = Answers(
            self._in_flight, self._links, self._clock, self.counters, config.ground, self._enqueue, self._everywhere
        )
        self._outages = Outages(sky, self._links, self._outbox, self._pointing, self.counters, self._ping)
        self.breaker = self._outages.breaker
        self._still_writing = StillWriting(self._places_of_write, self._say)
        self._operations: dict[int, Operation] = {}
        self._waiting: deque[Operation] = deque()
        self._events: deque[Finished] = deque()
        self._next_number = 1

    # --- operations ---

    def moves(self, now_s: float) -> Moves:
        """How far the box has moved, as the clock and the satellites' last words have it."""
        return self._clock.moves(now_s)

    def moves_at(self, time_s: float) -> Moves:
        """How far the box will have moved (or had) at another time than now."""
        return self._clock.at(time_s)

    def get(self, info: ValueInfo, out: memoryview, now_s: float, replicas: int = 1) -> int:
        """Begin to read a value into ``out``, which must be writable and at least ``info.value_bytes`` long.

        Raises:
            InvalidInput: ``out`` is too small or read-only, or ``info`` contradicts itself or the constellation.
        """
        burst_bytes = self._links.inbound.size_bytes // 4
        burst_chunks = max(1, min(self.config.read_burst_chunks, burst_bytes // max(1, info.chunk_bytes)))
        copies = self._copies(info.strategy, info.servers, info.set_moves, replicas)
        moves = self._clock.to_read_at(info.set_moves, now_s)
        if replicas > 1:
            hedged = ReplicatedRead(info, out, copies, moves, burst_chunks, self.config.hedge_round_trips)
            return self._begin(hedged, now_s)
        return self._begin(ReadTransfer(info, out, copies[0], moves, burst_chunks), now_s)

    def put(
        self,
        key: bytes,
        value: Buffer,
        chunk_bytes: int,
        strategy: int,
        servers: int,
        now_s: float,
        set_moves: Moves | None = None,
        replicas: int = 1,
    ) -> tuple[int, ValueInfo]:
        """Begin to write a value; the caller keeps ``value`` unchanged until the operation ends.

        ``set_moves`` places it as if it were written when the box had moved so far (default: as far as now).

        Raises:
            ValueTooLarge: a chunk that no datagram carries, or a value beyond the wire's 4 GiB.
            InvalidInput: a strategy or number of servers that this constellation has not.
        """
        moves = self.moves(now_s) if set_moves is None else set_moves
        copies = self._copies(strategy, servers, moves, replicas)
        transfer = WriteTransfer.of(key, value, chunk_bytes, strategy, servers, moves, copies[0])
        if replicas > 1:
            transfer = ReplicatedWrite.of_copies(transfer, copies, moves)
        return self._begin(transfer, now_s), transfer.info

    def ask(self, op: Op, body: bytes, satellite: SatelliteId, now_s: float, *, once: bool = False) -> int:
        """Begin a question to one satellite (HAS, EVICT, LIST, PING, ADVANCE, RETAIN): one packet there, one back.
        ``once``: it is not repeated where no answer comes.
        """
        operation = self._register(None, TransferReport(satellites=1), now_s)
        if op not in ALWAYS_ASKED and self._outages.refuses(satellite):
            self._finish(Verdict(operation, "unreachable"), now_s)
            return operation.number
        if op not in ALWAYS_ASKED and self._links.peer(satellite).lacks(op, now_s):
            self._finish(Verdict(operation, "unsupported"), now_s)
            return operation.number
        self._point_beam(now_s)
        self._in_flight.send(operation, satellite, op, [], body, 0, self.moves(now_s), now_s, once)
        return operation.number

    def _ping(self, satellite: SatelliteId, now_s: float, once: bool) -> int:
        return self.ask(Op.PING, b"", satellite, now_s, once=once)

    def cancel(self, number: int) -> None:
        """Forget an operation; what still comes for it is ignored, and how it ended, if it has, is not told."""
        operation = self._operations.pop(number, None)
        if operation is not None:
            self._still_writing.ended(number, 0.0)
            self._in_flight.drop(operation)
        elif self._events:
            self._events = deque(event for event in self._events if event.number != number)

    def take_gone(self) -> list[Dead]:
        """Values that satellites have said since the last time are dead (GONE), unasked."""
        gone = list(self._answers.gone)
        self._answers.gone.clear()
        return gone

    def next_event(self) -> Finished | None:
        return self._events.popleft() if self._events else None

    # --- the verbs of the transport ---

    def receive_datagram(self, data: Buffer, now_s: float) -> None:
        self.receive_batch(data, len(data), now_s)

    def receive_batch(self, data: Buffer, segment_bytes: int, now_s: float) -> None:
        """Take packets of ``segment_bytes`` each (the last may be shorter); bad ones are counted and dropped."""
        self.receive_runs([(memoryview(data), segment_bytes)], now_s)

    def receive_runs(self, runs: list[Run], now_s: float) -> None:
        """``receive_batch`` for each of several."""
        if self._gate is not None:
            runs = self._gate.admit(runs)
        at = 0
        while at < len(runs):
            tallies = native.place_runs(runs, at, self._in_flight.awaited)
            self.placed(tallies, now_s)
            at += sum(tally[2] for tally in tallies)
            if at < len(runs):
                self._take_apart(*runs[at], now_s)
                at += 1

    @property
    def awaited(self) -> dict[int, Landing]:
        """Where what answers reads belongs: a transport may place runs of DATA as they come, and tell ``placed``.
        Nothing, where answers must pass the gate first.
        """
        return self._in_flight.awaited if self._gate is None else {}

    def placed(self, tallies: Sequence[Tally], now_s: float) -> None:
        """Runs of DATA have been placed where they were ``awaited``."""
        for verdict in self._answers.data(tallies, now_s):
            self._finish(verdict, now_s)

    @property
    def wants_to_send(self) -> bool:
        """Whether something may be there to send; False only where nothing is."""
        return bool(self._waiting) or self._outbox.filled

    def datagrams_to_send(self, now_s: float) -> list[tuple[SegmentBatch, SatelliteId]]:
        """Batches with the satellite whose beam each takes, as far as the windows let them."""
        return [one for together in self.each_to_send(now_s) for one in together]

    def each_to_send(self, now_s: float) -> Iterator[list[tuple[SegmentBatch, SatelliteId]]]:
        """``datagrams_to_send`` bit by bit: what is sent is packed when the burst before it is on its way, what is
        asked for all at once. Take them all.
        """
        self._point_beam(now_s)
        if self._outbox.filled:
            yield self._outbox.take()
        for _ in range(len(self._waiting)):
            operation = self._waiting.popleft()
            operation.queued = False
            transfer = operation.transfer
            if operation.number not in self._operations or transfer is None:
                continue
            if self._outages.refuses(None):
                self._finish(Verdict(operation, "unreachable"), now_s)
            else:
                moves = self.moves(now_s)
                if isinstance(transfer, ReadTransfer):
                    self._finish(self._bursts.ask(operation, transfer, moves, now_s), now_s)
                else:
                    self._still_writing.began(operation.number, transfer, now_s)
                    for failed in self._bursts.send(operation, transfer, moves, now_s):
                        self._finish(failed, now_s)
                        if self._outbox.filled:
                            yield self._outbox.take()
                if operation.number in self._operations and transfer.pending:
                    self._enqueue(operation)
        if self._outbox.filled:
            yield self._outbox.take()

    def next_timer_s(self) -> float | None:
        due_s = min(self._in_flight.next_timer_s(), self._outages.next_s, self._still_writing.next_s)
        return due_s if due_s < math.inf else None

    @property
    def ailing(self) -> bool:
        """Whether somebody is silent: a transport has to serve the timer also with no operation to wait for."""
        return self._outages.next_s < math.inf

    def handle_timer(self, now_s: float) -> None:
        self._point_beam(now_s)
        for request in self._in_flight.overdue(now_s):
            if self._in_flight.find(request.request_id) is not request:
                continue
            if self._in_flight.hedge(request, now_s):
                self._enqueue(request.operation)
                continue
            if self._outages.doubt(request, self._centre(now_s), now_s):
                self._point_beam(now_s)
            if failure := self._in_flight.give_up_or_repeat(request, self.moves(now_s), now_s):
                self._finish(self._answers.lost(request, failure, now_s), now_s)
            elif request.operation.transfer is None and request.op not in ALWAYS_ASKED:
                self._outages.check(request.satellite, now_s)
        if now_s >= self._still_writing.next_s:
            for number in self._still_writing.handle_timer(now_s):
                self._finish(Verdict(self._operations[number], "interrupted"), now_s)
        if now_s >= self._outages.next_s:
            self._outages.handle_timer(self._centre(now_s), now_s)

    # --- arrival ---

    def _take_apart(self, view: memoryview, segment_bytes: int, now_s: float) -> None:
        """Packets that merely came together: receive offload joins all that one satellite sends."""
        if segment_bytes <= 0 or not len(view):
            self.counters.add("packets_malformed")
            return
        awaited = self._in_flight.awaited
        for at in range(0, len(view), segment_bytes):
            packet = view[at : at + segment_bytes]
            if len(view) > segment_bytes and (tallies := native.place_runs([(packet, len(packet))], 0, awaited)):
                self.placed(tallies, now_s)
            elif (ack := native.open_ack(packet)) is not None:
                self._finish(self._answers.acknowledged(ack, now_s), now_s)
            elif native.verify_segments(packet, len(packet)) != _SOUND:
                self.counters.add("packets_malformed")
            else:
                self._finish(self._answers.control(packet, now_s), now_s)

    # --- beginning and ending ---

    def _centre(self, now_s: float) -> SatelliteId:
        return self._sky.centre_at(self.moves(now_s))

    def _copies(self, strategy: int, servers: int, set_moves: Moves, replicas: int) -> list[Where]:
        def copy(replica: int) -> Where:
            return lambda moves: self._sky.servers_at(strategy, servers, set_moves, moves, replica)

        return [copy(replica) for replica in range(replicas)]

    def _everywhere(self, info: ValueInfo, now_s: float) -> list[Moves]:
        """Moves that name all places where chunks of a value may have been left, those of now first."""
        return self._clock.everywhere(now_s, info.set_moves, self._sky.placement(info.strategy, info.servers))

    def _places_of_write(self, transfer: WriteTransfer, now_s: float) -> set[SatelliteId]:
        """Where chunks of it are stored, now and when our word arrives."""
        info, replicas = transfer.info, len(transfer.acknowledged) // transfer.info.chunks
        return {
            place
            for moves in {self.moves(now_s), self.moves_at(now_s + _ON_ITS_WAY_S)}
            for copy in self._copies(info.strategy, info.servers, info.set_moves, replicas)
            for place in copy(moves)[: info.chunks]
        }

    def _say(self, satellite: SatelliteId, body: bytes, now_s: float) -> None:
        """A RETAIN that nobody answers."""
        self.cancel(self.ask(Op.RETAIN, body, satellite, now_s, once=True))

    def _register(self, transfer: Transfer | None, report: TransferReport, now_s: float) -> Operation:
        operation = Operation(self._next_number, transfer, now_s, report)
        self._next_number += 1
        self._operations[operation.number] = operation
        return operation

    def _begin(self, transfer: Transfer, now_s: float) -> int:
        operation = self._register(transfer, transfer.report, now_s)
        self._enqueue(operation)
        return operation.number

    def _finish(self, verdict: Verdict | None, now_s: float) -> None:
        if verdict is None or self._operations.pop(verdict.operation.number, None) is None:
            return
        operation, failure = verdict.operation, verdict.failure
        if self._still_writing.ended(operation.number, now_s):
            failure = failure or "interrupted"
        self._in_flight.drop(operation)
        if self._outages.ended(operation, failure, now_s):
            return
        operation.report.seconds, operation.report.failure = now_s - operation.started_s, failure
        info = operation.transfer.info if operation.transfer is not None else None
        if failure:
            self.counters.add("operations_failed", label=failure)
        self._events.append(Finished(operation.number, not failure, operation.report, verdict.body, info))

    # --- sending ---

    def _point_beam(self, now_s: float) -> None:
        if self._pointing.aim(self._outbox, self._clock, now_s):
            self._links.rerouted()

    def _enqueue(self, operation: Operation) -> None:
        """It has something to send, as soon as it is its turn and the windows let it."""
        if not operation.queued:
            operation.queued = True
            self._waiting.append(operation)


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """``window_bytes``: what may be on its way to us (our receive buffer's real size bounds it); ``credit_bytes``:
    what a satellite is taken to hold before it has said so; ``expected_rtt_s``: round trip by geometry.
    """

    ground: int
    access: Access = "los"
    window_bytes: int = 3 << 20
    credit_bytes: int = 1 << 20
    expected_rtt_s: float = 0.0
    give_up_s: float = 0.8
    read_burst_chunks: int = 64
    hedge_round_trips: float = 1.5
    """Of values with copies: after so many round trips without an answer the next copy is asked too; 0: at once."""
    authority: Authority | None = field(default=None, repr=False)
    """Signs what we ask; None where the satellites ask for no MACs."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of operation ``number``. For ``ask``, ``body`` is the answer's; for transfers, ``report`` says all."""

    number: int
    ok: bool
    report: TransferReport
    body: bytes = b""
    info: ValueInfo | None = None


# A writer's word that it is still at it, for values that take long to write.
#
# A value that is half there looks like one that has lost the other half: to a reader that has no index, and to
# satellites
# that ask each other whether their blocks are whole. Those that have their chunks already, or have had none yet,
# cannot
# know that more will come, for a write has no longest time. So the writer tells all satellites of such a value each
# half
# second (RETAIN with WRITING, unacknowledged): one packet for each satellite, whatever the number of values.
#
# A writer that could not say so for too long (its process was stopped, or its computer slept) cannot know what became
# of
# what it had stored: then the write has failed, though all may have been acknowledged.


_EVERY_S = 0.5
_LONGEST_SILENCE_S = WRITING_S - 1.0
"""Between two words: the later may take a second longer on its way, and still comes in time."""


class StillWriting:
    """The writes of one ground host that are under way. ``places``: the satellites that a write concerns, at a time;
    ``send``: a body of RETAIN, to a satellite, at a time.
    """

    def __init__(
        self,
        places: Callable[[WriteTransfer, float], Iterable[SatelliteId]],
        send: Callable[[SatelliteId, bytes, float], None],
    ) -> None:
        self._places = places
        self._send = send
        self._writes: dict[int, tuple[WriteTransfer, float]] = {}
        """By the number of the operation, and when satellites heard of it last."""
        self.next_s = math.inf
        """When ``handle_timer`` is to be called; infinite while nothing is being written."""

    def began(self, number: int, transfer: WriteTransfer, now_s: float) -> None:
        """The first chunks of a write leave; once is enough."""
        if number not in self._writes:
            self._writes[number] = transfer, now_s
            self.next_s = min(self.next_s, now_s + _EVERY_S)

    def ended(self, number: int, now_s: float) -> bool:
        """Whether satellites may have taken it for ended before."""
        _, said_s = self._writes.pop(number, (None, now_s))
        if not self._writes:
            self.next_s = math.inf
        return now_s - said_s > _LONGEST_SILENCE_S

    def handle_timer(self, now_s: float) -> list[int]:
        """Say so of all writes; but of those that it is too late for, return the numbers: they have failed."""
        late = [number for number, (_, said_s) in self._writes.items() if now_s - said_s > _LONGEST_SILENCE_S]
        keys: dict[SatelliteId, dict[bytes, None]] = {}
        for number, (transfer, _) in self._writes.items():
            if number not in late:
                self._writes[number] = transfer, now_s
                for satellite in self._places(transfer, now_s):
                    keys.setdefault(satellite, {})[transfer.info.key] = None
        for satellite, its in keys.items():
            names = list(its)
            for at in range(0, len(names), MAX_KEYS_PER_PACKET):
                body = pack_retain(Retain.WRITING, 0.0, names[at : at + MAX_KEYS_PER_PACKET])
                self._send(satellite, body, now_s)
        self.next_s = now_s + _EVERY_S if self._writes else math.inf
        return late


__all__ = ["ClientConfig", "ClientMachine", "Finished"]
