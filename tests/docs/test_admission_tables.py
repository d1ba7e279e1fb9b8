"""The page on admission says what its runs say, and they keep what is promised of ours."""

from __future__ import annotations

import pytest
from tools.admission_tables import FAMILIES, OURS, PAGE, best_rival, cells, page


def test_the_page_is_that_of_the_runs() -> None:
    assert PAGE.read_text("utf-8") == page(), "run: python -m tools.admission_tables"


@pytest.mark.parametrize("family", FAMILIES)
def test_ours_keeps_as_many_promises_as_any_rule_and_never_a_hundredth_fewer(family: str) -> None:
    grid = cells(family)
    assert len(grid) == 27
    rules = next(iter(grid.values()))
    kept = {rule: sum(there[rule]["met"] for there in grid.values()) for rule in rules}
    assert kept[OURS] == max(kept.values())
    assert all(there[OURS]["met"] >= 0.99 * there[best_rival(there)]["met"] for there in grid.values())
