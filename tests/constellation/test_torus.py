"""The torus against a breadth-first search over its links, and the greedy rule of paper §4 with its repair."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymemory.constellation.presets import PRESETS
from skymemory.constellation.torus import ROUTING_MODES, Axis, RoutingMode, SatelliteId, Torus, reached_from
from skymemory.errors import InvalidInput

TORI = sorted({preset.torus for preset in PRESETS.values()}, key=lambda torus: torus.size)
SMALL = st.builds(Torus, st.integers(1, 9), st.integers(1, 9))


def searched_hops(torus: Torus, start: SatelliteId) -> dict[SatelliteId, int]:
    distance = {start: 0}
    queue = deque([start])
    while queue:
        here = queue.popleft()
        for onward in torus.neighbours(here):
            if onward not in distance:
                distance[onward] = distance[here] + 1
                queue.append(onward)
    return distance


@pytest.mark.brief(every=5)
@pytest.mark.parametrize("torus", TORI, ids=str)
@pytest.mark.parametrize("mode", ROUTING_MODES)
def test_routing_arrives_everywhere_over_as_few_links_as_there_are(torus: Torus, mode: RoutingMode) -> None:
    # One source per torus: routing looks at differences only, which the test of translations below proves.
    start = SatelliteId(torus.planes - 1, 0)
    for there, hops in searched_hops(torus, start).items():
        way = torus.path(start, there, mode)
        assert way[0] == start and way[-1] == there
        assert len(way) - 1 == torus.hops(start, there) == hops
        assert all(onward in torus.neighbours(here) for here, onward in itertools.pairwise(way))


@pytest.mark.parametrize("mode", ROUTING_MODES)
def test_routing_from_everywhere_to_everywhere_on_the_testbed(mode: RoutingMode) -> None:
    torus = PRESETS["testbed-19x5"].torus
    for here in torus.satellites():
        hops = searched_hops(torus, here)
        assert all(len(torus.path(here, there, mode)) - 1 == hops[there] for there in torus.satellites())


@given(planes=st.integers(1, 9), slots=st.integers(1, 9), data=st.data(), mode=st.sampled_from(ROUTING_MODES))
def test_no_route_crosses_a_seam_and_none_is_longer_than_need_be(
    planes: int, slots: int, data: st.DataObject, mode: RoutingMode
) -> None:
    torus = Torus(planes, slots, seam=True)
    here = data.draw(st.builds(torus.wrap, st.integers(), st.integers()))
    for satellite in torus.satellites():
        assert all(abs(near.plane - satellite.plane) <= 1 for near in torus.neighbours(satellite))
    for there, hops in searched_hops(torus, here).items():
        way = torus.path(here, there, mode)
        assert way[0] == here and way[-1] == there
        assert len(way) - 1 == torus.hops(here, there) == hops
        assert all(abs(b.plane - a.plane) <= 1 for a, b in itertools.pairwise(way))
        assert torus.delta(here, there)[1] == there.plane - here.plane


@given(torus=SMALL, data=st.data(), mode=st.sampled_from(ROUTING_MODES))
def test_routing_and_distances_do_not_depend_on_where_the_torus_is_cut(
    torus: Torus, data: st.DataObject, mode: RoutingMode
) -> None:
    ids = st.builds(torus.wrap, st.integers(), st.integers())
    here, there, by = data.draw(ids), data.draw(ids), data.draw(ids)

    def moved(satellite: SatelliteId) -> SatelliteId:
        return torus.wrap(satellite.plane + by.plane, satellite.slot + by.slot)

    assert torus.delta(moved(here), moved(there)) == torus.delta(here, there)
    assert torus.path(moved(here), moved(there), mode) == [moved(step) for step in torus.path(here, there, mode)]


@given(torus=SMALL, data=st.data(), came=st.sampled_from([None, "slot", "plane"]))
def test_any_hop_brings_a_packet_one_link_nearer(torus: Torus, data: st.DataObject, came: Axis | None) -> None:
    ids = st.sampled_from(torus.satellites())
    here, there = data.draw(ids), data.draw(ids)
    for mode in ROUTING_MODES:
        onward = torus.next_hop(here, there, mode, came)
        assert torus.hops(onward, there) == max(0, torus.hops(here, there) - 1)


def test_opposite_on_a_ring_goes_north_and_west() -> None:
    torus = Torus(planes=4, slots_per_plane=6)
    here = SatelliteId(1, 2)
    assert torus.delta(here, SatelliteId(3, 2)) == (0, -2)
    assert torus.next_hop(here, SatelliteId(3, 2)) == torus.north(here) == SatelliteId(0, 2)
    assert torus.delta(here, SatelliteId(1, 5)) == (-3, 0)
    assert torus.next_hop(here, SatelliteId(1, 5)) == torus.west(here) == SatelliteId(1, 1)
    assert torus.next_hop(here, here) == here


def test_directions_wrap_and_come_in_the_order_of_the_figures() -> None:
    torus = Torus(planes=5, slots_per_plane=19)
    north, east, south, west = torus.neighbours(SatelliteId(0, 18))
    assert (north, east, south, west) == (SatelliteId(4, 18), SatelliteId(0, 0), SatelliteId(1, 18), SatelliteId(0, 17))
    assert SatelliteId(4, 18).label == "sat 19, orb 5"


def flows_over_the_links_of_the_centre(mode: RoutingMode, inbound: bool, stateless: bool) -> Counter[SatelliteId]:
    """How many of the 80 flows of a 9×9 box pass each neighbour of its centre."""
    torus, centre = PRESETS["starlink-a"].torus, SatelliteId(36, 11)
    flows: Counter[SatelliteId] = Counter()
    for d_plane in range(-4, 5):
        for d_slot in range(-4, 5):
            other = torus.wrap(centre.plane + d_plane, centre.slot + d_slot)
            if other == centre:
                continue
            here, there = (other, centre) if inbound else (centre, other)
            way = torus.path(here, there, mode)
            if stateless:
                way = [here]
                while way[-1] != there:
                    way.append(torus.next_hop(way[-1], there, mode))
            flows[way[-2] if inbound else way[1]] += 1
    return flows


def test_planes_first_crowds_two_links_of_the_centre() -> None:
    torus, centre = PRESETS["starlink-a"].torus, SatelliteId(36, 11)
    north, east, south, west = torus.neighbours(centre)
    assert flows_over_the_links_of_the_centre("greedy", True, False) == {east: 36, west: 36, north: 4, south: 4}
    assert flows_over_the_links_of_the_centre("greedy", False, False) == {north: 36, south: 36, east: 4, west: 4}


@pytest.mark.parametrize("inbound", [True, False])
@pytest.mark.parametrize("stateless", [True, False])
def test_alternate_spreads_the_flows_evenly(inbound: bool, stateless: bool) -> None:
    assert sorted(flows_over_the_links_of_the_centre("alternate", inbound, stateless).values()) == [20] * 4


def test_alternate_swaps_axes_at_each_hop() -> None:
    way = PRESETS["starlink-a"].torus.path(SatelliteId(10, 10), SatelliteId(13, 14), "alternate")
    axes = ["slot" if onward.plane == here.plane else "plane" for here, onward in itertools.pairwise(way)]
    assert axes == ["slot", "plane"] * 3 + ["slot"]


@pytest.mark.parametrize(("planes", "slots"), [(0, 5), (5, 0), (-1, 3), (5000, 3)])
def test_a_torus_without_satellites_is_refused(planes: int, slots: int) -> None:
    with pytest.raises(InvalidInput, match="1 to 4096"):
        Torus(planes, slots)


@given(torus=SMALL)
def test_numbering_of_satellites_is_a_bijection(torus: Torus) -> None:
    satellites = torus.satellites()
    assert len(set(satellites)) == torus.size
    assert [torus.satellite(torus.index(satellite)) for satellite in satellites] == satellites
    assert [torus.index(satellite) for satellite in satellites] == list(range(torus.size))
    assert all(satellite in torus for satellite in satellites)
    assert SatelliteId(torus.planes, 0) not in torus
    with pytest.raises(InvalidInput):
        torus.satellite(torus.size)


# --- Gaps ---


def with_gaps(dice: random.Random, seam: bool = False) -> Torus:
    planes, slots = dice.randrange(1, 9), dice.randrange(2, 11)
    cells = [SatelliteId(plane, slot) for plane in range(planes) for slot in range(slots)]
    gaps = frozenset(dice.sample(cells, dice.randrange(1, len(cells))))
    return Torus(planes, slots, seam, gaps, dice.choice([1, 2, slots]), dice.choice([1, 2, planes]))


def linked_by_hand(torus: Torus) -> dict[SatelliteId, set[SatelliteId]]:
    """Every two of a plane or a slot with only gaps between them on one of the two ways round, not too far apart."""
    links: dict[SatelliteId, set[SatelliteId]] = {each: set() for each in torus.satellites()}
    for one, other in itertools.permutations(links, 2):
        for step in ((0, 1), (0, -1), (1, 0), (-1, 0)):
            ring, most = (torus.slots_per_plane, torus.most_slots) if step[1] else (torus.planes, torus.most_planes)
            for steps in range(1, min(ring, most) + 1):
                plane, slot = one.plane + steps * step[0], one.slot + steps * step[1]
                if torus.seam and not 0 <= plane < torus.planes:
                    break
                at = SatelliteId(plane % torus.planes, slot % torus.slots_per_plane)
                if at == other:
                    links[one].add(other)
                if at not in torus.gaps:
                    break
    return links


@pytest.mark.parametrize("seed", range(40))
def test_links_close_over_gaps_and_routes_over_them_are_shortest(seed: int) -> None:
    dice = random.Random(seed)
    torus = with_gaps(dice, seam=seed % 4 == 0)
    satellites, links = torus.satellites(), linked_by_hand(torus)
    assert torus.size == len(satellites) == len(links) and not torus.gaps & set(satellites)
    for here in satellites:
        four = torus.neighbours(here)
        assert len(four) == 4 and {each for each in four if each != here} == links[here]
        assert all(here in links[each] for each in links[here]), "a link has two ends"
    for there in dice.sample(satellites, min(6, len(satellites))):
        distance = {there: 0}
        queue = deque([there])
        while queue:
            at = queue.popleft()
            for onward in links[at] - distance.keys():
                distance[onward] = distance[at] + 1
                queue.append(onward)
        assert sorted(reached_from(torus, there)) == sorted(distance)
        for here in satellites:
            if here not in distance:
                with pytest.raises(InvalidInput, match="no links lead from"):
                    torus.hops(here, there)
                continue
            mode: RoutingMode = dice.choice(ROUTING_MODES)
            way = torus.path(here, there, mode)
            assert torus.hops(here, there) == distance[here] == len(way) - 1
            assert all(there in links[here] for here, there in itertools.pairwise(way))


@pytest.mark.parametrize("seed", range(40))
def test_what_belongs_to_a_gap_is_with_the_next_living_satellite_of_its_plane(seed: int) -> None:
    torus = with_gaps(random.Random(seed))
    for at in range(torus.cells):
        cell = torus.satellite(at)
        ahead = (
            SatelliteId((cell.plane + planes) % torus.planes, (cell.slot + slots) % torus.slots_per_plane)
            for planes in range(torus.planes)
            for slots in range(torus.slots_per_plane)
        )
        assert torus.living(cell) == next(each for each in ahead if each not in torus.gaps)
        assert torus.living(cell) in torus and (cell in torus) == (cell not in torus.gaps)


def test_a_torus_of_gaps_only_is_refused() -> None:
    with pytest.raises(InvalidInput, match="expected a satellite"):
        Torus(1, 1, gaps=frozenset([SatelliteId(0, 0)]))
    with pytest.raises(InvalidInput, match="expected 1 or more"):
        Torus(2, 2, most_slots=0)
