"""The command itself: verbs, errors in one line, exit codes, and a start that imports nothing heavy."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

import skymemory
from skymemory.cli import main as command
from skymemory.errors import ConstellationError, InvalidInput

HEAVY = {"torch", "transformers", "matplotlib", "numpy", "asyncio", "hqq", "optimum"}


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], int]], None]:
    """Gives the command one verb, ``try``, that does what a test says."""

    def install(act: Callable[[], int]) -> None:
        def add_parser(subparsers: command.Subparsers) -> None:
            subparsers.add_parser("try")

        def run(args: argparse.Namespace) -> int:
            return act()

        monkeypatch.setattr(command, "verb_names", lambda: ["try"])
        monkeypatch.setattr(command, "_load", lambda name: SimpleNamespace(add_parser=add_parser, run=run))

    return install


def _raise(error: BaseException) -> Callable[[], int]:
    def act() -> int:
        raise error

    return act


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (InvalidInput("no such planet"), 2, "skymemory: no such planet\n"),
        (ConstellationError("port taken"), 1, "skymemory: port taken\n"),
        (KeyboardInterrupt(), 130, "skymemory: interrupted\n"),
    ],
)
def test_errors_are_one_line_and_a_code(
    verb: Callable[[Callable[[], int]], None],
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    words: str,
) -> None:
    verb(_raise(error))
    assert command.main(["try"]) == code
    assert capsys.readouterr().err == words


def test_faults_of_ours_are_not_hidden(verb: Callable[[Callable[[], int]], None]) -> None:
    verb(_raise(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        command.main(["try"])


def test_a_verbs_answer_is_the_exit_code(verb: Callable[[Callable[[], int]], None]) -> None:
    verb(lambda: 3)
    assert command.main(["try"]) == 3


def test_a_mistyped_verb_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["constelation", "up"]) == 2
    assert "did you mean 'constellation'?" in capsys.readouterr().err
    assert command.main(["xyzzy"]) == 2
    assert "there are " in capsys.readouterr().err


def test_no_verb_at_all_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 2
    assert "VERB" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"skymemory {skymemory.__version__}\n"


@pytest.mark.parametrize("name", command.verb_names())
def test_each_verb_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([name, "--help"])
    assert ended.value.code == 0
    assert name in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--help"], ["satellite", "--help"], ["constellation", "up", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    probe = (
        "import sys; from skymemory.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        f"finally: print(sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", probe, *arguments], capture_output=True, text=True, check=True)
    assert ended.stderr == "[]\n"


def test_python_m_skymemory_is_the_same_command() -> None:
    ended = subprocess.run([sys.executable, "-m", "skymemory", "--version"], capture_output=True, text=True, check=True)
    assert ended.stdout == f"skymemory {skymemory.__version__}\n"


def test_a_reader_that_has_gone_is_no_error() -> None:
    ended = subprocess.run(
        [f"{sys.executable} -m skymemory layout --preset starlink-a | head -c 1; exit ${{PIPESTATUS[0]}}"],
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
