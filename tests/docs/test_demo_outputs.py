"""The demos' guide shows what the demos print: the conductor's table is the same on every machine, and compared."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.demo_outputs import DEMOS, HANDED_OVER, PAGE, block_of, counted, excerpt, faults, outputs

from skymemory.cli.main import main
from tools import demo_outputs


@pytest.mark.brief()
def test_the_conductors_table_on_the_page_is_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    shown = DEMOS["conductor"]
    assert main(["demo", *shown.words]) == 0
    page = block_of("conductor", PAGE.read_text("utf-8")).group(2)
    assert excerpt(capsys.readouterr().out, shown) == page, "write it with `python -m tools.demo_outputs conductor`"


@pytest.mark.parametrize("name", sorted(DEMOS))
def test_every_demo_has_its_block(name: str) -> None:
    shown = block_of(name, PAGE.read_text("utf-8")).group(2)
    assert shown.startswith(DEMOS[name].first.strip())
    assert max(map(len, shown.splitlines())) <= 100


def test_lines_that_are_not_printed_are_an_error() -> None:
    with pytest.raises(SystemExit, match="no line"):
        excerpt("other\nlines", DEMOS["conductor"])


def test_what_a_demo_prints_is_kept_with_its_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page, kept = tmp_path / "demos.md", tmp_path / "outputs.json"
    page.write_text(PAGE.read_text("utf-8"), "utf-8")
    kept.write_text(demo_outputs.OUTPUTS.read_text("utf-8"), "utf-8")
    for name, value in (("ROOT", tmp_path), ("PAGE", page), ("OUTPUTS", kept)):
        monkeypatch.setattr(demo_outputs, name, value)
    printed = "rotated by one slot: 99 chunks handed over within\nTable 3, here\nit took 0.06 s\nTTFT: to the first"
    monkeypatch.setattr(demo_outputs, "run", lambda _: printed)
    demo_outputs.main(["table-3"])
    assert outputs()["table-3"]["counts"] == {HANDED_OVER: "99"}
    assert outputs()["table-3"]["lines"] == ["Table 3, here", "it took 0.06 s"]
    assert "processor" in outputs()["table-3"]["versions"]
    assert list(faults()) == []
    page.write_text(page.read_text("utf-8").replace("it took 0.06 s", "it took 0.05 s"), "utf-8")
    assert list(faults()) == ["demos.md: demo table-3 did not print this: run python -m tools.demo_outputs table-3"]


def test_an_output_without_a_count_of_the_prose_is_an_error() -> None:
    with pytest.raises(SystemExit, match="chunks handed over"):
        counted("Table 3, here", DEMOS["table-3"])
