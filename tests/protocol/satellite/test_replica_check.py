"""Copies and eviction: a block lives while any copy of each share is whole; and lost copies are made again."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.protocol.conftest import World, key_of
from tests.protocol.satellite import ledgers
from tests.protocol.satellite.test_replica_conflicts import copies

from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput, MalformedPacket
from skymemory.protocol import messages
from skymemory.protocol.client.transfer import Striping, ValueInfo
from skymemory.protocol.clock import STRATEGY_CODES
from skymemory.protocol.messages import WRITING_S
from skymemory.protocol.satellite.checks import (
    MAX_CHECKS_PER_PACKET,
    Check,
    CheckResult,
    pack_checks,
    pack_found,
    unpack_checks,
    unpack_found,
)
from skymemory.protocol.satellite.state import EvictionConfig
from skymemory.protocol.wire import Op

SERVERS = 10


def policy(*names: str, replicas: int = 2, sweep_s: float = 1e6) -> EvictionConfig:
    """Where no sweep is wanted, none comes."""
    return EvictionConfig.of(names, sweep_s, replicas)


def put(sky: World, name: str, value: bytes, chunk_bytes: int = 1000, replicas: int = 2) -> ValueInfo:
    number, info = sky.host.machine.put(
        key_of(name), value, Striping(chunk_bytes, STRATEGY_CODES["rotation_hop"], SERVERS, replicas), sky.now_s
    )
    assert sky.host.run([number])[number].ok
    return info


def get(sky: World, info: ValueInfo, replicas: int = 2) -> tuple[bool, bytes]:
    out = bytearray(info.value_bytes)
    number = sky.host.machine.get(info, memoryview(out), sky.now_s, replicas)
    return sky.host.run([number])[number].ok, bytes(out)


def place(sky: World, info: ValueInfo, server: int, replica: int, moves=(0, 0)) -> SatelliteId:
    return sky.sky.servers_at(info.strategy, SERVERS, info.set_moves, moves, replica)[server]


def homes(sky: World, info: ValueInfo, moves=(0, 0), replicas: int = 2):
    return {
        (index, replica): {place(sky, info, index % SERVERS, replica, moves)}
        for index in range(info.chunks)
        for replica in range(replicas)
    }


def lose(sky: World, info: ValueInfo, server: int, replica: int) -> int:
    """The satellite of that copy evicts its chunks of that server, as for want of room; it notices when next asked."""
    here = place(sky, info, server, replica)
    store = sky.sim.satellites[here].store
    lost = [index for index in store.shares[info.key] if index % SERVERS == server]
    for index in lost:
        store._evict((info.key, index))
    sky.ask(Op.HAS, messages.pack_keys([info.key]), here)
    return len(lost)


# --- eviction ---


@pytest.mark.brief()
@pytest.mark.parametrize("names", [("gossip",), ("periodic",), ("gossip", "periodic", "migration")])
def test_a_block_that_lost_one_copy_of_a_share_is_not_dead(world, value_of, names):
    sky = world(eviction=policy(*names, sweep_s=10.0 if "periodic" in names else 1e6))
    values = {name: value_of(40_000, at) for at, name in enumerate("abc")}
    infos = {name: put(sky, name, value) for name, value in values.items()}
    before = copies(sky, infos["a"])
    full = sky.sim.satellites[place(sky, infos["a"], 3, 0)].store
    assert lose(sky, infos["a"], 3, 0) == 4
    full.limit_bytes = full.used_bytes  # so that nothing is mended meanwhile
    sky.settle(75.0)
    assert len(copies(sky, infos["a"])) == len(before) - 4 and not sky.host.machine.take_gone()
    for name, info in infos.items():
        assert get(sky, info) == (True, values[name])


@pytest.mark.brief(every=3)
@pytest.mark.parametrize("names", [("gossip",), ("periodic",)])
@pytest.mark.parametrize("replicas", [2, 3])
def test_a_block_of_which_a_share_is_whole_nowhere_is_dead_in_all_copies(world, value_of, names, replicas):
    sky = world(eviction=policy(*names, replicas=replicas, sweep_s=10.0 if "periodic" in names else 1e6))
    values = {name: value_of(40_000, at) for at, name in enumerate("abc")}
    infos = {name: put(sky, name, value, replicas=replicas) for name, value in values.items()}
    sky.settle(WRITING_S)
    for replica in range(replicas):
        lose(sky, infos["a"], 3, replica)
        sky.settle(1.0)
    sky.settle(100.0)
    assert not copies(sky, infos["a"])
    assert {key for key, _ in sky.host.machine.take_gone()} == {infos["a"].key}
    for name in "bc":
        assert get(sky, infos[name], replicas) == (True, values[name])


@pytest.mark.brief()
@pytest.mark.parametrize("names", [("gossip",), ("periodic",)])
def test_copies_with_holes_in_different_places_are_one_block_that_can_be_read(world, value_of, names):
    """Reads mix copies chunk by chunk."""
    sky = world(eviction=policy(*names, sweep_s=10.0 if "periodic" in names else 1e6))
    value = value_of(40_000)
    info = put(sky, "a", value)
    for replica in range(2):
        here = place(sky, info, 3, replica)
        store = sky.sim.satellites[here].store
        its = sorted(index for index in store.shares[info.key] if index % SERVERS == 3)
        store._evict((info.key, its[replica]))
        store.limit_bytes = store.used_bytes
        sky.ask(Op.HAS, messages.pack_keys([info.key]), here)
    before = copies(sky, info)
    sky.settle(100.0)
    assert copies(sky, info) == before and get(sky, info) == (True, value)
    lose(sky, info, 3, 0)
    lose(sky, info, 3, 1)
    sky.settle(100.0)
    assert not copies(sky, info)


def test_under_pressure_gossip_leaves_blocks_that_can_be_read_and_none_that_cannot(world, value_of):
    """Memories of different fullness evict different blocks at different times."""
    sky = world(memory_bytes=48 * 1072, eviction=policy("gossip"))
    values, infos = {}, {}
    for number in range(30):
        values[number] = value_of(500 + 977 * number % 19_000, number)
        infos[number] = put(sky, str(number), values[number])
    sky.settle(1.0)
    readable = 0
    for number, info in infos.items():
        held = copies(sky, info)
        whole = {index for index, _ in held} == set(range(info.chunks))
        assert whole or not held, "dead bytes"
        if whole:
            readable += 1
            assert get(sky, info) == (True, values[number])
    assert readable >= 5 and sky.counted("chunks_evicted") > 0
    gone = {key for key, _ in sky.host.machine.take_gone()}
    assert gone == {info.key for info in infos.values() if not copies(sky, info)}


def test_what_was_evicted_for_want_of_room_is_not_pushed_back(world, value_of):
    sky = world(memory_bytes=24 * 1072, eviction=policy("gossip", sweep_s=5.0))
    for number in range(30):
        put(sky, str(number), value_of(9_000, number))
    sky.settle(1.0)
    evicted = sky.counted("chunks_evicted")
    assert evicted > 0
    sky.settle(60.0)
    assert sky.counted("chunks_evicted") == evicted


# --- mending ---


@pytest.mark.brief("satellite-2")
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("what", ["satellite", "plane", "two of a plane"])
def test_lost_copies_are_made_again(world, value_of, replicas, what):
    sky = world(eviction=policy(replicas=replicas, sweep_s=5.0))
    values = {name: value_of(40_000 + at, at) for at, name in enumerate("abcdef")}
    infos = {name: put(sky, name, value, replicas=replicas) for name, value in values.items()}
    dead = {
        "satellite": [SatelliteId(2, 9)],
        "plane": [SatelliteId(1, slot) for slot in range(19)],
        "two of a plane": [SatelliteId(2, 9), SatelliteId(2, 10)],
    }[what]
    for satellite in dead:
        sky.sim.kill(satellite)
    sky.settle(12.0)
    for satellite in dead:
        sky.sim.revive(satellite)
    assert any(copies(sky, info) != homes(sky, info, replicas=replicas) for info in infos.values())
    sky.settle(30.0)
    for name, info in infos.items():
        assert copies(sky, info) == homes(sky, info, replicas=replicas)
        assert get(sky, info, replicas) == (True, values[name])
    mended = sky.counted("copies_mended")
    sky.settle(60.0)
    assert sky.counted("copies_mended") == mended, "what is whole is asked for, not sent"


def test_three_planes_that_die_one_after_the_other_cost_nothing(world, value_of):
    """Without mending whatever had its copies on two of them is lost."""
    sky = world(eviction=policy(sweep_s=5.0))
    value = value_of(40_000)
    info = put(sky, "v", value)
    for plane in (1, 2, 3):
        sky.sim.kill_plane(plane)
        sky.sim.revive_plane(plane)
        sky.settle(30.0)
    assert get(sky, info) == (True, value) and copies(sky, info) == homes(sky, info)


def test_a_satellite_that_dies_before_the_box_moves_is_made_up_for(world, value_of):
    sky = world(eviction=policy(sweep_s=5.0))
    value = value_of(40_000)
    info = put(sky, "v", value)
    sky.sim.kill(SatelliteId(2, 10))
    sky.sim.revive(SatelliteId(2, 10))
    sky.advance(2, 1)
    sky.settle(40.0)
    assert copies(sky, info) == homes(sky, info, (2, 1)) and get(sky, info) == (True, value)


def test_no_room_no_copy_and_nothing_in_the_place_of_another_setting(world, value_of):
    sky = world(eviction=policy(sweep_s=5.0))
    info = put(sky, "v", value_of(40_000))
    poor, other = (sky.sim.satellites[place(sky, info, server, 0)].store for server in (3, 4))
    lose(sky, info, 3, 0)
    poor.limit_bytes = poor.used_bytes + 2000
    index = next(index for index in other.shares[info.key] if index % SERVERS == 4)
    ref, payload = other.shares[info.key][index]
    other.shares[info.key][index] = later = (ref[:52] + bytes(4) + ref[56:], payload)
    sky.settle(30.0)
    assert (3, 0) not in copies(sky, info)
    assert other.shares[info.key][index] == later


def test_nothing_is_mended_while_chunks_are_handed_over(world, value_of):
    """What is lacking may be on its way."""
    sky = world(eviction=policy(sweep_s=5.0))
    info = put(sky, "v", value_of(40_000))
    assert lose(sky, info, 3, 0) == 4
    for satellite in sky.sim.satellites.values():
        satellite.handover.stray((key_of("another"), 0), 30.0)
    sky.settle(25.0)
    assert sky.counted("copies_mended") == 0
    sky.settle(30.0)
    assert sky.counted("copies_mended") == 4


def test_one_sweep_sends_so_much_and_the_next_the_rest(world, value_of, monkeypatch):
    monkeypatch.setattr("skymemory.protocol.satellite.sweep.MOST_BYTES", 3 * 1072)
    sky = world(eviction=policy(sweep_s=5.0))
    infos = [put(sky, str(number), value_of(40_000, number)) for number in range(4)]
    sky.sim.kill(SatelliteId(2, 9))
    sky.sim.revive(SatelliteId(2, 9))
    sky.sim.settle(6.0)
    sent = [satellite.counters.get("copies_mended") for satellite in sky.sim.satellites.values()]
    assert max(sent) == 4, "a share of four chunks, by which the budget is spent"
    sky.settle(60.0)
    assert all(copies(sky, info) == homes(sky, info) for info in infos)


@pytest.mark.brief()
@given(
    st.lists(st.one_of(st.sampled_from([(1, 0), (-1, 0), (0, 1), (0, -1)]), st.integers(0, 94)), max_size=6),
    st.integers(2, 3),
)
@settings(max_examples=10, deadline=None)
def test_one_death_at_a_time_and_any_moves_lose_nothing(events, replicas):
    """While there is time to mend between two deaths."""
    sky = World(eviction=policy("periodic", "migration", replicas=replicas, sweep_s=5.0))
    value, moves = bytes(range(256)) * 40, (0, 0)
    info = put(sky, "v", value, 400, replicas)
    everyone = list(sky.torus.satellites())
    for event in events:
        if isinstance(event, int):
            sky.sim.kill(everyone[event])
            sky.sim.revive(everyone[event])
            sky.host.run(sky.begin_advance(*moves))
        else:
            moves = moves[0] + event[0], moves[1] + event[1]
            sky.advance(*moves)
        sky.settle(30.0)
    assert copies(sky, info) == homes(sky, info, moves, replicas)
    assert get(sky, info, replicas) == (True, value)
    figures = {here: machine.housekeeping() for here, machine in sky.sim.satellites.items()}
    assert ledgers.open_books(figures) == {}


# --- the wire of it ---


checks = st.builds(
    lambda key, setting, servers, server, more, length: Check(
        key, setting, servers, server % servers, server % servers + 1 + more, length
    ),
    st.binary(min_size=32, max_size=32),
    st.binary(min_size=12, max_size=12),
    st.integers(1, 65_535),
    st.integers(0, 65_534),
    st.integers(0, 1 << 30),
    st.integers(0, 65_375),
)


@given(st.lists(checks, min_size=1, max_size=MAX_CHECKS_PER_PACKET))
@settings(max_examples=30, deadline=None)
def test_checks_round_trip(them):
    assert unpack_checks(pack_checks(them)) == them


def test_bodies_that_are_not_what_they_say_are_refused():
    sound = pack_checks([Check(bytes(32), bytes(12), 10, 9, 10, 6144)])
    for body in (b"", sound[:-1], sound + b"x", b"\0\0\0\0", sound[:50] + b"\0\0" + sound[52:]):
        with pytest.raises(MalformedPacket):
            unpack_checks(body)
    with pytest.raises(InvalidInput):
        pack_checks([])
    answer = pack_found([CheckResult.WHOLE, CheckResult.NO_ROOM])
    assert unpack_found(answer) == [CheckResult.WHOLE, CheckResult.NO_ROOM]
    for body in (b"", answer[:-1], answer[:-1] + b"\3"):
        with pytest.raises(MalformedPacket):
            unpack_found(body)
