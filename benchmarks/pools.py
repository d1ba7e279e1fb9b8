"""Elastic pools against fixed splits: `python benchmarks/pools.py [--json FILE] [--quick] [--only A,B]`.

Eight machines in the cluster simulator (LLaMA-70B, prefills as on 8×A800, decoding as vLLM's on 8×A100; objectives of
30 s and 0.1 s a token; KVCache-centric scheduling, admission rule `goodput`). On each family of requests: every fixed
split, of which the best is known only in hindsight; elastic pools that start from the even split, with the default
settings; and with settings that were swept. A goodput is requests within both objectives per second of arrivals; a
share is of the best split's, draw by draw.

The sweep runs on `--seed` and a third of the time (of the trace: of its first half); reported are whole draws with
seeds of their own (of the trace: its second half). First smoothing and settling times are swept, then the other
settings around the best; best: most families at 95 % of their best split or more, then the largest mean share.

Without the conversation trace at `../shared/data` or `--trace FILE` that family is left out, and said so. `--quick`:
one draw of a third of the time, no sweep.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from _bench import print_table, write_json
from skymemory.conductor.pools import ElasticSettings
from skymemory_lab.reproduce.mooncake.base import COST
from skymemory_lab.sim.cluster.cells import ClusterCell, run_cell
from skymemory_lab.sim.cluster.setup import ClusterSetup
from skymemory_lab.sim.mixes import MixSource, WorkloadSource
from skymemory_lab.sim.sweeps import WAYS, Way, sweep
from skymemory_lab.sim.workload import ConversationSource, OpenSource, RequestSource

TRACE = Path(__file__).parents[2] / "shared/data/traces/conversation_trace.jsonl"
MACHINES = 8
SPLITS = tuple(range(1, MACHINES))
EVEN = MACHINES // 2
GOAL = 0.95
JUDGED_FROM = 1000
"""First seed of the reported draws."""
Make = Callable[[int, float], RequestSource]
"""A source by seed, and part of its full duration."""


@dataclass(frozen=True)
class Family:
    changes: bool
    """Whether its mix does."""
    make: Make
    rate: float = 1.0
    """Factor on the speed of its arrivals: near what the best split can do."""
    trace: bool = False


def _workload(name: str, seconds: float) -> Make:
    return lambda seed, part: WorkloadSource(name, seed, seconds * part)


def _poisson(name: str, rate_per_s: float, count: int) -> Make:
    return lambda seed, part: OpenSource(name, rate_per_s, round(count * part), seed)


def _mix(shape: str, period_s: float, readers_per_s: float = 3.0, writers_per_s: float = 6.0) -> Make:
    return lambda seed, part: MixSource(
        shape, seed, readers_per_s, writers_per_s, 3600.0 * part, period_s * (part if period_s == 3600.0 else 1)
    )


def families(trace: Path | None) -> dict[str, Family]:
    found = {
        "conversations": Family(False, _workload("conversations", 2400.0), 1.3),
        "tenants": Family(False, _workload("tenants", 450.0), 0.25),
        "agents": Family(False, _workload("agents", 1200.0), 0.8),
        "arxiv": Family(False, _poisson("arxiv", 6.0, 9000)),
        "l-eval": Family(False, _poisson("l-eval", 6.0, 9000)),
        "simulated-16k": Family(False, _poisson("simulated-16k", 2.0, 3600)),
        "mix, even": Family(False, _mix("even", 3600.0)),
        "mix, day and night": Family(True, _mix("day", 3600.0)),
        "mix, in turns of 15 min": Family(True, _mix("turns", 1800.0)),
        "mix, one switch": Family(True, _mix("switch", 3600.0)),
        "mix, ramp": Family(True, _mix("ramp", 3600.0)),
    }
    if trace is not None:
        found = {
            "conversation trace": Family(False, lambda seed, part: ConversationSource(trace, seed), 1.2, trace=True),
            **found,
        }
    return found


def run(cell: ClusterCell) -> dict[str, float]:
    answer = run_cell(cell).metrics
    requests = cell.source.requests()
    seconds = (requests[-1].at_s - requests[0].at_s) * (cell.until_part - cell.begin_part) / cell.setup.rate
    return {
        "requests": answer.requests,
        "met": answer.met,
        "goodput_per_s": round(answer.met / seconds, 4),
        "refused": answer.refused + answer.refused_after_prefill,
        "changes": answer.role_changes,
    }


def cell_of(family: Family, seed: int, part: float, tune: bool, admission: str, setup: ClusterSetup) -> ClusterCell:
    setup = replace(setup, cost=COST, rate=family.rate, seed=seed)
    halves = {}
    if family.trace:
        halves = {"until_part": 0.5 * part} if tune else {"begin_part": 0.5, "until_part": 0.5 + 0.5 * part}
    return ClusterCell(family.make(seed, part), setup, admission=admission, **halves)


def fixed(prefill: int) -> ClusterSetup:
    return ClusterSetup(prefill=prefill, decode=MACHINES - prefill)


def elastic(settings: ElasticSettings) -> ClusterSetup:
    return ClusterSetup(prefill=EVEN, decode=MACHINES - EVEN, pools="elastic", elastic=settings)


def progress_of(name: str) -> Any:
    """Progress on a terminal."""

    def show(done: int, of: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{name}: {done} of {of}\x1b[K", end="" if done < of else "\r\x1b[K", file=sys.stderr, flush=True)

    return show


FIRST = [
    ElasticSettings(smoothing_s=smoothing_s, settle_s=settle_s)
    for smoothing_s in (15.0, 30.0, 60.0)
    for settle_s in (15.0, 30.0, 60.0)
]


def then(best: ElasticSettings) -> list[ElasticSettings]:
    """Around the best of the first sweep."""
    thresholds = [(high, low) for high in (0.75, 0.85, 0.95) for low in (0.8, 0.9, 1.0)]
    found = [replace(best, high=high, low=low) for high, low in thresholds]
    return [*found, *(replace(best, drain_weight=weight) for weight in (0.0, 1.0)), replace(best, margin=0.3)]


def swept(
    chosen: dict[str, Family], seed: int, part: float, admission: str, on: Way, jobs: int | None
) -> tuple[ElasticSettings, list[dict[str, Any]]]:
    """The best settings, and all that were tried."""

    def cells(setups: Sequence[ClusterSetup]) -> list[ClusterCell]:
        return [cell_of(one, seed, part, True, admission, setup) for one in chosen.values() for setup in setups]

    splits = [fixed(prefill) for prefill in SPLITS]
    found = sweep(run, cells(splits), on, jobs, progress=progress_of("sweep: fixed splits"))
    best = [max(one["met"] for one in found[at : at + len(SPLITS)]) for at in range(0, len(found), len(SPLITS))]
    rows: list[dict[str, Any]] = []

    def tried(settings: Sequence[ElasticSettings], name: str) -> ElasticSettings:
        answers = sweep(run, cells([elastic(one) for one in settings]), on, jobs, progress=progress_of(name))
        for at, one in enumerate(settings):
            shares = [answer["met"] / most for answer, most in zip(answers[at :: len(settings)], best, strict=True)]
            rows.append(
                {
                    "part": "sweep",
                    "settings": asdict(one),
                    "at_goal": sum(share >= GOAL for share in shares),
                    "mean_share": round(math.exp(sum(map(math.log, shares)) / len(shares)), 5),
                    "shares": {name: round(share, 4) for name, share in zip(chosen, shares, strict=True)},
                }
            )
        top = max(rows, key=lambda row: (row["at_goal"], row["mean_share"]))
        return ElasticSettings(**top["settings"])

    first = tried(FIRST, "sweep: times")
    return tried(then(first), "sweep: thresholds"), rows


def judged(
    chosen: dict[str, Family],
    ways: dict[str, ClusterSetup],
    seeds: Sequence[int],
    part: float,
    admission: str,
    on: Way,
    jobs: int | None,
) -> list[dict[str, Any]]:
    """A row for each family, draw and way."""
    labels = [(name, seed, way) for name in chosen for seed in seeds for way in ways]
    cells = [cell_of(chosen[name], seed, part, False, admission, ways[way]) for name, seed, way in labels]
    answers = sweep(run, cells, on, jobs, progress=progress_of("families"))
    return [
        {"part": "families", "family": name, "changes_mix": chosen[name].changes, "seed": seed, "way": way, **answer}
        for (name, seed, way), answer in zip(labels, answers, strict=True)
    ]


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each family, over its draws."""
    found = []
    for family in dict.fromkeys(row["family"] for row in rows):
        mine = [row for row in rows if row["family"] == family]
        seeds = list(dict.fromkeys(row["seed"] for row in mine))
        by = {(row["seed"], row["way"]): row for row in mine}
        splits = [way for way in dict.fromkeys(row["way"] for row in mine) if way.endswith("D")]
        tops = {seed: max(splits, key=lambda way, seed=seed: by[seed, way]["met"]) for seed in seeds}
        best = {seed: by[seed, tops[seed]] for seed in seeds}
        total = sum(one["requests"] for one in best.values())
        row: dict[str, Any] = {
            "part": "summary",
            "family": family,
            "changes_mix": mine[0]["changes_mix"],
            "draws": len(seeds),
            "requests": total,
            "best": "/".join(dict.fromkeys(tops.values())),
            "best_goodput_per_s": round(sum(one["goodput_per_s"] for one in best.values()) / len(seeds), 4),
            "best_attainment": round(sum(one["met"] for one in best.values()) / total, 4),
        }
        for way in ("even", "elastic", "elastic, swept"):
            name = f"{EVEN}P+{MACHINES - EVEN}D" if way == "even" else way
            if (seeds[0], name) not in by:
                continue
            ours = {seed: by[seed, name] for seed in seeds}
            shares = [ours[seed]["met"] / best[seed]["met"] for seed in seeds]
            row[way] = {
                "goodput_per_s": round(sum(one["goodput_per_s"] for one in ours.values()) / len(seeds), 4),
                "share": round(sum(one["met"] for one in ours.values()) / sum(one["met"] for one in best.values()), 4),
                "worst_share": round(min(shares), 4),
                "changes": round(sum(one["changes"] for one in ours.values()) / len(seeds), 1),
            }
        found.append(row)
    return found


def report(rows: Sequence[dict[str, Any]]) -> None:
    def cell(row: dict[str, Any], way: str) -> str:
        return f"{row[way]['share']:.3f} ({row[way]['worst_share']:.3f})" if way in row else "-"

    print_table(
        "share of the best fixed split's goodput (of the worst draw)",
        ["family", "requests", "best split", "its goodput /s", "within both", "even", "elastic", "swept", "changes"],
        [
            [
                row["family"],
                f"{row['requests']:,}",
                row["best"],
                f"{row['best_goodput_per_s']:.2f}",
                f"{row['best_attainment']:.1%}",
                *(cell(row, way) for way in ("even", "elastic", "elastic, swept")),
                f"{row['elastic']['changes']:.0f}",
            ]
            for row in rows
        ],
    )
    for way in ("elastic", "elastic, swept"):
        if way not in rows[0]:
            continue
        lost = [row for row in rows if row[way]["share"] < (1.0 if row["changes_mix"] else GOAL)]
        print(
            f"\n{way}: lost {len(lost)} of {len(rows)} families (below {GOAL:.0%}; below 100 % where the mix changes)"
        )
        for row in lost:
            print(
                f"  {row['family']}: {row[way]['share']:.1%} of {row['best']}, worst draw {row[way]['worst_share']:.1%}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE, metavar="FILE")
    parser.add_argument("--only", metavar="A,B", help="families, by name or its beginning")
    parser.add_argument("--admission", default="goodput", metavar="RULE")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--draws", type=int, default=2, metavar="N")
    parser.add_argument("--no-sweep", action="store_true", help="only the default settings")
    parser.add_argument("--jobs", type=int, metavar="N", help="in parallel (default: one per core)")
    parser.add_argument("--on", choices=WAYS, default="processes", help="where cells run")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    trace = options.trace if options.trace.is_file() else None
    if trace is None:
        print(f"there is no trace at {options.trace}: that family is left out", file=sys.stderr)
    wanted = [one.strip() for one in options.only.split(",")] if options.only else [""]
    chosen = {name: family for name, family in families(trace).items() if any(name.startswith(one) for one in wanted)}
    if not chosen:
        parser.error(f"--only {options.only}: no such family; there are {'; '.join(families(trace))}")
    part, draws = (1 / 3, 1) if options.quick else (1.0, options.draws)
    ways = {f"{prefill}P+{MACHINES - prefill}D": fixed(prefill) for prefill in SPLITS}
    ways["elastic"] = elastic(ElasticSettings())
    rows: list[dict[str, Any]] = []
    if not (options.quick or options.no_sweep):
        best, rows = swept(chosen, options.seed, part / 3, options.admission, options.on, options.jobs)
        ways["elastic, swept"] = elastic(best)
        print(f"swept: {best}; default: {ElasticSettings()}")
    seeds = [JUDGED_FROM + options.seed + draw for draw in range(draws)]
    found = judged(chosen, ways, seeds, part, options.admission, options.on, options.jobs)
    shown = summary(found)
    report(shown)
    write_json(options.json, "pools", options.seed, [*shown, *rows, *found])


if __name__ == "__main__":
    main()
