"""The tables of the benchmark pages are those of the JSON beside them, and every table has a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tools.benchmark_tables import PAGES, TABLES, page


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_page_is_that_of_the_runs(path: Path) -> None:
    assert path.read_text("utf-8") == page(path), "run: python -m tools.benchmark_tables"


def test_every_table_stands_on_one_page() -> None:
    marks = [mark for path in PAGES for mark in re.findall(r"<!-- benchmark: (.+) -->", path.read_text("utf-8"))]
    assert sorted(marks) == sorted(TABLES)
