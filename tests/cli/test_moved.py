"""Options that are keys of settings files now."""

from __future__ import annotations

from pathlib import Path

import pytest

from skymemory.cli._moved import _MOVED
from skymemory.cli.main import main

ROOT = Path(__file__).parents[2]
MOVED = [(verb, page, option, key) for verb, (page, keys) in _MOVED.items() for option, key in keys.items()]


@pytest.mark.parametrize(("verb", "page", "option", "key"), MOVED, ids=lambda word: word)
def test_the_error_of_a_moved_option_names_its_key(
    verb: str, page: str, option: str, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if verb not in ("route", "epp"):
        pytest.importorskip("skymemory_lab", reason="the laboratory is not installed")
    assert main([*verb.split(), option, "1"]) == 2
    error = capsys.readouterr().err
    assert f"{option} is a key of the settings file now: {key.rpartition('.')[2]} = " in error and page in error
    assert f"| `{key.rpartition('.')[2]}` |" in (ROOT / page).read_text("utf-8")
