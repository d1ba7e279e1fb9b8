"""How many requests servers have, and the bound over which a server is passed by."""

from __future__ import annotations

import math
from collections.abc import Sequence

from skymemory.conductor.fleet import Server
from skymemory.errors import InvalidInput

STALE_S = 5.0
"""A report older than this says nothing."""


def requests_at(server: Server, now_s: float) -> float:
    """Requests at a server: it may have others than ours, and its report may be older than what we sent since."""
    report = server.reported
    if report is None or now_s - report.at_s > STALE_S:
        return float(server.in_flight)
    return float(max(server.in_flight, report.waiting + report.running))


def loads_of(servers: Sequence[Server], now_s: float) -> list[float]:
    return [requests_at(server, now_s) for server in servers]


def most_allowed(loads: Sequence[float], factor: float) -> int:
    """Requests a server may have with the new one: the next whole number over ``factor`` × the mean.

    Rounded up, as in Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads" (2016). Rounded down,
    no server of eight could take a second request while one is under way, and all would go to the ring's first.
    """
    return math.ceil(factor * (sum(loads) + 1.0) / len(loads))


def check_factor(factor: float) -> None:
    if not (1.0 <= factor < math.inf):
        raise InvalidInput(f"load_factor is {factor}; expected 1 or more, such as 1.25")
