"""The command itself: verbs, errors in one line, exit codes, and a start that imports nothing heavy."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import skymemory
from skymemory.cli import main as command
from skymemory.errors import ConstellationError, InvalidInput
from skymemory.installation import install_command

HEAVY = {"torch", "transformers", "matplotlib", "numpy", "asyncio", "hqq", "optimum"}


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], int]], None]:
    """Gives the command one verb, ``try``, that does what a test says."""

    def install(act: Callable[[], int]) -> None:
        def add_parser(subparsers: command.Subparsers) -> None:
            subparsers.add_parser("try")

        def run(args: argparse.Namespace) -> int:
            return act()

        monkeypatch.setattr(command, "_module_of", lambda name: name)
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
    assert "expected one of " in capsys.readouterr().err


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


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in dict.fromkeys(action.choices.values()):
                yield from _parsers(inner)


def test_every_help_is_formatted() -> None:
    parsers = list(_parsers(command.build_parser()))
    assert len(parsers) > 40
    for parser in parsers:
        assert "%%" not in parser.format_help(), parser.prog


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_every_help_fits_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """argparse itself breaks neither ``[--access {ideal,gateway,onboard,hybrid,los}]`` nor what stands before it."""
    monkeypatch.setenv("COLUMNS", str(columns))
    for parser in _parsers(command.build_parser()):
        text = parser.format_help()
        assert max(map(len, text.splitlines())) <= columns, text
        shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
        assert all(option in text for action in shown for option in action.option_strings), parser.prog


@pytest.mark.parametrize(
    ("words", "guess"),
    [
        ("kv gte name", "'get'"),
        ("keys rotat file", "'rotate'"),
        ("demo rout", "'route'"),
        ("kv get x --stroe y", "'--store'"),
    ],
)
def test_a_mistyped_action_or_option_gets_a_suggestion(
    words: str, guess: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(words.split()) == 2
    error = capsys.readouterr().err
    assert f"did you mean {guess}?" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        "keys new nowhere/keys",
        "doctor --compare nowhere",
        "fit --url http://127.0.0.1:1 --shape nowhere",
        "replay nowhere --url http://127.0.0.1:1",
        "kv put nowhere --store memory://1MiB",
        "constellation status --plan nowhere",
        "satellite --plan nowhere --host 0",
        "prefetch nowhere",
        "route --settings nowhere",
        "epp --settings nowhere",
    ],
)
def test_a_file_that_is_not_there_is_named_without_an_error_number(
    words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.main(words.split()) in (1, 2)
    error = capsys.readouterr().err
    assert "nowhere" in error and "Errno" not in error and error.count("\n") == 1


def test_a_verb_ends_with_its_standard_input() -> None:
    """What the demos start is gone when they are."""
    probe = "import time; from skymemory.cli.main import _end_with_stdin; _end_with_stdin(); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", probe], stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(30) != 0


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--versoin"], "did you mean '--version'?"),
        (["constellation", "stauts"], "did you mean 'status'?"),
        (["kv", "gett"], "did you mean 'get'?"),
        (["demo", "motin"], "did you mean 'motion'?"),
    ],
)
def test_a_misspelt_option_or_action_is_guessed(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "replay nowhere --url http://127.0.0.1:1",
        "reproduce mooncake --trace nowhere",
        "prefetch nowhere",
        "kv put nowhere --store memory://",
        "fit --url http://127.0.0.1:1 --shape nowhere",
        "doctor --compare nowhere",
        "constellation status --plan nowhere",
    ],
)
def test_a_missing_file_is_the_input_s_fault_in_one_wording(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(words.split()) == 2
    error = capsys.readouterr().err
    assert "cannot read " in error and error.endswith("nowhere: No such file or directory\n")


@pytest.mark.parametrize(
    ("words", "package", "extra"),
    [
        ("figures 16", "matplotlib", "figures"),
        ("layout --out map.png", "matplotlib", "figures"),
        ("serve", "torch", "hf"),
        ("demo", "torch", "hf"),
        ("route --backend http://127.0.0.1:1", "aiohttp", "router"),
        ("epp --endpoint 127.0.0.1:1", "aiohttp", "envoy,router"),
        ("keys api nowhere tenant", "aiohttp", "router"),
        ("replay nowhere --url http://127.0.0.1:1", "aiohttp", "router"),
    ],
)
def test_a_missing_extra_is_named_in_one_wording(
    words: str, package: str, extra: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("skymemory.cli._options", "skymemory.engine.inputs"):
        monkeypatch.setattr(f"{module}.find_spec", lambda name: None if name == package else name)
    if package == "matplotlib":
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert command.main(words.split()) == 1
    error = capsys.readouterr().err
    assert error.endswith(f" needs {package}, not installed here: {install_command(*extra.split(','))}\n")


@pytest.mark.parametrize("words", ["serve", "doctor", "demo --model small"])
def test_all_that_is_missing_is_named_at_once(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skymemory.engine.inputs.find_spec", lambda name: None)
    monkeypatch.setattr("skymemory.engine.inputs.find_checkout", lambda: None)
    assert command.main(words.split()) == 1
    error = capsys.readouterr().err
    extras = ("hf", "router") if words == "serve" else ("hf",)
    assert install_command(*extras) in error and "the small model is not installed" in error
    assert "torch, transformers" in error and ("aiohttp" in error) == (words == "serve")


@pytest.mark.parametrize("words", [["--admission", "erly"], ["--out", "page.gif"]])
def test_the_simulated_cluster_refuses_options_before_it_runs(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["demo", "conductor", *words]) == 2
    assert capsys.readouterr().out == ""


def test_keys_are_listed_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "keys")
    assert command.main(["keys", "new", path]) == 0
    capsys.readouterr()
    assert command.main(["keys", "show", path, "--json"]) == 0
    (key,) = json.loads(capsys.readouterr().out)
    assert key["in_use"] is True and set(key) == {"id", "from_s", "in_use"}
