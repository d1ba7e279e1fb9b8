"""A real Envoy, and what is missing: the first endpoint, all of them, room, or the picker itself."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.end_to_end.envoy import (
    Servers,
    a_completion,
    ask,
    envoy_binary,
    running_envoy,
    running_picker,
)
from tests.router.mock_engine import MockEngine
from tests.router.running import Loop

from skymemory.router.envoy.config import Entrance, bootstrap

try:
    envoy_binary()
except FileNotFoundError as why:
    pytest.skip(f"no real Envoy: {why}", allow_module_level=True)

PLAIN = ("--strategy", "round-robin")
UNREAD = 'health.metrics_path = ""'
"""Settings: the picker reads no server's metrics."""


def a_dead_address() -> str:
    """One without a listener, nor likely to get one soon."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with Servers(2) as servers:
        yield servers


@pytest.mark.brief()
def test_a_dead_endpoint_costs_its_requests_nothing_and_is_left_alone(servers: Servers, tmp_path: Path) -> None:
    dead = a_dead_address()
    all_servers = (dead, *servers.endpoints)
    named = [word for endpoint in all_servers for word in ("--endpoint", endpoint)]
    counted, settings = ("--metrics-listen", "127.0.0.1:0"), f"{UNREAD}\npicker.fallbacks = 2"
    with running_picker(*named, *PLAIN, *counted, settings=settings) as picker:
        entrance = Entrance("fallback", f"127.0.0.1:{picker.port}", endpoints=all_servers, retries=2)
        with running_envoy(bootstrap([entrance]), tmp_path / "run") as envoy:
            answers = [ask(envoy.ports["fallback"], "/v1/completions", a_completion()) for _ in range(15)]
        metrics = picker.port_after("metrics at")
        page = ask(metrics, "/metrics").body.decode()
    assert [answer.status for answer in answers] == [200] * 15
    assert {answer.server for answer in answers} == set(servers.endpoints)
    # One request tried it, and found another: then it was left alone for a second, and longer with each that failed.
    tried = re.search(rf'skymemory_epp_picks_total{{server="{dead}"}} (\d)', page)
    assert tried is not None and 1 <= int(tried[1]) <= 3
    took = sum(
        float(line.split()[-1]) for line in page.splitlines() if line.startswith("skymemory_epp_fallbacks_total{")
    )
    assert took == int(tried[1])


@pytest.mark.brief("500")
@pytest.mark.parametrize("status", [429, 500])
def test_an_endpoint_that_answers_errors_at_once_does_not_look_fastest(
    servers: Servers, tmp_path: Path, status: int
) -> None:
    loop, bad = Loop(), MockEngine("bad", mock={"status": status})
    loop.run(bad.start())
    try:
        all_servers = (f"127.0.0.1:{bad.port}", *servers.endpoints)
        named = [word for endpoint in all_servers for word in ("--endpoint", endpoint)]
        settings = f"{UNREAD}\npicker.fallbacks = 2"
        with running_picker(*named, "--strategy", "least-load", settings=settings) as picker:
            entrance = Entrance("door", f"127.0.0.1:{picker.port}", endpoints=all_servers, retries=2)
            with running_envoy(bootstrap([entrance]), tmp_path / "run") as envoy:
                answers = [ask(envoy.ports["door"], "/v1/completions", a_completion()) for _ in range(100)]
        assert {answer.status for answer in answers} == {200}
        assert 1 <= len(bad.seen) <= 3
    finally:
        loop.run(bad.die())
        loop.close()


@pytest.mark.brief()
def test_no_endpoint_is_503_and_no_room_is_429_and_endpoints_may_come_later(servers: Servers, tmp_path: Path) -> None:
    file = tmp_path / "endpoints"
    file.write_text("# none yet\n")
    settings = f'{UNREAD}\n[picker]\nendpoints = "{file}"\nrefresh = "100ms"\nmax_requests = 1'
    with running_picker(*PLAIN, settings=settings) as picker:  # noqa: SIM117
        with running_envoy(bootstrap([Entrance("door", f"127.0.0.1:{picker.port}")]), tmp_path / "run") as envoy:
            port = envoy.ports["door"]
            none = ask(port, "/v1/completions", a_completion())
            assert none.status == 503 and none.headers["retry-after"] == "1" and b"has no server" in none.body
            file.write_text(f"{servers.endpoints[0]}\n")
            picker.wait_for("1 endpoints: 1 added")
            body = a_completion(stream=True)
            with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
                client.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
                )
                assert client.recv(12) == b"HTTP/1.1 200"
                full = ask(port, "/v1/models")
                assert full.status == 429 and full.headers["retry-after"] == "1" and b"try again" in full.body
            assert _becomes(port, 200)


def test_without_a_picker_open_goes_on_and_closed_does_not(servers: Servers, tmp_path: Path) -> None:
    dead = a_dead_address()
    config = bootstrap(
        [
            Entrance("open", dead, endpoints=servers.endpoints, fail_open=True),
            Entrance("closed", dead, endpoints=servers.endpoints),
        ]
    )
    with running_envoy(config, tmp_path / "run") as envoy:
        mine = {"x-gateway-destination-endpoint": "169.254.169.254:80"}
        answers = [ask(envoy.ports["open"], "/v1/completions", a_completion(), mine) for _ in range(4)]
        assert [answer.status for answer in answers] == [200] * 4
        assert {answer.server for answer in answers} == set(servers.endpoints)
        assert ask(envoy.ports["closed"], "/v1/completions", a_completion()).status >= 500


@pytest.mark.slow
def test_a_picker_that_is_killed_and_comes_back_is_asked_again(servers: Servers, tmp_path: Path) -> None:
    named = [word for endpoint in servers.endpoints for word in ("--endpoint", endpoint)]
    with running_picker(*named, *PLAIN, settings=UNREAD) as picker:
        at = f"127.0.0.1:{picker.port}"
        config = bootstrap(
            [
                Entrance("closed", at, health_s=0.2),
                Entrance("open", at, endpoints=servers.endpoints, fail_open=True, health_s=0.2),
            ]
        )
        with running_envoy(config, tmp_path / "run") as envoy:
            assert ask(envoy.ports["closed"], "/v1/models").status == 200
            os.killpg(picker.process.pid, signal.SIGKILL)
            picker.process.wait(60)
            assert ask(envoy.ports["closed"], "/v1/completions", a_completion()).status >= 500
            # Until Envoy has noticed, requests with a body are lost: it keeps no copy of what it sent the picker.
            end = time.monotonic() + 30
            while envoy.stat("cluster.open-picker.membership_healthy") and time.monotonic() < end:
                time.sleep(0.05)
            for body in (a_completion(), a_completion("x" * 1_000_000)):
                assert ask(envoy.ports["open"], "/v1/completions", body).status == 200
            with running_picker(*named, *PLAIN, "--listen", at, settings=UNREAD):
                assert _becomes(envoy.ports["closed"], 200)


def _becomes(port: int, status: int, patience_s: float = 60.0) -> bool:
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        if ask(port, "/v1/models").status == status:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.slow
def test_a_picker_that_hangs_is_given_up_in_time(servers: Servers, tmp_path: Path) -> None:
    with running_picker("--endpoint", servers.endpoints[0], *PLAIN, settings=UNREAD) as picker:
        entrance = Entrance("door", f"127.0.0.1:{picker.port}", health_s=0.2)
        with running_envoy(bootstrap([entrance]), tmp_path / "run") as envoy:
            assert ask(envoy.ports["door"], "/v1/models").status == 200
            os.killpg(picker.process.pid, signal.SIGSTOP)
            try:
                began = time.monotonic()
                assert ask(envoy.ports["door"], "/v1/models").status >= 500
                assert time.monotonic() - began < 15
            finally:
                os.killpg(picker.process.pid, signal.SIGCONT)


@pytest.mark.slow
def test_a_picker_that_is_stopped_lets_its_streams_end(servers: Servers, tmp_path: Path) -> None:
    with running_picker("--endpoint", servers.endpoints[0], *PLAIN, settings=UNREAD) as picker:
        with running_envoy(bootstrap([Entrance("door", f"127.0.0.1:{picker.port}")]), tmp_path / "run") as envoy:
            port = envoy.ports["door"]
            with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
                body = a_completion(stream=True)
                client.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s"
                    % (len(body), body)
                )
                got = client.recv(4096)
                picker.process.send_signal(signal.SIGINT)
                while piece := client.recv(4096):
                    got += piece
        assert b"[DONE]" in got
        assert picker.process.wait(60) == 0
        assert "Traceback" not in "\n".join(picker.lines)


@pytest.mark.slow
def test_a_port_that_is_taken_is_said_in_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        there = f"127.0.0.1:{taken.getsockname()[1]}"
        with (
            pytest.raises(AssertionError, match=r"skymemory: cannot listen at .*the port is taken") as raised,
            running_picker("--endpoint", "127.0.0.1:1", "--listen", there),
        ):
            pass
    assert "Traceback" not in str(raised.value)
