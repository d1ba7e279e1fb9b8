"""Experiments on clusters: coupled machines (arXiv figures 11, 12, 13), schedulers, network rates and prefill:decode
ratios (FAST'25 figure 5, arXiv figure 8).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from skymemory.conductor.cost_model import CostModel
from skymemory.conductor.request import Slo
from skymemory_lab.reproduce.mooncake.base import (
    BOTH,
    DECODING_WORDS,
    DECODINGS,
    FAST_CONTEXTS,
    FAST_CONTEXTS_WORDS,
    MEMORY_WORDS,
    VLLM_WORDS,
    Experiment,
    ExperimentSetting,
    Value,
    columns,
)
from skymemory_lab.sim.cluster.cells import CapacityCell, ClusterCell, Rule, at_rate, capacity, run_cell
from skymemory_lab.sim.cluster.outcome import ClusterMetrics
from skymemory_lab.sim.cluster.setup import ClusterSetup
from skymemory_lab.sim.sweeps import sweep
from skymemory_lab.sim.trace import BLOCK_TOKENS, TraceRequest
from skymemory_lab.sim.workload import SIMULATED, OpenSource

REAL_SLO = Slo(30.0, 0.1)
TTFT_TIMES, TBT_TIMES = 10.0, 5.0
"""Factors of the SLOs, relative to an unloaded machine."""
COUNT, QUICK_COUNT = 500, 250
CHUNK_TOKENS = 2_048
RULES: tuple[Rule, ...] = ("p90", "p90 of the longest")
_APART = ("3P+1D", "2P+2D")
_COUPLED = ("4 coupled", "4 coupled, chunked")
_ALL = (*_APART, *_COUPLED)
PUBLISHED_SYSTEMS = ("10P+10D", "20 coupled", "20 coupled, chunked")
SEARCHED_PART = 0.4
RATES = (1.0, 1.5, 2.0, 3.0)
"""Multiples of the trace's rate; the first two have published figures."""
PUBLISHED_MET = {"10P+10D": 100.0, "20 coupled": 57.0}
"""Percent of the requests."""
PUBLISHED_GAIN = {"arxiv": 20.0, "l-eval": 40.0}
PUBLISHED_LONG = "50 to 525, by length"


def public_datasets(setting: ExperimentSetting) -> Experiment:
    """Compare four machines on arXiv summarization and L-Eval."""
    return _four_machines(setting, ("arxiv", "l-eval"), "datasets")


def simulated(setting: ExperimentSetting) -> Experiment:
    """Compare four machines on 16k to 128k tokens, half of them cached."""
    return _four_machines(setting, tuple(workload.name for workload in SIMULATED), "simulated")


def unloaded(cost: CostModel, requests: list[TraceRequest]) -> tuple[float, float]:
    """Return mean TTFT and TBT (s) on an idle machine, with all earlier blocks cached."""
    stored: set[int] = set()
    ttft_s = tbt_s = 0.0
    for request in requests:
        # The longest prefix of earlier prompts is cached, as on a single machine with unlimited memory.
        blocks = request.blocks()
        cached = next((at for at, block in enumerate(blocks) if block not in stored), len(blocks)) * BLOCK_TOKENS
        stored.update(blocks)
        ttft_s += cost.prefill_s(request.input_tokens, cached)
        tbt_s += cost.decode_step_s(1, request.input_tokens + request.output_tokens / 2)
    return ttft_s / len(requests), tbt_s / len(requests)


def systems(instances: tuple[int, int], scheduler: str = "kvcache-centric") -> dict[str, ClusterCell]:
    """Return cells by name: separate prefill and decode instances, and as many coupled, also with chunked prefill."""
    prefill, decode = instances
    total = prefill + decode
    cells = {f"{prefill}P+{decode}D": (ClusterSetup(prefill=prefill, decode=decode), scheduler)}
    together = ClusterSetup(prefill=prefill, decode=decode).with_coupled()
    cells[f"{total} coupled"] = (together, "cache-aware")
    cells[f"{total} coupled, chunked"] = (replace(together, mixed_tokens=CHUNK_TOKENS), "cache-aware")
    nothing = OpenSource("arxiv", 1.0, 1)
    return {name: ClusterCell(nothing, setup, who) for name, (setup, who) in cells.items()}


# For every workload and decode model, a search for the highest rate that keeps both SLOs, over four systems and two
# readings of the TBT. As in the paper, SLOs are multiples of the times of an unloaded machine with the same cost model:
# an absolute SLO would favour the model with short steps.
def _four_machines(setting: ExperimentSetting, workloads: tuple[str, ...], name: str) -> Experiment:
    count = QUICK_COUNT if setting.quick else COUNT
    costs = {**BOTH, "fast contexts": FAST_CONTEXTS}
    sources = {workload: OpenSource(workload, 1.0, count, setting.seed) for workload in workloads}
    searches: list[CapacityCell] = []
    labels: list[tuple[str, str, str, Rule]] = []
    promised: list[str] = []
    for (workload, source), (decoding, cost) in product(sources.items(), costs.items()):
        ttft_s, tbt_s = unloaded(cost, source.requests())
        slo = Slo(TTFT_TIMES * ttft_s, TBT_TIMES * tbt_s)
        promised.append(f"{workload}, {decoding} {slo.ttft_s:.2f} s, {slo.tbt_s * 1e3:.0f} ms")
        for system, cell in {**systems((2, 2)), **systems((3, 1))}.items():
            setup = replace(cell.setup, slo=slo, seed=setting.seed, cost=cost)
            ready = replace(cell, source=source, setup=setup)
            for rule in RULES:
                # From a twentieth to forty times the rate of an idle machine: no system lies outside.
                searches.append(CapacityCell(ready, 0.05 / ttft_s, 40.0 / ttft_s, rule=rule))
                labels.append((workload, decoding, system, rule))
    answers = dict(zip(labels, sweep(capacity, searches, setting.way, setting.jobs, setting.progress), strict=True))
    values: list[Value] = []
    for workload, decoding in product(workloads, costs):
        by_system = {(system, rule): answers[workload, decoding, system, rule] for system in _ALL for rule in RULES}
        which = f"{workload}, {decoding}"
        for rule in RULES:
            gain = _gain(by_system["3P+1D", rule].rate, by_system[_COUPLED[0], rule].rate)
            published = PUBLISHED_GAIN.get(workload, PUBLISHED_LONG) if rule == "p90" else None
            what = f"{which}: 3P+1D against 4 coupled, {rule}"
            values.append(Value(what, "% more requests", published, gain, _WHY[rule], digits=0))
        best = max(by_system[system, "p90"].rate for system in _APART)
        values.append(
            Value(
                f"{which}: best of 3P+1D and 2P+2D against 4 coupled with chunked prefill, p90",
                "% more requests",
                None,
                _gain(best, by_system[_COUPLED[1], "p90"].rate),
                "chunked prefill came to vLLM after the paper",
                digits=0,
            )
        )
    return Experiment(
        name=name,
        source=f"Poisson, {count} requests of each workload, the same at every rate",
        assumed=(
            f"promised: {TTFT_TIMES:g} × the TTFT and {TBT_TIMES:g} × the TBT of the same requests alone on a machine,"
            " all cached that came before: " + "; ".join(promised),
            MEMORY_WORDS,
            VLLM_WORDS,
            FAST_CONTEXTS_WORDS,
            "two readings of the TBT held against it: p90 over requests of their mean TBT, and of their longest",
            "coupled instances compute a prefill as soon as it is there and decoding waits (vLLM of the paper's time);"
            f" chunked: in steps of {CHUNK_TOKENS:,} tokens beside decoding; each request goes where estimated time to"
            " first token is least, own prefix cache counted (kinder to the rival than equal shares)",
        ),
        header=("workload", "decoding", "system", "rule", "requests_per_s", *_HEADER),
        rows=tuple(
            (*label, answer.rate if answer.metrics else 0.0, *columns(answer.metrics, _HEADER))
            for label, answer in answers.items()
        ),
        values=tuple(values),
    )


def real(setting: ExperimentSetting) -> Experiment:
    """Compare 20 machines on the conversation trace: separate in the published and other splits, and coupled."""
    costs = {**BOTH, **DECODINGS}
    labels, cells = [], []
    for decoding, cost in costs.items():
        for name, cell in {**systems((10, 10)), **systems((14, 6)), **systems((16, 4))}.items():
            setup = replace(cell.setup, slo=REAL_SLO, seed=setting.seed, cost=cost)
            labels.append((decoding, name))
            cells.append(replace(cell, source=setting.source, setup=setup, until_part=SEARCHED_PART))
    # Only published systems are measured at fixed rates; other splits are searched, to see what 10P+10D leaves.
    flat = [(label, rate) for label in labels if label[1] in PUBLISHED_SYSTEMS for rate in RATES]
    runs = [replace(at_rate(cells[labels.index(label)], rate), until_part=1.0) for label, rate in flat]
    searches = [CapacityCell(cell, 0.5, 8.0, 4 if setting.quick else 6, "attainment") for cell in cells]
    # Two sweeps with a common progress: searches take far longer than single runs.
    total = len(runs) + len(searches)
    capacities = sweep(capacity, searches, setting.way, setting.jobs, lambda done, of: setting.progress(done, total))
    measured = sweep(
        run_cell, runs, setting.way, setting.jobs, lambda done, of: setting.progress(len(searches) + done, total)
    )
    rates = {label: highest.rate for label, highest in zip(labels, capacities, strict=True)}
    rows: list[tuple[object, ...]] = []
    for label, highest in zip(labels, capacities, strict=True):
        rows.append((*label, "capacity", highest.rate, *columns(highest.metrics, _REAL_HEADER)))
    for (label, rate), answer in zip(flat, measured, strict=True):
        rows.append((*label, "measured", rate, *columns(answer.metrics, _REAL_HEADER)))
    runs_by = {(*label, rate): answer.metrics for (label, rate), answer in zip(flat, measured, strict=True)}
    values = [line for decoding in costs for line in _real_values(decoding, rates, runs_by)]
    return Experiment(
        name="real",
        source=setting.source.name,
        assumed=(
            "promised: 30 s to the first token, 0.1 s a token as the request's mean",
            "capacity: the highest rate, in multiples of the trace's, at which 90 % of the requests have both, over the"
            f" first {SEARCHED_PART:.0%} of the time; measured: all of it",
            MEMORY_WORDS,
            DECODING_WORDS,
            "their rate of replay is not stated; ours are 1, 1.5, 2 and 3 times the trace's",
            "which TBT is held against 0.1 s is not stated: a request's mean, or each of its tokens'; their 75 % more"
            " requests within both SLOs seem to be 100 % over 57 %",
        ),
        header=("decoding", "system", "what", "rate", *_REAL_HEADER),
        rows=tuple(rows),
        values=tuple(values),
    )


def _real_values(
    decoding: str, rates: dict[tuple[str, str], float], runs: dict[tuple[str, str, float], ClusterMetrics]
) -> list[Value]:
    # Compare the systems with one ``decoding`` model: rates by (decoding, system), runs by (…, rate).
    separate, coupled, chunked = PUBLISHED_SYSTEMS
    ours, rival, kinder = (rates[decoding, name] for name in PUBLISHED_SYSTEMS)
    split = max((separate, "14P+6D", "16P+4D"), key=lambda name: rates[decoding, name])
    best = rates[decoding, split]
    values = []
    for rate, (name, published) in product(RATES[:2], PUBLISHED_MET.items()):
        metrics, where = runs[decoding, name, rate], f"{name}, rate × {rate:g}"
        values += [
            Value(f"{decoding}: mean TBT within 0.1 s, {where}", "%", published, 100 * metrics.tbt_met, digits=1),
            Value(
                f"{decoding}: no stall above 0.1 s, {where}", "%", published, 100 * metrics.longest_tbt_met, digits=1
            ),
        ]
    return [
        *values,
        Value(
            f"{decoding}: rate that {separate} takes, against {coupled}",
            "% more",
            None,
            _gain(ours, rival),
            _REAL_WHY[decoding],
            digits=0,
        ),
        Value(
            f"{decoding}: rate that the best split ({split}) takes, against {coupled}",
            "% more",
            None,
            _gain(best, rival),
            digits=0,
        ),
        Value(f"{decoding}: the same against {chunked}", "% more", None, _gain(best, kinder), digits=0),
    ]


_HEADER = ("p90_ttft_s", "p90_tbt_s", "p90_longest_tbt_s", "token_hits", "prefill_utilisation", "decode_utilisation")
_REAL_HEADER = (
    "attainment",
    "ttft_met",
    "tbt_met",
    "longest_tbt_met",
    "p90_ttft_s",
    "p90_tbt_s",
    "p90_longest_tbt_s",
    "prefill_utilisation",
)
_WHY: dict[Rule, str] = {
    "p90": "the mean of a request's TBT forgives stalls",
    "p90 of the longest": "any prefill of others stalls decoding beyond the SLO",
}
_REAL_WHY = {
    "memory": "ten machines prefill, and 20 coupled ones twice as much; with steps of 9 ms a mean TBT of 0.1 s forgives"
    " prefilling nine tenths of the time",
    **dict.fromkeys(
        DECODINGS, "the slower a step, the sooner prefills beside it break 0.1 s; the ten that decode have room still"
    ),
}


def _gain(ours: float, theirs: float) -> float:
    return 100 * (ours / theirs - 1) if theirs else float("inf")


SCHEDULERS = ("random", "load-balance", "cache-aware", "kvcache-centric")
PUBLISHED_TTFT_S = {"random": 19.65, "load-balance": 5.27, "cache-aware": 3.58, "kvcache-centric": 3.07}
VARIANTS = ("fast25", "arxiv", "cheaper")
GBIT_BYTES = 1e9 / 8
NETWORK_GBIT = (24, 50, 100, 200, 400)
NODES = 16
NEAR = 0.001
"""Relative difference within which splits are equally good."""
PREFILLING = (4, 6, 7, 8, 9, 10, 12)
RATIO_RATES = (1.0, 1.5, 2.0)


def scheduling(setting: ExperimentSetting) -> Experiment:
    """Compare mean TTFTs of the schedulers, and of the published variants of Algorithm 1."""
    cells = [ClusterCell(setting.source, ClusterSetup(seed=setting.seed), name) for name in SCHEDULERS]
    cells += [
        ClusterCell(setting.source, ClusterSetup(seed=setting.seed), "kvcache-centric", (("variant", variant),))
        for variant in VARIANTS
    ]
    cells.append(ClusterCell(setting.source, ClusterSetup(seed=setting.seed), "least-load"))
    answers = sweep(run_cell, cells, setting.way, setting.jobs, setting.progress)
    names = [*SCHEDULERS, *(f"kvcache-centric, {variant}" for variant in VARIANTS), "least requests"]
    ours = {name: answer.metrics.ttft_s.mean for name, answer in zip(SCHEDULERS, answers, strict=False)}
    values = [Value(f"mean TTFT, {name}", "s", PUBLISHED_TTFT_S[name], ours[name], _why(name)) for name in SCHEDULERS]
    for name in SCHEDULERS[1:]:
        theirs = PUBLISHED_TTFT_S[name] / PUBLISHED_TTFT_S["random"]
        values.append(Value(f"{name} over random", "", theirs, ours[name] / ours["random"], digits=3))
    theirs = PUBLISHED_TTFT_S["kvcache-centric"] / PUBLISHED_TTFT_S["cache-aware"] - 1
    saved = ours["kvcache-centric"] / ours["cache-aware"] - 1
    values.append(Value("kvcache-centric against cache-aware", "%", 100 * theirs, 100 * saved, digits=0))
    least = answers[-1].metrics.ttft_s.mean
    values.append(Value("mean TTFT, fewest requests", "s", PUBLISHED_TTFT_S["load-balance"], least, _FEWEST_WHY))
    return Experiment(
        name="scheduling",
        source=setting.source.name,
        assumed=(
            "half of the machines' speed is reached (mfu 0.5): our choice, the papers do not state it",
            "1 TB of DRAM a node for KV; 800 Gbit/s between nodes; the trace's own rate",
            "arrivals spread over the 3 s between the trace's batches; nothing is refused",
        ),
        header=("scheduler", *_SCHEDULING_HEADER),
        rows=tuple(
            (name, *columns(answer.metrics, _SCHEDULING_HEADER)) for name, answer in zip(names, answers, strict=True)
        ),
        values=tuple(values),
    )


def bandwidth(setting: ExperimentSetting) -> Experiment:
    """Compare mean TTFTs by the network's rate."""
    alone = ClusterCell(setting.source, ClusterSetup(seed=setting.seed), "cache-aware")
    cells = [alone]  # it moves no KV for prefills, so it does not depend on the network's rate
    for gbit in NETWORK_GBIT:
        cost = ClusterSetup().cost
        machine = replace(cost.machine, network_bytes_per_s=gbit * GBIT_BYTES)
        setup = ClusterSetup(cost=replace(cost, machine=machine), seed=setting.seed)
        cells.append(ClusterCell(setting.source, setup, "kvcache-centric"))
    local, *networked = (
        answer.metrics for answer in sweep(run_cell, cells, setting.way, setting.jobs, setting.progress)
    )
    rows = []
    for gbit, everywhere in zip(NETWORK_GBIT, networked, strict=True):
        remote = sum(part for source, part in everywhere.hits.tokens_by_source.items() if source != "local")
        rows.append((gbit, local.ttft_s.mean, everywhere.ttft_s.mean, everywhere.ttft_s.p90, remote))
    above = max(row[2] for row in rows if row[0] >= 100)
    return Experiment(
        name="bandwidth",
        source=setting.source.name,
        assumed=("as for scheduling; the rate is each node's, in each direction",),
        header=("gbit_per_s", "cache_aware_mean_ttft_s", "mean_ttft_s", "p90_ttft_s", "tokens_from_other_nodes"),
        rows=tuple(rows),
        values=(
            Value("worst mean TTFT at 100 Gbit/s and more", "s", "below 2", above),
            Value(
                "mean TTFT at 24 over that at 400 Gbit/s",
                "×",
                None,
                rows[0][2] / rows[-1][2],
                "a scheduler that weighs loading against computing loads less over a slow network",
            ),
        ),
    )


def ratio(setting: ExperimentSetting) -> Experiment:
    """Search the best number of prefill machines of 16, by decoding time and request rate."""
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
    answers = sweep(run_cell, cells, setting.way, setting.jobs, setting.progress)
    met = {label: answer.metrics.met for label, answer in zip(labels, answers, strict=True)}
    values = []
    for name in DECODINGS:
        for rate in rates:
            most = max(met[name, rate, count] for count in counts)
            # Several splits often differ by less than noise: all of them are listed.
            near = [count for count in counts if met[name, rate, count] >= most * (1 - NEAR)]
            best = next(count for count in near if met[name, rate, count] == most)
            words = f"{near[0]} to {near[-1]} keep as many within {NEAR:.1%}" if len(near) > 1 else ""
            what = f"best number of machines that prefill, {name}, {rate:g} times the trace's rate"
            values.append(Value(what, "", 8.0, best, words, digits=0))
    return Experiment(
        name="ratio",
        source=setting.source.name,
        assumed=(
            "SLOs of 30 s and 0.1 s; nothing is refused; best: most requests within both SLOs",
            "their rate of replay is not stated; ours are 1, 1.5 and 2 times the trace's",
            DECODING_WORDS,
        ),
        header=("decoding", "rate", "prefill", "decode", *_SCHEDULING_HEADER),
        rows=tuple(
            (name, rate, count, NODES - count, *columns(answer.metrics, _SCHEDULING_HEADER))
            for (name, rate, count), answer in zip(labels, answers, strict=True)
        ),
        values=tuple(values),
    )


_FEWEST_WHY = "if theirs counts requests instead: the router's least-load does"
_SCHEDULING_HEADER = (
    "mean_ttft_s",
    "p50_ttft_s",
    "p90_ttft_s",
    "p99_ttft_s",
    "mean_tbt_ms",
    "p90_tbt_ms",
    "met",
    "goodput_per_s",
    "token_hits",
    "prefill_utilisation",
    "decode_utilisation",
)


def _why(name: str) -> str:
    return {
        "random": "the level follows from the speed that is assumed; ratios and order are what to compare",
        "load-balance": "ours weighs estimated seconds in line, not numbers of requests",
        "cache-aware": "",
        "kvcache-centric": "ours takes per instance the cheaper of loading and computing, or both at once",
    }[name]
