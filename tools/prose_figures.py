"""Measured figures in prose, from the JSON of the runs that measured them: ``python -m tools.prose_figures``.

A page marks a figure by ``<!-- figure: NAME -->…<!-- end -->``; this command writes what stands between.

``--check`` (part of ``make check``) prints, and exits with 1 for:

- a marked figure, a table or a demo's output that differs from its run;
- a quantity in README, ARCHITECTURE, docs/benchmarks.md or a guide that is neither marked nor listed in
  ``stated_quantities.toml``, which holds what was not measured: settings, limits, versions, definitions, and results
  of others;
- any other number that differs from the one accepted in ``prose_numbers.json``.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

from skymemory.testbed.carrying import most_time_scale
from skymemory.testbed.plan import Faults, make_plan
from tools import admission_tables, arena_tables, benchmark_tables, demo_outputs, prose_numbers
from tools.benchmark_tables import FOLDER, Row, row_of, rows_of
from tools.goal_figures import GOALS, extent
from tools.prose_numbers import GENERATED, MARKED

ROOT = Path(__file__).parents[1]
PAGES = sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("docs/**/*.md"))
PROSE = [
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    *sorted(ROOT.glob("docs/guide/*.md")),
    ROOT / "docs/benchmarks.md",
]
"""Pages in which every quantity has a source."""
STATED = Path(__file__).with_name("stated_quantities.toml")

_CODE = re.compile(r"^( *)(```+).*?^\1\2 *$|`([^`\n]+)`|\]\([^)]*\)", re.DOTALL | re.MULTILINE)
_NUMBER = r"(?<![\w.,/#-])\d[\d,]*(?:\.\d+)?"
_UNIT = r"ns|µs|us|ms|s|seconds?|min|minutes?|hours?|[KMGT]i?B(?:/s)?|kB|%|×|times|requests/s"
_MEASURED = rf"{_NUMBER}(?:[ -]?(?:{_UNIT})| (?:a|per) (?:second|minute|hour))(?!\w)|× {_NUMBER}"
_QUANTITY = re.compile(rf"{_MEASURED}|(?<![\w.,/#-])\d+\.\d+(?![\w.]*\w)")


# --- what the runs say ---


def _sizes(verb: str, path: str, at_most_bytes: int) -> list[float]:
    """Rates beside Redis's of one path, at every number of clients."""
    return [
        row["x"]
        for row in rows_of("data_path")
        if row["section"] == "sizes"
        and (row["verb"], row["path"]) == (verb, path)
        and row["size_bytes"] <= at_most_bytes
        and "x" in row
    ]


def _machine(name: str) -> str:
    """Processor and cores of the run ``name``."""
    versions = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))["versions"]
    return f"{versions['cores']} " + (f"cores of {of}" if (of := versions.get("processor")) else "CPU cores")


def _looking() -> str:
    row = row_of("guard")
    look, step, warm, after = (f"{row[key]:.0f} µs" for key in ("look_us", "step_look_us", "step_again_us", "step_us"))
    return (
        f"checking {row['modules']} modules takes {look} at each load, first call and store, {step} at a decoding "
        f"step; in all a step waits {warm} behind another check, {after} behind the model's pass, and the first call "
        f"of a prompt {row['first_call_us'] / 1e3:.1f} ms, {_machine('guard')}"
    )


def _whole_shell() -> str:
    row = row_of("whole_shell")
    return (
        f"{row['satellites']:,} satellites, {row['operations']:,} operations ({row['gets_hit']:,} gets hit) in "
        f"{row['seconds']:.0f} s, {row['events_per_s']:,.0f} events a second."
    )


def _below_saturation(key: str) -> list[float]:
    verdicts = json.loads((FOLDER / "arena.json").read_text("utf-8"))["verdicts"]
    return [cell["mean_s"][key] for cell in verdicts if not cell["saturated"]]


def _cold_loads(chunk_tokens: int, *, random: bool) -> list[Row]:
    """First prompts over random links, or over all other links."""
    return [
        row
        for row in rows_of("loading")
        if (row.get("state"), row.get("chunk_tokens")) == ("cold", chunk_tokens) and (row["link"] == "random") == random
    ]


def _cells_above_goal(rows: list[Row]) -> str:
    return f"{sum(row['above_goal'] for row in rows)} of {sum(row['cells'] for row in rows)} cells"


def _worst_above_hindsight(rows: list[Row]) -> str:
    return _percent(max(row["worst"] for row in rows) - 1)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _block_mb(codec: str) -> str:
    """Megabytes of a block of TinyLlama's shape, 128 tokens."""
    return f"{row_of('table_3', codec=codec)['block_bytes'] / 1e6:.2f} MB"


def _cachegen_blocks_mb() -> str:
    raw_mb = row_of("table_3", codec="raw")["block_bytes"] / 1e6
    levels = ("cachegen-finest", "cachegen-fine", "cachegen", "cachegen-coarse")
    bits = [row_of("codecs", source="TinyLlama's shape, 3 layers", codec=level)["bits"] for level in levels]
    return ", ".join(f"{raw_mb * each / 16:.2f}" for each in bits)


def _flight_memory(*, keys: bool) -> str:
    rows = [row for row in rows_of("flight") if row["section"] == "start" and row["keys"] == keys]
    return f"{max(row['resident_bytes'] for row in rows) / 1e6:.0f} MB"


def _packet_costs_us() -> list[float]:
    return [row["us"] for row in rows_of("security") if "packet" in row]


def _cluster_access_p99(gateway: str) -> list[float]:
    return [row["p99_ms"] for row in rows_of("access") if row["gateway"] == gateway and row["servers"] == 10]


def _added_us(row: Row) -> str:
    return f"{(row['ours_s'] - row['peer_s']) * 1e6:.0f} µs"


def _goodput_over_best_fixed() -> list[float]:
    rows = rows_of("elastic_engines")
    found = []
    for seed in sorted({row["seed"] for row in rows}):
        of_seed = [row for row in rows if row["seed"] == seed]
        best = max((row["goodput_per_s"] for row in of_seed if not row["elastic"]), default=0.0)
        found += [row["goodput_per_s"] / best for row in of_seed if row["elastic"] and best]
    return found


def _ttft_shares() -> str:
    """Of 512, 2,048 and 4,096 tokens."""
    off, real = (
        ", ".join(f"{100 * row['share']:.1f}" for row in rows_of("ttft") if row["delay"] == delay)
        for delay in ("off", "real")
    )
    return f"{off} %; real delays {real} %"


def _of_file(delay: str) -> str:
    """Ratios to a safetensors file at 512, 2,048 and 4,096 tokens; the goal is 1.05."""
    ratios = [row["of_file"] for row in rows_of("ttft") if row["delay"] == delay]
    return ", ".join(f"{ratio:.2f}" + ("" if round(ratio, 2) <= 1.05 else ": **missed**") for ratio in ratios)


def _cake() -> str:
    rows = rows_of("cake")
    best, hindsight = (max(row[key] for row in rows) for key in ("of_best", "of_hindsight"))
    met = sum(row["of_hindsight"] <= 1.08 for row in rows)
    return f"{best:.3f} ×; {met} of {len(rows)} cells, worst {hindsight:.3f}: **{len(rows) - met} missed**"


def _pick() -> str:
    (default,) = [row for row in rows_of("picking") if row.get("strategy") == "least-ttft"]
    return f"{default['pick']['p50_us']:.0f} and {default['pick']['p99_us']:.0f} µs"


def _proxy() -> str:
    ours = {
        row["connections"]: row for row in rows_of("proxy") if "default" in row["way"] and row["body_bytes"] == 8192
    }
    return " and ".join(f"{ours[connections]['per_s_over_peer']:.2f}" for connections in (8, 64))


def _floods() -> str:
    rows = rows_of("picker_floods")
    late, more = [row["p99_ms"] for row in rows], max(row["more_mib"] for row in rows)
    return f"{len(rows)} floods: {min(late):.0f} to {max(late):.0f} ms, ≤ {more:.0f} MiB"


def _who_pays() -> str:
    """Of the causes under which others can be answered at all."""
    rows = [row for row in rows_of("hostile") if row["who_pays"] and not row["name"].startswith("every engine")]
    met = [row for row in rows if row["share"] >= 0.99 and row["p99_s"] < 1 and row["after_share"] >= 0.99]
    missed = len(rows) - len(met)
    least, late = min(row["share"] for row in met), max(row["p99_s"] for row in met)
    words = f"{len(met)} of {len(rows)} causes: ≥ {int(least * 1000) / 10:.1f} %, p99 ≤ {late * 1e3:.0f} ms"
    return f"{words}: **{missed} missed**" if missed else words


def _led() -> str:
    ratios = _below_saturation("ratio")
    return f"{sum(ratio <= 1.05 for ratio in ratios)} of {len(ratios)} cells"


def _mutants() -> str:
    run = json.loads((FOLDER / "mutants.json").read_text("utf-8"))
    return f"{run['killed']} of {run['faults']}"


def _codecs() -> str:
    row = row_of("codecs", source="quality", codec="cachegen")
    times, higher, error = (row[key] for key in ("times_smaller_than_quanto8", "higher_percent", "error_percent"))
    return f"{times:.2f} × at {higher:.2f} ± {error:.2f} %"


def _time_scale(faults: Faults) -> str:
    """Largest that two cores carry with keys and delays, by the costs of moves (docs/benchmarks/sky.md); rounded down
    to two digits.
    """
    plan = make_plan(preset="testbed-19x5", auth="on", keys_file="keys", faults=faults)
    most = most_time_scale(plan, processor_s_per_s=2)
    step = 10 ** (math.floor(math.log10(most)) - 1)
    return f"× {math.floor(most / step) * step}"


def _of_answers(verb: str) -> float:
    """Rate with MACs on writes and answers beside that with MACs on commands alone."""
    commands, answers = (row_of("security", way=f"MAC on commands{more}") for more in ("", " and answers"))
    return float(min(1.0, answers[f"{verb}_x"] / commands[f"{verb}_x"]))


FIGURES: dict[str, Callable[[], str]] = {
    "ttft, shares": _ttft_shares,
    "cake": _cake,
    "pick": _pick,
    "proxy": _proxy,
    "through Envoy": lambda: f"{rows_of('envoy_picker')[1]['p50_ms']:.2f} ms",
    "floods": _floods,
    "who pays": _who_pays,
    "arena, led": _led,
    "mutants": _mutants,
    "codecs": _codecs,
    "ttft with": lambda: f"{row_of('ttft', delay='real', tokens=4096)['with_s']:.2f} s",
    "ttft without": lambda: f"{row_of('ttft', delay='real', tokens=4096)['without_s']:.1f} s",
    "ttft machine": lambda: _machine("ttft"),
    "ttft dtype": lambda: str(row_of("ttft", delay="real", tokens=4096)["dtype"]),
    "ttft with, second": lambda: f"{row_of('ttft_xeon', delay='real', tokens=4096)['with_s']:.2f} s",
    "ttft without, second": lambda: f"{row_of('ttft_xeon', delay='real', tokens=4096)['without_s']:.1f} s",
    "ttft machine, second": lambda: _machine("ttft_xeon"),
    "ttft, of a file": lambda: _of_file("off"),
    "ttft, of a file, real delays": lambda: extent(
        [row["of_file"] for row in rows_of("ttft") if row["delay"] == "real"]
    ),
    "arena, of its best rival": lambda: extent(_below_saturation("ratio")),
    "writes below 1 MB": lambda: extent(_sizes("write", "by size", 999_999)),
    "daemon, small values": lambda: extent(
        [row["ratio"] for row in rows_of("store_daemon") if row["size_bytes"] <= 65_536]
    ),
    "start": lambda: f"{row_of('footprint')['start_s']:.2f} s",
    "start, memory": lambda: f"{row_of('footprint')['memory_MB']:.0f} MB",
    "MACs and seal": lambda: _percent(1 - row_of("security", way="both")["read_x"]),
    "MACs, writes": lambda: extent(
        [row_of("security", way=way)["write_x"] for way in ("MAC on commands", "both")], digits=2
    ),
    "MACs of payloads and answers": lambda: " and ".join(_percent(1 - _of_answers(verb)) for verb in ("read", "write")),
    "busy computer": lambda: " and ".join(
        f"{row_of('data_path_busy', programs=20, pause_s=0.02, verb=verb, path='by size')['x']:.1f}"
        for verb in ("read", "write")
    ),
    "flood packet": lambda: extent(_packet_costs_us(), digits=1) + " µs",
    "p99 climbing": lambda: f"{max(_cluster_access_p99('climbing')):.0f} ms",
    "p99 nearest": lambda: extent([ms / 1000 for ms in _cluster_access_p99("nearest")], digits=1) + " s",
    "elastic engines": lambda: extent(_goodput_over_best_fixed(), digits=1),
    "whole shell": _whole_shell,
    "looking": _looking,
    "time scale": lambda: _time_scale(Faults()),
    "time scale with faults": lambda: _time_scale(Faults(loss=0.02)),
    "table 3, handed over": lambda: f"{demo_outputs.outputs()['table-3']['counts'][demo_outputs.HANDED_OVER]} chunks",
    "goal: elastic engines": lambda: extent((100 * times for times in _goodput_over_best_fixed()), 0) + " %",
    "migration at 960": lambda: _percent(row_of("motion", kind="cost", scale=960)["cpu_share"]),
    "hierarchy": lambda: _added_us(row_of("tiers", tier="hierarchy", what="over memory")),
    "first prompt, worst": lambda: _worst_above_hindsight(_cold_loads(512, random=False)),
    "first prompt, cells": lambda: _cells_above_goal(_cold_loads(512, random=False)),
    "random links, worst": lambda: _worst_above_hindsight(_cold_loads(128, random=True)),
    "random links, cells": lambda: _cells_above_goal(_cold_loads(128, random=True)),
    "block, raw": lambda: _block_mb("raw"),
    "block, quanto8": lambda: _block_mb("quanto8"),
    "block, hqq8": lambda: _block_mb("hqq8"),
    "block, cachegen": _cachegen_blocks_mb,
    "cachegen rate": lambda: (
        f"{row_of('codecs', source='small trained model', codec='cachegen')['encode_mb_s']:.0f} MB/s"
    ),
    "flight, 1,584": lambda: _flight_memory(keys=False),
    "flight, 1,584 with keys": lambda: _flight_memory(keys=True),
    **GOALS,
}


# --- pages ---


def page(path: Path) -> str:
    """The page as it should be."""
    return MARKED.sub(
        lambda found: f"<!-- figure: {found[1]} -->{FIGURES[found[1]]()}<!-- end -->", path.read_text("utf-8")
    )


def unsourced(text: str, stated: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Line numbers and texts of quantities that are neither marked nor in ``stated``."""

    def blank(found: re.Match[str]) -> str:
        return "\n" * found[0].count("\n")

    for pattern in (GENERATED, MARKED):
        text = pattern.sub(blank, text)
    text = _CODE.sub(lambda found: found[0] if re.fullmatch(_MEASURED, found[3] or "") else blank(found), text)
    for at, line in enumerate(text.splitlines(), 1):
        yield from ((at, found[0]) for found in _QUANTITY.finditer(line) if found[0] not in stated)


def unused(text: str, stated: frozenset[str]) -> list[str]:
    """Entries of ``stated`` that the page no longer has."""
    return sorted(stated - {quantity for _, quantity in unsourced(text, frozenset())})


def stated_in(path: Path) -> frozenset[str]:
    listed: list[str] = tomllib.loads(STATED.read_text("utf-8")).get(path.relative_to(ROOT).as_posix(), [])
    return frozenset(listed)


def mark_faults() -> Iterator[str]:
    marks = set()
    for path in PAGES:
        name, text = path.relative_to(ROOT), path.read_text("utf-8")
        for found in MARKED.finditer(text):
            marks.add(found[1])
            if found[1] not in FIGURES:
                yield f"{name}: no figure is called {found[1]!r}"
            elif (due := FIGURES[found[1]]()) != found[2]:
                yield f"{name}: {found[1]}: says {found[2]}, the run says {due}: run python -m tools.prose_figures"
    yield from (f"no page has the figure {name!r}" for name in FIGURES if name not in marks)


def quantity_faults() -> Iterator[str]:
    for path in PROSE:
        for line, quantity in unsourced(path.read_text("utf-8"), stated_in(path)):
            yield (
                f"{path.relative_to(ROOT)}:{line}: {quantity}: mark it as a figure of a run, or, if it was not "
                f"measured (a setting, a limit, a definition), list it in {STATED.relative_to(ROOT)}"
            )
        for quantity in unused(path.read_text("utf-8"), stated_in(path)):
            yield f"{STATED.relative_to(ROOT)}: {quantity} no longer stands in {path.relative_to(ROOT)}"


def table_faults() -> Iterator[str]:
    """Tables and outputs that are not those of their runs."""
    due = {
        **{path: ("benchmark_tables", benchmark_tables.page(path)) for path in benchmark_tables.PAGES},
        arena_tables.PAGE: ("arena_tables", arena_tables.page()),
        admission_tables.PAGE: ("admission_tables", admission_tables.page()),
    }
    for path, (tool, text) in due.items():
        if path.read_text("utf-8") != text:
            yield f"{path.relative_to(ROOT)}: a table is not that of its run: run python -m tools.{tool}"
    yield from demo_outputs.faults()


def faults() -> Iterator[str]:
    for check in (mark_faults, quantity_faults, table_faults, prose_numbers.faults):
        yield from check()


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        found = list(faults())
        print(*found, sep="\n", end="\n" if found else "")
        sys.exit(1 if found else 0)
    for each in PAGES:
        if (due := page(each)) != each.read_text("utf-8"):
            each.write_text(due, "utf-8")
