"""A daemon's memory and threads, measured from outside: level under many connections and slow readers."""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import struct
import threading
import time
from pathlib import Path

import pytest
import redis
from tests.contract.store_contract import value
from tests.store.redis_server.daemons import daemon, until

from skymemory.testbed.key_file import new_keys

pytestmark = pytest.mark.slow

MIB = 1 << 20


def process_at(path: str) -> int:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        found: int = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        return found


def status(process: int) -> tuple[int, int]:
    """Resident bytes and threads."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return int(lines["VmRSS"].split()[0]) << 10, int(lines["Threads"])


def test_ten_thousand_connections_leave_nothing_behind() -> None:
    with daemon("memory://64MiB") as path:
        process, client = process_at(path), redis.Redis(unix_socket_path=path)

        def connections(count: int) -> None:
            for number in range(count):
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.connect(path)
                    if number % 3 == 0:
                        sock.sendall(b"PING\r\n")
                        assert sock.recv(100) == b"+PONG\r\n"
                    elif number % 3 == 1:  # in the middle of a value
                        sock.sendall(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$50000\r\nabc")
            until(lambda: client.info()["connected_clients"] == 1)

        connections(1000)
        before_bytes, before_threads = status(process)
        connections(10_000)
        after_bytes, after_threads = status(process)
        assert after_threads == before_threads
        assert after_bytes - before_bytes < 8 * MIB
        assert len(os.listdir(f"/proc/{process}/fd")) < 30
        assert client.info()["in_flight_bytes"] == 0


def test_slow_readers_hold_no_more_than_the_budget_and_hold_up_no_quick_client(tmp_path: Path) -> None:
    """Of a sealed store, which opens a value into memory of its own for each reader."""
    new_keys(tmp_path / "keys")
    settings = tmp_path / "daemon.toml"
    settings.write_text('in_flight = "32MiB"\nstall = "4s"')
    options = ("--settings", str(settings))
    with daemon(f"memory://64MiB?seal={tmp_path}/keys", *options) as path, contextlib.ExitStack() as readers:
        process, client = process_at(path), redis.Redis(unix_socket_path=path)
        client.set("large", value(1, 4 * MIB))
        client.set("small", value(2, 20_000))
        assert client.get("large") == value(1, 4 * MIB)
        before_bytes, _ = status(process)
        slow = [readers.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(64)]
        for sock in slow:
            sock.connect(path)
            sock.sendall(b"GET large\r\n")
        until(lambda: client.info()["in_flight_bytes"] >= 28 * MIB)
        stop = threading.Event()

        def drip() -> None:
            while not stop.wait(0.05):
                for sock in slow:
                    with contextlib.suppress(OSError):
                        sock.recv(2000, socket.MSG_DONTWAIT)

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            most_bytes, took_s = 0, list[float]()
            for number in range(40):
                began_s = time.monotonic()
                assert client.get("small") == value(2, 20_000) and client.set(f"quick {number}", b"x" * 5000)
                took_s.append(time.monotonic() - began_s)
                most_bytes = max(most_bytes, status(process)[0])
                time.sleep(0.05)
        finally:
            stop.set()
            dripping.join()
        assert statistics.median(took_s) < 1, "one that waited for a slow reader to be ended would wait for seconds"
        # The budget, one 64 KiB buffer and a stack for each thread.
        assert most_bytes - before_bytes < (32 + 16) * MIB
        until(lambda: client.info()["in_flight_bytes"] == 0, 60)
        assert client.get("large") == value(1, 4 * MIB)
