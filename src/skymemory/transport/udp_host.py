"""Satellites of a host over UDP: a socket each, and an event loop.

It moves datagrams between state machines and sockets, delays them by their link, and injects faults; beams in both
directions, so that clients need no geometry. Postponed work gets at least a fifth of the time.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import cast

from skymemory import native
from skymemory.constellation.links import LinkQueues, Links, elevation_deg
from skymemory.constellation.orbit import Shell
from skymemory.constellation.sight import BoxSight, Sight
from skymemory.constellation.torus import Axis, RoutingMode, SatelliteId
from skymemory.constellation.visibility import GroundHost
from skymemory.errors import InvalidInput
from skymemory.eviction import DEFAULT_REPLACEMENT
from skymemory.placement.locate import Moves
from skymemory.protocol.auth import Authority
from skymemory.protocol.clock import MoveClock, SkyMap
from skymemory.protocol.satellite.machine import SatelliteConfig, SatelliteMachine
from skymemory.protocol.satellite.memory import Ledger
from skymemory.protocol.satellite.overload import LATE_S, Lateness
from skymemory.protocol.satellite.state import EvictionConfig
from skymemory.protocol.wire import LinkEnd, SegmentBatch, single
from skymemory.transport.delay_line import DelayLine, groups, handover_timeout_s, is_urgent
from skymemory.transport.faults import FaultInjector
from skymemory.transport.udp_socket import PLACE, PLACE_MARK, BatchSocket, Run
from skymemory.transport.unix_clock import UnixClock

Endpoint = tuple[str, int]
_BACKLOGS = 4
_FIGURES_KEPT_S = 0.5
PATIENCE_S = 0.05
"""Seconds beyond the round trip that a neighbour may be busy."""
RECEIVE_ROUNDS = 4
_MOST_PLACES = 4096
BEAT_S = 0.1
BACKGROUND_SHARE = 0.2
MIN_SLICE_S, MAX_SLICE_S = 0.001, 0.02


@dataclass(frozen=True, slots=True)
class HostSpec:
    """Configuration of a host process.

    ``mine`` are its own satellites. ``delay_scale`` 1 is the delay of light. The beam of ``onboard``, which carries the
    client's host, has no length.
    """

    mine: Mapping[SatelliteId, Endpoint]
    everyone: Mapping[SatelliteId, Endpoint]
    sky: SkyMap
    shell: Shell
    clock: MoveClock
    memory_bytes: int
    delay_scale: float = 1.0
    faults: FaultInjector | None = None
    routing: RoutingMode = "greedy"
    replacement: str = DEFAULT_REPLACEMENT
    eviction: EvictionConfig = field(default_factory=EvictionConfig)
    onboard: SatelliteId | None = None
    authority: Authority | None = None
    links: Links | None = None
    sight_at: Callable[[GroundHost], Sight] | None = None
    """Sight of a client with its own place; None: all are at the plan's place."""
    unix_at_boot_s: float | None = None


class UdpSatellite:
    def __init__(self, machine: SatelliteMachine, sock: BatchSocket, loop: asyncio.AbstractEventLoop) -> None:
        self.machine = machine
        self.sock = sock
        self.timer: asyncio.TimerHandle | None = None
        self.timer_s = self.alarm_s = 0.0
        self.full_since_s = math.inf
        """Time since which its socket always had more than a batch."""
        self.waits = False
        self.closed = False
        self._loop = loop
        self._backlog: deque[tuple[Endpoint, SegmentBatch]] = deque()

    def transmit(self, batch: SegmentBatch, endpoint: Endpoint) -> None:
        if self.closed:
            return
        unsent = batch if self._backlog else self.sock.send(batch, endpoint)
        if unsent is not None:
            self.wait_to_send(unsent, endpoint)

    def wait_to_send(self, batch: SegmentBatch, endpoint: Endpoint) -> None:
        if self.machine.backlog_bytes > _BACKLOGS * self.machine.config.max_backlog_bytes:
            self.machine.counters.add("packets_dropped", batch.count)
            return
        if not self._backlog:
            self._loop.add_writer(self.sock.fileno(), self._writable)
        self._backlog.append((endpoint, batch))
        self.machine.backlog_bytes += batch.total_bytes

    def _writable(self) -> None:
        while self._backlog:
            endpoint, batch = self._backlog.popleft()
            unsent = self.sock.send(batch, endpoint)
            self.machine.backlog_bytes -= batch.total_bytes
            if unsent is not None:
                self._backlog.appendleft((endpoint, unsent))
                self.machine.backlog_bytes += unsent.total_bytes
                return
        self._loop.remove_writer(self.sock.fileno())

    def close(self) -> None:
        self.closed = True
        self._loop.remove_reader(self.sock.fileno())
        self._loop.remove_writer(self.sock.fileno())
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        self._backlog.clear()
        self.sock.close()


class UdpHost:
    """Runner of a host's satellites. Construct it inside a running event loop."""

    def __init__(self, spec: HostSpec, loop: asyncio.AbstractEventLoop) -> None:
        self.spec = spec
        self._loop = loop
        self._elsewhere = {name: endpoint for name, endpoint in spec.everyone.items() if name not in spec.mine}
        self._names = {endpoint: satellite for satellite, endpoint in spec.everyone.items()}
        self._clock = UnixClock()
        self._clock.count_from(spec.unix_at_boot_s)
        self.lateness = Lateness()
        self._waiting: deque[UdpSatellite] = deque()
        self._slice: asyncio.Handle | None = None
        self._rested_s = time.monotonic()
        self._beat_s = self.now_s() + BEAT_S
        self._slept_s = self.now_s() - time.monotonic()
        self._beat = loop.call_later(BEAT_S, self._measure_lateness)
        is_delayed = spec.delay_scale > 0 or spec.links is not None
        self._delays: DelayLine[Callable[[], None]] | None = DelayLine() if is_delayed else None
        self._queues: LinkQueues | None = None
        if spec.links is not None:
            self._queues = LinkQueues(spec.links, spec.clock.epoch_s, self._elevation_deg, self._place, spec.onboard)
        sight = spec.sky.sight
        self._blocks = sight if sight is not None and sight.any_blocked else None
        self._direct = self._delays is None and spec.faults is None and self._blocks is None
        self._sight: Sight = spec.sky.sight or BoxSight(spec.shell, spec.sky.torus)
        self._beams_s: dict[tuple[SatelliteId, str], tuple[tuple[Moves, int], float]] = {}
        self._places: dict[object, tuple[str, Sight]] = {}
        axes: tuple[Axis, Axis] = ("slot", "plane")
        self._link_s = {axis: spec.shell.isl_one_way_s(axis) * spec.delay_scale for axis in axes}
        self._over_gaps = bool(spec.sky.torus.gaps)
        planes = range(spec.sky.torus.planes)
        self._plane_links_s = [spec.shell.plane_link_one_way_s(plane) * spec.delay_scale for plane in planes]
        self._last_figures: dict[str, int] = {}
        self._figures_until_s = 0.0
        self._satellites: dict[SatelliteId, UdpSatellite] = {}
        self._ledgers: dict[SatelliteId, Ledger] = {}
        self._pushed = 0, spec.clock.pushed
        """Unix ms and moves of the last push known to satellites that died here."""
        try:
            for name, endpoint in spec.mine.items():
                self._satellites[name] = self._launch(name, endpoint)
        except OSError:
            self.close()
            raise
        self.shortfall = next((satellite.sock.shortfall for satellite in self._satellites.values()), "")
        if self._delays is not None:
            loop.add_reader(self._delays.fileno(), self._release_due)
        for satellite in self._satellites.values():
            self._after(satellite)

    def _launch(self, name: SatelliteId, endpoint: Endpoint) -> UdpSatellite:
        sock = BatchSocket(*endpoint)
        config = SatelliteConfig(
            name,
            self.spec.memory_bytes,
            routing=self.spec.routing,
            credit_bytes=sock.receive_buffer_bytes // 2,
            replacement=self.spec.replacement,
            eviction=self.spec.eviction,
            neighbour_timeout_s=PATIENCE_S + 2 * self._longest_link_s(name),
            authority=self.spec.authority,
            first_request_id=secrets.randbits(30),
        )
        if self.spec.links is not None:
            config = replace(config, handover_timeout_s=handover_timeout_s(config.handover_timeout_s, self.spec.links))
        pushed_at_ms, pushed = self._pushed
        clock = replace(self.spec.clock, pushed=pushed)
        machine = SatelliteMachine(config, self.spec.sky, clock, self.now_s(), self.lateness, self._figures)
        machine.neighbours.pushed_at_ms = pushed_at_ms
        machine.store.ledger = self._ledgers.pop(name, machine.store.ledger)
        machine.neighbours.greet(self.now_s())
        satellite = UdpSatellite(machine, sock, self._loop)
        self._loop.add_reader(sock.fileno(), self._readable, satellite)
        self._arm(satellite)
        return satellite

    def now_s(self) -> float:
        return self._clock.now_s()

    def set_dead(self, dead: Collection[SatelliteId]) -> None:
        """Make exactly these satellites dead. Others come back, empty.

        Raises:
            OSError: the port of a satellite that should come back is in use.
        """
        for name in self._satellites.keys() & dead:
            satellite = self._satellites.pop(name)
            satellite.close()
            self._ledgers[name] = satellite.machine.store.ledger
            self._ledgers[name].record_removed(satellite.machine.store.used_bytes, "lost")
            neighbours = satellite.machine.neighbours
            self._pushed = max(self._pushed, (neighbours.pushed_at_ms, neighbours.pushed))
        for name in self.spec.mine.keys() - self._satellites.keys() - set(dead):
            self._satellites[name] = self._launch(name, self.spec.mine[name])
            self._after(self._satellites[name])

    def close(self) -> None:
        self._beat.cancel()
        if self._slice is not None:
            self._slice.cancel()
        for satellite in self._satellites.values():
            satellite.close()
        self._satellites.clear()
        if self._delays is not None:
            self._loop.remove_reader(self._delays.fileno())
            self._delays.close()
            self._delays = None

    # --- in ---

    def _readable(self, satellite: UdpSatellite) -> None:
        """Process a bounded number of batches from a satellite's socket, then send its answers."""
        quiet, now_s = True, self.now_s()
        for _ in range(1 if self.lateness.is_late(now_s) else RECEIVE_ROUNDS):
            arrivals, served, forwarded = self._receive(satellite)
            quiet &= not satellite.machine.wants_to_send
            for endpoint, group in groupby(arrivals, key=itemgetter(2)):
                quiet = False
                self._arrive(satellite, [(view, size) for view, size, _ in group], endpoint)
            stream = (arrivals and len(arrivals[0][0]) > arrivals[0][1]) or (forwarded and forwarded[0][3] > 1)
            if len(arrivals) + len(served) + len(forwarded) <= 1 and not stream:
                satellite.full_since_s = math.inf
                break  # nothing, or a single datagram and no stream: answer at once
        else:
            self._late_by(now_s - satellite.full_since_s, now_s)
            satellite.full_since_s = min(satellite.full_since_s, now_s) if satellite.sock.has_more() else math.inf
        if not quiet:
            self._after(satellite)

    def _receive(self, satellite: UdpSatellite) -> tuple[list[Run], list[native.Served], list[native.Passed]]:
        # Plain GETs and SETs, and packets in transit, never reach Python, unless links are delayed or faulty.
        now_s = self.now_s()
        terms = self._terms(satellite, now_s) if self._direct else None
        if terms is None:
            return satellite.sock.receive(), [], []
        arrivals, served, forwarded = satellite.sock.serve(self._names, *terms)
        self._carried(satellite, served, forwarded, now_s)
        return arrivals, served, forwarded

    def _terms(
        self, satellite: UdpSatellite, now_s: float
    ) -> tuple[native.PlainRequests, native.Transit | None] | None:
        """Return what ``native`` needs to serve plain requests and packets in transit; None if it may not."""
        requests = satellite.machine.plain_requests(now_s)
        if requests is None:
            return None
        routes = satellite.machine.routes(now_s)
        return requests, (*routes, self._elsewhere) if routes is not None else None

    def _carried(
        self, satellite: UdpSatellite, served: list[native.Served], forwarded: list[native.Passed], now_s: float
    ) -> None:
        """Account for runs that ``native`` served or forwarded; hand over or queue what it could not send."""
        machine, address = satellite.machine, satellite.machine.config.address
        to_hand_over: dict[SatelliteId, list[native.Slot]] = {}
        if forwarded:
            machine.record_passed(forwarded, now_s)
            for _, _, link, _, unsent in forwarded:
                if unsent and link in self._satellites:
                    to_hand_over.setdefault(link, []).extend(unsent)
                else:
                    for packets, size in satellite.sock.received(unsent):
                        satellite.wait_to_send(SegmentBatch(bytes(packets), size), self._endpoint(link))
        if served:
            machine.record_served(served, now_s)
            for _, _, _, _, link, *_, unsent_answer in served:
                if unsent_answer is not None:
                    headers, payloads = unsent_answer
                    batch = SegmentBatch(headers, len(headers) // (len(payloads) if payloads else 1), payloads)
                    if link in self._satellites:
                        self._relay(satellite, batch, link, now_s)
                    else:
                        satellite.wait_to_send(batch, self._endpoint(link))
        for link, runs in to_hand_over.items():
            self._hand_over(address, self._satellites[link], runs, now_s)

    # Links between satellites of one host are memory, if nothing is delayed or damaged: bytes that need not cross a
    # socket take half the time. Whatever is not plain still goes through the socket, or through the machine.

    def _relay(self, satellite: UdpSatellite, batch: SegmentBatch, link: LinkEnd, now_s: float) -> None:
        """Pass answers within this host without copying payloads."""
        while link in self._satellites:
            onward = self._satellites[link].machine.relay(batch, satellite.machine.config.address, now_s)
            if onward is None:
                break
            satellite = self._satellites[link]
            batch, link = onward
            if satellite.machine.wants_to_send:
                self._after(satellite)
        satellite.transmit(batch, self._endpoint(link))

    def _endpoint(self, link: LinkEnd) -> Endpoint:
        return self.spec.everyone[link] if isinstance(link, SatelliteId) else cast(Endpoint, link)

    def _hand_over(self, source: SatelliteId, satellite: UdpSatellite, runs: list[native.Slot], now_s: float) -> None:
        """Pass runs from another satellite of this host without a socket."""
        terms = self._terms(satellite, now_s)
        if terms is not None:
            runs, served, forwarded = satellite.sock.serve_runs(runs, source, *terms)
            self._carried(satellite, served, forwarded, now_s)
        if runs:
            satellite.machine.receive_runs(satellite.sock.received(runs), source, now_s)
        if satellite.machine.wants_to_send or runs:
            self._after(satellite)

    def _arrive(self, satellite: UdpSatellite, runs: list[native.Run], endpoint: Endpoint) -> None:
        """Give packets from an endpoint to a machine, after the delay, queue and faults of a beam."""
        source: SatelliteId | Endpoint = self._names.get(endpoint, endpoint)
        if self.spec.sight_at is not None and source is endpoint:
            runs = self._hear_places(runs, endpoint)
        faults = self.spec.faults
        if faults is not None:
            beam = None
            if self._queues is not None and not isinstance(source, SatelliteId):
                beam = self._queues.of(source, satellite.machine.config.address)
            for view, size in runs:
                for at in range(0, len(view), size):
                    sent, wait_s = bytes(view[at : at + size]), 0.0
                    if beam is not None:
                        now_s = self.now_s()
                        wait_s = beam.leaves_s(len(sent), now_s) - now_s
                        if wait_s < 0.0:
                            continue
                    for data, extra_s in faults.apply(sent):
                        self._arrive_later(satellite, data, len(data), source, wait_s + extra_s)
        elif self._queues is not None and not isinstance(source, SatelliteId):
            queue, now_s = self._queues.of(source, satellite.machine.config.address), self.now_s()
            for view, size in runs:
                datagrams = [bytes(view[at : at + size]) for at in range(0, len(view), size)]
                for wait_s, batch in groups(queue, datagrams, now_s):
                    self._arrive_later(satellite, bytes(batch.headers), batch.header_bytes, source, wait_s)
        elif self._delays is not None and not isinstance(source, SatelliteId):
            for view, size in runs:
                self._arrive_later(satellite, bytes(view), size, source, 0.0)
        else:
            satellite.machine.receive_runs(runs, source, self.now_s())

    def _arrive_later(
        self, satellite: UdpSatellite, data: bytes, segment_bytes: int, source: SatelliteId | Endpoint, extra_s: float
    ) -> None:
        def arrive() -> None:
            if satellite.closed:
                return
            satellite.machine.receive_batch(data, segment_bytes, source, self.now_s())
            self._after(satellite)

        beam = not isinstance(source, SatelliteId)
        if self._delays is not None and beam:
            self._delays.push(self._beam_one_way_s(satellite, source) + extra_s, arrive)
        elif extra_s > 0:
            self._loop.call_later(extra_s, arrive)
        else:
            satellite.machine.receive_batch(data, segment_bytes, source, self.now_s())

    # --- out ---

    def _after(self, satellite: UdpSatellite) -> None:
        if satellite.closed:
            return
        machine = satellite.machine
        for batch, link in machine.datagrams_to_send(self.now_s()):
            if isinstance(link, SatelliteId):
                address = machine.config.address
                if self._blocks is not None and self._is_blocked(address, link, machine.moves):
                    machine.counters.add("packets_blocked", batch.count)
                    continue
                hold_s = self._hop_s(address, link)
                self._depart(satellite, batch, self.spec.everyone[link], hold_s, link)
            else:
                self._down(satellite, batch, cast(Endpoint, link))
        self._arm(satellite)
        if machine.wants_work:
            self._want_slice(satellite)

    def _is_blocked(self, satellite: SatelliteId, to: SatelliteId, moves: Moves) -> bool:
        assert self._blocks is not None
        return self._blocks.blocked(satellite, to, self.spec.sky.centre_at(moves), self.spec.clock.sky_s(self.now_s()))

    def _hop_s(self, satellite: SatelliteId, to: SatelliteId) -> float:
        if self._over_gaps:
            return self.spec.shell.hop_one_way_s(self.spec.sky.torus, satellite, to) * self.spec.delay_scale
        return self._link_s["slot"] if to.plane == satellite.plane else self._plane_link_s(satellite.plane, to.plane)

    def _longest_link_s(self, satellite: SatelliteId) -> float:
        if self._over_gaps:
            return max(self._hop_s(satellite, neighbour) for neighbour in self.spec.sky.torus.neighbours(satellite))
        return max(self._link_s["slot"], *self._plane_links_s)

    def _plane_link_s(self, plane: int, other_plane: int) -> float:
        first = plane if (other_plane - plane) % self.spec.sky.torus.planes == 1 else other_plane
        return self._plane_links_s[first]

    def _down(self, satellite: UdpSatellite, batch: SegmentBatch, endpoint: Endpoint) -> None:
        """Send to a ground host; faults of both directions are injected here."""
        hold_s = self._beam_one_way_s(satellite, endpoint) if self._delays is not None else 0.0
        if self.spec.faults is None:
            self._depart(satellite, batch, endpoint, hold_s)
            return
        for datagram in batch.datagrams():
            for data, extra_s in self.spec.faults.apply(datagram):
                if extra_s > 0:
                    self._loop.call_later(extra_s, self._depart, satellite, single(data), endpoint, hold_s)
                else:
                    self._depart(satellite, single(data), endpoint, hold_s)

    def _depart(
        self,
        satellite: UdpSatellite,
        batch: SegmentBatch,
        endpoint: Endpoint,
        hold_s: float,
        to: SatelliteId | None = None,
    ) -> None:
        """Send a batch after its delays. ``to`` is None for a ground host."""
        if self._delays is None:
            satellite.transmit(batch, endpoint)
        elif self._queues is None:
            self._delays.push(hold_s, lambda: satellite.transmit(batch, endpoint))
        else:
            address, now_s = satellite.machine.config.address, self.now_s()
            queue, urgent = self._queues.of(address, to or endpoint), is_urgent(batch, address, to)
            for wait_s, group in groups(queue, batch.datagrams(), now_s, urgent):
                self._delays.push(wait_s + hold_s, partial(satellite.transmit, group, endpoint))

    # --- time ---

    def _hear_places(self, runs: list[native.Run], endpoint: Endpoint) -> list[native.Run]:
        """Record a client's announced place. Return packets before it."""
        packets = []
        for view, size in runs:
            at = (len(view) - 1) // size * size if size > 0 else 0
            if len(view) - at == PLACE.size and view[at : at + len(PLACE_MARK)] == PLACE_MARK:
                _, latitude_deg, longitude_deg = PLACE.unpack(view[at:])
                self._place_of(endpoint, latitude_deg, longitude_deg)
                view = view[:at]
            if len(view):
                packets.append((view, size))
        return packets

    def _place_of(self, endpoint: Endpoint, latitude_deg: float, longitude_deg: float) -> None:
        """Record a client's announced place."""
        place = f"{latitude_deg:.4f},{longitude_deg:.4f}"
        known = self._places.get(endpoint)
        if self.spec.sight_at is None or (known is not None and known[0] == place):
            return
        with suppress(InvalidInput):  # not a place on Earth
            sight = next((known_sight for name, known_sight in self._places.values() if name == place), None)
            if len(self._places) >= _MOST_PLACES:
                del self._places[next(iter(self._places))]
            self._places[endpoint] = place, sight or self.spec.sight_at(GroundHost(latitude_deg, longitude_deg))

    def _place(self, host: object) -> str:
        return self._places[host][0] if host in self._places else ""

    def _sight_of(self, host: object) -> Sight:
        return self._places[host][1] if host in self._places else self._sight

    def _beam_one_way_s(self, satellite: UdpSatellite, host: object) -> float:
        """Return light's travel time, to within a second's flight."""
        address, moves = satellite.machine.config.address, satellite.machine.moves
        if address == self.spec.onboard:
            return 0.0
        sky_s = self.spec.clock.sky_s(self.now_s())
        at = moves, math.floor(sky_s)
        seen_by = address, self._place(host)
        cached = self._beams_s.get(seen_by)
        if cached is None or cached[0] != at:
            one_way_s = self._sight_of(host).one_way_s(address, self.spec.sky.centre_at(moves), sky_s)
            cached = self._beams_s[seen_by] = at, one_way_s * self.spec.delay_scale
        return cached[1]

    def _elevation_deg(self, satellite: SatelliteId, host: object, now_s: float) -> float:
        sky_s, moves = self.spec.clock.sky_s(now_s), self.spec.clock.moves(now_s)
        one_way_s = self._sight_of(host).one_way_s(satellite, self.spec.sky.centre_at(moves), sky_s)
        return elevation_deg(self.spec.shell.altitude_m, one_way_s)

    def _release_due(self) -> None:
        if self._delays is not None:
            self._late_by(self._delays.late_s(), self.now_s())
            for release in self._delays.pop_due():
                release()

    def _late_by(self, late_s: float, now_s: float) -> None:
        if late_s > LATE_S:
            self.lateness.measured(late_s, now_s)

    def _arm(self, satellite: UdpSatellite) -> None:
        due_s = satellite.machine.next_timer_s()
        if satellite.timer is not None:
            if due_s == satellite.timer_s:
                return
            satellite.timer.cancel()
            satellite.timer = None
        if due_s is not None:
            now_s = self.now_s()
            satellite.timer_s, satellite.alarm_s = due_s, max(due_s, now_s)
            satellite.timer = self._loop.call_later(max(0.0, due_s - now_s), self._alarm, satellite)

    def _alarm(self, satellite: UdpSatellite) -> None:
        satellite.timer = None
        self._late_by(self.now_s() - satellite.alarm_s, self.now_s())
        satellite.machine.handle_timer(self.now_s())
        self._after(satellite)

    def _measure_lateness(self) -> None:
        """Measure lateness; after a sleep, set all timers again."""
        self._look_at_wall_clock()
        now_s = self.now_s()
        self.lateness.measured(now_s - self._beat_s, now_s)
        slept_s = now_s - time.monotonic()
        if slept_s > self._slept_s + LATE_S:  # the loop's own clock stood still
            for satellite in list(self._satellites.values()):
                if satellite.timer is not None:
                    satellite.timer.cancel()
                    satellite.timer = None
                self._arm(satellite)
        self._slept_s = slept_s
        self._beat_s = now_s + BEAT_S
        self._beat = self._loop.call_later(BEAT_S, self._measure_lateness)

    def _look_at_wall_clock(self) -> None:
        """Follow a wall clock set forward: with MACs, only after an authentic command has its time."""
        authority = self.spec.authority
        if authority is None or authority.heard_by_wall:
            self._clock.follow_wall()
        if authority is not None:
            authority.heard_by_wall, authority.wall_shift_s = False, self._clock.wall_shift_s()

    # --- background ---

    def _want_slice(self, satellite: UdpSatellite) -> None:
        if not satellite.waits:
            satellite.waits = True
            self._waiting.append(satellite)
            if self._slice is None:
                self._slice = self._loop.call_soon(self._work)

    def _work(self) -> None:
        self._slice = None
        started_s = time.monotonic()
        # Long enough for its share of the time since the last slice, within bounds.
        owed_s = (started_s - self._rested_s) * BACKGROUND_SHARE / (1.0 - BACKGROUND_SHARE)
        end_s = started_s + min(max(owed_s, MIN_SLICE_S), MAX_SLICE_S)
        while self._waiting and time.monotonic() < end_s:
            satellite = self._waiting.popleft()
            satellite.waits = False
            if not satellite.closed:
                satellite.machine.work(self.now_s())
                self._after(satellite)
        self._rested_s = time.monotonic()
        if self._waiting and self._slice is None:
            self._slice = self._loop.call_soon(self._work)

    def _figures(self) -> dict[str, int]:
        now_s = time.monotonic()
        if now_s >= self._figures_until_s:
            error_s = self._delays.report()["hold_error_p99_s"] if self._delays is not None else 0.0
            self._last_figures = {
                "delay_error_p99_us": round(error_s * 1e6),
                "late_us": round(self.lateness.at(self.now_s()) * 1e6),
                "faults_injected": self.spec.faults.injected if self.spec.faults is not None else 0,
            }
            if self._queues is not None:
                self._last_figures |= self._queues.figures(self.now_s())
            self._figures_until_s = now_s + _FIGURES_KEPT_S
        return self._last_figures


async def serve_host(
    spec: HostSpec,
    stop: asyncio.Event,
    on_ready: Callable[[str], None],
    on_host: Callable[[UdpHost], None] | None = None,
) -> None:
    """Run a host's satellites until ``stop`` is set.

    ``on_ready`` gets the host's ``shortfall`` once all sockets are bound.

    Raises:
        OSError: a port is in use; no socket stays bound.
    """
    host = UdpHost(spec, asyncio.get_running_loop())
    try:
        if on_host is not None:
            on_host(host)
        on_ready(host.shortfall)
        await stop.wait()
    finally:
        host.close()
