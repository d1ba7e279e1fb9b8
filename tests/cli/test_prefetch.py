"""``skymemory prefetch``: what a habits file expects, printed for people and programs."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from tests.cache.test_predictor import chain
from tests.cache.test_prefetching import Tier

from skymemory.cache.predictor import DAY_S, Predictor
from skymemory.cache.prefetching import save_habits
from skymemory.cli.main import main


class ClosingTier(Tier):
    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def habits(tmp_path: Path) -> Path:
    """A prompt that came about an hour from now on each of the last five days, and one that came once."""
    predictor = Predictor(zone="Asia/Kathmandu")
    for day in range(5, 0, -1):
        predictor.record_prompt(chain("daily"), time.time() + 3600 - day * DAY_S)
    predictor.record_prompt(chain("once"), time.time() - 7200)
    path = tmp_path / "habits.json"
    save_habits(predictor, path)
    return path


def test_it_prints_for_programs(habits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prefetch", str(habits), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["zone"], facts["habits"], facts["recurring"]) == ("Asia/Kathmandu", 2, 1)
    [one] = facts["expected"]
    assert abs(one["at_s"] - time.time() - 3600) < 60 and one["at"].endswith("+05:45")
    assert (one["blocks"], one["first"], one["last"]) == (4, chain("daily")[0].hex(), chain("daily")[-1].hex())


def test_it_prints_for_people(habits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prefetch", str(habits)]) == 0
    said = capsys.readouterr().out
    assert "2 prompts, 1 of them seen on more than one day; times in Asia/Kathmandu" in said
    assert "4 blocks" in said and chain("daily")[0].hex()[:12] in said
    assert main(["prefetch", str(habits), "--within", "10m"]) == 0
    assert "nothing is expected within" in capsys.readouterr().out


def test_a_file_that_is_damaged_or_missing_is_an_error_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.json").write_text("{")
    assert main(["prefetch", str(tmp_path / "bad.json")]) == 2
    assert "not a habits file" in capsys.readouterr().err
    assert main(["prefetch", str(tmp_path / "none.json")]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_it_brings_near_what_is_expected(
    habits: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tier = ClosingTier()
    monkeypatch.setattr("skymemory.testbed.connect.open_constellation", lambda run_dir: tier)
    assert main(["prefetch", str(habits), "--now", "--json"]) == 0
    [one] = json.loads(capsys.readouterr().out)["expected"]
    assert one["near"] == 4 and tier.asked == [(tuple(chain("daily")), one["at_s"])] and tier.closed


def test_bringing_it_near_needs_a_constellation(
    habits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prefetch", str(habits), "--now", "--run-dir", str(tmp_path)]) == 1
    assert "no constellation" in capsys.readouterr().err
