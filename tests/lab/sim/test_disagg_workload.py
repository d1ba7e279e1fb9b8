"""The requests that `benchmarks/disagg.py` gives to real engines and to the simulator, and its fits; all of it quickly
in a slow test."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


def workload() -> ModuleType:
    spec = importlib.util.spec_from_file_location("_disagg_workload", ROOT / "benchmarks/_disagg_workload.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_equal_seeds_are_equal_requests_and_equal_blocks_are_equal_tokens() -> None:
    disagg = workload()
    mix = disagg.MIXES["chat"]
    requests = disagg.requests_of(mix, 5.0, 20.0, 7)
    assert requests == disagg.requests_of(mix, 5.0, 20.0, 7) != disagg.requests_of(mix, 5.0, 20.0, 8)
    faster = disagg.requests_of(mix, 10.0, 20.0, 7)
    assert [(one.input_tokens, one.ids) for one in faster][: len(requests)] == [
        (one.input_tokens, one.ids) for one in requests
    ]
    prompts = [disagg.token_ids(one.ids, one.input_tokens, 2000, 7) for one in requests]
    assert [len(prompt) for prompt in prompts] == [one.input_tokens for one in requests]
    shared = 0
    for at, one in enumerate(requests):
        for other in range(at):
            same = one.ids[0] == requests[other].ids[0]
            shared += same
            assert (prompts[at][:512] == prompts[other][:512]) == same or min(
                map(len, (prompts[at], prompts[other]))
            ) < 512
    assert shared > 5


def test_a_line_is_found_in_spite_of_a_disturbed_point() -> None:
    line_of = workload().line_of
    points = [(float(units), 0.5 + 0.01 * units) for units in range(0, 100, 10)]
    assert line_of([*points, (55.0, 9.0)]) == pytest.approx((0.5, 0.01))
    assert line_of([(1.0, 3.0), (2.0, 2.0)])[1] == 0.0, "never below 0"
    with pytest.raises(ValueError, match="two points"):
        line_of([(1.0, 1.0)])


def test_the_curve_is_that_of_the_fit_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one cell: the rows of the file are what the model gives, so both are of one run."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import _disagg_curve as curve
    import disagg

    model = disagg.read_fit(disagg.read_rows(ROOT / "docs/benchmarks/disagg.json", "own")["fit"][0])
    setup = disagg.setup_of(disagg.own(), model, disagg.slo_of(disagg.MIXES["chat"], model), False)
    base = curve.Machine(setup.cost, setup.handover, setup.request_s)
    faster = base.times(4, 16, 32)
    assert faster.cost.prefill_s(500) == pytest.approx(base.cost.prefill_s(500) / 4)
    assert faster.handover.fetch_token_s == pytest.approx(base.handover.fetch_token_s / 32)
    assert faster.handover.take_s == pytest.approx(base.handover.take_s / 16)
    written = curve.cells(curve.read(ROOT / "docs/figures/disagg-speeds.csv"))["chat", 1, 32, 4, 16]
    found = list(curve._cell("chat", 1, faster, setup, 1))
    assert [row["apart_kept"] for row in found] == [row["apart_kept"] for row in written]
    assert curve.ratio(found) == pytest.approx(curve.ratio(written), rel=2e-3)
    assert curve.ratio(written) > 0.9


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(500)
def test_the_simulator_is_near_real_engines_and_admission_keeps_more_promises(tmp_path: Path) -> None:
    results = tmp_path / "disagg.json"
    command = [sys.executable, str(ROOT / "benchmarks/disagg.py"), "--quick", "--json", str(results)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=480, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(results.read_text())["rows"]
    real, twin = (row for row in rows if row["part"] == "real")
    assert real["hit_rate"] == pytest.approx(twin["hit_rate"], abs=0.01), "the same blocks were found"
    assert 0.4 < twin["ttft_mean_s"] / real["ttft_mean_s"] < 1.6, "on a crowded computer"
    kept = {row["rule"]: row["kept"] for row in rows if row["part"] == "overload"}
    assert kept["early"] >= kept["all"]
