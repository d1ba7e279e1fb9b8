"""The report of a cluster's runs: what its panels show is what was run."""

from __future__ import annotations

from pathlib import Path

import pytest

from skymemory.conductor.request import Slo
from skymemory.errors import InvalidInput
from skymemory_lab.sim.cluster.outcome import ClusterRun, LoadSample, RequestOutcome

pytest.importorskip("matplotlib")
from skymemory_lab.view.cluster_report import draw_cluster_report, write_cluster_report

DONE = RequestOutcome(0.0, "completed", 1_000, 11, 0, 0, 512, {"node": 100}, 388, 1.0, 0.5, 1.5, 2.0, 0.05, 0.05)
LATE = RequestOutcome(1.0, "completed", 1_000, 11, 0, 0, 0, {}, 1_000, 8.0, 0.5, 9.0, 11.0, 0.05, 0.05)
GONE = RequestOutcome(2.0, "refused", 1_000, 11, end_s=2.0)
LOADS = (LoadSample(0.0, 0.5, 0.5, 3), LoadSample(1.0, 0.6, 0.4, 5))
RUNS = {
    "random": ClusterRun(
        (DONE, LATE, GONE), (LoadSample(0.0, 0.5, 0.5, 3), LoadSample(1.0, 0.6, 0.4, 5)), (1.0,), (1.0,)
    ),
    "better": ClusterRun((DONE, DONE, DONE), (LoadSample(0.0, 0.1, 0.5, 0),), (1.0,), (1.0,)),
}


@pytest.mark.brief()
def test_shows_every_run_and_every_end(tmp_path: Path) -> None:
    figure = draw_cluster_report(RUNS, Slo(5.0, 0.1), "two schedulers")
    panels = figure.get_axes()
    assert len(panels) == 6
    assert [line.get_label() for line in panels[0].get_lines()[:2]] == ["random", "better"]
    assert max(panels[0].get_lines()[0].get_xdata()) == 9.0
    hits = {bar.get_label(): [patch.get_height() for patch in bar] for bar in panels[3].containers}
    assert hits["local"] == pytest.approx([100 * 512 / 2_000, 51.2])
    assert hits["node"] == pytest.approx([5.0, 10.0])
    ends = {bar.get_label(): [patch.get_height() for patch in bar] for bar in panels[4].containers}
    assert ends == {"both SLOs met": [1, 3], "an SLO missed": [1, 0], "refused on arrival": [1, 0]}
    path = write_cluster_report(RUNS, Slo(5.0, 0.1), "two schedulers", tmp_path / "report.png")
    assert path.stat().st_size > 20_000
    with pytest.raises(InvalidInput, match="expected the suffix"):
        write_cluster_report(RUNS, Slo(5.0, 0.1), "x", tmp_path / "report.gif")
