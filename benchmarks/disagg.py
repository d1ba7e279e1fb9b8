"""Prefill and decode apart on real engines, and in the simulator: `python benchmarks/disagg.py [--json FILE]`.

Two engines with a core each, on one store. With `--engine own` they are `skymemory serve` with the shipped model, with
`--engine vllm` two vLLM with a random model (`--python`). Parts (`--parts`; without fit, the model is that of FILE);
`--quick`: fewer and shorter:

fit       The cost model of this machine, and the terms of the hand-over, measured on idle engines part by part.
real      Seeded requests at three loads on a real 1P+1D behind `skymemory route`, and the very same requests in the
          cluster simulator with the fitted model: times, hits, goodput.
coupled   The same requests on 1P+1D and on two engines that do both behind the same router, at several mixes and loads;
          and both in the simulator.
overload  1.5 to 3 times of what 1P+1D can do, with promised times: requests kept with early rejection and without.
split     The same requests, many of them short; prompts of which the decode engine lacks few tokens take one step, by
          several settings of the router's `split_from`.
curve     From which speeds on prefill and decode apart win: the fitted model with its speeds multiplied, simulated
          (a minute; rows go to `--csv`, `plot_disagg.py` draws them). Needs no engine.

Loads are parts of what the model says that the busier of both engines can do. Objectives are five times what the model
says of a lone request of the mix.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from _bench import print_table, versions
from _disagg_curve import SPEEDS, Machine, cells, curve, ratio, write
from _disagg_real import (
    ALONE,
    COMPUTED,
    COUNT,
    PROMPTS,
    Fitted,
    Kind,
    Servers,
    counters,
    fitted,
    own,
    played,
    routed,
    servers,
    vllm,
)
from _disagg_workload import MIXES, TURNS, Mix, busy_s, requests_of, scaled
from skymemory.conductor.cost_fit import dump, parse
from skymemory.conductor.request import Slo
from skymemory.metrics import spread
from skymemory_lab.replay.report import ReplayOutcome, ResponseStatus
from skymemory_lab.sim.cluster.outcome import RequestOutcome
from skymemory_lab.sim.cluster.setup import ClusterSetup, PoolSettings, PromptHandover
from skymemory_lab.sim.cluster.simulation import run_cluster
from skymemory_lab.sim.trace import TraceRequest

PARTS = ("fit", "real", "coupled", "overload", "split", "curve")
SEEDS = {0.3: 2, 0.6: 2, 0.85: 3}
"""Plays by load: near saturation, the mean time to the first token is that of the burst that a seed happens to have."""
CALIBRATED = (0.3, 0.5, 0.75)
"""Loads of the plays that the fit's last three numbers are from: one play alone is off by a tenth."""
MORE_S = (0.0, 0.01, 0.02, 0.03, 0.05, 0.08)
"""Tried as what a request at work takes more than a lone one, at any load."""
GOAL = 0.25
"""By how much the simulated mean time to the first token may be off."""
CACHE_BYTES = 512 << 20
LOOSE = 5.0
SPLITS = (0, 32, 64, 128, 256)
RULES = ("all", "early")
"""Of admission."""
Row = dict[str, Any]


def say(words: str) -> None:
    """Progress, in one line on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{words}", end="", file=sys.stderr, flush=True)


# --- one play, real or simulated, as figures ---


@dataclass(frozen=True)
class Times:
    """Of one request; nan: it was not served."""

    ttft_s: float
    tbt_s: float
    end_s: float


def of_real(outcomes: Sequence[ReplayOutcome]) -> list[Times]:
    nothing = Times(math.nan, math.nan, math.nan)
    return [
        Times(one.due_ttft_s, one.tbt_s, one.end_s) if one.status is ResponseStatus.COMPLETED else nothing
        for one in outcomes
    ]


def of_simulated(outcomes: Sequence[RequestOutcome]) -> list[Times]:
    return [
        Times(one.ttft_s or math.nan, one.tbt_mean_s or math.nan, one.end_s or math.nan)
        if one.status == "completed"
        else Times(math.nan, math.nan, math.nan)
        for one in outcomes
    ]


def kept(one: Times, slo: Slo) -> bool:
    return one.ttft_s <= slo.ttft_s and not one.tbt_s > slo.tbt_s


def figures(times: Sequence[Times], requests: Sequence[TraceRequest], slo: Slo, hit_rate: float) -> Row:
    ttft, tbt = spread(one.ttft_s for one in times), spread(one.tbt_s for one in times)
    ends = [one.end_s for one in times if not math.isnan(one.end_s)]
    good = sum(kept(one, slo) for one in times)
    elapsed_s = max(ends, default=math.nan) - requests[0].at_s
    row = {
        "served": ttft.count,
        "ttft_mean_s": ttft.mean,
        "ttft_p50_s": ttft.p50,
        "ttft_p99_s": ttft.p99,
        "tbt_mean_s": tbt.mean,
        "tbt_p50_s": tbt.p50,
        "tbt_p99_s": tbt.p99,
        "hit_rate": hit_rate,
        "kept": good,
        "goodput_per_s": good / elapsed_s,
    }
    return {name: round(value, 5) if isinstance(value, float) else value for name, value in row.items()}


def real_hits(spent: Sequence[dict[str, float]], coupled: bool) -> float:
    """Part of the prompts' tokens that the engines that prefill had cached."""
    counted = spent if coupled else spent[:1]
    prompts = sum(one.get(PROMPTS, 0.0) for one in counted)
    return 1.0 - sum(one.get(COMPUTED, 0.0) for one in counted) / prompts if prompts else math.nan


def slower(handover: PromptHandover, decode: float) -> PromptHandover:
    return replace(handover, take_s=handover.take_s * decode, take_token_s=handover.take_token_s * decode)


def contended(model: Fitted, requests: Sequence[TraceRequest], coupled: bool) -> tuple[float, float]:
    """How many times as long prefills and decoding take with these requests as on idle engines.

    Each engine is slower while the other one works. For how much of the time that is follows from the requests: the
    part of a play in which it would be busy, which in turn depends on how slow it is.
    """
    each = busy_s(
        requests,
        scaled(model.cost, model.prefill_at_work, model.decode_at_work),
        slower(model.handover, model.decode_at_work),
    )
    works = [len(requests) * one for one in each]
    span_s = max(requests[-1].at_s, 1e-9)
    slow = [1.0, 1.0]
    for _ in range(20):
        busy = [min(1.0, work * factor / span_s) for work, factor in zip(works, slow, strict=True)]
        if coupled:
            busy = [sum(busy) / 2] * 2
        slow = [1.0 + (model.prefill_beside - 1.0) * busy[1], 1.0 + (model.decode_beside - 1.0) * busy[0]]
    return model.prefill_at_work * slow[0], model.decode_at_work * slow[1]


def setup_of(kind: Kind, model: Fitted, slo: Slo, coupled: bool, requests: Sequence[TraceRequest] = ()) -> ClusterSetup:
    """The simulator's twin of ``_disagg_real.servers``; without ``requests``, of engines that share no computer."""
    prefill, decode = model.prefill_at_work, model.decode_at_work
    if requests:
        prefill, decode = contended(model, requests, coupled)
    setup = ClusterSetup(
        prefill=1,
        decode=1,
        cost=scaled(model.cost, prefill, decode),
        handover=slower(model.handover, decode),
        request_s=model.request_s,
        most_batch=kind.most_batch,
        mixed_tokens=kind.mixed_tokens,
        coupled_cache_tokens=CACHE_BYTES // model.cost.shape.kv_bytes_per_token,
        pool=PoolSettings(dram_bytes=CACHE_BYTES),
        slo=slo,
    )
    return setup.with_coupled() if coupled else setup


def simulated(kind: Kind, model: Fitted, slo: Slo, requests: Sequence[TraceRequest], coupled: bool) -> Row:
    setup = setup_of(kind, model, slo, coupled, requests)
    outcomes = run_cluster(requests, setup, "least-ttft" if coupled else "cache-aware").outcomes
    hits = sum(one.cached_tokens for one in outcomes) / sum(one.prompt_tokens for one in outcomes)
    return figures(of_simulated(outcomes), requests, slo, hits)


def rate_of(mix: Mix, load_part: float, model: Fitted, seed: int) -> float:
    """Requests per second of that part of what 1P+1D can do."""
    requests = requests_of(mix, 100.0, 3.0, seed)  # so many that both are busy all the time
    prefill, decode = contended(model, requests, False)
    return load_part / max(busy_s(requests, scaled(model.cost, prefill, decode), slower(model.handover, decode)))


def slo_of(mix: Mix, model: Fitted) -> Slo:
    tokens = round(mix.own.median)
    one = model.handover
    lone_s = model.cost.prefill_s(tokens) + model.request_s + one.save_s + one.fetch_s + one.take_s
    lone_s += tokens * (one.save_token_s + one.fetch_token_s + one.take_token_s)
    return Slo(round(LOOSE * lone_s, 3), round(LOOSE * model.cost.decode_step_s(1, tokens), 4))


# --- parts ---


@dataclass(frozen=True)
class Bench:
    kind: Kind
    seed: int
    quick: bool
    folder: Path

    def seconds(self, whole: float) -> float:
        return 12.0 if self.quick else whole


def fit(bench: Bench) -> tuple[Fitted, list[Row]]:
    with ExitStack() as stack:
        on = stack.enter_context(servers(bench.kind, bench.folder, coupled=False))
        url = stack.enter_context(routed(on, "fit"))
        found = asyncio.run(fitted(on, url, bench.seed, bench.quick, say))
        found = at_work(bench, found, on, url)
    row = {
        "cost": json.loads(dump(found.cost)),
        "handover": asdict(found.handover),
        "request_s": found.request_s,
        "prefill_at_work": found.prefill_at_work,
        "decode_at_work": found.decode_at_work,
        "prefill_beside": found.prefill_beside,
        "decode_beside": found.decode_beside,
        **found.points,
    }
    return found, [row]


def at_work(bench: Bench, model: Fitted, on: Servers, url: str) -> Fitted:
    """What laws of idle engines do not show, from plays with seeds of their own: factors of decoding and of prefills,
    and a time that every request takes more, with which the simulator's mean times between tokens, then to the first
    token, are those of the plays: on average, and as far as two numbers can, of each."""
    mix = MIXES["chat"]
    slo = slo_of(mix, model)
    _warm(on, url)
    plays = []
    for number, load_part in enumerate(CALIBRATED[:1] if bench.quick else CALIBRATED):
        seed = bench.seed + 500 + number
        requests = requests_of(mix, rate_of(mix, load_part, model, seed), bench.seconds(25.0), seed)
        say(f"plays to calibrate: {len(requests)} requests at {load_part:.0%}")
        played_s = of_real(asyncio.run(played(on, url, requests, seed)).outcomes)
        plays.append((requests, figures(played_s, requests, slo, 0.0)))

    def ratios(tried: Fitted, what: str) -> list[float]:
        return [simulated(bench.kind, tried, slo, requests, False)[what] / got[what] for requests, got in plays]

    def balanced(tried: Fitted, name: str, what: str) -> Fitted:
        """With the factor that makes the ratios 1 on average: every play has the same weight, whatever its times."""
        low, high = 0.5, 2.0
        for _ in range(9):
            middle = math.sqrt(low * high)
            parts = ratios(replace(tried, **{name: middle}), what)
            low, high = (middle, high) if sum(parts) < len(parts) else (low, middle)
        return replace(tried, **{name: round(math.sqrt(low * high), 4)})

    lone_s = model.request_s
    for _ in range(2):
        model = balanced(model, "decode_at_work", "tbt_mean_s")
        tried = [
            balanced(replace(model, request_s=lone_s + more_s), "prefill_at_work", "ttft_mean_s")
            for more_s in (MORE_S[:1] if len(plays) == 1 else MORE_S)
        ]
        model = min(tried, key=lambda one: max(abs(part - 1.0) for part in ratios(one, "ttft_mean_s")))
    return model


def read_fit(row: Row) -> Fitted:
    return Fitted(
        parse(json.dumps(row["cost"])),
        PromptHandover(**row["handover"]),
        *(row[name] for name in ("request_s", "prefill_at_work", "decode_at_work")),
        {},
        *(row.get(name, 1.0) for name in ("prefill_beside", "decode_beside")),
    )


def real(bench: Bench, model: Fitted) -> list[Row]:
    """On requests of seeds that the fit has not seen."""
    rows: list[Row] = []
    mix = MIXES["chat"]
    slo = slo_of(mix, model)
    with ExitStack() as stack:
        on = stack.enter_context(servers(bench.kind, bench.folder, coupled=False))
        url = stack.enter_context(routed(on, "real"))
        _warm(on, url)
        plan = [(load_part, repeat) for load_part, repeats in SEEDS.items() for repeat in range(repeats)]
        for load_part, repeat in plan[1:2] if bench.quick else plan:
            seed = bench.seed + 1000 + round(100 * load_part) + repeat
            requests = requests_of(mix, rate_of(mix, load_part, model, seed), bench.seconds(25.0), seed)
            say(f"simulator and real: {len(requests)} requests at {load_part:.0%}")
            play = asyncio.run(played(on, url, requests, seed))
            label = {"mix": mix.name, "load": load_part, "seed": seed, "requests": len(requests), **asdict(slo)}
            got = figures(of_real(play.outcomes), requests, slo, real_hits(play.spent, False))
            rows.append({**label, "way": "1P+1D", "what": "real", **got})
            rows.append(
                {**label, "way": "1P+1D", "what": "simulator", **simulated(bench.kind, model, slo, requests, False)}
            )
    return rows


def _warm(on: Servers, url: str) -> None:
    """Engines, connections and the router have had requests of all lengths."""
    requests = [
        TraceRequest(0.3 * number, 200 * (number + 1), 8, (number, 100 + number, 200 + number)) for number in range(6)
    ]
    asyncio.run(played(on, url, requests, 77))


def off(rows: Sequence[Row], load_part: float) -> float:
    """By which part the simulator's mean time to the first token is off, over all plays at a load."""
    mine = [row for row in rows if row["load"] == load_part]
    real_s, twin_s = (sum(row["ttft_mean_s"] for row in mine if row["what"] == what) for what in ("real", "simulator"))
    return float(twin_s / real_s - 1.0)


def show_real(rows: Sequence[Row]) -> None:
    print_table(
        "simulator | real, 1P+1D",
        ["mix", "load", "requests", "", "TTFT mean", "p50", "p99", "TBT mean", "p99", "hits", "goodput /s", "TTFT off"],
        [
            [
                row["mix"],
                f"{row['load']:.0%}",
                row["requests"],
                row["what"],
                *(f"{row[name] * 1e3:.0f} ms" for name in ("ttft_mean_s", "ttft_p50_s", "ttft_p99_s")),
                *(f"{row[name] * 1e3:.1f} ms" for name in ("tbt_mean_s", "tbt_p99_s")),
                f"{row['hit_rate']:.1%}",
                f"{row['goodput_per_s']:.2f}",
                "" if row["what"] == "real" else f"{row['ttft_mean_s'] / rows[at - 1]['ttft_mean_s'] - 1:+.1%}",
            ]
            for at, row in enumerate(rows)
        ],
    )
    for load_part in sorted({row["load"] for row in rows}):
        print(f"TTFT off at {load_part:.0%}: {off(rows, load_part):+.1%}; goal {GOAL:.0%}")


def coupled(bench: Bench, model: Fitted) -> list[Row]:
    """Both ways, the same requests; then both in the simulator."""
    rows: list[Row] = []
    names = ("chat",) if bench.quick else ("chat", "answers")
    loads = (0.6,)
    for is_coupled in (False, True):
        with ExitStack() as stack:
            on = stack.enter_context(servers(bench.kind, bench.folder, coupled=is_coupled))
            url = stack.enter_context(routed(on, "coupled" if is_coupled else "apart", *_known(bench, model)))
            _warm(on, url)
            for name in names:
                for load_part in loads:
                    mix, seed = MIXES[name], bench.seed + 2000 + round(100 * load_part)
                    slo = slo_of(mix, model)
                    requests = requests_of(mix, rate_of(mix, load_part, model, seed), bench.seconds(14.0), seed)
                    way = "two coupled" if is_coupled else "1P+1D"
                    say(f"{way}: {len(requests)} requests of {name} at {load_part:.0%}")
                    play = asyncio.run(played(on, url, requests, seed))
                    got = figures(of_real(play.outcomes), requests, slo, real_hits(play.spent, is_coupled))
                    label = {"mix": name, "load": load_part, "seed": seed, "requests": len(requests), "way": way}
                    rows.append({**label, **asdict(slo), "what": "real", **got})
                    twin = simulated(bench.kind, model, slo, requests, is_coupled)
                    rows.append({**label, **asdict(slo), "what": "simulator", **twin})
    return sorted(rows, key=lambda row: (names.index(row["mix"]), row["load"], row["what"], row["way"]))


def _known(bench: Bench, model: Fitted) -> tuple[str, ...]:
    path = bench.folder / "cost.json"
    path.write_text(dump(model.cost))
    return "--cost", str(path)


def show_ways(rows: Sequence[Row]) -> None:
    print_table(
        "1P+1D against two coupled",
        ["mix", "load", "", "way", "TTFT p50", "p99", "TBT p50", "p99", "kept", "goodput /s"],
        [
            [
                row["mix"],
                f"{row['load']:.0%}",
                row["what"],
                row["way"],
                *(f"{row[name] * 1e3:.0f} ms" for name in ("ttft_p50_s", "ttft_p99_s")),
                *(f"{row[name] * 1e3:.1f} ms" for name in ("tbt_p50_s", "tbt_p99_s")),
                f"{row['kept']} of {row['requests']}",
                f"{row['goodput_per_s']:.2f}",
            ]
            for row in rows
        ],
    )


def overload(bench: Bench, model: Fitted) -> list[Row]:
    """The same requests with early rejection and without."""
    rows: list[Row] = []
    mix = MIXES["chat"]
    slo = slo_of(mix, model)
    with ExitStack() as stack:
        on = stack.enter_context(servers(bench.kind, bench.folder, coupled=False))
        for rule in RULES:
            promised = f'ttft = "{slo.ttft_s}s"\ntbt = "{slo.tbt_s}s"\n'
            settings = f'[admission]\nrule = "{rule}"\n{promised}' if rule != "all" else ""
            url = stack.enter_context(routed(on, rule, *_known(bench, model), settings=settings))
            _warm(on, url)
            for times in (2.0,) if bench.quick else (1.5, 3.0):
                seed = bench.seed + 3000 + round(10 * times)
                requests = requests_of(mix, rate_of(mix, times, model, seed), bench.seconds(15.0), seed)
                say(f"overload, rule {rule}: {len(requests)} requests at {times:g} times")
                play = asyncio.run(played(on, url, requests, seed + RULES.index(rule)))
                label = {"mix": mix.name, "load": times, "seed": seed, "requests": len(requests), "rule": rule}
                got = figures(of_real(play.outcomes), requests, slo, real_hits(play.spent, False))
                refused = sum(one.status is ResponseStatus.REFUSED for one in play.outcomes)
                prefills = round(play.spent[0].get(COUNT, 0.0))
                rows.append({**label, **asdict(slo), **got, "refused": refused, "prefills": prefills})
    return sorted(rows, key=lambda row: (row["load"], row["rule"]))


def show_overload(rows: Sequence[Row]) -> None:
    print_table(
        "promises under overload, 1P+1D",
        ["load", "rule", "requests", "refused", "prefilled", "kept", "of all", "of served", "TTFT p99", "TBT p99"],
        [
            [
                f"{row['load']:g} ×",
                row["rule"],
                row["requests"],
                row["refused"],
                row["prefills"],
                row["kept"],
                f"{row['kept'] / row['requests']:.1%}",
                f"{row['kept'] / max(1, row['served']):.1%}",
                f"{row['ttft_p99_s'] * 1e3:.0f} ms",
                f"{row['tbt_p99_s'] * 1e3:.1f} ms",
            ]
            for row in rows
        ],
    )


def split(bench: Bench, model: Fitted) -> list[Row]:
    """The same lengths and times for each setting, with text of their own."""
    rows: list[Row] = []
    slo, seed, load_part = slo_of(TURNS, model), bench.seed + 4000, 0.6
    requests = requests_of(TURNS, rate_of(TURNS, load_part, model, seed), bench.seconds(20.0), seed)
    with ExitStack() as stack:
        on = stack.enter_context(servers(bench.kind, bench.folder, coupled=False))
        for at, split_from in enumerate(SPLITS):
            url = stack.enter_context(routed(on, f"split-{split_from}", split_from=split_from))
            if not at:
                _warm(on, url)
            say(f"{len(requests)} requests, split from {split_from} tokens on")
            before = counters(url)
            play = asyncio.run(played(on, url, requests, seed + at))
            alone = counters(url).get(ALONE, 0.0) - before.get(ALONE, 0.0)
            got = figures(of_real(play.outcomes), requests, slo, real_hits(play.spent, False))
            label = {"mix": TURNS.name, "load": load_part, "seed": seed, "requests": len(requests)}
            rows.append({**label, **asdict(slo), "split_from": split_from, "alone": round(alone), **got})
    return rows


def show_split(rows: Sequence[Row]) -> None:
    print_table(
        "1P+1D, requests served alone by the decode engine",
        ["split from", "requests", "alone", "TTFT mean", "p50", "p99", "TBT mean", "p99", "kept"],
        [
            [
                row["split_from"],
                row["requests"],
                row["alone"],
                *(f"{row[name] * 1e3:.0f} ms" for name in ("ttft_mean_s", "ttft_p50_s", "ttft_p99_s")),
                *(f"{row[name] * 1e3:.1f} ms" for name in ("tbt_mean_s", "tbt_p99_s")),
                f"{row['kept']} of {row['requests']}",
            ]
            for row in rows
        ],
    )


def speeds(bench: Bench, model: Fitted, path: Path | None) -> list[Row]:
    """The curve; all of it into the file at ``path``."""
    setup = setup_of(bench.kind, model, slo_of(MIXES["chat"], model), False)
    assert setup.handover is not None
    base = Machine(setup.cost, setup.handover, setup.request_s)
    rows = curve(base, setup, bench.seed, bench.quick, say)
    if path is not None:
        write(rows, path)
    return rows


def show_speeds(rows: Sequence[Row]) -> None:
    found = [(cell, ratio(its)) for cell, its in cells(rows).items()]
    print_table(
        "apart over coupled: goodput at the best of all loads; at equal speeds, then the best speeds",
        ["mix", "", "link", *(f"{speed} ×" for speed in SPEEDS), "best", "prefill", "decode"],
        [
            [
                mix,
                f"{pairs:.0f}P+{pairs:.0f}D",
                f"{link:.0f} ×",
                *(next((f"{more:.2f}" for cell, more in its if cell[3] == cell[4] == speed), "") for speed in SPEEDS),
                *_best(its),
            ]
            for (mix, pairs, link) in dict.fromkeys(cell[:3] for cell, _ in found)
            for its in [[one for one in found if one[0][:3] == (mix, pairs, link)]]
        ],
    )


def _best(its: Sequence[tuple[tuple[Any, ...], float]]) -> tuple[str, str, str]:
    cell, more = max((one for one in its if not math.isnan(one[1])), key=lambda one: one[1])
    return f"{more:.2f}", f"{cell[3]:.0f} ×", f"{cell[4]:.0f} ×"


# --- the file, and the command line ---


def read_rows(path: Path | None, engine: str) -> dict[str, list[Row]]:
    """The parts that the file has of this engine."""
    if path is None or not path.is_file():
        return {}
    found: dict[str, list[Row]] = {}
    for row in json.loads(path.read_text("utf-8"))["rows"]:
        if row["engine"] == engine:
            found.setdefault(row["part"], []).append({k: v for k, v in row.items() if k not in ("engine", "part")})
    return found


def write_rows(path: Path | None, seed: int, engine: str, parts: dict[str, list[Row]]) -> None:
    """Replaces the rows of this engine; those of the other one stay."""
    if path is None:
        return
    others = []
    if path.is_file():
        others = [row for row in json.loads(path.read_text("utf-8"))["rows"] if row["engine"] != engine]
    ours = [{"engine": engine, "part": name, **row} for name in PARTS for row in parts.get(name, ())]
    rows = sorted([*others, *ours], key=lambda row: row["engine"])
    content = {"benchmark": "disagg", "seed": seed, "versions": versions(), "rows": rows}
    path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("own", "vllm"), default="own")
    parser.add_argument("--python", type=Path, default=Path(".venv-vllm/bin/python"), help="of vLLM's environment")
    parser.add_argument("--parts", default=",".join(PARTS), metavar="A,B")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="for the rows of the part curve")
    options = parser.parse_args()
    wanted = options.parts.split(",")
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"--parts: no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if options.engine == "vllm" and {*wanted} != {"curve"} and not options.python.is_file():
        parser.error(f"--python {options.python}: no such file; `make demo-vllm` makes an environment with vLLM")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what it has started
    parts = read_rows(options.json, options.engine)
    if "fit" not in wanted and not parts.get("fit"):
        parser.error("there is no fit of this engine in --json: add the part fit")
    with tempfile.TemporaryDirectory(prefix="sky-") as text:
        folder = Path(text)
        kind = own() if options.engine == "own" else vllm(options.python.absolute(), folder / "model")
        bench = Bench(kind, options.seed, options.quick, folder)
        if "fit" in wanted:
            model, parts["fit"] = fit(bench)
            write_rows(options.json, options.seed, options.engine, parts)
        model = read_fit(parts["fit"][0])
        for name, run, show in RUNS:
            if name in wanted:
                parts[name] = run(bench, model)
                say("")
                show(parts[name])
                write_rows(options.json, options.seed, options.engine, parts)
        if "curve" in wanted:
            rows = speeds(bench, model, options.csv)
            say("")
            show_speeds(rows)


RUNS = (
    ("real", real, show_real),
    ("coupled", coupled, show_ways),
    ("overload", overload, show_overload),
    ("split", split, show_split),
)


if __name__ == "__main__":
    main()
