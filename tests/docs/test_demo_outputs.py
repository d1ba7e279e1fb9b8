"""The demos' guide shows what the demos print: the conductor's table is the same on every machine, and compared."""

from __future__ import annotations

import pytest
from tools.demo_outputs import DEMOS, PAGE, block_of, excerpt

from skymemory.cli.main import main


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
