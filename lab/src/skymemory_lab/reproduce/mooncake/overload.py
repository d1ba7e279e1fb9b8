"""Admission under overload: rejections (arXiv table 3) and swings of the loads (figures 9 and 10)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from skymemory.conductor.request import Slo
from skymemory_lab.reproduce.mooncake.base import COST, DECODINGS, Experiment, ExperimentSetting, Value, columns
from skymemory_lab.sim.cluster.cells import CellAnswer, ClusterCell, run_cell
from skymemory_lab.sim.cluster.setup import ClusterSetup
from skymemory_lab.sim.sweeps import sweep
from skymemory_lab.sim.workload import ConversationSource

RULES = ("all", "baseline", "early", "predicted", "predicted, long", "goodput")
"""Admission rules; ``long``: no request is forecast to end during a prefill."""
INFINITE_S = 1e9
PUBLISHED_REJECTIONS = {"baseline": 4_183, "early": 3_771, "predicted": 3_589, "predicted, long": 3_589}
PUBLISHED_REQUESTS = 23_608
RATE = 2.0
SLO = Slo(30.0, 0.1)
SHORT = {"vllm": (11, 5), "turbomind": (13, 3)}
"""Splits of sixteen machines in which decode reaches its SLO before prefill."""


@dataclass(frozen=True, slots=True)
class Situation:
    """Overloaded cluster, described by ``words``."""

    name: str
    setup: ClusterSetup
    words: str


def situations(seed: int) -> tuple[Situation, ...]:
    """Return the published situation, limited by prefill, and a situation per engine, limited by decode."""
    stated = ClusterSetup(rate=RATE, slo=SLO, cost=COST, seed=seed)
    words = "8P+8D, the trace at twice its rate, SLOs of 30 s and 0.1 s a token; decoding as vLLM's on 8×A100"
    listed = [Situation("as stated", stated, words)]
    for name, (prefill, decode) in SHORT.items():
        setup = replace(stated, prefill=prefill, decode=decode, cost=DECODINGS[name])
        engine = "the same" if name == "vllm" else "decoding as TurboMind's on 4×A100"
        words = f"{engine} with {prefill}P+{decode}D: decode comes to its SLO before prefill does"
        listed.append(Situation(f"decode short, {name}", setup, words))
    return tuple(listed)


def rejections(setting: ExperimentSetting) -> Experiment:
    """Compare rejections by rule, with goodput and wasted prefills."""
    runs = _runs(setting)
    rows = [(situation.name, rule, *columns(answer.metrics, _HEADER)) for situation, rule, answer in runs]
    ours = {(situation.name, rule): answer.metrics for situation, rule, answer in runs}
    values: list[Value] = []
    for situation in situations(setting.seed):
        for rule, published in PUBLISHED_REJECTIONS.items():
            metrics = ours[situation.name, rule]
            refused = metrics.refused + metrics.refused_after_prefill
            why = _STATED_WHY if situation.name == "as stated" else _SHORT_WHY
            values.append(Value(f"{situation.name}: rejected, {rule}", "requests", published, refused, why, digits=0))
            part = 100 * refused / max(1, metrics.requests)
            values.append(
                Value(
                    f"{situation.name}: the same, of all, {rule}",
                    "%",
                    100 * published / PUBLISHED_REQUESTS,
                    part,
                    digits=1,
                )
            )
        # Wasted prefills: the request was refused afterwards. Early rejection avoids this cost.
        base = ours[situation.name, "baseline"]
        for rule in RULES[1:]:
            metrics = ours[situation.name, rule]
            values.append(
                Value(f"{situation.name}: goodput, {rule}", "requests/s", None, metrics.goodput_per_s, digits=3)
            )
            if rule != "baseline":
                saved = _saved(metrics.wasted_prefill_s, base.wasted_prefill_s)
                values.append(
                    Value(f"{situation.name}: wasted prefill against baseline, {rule}", "%", None, saved, digits=0)
                )
    return Experiment(
        name="rejections",
        source=setting.source.name,
        assumed=(
            *(f"{situation.name}: {situation.words}" for situation in situations(setting.seed)),
            "predicted: all decode for one usual time, learnt as the mean; predicted, long: that time is without end",
        ),
        header=("situation", "rule", *_HEADER),
        rows=tuple(rows),
        values=tuple(values),
    )


def load_swings(setting: ExperimentSetting) -> Experiment:
    """Compare the swings of prefill and decode loads by rule."""
    runs = _runs(setting)
    rows: list[tuple[object, ...]] = []
    series: dict[str, tuple[tuple[float, ...], ...]] = {}
    values: list[Value] = []
    for situation, rule, answer in runs:
        swings = answer.swings
        assert swings is not None
        rows.append((situation.name, rule, *(getattr(swings, name) for name in _SWING_HEADER)))
        series[f"{situation.name}, {rule}"] = answer.curves
        if situation.name == "decode short, vllm" and rule in ("early", "predicted, long", "goodput"):
            says = {"early": "anti-phase: near -1", "predicted, long": "calmer"}.get(rule)
            values.append(Value(f"{rule}: correlation of both loads", "", says, swings.correlation, _SWING_WHY))
            values.append(Value(f"{rule}: amplitude of decode", "of its SLO", None, swings.decode_amplitude, digits=3))
            values.append(
                Value(f"{rule}: amplitude of prefill", "of its SLO", None, swings.prefill_amplitude, digits=3)
            )
    return Experiment(
        name="swings",
        source=setting.source.name,
        assumed=(
            *(f"{situation.name}: {situation.words}" for situation in situations(setting.seed)),
            "load: worst predicted TTFT over its SLO, worst TBT over its SLO; amplitude, period, phase, coherence as"
            " docs/reference/cluster-metrics.md defines them",
        ),
        header=("situation", "rule", *_SWING_HEADER),
        rows=tuple(rows),
        values=tuple(values),
        series=series,
    )


_HEADER = (
    "rejected",
    "refused",
    "refused_after_prefill",
    "completed",
    "met",
    "goodput_per_s",
    "wasted_prefill_s",
    "late_prefill_s",
    "p90_ttft_s",
    "p90_tbt_s",
)
_SWING_HEADER = (
    "prefill_mean",
    "prefill_amplitude",
    "decode_mean",
    "decode_amplitude",
    "correlation",
    "period_s",
    "phase_degrees",
    "coherence",
)
_STATED_WHY = "prefill and decode are at their SLOs together: most are refused by the first token's time, by any rule"
_SHORT_WHY = "the split is ours; compare the order and the shares"
_SWING_WHY = "published as a picture"


_FOUND: dict[ConversationSource, list[CellAnswer]] = {}


def _runs(setting: ExperimentSetting) -> list[tuple[Situation, str, CellAnswer]]:
    # Return the runs of all situations and rules, kept for both experiments.
    labels = [(situation, rule) for situation in situations(setting.seed) for rule in RULES]
    if setting.source not in _FOUND:
        cells = [overload_cell(setting.source, situation.setup, rule) for situation, rule in labels]
        _FOUND.clear()
        _FOUND[setting.source] = sweep(run_cell, cells, setting.way, setting.jobs, setting.progress)
    answers = _FOUND[setting.source]
    return [(situation, rule, answer) for (situation, rule), answer in zip(labels, answers, strict=True)]


def overload_cell(source: ConversationSource, setup: ClusterSetup, rule: str) -> ClusterCell:
    name, _, long = rule.partition(", ")
    # With an infinite decoding time no request is forecast to leave: the most cautious prediction.
    setup = replace(setup, decode_s=INFINITE_S) if long else setup
    return ClusterCell(source, setup, admission=name, curves=True)


def _saved(ours: float, theirs: float) -> float:
    return 100 * (ours / theirs - 1) if theirs else 0.0
