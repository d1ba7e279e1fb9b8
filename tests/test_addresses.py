"""Addresses to listen at: the same grammar wherever something listens."""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from skymemory.addresses import ListenAddress, format_address, host_and_port
from skymemory.cli import main as command
from skymemory.errors import InvalidInput

TCP = {
    "127.0.0.1:80": ("127.0.0.1", 80),
    "tcp://127.0.0.1:80": ("127.0.0.1", 80),
    "[::1]:0": ("::1", 0),
    "tcp://[::1]:0": ("::1", 0),
    "::1:65535": ("::1", 65535),
    ":8080": ("127.0.0.1", 8080),
    "tcp://:8080": ("127.0.0.1", 8080),
    "node-7.example:8080": ("node-7.example", 8080),
}
REFUSED = ["", "8080", "8080x", "a:b", "a:70000", "a:-1", "a:²", "a:" + 5000 * "1", "[::1]", "[a]:1", "a:b:1", "tcp://"]
REFUSED += ["http://a:1", "tcp://a:1/", "/run/s.sock", "a b:1", "udp://a:1"]


@pytest.mark.parametrize("text", TCP)
@pytest.mark.parametrize("unix", [False, True])
def test_tcp_addresses_have_one_grammar(text: str, unix: bool) -> None:
    address = ListenAddress.parse(text, unix=unix)
    assert (address.host, address.port, address.path) == (*TCP[text], "")
    assert ListenAddress.parse(str(address)) == address
    assert host_and_port(format_address(address.host, address.port)) == TCP[text]


@pytest.mark.parametrize("text", ["unix:/run/s.sock", "unix:///run/s.sock"])
def test_paths_are_for_those_that_take_them(text: str) -> None:
    assert ListenAddress.parse(text, unix=True) == ListenAddress(path="/run/s.sock")
    with pytest.raises(InvalidInput, match="expected HOST:PORT"):
        ListenAddress.parse(text)
    assert ListenAddress.parse("unix:s.sock", unix=True).path == "s.sock"
    with pytest.raises(InvalidInput, match="no path"):
        ListenAddress.parse("unix:", unix=True)


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:20])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="not an address to listen at: expected HOST:PORT") as refused:
        ListenAddress.parse(text)
    assert len(str(refused.value)) < 250


def _listening(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in dict.fromkeys(action.choices.values()):
                yield from _listening(inner)
        for option in action.option_strings:
            if option.endswith("listen") and "PORT" in str(action.metavar) + str(action.help):
                yield parser.prog.removeprefix("skymemory "), option


LISTENING = list(_listening(command.build_parser()))
WITH = {
    "epp": "--endpoint 127.0.0.1:1",
    "route": "--backend http://127.0.0.1:1",
    "store serve": "memory://1MiB",
    "serve": "--model small",
}


def test_every_option_that_listens_is_tried() -> None:
    assert {option for _, option in LISTENING} >= {"--listen", "--health-listen", "--metrics-listen"}
    assert {verb for verb, _ in LISTENING} == set(WITH)


@pytest.mark.parametrize(("verb", "option"), LISTENING)
def test_every_verb_refuses_with_the_same_words(verb: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*verb.split(), *WITH[verb].split(), option, "nowhere:port"]) == 2
    error = capsys.readouterr().err
    assert "'nowhere:port' is not an address to listen at: expected HOST:PORT, [IPv6]:PORT or :PORT" in error


@pytest.mark.brief()
@pytest.mark.parametrize(
    ("listen", "said"), [("[::1]:0", r"tcp://\[::1\]:\d+ "), ("tcp://127.0.0.1:0", r"tcp://127.0.0.1:\d+ ")]
)
def test_the_store_daemon_prints_an_address_that_can_be_given_back(
    listen: str, said: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "skymemory", "store", "serve", "memory://1MiB", "--listen", listen],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as served:
        assert served.stdout is not None and served.stderr is not None
        line = served.stdout.readline()
        served.send_signal(signal.SIGTERM)
        error = served.stderr.read()
    if "reachable from other computers" in error or "no such address" in error:
        pytest.skip(error)
    found = re.search(said, line)
    assert found, (line, error)
    assert ListenAddress.parse(found[0].strip()).port > 0
