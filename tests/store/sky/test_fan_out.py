"""Values on as many satellites as their sizes are worth: what they cost to read, wherever the box is, and how memory is
shared. In virtual time, with the delays of the orbits."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from tests.contract.store_contract import key, value

from skymemory.constellation.visibility import plane_move_period_s, slot_move_period_s
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.store.sky.store import ConstellationStore
from skymemory.testbed.connect import shell_of
from skymemory.testbed.plan import ConstellationPlan, make_plan
from skymemory.testbed.virtual import VirtualConstellation

SMALL_BYTES = 64 << 10


def read_s(store: ConstellationStore, one: bytes, wanted: bytes) -> float:
    began_s = store._driver.now_s()
    (got,) = store.get_many([one])
    assert got is not None and bytes(got) == wanted
    return store._driver.now_s() - began_s


def servers_of(store: ConstellationStore, one: bytes) -> int:
    return store._catalog.known([one])[one].servers


def held_bytes(virtual: VirtualConstellation) -> list[int]:
    """Bytes in the memories of the satellites, the fullest first."""
    return sorted((machine.store.used_bytes for machine in virtual.simulated.satellites.values()), reverse=True)


@pytest.mark.brief("testbed-19x5")
@pytest.mark.parametrize("preset", ["testbed-19x5", "starlink-a"])
def test_a_small_value_costs_a_round_trip_to_one_of_the_two_nearest_satellites(preset: str) -> None:
    """At times spread over a rotation: until every column and row of the box has moved once around its ring."""
    plan = make_plan(preset, time_scale=1.0)
    virtual = VirtualConstellation(plan)
    store = virtual.store(index=SharedIndex())
    small = value(1, SMALL_BYTES)
    assert store.put_many([(key(1), small)]) == [True]
    shell = shell_of(plan)
    rotation_s = max(slot_move_period_s(shell) * plan.slots_per_plane, plane_move_period_s(shell) * plan.planes)
    sight, beyond_s = virtual._sight, []
    assert sight is not None
    for _ in range(40):
        virtual.simulated.settle(virtual.simulated.now_s + rotation_s / 40 + 1.7)
        now_s = virtual.simulated.now_s
        centre, sky_s = virtual.simulated.sky.centre_at(virtual.clock.moves(now_s)), virtual.clock.sky_s(now_s)
        near = sorted(2 * sight.one_way_s(one, centre, sky_s) for one in virtual.simulated.satellites)[:2]
        beyond_s.append(read_s(store, key(1), small) - near[1])
    assert statistics.median(beyond_s) <= 0.001
    store.close()


def plan_of(memory_bytes: int, servers: int | None = None) -> ConstellationPlan:
    return make_plan(memory_per_satellite_bytes=memory_bytes, servers=servers)


def test_a_second_process_reads_it_and_so_does_one_without_the_index(tmp_path: Path) -> None:
    virtual = VirtualConstellation(plan_of(8 << 20))
    store = virtual.store(index=SharedIndex(tmp_path / "index", born=True))
    items = [(key(number), value(number, size)) for number, size in enumerate((10, 6144, SMALL_BYTES, 3_000_000))]
    assert all(store.put_many(items))
    keys = [one for one, _ in items]
    assert [servers_of(store, one) for one in keys] == [1, 1, 1, 9]
    for index in (SharedIndex(tmp_path / "index"), None):
        other = virtual.store(index=index, ground=2)
        assert other.prefix(keys) == 4
        assert [bytes(one or b"") for one in other.get_many(keys)] == [its for _, its in items]
        other.close()
    assert store.delete(keys) == [True] * 4
    assert sum(held_bytes(virtual)) == 0
    store.close()


def kept(virtual: VirtualConstellation, count: int, size: int) -> tuple[list[int], int, ConstellationStore]:
    """Of so many values: the number of satellites of each, and how many are there in the end."""
    store, chosen = virtual.store(index=SharedIndex()), []
    for number in range(count):
        assert store.put_many([(key(number), value(number, size))]) == [True]
        chosen.append(servers_of(store, key(number)))
    found = store.get_many([key(number) for number in range(count)])
    return chosen, sum(one is not None for one in found), store


@pytest.mark.brief()
def test_small_values_fill_a_fifth_of_the_nearest_satellite_and_no_memory_is_wasted() -> None:
    memory_bytes, size = 1 << 20, 60_000
    for count in (150, 400):
        chosen, there, store = kept(VirtualConstellation(plan_of(memory_bytes)), count, size)
        _, there_on_ten, other = kept(VirtualConstellation(plan_of(memory_bytes, 10)), count, size)
        assert chosen[:3] == [1] * 3
        assert max(chosen) == 10
        assert there >= 0.94 * there_on_ten
        # Room again: the next small value is near.
        assert None not in store.delete([key(number) for number in range(count)])
        assert store.put_many([(key(count), value(count, size))]) == [True]
        assert servers_of(store, key(count)) == 1
        store.close()
        other.close()


def test_all_values_of_one_call_count() -> None:
    memory_bytes = 1 << 20
    virtual = VirtualConstellation(plan_of(memory_bytes))
    store = virtual.store(index=SharedIndex())
    assert all(store.put_many([(key(number), value(number, SMALL_BYTES)) for number in range(40)]))
    held: dict[int, int] = {}
    for number in range(40):
        servers = servers_of(store, key(number))
        held[servers] = held.get(servers, 0) + SMALL_BYTES
    assert held[1] <= memory_bytes / 5
    assert sum(its / servers for servers, its in held.items() if servers <= 4) <= memory_bytes / 5
    store.close()


def test_with_a_number_of_servers_every_value_has_it_and_without_an_index_too() -> None:
    for plan, index in ((plan_of(8 << 20, 10), SharedIndex()), (plan_of(8 << 20), None)):
        virtual = VirtualConstellation(plan)
        store = virtual.store(index=index)
        assert store.put_many([(key(1), value(1, SMALL_BYTES))]) == [True]
        store.prefix([key(1)])
        assert servers_of(store, key(1)) == 10
        store.close()


def test_a_value_set_again_on_fewer_satellites_leaves_nothing_behind() -> None:
    virtual = VirtualConstellation(plan_of(8 << 20))
    store = virtual.store(index=SharedIndex())
    for size in (3_000_000, SMALL_BYTES, 2_000_000, 100):
        assert store.put_many([(key(1), value(size, size))]) == [True]
        assert read_s(store, key(1), value(size, size)) > 0
    assert store.delete([key(1)]) == [True]
    assert sum(held_bytes(virtual)) == 0
    store.close()
