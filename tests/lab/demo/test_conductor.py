"""``skymemory demo conductor``: its table, what it plays, its JSON."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.settings_file import settings_file

from skymemory.cli.main import main
from skymemory.conductor.cost_fit import dump
from skymemory.conductor.cost_model import LLAMA_70B_8xA800
from skymemory.conductor.pools import ElasticSettings
from skymemory_lab.demo.conductor import SCHEDULERS, Playback, _play, final, frame
from skymemory_lab.sim.cluster.cells import ClusterCell, run_of
from skymemory_lab.sim.cluster.outcome import measured
from skymemory_lab.sim.cluster.setup import ClusterSetup
from skymemory_lab.sim.workload import OpenSource


def test_plays_all_four_and_prints_the_results() -> None:
    setup = ClusterSetup(seed=1)
    runs = [run_of(ClusterCell(OpenSource("l-eval", 8.0, 100, 1), setup, name)) for name in SCHEDULERS]
    stream = io.StringIO()
    _play(runs, setup, stream, played_s=0.3)
    assert all(name in stream.getvalue() for name in SCHEDULERS)
    moments = [Playback(run, 8, 8, setup.slo).at(6.0) for run in runs]
    lines = frame(SCHEDULERS, moments, 6.0, 20.0, 100)
    assert len(lines) == 2 + len(SCHEDULERS)
    assert len({len(row) for row in lines[1:]}) == 1, "columns stand below each other"
    for width in (80, 60):
        narrow = frame(SCHEDULERS, moments, 6.0, 20.0, width)
        assert max(map(len, narrow)) <= width and len(narrow) <= 20
        assert set(" ".join(narrow).split()) == set(" ".join(lines).split()), "all of it, in blocks"
    report = final(SCHEDULERS, [measured(run, setup.slo) for run in runs]).lines(120)
    (best,) = [row for row in report if row.startswith("kvcache-centric")]
    assert "100" in best and "node" in best


def test_elastic_pools_have_a_bar_for_each_machine_in_both_roles() -> None:
    setup = ClusterSetup(seed=1, pools="elastic", elastic=ElasticSettings(settle_s=2.0))
    run = run_of(ClusterCell(OpenSource("l-eval", 8.0, 100, 1), setup, "kvcache-centric"))
    stream = io.StringIO()
    _play([run] * 4, setup, stream, played_s=0.3)
    player = Playback(run, 16, 16, setup.slo)
    moments = [player.at(run.end_s)] * 4
    assert (moments[0].arrived, sum(moments[0].waiting), sum(moments[0].decoding)) == (100, 0, 0)
    lines = frame(SCHEDULERS, moments, 6.0, 20.0, 120)
    assert lines[1].index("done") + len("done") == lines[2].index(" 100 ") + len(" 100")


def test_refuses_what_it_cannot_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["demo", "conductor", "--rate", "0"]) == 2
    with settings_file(f"trace = '{tmp_path / 'none.jsonl'}'") as words:
        assert main(["demo", "conductor", *words]) == 2
    assert "cannot read" in capsys.readouterr().err
    with settings_file("pools = 'both'") as words:
        assert main(["demo", "conductor", *words]) == 2
    assert "pools: 'both': expected one of fixed, elastic" in capsys.readouterr().err


@pytest.mark.slow
def test_orders_the_schedulers_as_published(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "conductor", "--quick", "--no-play", "--json", "--rate", "1", "--admission", "all"]) == 0
    report = json.loads(capsys.readouterr().out)["schedulers"]
    means = [report[name]["ttft_s"]["mean"] for name in SCHEDULERS]
    assert means == sorted(means, reverse=True)


@pytest.mark.slow
def test_elastic_pools_say_how_often_machines_changed(capsys: pytest.CaptureFixture[str]) -> None:
    with settings_file("pools = 'elastic'") as words:
        assert main(["demo", "conductor", "--quick", "--no-play", "--json", *words]) == 0
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert report["pools"] == "elastic"
    counts = [report["schedulers"][name]["role_changes"] for name in SCHEDULERS]
    assert f"kvcache-centric {counts[-1]}" in said.err and max(counts) > 0


@pytest.mark.slow
def test_machines_may_be_those_that_were_fitted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A machine ten times as fast keeps what it promises to more, and is called by its name."""
    file = tmp_path / "cost.json"
    fast = replace(LLAMA_70B_8xA800.machine, name="fast", flops_per_s=3e16)
    file.write_text(dump(replace(LLAMA_70B_8xA800, machine=fast)))
    within = []
    for words in ([], ["--cost", str(file)]):
        assert main(["demo", "conductor", "--quick", "--no-play", "--json", "--rate", "0.3", *words]) == 0
        said = capsys.readouterr()
        within.append(json.loads(said.out)["schedulers"]["random"]["ttft_s"]["mean"])
    assert within[1] < within[0] / 3 and "LLaMA-70B on fast" in said.err
    assert main(["demo", "conductor", "--cost", str(tmp_path / "none.json")]) == 2
