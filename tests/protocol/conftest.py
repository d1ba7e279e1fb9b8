"""A constellation over virtual time in a few words, for the tests of the machines."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
import pytest

from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.eviction import DEFAULT_REPLACEMENT
from skymemory.placement.layout import Strategy
from skymemory.protocol import messages
from skymemory.protocol.client.machine import ClientConfig, Finished
from skymemory.protocol.client.transfer import Striping, ValueInfo
from skymemory.protocol.clock import STRATEGY_CODES, MoveClock, SkyMap
from skymemory.protocol.satellite.state import EvictionConfig
from skymemory.protocol.wire import Op
from skymemory.transport.faults import FaultInjector
from skymemory.transport.simulated import SimulatedConstellation

LINK_S = 0.004


def key_of(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


BUFFER_BYTES, WINDOW_BYTES = 1 << 20, 3 << 20
"""Of a satellite, and of the host: large values need several windows."""


class World:
    """5 planes of 19 satellites around (2, 9), 4 ms a link, and one ground host."""

    def __init__(
        self,
        access: str = "los",
        planes: int = 5,
        slots: int = 19,
        memory_bytes: int = 64 << 20,
        faults: FaultInjector | None = None,
        clock: MoveClock | None = None,
        routing: str = "greedy",
        offload: bool = True,
        link_s: float = LINK_S,
        eviction: EvictionConfig | None = None,
        replacement: str = DEFAULT_REPLACEMENT,
        **client: float,
    ) -> None:
        self.torus = Torus(planes, slots)
        self.sky = SkyMap(self.torus, SatelliteId(planes // 2, slots // 2))
        self.sim = SimulatedConstellation(
            self.sky,
            memory_bytes,
            clock,
            lambda sender, receiver: link_s,
            faults,
            routing,
            offload,
            replacement,
            eviction,
            buffer_bytes=BUFFER_BYTES,
        )
        self.access, self.link_s = access, link_s
        self.client_options = {"window_bytes": WINDOW_BYTES} | client
        self.host = self.connect(7)

    def connect(self, ground: int):
        config = ClientConfig(ground, self.access, expected_rtt_s=2 * self.link_s, **self.client_options)
        return self.sim.connect(config)

    @property
    def now_s(self) -> float:
        return self.sim.now_s

    def begin_put(
        self,
        name: str,
        value: bytes,
        chunk_bytes: int = 6144,
        strategy: Strategy = "rotation_hop",
        servers: int = 10,
        host=None,
    ) -> tuple[int, ValueInfo]:
        machine = (host or self.host).machine
        return machine.put(key_of(name), value, Striping(chunk_bytes, STRATEGY_CODES[strategy], servers), self.now_s)

    def put(self, name: str, value: bytes, *args, host=None, **kwargs) -> tuple[Finished, ValueInfo]:
        number, info = self.begin_put(name, value, *args, host=host, **kwargs)
        return (host or self.host).run([number])[number], info

    def get(self, info: ValueInfo, host=None) -> tuple[Finished, bytes]:
        host = host or self.host
        out = bytearray(info.value_bytes)
        number = host.machine.get(info, memoryview(out), self.now_s)
        return host.run([number])[number], bytes(out)

    def ask(self, op: Op, body: bytes, satellite: SatelliteId) -> Finished:
        number = self.host.machine.ask(op, body, satellite, self.now_s)
        return self.host.run([number])[number]

    def begin_advance(
        self, slot_moves: int, plane_moves: int = 0, satellites: Iterable[SatelliteId] | None = None
    ) -> list[int]:
        body = messages.pack_moves(slot_moves, plane_moves)
        everyone = self.torus.satellites() if satellites is None else satellites
        return [self.host.machine.ask(Op.ADVANCE, body, satellite, self.now_s) for satellite in everyone]

    def advance(self, slot_moves: int, plane_moves: int = 0) -> None:
        answers = self.host.run(self.begin_advance(slot_moves, plane_moves))
        assert all(answer.ok for answer in answers.values())

    def settle(self, seconds: float = 5.0) -> None:
        self.sim.settle(self.now_s + seconds)

    def counted(self, name: str) -> int:
        return sum(satellite.counters.get(name) for satellite in self.sim.satellites.values())

    def holders(self, info: ValueInfo) -> dict[int, list[SatelliteId]]:
        """Every satellite that has chunk ``index``, for every index of the value."""
        shares = {here: machine.store.shares.get(info.key, {}) for here, machine in self.sim.satellites.items()}
        some = {here: share for here, share in shares.items() if share}  # few of them
        return {index: [here for here, share in some.items() if index in share] for index in range(info.chunks)}

    def homes(self, info: ValueInfo, moves: tuple[int, int]) -> dict[int, list[SatelliteId]]:
        """Where every chunk must be at ``moves``, as ``holders`` would compute it."""
        places = self.sky.servers_at(info.strategy, info.servers, info.set_moves, moves)
        return {index: [places[index % info.servers]] for index in range(info.chunks)}

    def spread(self, info: ValueInfo) -> Counter[SatelliteId]:
        return Counter(holder for holders in self.holders(info).values() for holder in holders)


@pytest.fixture
def world() -> Callable[..., World]:
    return World


@pytest.fixture
def value_of() -> Callable[[int], bytes]:
    """Incompressible bytes, the same for a size."""
    return lambda size, seed=0: np.random.default_rng([seed, size]).bytes(size)
