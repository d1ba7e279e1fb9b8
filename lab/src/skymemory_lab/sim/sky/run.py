"""Runs of scenarios, cell by cell: by the satellites' and clients' own machines in virtual time, or by the physical
model.

Every latency comes with its lower bound and the model's time. Misses cost no time.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum, unique
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import skymemory
from skymemory.constellation.links import LINK_CLASSES
from skymemory.errors import InvalidInput, MissingExtra, missing_extra
from skymemory.files import write_output
from skymemory.metrics import spread
from skymemory.placement.locate import Moves
from skymemory.protocol.client.machine import Finished
from skymemory.protocol.client.transfer import Striping, ValueInfo
from skymemory.protocol.clock import HANDED_OVER_S, STRATEGY_CODES
from skymemory.reasons import LOST, Miss
from skymemory.testbed.connect import clock_of, sky_of
from skymemory.testbed.virtual import VirtualConstellation
from skymemory_lab.sim.sky.bound import lower_bound_s
from skymemory_lab.sim.sky.physical import LinkRates, TransferSetting, Ways, latency_s, ways_of
from skymemory_lab.sim.sky.physical import Operation as Direction
from skymemory_lab.sim.sky.scenario import ENDS_WITHIN_S, Cell, Scenario, ScheduledOperation
from skymemory_lab.sim.sweeps import Progress, Way, sweep

# Version of kept results, changed with code that changes results.
_RESULTS_VERSION = f"{skymemory.__version__}/2"
_BOTH: tuple[Direction, Direction] = ("get", "set")


# --- One cell ---


@unique
class Unserved(StrEnum):
    """Reason, besides the client's ``Miss``, for an operation that failed or was not begun."""

    UNSEEN = "nothing in sight"
    FIRST_USE = "first use"
    BEING_STORED = "being stored"
    NOT_STORED = "not stored"  # a set failed, or the value was lost
    NOT_ENDED = "not ended"


class _Transfer(NamedTuple):
    """Get that hit, or set.

    ``placed`` has a time, the moves at the set, and those by which holders are located: at the start, at the start with
    the moves ``HANDED_OVER_S`` earlier (as clients try first), and at the end.
    """

    host: int
    direction: Direction
    value_bytes: int
    begun_s: float
    took_s: float
    placed: tuple[tuple[float, Moves, Moves], ...] = ()


@dataclass(frozen=True)
class CellResult:
    """Figures of a cell by name, None without such an operation.

    ``wall_s`` and ``packets`` are not compared.
    """

    number: int
    swept: tuple[tuple[str, Any], ...]
    figures: dict[str, Any]
    wall_s: float = 0.0
    packets: int = 0
    kept: bool = False  # from an earlier run


def run_cell(cell: Cell) -> CellResult:
    """Run a cell; results are the same on every computer and in every process."""
    try:
        return _run_cell(cell)
    except InvalidInput as error:
        if not cell.swept:
            raise
        values = ", ".join(f"{path} = {json.dumps(value)}" for path, value in cell.swept)
        raise InvalidInput(f"cell {cell.number} ({values}): {error}") from error


def _run_cell(cell: Cell) -> CellResult:
    scenario, started_s = cell.scenario, time.perf_counter()
    scenario.check_sight()
    work = scenario.operations()
    cell_run = _ByModel(scenario) if scenario.engine == "model" else _ByMachines(scenario)
    cell_run.run(work)
    figures = {**cell_run.figures(), **_latencies(scenario, cell_run)}
    return CellResult(cell.number, cell.swept, figures, time.perf_counter() - started_s, cell_run.packets)


class _Run(ABC):
    """Run of a cell: its transfers, hits and misses."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.packets = 0
        self.transfers: list[_Transfer] = []
        self.misses: Counter[Miss | Unserved] = Counter()
        self.failed_sets: Counter[Miss | Unserved] = Counter()
        self.hits_of: Counter[int] = Counter()
        self.misses_of: Counter[int] = Counter()
        hosts = range(len(scenario.ground))
        self.accesses = [scenario.access(host) for host in hosts]
        self.places = [scenario.place(host) if host else None for host in hosts]
        self.sights = [scenario.plan.sight(place) for place in self.places]
        self._beams = [access in ("gateway", "hybrid") for access in self.accesses]
        self._clock = clock_of(scenario.plan)
        self._sky = sky_of(scenario.plan)

    @abstractmethod
    def run(self, work: Sequence[Sequence[ScheduledOperation]]) -> None: ...

    def windows(self, host: int) -> tuple[int | None, int | None]:
        # Return the limits of bytes in flight of a get and of a set; None: no limit.
        return None, None

    def sees(self, host: int, now_s: float) -> bool:
        # Return True if a satellite is in sight, or the host needs no beam.
        centre = self._sky.centre_at(self._clock.moves(now_s))
        return not self._beams[host] or bool(self.sights[host].in_sight(centre, self._clock.sky_s(now_s)))

    def missed(self, host: int, reason: Miss | Unserved) -> None:
        self.misses[reason] += 1
        self.misses_of[host] += 1

    def hit(self, host: int) -> None:
        self.hits_of[host] += 1

    def figures(self) -> dict[str, Any]:
        end_s = self.scenario.duration_s
        moves = [after - before for after, before in zip(self._clock.moves(end_s), self._clock.moves(0.0), strict=True)]
        return {
            "hits": self.hits_of.total(),
            "misses": self.misses.total(),
            "misses_by_reason": dict(sorted(self.misses.items())),
            "sets_failed": self.failed_sets.total(),
            "sets_failed_by_reason": dict(sorted(self.failed_sets.items())),
            "slot_moves": moves[0],
            "plane_moves": moves[1],
        }


class _ByModel(_Run):
    """Run by the physical model: a single copy of every value, nothing evicted or lost."""

    def run(self, work: Sequence[Sequence[ScheduledOperation]]) -> None:
        known: set[int] = set()
        for request in work:
            after_miss = False
            for at_s, host, put, key, value_bytes in request:
                unseen = not self.sees(host, at_s)
                reason: Miss | Unserved = Miss.BEHIND_MISS if after_miss else Unserved.FIRST_USE
                is_hit = not put and key in known and not unseen and not after_miss
                if not put:
                    self.hit(host) if is_hit else self.missed(host, Unserved.UNSEEN if unseen else reason)
                    after_miss = not is_hit
                if unseen:
                    if put or key not in known:
                        self.failed_sets[Unserved.UNSEEN] += 1
                    continue
                if is_hit or put or key not in known:
                    self.transfers.append(_Transfer(host, "get" if is_hit else "set", value_bytes, at_s, math.nan))
                    known.add(key)


class _Begun(NamedTuple):
    operation: ScheduledOperation
    request: _Request
    at: int  # index of the operation in its request
    info: ValueInfo
    out: bytearray | None  # destination of a get; None: a set
    begun_s: float


@dataclass(slots=True)
class _Request:
    """Request in progress, with its failures by the operation's index."""

    operations: Sequence[ScheduledOperation]
    waiting: int = 0  # gets in progress
    failures: dict[int, Miss | Unserved] = field(default_factory=dict)


class _ByMachines(_Run):
    """Run by the state machines of all satellites and of a client per host; hosts share an index of values."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        plan = scenario.plan
        self._world = VirtualConstellation(plan)
        self._simulated = self._world.simulated
        self._clients = [
            self._world.connect(access, ground=number + 1, place=place)
            for number, (access, place) in enumerate(zip(self.accesses, self.places, strict=True))
        ]
        self._code = STRATEGY_CODES[plan.strategy]  # type: ignore[index]
        self._index: dict[int, ValueInfo] = {}
        self._writing: Counter[int] = Counter()
        self._begun: dict[tuple[int, int], _Begun] = {}
        self._content = np.random.default_rng(scenario.workload.seed).bytes(max(scenario.workload.sizes) + (1 << 16))
        self.wrong = 0

    def windows(self, host: int) -> tuple[int | None, int | None]:
        config = self._clients[host].machine.config
        chunk_bytes = self.scenario.placement.chunk_bytes
        return max(chunk_bytes, config.window_bytes), max(chunk_bytes, config.credit_bytes)

    def _value(self, key: int, value_bytes: int) -> memoryview:
        # Return the content of a key's value, a part of random bytes.
        first = key * 251 % (1 << 16)
        return memoryview(self._content)[first : first + value_bytes]

    def run(self, work: Sequence[Sequence[ScheduledOperation]]) -> None:
        for request in work:
            self._advance(request[0].at_s)
            self._begin(_Request(request))
        end_s = self.scenario.duration_s + ENDS_WITHIN_S
        while self._begun and self._step(end_s):
            pass
        for transfer in self._begun.values():
            if transfer.out is None:
                self.failed_sets[Unserved.NOT_ENDED] += 1
            else:
                self.missed(transfer.operation.host, Unserved.NOT_ENDED)
        self.packets = self._simulated.datagrams_sent

    def _advance(self, until_s: float) -> None:
        while self._step(until_s):
            pass

    def _step(self, until_s: float) -> bool:
        # Process the next event up to ``until_s``; return False if there is none.
        is_running = self._simulated.step(until_s)
        for host, client in enumerate(self._clients):
            while (event := client.machine.next_event()) is not None:
                self._on_finished(host, event)
        return is_running

    def _begin(self, request: _Request) -> None:
        """Start an operation of a mix, or the gets of a request up to its first unknown block."""
        first = request.operations[0]
        if first.put:
            self._put(request, 0)
            return
        if not self.sees(first.host, self._simulated.now_s):
            for operation in request.operations:
                self.missed(operation.host, Unserved.UNSEEN)
            return
        for at, operation in enumerate(request.operations):
            if operation.key not in self._index:
                used = operation.key in self._writing  # a counter keeps keys with a count of 0
                earlier = Unserved.NOT_STORED if used else Unserved.FIRST_USE
                request.failures[at] = Unserved.BEING_STORED if self._writing[operation.key] else earlier
                break
            self._get(request, at)
        if not request.waiting:
            self._complete(request)

    def _get(self, request: _Request, at: int) -> None:
        operation, now_s = request.operations[at], self._simulated.now_s
        info = self._index[operation.key]
        out = bytearray(info.value_bytes)
        number = self._clients[operation.host].machine.get(info, memoryview(out), now_s)
        request.waiting += 1
        self._begun[operation.host, number] = _Begun(operation, request, at, info, out, now_s)

    def _put(self, request: _Request, at: int) -> None:
        operation, now_s = request.operations[at], self._simulated.now_s
        if not self.sees(operation.host, now_s):
            self.failed_sets[Unserved.UNSEEN] += 1
            return
        placement, value = self.scenario.placement, self._value(operation.key, operation.value_bytes)
        number, info = self._clients[operation.host].machine.put(
            operation.key.to_bytes(32, "big", signed=True),
            value,
            Striping(placement.chunk_bytes, self._code, placement.servers),
            now_s,
        )
        self._writing[operation.key] += 1
        self._begun[operation.host, number] = _Begun(operation, request, at, info, None, now_s)

    def _on_finished(self, host: int, event: Finished) -> None:
        # Record the end of a set, or of a get, which completes its request if it is the last.
        transfer = self._begun.pop((host, event.number), None)
        if transfer is None:
            return
        operation, request, info, failure = transfer.operation, transfer.request, transfer.info, event.report.failure
        if transfer.out is None:
            self._writing[operation.key] -= 1
            if failure:
                self.failed_sets[failure] += 1
            else:
                self._index[operation.key] = info
                self._record_transfer("set", transfer)
            return
        if failure:
            request.failures[transfer.at] = failure
            if failure in LOST and self._index.get(operation.key) is info:
                del self._index[operation.key]
        else:
            self.wrong += transfer.out != self._value(operation.key, operation.value_bytes)
            self._record_transfer("get", transfer)
        request.waiting -= 1
        if not request.waiting:
            self._complete(request)

    def _complete(self, request: _Request) -> None:
        # Count hits before a request's first miss, misses from it on, and store the unknown values.
        first = min(request.failures, default=len(request.operations))
        for at, operation in enumerate(request.operations):
            if at < first:
                self.hit(operation.host)
                continue
            self.missed(operation.host, request.failures.get(at, Miss.BEHIND_MISS))
            if operation.key not in self._index and not self._writing[operation.key]:
                self._put(request, at)

    def _record_transfer(self, direction: Direction, transfer: _Begun) -> None:
        operation, end_s = transfer.operation, self._simulated.now_s
        positions = []
        for now_s, counted_s in (
            (transfer.begun_s, transfer.begun_s),
            (transfer.begun_s, transfer.begun_s - HANDED_OVER_S),
            (end_s, end_s),
        ):
            positions.append((now_s, transfer.info.set_moves, self._clock.moves(counted_s)))
        self.transfers.append(
            _Transfer(
                operation.host,
                direction,
                operation.value_bytes,
                transfer.begun_s,
                end_s - transfer.begun_s,
                tuple(positions),
            )
        )

    def figures(self) -> dict[str, Any]:
        counts = self._simulated.queues.counts if self._simulated.queues is not None else {}
        satellites = self._simulated.satellites.values()
        lost = {kind: counts[kind].dropped + counts[kind].outage for kind in counts}
        unused = ("up", "down") if self.scenario.plan.access == "onboard" else ()  # there is no beam
        handovers = [client.machine.counters.get("gateway_handovers") for client in self._clients]
        return {
            **super().figures(),
            "wrong_values": self.wrong,
            "gateway_handovers": sum(handovers),
            "chunks_handed_over": sum(satellite.counters.get("chunks_migrated_out") for satellite in satellites),
            "chunks_evicted": sum(satellite.counters.get("chunks_evicted") for satellite in satellites),
            **{f"{kind}_bytes": 0 if kind in unused else counts[kind].bytes for kind in LINK_CLASSES},
            **{f"{kind}_packets_lost": lost[kind] for kind in LINK_CLASSES},
        }


# --- Latencies, bounds, model ---


def _latencies(scenario: Scenario, cell_run: _Run) -> dict[str, Any]:
    columns: dict[tuple[int, Direction], list[np.ndarray[Any, np.dtype[np.float64]]]] = {}
    for host in range(len(scenario.ground)):
        for direction in _BOTH:
            mine = [
                transfer for transfer in cell_run.transfers if (transfer.host, transfer.direction) == (host, direction)
            ]
            columns[host, direction] = _get_time_columns(scenario, cell_run, host, direction, mine)
    figures: dict[str, Any] = {}
    for direction in _BOTH:
        parts = [columns[host, direction] for host in range(len(scenario.ground))]
        figures.update(_spreads(direction, [np.concatenate(column) for column in zip(*parts, strict=True)]))
    figures["hosts"] = {
        host.name: {
            "hits": cell_run.hits_of[number],
            "misses": cell_run.misses_of[number],
            **{name: value for way in _BOTH for name, value in _spreads(way, columns[number, way]).items()},
        }
        for number, host in enumerate(scenario.ground)
    }
    return figures


def _spreads(direction: str, columns: Sequence[Iterable[float]]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for label, values in zip(("", "_bound", "_model"), columns, strict=True):
        statistics = spread(values)
        if not label:
            figures[f"{direction}s"] = statistics.count
        for part in ("p50", "p99", "mean"):
            value = getattr(statistics, part)
            figures[f"{direction}{label}_{part}_s"] = None if math.isnan(value) else value
    return figures


def _get_time_columns(
    scenario: Scenario, cell_run: _Run, host: int, direction: Direction, transfers: Sequence[_Transfer]
) -> list[np.ndarray[Any, np.dtype[np.float64]]]:
    """Return the seconds measured (engine ``model``: the model's), at least, and by the model."""
    took_s = np.array([transfer.took_s for transfer in transfers])
    bound_s, model_s = np.full(len(transfers), math.nan), np.full(len(transfers), math.nan)
    if not transfers:
        return [took_s, bound_s, model_s]
    rates, window_bytes = _rates(scenario), cell_run.windows(host)[direction == "set"]
    by_size: dict[int, list[int]] = defaultdict(list)
    for at, transfer in enumerate(transfers):
        by_size[transfer.value_bytes].append(at)
    for value_bytes, numbers in by_size.items():
        setting = TransferSetting(value_bytes, scenario.placement.chunk_bytes, scenario.memory.server_s, window_bytes)
        mine = [transfers[number] for number in numbers]
        ways = _ways(scenario, cell_run, host, mine)
        moments = max(1, len(mine[0].placed))
        # The box and the beams move during a transfer, so the bound is the least of the moments.
        least = lower_bound_s(ways, setting, rates, direction).reshape(-1, moments)
        bound_s[numbers] = least.min(axis=1)
        model_s[numbers] = latency_s(ways, setting, rates, direction).reshape(-1, moments)[:, 0]
    return [model_s if scenario.engine == "model" else took_s, bound_s, model_s]


def _ways(scenario: Scenario, cell_run: _Run, host: int, transfers: Sequence[_Transfer]) -> Ways:
    # Return the host's ways at all moments of ``placed`` of the transfers, or at their begins.
    plan = scenario.plan
    moments = [moment for transfer in transfers for moment in transfer.placed or ((transfer.begun_s, None, None),)]
    times = [scenario.start_s + moment[0] for moment in moments]
    moves_by_time = None if moments[0][1] is None else [(set_moves, moves) for _, set_moves, moves in moments]
    how: dict[str, Any] = {"strategy": plan.strategy, "servers": plan.servers, "moves_by_time": moves_by_time}
    ways = ways_of(scenario.preset, cell_run.sights[host], cell_run.accesses[host], times, **how)  # type: ignore[arg-type]
    if len(ways.times_s) == len(times):
        return ways
    # At the end of a transfer its last satellite may have set. The begin counts then.
    visible_times, rows, at = set(ways.times_s.tolist()), [], -1
    for time_s in times:
        at += time_s in visible_times
        rows.append(max(at, 0))
    return ways.of(np.array(rows))


def _rates(scenario: Scenario) -> LinkRates:
    rates_bit_s = (8 * scenario.links.bytes_per_s(kind) for kind in ("up", "down", "isl"))
    return LinkRates(*(None if math.isinf(rate) else rate for rate in rates_bit_s))


# --- All cells ---


@dataclass(frozen=True)
class Results:
    scenario: Scenario
    cells: tuple[CellResult, ...]

    def rows(self) -> list[dict[str, Any]]:
        rows = []
        for cell in self.cells:
            row: dict[str, Any] = {"cell": cell.number}
            row.update(
                (path, value if isinstance(value, str | int | float) else json.dumps(value))
                for path, value in cell.swept
            )
            for name, value in cell.figures.items():
                if name == "hosts":
                    continue
                row[name] = (
                    "; ".join(f"{why} {count}" for why, count in value.items()) if isinstance(value, dict) else value
                )
            rows.append(row)
        return rows

    def as_csv(self) -> str:
        rows = self.rows()
        names = list(dict.fromkeys(name for row in rows for name in row))
        lines = io.StringIO()
        writer = csv.DictWriter(lines, names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return lines.getvalue()

    def as_json(self) -> str:
        cells = [{"cell": cell.number, "swept": dict(cell.swept), **cell.figures} for cell in self.cells]
        return json.dumps({"title": self.scenario.title, "cells": cells}, indent=1) + "\n"

    def write(self, folder: Path) -> list[Path]:
        written = []
        for name, content in (("results.csv", self.as_csv()), ("results.json", self.as_json())):
            write_output(folder / name, content.encode())
            written.append(folder / name)
        with suppress(MissingExtra):
            written.append(self.write_parquet(folder / "results.parquet"))
        return written

    def write_parquet(self, path: Path) -> Path:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as error:
            raise missing_extra("Parquet", "pyarrow", "parquet") from error
        pq.write_table(pa.Table.from_pylist(self.rows()), path)
        return path


def run(
    scenario: Scenario,
    out: Path | None = None,
    *,
    jobs: int | None = None,
    way: Way = "processes",
    progress: Progress = lambda done, of: None,
) -> Results:
    """Run all cells of a scenario, and write results into ``out``; cells finished in ``out/cells`` are not run again.

    Figures are the same for any number of ``jobs`` (None: one per core), any ``way``, and after an interruption.

    Raises:
        InvalidInput: an impossible scenario (see ``Scenario.read``), or a place sees nothing.
        SkyMemoryError: worker processes are killed, or Ray is not available.
        OSError: ``out`` cannot be written.
    """
    cells = scenario.cells()
    known: dict[int, CellResult] = {}
    folder = None if out is None else out / "cells"
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for cell in cells:
            if (earlier := _load_result(folder, cell)) is not None:
                known[cell.number] = earlier
    missing = [cell for cell in cells if cell.number not in known]
    before = len(known)
    progress(before, len(cells))

    def keep(number: int, result: CellResult) -> None:
        known[result.number] = result
        if folder is not None:
            path = folder / f"{missing[number].key(_RESULTS_VERSION)}.json"
            written = {
                "figures": result.figures,
                "digest": _figures_digest(result.figures),
                "wall_s": result.wall_s,
                "packets": result.packets,
            }
            write_output(path, json.dumps(written).encode())

    count: Callable[[int, int], None] = lambda done, of: progress(before + done, len(cells))  # noqa: E731
    if missing:
        sweep(run_cell, missing, way, jobs, count, keep)
    results = Results(scenario, tuple(known[cell.number] for cell in cells))
    if out is not None:
        results.write(out)
    return results


def _load_result(folder: Path, cell: Cell) -> CellResult | None:
    try:
        content = json.loads((folder / f"{cell.key(_RESULTS_VERSION)}.json").read_bytes())
        figures = dict(content["figures"])
        if content["digest"] != _figures_digest(figures):
            return None
        return CellResult(cell.number, cell.swept, figures, content["wall_s"], content["packets"], True)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        return None


def _figures_digest(figures: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(figures).encode()).hexdigest()
