"""Whatever arrives at a ground host: no exception, counted, never wrong bytes, and every operation ends."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.properties.wire_traffic import (
    CHUNK_BYTES,
    HERE,
    KEY,
    SKY_MAP,
    SOUND,
    VALUE,
    bulk,
    damaged,
    hostile,
    segment_sizes,
)
from tests.protocol.datagrams import receive_datagram

from skymemory.protocol import messages
from skymemory.protocol.client.machine import ClientConfig, ClientMachine
from skymemory.protocol.client.transfer import Striping
from skymemory.protocol.clock import MoveClock
from skymemory.protocol.wire import (
    Op,
)


def client() -> tuple[ClientMachine, bytearray]:
    """A client that reads VALUE (request 1), writes it (request 2), and asks (3 and 4)."""
    machine = ClientMachine(ClientConfig(ground=7), SKY_MAP, MoveClock())
    out = bytearray(2500)
    _, info = machine.put(KEY, VALUE, Striping(CHUNK_BYTES, 3, 1), 0.0)
    machine.cancel(1)
    machine.get(info, memoryview(out), 0.0)
    machine.datagrams_to_send(0.0)
    machine.put(KEY, VALUE, Striping(CHUNK_BYTES, 3, 1), 0.0)
    machine.datagrams_to_send(0.0)
    machine.ask(Op.HAS, messages.pack_keys([KEY]), HERE, 0.0)
    machine.ask(Op.PING, b"", HERE, 0.0)
    machine.datagrams_to_send(0.0)
    return machine, out


def end(machine: ClientMachine) -> None:
    """Whatever came: every operation ends, in time, and leaves nothing behind."""
    now_s = 0.0
    finished = []
    while len(finished) < 4 and now_s < 15:
        machine.datagrams_to_send(now_s)
        while (event := machine.next_event()) is not None:
            finished.append(event.number)
        if len(finished) < 4:
            due_s = machine.next_timer_s()
            assert due_s is not None, "an operation has neither ended nor a timer"
            now_s = max(now_s, due_s)
            machine.handle_timer(now_s)
    assert sorted(finished) == [2, 3, 4, 5]
    assert (machine.next_timer_s() is None) or machine.probing, "pings of its own, while a satellite is silent"
    assert machine._peers.inbound.in_flight_bytes == 0
    assert all(window.in_flight_bytes == 0 for window in machine._peers._outbound.values())


@settings(max_examples=200)
@given(data=st.binary(max_size=900), segment_bytes=segment_sizes())
def test_random_bytes_at_a_client(data, segment_bytes):
    machine, out = client()
    machine.receive_batch(data, segment_bytes, 0.0)
    assert not any(out) and machine.next_event() is None
    end(machine)


@pytest.mark.brief()
@settings(max_examples=300)
@given(data=damaged([*bulk(Op.DATA), *SOUND]), segment_bytes=segment_sizes())
def test_damaged_packets_at_a_client(data, segment_bytes):
    machine, out = client()
    machine.receive_batch(data, segment_bytes, 0.001)
    for at in range(0, 2500, CHUNK_BYTES):
        chunk = out[at : at + CHUNK_BYTES]
        assert not any(chunk) or chunk == VALUE[at : at + CHUNK_BYTES]
    end(machine)


@pytest.mark.slow
@pytest.mark.seeded
@settings(max_examples=500)
@given(packets=st.lists(hostile(to_ground=True), min_size=1, max_size=6), batched=st.booleans())
def test_hostile_packets_at_a_client(packets, batched):
    machine, out = client()
    if batched:
        machine.receive_batch(b"".join(packets), len(packets[0]), 0.001)
    else:
        for packet in packets:
            receive_datagram(machine, packet, 0.001)
            machine.datagrams_to_send(0.001)
    assert len(out) == 2500
    end(machine)


@settings(max_examples=200)
@given(
    runs=st.lists(
        st.lists(st.sampled_from([*bulk(Op.DATA), *bulk(Op.DATA), *SOUND[-4:]]), min_size=1, max_size=5),
        min_size=1,
        max_size=4,
    ),
    damage=st.lists(st.integers(0, 10**6), max_size=2),
)
def test_runs_at_a_client_do_what_their_packets_do(runs, damage):
    joined = [bytearray(b"".join(run)) for run in runs]
    for bit in damage:
        data = joined[bit % len(joined)]
        data[bit // 8 % len(data)] ^= 1 << bit % 8
    sizes = [len(run[0]) for run in runs]
    (together, out_together), (apart, out_apart) = client(), client()
    together.receive_runs([(memoryview(data), size) for data, size in zip(joined, sizes, strict=True)], 0.001)
    for data, size in zip(joined, sizes, strict=True):
        for at in range(0, len(data), size):
            receive_datagram(apart, data[at : at + size], 0.001)
    assert out_together == out_apart
    ended = [[(event.number, event.ok) for event in machine._events] for machine in (together, apart)]
    assert ended[0] == ended[1]
    assert together._peers.inbound.in_flight_bytes == apart._peers.inbound.in_flight_bytes
    if not ended[0]:
        for name in ("packets_malformed", "packets_unexpected"):
            assert together.counters.get(name) == apart.counters.get(name)
