"""`python -m tests.soak.limited`: what is left of a constellation after a cause that overloaded it, in virtual time.

Its hosts have processors that can be paused and slowed, and buffers that overflow (``transport.simulated_host``). It
is filled, watched while it is healthy, overloaded by one cause, and watched again: how many satellites answer, how many
reads hit, how much processor the hosts use, and for what.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tests.soak.terms import ANSWER_AFTER_S, READ_AFTER_S, Row, later, share_of_hits

from skymemory.constellation.presets import preset_named
from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.kv.value import DEFAULT_CHUNK_BYTES
from skymemory.protocol import messages
from skymemory.protocol.client.machine import ClientConfig
from skymemory.protocol.client.transfer import Striping, ValueInfo
from skymemory.protocol.clock import STRATEGY_CODES, MoveClock, SkyMap
from skymemory.protocol.wire import Op
from skymemory.transport.faults import FaultInjector
from skymemory.transport.simulated import SimulatedClient, SimulatedConstellation
from skymemory.transport.simulated_host import HostLimits, WorkCosts, split_evenly

_BEAM_S = 0.002
_PATIENCE_S = 1.0
_LONGEST_CAUSE_S = 45.0


@dataclass(frozen=True, slots=True)
class Shape:
    """The constellation, and how much there is in it. ``slower``: how many times the measured costs its processors
    take: a smaller constellation with so much slower processors is as loaded as a large one, and sooner simulated.
    """

    planes: int = 5
    slots: int = 19
    hosts: int = 5
    values: int = 100
    value_bytes: int = 1_800_000
    servers: int = 10
    share: float = 0.4
    """Of a core for each host: five of them on two cores."""
    slower: float = 1.0
    faults: bool = True
    time_scale: float = 60.0
    slot_period_s: float = 260.0
    plane_period_s: float = 1184.0
    healthy_s: float = 15.0
    after_s: float = 60.0
    seed: int = 1


SHAPES = {"large": Shape(), "small": Shape(slots=7, values=12, slower=8.0)}
"""``large`` is the constellation of real processes that fell and stayed down; ``small`` is as loaded by as much work of
each kind, for a search of routes or a flood among a third of the satellites is an eighth of the work.
"""


@dataclass(slots=True)
class Outcome:
    """Rows, what work was done in each phase (seconds of processor by kind), and values that were read wrong."""

    satellites: int
    rows: list[Row] = field(default_factory=list)
    work_s: dict[str, Counter[str]] = field(default_factory=dict)
    wrong: int = 0

    @property
    def healthy_cores(self) -> float:
        rows = [row.cores for row in self.rows if row.phase == "healthy"]
        return sum(rows) / len(rows)

    @property
    def answer(self) -> float:
        """The smallest share of the satellites that answered in any second from 10 s on after the cause."""
        return min(row.answer for row in later(self.rows, ANSWER_AFTER_S)) / self.satellites

    @property
    def hits(self) -> float:
        """The share of the reads that hit from 30 s on after the cause."""
        return share_of_hits(later(self.rows, READ_AFTER_S))

    def load(self, undisturbed: Outcome) -> float:
        """Processor from 30 s on after the cause, as a multiple of what it was without it in the same seconds: how much
        there is to do depends on where the box is.
        """
        rows = later(self.rows, READ_AFTER_S)
        as_usual = (row.cores for row in undisturbed.rows if rows[0].at_s - 0.5 < row.at_s < rows[-1].at_s + 0.5)
        return sum(row.cores for row in rows) / sum(as_usual)

    def holds(self, undisturbed: Outcome) -> bool:
        return self.answer >= 0.95 and self.hits >= 0.95 and self.load(undisturbed) <= 1.2 and not self.wrong


class LimitedSoak:
    """A constellation of this shape; ``run`` it through a cause."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        shell = preset_named("testbed-19x5").shell
        torus = Torus(shape.planes, shape.slots)
        links_s = {axis: shell.isl_one_way_s(axis) for axis in ("slot", "plane")}

        def delay_s(sender: object, receiver: object) -> float:
            if isinstance(sender, SatelliteId) and isinstance(receiver, SatelliteId):
                return links_s["slot" if sender.plane == receiver.plane else "plane"]
            return _BEAM_S

        sky = SkyMap(torus, SatelliteId(shape.planes // 2, shape.slots // 2), links_s["slot"], links_s["plane"])
        clock = MoveClock(0.0, shape.slot_period_s, shape.plane_period_s, shape.time_scale)
        faults = FaultInjector(0.02, 0.01, 0.03, 0.005, shape.seed) if shape.faults else None
        self.limits = HostLimits(
            split_evenly(torus.satellites(), shape.hosts), shape.share, WorkCosts().times(shape.slower)
        )
        self.sim = SimulatedConstellation(sky, 64 << 20, clock, delay_s, faults, limits=self.limits)
        self.outcome = Outcome(torus.size)
        self._dice = random.Random(shape.seed)
        self._operators = 0
        self._pings = self._new_operator()
        self._reads = self.sim.connect(ClientConfig(9, "los", expected_rtt_s=2 * _BEAM_S))
        self._writes = self.sim.connect(ClientConfig(11, "los", expected_rtt_s=2 * _BEAM_S))
        self._values: list[tuple[ValueInfo, bytes]] = []
        self._reading: dict[int, tuple[int, bytearray]] = {}
        self._answered: set[int] = set()
        self._ended: list[bool] = []
        self._busy_s = 0.0
        self._work: Counter[str] = Counter()
        self.report: Callable[[str], None] | None = None

    def _new_operator(self) -> SimulatedClient:
        """Who asks whether satellites live is new each second, as a command is, and knows no round trips of before."""
        self._operators += 1
        ground = 100 + self._operators % 32
        return self.sim.connect(ClientConfig(ground, "los", expected_rtt_s=2 * _BEAM_S, give_up_s=_PATIENCE_S))

    def run(self, cause: Callable[[LimitedSoak], Iterator[float]]) -> Outcome:
        """Fill it, watch it, let ``cause`` happen (it yields how long each part of it lasts), and watch again."""
        self.fill()
        self.watch("healthy", self.shape.healthy_s)
        for number, seconds in enumerate(cause(self), 1):
            self.watch(f"cause {number}", seconds)
        self.watch("after", self.shape.after_s)
        return self.outcome

    def fill(self) -> None:
        for number in range(self.shape.values):
            key = hashlib.sha256(b"%d" % number).digest()
            value = random.Random(number).randbytes(self.shape.value_bytes)
            for _ in range(5):
                begun, info = self._writes.machine.put(
                    key,
                    value,
                    Striping(DEFAULT_CHUNK_BYTES, STRATEGY_CODES["rotation_hop"], self.shape.servers),
                    self.sim.now_s,
                )
                if self._writes.run([begun])[begun].ok:
                    break
            self._values.append((info, value))
        self._start_counting()

    def _start_counting(self) -> None:
        self._busy_s = sum(host.busy_s for host in self.sim.hosts)
        self._work = self._worked()

    def _worked(self) -> Counter[str]:
        return sum((host.work for host in self.sim.hosts), Counter())

    def watch(self, phase: str, seconds: float) -> None:
        """Row after row: each second all satellites are asked whether they live, and a value is read."""
        end_s = self.sim.now_s + seconds
        before = self._worked()
        while self.sim.now_s < end_s - 1e-6:
            began_s = self.sim.now_s
            self._pings = self._new_operator()
            asked = {self._ping(satellite) for satellite in self.sim.satellites}
            self._read()
            for part in range(1, 11):
                self.sim.settle(began_s + part / 10)
                self._collect()
            self._row(phase, asked)
        done = self._worked()
        done.subtract(before)
        costs = self.limits.costs
        spent = Counter({kind: times * getattr(costs, kind) for kind, times in done.items()})
        self.outcome.work_s[phase] = spent

    def _ping(self, satellite: SatelliteId) -> int:
        return self._pings.machine.ask(Op.PING, b"", satellite, self.sim.now_s)

    def _read(self) -> None:
        which = self._dice.randrange(len(self._values))
        info, _ = self._values[which]
        out = bytearray(info.value_bytes)
        number = self._reads.machine.get(info, memoryview(out), self.sim.now_s)
        self._reading[number] = which, out

    def _collect(self) -> None:
        while (event := self._pings.machine.next_event()) is not None:
            if event.ok:
                self._answered.add(event.number)
        while (event := self._reads.machine.next_event()) is not None:
            if event.number in self._reading:
                which, out = self._reading.pop(event.number)
                self._ended.append(event.ok)
                self.outcome.wrong += event.ok and out != self._values[which][1]

    def _row(self, phase: str, asked: set[int]) -> None:
        busy_s = sum(host.busy_s for host in self.sim.hosts)
        cores, self._busy_s = busy_s - self._busy_s, busy_s
        ended, self._ended = self._ended, []
        row = Row(self.sim.now_s, phase, cores, len(asked & self._answered), len(ended), sum(ended))
        self._answered.clear()
        self.outcome.rows.append(row)
        if self.report is not None:
            self.report(
                f"{row.at_s:6.1f} s  {phase:8}  {row.cores:5.2f} cores  {row.answer:3} of "
                f"{self.outcome.satellites} answer  {row.hits} of {row.reads} reads hit"
            )

    # --- what befalls the hosts ---

    def set_share(self, share: float) -> None:
        for host in self.sim.hosts:
            host.set_share(share, self.sim.now_s)

    def forge(self, slot_moves: int, plane_moves: int) -> None:
        """A stray ADVANCE to some satellite."""
        satellite = self._dice.choice(list(self.sim.satellites))
        self._pings.machine.ask(Op.ADVANCE, messages.pack_moves(slot_moves, plane_moves), satellite, self.sim.now_s)


def pause(soak: LimitedSoak) -> Iterator[float]:
    """All hosts stand still for 15 s."""
    soak.set_share(0.0)
    yield 15.0
    soak.set_share(soak.shape.share)


def pause_and_busy(soak: LimitedSoak) -> Iterator[float]:
    """All hosts stand still for 15 s, and then have 30 s on one core that three busy programs want as well."""
    soak.set_share(0.0)
    yield 15.0
    soak.set_share(1.0 / (soak.shape.hosts + 3))
    yield 30.0
    soak.set_share(soak.shape.share)


def slow(soak: LimitedSoak) -> Iterator[float]:
    """Every host has 10 % of a core for 30 s."""
    soak.set_share(0.1)
    yield 30.0
    soak.set_share(soak.shape.share)


def forged(soak: LimitedSoak) -> Iterator[float]:
    """Ten ADVANCE of 2^30 moves, to and fro."""
    for number in range(10):
        sign = 1 - 2 * (number % 2)
        soak.forge(sign * (1 << 30), 0)
        yield 1.0


def clock_step(soak: LimitedSoak) -> Iterator[float]:
    """All hosts stand still for 40 s and their clocks with them, as in a virtual machine that was paused."""
    soak.set_share(0.0)
    yield 40.0
    for host in soak.sim.hosts:
        host.fall_behind(40.0)
    soak.set_share(soak.shape.share)


CAUSES: dict[str, Callable[[LimitedSoak], Iterator[float]]] = {
    "pause": pause,
    "pause-busy": pause_and_busy,
    "slow": slow,
    "forged": forged,
    "clock-step": clock_step,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--cause", choices=CAUSES, action="append", help="default: each of them")
    parser.add_argument("--after", type=float, metavar="SECONDS", help="how long to watch when it is over")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    shape = replace(SHAPES[options.shape], seed=options.seed)
    if options.after:
        shape = replace(shape, after_s=options.after)
    undisturbed = LimitedSoak(replace(shape, after_s=shape.after_s + _LONGEST_CAUSE_S)).run(lambda soak: iter(()))
    found, held = {"none": undisturbed}, True
    for cause in options.cause or CAUSES:
        print(f"--- {cause}: {CAUSES[cause].__doc__}")
        soak = LimitedSoak(shape)
        soak.report = print
        outcome = found[cause] = soak.run(CAUSES[cause])
        for phase, work_s in outcome.work_s.items():
            named = (f"{kind.removesuffix('_s')} {spent_s:.1f}" for kind, spent_s in work_s.most_common(8) if spent_s)
            print(f"{phase:8} seconds of processor: {', '.join(named)}")
        holds = outcome.holds(undisturbed)
        held &= holds
        print(
            f"{cause}: {'holds' if holds else 'FELL'}; at least {outcome.answer:.0%} answer, "
            f"{outcome.hits:.0%} of the reads hit, {outcome.load(undisturbed):.2f} times the processor of without it"
        )
    if options.json is not None:
        options.json.write_text(json.dumps({name: asdict(outcome) for name, outcome in found.items()}) + "\n", "utf-8")
    return 0 if held else 1


if __name__ == "__main__":
    raise SystemExit(main())
