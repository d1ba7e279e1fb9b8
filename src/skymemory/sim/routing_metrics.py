"""What is told of a simulated run: time to the first token, hits, and how evenly requests were spread."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from skymemory.errors import InvalidInput
from skymemory.sim.routing import Outcome

WINDOW_S = 60.0
WINDOW_REQUESTS = 80


@dataclass(frozen=True, slots=True)
class RoutingMetrics:
    """Of the requests that were measured."""

    requests: int
    mean_s: float
    """Mean time to the first token; ``p50_s``, ``p90_s``, ``p99_s`` are its percentiles."""
    p50_s: float
    p90_s: float
    p99_s: float
    token_hits: float
    """Part of the prompts' tokens that hit."""
    block_hits: float
    """Part of their whole blocks."""
    worst_share: float
    """The most requests that one server got in a window of 60 s, over the mean of the servers in it; 0: no window."""
    spread: float
    """Standard deviation of the requests per server, over their mean."""

    def as_json(self) -> dict[str, float]:
        return {name: value if isinstance(value, int) else round(value, 6) for name, value in asdict(self).items()}


def measured(outcomes: Sequence[Outcome], servers: int, from_s: float = 0.0) -> RoutingMetrics:
    """The metrics of the requests that arrived at ``from_s`` or later.

    Raises:
        InvalidInput: there are none.
    """
    late = [outcome for outcome in outcomes if outcome.at_s >= from_s]
    if not late:
        raise InvalidInput(f"no request arrived at {from_s:g} s or later: nothing to measure")
    ttft_s = np.array([outcome.ttft_s for outcome in late])
    p50_s, p90_s, p99_s = (float(value) for value in np.percentile(ttft_s, [50, 90, 99]))
    counts = np.bincount([outcome.server for outcome in late], minlength=servers)
    return RoutingMetrics(
        requests=len(late),
        mean_s=float(ttft_s.mean()),
        p50_s=p50_s,
        p90_s=p90_s,
        p99_s=p99_s,
        token_hits=sum(outcome.hit_tokens for outcome in late) / sum(outcome.tokens for outcome in late),
        block_hits=sum(outcome.hit_blocks for outcome in late) / max(1, sum(outcome.blocks for outcome in late)),
        worst_share=worst_share([(outcome.at_s, outcome.server) for outcome in late], servers),
        spread=float(counts.std() / counts.mean()),
    )


def worst_share(
    arrivals: Sequence[tuple[float, int]],
    servers: int,
    window_s: float = WINDOW_S,
    least: int = WINDOW_REQUESTS,
) -> float:
    """Over every window of ``window_s`` with ``least`` requests or more: a server's requests over the servers' mean.

    ``arrivals``: (s, server) in the order of time. A window is closed at its begin and open at its end; each that
    differs from its neighbour in what it holds is looked at.
    """
    comes = [(at_s, 1, server) for at_s, server in arrivals]
    goes = [(at_s + window_s, 0, server) for at_s, server in arrivals]
    counts = [0] * servers
    inside, worst, before_s = 0, 0.0, None
    for at_s, is_new, server in heapq.merge(goes, comes):
        if at_s != before_s and inside >= least:
            worst = max(worst, max(counts) * servers / inside)
        step = 1 if is_new else -1
        counts[server] += step
        inside += step
        before_s = at_s
    return worst
