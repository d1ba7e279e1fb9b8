"""docs/reference/compatibility.md is that of the recorded runs, and what was recorded are tests of today."""

from __future__ import annotations

import ast
import json
from pathlib import Path

from tools.compatibility import INTERFACES, MATRIX, MATRIX_PAGE, PAGE, RECORD, interface_of, matrix_page, page

ROOT = Path(__file__).parents[2]
TESTS = json.loads(RECORD.read_text("utf-8"))["tests"]


def test_the_page_is_that_of_the_record() -> None:
    assert PAGE.read_text("utf-8") == page(TESTS), "run: python -m tools.compatibility"


def test_the_page_of_parameters_is_that_of_the_record_and_has_no_difference() -> None:
    matrix = json.loads(MATRIX.read_text("utf-8"))
    assert MATRIX_PAGE.read_text("utf-8") == matrix_page(matrix) + "\n", "run: python -m tools.compatibility"
    assert len(matrix["same"]) == 6 and all(all(same.values()) for same in matrix["same"].values())


def test_every_interface_was_tried_and_every_line_is_a_test() -> None:
    tried = {interface_of(one["test"]) for one in TESTS} - {None}
    assert tried == set(INTERFACES.values())
    for file in {one["test"].partition("::")[0] for one in TESTS}:
        defined = {
            one.name for one in ast.parse((ROOT / file).read_text("utf-8")).body if isinstance(one, ast.FunctionDef)
        }
        recorded = {one["test"].partition("::")[2].partition("[")[0] for one in TESTS if one["test"].startswith(file)}
        assert recorded <= defined, f"{file}: renamed or gone since; run make compatibility-page"


def test_nothing_that_was_recorded_failed() -> None:
    assert {one["outcome"] for one in TESTS} <= {"passed", "skipped"}
