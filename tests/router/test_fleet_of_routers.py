"""Routers as processes that exchange what they have sent: one dies, one stops, Redis dies."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.router.processes import Process, engine, router
from tests.router.running import until
from tests.store.real_redis import RedisServer

PATIENCE_S = 60.0


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    directory = Path(tempfile.mkdtemp())  # a socket's path must be short
    server = RedisServer(directory)
    yield server
    server.stop()
    shutil.rmtree(directory)


def free_ports(count: int) -> list[int]:
    with ExitStack() as sockets:
        bound = [sockets.enter_context(socket.socket()) for _ in range(count)]
        for each in bound:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in bound]


def get(port: int, path: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def metric(port: int, name: str) -> float:
    found = re.search(rf"^skymemory_router_{name} (.+)$", get(port, "/metrics"), re.MULTILINE)
    assert found is not None, name
    return float(found[1])


class Slow:
    """A request sent in the background, whose answer takes long."""

    def __init__(self, port: int, prompt: str) -> None:
        self._thread = threading.Thread(target=self._ask, args=(port, prompt), daemon=True)
        self.status = 0
        self._thread.start()

    def _ask(self, port: int, prompt: str) -> None:
        try:
            self.status = ask(port, prompt)[0]
        except OSError:
            self.status = -1


def ask(port: int, prompt: str) -> tuple[int, dict[str, Any]]:
    """Status and decision."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        body = json.dumps({"model": "small", "prompt": prompt})
        headers = {"Content-Type": "application/json", "x-skymemory-decision": "1"}
        connection.request("POST", "/v1/completions", body, headers)
        response = connection.getresponse()
        response.read()
        return response.status, json.loads(response.headers["x-skymemory-decision"] or "{}")
    finally:
        connection.close()


class Fleet:
    """Routers before the same two engines."""

    def __init__(self, stack: ExitStack, replicas: list[str]) -> None:
        self._stack = stack
        engines = [stack.enter_context(engine(f"e{number}")) for number in range(2)]
        self.engines = [process for process, _ in engines]
        backends = "".join(
            f'[[backends]]\nurl = "http://127.0.0.1:{port}"\nname = "e{number}"\n'
            for number, (_, port) in enumerate(engines)
        )
        self._settings = [
            f'{backends}\n[health]\nevery = "10s"\ntimeout = "10s"\n[replicas]\nevery = "20ms"\nsilent = "2s"\n{each}'
            for each in replicas
        ]
        self.routers = [self.start(number) for number in range(len(replicas))]

    def start(self, number: int) -> tuple[Process, int]:
        return self._stack.enter_context(router(settings=self._settings[number]))

    def port(self, number: int) -> int:
        return self.routers[number][1]

    def requests_elsewhere(self, number: int) -> float:
        return metric(self.port(number), "replica_requests")

    def heard(self, number: int) -> float:
        return metric(self.port(number), "replicas_heard")


def by_peers(count: int) -> list[str]:
    ports = free_ports(count)
    every_peer = json.dumps([f"127.0.0.1:{port}" for port in ports])
    return [f'listen = "127.0.0.1:{port}"\npeers = {every_peer}\n' for port in ports]


def test_three_routers_count_each_others_requests_and_survive_each_other() -> None:
    with ExitStack() as stack:
        fleet = Fleet(stack, by_peers(3))
        until(lambda: all(fleet.heard(number) == 2 for number in range(3)))
        # The engines hang: what is sent stays in flight.
        for process in fleet.engines:
            process.send_signal(signal.SIGSTOP)
        prompts = ["a" * 4096, "b" * 4096]
        for prompt in prompts:
            Slow(fleet.port(0), prompt)
            time.sleep(0.2)
        until(lambda: all(fleet.requests_elsewhere(number) == 2 for number in (1, 2)))
        assert fleet.requests_elsewhere(0) == 0
        fleet.routers[0][0].send_signal(signal.SIGKILL)
        until(lambda: all(fleet.requests_elsewhere(number) == 0 for number in (1, 2)))
        assert all("was last heard" in get(fleet.port(number), "/ready") for number in (1, 2))
        assert fleet.heard(1) == fleet.heard(2) == 1
        fleet.routers[0][0].close()
        fleet.routers[0] = fleet.start(0)
        until(lambda: all(fleet.heard(number) == 2 for number in range(3)))
        # A stopped router holds up no other.
        for process in fleet.engines:
            process.send_signal(signal.SIGCONT)
        fleet.routers[2][0].send_signal(signal.SIGSTOP)
        slowest_s = 0.0
        for number in range(60):
            started_s = time.monotonic()
            status, _ = ask(fleet.port(number % 2), f"{number} " * 500)
            assert status == 200
            slowest_s = max(slowest_s, time.monotonic() - started_s)
        assert slowest_s < 2.0
        until(lambda: fleet.heard(0) == 1)
        fleet.routers[2][0].send_signal(signal.SIGCONT)
        until(lambda: fleet.heard(0) == 2 and fleet.heard(2) == 2)
        status, decision = ask(fleet.port(2), "59 " * 500)
        assert status == 200 and decision["matched_tokens"] > 0, "it got what it missed"


def test_a_router_that_hears_nothing_says_so() -> None:
    with ExitStack() as stack:
        fleet = Fleet(stack, by_peers(1))
        assert json.loads(get(fleet.port(0), "/ready"))["reasons"] == []
        until(lambda: "no other router was heard since the start" in get(fleet.port(0), "/ready"))
        assert fleet.heard(0) == 0 and ask(fleet.port(0), "a" * 4096)[0] == 200


def test_routers_with_redis_count_each_others_requests_also_after_it_died(redis: RedisServer) -> None:
    with ExitStack() as stack:
        fleet = Fleet(stack, [f'redis = "{redis.url}"\n'] * 2)
        until(lambda: fleet.heard(0) == fleet.heard(1) == 1)
        for process in fleet.engines:
            process.send_signal(signal.SIGSTOP)
        Slow(fleet.port(0), "a" * 4096)
        until(lambda: fleet.requests_elsewhere(1) == 1)
        redis.stop()
        until(lambda: fleet.requests_elsewhere(1) == 0)
        Slow(fleet.port(0), "b" * 4096)
        redis.socket.unlink(missing_ok=True)
        redis.start()
        until(lambda: fleet.requests_elsewhere(1) == 2)
        until(lambda: fleet.heard(0) == fleet.heard(1) == 1)


def test_with_peers_too_routers_go_on_while_redis_is_dead(redis: RedisServer) -> None:
    with ExitStack() as stack:
        fleet = Fleet(stack, [f'redis = "{redis.url}"\n{each}' for each in by_peers(2)])
        until(lambda: fleet.heard(0) == fleet.heard(1) == 1)
        redis.stop()
        until(lambda: "Redis does not answer" in get(fleet.port(1), "/ready"))
        for process in fleet.engines:
            process.send_signal(signal.SIGSTOP)
        for number in range(3):
            Slow(fleet.port(0), f"{number}" * 4096)
        until(lambda: fleet.requests_elsewhere(1) == 3)
        time.sleep(2.5)  # longer than silence is borne
        assert fleet.requests_elsewhere(1) == 3 and fleet.heard(1) == 1
