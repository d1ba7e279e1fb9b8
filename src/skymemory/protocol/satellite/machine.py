"""State machine of a satellite: packets and timers in, datagrams out; no I/O.

- *packets*: ``receive_runs`` takes what arrived on a link. Packets in transit are forwarded; others go to their handler
  (``_handlers``), SET and MIGRATE to ``ChunkService``, LINKS to ``Neighbours``;
- *timers*: ``handle_timer`` runs ``_timers`` and ``_background_timers``;
- *operators*: ADVANCE, a packet too, moves the box.

After each event, the transport sends what ``datagrams_to_send`` returns. While its host is overloaded, a satellite only
answers, forwards and maintains its links; background work waits for ``work``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from skymemory import native
from skymemory.constellation.torus import SatelliteId
from skymemory.errors import MalformedPacket
from skymemory.placement.locate import Moves
from skymemory.protocol import messages
from skymemory.protocol.auth import SatelliteGate, claims_mac
from skymemory.protocol.clock import MoveClock, SkyMap
from skymemory.protocol.messages import OURS
from skymemory.protocol.satellite.checks import Checks, LossProofs
from skymemory.protocol.satellite.chunks import ChunkService
from skymemory.protocol.satellite.gossip import Gossip
from skymemory.protocol.satellite.links import Neighbours
from skymemory.protocol.satellite.migration import Migration
from skymemory.protocol.satellite.overload import Lateness
from skymemory.protocol.satellite.retention import Retention
from skymemory.protocol.satellite.state import SatelliteConfig, SatelliteState
from skymemory.protocol.satellite.sweep import ReplicaRepair, Sweep
from skymemory.protocol.wire import (
    COMMAND_BYTES,
    COMMAND_PREFIX_BYTES,
    SKY_BYTES,
    Address,
    Buffer,
    LinkEnd,
    Op,
    Packet,
    SegmentBatch,
    Status,
    UnknownOperation,
    destination_of,
    header_start,
    microseconds,
    parse_packet,
)

__all__ = ["SatelliteConfig", "SatelliteMachine"]
_CARRIERS = (Op.SET, Op.MIGRATE)
_NOTHING_SETTLED: set[bytes] = set()
_OVERLOAD_CHECK_S = 0.25

Timer = tuple[Callable[[], float], Callable[[float], None]]
"""Time at which it is next due (infinity: never), and its action."""


class SatelliteMachine:
    def __init__(
        self,
        config: SatelliteConfig,
        sky: SkyMap,
        clock: MoveClock,
        now_s: float,
        lateness: Lateness | None = None,
        transport_figures: Callable[[], dict[str, int]] = dict,
    ) -> None:
        """Create the machine. The transport updates ``lateness``; ``transport_figures`` are its housekeeping."""
        # State that all handlers share.
        self._state = state = SatelliteState(config, sky, clock, now_s, lateness)
        self.config = config
        self.lateness = state.lateness
        self.counters = state.counters
        self.store = state.store
        self.handover = state.handover
        self.backlog_bytes = 0
        self._address, self._locator, self._router = state.address, state.locator, state.router
        self._outbox, self._postponed = state.outbox, state.postponed
        self._transport_figures = transport_figures
        self._are_packets_next = False
        self._was_late = False
        self._overload_check_s = now_s
        self._healed_links_seen = 0

        # Handlers, each constructed with the handlers that it calls.
        self._gate: SatelliteGate | None = None
        if config.authority is not None:
            self._gate = SatelliteGate(config.authority, state.address, state.counters, state.outbox.refuse, now_s)
        self.neighbours = Neighbours(state)
        self._retention = Retention(state)
        self._checks = Checks(state)
        proofs = LossProofs(state, self._checks)
        self._gossip = Gossip(state, self._checks, proofs, now_s)
        self._sweep = Sweep(state, self._checks, proofs, self._gossip, now_s)
        self._repair = ReplicaRepair(state, self._checks, now_s)
        self._migration = Migration(state, self._sweep, self._retention)
        self._chunks = ChunkService(state, self._migration, self._gate)

        # Handler of each message. SET, MIGRATE and LINKS come in runs: see ``_handle_segments``,
        # ``_receive_segments``.
        self._handlers: dict[Op, Callable[[Packet, float], None]] = {
            # requests of clients
            Op.GET: self._on_get,
            Op.HAS: self._chunks.has,
            Op.EVICT: self._chunks.evict,
            Op.FORGET: self._chunks.forget,
            Op.LIST: self._chunks.list,
            Op.RETAIN: self._retention.receive,
            Op.PING: self._on_ping,
            Op.ADVANCE: self._on_advance,
            # requests of other satellites (which also send RETAIN and HAS)
            Op.NOTICE: self._gossip.receive,
            Op.CHECK: self._checks.receive,
            # answers of other satellites
            Op.ACK: self._on_ack,
            Op.UNREACHABLE: self._on_unreachable,
            Op.RETAINED: self._retention.answered,
            Op.UNSUPPORTED: self._retention.unsupported,
            Op.PRESENCE: self._sweep.answered,
            Op.CHECKED: self._on_checked,
        }

        # Timers, in the order in which they are handled. While the host is late, the background timers wait.
        self._timers: tuple[Timer, ...] = (
            # the box moves
            (self._locator.next_timer_s, self._follow_clock),
            # probes of neighbours, floods of link state
            (self.neighbours.next_timer_s, self.neighbours.handle_timer),
            (self._next_overload_check_s, self._check_overload),
        )
        self._background_timers: tuple[Timer, ...] = (
            # handed over and acknowledged: the grace period ends
            (self.handover.next_deletion_s, self._migration.delete_copied),
            # announce what was evicted
            (self._gossip.next_timer_s, self._gossip.handle_timer),
            # pins, leases and expiries end
            (self._retention.next_timer_s, self._retention.handle_timer),
            # incomplete blocks, lost copies
            (self._sweep.next_confirmation_s, self._sweep.confirm_suspicions),
            (self._repair.next_timer_s, self._repair.handle_timer),
            (self._sweep.next_sweep_s, self._sweep.sweep),
            # plan a handover, send bursts and send them again
            (self._migration.next_timer_s, self._migration.send_due),
        )
        self._due_s = tuple(due_s for due_s, _ in self._timers + self._background_timers)

    @property
    def moves(self) -> Moves:
        return self._locator.moves

    @property
    def hidden_work(self) -> tuple[int, int, int]:
        """Return work that no packet shows: satellites searched, chunks planned, packets postponed."""
        return self._state.links.satellites_searched, self.handover.chunks_planned, self._postponed.kept

    # --- Packets ---

    def receive_batch(self, data: Buffer, segment_bytes: int, source: LinkEnd, now_s: float) -> None:
        self.receive_runs([(memoryview(data), segment_bytes)], source, now_s)

    def receive_runs(self, runs: list[native.Run], source: LinkEnd, now_s: float) -> None:
        """Receive runs from a link. Data are only read during the call; malformed packets are counted, nothing
        raises.
        """
        # 1. Authentication. An address can be forged: with keys, only an authentic packet is a sign of life.
        is_authentic = True
        if self._gate is not None:
            runs, is_authentic = self._gate.admit(runs, source, now_s)
        if is_authentic and isinstance(source, SatelliteId):
            self.neighbours.on_packet_received(source, now_s)
        # 2. While the host is late, background packets wait.
        late = self.lateness.is_late(now_s)
        self._was_late |= late
        if late or self._postponed:
            runs = self._postponed.sift(runs, source, now_s)
        # 3. Everything else is processed.
        self._process_runs(runs, source, now_s)

    def _process_runs(self, runs: list[native.Run], source: LinkEnd, now_s: float) -> None:
        at = 0
        while at < len(runs):
            # Runs of plain SETs and MIGRATEs first: nearly all bytes that a satellite receives.
            stored = self._chunks.store_runs(runs, at, source, now_s)
            if stored:
                packets = sum(-(-len(view) // size) for view, size in runs[at : at + stored])
                self.counters.add("packets_received", packets)
                if not self.handover.idle:
                    self._send_or_postpone_handover(now_s)
            else:
                self._receive_run(*runs[at], source, now_s)
            at += stored or 1

    def _receive_run(self, view: memoryview, segment_bytes: int, source: LinkEnd, now_s: float) -> None:
        """Answer a plain GET at once; otherwise process a run whole, or by packet if its packets are of several
        requests.
        """
        count = -(-len(view) // segment_bytes) if segment_bytes > 0 else 1
        self.counters.add("packets_received", count)
        if segment_bytes < COMMAND_PREFIX_BYTES:
            self.counters.add("packets_malformed", max(1, count))
        elif self._chunks.answer_get(
            view, segment_bytes, source, now_s, self.backlog_bytes > self.config.max_backlog_bytes
        ):
            return
        elif native.same_journey(view, segment_bytes):
            self._receive_segments(view, segment_bytes, source, now_s)
        else:
            for at in range(0, len(view), segment_bytes):
                self._receive_segments(view[at : at + segment_bytes], segment_bytes, source, now_s)

    def _receive_segments(self, view: memoryview, segment_bytes: int, source: LinkEnd, now_s: float) -> None:
        """Forward packets in transit, and handle intact packets for this satellite; all are of a single request."""
        start = header_start(view)
        if len(view) < start + SKY_BYTES:
            self.counters.add("packets_malformed")
            return
        destination = destination_of(view)
        to_me = destination == self._address
        if isinstance(source, SatelliteId) and not to_me:  # in transit: the destination verifies the checksum
            self._forward(view, segment_bytes, destination, source, now_s)
            return
        codes = native.verify_segments(view, segment_bytes)
        bad = len(codes) - codes.count(0)
        if bad:
            self.counters.add("packets_malformed", bad)
        good = [view[i * segment_bytes : (i + 1) * segment_bytes] for i, code in enumerate(codes) if not code]
        if not good:
            return
        if not isinstance(source, SatelliteId):
            # Answers to this ground host leave by the link on which it was heard.
            self._router.remember(int.from_bytes(good[0][start + 12 : start + 16], "big"), source)
            if not to_me:
                intact = memoryview(b"".join(good)) if bad else view
                self._forward(intact, segment_bytes, destination, source, now_s)
                return
        if good[0][start + 1] == Op.LINKS:
            self._on_links(good, source, now_s)
        else:
            self._handle_segments(good, start, now_s)

    def _forward(
        self, view: memoryview, segment_bytes: int, destination: Address, source: LinkEnd, now_s: float
    ) -> None:
        forwarded = self._router.forward(view, segment_bytes, destination, source)
        if isinstance(forwarded, Status):
            self.counters.add("packets_unroutable")
            packet = self._parse_or_count(view[:segment_bytes])
            if packet is not None and packet.header.op.is_command:
                self._outbox.reply(packet.header, Op.UNREACHABLE, b"", now_s, forwarded)
            return
        self.counters.add("packets_forwarded", forwarded[0].count)
        self._outbox.send_by(*forwarded)

    def _handle_segments(self, segments: list[memoryview], start: int, now_s: float) -> None:
        carries = segments[0][start + 1] in _CARRIERS
        if claims_mac(segments[0], start) or (carries and start != COMMAND_BYTES):  # a gate removes MACs
            self.counters.add("packets_malformed", len(segments))
        elif carries:
            self._chunks.set(segments, start, now_s)
            if not self.handover.idle:
                self._send_or_postpone_handover(now_s)
        else:
            for segment in segments:
                self._handle_packet(segment, now_s)

    def _handle_packet(self, segment: memoryview, now_s: float) -> None:
        try:
            packet = parse_packet(segment)
        except UnknownOperation:
            self.counters.add("packets_unsupported")
            self._outbox.unsupported(segment, now_s)
            return
        except MalformedPacket:
            self.counters.add("packets_malformed")
            return
        try:
            if packet.header.op not in self._handlers:
                raise MalformedPacket(f"{packet.header.op.name} is not sent to satellites")
            self._handlers[packet.header.op](packet, now_s)
        except MalformedPacket:
            self.counters.add("packets_malformed")

    def _parse_or_count(self, view: memoryview) -> Packet | None:
        try:
            return parse_packet(view)
        except MalformedPacket:
            self.counters.add("packets_malformed")
            return None

    # --- Plain requests that the transport serves by itself, without a call per packet ---

    def plain_requests(self, now_s: float) -> native.PlainRequests | None:
        """Return what serves plain GETs and SETs until the next call, if possible. Report its work with
        ``record_served``.
        """
        settled = self._locator.settled if self.handover.at_rest else _NOTHING_SETTLED
        return None if self.backlog_bytes else self._chunks.plain_requests(settled, now_s)

    def record_served(self, served: Sequence[native.Served], now_s: float) -> None:
        self.counters.add("packets_received", self._chunks.count_served(served))
        for _, _, _, source, link, *_ in served:
            if isinstance(source, SatelliteId):
                self.neighbours.on_packet_received(source, now_s)
            self.neighbours.on_packet_sent(link, now_s)

    def routes(self, now_s: float) -> tuple[dict[int, SatelliteId], dict[int, LinkEnd]] | None:
        """Return next hops and beams until the next call, if nothing is postponed."""
        return None if self._postponed or self.lateness.is_late(now_s) else self._router.known()

    def record_passed(self, forwarded: Sequence[native.Passed], now_s: float) -> None:
        packets = 0
        for source, ground, link, passed_packets, _ in forwarded:
            packets += passed_packets
            if not isinstance(source, SatelliteId):
                self._router.remember(ground, source)
            elif self._gate is None:  # with keys, a packet for another satellite proves nothing
                self.neighbours.on_packet_received(source, now_s)
            self.neighbours.on_packet_sent(link, now_s)
        self.counters.add("packets_received", packets)
        self.counters.add("packets_forwarded", packets)

    def relay(self, batch: SegmentBatch, source: SatelliteId, now_s: float) -> tuple[SegmentBatch, LinkEnd] | None:
        """Forward a local satellite's answers unparsed: return them, hops counted, and their next link. None: they must
        come as packets.
        """
        destination = destination_of(batch.headers)
        if destination == self._address or self.routes(now_s) is None:
            return None
        headers = memoryview(batch.headers)
        forwarded = self._router.forward(headers, batch.header_bytes, destination, source)
        if isinstance(forwarded, Status):
            return None
        forwarded_batch, link = forwarded
        self.record_passed([(source, 0, link, forwarded_batch.count, [])], now_s)
        return SegmentBatch(forwarded_batch.headers, forwarded_batch.header_bytes, batch.payloads), link

    @property
    def wants_to_send(self) -> bool:
        return bool(self._outbox)

    # --- Datagrams to send ---

    def datagrams_to_send(self, now_s: float) -> list[tuple[SegmentBatch, LinkEnd]]:
        if self._healed_links_seen != self._state.links.healed:  # a destination may be reachable again
            self._healed_links_seen = self._state.links.healed
            self.handover.retry_unanswered(now_s)
        self._chunks.acknowledge(now_s)
        self._gossip.gather(now_s)
        batches = self._outbox.take()
        for _, link in batches:
            self.neighbours.on_packet_sent(link, now_s)
        return batches + self._outbox.take_links()

    # --- Timers ---

    def next_timer_s(self) -> float | None:
        timers = self._due_s[: len(self._timers)] if self._state.timers_wait else self._due_s
        soonest_s = min([due_s() for due_s in timers])
        return soonest_s if soonest_s < math.inf else None

    def handle_timer(self, now_s: float) -> None:
        for _, action in self._timers:
            action(now_s)
        if self._was_late:
            self._state.timers_wait = True
        else:
            self._run_background(now_s)

    def _next_overload_check_s(self) -> float:
        return self._overload_check_s if self._was_late else math.inf

    def _check_overload(self, now_s: float) -> None:
        late, was_late = self.lateness.is_late(now_s), self._was_late
        self._was_late, self._overload_check_s = late, now_s + _OVERLOAD_CHECK_S
        if was_late and not late:
            self.neighbours.probe_down(now_s)
            self.handover.retry_unanswered(now_s)

    def _run_background(self, now_s: float) -> None:
        self._state.timers_wait = False
        for _, action in self._background_timers:
            action(now_s)

    @property
    def wants_work(self) -> bool:
        return self._state.timers_wait or bool(self._postponed)

    def work(self, now_s: float) -> native.Run | None:
        """Do a piece of background work. Return processed packets."""
        packets_next, self._are_packets_next = self._are_packets_next, not self._are_packets_next
        if self._state.timers_wait and not (packets_next and self._postponed):
            self._run_background(now_s)
        elif (postponed := self._postponed.take(now_s)) is not None:
            view, size, source, arrived_s = postponed
            self._chunks.waited_s = now_s - arrived_s
            self._process_runs([(view, size)], source, now_s)
            self._chunks.waited_s = 0.0
            return view, size
        return None

    def _send_or_postpone_handover(self, now_s: float) -> None:
        if self.lateness.is_late(now_s):
            self._state.timers_wait = True
        else:
            self._migration.send_due(now_s)

    def _follow_clock(self, now_s: float) -> None:
        if self._locator.next_move_s is not None and now_s >= self._locator.next_move_s:
            self._follow_moves(now_s)

    def _follow_moves(self, now_s: float, pushed: bool = False) -> None:
        if self._locator.follow(now_s):
            if not self.lateness.is_late(now_s):
                self._sweep.before_handover(now_s)
            self._migration.box_moved(urgent=pushed)

    # --- Messages that concern several handlers, or the machine itself ---

    def _on_get(self, packet: Packet, now_s: float) -> None:
        if self.backlog_bytes > self.config.max_backlog_bytes:
            self._outbox.reply(packet.header, Op.BUSY, bytes(packet.body), now_s)
        else:
            self._chunks.get(packet, now_s)

    def _on_ack(self, packet: Packet, now_s: float) -> None:
        self._migration.acknowledged(packet, now_s)
        self._send_or_postpone_handover(now_s)

    def _on_unreachable(self, packet: Packet, now_s: float) -> None:
        self._migration.unreachable(packet, now_s)
        self._send_or_postpone_handover(now_s)

    def _on_checked(self, packet: Packet, now_s: float) -> None:
        self._checks.answered(packet, now_s)
        self._sweep.release_handover()

    def _on_links(self, segments: list[memoryview], source: LinkEnd, now_s: float) -> None:
        packets = [packet for segment in segments if (packet := self._parse_or_count(segment)) is not None]
        bad, pushed = self.neighbours.receive(packets, source, now_s)
        if bad:
            self.counters.add("packets_malformed", bad)
        if pushed:
            self._follow_moves(now_s, pushed=True)
            self._send_or_postpone_handover(now_s)

    def _on_advance(self, packet: Packet, now_s: float) -> None:
        pushed = messages.unpack_moves(packet.body)
        if not self._locator.may_push_to(pushed, now_s):
            self.counters.add("pushes_refused")
            self._outbox.reply(packet.header, Op.UNREACHABLE, b"", now_s, Status.REFUSED)
            return
        self._locator.push_to(pushed)
        self.neighbours.pushed_at_ms = microseconds(now_s) // 1000
        self._follow_moves(now_s, pushed=True)
        self._outbox.reply(packet.header, Op.ADVANCED, messages.pack_moves(*self._locator.pushed), now_s)
        self._send_or_postpone_handover(now_s)

    def _on_ping(self, packet: Packet, now_s: float) -> None:
        self._outbox.reply(packet.header, Op.PONG, messages.pack_housekeeping(self.housekeeping()), now_s)

    def housekeeping(self) -> dict[str, int]:
        return self.counters.as_dict() | dict(
            memory_used_bytes=self.store.used_bytes,
            memory_limit_bytes=self.store.limit_bytes,
            chunks_held=len(self.store),
            receive_credit_bytes=self.config.credit_bytes,
            migrations_retransmitted=self.handover.retransmitted,
            pinned_bytes=self.store.pinned_bytes,
            pushed_slot_moves=self._locator.pushed[0],
            pushed_plane_moves=self._locator.pushed[1],
            packets_shed=self._postponed.dropped,
            **OURS.figures(),
            **self.store.ledger.figures(),
            **self._transport_figures(),
        )
