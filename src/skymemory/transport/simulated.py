"""Simulated constellation over virtual time: exact to the event, and reproducible from a seed.

It drives the UDP transport's state machines. Work takes no time, unless hosts have limits (``simulated_host``). Packets
to neighbours behind the Earth are lost.

If links have rates, a forwarding satellite sees a run of packets once, when the first arrives; each follows when its
last bit has arrived.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count, islice
from operator import attrgetter
from threading import RLock
from typing import NamedTuple, cast

from skymemory import native
from skymemory.constellation.links import LOST, LinkQueue, LinkQueues
from skymemory.constellation.torus import RoutingMode, SatelliteId
from skymemory.errors import InvalidInput
from skymemory.eviction import DEFAULT_REPLACEMENT
from skymemory.native import Rows
from skymemory.protocol.auth import Authority
from skymemory.protocol.client.machine import ClientConfig, ClientMachine, Finished
from skymemory.protocol.client.transfer import Striping, ValueInfo
from skymemory.protocol.clock import MoveClock, SkyMap
from skymemory.protocol.satellite.machine import SatelliteConfig, SatelliteMachine
from skymemory.protocol.satellite.overload import Lateness
from skymemory.protocol.satellite.state import EvictionConfig
from skymemory.protocol.wire import CREDIT_UNIT_BYTES, MAX_PACKET_BYTES, MOST_CREDIT, Buffer, LinkEnd, SegmentBatch
from skymemory.transport.delay_line import GRAIN_S, handover_timeout_s, is_urgent
from skymemory.transport.faults import FaultEvent, FaultInjector
from skymemory.transport.simulated_host import HostLimits, SimulatedHost, is_for
from skymemory.transport.udp_host import PATIENCE_S

GroundToken = tuple[str, int]
Node = SatelliteId | GroundToken
LinkDelay = Callable[[Node, Node], float]
Machine = Callable[[SatelliteConfig, SkyMap, MoveClock, float, Lateness | None], SatelliteMachine]
_MAX_RUN_SEGMENTS = 64
_NO_SOCKETS: dict[object, tuple[str, int]] = {}
AMPLE_BYTES = MOST_CREDIT * CREDIT_UNIT_BYTES


def no_delay(sender: Node, receiver: Node) -> float:
    return 0.0


class _Arrival(NamedTuple):
    """Datagrams on the way to ``receiver``: ``segment_bytes`` each, the last maybe shorter. ``order`` breaks ties in
    time.
    """

    time_s: float
    order: int
    receiver: Node
    sender: Node
    data: bytes
    segment_bytes: int


@dataclass(slots=True, eq=False)
class _Train:
    """Packets of a batch on a link with a rate: ``size`` bytes each, the last maybe fewer.

    ``due_s`` are arrivals: ``LOST``, or infinite before departure. ``ends``: they are delivered to ``receiver``;
    otherwise ``onward`` is their train on the next link. ``left``: the last packet that has left.
    """

    data: bytearray
    size: int
    sender: Node
    receiver: Node
    queue: LinkQueue
    delay_s: float
    urgent: bool
    count: int = field(init=False)
    due_s: list[float] = field(init=False)
    ends: bool = field(init=False)
    orders: list[int] = field(init=False)
    onward: _Train | None = None
    machine: object = None
    """Machine that forwarded them; it may be replaced since."""
    first: int = -1
    """First packet arrived but not delivered."""
    left: int = -1
    scheduled: bool = False

    def __post_init__(self) -> None:
        self.count = -(-len(self.data) // self.size)
        self.due_s = [math.inf] * self.count
        receiver = self.receiver
        self.ends = self.count == 1 or not isinstance(receiver, SatelliteId) or is_for(receiver, self.data)
        self.orders = [0] * self.count if self.ends else []


class SimulatedConstellation:
    """Satellites of a torus, and ground hosts, over virtual time from 0."""

    def __init__(
        self,
        sky: SkyMap,
        memory_bytes: int,
        clock: MoveClock | None = None,
        delay_s: LinkDelay = no_delay,
        faults: FaultInjector | None = None,
        routing: RoutingMode = "greedy",
        offload: bool = True,
        replacement: str = DEFAULT_REPLACEMENT,
        eviction: EvictionConfig | None = None,
        clocks: Mapping[SatelliteId, MoveClock] | None = None,
        authority: Authority | None = None,
        limits: HostLimits | None = None,
        queues: LinkQueues | None = None,
        buffer_bytes: int = AMPLE_BYTES,
        machine: Machine | None = None,
    ) -> None:
        """Create the constellation.

        Args:
            offload: False delivers every datagram individually.
            clocks: the wrong clocks of some satellites.
            limits: None: work takes no time, and no buffer overflows.
            queues: link rates; None: unlimited.
            buffer_bytes: each receiver's credit, without ``limits``.

        Raises:
            InvalidInput: both ``limits`` and ``queues``.
        """
        if limits is not None and queues is not None:
            raise InvalidInput("limits of hosts and rates of links: expected one of them in one simulation")
        self.sky = sky
        self.clock = clock or MoveClock()
        self.lock = RLock()
        self.now_s = 0.0
        self.datagrams_sent = 0
        self.bytes_sent = 0
        self._any_blocked = sky.sight is not None and sky.sight.any_blocked
        self._memory_bytes = memory_bytes
        self._clocks = clocks or {}
        self._delay_s = delay_s
        self._faults = faults
        self._routing: RoutingMode = routing
        self._offload = offload
        self._replacement = replacement
        self._eviction = eviction or EvictionConfig()
        self._authority = authority
        self._limits = limits
        self._buffer_bytes = buffer_bytes
        self._new_machine: Machine = machine or SatelliteMachine
        self.queues = queues
        self._arrivals: list[_Arrival | tuple[float, int, _Train, int]] = []
        self._order = count()
        self._lateness: dict[SatelliteId, Lateness] = {}
        for names in limits.hosts if limits is not None else ():
            self._lateness.update(dict.fromkeys(names, Lateness()))
        self.satellites = {satellite: self._new_satellite(satellite) for satellite in sky.torus.satellites()}
        self._dead: set[SatelliteId] = set()
        self._revived_s: dict[Node, float] = {}
        self._cut: set[frozenset[Node]] = set()
        self._link_faults: dict[frozenset[Node], FaultInjector] = {}
        self._events: deque[FaultEvent] = deque()
        self._clients: dict[GroundToken, ClientMachine] = {}
        self._asked: dict[Node, int] = {}
        self._touched: dict[Node, None] = dict.fromkeys(self.satellites)
        self._timers: dict[Node, float] = {}
        self._alarms: list[tuple[float, int, Node]] = []
        self.hosts: list[SimulatedHost] = []
        self._host_of: dict[SatelliteId, SimulatedHost] = {}
        for names in limits.hosts if limits is not None else ():
            machines = {name: self.satellites[name] for name in names}
            host = SimulatedHost(limits, machines, self._lateness[names[0]], delay_s, self._depart, faults)  # type: ignore[arg-type]
            self.hosts.append(host)
            self._host_of.update(dict.fromkeys(names, host))

    def _new_satellite(self, satellite: SatelliteId) -> SatelliteMachine:
        config = SatelliteConfig(
            satellite,
            self._memory_bytes,
            self._routing,
            replacement=self._replacement,
            eviction=self._eviction,
            authority=self._authority,
            credit_bytes=self._buffer_bytes,
        )
        if self.queues is not None:
            timeout_s = handover_timeout_s(config.handover_timeout_s, self.queues.links)
            config = replace(config, handover_timeout_s=timeout_s)
        if self._limits is not None:
            longest_s = max(self._delay_s(satellite, neighbour) for neighbour in self.sky.torus.neighbours(satellite))
            config = replace(
                config, credit_bytes=self._limits.buffer_bytes // 2, neighbour_timeout_s=PATIENCE_S + 2 * longest_s
            )
        clock, lateness = self._clocks.get(satellite, self.clock), self._lateness.get(satellite)
        return self._new_machine(config, self.sky, clock, self.now_s, lateness)

    def kill(self, satellite: SatelliteId) -> None:
        """Stop a satellite and lose its memory. Packets already sent arrive."""
        self.flush()
        self._dead.add(satellite)
        self._timers.pop(satellite, None)
        if satellite in self._host_of:
            self._host_of[satellite].forget(satellite)

    def revive(self, satellite: SatelliteId) -> None:
        """Restart a satellite, empty; its ledger counts a loss."""
        self._dead.discard(satellite)
        self._revived_s[satellite] = self.now_s
        before = self.satellites[satellite].store
        before.ledger.record_removed(before.used_bytes, "lost")
        self.satellites[satellite] = self._new_satellite(satellite)
        self.satellites[satellite].store.ledger = before.ledger
        self.satellites[satellite].neighbours.greet(self.now_s)
        self._touched[satellite] = None
        if satellite in self._host_of:
            self._host_of[satellite].adopt(satellite, self.satellites[satellite], self.now_s)

    @property
    def dead(self) -> frozenset[SatelliteId]:
        return frozenset(self._dead)

    def kill_plane(self, plane: int) -> None:
        for satellite in [candidate for candidate in self.satellites if candidate.plane == plane]:
            self.kill(satellite)

    def revive_plane(self, plane: int) -> None:
        for satellite in [candidate for candidate in self.satellites if candidate.plane == plane]:
            self.revive(satellite)

    def cut(self, node: Node, other: Node) -> None:
        """Cut a link in both directions. Packets in flight arrive."""
        self.flush()
        self._cut.add(frozenset((node, other)))

    def mend(self, node: Node, other: Node) -> None:
        self._cut.discard(frozenset((node, other)))

    def spoil(self, node: Node, other: Node, faults: FaultInjector | None) -> None:
        """Inject faults on this link."""
        link = frozenset((node, other))
        if faults is None:
            self._link_faults.pop(link, None)
        else:
            self._link_faults[link] = faults

    def follow(self, events: Iterable[FaultEvent]) -> None:
        self._events = deque(sorted(events, key=lambda event: event.time_s))

    def _apply(self, event: FaultEvent) -> None:
        for satellite in event.satellites:
            (self.revive if event.over else self.kill)(satellite)
        if event.link is not None:
            (self.mend if event.over else self.cut)(*event.link)

    def connect(self, config: ClientConfig, sky: SkyMap | None = None) -> SimulatedClient:
        if self._limits is None:
            config = config.with_windows(self._buffer_bytes, self._buffer_bytes)
        machine = ClientMachine(config, sky or self.sky, self.clock)
        token = ("ground", config.ground)
        self._clients[token] = machine
        return SimulatedClient(self, machine)

    def disconnect(self, config: ClientConfig) -> None:
        """Remove a ground host: packets on their way to it are lost."""
        token = ("ground", config.ground)
        self._clients.pop(token, None)
        self._touched.pop(token, None)
        self._timers.pop(token, None)
        self._asked.pop(token, None)
        if self.queues is not None:
            self.queues.forget(token)

    def step(self, limit_s: float) -> bool:
        """Run the next event, up to ``limit_s``. Return False, with the time at the limit, if there is none."""
        self.flush()
        return self.step_flushed(limit_s)

    def step_flushed(self, limit_s: float) -> bool:
        """Do as ``step`` after a ``flush``."""
        # Earliest event: hosts' work, a fault, a packet's arrival, or a timer.
        timer_s = self._next_alarm_s()
        arrival_s = self._arrivals[0][0] if self._arrivals else math.inf
        if self.hosts and self._run_hosts(timer_s, limit_s):
            return True
        next_s = arrival_s if arrival_s <= timer_s else timer_s
        fault_s = self._events[0].time_s if self._events else math.inf
        if self._events and fault_s <= next_s and fault_s <= limit_s:
            self.now_s = max(self.now_s, fault_s)
            self._apply(self._events.popleft())
            return True
        if next_s > limit_s or next_s == math.inf:
            self.now_s = limit_s if self.now_s < limit_s < math.inf else self.now_s
            return False
        if next_s > self.now_s:
            self.now_s = next_s
        if arrival_s <= timer_s:
            arrival = heapq.heappop(self._arrivals)
            if isinstance(arrival, _Arrival):
                self._deliver(arrival)
            else:
                self._process_arrivals(arrival, min(timer_s, limit_s, fault_s))
        else:
            while self._next_alarm_s() <= self.now_s:
                node = heapq.heappop(self._alarms)[2]
                del self._timers[node]
                self._machine(node).handle_timer(self.now_s)
                self._touched[node] = None
        return True

    def _run_hosts(self, timer_s: float, limit_s: float) -> bool:
        """Let hosts work until any other event is due. Return True if a host has."""
        worked = False
        until_s = min(timer_s, self._events[0].time_s if self._events else math.inf)
        while True:
            host = min(self.hosts, key=_wake_s)
            if not host.wake_s < min(until_s, self._arrivals[0][0] if self._arrivals else math.inf):
                return worked
            if host.wake_s > limit_s:
                return worked
            self.now_s = max(self.now_s, host.wake_s)
            host.step(self.now_s)
            worked = True

    def _next_alarm_s(self) -> float:
        while self._alarms:
            time_s, _, node = self._alarms[0]
            if self._timers.get(node) == time_s:
                return time_s
            heapq.heappop(self._alarms)
        return math.inf

    def settle(self, limit_s: float) -> None:
        while self.step(limit_s):
            pass

    def _machine(self, node: Node) -> SatelliteMachine | ClientMachine:
        return self.satellites[node] if isinstance(node, SatelliteId) else self._clients[node]

    def flush(self) -> None:
        """Send packets of machines with events, and record timers."""
        for token, client in self._clients.items():
            # A client whose windows are full need not be asked again before it has received something.
            if client.wants_to_send and self._asked.get(token) != client.revision:
                self._touched[token] = None
        now_s, dead = self.now_s, self._dead
        for node in self._touched:
            if node in self._host_of:
                self._host_of[node].nudge(node, now_s)
                continue
            machine = self._machine(node)
            for batch, to in machine.datagrams_to_send(now_s):
                if node not in dead:
                    self._send(batch, node, cast(Node, to))
            if self.queues is not None and isinstance(machine, ClientMachine):
                self._asked[node] = machine.revision
            timer_s = None if node in dead else machine.next_timer_s()
            if timer_s is None:
                self._timers.pop(node, None)
            elif timer_s != self._timers.get(node):
                self._timers[node] = timer_s
                heapq.heappush(self._alarms, (timer_s, next(self._order), node))
        self._touched.clear()

    def _depart(self, batch: SegmentBatch, sender: SatelliteId, receiver: LinkEnd) -> None:
        if sender not in self._dead:
            self._send(batch, sender, cast(Node, receiver))

    def _send(self, batch: SegmentBatch, sender: Node, receiver: Node) -> None:
        """Send a batch, joined as by receive offload."""
        if self._any_blocked and self._blocked(sender, receiver):
            self.satellites[cast(SatelliteId, sender)].counters.add("packets_blocked", batch.count)
            return
        if self.queues is not None:
            self._send_by_rate(batch, sender, receiver)
            return
        link_s = 0.0 if sender in self._host_of else self._delay_s(sender, receiver)
        link = frozenset((sender, receiver)) if self._cut or self._link_faults else frozenset()
        own_faults = self._link_faults.get(link)
        faults = None if receiver in self._host_of else self._faults  # a host draws them when its sockets receive
        run: list[bytes] = []
        for data in batch.datagrams():
            self.datagrams_sent += 1
            self.bytes_sent += len(data)
            for copy, extra_s in () if link in self._cut else _flights(data, own_faults, faults):
                if extra_s > 0 or not self._offload:
                    self._arrive([copy], link_s + extra_s, sender, receiver)
                    continue
                if run and not _joins(run, copy):
                    self._arrive(run, link_s, sender, receiver)
                    run = []
                run.append(copy)
        if run:
            self._arrive(run, link_s, sender, receiver)

    def _blocked(self, sender: Node, receiver: Node) -> bool:
        sight = self.sky.sight
        if sight is None or not isinstance(sender, SatelliteId) or not isinstance(receiver, SatelliteId):
            return False
        centre = self.sky.centre_at(self.clock.moves(self.now_s))
        return sight.blocked(sender, receiver, centre, self.clock.sky_s(self.now_s))

    def _arrive(self, run: list[bytes], delay_s: float, sender: Node, receiver: Node) -> None:
        data = run[0] if len(run) == 1 else b"".join(run)
        if delay_s == 0 and receiver in self._host_of:
            self._host_of[receiver].arrive(receiver, data, len(run[0]), sender, self.now_s)
            return
        arrival = _Arrival(self.now_s + delay_s, next(self._order), receiver, sender, data, len(run[0]))
        heapq.heappush(self._arrivals, arrival)

    # --- Links with rates ---

    def _send_by_rate(self, batch: SegmentBatch, sender: Node, receiver: Node) -> None:
        """Put a batch on a link with a rate, as a train or, with faults, datagram by datagram."""
        assert self.queues is not None
        link = frozenset((sender, receiver)) if self._cut or self._link_faults else frozenset()
        if link in self._cut:
            return
        queue, delay_s, now_s = self.queues.of(sender, receiver), self._delay_s(sender, receiver), self.now_s
        own_faults, urgent = self._link_faults.get(link), is_urgent(batch, sender, receiver)
        if own_faults is not None or self._faults is not None:
            for data in batch.datagrams():  # each individually: any of them may be lost, or late
                self._count(data)
                leaves_s = queue.leaves_s(len(data), now_s, urgent)
                for copy, extra_s in _flights(data, own_faults, self._faults) if leaves_s >= 0.0 else ():
                    self._arrive([copy], leaves_s - now_s + delay_s + extra_s, sender, receiver)
            return
        for packets, size in _runs_of(batch):
            train = _Train(packets, size, sender, receiver, queue, delay_s, urgent)
            count = train.count
            if not train.ends:
                for at in range(count):
                    self._leave(train, at)
                continue
            self.datagrams_sent += count
            self.bytes_sent += len(packets)
            sizes = [size] * count
            sizes[-1] = len(packets) - (count - 1) * size
            leave_s = [queue.leaves_s(size_bytes, now_s, urgent) for size_bytes in sizes]
            train.due_s = [LOST if leaves_at_s < 0.0 else leaves_at_s + delay_s for leaves_at_s in leave_s]
            train.orders, train.left = list(islice(self._order, count)), count - 1
            self._schedule(train, 0)

    def _count(self, data: bytes) -> None:
        self.datagrams_sent += 1
        self.bytes_sent += len(data)

    def _leave(self, train: _Train, at: int) -> None:
        """Let packet ``at`` of a train leave; record its arrival, or that its link loses it."""
        size = train.size if at + 1 < train.count else len(train.data) - at * train.size
        self.datagrams_sent += 1
        self.bytes_sent += size
        leaves_s = train.queue.leaves_s(size, self.now_s, train.urgent)
        if leaves_s < 0.0:
            train.due_s[at] = LOST
            return
        due_s = train.due_s[at] = leaves_s + train.delay_s
        if train.ends:
            train.orders[at], train.left = next(self._order), at
        else:
            heapq.heappush(self._arrivals, (due_s, next(self._order), train, at))

    def _go_on(self, train: _Train, at: int) -> None:
        self._leave(train, at)
        if train.ends and not train.scheduled:
            self._schedule(train, at)

    def _schedule(self, train: _Train, at: int) -> None:
        """Schedule the next delivery from ``at`` on, with its last packet."""
        due_s, last_left = train.due_s, train.left
        while at <= last_left and not 0.0 <= due_s[at] < math.inf:
            at += 1
        train.scheduled = at <= last_left
        if train.scheduled:
            train.first = at
            if at < last_left:
                at = self._last_together(train, at, at)
            heapq.heappush(self._arrivals, (due_s[at], train.orders[at], train, at))

    def _last_together(self, train: _Train, first: int, last: int) -> int:
        """Return the last packet that is delivered together with ``first``, from ``last`` on."""
        if not self._offload:
            return last
        due_s, first_s = train.due_s, train.due_s[first]
        most = min(train.count, first + min(_MAX_RUN_SEGMENTS, max(1, MAX_PACKET_BYTES // train.size)))
        while last + 1 < most and 0.0 <= due_s[last + 1] - first_s <= GRAIN_S:
            last += 1
        return last

    def _process_arrivals(self, arrival: tuple[float, int, _Train, int], until_s: float) -> None:
        """Process packets at their links' ends until a machine received something, or ``until_s``."""
        # Most packets of a run pass a satellite that has forwarded the run, or are delivered with the next packet:
        # these need no check of timers and machines.
        arrivals, satellites, dead = self._arrivals, self.satellites, self._dead
        while True:
            _, _, train, at = arrival
            onward = train.onward
            if train.ends:
                if self._hand_over(train, at):
                    return
            elif onward is None or train.machine is not satellites[train.receiver]:  # type: ignore[index]
                if self._passes(train, at):
                    return
            elif train.receiver not in dead:
                self._go_on(onward, at)
            following = arrivals[0] if arrivals else None
            if following is None or following[0] > until_s or isinstance(following, _Arrival):
                return
            arrival = heapq.heappop(arrivals)  # type: ignore[assignment]
            if arrival[0] > self.now_s:
                self.now_s = arrival[0]

    def _passes(self, train: _Train, at: int) -> bool:
        """Process a packet to be forwarded. Return True if a machine received something."""
        if train.receiver in self._dead:
            return False
        if train.machine is None:
            self._forward(train, at)
            return True
        if train.machine is self.satellites[train.receiver]:  # type: ignore[index]
            return False  # it could not forward the run, and has answered so
        # Another machine is there now, which knows nothing of the run.
        if train.first < 0:
            train.first = at
        first = train.first
        if self._last_together(train, first, at) > at:
            return False  # delivered with the next packet
        train.first = -1
        self._give(train, first, at)
        return True

    def _hand_over(self, train: _Train, at: int) -> bool:
        """Deliver packets. Return True if a machine received something."""
        first = train.first
        last = at if at == train.left else self._last_together(train, first, at)
        if last > at:  # more have left meanwhile, to be delivered with them
            heapq.heappush(self._arrivals, (train.due_s[last], train.orders[last], train, last))
            return False
        self._schedule(train, at + 1)
        receiver = train.receiver
        if receiver in self._dead:
            return False
        if self._revived_s:  # packets that arrived before were lost with its memory
            since_s = self._revived_s.get(receiver, -math.inf)
            while first <= at and train.due_s[first] < since_s:
                first += 1
            if first > at:
                return False
        self._give(train, first, at)
        return True

    def _give(self, train: _Train, first: int, last: int) -> None:
        receiver, size = train.receiver, train.size
        begin, end = first * size, min((last + 1) * size, len(train.data))
        if isinstance(receiver, SatelliteId):
            unserved, outgoing = self._serve(receiver, train.data, (begin, end - begin, size), train.sender)
            for batch, to in outgoing:
                self._send(batch, receiver, to)
            if unserved:
                self._touched[receiver] = None
                view = memoryview(train.data)[begin:end]
                self.satellites[receiver].receive_batch(view, size, train.sender, self.now_s)
        elif receiver in self._clients:
            self._touched[receiver] = None
            self._clients[receiver].receive_batch(memoryview(train.data)[begin:end], size, self.now_s)

    def _serve(
        self, satellite: SatelliteId, data: bytearray, run: native.Slot, source: Node
    ) -> tuple[bool, list[tuple[SegmentBatch, Node]]]:
        """Let a satellite serve plain requests and transit, counting hops in ``data``.

        Return True if the machine must see the run, and the packets that leave now.
        """
        machine, now_s = self.satellites[satellite], self.now_s
        requests = None if self._authority is not None else machine.plain_requests(now_s)
        if requests is None:
            return True, []
        routes = machine.routes(now_s)
        transit = None if routes is None else (*routes, _NO_SOCKETS)
        unserved, served, _, forwarded = native.serve_runs(-1, data, [run], source, requests, transit)
        outgoing: list[tuple[SegmentBatch, Node]] = []
        if forwarded:
            machine.record_passed(forwarded, now_s)
            for _, _, link, _, remainder in forwarded:
                for at, size, segment_bytes in remainder:
                    packets = data if size == len(data) else data[at : at + size]
                    outgoing.append((SegmentBatch(packets, segment_bytes), link))
        if served:
            machine.record_served(served, now_s)
            for *_, link, _, _, _, _, answer in served:
                headers, payloads = cast(tuple[bytearray, list[bytes] | None], answer)
                width = len(headers) // (len(payloads) if payloads else 1)
                outgoing.append((SegmentBatch(headers, width, payloads), link))
        if machine.wants_to_send:
            self._touched[satellite] = None
        return bool(unserved), outgoing

    def _forward(self, train: _Train, at: int) -> None:
        """Forward a run when its first packet arrives."""
        forwarder = train.receiver
        assert isinstance(forwarder, SatelliteId) and self.queues is not None
        machine = train.machine = self.satellites[forwarder]
        unserved, outgoing = self._serve(forwarder, train.data, (0, len(train.data), train.size), train.sender)
        if unserved:
            machine.receive_batch(train.data, train.size, train.sender, self.now_s)
            self._touched[forwarder] = None
        if unserved or machine.wants_to_send:
            outgoing += cast(list[tuple[SegmentBatch, Node]], machine.datagrams_to_send(self.now_s))
        for batch, receiver in outgoing:
            link = frozenset((forwarder, receiver))
            is_same_run = train.onward is None and batch.payloads is None and batch.count == train.count
            blocked = self._any_blocked and self._blocked(forwarder, receiver)
            if not is_same_run or blocked or link in self._link_faults or link in self._cut:
                self._send(batch, forwarder, receiver)
                continue
            queue, delay_s = self.queues.of(forwarder, receiver), self._delay_s(forwarder, receiver)
            data = batch.headers if isinstance(batch.headers, bytearray) else bytearray(batch.headers)
            train.onward = _Train(data, batch.header_bytes, forwarder, receiver, queue, delay_s, urgent=False)
        if train.onward is not None:
            self._go_on(train.onward, at)

    def _deliver(self, arrival: _Arrival) -> None:
        _, _, receiver, sender, data, segment_bytes = arrival
        if isinstance(receiver, SatelliteId):
            if receiver in self._host_of:
                self._host_of[receiver].arrive(receiver, data, segment_bytes, sender, self.now_s)
            elif receiver not in self._dead:
                self._touched[receiver] = None
                self.satellites[receiver].receive_batch(data, segment_bytes, sender, self.now_s)
        elif receiver in self._clients:
            self._touched[receiver] = None
            self._clients[receiver].receive_batch(data, segment_bytes, self.now_s)


_wake_s = attrgetter("wake_s")


def _flights(data: bytes, own_faults: FaultInjector | None, faults: FaultInjector | None) -> list[tuple[bytes, float]]:
    """Return a datagram's arriving copies, each with extra seconds, by faults of the link and of all links."""
    if own_faults is None:
        return [(data, 0.0)] if faults is None else faults.apply(data)
    flights = own_faults.apply(data)
    if faults is not None:
        flights = [(last, before_s + s) for copy, before_s in flights for last, s in faults.apply(copy)]
    return flights


def _runs_of(batch: SegmentBatch) -> list[tuple[bytearray, int]]:
    """Return packets in runs of equal size (the last maybe shorter)."""
    headers, step, payloads = batch.headers, batch.header_bytes, batch.payloads
    if payloads is None:
        return [(headers if isinstance(headers, bytearray) else bytearray(headers), step)]
    parts: list[Buffer] = [b""] * (2 * len(payloads))
    parts[1::2] = payloads if isinstance(payloads, list) else [payloads[at] for at in range(len(payloads))]
    sizes = list(map(len, parts[1::2]))
    if sizes.count(sizes[0]) < len(sizes) - (sizes[-1] < sizes[0]):
        return [(bytearray(data), len(data)) for data in batch.datagrams()]
    view = memoryview(headers)
    parts[::2] = [view[at : at + step] for at in range(0, len(headers), step)]
    return [(bytearray().join(parts), step + sizes[0])]


def _joins(run: list[bytes], data: bytes) -> bool:
    segment_bytes = len(run[0])
    if len(run[-1]) != segment_bytes or not 0 < len(data) <= segment_bytes:
        return False
    return len(run) < _MAX_RUN_SEGMENTS and (len(run) + 1) * segment_bytes <= MAX_PACKET_BYTES


class SimulatedClient:
    """Ground host, with the interface of ``UdpClient``."""

    def __init__(self, constellation: SimulatedConstellation, machine: ClientMachine) -> None:
        self._constellation = constellation
        self.machine = machine
        self.lock = constellation.lock  # clients share its virtual time: one thread at a time advances it
        self._unclaimed: dict[int, Finished] = {}

    def now_s(self) -> float:
        return self._constellation.now_s

    def read(self, info: ValueInfo, out: memoryview | Rows, replicas: int = 1) -> Finished:
        with self.lock:
            number = self.machine.get(info, out, self.now_s(), replicas)
        return self.run([number])[number]

    def write(
        self,
        key: bytes,
        value: Buffer,
        striping: Striping,
        meanwhile: Callable[[ValueInfo], object] = lambda info: None,
    ) -> Finished:
        with self.lock:
            number, info = self.machine.put(key, value, striping, self.now_s())
            meanwhile(info)
        return self.run([number])[number]

    def run(self, numbers: Iterable[int]) -> dict[int, Finished]:
        with self.lock:
            return self._run(set(numbers))

    def _run(self, waiting: set[int]) -> dict[int, Finished]:
        finished = dict[int, Finished]()
        while True:
            self._constellation.flush()
            while (event := self.machine.next_event()) is not None:
                self._unclaimed[event.number] = event
            for number in waiting & self._unclaimed.keys():
                finished[number] = self._unclaimed.pop(number)
            waiting -= finished.keys()
            if not waiting:
                return finished
            if not self._constellation.step_flushed(math.inf):
                raise RuntimeError(f"operations {sorted(waiting)} can never end: a bug in the client machine")

    def close(self) -> None:
        self._constellation.flush()
        self._constellation.disconnect(self.machine.config)
