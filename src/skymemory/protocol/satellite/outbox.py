"""What a satellite has to say: answers, commands of its own, packets in transit; each with the link it leaves by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from skymemory import native
from skymemory.constellation.torus import SatelliteId
from skymemory.errors import MalformedPacket
from skymemory.metrics import Counters
from skymemory.protocol import messages
from skymemory.protocol.capabilities import OURS
from skymemory.protocol.routing import LinkEnd, Router
from skymemory.protocol.satellite.config import SatelliteConfig
from skymemory.protocol.satellite.locator import Whereabouts
from skymemory.protocol.satellite.memory import Chunk, Share
from skymemory.protocol.segments import SegmentBatch, bulk_batch, single
from skymemory.protocol.wire import (
    CHUNK_REF_BYTES,
    COMMAND_BYTES,
    CREDIT_UNIT_BYTES,
    GROUND_SHELL,
    MOST_CREDIT,
    SKY_BYTES,
    TELEMETRY_PREFIX_BYTES,
    Address,
    Op,
    SkyHeader,
    Status,
)


class Departures:
    """Packs and queues what leaves. The config's ``credit_bytes`` is offered in every header, its authority signs."""

    def __init__(
        self, address: Address, whereabouts: Whereabouts, router: Router, counters: Counters, config: SatelliteConfig
    ) -> None:
        self._address = address
        self._whereabouts = whereabouts
        self._router = router
        self._counters = counters
        self._credit = min(config.credit_bytes // CREDIT_UNIT_BYTES, MOST_CREDIT)
        self._authority = config.authority
        self._sequence = 0
        self._outgoing: list[tuple[SegmentBatch, LinkEnd]] = []
        self._told: list[tuple[SegmentBatch, LinkEnd]] = []

    def take_told(self) -> list[tuple[SegmentBatch, LinkEnd]]:
        """``take`` for what neighbours are told: no traffic, so no reason to ask whether they are alive."""
        told, self._told = self._told, []
        return told

    def take(self) -> list[tuple[SegmentBatch, LinkEnd]]:
        """Batches with the link each leaves by; they are handed out once."""
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    def pass_on(self, batch: SegmentBatch, link: LinkEnd) -> None:
        """Packets of others, on their way."""
        self._outgoing.append((batch, link))

    def reply(
        self,
        request: SkyHeader,
        op: Op,
        body: bytes | bytearray,
        now_s: float,
        status: Status = Status.OK,
        flags: int = 0,
    ) -> None:
        """One control packet back to whoever asked."""
        header = self._answer(request, op, status)._replace(flags=flags)
        packet = messages.build_packet(header, bytes(body), self._take_sequence(1), now_s)
        self._send(single(packet), request.source, now_s)

    def reply_chunks(self, request: SkyHeader, chunks: Sequence[Chunk], now_s: float) -> None:
        """DATA: one packet per chunk."""
        self._send(self._bulk(self._answer(request, Op.DATA, Status.OK), chunks, now_s), request.source, now_s)

    def terms(self, now_s: float) -> native.AnswerTerms:
        """What an answer of ours says beyond the request and the chunks."""
        seconds = int(now_s)
        fraction = int((now_s - seconds) * 65536)
        return *self._whereabouts.moves, self._credit, seconds & 0xFFFFFFFF, fraction, self._sequence

    def sent(self, packets: int) -> None:
        """So many packets left by ``terms``: the sequence goes on after them."""
        self._take_sequence(packets)

    def data_for(
        self, get: memoryview, shares: Mapping[bytes, Share], now_s: float
    ) -> tuple[bytes, SegmentBatch] | None:
        """Key and DATA packets for a GET as it came, if all it wants is in ``shares``; not queued."""
        answer = native.answer_get(get, shares, self.terms(now_s))
        if answer is None:
            return None
        key, headers, payloads = answer
        self.sent(len(payloads))
        batch = SegmentBatch(headers, TELEMETRY_PREFIX_BYTES + CHUNK_REF_BYTES, payloads)
        return key, self._signed(batch, now_s)

    def refuse(self, command: memoryview, link: LinkEnd, now_s: float) -> None:
        """Tell a ground host, by the link it came by, that its command was not taken: it is not to wait."""
        with suppress(MalformedPacket):
            header = self._answer(SkyHeader.unpack(command, COMMAND_BYTES), Op.UNREACHABLE, Status.REFUSED)
            packet = messages.build_packet(header, b"", self._take_sequence(1), now_s)
            self._outgoing.append((self._signed(single(packet), now_s), link))

    def unsupported(self, command: memoryview, now_s: float) -> None:
        """Tell who sent a sound command whose operation this release does not know, and what it does know."""
        op_at = COMMAND_BYTES + 1
        op, known = command[op_at], bytearray(command[: COMMAND_BYTES + SKY_BYTES])
        known[op_at] = Op.PING
        self.reply(SkyHeader.unpack(known, COMMAND_BYTES), Op.UNSUPPORTED, OURS.pack_unsupported(op), now_s)

    def command(self, op: Op, there: SatelliteId, request_id: int, body: bytes, now_s: float) -> None:
        """One control packet of our own to another satellite."""
        slot_moves, plane_moves = self._whereabouts.moves
        header = SkyHeader(
            op,
            Address(*there),
            self._address,
            0,
            request_id,
            slot_moves=slot_moves,
            plane_moves=plane_moves,
            credit=self._credit,
        )
        packet = messages.build_packet(header, body, self._take_sequence(1), now_s)
        self._send(single(packet), header.destination, now_s)

    def tell_ground(self, op: Op, body: bytes, most: int, now_s: float) -> int:
        """Telemetry that nobody asked for, to the ground hosts heard of last, ``most`` of them; how many."""
        slot_moves, plane_moves = self._whereabouts.moves
        there = Address(self._address.plane, self._address.slot, GROUND_SHELL)
        hosts = self._router.heard_last(most)
        for ground in hosts:
            header = SkyHeader(
                op, there, self._address, ground, 0, slot_moves=slot_moves, plane_moves=plane_moves, credit=self._credit
            )
            self._send(single(messages.build_packet(header, body, self._take_sequence(1), now_s)), there, now_s)
        return len(hosts)

    def migrate(self, there: Address, request_id: int, chunks: Sequence[Chunk], now_s: float) -> None:
        """MIGRATE: one packet per chunk, to another satellite."""
        slot_moves, plane_moves = self._whereabouts.moves
        header = SkyHeader(
            Op.MIGRATE,
            there,
            self._address,
            0,
            request_id,
            slot_moves=slot_moves,
            plane_moves=plane_moves,
            credit=self._credit,
            timestamp_us=int(now_s * 1e6) & 0xFFFFFFFF,
        )
        self._send(self._bulk(header, chunks, now_s), there, now_s)

    def tell(self, neighbour: SatelliteId, body: bytes, now_s: float) -> None:
        """LINKS: to a neighbour by our link to it, whatever the routes say."""
        slot_moves, plane_moves = self._whereabouts.moves
        header = SkyHeader(
            Op.LINKS,
            Address(*neighbour),
            self._address,
            0,
            0,
            slot_moves=slot_moves,
            plane_moves=plane_moves,
            credit=self._credit,
        )
        packet = messages.build_packet(header, body, self._take_sequence(1), now_s)
        self._told.append((self._signed(single(packet), now_s), neighbour))

    def _bulk(self, header: SkyHeader, chunks: Sequence[Chunk], now_s: float) -> SegmentBatch:
        refs, payloads = zip(*chunks, strict=True)
        return bulk_batch(header, b"".join(refs), payloads, self._take_sequence(len(chunks)), now_s)

    def _answer(self, request: SkyHeader, op: Op, status: Status) -> SkyHeader:
        slot_moves, plane_moves = self._whereabouts.moves
        return SkyHeader(
            op,
            request.source,
            self._address,
            request.ground,
            request.request_id,
            status,
            timestamp_us=request.timestamp_us,
            slot_moves=slot_moves,
            plane_moves=plane_moves,
            credit=self._credit,
        )

    def _take_sequence(self, count: int) -> int:
        first = self._sequence
        self._sequence = (first + count) & 0x3FFF
        return first

    def _signed(self, batch: SegmentBatch, now_s: float) -> SegmentBatch:
        """Where MACs are asked for, with them: a command always, an answer if every packet has one."""
        return batch if self._authority is None else self._authority.sign(batch, now_s)

    def _send(self, batch: SegmentBatch, destination: Address, now_s: float) -> None:
        to = self._router.exit_for(destination, batch.headers)
        if to is None:
            self._counters.add("packets_unroutable", batch.count)
        else:
            self._outgoing.append((self._signed(batch, now_s), to))
