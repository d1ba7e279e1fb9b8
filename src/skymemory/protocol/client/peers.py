"""What a ground host knows of each satellite: its round trip, what it can take, when it was last heard."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass

from skymemory.constellation.torus import SatelliteId
from skymemory.protocol.capabilities import ASK_AGAIN_S, Capabilities
from skymemory.protocol.congestion import RoundTrip, Window
from skymemory.protocol.wire import Op

_WINDOW_FLOOR_BYTES = 64 * 1024
_CLOCK_GRAIN_S = 2e-6
"""Timestamps on the wire are whole microseconds."""


class Peer:
    """One satellite. Times before anything happened lie before all others."""

    __slots__ = ("_lacks", "_name", "_suspects", "answered_sent_s", "capabilities", "heard_s", "quiet", "round_trip")

    def __init__(self, name: SatelliteId, expected_rtt_s: float, suspects: Suspects) -> None:
        self.round_trip = RoundTrip(expected_rtt_s)
        self.heard_s = self.answered_sent_s = -math.inf
        self.quiet = False
        """It did not answer when it was asked in place of a silent one: it is not asked so again until it is heard."""
        self.capabilities: Capabilities | None = None
        """What its last PONG said; None before any."""
        self._lacks: dict[Op, float] = {}
        """What it cannot do, each until when that is believed."""
        self._name = name
        self._suspects = suspects

    def heard(self, round_trip_s: float | None, now_s: float) -> None:
        """A checked answer came from it."""
        self.heard_s = now_s
        self.quiet = False
        if self._suspects:
            self._suspects.heard(self._name)
        if round_trip_s is not None:
            self.round_trip.sample(round_trip_s)
            sent_s = now_s - round_trip_s
            if sent_s > self.answered_sent_s:
                self.answered_sent_s = sent_s

    def declares(self, capabilities: Capabilities, now_s: float) -> None:
        """It declares what it supports. What is not on that list is not asked of it for a while."""
        self.capabilities = capabilities
        if capabilities.stated:
            lacking = (op for op in Op if op.is_command and not capabilities.serves(op))
            self._lacks = dict.fromkeys(lacking, now_s + ASK_AGAIN_S)

    def cannot(self, op: Op, now_s: float) -> None:
        """It has said so of ``op``, or has answered all but this."""
        self._lacks[op] = now_s + ASK_AGAIN_S

    def lacks(self, op: Op, now_s: float) -> bool:
        """Whether there is no use in asking it for ``op`` now."""
        return bool(self._lacks) and now_s < self._lacks.get(op, -math.inf)

    def ignores(self, op: Op) -> bool:
        """Whether it may leave ``op`` unanswered because it does not know it: it has not said otherwise."""
        known = self.capabilities
        return known is not None and not (known.stated and known.serves(op))


class Links:
    """Windows towards the beams, one window for all that comes to us, and the health of every satellite."""

    def __init__(self, inbound_bytes: int, credit_bytes: int, expected_rtt_s: float) -> None:
        self.inbound = Window(inbound_bytes, _WINDOW_FLOOR_BYTES)
        self._credit_bytes = credit_bytes
        self._expected_rtt_s = expected_rtt_s
        self.suspects = Suspects()
        self._outbound: dict[SatelliteId, Window] = {}
        self._peers: dict[SatelliteId, Peer] = {}

    def outbound(self, beam: SatelliteId) -> Window:
        """What may be on its way up this beam."""
        window = self._outbound.get(beam)
        if window is None:
            window = self._outbound[beam] = Window(self._credit_bytes, _WINDOW_FLOOR_BYTES)
        return window

    def rerouted(self) -> None:
        """The gateway is another: what was measured through the one before says little of the ways through this one."""
        for peer in self._peers.values():
            peer.round_trip.rerouted()

    def round_trip(self, satellite: SatelliteId) -> RoundTrip:
        return self.peer(satellite).round_trip

    def peer(self, satellite: SatelliteId) -> Peer:
        """What is known of it."""
        found = self._peers.get(satellite)
        if found is None:
            found = self._peers[satellite] = Peer(satellite, self._expected_rtt_s, self.suspects)
        return found

    def quiet(self, satellite: SatelliteId) -> bool:
        """Whether it is of no use to ask it in place of a silent one."""
        return satellite in self.suspects or self.peer(satellite).quiet

    def heard_late(self, satellite: SatelliteId, round_trip_s: float | None, now_s: float) -> None:
        """It has answered what is no longer waited for: it lives, and is so late."""
        if (peer := self._peers.get(satellite)) is not None:
            peer.heard(round_trip_s, now_s)

    def grace_s(self, satellite: SatelliteId) -> float:
        """How long the rest of an answer may lag behind the part that is here."""
        return max(self.round_trip(satellite).smoothed_s / 4, 0.002)

    def silent_since_s(self, satellite: SatelliteId, asked_s: float) -> float:
        """Since when we have waited for a word, having asked at ``asked_s``."""
        return max(asked_s, self.peer(satellite).heard_s)

    def overtaken(self, satellite: SatelliteId, sent_s: float) -> bool:
        """Whether something sent later than ``sent_s`` has been answered: satellites serve in order of arrival."""
        return self.peer(satellite).answered_sent_s > sent_s + _CLOCK_GRAIN_S

    def answered_since(self, satellite: SatelliteId, sent_s: float) -> bool:
        """Whether something sent then, or later, has been answered."""
        return self.peer(satellite).answered_sent_s > sent_s - _CLOCK_GRAIN_S

    def heard_anybody_since(self, time_s: float, but: Container[SatelliteId] = ()) -> bool:
        """Whether any satellite, ``but`` these, has answered since then. Looks at all: for when something is wrong."""
        return any(peer.heard_s > time_s for here, peer in self._peers.items() if here not in but)


# Satellites that did not answer: whoever needs one fails at once, and pings of our own find out when it is back.
#
# No operation waits for a suspect again. It is asked every now and then, ever more rarely: after a quarter of the time
# for which it has been silent, between ``_SOONEST_S`` and ``_LATEST_S``. The first word from it ends the suspicion.


_SOONEST_S = 0.25
_LATEST_S = 4.0
MOST_SUSPECTS = 64
"""What is suspected beyond that replaces who has been silent the longest: so many are asked at most."""


@dataclass(slots=True)
class _Suspicion:
    since_s: float
    ask_s: float


class Suspects:
    """Who they are, and when to ask each. Its owner tells it who has been heard."""

    def __init__(self) -> None:
        self._suspicions: dict[SatelliteId, _Suspicion] = {}
        self._fresh: list[SatelliteId] = []
        self.next_s = math.inf
        """None is to be asked earlier, and nothing else has changed."""
        self.added = 0
        """How many were added so far: who has looked at all of them need not look again until this has changed."""

    def __len__(self) -> int:
        return len(self._suspicions)

    def __contains__(self, satellite: SatelliteId) -> bool:
        return satellite in self._suspicions

    def add(self, satellite: SatelliteId, now_s: float) -> None:
        """It has been silent for too long."""
        if satellite in self._suspicions:
            return
        if len(self._suspicions) >= MOST_SUSPECTS:
            del self._suspicions[next(iter(self._suspicions))]
        self._suspicions[satellite] = _Suspicion(now_s, now_s + _SOONEST_S)
        self.added += 1
        self._fresh.append(satellite)
        self.next_s = min(self.next_s, now_s)

    def heard(self, satellite: SatelliteId) -> None:
        """It is there after all."""
        if self._suspicions.pop(satellite, None) is not None:
            self._look()

    def due(self, now_s: float) -> list[SatelliteId]:
        """Whom to ask now."""
        if now_s < self.next_s:
            return []
        asked = [satellite for satellite, suspicion in self._suspicions.items() if suspicion.ask_s <= now_s]
        for satellite in asked:
            suspicion = self._suspicions[satellite]
            silent_s = now_s - suspicion.since_s
            suspicion.ask_s = now_s + min(max(silent_s / 4, _SOONEST_S), _LATEST_S)
        self._look()
        return asked

    def ask_all(self, now_s: float) -> None:
        """All are to be asked now: things have changed."""
        for suspicion in self._suspicions.values():
            suspicion.ask_s = now_s
        self._look()

    def take_fresh(self) -> list[SatelliteId]:
        """Those that became suspect since the last time, and still are."""
        fresh, self._fresh = self._fresh, []
        return [satellite for satellite in fresh if satellite in self._suspicions]

    def _look(self) -> None:
        self.next_s = min((suspicion.ask_s for suspicion in self._suspicions.values()), default=math.inf)
