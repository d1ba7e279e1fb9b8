"""Causes that overload a constellation of real processes, and what is left of it when they are over.

Each cause is run by itself: a constellation is started and filled, watched while it is healthy, overloaded, and watched
again. Every second is a row: processor of the hosts, satellites that answer, reads that hit. What must hold then is in
``Verdict``.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from tests.soak.slept_host import build, fall_asleep, sleepy
from tests.soak.terms import ANSWER_AFTER_S, READ_AFTER_S, Row, later, share_of_hits
from tests.soak.walls import OTHERS, Walls

from skymemory.constellation.presets import preset_named
from skymemory.protocol.messages import pack_moves
from skymemory.protocol.wire import GROUND_SHELL, Address, Op, SkyHeader, build_packet
from skymemory.testbed import supervisor
from skymemory.testbed.connect import open_constellation
from skymemory.testbed.control import ping_all
from skymemory.testbed.key_file import new_keys
from skymemory.testbed.plan import ConstellationPlan, Faults, HostShare, MemoryPolicy, local_hosts, make_plan
from skymemory.testbed.run_directory import RunDirectory
from skymemory.testbed.supervisor import revive, start_on_free_ports, stop
from skymemory.transport import udp_client

_FAULTS = Faults(loss=0.02, duplicate=0.01, reorder=0.03, corrupt=0.005, seed=1)
_VALUE_BYTES = 1_800_000
_HEALTHY_S = 40.0
"""As long as two plane moves at sixty times the pace: what a move costs depends on which it is."""
_SWEEP_S = 30
"""Satellites with copies sweep as often, for a second at three times the processor of all others."""
_AFTER_S = READ_AFTER_S + _HEALTHY_S
"""As many moves are judged after the cause as before."""
_PATIENCE_S = 1.0
_READ_EVERY_S = 0.4
_HOSTS = 5
_SERVED_WITHIN_S = 10.0
"""After a wall clock was set."""
_BESIDE_A_LOCK_S = 2.0
_BUSY = "while True: pass"
_ROOT = Path(__file__).parents[2]
_SLEPT_HOST = "import sys; sys.path.insert(0, {!r}); from tests.soak import slept_host; slept_host.run(sys.argv[1:])"


@dataclass(frozen=True, slots=True)
class Sky:
    """The constellation that a cause is tried on."""

    preset: str = "testbed-19x5"
    access: str = "los"
    servers: int | None = None
    replicas: int = 1
    faults: Faults = _FAULTS
    auth: str = "off"
    time_scale: float = 60.0
    values: int = 100
    memory_bytes: int = 64 << 20
    eviction: str = "lazy"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of the rows after the cause: the fewest satellites that answered from 10 s on and the reads that hit from 30 s
    on, as shares, and the processor from 30 s on as a multiple of what it was before. ``forced``: hosts that had to be
    killed in the end.
    """

    answer: float
    hits: float
    reads: int
    cores: float
    healthy_cores: float
    forced: int
    wrong: int
    """Reads that gave other bytes than were stored."""
    broken: int = 0
    """Promises beside these that did not hold while the cause lasted."""

    @property
    def holds(self) -> bool:
        well = self.answer >= 0.95 and self.hits >= 0.95 and self.cores <= 1.2
        return well and not self.forced and not self.wrong and not self.broken


@dataclass(slots=True)
class Watched:
    """Rows of a run, and what was read."""

    rows: list[Row] = field(default_factory=list)
    wrong: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    client: dict[str, int | float] = field(default_factory=dict)
    """What the reader's store counted."""


class _Watch(threading.Thread):
    """Pings all satellites once a second, and reads a few values a second, until ``end``."""

    def __init__(self, plan: ConstellationPlan, folder: Path, pids: list[int], keys: list[bytes], seed: int) -> None:
        super().__init__(daemon=True, name="watch")
        self.phase = "healthy"
        self.watched = Watched()
        self.reopen = threading.Event()
        """Set: the reader opens the constellation again, as a process does that was started again."""
        self._plan, self._folder, self._keys, self._pids = plan, folder, keys, pids
        self._dice = random.Random(seed)
        self._over = threading.Event()
        self._reads: list[bool] = []
        self._reader = threading.Thread(target=self._read, daemon=True, name="reader")
        self.began_s = time.monotonic()

    def run(self) -> None:
        self._reader.start()
        before_s, seen_s = self._cpu_s(), time.monotonic()
        while not self._over.is_set():
            phase = self.phase
            answers = ping_all(self._plan, _PATIENCE_S)
            if self._over.wait(max(0.0, seen_s + 1.0 - time.monotonic())):
                break  # what was taken in a part of a second says little
            now_s, cpu_s = time.monotonic(), self._cpu_s()
            reads, self._reads = self._reads, []
            self.watched.rows.append(
                Row(
                    now_s - self.began_s,
                    phase,
                    (cpu_s - before_s) / (now_s - seen_s),
                    sum(found is not None for found in answers.values()),
                    len(reads),
                    sum(reads),
                )
            )
            before_s, seen_s = cpu_s, now_s
        self._reader.join()

    def end(self) -> None:
        self._over.set()
        self.join()

    def _cpu_s(self) -> float:
        used_s = 0.0
        for pid in [*self._pids]:
            with suppress(psutil.Error):
                times = psutil.Process(pid).cpu_times()
                used_s += times.user + times.system
        return used_s

    def _read(self) -> None:
        store = open_constellation(self._folder)
        try:
            while not self._over.is_set():
                began_s = time.monotonic()
                if self.reopen.is_set():
                    store.close()
                    self.reopen.clear()
                    store = open_constellation(self._folder)
                key = self._dice.choice(self._keys)
                ticket = store.prepare_load([key])
                (found,) = store.complete_load(ticket)
                if found is not None and found != value_of(key):
                    self.watched.wrong += 1
                if found is None:
                    reason = f"{self.phase}: {ticket.report.keys[0].reason if ticket.report else 'miss'}"
                    self.watched.reasons[reason] = self.watched.reasons.get(reason, 0) + 1
                store.release(ticket)
                self._reads.append(found is not None)
                self._over.wait(max(0.0, began_s + _READ_EVERY_S - time.monotonic()))
        finally:
            self.watched.client = {name: count for name, count in store.stats().items() if count}
            store.close()


def value_of(key: bytes) -> bytes:
    return random.Random(key).randbytes(_VALUE_BYTES)


@contextmanager
def busy(programs: int, core: int | None = None) -> Iterator[None]:
    """So many programs that take all they get; on one core, or anywhere."""
    command = [sys.executable, "-c", _BUSY]
    if core is not None:
        command = ["taskset", "-c", str(core), *command]
    running = [subprocess.Popen(command, start_new_session=True) for _ in range(programs)]
    try:
        yield
    finally:
        for program in running:
            program.kill()
            program.wait()


def _signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


@contextmanager
def sleeping(folder: Path) -> Iterator[Path]:
    """This computer sleeps by a file in this folder (see ``slept_host``): so do its hosts, and clients in this
    process.
    """
    slept = folder / "slept"
    whole_command, own_clock = supervisor.host_command, udp_client.UnixClock

    def host_command(host: HostShare, plan_path: Path, directory: RunDirectory, line_fd: int) -> list[str]:
        python, _, _, *rest = whole_command(host, plan_path, directory, line_fd)
        return [python, "-c", _SLEPT_HOST.format(str(_ROOT)), str(slept), *rest]

    slept.write_bytes(struct.pack("d", 0.0))
    if shutil.which(os.environ.get("CC", "cc")) is not None:
        build(slept)
    supervisor.host_command = host_command
    udp_client.UnixClock = lambda: sleepy(slept)  # type: ignore[assignment,misc]
    try:
        yield slept
    finally:
        supervisor.host_command, udp_client.UnixClock = whole_command, own_clock  # type: ignore[misc]


@contextmanager
def walled(folder: Path) -> Iterator[Walls]:
    """The wall clocks of hosts, and of clients in this process, can be set."""
    walls = Walls(folder, [f"host-{number}" for number in range(_HOSTS)])
    before, right_s = {name: os.environ.get(name) for name in walls.environment}, time.time
    os.environ |= walls.environment
    time.time = lambda: right_s() + walls.ahead_s
    try:
        yield walls
    finally:
        time.time = right_s
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@dataclass(frozen=True, slots=True)
class Trial:
    """What a cause may lay hands on."""

    plan: ConstellationPlan
    pids: list[int]
    folder: Path
    keys: list[bytes]
    """Of the values that are read."""
    restarted: Callable[[], None]
    """Clients are started again, too."""
    broken: list[str]
    """What did not hold."""
    clocks: Walls | Path | None
    """What sets them."""


# --- causes: each returns when it is over ---


def pause(trial: Trial) -> None:
    """All hosts stopped for 15 s, then 30 s of one core shared with three busy programs."""
    _signal_all(trial.pids, signal.SIGSTOP)
    time.sleep(15.0)
    cores = os.sched_getaffinity(0)
    one = min(cores)
    for pid in trial.pids:
        os.sched_setaffinity(pid, {one})
    with busy(3, one):
        _signal_all(trial.pids, signal.SIGCONT)
        time.sleep(30.0)
    for pid in trial.pids:
        os.sched_setaffinity(pid, cores)


def pushes(trial: Trial) -> None:
    """Ten ADVANCE of 2³⁰ moves there and back, each to one satellite, on a loaded machine."""
    dice = random.Random(1)
    addresses = trial.plan.addresses()
    with busy(4), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for number in range(10):
            victim = dice.choice(list(addresses))
            moves = (1 << 30) * (-1) ** number
            here = Address(*victim)
            header = SkyHeader(Op.ADVANCE, here, Address(here.plane, here.slot, GROUND_SHELL), 77, number + 1)
            for _ in range(3):  # some get lost
                body = pack_moves(moves, 0)
                sender.sendto(build_packet(header, body, number, time.time()), addresses[victim])
            time.sleep(1.0)
        time.sleep(10.0)


def tenth(trial: Trial) -> None:
    """Every host gets 10 % of a core for 30 s."""
    end_s = time.monotonic() + 30.0
    while time.monotonic() < end_s:
        _signal_all(trial.pids, signal.SIGSTOP)
        time.sleep(0.09)
        _signal_all(trial.pids, signal.SIGCONT)
        time.sleep(0.01)


def load(trial: Trial) -> None:
    """Twenty busy programs for a minute: nothing that passes, but the machine is shared."""
    with busy(20):
        time.sleep(60.0)


def suspend(trial: Trial) -> None:
    """The computer sleeps for 45 s: processes stand still, ``CLOCK_MONOTONIC`` too, all other clocks go on."""
    _signal_all(trial.pids, signal.SIGSTOP)
    time.sleep(2.0)
    assert isinstance(trial.clocks, Path)
    fall_asleep(trial.clocks, 45.0)
    _signal_all(trial.pids, signal.SIGCONT)


def clocks(trial: Trial) -> None:
    """Wall clocks are set by 40 s and by a day, back and forth: of all processes, of one host, of clients. New clients
    write and read each time.
    """
    walls = trial.clocks
    assert isinstance(walls, Walls)
    for number, ahead_s in enumerate((-40.0, 40.0, -86_400.0, 86_400.0)):
        for names in ((), (f"host-{number}",), (OTHERS,)):
            walls.set(ahead_s, *names)
            _serves_a_new_client(trial, f"{ahead_s:+.0f} s at {', '.join(names) or 'all'}", _SERVED_WITHIN_S)
            walls.set(0.0)


def locks(trial: Trial) -> None:
    """Another process holds the lock of the index for 30 s; new clients write and read meanwhile."""
    end_s = time.monotonic() + 30.0
    with RunDirectory(trial.folder).index_path.open("r+b") as index:
        fcntl.flock(index, fcntl.LOCK_EX)
        while time.monotonic() < end_s:
            _serves_a_new_client(trial, "the lock is held", _BESIDE_A_LOCK_S)
            time.sleep(1.0)


def power(trial: Trial) -> None:
    """The computer of all hosts loses its power: they and their clients end at once, and the index lacks the last bytes
    that were written. It starts again, and the values are stored again.
    """
    directory = RunDirectory(trial.folder)
    _signal_all(trial.pids, signal.SIGKILL)
    os.truncate(directory.index_path, max(0, directory.index_path.stat().st_size - 7))
    time.sleep(2.0)
    revive(directory)
    trial.pids[:] = [record.pid for record in directory.running().values()]
    trial.restarted()
    if len(fill(trial.folder, trial.keys)) < len(trial.keys):
        trial.broken.append("values could not be stored again")


def _serves_a_new_client(trial: Trial, when: str, within_s: float) -> None:
    """Note in ``trial.broken`` if it cannot store and read a value in this time."""
    key = hashlib.sha256(f"{when} {time.monotonic()}".encode()).digest()
    began_s = time.monotonic()
    with open_constellation(trial.folder) as store:
        while store.put_many([(key, value_of(key))]) != [True] and time.monotonic() < began_s + within_s:
            pass
        (found,) = store.get_many([key])
    took_s = time.monotonic() - began_s
    if found is None or found != value_of(key) or took_s > within_s:
        trial.broken.append(f"{when}: {'a miss' if found is None else 'it'} took {took_s:.1f} s")


@dataclass(frozen=True, slots=True)
class Cause:
    sky: Sky
    happen: Callable[[Trial], None]
    throughout: bool = False
    """Nothing passes: what holds afterwards has to hold while it lasts, too."""
    around: Callable[[Path], AbstractContextManager[Walls | Path | None]] = lambda folder: nullcontext()
    """From before the start to after the end; is given the run's folder."""


CAUSES = {
    "pause": Cause(Sky(), pause),
    "pushes": Cause(Sky(), pushes),
    "tenth": Cause(Sky(), tenth),
    "suspend": Cause(Sky(), suspend, around=sleeping),
    "clocks": Cause(Sky(auth="on", time_scale=1.0), clocks, True, walled),
    "locks": Cause(Sky(time_scale=1.0), locks, True),
    "power": Cause(Sky(), power),
    "kuiper": Cause(
        Sky("kuiper-b", "hybrid", servers=16, replicas=2, faults=Faults(), time_scale=1.0, values=60), load, True
    ),
    "every": Cause(Sky(replicas=2, faults=Faults(), auth="every", time_scale=1.0), load, True),
}


def fill(folder: Path, keys: list[bytes]) -> list[bytes]:
    """Store their values; those that were stored."""
    with open_constellation(folder) as store:
        return [key for key in keys if store.put_many([(key, value_of(key))]) == [True]]


class OverloadSoak:
    """Build it, then ``run``."""

    def __init__(self, cause: str, seed: int = 1, sky: Sky | None = None) -> None:
        self.cause = CAUSES[cause]
        self._sky = sky or self.cause.sky
        self._seed = seed
        self.watched = Watched()
        self._broken: list[str] = []

    def run(self, report: Callable[[str], None]) -> Verdict:
        folder = Path(tempfile.mkdtemp(prefix="skymemory-overload-"))
        directory = RunDirectory(folder)
        forced = 0
        with self.cause.around(folder) as clocks:
            try:
                plan = self._start(folder, directory)
                pids = [record.pid for record in directory.running().values()]
                self._live(plan, pids, folder, clocks, report)
            finally:
                with suppress(ProcessLookupError):
                    _, forced = stop(directory)
                shutil.rmtree(folder, ignore_errors=True)
        return self._verdict(plan, forced)

    def _start(self, folder: Path, directory: RunDirectory) -> ConstellationPlan:
        sky, keys_file = self._sky, ""
        if sky.auth != "off":
            keys_file = str(folder / "keys")
            new_keys(folder / "keys")
        return start_on_free_ports(
            directory,
            lambda base_port: make_plan(
                sky.preset,
                hosts=local_hosts(sky.preset, _HOSTS, base_port),
                servers=sky.servers,
                access=sky.access,
                time_scale=sky.time_scale,
                epoch_s=time.time(),
                replicas=sky.replicas,
                faults=sky.faults,
                memory_per_satellite_bytes=sky.memory_bytes,
                auth=sky.auth,
                keys_file=keys_file,
                memory_policy=MemoryPolicy(sky.eviction),
            ),
            preset_named(sky.preset).torus.size,
        ).plan

    def _live(
        self,
        plan: ConstellationPlan,
        pids: list[int],
        folder: Path,
        clocks: Walls | Path | None,
        report: Callable[[str], None],
    ) -> None:
        keys = [hashlib.sha256(b"%d %d" % (self._seed, number)).digest() for number in range(self._sky.values)]
        keys = fill(folder, keys)
        report(f"{len(keys)} values of {_VALUE_BYTES} bytes are stored")
        watch = _Watch(plan, folder, pids, keys, self._seed)
        self.watched = watch.watched
        watch.start()
        reported = 0

        def report_rows() -> None:
            nonlocal reported
            for row in self.watched.rows[reported:]:
                said = f"{row.cores:5.2f} cores, {row.answer:5} answer, {row.hits} of {row.reads} reads hit"
                report(f"{row.at_s:6.1f} s, {row.phase:8} {said}")
            reported = len(self.watched.rows)

        time.sleep(_HEALTHY_S)
        watch.phase = "cause"
        report_rows()
        self.cause.happen(Trial(plan, pids, folder, keys, watch.reopen.set, self._broken, clocks))
        watch.phase = "after"
        report_rows()
        end_s = time.monotonic() + _AFTER_S
        while time.monotonic() < end_s:
            time.sleep(5.0)
            report_rows()
        watch.end()
        report_rows()
        for each in self._broken:
            report(f"did not hold: {each}")
        report(f"misses: {self.watched.reasons}, wrong: {self.watched.wrong}, client: {self.watched.client}")

    def _verdict(self, plan: ConstellationPlan, forced: int) -> Verdict:
        rows = self.watched.rows
        healthy = [row for row in rows if row.phase == "healthy"]
        if self.cause.throughout:  # the box hardly moves, but there are copies: one sweep before as there is one after
            healthy = healthy[-_SWEEP_S:]
        late = later(rows, READ_AFTER_S)
        answering = rows if self.cause.throughout else later(rows, ANSWER_AFTER_S)
        reading = rows if self.cause.throughout else late
        healthy_cores = sum(row.cores for row in healthy) / max(1, len(healthy))
        return Verdict(
            min((row.answer for row in answering), default=0) / plan.torus.size,
            share_of_hits(reading),
            sum(row.reads for row in reading),
            sum(row.cores for row in late) / max(1, len(late)) / max(healthy_cores, 1e-9),
            healthy_cores,
            forced,
            self.watched.wrong,
            len(self._broken),
        )
