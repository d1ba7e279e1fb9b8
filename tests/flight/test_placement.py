"""Torus, placement, clock and locator in C against the golden vectors and the Python functions."""

from __future__ import annotations

import ctypes
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.flight.parts import NEVER_US, NOWHERE, library, numbers
from tests.vectors.test_placement_vectors import clock_by_code

from skymemory.constellation.presets import PRESETS, preset_named
from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.errors import InvalidInput
from skymemory.placement.layout import STRATEGIES, Strategy
from skymemory.placement.locate import Placement
from skymemory.protocol.clock import DISPLACEMENTS, STRATEGY_CODES, Locator, MoveClock, SkyMap, displaced
from skymemory.protocol.wire import Address, PlacementTag
from skymemory.testbed.connect import clock_of, sky_of
from skymemory.testbed.plan import Ground, make_plan

VECTORS = Path(__file__).parents[1] / "vectors"
PLACEMENTS: list[dict[str, Any]] = json.loads((VECTORS / "placement.json").read_text("utf-8"))
MOVES: list[dict[str, Any]] = json.loads((VECTORS / "moves.json").read_text("utf-8"))


def packed(tag: PlacementTag) -> bytes:
    server = (tag.server + 1) & 0xFFFF
    moves = (part.to_bytes(4, "big", signed=True) for part in (tag.slot_moves, tag.plane_moves))
    return (
        tag.servers.to_bytes(2, "big")
        + server.to_bytes(2, "big")
        + bytes([tag.strategy, tag.replica, 0, 0])
        + b"".join(moves)
    )


def placing(torus: tuple[int, int], centre: tuple[int, int], delays_ps: tuple[int, int]) -> Any:
    return library().parts_placing(numbers([*torus, *centre, *delays_ps]))


@pytest.mark.parametrize("entry", PLACEMENTS, ids=lambda entry: entry["says"])
def test_satellites_are_those_of_the_vectors(entry: dict[str, Any]) -> None:
    it = placing(tuple(entry["torus"]), tuple(entry["centre"]), tuple(entry["link_delays_ps"]))
    for server, satellite in enumerate(entry["satellites"]):
        tag = PlacementTag(
            displaced(STRATEGY_CODES[entry["strategy"]], entry.get("displacement", 0)),
            entry["servers"],
            server,
            *entry["set_moves"],
            entry["replica"],
        )
        assert library().parts_locate(it, packed(tag), *entry["now_moves"]) == Address(*satellite).pack()


tori = st.tuples(st.integers(1, 9), st.integers(1, 11))
few_moves = st.tuples(st.integers(-60, 60), st.integers(-60, 60)) | st.just((0, 0))
any_moves = few_moves | st.tuples(st.integers(-(1 << 31), (1 << 31) - 1), st.integers(-(1 << 30), 1 << 30))
delays = st.tuples(st.integers(1, 40), st.integers(1, 40)) | st.just((1, 1)) | st.just((6577336750, 3622521966))


@settings(max_examples=200)
@given(tori, st.sampled_from(STRATEGIES), st.data(), delays)
def test_layouts_and_places_are_those_of_the_twin(
    torus: tuple[int, int], strategy: Strategy, data: Any, delays_ps: tuple[int, int]
) -> None:
    lib = library()
    centre = data.draw(st.tuples(st.integers(0, torus[0] - 1), st.integers(0, torus[1] - 1)))
    it = placing(torus, centre, delays_ps)
    placed = Torus(*torus)
    code = displaced(STRATEGY_CODES[strategy], data.draw(st.integers(0, len(DISPLACEMENTS) - 1)))
    sky = SkyMap(placed, SatelliteId(*centre), *(ps * 1e-12 for ps in delays_ps))
    for servers in data.draw(st.lists(st.integers(1, torus[0] * torus[1]), min_size=1, max_size=3)):
        twin = sky.placement(code, servers)
        cells, box = (ctypes.c_int16 * (2 * servers))(), (ctypes.c_int32 * 4)()
        assert lib.parts_layout(it, code, servers, cells, box)
        assert tuple(zip(cells[::2], cells[1::2], strict=True)) == twin.layout.cells
        assert tuple(box) == (twin.box.width, twin.box.height, twin.box.west, twin.box.north)
        set_moves, now_moves = data.draw(any_moves), data.draw(few_moves)
        replica, server = data.draw(st.integers(0, 12)), data.draw(st.integers(-1, servers - 1))
        tag = PlacementTag(code, servers, server, *set_moves, replica)
        try:
            expected = Address(*twin.locate(server, set_moves, now_moves, replica)).pack()
        except InvalidInput:
            expected = NOWHERE
        assert lib.parts_locate(it, packed(tag), *now_moves) == expected
        out = (ctypes.c_int32 * (2 * placed.size))()
        count = lib.parts_all_places(it, code, servers, *set_moves, out)
        found = list(zip(out[: 2 * count : 2], out[1 : 2 * count : 2], strict=True))
        everywhere = twin.moves_of_all_places(set_moves)
        assert len(found) == len(everywhere)
        for ours, theirs in zip(found, everywhere, strict=True):  # the same place; the same count where 32 bits hold it
            if max(theirs) < 1 << 31:
                assert ours == theirs
            assert twin.locate(0, set_moves, ours) == twin.locate(0, set_moves, theirs)


@pytest.mark.parametrize("delays_ps", [(1, 1), (1, 2), (2, 1), (3, 5)])
def test_of_boxes_of_equal_area_the_twins_is_taken(delays_ps: tuple[int, int]) -> None:
    for torus in ((p, s) for p in range(1, 7) for s in range(1, 7)):
        it, placed = placing(torus, (0, 0), delays_ps), Torus(*torus)
        for servers in range(1, torus[0] * torus[1] + 1):
            cells, box = (ctypes.c_int16 * (2 * servers))(), (ctypes.c_int32 * 4)()
            assert library().parts_layout(it, STRATEGY_CODES["cost"], servers, cells, box)
            twin = Placement.of("cost", servers, placed, SatelliteId(0, 0), *(ps * 1e-12 for ps in delays_ps)).box
            assert tuple(box) == (twin.width, twin.height, twin.west, twin.north), (torus, servers)


def test_what_cannot_be_placed_is_nowhere() -> None:
    it = placing((5, 19), (2, 9), (1, 1))
    for tag in (
        PlacementTag(0, 3, 0, 0, 0),
        PlacementTag(6, 3, 0, 0, 0),
        PlacementTag(displaced(1, len(DISPLACEMENTS)), 3, 0, 0, 0),
        PlacementTag(1, 96, 0, 0, 0),
        PlacementTag(1, 0, 0, 0, 0),
    ):
        assert library().parts_locate(it, packed(tag), 0, 0) == NOWHERE


def test_more_layouts_than_are_kept_are_computed_again() -> None:
    it = placing((5, 19), (2, 9), (7, 3))
    for _ in range(2):
        for servers in range(1, 60):
            for name, code in STRATEGY_CODES.items():
                twin = Placement.of(name, servers, Torus(5, 19), SatelliteId(2, 9), 7e-12, 3e-12)
                tag = PlacementTag(code, servers, servers - 1, 3, 4)
                assert (
                    library().parts_locate(it, packed(tag), 10, -6)
                    == Address(*twin.locate(servers - 1, (3, 4), (10, -6))).pack()
                )


@settings(max_examples=150)
@given(tori, st.data())
def test_the_torus_is_that_of_the_twin(shape: tuple[int, int], data: Any) -> None:
    lib, torus = library(), Torus(*shape)
    places = st.tuples(st.integers(0, shape[0] - 1), st.integers(0, shape[1] - 1)).map(lambda pair: SatelliteId(*pair))
    here, there = data.draw(places), data.draw(places)
    at, to = Address(*here).pack(), Address(*there).pack()
    assert lib.parts_hops(*shape, at, to) == torus.hops(here, there)
    for direction, neighbour in enumerate(torus.neighbours(here)):
        assert lib.parts_neighbour(*shape, at, direction) == Address(*neighbour).pack()
    for alternate, mode in enumerate(("greedy", "alternate")):
        for came, axis in enumerate((None, "slot", "plane")):
            assert (
                lib.parts_next_hop(*shape, at, to, alternate, came)
                == Address(*torus.next_hop(here, there, mode, axis)).pack()
            )


# --- Clock ---


def counted(clock: Any, time_us: int) -> tuple[int, int, int]:
    out = numbers([0, 0, 0])
    library().parts_counted(clock, time_us, out)
    return tuple(out)


def clock_in_c(
    preset: str, version: int, epoch_s: float, scale: float, latitude_deg: float, longitude_deg: float
) -> Any:
    found = library().parts_clock(
        preset.encode(), version, (ctypes.c_double * 4)(epoch_s, scale, latitude_deg, longitude_deg)
    )
    assert found
    return found


STANDING = [entry for entry in MOVES if not isinstance(entry["host"][0], list)]
"""Clocks by the name of a preset have hosts that stand still; of those that move: test_orbits.py."""


@pytest.mark.parametrize("entry", STANDING, ids=lambda entry: f"{entry['preset']} {entry['time_s']:g} s")
def test_moves_are_those_of_the_vectors(entry: dict[str, Any]) -> None:
    _, twin = clock_by_code(entry)
    clock = clock_in_c(entry["preset"], 1, 1_000_000.0, 60.0, *entry["host"])
    now_us = round((1_000_000.0 + entry["time_s"] / 60.0) * 1e6)
    assert list(counted(clock, round((1_000_000.0 + entry["time_s"] / 60.0) * 1e6))[:2]) == list(
        twin.moves(now_us / 1e6)
    )
    exact = clock_in_c(entry["preset"], 1, 0.0, 1.0, *entry["host"])
    assert list(counted(exact, round(entry["time_s"] * 1e6))[:2]) == entry["moves"]


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(PRESETS)),
    st.integers(1, 2),
    st.floats(-60, 60, allow_nan=False),
    st.floats(-180, 180, allow_nan=False),
    st.sampled_from([0.5, 1.0, 60.0, 3600.0]),
    st.integers(0, 10**12),
)
def test_the_clock_counts_as_the_twin(
    name: str, version: int, latitude: float, longitude: float, scale: float, since_us: int
) -> None:
    version = min(version, preset_named(name).version)
    ground = Ground(latitude_deg=latitude, longitude_deg=longitude)
    preset, epoch_s = preset_named(name, version), 1_700_000_000.0
    track = None if preset.fixed_centre else ground.track(preset)
    plan = make_plan(name, access="ideal", ground=ground, epoch_s=epoch_s, time_scale=scale)
    periods = clock_of(plan)
    twin = MoveClock(epoch_s, periods.slot_period_s, periods.plane_period_s, scale, (0, 0), track)
    clock = clock_in_c(name, version, epoch_s, scale, latitude, longitude)
    now_us = 1_700_000_000_000_000 + since_us
    for _ in range(4):
        slots, planes, next_us = counted(clock, now_us)
        assert (slots, planes) == twin.moves(now_us / 1e6)
        next_s = twin.next_move_s(now_us / 1e6)
        assert next_s is not None and abs(next_us - next_s * 1e6) <= 4
        assert twin.moves(next_us / 1e6) != (slots, planes)
        assert twin.moves((next_us - 1) / 1e6) == (slots, planes) or next_us == now_us + 1
        now_us = next_us


def test_a_clock_of_scale_0_stands_still_and_a_stranger_is_refused() -> None:
    assert counted(clock_in_c("starlink-a", 2, 0.0, 0.0, 40.0, -75.0), 10**15) == (0, 0, NEVER_US)
    for name, version in (("starlink-z", 1), ("starlink-a", 3), ("testbed-19x5", 2)):
        assert not library().parts_clock(name.encode(), version, (ctypes.c_double * 4)(0, 1, 40, -75))


# --- Locator ---


@settings(max_examples=60)
@given(
    st.sampled_from([(10.0, 46.0), (0.5, 0.75), (math.inf, 5.0), (3.0, math.inf)]),
    st.integers(0, 4000),
    st.integers(0, 300),
    st.integers(0, 300),
    st.sampled_from(STRATEGIES),
    st.integers(1, 20),
    st.sampled_from([(0, 0), (0, 0), (2, -1), (0, 3)]),
)
def test_where_a_chunk_can_have_been_left(
    periods: tuple[float, float],
    since_s: int,
    slots_ago: int,
    planes_ago: int,
    strategy: Strategy,
    servers: int,
    pushed: tuple[int, int],
) -> None:
    lib, epoch_s = library(), 1_700_000_000.0
    twin = MoveClock(epoch_s, *periods, 1.0, pushed)
    clock = lib.parts_clock(b"", 0, (ctypes.c_double * 4)(epoch_s, 1.0, *periods))
    now_us = 1_700_000_000_000_000 + since_s * 1_000_000 + 250_000
    it = lib.parts_locator(numbers([5, 19, 2, 9, 1, 1, *pushed, clock, now_us]))
    slots, planes = twin.moves(now_us / 1e6)
    then = twin.moves(now_us / 1e6 - slots_ago * min(10.0, periods[0]))
    for set_moves in ((slots - slots_ago, planes - planes_ago), then, (slots, planes)):
        placement = Placement.of(strategy, servers, Torus(5, 19), SatelliteId(2, 9))
        out = (ctypes.c_int32 * 4000)()
        count = lib.parts_moves_since(it, STRATEGY_CODES[strategy], servers, *set_moves, now_us, out, 2000)
        found = list(zip(out[: 2 * count : 2], out[1 : 2 * count : 2], strict=True))
        assert found == twin.moves_since(set_moves, placement, now_us / 1e6)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(-12000, 12000), st.integers(-40, 40)), min_size=1, max_size=40),
    st.sampled_from([(4.0, 10.0), (0.25, 5.0)]),
)
def test_the_locator_follows_and_is_pushed_as_the_twin(
    steps: list[tuple[int, int, int]], periods: tuple[float, float]
) -> None:
    lib, epoch_s = library(), 1_700_000_000.0
    now_us = 1_700_000_000_000_000
    twin = Locator(
        SatelliteId(2, 9), SkyMap(Torus(5, 19), SatelliteId(2, 9)), MoveClock(epoch_s, *periods, 1.0), now_us / 1e6
    )
    clock = lib.parts_clock(b"", 0, (ctypes.c_double * 4)(epoch_s, 1.0, *periods))
    it = lib.parts_locator(numbers([5, 19, 2, 9, 1, 1, 0, 0, clock, now_us]))
    out = numbers([0] * 7)
    for wait, slots, planes in steps:
        now_us += wait * 250_000
        if planes > 0:
            may = twin.may_push_to((slots, planes), now_us / 1e6)
            assert lib.parts_push(it, slots, planes, now_us, 10_000) == may
            if may:
                twin.push_to((slots, planes))
        changed = twin.follow(now_us / 1e6)
        lib.parts_follow(it, now_us, out)
        interval_us = round(twin.interval_s(now_us / 1e6) * 1e6)
        assert tuple(out)[:5] == (*twin.moves, *twin.before, round(twin.next_timer_s() * 1e6))
        assert out[6] == changed and abs(out[5] - interval_us) <= 1
        for tag in (
            PlacementTag(3, 10, wait % 10, slots, planes),
            PlacementTag(1, 96, 0, 0, 0),
            PlacementTag(2, 5, wait % 5, 1, 2, 1),
        ):
            ref = bytes(56) + packed(tag)
            try:
                home = Address(*twin.home(ref)).pack()
            except InvalidInput:
                home = NOWHERE
            assert lib.parts_home(it, ref) == home
            assert lib.parts_home(it, ref) == home


def test_link_delays_of_the_plan_are_those_of_the_page() -> None:
    plan = make_plan("starlink-a", access="ideal", epoch_s=0.0, time_scale=1.0)
    sky = sky_of(plan)
    placement = sky.placement(STRATEGY_CODES["cost"], 30)
    delays_ps = tuple(round(link_s * 1e12) for link_s in (placement.layout.slot_link_s, placement.layout.plane_link_s))
    assert delays_ps == (6577336750, 3622521966)
    it = placing((72, 22), tuple(sky.centre), delays_ps)
    for server in range(30):
        tag = PlacementTag(4, 30, server, 3, 4)
        assert (
            library().parts_locate(it, packed(tag), 20, -7)
            == Address(*placement.locate(server, (3, 4), (20, -7))).pack()
        )
