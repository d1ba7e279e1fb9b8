"""What a ground host has to send: headers filled in, requests packed, batches queued by beam."""

from __future__ import annotations

from dataclasses import dataclass, field

from skymemory.constellation.torus import SatelliteId
from skymemory.placement.locate import Moves
from skymemory.protocol import messages
from skymemory.protocol.pacing import Window
from skymemory.protocol.segments import SegmentBatch, bulk_batch, single
from skymemory.protocol.selection import Selection
from skymemory.protocol.transfer import ReadTransfer, TransferReport, WriteTransfer
from skymemory.protocol.wire import GROUND_SHELL, Address, Op, SkyHeader

CREDIT_UNIT_BYTES = 4096


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
    indices: list[int]
    body: bytes
    begun_s: float
    deadline_s: float
    in_flight_bytes: int
    moves: Moves
    window: Window
    """The one it fills, whatever beam a later repetition takes."""
    attempts: int = 1


class Outbox:
    """Packs requests. ``gateway`` is None where every satellite has a beam of its own (``los``)."""

    def __init__(self, ground: int, credit_bytes: int) -> None:
        self.gateway: SatelliteId | None = None
        self._ground = ground
        self._credit = credit_bytes // CREDIT_UNIT_BYTES
        self._sequence = 0
        self._batches: list[tuple[SegmentBatch, SatelliteId]] = []

    def beam(self, satellite: SatelliteId) -> SatelliteId:
        """The satellite we talk to for the sake of this one."""
        return satellite if self.gateway is None else self.gateway

    def take(self) -> list[tuple[SegmentBatch, SatelliteId]]:
        batches, self._batches = self._batches, []
        return batches

    def transmit(self, request: Request, now_s: float) -> None:
        """Queue the request's packets, as many as it still wants answered."""
        transfer = request.operation.transfer
        header = self._header(request, now_s)
        beam = self.beam(request.satellite)
        if isinstance(transfer, WriteTransfer):
            payloads = [transfer.payloads[index] for index in request.indices]
            sequence = self._take_sequence(len(payloads))
            batch = bulk_batch(header, transfer.refs[request.indices], payloads, sequence, now_s)
        else:
            if isinstance(transfer, ReadTransfer):
                request.body = Selection.of(transfer.info.key, request.indices, transfer.info.servers).pack()
            batch = single(messages.build_packet(header, request.body, self._take_sequence(1), now_s))
        self._batches.append((batch, beam))

    def _header(self, request: Request, now_s: float) -> SkyHeader:
        satellite, beam = request.satellite, self.beam(request.satellite)
        return SkyHeader(
            request.op, Address(satellite.plane, satellite.slot), Address(beam.plane, beam.slot, GROUND_SHELL),
            self._ground, request.request_id, timestamp_us=int(now_s * 1e6) & 0xFFFFFFFF,
            slot_moves=request.moves[0], plane_moves=request.moves[1], credit=self._credit,
        )  # fmt: skip

    def _take_sequence(self, count: int) -> int:
        first = self._sequence
        self._sequence = (first + count) & 0x3FFF
        return first
