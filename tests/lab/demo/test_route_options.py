"""Options of ``skymemory demo route``."""

from __future__ import annotations

import pytest

from skymemory.cli.main import main


@pytest.mark.parametrize(("words", "chosen"), [([], False), (["--strategies", "round-robin"], True)])
def test_only_strategies_that_were_named_stay_on_a_slow_computer(
    monkeypatch: pytest.MonkeyPatch, words: list[str], chosen: bool
) -> None:
    seen: list[bool] = []
    monkeypatch.setattr("skymemory_lab.demo.route.run_route", lambda args: seen.append(args.are_strategies_chosen) or 0)
    assert main(["demo", "route", *words]) == 0
    assert seen == [chosen]
