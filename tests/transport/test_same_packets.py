"""Packet for packet: what satellites receive and send over sockets is what they do in virtual time."""

from __future__ import annotations

import asyncio
import random
import selectors
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from skymemory.constellation.torus import SatelliteId
from skymemory.protocol import messages
from skymemory.protocol.client.gateway import ACCESS_MODES, Access
from skymemory.protocol.client.machine import ClientConfig
from skymemory.protocol.client.transfer import Striping
from skymemory.protocol.clock import STRATEGY_CODES
from skymemory.protocol.satellite.machine import SatelliteMachine
from skymemory.protocol.satellite.overload import Lateness
from skymemory.protocol.wire import SKY_BYTES, ChunkRef, Op, SkyHeader, header_start
from skymemory.testbed.connect import host_spec, sky_of
from skymemory.testbed.plan import ConstellationPlan, local_hosts, make_plan
from skymemory.testbed.run_directory import free_ports
from skymemory.testbed.virtual import VirtualConstellation
from skymemory.transport import udp_client, udp_host
from skymemory.transport.delay_line import DelayLine
from skymemory.transport.udp_client import UdpClient
from skymemory.transport.udp_host import UdpHost
from skymemory.transport.unix_clock import UnixClock

VALUES = [random.Random(number).randbytes(100_000 + number) for number in range(3)]
STRATEGY, SERVERS, CHUNK_BYTES = STRATEGY_CODES["rotation_hop"], 10, 6144
TIMED = (Op.LINKS, Op.PING, Op.PONG, Op.RETAIN, Op.ADVANCE, Op.ADVANCED)
"""How often these are sent, or by which beam, depends on time: neighbours are asked when they were silent for a while,
and which satellites a client sees changes in the midst of a push.
"""
SLOWNESS = (1, 4, 8)
"""Of time over sockets, try by try. A computer that takes long makes a client look for other ways: on a busy one, all
clocks, timers and delays run slower, so that the same work takes less of their time.
"""

Seen = set[tuple[str, SatelliteId, object, Op, SatelliteId | str, bytes, int]]
"""Sent or received, by whom, over which link, operation, destination, key, chunk."""


def chunks_of(header: SkyHeader, body: memoryview) -> list[tuple[bytes, int]]:
    """Key and numbers: packets that are split otherwise have the same chunks."""
    if header.op in (Op.SET, Op.MIGRATE, Op.DATA):
        ref = ChunkRef.unpack(body)
        return [(ref.key, ref.index)]
    if header.op in (Op.GET, Op.ACK, Op.MISS):
        selection = messages.Selection.unpack(body)
        return [(selection.key, index) for index in selection.indices()]
    return [(b"", -1)]


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """All packets of all satellites in this process, once each."""
    seen: Seen = set()
    receive, send = SatelliteMachine.receive_runs, SatelliteMachine.datagrams_to_send

    def note(what: str, here: SatelliteId, link: object, packet: Any) -> None:
        start = header_start(packet)
        header = SkyHeader.unpack(packet, start)
        if header.op in TIMED:
            return
        there: SatelliteId | str = "ground"
        if header.destination.shell == 0:
            there = SatelliteId(header.destination.plane, header.destination.slot)
        end = link if isinstance(link, SatelliteId) else "beam"
        for key, index in chunks_of(header, memoryview(packet)[start + SKY_BYTES :]):
            seen.add((what, here, end, header.op, there, key, index))

    def receiving(machine: SatelliteMachine, runs: Any, source: Any, now_s: float) -> None:
        for view, size in runs:
            for at in range(0, len(view), size):
                note("received", machine.config.address, source, bytes(view[at : at + size]))
        receive(machine, runs, source, now_s)

    def sending(machine: SatelliteMachine, now_s: float) -> Any:
        batches = send(machine, now_s)
        for batch, link in batches:
            for packet in batch.datagrams():
                note("sent", machine.config.address, link, packet)
        return batches

    with monkeypatch.context() as patched:
        patched.setattr(SatelliteMachine, "receive_runs", receiving)
        patched.setattr(SatelliteMachine, "datagrams_to_send", sending)
        # A host that is late, as this process may be, lets the machine put work off.
        patched.setattr(Lateness, "is_late", lambda self, now_s: False)
        yield seen


def operate(client: Any, plan: ConstellationPlan, settle: Callable[[], None]) -> None:
    """Writes, a move that operators push, reads where the chunks have gone to, and a deletion."""
    infos = []
    for number, value in enumerate(VALUES):
        written = client.write(bytes([number + 1]) * 32, value, Striping(CHUNK_BYTES, STRATEGY, SERVERS))
        assert written.ok and written.info is not None
        infos.append(written.info)
    settle()
    if plan.access != "onboard":
        for there in plan.torus.satellites():
            ask(client, Op.ADVANCE, messages.pack_moves(1, 0), there)
        settle()
    for info, value in zip(infos, VALUES, strict=True):
        out = bytearray(len(value))
        assert client.read(info, memoryview(out)).ok and out == value
    settle()


def ask(client: Any, op: Op, body: bytes, there: SatelliteId) -> None:
    with client.lock:
        number = client.machine.ask(op, body, there, client.now_s())
    assert client.run([number])[number].ok


def in_virtual_time(plan: ConstellationPlan, monkeypatch: pytest.MonkeyPatch) -> Seen:
    with recorded(monkeypatch) as seen:
        world = VirtualConstellation(plan)
        simulated = world.simulated
        operate(world.connect(), plan, lambda: simulated.settle(simulated.now_s + 2.0))
    return seen


class SlowSelector(selectors.DefaultSelector):
    def __init__(self, slowness: int) -> None:
        super().__init__()
        self._slowness = slowness

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(timeout if timeout is None else timeout * self._slowness)


class SlowLoop(asyncio.SelectorEventLoop):
    def __init__(self, slowness: int) -> None:
        self._slowness = slowness
        super().__init__(SlowSelector(slowness))

    def time(self) -> float:
        return super().time() / self._slowness


@contextmanager
def slow_time(slowness: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For hosts and clients that are made meanwhile. Pauses of ``SlowLoop`` are slow, too."""
    began_s, began_unix_s, push = time.monotonic(), time.time(), DelayLine.push

    def passed_s() -> float:
        return (time.monotonic() - began_s) / slowness

    with monkeypatch.context() as patched:
        for module in (udp_host, udp_client):
            patched.setattr(module, "UnixClock", lambda: UnixClock(lambda: began_unix_s + passed_s(), passed_s))
        patched.setattr(DelayLine, "push", lambda self, delay_s, item: push(self, delay_s * slowness, item))
        yield


def over_sockets(plan: ConstellationPlan, slowness: int, monkeypatch: pytest.MonkeyPatch) -> Seen:
    plan = replace(plan, hosts=local_hosts("testbed-19x5", 1, free_ports(95)))  # free now

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        host = UdpHost(host_spec(plan, plan.hosts[0]), loop)
        client = UdpClient(
            ClientConfig(1, access=plan.access, give_up_s=20.0), sky_of(plan), host.spec.clock, host.spec.everyone
        )

        def settle() -> None:
            asyncio.run_coroutine_threadsafe(asyncio.sleep(2.0), loop).result()

        try:
            await asyncio.to_thread(operate, client, plan, settle)
        finally:
            client.close()
            host.close()

    with (
        recorded(monkeypatch) as seen,
        slow_time(slowness, monkeypatch),
        asyncio.Runner(loop_factory=lambda: SlowLoop(slowness)) as runner,
    ):
        runner.run(scenario())
    return seen


@pytest.mark.timeout(600)
@pytest.mark.brief()
@pytest.mark.parametrize("access", ACCESS_MODES)
def test_satellites_do_the_same_over_sockets_and_in_virtual_time(
    access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(hosts=local_hosts("testbed-19x5", 1, free_ports(95)), access=access, servers=SERVERS, epoch_s=0.0)
    expected = in_virtual_time(plan, monkeypatch)
    operations = {op for _, _, _, op, *_ in expected}
    moved = {Op.MIGRATE} if access != "onboard" else set()
    assert operations >= {Op.SET, Op.ACK, Op.GET, Op.DATA} | moved
    chunks = sum(-(-len(value) // CHUNK_BYTES) for value in VALUES)
    assert len({(key, index) for *_, op, _, key, index in expected if op is Op.DATA}) == chunks
    for slowness in SLOWNESS:
        found = over_sockets(plan, slowness, monkeypatch)
        if found == expected:
            return
    assert found - expected == set() == expected - found
