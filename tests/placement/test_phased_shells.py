"""Placement over shells whose planes are out of phase, against the satellites' positions."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from skymemory.constellation.ground_track import track_over
from skymemory.constellation.orbit import SKY_MODELS, Shell
from skymemory.constellation.presets import EPOCH_UNIX_S, PRESETS
from skymemory.constellation.torus import SatelliteId
from skymemory.constellation.visibility import GroundHost, elevations_deg, ground_angle_rad, overhead_argument_rad
from skymemory.placement.locate import Placement


def random_shell(dice: random.Random) -> Shell:
    planes, slots = dice.randrange(2, 30), dice.randrange(2, 30)
    altitude_m, inclination_deg = dice.uniform(4e5, 1.5e6), dice.uniform(15, 165)
    return Shell(planes, slots, altitude_m, inclination_deg, dice.randrange(planes), model=dice.choice(SKY_MODELS))


def slots_flown(shell: Shell, now_s: float) -> np.ndarray:
    """From positions alone: each satellite's argument of latitude, in slots; ``(planes, slots)``."""
    positions, found = shell.positions_m(now_s), np.empty((shell.planes, shell.slots_per_plane))
    for plane in range(shell.planes):
        node = 2 * math.pi * plane / shell.planes + shell.node_rate_rad_s * now_s
        along = positions[plane] @ np.array([math.cos(node), math.sin(node), 0.0])
        found[plane] = np.arctan2(positions[plane, :, 2] / math.sin(math.radians(shell.inclination_deg)), along)
    return found * shell.slots_per_plane / (2 * math.pi)


@pytest.mark.parametrize("seed", range(25))
def test_links_and_boxes_join_satellites_that_fly_side_by_side(seed: int) -> None:
    dice = random.Random(seed)
    shell = random_shell(dice)
    torus, now_s = shell.torus, dice.uniform(0, 1e6)
    slots = slots_flown(shell, now_s)

    def apart(here: SatelliteId, there: SatelliteId) -> float:
        """In slots along the orbit."""
        return math.remainder(slots[there] - slots[here], torus.slots_per_plane)

    # Neighbours, across the last plane and the first as anywhere: less than a slot from side by side.
    positions = shell.positions_m(now_s)
    for here in torus.satellites():
        for there in (torus.north(here), torus.south(here)):
            assert abs(apart(here, there)) < 1 + 1e-6
        south = torus.south(here)
        assert np.linalg.norm(positions[south] - positions[here]) <= shell.longest_plane_link_m(here.plane) + 1e-3

    # A host, and the box around it after a while: centre and cells are where they should be, and each cell's
    # satellite stays within half a slot of its column.
    host = GroundHost(dice.uniform(-80, 80), dice.uniform(-180, 180))
    track = track_over(shell, host, EPOCH_UNIX_S)
    placement = Placement.of(
        dice.choice(["rotation", "rotation_hop", "cost"]),  # type: ignore[arg-type]
        dice.randrange(1, torus.size + 1),
        torus,
        torus.wrap(*track.cell_at(0.0)),
    )
    moves = track.moves(now_s)
    centre = placement.centre_at(moves)
    overhead = overhead_argument_rad(shell, host) * torus.slots_per_plane / (2 * math.pi)
    assert abs(math.remainder(slots[centre] - overhead, torus.slots_per_plane)) <= 1 + 1e-6
    node = ground_angle_rad(shell.model, EPOCH_UNIX_S, now_s) + math.radians(host.longitude_deg)
    u_rad, i_rad = overhead_argument_rad(shell, host), math.radians(shell.inclination_deg)
    node -= math.atan2(math.cos(i_rad) * math.sin(u_rad), math.cos(u_rad)) + shell.node_rate_rad_s * now_s
    assert abs(math.remainder(node / (2 * math.pi) * shell.planes - centre.plane, shell.planes)) <= 0.5 + 1e-6
    straight = slots[centre] - (shell.argument_rad(centre.plane, 0) * torus.slots_per_plane / (2 * math.pi))
    for (x, _), satellite in zip(placement.box.cells, placement.box_satellites(moves), strict=True):
        assert abs(math.remainder(slots[satellite] - straight - x, torus.slots_per_plane)) <= 0.5 + 1e-6
    servers = placement.locate_all((0, 0), moves)
    assert len({*servers}) == placement.servers and {*servers} <= {*placement.box_satellites(moves)}


@pytest.mark.parametrize("name", ["starlink-a", "kuiper-a", "kuiper-b"])
def test_over_a_day_the_box_of_a_real_preset_stays_over_its_host(name: str) -> None:
    preset = PRESETS[name]
    centres, boxes = [], []
    placement = Placement.for_preset(preset, servers=9)
    for now_s in range(0, 86_400, 450):
        elevation = elevations_deg(preset.shell, preset.host, preset.epoch_unix_s, float(now_s))
        moves = preset.moves_at(float(now_s))
        centres.append(elevation[placement.centre_at(moves)])
        boxes.append(max(elevation[satellite] for satellite in placement.box_satellites(moves)))
    assert min(centres) > 0, min(centres)
    assert min(boxes) > 25, min(boxes)
