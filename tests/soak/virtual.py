"""Days of a constellation in virtual time, with faults by seed: every read is right or a miss, and all books close.

Two ground hosts (one with a beam to each satellite, one through the gateway) put, get and delete values of 1 to 4
chunks, and now and then a full block of 480, while the box moves with the orbits. Datagrams are lost, doubled,
delayed and damaged; satellites and whole planes die and return empty; some satellites hold next to nothing. Time in
which nothing happens costs nothing. The judge is a dictionary: what was put under which version of which key.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.protocol import ledger, messages
from skymemory.protocol.client import ClientConfig
from skymemory.protocol.eviction import EvictionConfig
from skymemory.protocol.motion import STRATEGY_CODES, MoveClock, SkyMap
from skymemory.protocol.transfer import ValueInfo
from skymemory.protocol.wire import CHUNK_REF_BYTES, Op
from skymemory.transport.faults import FaultInjector
from skymemory.transport.simulated import SimulatedClient, SimulatedConstellation

DAY_S = 86_400.0
FULL_BLOCK_CHUNKS, FULL_CHUNK_BYTES = 480, 6144
_LINK_S = 0.004
_KEYS = 500
_FULL_KEYS = 2
_SMALL_SATELLITES = 2
_SERVERS = (1, 4, 10)
_SWEEP_S = 300.0
"""Between looks for lost copies, where there are copies: ten times the default, since days are simulated."""


@dataclass(frozen=True, slots=True)
class Setting:
    """``deaths_per_day`` and ``plane_deaths_per_day`` are means; the dead return empty after minutes to an hour."""

    days: float
    operations: int
    full_blocks: int
    seed: int = 1
    memory_bytes: int = 768 << 10
    small_memory_bytes: int = 20_000
    loss: float = 0.01
    duplicate: float = 0.01
    reorder: float = 0.02
    corrupt: float = 0.005
    deaths_per_day: float = 24.0
    plane_deaths_per_day: float = 0.5
    replicas: int = 1


@dataclass(slots=True)
class Outcome:
    """``wrong`` and ``open_books`` are the promises: both stay empty."""

    counted: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    open_books: list[str] = field(default_factory=list)
    books: dict[str, int] = field(default_factory=dict)
    moves: tuple[int, int] = (0, 0)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Version:
    info: ValueInfo
    number: int


def bytes_of(key: bytes, number: int, size: int) -> bytes:
    """Version ``number`` of a value: anybody can make it again."""
    return random.Random(key + number.to_bytes(4, "big")).randbytes(size)


class VirtualSoak:
    """Build it, then ``run``."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.outcome = Outcome()
        self._dice = random.Random(setting.seed)
        sky = SkyMap(Torus(5, 19), SatelliteId(2, 9))
        clock = MoveClock(slot_period_s=260.0, plane_period_s=1184.0, time_scale=1.0)
        faults = FaultInjector(setting.loss, setting.duplicate, setting.reorder, setting.corrupt, setting.seed)
        eviction = EvictionConfig.of((), _SWEEP_S, setting.replicas)
        self.sim = SimulatedConstellation(
            sky, setting.memory_bytes, clock, lambda sender, receiver: _LINK_S, faults, eviction=eviction
        )
        self._everyone = list(sky.torus.satellites())
        self._small = set(self._dice.sample(self._everyone, _SMALL_SATELLITES))
        for satellite in self._small:
            self.sim.satellites[satellite].store.limit_bytes = setting.small_memory_bytes
        self._hosts = [
            self.sim.connect(ClientConfig(7, "los", expected_rtt_s=2 * _LINK_S)),
            self.sim.connect(ClientConfig(8, "gateway", expected_rtt_s=8 * _LINK_S)),
        ]
        self._versions: dict[bytes, list[_Version]] = {}
        self._written: Counter[bytes] = Counter()
        self._dead: dict[SatelliteId, float] = {}

    def run(self, tell: Callable[[str], None] | None = None) -> Outcome:
        """All of it; ``tell`` hears of progress at each hundredth."""
        setting, began = self.setting, time.monotonic()
        total = setting.operations + setting.full_blocks
        full = set(self._dice.sample(range(total), setting.full_blocks))
        events = self._plan_of_deaths()
        death_s, victims, down_s = next(events)
        for number in range(total):
            now_s = (number + self._dice.random()) * setting.days * DAY_S / total
            while min(death_s, min(self._dead.values(), default=death_s)) <= now_s:
                if death_s <= min(self._dead.values(), default=death_s):
                    self.sim.settle(death_s)
                    self._kill(victims, death_s + down_s)
                    death_s, victims, down_s = next(events)
                else:
                    self._revive_next()
            self.sim.settle(max(now_s, self.sim.now_s))
            self._operate(number in full)
            if number % 1000 == 999:
                self._audit()
            if tell is not None and number % max(1, total // 100) == 0:
                tell(f"{number} of {total} operations, day {self.sim.now_s / DAY_S:.1f}")
        self.sim.settle(self.sim.now_s + 60.0)
        self._audit()
        self.outcome.moves = self.sim.clock.moves(self.sim.now_s)
        self.outcome.seconds = time.monotonic() - began
        return self.outcome

    # --- faults ---

    def _plan_of_deaths(self) -> Iterator[tuple[float, list[SatelliteId], float]]:
        """Time, victims, and for how long."""
        dice, setting = random.Random(self.setting.seed + 1), self.setting
        rate = setting.deaths_per_day + setting.plane_deaths_per_day
        now_s = 0.0
        while True:
            now_s += dice.expovariate(rate / DAY_S) if rate > 0 else float("inf")
            if dice.random() * rate < setting.plane_deaths_per_day:
                plane = dice.randrange(5)
                yield now_s, [satellite for satellite in self._everyone if satellite.plane == plane], 1200.0
            else:
                yield now_s, [dice.choice(self._everyone)], dice.uniform(1.0, 3600.0)

    def _kill(self, victims: list[SatelliteId], until_s: float) -> None:
        for satellite in victims:
            if satellite not in self._dead:
                self.sim.kill(satellite)
                self.outcome.counted["deaths"] += 1
            self._dead[satellite] = until_s

    def _revive_next(self) -> None:
        satellite = min(self._dead, key=lambda dead: (self._dead[dead], dead))
        self.sim.settle(max(self.sim.now_s, self._dead.pop(satellite)))
        self.sim.revive(satellite)
        if satellite in self._small:
            self.sim.satellites[satellite].store.limit_bytes = self.setting.small_memory_bytes

    # --- operations ---

    def _operate(self, full: bool) -> None:
        dice = self._dice
        host = dice.choice(self._hosts)
        key = hashlib.sha256(b"full%d" % dice.randrange(_FULL_KEYS) if full else b"%d" % dice.randrange(_KEYS)).digest()
        versions = self._versions.get(key)
        choice = dice.random()
        if not versions or choice < 0.25:
            self._put(host, key, full)
            if full:  # else it has mostly been lost to deaths and full satellites before it is read, hours later
                self._get(host, key, self._versions[key][-1])
        elif choice < 0.95 or full:
            version = versions[-1] if dice.random() < 0.9 else dice.choice(versions)
            self._get(host, key, version)
        else:
            self._delete(host, versions[-1].info)

    def _put(self, host: SimulatedClient, key: bytes, full: bool) -> None:
        """Three of four times it is what the key had before, as the hash of a prompt would have it."""
        dice = self._dice
        versions = self._versions.setdefault(key, [])
        again = versions and dice.random() < 0.75
        number = versions[-1].number if again else self._written[key]
        self._written[key] = max(self._written[key], number + 1)
        shape = random.Random(key + number.to_bytes(4, "little"))
        chunk_bytes = FULL_CHUNK_BYTES if full else shape.choice((64, 600, 2000, FULL_CHUNK_BYTES))
        size = FULL_BLOCK_CHUNKS * chunk_bytes if full else shape.randint(0, 4 * chunk_bytes)
        strategy = STRATEGY_CODES["rotation_hop"] if full else shape.choice(list(STRATEGY_CODES.values()))
        servers = 10 if full else shape.choice(_SERVERS)
        value = bytes_of(key, number, size)
        begun, info = host.machine.put(
            key, value, chunk_bytes, strategy, servers, host.now_s(), replicas=self._replicas(servers)
        )
        stored = host.run([begun])[begun].ok
        self._count("put", full, "stored" if stored else "failed")
        versions.append(_Version(info, number))
        del versions[:-4]

    def _get(self, host: SimulatedClient, key: bytes, version: _Version) -> None:
        info = version.info
        out = bytearray(info.value_bytes)
        begun = host.machine.get(info, memoryview(out), host.now_s(), self._replicas(info.servers))
        finished = host.run([begun])[begun]
        self._count("get", info.chunks > 4, "hit" if finished.ok else finished.report.failure)
        if finished.ok and out != bytes_of(key, version.number, info.value_bytes):
            self.outcome.wrong.append(f"{key.hex()[:12]} version {version.number} at {host.now_s():.3f} s")

    def _delete(self, host: SimulatedClient, info: ValueInfo) -> None:
        now_s = host.now_s()
        body, moves = messages.pack_keys([info.key]), host.machine.moves(now_s)
        places = [
            place
            for replica in range(self._replicas(info.servers))
            for place in self.sim.sky.servers_at(info.strategy, info.servers, info.set_moves, moves, replica)[
                : info.chunks
            ]
        ]
        asked = [host.machine.ask(Op.EVICT, body, place, now_s) for place in dict.fromkeys(places)]
        host.run(asked)
        self._count("delete", False, "asked")

    def _replicas(self, servers: int) -> int:
        """A box of one satellite has room for one copy."""
        return self.setting.replicas if servers > 1 else 1

    def _count(self, verb: str, full: bool, how: str) -> None:
        self.outcome.counted[f"{verb}{' full' if full else ''}: {how}"] += 1

    # --- the books ---

    def _audit(self) -> None:
        """Every satellite's books against a recount of its memory, and all of them together."""
        figures = {here: machine.housekeeping() for here, machine in self.sim.satellites.items()}
        for here, machine in self.sim.satellites.items():
            held = sum(len(chunk.payload) + CHUNK_REF_BYTES for _, chunk in machine.store.items())
            figures[here]["memory_used_bytes"] = held
        self.outcome.books = books = ledger.total(figures)
        gaps: dict[object, int] = {**ledger.open_books(figures), **ledger.open_books({"all": books})}
        if books["bytes_migrated_out"] > books["bytes_migrated_in"]:
            gaps["left and never arrived"] = books["bytes_migrated_out"] - books["bytes_migrated_in"]
        self.outcome.open_books += [f"{name} at {self.sim.now_s:.3f} s: {gap} bytes" for name, gap in gaps.items()]
        self.outcome.counted["audits"] += 1
