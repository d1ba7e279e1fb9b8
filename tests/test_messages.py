"""Messages for people: each says what was wrong, where, and what to do, in our words and for every kind of cause."""

from __future__ import annotations

import argparse
import errno
import math
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skymemory.addresses import without_api_path
from skymemory.cli import main as command
from skymemory.config import converted, duration, parse_json, parse_toml, positive, suggestion
from skymemory.engine.inputs import read_document
from skymemory.errors import InvalidInput, connection_reason, quoted
from skymemory.files import decode_text, read_toml
from skymemory.router.settings import read_cost, read_settings
from skymemory.store import disk_files
from skymemory.testbed.key_file import read_keys
from skymemory.testbed.open_store import open_store
from skymemory.testbed.plan_file import load_plan

pytest.importorskip("skymemory_lab", reason="the laboratory is not installed")

from skymemory_lab.sim.sky.breakeven import read_measured
from skymemory_lab.sim.trace import read_trace

# --- a put that fails ---

DISK = {
    "ENOSPC": "the disk is full",
    "EDQUOT": "this user's disk quota is used up",
    "EROFS": "the file system is read-only",
    "EACCES": "this user may not write there",
    "EIO": "the disk fails",
}


@pytest.mark.parametrize("kind", ["disk://{folder}?budget=1MiB", "tiers:?tier=memory://64KiB&tier=disk://{folder}"])
@pytest.mark.parametrize("fault", DISK)
def test_a_disk_that_takes_nothing_is_distinguished(
    fault: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    value, folder = tmp_path / "value", tmp_path / "values"
    value.write_bytes(b"x" * 100_000)

    def fail(*_: object) -> int:
        raise OSError(getattr(errno, fault), os.strerror(getattr(errno, fault)))

    monkeypatch.setattr(disk_files.os, "writev", fail)
    address = kind.format(folder=folder) + ("%3Fbudget%3D1MiB" if kind.startswith("tiers") else "")
    assert command.main(["kv", "put", str(value), "--key", "nothing", "--store", address]) == 1
    said = capsys.readouterr().err
    assert said.startswith("skymemory: 'nothing' was not stored in the store ")
    assert f"{folder}: {DISK[fault]}" in said and "no room, or no answer" not in said


def test_a_file_that_may_not_be_so_large_is_named(tmp_path: Path) -> None:
    """A limit of the user's, which the system does not name the file for."""
    (tmp_path / "value").write_bytes(bytes(10_000))
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))\n"
        "from pathlib import Path; from skymemory.cli.main import main; from skymemory.files import write_output\n"
        "from skymemory.files import write_private; import skymemory_lab.cli.layout as layout\n"
        "layout.run = lambda args: write_{}(Path('there'), bytes(5000))\n"
        "sys.exit(main(['layout']))"
    )
    for way in ("output", "private"):
        done = subprocess.run(
            [sys.executable, "-c", program.format(way)], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 1
        assert "there: File too large: " in done.stderr and "ulimit -f" in done.stderr, done.stderr


def test_a_key_that_is_not_utf_8_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "ä").write_text("x")
    done = subprocess.run(
        [sys.executable, "-m", "skymemory", "kv", "put", "ä", "--store", f"disk://{tmp_path}/values?budget=1MiB"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and "LC_ALL=C.UTF-8" in done.stderr, done.stderr


@pytest.mark.parametrize("content", ["", "# only a comment\n"])
def test_an_empty_scenario_is_refused(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_text(content)
    assert command.main(["simulate", "empty"]) == 2
    assert "empty: it has no key of a scenario" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["get nothing", "pin nothing", "delete nothing"])
def test_a_key_is_quoted(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["kv", *words.split(), "--store", "memory://1MiB"]) == 1
    assert "'nothing' is not in the store 'memory'" in capsys.readouterr().err


def test_a_store_that_ends_with_the_command_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = tmp_path / "value"
    value.write_bytes(b"x")
    assert command.main(["kv", "put", str(value), "--store", "memory://"]) == 2
    assert "ends with it: expected a store that stays" in capsys.readouterr().err


@pytest.mark.parametrize(
    "address",
    [
        "disk:///folder?max={}", "disk:///folder?{}=1", "disk:///folder?budget={}", "memory://1MiB?admit={}",
        "memory://1MiB?name=-{}", "redis://host/{}", "constellation:///run?index={}", "{}",
    ],
)  # fmt: skip
def test_a_long_address_of_a_store_is_shown_in_part(address: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        open_store(address.format(5_000 * "y"))
    assert len(str(refused.value)) < 700


def test_a_word_that_is_known_twice_is_listed_once() -> None:
    assert suggestion("zzz", ["name", "name", "store"]) == "expected one of name, store"


@pytest.mark.parametrize("words", [["--x" + 5_000 * "y"], [f"--x{at}" for at in range(1_000)]])
def test_long_arguments_are_shown_in_part(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["layout", *words]) == 2
    assert len(capsys.readouterr().err) < 300


# --- text ---

READERS: dict[str, Callable[[Path], Any]] = {
    "toml": read_toml,
    "settings": lambda path: read_settings(path),
    "hierarchy": lambda path: open_store(f"tiers://{path}"),
    "cost": read_cost,
    "plan": load_plan,
    "keys": read_keys,
    "trace": read_trace,
    "document": read_document,
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("a = 1\n".encode("utf-16"), "UTF-16, expected UTF-8"),
        (b"\xff\xfe\x00\x00a\x00\x00\x00", "UTF-32, expected UTF-8"),
        (b"a = '\xe9'\n", r"not UTF-8 text \(byte 5, 0xe9\)"),
    ],
    ids=["utf-16", "utf-32", "latin-1"],
)
def test_text_in_another_encoding_is_named_with_its_file(name: str, data: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "named.toml"
    path.write_bytes(data)
    path.chmod(0o600)
    with pytest.raises(InvalidInput, match=said) as refused:
        READERS[name](path)
    assert str(refused.value).count("named.toml") == 1


@pytest.mark.parametrize(
    ("data", "said"), [("", "not JSON: it is empty"), ("{oh", "not JSON at line 1, column 2"), ("[]", "[]")]
)
def test_a_file_that_is_no_json_object_is_named_once(data: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "named.json"
    path.write_text(data)
    with pytest.raises(InvalidInput) as refused:
        read_measured(path)
    assert str(refused.value).startswith(f"{path}: {said}")
    assert str(refused.value).endswith("; expected measured engines, format skymemory-prefill/1")
    assert str(refused.value).count("named.json") == 1


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "named"
    line = '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [0]}\n'
    path.write_bytes(b"\xef\xbb\xbf" + line.encode())
    assert len(read_trace(path)) == 1
    path.write_bytes(b"\xef\xbb\xbfseed = 3\n[[backends]]\nurl = 'http://127.0.0.1:1'\n")
    assert read_settings(path).seed == 3 and read_toml(path)["seed"] == 3
    path.write_bytes(b"\xef\xbb\xbfa text")
    assert read_document(path) == decode_text(path.read_bytes()) == "a text"


# --- numbers ---

NUMBERS = {
    "1e309": "1e309",
    "400 digits": 400 * "9",
    "5,000 digits": 5000 * "9",
    "minus": "-" + 5000 * "9",
    "nan": "nan",
    "inf": "inf",
    "-inf": "-inf",
    "empty": "",
    "20 digits": 20 * "9",
    "other digits": "²",
}


def _options(parser: argparse.ArgumentParser) -> Iterator[tuple[argparse.ArgumentParser, argparse.Action]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in dict.fromkeys(action.choices.values()):
                yield from _options(inner)
        elif action.type not in (None, Path) and action.nargs != 0:
            yield parser, action


@pytest.mark.brief(every=5)
@pytest.mark.parametrize("kind", NUMBERS)
def test_every_option_refuses_numbers_that_are_none_or_reads_finite_ones(kind: str) -> None:
    options = list(_options(command.build_parser()))
    assert len(options) > 75
    for parser, action in options:
        try:
            read = parser._get_value(action, NUMBERS[kind])
        except argparse.ArgumentError as error:
            assert len(str(error)) < 400, (parser.prog, action.dest)
            continue
        for number in read if isinstance(read, list | tuple) else [read]:
            if isinstance(number, int | float):
                assert math.isfinite(float(number)), (parser.prog, action.dest, number)


@pytest.mark.parametrize("digits", [20, 400, 5000])
@pytest.mark.parametrize("read", [parse_toml, lambda text: parse_json('{"a": ' + text.split("=")[1] + "}")])
def test_numbers_of_any_length_in_a_file_are_clear_errors(read: Callable[[str], Any], digits: int) -> None:
    try:
        found = read(f"a = {digits * '9'}")
    except InvalidInput as error:
        assert "whole number" in str(error) and "set_int_max" not in str(error) and len(str(error)) < 200
    else:  # in JSON 20 digits are a number, as in the files of tokenizers
        assert digits == 20 and float(found["a"]) == 1e20
    with pytest.raises(InvalidInput, match=r"a: a number of about [56],?\d+ digits"):
        parse_toml(f"a = 0x{5000 * 'f'}")


@pytest.mark.parametrize("value", [10**400, 10**5000, float("nan"), float("inf"), -1, "", 5000 * "9"], ids=range(7))
def test_settings_refuse_numbers_out_of_range_with_a_short_message(value: object) -> None:
    for read in (positive, duration, lambda value: converted("a", value, 1)):
        try:
            found = read(value)
        except InvalidInput as error:
            assert len(str(error)) < 200
        else:
            assert value == -1 and found == -1
    with pytest.raises(InvalidInput, match="a is "):
        converted("a", value if value != -1 else math.nan, 1.5) if value != math.inf else converted("a", "1e309", 1.5)


def test_long_numbers_in_a_trace_are_refused_with_their_line(tmp_path: Path) -> None:
    for digits in (30, 400, 5000):
        path = tmp_path / "trace.jsonl"
        path.write_text('{"timestamp": %s, "input_length": 1, "output_length": 1, "hash_ids": [0]}' % (digits * "9"))
        with pytest.raises(InvalidInput, match=r"trace\.jsonl, line 1: .*whole number") as refused:
            read_trace(path)
        assert len(str(refused.value)) < 200


def test_what_a_user_wrote_is_quoted_and_cut() -> None:
    assert quoted("a b") == "'a b'" and quoted(3) == "3"
    assert quoted("x" * 5000).endswith("…' (5,000 characters)") and len(quoted("x" * 5000)) < 80
    assert quoted(10**5000) == "a number of about 5,000 digits"


# --- servers ---


@pytest.mark.parametrize("more", ["", "/", "/v1", "/v1/", "/v1/models", "/v1/chat/completions", "/v1/completions"])
def test_the_path_of_the_api_may_stand_in_a_servers_address(more: str, tmp_path: Path) -> None:
    from skymemory_lab.replay.client import base_url

    for url in ("http://127.0.0.1:8000", "https://host/prefix"):
        assert without_api_path(url + more) == base_url(url + more) == url
        settings = read_settings(None, {"backends": [url + more]})
        assert settings.backends[0].url == url


def test_a_connection_that_failed_is_described_in_our_words() -> None:
    import aiohttp
    from aiohttp.client_reqrep import ConnectionKey

    key = ConnectionKey("127.0.0.1", 1, False, True, None, None, None)
    refused = ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('127.0.0.1', 1)")
    wrong = ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number")
    wrong.reason = "WRONG_VERSION_NUMBER"
    for error, said in {
        aiohttp.ClientConnectorError(key, refused): "connection refused: nothing listens there",
        aiohttp.ClientConnectorError(key, socket.gaierror(-2, "Name or service not known")): "its name is not known",
        aiohttp.ClientConnectorSSLError(key, wrong): "TLS failed: wrong version number; it may speak plain HTTP",
        aiohttp.ServerDisconnectedError(): "connection closed by the other side before it answered",
        aiohttp.ClientOSError(errno.ECONNRESET, "reset"): "reset",
        ConnectionResetError(errno.ECONNRESET, "reset"): "connection closed by the other side before it answered",
        TimeoutError(): "no answer in time",
        OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH)): "No route to host",
    }.items():
        words = connection_reason(error)
        assert words.startswith(said) and "ssl:" not in words and "Errno" not in words, words


def test_a_refused_metrics_page_does_not_speak_of_ssl(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        assert command.main(["route", "--check", "--backend", url]) == 1
    said = capsys.readouterr().out
    assert "connection refused: nothing listens there" in said and "ssl" not in said
