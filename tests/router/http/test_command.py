"""``skymemory route`` as a process, in front of engines that are processes: start, reload, kill, drain, stop."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.router.processes import PATIENCE_S, Process, engine, router

from skymemory.cli.main import main
from skymemory.router.limits.files import raise_open_files

STREAM = {"model": "small", "prompt": "x" * 200, "stream": True}


def opened(port: int, body: dict[str, Any]) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    connection.request("POST", "/v1/completions", json.dumps(body))
    return connection.getresponse()


def until(true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline_s, "it did not come true"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def two_engines() -> Iterator[list[int]]:
    with engine("e0") as (_, first), engine("e1") as (_, second):
        yield [first, second]


def urls(ports: list[int]) -> list[str]:
    return [word for port in ports for word in ("--backend", f"http://127.0.0.1:{port}")]


def test_it_serves_drains_on_sigterm_and_ends_with_0(two_engines: list[int]) -> None:
    with router(*urls(two_engines), "--strategy", "least-load", settings="log_requests = true") as (process, port):
        whole = opened(port, {**STREAM, "mock": {"events": 2}})
        assert whole.read().endswith(b"[DONE]\n\n")
        running = opened(port, {**STREAM, "mock": {"events": 6, "gap_s": 0.1}})
        first = running.read1()
        process.send_signal(signal.SIGTERM)
        until(lambda: not _accepts(port))
        assert (first + running.read()).endswith(b"data: [DONE]\n\n")
        assert process.ends() == 0
        process.says(r"POST /v1/completions 200 answered server=127.0.0.1:\d+ matched=0/50 cached=8/32 ttft_ms=[\d.]+ ")
        assert not any("Traceback" in line for line in process.said)


@pytest.mark.brief()
def test_what_does_not_end_in_time_is_cut_off(two_engines: list[int]) -> None:
    with router(*urls(two_engines), settings='drain = "300ms"') as (process, port):
        running = opened(port, {**STREAM, "mock": {"events": 100, "gap_s": 0.2}})
        running.read1()
        process.send_signal(signal.SIGTERM)
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            running.read()
        assert process.ends() == 1
        process.says("1 requests are aborted")


@pytest.mark.brief()
def test_an_engine_killed_in_the_middle_of_a_stream(two_engines: list[int]) -> None:
    with engine("doomed") as (doomed, doomed_port), router(*urls([doomed_port])) as (_, port):
        running = opened(port, {**STREAM, "mock": {"events": 100, "gap_s": 0.1}})
        first = running.read1()
        doomed.send_signal(signal.SIGKILL)
        with pytest.raises(http.client.IncompleteRead) as broken:
            while True:
                piece = running.read1()
                assert piece, "it ended as if it were whole"
                first += piece
        assert b"went away in the middle" in first + broken.value.partial
        until(lambda: opened(port, STREAM).status == 503)


@pytest.mark.brief()
def test_a_changed_file_and_sighup_are_taken_up(two_engines: list[int], tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    backend = '[[backends]]\nurl = "http://127.0.0.1:{}"\nname = "{}"\n'
    file.write_text(backend.format(two_engines[0], "first"))
    with router("--settings", str(file)) as (process, port):
        assert opened(port, STREAM).headers["X-Engine"] == "e0"
        file.write_text(backend.format(two_engines[1], "second"))
        until(lambda: opened(port, STREAM).headers["X-Engine"] == "e1")  # by itself, within a second
        file.write_text("backends = 3")
        process.send_signal(signal.SIGHUP)
        process.says("settings not reloaded.*: .*backends")
        assert opened(port, STREAM).headers["X-Engine"] == "e1"


@pytest.mark.slow
@pytest.mark.seeded
def test_a_router_that_was_killed_starts_again_and_ctrl_c_ends_it_without_a_word(two_engines: list[int]) -> None:
    with router(*urls(two_engines)) as (process, port):
        assert opened(port, STREAM).status == 200
        process.send_signal(signal.SIGKILL)
        process.ends()
    with router(*urls(two_engines), "--listen", f"127.0.0.1:{port}") as (process, again):
        assert again == port and opened(port, STREAM).status == 200
        process.send_signal(signal.SIGINT)
        assert process.ends() == 0
        assert not any("Traceback" in line or "rror" in line for line in process.said)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no server: add --backend"),
        (["--backend", "127.0.0.1:8000"], "is not the address of a server"),
        (["--backend", "http://127.0.0.1:1", "--strategy", "least-lode"], "least-load"),
        (["--backend", "http://127.0.0.1:1", "--listen", "8080"], "not an address to listen at"),
        (["--backend", "http://127.0.0.1:1", "--tokenizer", "nowhere"], "no tokenizer at"),
        (["--backend", "http://127.0.0.1:1", "--option", "x"], "expected NAME=VALUE"),
        (["--backend", "http://127.0.0.1:1", "--option", "nonsense=3"], "nonsense"),
        (["--settings", "nowhere.toml"], "cannot read"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["route", *arguments]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


def test_a_port_that_is_taken_is_said_in_one_line(two_engines: list[int]) -> None:
    process = Process("-m", "skymemory", "route", *urls(two_engines), "--listen", f"127.0.0.1:{two_engines[0]}")
    try:
        assert (
            process.ends() == 1 and len(process.said) == 1 and "the port is taken by another process" in process.said[0]
        )
    finally:
        process.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_thousand_requests_of_every_kind_leave_nothing_behind(two_engines: list[int]) -> None:
    """Whole answers, streams, broken ones, refused ones, clients that leave: open files and memory stay."""
    psutil = pytest.importorskip("psutil")
    with router(*urls(two_engines), "--strategy", "approximate", "--option", "blocks_per_server=2000") as (
        process,
        port,
    ):
        watched = psutil.Process(process.pid)

        def round_of(requests: int) -> None:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
            for number in range(requests):
                with contextlib.suppress(http.client.HTTPException, ConnectionError):
                    _one_of_many(connection, port, number)
            connection.close()

        round_of(2000)
        time.sleep(6.0)  # connections to engines that are no longer needed are closed by then
        files, memory = watched.num_fds(), watched.memory_info().rss
        round_of(10_000)
        time.sleep(6.0)
        assert watched.num_fds() <= files + 4
        grown = watched.memory_info().rss - memory
        print(f"open files {files} -> {watched.num_fds()}, memory {memory >> 10} KiB, grown by {grown >> 10} KiB")
        assert grown < 8 << 20


def _one_of_many(connection: http.client.HTTPConnection, port: int, number: int) -> None:
    body: dict[str, Any] = {"model": "small", "prompt": f"{number} " * 600, "lora_adapter": f"a{number % 5000}"}
    match number % 10:
        case 0:
            body |= {"stream": True, "mock": {"die": "between-events"}}
        case 1:
            body |= {"stream": True, "mock": {"events": 20, "gap_s": 0.05}}
            response = opened(port, body)
            response.read1()
            response.close()
            return
        case 2:
            connection.request("POST", "/v1/completions", b"{" * (number % 100))
            connection.getresponse().read()
            return
        case 3:
            body |= {"mock": {"die": "in-body"}}
        case 4 | 5 | 6:
            body |= {"stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body))
    connection.getresponse().read()


def _accepts(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.connect()
    except OSError:
        return False
    finally:
        connection.close()
    return True


def test_it_takes_as_many_open_files_as_it_may_have() -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
        raise_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
