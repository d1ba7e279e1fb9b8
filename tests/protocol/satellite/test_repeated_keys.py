"""Keys that one packet names twice: both satellites answer each place, and nothing is deleted or counted twice."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.flight.machine import FlightMachine, compiler
from tests.protocol.conftest import key_of
from tests.protocol.datagrams import receive_datagram
from tests.protocol.refs import pack_refs

from skymemory import native
from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.protocol import messages
from skymemory.protocol.clock import MoveClock, SkyMap
from skymemory.protocol.messages import pack_dead, pack_forget, pack_keys, unpack_count, unpack_presences
from skymemory.protocol.satellite.checks import Check, CheckResult, pack_checks, unpack_found
from skymemory.protocol.satellite.machine import SatelliteConfig, SatelliteMachine
from skymemory.protocol.satellite.memory import ChunkStore
from skymemory.protocol.wire import GROUND_SHELL, Address, Op, SkyHeader, build_packet, bulk_batch, parse_packet

HERE, BEAM = SatelliteId(2, 9), ("ground", 7)
PAYLOADS = [bytes([index]) * 100 for index in range(3)]
CRC = 5
VALUE_BYTES = 3 * (100 + 72)
OURS, OTHER = messages.pack_setting(CRC, 0, 0), messages.pack_setting(CRC + 1, 0, 0)


class Alone:
    def __init__(self, begin: Callable[..., Any], memory_bytes: int = 1 << 20) -> None:
        self.machine = begin(
            SatelliteConfig(HERE, memory_bytes), SkyMap(Torus(5, 19), HERE), MoveClock(time_scale=0.0), 0.0
        )
        self.requests = 0

    def header(self, op: Op) -> SkyHeader:
        self.requests += 1
        return SkyHeader(op, Address(*HERE), Address(*HERE, GROUND_SHELL), 7, self.requests)

    def store(self, *names: str) -> Alone:
        crcs = np.array([native.crc32(payload) for payload in PAYLOADS], np.uint32)
        for name in names:
            refs = pack_refs(key_of(name), range(3), crcs, 100, 300, CRC, 1, 3, (0, 0))
            for datagram in bulk_batch(self.header(Op.SET), refs, PAYLOADS, 0, 0.0).datagrams():
                receive_datagram(self.machine, datagram, BEAM, 0.0)
        self.machine.datagrams_to_send(0.0)
        return self

    def ask(self, op: Op, body: bytes, now_s: float = 0.0) -> bytes:
        receive_datagram(self.machine, build_packet(self.header(op), body, 0, now_s), BEAM, now_s)
        ((batch, _),) = self.machine.datagrams_to_send(now_s)
        (datagram,) = batch.datagrams()
        return bytes(parse_packet(datagram).body)


@pytest.fixture(params=[SatelliteMachine, FlightMachine])
def begin(request: pytest.FixtureRequest) -> Callable[..., Any]:
    if request.param is FlightMachine:
        compiler()
    kind: Callable[..., Any] = request.param
    return kind


def test_has_answers_every_place_as_it_answers_each_key_alone(begin: Callable[..., Any]) -> None:
    alone, dice = Alone(begin).store("v", "w"), random.Random(5)
    for _ in range(30):
        names = dice.choices("vwx", k=dice.randrange(1, 181))
        found = unpack_presences(alone.ask(Op.HAS, pack_keys([key_of(name) for name in names])))
        assert found == [unpack_presences(alone.ask(Op.HAS, pack_keys([key_of(name)])))[0] for name in names]
        assert [presence is not None for presence in found] == [name != "x" for name in names]


def test_a_key_is_examined_once_however_often_a_has_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cost is that of its share: 180 times a share of 10,000 chunks would hold up all other requests."""
    alone, examined = Alone(SatelliteMachine).store("v"), []
    presence = ChunkStore.presence
    monkeypatch.setattr(ChunkStore, "presence", lambda store, key: examined.append(key) or presence(store, key))
    alone.ask(Op.HAS, pack_keys([key_of("v")] * 179 + [key_of("w")]))
    assert examined == [key_of("v"), key_of("w")]


def test_what_is_deleted_twice_counts_once(begin: Callable[..., Any]) -> None:
    alone = Alone(begin).store("v", "w")
    assert unpack_count(alone.ask(Op.EVICT, pack_keys([key_of("v"), key_of("w"), key_of("v")]))) == 6
    assert alone.machine.counters.get("chunks_deleted") == 6
    alone.store("v", "w")
    dead = [(key_of("v"), OURS), (key_of("v"), OTHER), (key_of("w"), OTHER), (key_of("v"), OURS)]
    assert len(pack_dead(dead)) > 4 * 44
    assert unpack_count(alone.ask(Op.FORGET, pack_forget(dead, 1.0), 9.0)) == 3
    assert alone.machine.counters.get("chunks_deleted") == 9


@pytest.mark.parametrize("rooms", [1, 2])
def test_a_share_checked_twice_is_offered_room_twice_and_never_the_same_room(
    begin: Callable[..., Any], rooms: int
) -> None:
    check = Check(key_of("v"), OURS, 1, 0, 3, 100)
    alone = Alone(begin, rooms * VALUE_BYTES)
    assert unpack_found(alone.ask(Op.CHECK, pack_checks([check] * 3))) == [CheckResult.LACKING] * rooms + [
        CheckResult.NO_ROOM
    ] * (3 - rooms)
    alone.store("v")
    assert unpack_found(alone.ask(Op.CHECK, pack_checks([check] * 3))) == [CheckResult.WHOLE] * 3
