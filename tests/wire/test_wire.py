"""A client and its constellation on two computers, with a real wire between: fragments, delay, jitter, cuts."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.settings_file import settings_file
from tests.wire.wire import FAR, NEAR, Line, Wire, why_not

pytestmark = pytest.mark.slow
HOSTS = 5
FRAGMENTED, WHOLE = 6_144, 1_280
"""Bytes of chunks whose packets the wire carries in fragments, or whole."""
SIZES = (100, 6_144, 60_000, 600_000)


class Computers:
    """The satellites' and the client's."""

    def __init__(self, folder: Path, stack: ExitStack, chunk_bytes: int) -> None:
        self.wire = stack.enter_context(Wire())
        self._run, self._stack, self.chunk_bytes = folder / "run", stack, chunk_bytes
        plan = folder / "sky.json"
        hosts = [word for number in range(HOSTS) for word in ("--host", f"{FAR}:{26_000 + 100 * number}")]
        with settings_file(f"chunk = {chunk_bytes}") as words:
            self.on(NEAR, "constellation", "plan", "--out", str(plan), "--delay", "off", *words, *hosts)
        for number in range(HOSTS):
            words = ("satellite", "--plan", str(plan), "--host", str(number))
            log = stack.enter_context((folder / f"host-{number}.log").open("wb"))
            host = subprocess.Popen(self._command(FAR, words), stdout=log, stderr=subprocess.STDOUT)
            stack.callback(host.wait)
            stack.callback(host.kill)
        until_s = time.monotonic() + 60
        while b"listen" not in b"".join(file.read_bytes() for file in folder.glob("host-4.log")):
            assert time.monotonic() < until_s, [file.read_text() for file in folder.glob("host-*.log")]
            time.sleep(0.1)
        self.attached = self.on(NEAR, "constellation", "attach", str(plan), "--run-dir", str(self._run))
        self.client = self.new_client()

    def _command(self, at: str, words: tuple[str, ...]) -> list[str]:
        return self.wire.command(at, (sys.executable, "-m", "skymemory", *words))

    def on(self, at: str, *words: str) -> str:
        done = subprocess.run(self._command(at, words), capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def new_client(self) -> Client:
        words = (sys.executable, "-m", "tests.wire.client", str(self._run))
        return Client(self.wire.command(NEAR, words), self._stack)


class Client:
    def __init__(self, command: list[str], stack: ExitStack) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        stack.callback(self._process.wait)
        stack.callback(self._process.kill)
        self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def ask(self, do: str, names: list[str], size_bytes: int) -> tuple[float, list[bool | None], list[str]]:
        assert self._process.stdin is not None
        print(json.dumps({"do": do, "names": names, "size": size_bytes}), file=self._process.stdin, flush=True)
        seconds, done, why = self._answer()
        return seconds, done, why


@pytest.fixture(scope="module", params=[FRAGMENTED, WHOLE], ids=["fragments", "whole"])
def computers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Computers]:
    if reason := why_not():
        pytest.skip(f"no network namespaces here: {reason}")
    with ExitStack() as stack:
        yield Computers(tmp_path_factory.mktemp("wire"), stack, request.param)


def named(what: str, number: int) -> list[str]:
    return [f"{what} {each}" for each in range(number)]


@pytest.mark.parametrize("what", ["plain", "delay", "jitter", "loss"])
def test_what_is_put_is_got(computers: Computers, what: str) -> None:
    # The kernel drops a packet of which a fragment is overtaken by 64 others (net.ipv4.ipfrag_max_dist).
    jitter_s = 0.01 if computers.chunk_bytes == WHOLE else 0.0005
    line = {
        "plain": Line(),
        "delay": Line(delay_s=0.005),
        "jitter": Line(0.002, jitter_s),
        "loss": Line(0.002, jitter_s, 0.01, 0.02),
    }[what]
    computers.wire.set(line)
    for size_bytes in SIZES:
        names = named(f"{line} {size_bytes}", 4)
        assert computers.client.ask("put", names, size_bytes)[1] == [True] * 4
        assert computers.client.ask("get", names, size_bytes)[1] == [True] * 4


def test_attach_reports_fragments(computers: Computers) -> None:
    said = "a chunk takes a datagram of 6292 bytes, and the network carries 1472 whole" in computers.attached
    assert said == (computers.chunk_bytes == FRAGMENTED)


def test_after_a_cut_all_is_well_within_two_seconds(computers: Computers) -> None:
    line = Line(0.002)
    for size_bytes in SIZES:
        computers.wire.set(line)
        before = named(f"before {size_bytes}", 8)
        assert computers.client.ask("put", before, size_bytes)[1] == [True] * 8
        computers.wire.set(Line(is_cut=True))
        cut_s = time.monotonic()
        during = named(f"during {size_bytes}", 8)
        stored = computers.client.ask("put", during, size_bytes)[1]
        assert not any(stored) and computers.client.ask("get", before, size_bytes)[1] == [None] * 8
        time.sleep(max(0.0, cut_s + 5.0 - time.monotonic()))
        computers.wire.set(line)
        time.sleep(2.0)
        after = named(f"after {size_bytes}", 16)
        assert computers.client.ask("put", after, size_bytes)[1] == [True] * 16
        for client in (computers.client, computers.new_client()):
            assert client.ask("get", after, size_bytes)[1] == [True] * 16
            assert client.ask("get", before, size_bytes)[1] == [True] * 8


def test_ports_that_change_on_the_way(computers: Computers) -> None:
    for shift in (1, 7, 0):
        computers.wire.set(Line(0.001, port_shift=shift))
        names = named(f"ports {shift}", 8)
        assert computers.client.ask("put", names, 60_000)[1] == [True] * 8
        assert computers.client.ask("get", names, 60_000)[1] == [True] * 8


def test_jitter_costs_little_beside_its_delay(computers: Computers) -> None:
    """Beside a wire on which every packet takes as long as the slowest may with jitter."""
    if computers.chunk_bytes == FRAGMENTED:
        pytest.skip("fragments do not survive it")
    names = named("jitter", 12)
    took_s: dict[str, list[float]] = {}
    computers.wire.set(Line(0.001))
    assert computers.client.ask("put", names, 600_000)[1] == [True] * 12
    for _ in range(3):
        for what, line in {"steady": Line(0.012), "jitter": Line(0.002, 0.01)}.items():
            computers.wire.set(line)
            seconds, done, why = computers.client.ask("get", names, 600_000)
            assert done == [True] * 12, (what, why)
            took_s.setdefault(what, []).append(seconds)
    assert statistics.median(took_s["jitter"]) <= 1.3 * statistics.median(took_s["steady"]), took_s
