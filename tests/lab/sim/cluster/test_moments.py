"""A run played back: what is where at each moment, by hand, and that at the end all counts agree with the metrics."""

from __future__ import annotations

from skymemory.conductor.request import Slo
from skymemory_lab.demo.conductor import Playback
from skymemory_lab.sim.cluster.cells import ClusterCell, run_of
from skymemory_lab.sim.cluster.outcome import ClusterRun, RequestOutcome, measured
from skymemory_lab.sim.cluster.setup import ClusterSetup
from skymemory_lab.sim.workload import OpenSource

SLO = Slo(2.0, 0.1)
RUN = ClusterRun(
    (
        RequestOutcome(0.0, "completed", 1_000, 11, 0, 1, 512, {"node": 100}, 388, 1.0, 0.5, 1.5, 2.0, 0.05, 0.05),
        RequestOutcome(0.5, "refused", 1_000, 11, end_s=0.5),
        RequestOutcome(1.0, "refused_after_prefill", 2_000, 11, 1, None, 0, {}, 2_000, 0.0, 2.0, None, 3.0),
    ),
    (),
    (0.5, 2.0),
    (0.0, 0.5),
)


def test_moments_by_hand() -> None:
    played = Playback(RUN, 2, 2, SLO)
    assert played.end_s == 3.0
    now = played.at(0.6)
    assert (now.arrived, now.refused, now.waiting, now.prefilling, now.decoding) == (2, 1, [1, 0], [0, 0], [0, 0])
    now = played.at(1.2)
    assert (now.waiting, now.prefilling, now.prompt_tokens) == ([0, 0], [1, 1], 3_000)
    assert (now.hits, now.loaded) == (612 / 3_000, 100 / 3_000)
    now = played.at(1.6)
    assert (now.prefilling, now.decoding, now.ttft_s) == ([0, 1], [0, 1], [1.5])
    now = played.at(10.0)
    assert (now.completed, now.met, now.refused_after_prefill) == (1, 1, 1)
    assert now.waiting == now.prefilling == now.decoding == [0, 0]


def test_all_counts_agree_in_the_end() -> None:
    setup = ClusterSetup(prefill=2, decode=2, slo=Slo(3.0, 0.1))
    run = run_of(ClusterCell(OpenSource("l-eval", 2.0, 80, 4), setup, "kvcache-centric", admission="early"))
    played = Playback(run, 2, 2, setup.slo)
    times_s = [run.end_s * step / 200 for step in range(201)]
    for now_s in times_s:
        now = played.at(now_s)
        assert min(*now.waiting, *now.prefilling, *now.decoding) >= 0
        assert max(now.prefilling) <= 1
    found = measured(run, setup.slo)
    assert (now.arrived, now.completed, now.met) == (80, found.completed, found.met)
    assert now.refused == found.refused > 0
    assert sum(now.waiting) + sum(now.prefilling) + sum(now.decoding) == 0
    assert now.hits == found.hits.tokens
