"""``cost`` against Dijkstra's search and against every box there is."""

from __future__ import annotations

import heapq
import itertools

import pytest

from skymemory.constellation.presets import PRESETS, Preset
from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.placement.layout import Box, layout


def searched_delays_s(torus: Torus, slot_link_s: float, plane_link_s: float) -> dict[SatelliteId, float]:
    """Dijkstra over the links, from satellite (0, 0)."""
    delays: dict[SatelliteId, float] = {}
    queue = [(0.0, SatelliteId(0, 0))]
    while queue:
        delay_s, here = heapq.heappop(queue)
        if here in delays:
            continue
        delays[here] = delay_s
        for onward in torus.neighbours(here):
            link_s = slot_link_s if onward.plane == here.plane else plane_link_s
            heapq.heappush(queue, (delay_s + link_s, onward))
    return delays


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_the_servers_are_the_nearest_by_delay_in_their_order(preset: Preset) -> None:
    torus = preset.torus
    links = preset.shell.isl_one_way_s("slot"), preset.shell.isl_one_way_s("plane")
    delays = searched_delays_s(torus, *links)
    nearest = sorted(delays.values())
    for servers in {1, 2, 3, 4, 5, 10, 25, 81, torus.size // 3, torus.size - 1, torus.size}:
        made = layout("cost", servers, torus, *links)
        ordered = [delays[torus.wrap(y, x)] for x, y in made.cells]
        assert ordered[-1] == pytest.approx(nearest[servers - 1], rel=1e-9)
        assert made.worst_path_s == pytest.approx(nearest[servers - 1], rel=1e-9)
        assert all(earlier <= later + 1e-11 for earlier, later in itertools.pairwise(ordered))


@pytest.mark.parametrize("links", [(1.0, 1.0), (6.571, 2.014), (1.0, 3.5)])
@pytest.mark.parametrize("torus", [Torus(5, 6), Torus(7, 4), Torus(1, 9), Torus(3, 3)], ids=str)
def test_no_smaller_box_holds_them_within_the_same_worst_delay(torus: Torus, links: tuple[float, float]) -> None:
    delays = searched_delays_s(torus, *links)
    for servers in range(1, torus.size + 1):
        made = layout("cost", servers, torus, *links)
        for width, height in itertools.product(range(1, torus.slots_per_plane + 1), range(1, torus.planes + 1)):
            if width * height >= made.box.width * made.box.height:
                continue
            inside = [delays[torus.wrap(y, x)] for x, y in Box.centred(width, height).cells]
            assert sum(delay <= made.worst_path_s + 1e-9 for delay in inside) < servers
