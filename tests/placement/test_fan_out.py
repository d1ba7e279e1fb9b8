"""How many satellites a value is worth, beside a search through all numbers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skymemory.constellation.presets import preset_named
from skymemory.constellation.torus import SatelliteId
from skymemory.placement.fan_out import FanOut, round_trips_of
from skymemory.placement.layout import STRATEGIES, Strategy
from skymemory.placement.locate import Placement

TESTBED = preset_named("testbed-19x5")


def placement(servers: int, strategy: Strategy = "rotation_hop") -> Placement:
    return Placement.of(strategy, servers, TESTBED.torus, TESTBED.centre)


def hops_s(satellite: SatelliteId) -> float:
    """A round trip of 4 ms overhead, and 2 ms for each hop."""
    slots, planes = TESTBED.torus.delta(TESTBED.centre, satellite)
    return 0.004 + 0.002 * (abs(slots) + abs(planes))


def fan_out(most: int = 10, chunk_s: float = 40e-6, memory_bytes: int = 0, replicas: int = 1) -> FanOut:
    return FanOut(round_trips_of(placement, most, (0, 0), hops_s, replicas), chunk_s, memory_bytes, replicas)


def test_a_small_value_is_on_the_nearest_satellite_alone_and_a_large_one_on_many() -> None:
    chosen = [fan_out().servers(chunks, 6144 * chunks, {}) for chunks in (1, 11, 85, 480, 2700)]
    assert chosen[0] == chosen[1] == 1
    assert chosen == sorted(chosen)
    assert chosen[-1] > 4


def test_the_fullest_server_decides_and_each_costs_a_request() -> None:
    assert fan_out(chunk_s=1e-3).seconds(4, 9) == pytest.approx(0.008 + 3 * 1e-3 + 4 * 25e-6)


def test_where_links_transmit_at_once_one_satellite_is_best_for_any_size() -> None:
    chooser = fan_out(chunk_s=0.0)
    assert {chooser.servers(chunks, 6144 * chunks, {}) for chunks in (1, 11, 85, 170, 480)} == {1}
    # But for what one satellite takes at once.
    assert [chooser.servers(480, size_bytes << 20, {}) for size_bytes in (4, 8, 12, 20, 36, 64)] == [1, 2, 4, 6, 9, 10]


def test_only_full_boxes_and_the_largest_number_are_chosen() -> None:
    assert list(fan_out(10).round_trips_s) == [1, 2, 4, 6, 9, 10]
    assert list(fan_out(1).round_trips_s) == [1]


@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_copies_of_a_chunk_are_on_as_many_planes_as_in_the_largest_box(strategy: Strategy, replicas: int) -> None:
    def planes(servers: int) -> int:
        its = placement(servers, strategy)
        return min(
            len({its.locate(server, replica=replica).plane for replica in range(replicas)}) for server in range(servers)
        )

    found = round_trips_of(lambda servers: placement(servers, strategy), 10, (0, 0), hops_s, replicas)
    assert max(found) == 10
    for servers in found:
        its = placement(servers, strategy)
        for server in range(servers):
            assert len({its.locate(server, replica=replica) for replica in range(replicas)}) == replicas
        assert planes(servers) >= planes(10)
    rows = {servers: placement(servers, strategy).box.height for servers in found}
    assert min(rows.values()) >= (1 if replicas == 1 else min(replicas + 1, rows[10]))


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 95),
    st.floats(0, 1e-3),
    st.lists(st.integers(1, 5000), min_size=1, max_size=30),
    st.integers(0, 20_000_000),
)
def test_the_fastest_box_with_room_is_chosen(most: int, chunk_s: float, sizes: list[int], memory_bytes: int) -> None:
    chooser, held = fan_out(most, chunk_s, memory_bytes), dict[int, float]()
    for chunks in sizes:
        value_bytes = chunks * 6144
        servers = chooser.servers(chunks, value_bytes, held)

        def has_room(one: int, more: int = value_bytes) -> bool:
            its = {number: all_of_it / number for number, all_of_it in held.items()}
            nearer = more / one + sum(share for number, share in its.items() if number <= one)
            left = memory_bytes - sum(share for number, share in its.items() if number > one)
            return nearer <= memory_bytes / 5 and (nearer <= left or nearer <= memory_bytes / 32)

        fits = [one for one in chooser.round_trips_s if one == most or value_bytes <= one << 22]
        allowed = [one for one in fits if memory_bytes == 0 or one == most or has_room(one)]
        assert servers in allowed
        assert chooser.seconds(servers, chunks) == min(chooser.seconds(one, chunks) for one in allowed)
        held[servers] = held.get(servers, 0.0) + value_bytes
    if memory_bytes and most > 1 and 1 in held:
        assert held[1] <= memory_bytes / 5


def test_copies_count_towards_the_memory() -> None:
    once, twice = fan_out(memory_bytes=5 << 20), fan_out(memory_bytes=5 << 20, replicas=2)
    assert once.servers(1, 1 << 19, {1: 1 << 19}) == 1
    assert once.servers(1, 1 << 19, {1: (1 << 19) + 1}) == 2
    smallest = min(twice.round_trips_s)
    room_bytes = smallest << 20
    assert twice.servers(1, room_bytes // 2, {}) == smallest
    assert twice.servers(1, room_bytes // 2 + 2, {}) > smallest


def test_values_on_all_satellites_leave_small_ones_a_little_room() -> None:
    chooser = fan_out(memory_bytes=1 << 20)
    assert chooser.servers(1, 6144, {10: 10 << 20}) == 1
    assert chooser.servers(1, 6144, {1: 1 << 15, 10: 10 << 20}) == 10
    assert chooser.servers(1, 6144, {1: 1 << 15, 10: 8 << 20}) == 1
