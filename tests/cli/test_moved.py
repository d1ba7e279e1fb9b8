"""Options that are keys of settings files now, or were replaced."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from skymemory.cli._moved import _MOVED, _REPLACED, moved_keys
from skymemory.cli.main import main, verb_names

ROOT = Path(__file__).parents[2]
NEEDED = {
    "constellation plan": "--out p --host 127.0.0.1:1",
    "store serve": "memory",
    "replay": "--url http://127.0.0.1:1",
    "kv put": "x",
    "kv get": "x",
    "kv pin": "x",
    "kv delete": "x",
    "reproduce": "cake",
    "cluster up": "cluster.toml",
}
"""Words without which a verb's parser refuses everything."""
MOVED = [(verb, option, key) for verb in _MOVED for option, key in moved_keys(verb).items()]
REPLACED = [(verb, option, advice) for verb, options in _REPLACED.items() for option, advice in options.items()]


def error_of(verb: str, option: str, capsys: pytest.CaptureFixture[str]) -> str:
    if verb.split()[0] not in verb_names():
        pytest.skip("the laboratory is not installed")
    assert main([*verb.split(), *NEEDED.get(verb, "").split(), option, "1"]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(("verb", "option", "key"), MOVED)
def test_the_error_of_a_moved_option_names_its_key(
    verb: str, option: str, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = " ".join(error_of(verb, option, capsys).split())
    name = key.rpartition(".")[2]
    page = ROOT / "docs" / "reference" / ("router.md" if verb in ("route", "epp") else "settings.md")
    assert f"{option} is a key of the settings file now: {name} = …" in error and page.name in error
    text = page.read_text("utf-8")
    if page.name == "settings.md":
        heading = f"`skymemory {verb.replace('plan', 'up')}`"
        text = next(part for part in re.split("^## ", text, flags=re.M) if part.startswith(heading))
    assert f"| `{name}` |" in text or f"`[{name}]`" in text


@pytest.mark.parametrize(("verb", "option", "advice"), REPLACED)
def test_the_error_of_a_replaced_option_says_by_what(
    verb: str, option: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"{option} was replaced: {advice}" in " ".join(error_of(verb, option, capsys).split())
