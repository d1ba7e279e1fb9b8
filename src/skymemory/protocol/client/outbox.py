"""What a ground host has to send: headers filled in, requests packed, batches queued by beam."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from skymemory import native
from skymemory.constellation.torus import SatelliteId
from skymemory.placement.locate import Moves
from skymemory.protocol.auth import Authority
from skymemory.protocol.client.peers import Peer
from skymemory.protocol.client.transfer import ReadTransfer, TransferReport, WriteTransfer
from skymemory.protocol.congestion import Window
from skymemory.protocol.messages import Selection
from skymemory.protocol.segments import SegmentBatch, prefixed_batch, single
from skymemory.protocol.wire import (
    COMMAND_FORMAT,
    COMMAND_PREFIX_BYTES,
    CREDIT_UNIT_BYTES,
    GROUND_SHELL,
    HOP_LIMIT,
    MOST_CREDIT,
    SKY,
    VERSION,
    Op,
    Status,
    command_fields,
)

_COMMAND_PREFIX = struct.Struct(COMMAND_FORMAT + SKY.format.removeprefix(">"))
_GROUND = GROUND_SHELL << 24


def _word(satellite: SatelliteId) -> int:
    """Its address on the wire, as ``Address.pack`` would make it."""
    return satellite.plane << 12 | satellite.slot


@dataclass(slots=True, eq=False)
class Operation:
    """What a caller began: a read, a write, or (``transfer`` None) a question."""

    number: int
    transfer: ReadTransfer | WriteTransfer | None
    started_s: float
    report: TransferReport
    requests: set[int] = field(default_factory=set)
    queued: bool = False
    """Whether it waits for its turn to send."""


@dataclass(slots=True, eq=False)
class Request:
    """One packet (or burst of packets) in flight, until answered, repeated or given up.

    A repetition keeps the request id, so that late answers to an earlier sending still count.
    """

    request_id: int
    operation: Operation
    satellite: SatelliteId
    op: Op
    indices: Sequence[int]
    body: bytes
    """What follows the headers; of a read it may be empty, and is then packed when it is sent."""
    begun_s: float
    deadline_s: float
    in_flight_bytes: int
    moves: Moves
    window: Window
    """The one it fills, whatever beam a later repetition takes."""
    peer: Peer
    once: bool = False
    """It is waited for and not repeated."""
    attempts: int = 1
    sent_s: float = 0.0
    """When it was last transmitted."""
    hedged: bool = False
    """The next copy has been asked for it too."""
    passed_over: int = 0
    """Of a question: how often it was left unanswered while what was sent with it was answered."""
    gap_seen: bool = False
    """Later parts of its answer are here, earlier ones are not."""


class Outbox:
    """Packs requests. ``gateway`` is None where every satellite has a beam of its own (``los``); beside a gateway,
    those in ``direct`` have one.
    """

    def __init__(self, ground: int, credit_bytes: int, authority: Authority | None = None) -> None:
        self.gateway: SatelliteId | None = None
        self.direct: frozenset[SatelliteId] = frozenset()
        self._ground = ground
        self._authority = authority
        self._credit = min(credit_bytes // CREDIT_UNIT_BYTES, MOST_CREDIT)
        self._sequence = 0
        self._batches: list[tuple[SegmentBatch, SatelliteId]] = []

    def beam(self, satellite: SatelliteId) -> SatelliteId:
        """The satellite we talk to for the sake of this one."""
        return satellite if self.gateway is None or satellite in self.direct else self.gateway

    @property
    def filled(self) -> bool:
        return bool(self._batches)

    def take(self) -> list[tuple[SegmentBatch, SatelliteId]]:
        batches, self._batches = self._batches, []
        return batches

    def transmit(self, requests: Sequence[Request], now_s: float) -> None:
        """Queue the packets of requests of one operation and kind, as many as they still want answered."""
        for request in requests:
            request.sent_s = now_s
        transfer = requests[0].operation.transfer
        if isinstance(transfer, WriteTransfer):
            for request in requests:
                self._queue_chunks(request, transfer, now_s)
            return
        rows, beams = [], []
        for request in requests:
            if transfer is not None and not request.body:
                request.body = Selection.of(transfer.info.key, request.indices, transfer.info.servers).pack()
            beam = self.beam(request.satellite)
            rows.append((_word(request.satellite), _GROUND | _word(beam), request.request_id, request.body))
            beams.append(beam)
        prefix = self._prefix(requests[0], beams[0], 1, 0, now_s)
        packets = native.command_packets(prefix, self._take_sequence(len(rows)), rows)
        for packet, beam in zip(packets, beams, strict=True):
            self._queue(single(packet), beam, now_s)

    def _queue_chunks(self, request: Request, transfer: WriteTransfer, now_s: float) -> None:
        beam = self.beam(request.satellite)
        refs, payloads = transfer.of_these(request.indices)
        sequence = self._take_sequence(len(payloads))
        prefix = self._prefix(request, beam, 1, sequence, now_s)
        batch = prefixed_batch(prefix, refs, payloads, sequence)
        self._queue(batch, beam, now_s)

    def _queue(self, batch: SegmentBatch, beam: SatelliteId, now_s: float) -> None:
        """Where MACs are asked for, it is signed: a repetition anew."""
        self._batches.append((batch if self._authority is None else self._authority.sign(batch, now_s), beam))

    def _prefix(self, request: Request, beam: SatelliteId, body_bytes: int, sequence: int, now_s: float) -> bytes:
        """The headers, packed without a ``SkyHeader`` in between: a block takes dozens."""
        slot_moves, plane_moves = request.moves
        return _COMMAND_PREFIX.pack(
            *command_fields(request.op, sequence, COMMAND_PREFIX_BYTES + body_bytes),
            VERSION,
            request.op,
            0,
            Status.OK,
            _word(request.satellite),
            _GROUND | _word(beam),
            self._ground,
            request.request_id,
            HOP_LIMIT,
            0,
            0,
            int(now_s * 1e6) & 0xFFFFFFFF,
            slot_moves,
            plane_moves,
            self._credit,
            0,
            0,
        )

    def _take_sequence(self, count: int) -> int:
        first = self._sequence
        self._sequence = (first + count) & 0x3FFF
        return first
