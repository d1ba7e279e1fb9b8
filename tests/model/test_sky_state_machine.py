"""Satellites, client and migration against a dictionary: never wrong bytes, and what nothing befell is found.

The stated number of faults is no death: what was stored while all was well, and since when no satellite has died,
must be found whenever all is well again, however the box moved and whatever storm of lost, doubled, late and damaged
datagrams passed meanwhile. During storms, and after deaths, it is the right bytes or a miss. Nothing is evicted for
want of room (the memory is large); EVICT is the caller's own deletion.
"""

from __future__ import annotations

import hashlib
import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.protocol.satellite import ledgers

from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.protocol import messages
from skymemory.protocol.client.machine import ClientConfig
from skymemory.protocol.client.transfer import Striping, ValueInfo
from skymemory.protocol.clock import STRATEGY_CODES, SkyMap
from skymemory.protocol.wire import Op
from skymemory.transport.faults import FaultInjector
from skymemory.transport.simulated import SimulatedConstellation

TORUS = Torus(5, 19)
LINK_S = 0.004
EXAMPLES = int(os.environ.get("SKYMEMORY_MODEL_EXAMPLES", "8"))
SETTLED_S = 5.0
"""A handover of this little data has ended long before, if nothing is lost and no satellite dead."""
KEYS = [hashlib.sha256(bytes([number])).digest() for number in range(4)]
satellites = st.builds(SatelliteId, st.integers(0, 4), st.integers(0, 18))
near = st.builds(SatelliteId, st.integers(1, 3), st.integers(7, 11))
"""Likely to hold something while the box has not moved far."""


class SkyMachine(RuleBasedStateMachine):
    """``values`` is the dictionary; ``sure`` are the keys that must be found when all is well."""

    @initialize(access=st.sampled_from(["los", "gateway"]), seed=st.integers(0, 99))
    def build(self, access: str, seed: int) -> None:
        self.sky = SkyMap(TORUS, SatelliteId(2, 9))
        self.calm = FaultInjector()
        self.storm = FaultInjector(loss=0.1, duplicate=0.1, reorder=0.1, corrupt=0.1, seed=seed)
        self.sim = SimulatedConstellation(self.sky, 64 << 20, None, lambda *_: LINK_S, self.calm)
        self.host = self.sim.connect(ClientConfig(7, access, expected_rtt_s=2 * LINK_S))  # type: ignore[arg-type]
        self.moves = (0, 0)
        self.values: dict[bytes, tuple[ValueInfo, bytes]] = {}
        self.older: list[tuple[ValueInfo, bytes]] = []
        self.sure: set[bytes] = set()
        self.dead: set[SatelliteId] = set()
        self.written = 0

    @property
    def faultless(self) -> bool:
        return not self.dead and self.sim._faults is self.calm

    @rule(
        key=st.sampled_from(KEYS),
        size=st.sampled_from([0, 1, 400, 401, 1600, 20_000]),
        strategy=st.sampled_from(sorted(STRATEGY_CODES.values())),
        servers=st.sampled_from([1, 4, 10]),
    )
    def put(self, key: bytes, size: int, strategy: int, servers: int) -> None:
        self.written += 1
        value = hashlib.shake_128(bytes([self.written % 256])).digest(size)
        number, info = self.host.machine.put(key, value, Striping(400, strategy, servers), self.sim.now_s)
        stored = self.host.run([number])[number].ok
        if key in self.values:
            self.older.append(self.values[key])
        self.values[key] = info, value
        assert stored or not self.faultless
        self.sure.discard(key)
        if self.faultless:
            self.sure.add(key)

    @rule(key=st.sampled_from(KEYS))
    def get(self, key: bytes) -> None:
        if key in self.values:
            found = self.read(*self.values[key])
            assert found or key not in self.sure or not self.faultless, "no satellite died, and it is not found"

    @precondition(lambda self: self.older)
    @rule(data=st.data())
    def get_what_was_overwritten(self, data: st.DataObject) -> None:
        self.read(*data.draw(st.sampled_from(self.older)))

    def read(self, info: ValueInfo, value: bytes) -> bool:
        out = bytearray(info.value_bytes)
        number = self.host.machine.get(info, memoryview(out), self.sim.now_s)
        ok = self.host.run([number])[number].ok
        assert not ok or bytes(out) == value, "wrong bytes"
        return ok

    @rule(key=st.sampled_from(KEYS))
    def delete(self, key: bytes) -> None:
        body = messages.pack_keys([key])
        everyone = [here for here in TORUS.satellites() if here not in self.dead]
        done = self.host.run([self.host.machine.ask(Op.EVICT, body, here, self.sim.now_s) for here in everyone])
        self.sure.discard(key)
        if self.faultless:
            assert all(finished.ok for finished in done.values())
            if self.values.get(key) is not None and self.values[key][0].value_bytes:
                self.sim.settle(self.sim.now_s + SETTLED_S)

    @rule(slots=st.integers(-2, 2), planes=st.integers(-1, 1), patient=st.booleans())
    def move(self, slots: int, planes: int, patient: bool) -> None:
        """An impatient operator moves on before the handover has ended: allowed while nothing else goes wrong."""
        self.moves = self.moves[0] + slots, self.moves[1] + planes
        body = messages.pack_moves(*self.moves)
        notified = [here for here in TORUS.satellites() if here not in self.dead]
        self.host.run([self.host.machine.ask(Op.ADVANCE, body, here, self.sim.now_s) for here in notified])
        if patient or not self.faultless:
            self.sim.settle(self.sim.now_s + SETTLED_S)

    @rule(victim=st.one_of(near, satellites))
    def kill(self, victim: SatelliteId) -> None:
        self.sim.kill(victim)
        self.dead.add(victim)
        self.sure.clear()

    @precondition(lambda self: self.dead)
    @rule()
    def revive_all(self) -> None:
        for satellite in sorted(self.dead):
            self.sim.revive(satellite)
        self.dead.clear()
        self.announce_the_moves()

    @precondition(lambda self: self.sim._faults is self.calm)
    @rule()
    def storm_begins(self) -> None:
        self.sim._faults = self.storm

    @precondition(lambda self: self.sim._faults is self.storm)
    @rule()
    def storm_ends(self) -> None:
        """What was handed over meanwhile gets its time; a value that was whole before it is found after it."""
        self.sim._faults = self.calm
        self.announce_the_moves()

    def announce_the_moves(self) -> None:
        body = messages.pack_moves(*self.moves)
        notified = [here for here in TORUS.satellites() if here not in self.dead]
        self.host.run([self.host.machine.ask(Op.ADVANCE, body, here, self.sim.now_s) for here in notified])
        self.sim.settle(self.sim.now_s + 30.0)

    @rule(seconds=st.sampled_from([0.01, 1.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.sim.settle(self.sim.now_s + seconds)

    @invariant()
    def the_books_close(self) -> None:
        if hasattr(self, "sim"):
            books = {here: machine.housekeeping() for here, machine in self.sim.satellites.items()}
            assert ledgers.open_books(books) == {}


TestSky = SkyMachine.TestCase
TestSky.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
