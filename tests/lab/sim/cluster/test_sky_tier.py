"""The sky behind a simulated cluster: against the constellation's own locator, and by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skymemory.constellation.presets import preset_named
from skymemory.errors import InvalidInput, UnknownPreset
from skymemory.placement.locate import Placement, server_moves
from skymemory.testbed.connect import expected_round_trip_s
from skymemory_lab.sim.cluster.pool import NetworkDirection
from skymemory_lab.sim.cluster.setup import SkySetup
from skymemory_lab.sim.cluster.sky import SkyGeometry, SkyTier

WIDE = 1e18
BLOCK = 1000.0


@pytest.mark.parametrize("access", ["hybrid", "gateway", "ideal"])
def test_round_trips_are_those_that_clients_of_the_real_plan_expect(access: str) -> None:
    """81 servers fill their box, so the farthest of the box is the farthest server, whenever it was set."""
    geometry = SkyGeometry(SkySetup(access=access, geometry_s=10.0))
    seen = set()
    crossing_s = 202.0  # the first move is at 201.9 s, within a step
    for now_s in [0.0, crossing_s, *(170.0 * at + 3.3 for at in range(2, 21))]:
        expected_s = expected_round_trip_s(geometry.plan, access, now_s)
        assert geometry.round_trip_s((0, 0), now_s) == pytest.approx(expected_s)
        seen.add(round(expected_s, 6))
    assert len(seen) > 5 or access == "ideal"  # to whom is out of sight, the paper's beam: always as long
    assert 0.005 < min(seen) <= max(seen) < 0.2


def test_who_holds_what_is_followed_through_every_handover() -> None:
    """Ten servers leave two cells of their box empty: where they are in it depends on when they were set."""
    geometry = SkyGeometry(SkySetup(servers=10))
    preset = preset_named("starlink-a")
    placement = Placement.for_preset(preset, "rotation_hop", 10)
    holders, moves, moved = list(geometry.servers_at((0, 0), 0.0)), (0, 0), 0
    for now_s in range(0, 3600, 30):
        now_moves = geometry.moves(now_s)
        assert now_moves == preset.moves_at(now_s)
        for handover in server_moves(placement, (0, 0), moves, now_moves):
            assert holders[handover.server] == handover.source
            holders[handover.server] = handover.target
            moved += 1
        moves = now_moves
        assert geometry.servers_at((0, 0), now_s) == tuple(holders)
    assert moves == (13, 3)
    assert moved > 30
    assert set(holders) != set(geometry.servers_at(moves, 3590.0))


def test_a_box_that_is_no_orbit_and_one_on_board() -> None:
    paper = SkyGeometry(SkySetup(preset="paper-15x15", access="ideal", servers=9))
    assert paper.round_trip_s((0, 0), 0.0) == pytest.approx(paper.round_trip_s((0, 0), 100.0))
    aboard = SkyGeometry(SkySetup(access="onboard", strategy="hop", servers=5))
    assert (aboard.moves(3000.0), aboard.round_trip_s((0, 0), 0.0)) == ((0, 0), pytest.approx(2 * 6.571e-3, rel=1e-3))


def test_nothing_is_read_or_written_while_no_satellite_is_in_reach() -> None:
    tier = SkyTier(SkySetup(bytes_per_s=BLOCK, servers=9), BLOCK)
    tier.write((1, 2), NetworkDirection("out", WIDE), 0.0)
    tier.geometry.round_trip_s = lambda set_moves, now_s: math.inf  # type: ignore[method-assign]
    assert tier.offer((1, 2), 100.0) is None
    assert tier.read((1, 2), 0, 2, NetworkDirection("in", WIDE), 100.0) == (0, 100.0)
    tier.write((1, 2, 3), NetworkDirection("out", WIDE), 100.0)
    assert (tier.leading((1, 2, 3), 200.0), tier.figures()["sky_unwritten_blocks"]) == (2, 1)


def test_a_block_can_be_read_when_it_has_gone_up_and_comes_down_at_the_links_rate() -> None:
    tier = SkyTier(SkySetup(bytes_per_s=BLOCK / 4, servers=9, most_queued_s=100.0, packing=0.5), BLOCK)
    out, into = NetworkDirection("out", WIDE), NetworkDirection("in", WIDE)
    tier.write((1, 2, 3), out, 0.0)  # half a block each: two seconds
    light_s = tier.geometry.round_trip_s((0, 0), 0.0)
    assert 0 < light_s < 0.1
    assert (tier.leading((1, 2, 3), 6.0), tier.leading((1, 2, 3), 6.0 + light_s)) == (0, 3)
    offer = tier.offer((1, 2, 3, 4), 10.0)
    assert offer is not None
    assert (offer.tier, offer.blocks, offer.medium.bytes_per_s) == ("sky", 3, BLOCK / 2)
    light_s = tier.geometry.round_trip_s((0, 0), 10.0)
    assert offer.medium.latency_s == pytest.approx(light_s)
    assert tier.read((1, 2, 3, 4), 1, 4, into, 10.0) == (2, pytest.approx(14.0 + light_s))
    behind = tier.offer((1, 2), 11.0)
    assert behind is not None
    assert behind.medium.latency_s == pytest.approx(3.0 + tier.geometry.round_trip_s((0, 0), 11.0))
    assert (out.carried_bytes, into.carried_bytes) == (1500.0, 1000.0)


def test_what_the_way_up_has_no_time_for_is_left_out_from_the_end() -> None:
    tier = SkyTier(SkySetup(bytes_per_s=BLOCK, servers=9, most_queued_s=2.0), BLOCK)
    out = NetworkDirection("out", WIDE)
    tier.write((1, 2, 3, 4, 5), out, 0.0)
    assert (len(tier), tier.up.free_s, tier.figures()["sky_unwritten_blocks"]) == (3, 3.0, 2)
    tier.write((1, 2, 3, 4, 5), out, 0.5)
    assert len(tier) == 3
    tier.write((1, 2, 3, 4, 5), out, 1.0)
    assert (len(tier), tier.leading((1, 2, 3, 4, 5), 99.0)) == (4, 4)


def test_a_full_sky_forgets_the_deepest_of_what_was_used_longest_ago() -> None:
    tier = SkyTier(SkySetup(servers=9, memory_bytes_per_satellite=4 * BLOCK / 9, most_queued_s=1e9), BLOCK)
    out = NetworkDirection("out", WIDE)
    assert tier.capacity_blocks == 4
    tier.write((1, 2, 3), out, 0.0)
    tier.write((1, 10, 11), out, 100.0)
    assert (tier.leading((1, 2, 3), 999.0), tier.leading((1, 10, 11), 999.0), len(tier)) == (2, 3, 4)
    tier.write((20, 21, 22, 23, 24), out, 1000.0)
    assert (tier.leading((20, 21, 22, 23, 24), 1999.0), tier.leading((1,), 1999.0), len(tier)) == (4, 0, 4)


def test_handovers_are_counted_and_limit_what_a_box_can_hold() -> None:
    setup = SkySetup(servers=9, isl_bytes_per_s=BLOCK / 9, most_queued_s=1e9)
    tier = SkyTier(setup, BLOCK)
    period_s = tier.geometry.slot_period_s
    assert tier.capacity_blocks == int(9 * period_s * setup.isl_bytes_per_s // BLOCK)
    tier.write((1, 2), NetworkDirection("out", WIDE), 0.0)
    moves, now_s = (0, 0), 0.0
    while moves == (0, 0):
        now_s += 5.0
        moves = tier.geometry.moves(now_s)
    tier.fly(now_s)
    figures = tier.figures()
    assert moves in ((1, 0), (0, 1))  # a column or row of three servers, each with a ninth of both blocks
    assert figures["sky_handover_bytes"] == pytest.approx(3 * 2 * BLOCK / 9)
    assert figures["sky_longest_handover_s"] == pytest.approx(2.0)
    assert figures["sky_box_moves"] == 1
    stays = SkySetup(servers=9, strategy="hop", isl_bytes_per_s=1e-9)
    assert SkyTier(stays, BLOCK).capacity_blocks == int(9 * 256e9 // BLOCK)


def test_a_sky_that_cannot_be() -> None:
    with pytest.raises(InvalidInput, match="are smaller than a block"):
        SkyTier(SkySetup(memory_bytes_per_satellite=1.0), BLOCK)
    with pytest.raises(UnknownPreset):
        SkyTier(SkySetup(preset="starlink-z"), BLOCK)
    with pytest.raises(InvalidInput, match="packing"):
        SkySetup(packing=0.0)


def test_a_busy_way_up_takes_only_what_is_offered_again() -> None:
    tier = SkyTier(SkySetup(bytes_per_s=BLOCK, servers=9, most_queued_s=20.0, picky_queued_s=2.5), BLOCK)
    out = NetworkDirection("out", WIDE)
    tier.write((1, 2, 3), out, 0.0)
    tier.write((1, 2, 3, 4), out, 0.0)
    assert len(tier) == 3
    tier.write((1, 2, 3, 4, 5), out, 0.0)
    assert tier.leading((1, 2, 3, 4, 5), 99.0) == 4
    tier.write((9,), out, 2.0)
    assert len(tier) == 5


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 2), st.lists(st.integers(1, 3), min_size=1, max_size=5)), max_size=30
    ),
    st.integers(1, 9),
)
def test_the_sky_too_never_keeps_a_block_without_its_parent(
    steps: list[tuple[bool, int, list[int]]], capacity: int
) -> None:
    setup = SkySetup(
        bytes_per_s=BLOCK / 30, servers=9, memory_bytes_per_satellite=(capacity + 0.5) * BLOCK / 9, most_queued_s=100.0
    )
    tier, out, into, now_s, read = (
        SkyTier(setup, BLOCK),
        NetworkDirection("out", WIDE),
        NetworkDirection("in", WIDE),
        0.0,
        0,
    )
    seen: set[tuple[int, ...]] = set()
    for writes, wait, choices in steps:
        now_s += 40.0 * wait
        chain = tuple(int("".join(map(str, choices[: at + 1]))) for at in range(len(choices)))
        seen.update(chain[: at + 1] for at in range(len(chain)))
        if writes:
            tier.write(chain, out, now_s)
        else:
            count, done_s = tier.read(chain, 0, len(chain), into, now_s)
            assert count == tier.leading(chain, now_s)
            assert done_s >= now_s + 30 * count
            read += count
        resident = {chain[-1] for chain in seen if tier.leading((chain[-1],), 1e9)}
        assert all(block < 10 or block // 10 in resident for block in resident)
        assert len(tier) == len(resident) <= capacity
    figures = tier.figures()
    assert figures["sky_down_bytes"] == into.carried_bytes == read * BLOCK
    assert figures["sky_up_bytes"] == out.carried_bytes == (len(tier) + figures["sky_evicted_blocks"]) * BLOCK
