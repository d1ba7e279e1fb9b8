"""Figures in prose are those of the runs, every quantity has a source, and the checker finds what breaks either."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tools.prose_figures import FIGURES, PAGES, ROOT, faults, mark_faults, page, unsourced, unused

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
    fault = next(mark_faults())
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
        "at `0.18 s` with it",
        "two cores carry × 900",
        "some 900,000 a second",
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


@pytest.mark.brief(every=5)
@pytest.mark.parametrize(
    ("name", "figure"),
    [
        ("docs/guide/demos.md", r"<!-- benchmark: demo times -->.*? (\d+) s"),
        ("docs/guide/tiers.md", r"<!-- benchmark: tiers that hang -->.*?\| (\d+) \|"),
        ("docs/benchmarks/arena.md", r"<!-- arena: .*?(\d+\.\d+)"),
        ("docs/benchmarks/admission.md", r"<!-- admission: .*?(\d+\.\d+)"),
        ("docs/guide/demos.md", r"<!-- demo: table-3 -->.*?(\d\.\d\d)"),
        ("docs/guide/demos.md", r"```text\n\[ +\d+\.\d s\] values of (\d)"),
        ("docs/guide/demos.md", r"hands <!-- figure: [^>]+ -->(\d+) chunks"),
        ("docs/guide/demos.md", r"terminals of (\d+) columns"),
        ("docs/guide/constellation.md", r"two cores carry <!-- figure: [^>]+ -->× (\d+)"),
        ("docs/guide/security.md", r"about (\d+),000 a second"),
        ("docs/benchmarks.md", r"(\d) × smaller than 8 bits"),
        ("docs/benchmarks/robustness.md", r"(\d+) days"),
    ],
)
def test_a_changed_digit_is_found(name: str, figure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = re.search(figure, (text := (ROOT / name).read_text("utf-8")), re.DOTALL)
    assert found is not None
    at = found.start(1)
    _show(monkeypatch, name, text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :])
    assert any(fault.startswith(name) for fault in faults())


@pytest.mark.brief()
@pytest.mark.parametrize("instead", ["`0.18 s`", "half a second", ""])
def test_a_figure_whose_mark_was_removed_is_found(instead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    _show(monkeypatch, "README.md", re.sub("<!-- figure: ttft with -->.*?<!-- end -->", instead, text))
    found = list(faults())
    assert "no page has the figure 'ttft with'" in found
    assert any("README.md: no longer says 'figure:ttft_with'" in fault for fault in found)


def _show(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    """Let a page have another text."""
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, *words: text if path == ROOT / name else read(path, *words))
