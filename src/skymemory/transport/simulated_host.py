"""Host process over virtual time: satellites, an event loop, a processor whose work takes time.

Each turn is as in ``udp_host``. A step costs processor seconds (``WorkCosts``), and its packets leave at its end.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from itertools import count
from typing import Any, NamedTuple

from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput
from skymemory.protocol.satellite.machine import SatelliteMachine
from skymemory.protocol.satellite.overload import LATE_S, Lateness
from skymemory.protocol.wire import SKY_BYTES, Address, LinkEnd, Op, SegmentBatch, header_start
from skymemory.transport.faults import FaultInjector
from skymemory.transport.udp_host import BACKGROUND_SHARE, BEAT_S, MAX_SLICE_S, MIN_SLICE_S, RECEIVE_ROUNDS
from skymemory.transport.udp_socket import DEFAULT_BUFFER_BYTES, DEFAULT_SLOTS

Depart = Callable[[SegmentBatch, SatelliteId, LinkEnd], None]

_KERNEL_BYTES = 768
"""Bytes that Linux charges to a socket's buffer per run of datagrams."""
_LINKS_HEAD_BYTES = 20
_DECLARATION_BYTES = 16
_CARRIERS = (Op.SET, Op.MIGRATE)
_STEP_S = 1.0


@dataclass(frozen=True, slots=True)
class WorkCosts:
    """Processor seconds by kind of work, measured by ``benchmarks/satellite_work.py`` with the compiled helper on a
    core of a Xeon of 2021.
    """

    wake_s: float = 12e-6
    """Handling of a socket or delayed batch."""
    run_s: float = 2.2e-6
    faulty_s: float = 0.7e-6
    control_s: float = 16e-6
    links_s: float = 14e-6
    declaration_s: float = 2.2e-6
    """Receipt or transmission of a declaration."""
    chunk_s: float = 26e-6
    run_chunk_s: float = 4e-6
    forward_s: float = 11e-6
    alarm_s: float = 6e-6
    """Expiry and setting of a timer."""
    searched_s: float = 2.5e-6
    """Visit in a search for routes."""
    planned_s: float = 0.9e-6
    """Check of a chunk for migration."""
    postponed_s: float = 3e-6
    packed_s: float = 17e-6
    batch_s: float = 2e-6
    """Transfer to the kernel."""
    packet_s: float = 0.6e-6

    def times(self, factor: float) -> WorkCosts:
        return WorkCosts(*(getattr(self, field.name) * factor for field in fields(self)))


@dataclass(frozen=True, slots=True)
class HostLimits:
    """Limits of host processes: ``hosts`` are their satellites, ``share`` is of a core."""

    hosts: tuple[tuple[SatelliteId, ...], ...]
    share: float = 1.0
    costs: WorkCosts = WorkCosts()
    buffer_bytes: int = 2 * DEFAULT_BUFFER_BYTES


class _Held(NamedTuple):
    """Batch delayed by its link, or datagram by a fault."""

    due_s: float
    order: int
    satellite: SatelliteId
    batch: SegmentBatch
    other: LinkEnd


class _Inbox:
    """Receive buffer of a satellite's socket; ``full_since_s``: time since which no turn has emptied it."""

    __slots__ = ("bytes", "full_since_s", "runs")

    def __init__(self) -> None:
        self.bytes = 0
        self.runs: deque[tuple[bytes, int, LinkEnd]] = deque()
        self.full_since_s = math.inf


class SimulatedHost:
    def __init__(
        self,
        limits: HostLimits,
        machines: dict[SatelliteId, SatelliteMachine],
        lateness: Lateness,
        hold_s: Callable[[LinkEnd, LinkEnd], float],
        depart: Depart,
        faults: FaultInjector | None,
    ) -> None:
        """``hold_s`` returns a link's one-way time; ``faults`` apply to received datagrams."""
        self.machines = machines
        self.lateness = lateness
        self.work: Counter[str] = Counter()
        self.lost_bytes = 0
        self.busy_s = 0.0
        self._limits = limits
        self._costs = {field.name: getattr(limits.costs, field.name) for field in fields(limits.costs)}
        self._hold_s = hold_s
        self._depart = depart
        self._faults = faults
        self._share = limits.share
        self._now_s = 0.0
        self._behind_s = 0.0
        self._beat_s = BEAT_S
        self._waiting: dict[SatelliteId, None] = {}
        self._rested_s = 0.0
        self.wake_s = 0.0
        self._left_s = 0.0
        self._working = False
        self._inboxes = {name: _Inbox() for name in machines}
        self._filled: dict[SatelliteId, None] = {}
        self._order = count()
        self._alarms: list[tuple[float, int, SatelliteId]] = []
        self._alarm_s: dict[SatelliteId, tuple[float, float]] = {}
        self._line: list[_Held] = []
        self._late: list[_Held] = []
        self._nudged: dict[SatelliteId, None] = {}
        self._turn: deque[Callable[[], None]] = deque()
        self._sending: list[tuple[SegmentBatch, SatelliteId, LinkEnd, float]] = []
        self._hidden = dict.fromkeys(machines, (0, 0, 0))

    # --- events from outside ---

    def arrive(self, satellite: SatelliteId, data: bytes, segment_bytes: int, source: LinkEnd, now_s: float) -> None:
        """Put a run into a socket, whose full buffer drops it."""
        inbox = self._inboxes.get(satellite)
        if inbox is None:
            return
        size = len(data) + _KERNEL_BYTES
        if inbox.bytes + size > self._limits.buffer_bytes:
            self.lost_bytes += len(data)
            return
        inbox.bytes += size
        inbox.runs.append((data, segment_bytes, source))
        self._filled[satellite] = None
        self._wake(now_s)

    def nudge(self, satellite: SatelliteId, now_s: float) -> None:
        if satellite in self.machines:
            self._nudged[satellite] = None
            self._wake(now_s)

    def forget(self, satellite: SatelliteId) -> None:
        tables: tuple[dict[SatelliteId, Any], ...] = (
            self.machines,
            self._inboxes,
            self._filled,
            self._alarm_s,
            self._nudged,
            self._hidden,
            self._waiting,
        )
        for table in tables:
            table.pop(satellite, None)
        self._line = [item for item in self._line if item.satellite != satellite]
        self._late = [item for item in self._late if item.satellite != satellite]
        heapq.heapify(self._line)
        heapq.heapify(self._late)
        self._sending = [entry for entry in self._sending if entry[1] != satellite]

    def adopt(self, satellite: SatelliteId, machine: SatelliteMachine, now_s: float) -> None:
        self.machines[satellite] = machine
        self._inboxes[satellite] = _Inbox()
        self._hidden[satellite] = 0, 0, 0
        self.nudge(satellite, now_s)

    def set_share(self, share: float, now_s: float) -> None:
        if not 0.0 <= share <= 1.0:
            raise InvalidInput(f"share {share} of a core: expected 0 (paused) to 1")
        if self._working:
            self._left_s = max(0.0, self._left_s - (now_s - self._now_s) * self._share)
        self._now_s, self._share = now_s, share
        self.wake_s = self._next_s(now_s)

    def fall_behind(self, seconds: float) -> None:
        """Stop its clock for ``seconds``, as for a paused virtual machine."""
        self._behind_s += seconds
        self.wake_s = self._next_s(self._now_s)

    # --- time ---

    @property
    def _its_now_s(self) -> float:
        return self._now_s - self._behind_s

    def _is_due(self, its_s: float) -> bool:
        return its_s + self._behind_s <= self._now_s

    def _wake(self, now_s: float) -> None:
        if self._share and not self._working:
            self.wake_s = min(self.wake_s, now_s)

    def _next_s(self, now_s: float) -> float:
        """Return when the host next begins or ends a step; infinity if paused."""
        if not self._share:
            return math.inf
        if self._working:
            return self._now_s + self._left_s / self._share
        if self._turn or self._filled or self._nudged or self._waiting:
            return now_s
        next_due_s = self._beat_s
        if self._alarms:
            next_due_s = min(next_due_s, self._alarms[0][0])
        if self._line:
            next_due_s = min(next_due_s, self._line[0].due_s)
        if self._late:
            next_due_s = min(next_due_s, self._late[0].due_s)
        return max(now_s, next_due_s + self._behind_s)

    def step(self, now_s: float) -> None:
        """End a step, and begin the next."""
        if self._working:
            self._working = False
            self._now_s = now_s
            self._send_off(self._its_now_s)
        self._now_s = now_s
        if not self._turn and self._next_s(now_s) <= now_s:
            self._next_turn()
        if self._turn:
            self._turn.popleft()()
            self.busy_s += self._left_s
            self._working = True
        self.wake_s = self._next_s(now_s)

    def _spend(self, kind: str, times: int = 1) -> None:
        self.work[kind] += times
        self._left_s += times * self._costs[kind]

    def _send_off(self, now_s: float) -> None:
        self._left_s = 0.0
        sending, self._sending = self._sending, []
        for batch, satellite, link, hold_s in sending:
            if hold_s > 0:
                heapq.heappush(self._line, _Held(now_s + hold_s, next(self._order), satellite, batch, link))
            else:
                self._depart(batch, satellite, link)

    # --- a turn of its loop ---

    def _next_turn(self) -> None:
        """Queue a turn's steps."""
        turn = self._turn
        turn.extend(partial(self._after, satellite) for satellite in self._nudged)
        self._nudged.clear()
        if self._is_due(self._beat_s):
            turn.append(self._measure_lateness)
        while self._late and self._is_due(self._late[0].due_s):
            turn.append(partial(self._deliver_late, heapq.heappop(self._late)))
        while self._alarms and self._is_due(self._alarms[0][0]):
            due_s, _, satellite = heapq.heappop(self._alarms)
            if self._alarm_s.get(satellite, (0.0, -1.0))[1] == due_s:
                turn.append(partial(self._alarm, satellite, due_s))
        if self._waiting:
            turn.append(self._begin_slice)
        turn.append(self._look_at_sockets)

    def _look_at_sockets(self) -> None:
        if self._line and self._is_due(self._line[0].due_s):
            self._turn.append(self._release_due)
        self._turn.extend(partial(self._readable, satellite) for satellite in self._filled)

    def _measure_lateness(self) -> None:
        self._spend("wake_s")
        if self._behind_s > _STEP_S:
            self._behind_s = 0.0
        now_s = self._its_now_s
        self.lateness.measured(now_s - self._beat_s, now_s)
        self._beat_s = now_s + BEAT_S

    def _late_by(self, late_s: float) -> None:
        if late_s > LATE_S:
            self.lateness.measured(late_s, self._its_now_s)

    def _alarm(self, satellite: SatelliteId, due_s: float) -> None:
        machine = self.machines.get(satellite)
        if machine is None or self._alarm_s.get(satellite, (0.0, -1.0))[1] != due_s:
            return  # dead, or set again meanwhile
        self._spend("wake_s")
        self._spend("alarm_s")
        self._late_by(self._its_now_s - due_s)
        del self._alarm_s[satellite]
        machine.handle_timer(self._its_now_s)
        self._after(satellite)

    # --- background ---

    def _begin_slice(self) -> None:
        now_s = self._now_s
        owed_s = (now_s - self._rested_s) * BACKGROUND_SHARE / (1.0 - BACKGROUND_SHARE)
        self._turn.appendleft(partial(self._work, now_s + min(max(owed_s, MIN_SLICE_S), MAX_SLICE_S)))

    def _work(self, end_s: float) -> None:
        """Do background work while time is left."""
        self._rested_s = self._now_s
        if not self._waiting or self._now_s >= end_s:
            return
        satellite = next(iter(self._waiting))
        del self._waiting[satellite]
        machine = self.machines[satellite]
        self._turn.appendleft(partial(self._work, end_s))
        if (processed := machine.work(self._its_now_s)) is not None:
            self._count(satellite, bytes(processed[0]), processed[1])
        else:
            self._spend("alarm_s")
        self._after(satellite)

    # --- in ---

    def _release_due(self) -> None:
        self._late_by(self._its_now_s - self._line[0].due_s)
        self._release()

    def _release(self) -> None:
        item = heapq.heappop(self._line)
        self._spend("wake_s")
        self._sending.append((item.batch, item.satellite, item.other, 0.0))
        if self._line and self._is_due(self._line[0].due_s):
            self._turn.appendleft(self._release)

    def _readable(self, satellite: SatelliteId) -> None:
        """Process a bounded number of runs before any answer."""
        inbox = self._inboxes.get(satellite)
        if inbox is None or not inbox.runs:
            return
        self._spend("wake_s")
        rounds = 1 if self.lateness.is_late(self._its_now_s) else RECEIVE_ROUNDS
        self._read(satellite, rounds * DEFAULT_SLOTS, self._its_now_s)

    def _read(self, satellite: SatelliteId, runs_left: int, began_s: float) -> None:
        """Process a run from a satellite's socket, then the next, up to ``runs_left``; its answers follow."""
        inbox = self._inboxes.get(satellite)
        if inbox is None or not inbox.runs:
            return  # it has died since, and may be back
        data, segment_bytes, source = inbox.runs.popleft()
        inbox.bytes -= len(data) + _KERNEL_BYTES
        self._spend("run_s")
        if self._faults is None:
            self._take(satellite, data, segment_bytes, source)
        else:
            for at in range(0, len(data), segment_bytes):
                self._spend("faulty_s")
                for copy, extra_s in self._faults.apply(data[at : at + segment_bytes]):
                    if extra_s > 0:
                        batch = SegmentBatch(copy, max(1, len(copy)))
                        late = _Held(self._its_now_s + extra_s, next(self._order), satellite, batch, source)
                        heapq.heappush(self._late, late)
                    else:
                        self._take(satellite, copy, len(copy), source)
        if inbox.runs and runs_left > 1:
            self._turn.appendleft(partial(self._read, satellite, runs_left - 1, began_s))
            return
        if inbox.runs:
            inbox.full_since_s = min(inbox.full_since_s, began_s)
            self._late_by(began_s - inbox.full_since_s)
        else:
            inbox.full_since_s = math.inf
            self._filled.pop(satellite, None)
        self._turn.appendleft(partial(self._after, satellite))

    def _deliver_late(self, delivery: _Held) -> None:
        if delivery.satellite in self.machines:
            self._spend("wake_s")
            self._take(delivery.satellite, bytes(delivery.batch.headers), delivery.batch.header_bytes, delivery.other)
            self._after(delivery.satellite)

    def _take(self, satellite: SatelliteId, data: bytes, segment_bytes: int, source: LinkEnd) -> None:
        machine = self.machines[satellite]
        machine.receive_batch(data, segment_bytes, source, self._its_now_s)
        if not self._count_hidden(satellite, machine):
            self._count(satellite, data, segment_bytes)

    # --- out ---

    def _after(self, satellite: SatelliteId) -> None:
        """Charge and send a machine's packets, and set its timer."""
        machine = self.machines.get(satellite)
        if machine is None:
            return
        now_s = self._its_now_s
        for batch, link in machine.datagrams_to_send(now_s):
            op_at = _op_at(batch.headers)
            self._spend("batch_s")
            self._spend("packet_s", batch.count)
            if batch.headers[op_at + 7 : op_at + 11] == _packed(satellite):
                self._spend("packed_s")
                if batch.headers[op_at] == Op.LINKS:
                    self._spend("declaration_s", _declarations(len(batch.headers), op_at))
            self._sending.append((batch, satellite, link, self._hold_s(satellite, link)))
        self._count_hidden(satellite, machine)
        due_s = machine.next_timer_s()
        if due_s is None:
            self._alarm_s.pop(satellite, None)
        elif self._alarm_s.get(satellite, (None, 0.0))[0] != due_s:
            at_s = max(due_s, now_s)
            self._alarm_s[satellite] = due_s, at_s
            heapq.heappush(self._alarms, (at_s, next(self._order), satellite))
        if machine.wants_work:
            self._waiting[satellite] = None

    # --- costs ---

    def _count(self, satellite: SatelliteId, data: bytes, segment_bytes: int) -> None:
        """Charge a run by the kind of its first packet."""
        packets = -(-len(data) // segment_bytes) if segment_bytes > 0 else 1
        op_at = _op_at(data)
        if len(data) < op_at - 1 + SKY_BYTES:
            self._spend("control_s")
            return
        op = data[op_at]
        if data[op_at + 3 : op_at + 7] != _packed(satellite):
            self._spend("forward_s")
            self._spend("packet_s", packets)
        elif op in _CARRIERS:
            self._spend("chunk_s" if packets == 1 else "run_chunk_s", packets)
        elif op == Op.LINKS:
            self._spend("links_s")
            self._spend("declaration_s", _declarations(segment_bytes, op_at))
        else:
            self._spend("control_s", packets)

    def _count_hidden(self, satellite: SatelliteId, machine: SatelliteMachine) -> int:
        """Charge work that no packet shows. Return postponed packets."""
        now = machine.hidden_work
        before = self._hidden[satellite]
        if now == before:
            return 0
        self._hidden[satellite] = now
        searched, planned, postponed = (total - previous for total, previous in zip(now, before, strict=True))
        self._spend("searched_s", searched)
        self._spend("planned_s", planned)
        self._spend("postponed_s", postponed)
        return postponed


def split_evenly(satellites: Iterable[SatelliteId], hosts: int) -> tuple[tuple[SatelliteId, ...], ...]:
    """Return each host's satellites: whole planes, as in local plans."""
    planes: dict[int, list[SatelliteId]] = {}
    for satellite in satellites:
        planes.setdefault(satellite.plane, []).append(satellite)
    shares: list[list[SatelliteId]] = [[] for _ in range(hosts)]
    for at, plane in enumerate(sorted(planes)):
        shares[at * hosts // len(planes)] += planes[plane]
    return tuple(tuple(share) for share in shares)


@lru_cache(maxsize=4096)
def _packed(satellite: SatelliteId) -> bytes:
    return Address(*satellite).pack().to_bytes(4, "big")


def is_for(satellite: SatelliteId, packet: bytes | bytearray) -> bool:
    """Return True if a packet ends at this satellite, or is too short."""
    at = _op_at(packet)
    return len(packet) < at - 1 + SKY_BYTES or packet[at + 3 : at + 7] == _packed(satellite)


def _op_at(packet: bytes | bytearray) -> int:
    return header_start(memoryview(packet)) + 1


def _declarations(packet_bytes: int, op_at: int) -> int:
    return max(0, packet_bytes - (op_at - 1) - SKY_BYTES - _LINKS_HEAD_BYTES) // _DECLARATION_BYTES
