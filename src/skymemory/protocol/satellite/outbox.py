"""Outgoing packets of a satellite: answers, its own commands, packets in transit; each with the link it leaves by."""

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
    """Packs, signs and queues packets. Every header carries the current moves and offers senders their share of
    ``credit_bytes``.
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
        self._links: list[tuple[SegmentBatch, LinkEnd]] = []

    # --- The queues ---

    def __bool__(self) -> bool:
        return bool(self._outgoing or self._links)

    def take(self) -> list[tuple[SegmentBatch, LinkEnd]]:
        """Batches with the link each leaves by, except LINKS; each is returned once."""
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    def take_links(self) -> list[tuple[SegmentBatch, LinkEnd]]:
        """``take`` for LINKS: these do not count as traffic, so they do not make their neighbour be probed."""
        links, self._links = self._links, []
        return links

    def send_by(self, batch: SegmentBatch, link: LinkEnd) -> None:
        """Queue packets that are complete, such as those in transit."""
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
        """One control packet to the sender of ``request``."""
        header = self._answer(request, op, status, flags)
        packet = build_packet(header, bytes(body), self._take_sequence(1), now_s)
        self._send(single(packet), request.source, now_s)

    def reply_chunks(self, request: SkyHeader, chunks: Sequence[Chunk], now_s: float) -> None:
        """DATA: one packet per chunk."""
        self._send(self._bulk(self._answer(request, Op.DATA), chunks, now_s), request.source, now_s)

    def data_for(
        self, get: memoryview, shares: Mapping[bytes, Share], now_s: float
    ) -> tuple[bytes, SegmentBatch] | None:
        """Key and DATA packets for a GET as received, if all requested chunks are in ``shares``; not queued."""
        answer = native.answer_get(get, shares, self.terms(now_s))
        if answer is None:
            return None
        key, headers, payloads = answer
        self.sent(len(payloads))
        batch = SegmentBatch(headers, TELEMETRY_PREFIX_BYTES + CHUNK_REF_BYTES, payloads)
        return key, self._signed(batch, now_s)

    def terms(self, now_s: float) -> native.AnswerTerms:
        """The header fields of an answer that come neither from the request nor from the chunks."""
        return *self._locator.moves, self._credit_units(), *telemetry_time(now_s), self._sequence

    def sent(self, packets: int) -> None:
        """Count packets that left by ``terms``: the sequence continues after them."""
        self._take_sequence(packets)

    def refuse(self, command: memoryview, link: LinkEnd, now_s: float) -> None:
        """Answer a ground host's refused command on the link it came by, so that its sender does not wait."""
        with suppress(MalformedPacket):
            header = self._answer(SkyHeader.unpack(command, COMMAND_BYTES), Op.UNREACHABLE, Status.REFUSED)
            packet = build_packet(header, b"", self._take_sequence(1), now_s)
            self._outgoing.append((self._signed(single(packet), now_s), link))

    def unsupported(self, command: memoryview, now_s: float) -> None:
        """Answer a sound command whose operation this release does not know with what it supports."""
        op_at = COMMAND_BYTES + 1
        op, known = command[op_at], bytearray(command[: COMMAND_BYTES + SKY_BYTES])
        known[op_at] = Op.PING  # any known operation, so that the header can be parsed
        self.reply(SkyHeader.unpack(known, COMMAND_BYTES), Op.UNSUPPORTED, OURS.pack_unsupported(op), now_s)

    # --- Commands and notifications of this satellite ---

    def command(self, op: Op, there: SatelliteId, request_id: int, body: bytes, now_s: float) -> None:
        """One control packet to another satellite."""
        header = self._header(op, Address(*there), request_id)
        packet = build_packet(header, body, self._take_sequence(1), now_s)
        self._send(single(packet), header.destination, now_s)

    def migrate(self, there: SatelliteId, request_id: int, chunks: Sequence[Chunk], now_s: float) -> None:
        """MIGRATE: one packet per chunk, to another satellite."""
        header = self._header(Op.MIGRATE, Address(*there), request_id, microseconds(now_s) & 0xFFFFFFFF)
        self._send(self._bulk(header, chunks, now_s), header.destination, now_s)

    def send_links(self, neighbour: SatelliteId, body: bytes, now_s: float) -> None:
        """LINKS: to a neighbour by the link to it, whatever the routes say."""
        packet = build_packet(self._header(Op.LINKS, Address(*neighbour)), body, self._take_sequence(1), now_s)
        self._links.append((self._signed(single(packet), now_s), neighbour))

    def notify_ground(self, op: Op, body: bytes, most: int, now_s: float) -> int:
        """Unsolicited telemetry to the ``most`` ground hosts heard of last; how many there were."""
        there = Address(self._address.plane, self._address.slot, GROUND_SHELL)
        hosts = self._router.heard_last(most)
        for ground in hosts:
            header = self._header(op, there, ground=ground)
            self._send(single(build_packet(header, body, self._take_sequence(1), now_s)), there, now_s)
        return len(hosts)

    # --- Headers, sequence counts, signatures ---

    def _answer(self, request: SkyHeader, op: Op, status: Status = Status.OK, flags: int = 0) -> SkyHeader:
        there, echo_us = request.source, request.timestamp_us
        return self._header(op, there, request.request_id, echo_us, request.ground, status, flags)

    def _header(
        self,
        op: Op,
        there: Address,
        request_id: int = 0,
        timestamp_us: int = 0,
        ground: int = 0,
        status: Status = Status.OK,
        flags: int = 0,
    ) -> SkyHeader:
        slot_moves, plane_moves = self._locator.moves
        return SkyHeader(
            op,
            there,
            self._address,
            ground,
            request_id,
            status,
            timestamp_us=timestamp_us,
            slot_moves=slot_moves,
            plane_moves=plane_moves,
            credit=self._credit_units(),
            flags=flags,
        )

    def _bulk(self, header: SkyHeader, chunks: Sequence[Chunk], now_s: float) -> SegmentBatch:
        refs, payloads = zip(*chunks, strict=True)
        return bulk_batch(header, b"".join(refs), payloads, self._take_sequence(len(chunks)), now_s)

    def _credit_units(self) -> int:
        return min(self.credit.each_bytes // CREDIT_UNIT_BYTES, MOST_CREDIT)

    def _take_sequence(self, count: int) -> int:
        first = self._sequence
        self._sequence = (first + count) & 0x3FFF
        return first

    def _signed(self, batch: SegmentBatch, now_s: float) -> SegmentBatch:
        """With MACs where the constellation has keys: every command; answers only if every packet has one."""
        return batch if self._authority is None else self._authority.sign(batch, now_s)

    def _send(self, batch: SegmentBatch, destination: Address, now_s: float) -> None:
        to = self._router.exit_for(destination, batch.headers)
        if to is None:
            self._counters.add("packets_unroutable", batch.count)
        else:
            self._outgoing.append((self._signed(batch, now_s), to))
