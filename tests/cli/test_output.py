"""Text that the command writes: any encoding, a closed pipe, a full device; no trace, and the same exit code."""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skymemory.cli import main as command
from skymemory.cli._output import PLAIN, to_ascii

ENCODINGS = ("latin-1", "cp1252", "ascii")

READS = {
    "breakeven": "breakeven --json",
    "cluster status": "cluster status --run-dir {folder}",
    "cluster logs": "cluster logs router --run-dir {folder}",
    "cluster manifests": "cluster manifests nowhere→.toml",
    "constellation status": "constellation status --run-dir {folder}/×",
    "epp": "epp --settings nowhere→.toml",
    "fit": "fit --url http://127.0.0.1:1 --shape nowhere→",
    "keys show": "keys show nowhere→",
    "kv get": "kv get → --store memory://1MiB",
    "kv pin": "kv pin … --store memory://1MiB",
    "kv delete": "kv delete 好 --store memory://1MiB",
    "kv list": "kv list --store memory://1MiB",
    "layout": "layout",
    "passes": "passes --lat 48 --lon 11 --hours 1",
    "prefetch": "prefetch nowhere→",
    "replay": "replay nowhere→ --url http://127.0.0.1:1",
    "route": "route --check --settings nowhere→.toml",
    "shells": "shells nowhere→",
    "simulate": "simulate --list",
    "vllm-args": "vllm-args model→ --store memory://1MiB",
}
"""A command line of every verb that reads, or is refused for a word that is not ASCII."""

SLOW = {"breakeven", "passes"}

OTHERS = {
    *("cluster up", "cluster down", "cluster supervise"),
    *("constellation up", "constellation down", "constellation rotate", "constellation plan", "constellation attach"),
    *("constellation disable", "constellation enable", "constellation revive", "satellite", "store serve", "serve"),
    *("keys new", "keys rotate", "keys retire", "keys api", "kv put"),
    *("demo", "demo motion", "demo cells", "demo cake", "demo route", "demo conductor", "demo vllm", "demo disagg"),
    *("doctor", "figures", "optimise", "reproduce"),
}
"""Verbs that start, change or compute for long; their pages of help are written in every encoding, too."""


def _leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not inner:
        yield parser
    for action in inner:
        for each in dict.fromkeys(action.choices.values()):
            yield from _leaves(each)


LEAVES = {leaf.prog.removeprefix("skymemory "): leaf for leaf in _leaves(command.build_parser())}


def _run(words: list[str], encoding: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str, str]:
    out, err = io.BytesIO(), io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding=encoding, errors="strict"))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(err, encoding=encoding, errors="strict"))
    try:
        status = command.main(words)
    except SystemExit as ended:
        status = int(ended.code or 0)
    sys.stdout.flush()
    sys.stderr.flush()
    return status, out.getvalue().decode(encoding), err.getvalue().decode(encoding)


def test_every_verb_is_tried_in_other_encodings() -> None:
    assert set(READS) | OTHERS == set(LEAVES) | {"demo"}


@pytest.mark.parametrize(
    "verb", [pytest.param(verb, marks=[pytest.mark.slow] if verb in SLOW else []) for verb in READS]
)
def test_a_verb_ends_the_same_in_every_encoding(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [word.format(folder=tmp_path) for word in READS[verb].split()]
    status, out, err = _run(words, "utf-8", monkeypatch)
    assert out or err
    for encoding in ENCODINGS:
        its, its_out, its_err = _run(words, encoding, monkeypatch)
        assert its == status, (encoding, its_err)
        # Columns of a table are as wide as what stands in them, and plain forms are longer.
        assert to_ascii(out).split() == to_ascii(its_out).split() and to_ascii(err).split() == to_ascii(its_err).split()
        assert "\\u" not in its_err and "Traceback" not in its_err


@pytest.mark.parametrize("verb", LEAVES)
def test_help_is_written_in_every_encoding(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    page = LEAVES[verb].format_help()
    for encoding in ENCODINGS:
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors=PLAIN)
        stream.write(page)
        stream.flush()
    if not page.isascii():
        assert _run([*verb.split(), "--help"], "ascii", monkeypatch)[0] == 0


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("a → b × 3 · … ≤ ≥ −1", "a -> b x 3 . ... <= >= -1"),
        ("┌─┬┐│╭╮├┼┤└┴┘═║╞━┃╴╎┄╱", "+-++|++++++++=|+-|-|-/"),
        ("ñ ü ½ µs 25° 10² 好 \udcff", "n u 1/2 us 25deg 102 ? ?"),
        ("▁▃█ ⣿ e\u0301", "_-# : e"),
    ],
)
def test_characters_that_an_encoding_lacks_have_plain_forms(text: str, written: str) -> None:
    assert text.encode("ascii", PLAIN).decode() == written == to_ascii(text)


def test_what_an_encoding_has_is_written_as_it_is() -> None:
    assert "3 × 4 → ·".encode("latin-1", PLAIN) == "3 × 4 -> ·".encode("latin-1")
    assert "a\udcffb→".encode("utf-8", PLAIN) == "a?b→".encode()


_STARTS = [["-m", "skymemory"], ["-m", "skymemory.cli.main"]]


@pytest.mark.brief(every=3)
@pytest.mark.parametrize("start", _STARTS, ids=" ".join)
@pytest.mark.parametrize(
    "environment",
    [{"PYTHONIOENCODING": "latin-1"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"LC_ALL": "C"}],
    ids=["latin-1", "ascii", "C"],
)
def test_every_start_of_the_command_writes_what_the_stream_can_show(
    start: list[str], environment: dict[str, str]
) -> None:
    ended = subprocess.run(
        [sys.executable, *start, "layout"], env={**os.environ, **environment}, capture_output=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
    # In the locale C Python itself takes UTF-8.
    assert ("motion →" if environment == {"LC_ALL": "C"} else "motion ->").encode() in ended.stdout


def test_an_error_handler_that_was_chosen_is_kept() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "skymemory", "layout"],
        env={**os.environ, "PYTHONIOENCODING": "ascii:replace"},
        capture_output=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, b"") and b"motion ?" in ended.stdout


def test_a_program_of_ours_reads_utf_8() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "skymemory.cli.main", command.END_WITH_STDIN, "layout"],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as started:
        assert started.stdout is not None
        assert "motion →".encode() in started.stdout.read()


@pytest.mark.brief(every=3)
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("words", ["layout", "layout --help", "--version"])
def test_output_that_cannot_be_written_is_a_failure(words: str, unbuffered: str) -> None:
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "skymemory", *words.split()],
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
            text=True,
        )
    said = "skymemory: cannot write to standard output: No space left on device\n"
    assert (ended.returncode, ended.stderr) == (1, said)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_errors_that_cannot_be_written_leave_the_exit_code() -> None:
    with open("/dev/full", "wb") as full:
        ended = subprocess.run([sys.executable, "-m", "skymemory", "bogus"], stderr=full, stdout=full, check=False)
    assert ended.returncode == 2


@pytest.mark.parametrize("closed", ["1", "2"])
def test_streams_that_are_closed_are_no_error(closed: str) -> None:
    ended = subprocess.run(
        ["/bin/sh", "-c", f'"$0" -m skymemory layout {closed}>&-', sys.executable], capture_output=True, check=False
    )
    assert ended.returncode == 0 and b"Traceback" not in ended.stderr
