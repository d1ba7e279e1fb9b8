"""Constellations for the store tests: over virtual time, and as a real host over real sockets in this process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from skymemory.constellation.presets import preset_named
from skymemory.protocol.auth import Authority
from skymemory.protocol.client.machine import ClientConfig
from skymemory.protocol.client.transfer import ReadTransfer
from skymemory.protocol.clock import SkyMap
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.store.sky.store import ConstellationStore, SkySettings
from skymemory.testbed.connect import clock_of, host_spec, sky_of
from skymemory.testbed.plan import ConstellationPlan, Faults, local_hosts, make_plan
from skymemory.testbed.run_directory import free_ports
from skymemory.transport.simulated import SimulatedConstellation
from skymemory.transport.udp_client import UdpClient
from skymemory.transport.udp_host import UdpHost

PRESET = "testbed-19x5"
PATIENCE_S = 5.0
"""Satellites in this very process, beside other programs, are late at times; that is no outage."""
OUTAGE_PATIENCE_S = 0.2


def simulated(memory_bytes: int = 8 << 20, one_way_s: float = 0.002, **how: Any) -> SimulatedConstellation:
    preset = preset_named(PRESET)
    sky = SkyMap(preset.torus, preset.centre)
    return SimulatedConstellation(sky, memory_bytes, delay_s=lambda a, b: one_way_s, **how)


def store_over(
    constellation: SimulatedConstellation, ground: int = 1, index: SharedIndex | None = None, **settings: object
) -> ConstellationStore:
    driver = constellation.connect(ClientConfig(ground, expected_rtt_s=0.004))
    return ConstellationStore(driver, constellation.sky, SkySettings(**settings), index=index)  # type: ignore[arg-type]


@contextmanager
def cut_off(constellation: SimulatedConstellation, ground: int = 1) -> Iterator[None]:
    """No satellite hears this ground host, nor it them; then they have all answered its probes again."""
    client = ("ground", ground)
    for satellite in constellation.satellites:
        constellation.cut(client, satellite)
    yield
    for satellite in constellation.satellites:
        constellation.mend(client, satellite)
    constellation.settle(constellation.now_s + 30.0)


@contextmanager
def udp_store(index: SharedIndex | None = None, authority: Authority | None = None) -> Iterator[ConstellationStore]:
    """All 95 satellites behind real sockets, their event loop in a thread of this process."""
    with udp_sky(authority) as plan:
        store = store_on(plan, index, authority)
        try:
            yield store
        finally:
            store.close()


def put_forward(client: UdpClient, seconds: float) -> None:
    """This many seconds pass for this client."""
    before = client._clock._running
    client._clock._running = lambda: before() + seconds


def store_on(
    plan: ConstellationPlan,
    index: SharedIndex | None = None,
    authority: Authority | None = None,
    ground: int = 9,
    give_up_s: float = PATIENCE_S,
    **settings: Any,
) -> ConstellationStore:
    """One more host on the ground of a constellation that runs; ``settings``: of ``SkySettings``."""
    client = UdpClient(
        ClientConfig(ground, authority=authority, give_up_s=give_up_s), sky_of(plan), clock_of(plan), plan.addresses()
    )
    settings = {"memory_per_satellite_bytes": plan.memory_per_satellite_bytes, **settings}
    return ConstellationStore(client, sky_of(plan), SkySettings(**settings), index=index)


@contextmanager
def udp_sky(authority: Authority | None = None) -> Iterator[ConstellationPlan]:
    """The satellites of ``udp_store`` alone."""
    with udp_sky_and_loop(authority) as (plan, _):
        yield plan


def connection(store: ConstellationStore) -> UdpClient:
    """The ground host of a store over UDP."""
    assert isinstance(store._driver, UdpClient)
    return store._driver


@contextmanager
def standing(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """The host of all satellites stands still, and goes on afterwards."""
    goes_on, stands = threading.Event(), threading.Event()
    loop.call_soon_threadsafe(lambda: (stands.set(), goes_on.wait(60)))
    assert stands.wait(60)
    try:
        yield
    finally:
        goes_on.set()


def reads_under_way(store: ConstellationStore) -> int:
    """How many values this client waits for at the same time."""
    return sum(isinstance(each.transfer, ReadTransfer) for each in list(connection(store).machine._operations.values()))


@contextmanager
def stopped(loop: asyncio.AbstractEventLoop, client: UdpClient) -> Iterator[None]:
    """The host of all satellites is stopped; then it goes on, and all have answered this client again."""
    goes_on, standing = threading.Event(), threading.Event()
    loop.call_soon_threadsafe(lambda: (standing.set(), goes_on.wait(20)))
    assert standing.wait(20)
    patience_s, client.machine._in_flight._give_up_s = client.machine._in_flight._give_up_s, OUTAGE_PATIENCE_S
    try:
        yield
    finally:
        client.machine._in_flight._give_up_s = patience_s
        goes_on.set()
    until_s = time.monotonic() + 30
    while client.machine.probing:  # the client asks by itself
        assert time.monotonic() < until_s
        time.sleep(0.005)


@contextmanager
def udp_sky_and_loop(
    authority: Authority | None = None, delay_scale: float = 0.0, faults: Faults | None = None
) -> Iterator[tuple[ConstellationPlan, asyncio.AbstractEventLoop]]:
    """And the event loop of their host."""
    plan = make_plan(
        PRESET,
        hosts=local_hosts(PRESET, 1, free_ports(95)),
        delay_scale=delay_scale,
        memory_per_satellite_bytes=8 << 20,
        faults=faults,
    )
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    hosts: list[UdpHost] = []

    def serve() -> None:
        asyncio.set_event_loop(loop)
        hosts.append(UdpHost(host_spec(plan, plan.hosts[0], authority=authority), loop))
        ready.set()
        loop.run_forever()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield plan, loop
    finally:
        loop.call_soon_threadsafe(hosts[0].close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()
