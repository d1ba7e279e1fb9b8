"""How far the sky is: which satellite holds what at a moment of the simulation, and how long light takes there.

All of it is asked of what flies: the move clock and the map of a constellation's plan, its placement, and what a ground
station sees of the real orbits. Nothing here is a constant: boxes move, chunks are handed over with them, gateways set.
"""

from __future__ import annotations

import math

from skymemory.constellation.torus import SatelliteId
from skymemory.placement.locate import Moves, Placement
from skymemory.protocol.motion import STRATEGY_CODES
from skymemory.sim.cluster.pool_settings import SkySetup
from skymemory.testbed.ground import Ground
from skymemory.testbed.plan import make_plan
from skymemory.testbed.wiring import clock_of, shell_of, sky_of


class SkyGeometry:
    """The box over the ground station of a preset, from its epoch on, as it flies.

    Raises:
        InvalidInput, UnknownPreset: no such preset, strategy, access mode, or box.
    """

    def __init__(self, setup: SkySetup) -> None:
        self.plan = make_plan(
            setup.preset,
            servers=setup.servers,
            strategy=setup.strategy,
            access=setup.access,
            time_scale=1.0,
            ground=Ground(gateway=setup.gateway),
        )
        self._clock, self._sky = clock_of(self.plan), sky_of(self.plan)
        self._strategy = STRATEGY_CODES[self.plan.strategy]  # type: ignore[index]
        shell = shell_of(self.plan)
        self.slot_period_s = shell.period_s / shell.slots_per_plane
        self._slot_link_s, self._plane_link_s = shell.isl_one_way_s("slot"), shell.isl_one_way_s("plane")
        self._step_s = setup.geometry_s
        self._step: tuple[Moves, int] | None = None
        self._look_s = 0.0
        self._moves: Moves = (0, 0)
        self._moves_until_s = -math.inf
        self._centre = self.plan.centre
        self._seen: tuple[SatelliteId, ...] = ()
        self._beam_s = 0.0
        self._one_way: dict[SatelliteId, float] = {}
        self._round_trips: dict[Moves, float] = {}

    @property
    def placement(self) -> Placement:
        return self._sky.placement(self._strategy, self.plan.servers)

    def moves(self, now_s: float) -> Moves:
        """Of the box, since the epoch. Calls come in the order of time."""
        if now_s >= self._moves_until_s:
            self._moves = self._clock.moves(now_s)
            next_s = self._clock.next_move_s(now_s)
            self._moves_until_s = math.inf if next_s is None else next_s
        return self._moves

    def servers_at(self, set_moves: Moves, now_s: float) -> tuple[SatelliteId, ...]:
        """Who holds now what was set at ``set_moves``, by server: the locator's closed form."""
        return self._sky.servers_at(self._strategy, self.plan.servers, set_moves, self.moves(now_s))

    def round_trip_s(self, set_moves: Moves, now_s: float) -> float:
        """There and back to the farthest server of a value set at ``set_moves``; infinite while none is in reach."""
        step = self.moves(now_s), math.floor(now_s / self._step_s)
        if step != self._step:
            self._look(step, now_s)
        found = self._round_trips.get(set_moves)
        if found is None:
            found = 2 * max(self._one_way_s(satellite) for satellite in self.servers_at(set_moves, now_s))
            self._round_trips[set_moves] = found
        return found

    def _look(self, step: tuple[Moves, int], now_s: float) -> None:
        """The beams of this step, as they are when it is first asked for: never those of before a move."""
        self._step, self._look_s = step, now_s
        self._one_way.clear()
        self._round_trips.clear()
        self._centre = self._sky.centre_at(step[0])
        sight = self._sky.sight
        assert sight is not None
        if self.plan.access == "onboard":
            self._seen, self._beam_s = (self._centre,), 0.0
            return
        self._seen = sight.in_sight(self._centre, now_s)
        self._beam_s = self._beam_to(self._seen[0]) if self._seen else math.inf

    def _beam_to(self, satellite: SatelliteId) -> float:
        assert self._sky.sight is not None
        return self._sky.sight.one_way_s(satellite, self._centre, self._look_s)

    def _one_way_s(self, satellite: SatelliteId) -> float:
        found = self._one_way.get(satellite)
        if found is None:
            access = self.plan.access
            if access == "los" or (access == "hybrid" and satellite in self._seen):
                found = self._beam_to(satellite)
            elif self._beam_s == math.inf:
                found = math.inf
            else:
                slots, planes = self.plan.torus.delta(self._seen[0], satellite)
                found = self._beam_s + abs(slots) * self._slot_link_s + abs(planes) * self._plane_link_s
            self._one_way[satellite] = found
        return found
