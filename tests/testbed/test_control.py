"""What operators ask of satellites over real sockets: who has to answer before a constellation is said to be up."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from skymemory.constellation.torus import SatelliteId
from skymemory.errors import ConstellationError
from skymemory.testbed import control
from skymemory.testbed.connect import host_spec
from skymemory.testbed.control import Silence, hosts_of_another_time, ping_all
from skymemory.testbed.plan import ConstellationPlan, local_hosts, make_plan
from skymemory.testbed.run_directory import free_ports
from skymemory.transport.udp_host import UdpHost


@contextmanager
def serving(plan: ConstellationPlan, slow_s: float = 0.0) -> Iterator[list[UdpHost]]:
    """The hosts of a plan in a thread of this process; ``slow_s`` of its time go before each turn at a socket."""
    loop, hosts = asyncio.new_event_loop(), list[UdpHost]()
    ready = threading.Event()

    async def serve() -> None:
        hosts.extend(UdpHost(host_spec(plan, host), loop) for host in plan.hosts)
        for host in hosts:
            readable = host._readable
            for satellite in host._satellites.values():
                slowly = lambda one, readable=readable: (time.sleep(slow_s), readable(one))  # noqa: E731
                loop.remove_reader(satellite.sock.fileno())
                loop.add_reader(satellite.sock.fileno(), slowly, satellite)
        ready.set()

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(serve(), loop).result()
    ready.wait()
    try:
        yield hosts
    finally:
        for host in hosts:
            loop.call_soon_threadsafe(host.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture
def plan() -> ConstellationPlan:
    return make_plan(hosts=local_hosts("testbed-19x5", 5, free_ports(95)), delay_scale=0.0)


@pytest.mark.slow
def test_a_host_that_takes_its_time_is_heard_whole(plan: ConstellationPlan) -> None:
    """2 s for all 95 satellites at the least, beside what they say to each other: those who had no turn in the first
    second did not count before.
    """
    with serving(plan, slow_s=0.02):
        answers = ping_all(plan, Silence(1.0, 30.0, busy=lambda: [host.name for host in plan.hosts]))
    assert sum(answer is not None for answer in answers.values()) == 95


@pytest.mark.slow
def test_the_dead_are_named(plan: ConstellationPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_START_PATIENCE_S", 2.0)
    with serving(plan) as hosts:
        control.confirm_all_answer(plan, lambda: [host.name for host in plan.hosts])
        hosts[3].set_dead([SatelliteId(3, 7)])
        with pytest.raises(
            ConstellationError, match="1 satellites of host-3 do not answer, the first is plane 3, slot 7"
        ):
            control.confirm_all_answer(plan, tuple)


@pytest.mark.slow
def test_a_busy_host_is_waited_for_and_one_that_is_off_is_not(plan: ConstellationPlan) -> None:
    """No answer comes: a busy host has ten patiences, one that is off has one."""
    took_s = []
    for satellites in (plan.torus.satellites(), [SatelliteId(0, 1)]):
        began_s = time.monotonic()
        silence = Silence(0.2, busy=lambda: ["host-1"], off=[SatelliteId(0, 1)])
        assert set(ping_all(plan, silence, satellites).values()) == {None}
        took_s.append(time.monotonic() - began_s)
    assert 1.9 < took_s[0] < 15 and 0.1 < took_s[1] < took_s[0]


@pytest.mark.parametrize(
    ("clocks_s", "wrong"),
    [
        ({"a": 0.0, "b": 0.1, "c": 3_600.0}, {"c"}),
        ({"a": -40.0, "b": -40.2, "c": -39.9, "d": -0.1, "e": -40.0}, {"d"}),
        ({"a": 0.0, "b": 86_400.0}, {"b"}),
        ({"a": 40.0, "b": 41.0}, set()),
        ({"a": 29.0, "b": 0.0, "c": -0.1}, set()),
        ({"a": 900.0}, set()),
        ({}, set()),
    ],
)
def test_a_host_of_another_time_is_one_that_most_others_refuse(clocks_s: dict[str, float], wrong: set[str]) -> None:
    assert hosts_of_another_time(clocks_s).keys() == wrong
