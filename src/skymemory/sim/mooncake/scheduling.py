"""Who prefills: time to first token by scheduler (FAST'25 figure 5, arXiv figure 8), by the network's rate, and by how
many of the machines prefill.
"""

from __future__ import annotations

from dataclasses import replace

from skymemory.sim.cluster.cells import CellAnswer, ClusterCell, run_cell
from skymemory.sim.cluster.setup import ClusterSetup
from skymemory.sim.mooncake.base import DECODING_WORDS, DECODINGS, Experiment, Setting, Told
from skymemory.sim.sweeps import sweep

SCHEDULERS = ("random", "load-balance", "cache-aware", "kvcache-centric")
PUBLISHED_TTFT_S = {"random": 19.65, "load-balance": 5.27, "cache-aware": 3.58, "kvcache-centric": 3.07}
VARIANTS = ("fast25", "arxiv", "cheaper")
GBIT_BYTES = 1e9 / 8
NETWORK_GBIT = (24, 50, 100, 200, 400)
NODES = 16
NEAR = 0.001
"""Splits that keep so little fewer promises than the best are named with it."""
PREFILLING = (4, 6, 7, 8, 9, 10, 12)
RATIO_RATES = (1.0, 1.5, 2.0)


def scheduling(setting: Setting) -> Experiment:
    """Mean time to first token under each scheduler, and under each published variant of Algorithm 1."""
    cells = [ClusterCell(setting.source, ClusterSetup(seed=setting.seed), name) for name in SCHEDULERS]
    cells += [
        ClusterCell(setting.source, ClusterSetup(seed=setting.seed), "kvcache-centric", (("variant", variant),))
        for variant in VARIANTS
    ]
    cells.append(ClusterCell(setting.source, ClusterSetup(seed=setting.seed), "least-load"))
    found = sweep(run_cell, cells, setting.way, setting.jobs, setting.progress)
    names = [*SCHEDULERS, *(f"kvcache-centric, {variant}" for variant in VARIANTS), "least requests"]
    ours = {name: answer.metrics.ttft_s.mean for name, answer in zip(SCHEDULERS, found, strict=False)}
    told = [Told(f"mean TTFT, {name}", "s", PUBLISHED_TTFT_S[name], ours[name], _why(name)) for name in SCHEDULERS]
    for name in SCHEDULERS[1:]:
        theirs = PUBLISHED_TTFT_S[name] / PUBLISHED_TTFT_S["random"]
        told.append(Told(f"{name} over random", "", theirs, ours[name] / ours["random"], digits=3))
    theirs = PUBLISHED_TTFT_S["kvcache-centric"] / PUBLISHED_TTFT_S["cache-aware"] - 1
    saved = ours["kvcache-centric"] / ours["cache-aware"] - 1
    told.append(Told("kvcache-centric against cache-aware", "%", 100 * theirs, 100 * saved, digits=0))
    least = found[-1].metrics.ttft_s.mean
    told.append(Told("mean TTFT, fewest requests", "s", PUBLISHED_TTFT_S["load-balance"], least, _FEWEST_WHY))
    return Experiment(
        name="scheduling",
        published_as="FAST'25 figure 5; arXiv figure 8",
        title="Mean time to first token by scheduler, 8 machines that prefill and 8 that decode",
        source=setting.source.name,
        assumed=(
            "half of the machines' speed is reached (mfu 0.5): our choice, the papers name none",
            "1 TB of DRAM a node for KV; 800 Gbit/s between nodes; the trace's own rate",
            "arrivals spread over the 3 s between the trace's batches; nobody is refused",
        ),
        header=("scheduler", *_HEADER),
        rows=tuple((name, *_row(answer)) for name, answer in zip(names, found, strict=True)),
        told=tuple(told),
    )


def bandwidth(setting: Setting) -> Experiment:
    """Mean time to first token by the rate of the network between nodes."""
    alone = ClusterCell(setting.source, ClusterSetup(seed=setting.seed), "cache-aware")
    cells = [alone]  # Nothing is moved for a prefill there: the network's rate makes no difference to it.
    for gbit in NETWORK_GBIT:
        cost = ClusterSetup().cost
        machine = replace(cost.machine, network_bytes_per_s=gbit * GBIT_BYTES)
        setup = ClusterSetup(cost=replace(cost, machine=machine), seed=setting.seed)
        cells.append(ClusterCell(setting.source, setup, "kvcache-centric"))
    local, *others = (answer.metrics for answer in sweep(run_cell, cells, setting.way, setting.jobs, setting.progress))
    rows = []
    for gbit, everywhere in zip(NETWORK_GBIT, others, strict=True):
        remote = sum(part for source, part in everywhere.hits.tokens_by_source.items() if source != "local")
        rows.append((gbit, local.ttft_s.mean, everywhere.ttft_s.mean, everywhere.ttft_s.p90, remote))
    above = max(row[2] for row in rows if row[0] >= 100)
    return Experiment(
        name="bandwidth",
        published_as="FAST'25, transfer bandwidth from 24 to 400 Gbit/s",
        title="Time to first token by the network's rate",
        source=setting.source.name,
        assumed=("as for scheduling; the rate is each node's, in each direction",),
        header=("gbit_per_s", "cache_aware_mean_ttft_s", "mean_ttft_s", "p90_ttft_s", "tokens_from_other_nodes"),
        rows=tuple(rows),
        told=(
            Told("worst mean TTFT at 100 Gbit/s and more", "s", "below 2", above),
            Told("mean TTFT at 24 over that at 400 Gbit/s", "×", None, rows[0][2] / rows[-1][2],
                 "who weighs loading against computing loads less where the network is slow"),
        ),
    )  # fmt: skip


def ratio(setting: Setting) -> Experiment:
    """How many of 16 machines should prefill, by what a decoding step takes and by how fast requests come."""
    counts = (6, 8, 10) if setting.quick else PREFILLING
    rates = RATIO_RATES[1:2] if setting.quick else RATIO_RATES
    labels = [(decoding, rate, count) for decoding in DECODINGS for rate in rates for count in counts]
    cells = [
        ClusterCell(
            setting.source,
            ClusterSetup(prefill=count, decode=NODES - count, cost=DECODINGS[name], rate=rate, seed=setting.seed),
        )
        for name, rate, count in labels
    ]
    found = sweep(run_cell, cells, setting.way, setting.jobs, setting.progress)
    met = {label: answer.metrics.met for label, answer in zip(labels, found, strict=True)}
    told = []
    for name in DECODINGS:
        for rate in rates:
            most = max(met[name, rate, count] for count in counts)
            near = [count for count in counts if met[name, rate, count] >= most * (1 - NEAR)]
            best = next(count for count in near if met[name, rate, count] == most)
            words = f"{near[0]} to {near[-1]} keep as many within {NEAR:.1%}" if len(near) > 1 else ""
            what = f"best number of machines that prefill, {name}, {rate:g} times the trace's rate"
            told.append(Told(what, "", 8.0, best, words, digits=0))
    return Experiment(
        name="ratio",
        published_as="FAST'25, prefill:decode ratio on 16 nodes",
        title="Machines that prefill, of 16",
        source=setting.source.name,
        assumed=(
            "SLOs of 30 s and 0.1 s; nobody is refused; best: most requests with both promises kept",
            "their rate of replay is not stated; ours are told at 1, 1.5 and 2 times the trace's",
            DECODING_WORDS,
        ),
        header=("decoding", "rate", "prefill", "decode", *_HEADER),
        rows=tuple(
            (name, rate, count, NODES - count, *_row(answer))
            for (name, rate, count), answer in zip(labels, found, strict=True)
        ),
        told=tuple(told),
    )


_FEWEST_WHY = "if theirs counts requests instead: the router's least-load does"
_HEADER = (
    "mean_ttft_s", "p50_ttft_s", "p90_ttft_s", "p99_ttft_s", "mean_tbt_ms", "p90_tbt_ms", "met", "goodput_per_s",
    "token_hits", "prefill_utilisation", "decode_utilisation",
)  # fmt: skip


def _row(answer: CellAnswer) -> tuple[object, ...]:
    one = answer.metrics
    return (
        one.ttft_s.mean, one.ttft_s.p50, one.ttft_s.p90, one.ttft_s.p99, one.tbt_request_s.mean * 1e3,
        one.tbt_request_s.p90 * 1e3, one.met, one.goodput_per_s, one.hits.tokens, one.prefill_utilisation,
        one.decode_utilisation,
    )  # fmt: skip


def _why(name: str) -> str:
    return {
        "random": "the level follows from the speed that is assumed; ratios and order are what to compare",
        "load-balance": "ours weighs estimated seconds in line, not numbers of requests",
        "cache-aware": "",
        "kvcache-centric": "ours takes per instance the cheaper of loading and computing, or both at once",
    }[name]
