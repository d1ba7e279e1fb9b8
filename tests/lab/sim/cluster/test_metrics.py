"""Metrics of a cluster's run, each counted by hand."""

from __future__ import annotations

import math

import pytest

from skymemory.conductor.request import Slo
from skymemory.errors import InvalidInput
from skymemory_lab.sim.cluster.outcome import ClusterMetrics, ClusterRun, Quantiles, RequestOutcome, keeps, measured

SLO = Slo(ttft_s=2.0, tbt_s=0.1)


def done(at_s: float, ttft_s: float, tbt_s: float | None, **more: object) -> RequestOutcome:
    fields: dict[str, object] = {
        "prompt_tokens": 1_000,
        "output_tokens": 11,
        "prefill": 0,
        "decode": 0,
        "computed_tokens": 1_000,
        "prefill_s": 0.5,
        "tbt_mean_s": tbt_s,
        "tbt_max_s": None if tbt_s is None else 2 * tbt_s,
        "end_s": at_s + ttft_s + 10 * (tbt_s or 0.0),
    }
    return RequestOutcome(at_s=at_s, status="completed", ttft_s=ttft_s, **{**fields, **more})  # type: ignore[arg-type]


OUTCOMES = (
    done(0.0, 1.0, 0.05, held_tokens=512, loaded_tokens={"ssd": 256}, computed_tokens=232),
    done(1.0, 2.0, 0.1),  # both SLOs met exactly
    done(2.0, 2.5, 0.05, prefill_s=0.7),  # its first token late
    done(3.0, 1.0, 0.2, prefill_s=0.9, prompt_tokens=1_024, held_tokens=1_023, computed_tokens=1),
    done(4.0, 1.5, None, output_tokens=1),
    RequestOutcome(5.0, "refused", 9_999, 5, end_s=5.0),
    RequestOutcome(6.0, "refused_after_prefill", 2_000, 5, prefill=1, prefill_s=1.25, computed_tokens=2_000, end_s=8.0),
    RequestOutcome(7.0, "failed", 1_000, 5, prefill=1, prefill_s=0.25, computed_tokens=400, end_s=10.0),
)
RUN = ClusterRun(OUTCOMES, (), prefill_busy_s=(4.0, 1.5), decode_busy_s=(2.0,))


def test_every_request_is_counted_once() -> None:
    found = measured(RUN, SLO)
    assert (found.requests, found.completed, found.refused, found.refused_after_prefill, found.failed) == (
        8,
        5,
        1,
        1,
        1,
    )


def test_times_are_of_those_that_completed() -> None:
    found = measured(RUN, SLO)
    assert found.ttft_s.mean == pytest.approx((1.0 + 2.0 + 2.5 + 1.0 + 1.5) / 5)
    assert found.ttft_s.p50 == 1.5
    assert found.tbt_request_s.mean == pytest.approx(0.1)
    assert found.tbt_max_s.p50 == pytest.approx(0.15)
    assert found.tbt_token_s.p50 == 0.05  # 20 gaps of 50 ms, 10 of 100, 10 of 200
    assert found.tbt_token_s.p90 == 0.2


def test_promises_and_goodput() -> None:
    found = measured(RUN, SLO)
    assert found.ttft_met == 4 / 5
    assert found.tbt_met == 4 / 5
    assert found.longest_tbt_met == 3 / 5
    assert found.met == 3  # an answer of one token has no time between tokens to be late
    assert found.attainment == 3 / 8
    assert found.elapsed_s == 10.0
    assert found.goodput_per_s == pytest.approx(0.3)
    assert measured(RUN, SLO, tbt_rule="max").met == 2
    assert not keeps(OUTCOMES[5], SLO)


def test_prefills_for_nothing() -> None:
    found = measured(RUN, SLO)
    assert found.prefill_s == pytest.approx(0.5 + 0.5 + 0.7 + 0.9 + 0.5 + 1.25 + 0.25)
    assert found.wasted_prefill_s == pytest.approx(1.5)
    assert found.late_prefill_s == pytest.approx(0.7 + 0.9)


def test_hits_by_source_and_in_both_countings() -> None:
    found = measured(RUN, SLO).hits
    tokens = 1_000 * 4 + 1_024 + 2_000 + 1_000
    assert found.tokens == pytest.approx((512 + 256 + 1_023) / tokens)
    assert found.tokens_by_source == {"local": pytest.approx(1_535 / tokens), "ssd": pytest.approx(256 / tokens)}
    whole, begun = 4 * 1 + 2 + 3 + 1, 4 * 2 + 2 + 4 + 2
    assert found.blocks == pytest.approx((2 + 2) / whole)
    assert found.all_blocks == pytest.approx((2 + 2) / begun)


def test_utilisation_is_of_the_whole_run() -> None:
    found = measured(RUN, SLO, from_s=1.0)
    assert found.prefill_utilisation == pytest.approx(5.5 / 20)
    assert found.decode_utilisation == pytest.approx(0.2)
    assert math.isnan(measured(ClusterRun(OUTCOMES, (), (1.0,), ()), SLO).decode_utilisation)


def test_a_window_counts_who_arrived_in_it() -> None:
    found = measured(RUN, SLO, from_s=1.0, until_s=3.0)
    assert (found.requests, found.met) == (2, 1)
    assert found.elapsed_s == pytest.approx(4.0)
    with pytest.raises(InvalidInput, match="between 50 s"):
        measured(RUN, SLO, from_s=50.0)


def test_a_histogram_of_tokens_is_preferred() -> None:
    run = ClusterRun(OUTCOMES, (), (), (), gap_seconds=(0.3, 0.01, 0.02), gap_tokens=(1, 90, 9))
    found = measured(run, SLO).tbt_token_s
    assert (found.p50, found.p90, found.p99) == (0.01, 0.01, 0.02)
    assert found.mean == pytest.approx((0.3 + 0.9 + 0.18) / 100)
    assert math.isnan(Quantiles.of_histogram((), ()).mean)


def test_nothing_measured_is_null_in_json() -> None:
    lost = ClusterRun((OUTCOMES[5],), (), (), ())
    found = measured(lost, SLO)
    assert isinstance(found, ClusterMetrics)
    as_dict = found.as_json()
    assert as_dict["ttft_s"] == {"mean": None, "p50": None, "p90": None, "p99": None}
    assert as_dict["goodput_per_s"] is None
    assert as_dict["attainment"] == 0.0
