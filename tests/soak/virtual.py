"""Days of a constellation in virtual time, with faults by seed: every read is right or a miss, and all books close.

Two ground hosts (one with a beam to each satellite, one through the gateway) put, get and delete values of 1 to 4
chunks, and now and then a full block of 480, while the box moves with the orbits. Datagrams are lost, doubled,
delayed and damaged; satellites and whole planes die and return empty; others are short of memory for a while. Time in
which nothing happens costs nothing. The judge is a dictionary: what was put under which version of which key.

A read is only a trial of the handovers between it and its write, so reads are counted by how many moves of the box
their value has lived through.
"""

from __future__ import annotations

import hashlib
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from heapq import merge

from tests.protocol.satellite import ledgers
from tests.soak.terms import Outcome, Setting, bytes_of

from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.placement.locate import Moves
from skymemory.protocol import messages
from skymemory.protocol.client.machine import ClientConfig
from skymemory.protocol.client.transfer import Striping, ValueInfo
from skymemory.protocol.clock import STRATEGY_CODES, MoveClock, SkyMap
from skymemory.protocol.satellite.state import EvictionConfig
from skymemory.protocol.wire import CHUNK_REF_BYTES, Op
from skymemory.transport.faults import FaultInjector
from skymemory.transport.simulated import SimulatedClient, SimulatedConstellation

DAY_S = 86_400.0
FULL_BLOCK_CHUNKS, FULL_CHUNK_BYTES = 480, 6144
_LINK_S = 0.004
_KEYS = 500
_FULL_KEYS = 2
_SQUEEZED_BYTES = 20_000
_SERVERS = (1, 4, 10)
_LIVED = ((24, "after 24 moves or more"), (5, "after 5 to 23 moves"), (1, "after 1 to 4 moves"), (0, "before a move"))
_SWEEP_S = 300.0
"""Between looks for lost copies, where there are copies: ten times the default, since days are simulated."""


@dataclass(frozen=True, slots=True)
class _Version:
    info: ValueInfo
    number: int


_Fault = tuple[float, Callable[[], None]]
_NEVER: _Fault = math.inf, lambda: None


def _times(dice: random.Random, per_day: float) -> Iterator[float]:
    """Of events that come so often on the average, and know nothing of one another."""
    now_s = 0.0
    while per_day > 0:
        now_s += dice.expovariate(per_day / DAY_S)
        yield now_s


def _lived(set_moves: Moves, moves: Moves) -> Iterator[str]:
    """How many moves a value has been through since it was written."""
    slot_moves, plane_moves = moves[0] - set_moves[0], moves[1] - set_moves[1]
    yield next(name for least, name in _LIVED if slot_moves + plane_moves >= least)
    if plane_moves:
        yield "after a plane move"


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
        self._hosts = [
            self.sim.connect(ClientConfig(7, "los", expected_rtt_s=2 * _LINK_S)),
            self.sim.connect(ClientConfig(8, "gateway", expected_rtt_s=8 * _LINK_S)),
        ]
        self._versions: dict[bytes, list[_Version]] = {}
        self._written: Counter[bytes] = Counter()
        self._dead: dict[SatelliteId, float] = {}
        """Until when."""
        self._squeezed: dict[SatelliteId, float] = {}
        self._seen = 0, 0

    def run(self, progress: Callable[[str], None] | None = None) -> Outcome:
        """All of it; ``progress`` is called at each hundredth."""
        setting, began = self.setting, time.process_time()
        total = setting.operations + setting.full_blocks
        full = set(self._dice.sample(range(total), setting.full_blocks))
        faults = merge(self._deaths(), self._squeezes(), key=lambda fault: fault[0])
        fault_s, begin = next(faults, _NEVER)
        for number in range(total):
            now_s = (number + self._dice.random()) * setting.days * DAY_S / total
            while min(fault_s, self._next_end_s()) <= now_s:
                if fault_s <= self._next_end_s():
                    self.sim.settle(max(fault_s, self.sim.now_s))
                    begin()
                    fault_s, begin = next(faults, _NEVER)
                else:
                    self._end_next()
            self.sim.settle(max(now_s, self.sim.now_s))
            self._operate(number in full)
            if number % 1000 == 999:
                self._audit()
            if progress is not None and number % max(1, total // 100) == 0:
                progress(f"{number} of {total} operations, day {self.sim.now_s / DAY_S:.1f}, {self._lately()}")
        self.sim.settle(self.sim.now_s + 60.0)
        self._audit()
        self.outcome.moves = self.sim.clock.moves(self.sim.now_s)
        self.outcome.seconds = time.process_time() - began
        return self.outcome

    def _lately(self) -> str:
        """The share of reads since the last look that hit: a cache that ages would show it here."""
        counted = self.outcome.counted
        hits = counted["get: hit"]
        reads = sum(count for what, count in counted.items() if what.startswith("get: ") and "," not in what)
        hits_before, reads_before = self._seen
        self._seen = hits, reads
        return f"{100 * (hits - hits_before) / max(1, reads - reads_before):.0f} % of the reads hit"

    # --- faults ---

    def _deaths(self) -> Iterator[_Fault]:
        """When, and what then happens."""
        dice, setting = random.Random(self.setting.seed + 1), self.setting
        rate = setting.deaths_per_day + setting.plane_deaths_per_day
        for now_s in _times(dice, rate):
            if dice.random() * rate < setting.plane_deaths_per_day:
                plane = dice.randrange(5)
                victims = [satellite for satellite in self._everyone if satellite.plane == plane]
                yield now_s, partial(self._kill, victims, now_s + 1200.0)
            else:
                yield now_s, partial(self._kill, [dice.choice(self._everyone)], now_s + dice.uniform(1.0, 3600.0))

    def _squeezes(self) -> Iterator[_Fault]:
        dice = random.Random(self.setting.seed + 2)
        for now_s in _times(dice, self.setting.squeezes_per_day):
            yield now_s, partial(self._squeeze, dice.choice(self._everyone), now_s + dice.uniform(1.0, 1800.0))

    def _kill(self, victims: list[SatelliteId], until_s: float) -> None:
        self.outcome.counted["deaths of planes" if len(victims) > 1 else "deaths of one satellite"] += 1
        for satellite in victims:
            if satellite not in self._dead:
                self.sim.kill(satellite)
                self.outcome.counted["deaths"] += 1
            self._dead[satellite] = until_s

    def _squeeze(self, satellite: SatelliteId, until_s: float) -> None:
        self.outcome.counted["squeezes"] += 1
        self.sim.satellites[satellite].store.limit_bytes = _SQUEEZED_BYTES
        self._squeezed[satellite] = until_s

    def _next_end_s(self) -> float:
        return min(*self._dead.values(), *self._squeezed.values(), math.inf, math.inf)

    def _end_next(self) -> None:
        """The next of the dead comes back empty, or the next of the squeezed has its memory again."""
        until_s, satellite = min((end_s, one) for ends in (self._dead, self._squeezed) for one, end_s in ends.items())
        self.sim.settle(max(self.sim.now_s, until_s))
        if self._dead.get(satellite) == until_s:
            del self._dead[satellite]
            self.sim.revive(satellite)
        else:
            del self._squeezed[satellite]
        squeezed = satellite in self._squeezed
        self.sim.satellites[satellite].store.limit_bytes = _SQUEEZED_BYTES if squeezed else self.setting.memory_bytes

    # --- operations ---

    def _operate(self, full: bool) -> None:
        dice = self._dice
        host = dice.choice(self._hosts)
        key = hashlib.sha256(b"full%d" % dice.randrange(_FULL_KEYS) if full else b"%d" % dice.randrange(_KEYS)).digest()
        versions = self._versions.get(key)
        choice = dice.random()
        if not versions or choice < 0.25:
            self._put(host, key, full)
            if full:  # a look at what no fault had time to meet
                self._get(host, key, self._versions[key][-1])
        elif choice < 0.97 or full:
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
            key, value, Striping(chunk_bytes, strategy, servers, self._replicas(servers)), host.now_s()
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
        full = info.chunks > 4
        self._count("get", full, "hit" if finished.ok else finished.report.failure)
        for lived in _lived(info.set_moves, self.sim.clock.moves(self.sim.now_s)):
            self._count("get", full, f"{lived}, {'hit' if finished.ok else 'no hit'}")
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
        self.outcome.books = books = ledgers.total(figures)
        gaps: dict[object, int] = {**ledgers.open_books(figures), **ledgers.open_books({"all": books})}
        if books["bytes_migrated_out"] > books["bytes_migrated_in"]:
            gaps["left and never arrived"] = books["bytes_migrated_out"] - books["bytes_migrated_in"]
        self.outcome.open_books += [f"{name} at {self.sim.now_s:.3f} s: {gap} bytes" for name, gap in gaps.items()]
        self.outcome.counted["audits"] += 1
