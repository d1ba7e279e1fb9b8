"""A stranger takes over the ports of a host process that was killed: real sockets, satellites of both kinds."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.flight.daemon import build
from tests.protocol.strangers import Stranger

from skymemory.constellation.presets import preset_named
from skymemory.store.sky.store import ConstellationStore
from skymemory.testbed.connect import open_constellation
from skymemory.testbed.flight import Choice, kinds_of
from skymemory.testbed.plan import ConstellationPlan, local_hosts, make_plan
from skymemory.testbed.run_directory import RunDirectory
from skymemory.testbed.supervisor import start_on_free_ports, stop

PRESET = "testbed-19x5"
READS, PUTS, VALUE_BYTES = 30, 6, 100_000
Up = Callable[..., RunDirectory]


@pytest.fixture
def up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Up]:
    """Starts constellations of two host processes."""
    started: list[RunDirectory] = []

    def start(satellite: Choice, auth: str, **plan: Any) -> RunDirectory:
        if satellite != "python":
            monkeypatch.setenv(
                "SKYMEMORY_FLIGHT", os.environ.get("SKYMEMORY_FLIGHT") or str(build() / "skymemory-flight")
            )
        directory = RunDirectory(tmp_path / f"run-{len(started)}")
        terms = {"delay_scale": 0.0, "memory_per_satellite_bytes": 8 << 20, "auth": auth, **plan}
        start_on_free_ports(
            directory,
            lambda ports: make_plan(
                PRESET, hosts=local_hosts(PRESET, 2, ports), keys_file=str(directory.keys_path), **terms
            ),
            preset_named(PRESET).torus.size,
            kinds=kinds_of(satellite, local_hosts(PRESET, 2, 26_000)),
        )
        started.append(directory)
        return directory

    yield start
    for directory in started:
        stop(directory)


def kill(directory: RunDirectory, host: str) -> None:
    directory.living()[host].send_signal(signal.SIGKILL)
    until_s = time.monotonic() + 60
    while directory.living().get(host) is not None:
        assert time.monotonic() < until_s
        time.sleep(0.01)


@contextmanager
def stranger_on(plan: ConstellationPlan, number: int, stranger: Stranger) -> Iterator[None]:
    """He has the ports of all satellites of a host."""
    with ExitStack() as stack:
        socks = []
        for _, address in plan.addresses_of(plan.hosts[number]):
            sock = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            sock.bind(address)
            socks.append(sock)
        ended = threading.Event()

        def serve() -> None:
            while not ended.is_set():
                for sock in select.select(socks, [], [], 0.05)[0]:
                    request, sender = sock.recvfrom(65_536)
                    for answer in stranger.answers(request):
                        with suppress(OSError):
                            sock.sendto(answer, sender)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(60)


@contextmanager
def overheard(store: ConstellationStore, stranger: Stranger) -> Iterator[None]:
    """All that the client is answered but DATA, which its socket places by itself."""
    machine = store._driver.machine
    original = machine.receive_runs

    def receive(runs: list[tuple[memoryview, int]], now_s: float) -> None:
        for view, size in runs:
            for at in range(0, len(view), size):
                stranger.overhear(bytes(view[at : at + size]))
        original(runs, now_s)

    machine.receive_runs = receive  # type: ignore[method-assign]
    yield
    machine.receive_runs = original  # type: ignore[method-assign]


def after_a_host_died(directory: RunDirectory, number: int, stranger: Stranger | None) -> tuple[float, int, int]:
    """How long the reads took, how many timed out, and how many values were acknowledged that no read finds."""
    plan = directory.read_plan()
    with open_constellation(directory.path) as store, ExitStack() as stack:
        before = {os.urandom(32): os.urandom(VALUE_BYTES) for _ in range(5)}
        with overheard(store, stranger or Stranger()):
            assert all(store.put_many(list(before.items())))
            assert all(found is not None for found in store.get_many(list(before)))
        kill(directory, f"host-{number}")
        if stranger is not None:
            stack.enter_context(stranger_on(plan, number, stranger))
        began_s = time.monotonic()
        for turn in range(READS):
            key = list(before)[turn % len(before)]
            (found,) = store.get_many([key])
            assert found is None or bytes(found) == before[key]
        reads_s = time.monotonic() - began_s
        timeouts = store._driver.machine.counters.get("operations_failed", "timeout")
        after = {os.urandom(32): os.urandom(VALUE_BYTES) for _ in range(PUTS)}
        kept = [key for key, value in after.items() if store.put_many([(key, value)]) == [True]]
        unreadable = sum(
            found is None or bytes(found) != after[key] for key, found in zip(kept, store.get_many(kept), strict=True)
        )
    return reads_s, timeouts, unreadable


@pytest.mark.brief()
def test_a_stranger_on_the_ports_of_a_dead_host_delays_no_read(up: Up) -> None:
    """Once its satellites are suspects, reads that need them fail at once, or find the chunks elsewhere."""
    stranger = Stranger()
    _, timeouts, unreadable = after_a_host_died(up("mixed", "answers"), 1, stranger)
    assert stranger.sent > 50 and timeouts <= READS / 5 and unreadable == 0


@pytest.mark.slow
@pytest.mark.parametrize(("satellite", "replicas"), [("python", 1), ("c", 1), ("mixed", 2)])
def test_reads_take_as_long_as_with_the_host_merely_dead(up: Up, satellite: Choice, replicas: int) -> None:
    alone_s, _, lost = after_a_host_died(up(satellite, "answers", replicas=replicas), 1, None)
    stranger = Stranger()
    beset_s, _, unreadable = after_a_host_died(up(satellite, "answers", replicas=replicas), 1, stranger)
    assert stranger.sent > 50 and lost == unreadable == 0
    assert beset_s <= 2 * alone_s + 1.0, "both wait for the same timeouts"
