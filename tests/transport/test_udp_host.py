"""Satellites of a host that die and come back: what of them outlives them."""

from __future__ import annotations

import asyncio
import math
import random
import socket
import time

import pytest
from tests.protocol.datagrams import receive_datagram

from skymemory.constellation.torus import SatelliteId
from skymemory.protocol import messages
from skymemory.protocol.client.gateway import ACCESS_MODES, Access
from skymemory.protocol.client.machine import ClientConfig
from skymemory.protocol.client.transfer import Striping
from skymemory.protocol.clock import STRATEGY_CODES
from skymemory.protocol.satellite.overload import Lateness
from skymemory.protocol.wire import GROUND_SHELL, Address, Op, SkyHeader, build_packet
from skymemory.testbed.connect import host_spec, sky_of
from skymemory.testbed.plan import local_hosts, make_plan
from skymemory.testbed.run_directory import free_ports
from skymemory.transport.udp_client import UdpClient
from skymemory.transport.udp_host import RECEIVE_ROUNDS, UdpHost
from skymemory.transport.udp_socket import DEFAULT_SLOTS
from skymemory.transport.unix_clock import UnixClock


def test_how_far_the_box_was_moved_outlives_all_satellites() -> None:
    """With all dead no neighbour can report it; the box would be back where it began, but for hosts that are revived
    and read the plan: these would disagree with the rest forever.
    """

    async def scenario() -> None:
        plan = make_plan(hosts=local_hosts("testbed-19x5", 1, free_ports(95)), delay_scale=0.0)
        host = UdpHost(host_spec(plan, plan.hosts[0]), asyncio.get_running_loop())
        try:
            for here, satellite in host._satellites.items():
                header = SkyHeader(Op.ADVANCE, Address(*here), Address(*here, GROUND_SHELL), 1, 1)
                packet = build_packet(header, messages.pack_moves(5, -1), 0, host.now_s())
                receive_datagram(satellite.machine, packet, ("127.0.0.1", 9), host.now_s())
            before = {here: satellite.machine for here, satellite in host._satellites.items()}
            host.set_dead(plan.torus.satellites())
            assert not host._satellites
            host.set_dead(())
            for here, satellite in host._satellites.items():
                assert satellite.machine is not before[here] and satellite.machine.moves == (5, -1)
                assert satellite.machine.neighbours.pushed_at_ms >= before[here].neighbours.pushed_at_ms > 0
            lives = [*before.values(), *(satellite.machine for satellite in host._satellites.values())]
            first_ids = {machine.handover._next_request_id for machine in lives}
            assert len(first_ids) > 1.9 * len(before), "no answer to an earlier life's request is taken for one to this"
        finally:
            host.close()

    asyncio.run(scenario())


def test_after_a_suspend_the_moves_that_were_missed_are_made_at_once() -> None:
    """The event loop's own time stands still while the computer sleeps: its alarms are set for a time long past."""

    async def scenario() -> None:
        plan = make_plan(
            hosts=local_hosts("testbed-19x5", 1, free_ports(95)),
            delay_scale=0.0,
            time_scale=15.0,
            epoch_s=time.time() - 1.0,
        )
        # Between the wakings it stands still: no move becomes due while the satellites are looked at.
        awake_s, asleep_s = plan.epoch_s + 1.0, 0.0
        host = UdpHost(host_spec(plan, plan.hosts[0]), asyncio.get_running_loop())
        try:
            host._clock = UnixClock(lambda: awake_s + asleep_s, lambda: asleep_s)
            asleep_s = 180.0
            # One beat finds out and sets the timers again; those that are due ring before the next one.
            for _ in range(2):
                beat = host._beat
                async with asyncio.timeout(60):
                    while host._beat is beat:
                        await asyncio.sleep(0.01)
            expected = host.spec.clock.moves(host.now_s())
            assert expected[0] >= 10
            assert {satellite.machine.moves for satellite in host._satellites.values()} == {expected}
        finally:
            host.close()

    asyncio.run(scenario())


def test_a_socket_that_was_emptied_keeps_nothing_waiting_until_the_next_burst() -> None:
    """As many datagrams as are taken at once, and no more: that they come again later is no sign of being late."""

    async def scenario() -> None:
        plan = make_plan(hosts=local_hosts("testbed-19x5", 1, free_ports(95)), delay_scale=0.0)
        host = UdpHost(host_spec(plan, plan.hosts[0]), asyncio.get_running_loop())
        try:
            await asyncio.sleep(0.3)  # greetings
            satellite = next(iter(host._satellites.values()))
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                for number in range(RECEIVE_ROUNDS * DEFAULT_SLOTS):
                    sender.sendto(bytes(100 + number), satellite.sock.address)
            async with asyncio.timeout(60):
                while satellite.machine.counters.get("packets_malformed") < RECEIVE_ROUNDS * DEFAULT_SLOTS:
                    await asyncio.sleep(0.01)
            assert satellite.full_since_s == math.inf
        finally:
            host.close()

    asyncio.run(scenario())


@pytest.mark.brief("1-ideal", "5-hybrid")
@pytest.mark.parametrize("access", ACCESS_MODES)
@pytest.mark.parametrize("hosts", [1, 5])
def test_values_are_the_same_whether_links_are_sockets_or_memory(
    access: Access, hosts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a question finds its way around a satellite that died, whose neighbours are in the same process."""
    handed = []
    hand_over = UdpHost._hand_over
    monkeypatch.setattr(UdpHost, "_hand_over", lambda self, *given: handed.append(given) or hand_over(self, *given))
    # A host that is late, as this process may be, lets the machine choose what to drop.
    monkeypatch.setattr(Lateness, "is_late", lambda self, now_s: False)
    values = [random.Random(number).randbytes(200_000 + number) for number in range(4)]

    async def scenario() -> None:
        plan = make_plan(hosts=local_hosts("testbed-19x5", hosts, free_ports(95)), delay_scale=0.0, servers=10)
        loop = asyncio.get_running_loop()
        processes = [UdpHost(host_spec(plan, share), loop) for share in plan.hosts]
        spec = processes[0].spec
        config = ClientConfig(7, access=access, give_up_s=20.0)
        client = UdpClient(config, sky_of(plan), spec.clock, spec.everyone)

        def write_and_read() -> None:
            for number, value in enumerate(values):
                written = client.write(bytes([number]) * 32, value, Striping(6144, STRATEGY_CODES["rotation_hop"], 10))
                assert written.ok and written.info is not None
                out = bytearray(len(value))
                assert client.read(written.info, memoryview(out)).ok and out == value

        def ask(there: SatelliteId) -> None:
            with client.lock:
                number = client.machine.ask(Op.PING, b"", there, client.now_s())
            assert client.run([number])[number].ok

        try:
            await asyncio.to_thread(write_and_read)
            forwarded = sum(
                satellite.machine.counters.get("packets_forwarded")
                for host in processes
                for satellite in host._satellites.values()
            )
            assert bool(handed) == (forwarded > len(values) * 33) == (access != "ideal")
            await asyncio.to_thread(ask, SatelliteId(2, 5))
            for host in processes:
                host.set_dead([SatelliteId(2, 7)])
            await asyncio.to_thread(ask, SatelliteId(2, 5))
        finally:
            client.close()
            for host in processes:
                host.close()

    asyncio.run(scenario())
