"""`skymemory demo motion`: a fast orbit with continuous reads, one plane killed in the middle and revived."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from skymemory.constellation.presets import DEFAULT_PRESET, preset_named
from skymemory.constellation.torus import SatelliteId
from skymemory.demo.motion_parts import MotionReport, Reader, Watch, copies, counted, wait_for_answers
from skymemory.demo.screen import Screen
from skymemory.errors import InvalidInput
from skymemory.placement.locate import Moves, Placement
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.testbed.connect import clock_of, store_of
from skymemory.testbed.control import confirm_all_answer
from skymemory.testbed.plan import ConstellationPlan, HostShare, local_hosts, make_plan
from skymemory.testbed.run_directory import RunDirectory, temporary_run_directory
from skymemory.testbed.supervisor import Child, SignalGate, Started, end_children, revive, start_on_free_ports
from skymemory.units import format_size
from skymemory.view.layout_map import LEGEND, OrbitFrame, frame_width, render_frame

VALUES = {1: 4, 2: 4}
"""Number of values by number of copies."""
CHUNKS_PER_VALUE = 480
"""A block of TinyLlama-1.1B: 2.9 MB of 16-bit keys and values."""
KILL_AT, DOWN_FOR = 0.4, 0.2
"""As shares of the run."""
LEAST_SECONDS, MOST_SECONDS = 5.0, 86_400.0
FRAME_S = 0.2
READ_PAUSE_S = 0.01
# A client waits this long for a satellite before the read counts as a miss; a dead plane never answers.
GIVE_UP_S = 0.5
PATIENCE_S = 20.0
"""Timeout for the first stores, and for the last values and satellites to come back; 5 s suffice on an idle machine."""


# The run: store known values (four with one copy, four with two), read them continuously in two threads, kill the
# process of the plane overhead at 40 % of the time, start it again at 60 %, read to the end. A read's bytes are
# compared with the value's; a miss is stored again, as an engine would that computes a missing block. At the end
# everything must be readable and every satellite must answer.
@dataclass(slots=True)
class _Flight:
    """One run in progress."""

    plan: ConstellationPlan
    directory: RunDirectory
    children: dict[str, Child]
    gate: SignalGate
    screen: Screen
    watch: Watch
    readers: tuple[Reader, ...]
    placement: Placement
    colour: bool
    began_s: float
    """On the clock of satellites and clients (Unix time)."""
    dead: HostShare | None = None
    absent: int = 0
    """Unreadable values at the last report."""

    def moves(self) -> Moves:
        return clock_of(self.plan).moves(time.time())

    def picture(self) -> list[str]:
        dead = frozenset(satellite for satellite, _ in self.plan.addresses_of(self.dead)) if self.dead else frozenset()
        frame = OrbitFrame(self.placement, (0, 0), self.moves(), dead, self.watch.holding)
        return [*render_frame(frame, self.colour), LEGEND]

    def figures(self) -> list[str]:
        moves = self.moves()
        overhead = self.placement.centre_at(moves)
        moved = self.watch.total("chunks_migrated_out")
        return [
            f"overhead: plane {overhead.plane + 1}, satellite {overhead.slot + 1}, after {counted(moves)}",
            f"handed over {moved:,} chunks, {format_size(moved * self.plan.chunk_bytes)}",
            *(reader.words for reader in self.readers),
        ]

    def report_absent(self) -> None:
        """Prints when values become unreadable, and when all are readable again."""
        absent = sum(len(reader.absent) for reader in self.readers)
        if absent and not self.absent:
            self.screen.say("a value is missed: it is computed again, and stored as soon as the sky can take it")
        elif self.absent and not absent:
            again = sum(reader.tally.recomputed for reader in self.readers)
            self.screen.say(f"all that was missed is computed and stored again ({again} values): reads hit")
        self.absent = absent

    def until(self, elapsed_s: float) -> None:
        """Draws until ``elapsed_s`` after the start. Raises KeyboardInterrupt on a signal to stop."""
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
def _constellation(speed: float, gate: SignalGate) -> Iterator[tuple[Started, RunDirectory]]:
    """A testbed whose processes end with this one, however it ends; its directory is removed."""
    with temporary_run_directory("motion-") as folder:
        directory = RunDirectory(folder)
        started: Started | None = None
        try:
            started = start_on_free_ports(
                directory,
                lambda ports: make_plan(
                    hosts=local_hosts(DEFAULT_PRESET, 5, ports), epoch_s=time.time(), time_scale=speed
                ),
                preset_named(DEFAULT_PRESET).torus.size,
                foreground=True,
                confirm=confirm_all_answer,
                gate=gate,
            )
            yield started, directory
        finally:
            if started is not None:
                end_children(started.children)


def _host_of(plan: ConstellationPlan, plane: int) -> HostShare:
    return next(host for host in plan.hosts if plane in host.planes)


def _satellites_of(plan: ConstellationPlan, host: HostShare) -> list[SatelliteId]:
    return [satellite for satellite, _ in plan.addresses_of(host)]


def _planes(host: HostShare) -> str:
    return f"plane {', '.join(str(plane + 1) for plane in host.planes)}"


def _kill(flight: _Flight) -> tuple[HostShare, int, int]:
    """Kills the process of the plane overhead: ``(host, chunks lost, bytes lost)``."""
    flight.watch.ask()
    # The plane overhead: its satellites hold chunks for certain.
    host = _host_of(flight.plan, flight.placement.centre_at(flight.moves()).plane)
    child = flight.children[host.name]
    child.process.kill()
    child.process.wait()
    # Its supervisor line, too: the restarted process gets a new one.
    child.line.close()
    flight.dead = host
    chunks, size_bytes = flight.watch.died(_satellites_of(flight.plan, host))
    words = f"{host.name} ({_planes(host)}) killed, with {chunks:,} chunks, {format_size(size_bytes)}"
    flight.screen.say(words, flight.picture())
    return host, chunks, size_bytes


def _revive(flight: _Flight, host: HostShare, started: Started) -> None:
    """Starts the host's process again, with empty memory."""
    began_s = time.perf_counter()
    revive(flight.directory, flight.gate, started.children)
    flight.dead = None
    flight.screen.say(
        f"{host.name} ({_planes(host)}) is back after {time.perf_counter() - began_s:.2f} s, empty", flight.picture()
    )


def _closing(flight: _Flight) -> tuple[int, int]:
    """Reads everything once more, storing what is lost: ``(values readable, satellites that answer)``."""
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
    """Runs the demo; exit code 0 if no byte was wrong and everything is readable at the end."""
    if not LEAST_SECONDS <= args.seconds <= MOST_SECONDS:
        raise InvalidInput(f"--seconds {args.seconds:g}: expected {LEAST_SECONDS:g} to {MOST_SECONDS:g}")
    if not 0 < args.speed <= 2000:
        raise InvalidInput(f"--speed {args.speed:g}: expected more than 0 and at most 2000 times real time")
    stream = sys.stderr if args.json else sys.stdout
    slots = preset_named(DEFAULT_PRESET).torus.slots_per_plane
    with SignalGate() as gate:
        screen = Screen(stream, frame_width(slots), time.monotonic())
        try:
            with _constellation(args.speed, gate) as (started, directory):
                report = _demonstrate(args, started, directory, gate, screen)
        finally:
            screen.close()
    if args.json:
        print(json.dumps(report.as_object(), indent=1))
    else:
        print("\n" + "\n".join(report.lines()))
        print("\ndone; the constellation is down again" if report.sound else "\nFAILED: see above")
    return 0 if report.sound else 1


def _demonstrate(
    args: argparse.Namespace, started: Started, directory: RunDirectory, gate: SignalGate, screen: Screen
) -> MotionReport:
    plan = started.plan
    placement = Placement.for_preset(preset_named(plan.preset))
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
        Reader(store, _random_values(args.seed, count, size_bytes), READ_PAUSE_S) for count, store in stores.items()
    )
    watch = Watch(plan)
    colour = screen.live and not args.no_color and not os.environ.get("NO_COLOR")
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
