"""Shells, planes and slots recovered from the element sets of a real constellation.

On mean elements at a common epoch:

1. Leave out stale and eccentric sets and satellites under thrust.
2. Shells are dense runs of inclination, then of altitude.
3. Planes are the fewest evenly spread nodes near nearly all satellites, else the groups of nodes; over half a circle
   they are a Walker star.
4. Slots are the smallest number that puts each plane's satellites in phase; without it the group is a parking orbit.
5. The satellite nearest to a slot's centre occupies it; others there are spares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from skymemory.constellation.orbit import WGS84_RADIUS_M, Shell
from skymemory.constellation.presets import FlownShell
from skymemory.constellation.tle import ElementSet, MeanElements, error_reason, mean_elements
from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.errors import InvalidInput

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

Why = Literal["stale", "sgp4", "moving", "off shell", "off plane", "no slots", "spare"]

STALE_S = 3 * 86400.0
ECCENTRIC = 0.005
THRUST_REV_DAY2 = 0.01
_INCLINATION_REACH_DEG = 0.03
# First narrow, to separate shells from parking orbits near them; then wide, for satellites without a shell. OneWeb
# flies its planes at altitudes 4 km apart so that they pass each other at the poles.
_ALTITUDE_REACHES_M = (1_500.0, 4_500.0)
_LEAST_SHARE = 0.03
_LEAST_SATELLITES = 8
# A satellite that is moved along its plane changes its node too: at another altitude both drift, nodal rate to mean
# motion as 7/3. So nodes of a filled plane differ by up to 0.85° (43°, 560 km).
_NODE_REACH_DEG = 0.7
_MOST_PLANES = 120  # beyond it, _NODE_REACH_DEG around evenly spread nodes covers nearly half the circle
_MOST_SLOTS = 150
_EVEN_SCORE = 0.75
_EVEN_OCCUPIED = 0.6
_SEAM_DEG = 150.0
_OFF_ALTITUDE_M = 2_000.0
_LEAST_COHERENCE = 0.3
_LEAST_PHASED = 0.9
_LEAST_SLOTS = 3
_MOST_SPARES = 1 / 3
_LEAST_FILLED = 0.2


@dataclass(frozen=True, slots=True)
class ClusteredShell:
    """Shell whose slot ``s`` of plane ``p`` has the argument of latitude ``2π·(s + offsets_slots[p])/slots_per_plane``.

    Offsets lie within [−½, ½), so the torus closes without a twist.
    """

    planes: int
    slots_per_plane: int
    altitude_m: float
    """Mean semi-major axis minus the equatorial radius."""
    inclination_deg: float
    epoch_unix_s: float
    nodes_rad: tuple[float, ...]
    """Nodes in eastward order; a star begins after its seam."""
    offsets_slots: tuple[float, ...]
    placed: tuple[tuple[ElementSet | None, ...], ...]

    @property
    def torus(self) -> Torus:
        cells = (SatelliteId(plane, slot) for plane in range(self.planes) for slot in range(self.slots_per_plane))
        gaps = frozenset(cell for cell in cells if self.at(cell) is None)
        return Torus(self.planes, self.slots_per_plane, self.star, gaps)

    @property
    def satellites(self) -> int:
        return sum(elements is not None for plane in self.placed for elements in plane)

    @property
    def gaps(self) -> int:
        return self.planes * self.slots_per_plane - self.satellites

    @property
    def empty_planes(self) -> tuple[int, ...]:
        return tuple(number for number, plane in enumerate(self.placed) if not any(plane))

    @property
    def spacings_deg(self) -> tuple[float, ...]:
        following = (*self.nodes_rad[1:], self.nodes_rad[0])
        pairs = zip(self.nodes_rad, following, strict=True)
        return tuple(math.degrees((node_after - node) % (2 * math.pi)) for node, node_after in pairs)

    @property
    def star(self) -> bool:
        widest = sorted(self.spacings_deg)[-2:]
        return self.planes > 2 and widest[1] >= max(_SEAM_DEG, 1.5 * widest[0])

    @property
    def even(self) -> bool:
        inner = sorted(self.spacings_deg)[: -1 if self.star else None]
        return not inner or (inner[-1] - inner[0] <= 4 * _NODE_REACH_DEG and inner[0] * 2 > inner[-1])

    @property
    def phase(self) -> int | None:
        """Walker's F, if offsets follow it."""
        if self.star or not self.even:
            return None
        known = {number: offset for number, offset in enumerate(self.offsets_slots) if any(self.placed[number])}
        return _walker_phase(known, self.planes)

    def at(self, satellite: SatelliteId) -> ElementSet | None:
        return self.placed[satellite.plane][satellite.slot]

    def living(self, satellite: SatelliteId) -> SatelliteId:
        return self.torus.living(satellite)

    def flown(self, source: str) -> FlownShell:
        """Return the shell for a plan; ``source`` names its origin."""
        cells = ((plane, slot) for plane in range(self.planes) for slot in range(self.slots_per_plane))
        return FlownShell(
            source,
            self.epoch_unix_s,
            self.slots_per_plane,
            self.altitude_m,
            self.inclination_deg,
            self.nodes_rad,
            self.offsets_slots,
            tuple(SatelliteId(plane, slot) for plane, slot in cells if self.placed[plane][slot] is None),
            self.star,
        ).linked()

    def shell(self) -> Shell:
        """Return the orbits from ``epoch_unix_s`` on, without gaps, at the mean altitude."""
        return Shell(
            self.planes,
            self.slots_per_plane,
            self.altitude_m,
            self.inclination_deg,
            pattern="star" if self.star else "delta",
            model="j2",
            plane_offsets=self.offsets_slots,
            plane_nodes_rad=self.nodes_rad,
        )

    def __str__(self) -> str:
        return f"{self.inclination_deg:.2f}° {self.altitude_m / 1000:.0f} km"


@dataclass(frozen=True, slots=True)
class LeftOut:
    elements: ElementSet
    why: Why
    reason: str


@dataclass(frozen=True, slots=True)
class Clustering:
    shells: tuple[ClusteredShell, ...]
    left_out: tuple[LeftOut, ...]


@dataclass(frozen=True, slots=True)
class Fit:
    """Mean rates of a shell's satellites by SGP4 without drag."""

    argument_rad_s: float
    node_rad_s: float
    plane_argument_rad_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Drift:
    """Distance of satellites from their closed form, ``after_s`` from the epoch."""

    after_s: float
    median_slots: float
    p99_slots: float
    """Along-track, against a common rate."""
    plane_median_slots: float
    plane_p99_slots: float
    """Along-track, against a rate per plane."""
    node_p99_deg: float


def cluster(elements: Sequence[ElementSet]) -> Clustering:
    import numpy as np

    epochs = np.array([element_set.epoch_unix_s for element_set in elements])
    epoch_unix_s = float(np.median(epochs))
    left_out: list[LeftOut] = []
    steady: list[ElementSet] = []
    for satellite, satellite_epoch_unix_s in zip(elements, epochs, strict=True):
        # sgp4 has it in radians per minute².
        change_rev_day2 = satellite.satrec.ndot * 1440.0**2 / (2 * math.pi)
        if abs(satellite_epoch_unix_s - epoch_unix_s) > STALE_S:
            days = abs(satellite_epoch_unix_s - epoch_unix_s) / 86400
            left_out.append(LeftOut(satellite, "stale", f"its elements are {days:.1f} days from the file's median"))
        elif satellite.satrec.ecco > ECCENTRIC:
            left_out.append(
                LeftOut(satellite, "moving", f"eccentricity {satellite.satrec.ecco:.4f}: no station is kept there")
            )
        elif abs(change_rev_day2) > THRUST_REV_DAY2:
            left_out.append(
                LeftOut(
                    satellite, "moving", f"mean motion changes by {2 * change_rev_day2:+.3f} rev/day²: thrust or decay"
                )
            )
        else:
            steady.append(satellite)
    mean = mean_elements(steady, epoch_unix_s)
    failed = np.flatnonzero(mean.error)
    left_out += [LeftOut(steady[at], "sgp4", error_reason(int(mean.error[at]))) for at in failed]
    shells: list[ClusteredShell] = []
    remaining = np.flatnonzero(mean.error == 0)
    refused: list[LeftOut] = []
    for reach_m in _ALTITUDE_REACHES_M:
        refused = []
        for group in _groups(mean, remaining, reach_m):
            shell, unplaced = _shell_of(steady, mean, group, epoch_unix_s)
            if shell is None:
                refused += unplaced
            else:
                remaining = np.setdiff1d(remaining, group)
                left_out += unplaced
                shells.append(shell)
    left_out += refused
    explained = {entry.elements.number for entry in refused}
    left_out += [
        _off_shell(steady[at], mean, int(at), shells) for at in remaining if steady[at].number not in explained
    ]
    shells.sort(key=lambda shell: -shell.satellites)
    return Clustering(tuple(shells), tuple(left_out))


def fit(shell: ClusteredShell) -> Fit:
    import numpy as np

    # SGP4's rates are per minute.
    rates = [
        [
            (elements.satrec.mdot + elements.satrec.argpdot, elements.satrec.nodedot)
            for elements in plane
            if elements is not None
        ]
        for plane in shell.placed
    ]
    along, node = np.mean([rate for plane in rates for rate in plane], axis=0) / 60
    by_plane = [float(np.mean([rate[0] for rate in plane])) / 60 if plane else float(along) for plane in rates]
    return Fit(float(along), float(node), tuple(by_plane))


def drift(shell: ClusteredShell, after_s: float) -> Drift:
    """Compare the closed form with SGP4's mean elements, drag included, ``after_s`` seconds from the epoch, without
    satellites that decay before then.
    """
    import numpy as np

    rates = fit(shell)
    members = [
        (plane, satellite) for plane, row in enumerate(shell.placed) for satellite in row if satellite is not None
    ]
    elements = [satellite for _, satellite in members]
    then = mean_elements(elements, shell.epoch_unix_s + after_s)
    now = mean_elements(elements, shell.epoch_unix_s)
    valid = (then.error == 0) & (now.error == 0)
    if not valid.any():
        raise InvalidInput(f"{shell}: none of its satellites can be propagated for {after_s:g} s: expected less")
    # sgp4 returns angles within a turn, so the motion is compared modulo a turn.
    moved = (then.argument_rad - now.argument_rad)[valid]
    of_plane = np.array([rates.plane_argument_rad_s[plane] for plane, _ in members])[valid]
    slots = shell.slots_per_plane / (2 * np.pi)
    common = np.abs(_centred(moved - rates.argument_rad_s * after_s, 2 * np.pi)) * slots
    own = np.abs(_centred(moved - of_plane * after_s, 2 * np.pi)) * slots
    node = np.abs(_centred((then.node_rad - now.node_rad)[valid] - rates.node_rad_s * after_s, 2 * np.pi))
    median, p99 = np.percentile(common, [50, 99])
    plane_median, plane_p99 = np.percentile(own, [50, 99])
    node_p99 = np.degrees(np.percentile(node, 99))
    return Drift(after_s, float(median), float(p99), float(plane_median), float(plane_p99), float(node_p99))


def _centred(angle: Array, turn: float) -> Array:
    return (angle + turn / 2) % turn - turn / 2


def _walker_phase(offsets_slots: Mapping[int, float], planes: int) -> int | None:
    """Return Walker's F, the phasing of successive planes, if these offsets fit it."""
    import numpy as np

    phasors = np.exp(2j * np.pi * np.array([*offsets_slots.values()]))
    steps = np.outer(np.arange(planes), [*offsets_slots]) / planes
    together = np.abs((phasors * np.exp(-2j * np.pi * steps)).mean(axis=1))
    best = int(np.argmax(together))
    return best if together[best] >= _LEAST_PHASED else None


def _dense_runs(values: Array, reach: float) -> list[NDArray[np.int64]]:
    """Return runs of values within ``reach`` of dense values, as indices."""
    import numpy as np

    order = np.argsort(values, kind="stable")
    ordered = values[order]
    near = np.searchsorted(ordered, ordered + reach, "right") - np.searchsorted(ordered, ordered - reach, "left")
    dense = ordered[near >= max(4, _LEAST_SHARE * len(values))]
    if not len(dense):
        return []
    runs = np.split(dense, np.flatnonzero(np.diff(dense) > reach) + 1)
    return [order[(ordered >= run[0] - reach) & (ordered <= run[-1] + reach)] for run in runs]


def _groups(mean: MeanElements, among: NDArray[np.int64], altitude_reach_m: float) -> list[NDArray[np.int64]]:
    """Return groups of satellites with nearly equal inclination and altitude, as indices."""
    import numpy as np

    groups: list[NDArray[np.int64]] = []
    grouped = np.zeros(len(mean.error), dtype=bool)
    for inclined in _dense_runs(np.degrees(mean.inclination_rad[among]), _INCLINATION_REACH_DEG):
        members = among[inclined]
        for high in _dense_runs(mean.axis_m[members], altitude_reach_m):
            group = members[high]
            group = group[~grouped[group]]
            grouped[group] = True
            groups.append(group)
    return groups


def _off_shell(elements: ElementSet, mean: MeanElements, at: int, shells: Sequence[ClusteredShell]) -> LeftOut:
    inclination_deg = math.degrees(mean.inclination_rad[at])
    altitude_km = (mean.axis_m[at] - WGS84_RADIUS_M) / 1000
    near = [shell for shell in shells if abs(shell.inclination_deg - inclination_deg) < 0.1]
    heights = ", ".join(f"{height:.0f}" for height in sorted(shell.altitude_m / 1000 for shell in near))
    why = f"the shells of its inclination are at {heights} km" if near else "no shell has its inclination"
    return LeftOut(elements, "off shell", f"{inclination_deg:.2f}° {altitude_km:.0f} km: {why}")


def _shell_of(
    elements: Sequence[ElementSet], mean: MeanElements, group: NDArray[np.int64], epoch_unix_s: float
) -> tuple[ClusteredShell | None, list[LeftOut]]:
    """Return the group's shell, if any, and its satellites outside that shell."""
    import numpy as np

    members = group

    def refuse(why: Why, reason: str) -> list[LeftOut]:
        return [LeftOut(elements[at], why, reason) for at in members]

    left_out: list[LeftOut] = []
    height_km = (np.median(mean.axis_m[group]) - WGS84_RADIUS_M) / 1000
    where = f"{math.degrees(np.median(mean.inclination_rad[group])):.2f}° {height_km:.0f} km"
    if len(group) < _LEAST_SATELLITES:
        return None, refuse("off shell", f"{where}: {len(group)} satellites are not a shell")
    nodes_deg = np.degrees(mean.node_rad[group]) % 360
    plane_nodes_deg = _even_nodes(nodes_deg)
    evenly = plane_nodes_deg is not None
    if plane_nodes_deg is None:
        plane_nodes_deg = _uneven_nodes(nodes_deg)
    if len(plane_nodes_deg) < 2:
        return None, refuse("off plane", f"{where}: not in two planes or more, a parking orbit")
    distances_deg = _centred(nodes_deg[:, None] - plane_nodes_deg[None, :], 360.0)
    plane_of = np.argmin(np.abs(distances_deg), axis=1)
    off = np.abs(distances_deg[np.arange(len(group)), plane_of])
    # The reach must not extend halfway to the next plane.
    narrowest = np.min(np.diff(plane_nodes_deg, append=plane_nodes_deg[0]) % 360)
    reach = min(1.5 * _NODE_REACH_DEG, 0.3 * narrowest)
    for at in np.flatnonzero(off > reach):
        reason = f"{where}: its node is {off[at]:.1f}° from the nearest plane's"
        left_out.append(LeftOut(elements[group[at]], "off plane", reason))
    for plane in range(len(plane_nodes_deg)):
        inside = np.flatnonzero((plane_of == plane) & (off <= reach))
        if len(inside):
            above = mean.axis_m[group[inside]] - np.median(mean.axis_m[group[inside]])
            for at in inside[np.abs(above) > _OFF_ALTITUDE_M]:
                by_km = (mean.axis_m[group[at]] - np.median(mean.axis_m[group[inside]])) / 1000
                left_out.append(LeftOut(elements[group[at]], "moving", f"{where}: {by_km:+.1f} km off its plane"))
                off[at] = np.inf
    in_plane = off <= reach
    group, plane_of = group[in_plane], plane_of[in_plane]
    turns = mean.argument_rad[group] / (2 * np.pi)
    slots = _slot_count(turns, plane_of, len(plane_nodes_deg))
    if slots is None:
        return None, refuse("no slots", f"{where}: no regular slots, a parking orbit")
    nodes, offsets, rows = [], [], []
    for plane, node_deg in enumerate(plane_nodes_deg):
        inside = group[plane_of == plane]
        offset, row, spares = _filled([elements[at] for at in inside], mean.argument_rad[inside], slots)
        for spare, slot in spares:
            reason = f"{where}: shares plane {plane}, slot {slot} with {row[slot]}"
            left_out.append(LeftOut(spare, "spare", reason))
        # Use the median node of the plane's satellites, if it has any, instead of the even spacing.
        aside = _centred(mean.node_rad[inside] - math.radians(node_deg), 2 * np.pi)
        node_rad = math.radians(node_deg) + (float(np.median(aside)) if len(inside) else 0.0)
        nodes.append(node_rad % (2 * math.pi))
        offsets.append(offset)
        rows.append(row)
    if sum(entry.why == "spare" for entry in left_out) > _MOST_SPARES * len(group):
        return None, refuse("no slots", f"{where}: slots shared by several satellites, a parking orbit")
    if sum(satellite is not None for row in rows for satellite in row) < _LEAST_FILLED * slots * len(rows):
        return None, refuse("no slots", f"{where}: not a fifth of {len(rows)} planes of {slots} is filled")
    known = {plane: offset for plane, offset in enumerate(offsets) if any(rows[plane])}
    phase = _walker_phase(known, len(rows)) if evenly else None
    if phase is not None:
        # Planes without satellites get the offset that follows from the phasing of the others.
        start = np.angle(sum(np.exp(2j * np.pi * (it - phase * plane / len(rows))) for plane, it in known.items()))
        for plane in set(range(len(rows))) - set(known):
            offsets[plane] = float((start / (2 * np.pi) + phase * plane / len(rows) + 0.5) % 1.0 - 0.5)
    shell = ClusteredShell(
        planes=len(nodes),
        slots_per_plane=slots,
        altitude_m=float(np.mean(mean.axis_m[group])) - WGS84_RADIUS_M,
        inclination_deg=math.degrees(float(np.mean(mean.inclination_rad[group]))),
        epoch_unix_s=epoch_unix_s,
        nodes_rad=tuple(nodes),
        offsets_slots=tuple(offsets),
        placed=tuple(rows),
    )
    return shell, left_out


def _filled(
    satellites: Sequence[ElementSet], argument_rad: Array, slots: int
) -> tuple[float, tuple[ElementSet | None, ...], list[tuple[ElementSet, int]]]:
    """Return a plane's offset, its slots, and its spares with their slots."""
    import numpy as np

    row: list[ElementSet | None] = [None] * slots
    spares = []
    if not satellites:
        return 0.0, tuple(row), []
    places = (argument_rad / (2 * np.pi) * slots) % slots
    offset = _offset(places)
    slot_of = np.rint(places - offset).astype(int) % slots
    miss = np.abs(_centred(places - offset - slot_of, float(slots)))
    for at in np.argsort(miss, kind="stable"):
        slot = int(slot_of[at])
        if row[slot] is None:
            row[slot] = satellites[at]
        else:
            spares.append((satellites[at], slot))
    return offset, tuple(row), spares


def _uneven_nodes(nodes_deg: Array) -> Array:
    """Return the nodes of unevenly spread planes, in order; a star begins after its seam."""
    import numpy as np

    ordered = np.sort(nodes_deg)
    wide = np.diff(np.append(ordered, ordered[0] + 360))
    first = (int(np.argmax(wide)) + 1) % len(ordered)
    unrolled = np.roll(ordered, -first)
    unrolled = np.where(unrolled < unrolled[0], unrolled + 360, unrolled)
    parts = np.split(unrolled, np.flatnonzero(np.diff(unrolled) > _NODE_REACH_DEG) + 1)
    # A plane has a share of the fuller planes' number; single satellites between planes are spares or in transit.
    fullest = np.percentile([len(part) for part in parts], 90)
    middles = np.array([(part[0] + part[-1]) / 2 for part in parts if len(part) >= max(3, 0.1 * fullest)])
    if len(middles) < 2:
        return middles % 360
    if 360 - (middles[-1] - middles[0]) >= _SEAM_DEG:
        # A star: even spacing shows which planes are missing between others.
        spacing = float(np.median(np.diff(middles)))
        steps = np.rint((middles - middles[0]) / spacing)
        fitted = np.polyfit(steps, middles, 1)
        regular = np.max(np.abs(np.polyval(fitted, steps) - middles)) <= _NODE_REACH_DEG
        if regular and len(middles) >= _EVEN_OCCUPIED * (steps[-1] + 1):
            return np.asarray(np.polyval(fitted, np.arange(steps[-1] + 1)) % 360, dtype=np.float64)
        return middles % 360
    return np.sort(middles % 360)


def _even_nodes(nodes_deg: Array) -> Array | None:
    """Return the fewest evenly spread nodes near nearly all, more than by chance."""
    import numpy as np

    candidates: list[tuple[float, int, float]] = []
    for planes in range(1, _MOST_PLANES + 1):
        spacing = 360 / planes
        residues = np.sort(nodes_deg % spacing)
        window = 2 * _NODE_REACH_DEG
        if window >= spacing:
            break
        around = np.append(residues, residues + spacing)
        count = np.searchsorted(around, residues + window, "right") - np.arange(len(residues))
        start = int(np.argmax(count))
        inside = around[start : start + int(count[start])]
        # The share that a window of this width would hold if nodes were random.
        chance = window / spacing
        score = (len(inside) / len(nodes_deg) - chance) / (1 - chance)
        middle = float((inside[0] + inside[-1]) / 2)
        near = np.abs(_centred(nodes_deg - middle, spacing)) <= _NODE_REACH_DEG
        occupied = len(np.unique(np.rint((nodes_deg[near] - middle) / spacing).astype(int) % planes))
        if score >= _EVEN_SCORE and occupied >= _EVEN_OCCUPIED * planes:
            candidates.append((score, planes, middle))
    if not candidates:
        return None
    # A multiple of the number fits as well: take the smallest among nearly equal scores.
    top = max(score for score, _, _ in candidates)
    planes, middle = next((planes, middle) for score, planes, middle in candidates if score >= top - 0.02)
    return np.sort((middle + 360 / planes * np.arange(planes)) % 360)


def _slot_count(turns: Array, plane_of: NDArray[np.int64], planes: int) -> int | None:
    """Return the smallest number of slots that puts each plane's satellites in phase.

    The measure is the mean of cos(2π·slots·difference) over pairs in a plane: 1 on a grid, 0 by chance.
    """
    import numpy as np

    sizes = np.bincount(plane_of, minlength=planes)
    pairs = float((sizes * (sizes - 1)).sum())
    if not pairs:
        return None
    coherence = np.zeros(_MOST_SLOTS + 1)
    for slots in range(1, _MOST_SLOTS + 1):
        phases = np.exp(2j * np.pi * ((turns * slots) % 1.0))
        sums = np.bincount(plane_of, phases.real, planes) + 1j * np.bincount(plane_of, phases.imag, planes)
        coherence[slots] = ((np.abs(sums) ** 2).sum() - len(turns)) / pairs
    most = int(np.argmax(coherence))
    # Spares between the slots make a finer grid fit best; take the coarsest grid that divides it.
    coarse = (slots for slots in range(_LEAST_SLOTS, most + 1) if most % slots == 0)
    return next((slots for slots in coarse if coherence[slots] >= max(_LEAST_COHERENCE, coherence[most] / 2)), None)


def _offset(places: Array) -> float:
    """Return the offset from whole slots, within [−½, ½), that fits most satellites."""
    import numpy as np

    fractions = np.sort(places % 1.0)
    around = np.append(fractions, fractions + 1.0)
    count = np.searchsorted(around, fractions + 0.5, "right") - np.arange(len(fractions))
    fullest = np.flatnonzero(count == count.max())
    # Among several such windows take the narrowest.
    widths = [around[at + int(count[at]) - 1] - around[at] for at in fullest]
    start = int(fullest[int(np.argmin(widths))])
    inside = around[start : start + int(count[start])]
    return float((inside.mean() + 0.5) % 1.0 - 0.5)
