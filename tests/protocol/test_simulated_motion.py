"""The box moves: satellites hand over by themselves, readers find everything before, during and after."""

from __future__ import annotations

import pytest

from skymemory.constellation.torus import SatelliteId
from skymemory.placement import locate
from skymemory.protocol.clock import MoveClock
from skymemory.protocol.wire import SegmentBatch
from skymemory.transport.faults import FaultInjector

CHUNK_PACKET_BYTES = 1000 + 8 + 44 + 72


def leaving(sky, info, before, after) -> int:
    """Chunks that have to change their satellite, as ``placement.locate`` has it."""
    placement = sky.sky.placement(info.strategy, info.servers)
    servers = {line.server for line in locate.server_moves(placement, info.set_moves, before, after)}
    return sum(index % info.servers in servers for index in range(info.chunks))


def migrated_bytes(sky) -> list[int]:
    """Record the bytes of every MIGRATE packet from now on, one entry per packet and link."""
    sizes, send = [], sky.sim._send

    def recording(batch: SegmentBatch, sender, receiver) -> None:
        sizes.extend(len(data) for data in batch.datagrams() if data[0] & 0x10 and data[9] == 0x05)
        send(batch, sender, receiver)

    sky.sim._send = recording
    return sizes


@pytest.mark.brief("1-move1-rotation", "9-move3-rotation_hop", "10-move0-cost", "1-move2-rotation")
@pytest.mark.parametrize("strategy", ["rotation", "rotation_hop", "cost"])
@pytest.mark.parametrize("move", [(1, 0), (-1, 0), (0, 1), (0, -1)])
@pytest.mark.parametrize("servers", [1, 9, 10])
def test_exactly_the_leaving_chunks_move_and_arrive(world, value_of, strategy, move, servers):
    sky = world()
    value = value_of(100_000)
    _, info = sky.put("v", value, 1000, strategy, servers)
    sizes = migrated_bytes(sky)
    expected = leaving(sky, info, (0, 0), move)
    sky.advance(*move)
    sky.settle()
    assert sky.holders(info) == sky.homes(info, move)
    assert sky.counted("chunks_migrated_out") == sky.counted("chunks_migrated_in") == expected
    hops = {
        index: sky.torus.hops(before[0], after[0])
        for (index, before), after in zip(sky.homes(info, (0, 0)).items(), sky.homes(info, move).values(), strict=True)
    }
    assert sum(sizes) == sum(hops.values()) * CHUNK_PACKET_BYTES
    read, out = sky.get(info)
    assert read.ok and out == value and read.report.requests == (2 if servers == 1 else servers)


@pytest.mark.parametrize("strategy", ["hop", "baseline"])
def test_what_does_not_migrate_stays(world, value_of, strategy):
    sky = world()
    value = value_of(60_000)
    _, info = sky.put("v", value, 1000, strategy)
    sky.advance(3, -1)
    sky.settle()
    read, out = sky.get(info)
    assert read.ok and out == value
    assert sky.holders(info) == sky.homes(info, (0, 0)) == sky.homes(info, (3, -1))
    assert sky.counted("chunks_migrated_out") == 0


@pytest.mark.parametrize("access", ["los", pytest.param("gateway", marks=(pytest.mark.slow, pytest.mark.seeded))])
def test_a_walk_of_the_box_with_readers_all_along(world, value_of, access):
    """Forward, several at once, across planes, back; read begun before, during and after each."""
    sky = world(access)
    values = {name: value_of(200_000 + i, i) for i, name in enumerate("abc")}
    infos = {"a": sky.put("a", values["a"])[1]}
    totals = 0
    for at, moves in enumerate([(1, 0), (2, 0), (2, 1), (5, 1), (3, 0), (3, -2), (0, 0), (-1, 3), (18, -5)]):
        before = sky.host.machine.moves(sky.now_s)
        reads, outs = [], []

        def begin(reads=reads, outs=outs) -> None:
            for name, info in infos.items():
                outs.append((name, bytearray(info.value_bytes)))
                reads.append(sky.host.machine.get(info, memoryview(outs[-1][1]), sky.now_s))

        totals += sum(leaving(sky, info, before, moves) for info in infos.values())
        begin()
        asked = []
        for at_once in _by(sky.torus.satellites(), 7):
            asked += sky.begin_advance(*moves, at_once)
            begin()
            sky.sim.settle(sky.now_s + 0.003)
        answers = sky.host.run(asked)
        assert all(answer.ok for answer in answers.values())
        begin()
        done = sky.host.run(reads)
        assert [done[number].report.failure for number in reads] == [None] * len(reads), moves
        assert all(bytes(out) == values[name] for name, out in outs)
        if at in (1, 4):
            name = "bc"[at // 4]
            infos[name] = sky.put(name, values[name])[1]
        sky.settle()
        for info in infos.values():
            assert sky.holders(info) == sky.homes(info, moves)
    assert totals > 0


def _by(satellites, count):
    return [satellites[at : at + count] for at in range(0, len(satellites), count)]


def test_back_and_forth_within_the_grace(world, value_of):
    sky = world()
    value = value_of(300_000)
    _, info = sky.put("v", value)
    for moves in [(1, 0), (0, 0), (1, 0), (2, 0), (1, 0), (0, 0), (1, 1)]:
        sky.advance(*moves)
        read, out = sky.get(info)
        assert read.ok and out == value
        sky.settle(0.05)
    sky.settle()
    assert sky.holders(info) == sky.homes(info, (1, 1))


@pytest.mark.brief("2", "1")
@pytest.mark.parametrize("seed", range(3))
def test_handovers_survive_loss(world, value_of, seed):
    sky = world(faults=FaultInjector(loss=0.05, duplicate=0.05, reorder=0.2, reorder_delay_s=0.01, seed=seed))
    value = value_of(400_000)
    stored, info = sky.put("v", value)
    assert stored.ok
    for moves in [(1, 0), (2, 0), (1, -1)]:
        sky.advance(*moves)
        read, out = sky.get(info)
        assert read.ok and out == value
        sky.settle(12)
        assert sky.holders(info) == sky.homes(info, moves)


def test_a_write_during_the_move_ends_up_where_it_belongs(world, value_of):
    """Half of the satellites know of the move, the writer does not."""
    sky = world()
    value = value_of(500_000)
    asked = sky.begin_advance(2, 1, sky.torus.satellites()[::2])
    number, info = sky.begin_put("v", value)
    assert sky.host.run([number])[number].ok
    read, out = sky.get(info)
    assert read.ok and out == value
    sky.host.run([*asked, *sky.begin_advance(2, 1)])
    sky.settle()
    assert sky.holders(info) == sky.homes(info, (2, 1))


def test_satellites_that_disagree_do_not_toss_chunks_to_and_fro(world, value_of):
    sky = world()
    _, info = sky.put("v", value_of(100_000), 1000)
    sky.host.run(sky.begin_advance(1, 0, sky.torus.satellites()[::2]))
    sky.settle(10)
    assert sky.counted("chunks_migrated_out") < 20 * info.chunks
    read, _ = sky.get(info)
    assert read.ok
    sky.host.run(sky.begin_advance(1, 0))
    sky.settle(10)
    assert sky.holders(info) == sky.homes(info, (1, 0))


@pytest.mark.brief()
def test_a_dead_target_does_not_hold_up_the_others(world, value_of):
    """What cannot be handed over stays readable where it is, and follows when the target is back."""
    sky = world()
    value = value_of(2_000_000)
    _, info = sky.put("v", value)
    targets = {
        after[0]
        for before, after in zip(sky.homes(info, (0, 0)).values(), sky.homes(info, (1, 0)).values(), strict=True)
        if before != after
    }
    dead = min(targets)
    sky.sim.kill(dead)
    alive = [here for here in sky.torus.satellites() if here != dead]
    assert all(answer.ok for answer in sky.host.run(sky.begin_advance(1, 0, alive)).values())
    sky.settle(12)
    homes = sky.homes(info, (1, 0))
    assert all(sky.holders(info)[index] == home for index, home in homes.items() if home != [dead])
    assert all(len(holders) == 1 for holders in sky.holders(info).values())
    sky.sim.revive(dead)
    sky.host.run(sky.begin_advance(1, 0))
    sky.settle(25)
    assert sky.holders(info) == homes
    read, out = sky.get(info)
    assert read.ok and out == value


@pytest.mark.slow
@pytest.mark.seeded
def test_the_clock_at_speed(world, value_of):
    """A slot move each 0.52 s and a plane move each 2.37 s, 500 times as fast as Starlink A: every read is right."""
    clock = MoveClock(epoch_s=-3.3, slot_period_s=260.0, plane_period_s=1184.0, time_scale=500.0)
    sky = world(clock=clock)
    values = [value_of(150_000, i) for i in range(4)]
    infos = []
    reads = 0
    while sky.now_s < 20:
        if len(infos) < 4 and sky.now_s >= 3 * len(infos):
            stored, info = sky.put(f"v{len(infos)}", values[len(infos)])
            assert stored.ok
            infos.append(info)
        for info, value in zip(infos, values, strict=False):
            read, out = sky.get(info)
            assert read.ok and out == value, (sky.now_s, read.report)
            reads += 1
        sky.settle(0.037)
    moves = clock.moves(sky.now_s)
    assert moves[0] >= 40 and moves[1] >= 9 and reads > 900
    assert sky.host.machine.moves(sky.now_s) == moves
    copies = [len(holders) for info in infos for holders in sky.holders(info).values()]
    assert min(copies) == 1


def test_a_host_whose_clock_is_wrong_learns_from_the_first_answer(world, value_of):
    sky = world()
    value = value_of(200_000)
    _, info = sky.put("v", value)
    for moves in [(1, 0), (2, 0), (3, 1)]:
        sky.advance(*moves)
        sky.settle(3)
    newcomer = sky.connect(9)
    assert newcomer.machine.moves(sky.now_s) == (0, 0)
    read, out = sky.get(info, newcomer)
    assert read.ok and out == value
    assert newcomer.machine.moves(sky.now_s) == (3, 1)
    again, _ = sky.get(info, newcomer)
    assert again.ok and again.report.requests == 10


@pytest.mark.brief()
def test_the_gateway_follows_the_box_and_windows_are_given_back(world, value_of):
    sky = world("gateway", credit_bytes=65_536)
    value = value_of(400_000)
    for turn in range(1, 6):
        number, info = sky.begin_put(f"v{turn}", value)
        sky.sim.step(sky.now_s + 1)
        asked = sky.begin_advance(turn, turn // 2)
        done = sky.host.run([number, *asked])
        assert all(finished.ok for finished in done.values())
        read, out = sky.get(info)
        assert read.ok and out == value
    assert sky.host.machine._gateway.current == sky.sky.centre_at((5, 2)) != SatelliteId(2, 9)
    links = sky.host.machine._peers
    assert all(window.in_flight_bytes == 0 for window in [links.inbound, *links._outbound.values()])
