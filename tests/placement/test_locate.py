"""The closed form on the papers' own examples."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from skymemory.constellation.presets import PRESETS
from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.errors import InvalidInput
from skymemory.placement.layout import STRATEGIES, Strategy
from skymemory.placement.locate import Placement, server_moves

FIGURE_7 = Placement.of("rotation_hop", 9, Torus(5, 7), SatelliteId(plane=2, slot=3))


def figure_style(satellite: SatelliteId) -> tuple[int, int]:
    return satellite.slot + 1, satellite.plane + 1


def test_figure_8_moves_three_servers_and_no_others() -> None:
    before, after = FIGURE_7.locate_all(), FIGURE_7.locate_all((0, 0), (1, 0))
    moved = {
        server + 1: (figure_style(old), figure_style(new))
        for server, (old, new) in enumerate(zip(before, after, strict=True))
        if old != new
    }
    assert moved == {6: ((5, 2), (2, 2)), 3: ((5, 3), (2, 3)), 8: ((5, 4), (2, 4))}
    assert figure_style(FIGURE_7.centre_at((1, 0))) == (3, 3)


def test_what_is_set_after_a_rotation_is_laid_out_around_the_new_centre() -> None:
    assert figure_style(FIGURE_7.locate(0, (1, 0), (1, 0))) == (3, 3)
    assert figure_style(FIGURE_7.locate(2, (1, 0), (1, 0))) == (4, 3)
    assert figure_style(FIGURE_7.locate(2, (1, 0), (2, 0))) == (1, 3)


def test_a_probe_of_the_centre_gives_the_rotations_modulo_the_width() -> None:
    # Step 8 of "get": the nearest satellite says which server it is; from that follows the shift.
    seen = [FIGURE_7.server_at(FIGURE_7.centre_at((r, 0)), (0, 0), (r, 0)) for r in range(7)]
    assert seen == [0, 4, 2, 0, 4, 2, 0]


def test_hop_stays_where_it_was_set_and_baseline_where_it_always_is() -> None:
    torus, centre = Torus(5, 19), SatelliteId(2, 9)
    hop = Placement.of("hop", 5, torus, centre)
    assert hop.locate_all((3, 1), (3, 1)) == hop.locate_all((3, 1), (90, -7))
    assert hop.locate(0, (3, 1), (50, 50)) == SatelliteId(3, 6)
    assert hop.locate(0, (0, 0), (50, 50)) == centre
    fixed = Placement.of("baseline", 5, torus, centre)
    assert fixed.locate_all((3, 1), (9, 9)) == fixed.locate_all()
    assert not hop.migrates and not fixed.migrates and FIGURE_7.migrates


@pytest.mark.parametrize("strategy", ["rotation", "rotation_hop", "cost"])
@pytest.mark.parametrize("servers", [1, 4, 7, 10, 30, 95])
def test_the_map_repeats_after_lcm_of_ring_and_box_on_either_axis(strategy: str, servers: int) -> None:
    placement = Placement.for_preset(PRESETS["testbed-19x5"], strategy, servers)  # type: ignore[arg-type]
    torus, box = placement.torus, placement.box
    start = placement.locate_all()
    slot_period = math.lcm(torus.slots_per_plane, box.width)
    plane_period = math.lcm(torus.planes, box.height)
    assert placement.locate_all((0, 0), (slot_period, 0)) == start
    assert placement.locate_all((0, 0), (0, -plane_period)) == start
    assert placement.locate_all((0, 0), (7 * slot_period, 3 * plane_period)) == start


def test_the_period_of_a_full_box_is_the_lcm_and_nothing_less() -> None:
    placement = Placement.of("rotation", 12, Torus(5, 10), SatelliteId(2, 5))  # a box of 4 × 3
    start = placement.locate_all()
    slot_periods = [r for r in range(1, 21) if placement.locate_all((0, 0), (r, 0)) == start]
    assert slot_periods == [math.lcm(10, 4)]
    assert [p for p in range(1, 16) if placement.locate_all((0, 0), (0, p)) == start] == [math.lcm(5, 3)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_box_as_wide_as_the_ring_never_moves_in_its_plane(strategy: str) -> None:
    placement = Placement.of(strategy, 95, Torus(5, 19), SatelliteId(2, 9))  # type: ignore[arg-type]
    assert placement.locate_all((0, 0), (5, 3)) == placement.locate_all()


def test_satellites_outside_the_box_are_no_server() -> None:
    assert FIGURE_7.server_at(SatelliteId(0, 0)) is None
    assert FIGURE_7.cell_of(SatelliteId(0, 0), FIGURE_7.centre) is None
    assert FIGURE_7.server_at(SatelliteId(2, 4)) == 2
    assert len(FIGURE_7.box_satellites((3, 2))) == 9
    assert FIGURE_7.box_satellites((3, 2))[4] == FIGURE_7.centre_at((3, 2))


def test_servers_and_centres_that_do_not_exist_are_refused() -> None:
    for server in (-1, 9):
        with pytest.raises(InvalidInput, match="expected 0 … 8"):
            FIGURE_7.locate(server)
    with pytest.raises(InvalidInput, match="centre"):
        Placement.of("hop", 1, Torus(5, 7), SatelliteId(5, 0))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("torus", "servers"), [(Torus(5, 19), 10), (Torus(72, 22), 81), (Torus(7, 12), 9)])
def test_the_moves_of_all_places_name_every_place_that_there_ever_is(
    strategy: Strategy, torus: Torus, servers: int
) -> None:
    placement = Placement.of(strategy, servers, torus, SatelliteId(2, 5))
    dice, start = random.Random(servers), (-37, 12)
    moves = placement.moves_of_all_places(start)
    assert len(moves) <= torus.planes * torus.slots_per_plane
    for server, replica in ((0, 0), (servers - 1, 0), (servers // 2, 1)):
        places = {placement.locate(server, start, at, replica) for at in moves}
        ever = {
            placement.locate(server, start, (dice.randrange(-500, 500), dice.randrange(-500, 500)), replica)
            for _ in range(2000)
        }
        assert ever <= places


@pytest.mark.parametrize("seed", range(30))
def test_with_gaps_every_chunk_is_where_handing_it_on_move_by_move_has_brought_it(seed: int) -> None:
    """Brute force: the box is carried cell by cell over the grid; a gap's chunks are with the next living one ahead."""
    dice = random.Random(seed)
    planes, slots = dice.randrange(2, 8), dice.randrange(3, 10)
    cells = [SatelliteId(plane, slot) for plane in range(planes) for slot in range(slots)]
    torus = Torus(planes, slots, gaps=frozenset(dice.sample(cells, dice.randrange(1, len(cells) // 2))))
    servers = dice.randrange(1, torus.size + 1)
    placement = Placement.of(dice.choice(["rotation", "rotation_hop", "cost"]), servers, torus, dice.choice(cells))
    full = Placement(replace(placement.layout, torus=Torus(planes, slots)), placement.centre)

    def holder(cell: SatelliteId) -> SatelliteId:
        while cell in torus.gaps:
            rest = [each for each in range(1, slots) if (cell.plane, (cell.slot + each) % slots) not in torus.gaps]
            cell = (
                SatelliteId(cell.plane, (cell.slot + rest[0]) % slots)
                if rest
                else SatelliteId((cell.plane + 1) % planes, cell.slot)
            )
        return cell

    set_moves = now = (dice.randrange(-9, 9), dice.randrange(-9, 9))
    held = {server: holder(at) for server, at in enumerate(full.locate_all(set_moves, set_moves))}
    for _ in range(2 * (planes + slots)):
        step = dice.choice([(1, 0), (0, 1), (-1, 0), (0, -1)])
        then = now[0] + step[0], now[1] + step[1]
        for server, source, target in server_moves(placement, set_moves, now, then):
            assert held[server] == source != target
            held[server] = target
        now = then
        for server, at in enumerate(full.locate_all(set_moves, now)):
            assert placement.locate(server, set_moves, now) == held[server] == holder(at)
        assert held == dict(enumerate(placement.locate_all(set_moves, now)))
        assert not torus.gaps & {*held.values(), *placement.box_satellites(now)}
        places = (placement.locate_all(set_moves, moves) for moves in placement.moves_of_all_places(set_moves))
        assert set(held.values()) <= {each for place in places for each in place}
