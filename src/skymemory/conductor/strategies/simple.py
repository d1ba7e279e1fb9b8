"""Session affinity: requests of one client go to one server.

Source: prefix-aware-routing ("session affinity"). Which server is found by rendezvous hashing, so that nothing is kept
per session and a server that leaves or comes moves only its own share of sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from skymemory.conductor.fleet import Server
from skymemory.conductor.request import Request
from skymemory.conductor.strategies.base import Forgetful, Ranking
from skymemory.conductor.strategies.hashing import NameHashes, hash_words, mix
from skymemory.conductor.strategies.loads import check_factor, loads_of, most_allowed


@dataclass(frozen=True, slots=True)
class SessionSettings:
    load_factor: float = 2.0
    """A session leaves its server for as long as that has more than this × the mean of requests under way."""

    def __post_init__(self) -> None:
        check_factor(self.load_factor)


class SessionAffinity(Forgetful):
    """The server whose hash with the session is highest, unless it is overloaded; without a session, least load."""

    name = "session"

    def __init__(self, settings: SessionSettings | None = None) -> None:
        self.settings = settings or SessionSettings()
        self._names = NameHashes()

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        loads = loads_of(servers, now_s)
        if not request.session:
            return Ranking(
                [-load for load in loads],
                reasons=("load only: the request names no session",),
                weights=(("requests there", loads),),
            )
        names = np.array([self._names.of(server.name) for server in servers], dtype=np.uint64)
        drawn = mix(names ^ np.uint64(hash_words(request.session.encode())))
        places = np.empty(len(servers), dtype=np.int64)
        places[np.argsort(drawn, kind="stable")] = np.arange(len(servers))
        most = most_allowed(loads, self.settings.load_factor)
        scores = [
            float(place) if load + 1.0 <= most else -1.0 - load
            for place, load in zip(places.tolist(), loads, strict=True)
        ]
        return Ranking(scores, reasons=(self._reason(places, loads, most),), weights=(("requests there", loads),))

    @staticmethod
    def _reason(places: np.ndarray[tuple[int], np.dtype[np.int64]], loads: Sequence[float], most: int) -> str:
        own = loads[int(places.argmax())]
        if own + 1.0 <= most:
            return "by its session"
        return f"away from its session's server: {own:.0f} requests are there, and {most} are allowed"
