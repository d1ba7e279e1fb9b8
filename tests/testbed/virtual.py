"""A plan's constellation simulated in virtual time, in one process."""

from __future__ import annotations

from collections.abc import Mapping

from skymemory.constellation.torus import SatelliteId
from skymemory.protocol.client.machine import ClientConfig
from skymemory.protocol.clock import MoveClock
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.store.sky.store import ConstellationStore
from skymemory.testbed.connect import check_access, clock_of, expected_round_trip_s, settings_of, shell_of, sky_of
from skymemory.testbed.plan import ConstellationPlan
from skymemory.transport.faults import FaultInjector
from skymemory.transport.simulated import Node, SimulatedClient, SimulatedConstellation


class VirtualConstellation:
    """All satellites of a plan, with link delays by its geometry at every moment.

    Virtual time starts at 0, so ``epoch_s`` is usually 0. ``clocks``: of satellites with wrong clocks.
    """

    def __init__(
        self,
        plan: ConstellationPlan,
        faults: FaultInjector | None = None,
        clocks: Mapping[SatelliteId, MoveClock] | None = None,
    ) -> None:
        self.plan = plan
        self.clock = clock_of(plan)
        self._sight = sky_of(plan).sight
        self._onboard = plan.centre if plan.access == "onboard" else None
        shell = shell_of(plan)
        self._links_s = shell.isl_one_way_s("plane"), shell.isl_one_way_s("slot")
        self.simulated = SimulatedConstellation(
            sky_of(plan),
            plan.memory_per_satellite_bytes,
            self.clock,
            self._delay_s,
            faults,
            replacement=plan.memory_policy.replacement,
            eviction=plan.memory_policy.satellites(plan.replicas),
            clocks=clocks,
        )

    def _delay_s(self, sender: Node, receiver: Node) -> float:
        if isinstance(sender, SatelliteId) and isinstance(receiver, SatelliteId):
            return self._links_s[sender.plane == receiver.plane] * self.plan.delay_scale
        satellite = sender if isinstance(sender, SatelliteId) else receiver
        if not isinstance(satellite, SatelliteId) or satellite == self._onboard or self._sight is None:
            return 0.0
        now_s, sky = self.simulated.now_s, self.simulated.sky
        centre = sky.centre_at(self.clock.moves(now_s))
        return self._sight.one_way_s(satellite, centre, self.clock.sky_s(now_s)) * self.plan.delay_scale

    def connect(self, access: str | None = None, ground: int = 1) -> SimulatedClient:
        """A client; ``access`` overrides the plan's."""
        mode = check_access(self.plan, access or self.plan.access)
        rtt_s = expected_round_trip_s(self.plan, mode, self.simulated.now_s)
        return self.simulated.connect(ClientConfig(ground, mode, expected_rtt_s=rtt_s))

    def store(self, access: str | None = None, index: SharedIndex | None = None, ground: int = 1) -> ConstellationStore:
        """A store over it."""
        return ConstellationStore(self.connect(access, ground), self.simulated.sky, settings_of(self.plan), index=index)
