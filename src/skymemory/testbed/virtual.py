from __future__ import annotations

from collections.abc import Mapping

from skymemory.constellation.links import LinkQueues, elevation_deg
from skymemory.constellation.sight import Sight
from skymemory.constellation.torus import SatelliteId
from skymemory.constellation.visibility import GroundHost
from skymemory.protocol.client.machine import ClientConfig
from skymemory.protocol.clock import MoveClock
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.store.sky.store import ConstellationStore
from skymemory.testbed.connect import check_access, clock_of, expected_round_trip_s, settings_of, shell_of, sky_of
from skymemory.testbed.plan import ConstellationPlan
from skymemory.transport.faults import FaultInjector
from skymemory.transport.simulated import Machine, Node, SimulatedClient, SimulatedConstellation


class VirtualConstellation:
    """All satellites of a plan in one process and virtual time, which starts at 0."""

    def __init__(
        self,
        plan: ConstellationPlan,
        faults: FaultInjector | None = None,
        clocks: Mapping[SatelliteId, MoveClock] | None = None,
        machine: Machine | None = None,
    ) -> None:
        self.plan = plan
        self.clock = clock_of(plan)
        self._sight = sky_of(plan).sight
        self._centre = (0, 0), sky_of(plan).centre_at((0, 0))
        self._onboard = plan.torus.living(plan.centre) if plan.access == "onboard" else None
        self._links_s: dict[tuple[Node, Node], float] = {}
        self._sights: dict[Node, Sight] = {}
        self._places: dict[Node, str] = {}
        self.simulated = SimulatedConstellation(
            sky_of(plan),
            plan.memory_per_satellite_bytes,
            self.clock,
            self._delay_s,
            faults,
            replacement=plan.memory_policy.replacement,
            eviction=plan.memory_policy.satellites(plan.replicas),
            clocks=clocks,
            queues=None
            if plan.links is None
            else LinkQueues(plan.links, plan.epoch_s, self._elevation_deg, self._place_of, self._onboard),
            machine=machine,
        )

    def _elevation_deg(self, satellite: SatelliteId, host: Node, now_s: float) -> float:
        centre = self.simulated.sky.centre_at(self.clock.moves(now_s))
        sight = self._sights.get(host, self._sight)
        assert sight is not None
        one_way_s = sight.one_way_s(satellite, centre, self.clock.sky_s(now_s))
        return elevation_deg(shell_of(self.plan).altitude_m, one_way_s)

    def _place_of(self, host: Node) -> str:
        return self._places.get(host, "")

    def _delay_s(self, sender: Node, receiver: Node) -> float:
        """Return the one-way delay of a link or beam at this time."""
        if isinstance(sender, SatelliteId) and isinstance(receiver, SatelliteId):
            link_s = self._links_s.get((sender, receiver))
            if link_s is None:
                link_s = shell_of(self.plan).hop_one_way_s(self.plan.torus, sender, receiver) * self.plan.delay_scale
                self._links_s[sender, receiver] = link_s
            return link_s
        satellite = sender if isinstance(sender, SatelliteId) else receiver
        if not isinstance(satellite, SatelliteId) or satellite == self._onboard or self._sight is None:
            return 0.0
        now_s = self.simulated.now_s
        moves, centre = self.clock.moves(now_s), self._centre[1]
        if moves != self._centre[0]:
            centre = self.simulated.sky.centre_at(moves)
            self._centre = moves, centre
        sight = self._sight
        if self._sights:
            sight = self._sights.get(receiver if satellite is sender else sender, sight)
        return sight.one_way_s(satellite, centre, self.clock.sky_s(now_s)) * self.plan.delay_scale

    def connect(self, access: str | None = None, ground: int = 1, place: GroundHost | None = None) -> SimulatedClient:
        """Return a client as ground host ``ground``, at ``place`` if not the plan's."""
        mode = check_access(self.plan, access or self.plan.access)
        rtt_s = expected_round_trip_s(self.plan, mode, self.simulated.now_s, place)
        config = ClientConfig(ground, mode, expected_rtt_s=rtt_s, links=self.plan.links)
        if place is None:
            return self.simulated.connect(config)
        sky = sky_of(self.plan, place)
        assert sky.sight is not None
        self._sights["ground", ground] = sky.sight
        self._places["ground", ground] = f"{place.latitude_deg:g},{place.longitude_deg:g}"
        return self.simulated.connect(config, sky)

    def store(
        self,
        access: str | None = None,
        index: SharedIndex | None = None,
        ground: int = 1,
        place: GroundHost | None = None,
    ) -> ConstellationStore:
        client = self.connect(access, ground, place)
        return ConstellationStore(client, self.simulated.sky, settings_of(self.plan, ground=place), index=index)
