"""Passes of satellites over a place: rise above a mask, culmination, set, and the satellites in sight.

Every culmination is next to a sample higher than its neighbours, so no pass is too short to be found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from skymemory.constellation.orbit import Shell
from skymemory.constellation.sight import check_mask
from skymemory.constellation.tle import (
    ElementSet,
    error_reason,
    teme_states,
)
from skymemory.constellation.visibility import (
    EARTH_ROTATION_RAD_S,
    GroundHost,
    ground_angle_rad,
    place_m,
    place_up,
    sidereal_angle_rad,
)
from skymemory.errors import InvalidInput

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]
    Whole = NDArray[np.int64]

STEP_S = 60.0
"""Interval of samples; cubics between them are within 0.3 m of the orbit (error ~ interval⁴)."""
HIGHEST_EVERY_S = 2.0
"""Interval of the search for the highest satellite."""
MAX_HOURS = 168.0
_SAMPLES_AT_ONCE = 1_000_000
_TIMES_AT_ONCE = 64
_GOLDEN = (math.sqrt(5) - 1) / 2
# The ellipsoid's vertical is within 0.2° of the direction to its centre; the remainder covers motion within a step.
_VERTICAL_DEG = 0.5


class Sky(Protocol):
    """Moving satellites, in an inertial frame in which the Earth has turned by ``angle_rad``."""

    @property
    def satellites(self) -> int: ...

    def name(self, satellite: int) -> str: ...

    def states(self, first: int, last: int, unix_s: Array) -> tuple[Array, Array]:
        """Return positions (m) and velocities (m/s), shape ``(last - first, times, 3)``; NaN if invalid.

        ``unix_s`` must be evenly spaced.
        """
        ...

    def angle_rad(self, unix_s: Array) -> Array: ...


class ElementSky:
    """Satellites by SGP4, and the reasons of those that it cannot propagate."""

    def __init__(self, elements: Sequence[ElementSet]) -> None:
        self.elements = elements
        self.left_out: dict[int, str] = {}

    @property
    def satellites(self) -> int:
        return len(self.elements)

    def name(self, satellite: int) -> str:
        return str(self.elements[satellite])

    def states(self, first: int, last: int, unix_s: Array) -> tuple[Array, Array]:
        import numpy as np

        position, velocity, errors = teme_states(self.elements[first:last], unix_s)
        for at in np.flatnonzero(errors):
            position[at] = np.nan
            self.left_out[first + int(at)] = error_reason(int(errors[at]))
        return position, velocity

    def angle_rad(self, unix_s: Array) -> Array:
        epoch_unix_s = self.elements[0].epoch_unix_s
        return sidereal_angle_rad(epoch_unix_s, unix_s - epoch_unix_s)


@dataclass(frozen=True, slots=True)
class ShellSky:
    """Satellites of a shell; slot 0 of plane 0 is at the vernal equinox at the epoch."""

    shell: Shell
    epoch_unix_s: float

    @property
    def satellites(self) -> int:
        return self.shell.planes * self.shell.slots_per_plane

    def name(self, satellite: int) -> str:
        plane, slot = divmod(satellite, self.shell.slots_per_plane)
        return f"plane {plane} slot {slot}"

    def states(self, first: int, last: int, unix_s: Array) -> tuple[Array, Array]:
        import numpy as np

        # Three extra times at each end: velocities are sixth-order differences, exact to 1e-9 at this step.
        step = float(unix_s[1] - unix_s[0])
        extra_s = step * np.arange(1, 4)
        times = np.concatenate([unix_s[0] - extra_s[::-1], unix_s, unix_s[-1] + extra_s]) - self.epoch_unix_s
        positions = np.empty((last - first, len(times), 3))
        for at in range(0, len(times), _TIMES_AT_ONCE):
            some = self.shell.positions_m(times[at : at + _TIMES_AT_ONCE])
            positions[:, at : at + len(some)] = some.reshape(len(some), -1, 3)[:, first:last].swapaxes(0, 1)
        differences = [
            positions[:, 3 + by : len(times) - 3 + by] - positions[:, 3 - by : len(times) - 3 - by] for by in (1, 2, 3)
        ]
        velocity = (45 * differences[0] - 9 * differences[1] + differences[2]) / (60 * step)
        return positions[:, 3:-3], velocity

    def angle_rad(self, unix_s: Array) -> Array:
        return ground_angle_rad(self.shell.model, self.epoch_unix_s, unix_s - self.epoch_unix_s)


@dataclass(frozen=True, slots=True)
class Pass:
    """Pass above the mask; angles at culmination, azimuth from north by east."""

    satellite: int
    rise_unix_s: float | None
    """Time of rise; None: in sight at the start."""
    culmination_unix_s: float
    set_unix_s: float | None
    """Time of set; None: in sight at the end."""
    elevation_deg: float
    azimuth_deg: float


@dataclass(frozen=True, slots=True)
class InSight:
    """Number of satellites in sight over time."""

    fewest: int
    mean: float
    most: int
    longest_gap_s: float  # without any in sight
    covered: float  # share of the time with any in sight
    highest_for_s: float | None
    """Mean time for which the same satellite is the highest."""


@dataclass(frozen=True, slots=True)
class Passes:
    passes: tuple[Pass, ...]
    in_sight: InSight
    highest_deg: float
    """Highest elevation at any sample, also below the mask."""
    highest: int | None


def find_passes(
    sky: Sky,
    place: GroundHost,
    start_unix_s: float,
    duration_s: float,
    mask_deg: float,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Passes:
    """Return all passes above ``mask_deg`` (elevation over the horizon of WGS84, no refraction).

    ``progress`` gets the satellites done and their total.

    Raises:
        InvalidInput: mask or duration is out of range.
    """
    import numpy as np

    check_mask(mask_deg)
    if not 0 < duration_s <= MAX_HOURS * 3600:
        raise InvalidInput(f"{duration_s / 3600:g} hours: expected more than 0 and at most {MAX_HOURS:g}")
    steps = max(2, math.ceil(duration_s / STEP_S))
    times = start_unix_s + np.linspace(0.0, duration_s, steps + 1)
    at_once = max(1, _SAMPLES_AT_ONCE // len(times))
    envelope = _Envelope(start_unix_s, duration_s)
    passes: list[Pass] = []
    highest_deg, highest = -90.0, None
    for first in range(0, sky.satellites, at_once):
        last = min(first + at_once, sky.satellites)
        piece = _Piece(sky, place, first, last, times)
        top = np.fmax.reduce(piece.sines, axis=None, initial=-1.0)
        if math.degrees(math.asin(top)) > highest_deg:
            highest_deg = math.degrees(math.asin(top))
            highest = first + int(np.nanargmax(piece.sines)) // len(times)
        inside = piece.passes(mask_deg)
        passes += inside
        envelope.add(piece, inside)
        progress(last, sky.satellites)
    passes.sort(key=lambda satellite_pass: (satellite_pass.rise_unix_s or 0.0, satellite_pass.culmination_unix_s))
    return Passes(tuple(passes), _in_sight(passes, envelope, start_unix_s, duration_s), highest_deg, highest)


class _Piece:
    """Sampled orbits of satellites ``first`` to ``last``, and their elevations over the place."""

    def __init__(self, sky: Sky, place: GroundHost, first: int, last: int, unix_s: Array) -> None:
        import numpy as np

        self._sky, self._first, self._times = sky, first, unix_s
        self._step = float(unix_s[1] - unix_s[0])
        self._ground, self._up = place_m(place), place_up(place)
        longitude = math.radians(place.longitude_deg)
        self._east = np.array([-math.sin(longitude), math.cos(longitude), 0.0])
        self._north = np.cross(self._up, self._east)
        self._position, self._velocity = sky.states(first, last, unix_s)
        angle = sky.angle_rad(unix_s)
        offset = self._position - _turned(self._ground, angle)
        self.sines: Array = np.einsum("ntk,tk->nt", offset, _turned(self._up, angle)) / np.linalg.norm(offset, axis=-1)

    def passes(self, mask_deg: float) -> list[Pass]:
        import numpy as np

        mask = math.sin(math.radians(mask_deg))
        satellite, sample = self._candidates(mask_deg)
        last = len(self._times) - 1
        peak = self._refined_maximum(
            satellite, self._times[np.maximum(sample - 1, 0)], self._times[np.minimum(sample + 1, last)]
        )
        reached = self.sine(satellite, peak) >= mask
        satellite, peak = satellite[reached], peak[reached]
        top = self.sine(satellite, peak)
        below = self.sines < mask
        numbers = np.arange(last + 1)
        # The samples below the mask before and after each culmination: the mask is crossed next to them.
        earlier = np.maximum.accumulate(np.where(below, numbers, -1), axis=1)
        later = np.minimum.accumulate(np.where(below, numbers, last + 1)[:, ::-1], axis=1)[:, ::-1]
        before = self._sample_before(peak)
        rise_at, set_at = earlier[satellite, before], later[satellite, before + 1]
        # If a pass has several culminations (high orbits), the highest represents it.
        order = np.lexsort((-top, rise_at, set_at, satellite))
        same = (np.diff(satellite[order]) == 0) & (np.diff(rise_at[order]) == 0) & (np.diff(set_at[order]) == 0)
        chosen = order[np.append(True, ~same)] if len(order) else order
        satellite, peak, top, rise_at, set_at = (
            satellite[chosen],
            peak[chosen],
            top[chosen],
            rise_at[chosen],
            set_at[chosen],
        )
        low = np.maximum(rise_at, 0)
        rise = self._crossing(satellite, self._times[low], np.minimum(self._times[low + 1], peak), mask)
        high = np.minimum(set_at, last)
        sets = self._crossing(satellite, self._times[high], np.maximum(self._times[high - 1], peak), mask)
        azimuth = self._azimuth_deg(satellite, peak)
        return [
            Pass(
                satellite=self._first + int(satellite[at]),
                rise_unix_s=float(rise[at]) if rise_at[at] >= 0 else None,
                culmination_unix_s=float(peak[at]),
                set_unix_s=float(sets[at]) if set_at[at] <= last else None,
                elevation_deg=math.degrees(math.asin(min(1.0, top[at]))),
                azimuth_deg=float(azimuth[at]),
            )
            for at in range(len(chosen))
        ]

    def _candidates(self, mask_deg: float) -> tuple[Whole, Whole]:
        # Return satellite and sample of each local maximum of elevation that may be above the mask.
        import numpy as np

        padded = np.pad(self.sines, ((0, 0), (1, 1)), constant_values=-np.inf)
        satellite, sample = np.nonzero((self.sines >= padded[:, :-2]) & (self.sines > padded[:, 2:]))
        position, velocity = self._position[satellite, sample], self._velocity[satellite, sample]
        radius = np.linalg.norm(position, axis=-1)
        ground = _turned(self._ground, self._sky.angle_rad(self._times[sample]))
        ground_radius = float(np.linalg.norm(self._ground))
        distance_rad = np.arccos(np.clip(np.einsum("ck,ck->c", position, ground) / radius / ground_radius, -1, 1))
        mask = math.radians(mask_deg)
        widest = np.arccos(np.clip(ground_radius / radius * math.cos(mask), -1, 1)) - mask
        within_step = (np.linalg.norm(velocity, axis=-1) / radius + EARTH_ROTATION_RAD_S) * self._step
        near = distance_rad <= widest + within_step + math.radians(_VERTICAL_DEG)
        return satellite[near], sample[near]

    def _sample_before(self, unix_s: Array) -> Whole:
        import numpy as np

        at = np.floor((unix_s - self._times[0]) / self._step).astype(np.int64)
        return np.asarray(np.clip(at, 0, len(self._times) - 2), dtype=np.int64)

    def _offsets(self, satellite: Whole, unix_s: Array) -> tuple[Array, Array]:
        # Return vectors from the place to the satellites, by cubics between samples, and the Earth's angles.
        at = self._sample_before(unix_s)
        x = ((unix_s - self._times[at]) / self._step)[:, None]
        start, end = self._position[satellite, at], self._position[satellite, at + 1]
        speed, speed_there = self._velocity[satellite, at] * self._step, self._velocity[satellite, at + 1] * self._step
        position = (
            (1 + 2 * x) * (1 - x) ** 2 * start
            + x * (1 - x) ** 2 * speed
            + x**2 * (3 - 2 * x) * end
            + x**2 * (x - 1) * speed_there
        )
        angle = self._sky.angle_rad(unix_s)
        return position - _turned(self._ground, angle), angle

    def sine(self, satellite: Whole, unix_s: Array) -> Array:
        """Return sines of elevation of satellites (numbered within the piece)."""
        import numpy as np

        offset, angle = self._offsets(satellite, unix_s)
        return np.asarray(
            np.einsum("ck,ck->c", offset, _turned(self._up, angle)) / np.linalg.norm(offset, axis=-1), dtype=np.float64
        )

    def _azimuth_deg(self, satellite: Whole, unix_s: Array) -> Array:
        import numpy as np

        offset, angle = self._offsets(satellite, unix_s)
        east = np.einsum("ck,ck->c", offset, _turned(self._east, angle))
        north = np.einsum("ck,ck->c", offset, _turned(self._north, angle))
        return np.asarray(np.degrees(np.arctan2(east, north)) % 360, dtype=np.float64)

    def _refined_maximum(self, satellite: Whole, low: Array, high: Array) -> Array:
        # Return the times of the highest elevation between ``low`` and ``high``.
        import numpy as np

        # 25 golden sections: two steps shrink below a millisecond.
        lower, upper = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        at_lower, at_upper = self.sine(satellite, lower), self.sine(satellite, upper)
        for _ in range(25):
            rising = at_lower < at_upper
            low, high = np.where(rising, lower, low), np.where(rising, high, upper)
            probe = np.where(rising, low + _GOLDEN * (high - low), high - _GOLDEN * (high - low))
            value = self.sine(satellite, probe)
            lower, upper = np.where(rising, upper, probe), np.where(rising, probe, lower)
            at_lower, at_upper = np.where(rising, at_upper, value), np.where(rising, value, at_lower)
        return (low + high) / 2

    def _crossing(self, satellite: Whole, below: Array, above: Array, mask: float) -> Array:
        # Return the times at which elevations cross the mask, whose sine is ``mask``.
        import numpy as np

        # A step of a minute, halved 20 times, is 0.06 ms.
        for _ in range(20):
            middle = (below + above) / 2
            under = self.sine(satellite, middle) < mask
            below, above = np.where(under, middle, below), np.where(under, above, middle)
        return (below + above) / 2

    def number_within(self, satellite_pass: Pass) -> int:
        return satellite_pass.satellite - self._first


class _Envelope:
    """Highest satellite at each multiple of ``HIGHEST_EVERY_S``."""

    def __init__(self, start_unix_s: float, duration_s: float) -> None:
        import numpy as np

        self._start = start_unix_s
        self._last = math.floor(duration_s / HIGHEST_EVERY_S)
        self._sine = np.full(self._last + 1, -np.inf)
        self._who = np.full(self._last + 1, -1, dtype=np.int64)

    def add(self, piece: _Piece, passes: Sequence[Pass]) -> None:
        # Enter the satellites of these passes where they are the highest.
        import numpy as np

        if not passes:
            return

        def moments(times: Sequence[float | None], none: float) -> Array:
            positions = np.array([none if time is None else (time - self._start) / HIGHEST_EVERY_S for time in times])
            return np.asarray(positions, dtype=np.float64)

        first = np.ceil(moments([pass_.rise_unix_s for pass_ in passes], 0.0)).astype(np.int64)
        last = np.floor(moments([pass_.set_unix_s for pass_ in passes], self._last)).astype(np.int64)
        count = np.maximum(last - first + 1, 0)
        which = np.repeat(np.arange(len(passes)), count)
        at = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count) + first[which]
        numbers = np.array([piece.number_within(pass_) for pass_ in passes])
        sine = piece.sine(numbers[which], self._start + at * HIGHEST_EVERY_S)
        order = np.lexsort((sine, at))
        best = order[np.append(np.diff(at[order]) > 0, True)] if len(order) else order
        best = best[sine[best] > self._sine[at[best]]]
        self._sine[at[best]] = sine[best]
        self._who[at[best]] = np.array([pass_.satellite for pass_ in passes])[which[best]]

    def mean_reign_s(self) -> float | None:
        import numpy as np

        in_sight = self._who >= 0
        if not in_sight.any():
            return None
        begins = in_sight & (np.diff(self._who, prepend=-1) != 0)
        return float(in_sight.sum() / begins.sum() * HIGHEST_EVERY_S)


def _in_sight(passes: Sequence[Pass], envelope: _Envelope, start_unix_s: float, duration_s: float) -> InSight:
    import numpy as np

    rises = [pass_.rise_unix_s for pass_ in passes if pass_.rise_unix_s is not None]
    sets = [pass_.set_unix_s for pass_ in passes if pass_.set_unix_s is not None]
    at_start = len(passes) - len(rises)
    times = np.array([*rises, *sets])
    order = np.argsort(times, kind="stable")
    counts = at_start + np.cumsum(np.array([1] * len(rises) + [-1] * len(sets), dtype=np.int64)[order])
    counts = np.concatenate([[at_start], counts])
    lasting = np.diff(np.concatenate([[start_unix_s], times[order], [start_unix_s + duration_s]]))
    # If a satellite sets as another rises, there is an interval of zero length between them.
    real = lasting > 0
    counts, lasting = counts[real], lasting[real]
    return InSight(
        fewest=int(counts.min()),
        mean=float((counts * lasting).sum() / duration_s),
        most=int(counts.max()),
        longest_gap_s=float(lasting[counts == 0].max(initial=0.0)),
        covered=float(lasting[counts > 0].sum() / duration_s),
        highest_for_s=envelope.mean_reign_s(),
    )


def _turned(vector: Array, angle_rad: Array) -> Array:
    """Return an Earth-fixed vector in the inertial frame, shape ``(angles, 3)``."""
    import numpy as np

    cosine, sine = np.cos(angle_rad), np.sin(angle_rad)
    x, y, z = vector
    return np.stack([cosine * x - sine * y, sine * x + cosine * y, np.full_like(cosine, z)], axis=-1)
