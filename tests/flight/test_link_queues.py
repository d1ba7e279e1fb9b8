"""What links carry in the daemon, against the Python host's queues: rates, buffers, outages, elevations, rain."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.flight.share import Queues, Share

from skymemory.constellation.links import LINK_CLASSES, LinkQueues, Links, elevation_deg
from skymemory.constellation.torus import SatelliteId
from skymemory.constellation.visibility import GroundHost
from skymemory.testbed.connect import clock_of, shell_of, sky_of
from skymemory.testbed.plan import ConstellationPlan, make_plan

EPOCH_S = 1_750_000_000.0
CASES: dict[str, dict[str, Any]] = {
    "rates": {
        "up": "20Mbit",
        "down": "50Mbit",
        "isl": "100Mbit",
        "load": {"isl": 0.5, "down": 0.25},
        "buffer": "64KiB",
    },
    "one rate": {"down": "5Mbit", "buffer": "128KiB"},
    "outages": {
        "isl": "100Mbit",
        "outage": [
            {"link": "up", "from": "5s", "to": "9s"},
            {"link": "beams", "from": "20s", "to": "22s"},
            {"link": "2,9", "from": "30s", "to": "33s"},
            {"link": "2,9-2,10", "from": "40s", "to": "44s"},
            {"link": "isl", "from": "50s", "to": "52s"},
        ],
    },
    "elevations": {"up": "20Mbit", "down": "50Mbit", "elevations": [[25, 0.4], [40, 0.7], [60, 1]]},
    "rain": {
        "up": "20Mbit",
        "down": "50Mbit",
        "seed": 7,
        "rain": {"rate": 30.0, "share": 0.6, "spell": "6s", "margin_db": 1.0},
    },
    "all": {
        "up": "30Mbit",
        "down": "20Mbit",
        "isl": "200Mbit",
        "elevations": [[10, 0.2], [45, 1]],
        "rain": {"rate": 60.0, "share": 0.9, "spell": "10s", "margin_db": 3.0},
        "outage": [{"link": "down", "from": "15s", "to": "16s"}],
    },
}


def twin_of(plan: ConstellationPlan, places: dict[int, GroundHost]) -> LinkQueues:
    """As ``UdpHost`` makes it."""
    sky, clock, shell = sky_of(plan), clock_of(plan), shell_of(plan)

    def elevation(here: SatelliteId, host: Any, now_s: float) -> float:
        sight = plan.sight(places.get(host))
        return elevation_deg(
            shell.altitude_m, sight.one_way_s(here, sky.centre_at(clock.moves(now_s)), clock.sky_s(now_s))
        )

    def place(host: Any) -> str:
        its = places.get(host)
        return "" if its is None else f"{its.latitude_deg:.4f},{its.longitude_deg:.4f}"

    onboard = plan.torus.living(plan.centre) if plan.access == "onboard" else None
    assert plan.links is not None
    return LinkQueues(plan.links, clock.epoch_s, elevation, place, onboard)


@pytest.mark.brief(
    "testbed-19x5-one rate",
    "onboard-outages",
    "testbed-19x5-rates",
    "onboard-elevations",
    "onboard-rain",
    "onboard-all",
)
@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize("preset", ["testbed-19x5", pytest.param("starlink-a", marks=pytest.mark.slow), "onboard"])
def test_datagrams_leave_as_in_the_python_host(case: str, preset: str) -> None:
    links, draw = Links.read(CASES[case], "links"), random.Random(case + preset)
    onboard = preset == "onboard"
    name, access = ("testbed-19x5", "onboard") if onboard else (preset, "ideal")
    plan = make_plan(name, access=access, links=links, epoch_s=EPOCH_S, time_scale=30.0)
    places = {3: GroundHost(-12.5, 100.25)} if preset == "starlink-a" else {}
    twin, share = twin_of(plan, places), Share(plan)
    queues = Queues(share)
    here = SatelliteId(2, 9) if plan.torus.planes == 5 else plan.centre
    near, grounds = plan.torus.neighbours(here), [1, 2, 3]
    now_us, lost = round(EPOCH_S * 1e6), 0
    steps_us = [0, 0, 100] if "rate" in case else [0, 0, 100, 20_000]
    for _ in range(6_000):
        now_us += draw.choice(steps_us)
        ground, neighbour = draw.choice(grounds), draw.choice(near)
        there = draw.choice([here, neighbour])
        ends: tuple[Any, Any] = draw.choice([(ground, there), (there, ground), (here, neighbour), (neighbour, here)])
        size, urgent = draw.choice([80, 1_200, 6_300]), isinstance(ends[0], SatelliteId) and draw.random() < 0.1
        urgent = urgent and isinstance(ends[1], SatelliteId)
        now_s = now_us / 1e6
        leaves_s = twin.of(*ends).leaves_s(size, now_s, urgent)
        place = next((places[end] for end in ends if end in places), None)
        on_it = plan.centre if onboard else None
        found = queues.leaves_us(*ends, size, now_us, place, on_it, urgent)
        if leaves_s < 0:
            lost += 1
            assert found is None
        else:
            assert found is not None and -1e-6 < found / 1e6 - leaves_s < 3e-6
    for after_us in (0, 50_000):
        figures = queues.figures(now_us + after_us)
        twins = twin.figures((now_us + after_us) / 1e6)
        assert figures[:3] == [twins[f"link_{kind}_lost"] for kind in LINK_CLASSES]
        for number, kind in enumerate(LINK_CLASSES):
            assert abs(figures[3 + number] - twins[f"link_{kind}_queued_bytes"]) <= 3
    assert lost > 0 or case == "rain" or onboard


def test_queues_of_hosts_that_are_gone_take_no_room() -> None:
    """Thousands of hosts come, and most send once more; those whose packets still wait are not forgotten."""
    plan = make_plan("testbed-19x5", links=Links.read({"up": "1Mbit"}, "links"), epoch_s=EPOCH_S)
    twin, queues, draw = twin_of(plan, {}), Queues(Share(plan)), random.Random(3)
    here, now_us = SatelliteId(2, 9), round(EPOCH_S * 1e6)
    for host in range(6_000):
        now_us += 500
        for each in (host, host, max(0, host - draw.randrange(220))):  # two packets wait for 200 hosts' time
            leaves_s = twin.of(each, here).leaves_s(6_300, now_us / 1e6)
            found = queues.leaves_us(each, here, 6_300, now_us)
            assert found is not None and -1e-6 < found / 1e6 - leaves_s < 3e-6
