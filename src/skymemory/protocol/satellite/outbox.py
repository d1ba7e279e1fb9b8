"""Outgoing packets of a satellite, each with its link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from skymemory import native
from skymemory.constellation.torus import SatelliteId
from skymemory.errors import MalformedPacket
from skymemory.metrics import Counters
from skymemory.protocol.auth import Authority
from skymemory.protocol.clock import Locator
from skymemory.protocol.congestion import Credit
from skymemory.protocol.messages import OURS
from skymemory.protocol.satellite.memory import Chunk, Share
from skymemory.protocol.satellite.routing import Router
from skymemory.protocol.wire import (
    CHUNK_REF_BYTES,
    COMMAND_BYTES,
    CREDIT_UNIT_BYTES,
    GROUND_SHELL,
    MOST_CREDIT,
    SKY_BYTES,
    TELEMETRY_PREFIX_BYTES,
    Address,
    LinkEnd,
    Op,
    SegmentBatch,
    SkyHeader,
    Status,
    build_packet,
    bulk_batch,
    microseconds,
    single,
    telemetry_time,
)

_LEAST_CREDIT_BYTES = 128 * 1024


class Outbox:
    """Queue of packets, packed and signed here. Every header carries the current moves and offers senders their share
    of ``credit_bytes``.
    """

    def __init__(
        self,
        address: Address,
        locator: Locator,
        router: Router,
        counters: Counters,
        credit_bytes: int,
        authority: Authority | None,
    ) -> None:
        self._address = address
        self._locator = locator
        self._router = router
        self._counters = counters
        self.credit = Credit(credit_bytes, _LEAST_CREDIT_BYTES)
        self._authority = authority
        self._sequence = 0
        self._outgoing: list[tuple[SegmentBatch, LinkEnd]] = []
        self._outgoing_links: list[tuple[SegmentBatch, LinkEnd]] = []

    # --- The queues ---

    def __bool__(self) -> bool:
        return bool(self._outgoing or self._outgoing_links)

    def take(self) -> list[tuple[SegmentBatch, LinkEnd]]:
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    def take_links(self) -> list[tuple[SegmentBatch, LinkEnd]]:
        links, self._outgoing_links = self._outgoing_links, []
        return links

    def send_by(self, batch: SegmentBatch, link: LinkEnd) -> None:
        self._outgoing.append((batch, link))

    # --- Answers ---

    def reply(
        self,
        request: SkyHeader,
        op: Op,
        body: bytes | bytearray,
        now_s: float,
        status: Status = Status.OK,
        flags: int = 0,
    ) -> None:
        header = self._make_answer_header(request, op, status, flags)
        packet = build_packet(header, bytes(body), self._take_sequence(1), now_s)
        self._send(single(packet), request.source, now_s)

    def reply_chunks(self, request: SkyHeader, chunks: Sequence[Chunk], now_s: float) -> None:
        self._send(self._bulk_packets(self._make_answer_header(request, Op.DATA), chunks, now_s), request.source, now_s)

    def data_for(
        self, get: memoryview, shares: Mapping[bytes, Share], now_s: float
    ) -> tuple[bytes, SegmentBatch] | None:
        """Return key and DATA packets for a GET, if all its chunks are in ``shares``; the caller sends them."""
        answer = native.answer_get(get, shares, self.terms(now_s))
        if answer is None:
            return None
        key, headers, payloads = answer
        self.sent(len(payloads))
        batch = SegmentBatch(headers, TELEMETRY_PREFIX_BYTES + CHUNK_REF_BYTES, payloads)
        return key, self._sign(batch, now_s)

    def terms(self, now_s: float) -> native.AnswerTerms:
        """Return the header fields common to all answers: moves, credit, time and sequence count."""
        return *self._locator.moves, self._credit_units(), *telemetry_time(now_s), self._sequence

    def sent(self, packets: int) -> None:
        self._take_sequence(packets)

    def refuse(self, command: memoryview, link: LinkEnd, now_s: float) -> None:
        """Answer a ground host's refused command on its incoming link."""
        with suppress(MalformedPacket):
            header = self._make_answer_header(SkyHeader.unpack(command, COMMAND_BYTES), Op.UNREACHABLE, Status.REFUSED)
            packet = build_packet(header, b"", self._take_sequence(1), now_s)
            self._outgoing.append((self._sign(single(packet), now_s), link))

    def unsupported(self, command: memoryview, now_s: float) -> None:
        op_at = COMMAND_BYTES + 1
        op, known = command[op_at], bytearray(command[: COMMAND_BYTES + SKY_BYTES])
        known[op_at] = Op.PING  # any known operation, so that the header can be parsed
        self.reply(SkyHeader.unpack(known, COMMAND_BYTES), Op.UNSUPPORTED, OURS.pack_unsupported(op), now_s)

    # --- Commands and notifications of this satellite ---

    def command(self, op: Op, target: SatelliteId, request_id: int, body: bytes, now_s: float) -> None:
        header = self._make_header(op, Address(*target), request_id)
        packet = build_packet(header, body, self._take_sequence(1), now_s)
        self._send(single(packet), header.destination, now_s)

    def migrate(self, target: SatelliteId, request_id: int, chunks: Sequence[Chunk], now_s: float) -> None:
        header = self._make_header(Op.MIGRATE, Address(*target), request_id, microseconds(now_s) & 0xFFFFFFFF)
        self._send(self._bulk_packets(header, chunks, now_s), header.destination, now_s)

    def send_links(self, neighbour: SatelliteId, body: bytes, now_s: float) -> None:
        packet = build_packet(self._make_header(Op.LINKS, Address(*neighbour)), body, self._take_sequence(1), now_s)
        self._outgoing_links.append((self._sign(single(packet), now_s), neighbour))

    def notify_ground(self, op: Op, body: bytes, most: int, now_s: float) -> int:
        """Send telemetry to the ``most`` ground hosts heard last. Return their number."""
        destination = Address(self._address.plane, self._address.slot, GROUND_SHELL)
        hosts = self._router.heard_last(most)
        for ground in hosts:
            header = self._make_header(op, destination, ground=ground)
            self._send(single(build_packet(header, body, self._take_sequence(1), now_s)), destination, now_s)
        return len(hosts)

    # --- Headers, sequence counts, signatures ---

    def _make_answer_header(self, request: SkyHeader, op: Op, status: Status = Status.OK, flags: int = 0) -> SkyHeader:
        header = self._make_header(op, request.source, request.request_id, request.timestamp_us, request.ground)
        return header if status is Status.OK and not flags else header._replace(status=status, flags=flags)

    def _make_header(
        self,
        op: Op,
        target: Address,
        request_id: int = 0,
        timestamp_us: int = 0,
        ground: int = 0,
    ) -> SkyHeader:
        slot_moves, plane_moves = self._locator.moves
        return SkyHeader(
            op,
            target,
            self._address,
            ground,
            request_id,
            timestamp_us=timestamp_us,
            slot_moves=slot_moves,
            plane_moves=plane_moves,
            credit=self._credit_units(),
        )

    def _bulk_packets(self, header: SkyHeader, chunks: Sequence[Chunk], now_s: float) -> SegmentBatch:
        refs, payloads = zip(*chunks, strict=True)
        return bulk_batch(header, b"".join(refs), payloads, self._take_sequence(len(chunks)), now_s)

    def _credit_units(self) -> int:
        return min(self.credit.each_bytes // CREDIT_UNIT_BYTES, MOST_CREDIT)

    def _take_sequence(self, count: int) -> int:
        first = self._sequence
        self._sequence = (first + count) & 0x3FFF
        return first

    def _sign(self, batch: SegmentBatch, now_s: float) -> SegmentBatch:
        return batch if self._authority is None else self._authority.sign(batch, now_s)

    def _send(self, batch: SegmentBatch, destination: Address, now_s: float) -> None:
        link = self._router.exit_for(destination, batch.headers)
        if link is None:
            self._counters.add("packets_unroutable", batch.count)
        else:
            self._outgoing.append((self._sign(batch, now_s), link))
