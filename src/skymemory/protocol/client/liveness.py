"""State of each satellite as seen by a client, and detection of dead and recovered satellites.

1. A request unanswered for too long makes its satellite a suspect; operations that need it fail or read elsewhere.
2. Probes (PINGs) go to suspects at growing intervals, and to their neighbours, so that a dead plane is known before a
   read waits for it. Any answer ends a suspicion.
3. If no satellite answers, the gateway is skipped; then the circuit breaker opens.
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass

from skymemory.circuit_breaker import BreakerConfig, CircuitBreaker
from skymemory.constellation.torus import SatelliteId
from skymemory.metrics import Counters
from skymemory.protocol.client.gateway import Gateway, nearest
from skymemory.protocol.clock import SkyMap
from skymemory.protocol.congestion import RoundTrip, Window
from skymemory.protocol.messages import ASK_AGAIN_S, Capabilities
from skymemory.protocol.wire import Op

_WINDOW_FLOOR_BYTES = 64 * 1024
_LANE_FLOOR_BYTES = 16 * 1024
UNLIMITED = math.inf, 0
"""No rate: only receivers bound what is in flight."""
_LEAST_GRACE_S = 0.002
_OVERTAKING_MARGIN = 1.25
_OVERTAKING_S = 30.0
_CLOCK_GRAIN_S = 2e-6


class Peer:
    __slots__ = (
        "_answer_number",
        "_name",
        "_notice_number",
        "_suspects",
        "_unsupported_until_s",
        "answered_sent_s",
        "capabilities",
        "heard_s",
        "quiet",
        "round_trip",
    )

    def __init__(self, name: SatelliteId, expected_rtt_s: float, suspects: Suspects) -> None:
        self.round_trip = RoundTrip(expected_rtt_s)
        self.heard_s = self.answered_sent_s = -math.inf
        self.quiet = False
        self.capabilities: Capabilities | None = None
        self._unsupported_until_s: dict[Op, float] = {}
        self._name = name
        self._suspects = suspects
        self._answer_number = self._notice_number = -1

    def is_new(self, number: int) -> bool:
        is_new = number > self._answer_number
        self._answer_number = max(self._answer_number, number)
        return is_new

    def is_new_notice(self, number: int) -> bool:
        is_new = number > self._notice_number
        self._notice_number = max(self._notice_number, number)
        return is_new

    def on_answer(self, round_trip_s: float | None, now_s: float) -> None:
        """Record an answer, which ends a suspicion; ``round_trip_s`` None: not measurable."""
        self.heard_s = now_s
        self.quiet = False
        if self._suspects:
            self._suspects.remove(self._name)
        if round_trip_s is not None:
            self.round_trip.sample(round_trip_s)
            sent_s = now_s - round_trip_s
            if sent_s > self.answered_sent_s:
                self.answered_sent_s = sent_s

    def on_capabilities(self, capabilities: Capabilities, now_s: float) -> None:
        self.capabilities = capabilities
        if capabilities.stated:
            unsupported = (op for op in Op if op.is_command and not capabilities.serves(op))
            self._unsupported_until_s = dict.fromkeys(unsupported, now_s + ASK_AGAIN_S)

    def on_unsupported(self, op: Op, now_s: float) -> None:
        self._unsupported_until_s[op] = now_s + ASK_AGAIN_S

    def lacks(self, op: Op, now_s: float) -> bool:
        return bool(self._unsupported_until_s) and now_s < self._unsupported_until_s.get(op, -math.inf)

    def may_ignore(self, op: Op) -> bool:
        known = self.capabilities
        return known is not None and not (known.stated and known.serves(op))


class Peers:
    def __init__(
        self,
        inbound_bytes: int,
        credit_bytes: int,
        expected_rtt_s: float,
        up: tuple[float, int] = UNLIMITED,
        down: tuple[float, int] = UNLIMITED,
    ) -> None:
        """Create the state. ``up`` and ``down`` are a beam's bytes/s and most bytes in flight."""
        self.inbound = Window(inbound_bytes, _WINDOW_FLOOR_BYTES)
        self._up, self._down = up, down
        self.up_bytes_s = up[0]
        self._lanes: dict[SatelliteId, Window] = {}
        self._credit_bytes = credit_bytes
        self._expected_rtt_s = expected_rtt_s
        self.suspects = Suspects()
        self._overtaking_lag_s, self._overtaken_until_s = 0.0, -math.inf
        self._outbound: dict[SatelliteId, Window] = {}
        self._peers: dict[SatelliteId, Peer] = {}

    def outbound(self, beam: SatelliteId) -> Window:
        """Return the window for bytes sent up a satellite's beam."""
        window = self._outbound.get(beam)
        if window is None:
            rate_bytes_s, most_bytes = self._up
            if rate_bytes_s < math.inf:
                window = Window(min(self._credit_bytes, most_bytes), _LANE_FLOOR_BYTES, rate_bytes_s, most_bytes)
            else:
                window = Window(self._credit_bytes, _WINDOW_FLOOR_BYTES)
            self._outbound[beam] = window
        return window

    def lane(self, beam: SatelliteId) -> Window | None:
        """Return the window for answers down a satellite's beam; None if link rates are unlimited."""
        rate_bytes_s, most_bytes = self._down
        if rate_bytes_s == math.inf:
            return None
        lane = self._lanes.get(beam)
        if lane is None:
            lane = self._lanes[beam] = Window(most_bytes, _LANE_FLOOR_BYTES, rate_bytes_s, most_bytes)
        return lane

    def rerouted(self) -> None:
        for peer in self._peers.values():
            peer.round_trip.rerouted()

    def peer(self, satellite: SatelliteId) -> Peer:
        peer = self._peers.get(satellite)
        if peer is None:
            peer = self._peers[satellite] = Peer(satellite, self._expected_rtt_s, self.suspects)
        return peer

    def quiet(self, satellite: SatelliteId) -> bool:
        return satellite in self.suspects or self.peer(satellite).quiet

    def heard_late(
        self, satellite: SatelliteId, round_trip_s: float | None, now_s: float, number: int | None = None
    ) -> None:
        """Record an answer to a request no longer awaited, unless its ``number`` shows a replay."""
        if (peer := self._peers.get(satellite)) is None:
            return
        if number is None or (peer.is_new(number) and round_trip_s is not None):
            peer.on_answer(round_trip_s, now_s)

    def grace_s(self, satellite: SatelliteId, now_s: float) -> float:
        """Return the lag after which the rest of an answer seems lost."""
        overtaken_s = self._overtaking_lag_s if now_s < self._overtaken_until_s else 0.0
        return max(self.peer(satellite).round_trip.smoothed_s / 4, _LEAST_GRACE_S, _OVERTAKING_MARGIN * overtaken_s)

    def overtaken_by(self, late_s: float, now_s: float) -> None:
        if now_s >= self._overtaken_until_s or late_s >= self._overtaking_lag_s:
            self._overtaking_lag_s, self._overtaken_until_s = late_s, now_s + _OVERTAKING_S

    def silent_since_s(self, satellite: SatelliteId, asked_s: float) -> float:
        return max(asked_s, self.peer(satellite).heard_s)

    def overtaken(self, satellite: SatelliteId, sent_s: float) -> bool:
        """Return True if a packet sent later was answered: satellites serve in order."""
        return self.peer(satellite).answered_sent_s > sent_s + _CLOCK_GRAIN_S

    def answered_since(self, satellite: SatelliteId, sent_s: float) -> bool:
        return self.peer(satellite).answered_sent_s > sent_s - _CLOCK_GRAIN_S

    def any_heard_since(self, time_s: float, but: Container[SatelliteId] = ()) -> bool:
        return any(peer.heard_s > time_s for satellite, peer in self._peers.items() if satellite not in but)


_FIRST_WAIT_S, _LAST_WAIT_S = 0.25, 4.0
MAX_SUSPECTS = 64


@dataclass(slots=True)
class _Suspicion:
    since_s: float
    probe_s: float


class Suspects:
    """Satellites considered dead, and when to probe each."""

    def __init__(self) -> None:
        self._suspicions: dict[SatelliteId, _Suspicion] = {}
        self._new_suspects: list[SatelliteId] = []
        self.next_s = math.inf
        self.added = 0

    def __len__(self) -> int:
        return len(self._suspicions)

    def __contains__(self, satellite: object) -> bool:
        return satellite in self._suspicions

    def add(self, satellite: SatelliteId, now_s: float) -> None:
        """Suspect a satellite; beyond the limit, the oldest suspect is dropped."""
        if satellite in self._suspicions:
            return
        if len(self._suspicions) >= MAX_SUSPECTS:
            del self._suspicions[next(iter(self._suspicions))]
        self._suspicions[satellite] = _Suspicion(now_s, now_s + _FIRST_WAIT_S)
        self.added += 1
        self._new_suspects.append(satellite)
        self.next_s = min(self.next_s, now_s)

    def remove(self, satellite: SatelliteId) -> None:
        if self._suspicions.pop(satellite, None) is not None:
            self._update_next_s()

    def take_due(self, now_s: float) -> list[SatelliteId]:
        """Return the suspects to probe now, at intervals of a quarter of their silence."""
        if now_s < self.next_s:
            return []
        due_now = [satellite for satellite, suspicion in self._suspicions.items() if suspicion.probe_s <= now_s]
        for satellite in due_now:
            suspicion = self._suspicions[satellite]
            silent_s = now_s - suspicion.since_s
            suspicion.probe_s = now_s + min(max(silent_s / 4, _FIRST_WAIT_S), _LAST_WAIT_S)
        self._update_next_s()
        return due_now

    def probe_all(self, now_s: float) -> None:
        for suspicion in self._suspicions.values():
            suspicion.probe_s = now_s
        self._update_next_s()

    def take_new(self) -> list[SatelliteId]:
        new, self._new_suspects = self._new_suspects, []
        return [satellite for satellite in new if satellite in self._suspicions]

    def _update_next_s(self) -> None:
        self.next_s = min((suspicion.probe_s for suspicion in self._suspicions.values()), default=math.inf)


_RECENT_S = 1.0
_MAX_SCOUTED = 32
_WITNESSES = 3
Probes = list[tuple[SatelliteId, bool]]
"""PINGs to send: the satellite, and True if sent only once."""


_NO_SATELLITE_ANSWERS = BreakerConfig(failures=1, first_wait_s=0.1, last_wait_s=2.0, probe_limit_s=None)


class FailureDetector:
    """Decisions on what to probe, and when the gateway or the constellation (``breaker``) is dead."""

    def __init__(self, sky: SkyMap, peers: Peers, gateway: Gateway | None, counters: Counters) -> None:
        self.breaker = CircuitBreaker(_NO_SATELLITE_ANSWERS)
        self._sky = sky
        self._peers = peers
        self._gateway = gateway
        self._counters = counters
        self._witnesses_asked_s = -math.inf
        self._neighbour_asked_s: dict[SatelliteId, float] = {}

    def refuses(self, satellite: SatelliteId | None) -> bool:
        if not self.breaker.closed:
            self._counters.add("breaker_refused")
            return True
        return satellite is not None and satellite in self._peers.suspects

    @property
    def next_s(self) -> float:
        return self._peers.suspects.next_s if self.breaker.closed else self.breaker.next_probe_s

    def take_due_probes(self, centre: SatelliteId, now_s: float) -> Probes:
        """Return probes of suspects and their neighbours, or of witnesses if no satellite answers."""
        if not self.breaker.closed:
            if not self.breaker.probe_due(now_s):
                return []
            self._counters.add("breaker_probes")
            return self._get_witness_probes(None, centre, once=True)
        suspects = self._peers.suspects
        probes: Probes = [(satellite, True) for satellite in suspects.take_due(now_s)]
        if probes:
            self._counters.add("suspects_asked", len(probes))
        return probes + self._get_neighbour_probes(now_s)

    def _get_neighbour_probes(self, now_s: float) -> Probes:
        """Return probes of new suspects' neighbours not heard recently: satellites fail by plane or computer."""
        suspects, probes = self._peers.suspects, Probes()
        for suspect in suspects.take_new():
            if len(suspects) > _MAX_SCOUTED:
                break
            for satellite in self._sky.torus.neighbours(suspect):
                recent_s = max(self._peers.peer(satellite).heard_s, self._neighbour_asked_s.get(satellite, -math.inf))
                if satellite not in suspects and recent_s < now_s - _RECENT_S:
                    self._neighbour_asked_s[satellite] = now_s
                    self._counters.add("neighbours_of_suspects_asked")
                    probes.append((satellite, False))
        return probes

    def overdue(
        self, satellite: SatelliteId, begun_s: float, sent_s: float, centre: SatelliteId, now_s: float
    ) -> Probes:
        """Return probes for an overdue request, if no satellite was heard since ``sent_s``: of witnesses on other
        planes, then through the next gateway.
        """
        gateway = self._gateway.current if self._gateway is not None else None
        direct: frozenset[SatelliteId] = frozenset()
        if self._gateway is not None and self._gateway.beam(satellite) == gateway:
            direct = self._gateway.direct - {gateway}  # their answers prove nothing about the gateway
        if self._peers.any_heard_since(sent_s, direct):
            return []
        if self._witnesses_asked_s < begun_s:
            self._witnesses_asked_s = now_s
            return self._get_witness_probes(satellite, centre, once=False)
        if sent_s < self._witnesses_asked_s or self._peers.any_heard_since(self._witnesses_asked_s, direct):
            return []
        self._witnesses_asked_s = now_s
        if self._gateway is not None:
            self._gateway.silent(satellite, now_s)
        return self._get_witness_probes(satellite, centre, once=False)

    def succeeded(self, now_s: float) -> None:
        if self.breaker.answered():
            self._counters.add("breaker_closed")
            self._peers.suspects.probe_all(now_s)

    def timed_out(self, started_s: float, now_s: float) -> None:
        """Record a timeout: if no satellite was heard since the operation started, open the breaker."""
        if not self._peers.any_heard_since(started_s):
            if self.breaker.closed:
                self._counters.add("breaker_opened")
            self.breaker.timed_out(now_s, probe_at_once=True)

    def _get_witness_probes(self, silent: SatelliteId | None, centre: SatelliteId, once: bool) -> Probes:
        gateway = [] if self._gateway is None or self._gateway.current is None else [self._gateway.current]
        return [(satellite, once) for satellite in (*witnesses(self._sky, centre, silent), *gateway)]


def witnesses(sky: SkyMap, centre: SatelliteId, silent: SatelliteId | None) -> list[SatelliteId]:
    """Return satellites near the box's centre, on different planes, none on ``silent``'s."""
    near = [satellite for satellite in nearest(centre, sky.torus) if silent is None or satellite.plane != silent.plane]
    by_plane = {satellite.plane: satellite for satellite in reversed(near)}
    return sorted(by_plane.values(), key=near.index)[:_WITNESSES] or near[:1] or [sky.torus.living(centre)]
