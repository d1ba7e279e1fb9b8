"""What the contract does not ask of every tier: sharing, probing, holes, rotation, dead satellites, limits."""

from __future__ import annotations

import os
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.store.conftest import cut_off, simulated, store_over, udp_store

from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput, ValueTooLarge
from skymemory.protocol.clock import STRATEGY_CODES
from skymemory.protocol.messages import pack_moves
from skymemory.protocol.wire import Op
from skymemory.store.base import ABANDONED_S, LEASE_S, Presence
from skymemory.store.named_values import get_named, named_key, put_named
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.store.sky.store import ConstellationStore
from skymemory.transport.simulated import SimulatedConstellation

KEYS = [bytes([number]) * 32 for number in range(1, 21)]
VALUES = [os.urandom(1000 * number + 7) for number in range(1, 21)]
ITEMS = list(zip(KEYS, VALUES, strict=True))


def same(got: list[memoryview | None], wanted: list[bytes]) -> bool:
    return [None if value is None else bytes(value) for value in got] == wanted


def rotate(constellation: SimulatedConstellation, slot_moves: int, plane_moves: int = 0) -> None:
    operator = constellation.connect(constellation_config(99))
    asked = [
        operator.machine.ask(Op.ADVANCE, pack_moves(slot_moves, plane_moves), satellite, constellation.now_s)
        for satellite in constellation.satellites
    ]
    operator.run(asked)


def constellation_config(ground: int):  # type: ignore[no-untyped-def]
    from skymemory.protocol.client.machine import ClientConfig

    return ClientConfig(ground)


def test_two_processes_share_the_index_file(tmp_path: Path) -> None:
    sky = simulated()
    writer = store_over(sky, 1, SharedIndex(tmp_path / "index"))
    reader = store_over(sky, 2, SharedIndex(tmp_path / "index"))
    assert reader.prefix(KEYS) == 0
    writer.prefix(KEYS)
    assert all(writer.put_many(ITEMS))
    assert reader.prefix(KEYS) == len(KEYS)
    assert same(reader.get_many(KEYS), VALUES)
    assert writer.delete(KEYS[5:6]) == [True]
    assert reader.prefix(KEYS) == 5
    assert reader.lookup(KEYS[4:7]) == [Presence.HIT, Presence.MISS, Presence.HIT]


def test_values_of_a_store_that_is_never_completed_are_let_go() -> None:
    sky = simulated()
    store = store_over(sky, 1, SharedIndex())
    value = np.zeros(5000, dtype=np.uint8)
    alive = weakref.ref(value)
    store.prepare_store([(KEYS[0], memoryview(value))])
    del value
    sky.settle(sky.now_s + LEASE_S + ABANDONED_S + 1)
    assert store.put_many(ITEMS[1:2]) == [True]
    assert alive() is None


@pytest.mark.parametrize("strategy", ["rotation", "hop", "rotation_hop", "cost", "baseline"])
@pytest.mark.parametrize("moves", [(0, 0), (1, 0), (-3, 1), (7, -2)])
def test_what_one_stores_another_finds_without_an_index(strategy: str, moves: tuple[int, int]) -> None:
    if strategy == "hop" and moves != (0, 0):
        moves = (0, 0)  # hop stays where it was set; a host on board travels with it and sees no moves
    sky = simulated()
    assert all(store_over(sky, 1, SharedIndex(), strategy=strategy).put_many(ITEMS))
    if moves != (0, 0):
        rotate(sky, *moves)
        sky.settle(sky.now_s + 5)
    finder = store_over(sky, 2, strategy=strategy)
    finder.synchronise()
    assert finder.prefix(KEYS) == len(KEYS)
    assert same(finder.get_many(KEYS), VALUES)
    assert finder.prefix([b"?" * 32, *KEYS]) == 0


def test_a_value_with_a_hole_is_a_miss_and_its_remains_are_evicted() -> None:
    sky = simulated()
    store = store_over(sky, index=SharedIndex())
    store.put_many(ITEMS)
    sky.settle(sky.now_s + 5.0)  # what has just been stored is not forgotten for a loss that was proved before
    holder = next(machine for machine in sky.satellites.values() if machine.store.presence(KEYS[19]) is not None)
    held = holder.store.presence(KEYS[19])
    assert held is not None and holder.store.remove((KEYS[19], held.index))
    assert store.get_many(KEYS[18:]) == [VALUES[18], None]
    assert store.stats()["values_evicted_lazily"] == 1
    assert all(machine.store.presence(KEYS[19]) is None for machine in sky.satellites.values())
    assert store.lookup([KEYS[19]]) == [Presence.MISS]


def test_a_killed_satellite_is_a_miss_within_a_second_and_at_once_after_that() -> None:
    sky = simulated()
    store = store_over(sky, index=SharedIndex())
    store.put_many(ITEMS)
    sky.kill(SatelliteId(2, 9))
    began_s = sky.now_s
    assert store.get_many([KEYS[19]]) == [None]
    assert sky.now_s - began_s < 1.0
    began_s = sky.now_s
    assert store.get_many([KEYS[18]]) == [None]
    assert sky.now_s == began_s


def test_readers_find_everything_before_during_and_after_a_rotation() -> None:
    sky = simulated(one_way_s=0.01)
    store = store_over(sky, index=SharedIndex())
    store.put_many(ITEMS)
    operator = sky.connect(constellation_config(99))
    for turn in range(1, 12):
        for satellite in sky.satellites:
            operator.machine.ask(Op.ADVANCE, pack_moves(turn, 0), satellite, sky.now_s)
        for _ in range(4):
            assert same(store.get_many(KEYS), VALUES)
    sky.settle(sky.now_s + 5)
    assert sum(len(machine.store) for machine in sky.satellites.values()) == sum(
        -(-len(value) // 6144) for value in VALUES
    )


def test_a_value_larger_than_the_constellation_is_refused_with_the_limit() -> None:
    store = store_over(simulated(), memory_per_satellite_bytes=1 << 20)
    with pytest.raises(ValueTooLarge, match=r"at most .* fit"):
        store.prepare_store([(KEYS[0], bytes(11 << 20))])


def test_more_servers_than_satellites_and_unknown_strategies_are_refused() -> None:
    with pytest.raises(InvalidInput, match="95"):
        store_over(simulated(), servers=96)
    with pytest.raises(InvalidInput, match="rotation_hop"):
        store_over(simulated(), strategy="nearest")


def test_named_values_are_listed_deleted_and_never_confused() -> None:
    sky = simulated()
    store = store_over(sky, index=SharedIndex())
    assert put_named(store, "a/long name.bin", b"x" * 50_000).ok
    assert put_named(store, "empty", b"").ok
    store.put_many(ITEMS[:2])
    finder: ConstellationStore = store_over(sky, 2)
    assert [(v.name, v.size_bytes) for v in finder.names()] == [("a/long name.bin", 50_000), ("empty", 0)]
    found = get_named(finder, "a/long name.bin")
    assert found.value == b"x" * 50_000
    missing = get_named(finder, "nothing")
    assert missing.value is None and missing.reason == "absent"


def test_a_torn_index_tail_is_cut_off_by_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "index"
    sky = simulated()
    store_over(sky, 1, SharedIndex(path)).put_many(ITEMS[:3])
    with path.open("ab") as file:
        file.write(b"\x5b\x01\x01\x00torn")
    reader = store_over(sky, 2, SharedIndex(path))
    assert reader.lookup(KEYS[:4]) == [Presence.HIT] * 3 + [Presence.MISS]
    reader.put_many(ITEMS[3:5])
    assert store_over(sky, 3, SharedIndex(path)).lookup(KEYS[:6]) == [Presence.HIT] * 5 + [Presence.MISS]


@pytest.mark.parametrize("chunk_bytes", [500, 1000, 3000])
def test_a_writer_with_chunks_of_another_size_is_read_by_the_index(chunk_bytes: int) -> None:
    """The index knows how many there are: where that is not our number, they are another writer's, of one length."""
    sky, index = simulated(), SharedIndex()
    values = [os.urandom(chunk_bytes * number) for number in range(3, 10)]
    items = list(zip(KEYS, values, strict=False))
    assert all(store_over(sky, 1, index, chunk_bytes=chunk_bytes).put_many(items))
    assert same(store_over(sky, 2, index).get_many(KEYS[: len(items)]), values)


def test_an_entry_is_switched_only_while_it_is_what_was_copied() -> None:
    store = store_over(simulated(), index=SharedIndex())
    store.put_many(ITEMS[:1])
    catalog = store._catalog
    old = catalog.known(KEYS[:1])[KEYS[0]]
    store.put_many([(KEYS[0], VALUES[1])])
    latest = catalog.known(KEYS[:1])
    assert not catalog.switch(old, replace(old, set_moves=(9, 9)), 0.0) and catalog.known(KEYS[:1]) == latest
    assert catalog.switch(latest[KEYS[0]], replace(latest[KEYS[0]], set_moves=(9, 9)), 0.0)
    assert catalog.known(KEYS[:1])[KEYS[0]].set_moves == (9, 9)


def test_a_value_under_another_name_is_foreign() -> None:
    store = store_over(simulated(), index=SharedIndex())
    put_named(store, "mine", b"data")
    stored = store.get_many([named_key("mine")])[0]
    assert stored is not None
    store.put_many([(named_key("yours"), bytes(stored))])
    assert get_named(store, "mine").value == b"data"
    assert get_named(store, "yours").value is None and "foreign" in get_named(store, "yours").reason


def test_buffers_are_used_again_only_after_release() -> None:
    with udp_store(SharedIndex()) as store:
        store.put_many(ITEMS)
        first = store.prepare_load(KEYS[:1])
        kept = store.complete_load(first)[0]
        assert store.get_many(KEYS[1:2]) == [VALUES[1]] and kept == VALUES[0]
        store.release(first)
        second = store.prepare_load(KEYS[:1])
        assert store.complete_load(second) == [VALUES[0]]


def test_a_store_that_is_never_completed_is_pending_until_its_lease_ends() -> None:
    sky = simulated()
    store = store_over(sky, index=SharedIndex())
    store.prepare_store(ITEMS[:1])
    second = store.prepare_store(ITEMS[:2])
    assert store.complete_store(second) == [True, True]
    assert store.lookup(KEYS[:2]) == [Presence.PENDING, Presence.HIT]
    sky.settle(sky.now_s + LEASE_S)
    assert store.lookup(KEYS[:2]) == [Presence.HIT, Presence.HIT]


def test_an_interrupted_read_lets_go_of_its_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with udp_store(SharedIndex()) as store:
        store.put_many(ITEMS)
        client = store._driver
        with monkeypatch.context() as patch:
            patch.setattr(client, "_receive", interrupt)
            with pytest.raises(KeyboardInterrupt):
                store.get_many(KEYS)
        assert not client.machine.awaited, "no place for what may still come"
        assert same(store.get_many(KEYS), VALUES)


@pytest.mark.parametrize("with_index", [True, False])
def test_a_deletion_that_no_satellite_heard_is_none_and_can_be_requested_again(with_index: bool) -> None:
    sky = simulated()
    store = store_over(sky, 1, SharedIndex() if with_index else None)
    assert all(store.put_many(ITEMS[:3]))
    with cut_off(sky):
        assert store.delete(KEYS[:2]) == [None, None]
        assert store.delete(KEYS[10:11]) == [False if with_index else None], "a complete index knows what is absent"
    assert same(store.get_many(KEYS[:3]), VALUES[:3])
    assert store.delete(KEYS[:3]) == [True] * 3 and store.delete(KEYS[:1]) == [False]
    assert store.lookup(KEYS[:3]) == [Presence.MISS] * 3 and not any(len(one.store) for one in sky.satellites.values())


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_deletion_is_confirmed_as_soon_as_the_value_is_unreadable(replicas: int) -> None:
    """One satellite of its ten is dead: the shares of the other nine are gone by their own word, with all copies."""
    sky = simulated()
    store = store_over(sky, 1, SharedIndex(), replicas=replicas, chunk_bytes=500)
    key, value = bytes(32), os.urandom(20_000)
    assert store.put_many([(key, value)]) == [True]
    holder = next(here for here, one in sky.satellites.items() if key in one.store.shares)
    sky.kill(holder)
    assert store.delete([key]) == [True] and store.lookup([key]) == [Presence.MISS]
    left = {here for here, one in sky.satellites.items() if key in one.store.shares}
    assert left <= {holder}


def test_a_value_whose_only_satellite_is_silent_is_not_said_to_be_deleted() -> None:
    sky = simulated()
    store = store_over(sky, 1, SharedIndex())
    key = bytes(32)
    assert store.put_many([(key, b"of one chunk")]) == [True]
    holder = next(here for here, one in sky.satellites.items() if key in one.store.shares)
    sky.kill(holder)
    assert store.delete([key]) == [None]


def test_calls_in_an_outage_leave_nothing_behind() -> None:
    sky = simulated()
    store = store_over(sky, 1, SharedIndex())
    driver, machine = store._driver, store._driver.machine
    assert all(store.put_many(ITEMS))

    def kept() -> list[int]:
        unclaimed = driver._unclaimed  # type: ignore[attr-defined]
        return [len(unclaimed), len(machine._events), len(machine._operations), len(machine._in_flight.by_id)]

    before = kept()
    with cut_off(sky):
        store.get_many(KEYS)
        for _ in range(50):
            store.touch(KEYS)
            store.pin(KEYS[:2], 10.0)
            store.put_many(ITEMS[:1])
    assert kept() == before and not machine._probe_operations
    store.touch(KEYS)
    assert kept() == before and same(store.get_many(KEYS), VALUES)


@pytest.mark.parametrize(("writes", "reads"), [(6144, 6000), (6000, 6144), (6000, 5900)])
def test_chunks_of_another_size_than_ours_are_read_where_there_are_as_many(
    writes: int, reads: int, tmp_path: Path
) -> None:
    """17,000 bytes are three chunks of either size; the index says of which."""
    sky, value = simulated(), bytes(range(250)) * 68
    writer = store_over(sky, 1, SharedIndex(tmp_path / "index"), chunk_bytes=writes)
    reader = store_over(sky, 2, SharedIndex(tmp_path / "index"), chunk_bytes=reads)
    assert writer.put_many([(KEYS[0], value)]) == [True]
    for _ in range(2):
        assert reader.get_many(KEYS[:1]) == [value]


def test_an_entry_of_an_earlier_release_that_means_another_size_is_corrected_once(tmp_path: Path) -> None:
    sky, value = simulated(), bytes(range(250)) * 68
    writer = store_over(sky, 1, SharedIndex(tmp_path / "index"), chunk_bytes=6000)
    assert writer.put_many([(KEYS[0], value)]) == [True]
    index = SharedIndex(tmp_path / "index")
    assert index.replace(KEYS[0], lambda entry: True, lambda entry: replace(entry, chunk_bytes=0))
    assert store_over(sky, 2, index).get_many(KEYS[:1]) == [None]
    for ground in (2, 3):
        assert store_over(sky, ground, SharedIndex(tmp_path / "index")).get_many(KEYS[:1]) == [value]


@pytest.mark.parametrize("steps", [(1, 0), (0, 1)])
def test_of_two_reports_of_a_value_the_later_setting_is_believed_in_any_order(steps: tuple[int, int]) -> None:
    """One satellite missed what was stored again, a copy of which is elsewhere, and says what it had before."""
    sky = simulated()
    assert store_over(sky, 1, replicas=2).put_many([(KEYS[0], bytes(20 * 6144))]) == [True]
    rotate(sky, *steps)
    sky.settle(sky.now_s + 5.0)
    writer = store_over(sky, 2, replicas=2)
    writer.synchronise()
    moves = writer._driver.machine.moves(sky.now_s)
    behind, up_to_date = (sky.sky.servers_at(STRATEGY_CODES["rotation_hop"], 10, moves, moves)[at] for at in (3, 4))
    sky.cut(("ground", 2), behind)
    assert writer.put_many([(KEYS[0], bytes(10 * 6144))]) == [True]
    sky.mend(("ground", 2), behind)
    prober = store_over(sky, 3, replicas=2)._catalog._prober
    for asked in ([behind, up_to_date], [up_to_date, behind]):
        known, certain = prober._ask(asked, KEYS[:1])
        assert certain and known[KEYS[0]].set_moves == moves
