"""The command ``skymemory reproduce mooncake``."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from skymemory.errors import MissingExtra
from skymemory.files import check_readable
from skymemory.text import Table, width_of, wrapped, write_line
from skymemory_lab.reproduce.mooncake.base import Experiment, ExperimentSetting, Value
from skymemory_lab.reproduce.mooncake.experiments import EXPERIMENTS, chosen
from skymemory_lab.reproduce.mooncake.figures import draw, write_mooncake_csv
from skymemory_lab.sim.workload import ConversationSource
from skymemory_lab.view.drawing import PRINT_DPI, save


def run_mooncake(args: argparse.Namespace) -> int:
    if args.trace is not None:
        check_readable(args.trace)
    names = chosen(args.fig or [])
    source = ConversationSource(args.trace, args.seed, args.quick)
    if args.trace is None:
        write_line(
            "skymemory: no --trace FILE: requests come from the seeded generator, which has the statistics of"
            " Mooncake's conversation trace, not its requests",
            sys.stderr,
        )
    # Each experiment is printed when it is done, because all of them take long.
    results: list[Experiment] = []
    for name in names:
        progress = SweepProgress(sys.stderr, name)
        setting = ExperimentSetting(source, args.on, args.jobs, progress.show)
        try:
            results.append(EXPERIMENTS[name](setting))
        finally:
            progress.close()
        if not args.json:
            width = width_of()
            for line in as_markdown(results[-1]) if args.markdown else as_text(results[-1], width):
                print(line)
            sys.stdout.flush()
    if args.json:
        print(json.dumps([result.as_json() for result in results], indent=1, ensure_ascii=False))
    if args.out is not None:
        _write(results, args.out, sys.stderr if args.json else sys.stdout)
    return 0


class SweepProgress:
    """Line of a terminal with the number of cells done."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name, self._began_s = stream, name, time.monotonic()
        self._live = stream.isatty()
        self.show(0, 0)

    def show(self, done: int, of: int) -> None:
        if self._live:
            parts = f" {done} of {of}" if of else ""
            self._stream.write(f"\r{self._name}:{parts} ({time.monotonic() - self._began_s:.0f} s)\x1b[K")
            self._stream.flush()

    def close(self) -> None:
        if self._live:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def as_text(experiment: Experiment, width: int) -> list[str]:
    lines = [
        "",
        f"{experiment.name} ({experiment.published_as}): {experiment.title}",
        f"  requests: {experiment.source}",
        *(f"  assumed: {assumption}" for assumption in experiment.assumed),
    ]
    values = [
        [value.what, _published(value), _number(value.ours, value.digits), value.unit, value.why]
        for value in experiment.values
    ]
    return [
        *(part for line in lines for part in wrapped(line, width, 2)),
        *Table(("", "published", "ours", "", "why"), values, left=(0, 3, 4)).lines(width, "  "),
        "",
        *table(experiment.header, experiment.rows).lines(width, "  "),
    ]


def as_markdown(experiment: Experiment) -> list[str]:
    lines = [
        "",
        f"### {experiment.title}",
        "",
        f"`{experiment.name}`; published as {experiment.published_as}. Requests: {experiment.source}.",
    ]
    lines += ["", *(f"- {assumption}" for assumption in experiment.assumed)]
    lines += ["", "| what | published | ours | | why |", "| --- | ---: | ---: | --- | --- |"]
    for value in experiment.values:
        lines.append(
            f"| {value.what} | {_published(value)} | {_number(value.ours, value.digits)} | {value.unit} | {value.why} |"
        )
    lines += ["", f"| {' | '.join(experiment.header)} |".replace("_", " ")]
    words = [all(isinstance(row[at], str) for row in experiment.rows) for at in range(len(experiment.header))]
    lines.append(f"| {' | '.join('---' if is_words else '---:' for is_words in words)} |")
    lines += [f"| {' | '.join(_cell(value) for value in row)} |" for row in experiment.rows]
    return lines


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    words = [at for at in range(len(header)) if all(isinstance(row[at], str) for row in rows)]
    return Table([str(name) for name in header], [[_cell(value) for value in row] for row in rows], left=words)


def _published(value: Value) -> str:
    if value.published is None:
        return "-"
    return value.published if isinstance(value.published, str) else _number(value.published, value.digits)


def _number(value: float, digits: int) -> str:
    if not math.isfinite(value):
        return "no end" if value > 0 else "-"
    return f"{value:,.{digits}f}"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        if not math.isfinite(value):
            return "-"
        return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _write(results: Sequence[Experiment], folder: Path, stream: TextIO) -> None:
    for result in results:
        for path in write_mooncake_csv(result, folder):
            print(path, file=stream)
    try:
        for result in results:
            print(save(draw(result), folder / f"mooncake-{result.name}.png", PRINT_DPI), file=stream)
    except MissingExtra as error:
        print(f"skymemory: no PNG: {error}", file=sys.stderr)
