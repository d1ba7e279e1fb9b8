"""The ground's side of a plan: where the host is, how it moves, how low it sees, which satellite is its gateway."""

from __future__ import annotations

from dataclasses import dataclass

from skymemory.constellation.presets import DEFAULT_HOST, Preset
from skymemory.constellation.sight import GATEWAY_RULES, BoxSight, OrbitSight, Sight, check_mask
from skymemory.constellation.torus import SatelliteId
from skymemory.constellation.track import Track, track_over
from skymemory.constellation.trajectory import Place, Trajectory, Waypoint
from skymemory.constellation.visibility import DEFAULT_MASK_DEG, GroundHost
from skymemory.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Ground:
    """Degrees north, east and above the horizon. With ``waypoints`` the host follows them, by the satellites' time
    since the epoch, and latitude and longitude do not count. ``gateway`` is a ``GATEWAY_RULES``.
    """

    latitude_deg: float = DEFAULT_HOST.latitude_deg
    longitude_deg: float = DEFAULT_HOST.longitude_deg
    mask_deg: float = DEFAULT_MASK_DEG
    gateway: str = "nearest"
    waypoints: tuple[Waypoint, ...] = ()

    def __post_init__(self) -> None:
        check_mask(self.mask_deg)
        if self.gateway not in GATEWAY_RULES:
            raise InvalidInput(f"gateway {self.gateway!r}: expected one of {', '.join(GATEWAY_RULES)}")
        if self.waypoints:
            Trajectory(self.waypoints)
        GroundHost(self.latitude_deg, self.longitude_deg)

    @property
    def place(self) -> Place:
        if self.waypoints:
            return Trajectory(self.waypoints)
        return GroundHost(self.latitude_deg, self.longitude_deg)

    def track(self, preset: Preset) -> Track | None:
        """The overhead point's; None for a preset whose centre is fixed, because its grid is no orbit."""
        if preset.fixed_centre is not None:
            return None
        return track_over(preset.shell, self.place, preset.epoch_unix_s)

    def centre(self, preset: Preset) -> SatelliteId:
        """The satellite overhead at the epoch."""
        track = self.track(preset)
        return preset.centre if track is None else preset.torus.wrap(*track.cell_at(0.0))

    def sight(self, preset: Preset) -> Sight:
        if preset.fixed_centre is not None:
            return BoxSight(preset.shell, preset.torus, self.mask_deg)
        rule = next(rule for rule in GATEWAY_RULES if rule == self.gateway)
        return OrbitSight(preset.shell, self.place, preset.epoch_unix_s, self.mask_deg, rule)
