"""Figures in prose are those of the runs, every quantity has a source, and the checker finds what breaks either."""

from __future__ import annotations

import re

import pytest
from tools.prose_figures import FIGURES, PAGES, ROOT, faults, page, unsourced, unused

from tools import prose_figures


def test_every_figure_is_that_of_its_run_and_every_quantity_has_a_source() -> None:
    assert list(faults()) == []


def test_every_figure_stands_on_a_page() -> None:
    marks = {mark for path in PAGES for mark in re.findall(r"<!-- figure: ([^>]+?) -->", path.read_text("utf-8"))}
    assert marks == set(FIGURES)


def test_a_changed_figure_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    readme = ROOT / "README.md"
    changed = readme.read_text("utf-8").replace(FIGURES["ttft with"](), "0.01 s", 1)
    monkeypatch.setattr(prose_figures, "PAGES", [_Page(changed)])
    monkeypatch.setattr(prose_figures, "PROSE", [])
    (fault,) = faults()
    assert "says 0.01 s, the run says" in fault
    assert "python -m tools.prose_figures" in fault


def test_writing_a_page_mends_a_changed_figure() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert page(_Page(text.replace(FIGURES["ttft with"](), "0.01 s", 1))) == text  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "sentence",
    [
        "It takes 3 ms.",
        "It takes about 2.5 seconds",
        "a tenth, 12 %",
        "1,300 MB/s of it",
        "0.35 to 0.8 of Redis's rate",
        "twice: 2.4 ×",
        "in **19.5 s** without",
        "| a cell of 7 GiB |",
    ],
)
def test_a_quantity_without_a_source_is_found(sentence: str) -> None:
    ((line, quantity),) = list(unsourced(f"# Title\n\n{sentence}\n", frozenset()))[:1]
    assert line == 3
    assert quantity in sentence


@pytest.mark.parametrize(
    "sentence",
    [
        "four tiers, 95 satellites and 5 planes",
        "`--timeout 30s` and `0.5`",
        "[page 4](figures-1.5.md)",
        "<!-- figure: ttft with -->0.48 s<!-- end -->",
        "```text\ntook 3.4 s\n```",
        "port 8001, version 2",
    ],
)
def test_what_is_no_quantity_of_prose_needs_no_source(sentence: str) -> None:
    assert list(unsourced(f"{sentence}\n", frozenset())) == []


def test_a_stated_quantity_that_was_removed_from_its_page_is_found() -> None:
    assert unused("It waits 3 s.\n", frozenset({"3 s", "4 s"})) == ["4 s"]


class _Page:
    """A page's text in place of a file."""

    def __init__(self, text: str) -> None:
        self._text = text

    def read_text(self, encoding: str) -> str:
        return self._text

    def relative_to(self, root: object) -> str:
        return "page"


def test_the_picture_of_the_readme_is_that_of_its_runs() -> None:
    image = pytest.importorskip("PIL.Image")
    from benchmarks.plot_ttft import TARGET, source_digest

    with image.open(TARGET) as picture:
        assert picture.text["Source"] == source_digest(), "run: python benchmarks/plot_ttft.py"
