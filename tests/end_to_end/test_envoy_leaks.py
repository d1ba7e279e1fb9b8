"""Ten thousand requests through a real Envoy, good and bad ones: what the picker holds afterwards."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
from pathlib import Path

import psutil
import pytest
from tests.end_to_end.envoy import Servers, a_completion, ask, envoy_binary, running_envoy, running_picker

from skymemory.router.envoy.config import Entrance, bootstrap

try:
    envoy_binary()
except FileNotFoundError as why:
    pytest.skip(f"no real Envoy: {why}", allow_module_level=True)

REQUESTS = 10_000
CLIENTS = 8


def good(connection: http.client.HTTPConnection, number: int) -> int:
    body = a_completion("x" * 100, lora_adapter=f"adapter-{number}") if number % 20 else b"{"
    connection.request("POST", "/v1/completions", body)
    answer = connection.getresponse()
    answer.read()
    return answer.status


def broken_off(port: int, number: int) -> None:
    """A client that goes away: in its upload, or in its answer; with a reset, as one that was killed does."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        body = a_completion(stream=True)
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body))
        if number % 2:
            client.sendall(body)
            client.recv(100)
        else:
            client.sendall(body[:10])


def drive(port: int, requests: int, first: int) -> list[int]:
    statuses: list[int] = []

    def one(client: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        for number in range(first + client, first + requests, CLIENTS):
            if number % 97 == 0:
                broken_off(port, number)
            else:
                statuses.append(good(connection, number))
        connection.close()

    threads = [threading.Thread(target=one, args=(client,)) for client in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    return statuses


def gauge(port: int, name: str) -> float:
    lines = ask(port, "/metrics").body.decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name) and line[0] != "#")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ten_thousand_requests_leave_no_memory_no_files_and_a_closed_account(tmp_path: Path) -> None:
    with Servers(2) as servers:
        named = [word for endpoint in servers.endpoints for word in ("--endpoint", endpoint)]
        with running_picker(*named, "--metrics-listen", "127.0.0.1:0", settings='health.metrics_path = ""') as picker:
            entrance = Entrance("door", f"127.0.0.1:{picker.port}", endpoints=servers.endpoints)
            with running_envoy(bootstrap([entrance]), tmp_path / "run") as envoy:
                port, page = envoy.ports["door"], picker.port_after("metrics at")
                process = psutil.Process(picker.process.pid)
                drive(port, 1500, 1)
                for got in servers.got.values():
                    got.clear()
                before = process.memory_info().rss, process.num_fds()
                statuses = drive(port, REQUESTS, 10_000)
                end = time.monotonic() + 30
                while gauge(page, "skymemory_epp_streams") and time.monotonic() < end:
                    time.sleep(0.1)
                after = process.memory_info().rss, process.num_fds()
                assert gauge(page, "skymemory_epp_streams") == 0
                assert gauge(page, "skymemory_epp_server_requests{") == 0
                assert gauge(page, "skymemory_epp_server_prefill_tokens{") == 0
    assert set(statuses) == {200, 400} and len(statuses) > REQUESTS * 0.98
    assert after[1] <= before[1] + 2
    # An index may learn of ten thousand prompts; streams that were kept would be a hundred megabytes.
    assert after[0] - before[0] < 40 << 20, f"{(after[0] - before[0]) >> 20} MiB more"
