"""Delays a hundred or a thousand times as long as light takes: slow, but it works."""

from __future__ import annotations

import pytest
from tests.protocol.datagrams import receive_datagram

from skymemory.constellation.torus import SatelliteId
from skymemory.protocol.client.machine import ClientConfig, ClientMachine
from skymemory.protocol.satellite.machine import SatelliteConfig, SatelliteMachine
from skymemory.protocol.wire import COMMAND_BYTES, CREDIT_UNIT_BYTES, MOST_CREDIT, Op, SkyHeader
from skymemory.testbed.connect import clock_of, control_client, sky_of, worst_round_trip_s
from skymemory.testbed.plan import make_plan

PLAN = make_plan(delay_scale=100)
HERE = SatelliteId(2, 9)
PLENTY_BYTES = 2 * MOST_CREDIT * CREDIT_UNIT_BYTES


@pytest.mark.parametrize("scale", [1.0, 100.0, 1000.0])
def test_a_client_waits_for_more_than_one_round_trip(scale: float) -> None:
    plan = make_plan(delay_scale=scale)
    client = control_client(plan, 0.8)
    try:
        waits_s = client.machine.config.give_up_s
    finally:
        client.close()
    assert waits_s == 0.8 if scale == 1 else waits_s > 2 * worst_round_trip_s(plan, plan.torus.satellites()) > 2


def test_who_can_take_more_than_the_header_holds_says_so_much() -> None:
    """A window for a round trip of seconds overflowed the header's credit, which was an exception."""
    client = ClientMachine(ClientConfig(7, window_bytes=PLENTY_BYTES), sky_of(PLAN), clock_of(PLAN))
    client.ask(Op.PING, b"", HERE, 1.0)
    ((question, _),) = client.datagrams_to_send(1.0)
    packet = next(iter(question.datagrams()))
    assert SkyHeader.unpack(packet, COMMAND_BYTES).credit == MOST_CREDIT

    config = SatelliteConfig(HERE, 1 << 20, credit_bytes=PLENTY_BYTES)
    satellite = SatelliteMachine(config, sky_of(PLAN), clock_of(PLAN), 1.0)
    receive_datagram(satellite, packet, "ground", 1.0)
    ((answer, _),) = satellite.datagrams_to_send(1.0)
    receive_datagram(client, next(iter(answer.datagrams())), 2.0)
    event = client.next_event()
    assert event is not None and event.ok
