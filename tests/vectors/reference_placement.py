"""Placement and moves written from docs/reference/wire.md alone, with nothing of ours: the judge of both.

Slow and plain on purpose. It is what a reader of only the page would write.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

Cell = tuple[int, int]
Satellite = tuple[int, int]
C_M_S, EARTH_M = 299_792_458, 6_371_000
NEIGHBOURS = ((0, -1), (1, 0), (0, 1), (-1, 0))  # north, east, south, west
PRESETS = {
    # name: shell (planes, slots, altitude, inclination), torus (planes, slots), counted by the overhead point
    "testbed-19x5": ((72, 22, 550_000, 53.0), (5, 19), False),
    "paper-15x15": ((15, 15, 550_000, 53.0), (15, 15), False),
    "starlink-a": ((72, 22, 550_000, 53.0), (72, 22), True),
    "starlink-b": ((5, 75, 1_275_000, 81.0), (5, 75), True),
    "kuiper-a": ((34, 34, 630_000, 51.9), (34, 34), True),
    "kuiper-b": ((28, 28, 590_000, 33.0), (28, 28), True),
}
EPOCH_DAYS = 1_735_689_600 / 86_400 - (2451545.0 - 2440587.5)  # Unix time 0 is JD 2440587.5
PERIOD_FACTOR = 3.986004418e14


@dataclass(frozen=True)
class Box:
    width: int
    height: int
    west: int
    north: int

    def has(self, x: int, y: int) -> bool:
        return -self.west <= x < self.width - self.west and -self.north <= y < self.height - self.north


def centred(width: int, height: int) -> Box:
    return Box(width, height, width // 2, (height - 1) // 2)


def walk(box: Box, planes: int, slots: int) -> list[Cell]:
    queue, at = [(0, 0)], 0
    while at < len(queue):
        x, y = queue[at]
        at += 1
        for dx, dy in NEIGHBOURS:
            cell = (x + dx + box.west) % slots - box.west, (y + dy + box.north) % planes - box.north
            if box.has(*cell) and cell not in queue:
                queue.append(cell)
    return queue


def cells(strategy: str, servers: int, torus: tuple[int, int], delays_ps: tuple[int, int]) -> tuple[Box, list[Cell]]:
    planes, slots = torus
    width = min(slots, max(math.ceil(math.sqrt(servers)), math.ceil(servers / planes)))
    box = centred(width, math.ceil(servers / width))
    whole = centred(slots, planes)
    if strategy in ("rotation", "baseline"):
        return box, [(k % width - box.west, k // width - box.north) for k in range(servers)]
    if strategy == "rotation_hop":
        return box, walk(box, planes, slots)[:servers]
    if strategy == "hop":
        found = walk(whole, planes, slots)[:servers]
        xs, ys = {x for x, _ in found}, {y for _, y in found}
        return Box(max(xs) - min(xs) + 1, max(ys) - min(ys) + 1, -min(xs), -min(ys)), found
    assert strategy == "cost"
    delay = {(x, y): abs(x) * delays_ps[0] + abs(y) * delays_ps[1] for x, y in walk(whole, planes, slots)}
    ordered = sorted(delay, key=delay.__getitem__)  # a stable sort of the walk
    near = [cell for cell in ordered if delay[cell] <= delay[ordered[servers - 1]]]
    best = None
    for width in range(1, slots + 1):
        for height in range(1, planes + 1):
            box = centred(width, height)
            rank = width * height, abs(width - height), width
            if (best is None or rank < best[0]) and sum(box.has(*cell) for cell in near) >= servers:
                best = rank, box
    assert best is not None
    return best[1], [cell for cell in near if best[1].has(*cell)][:servers]


def link_delays_ps(preset: str) -> tuple[int, int]:
    planes, slots, altitude_m, _ = PRESETS[preset][0]
    chord = [(EARTH_M + altitude_m) * math.sqrt(2 - 2 * math.cos(2 * math.pi / count)) for count in (slots, planes)]
    return round(chord[0] / C_M_S * 1e12), round(chord[1] / C_M_S * 1e12)


PLANES_SOUTH = (0, 1, -1, 2, -2, 3, -3, 5, -5, 8, -8, 12, -12, 18, -18)


def satellites(
    strategy: str,
    servers: int,
    torus: tuple[int, int],
    centre: Satellite,
    delays_ps: tuple[int, int],
    set_moves: tuple[int, int],
    now_moves: tuple[int, int],
    replica: int,
    displacement: int = 0,
) -> list[Satellite]:
    planes, slots = torus
    box, found = cells(strategy, servers, torus, delays_ps)
    across, down = replica // box.height, replica % box.height
    (r0, p0), (r, p) = set_moves, now_moves
    plane, slot = centre
    if strategy == "hop":
        plane, slot = plane + p0, slot - r0
    elif strategy != "baseline":
        plane, slot = plane + p, slot - r
    plane += PLANES_SOUTH[displacement]
    placed = []
    for x, y in found:
        x = (x + across + down * (box.width // 2) + box.west) % box.width - box.west
        y = (y + down + box.north) % box.height - box.north
        if strategy not in ("hop", "baseline"):
            x = (x + r - r0 + box.west) % box.width - box.west
            y = (y - p + p0 + box.north) % box.height - box.north
        placed.append(((plane + y) % planes, (slot + x) % slots))
    return placed


# --- moves ---


def periods_s(preset: str) -> tuple[float, float]:
    planes, slots, altitude_m, inclination_deg = PRESETS[preset][0]
    r = EARTH_M + altitude_m
    period = 2 * math.pi * math.sqrt(r**3 / PERIOD_FACTOR)
    inclination = math.radians(inclination_deg)
    drift = -1.5 * 1.08262668e-3 * (EARTH_M / r) ** 2 * (2 * math.pi / period) * math.cos(inclination)
    return period / slots, 2 * math.pi / (planes * (7.292115146706979e-5 - drift))


def overhead(preset: str, latitude_deg: float, longitude_deg: float, time_s: float) -> tuple[float, float]:
    """(plane, slot) over a host at ``time_s``."""
    planes, slots, _, inclination_deg = PRESETS[preset][0]
    i, latitude = math.radians(inclination_deg), math.radians(latitude_deg)
    u = math.asin(max(-1.0, min(1.0, math.sin(latitude) / math.sin(i))))
    theta = 2 * math.pi * (0.7790572732640 + 1.00273781191135448 * EPOCH_DAYS) % (2 * math.pi)
    n = math.radians(longitude_deg) + theta - math.atan2(math.cos(i) * math.sin(u), math.cos(u))
    slot_period_s, plane_period_s = periods_s(preset)
    return (
        n * planes / (2 * math.pi) + time_s / plane_period_s,
        u * slots / (2 * math.pi) - time_s / slot_period_s,
    )


Waypoint = tuple[float, float, float]


def travelled(preset: str, way: list[Waypoint], time_s: float) -> tuple[float, float]:
    """(plane, slot) over a host that moves."""
    slot_period_s, plane_period_s = periods_s(preset)
    turn = PRESETS[preset][0][0]
    knots: list[tuple[float, float, float]] = []
    for at_s, latitude, longitude in pieces(way):
        plane, slot = overhead(preset, latitude, longitude, at_s)
        if knots:
            expected = knots[-1][1] + (at_s - knots[-1][0]) / plane_period_s
            plane += turn * round((expected - plane) / turn)
        knots.append((at_s, plane, slot))
    if time_s <= knots[0][0] or time_s >= knots[-1][0]:
        at_s, plane, slot = knots[0] if time_s <= knots[0][0] else knots[-1]
        return plane + (time_s - at_s) / plane_period_s, slot - (time_s - at_s) / slot_period_s
    after = next(number for number, knot in enumerate(knots) if knot[0] > time_s)
    (a_s, plane_a, slot_a), (b_s, plane_b, slot_b) = knots[after - 1], knots[after]
    share = (time_s - a_s) / (b_s - a_s)
    return plane_a + share * (plane_b - plane_a), slot_a + share * (slot_b - slot_a)


def pieces(way: list[Waypoint]) -> list[Waypoint]:
    found = [way[0]]
    for (a_s, *here), (b_s, *there) in itertools.pairwise(way):
        a, b = unit(*here), unit(*there)
        angle = math.acos(max(-1.0, min(1.0, sum(p * q for p, q in zip(a, b, strict=True)))))
        count = max(1, math.ceil(math.degrees(angle) / 0.25))
        for piece in range(1, count + 1):
            share = piece / count
            if angle:
                weights = math.sin((1 - share) * angle) / math.sin(angle), math.sin(share * angle) / math.sin(angle)
                x, y, z = (weights[0] * p + weights[1] * q for p, q in zip(a, b, strict=True))
            else:
                x, y, z = a
            latitude, longitude = math.asin(max(-1.0, min(1.0, z))), math.atan2(y, x)
            found.append((a_s + (b_s - a_s) * share, math.degrees(latitude), math.degrees(longitude)))
    return found


def unit(latitude_deg: float, longitude_deg: float) -> tuple[float, float, float]:
    a, b = math.radians(latitude_deg), math.radians(longitude_deg)
    return math.cos(a) * math.cos(b), math.cos(a) * math.sin(b), math.sin(a)


def nearest(value: float) -> int:
    return math.floor(value + 0.5)


def moves(preset: str, host: tuple[float, float] | list[Waypoint], time_s: float) -> tuple[int, int]:
    if not PRESETS[preset][2]:
        slot_period_s, plane_period_s = periods_s(preset)
        return math.floor(time_s / slot_period_s), math.floor(time_s / plane_period_s)
    (plane0, slot0), (plane, slot) = (cell_over(preset, host, at_s) for at_s in (0.0, time_s))
    return nearest(slot0) - nearest(slot), nearest(plane) - nearest(plane0)


def cell_over(preset: str, host: tuple[float, float] | list[Waypoint], time_s: float) -> tuple[float, float]:
    if isinstance(host, tuple):
        return overhead(preset, *host, time_s)
    return travelled(preset, host, time_s)


def centre(preset: str, host: tuple[float, float] | list[Waypoint]) -> Satellite:
    plane, slot = cell_over(preset, host, 0.0)
    planes, slots = PRESETS[preset][1]
    return nearest(plane) % planes, nearest(slot) % slots
