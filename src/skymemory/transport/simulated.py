"""The same machines over virtual time: a constellation in one object, exact to the event and the same for a seed.

Every link has its one-way delay; faults are drawn per datagram from a seeded injector. What is simulated here is what
flies: the satellites and clients are the very objects that the UDP transport drives.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import cast

from skymemory.constellation.torus import SatelliteId
from skymemory.protocol.client import ClientConfig, ClientMachine, Finished
from skymemory.protocol.motion import MoveClock, SkyMap
from skymemory.protocol.satellite import SatelliteConfig, SatelliteMachine
from skymemory.transport.faults import FaultInjector

GroundToken = tuple[str, int]
Node = SatelliteId | GroundToken
LinkDelay = Callable[[Node, Node], float]
"""One-way seconds from one end of a link to the other."""


def no_delay(sender: Node, receiver: Node) -> float:
    return 0.0


@dataclass(order=True, slots=True)
class _Arrival:
    time_s: float
    order: int
    receiver: Node = field(compare=False)
    sender: Node = field(compare=False)
    data: bytes = field(compare=False)


class SimulatedConstellation:
    """All satellites of a torus, and any number of ground hosts, over virtual time that starts at 0."""

    def __init__(
        self, sky: SkyMap, memory_bytes: int, clock: MoveClock | None = None, delay_s: LinkDelay = no_delay,
        faults: FaultInjector | None = None,
    ) -> None:  # fmt: skip
        self.sky = sky
        self.clock = clock or MoveClock()
        self.now_s = 0.0
        self.datagrams_sent = 0
        self.bytes_sent = 0
        self._memory_bytes = memory_bytes
        self._delay_s = delay_s
        self._faults = faults
        self._arrivals: list[_Arrival] = []
        self._order = count()
        self.satellites = {here: self._new_satellite(here) for here in sky.torus.satellites()}
        self._dead: set[SatelliteId] = set()
        self._clients: dict[GroundToken, ClientMachine] = {}
        self._touched: set[Node] = set(self.satellites)
        self._timers: dict[Node, float] = {}

    def _new_satellite(self, here: SatelliteId) -> SatelliteMachine:
        return SatelliteMachine(SatelliteConfig(here, self._memory_bytes), self.sky, self.clock, self.now_s)

    def kill(self, satellite: SatelliteId) -> None:
        """From now on it neither hears nor speaks; its memory is lost."""
        self._dead.add(satellite)
        self._timers.pop(satellite, None)

    def revive(self, satellite: SatelliteId) -> None:
        """It is back, empty."""
        self._dead.discard(satellite)
        self.satellites[satellite] = self._new_satellite(satellite)
        self._touched.add(satellite)

    def connect(self, config: ClientConfig) -> SimulatedClient:
        """A ground host."""
        machine = ClientMachine(config, self.sky, self.clock)
        token = ("ground", config.ground)
        self._clients[token] = machine
        return SimulatedClient(self, machine)

    def step(self, limit_s: float) -> bool:
        """Let the next thing happen, not later than ``limit_s``; False (and time at the limit) if nothing does."""
        self.flush()
        timer_s = min(self._timers.values(), default=math.inf)
        arrival_s = self._arrivals[0].time_s if self._arrivals else math.inf
        if min(timer_s, arrival_s) > limit_s or min(timer_s, arrival_s) == math.inf:
            self.now_s = limit_s if self.now_s < limit_s < math.inf else self.now_s
            return False
        self.now_s = max(self.now_s, min(timer_s, arrival_s))
        if arrival_s <= timer_s:
            self._deliver(heapq.heappop(self._arrivals))
        else:
            for node in [node for node, time_s in self._timers.items() if time_s <= self.now_s]:
                self._machine(node).handle_timer(self.now_s)
                self._touched.add(node)
        return True

    def settle(self, limit_s: float) -> None:
        """Run until nothing more happens, or until ``limit_s``."""
        while self.step(limit_s):
            pass

    def _machine(self, node: Node) -> SatelliteMachine | ClientMachine:
        return self.satellites[node] if isinstance(node, SatelliteId) else self._clients[node]

    def flush(self) -> None:
        """Send what the machines that something happened to (clients: always) have to say, and note their timers."""
        for node in [*self._touched, *self._clients]:
            machine = self._machine(node)
            for batch, to in machine.datagrams_to_send(self.now_s):
                for data in batch.datagrams():
                    self._send(data, node, cast(Node, to))
            timer_s = None if node in self._dead else machine.next_timer_s()
            if timer_s is None:
                self._timers.pop(node, None)
            else:
                self._timers[node] = timer_s
        self._touched.clear()

    def _send(self, data: bytes, sender: Node, receiver: Node) -> None:
        self.datagrams_sent += 1
        self.bytes_sent += len(data)
        flights = self._faults.apply(data) if self._faults is not None else [(data, 0.0)]
        for copy, extra_s in flights:
            time_s = self.now_s + self._delay_s(sender, receiver) + extra_s
            heapq.heappush(self._arrivals, _Arrival(time_s, next(self._order), receiver, sender, copy))

    def _deliver(self, arrival: _Arrival) -> None:
        receiver, sender = arrival.receiver, arrival.sender
        if isinstance(receiver, SatelliteId):
            if receiver not in self._dead:
                self._touched.add(receiver)
                self.satellites[receiver].receive_datagram(arrival.data, sender, self.now_s)
        else:
            self._clients[receiver].receive_datagram(arrival.data, self.now_s)


class SimulatedClient:
    """A ground host of a simulated constellation, with the driver's interface that the UDP client has too."""

    def __init__(self, constellation: SimulatedConstellation, machine: ClientMachine) -> None:
        self._constellation = constellation
        self.machine = machine
        self.lock = nullcontext()
        """Virtual time has one thread."""

    def now_s(self) -> float:
        return self._constellation.now_s

    def run(self, numbers: Iterable[int]) -> dict[int, Finished]:
        """Let time pass until all these operations have ended."""
        waiting, finished = set(numbers), dict[int, Finished]()
        while waiting:
            self._constellation.flush()
            while (event := self.machine.next_event()) is not None:
                finished[event.number] = event
                waiting.discard(event.number)
            if waiting and not self._constellation.step(math.inf):
                raise RuntimeError(f"operations {sorted(waiting)} wait for nothing: a fault of the client machine")
        return finished

    def close(self) -> None:
        """Nothing to release."""
