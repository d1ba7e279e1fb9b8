"""A satellite without I/O: what it does with every datagram, and when.

The transport calls ``receive_runs`` (or one of its kin) with what came from a link, ``handle_timer`` when
``next_timer_s`` has passed, and then sends what ``datagrams_to_send`` returns. Link ends are ``SatelliteId`` for a
neighbour and any hashable token of the transport's for a ground host.

While its host is late (``Lateness``, which the transport measures) a satellite only answers, forwards, and keeps its
links: all else waits until the transport has a moment to call ``work``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from skymemory import native
from skymemory.constellation.torus import SatelliteId
from skymemory.errors import MalformedPacket
from skymemory.eviction.policies import replacement_named
from skymemory.metrics import Counters
from skymemory.placement.locate import Moves
from skymemory.protocol import messages
from skymemory.protocol.auth import SatelliteGate, claims_mac
from skymemory.protocol.capabilities import OURS
from skymemory.protocol.clock import MoveClock, SkyMap
from skymemory.protocol.messages import Buffer, Packet
from skymemory.protocol.routing import LinkEnd, LinkState, Router, header_start, same_journey
from skymemory.protocol.satellite.chunks import ChunkService, PlainCases, PlainRequests
from skymemory.protocol.satellite.config import SatelliteConfig
from skymemory.protocol.satellite.eviction import Forgetting
from skymemory.protocol.satellite.links import Neighbourhood
from skymemory.protocol.satellite.locator import MOST_PUSHED, Whereabouts
from skymemory.protocol.satellite.memory import ChunkStore
from skymemory.protocol.satellite.migration import Migration, handover_of
from skymemory.protocol.satellite.outbox import Departures
from skymemory.protocol.satellite.overload import Lateness, Postponed
from skymemory.protocol.satellite.tombstones import Latecomers
from skymemory.protocol.segments import SegmentBatch
from skymemory.protocol.wire import (
    COMMAND_BYTES,
    COMMAND_PREFIX_BYTES,
    SKY_BYTES,
    Address,
    Op,
    SkyHeader,
    Status,
    UnknownOperation,
)

__all__ = ["SatelliteConfig", "SatelliteMachine"]
_CARRIERS = (Op.SET, Op.MIGRATE)
_NOTHING_SETTLED: set[bytes] = set()
_LOOK_S = 0.25


class SatelliteMachine:
    """One satellite: chunk memory, forwarding, answers, and its own migration."""

    def __init__(
        self, config: SatelliteConfig, sky: SkyMap, clock: MoveClock, now_s: float, lateness: Lateness | None = None
    ) -> None:
        """``lateness``: of the host, kept up to date by its transport (default: never late)."""
        self.config = config
        self.lateness = lateness or Lateness()
        self.counters = Counters()
        self.store = ChunkStore(config.memory_bytes, replacement_named(config.replacement))
        self.handover = handover_of(config, self.lateness)
        self.backlog_bytes = 0
        """Set by the transport: bytes it was given and has not sent yet."""
        self.transport_figures: Callable[[], dict[str, int]] = dict
        """Set by the transport: its own housekeeping (``delay_error_p99_us``, ``faults_injected``)."""
        self._address = Address(config.address.plane, config.address.slot)
        self._whereabouts = Whereabouts(config.address, sky, clock, now_s)
        links = LinkState(sky.torus)
        self._router = Router(config.address, sky.torus, config.routing, links)
        self._departures = Departures(self._address, self._whereabouts, self._router, self.counters, config)
        self._gate = SatelliteGate.of(config.authority, self._address, self.counters, self._departures.refuse, now_s)
        self.neighbourhood = Neighbourhood(
            config.address,
            sky.torus,
            links,
            clock.pushed,
            config.neighbour_patience_s,
            self._departures.tell,
            self.lateness,
            partial(self._whereabouts.may_push_to, most=MOST_PUSHED),
        )
        self._postponed = Postponed()
        self._timers_wait = False
        """Whether background timers have gone off that ``work`` is to see to."""
        self._packets_next = False
        """Of what ``work`` is to do; timers and packets take turns, for there are always timers in a handover."""
        self._was_late = False
        self._look_s = now_s
        """When to look whether our host is on time again."""
        self._healed = 0
        self._latecomers = Latecomers(config.address, sky, self._whereabouts)
        self._chunks = ChunkService(
            self.store,
            self._departures,
            self.counters,
            self._stored,
            self._whereabouts.home,
            self._latecomers,
            self._settled,
        )
        self._forgetting = Forgetting(
            config,
            self.store,
            self._whereabouts,
            sky,
            self._departures,
            self.counters,
            self.handover,
            self._settled_chunks,
            self._latecomers,
            now_s,
        )
        self._migration = Migration(
            config.address,
            self.store,
            self.handover,
            self._whereabouts,
            self._departures,
            self._forgetting,
            self.counters,
        )
        self._chunks.on_set = self._forgetting.stored
        self._chunks.on_served = self._forgetting.retention.served
        self._plain = PlainCases(self._address, self._chunks, self._departures, self._router, self._gate)
        self._handlers: dict[Op, Callable[[Packet, float], None]] = {
            Op.GET: self._get,
            Op.HAS: self._chunks.has,
            Op.EVICT: self._chunks.evict,
            Op.FORGET: self._chunks.forget,
            Op.LIST: self._chunks.list,
            Op.PING: self._ping,
            Op.ADVANCE: self._advance,
            Op.ACK: self._acknowledged,
            Op.UNREACHABLE: self._unreachable,
            **self._forgetting.handlers,
        }

    @property
    def moves(self) -> Moves:
        return self._whereabouts.moves

    @property
    def hidden_work(self) -> tuple[int, int, int]:
        """Satellites looked at to find ways, chunks looked at by plans and packets put off so far: work that no packet
        shows, for a transport that counts what work costs.
        """
        return self.neighbourhood.links.satellites_searched, self.handover.chunks_planned, self._postponed.kept

    # --- the verbs of the transport ---

    def receive_datagram(self, data: Buffer, source: LinkEnd, now_s: float) -> None:
        self.receive_batch(data, len(data), source, now_s)

    def receive_batch(self, data: Buffer, segment_bytes: int, source: LinkEnd, now_s: float) -> None:
        """Take packets of ``segment_bytes`` each (the last may be shorter) from one link."""
        self.receive_runs([(memoryview(data), segment_bytes)], source, now_s)

    def receive_runs(self, runs: list[native.Run], source: LinkEnd, now_s: float) -> None:
        """``receive_batch`` for each of several from one link.

        The data are only read during the call. Malformed packets are counted and dropped; nothing raises.
        """
        heard = True
        if self._gate is not None:  # an address can be borrowed: with keys only what is authentic is a sign of life
            runs, heard = self._gate.admit(runs, source, now_s)
        if heard and isinstance(source, SatelliteId):
            self.neighbourhood.heard(source, now_s)
        late = self.lateness.is_late(now_s)
        self._was_late |= late
        if late or self._postponed:
            runs = self._postponed.sift(runs, source, now_s)
        self._take(runs, source, now_s)

    def _take(self, runs: list[native.Run], source: LinkEnd, now_s: float) -> None:
        at = 0
        while at < len(runs):
            taken = self._plain.store(runs, at, source, now_s)
            if taken:
                packets = sum(-(-len(view) // size) for view, size in runs[at : at + taken])
                self.counters.add("packets_received", packets)
                if not self.handover.idle:
                    self._hand_over(now_s)
            else:
                self._receive_run(*runs[at], source, now_s)
            at += taken or 1

    def plain_requests(self, now_s: float) -> PlainRequests | None:
        """What the transport needs to serve plain requests without asking, until it calls any other verb; None: not
        now. ``served`` must be told what came of it.
        """
        settled = self._whereabouts.settled if self.handover.at_rest else _NOTHING_SETTLED
        return None if self.backlog_bytes else self._plain.terms(settled, now_s)

    def served(self, served: Sequence[native.Served]) -> None:
        self.counters.add("packets_received", self._plain.served(served))

    def datagrams_to_send(self, now_s: float) -> list[tuple[SegmentBatch, LinkEnd]]:
        """Batches with the link each leaves by; they are handed out once."""
        if self._healed != self.neighbourhood.links.healed:
            self._healed = self.neighbourhood.links.healed
            self.handover.relieved(now_s)
        self._chunks.acknowledge(now_s)
        self._forgetting.gather(now_s)
        batches = self._departures.take()
        for _, link in batches:
            self.neighbourhood.used(link, now_s)
        return batches + self._departures.take_told()

    def next_timer_s(self) -> float | None:
        times_s = [self._whereabouts.next_move_s, self.neighbourhood.next_timer_s()]
        if self._was_late:
            times_s.append(self._look_s)
        if not self._timers_wait:
            times_s += self._migration.next_timer_s(), self._forgetting.next_timer_s()
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    def handle_timer(self, now_s: float) -> None:
        next_move_s = self._whereabouts.next_move_s
        if next_move_s is not None and now_s >= next_move_s:
            self._follow_clock(now_s)
        self.neighbourhood.handle_timer(now_s)
        late, was_late = self.lateness.is_late(now_s), self._was_late
        self._was_late, self._look_s = late, now_s + _LOOK_S
        if was_late and not late:
            self.neighbourhood.relieved(now_s)
            self.handover.relieved(now_s)
        if late:
            self._timers_wait = True
        else:
            self._background(now_s)

    @property
    def wants_work(self) -> bool:
        """Whether background work waits for a call of ``work``."""
        return self._timers_wait or bool(self._postponed)

    def work(self, now_s: float) -> native.Run | None:
        """A piece of the background work that waits: for the transport to call, a little at a time while it is late.
        The packets that were taken up, if it was that.
        """
        packets_next, self._packets_next = self._packets_next, not self._packets_next
        if self._timers_wait and not (packets_next and self._postponed):
            self._background(now_s)
        elif (found := self._postponed.take(now_s)) is not None:
            view, size, source, came_s = found
            self._chunks.waited_s = now_s - came_s
            self._take([(view, size)], source, now_s)
            self._chunks.waited_s = 0.0
            return view, size
        return None

    def _background(self, now_s: float) -> None:
        self._timers_wait = False
        for name in self.handover.to_delete(now_s):
            chunk = self.store.peek(name)
            if chunk is not None and self._whereabouts.home(chunk.ref) != self.config.address:
                self.store.remove(name, "migrated_out")
        self._forgetting.handle_timer(now_s)
        self._migration.send_due(now_s)

    def _hand_over(self, now_s: float) -> None:
        """Something happened that may let more chunks leave."""
        if self.lateness.is_late(now_s):
            self._timers_wait = True
        else:
            self._migration.send_due(now_s)

    # --- arrival ---

    def _receive_run(self, view: memoryview, segment_bytes: int, source: LinkEnd, now_s: float) -> None:
        count = -(-len(view) // segment_bytes) if segment_bytes > 0 else 1
        self.counters.add("packets_received", count)
        if segment_bytes < COMMAND_PREFIX_BYTES:
            self.counters.add("packets_malformed", max(1, count))
        elif self._plain.answer(view, segment_bytes, source, now_s, self.backlog_bytes > self.config.max_backlog_bytes):
            return
        elif same_journey(view, segment_bytes):
            self._receive(view, segment_bytes, source, now_s)
        else:
            for at in range(0, len(view), segment_bytes):
                self._receive(view[at : at + segment_bytes], segment_bytes, source, now_s)

    def _receive(self, view: memoryview, segment_bytes: int, source: LinkEnd, now_s: float) -> None:
        """Packets that all go to one destination: on, or in."""
        start = header_start(view)
        if len(view) < start + SKY_BYTES:
            self.counters.add("packets_malformed")
            return
        destination = Address.unpack(int.from_bytes(view[start + 4 : start + 8], "big"))
        to_me = destination == self._address
        if isinstance(source, SatelliteId) and not to_me:
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
            self._router.remember(int.from_bytes(good[0][start + 12 : start + 16], "big"), source)
            if not to_me:
                whole = memoryview(b"".join(good)) if bad else view
                self._forward(whole, segment_bytes, destination, source, now_s)
                return
        if good[0][start + 1] == Op.LINKS:
            self._told(good, source, now_s)
        else:
            self._deliver(good, start, now_s)

    def _forward(
        self, view: memoryview, segment_bytes: int, destination: Address, source: LinkEnd, now_s: float
    ) -> None:
        forwarded = self._router.forward(view, segment_bytes, destination, source)
        if isinstance(forwarded, Status):
            self.counters.add("packets_unroutable")
            packet = self._parse(view[:segment_bytes])
            if packet is not None and packet.header.op.is_command:
                self._departures.reply(packet.header, Op.UNREACHABLE, b"", now_s, forwarded)
            return
        self.counters.add("packets_forwarded", forwarded[0].count)
        self._departures.pass_on(*forwarded)

    def _parse(self, view: memoryview) -> Packet | None:
        try:
            return messages.parse_packet(view)
        except MalformedPacket:
            self.counters.add("packets_malformed")
            return None

    # --- requests for this satellite ---

    def _deliver(self, segments: list[memoryview], start: int, now_s: float) -> None:
        carries = segments[0][start + 1] in _CARRIERS
        if claims_mac(segments[0], start) or (carries and start != COMMAND_BYTES):  # a gate takes MACs off
            self.counters.add("packets_malformed", len(segments))
        elif carries:
            self._chunks.set(segments, start, now_s)
            if not self.handover.idle:
                self._hand_over(now_s)
        else:
            for segment in segments:
                self._handle(segment, now_s)

    def _handle(self, segment: memoryview, now_s: float) -> None:
        try:
            packet = messages.parse_packet(segment)
        except UnknownOperation:
            self.counters.add("packets_unsupported")
            self._departures.unsupported(segment, now_s)
            return
        except MalformedPacket:
            self.counters.add("packets_malformed")
            return
        try:
            if packet.header.op not in self._handlers:
                raise MalformedPacket(f"{packet.header.op.name}: nothing that satellites are told")
            self._handlers[packet.header.op](packet, now_s)
        except MalformedPacket:
            self.counters.add("packets_malformed")

    def _stored(self, key: bytes, indices: list[int], ref: bytes, header: SkyHeader, now_s: float) -> None:
        """Chunks of one placement came in: they stay, or go on where the box has moved on meanwhile. Whoever handed
        them over may know of a move that we do not know of yet: then they stay for a while.
        """
        sent_behind = self._whereabouts.is_past((header.slot_moves, header.plane_moves))
        due_s = now_s if header.op is not Op.MIGRATE or sent_behind else now_s + self.handover.grace_s
        if self.store.met:
            self._migration.meetings.settle(due_s)
        self.handover.keep(key, indices)
        if self._whereabouts.home(ref) != self.config.address:
            for index in indices:
                self.handover.stray((key, index), due_s)

    def _settled(self, key: bytes, now_s: float) -> bool:
        """Whether what we say of this key is no matter of a handover or of a writer that is still at it: a MISS then
        counts towards a proof of loss.
        """
        return self._settled_chunks(key, self.store.shares.get(key, ()), now_s)

    def _settled_chunks(self, key: bytes, indices: Iterable[int], now_s: float) -> bool:
        """The same of some of its chunks."""
        next_move_s = self._whereabouts.next_move_s
        if next_move_s is not None and now_s >= next_move_s:
            return False  # the box has moved and we have not looked yet
        if self.wants_work or self.lateness.is_late(now_s):
            return False  # what waits here may be the very chunk
        if self._latecomers.is_being_written(key, now_s):
            return False  # it may not have been sent yet
        return self.handover.rests(key, indices)

    def _get(self, packet: Packet, now_s: float) -> None:
        if self.backlog_bytes > self.config.max_backlog_bytes:
            self._departures.reply(packet.header, Op.BUSY, bytes(packet.body), now_s)
        else:
            self._chunks.get(packet, now_s)

    def _acknowledged(self, packet: Packet, now_s: float) -> None:
        self._migration.acknowledged(packet, now_s)
        self._hand_over(now_s)

    def _unreachable(self, packet: Packet, now_s: float) -> None:
        self._migration.unreachable(packet, now_s)
        self._hand_over(now_s)

    def _ping(self, packet: Packet, now_s: float) -> None:
        self._departures.reply(packet.header, Op.PONG, messages.pack_housekeeping(self.housekeeping()), now_s)

    def _advance(self, packet: Packet, now_s: float) -> None:
        pushed = messages.unpack_moves(packet.body)
        if not self._whereabouts.may_push_to(pushed, now_s):
            self.counters.add("pushes_refused")
            self._departures.reply(packet.header, Op.UNREACHABLE, b"", now_s, Status.REFUSED)
            return
        self._whereabouts.push_to(pushed)
        self.neighbourhood.told_moves(self._whereabouts.pushed, now_s)
        self._follow_clock(now_s, pushed=True)
        self._departures.reply(packet.header, Op.ADVANCED, messages.pack_moves(*self._whereabouts.pushed), now_s)
        self._hand_over(now_s)

    def housekeeping(self) -> dict[str, int]:
        """Counters and gauges by the names of ``HOUSEKEEPING_FIELDS``; the transport may add its own."""
        return self.counters.as_dict() | dict(
            memory_used_bytes=self.store.used_bytes,
            memory_limit_bytes=self.store.limit_bytes,
            chunks_held=len(self.store),
            receive_credit_bytes=self.config.credit_bytes,
            migrations_retransmitted=self.handover.retransmitted,
            pinned_bytes=self.store.shielded_bytes,
            pushed_slot_moves=self._whereabouts.pushed[0],
            pushed_plane_moves=self._whereabouts.pushed[1],
            packets_shed=self._postponed.dropped,
            **OURS.figures(),
            **self.store.ledger.figures(),
            **self.transport_figures(),
        )

    # --- neighbours ---

    def _told(self, segments: list[memoryview], source: LinkEnd, now_s: float) -> None:
        packets = [packet for segment in segments if (packet := self._parse(segment)) is not None]
        bad, moved = self.neighbourhood.receive(packets, source, now_s)
        if bad:
            self.counters.add("packets_malformed", bad)
        if moved:
            self._whereabouts.push_to(self.neighbourhood.pushed)
            self._follow_clock(now_s, pushed=True)
            self._hand_over(now_s)

    # --- motion ---

    def _follow_clock(self, now_s: float, pushed: bool = False) -> None:
        if self._whereabouts.follow(now_s):
            if not self.lateness.is_late(now_s):
                self._forgetting.box_moved(now_s)
            self._migration.box_moved(in_haste=pushed)
