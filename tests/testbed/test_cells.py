"""Users among cells on the ground: the same placement and migration, moves from a path instead of an orbit."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymemory.constellation.ground_track import CellGrid, Stop
from skymemory.errors import InvalidInput
from skymemory.protocol.client.machine import ClientConfig
from skymemory.protocol.clock import MoveClock, SkyMap
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.store.sky.store import ConstellationStore, SkySettings
from skymemory.transport.simulated import SimulatedConstellation

GRID = CellGrid(12, 14)


@st.composite
def walks(draw: st.DrawFn) -> list[Stop]:
    time_s, stops = 0.0, []
    for _ in range(draw(st.integers(1, 6))):
        stops.append(Stop(time_s, draw(st.floats(2, 8)), draw(st.floats(2, 10))))
        time_s += draw(st.floats(1, 100))
    return stops


@given(path=walks(), now_s=st.floats(-10, 600))
def test_the_centre_is_the_cell_the_user_is_in_and_no_box_crosses_the_seam(path: list[Stop], now_s: float) -> None:
    track = GRID.track(path, 2)
    clock = MoveClock(time_scale=1.0, track=track)
    sky = SkyMap(GRID.torus, GRID.centre(path, 2))
    row, column = track.cell(now_s)
    here = sky.centre_at(clock.moves(now_s))
    assert abs(here.plane - row) <= 0.5 + 1e-9 and abs(here.slot - column) <= 0.5 + 1e-9
    assert min(stop.row for stop in path) - 1e-9 <= row <= max(stop.row for stop in path) + 1e-9
    for code in (1, 3):
        for cell in sky.placement(code, 9).box_satellites(clock.moves(now_s)):
            assert abs(cell.plane - here.plane) <= 1 and abs(cell.slot - here.slot) <= 1


@pytest.mark.brief()
def test_the_cache_follows_a_user_who_turns_and_comes_back() -> None:
    path = [Stop(0, 3, 3), Stop(10, 3, 9), Stop(20, 8, 9), Stop(25, 8, 6), Stop(40, 2, 2)]
    clock = MoveClock(time_scale=1.0, track=GRID.track(path, 2))
    sky = SkyMap(GRID.torus, GRID.centre(path, 2))
    cells = SimulatedConstellation(sky, 1 << 20, clock, lambda a, b: 0.001)
    store = ConstellationStore(
        cells.connect(ClientConfig(1, "gateway", expected_rtt_s=0.006)),
        sky,
        SkySettings("rotation_hop", 9, 1000),
        index=SharedIndex(),
    )
    value = random.Random(1).randbytes(60_000)
    assert store.put_many([(bytes(32), value)]) == [True]
    while cells.now_s < 45:
        began_s = cells.now_s
        found = store.get_many([bytes(32)])[0]
        assert found is not None and bytes(found) == value
        assert cells.now_s - began_s < 0.02
        cells.settle(cells.now_s + 0.21)
    here = sky.centre_at(clock.moves(cells.now_s))
    assert (here.plane, here.slot) == (2, 2)
    cells.settle(cells.now_s + 5)
    holding = {cell for cell, machine in cells.satellites.items() if len(machine.store)}
    assert holding == set(sky.placement(3, 9).box_satellites(clock.moves(cells.now_s)))


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ([], "without stops"),
        ([Stop(0, 5, 5), Stop(0, 6, 5)], "stop 2 is at 0 s"),
        ([Stop(0, 1.4, 5)], "row 1.4 of 12: a box that reaches 2 cells needs 1.5"),
        ([Stop(0, 5, 5), Stop(9, 5, 11.5)], "stop 2 is in column 11.5 of 14"),
        ([Stop(0, float("nan"), 5)], "expected seconds, row and column"),
    ],
)
def test_paths_that_cannot_be_are_named(path: list[Stop], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        GRID.track(path, 2)
