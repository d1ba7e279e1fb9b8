"""One satellite by itself: what it answers to packets made by hand, and what it then remembers."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from tests.protocol.conftest import key_of
from tests.protocol.datagrams import receive_datagram
from tests.protocol.refs import pack_refs

from skymemory import native
from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.protocol import messages
from skymemory.protocol.clock import MoveClock, SkyMap
from skymemory.protocol.messages import ChunkPresence, Selection, pack_forget
from skymemory.protocol.satellite import memory
from skymemory.protocol.satellite.checks import Check, CheckResult, pack_checks, pack_found, unpack_checks, unpack_found
from skymemory.protocol.satellite.machine import SatelliteConfig, SatelliteMachine
from skymemory.protocol.satellite.memory import setting_of
from skymemory.protocol.satellite.state import EvictionConfig
from skymemory.protocol.wire import (
    CHUNK_REF,
    FLAG_SETTLED,
    GROUND_SHELL,
    Address,
    Op,
    Packet,
    PlacementTag,
    SkyHeader,
    build_packet,
    bulk_batch,
    parse_packet,
)

HERE = SatelliteId(2, 9)
SKY = SkyMap(Torus(5, 19), HERE)
BEAM = ("ground", 7)
PAYLOADS = [bytes([index]) * 100 for index in range(3)]


class Alone:
    """Its own gateway's only ground host talks to it. All values are of three chunks on one server, which it is."""

    def __init__(self, memory_bytes: int = 1 << 20, *policies: str, replicas: int = 1) -> None:
        eviction = EvictionConfig.of(policies, sweep_s=10.0, replicas=replicas)
        self.machine = SatelliteMachine(SatelliteConfig(HERE, memory_bytes, eviction=eviction), SKY, MoveClock(), 0.0)
        self.requests = 0

    def header(self, op: Op, gateway: SatelliteId = HERE) -> SkyHeader:
        self.requests += 1
        return SkyHeader(op, Address(*HERE), Address(*gateway, GROUND_SHELL), 7, self.requests)

    def hear(self, op: Op, body: bytes, gateway: SatelliteId = HERE) -> list[Packet]:
        packet = build_packet(self.header(op, gateway), body, 0, 0.0)
        receive_datagram(self.machine, packet, BEAM, 0.0)
        return self.said()

    def store(self, name: str) -> list[Packet]:
        crcs = np.array([native.crc32(payload) for payload in PAYLOADS], np.uint32)
        refs = pack_refs(key_of(name), range(3), crcs, 100, 300, 5, 1, 3, (0, 0))
        for datagram in bulk_batch(self.header(Op.SET), refs, PAYLOADS, 0, 0.0).datagrams():
            receive_datagram(self.machine, datagram, BEAM, 0.0)
        return self.said()

    def said(self, now_s: float = 0.0) -> list[Packet]:
        batches = self.machine.datagrams_to_send(now_s)
        return [parse_packet(datagram) for batch, _ in batches for datagram in batch.datagrams()]


@pytest.mark.parametrize("gateway", [HERE, SatelliteId(2, 8)], ids=["by its beam", "by another"])
def test_a_satellite_that_cannot_send_as_fast_says_so_instead_of_queueing(gateway: SatelliteId) -> None:
    alone = Alone()
    alone.store("v")
    wanted = Selection.of(key_of("v"), [0, 1, 2]).pack()
    alone.machine.backlog_bytes = alone.machine.config.max_backlog_bytes + 1
    (busy,) = alone.hear(Op.GET, wanted)
    assert busy.header.op is Op.BUSY and bytes(busy.body) == wanted
    alone.machine.backlog_bytes = 0
    assert [answer.header.op for answer in alone.hear(Op.GET, wanted)] == [Op.DATA] * 3


def test_while_something_waits_to_be_sent_nothing_is_served_past_it() -> None:
    alone = Alone()
    assert alone.machine.plain_requests(0.0) is not None
    alone.machine.backlog_bytes = 1
    assert alone.machine.plain_requests(0.0) is None


def test_while_chunks_are_handed_over_sets_are_left_to_the_machine() -> None:
    """What replaces a chunk on its way must be noticed."""
    alone = Alone()
    alone.store("v")
    requests = alone.machine.plain_requests(0.0)
    assert requests is not None and len(requests[2]) == 1, "the placement whose chunks belong here"
    alone.machine.handover.enqueue(SatelliteId(2, 8), [(key_of("v"), 0)])
    requests = alone.machine.plain_requests(0.0)
    assert requests is not None and not requests[2]


def test_room_is_reported_once_for_a_request_of_many_chunks() -> None:
    """Two values of 516 bytes into a memory of 600."""
    alone = Alone(600)
    checks = [Check(key_of(name), bytes(12), 1, 0, 3, 100) for name in "vw"]
    (answer,) = alone.hear(Op.CHECK, pack_checks(checks))
    assert unpack_found(answer.body) == [CheckResult.LACKING, CheckResult.NO_ROOM]


@pytest.mark.parametrize("held", [0, 1, 2])
def test_a_place_has_its_share_of_a_value_when_it_has_all_of_it(held: int) -> None:
    """Of twenty chunks on ten servers we hold two, and so should any that we ask: first how many are there, after a
    while for each that may be lost.
    """
    alone, payload = Alone(1 << 20, "periodic"), bytes(100)
    placement = SKY.placement(3, 10)
    server = placement.locate_all().index(HERE)
    crcs = np.full(20, native.crc32(payload), np.uint32)
    refs = pack_refs(key_of("v"), [server, server + 10], crcs, 100, 2000, 5, 10, 3, (0, 0))
    for datagram in bulk_batch(alone.header(Op.SET), refs, [payload] * 2, 0, 0.0).datagrams():
        receive_datagram(alone.machine, datagram, BEAM, 0.0)
    alone.said()
    asked = 0
    for tenth in range(1, 200):
        now_s = tenth / 10
        alone.machine.handle_timer(now_s)
        for question in alone.said(now_s):
            there = question.header.destination
            if question.header.op is Op.CHECK:
                asked_for = [check.server for check in unpack_checks(question.body)]
                found = [CheckResult.WHOLE if index < 10 * held else CheckResult.LACKING for index in asked_for]
                header = SkyHeader(Op.CHECKED, Address(*HERE), there, 0, question.header.request_id, flags=FLAG_SETTLED)
                answer = build_packet(header, pack_found(found), 0, now_s)
                receive_datagram(alone.machine, answer, SatelliteId(there.plane, there.slot), now_s)
            if question.header.op is not Op.HAS:
                continue
            asked += 1
            its = PlacementTag(3, 10, placement.locate_all().index(SatelliteId(there.plane, there.slot)), 0, 0)
            presence = ChunkPresence(its.server, 20, 100, 2000, 5, held, its) if held else None
            header = SkyHeader(Op.PRESENCE, Address(*HERE), there, 0, question.header.request_id)
            answer = build_packet(header, messages.pack_presences([presence]), 0, now_s)
            receive_datagram(alone.machine, answer, SatelliteId(there.plane, there.slot), now_s)
    assert asked and bool(alone.machine.store.shares) == (held == 2)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_chunk_that_claims_a_million_others_costs_no_more_than_itself(replicas: int) -> None:
    """One SET, by mistake or not: what is missing of its value is never listed whole, however it is looked for."""
    alone = Alone(1 << 20, "gossip", "periodic", "migration", replicas=replicas)
    ref = CHUNK_REF.pack(key_of("v"), 1, 1 << 20, 4, native.crc32(b"once"), 4 << 20, 9, 1, 1, 3, 0, 0, 0, 0)
    (packet,) = bulk_batch(alone.header(Op.SET), ref, [b"once"], 0, 0.0).datagrams()
    receive_datagram(alone.machine, packet, BEAM, 0.0)
    tracemalloc.start()
    try:
        for tenth in range(1, 200):
            alone.machine.handle_timer(tenth / 10)
            alone.said(tenth / 10)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_set_ends_what_a_deletion_forbids() -> None:
    """Chunks of a deleted key that are handed over are not taken for a while, but those of a new value are."""
    alone = Alone()
    alone.store("v")
    late = alone.machine._state.history
    assert alone.hear(Op.EVICT, messages.pack_keys([key_of("v"), key_of("w")]))
    v, w = (key_of(name) + bytes(40) for name in "vw")
    assert late.is_deleted(v, 0.5) and late.is_deleted(w, 0.5)
    alone.store("v")
    assert not late.is_deleted(v, 0.5) and late.is_deleted(w, 0.5)
    assert not late.is_deleted(w, 1.5)


def test_what_is_to_be_forgotten_is_one_setting_and_was_not_stored_since() -> None:
    alone = Alone()
    alone.store("v")
    ref = alone.machine.store.shares[key_of("v")][0][0]
    other = key_of("v") + bytes(20) + b"\0\0\0\6" + bytes(16)
    late = alone.machine._state.history

    def forget(setting: bytes, since_s: float, now_s: float) -> int:
        packet = build_packet(alone.header(Op.FORGET), pack_forget([(key_of("v"), setting)], since_s), 0, now_s)
        receive_datagram(alone.machine, packet, BEAM, now_s)
        (answer,) = alone.said(now_s)
        return messages.unpack_count(answer.body)

    assert forget(setting_of(other), 1.0, 9.0) == 0
    assert forget(setting_of(ref), 9.0, 9.0) == 0, "stored at 0 s"
    assert forget(setting_of(ref), 8.9, 9.0) == 3
    assert late.is_deleted(ref, 9.5) and not late.is_deleted(other, 9.5) and not late.is_deleted(ref, 10.1)


def test_so_many_keys_are_known_to_have_been_stored_that_none_is_taken_for_older(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "_REMEMBERED_SETS", 2)
    late = Alone().machine._state.history
    for number, name in enumerate("abca"):
        late.written(key_of(name), float(number))
    assert late.was_written_since(key_of("a"), 3.0) and not late.was_written_since(key_of("c"), 2.5)
    assert not late.was_written_since(key_of("z"), 1.5) and late.was_written_since(key_of("z"), 1.0)
