"""Copies of every chunk: apart wherever the box goes, and read from the live satellite that answers first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.protocol.conftest import key_of

from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.errors import InvalidInput
from skymemory.placement.layout import STRATEGIES
from skymemory.placement.locate import Placement
from skymemory.protocol.client.transfer import ReplicatedRead, ReplicatedWrite, Striping, ValueInfo, WriteTransfer
from skymemory.protocol.clock import STRATEGY_CODES
from skymemory.protocol.wire import Op
from skymemory.reasons import Miss

TORUS = Torus(5, 19)
moves = st.tuples(st.integers(-30, 30), st.integers(-30, 30))


@given(st.sampled_from(STRATEGIES), st.integers(4, 25), moves, moves)
@settings(max_examples=150, deadline=None)
def test_the_copies_of_a_chunk_are_on_different_satellites_and_planes(strategy, servers, set_moves, now_moves):
    placement = Placement.of(strategy, servers, TORUS, SatelliteId(2, 9))
    box = placement.box
    for server in range(servers):
        copies = [placement.locate(server, set_moves, now_moves, r) for r in range(box.width * box.height)]
        assert copies[0] == placement.locate(server, set_moves, now_moves)
        assert len(set(copies)) == len(copies)
        assert len({copy.plane for copy in copies[: box.height]}) == box.height
    with pytest.raises(InvalidInput, match="too small"):
        placement.locate(0, set_moves, now_moves, box.width * box.height)


class Host:
    """A host that keeps two copies."""

    def __init__(self, sky, replicas: int = 2, chunk_bytes: int = 6144) -> None:
        self.sky, self.replicas, self.chunk_bytes = sky, replicas, chunk_bytes

    def put(self, name: str, value: bytes):
        sky = self.sky
        number, info = sky.host.machine.put(
            key_of(name),
            value,
            Striping(self.chunk_bytes, STRATEGY_CODES["rotation_hop"], 10, self.replicas),
            sky.now_s,
        )
        return sky.host.run([number])[number], info

    def get(self, info):
        out = bytearray(info.value_bytes)
        number = self.sky.host.machine.get(info, memoryview(out), self.sky.now_s, self.replicas)
        return self.sky.host.run([number])[number], bytes(out)


def copy_at(replica: int):
    """Server s of a copy is slot s of the plane of its number."""
    return lambda moves: tuple(SatelliteId(replica, slot) for slot in range(3))


def test_a_write_can_do_without_a_copy_of_a_chunk_and_not_without_both():
    value, copies = bytes(7), [copy_at(0), copy_at(1)]
    one = WriteTransfer.of(key_of("v"), value, Striping(1, 3, 3), (0, 0), copies[0])
    write = ReplicatedWrite.of_copies(one, copies, (0, 0))
    assert write.waive([0, 3, 6]) and write.missing == 11
    assert write.acknowledge([8]) == 1 and write.waive([1]) and not write.waive([7])


def test_only_chunks_that_have_not_come_are_asked_of_another_copy():
    info = ValueInfo(key_of("v"), 7, 1, 7, 0, 3, 3, (0, 0))
    read = ReplicatedRead(info, memoryview(bytearray(7)), [copy_at(0), copy_at(1)], (0, 0), 64, hedge=1.0)
    read.pending.clear()
    read.arrived[3] = 1
    assert read.ask_next([0, 3, 6], SatelliteId(0, 0))
    assert [(burst.satellite, list(burst.indices)) for burst in read.pending] == [(SatelliteId(1, 0), [0, 6])]
    read.pending.clear()
    assert read.redirect([0], SatelliteId(1, 0), Miss.TIMEOUT)
    assert not read.redirect([6], SatelliteId(0, 0), Miss.TIMEOUT), "both have failed"


@pytest.mark.brief("plane of the centre-los", "satellite-los", "plane-los")
@pytest.mark.parametrize("access", ["los", "gateway"])
@pytest.mark.parametrize("what", ["satellite", "plane", "plane of the centre"])
def test_a_dead_satellite_or_plane_is_no_miss(world, value_of, access, what):
    sky = world(access)
    host, value = Host(sky), value_of(500_000)
    stored, info = host.put("v", value)
    assert stored.ok and sum(sky.spread(info).values()) == 2 * info.chunks
    if what == "satellite":
        sky.sim.kill(sky.homes(info, (0, 0))[1][0])
    else:
        sky.sim.kill_plane(2 if "centre" in what else 1)
    if access == "gateway" and "centre" in what:
        sky.ask(Op.PING, b"", SatelliteId(1, 9))
    for _ in range(4):
        read, out = host.get(info)
        sky.settle(0.5)
    assert read.ok and out == value
    again, _ = host.put("w", value)
    assert again.ok


def test_the_slow_are_hedged_and_the_first_answer_wins(world, value_of):
    sky = world()
    host, value = Host(sky), value_of(300_000)
    _, info = host.put("v", value)
    for _ in range(3):
        assert host.get(info)[0].report.seconds == pytest.approx(2 * sky.link_s)
    sky.sim.kill(sky.homes(info, (0, 0))[1][0])
    read, out = host.get(info)
    assert read.ok and out == value and read.report.seconds < 5 * sky.link_s + 0.002


def test_both_at_once_and_duplicates_are_counted(world, value_of):
    sky = world(hedge_round_trips=0.0)
    host, value = Host(sky), value_of(300_000)
    _, info = host.put("v", value)
    read, out = host.get(info)
    assert read.ok and out == value and read.report.requests == 20
    sky.sim.kill_plane(1)
    read, out = host.get(info)
    assert read.ok and out == value and read.report.seconds == pytest.approx(2 * sky.link_s)


def test_copies_move_with_the_box(world, value_of):
    sky = world()
    host, value = Host(sky), value_of(300_000)
    _, info = host.put("v", value)
    for slot_moves, plane_moves in ((1, 0), (2, 0), (2, 1), (3, 1), (4, 1)):
        sky.advance(slot_moves, plane_moves)
        sky.settle(3.0)
        holders = sky.holders(info)
        for index in range(info.chunks):
            wanted = {
                sky.sky.servers_at(info.strategy, 10, (0, 0), (slot_moves, plane_moves), replica)[index % 10]
                for replica in (0, 1)
            }
            assert set(holders[index]) == wanted
    sky.sim.kill_plane(3)
    read, out = host.get(info)
    assert read.ok and out == value


def test_a_copy_that_is_gone_is_found_in_the_other(world, value_of):
    sky = world()
    host, value = Host(sky), value_of(300_000)
    _, info = host.put("v", value)
    victim = sky.homes(info, (0, 0))[3][0]
    sky.sim.kill(victim)
    sky.sim.revive(victim)
    read, out = host.get(info)
    assert read.ok and out == value
    _, single = sky.put("one copy", value)
    read, out = host.get(single)
    assert read.ok and out == value
