"""``skymemory simulate``: run a scenario of shell, hosts, links and workload, or all cells of its sweep."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skymemory.cli._options import add_json
from skymemory.errors import InvalidInput
from skymemory.text import Table, width_of, write, write_line
from skymemory.units import format_duration, format_size

if TYPE_CHECKING:
    from skymemory.cli.main import Subparsers
    from skymemory_lab.sim.sky import CellResult, Results

_SHOWN = 40
_BAR = 30


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "simulate",
        help="run a scenario: shell, hosts, links and workload from one file",
        description="Run a scenario, or every combination of its [sweep], by the satellites' and clients' own machines "
        "in virtual time or by the physical model. Beside every latency stand the least that any protocol needs "
        "('least') and the physical model. With --out finished cells are kept, so an interrupted run goes on where it "
        "was.",
    )
    add = parser.add_argument
    add("scenario", nargs="?", metavar="FILE|NAME", help="a TOML file, or a scenario of --list")
    add("--list", action="store_true", help="the scenarios that ship")
    add("--out", type=Path, metavar="DIR", help="keep cells, and write results.csv, .json, .parquet (with pyarrow)")
    add("--jobs", type=int, metavar="N", help="cells in parallel (default: one a core)")
    add("--on", choices=("processes", "ray"), default="processes", help="where cells run (default: processes)")
    add("--view", type=Path, metavar="DIR", help="write the first cell as CZML (for Cesium) and as an HTML animation")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from skymemory_lab.sim.sky import run as run_scenario
    from skymemory_lab.sim.sky import scenario_named, shipped

    if args.list:
        for name in shipped():
            write(f"{name:18} {scenario_named(name).title}", hanging=19)
        return 0
    if args.scenario is None:
        raise InvalidInput("simulate: expected a scenario: a TOML file, or a name of `skymemory simulate --list`")
    scenario = scenario_named(args.scenario)
    cells = scenario.cells()
    if args.view is not None:
        from skymemory_lab.view.animation import write_animation
        from skymemory_lab.view.czml import write_czml

        args.view.mkdir(parents=True, exist_ok=True)
        first, name = cells[0].scenario, Path(args.scenario).stem
        for path in (write_czml(first, args.view / f"{name}.czml"), write_animation(first, args.view / f"{name}.html")):
            write_line(f"{path}  {format_size(path.stat().st_size)}", sys.stderr)
    results = run_scenario(scenario, args.out, jobs=args.jobs, way=args.on, progress=_progress)
    if args.json:
        print(results.as_json(), end="")
    else:
        _print(results)
        if args.out is not None:
            write_line(f"\nresults in {args.out}")
    return 0


def _progress(done: int, of: int) -> None:
    if sys.stderr.isatty():
        full = _BAR * done // of
        line = f"{'█' * full}{'░' * (_BAR - full)} {done} of {of} cells" if done < of else ""
        print(f"\r\x1b[K{line[: width_of(sys.stderr) - 1]}", end="", file=sys.stderr, flush=True)


def _print(results: Results) -> None:
    swept = [path for path, _ in results.cells[0].swept]
    heads = ["p50", "least", "model", "p99", "least", "model"]
    rows = [[*swept, "hits", "misses", *(f"get {head}" for head in heads), *(f"set {head}" for head in heads)]]
    rows += [_row(cell) for cell in results.cells[:_SHOWN]]
    _table(rows, len(swept))
    if len(results.cells) > _SHOWN:
        write_line(f"… {len(results.cells) - _SHOWN} cells more")
    if "isl_bytes" in results.cells[0].figures:
        print()
        names = ["up", "down", "isl", "lost packets", "moves", "gateway handovers", "chunks handed over"]
        _table([[*swept, *names], *(_traffic(cell) for cell in results.cells[:_SHOWN])], len(swept))
    _say_reasons(results)
    computed = [cell for cell in results.cells if not cell.kept]
    if len(computed) < len(results.cells):
        write_line(f"{len(results.cells) - len(computed)} of {len(results.cells)} cells were there already")
    packets, wall_s = sum(cell.packets for cell in computed), sum(cell.wall_s for cell in computed)
    if packets:
        write_line(f"{packets} packets on links in {format_duration(wall_s)} of work, {packets / wall_s:.0f} a second")


def _say_reasons(results: Results) -> None:
    for key, what in (("misses_by_reason", "misses"), ("sets_failed_by_reason", "sets failed")):
        reasons: Counter[str] = Counter()
        for cell in results.cells:
            reasons.update(cell.figures[key])
        if reasons:
            write(f"{what}: {', '.join(f'{count} {reason}' for reason, count in reasons.most_common())}")
    wrong = sum(cell.figures.get("wrong_values", 0) for cell in results.cells)
    if wrong:  # never: values have checksums
        write_line(f"{wrong} values were read that differ from what was stored: a fault of SkyMemory", sys.stderr)


def _row(cell: CellResult) -> list[str]:
    figures = cell.figures
    row = [str(value) for _, value in cell.swept] + [str(figures["hits"]), str(figures["misses"])]
    for way in ("get", "set"):
        for part in ("p50", "p99"):
            row += [_ms(figures[f"{way}{label}_{part}_s"]) for label in ("", "_bound", "_model")]
    return row


def _traffic(cell: CellResult) -> list[str]:
    figures: dict[str, Any] = cell.figures
    lost = sum(figures[f"{kind}_packets_lost"] for kind in ("up", "down", "isl"))
    return [
        *(str(value) for _, value in cell.swept),
        *(format_size(figures[f"{kind}_bytes"]) for kind in ("up", "down", "isl")),
        str(lost),
        f"{figures['slot_moves']}+{figures['plane_moves']}",
        str(figures["gateway_handovers"]),
        str(figures["chunks_handed_over"]),
    ]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"


def _table(rows: list[list[str]], left_columns: int) -> None:
    Table(rows[0], rows[1:], left=range(left_columns), keys=left_columns).print()
