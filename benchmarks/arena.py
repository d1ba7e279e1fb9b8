"""Every strategy against the originals as they are published: `python benchmarks/arena.py [--json FILE] [--quick]`.

The picker and the strategies of `skymemory route`, in front of eight simulated servers (`sim.routing`: LLaMA-70B on
8×A800 at half its speed, one prefill at a time, reports every 0.2 s, cache events 0.05 s late). A strategy learns as
its original does, when it routes or from answers or events; ours learns servers' speeds from what it sees, and each of
its estimates errs by 10 % besides. Part of the answers may come whole: then no first byte shows when a prefill ended.

Requests: of a published trace (`--traces`; by default Mooncake's conversation trace from `../shared/data`), whose last
30 % are measured, and of three families of the seeded generator with seeds **newly drawn at each run**: they are in the
JSON, and `--seeds A,B,…` plays them again. Every original plays twice: with its authors' settings, and with the best of
a sweep of one of them. `--tune` runs those sweeps on the tuning part: the first 70 % of the trace, and the generator's
seeds 1 to 3, which are never drawn. A cell's figure is the mean over seeds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from _arena import DURATIONS_S, GIVEN, ORIGINALS, OURS, PREDICTED, TRACE_TUNED, Player, players, requests_of, scorer_of
from _arena import swept as swept_player
from _bench import print_table, versions, write_json
from skymemory_lab.sim.routing import RoutingSetup, measured, simulate
from skymemory_lab.sim.trace import at_rate, split_at

TRACE = Path(__file__).parents[2] / "shared/data/traces/conversation_trace.jsonl"
SERVERS = 8
RATES, BLOCKS, WHOLE = (0.75, 1.0, 1.35, 2.0), (2_000, 5_000, 10_000), (0.0, 0.5, 1.0)
SEEDS_OF_TRACES, SEEDS_OF_PREDICTED = 2, 1
"""A trace's seeds only move arrivals by seconds; refitting trees every 10 s takes most of the time."""
TUNED_SEEDS = (1, 2, 3)
WARM = 0.2
"""Of the tuning part of a trace, what fills the caches."""
SATURATED = 5.0
"""So many times its figure at the lowest rate, and the best strategy's queues only grow."""


@dataclass(frozen=True, slots=True)
class Cell:
    family: str
    rate: float
    blocks: int
    whole: float


@dataclass(frozen=True, slots=True)
class Run:
    cell: Cell
    player: Player
    seed: int
    trace: Path | None
    tuning: bool


def cells_of(family: str) -> Iterator[Cell]:
    """All rates and parts of whole answers with 5,000 blocks a server, and other caches at two rates."""
    for whole, rate in itertools.product(WHOLE, RATES):
        yield Cell(family, rate, 5_000, whole)
    for blocks, rate in itertools.product((2_000, 10_000), RATES[1:3]):
        yield Cell(family, rate, blocks, 0.0)


def run(one: Run) -> dict[str, float]:
    cell, seed = one.cell, one.seed
    requests, prompts = requests_of(cell.family, seed, one.trace)
    requests = at_rate(requests, cell.rate)
    from_s = split_at(requests, TRACE_TUNED if one.trace is not None else 0.5)
    if one.tuning and one.trace is not None:
        early = sum(request.at_s < from_s for request in requests)
        from_s = split_at(requests, WARM)
        requests, prompts = requests[:early], prompts[:early]
    setup = RoutingSetup(servers=SERVERS, cache_blocks=cell.blocks, scrape_s=0.2, whole=cell.whole, seed=seed)
    scorer, events = scorer_of(one.player, setup)
    outcomes = simulate(requests, scorer, setup, events, prompts)
    return measured(outcomes, SERVERS, from_s).as_json()


def play(runs: Sequence[Run], jobs: int, kept: Path | None = None) -> list[dict[str, float]]:
    """What each gave; those of one seed are run together, for its requests are made once in a process.

    ``kept``: a file with the results of runs, which are not run again, and to which each new one is added.
    """
    found: dict[str, dict[str, float]] = {}
    if kept is not None and kept.is_file():
        found = dict(map(json.loads, kept.read_text("utf-8").splitlines()))
    left = [one for one in runs if _name(one) not in found]
    order = {seed: at for at, seed in enumerate(dict.fromkeys(one.seed for one in runs))}
    left.sort(key=lambda one: (order[one.seed], str(one.trace), one.cell.family))
    with ProcessPoolExecutor(jobs) as pool, open(kept or os.devnull, "a", encoding="utf-8") as file:
        for done, (one, result) in enumerate(zip(left, pool.map(run, left, chunksize=8), strict=True), 1):
            found[_name(one)] = result
            print(json.dumps([_name(one), result]), file=file, flush=True)
            if sys.stderr.isatty() or not done % 500:
                print(f"\r{done:,} of {len(left):,} runs", end="" if sys.stderr.isatty() else "\n", file=sys.stderr)
    return [found[_name(one)] for one in runs]


def _name(one: Run) -> str:
    cell = one.cell
    trace = one.trace.name if one.trace is not None else ""
    return f"{trace} {cell.family} {cell.rate} {cell.blocks} {cell.whole} {one.player.name} {one.seed} {one.tuning}"


def rows_of(runs: Sequence[Run], results: Sequence[dict[str, float]]) -> list[dict[str, Any]]:
    """One row for each cell and player, with what each seed gave."""
    joined: dict[tuple[Cell, str], dict[int, dict[str, float]]] = {}
    for one, result in zip(runs, results, strict=True):
        joined.setdefault((one.cell, one.player.name), {})[one.seed] = result
    rows = []
    for (cell, player), by_seed in joined.items():
        row: dict[str, Any] = {
            "family": cell.family,
            "rate": cell.rate,
            "blocks": cell.blocks,
            "whole": cell.whole,
            "player": player,
            "seeds": list(by_seed),
        }
        for name in ("mean_s", "p50_s", "p90_s", "p99_s", "token_hits", "worst_share"):
            row[name] = round(statistics.mean(one[name] for one in by_seed.values()), 4)
        row["mean_s_of_seeds"] = [round(one["mean_s"], 4) for one in by_seed.values()]
        row["p99_s_of_seeds"] = [round(one["p99_s"], 4) for one in by_seed.values()]
        rows.append(row)
    return rows


def interval(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[float, float, float]:
    """Ours over theirs, seed by seed: the geometric mean of the ratios and its 95 % interval (Student's t)."""
    of_theirs = dict(zip(theirs["seeds"], theirs["mean_s_of_seeds"], strict=True))
    logs = [
        math.log(mean_s / of_theirs[seed])
        for seed, mean_s in zip(ours["seeds"], ours["mean_s_of_seeds"], strict=True)
        if seed in of_theirs
    ]
    middle = statistics.mean(logs)
    if len(logs) < 2:
        return (math.exp(middle),) * 3  # one seed: no interval
    off = _t975(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(middle), math.exp(middle - off), math.exp(middle + off)


def _t975(freedom: int) -> float:
    known = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
    return known[min(freedom, len(known)) - 1]


def verdicts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cell by cell: the best rival in the mean, how ours compares, and whether it is past saturation."""
    cells: dict[Cell, dict[str, dict[str, Any]]] = {}
    for row in rows:
        cell = Cell(row["family"], row["rate"], row["blocks"], row["whole"])
        cells.setdefault(cell, {})[row["player"]] = row
    found = []
    for cell, there in cells.items():
        ours = there[OURS]
        rivals = [row for name, row in there.items() if name not in (OURS, GIVEN)]
        # a rival that ran on fewer seeds is compared on these
        best = max(rivals, key=lambda rival: interval(ours, rival)[0])
        ratio, low, high = interval(ours, best)
        p99 = max(_p99_ratio(ours, rival) for rival in rivals)
        slow = cells.get(replace(cell, rate=min(RATES)), cells.get(replace(cell, rate=min(RATES), blocks=5_000)))
        saturated = slow is not None and ours["mean_s"] / max(1.0, ratio) > SATURATED * slow[OURS]["mean_s"]
        row = {
            "family": cell.family,
            "rate": cell.rate,
            "blocks": cell.blocks,
            "whole": cell.whole,
            "ours_s": ours["mean_s"],
            "best": best["player"],
            "ratio": round(ratio, 4),
            "low": round(low, 4),
            "high": round(high, 4),
            "p99_ratio": round(p99, 4),
            "saturated": saturated,
        }
        if GIVEN in there:
            row["over_given"] = round(interval(ours, there[GIVEN])[0], 4)
        found.append(row)
    return found


def _p99_ratio(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    of_theirs = dict(zip(theirs["seeds"], theirs["p99_s_of_seeds"], strict=True))
    pairs = zip(ours["seeds"], ours["p99_s_of_seeds"], strict=True)
    return statistics.geometric_mean(p99_s / of_theirs[seed] for seed, p99_s in pairs if seed in of_theirs)


def summary(found: Sequence[dict[str, Any]]) -> list[str]:
    below = [one for one in found if not one["saturated"]]
    won = sum(one["ratio"] <= 1 for one in below)
    whole = [one["over_given"] for one in found if one["whole"] == 1.0 and "over_given" in one]
    return [
        f"best mean TTFT in {won} of {len(below)} cells below saturation, and in "
        f"{sum(one['ratio'] <= 1 for one in found)} of all {len(found)}",
        f"worst cell: {max(one['ratio'] for one in below):.3f} of the best rival below saturation, "
        f"{max(one['ratio'] for one in found):.3f} in all",
        f"worst 99th percentile: {max(one['p99_ratio'] for one in below):.3f} of the best rival's below saturation, "
        f"{max(one['p99_ratio'] for one in found):.3f} in all",
        *([f"all answers whole: at most {max(whole):.3f} of its own figure with given speeds"] if whole else []),
    ]


def tables(rows: Sequence[dict[str, Any]], family: str) -> dict[str, list[list[str]]]:
    """Of a family: mean TTFT by player, once for streams and once for whole answers; first row: header."""
    of = [row for row in rows if row["family"] == family]
    found = {}
    for name, chosen in (("streams", [0.0]), ("whole", [0.5, 1.0])):
        cells = sorted({(row["whole"], row["blocks"], row["rate"]) for row in of if row["whole"] in chosen})
        by = {(row["whole"], row["blocks"], row["rate"], row["player"]): row["mean_s"] for row in of}
        label = (lambda c: f"{c[1]:,}, {c[2]:g}×") if name == "streams" else (lambda c: f"{c[0]:.0%}, {c[2]:g}×")
        names = list(dict.fromkeys(row["player"] for row in of))
        body = [
            [f"**{player}**" if player == OURS else player]
            + [_figure(by[*cell, player]) if (*cell, player) in by else "" for cell in cells]
            for player in names
        ]
        found[name] = [["strategy", *map(label, cells)], *body]
    return found


def _figure(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds < 1 else f"{seconds:.2f}" if seconds < 100 else f"{seconds:.0f}"


def verdict_table(found: Sequence[dict[str, Any]]) -> list[list[str]]:
    header = ["family", "blocks", "rate", "whole", "ours, s", "best rival", "ours / it", "95 %", "p99 / best", ""]
    return [header] + [
        [
            one["family"],
            f"{one['blocks']:,}",
            f"{one['rate']:g}×",
            f"{one['whole']:.0%}",
            _figure(one["ours_s"]),
            one["best"],
            f"{one['ratio']:.3f}",
            f"{one['low']:.2f} to {one['high']:.2f}" if one["low"] < one["high"] else "one seed",
            f"{one['p99_ratio']:.2f}",
            ("saturated " if one["saturated"] else "") + ("**lost**" if one["ratio"] > 1 else ""),
        ]
        for one in found
    ]


def originals_table() -> list[list[str]]:
    return [["strategy", "of", "rule read in", "its one setting, swept: the best"]] + [
        [
            one.strategy,
            one.of,
            one.source or "its name says it",
            f"{one.setting}, {', '.join(f'{value:g}' for value in one.values)}: "
            + (f"{one.swept:g}" if one.swept is not None else "its authors'")
            if one.values
            else "",
        ]
        for one in ORIGINALS
    ]


def results(rows: Sequence[dict[str, Any]], seeds: Sequence[int]) -> dict[str, Any]:
    """What the JSON holds: the figures, what they say cell by cell, and the tables of the page."""
    found = verdicts(rows)
    shown = {"originals": originals_table(), "verdicts": verdict_table(found)}
    for family in dict.fromkeys(row["family"] for row in rows):
        shown |= {f"{family} {name}": table for name, table in tables(rows, family).items()}
    kept = [{name: value for name, value in row.items() if name != "p99_s_of_seeds"} for row in rows]
    return {
        "benchmark": "arena",
        "seeds": list(seeds),
        "versions": versions(),
        "summary": summary(found),
        "tables": shown,
        "verdicts": found,
        "rows": [row | {"seeds": len(row["seeds"])} for row in kept],
    }


def written(made: dict[str, Any]) -> str:
    """As JSON, whose lists of lists and of tables have a line for each member."""

    def lines(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ",\n".join(f"{json.dumps(name)}: {lines(one)}" for name, one in value.items()) + "}"
        return "[\n" + ",\n".join(map(json.dumps, value)) + "]" if isinstance(value, list) else json.dumps(value)

    return lines(made) + "\n"


def tune(families: dict[str, Path | None], jobs: int, json_path: Path | None, only: frozenset[str]) -> None:
    """Each setting's values on the tuning part, and the published ones: geometric mean over cells, of the best."""
    cells = [
        Cell(family, rate, blocks, whole)
        for family in families
        for rate, blocks, whole in ((1.0, 5_000, 0.0), (1.35, 5_000, 0.5), (1.35, 2_000, 0.0))
    ]
    runs = []
    tuned = [one for one in ORIGINALS if not only or one.strategy in only]
    for one in tuned:
        tried = [Player(one.strategy, one.strategy, tuple(one.published.items()))]
        tried += [swept_player(one, value) for value in one.values]
        for cell, player in itertools.product(cells, tried if one.values else ()):
            trace = families[cell.family]
            seeds = TUNED_SEEDS[:1] if trace is not None or one.strategy == PREDICTED else TUNED_SEEDS
            runs += [Run(cell, player, seed, trace, True) for seed in seeds]
    rows = rows_of(runs, play(runs, jobs))
    for one in tuned:
        of: dict[str, list[float]] = {}
        for row in rows:
            if row["player"].split(",")[0] == one.strategy:
                of.setdefault(row["player"], []).append(row["mean_s"])
        scored = {name: statistics.geometric_mean(means) for name, means in of.items()}
        if scored:
            print_table(one.strategy, ["settings", "s"], [[name, f"{s:.4f}"] for name, s in sorted(scored.items())])
    write_json(json_path, "arena tuning", TUNED_SEEDS[0], rows)


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Ours over each rival by rate, one picture a family: below 1 ours is quicker."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    families = list(dict.fromkeys(row["family"] for row in rows))
    figure, axes = pyplot.subplots(1, len(families), figsize=(4.2 * len(families), 3.8), squeeze=False, sharey=True)
    for place, family in zip(axes[0], families, strict=True):
        of = [row for row in rows if row["family"] == family and row["blocks"] == 5_000 and row["whole"] == 0]
        ours = {row["rate"]: row["mean_s"] for row in of if row["player"] == OURS}
        for player in dict.fromkeys(row["player"] for row in of):
            theirs = sorted((row["rate"], row["mean_s"]) for row in of if row["player"] == player)
            if player not in (OURS, GIVEN) and "," not in player:
                ratios = [seconds / ours[rate] for rate, seconds in theirs]
                place.plot([f"{rate:g}×" for rate, _ in theirs], ratios, marker="o", ms=3, lw=1.2, label=player)
        place.axhline(1.0, color="black", lw=2, label=f"{OURS} (default)")
        place.set_yscale("log")
        place.set_title(family, fontsize=9)
        place.grid(alpha=0.3, which="both")
    axes[0][0].set_ylabel("mean TTFT over the default's")
    axes[0][-1].legend(fontsize=6.5)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"written: {path}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, nargs="*", default=[TRACE], metavar="FILE")
    parser.add_argument("--families", default=",".join(DURATIONS_S), metavar="A,B", help="of the generator")
    parser.add_argument("--strategies", metavar="A,B", help="these alone, and ours")
    parser.add_argument("--seeds", metavar="A,B", help="instead of ten new ones")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--quick", action="store_true", help="two seeds, one cell of each family, no trace")
    parser.add_argument("--tune", action="store_true", help="the sweeps on the tuning part, instead")
    parser.add_argument("--kept", type=Path, metavar="FILE", help="results of runs, kept for going on after a break")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture (needs matplotlib)")
    options = parser.parse_args()
    families: dict[str, Path | None] = {}
    for trace in options.traces if not options.quick else ():
        if trace.is_file():
            families[trace.stem.removesuffix("_trace") + " (trace)"] = trace
        else:
            print(f"skipped: there is no trace at {trace} (name others with --traces)", file=sys.stderr)
    families |= dict.fromkeys(filter(None, options.families.split(",")), None)
    if options.tune:
        tune(families, options.jobs, options.json, frozenset(filter(None, (options.strategies or "").split(","))))
        return
    playing = players()
    if options.strategies:
        playing = [one for one in playing if one.strategy in {OURS, *options.strategies.split(",")}]
    try:
        import xgboost  # noqa: F401
    except ImportError:
        playing = [one for one in playing if one.strategy != PREDICTED]
        print(f"skipped: {PREDICTED}, for which there must be xgboost (extra 'arena')", file=sys.stderr)
    if options.seeds:
        seeds = [int(seed) for seed in options.seeds.split(",")]
    else:
        seeds = random.SystemRandom().sample(range(1_000, 1_000_000), 2 if options.quick else 10)
        print(f"seeds drawn: {','.join(map(str, seeds))}", file=sys.stderr)
    runs = []
    for family, trace in families.items():
        cells = [Cell(family, 1.0, 5_000, 0.0)] if options.quick else list(cells_of(family))
        for cell, player in itertools.product(cells, playing):
            most = SEEDS_OF_PREDICTED if player.strategy == PREDICTED else len(seeds)
            most = min(most, SEEDS_OF_TRACES) if trace is not None else most
            runs += [Run(cell, player, seed, trace, False) for seed in seeds[:most]]
    rows = rows_of(runs, play(runs, options.jobs, options.kept))
    for family in families:
        for name, table in tables(rows, family).items():
            if len(table[0]) > 1:
                print_table(f"{family}: mean TTFT, s, {name}", table[0], table[1:])
    made = results(rows, seeds)
    header, *body = made["tables"]["verdicts"]
    print_table("Cell by cell", header, body)
    print("\n" + "\n".join(made["summary"]))
    if options.json is not None:
        options.json.write_text(written(made), "utf-8")
        print(f"written: {options.json}", file=sys.stderr)
    if options.plot is not None:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
