"""Verbs of the laboratory: found by their entry points, and asked for by a hint while it is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from skymemory.cli import main as command
from skymemory.installation import find_checkout, laboratory_command


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the product alone were installed."""
    monkeypatch.setattr(command, "_registered_modules", dict)


def test_without_the_laboratory_its_verbs_are_not_offered(alone: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert "constellation" in command.verb_names() and not command._LABORATORY & set(command.verb_names())
    with pytest.raises(SystemExit):
        command.main(["--help"])
    shown = capsys.readouterr().out
    assert "constellation" in shown and "optimise" not in shown and "Start with" not in shown
    assert "laboratory has more verbs" in shown and laboratory_command().split()[-1] in "".join(shown.split())


@pytest.mark.parametrize("verb", sorted(command._LABORATORY))
def test_without_the_laboratory_its_verbs_say_how_to_install_it(
    verb: str, alone: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([verb, "--quick"]) == 1
    error = capsys.readouterr().err
    assert f"the verb {verb!r}" in error and error.endswith(f": {laboratory_command()}\n")


def test_the_command_names_the_folder_of_the_checkout() -> None:
    checkout = find_checkout()
    assert checkout is not None
    assert Path(laboratory_command().split()[-1]) == checkout / "lab" and (checkout / "lab/pyproject.toml").is_file()


def test_the_verbs_of_hints_are_those_of_the_laboratory() -> None:
    pytest.importorskip("skymemory_lab", reason="the laboratory is not installed")
    assert set(command._registered_modules()) == command._LABORATORY


def test_a_verb_whose_files_are_gone_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after the checkout of an editable installation has moved."""
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    command._registered_modules.cache_clear()
    try:
        assert command.main(["layout"]) == 1
        assert laboratory_command() in capsys.readouterr().err
        assert "layout" not in command.verb_names()
    finally:
        command._registered_modules.cache_clear()


def test_a_mistyped_verb_of_the_laboratory_is_guessed_without_it(
    alone: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["simulat"]) == 2
    assert "did you mean 'simulate'?" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["help"], ["help", "keys"]])
def test_help_is_also_a_verb(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(words)
    assert ended.value.code == 0 and "keys" in capsys.readouterr().out


def test_own_verbs_ask_for_no_entry_points(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refused() -> dict[str, str]:
        raise AssertionError("own verbs do without the entry points, which take 30 ms")

    monkeypatch.setattr(command, "_registered_modules", refused)
    with pytest.raises(SystemExit) as ended:
        command.main(["keys", "--help"])
    assert ended.value.code == 0
