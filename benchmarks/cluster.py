"""Clusters that prefill and decode apart: `python benchmarks/cluster.py [--json FILE] [--plots DIR] [--only A,B]`.

Four tables, from the cluster simulator with the schedulers and admission rules of production:

* `schedulers`: time to first token and hits by scheduler and rate, on 8P+8D; order, and ours over random, at each rate.
* `admission`: goodput of every rule over rates x sizes x SLOs, refusals and wasted prefill beside it; each cell that
  ours loses is listed.
* `coupled`: the conversation trace on 20 machines, apart and coupled, and 16k to 128k tokens on four (the experiments
  `real` and `simulated` of `skymemory reproduce mooncake`).
* `speed`: the whole trace on one core, 8P+8D, every decoding step exact: seconds and megabytes, twice, same numbers.

Requests: the conversation trace from `../shared/data` or `--trace FILE`; without it the seeded generator with its
statistics. The whole trace is run; requests of the last 30 % of the time are measured (`--time report`), those before
are what was tuned on (`--time tune`; nothing later is run). `--quick`: ten minutes of requests and fewer cells.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from _bench import print_table, write_json
from _cluster_cells import GRID_RATES, GRID_RULES, OURS, QUICK_GRID_RATES, admission_cells, scheduler_cells, speed
from skymemory_lab.reproduce.mooncake.base import Experiment, ExperimentSetting
from skymemory_lab.reproduce.mooncake.clusters import real, simulated
from skymemory_lab.sim.cluster.cells import CellAnswer, run_cell
from skymemory_lab.sim.sweeps import sweep
from skymemory_lab.sim.workload import ConversationSource

TRACE = Path(__file__).parents[2] / "shared/data/traces/conversation_trace.jsonl"
PARTS = ("schedulers", "admission", "coupled", "speed")
PAPERS_BEST = 3.07 / 19.65


def progress_of(name: str) -> Any:
    """Progress on a terminal."""

    def show(done: int, of: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{name}: {done} of {of}\x1b[K", end="" if done < of else "\r\x1b[K", file=sys.stderr, flush=True)

    return show


def schedulers(source: ConversationSource, time: str, jobs: int) -> list[dict[str, Any]]:
    labels, cells = zip(*scheduler_cells(source, time), strict=True)
    rows = []
    for (rate, name), answer in zip(
        labels, sweep(run_cell, cells, jobs=jobs, progress=progress_of("schedulers")), strict=True
    ):
        rows.append({"rate": rate, "scheduler": name, **row_of(answer)})
    for rate in dict.fromkeys(row["rate"] for row in rows):
        mine = [row for row in rows if row["rate"] == rate]
        random = next(row for row in mine if row["scheduler"] == "random")["ttft_mean_s"]
        for row in mine:
            row["over_random"] = round(row["ttft_mean_s"] / random, 4)
        print_table(
            f"schedulers, {source.name}, {rate:g}×: {mine[0]['requests']:,} requests measured",
            ["scheduler", "mean TTFT, s", "p50", "p90", "p99", "over random", "tokens hit", "prefill busy"],
            [
                [
                    row["scheduler"],
                    f"{row['ttft_mean_s']:.2f}",
                    f"{row['ttft_p50_s']:.2f}",
                    f"{row['ttft_p90_s']:.2f}",
                    f"{row['ttft_p99_s']:.2f}",
                    f"{row['over_random']:.3f}",
                    f"{row['token_hits']:.1%}",
                    f"{row['prefill_utilisation']:.0%}",
                ]
                for row in mine
            ],
        )
        means = [row["ttft_mean_s"] for row in mine[:4]]
        in_order = means == sorted(means, reverse=True)
        print(
            f"order random > load-balance > cache-aware > kvcache-centric: {'yes' if in_order else 'NO'}; "
            f"ours over random {mine[3]['over_random']:.3f} (the paper's best: {PAPERS_BEST:.3f})"
        )
    return rows


def admission(
    source: ConversationSource, time: str, jobs: int, rates: Sequence[float], draws: int
) -> list[dict[str, Any]]:
    drawn = [replace(source, seed=source.seed + draw) for draw in range(draws)]
    labels, cells = zip(*(one for each in drawn for one in admission_cells(each, time, rates)), strict=True)
    by_cell: dict[tuple[object, ...], list[dict[str, Any]]] = {}
    for label, answer in zip(labels, sweep(run_cell, cells, jobs=jobs, progress=progress_of("admission")), strict=True):
        by_cell.setdefault(tuple(label.items()), []).append(row_of(answer))
    rows = [{**dict(label), **_of_draws(mine)} for label, mine in by_cell.items()]  # type: ignore[arg-type]
    groups: dict[tuple[object, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["size"], row["rate"], row["slo"]), {})[row["rule"]] = row
    print_table(
        f"admission, {source.name}: requests within both SLOs (wasted prefill, s)",
        ["cluster", "rate", "SLOs", "requests", *GRID_RULES, "best"],
        [
            [
                size,
                f"{rate:g}×",
                slo,
                f"{mine[OURS]['requests']:,}",
                *(f"{mine[rule]['met']:,} ({mine[rule]['wasted_prefill_s']:.0f})" for rule in GRID_RULES),
                _best(mine),
            ]
            for (size, rate, slo), mine in groups.items()
        ],
    )
    sums = {rule: sum(mine[rule]["met"] for mine in groups.values()) for rule in GRID_RULES}
    wasted = {rule: sum(mine[rule]["wasted_prefill_s"] for mine in groups.values()) for rule in GRID_RULES}
    print_table(
        f"in sum over {len(groups)} cells",
        ["rule", "within both SLOs", "over baseline", "wasted prefill, s", "over baseline"],
        [
            [
                rule,
                f"{sums[rule]:,}",
                f"{sums[rule] / sums['baseline'] - 1:+.1%}",
                f"{wasted[rule]:,.0f}",
                f"{wasted[rule] / wasted['baseline'] - 1:+.1%}" if wasted["baseline"] else "-",
            ]
            for rule in GRID_RULES
        ],
    )
    lost = []
    for (size, rate, slo), mine in groups.items():
        best = max((rule for rule in GRID_RULES if rule != OURS), key=lambda rule: mine[rule]["met"])
        if mine[OURS]["met"] < mine[best]["met"]:
            lost.append((size, rate, slo, best, mine[OURS], mine[best]))
    print(f"\ncells that {OURS} loses: {len(lost)} of {len(groups)}")
    for size, rate, slo, best, ours, theirs in lost:
        print(
            f"  {size}, {rate:g}×, {slo}: {ours['met']:,} against {best} {theirs['met']:,} of {ours['requests']:,}"
            f" ({ours['met'] / theirs['met'] - 1:+.2%}); ours {_ends(ours)}; {best} {_ends(theirs)}"
        )
    return rows


def _of_draws(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts in sum, all else as the mean."""
    if len(rows) == 1:
        return rows[0]
    found: dict[str, Any] = {"draws": len(rows)}
    for name, value in rows[0].items():
        total = sum(row[name] for row in rows)
        found[name] = total if isinstance(value, int) else round(total / len(rows), 6)
    return found


def _ends(one: dict[str, Any]) -> str:
    return f"refused {one['refused']}+{one['refused_after_prefill']}, broke {one['broken']}"


def _best(mine: dict[str, dict[str, Any]]) -> str:
    """Who keeps most promises; all who do."""
    most = max(one["met"] for one in mine.values())
    best = [rule for rule, one in mine.items() if one["met"] == most]
    return "all" if len(best) == len(mine) else ", ".join(best)


def coupled(source: ConversationSource, jobs: int) -> list[dict[str, Any]]:
    found: list[Experiment] = []
    for name, experiment in (("real", real), ("simulated", simulated)):
        found.append(experiment(ExperimentSetting(source, jobs=jobs, progress=progress_of(name))))
        last = found[-1]
        print_table(f"{last.title} ({last.source})", list(last.header), [[_cell(v) for v in row] for row in last.rows])
        for one in last.values:
            published = "-" if one.published is None else one.published
            print(f"  {one.what}: published {published}, ours {one.ours:,.{one.digits}f} {one.unit}  {one.why}")
    return [one.as_json() for one in found]


def row_of(answer: CellAnswer) -> dict[str, Any]:
    one = answer.metrics
    ttft, tbt = asdict(one.ttft_s), asdict(one.tbt_request_s)
    row: dict[str, Any] = {
        "requests": one.requests,
        "completed": one.completed,
        "met": one.met,
        "refused": one.refused,
        "refused_after_prefill": one.refused_after_prefill,
        "broken": one.completed - one.met,
        "attainment": one.attainment,
        "goodput_per_s": one.goodput_per_s,
        "wasted_prefill_s": one.wasted_prefill_s,
        "late_prefill_s": one.late_prefill_s,
        "token_hits": one.hits.tokens,
        "prefill_utilisation": one.prefill_utilisation,
        "decode_utilisation": one.decode_utilisation,
        **{f"ttft_{name}_s": value for name, value in ttft.items()},
        **{f"tbt_{name}_s": value for name, value in tbt.items()},
    }
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in row.items()}


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE, metavar="FILE")
    parser.add_argument("--only", default=",".join(PARTS), metavar="A,B", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--time", choices=("report", "tune"), default="report")
    parser.add_argument("--rates", metavar="X,Y", help="of the admission grid (default: 1.5,2,3)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--draws", type=int, default=1, metavar="N", help="of the admission grid: counts in sum")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="pictures of the tables (needs matplotlib)")
    options = parser.parse_args()
    trace = options.trace if options.trace.is_file() else None
    if trace is None:
        print(f"there is no trace at {options.trace}; in its place the seeded generator", file=sys.stderr)
    source = ConversationSource(trace, options.seed, options.quick)
    parts = options.only.split(",")
    found: dict[str, Any] = {}
    if "schedulers" in parts:
        found["schedulers"] = schedulers(source, options.time, options.jobs)
    if "admission" in parts:
        rates = [float(rate) for rate in options.rates.split(",")] if options.rates else GRID_RATES
        found["admission"] = admission(
            source, options.time, options.jobs, QUICK_GRID_RATES if options.quick else rates, options.draws
        )
    if "coupled" in parts:
        found["coupled"] = coupled(source, options.jobs)
    if "speed" in parts:
        found["speed"] = speed(source)
        print_table(
            "the whole trace on one core",
            ["scheduler", "processor seconds", "MB at most", "the same again"],
            [[r["scheduler"], f"{r['seconds']:.2f}", f"{r['mb']:.0f}", str(r["same"])] for r in found["speed"]],
        )
    rows = [{"part": part, **row} for part, mine in found.items() for row in mine]
    write_json(options.json, "cluster", options.seed, rows)
    if options.plots is not None:
        from _cluster_plots import draw

        for path in draw(found, options.plots):
            print(f"written: {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
