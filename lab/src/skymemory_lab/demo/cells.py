"""``skymemory demo cells``: a drive through a grid of base stations with continuous reads, in virtual time."""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

from skymemory.constellation.ground_track import CellGrid, Stop
from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput
from skymemory.placement.layout import Strategy
from skymemory.placement.locate import server_moves
from skymemory.progress import Progress
from skymemory.protocol.client.machine import ClientConfig
from skymemory.protocol.clock import STRATEGY_CODES, MoveClock, SkyMap
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.store.sky.store import ConstellationStore, SkySettings
from skymemory.text import Table, write
from skymemory.transport.simulated import Node, SimulatedConstellation
from skymemory.units import format_size
from skymemory_lab.demo.estimate import Estimate, EstimatedPart, TimedRun, say_estimate
from skymemory_lab.demo.resources import slowdown

HOP_S, RADIO_S = 0.001, 0.004
READ_EVERY_S = 5.0
_LEAST_LEG_M = 1000.0
MAX_VALUE_BYTES = 1 << 28
"""Limit of a value: one process holds all cells, some with two shares for a moment."""


@dataclass(frozen=True, slots=True)
class Town:
    """A grid with a value on the ``servers`` cells around the user."""

    grid: CellGrid
    cell_m: float = 500.0
    servers: int = 9
    value_bytes: int = 2_883_584
    chunk_bytes: int = 6144

    def __post_init__(self) -> None:
        if not (0 < self.cell_m < math.inf and self.servers >= 1 and 1 <= self.value_bytes <= MAX_VALUE_BYTES):
            raise InvalidInput(
                f"cells of {self.cell_m:g} m, {self.servers} of them with a value of {self.value_bytes} bytes: "
                f"expected more than 0 of each, and at most {MAX_VALUE_BYTES} bytes"
            )
        side = 2 * self.margin + 2
        if min(self.grid.rows, self.grid.columns) < side:
            raise InvalidInput(
                f"a grid of {self.grid.rows} x {self.grid.columns} cells is too small for a box of {self.servers}: "
                f"expected {side} x {side} at least"
            )

    @property
    def margin(self) -> int:
        """Distance in cells that the user keeps from the edge."""
        side = 1
        while side * side < self.servers:
            side += 1
        return side // 2 + 1

    def drive(self, seed: int, legs: int, speed_m_s: float) -> list[Stop]:
        """Draw a drive, straight from one random place to the next."""
        if legs < 1 or not 0 < speed_m_s < math.inf:
            raise InvalidInput(f"{legs} legs at {speed_m_s:g} m/s: expected at least one, and to move")
        draw = random.Random(seed)
        stops = [Stop(0.0, self.grid.rows / 2, self.grid.columns / 2)]
        farthest_m = self.cell_m * min(self.grid.rows, self.grid.columns) / 4
        while len(stops) <= legs:
            last_stop = stops[-1]
            row = draw.uniform(self.margin, self.grid.rows - self.margin - 1)
            column = draw.uniform(self.margin, self.grid.columns - self.margin - 1)
            metres = self.cell_m * ((row - last_stop.row) ** 2 + (column - last_stop.column) ** 2) ** 0.5
            if metres > min(_LEAST_LEG_M, farthest_m):
                stops.append(Stop(last_stop.time_s + metres / speed_m_s, row, column))
        return stops


@dataclass(frozen=True, slots=True)
class DriveReport:
    """Reads of a drive, and the bytes handed over between cells."""

    strategy: str
    reads: int
    hits: int
    wrong: int
    median_ms: float
    p99_ms: float
    worst_ms: float
    farthest_hops: int  # from the user's cell to a server
    crossings: int  # of borders between cells
    moved_bytes: int
    least_bytes: int  # least possible ``moved_bytes``


def run_drive(
    town: Town,
    path: list[Stop],
    strategy: Strategy,
    value: bytes,
    on_read: Callable[[float, int, int], None] | None = None,
) -> DriveReport:
    """Store the value, and read it every 5 s of the drive.

    ``on_read`` gets the time, the reads so far and their hits.
    """
    clock = MoveClock(time_scale=1.0, track=town.grid.track(path, town.margin))
    sky = SkyMap(town.grid.torus, town.grid.centre(path, town.margin))
    cells = SimulatedConstellation(sky, max(64 << 20, 4 * len(value)), clock, _delay_s)
    driver = cells.connect(ClientConfig(1, "gateway", expected_rtt_s=2 * (RADIO_S + 4 * HOP_S)))
    store = ConstellationStore(driver, sky, SkySettings(strategy, town.servers, town.chunk_bytes), index=SharedIndex())
    key = bytes(32)
    if store.put_many([(key, value)]) != [True]:
        raise InvalidInput(f"a value of {len(value)} bytes does not fit into {town.servers} cells")
    set_moves = clock.moves(cells.now_s)
    placement = sky.placement(STRATEGY_CODES[strategy], town.servers)
    chunks = -(-len(value) // town.chunk_bytes)
    # Chunk i lies on server i mod servers.
    chunks_on = [len(range(server, chunks, town.servers)) for server in range(town.servers)]
    times_s, hits, wrong, farthest, least_chunks, crossings, before = [], 0, 0, 0, 0, 0, set_moves
    while cells.now_s < path[-1].time_s:
        read_start_s = cells.now_s
        value_read = store.get_many([key])[0]
        times_s.append(cells.now_s - read_start_s)
        hits += value_read is not None
        wrong += value_read is not None and bytes(value_read) != value
        now = clock.moves(cells.now_s)
        centre = sky.centre_at(now)
        farthest = max(farthest, *(sky.torus.hops(centre, server) for server in placement.locate_all(set_moves, now)))
        if on_read is not None:
            on_read(read_start_s, len(times_s), hits)
        # Reads are due at fixed times, not after a fixed pause, so both schemes read at the same places.
        until_s = READ_EVERY_S * len(times_s)
        # Borders crossed before the next read. The least possible transfer is the chunks of the servers whose cell
        # changes; it is compared at the end with what the machines moved.
        while (at_s := clock.next_move_s(read_start_s)) is not None and at_s < until_s:
            after = clock.moves(at_s)
            least_chunks += sum(chunks_on[line.server] for line in server_moves(placement, set_moves, before, after))
            crossings += 1
            before, read_start_s = after, at_s
        cells.settle(until_s)
    moved = sum(cell.counters.get("chunks_migrated_in") for cell in cells.satellites.values())
    ordered = sorted(times_s)
    return DriveReport(
        strategy,
        len(times_s),
        hits,
        wrong,
        statistics.median(times_s) * 1e3,
        ordered[len(ordered) * 99 // 100] * 1e3,
        ordered[-1] * 1e3,
        farthest,
        crossings,
        moved * town.chunk_bytes,
        least_chunks * town.chunk_bytes,
    )


def _delay_s(sender: Node, receiver: Node) -> float:
    return HOP_S if isinstance(sender, SatelliteId) and isinstance(receiver, SatelliteId) else RADIO_S


SCHEMES: tuple[tuple[Strategy, str], ...] = (("rotation_hop", "follows the user"), ("hop", "stays in its place"))
SAY_EVERY_S = 300.0
_READ_S, _CHUNK_S = 0.0023, 44e-6  # time of a read and of each chunk, on the reference computer
_FARTHER = 1.7  # factor for a value that stays: its chunks cross more cells


def run_cells(args: argparse.Namespace) -> int:
    settings = args.settings
    town = Town(settings.grid, settings.cell_m, settings.servers, settings.value_bytes)
    path = town.drive(settings.seed, settings.legs, settings.speed_kmh / 3.6)
    value = random.Random(settings.seed).randbytes(town.value_bytes)
    out = sys.stderr if args.json else sys.stdout
    minutes, kilometres = path[-1].time_s / 60, path[-1].time_s * settings.speed_kmh / 3600
    write(
        f"{town.grid.rows} x {town.grid.columns} base stations {town.cell_m:g} m apart, 1 ms from one to the next and "
        f"4 ms to the user; {format_size(town.value_bytes)} on {town.servers} of them, read every 5 s\n"
        f"a drive of {kilometres:.1f} km in {minutes:.0f} minutes of virtual time",
        out,
    )
    progress = Progress(out)
    chunks = -(-town.value_bytes // town.chunk_bytes)
    drive_s = path[-1].time_s / READ_EVERY_S * (_READ_S + chunks * _CHUNK_S) * slowdown()
    times_s = (drive_s, _FARTHER * drive_s)
    estimate = Estimate(
        [EstimatedPart(words, seconds, "drive") for (_, words), seconds in zip(SCHEMES, times_s, strict=True)],
        spent_s=0.5,
    )
    run = TimedRun(progress, estimate)
    say_estimate(progress, estimate.first_s)
    reports = []
    for strategy, words in SCHEMES:
        last_line_s = 0.0

        def on_read(time_s: float, reads: int, hits: int, words: str = words) -> None:
            nonlocal last_line_s
            wait.on_progress(time_s / path[-1].time_s, f"minute {time_s / 60:.0f} of {minutes:.0f}")
            if time_s >= last_line_s + SAY_EVERY_S:
                last_line_s = time_s
                progress.write(f"[{time_s / 60:4.0f} min] the cache {words}: {hits} of {reads} reads hit", 11)

        with run.part(f"the cache {words}", words) as wait:
            reports.append(run_drive(town, path, strategy, value, on_read))
    if args.json:
        facts = {
            "rows": town.grid.rows,
            "columns": town.grid.columns,
            "cell_m": town.cell_m,
            "servers": town.servers,
            "value_bytes": town.value_bytes,
            "seconds": path[-1].time_s,
            "stops": [stop._asdict() for stop in path],
            "drives": [asdict(report) for report in reports],
        }
        print(json.dumps(facts))
    else:
        _print(reports)
    write(run.format_took(), out)
    return int(any(report.wrong or report.hits < report.reads for report in reports))


def _print(reports: list[DriveReport]) -> None:
    head = ("the cache", "hits", "median", "p99", "worst", "farthest", "moved")
    rows = [
        [
            words,
            f"{report.hits} of {report.reads}",
            *(f"{milliseconds:.1f} ms" for milliseconds in (report.median_ms, report.p99_ms, report.worst_ms)),
            f"{report.farthest_hops} hops",
            format_size(report.moved_bytes),
        ]
        for (_, words), report in zip(SCHEMES, reports, strict=True)
    ]
    print()
    Table(head, rows).print()
    first = reports[0]
    share = f", {first.moved_bytes / first.least_bytes:.3f} of the least possible" if first.least_bytes else ""
    print()
    write(
        f"{first.crossings} borders crossed, {format_size(first.moved_bytes)} handed over{share}; "
        f"{sum(report.wrong for report in reports)} wrong"
    )
