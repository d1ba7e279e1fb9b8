"""How fast a clock may run: what moves cost by the plan, by the machine, and what a user sees who wants more."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from skymemory.cli.main import main
from skymemory.errors import InvalidInput
from skymemory.testbed import carrying
from skymemory.testbed.carrying import check_time_scale, most_time_scale, processors, speed
from skymemory.testbed.plan import Faults, make_plan


def _most(**changes: object) -> float:
    return most_time_scale(make_plan(**changes), 1.5)  # type: ignore[arg-type]


def test_what_costs_more_must_go_slower() -> None:
    plain = _most(delay_scale=0.0)
    assert 60 < plain < 960, "a twentieth full, x 960 took 0.38 of a processor"
    assert _most(delay_scale=0.0, memory_per_satellite_bytes=8 << 20) == pytest.approx(8 * plain, rel=0.05)
    assert plain > _most() > _most(auth="on", keys_file="k") > _most(faults=Faults(0.02)) > _most(replicas=4)
    assert _most(strategy="hop") > 10 * plain, "parked values stay where they are"
    assert _most(access="onboard") == float("inf")
    assert _most(preset="starlink-a", strategy="hop") < _most(strategy="hop"), "each satellite looks at each move"


def test_the_model_meets_what_was_measured() -> None:
    """4,800 chunks at x 480 without delays took 0.175 of a processor, 7,218 at x 120 with faults 0.164."""
    filled = 10 * (64 << 20) / (6144 + 72) / 2
    for most, chunks, scale, measured in (
        (_most(delay_scale=0.0), 4800, 480, 0.175),
        (_most(delay_scale=0.0, faults=Faults(0.02)), 7218, 120, 0.164),
    ):
        assert 1.5 / most * scale * chunks / filled == pytest.approx(measured, rel=0.4)


def test_a_slow_machine_carries_less_and_reports_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrying, "processors", lambda: 2.0)
    monkeypatch.setattr(carrying, "speed", lambda: 1.0)
    most = _most() * 2 / 1.5
    check_time_scale(make_plan(time_scale=most * 0.99))
    with pytest.raises(InvalidInput, match=r"exceed the 2 processors here; use --time-scale") as raised:
        check_time_scale(make_plan(time_scale=most * 1.01))
    named = re.search(r"--time-scale ([0-9.e+]+) or less", str(raised.value))
    assert named is not None and 0.67 * most < float(named[1]) <= 0.75 * most
    check_time_scale(make_plan(time_scale=float(named[1])))
    monkeypatch.setattr(carrying, "speed", lambda: 0.5)
    with pytest.raises(InvalidInput):
        check_time_scale(make_plan(time_scale=most * 0.99))
    check_time_scale(make_plan())


def test_what_was_seen_to_run_well_on_two_processors_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrying, "processors", lambda: 2.0)
    monkeypatch.setattr(carrying, "speed", lambda: 0.7)
    faults = Faults(0.02, 0.01, 0.03, 0.005)
    check_time_scale(make_plan(time_scale=60.0, faults=faults, auth="on", keys_file="k"))


def test_this_machine_has_a_speed_and_processors() -> None:
    assert 0.02 < speed() < 50 and 0.01 < processors() < 10_000


def test_up_refuses_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--time-scale", "100000", "--base-port", "auto", "--run-dir", str(tmp_path / "run")]
    assert main(["constellation", "up", *words]) == 2
    assert "use --time-scale" in capsys.readouterr().err and not (tmp_path / "run").exists()
