"""``skymemory reproduce mooncake``: the paper's experiments in our simulator, its figures beside ours."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from skymemory.errors import InvalidInput, MissingExtra
from skymemory.reproduce.mooncake.base import Experiment, Setting, Told
from skymemory.reproduce.mooncake.experiments import EXPERIMENTS, chosen
from skymemory.reproduce.mooncake.figures import write_mooncake_csv, write_mooncake_figure
from skymemory.sim.workload import Source


def run_mooncake(args: argparse.Namespace) -> int:
    if args.trace is not None and not args.trace.is_file():
        raise InvalidInput(
            f"--trace {args.trace}: there is no such file; without it a seeded generator takes its place"
        )
    names = chosen(args.fig or [])
    source = Source(args.trace, args.seed, args.quick)
    if args.trace is None:
        print(
            "skymemory: no trace is named (--trace FILE): requests come from the seeded generator, which has the"
            " statistics of Mooncake's conversation trace, not its requests",
            file=sys.stderr,
        )
    told: list[Experiment] = []
    for name in names:
        progress = Progress(sys.stderr, name)
        setting = Setting(source, args.way, args.jobs, progress.show)
        try:
            told.append(EXPERIMENTS[name](setting))
        finally:
            progress.close()
        if not args.json:
            for line in (as_markdown if args.markdown else as_text)(told[-1]):
                print(line)
            sys.stdout.flush()
    if args.json:
        print(json.dumps([one.as_json() for one in told], indent=1, ensure_ascii=False))
    if args.out is not None:
        _write(told, args.out, sys.stderr if args.json else sys.stdout)
    return 0


class Progress:
    """One line, drawn over itself, on a terminal; nothing anywhere else."""

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


def as_text(told: Experiment) -> list[str]:
    """Published, ours, and why they differ; then all numbers."""
    lines = ["", f"{told.name} ({told.published_as}): {told.title}", f"  requests: {told.source}"]
    lines += [f"  assumed: {one}" for one in told.assumed]
    width = max(len(one.what) for one in told.told)
    lines.append(f"  {'':<{width}}  {'published':>22}  {'ours':>10}")
    for one in told.told:
        why = f"  ({one.why})" if one.why else ""
        unit = f" {one.unit}" if one.unit else ""
        lines.append(f"  {one.what:<{width}}  {_published(one):>22}  {_number(one.ours, one.digits):>10}{unit}{why}")
    return [*lines, "", *(f"  {line}" for line in table(told.header, told.rows))]


def as_markdown(told: Experiment) -> list[str]:
    """The same as a section of a page: how docs/reproduce/mooncake.md is written."""
    lines = ["", f"### {told.title}", "", f"`{told.name}`; published as {told.published_as}. Requests: {told.source}."]
    lines += ["", *(f"- {one}" for one in told.assumed)]
    lines += ["", "| what | published | ours | | why |", "| --- | ---: | ---: | --- | --- |"]
    for one in told.told:
        lines.append(f"| {one.what} | {_published(one)} | {_number(one.ours, one.digits)} | {one.unit} | {one.why} |")
    lines += ["", f"| {' | '.join(told.header)} |".replace("_", " ")]
    words = [all(isinstance(row[at], str) for row in told.rows) for at in range(len(told.header))]
    lines.append(f"| {' | '.join('---' if left else '---:' for left in words)} |")
    lines += [f"| {' | '.join(_cell(value) for value in row)} |" for row in told.rows]
    return lines


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    cells = [[str(name) for name in header], *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(header))]
    words = [all(isinstance(row[at], str) for row in rows) for at in range(len(header))]
    return [
        "  ".join(
            f"{cell:<{width}}" if left else f"{cell:>{width}}"
            for cell, width, left in zip(row, widths, words, strict=True)
        ).rstrip()
        for row in cells
    ]


def _published(one: Told) -> str:
    if one.published is None:
        return "-"
    return one.published if isinstance(one.published, str) else _number(one.published, one.digits)


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


def _write(told: Sequence[Experiment], folder: Path, stream: TextIO) -> None:
    for one in told:
        print(write_mooncake_csv(one, folder), file=stream)
    try:
        for one in told:
            path = write_mooncake_figure(one, folder)
            if path is not None:
                print(path, file=stream)
    except MissingExtra as error:
        print(f"skymemory: no PNG: {error}", file=sys.stderr)
