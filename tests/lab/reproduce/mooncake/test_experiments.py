"""Mooncake's experiments, small: what they compare, and that the values are of what ran."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from skymemory.conductor.cost_model import LLAMA_70B_8xA800
from skymemory.errors import InvalidInput
from skymemory_lab.reproduce.mooncake import clusters, experiments, overload
from skymemory_lab.reproduce.mooncake.base import BOTH, DECODINGS, Experiment, ExperimentSetting, Value, to_json_value
from skymemory_lab.reproduce.mooncake.clusters import unloaded
from skymemory_lab.reproduce.mooncake.experiments import EXPERIMENTS, PUBLISHED, chosen, hits, layer_wise, popularity
from skymemory_lab.sim.trace import TraceRequest
from skymemory_lab.sim.workload import ConversationSource


def small_trace(path: Path) -> Path:
    """A minute of requests in conversations of three turns."""
    lines = []
    for number in range(120):
        turn, talk = number // 40, number % 40
        tokens = 2_048 + 512 * turn
        ids = [0, *(1 + talk * 10 + at for at in range(3 + turn))]
        lines.append(
            json.dumps({"timestamp": number * 500, "input_length": tokens, "output_length": 40, "hash_ids": ids})
        )
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def setting(tmp_path: Path) -> ExperimentSetting:
    return ExperimentSetting(
        ConversationSource(small_trace(tmp_path / "trace.jsonl"), seed=1, quick=True), way="sequence"
    )


def of(experiment: Experiment, what: str) -> Value:
    (found,) = [one for one in experiment.values if one.what == what]
    return found


def test_popularity_counts_blocks(setting: ExperimentSetting) -> None:
    experiment = popularity(setting)
    assert of(experiment, "requests with the most popular block").ours == 120
    assert experiment.rows[0] == (1, 1.0)
    assert experiment.series["uses"][1][0] == 120


def test_hits_fall_with_the_capacity(setting: ExperimentSetting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments, "CAPACITIES", (200, 100, 60, 20, 5))
    experiment = hits(setting)
    for row in experiment.rows[:3]:
        values = [float(str(value)) for value in row[1:]]
        assert values == sorted(values, reverse=True)
        assert values[0] == pytest.approx(values[1])  # all 201 blocks but one
    assert of(experiment, "3 million tokens, LRU, of the most there is to hit").ours == pytest.approx(100)


def test_layer_wise_leaves_one_layer_of_eighty() -> None:
    experiment = layer_wise(ExperimentSetting(ConversationSource(None)))
    assert of(experiment, "what layer-wise storing leaves of the serial latency, most").ours == pytest.approx(100 / 80)


def test_scheduling_compares_what_ran(setting: ExperimentSetting) -> None:
    experiment = clusters.scheduling(setting)
    rows = {row[0]: row for row in experiment.rows}
    assert set(clusters.SCHEDULERS) < set(rows)
    ours = of(experiment, "mean TTFT, kvcache-centric").ours
    assert ours == rows["kvcache-centric"][1]
    ratio = of(experiment, "kvcache-centric over random")
    assert ratio.published == pytest.approx(3.07 / 19.65)
    assert ratio.ours == ours / float(str(rows["random"][1]))


@pytest.mark.brief()
def test_bandwidth_and_ratio_run(setting: ExperimentSetting) -> None:
    wide = clusters.bandwidth(setting)
    assert [row[0] for row in wide.rows] == list(clusters.NETWORK_GBIT)
    shares = clusters.ratio(setting)
    splits = [(6, 10), (8, 8), (10, 6)]
    assert [row[:4] for row in shares.rows] == [(name, 1.5, *split) for name in DECODINGS for split in splits]
    met = {row[:3]: row[shares.header.index("met")] for row in shares.rows}
    best = of(shares, "best number of machines that prefill, vllm, 1.5 times the trace's rate")
    assert met["vllm", 1.5, best.ours] == max(met["vllm", 1.5, count] for count, _ in splits)
    assert best.published == 8


@pytest.mark.slow
def test_rejections_come_with_goodput_and_waste(setting: ExperimentSetting) -> None:
    experiment = overload.rejections(setting)
    assert {"rejected", "goodput_per_s", "wasted_prefill_s"} < set(experiment.header)
    assert len(experiment.rows) == 3 * len(overload.RULES)
    assert of(experiment, "as stated: rejected, baseline").published == 4_183
    assert of(experiment, "as stated: the same, of all, baseline").published == pytest.approx(17.72, abs=0.005)
    loads = overload.load_swings(setting)
    assert len(loads.series) == len(loads.rows) == len(experiment.rows)


@pytest.mark.slow
@pytest.mark.seeded
def test_four_machines_are_compared_with_each_decoding(
    setting: ExperimentSetting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clusters, "QUICK_COUNT", 20)
    monkeypatch.setattr(clusters, "RULES", ("p90",))
    experiment = clusters.public_datasets(setting)
    decodings = (*BOTH, "fast contexts")
    systems = ("2P+2D", "4 coupled", "4 coupled, chunked", "3P+1D")
    assert [row[:4] for row in experiment.rows] == list(product(("arxiv", "l-eval"), decodings, systems, ("p90",)))
    rates = {row[:4]: float(str(row[4])) for row in experiment.rows}
    steps_s = {row[:4]: float(str(row[experiment.header.index("p90_tbt_s")])) for row in experiment.rows}
    for decoding in decodings:
        gain = of(experiment, f"arxiv, {decoding}: 3P+1D against 4 coupled, p90")
        apart, together = (rates["arxiv", decoding, name, "p90"] for name in ("3P+1D", "4 coupled"))
        assert gain.ours == pytest.approx(100 * (apart / together - 1))
        assert gain.published == 20.0
    assert steps_s["arxiv", "memory", "2P+2D", "p90"] < 0.02
    assert steps_s["arxiv", "vllm", "2P+2D", "p90"] > 0.04


@pytest.mark.slow
@pytest.mark.seeded
def test_the_real_workload_is_run_with_each_decoding(setting: ExperimentSetting) -> None:
    experiment = clusters.real(setting)
    rows = {row[:4]: dict(zip(experiment.header, row, strict=True)) for row in experiment.rows if row[2] == "measured"}
    assert list(rows) == list(product((*BOTH, "turbomind"), clusters.PUBLISHED_SYSTEMS, ("measured",), clusters.RATES))
    for decoding, step_s in (("memory", 0.009), ("vllm", 0.045), ("turbomind", 0.029)):
        assert rows[decoding, "10P+10D", "measured", 1.0]["p90_tbt_s"] == pytest.approx(step_s, rel=0.1)
        ours = of(experiment, f"{decoding}: mean TBT within 0.1 s, 20 coupled, rate × 1")
        assert ours.ours == 100 * rows[decoding, "20 coupled", "measured", 1.0]["tbt_met"]
        assert ours.published == 57.0


def test_unloaded_counts_what_came_before() -> None:
    first, again = TraceRequest(0.0, 1_024, 10, (0, 1)), TraceRequest(1.0, 1_024, 10, (0, 1))
    cost = LLAMA_70B_8xA800
    ttft_s, tbt_s = unloaded(cost, [first, again])
    assert ttft_s == pytest.approx((cost.prefill_s(1_024) + cost.prefill_s(1_024, 1_023)) / 2)
    assert tbt_s == pytest.approx(cost.decode_step_s(1, 1_029))


def test_names_figures_and_tables() -> None:
    assert chosen([]) == list(EXPERIMENTS)
    assert chosen(["9", "10", "Table 3", "real"]) == ["swings", "rejections", "real"]
    assert set(PUBLISHED.values()) <= set(EXPERIMENTS)
    with pytest.raises(InvalidInput, match="'14' is not reproduced"):
        chosen(["14"])


def test_json_has_no_infinities() -> None:
    experiment = Experiment("hits", "d", (), ("x",), ((float("inf"),), (1 / 3,)), (Value("w", "", None, float("inf")),))
    assert json.loads(json.dumps(experiment.as_json(), allow_nan=False))["rows"] == [{"x": None}, {"x": 0.333333}]
    assert to_json_value("words") == "words"
