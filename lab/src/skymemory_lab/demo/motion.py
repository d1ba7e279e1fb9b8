"""`skymemory demo motion`: a fast orbit with continuous reads, in which a plane is killed and revived."""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace

from skymemory.constellation.presets import DEFAULT_PRESET, preset_named
from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput
from skymemory.metrics import percentile
from skymemory.placement.locate import Moves, Placement
from skymemory.progress import Progress
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.store.sky.store import ConstellationStore
from skymemory.testbed.connect import clock_of, store_of
from skymemory.testbed.control import Housekeeping, confirm_all_answer, ping_all
from skymemory.testbed.flight import Choice, kinds_for
from skymemory.testbed.plan import DEFAULT_BASE_PORT, ConstellationPlan, HostShare, Ports, local_hosts, make_plan
from skymemory.testbed.run_directory import RunDirectory, temporary_run_directory
from skymemory.testbed.supervisor import Child, SignalGate, Started, end_children, revive, start_on_free_ports
from skymemory.text import Table, flowed, has_colour, width_of, wrapped, write
from skymemory.units import format_duration, format_size
from skymemory_lab.demo.estimate import format_took, say_estimate
from skymemory_lab.demo.resources import slowdown
from skymemory_lab.demo.screen import Draw, Screen
from skymemory_lab.view.layout_map import LEGEND, OrbitFrame, render_frame


@dataclass(slots=True)
class ReadTally:
    """Counts of a reader; ``right``: the value's bytes."""

    right: int = 0
    wrong: int = 0
    missed: int = 0
    recomputed: int = 0  # missed values stored again
    refused: int = 0
    """Recomputed values that could not be stored yet."""
    recomputed_bytes: int = 0
    longest_miss_s: float = 0.0
    seconds: list[float] = field(default_factory=list)

    @property
    def reads(self) -> int:
        return self.right + self.wrong + self.missed

    @property
    def counts(self) -> Counts:
        return self.right, self.reads

    def percentile_s(self, percent: float) -> float:
        return percentile(self.seconds, percent) if self.seconds else 0.0


class ReaderThread(threading.Thread):
    """Thread that reads ``values`` in turn and stores lost values again."""

    def __init__(self, store: ConstellationStore, values: Mapping[bytes, bytes], pause_s: float) -> None:
        super().__init__(name="reader", daemon=True)
        self.tally = ReadTally()
        self.copies = store.settings.replicas
        self.absent: set[bytes] = set()
        self.at_death: Counts = (0, 0)
        self.at_return: Counts = (0, 0)
        self.error: Exception | None = None
        self._store = store
        self._values = values
        self._pause_s = pause_s
        self._stopping = threading.Event()

    @property
    def keys(self) -> list[bytes]:
        return list(self._values)

    def store(self, key: bytes) -> bool:
        return self._store.put_many([(key, self._values[key])])[0]

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                for key in self._values:
                    self.read(key)
                    if self._stopping.wait(self._pause_s):
                        break
        # Kept for the main thread, which raises it: the screen would draw over a traceback of this thread.
        except Exception as error:
            self.error = error

    def stop(self) -> None:
        self._stopping.set()
        if self.is_alive():
            self.join()

    def read(self, key: bytes) -> bool:
        tally, value = self.tally, self._values[key]
        started_s = time.perf_counter()
        ticket = self._store.prepare_load([key])
        # The view is memory of the store, so compare before it is released.
        view = self._store.complete_load(ticket)[0]
        seconds = time.perf_counter() - started_s
        right = view is not None and bytes(view) == value
        self._store.release(ticket)
        if right:
            tally.seconds.append(seconds)
            tally.right += 1
            self.absent.discard(key)
        elif view is not None:
            tally.wrong += 1
        else:
            tally.missed += 1
            self.absent.add(key)
            tally.longest_miss_s = max(tally.longest_miss_s, seconds)
            self._recompute(key)
        return right

    def _recompute(self, key: bytes) -> None:
        if self.store(key):
            self.absent.discard(key)
            self.tally.recomputed += 1
            self.tally.recomputed_bytes += len(self._values[key])
        else:
            self.tally.refused += 1

    @property
    def words(self) -> str:
        tally = self.tally
        return (
            f"{copies(self.copies)}: {tally.right:,} of {tally.reads:,} reads right, {tally.missed} missed, "
            f"{tally.wrong} wrong, {tally.recomputed} recomputed, p50 {format_duration(tally.percentile_s(50))}"
        )

    def report(self) -> ReadReport:
        tally = self.tally
        return ReadReport(
            copies=self.copies,
            values=len(self._values),
            right=tally.right,
            wrong=tally.wrong,
            missed=tally.missed,
            before=self.at_death,
            while_down=minus(self.at_return, self.at_death),
            after=minus(tally.counts, self.at_return),
            recomputed=tally.recomputed,
            recompute_refused=tally.refused,
            recomputed_bytes=tally.recomputed_bytes,
            p50_s=tally.percentile_s(50),
            p99_s=tally.percentile_s(99),
            longest_miss_s=tally.longest_miss_s,
        )


Counts = tuple[int, int]
"""Correct reads, all reads."""


def format_moves(moves: Moves) -> str:
    slots, planes = moves
    return f"{slots} slot move{'s' * (slots != 1)} and {planes} plane move{'s' * (planes != 1)}"


def copies(count: int) -> str:
    return "1 copy" if count == 1 else f"{count} copies"


def minus(later: Counts, earlier: Counts) -> Counts:
    return later[0] - earlier[0], later[1] - earlier[1]


@dataclass(frozen=True, slots=True)
class ReadReport:
    """Reads before, during and after the plane's outage, with ``copies`` copies."""

    copies: int
    values: int
    right: int
    wrong: int
    missed: int
    before: Counts
    while_down: Counts
    after: Counts
    recomputed: int
    recompute_refused: int
    recomputed_bytes: int
    p50_s: float
    p99_s: float
    longest_miss_s: float

    def cells(self) -> list[str]:
        periods = (f"{right:,} of {reads:,}" for right, reads in (self.before, self.while_down, self.after))
        again = f"{self.recomputed} values"
        return [copies(self.copies), *periods, again, format_duration(self.p50_s), format_duration(self.p99_s)]


_HEAD = ("right", "before", "while dead", "after", "recomputed", "p50", "p99")


@dataclass(frozen=True, slots=True)
class MotionReport:
    """Result of a run. Moved chunks and bytes are between satellites."""

    seconds: float
    satellite_seconds: float
    slot_moves: int
    plane_moves: int
    value_bytes: int
    chunks_moved: int
    bytes_moved: int
    chunks_lost: int
    bytes_lost: int
    killed_host: str
    down_s: float
    readable_at_end: int
    satellites_at_end: int
    satellites: int
    reads: tuple[ReadReport, ...]

    @property
    def wrong(self) -> int:
        return sum(report.wrong for report in self.reads)

    @property
    def values(self) -> int:
        return sum(report.values for report in self.reads)

    @property
    def is_sound(self) -> bool:
        """True if no byte was wrong, and finally all satellites answer and all values are readable."""
        is_complete = self.readable_at_end == self.values and self.satellites_at_end == self.satellites
        return self.wrong == 0 and all(report.right > 0 for report in self.reads) and is_complete

    def as_object(self) -> dict[str, object]:
        return {"sound": self.is_sound, "values": self.values, "wrong": self.wrong, **asdict(self)}

    def lines(self, width: int) -> list[str]:
        refused = sum(report.recompute_refused for report in self.reads)
        facts = {
            "flown": f"{self.satellite_seconds / 60:.0f} minutes of orbit in {self.seconds:.0f} s: "
            f"{format_moves((self.slot_moves, self.plane_moves))}",
            "moved": f"{self.chunks_moved:,} chunks, {format_size(self.bytes_moved)}, from satellite to satellite",
            "lost": f"{self.chunks_lost:,} chunks, {format_size(self.bytes_lost)}, with {self.killed_host}, "
            f"which was dead for {self.down_s:.1f} s",
            "in the end": f"{self.readable_at_end} of {self.values} values can be read, "
            f"{self.satellites_at_end} of {self.satellites} satellites answer",
            "reads": f"{self.wrong} wrong; values of {format_size(self.value_bytes)}; the longest miss took "
            f"{format_duration(max(read.longest_miss_s for read in self.reads))}; "
            f"{format_size(sum(read.recomputed_bytes for read in self.reads))} recomputed; {refused} times a value was "
            "computed again and the sky could not take it yet",
        }
        lines = [line for name, words in facts.items() for line in wrapped(f"{name:<12}{words}", width, 12)]
        return [*lines, "", *Table(_HEAD, [read.cells() for read in self.reads]).lines(width)]


_COUNTED = ("chunks_migrated_out", "chunks_served", "chunks_set", "chunks_evicted", "migrations_retransmitted")
_PATIENCE_S = 0.4
_EVERY_S = 0.6


class StatusPoller(threading.Thread):
    """Thread that polls all satellites. Counters of a restarted satellite continue."""

    def __init__(self, plan: ConstellationPlan) -> None:
        super().__init__(name="watch", daemon=True)
        self._plan = plan
        self._latest: dict[SatelliteId, Housekeeping] = {}
        self._earlier: defaultdict[str, int] = defaultdict(int)
        self._asking = threading.Lock()
        self._stopping = threading.Event()

    def run(self) -> None:
        while not self._stopping.wait(_EVERY_S):
            self.ask()

    def stop(self) -> None:
        self._stopping.set()
        if self.is_alive():
            self.join()

    def ask(self) -> int:
        with self._asking:
            answers = ping_all(self._plan, _PATIENCE_S)
            for satellite, answer in answers.items():
                if answer is not None:
                    before = self._latest.get(satellite)
                    # A smaller counter means that the process was restarted between two answers and counts from 0
                    # again.
                    if before is not None and any(answer[name] < before[name] for name in _COUNTED):
                        self._keep(before)
                    self._latest[satellite] = answer
            return sum(answer is not None for answer in answers.values())

    def died(self, satellites: Iterable[SatelliteId]) -> tuple[int, int]:
        """Remove dead satellites. Return their last ``(chunks, bytes)``."""
        with self._asking:
            last_answers = [
                answer for satellite in satellites if (answer := self._latest.pop(satellite, None)) is not None
            ]
            for answer in last_answers:
                self._keep(answer)
        return sum(answer["chunks_held"] for answer in last_answers), sum(
            answer["memory_used_bytes"] for answer in last_answers
        )

    def _keep(self, answer: Housekeeping) -> None:
        for name in _COUNTED:
            self._earlier[name] += answer[name]

    def total(self, name: str) -> int:
        return self._earlier[name] + sum(answer[name] for answer in list(self._latest.values()))

    @property
    def holding(self) -> frozenset[SatelliteId]:
        return frozenset(satellite for satellite, answer in list(self._latest.items()) if answer["chunks_held"])


def wait_for_answers(poller: StatusPoller, satellites: int, patience_s: float) -> int:
    """Return the number of satellites that answer, once all do or after ``patience_s``."""
    deadline_s = time.monotonic() + patience_s
    while (answering := poller.ask()) < satellites and time.monotonic() < deadline_s:
        time.sleep(_EVERY_S / 4)
    return answering


VALUES = {1: 4, 2: 4}
CHUNKS_PER_VALUE = 480
"""Chunks of a block of TinyLlama-1.1B."""
KILL_AT, DOWN_FOR = 0.4, 0.2
"""Shares of the run."""
LEAST_SECONDS, MOST_SECONDS = 5.0, 86_400.0
AROUND_S = 2.0
FRAME_S = 0.2
READ_PAUSE_S = 0.01
# Time after which a client counts an unanswered read as a miss. A dead plane never answers.
GIVE_UP_S = 0.5
PATIENCE_S = 20.0


# The run: store known values (four with one copy, four with two), read them continuously in two threads, kill the
# process of the plane overhead at 40 % of the time, restart it at 60 %, read to the end. A read's bytes are compared
# with the value's. A miss is stored again, as an engine would that computes a missing block. At the end everything must
# be readable and every satellite must answer.
@dataclass(slots=True)
class _Flight:
    plan: ConstellationPlan
    directory: RunDirectory
    children: dict[str, Child]
    gate: SignalGate
    screen: Screen
    watch: StatusPoller
    readers: tuple[ReaderThread, ...]
    placement: Placement
    colour: bool
    began_s: float
    """Start on the clock of satellites and clients (Unix time)."""
    dead: HostShare | None = None  # host process that was killed
    absent: int = 0  # values missed and not stored again yet

    def moves(self) -> Moves:
        return clock_of(self.plan).moves(time.time())

    def picture(self) -> Draw:
        dead = frozenset(satellite for satellite, _ in self.plan.addresses_of(self.dead)) if self.dead else frozenset()
        frame = OrbitFrame(self.placement, (0, 0), self.moves(), dead, self.watch.holding)
        return lambda width: [*render_frame(frame, self.colour, width), *flowed(LEGEND, width)]

    def figures(self) -> list[str]:
        moves = self.moves()
        overhead = self.placement.centre_at(moves)
        moved = self.watch.total("chunks_migrated_out")
        return [
            f"overhead: plane {overhead.plane + 1}, satellite {overhead.slot + 1}, after {format_moves(moves)}",
            f"handed over {moved:,} chunks, {format_size(moved * self.plan.chunk_bytes)}",
            *(reader.words for reader in self.readers),
        ]

    def report_absent(self) -> None:
        absent = sum(len(reader.absent) for reader in self.readers)
        if absent and not self.absent:
            self.screen.say("a value is missed: it is computed again, and stored as soon as the sky can take it")
        elif self.absent and not absent:
            again = sum(reader.tally.recomputed for reader in self.readers)
            self.screen.say(f"all that was missed is computed and stored again ({again} values): reads hit")
        self.absent = absent

    def until(self, elapsed_s: float) -> None:
        """Draw until ``elapsed_s`` after the start.

        Raises:
            KeyboardInterrupt: a signal to stop arrived.
        """
        while (left_s := self.began_s + elapsed_s - time.time()) > 0:
            self.gate.check()
            for reader in self.readers:
                if reader.error is not None:
                    raise reader.error
            self.report_absent()
            self.screen.show(self.picture(), self.figures())
            time.sleep(min(FRAME_S, left_s))
        self.gate.check()


@contextmanager
def _constellation(
    speed: float, satellite: Choice, gate: SignalGate, progress: Progress
) -> Iterator[tuple[Started, RunDirectory]]:
    def plan_at(ports: Ports | int) -> ConstellationPlan:
        return make_plan(
            hosts=local_hosts(DEFAULT_PRESET, 5, ports),
            servers=preset_named(DEFAULT_PRESET).servers,
            epoch_s=time.time(),
            time_scale=speed,
        )

    kinds = kinds_for(satellite, plan_at(DEFAULT_BASE_PORT))
    with temporary_run_directory("motion-") as folder:
        directory = RunDirectory(folder)
        running: Started | None = None
        try:
            with progress.wait("starting the constellation", 2.0):
                running = start_on_free_ports(
                    directory,
                    plan_at,
                    preset_named(DEFAULT_PRESET).torus.size,
                    foreground=True,
                    confirm=confirm_all_answer,
                    gate=gate,
                    kinds=kinds,
                )
            yield running, directory
        finally:
            if running is not None:
                end_children(running.children)


def _host_of(plan: ConstellationPlan, plane: int) -> HostShare:
    return next(host for host in plan.hosts if plane in host.planes)


def _satellites_of(plan: ConstellationPlan, host: HostShare) -> list[SatelliteId]:
    return [satellite for satellite, _ in plan.addresses_of(host)]


def _planes(host: HostShare) -> str:
    return f"plane {', '.join(str(plane + 1) for plane in host.planes)}"


def _kill(flight: _Flight) -> tuple[HostShare, int, int]:
    """Kill the process of the plane overhead. Return ``(host, chunks lost, bytes lost)``."""
    flight.watch.ask()
    # The satellites of the plane overhead certainly hold chunks.
    host = _host_of(flight.plan, flight.placement.centre_at(flight.moves()).plane)
    child = flight.children[host.name]
    child.process.kill()
    child.process.wait()
    # Its supervisor line is closed as well: the restarted process gets a new line.
    child.line.close()
    flight.dead = host
    chunks, size_bytes = flight.watch.died(_satellites_of(flight.plan, host))
    words = f"{host.name} ({_planes(host)}) killed, with {chunks:,} chunks, {format_size(size_bytes)}"
    flight.screen.say(words, flight.picture())
    return host, chunks, size_bytes


def _revive(flight: _Flight, host: HostShare, started: Started) -> None:
    started_s = time.perf_counter()
    revive(flight.directory, flight.gate, started.children)
    flight.dead = None
    flight.screen.say(
        f"{host.name} ({_planes(host)}) is back after {time.perf_counter() - started_s:.2f} s, empty", flight.picture()
    )


def _closing(flight: _Flight) -> tuple[int, int]:
    """Read all values and store lost values. Return ``(values readable, satellites that answer)``."""
    for reader in flight.readers:
        reader.stop()
    readable, deadline_s = 0, time.monotonic() + PATIENCE_S
    for reader in flight.readers:
        for key in reader.keys:
            while not (right := reader.read(key)) and time.monotonic() < deadline_s:
                flight.gate.check()  # clients regard revived satellites as dead for another second
                time.sleep(FRAME_S)
            readable += right
    flight.report_absent()
    flight.watch.stop()
    answering = wait_for_answers(flight.watch, flight.plan.torus.size, PATIENCE_S)
    flight.screen.show(flight.picture(), flight.figures())
    return readable, answering


def _fly(flight: _Flight, started: Started, seconds: float) -> MotionReport:
    plan, readers, watch = flight.plan, flight.readers, flight.watch
    deadline_s = time.monotonic() + PATIENCE_S
    for reader in readers:
        for key in reader.keys:
            while not reader.store(key) and time.monotonic() < deadline_s:
                flight.gate.check()
    value_bytes = CHUNKS_PER_VALUE * plan.chunk_bytes
    kinds = ", ".join(f"{len(reader.keys)} with {copies(reader.copies)}" for reader in readers)
    flight.screen.say(
        f"values of {format_size(value_bytes)} stored: {kinds}; reading goes on from here", flight.picture()
    )
    watch.start()
    for reader in readers:
        reader.start()
    flight.until(KILL_AT * seconds)
    host, chunks_lost, bytes_lost = _kill(flight)
    killed_s = time.time()
    for reader in readers:
        reader.at_death = reader.tally.counts
    flight.until(killed_s - flight.began_s + DOWN_FOR * seconds)
    _revive(flight, host, started)
    down_s = time.time() - killed_s
    for reader in readers:
        reader.at_return = reader.tally.counts
    flight.until(seconds)
    readable, answering = _closing(flight)
    flown_s, moves, chunks_moved = time.time() - flight.began_s, flight.moves(), watch.total("chunks_migrated_out")
    return MotionReport(
        seconds=flown_s,
        satellite_seconds=flown_s * plan.time_scale,
        slot_moves=moves[0],
        plane_moves=moves[1],
        value_bytes=value_bytes,
        chunks_moved=chunks_moved,
        bytes_moved=chunks_moved * plan.chunk_bytes,
        chunks_lost=chunks_lost,
        bytes_lost=bytes_lost,
        killed_host=f"{host.name} ({_planes(host)})",
        down_s=down_s,
        readable_at_end=readable,
        satellites_at_end=answering,
        satellites=plan.torus.size,
        reads=tuple(reader.report() for reader in readers),
    )


def _random_values(seed: int, copies: int, size_bytes: int) -> dict[bytes, bytes]:
    dice = random.Random(f"{seed} {copies}")
    return {
        hashlib.sha256(f"motion {copies} {number}".encode()).digest(): dice.randbytes(size_bytes)
        for number in range(VALUES[copies])
    }


def run_motion(args: argparse.Namespace) -> int:
    """Return 0 if the report ``is_sound``."""
    if not LEAST_SECONDS <= args.seconds <= MOST_SECONDS:
        raise InvalidInput(f"--seconds {args.seconds:g}: expected {LEAST_SECONDS:g} to {MOST_SECONDS:g}")
    if not 0 < args.speed <= 2000:
        raise InvalidInput(f"--speed {args.speed:g}: expected more than 0 and at most 2000 times real time")
    progress = Progress(sys.stderr if args.json else sys.stdout)
    stream, estimate_s = progress.stream, args.seconds + AROUND_S * slowdown()
    say_estimate(progress, estimate_s)
    with SignalGate() as gate:
        screen = Screen(stream, progress.began_s)
        try:
            with _constellation(args.speed, args.satellite, gate, progress) as (started, directory):
                report = _demonstrate(args, started, directory, gate, screen)
        finally:
            screen.close()
    if args.json:
        print(json.dumps(report.as_object(), indent=1))
    else:
        print()
        write("\n".join(report.lines(width_of(stream))))
        print()
        write("done; the constellation is down again" if report.is_sound else "FAILED: see above")
    write(format_took(progress.seconds, estimate_s), stream)
    return 0 if report.is_sound else 1


def _demonstrate(
    args: argparse.Namespace, started: Started, directory: RunDirectory, gate: SignalGate, screen: Screen
) -> MotionReport:
    plan = started.plan
    placement = Placement.for_preset(plan.constellation)
    slot_s = clock_of(plan).slot_period_s / plan.time_scale
    screen.say(
        f"constellation up in {started.seconds:.2f} s: {plan.torus.size} satellites in {len(plan.hosts)} processes, "
        f"{args.speed:g} times as fast as real: a slot move every {slot_s:.1f} s"
    )
    size_bytes = CHUNKS_PER_VALUE * plan.chunk_bytes
    stores = {
        count: store_of(replace(plan, replicas=count), index=SharedIndex(directory.index_path), give_up_s=GIVE_UP_S)
        for count in VALUES
    }
    readers = tuple(
        ReaderThread(store, _random_values(args.seed, count, size_bytes), READ_PAUSE_S)
        for count, store in stores.items()
    )
    watch = StatusPoller(plan)
    colour = screen.live and has_colour(sys.stderr if args.json else sys.stdout)
    children = {child.host.name: child for child in started.children}
    flight = _Flight(plan, directory, children, gate, screen, watch, readers, placement, colour, time.time())
    try:
        return _fly(flight, started, args.seconds)
    finally:
        for reader in readers:
            reader.stop()
        watch.stop()
        for store in stores.values():
            store.close()
