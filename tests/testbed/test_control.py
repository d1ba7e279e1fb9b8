"""Who has to answer before a constellation is said to be up."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from skymemory.constellation.torus import SatelliteId
from skymemory.errors import ConstellationError
from skymemory.testbed import control
from skymemory.testbed.plan import ConstellationPlan, make_plan

PLAN = make_plan()


def _answer(monkeypatch: pytest.MonkeyPatch, most: int, dead: frozenset[SatelliteId] = frozenset()) -> list[int]:
    """At each ping so many answer, but the dead. How many were asked each time."""
    asked: list[int] = []

    def ping_all(
        plan: ConstellationPlan, patience_s: float, satellites: Iterable[SatelliteId] | None = None
    ) -> dict[SatelliteId, control.Housekeeping | None]:
        wanted = list(plan.torus.satellites() if satellites is None else satellites)
        asked.append(len(wanted))
        able = [one for one in wanted if one not in dead][:most]
        return {one: {"chunks_held": 0} if one in able else None for one in wanted}

    monkeypatch.setattr(control, "ping_all", ping_all)
    return asked


def test_on_a_busy_computer_those_who_had_no_turn_are_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid of 1,156 satellites never came up beside other work: in its one second only some had answered."""
    asked = _answer(monkeypatch, most=40)
    control.confirm_all_answer(PLAN)
    assert asked == [95, 55, 15]


def test_the_dead_are_named_after_one_more_round(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _answer(monkeypatch, most=95, dead=frozenset({SatelliteId(3, 7)}))
    with pytest.raises(ConstellationError, match="1 satellites of host-3 do not answer, the first is plane 3, slot 7"):
        control.confirm_all_answer(PLAN)
    assert asked == [95, 1]
