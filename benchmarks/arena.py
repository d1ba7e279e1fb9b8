"""Every strategy against the originals as they are published: `python benchmarks/arena.py [--json FILE] [--quick]`.

The picker and the strategies of `skymemory route`, in front of eight simulated servers (`sim.routing`, LLaMA-70B on
8×A800 at half its speed) with three kinds of engines: `fifo` computes a prompt at a time and decodes elsewhere;
`chunk` works in steps of 2,048 tokens with its answers in each, as vLLM; `shared` computes all its prompts at once.
Load reports come each second, cache events 0.05 s late, the number of cached tokens with an answer's end. A strategy
learns as its original does; ours learns servers' speeds from what it sees, and each of its estimates errs by 10 %
besides.

Judged by three means: time to first token, time per token after it, time of whole answers; and by the 99th percentile
of the first. Further cells have answers that come whole, smaller caches, and servers at fault.

Requests: of a published trace (`--traces`; by default Mooncake's conversation trace from `../shared/data`), whose last
30 % are measured, and of the generator's families with seeds **newly drawn at each run**: they are in the JSON, and
`--seeds A,B,…` plays them again. Every original plays twice: with its authors' settings, and with the best of a sweep
of one of them. `--tune` runs those sweeps on the tuning part: the first 70 % of the trace, and the generator's seeds 1
to 3, which are never drawn. Nothing is tuned on the families of `UNTUNED`. A cell's figure is the mean over seeds.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from _arena import (
    DURATIONS_S,
    GIVEN,
    ORIGINALS,
    OURS,
    PREDICTED,
    SMALL_CACHES,
    TRACE_TUNED,
    UNTUNED,
    Player,
    players,
    requests_of,
    scorer_of,
)
from _arena import swept as swept_player
from _bench import print_table, versions, write_json
from skymemory_lab.sim.routing import RoutingSetup, ServerFault, measured, simulate
from skymemory_lab.sim.routing_setup import EngineKind
from skymemory_lab.sim.trace import at_rate, split_at

TRACE = Path(__file__).parents[2] / "shared/data/traces/conversation_trace.jsonl"
SERVERS = 8
ENGINES: tuple[EngineKind, ...] = ("fifo", "chunk", "shared")
RATES = (0.6, 1.0)
STEPS = {"decode_token_s": 0.0127, "decode_more_s": 1.7e-4}
"""Of LLaMA-70B on 8×A800 by its cost model at 69 % of its memory's speed, with 5,700 tokens of context a request."""
BAD = 3
"""Number of the server at fault."""
FAULTS: dict[str, tuple[float, ServerFault]] = {
    "hung, streams": (0.0, ServerFault("hung", BAD, 60.0)),
    "hung, whole answers": (1.0, ServerFault("hung", BAD, 60.0)),
    "four times as slow": (0.0, ServerFault("slow", BAD, 60.0, factor=4.0)),
    "emptied cache": (0.0, ServerFault("emptied", BAD, 90.0)),
    "caches nothing": (0.0, ServerFault("uncached", BAD)),
    "lies": (0.0, ServerFault("liar", BAD)),
}
"""Share of whole answers, and the fault; in `tenants` at the lower rate, on `chunk`."""
METRICS = {"mean_s": "first token", "token_s": "per token", "answer_s": "whole answer"}
AS_GOOD = 1.001
"""Ratio up to which two means count as equal: where decoding costs nothing, they differ by rounding."""
SEEDS, SEEDS_OF_PREDICTED = 3, 1
"""Refitting trees every 10 s takes most of the time; of a trace, a seed only moves arrivals by seconds."""
TUNED_SEEDS = (1, 2, 3)
WARM = 0.4
"""Share of a family's time that fills the caches."""
SATURATED = 5.0
"""So many times its figure at the lowest rate, and the best strategy's queues only grow."""


@dataclass(frozen=True, slots=True)
class Cell:
    family: str
    engine: EngineKind
    rate: float
    blocks: int = 5_000
    whole: float = 0.0
    fault: str = ""

    @property
    def label(self) -> str:
        parts = [f"{self.blocks:,} blocks"] if self.blocks not in (5_000, SMALL_CACHES.get(self.family)) else []
        parts += [f"{self.whole:.0%} whole"] if self.whole and not self.fault else []
        return ", ".join([*parts, *([self.fault] if self.fault else [])])


@dataclass(frozen=True, slots=True)
class Run:
    cell: Cell
    player: Player
    seed: int
    trace: Path | None
    tuning: bool


def cells_of(family: str, is_trace: bool) -> Iterator[Cell]:
    """`chunk` at both rates, the others (but of a trace, which is long) at one; of two families also whole answers, and
    smaller caches.
    """
    blocks = SMALL_CACHES.get(family, 5_000)
    for rate in RATES:
        yield Cell(family, "chunk", rate, blocks)
    for engine in () if is_trace else ENGINES:
        if engine != "chunk":
            yield Cell(family, engine, max(RATES), blocks)
    if family in ("conversations", "tenants"):
        yield Cell(family, "chunk", 1.0, whole=0.5)
        yield Cell(family, "chunk", 1.0, whole=1.0)
        yield Cell(family, "chunk", 1.0, blocks=2_000)
    if family == "tenants":
        for fault, (whole, _) in FAULTS.items():
            yield Cell(family, "chunk", min(RATES), whole=whole, fault=fault)


def run(one: Run) -> dict[str, float]:
    cell, seed = one.cell, one.seed
    requests, prompts = requests_of(cell.family, seed, one.trace)
    requests = at_rate(requests, cell.rate)
    from_s = split_at(requests, TRACE_TUNED if one.trace is not None else WARM)
    if one.tuning and one.trace is not None:
        early = sum(request.at_s < from_s for request in requests)
        from_s = split_at(requests, WARM)
        requests, prompts = requests[:early], prompts[:early]
    setup = RoutingSetup(
        servers=SERVERS,
        engine=cell.engine,
        cache_blocks=cell.blocks,
        whole=cell.whole,
        usage=True,
        faults=(FAULTS[cell.fault][1],) if cell.fault else (),
        seed=seed,
        **(STEPS if cell.engine == "chunk" else {}),
    )
    scorer, events = scorer_of(one.player, setup)
    outcomes = simulate(requests, scorer, setup, events, prompts)
    sent = sum(outcome.server == BAD and outcome.at_s >= from_s for outcome in outcomes)
    return measured(outcomes, SERVERS, from_s).as_json() | {"to_it": sent}


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
    trace = one.trace.name if one.trace is not None else ""
    return f"{trace} {asdict(one.cell)} {one.player.name} {one.seed} {one.tuning}"


def rows_of(runs: Sequence[Run], results: Sequence[dict[str, float]]) -> list[dict[str, Any]]:
    """One row for each cell and player, with what each seed gave."""
    joined: dict[tuple[Cell, str], dict[int, dict[str, float]]] = {}
    for one, result in zip(runs, results, strict=True):
        joined.setdefault((one.cell, one.player.name), {})[one.seed] = result
    rows = []
    for (cell, player), by_seed in joined.items():
        row: dict[str, Any] = asdict(cell) | {"player": player, "seeds": list(by_seed)}
        for name in (*METRICS, "p99_s", "token_hits", "servers_used", "failed", "to_it"):
            row[name] = round(statistics.mean(one[name] for one in by_seed.values()), 5)
        for name in (*METRICS, "p99_s"):
            row[f"{name} of seeds"] = [round(one[name], 5) for one in by_seed.values()]
        rows.append(row)
    return rows


def interval(ours: dict[str, Any], theirs: dict[str, Any], metric: str) -> tuple[float, float, float]:
    """Ours over theirs, seed by seed: the geometric mean of the ratios and its 95 % interval (Student's t)."""
    of_theirs = dict(zip(theirs["seeds"], theirs[f"{metric} of seeds"], strict=True))
    logs = [
        math.log(mean_s / of_theirs[seed])
        for seed, mean_s in zip(ours["seeds"], ours[f"{metric} of seeds"], strict=True)
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
    """Cell by cell: the best rival by each metric, how ours compares, and whether it is past saturation."""
    cells: dict[Cell, dict[str, dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault(_cell_of(row), {})[row["player"]] = row
    found = []
    for cell, there in cells.items():
        ours = there[OURS]
        rivals = [row for name, row in there.items() if name not in (OURS, GIVEN)]
        verdict: dict[str, Any] = asdict(cell) | {"untuned": cell.family in UNTUNED}
        for metric in (*METRICS, "p99_s"):
            # a rival that ran on fewer seeds is compared on these
            best = max(rivals, key=lambda rival: interval(ours, rival, metric)[0])
            ratio, low, high = interval(ours, best, metric)
            verdict[metric] = {
                "ours": ours[metric],
                "best": best["player"],
                "ratio": round(ratio, 4),
                "low": round(low, 4),
                "high": round(high, 4),
            }
        slow = cells.get(
            replace(cell, engine="chunk", rate=min(RATES), whole=0.0, blocks=SMALL_CACHES.get(cell.family, 5_000))
        )
        best_s = ours["mean_s"] / max(1.0, verdict["mean_s"]["ratio"])
        verdict["saturated"] = not cell.fault and slow is not None and best_s > SATURATED * slow[OURS]["mean_s"]
        verdict["servers_used"] = ours["servers_used"]
        if GIVEN in there:
            verdict["over_given"] = round(interval(ours, there[GIVEN], "mean_s")[0], 4)
        found.append(verdict)
    return found


def _cell_of(row: dict[str, Any]) -> Cell:
    return Cell(*(row[name] for name in ("family", "engine", "rate", "blocks", "whole", "fault")))


def summary(found: Sequence[dict[str, Any]]) -> list[str]:
    below = [one for one in found if not one["saturated"]]
    lines = []
    for metric, name in METRICS.items():
        ratios = [one[metric]["ratio"] for one in below]
        worst = max(below, key=lambda one: one[metric]["ratio"])
        lines.append(
            f"{name}: best in {sum(ratio <= AS_GOOD for ratio in ratios)} of {len(ratios)} cells below saturation, "
            f"within 5 % of the best rival in {sum(ratio <= 1.05 for ratio in ratios)}, at worst {max(ratios):.3f} "
            f"({worst['family']}, {worst['engine']}, {worst['rate']:g}×{_label(worst)})"
        )
    p99 = [one["p99_s"]["ratio"] for one in below]
    lines.append(
        f"99th percentile of the first token: within 10 % of the best rival's in {sum(one <= 1.1 for one in p99)} of "
        f"{len(p99)}, at worst {max(p99):.3f}"
    )
    healthy = [one for one in found if not one["fault"]]
    lines.append(
        f"servers used: at least {min(one['servers_used'] for one in healthy):.0%} in every cell without fault"
    )
    new = [one["mean_s"]["ratio"] for one in below if one["untuned"]]
    if new:
        lines.append(f"families on which nothing was tuned ({', '.join(UNTUNED)}): first token at worst {max(new):.3f}")
    return lines


def _label(one: dict[str, Any]) -> str:
    label = _cell_of(one).label
    return f", {label}" if label else ""


def lost_table(found: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The cells in which a rival is better by any mean."""
    rows = [["family", "engine", "rate", "", "mean", "ours", "best rival", "ours / it", "95 %"]]
    for one in found:
        for metric, name in METRICS.items():
            verdict = one[metric]
            if verdict["ratio"] > AS_GOOD:
                rows.append(
                    [one["family"], one["engine"], f"{one['rate']:g}×", _cell_of(one).label]
                    + [name, _figure(verdict["ours"]), verdict["best"], f"{verdict['ratio']:.3f}", _interval(verdict)]
                )
    return rows


def _interval(verdict: dict[str, Any]) -> str:
    return f"{verdict['low']:.2f} to {verdict['high']:.2f}" if verdict["low"] < verdict["high"] else "one seed"


def table_of(rows: Sequence[dict[str, Any]], engine: str, metric: str) -> list[list[str]]:
    """Of an engine: a mean by player and family, with streams; first row: header."""
    of = [row for row in rows if row["engine"] == engine and not _cell_of(row).label]
    cells = list(dict.fromkeys((row["family"], row["rate"]) for row in of))
    by = {(row["family"], row["rate"], row["player"]): row[metric] for row in of}
    players = dict.fromkeys(row["player"] for row in of)
    body = [
        [f"**{player}**" if player == OURS else player]
        + [_figure(by[*cell, player]) if (*cell, player) in by else "" for cell in cells]
        for player in players
    ]
    return [["strategy", *(f"{family}, {rate:g}×" for family, rate in cells)], *body]


def faults_table(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """What a server at fault costs: mean time to first token, and requests sent there after the warm-up."""
    of = [row for row in rows if row["fault"]]
    by = {(row["player"], row["fault"]): row for row in of}
    body = [
        [f"**{player}**" if player == OURS else player]
        + [f"{_figure(by[player, fault]['mean_s'])} ({by[player, fault]['to_it']:.0f})" for fault in FAULTS]
        for player in dict.fromkeys(row["player"] for row in of)
    ]
    return [["strategy", *FAULTS], *body]


def _figure(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds < 1 else f"{seconds:.2f}" if seconds < 100 else f"{seconds:.0f}"


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
    shown = {"originals": originals_table(), "lost": lost_table(found)}
    for engine in dict.fromkeys(row["engine"] for row in rows):
        for metric in METRICS if engine == "chunk" else ("mean_s",):
            shown[f"{engine}, {METRICS[metric]}"] = table_of(rows, engine, metric)
    if any(row["fault"] for row in rows):
        shown["faults"] = faults_table(rows)
    kept = [{name: value for name, value in row.items() if not name.endswith("of seeds")} for row in rows]
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
        Cell(family, engine, 1.0, SMALL_CACHES.get(family, 5_000))
        for family in families
        if family not in UNTUNED
        for engine in ENGINES
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
    """Each rival over ours, by family, a picture for each engine: above 1 ours is quicker."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(ENGINES), figsize=(5.2 * len(ENGINES), 4.6), squeeze=False, sharey=True)
    for place, engine in zip(axes[0], ENGINES, strict=True):
        of = [row for row in rows if row["engine"] == engine and row["rate"] == 1.0 and not _cell_of(row).label]
        ours = {row["family"]: row["mean_s"] for row in of if row["player"] == OURS}
        for player in dict.fromkeys(row["player"] for row in of):
            if player in (OURS, GIVEN) or "," in player:
                continue
            theirs = {row["family"]: row["mean_s"] for row in of if row["player"] == player}
            ratios = [theirs[family] / ours[family] for family in ours if family in theirs]
            place.plot([family for family in ours if family in theirs], ratios, marker="o", ms=4, lw=0.6, label=player)
        place.axhline(1.0, color="black", lw=2, label=f"{OURS} (default)")
        place.set_yscale("log")
        place.set_title(engine, fontsize=10)
        place.tick_params(axis="x", rotation=70, labelsize=8)
        place.grid(alpha=0.3, which="both")
    axes[0][0].set_ylabel("mean time to first token over the default's")
    axes[0][-1].legend(fontsize=6.5, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"written: {path}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, nargs="*", default=[TRACE], metavar="FILE")
    parser.add_argument("--families", default=",".join(DURATIONS_S), metavar="A,B", help="of the generator")
    parser.add_argument("--strategies", metavar="A,B", help="these alone, and ours")
    parser.add_argument("--seeds", metavar="A,B", help="instead of new ones")
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
        seeds = random.SystemRandom().sample(range(1_000, 1_000_000), 2 if options.quick else SEEDS)
        print(f"seeds drawn: {','.join(map(str, seeds))}", file=sys.stderr)
    runs = []
    for family, trace in families.items():
        cells = (
            [Cell(family, "chunk", 1.0, SMALL_CACHES.get(family, 5_000))]
            if options.quick
            else cells_of(family, trace is not None)
        )
        for cell, player in itertools.product(list(cells), playing):
            most = SEEDS_OF_PREDICTED if player.strategy == PREDICTED or trace is not None else len(seeds)
            runs += [Run(cell, player, seed, trace, False) for seed in seeds[:most]]
    rows = rows_of(runs, play(runs, options.jobs, options.kept))
    made = results(rows, seeds)
    for name, (header, *body) in made["tables"].items():
        if name != "originals":
            print_table(name, header, body)
    print("\n" + "\n".join(made["summary"]))
    if options.json is not None:
        options.json.write_text(written(made), "utf-8")
        print(f"written: {options.json}", file=sys.stderr)
    if options.plot is not None:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
