"""Outcomes of the routing simulator, and their metrics."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from skymemory.errors import InvalidInput
from skymemory.metrics import percentile
from skymemory_lab.sim.trace import BLOCK_TOKENS

WINDOW_S = 60.0
WINDOW_REQUESTS = 80
USED = 0.25
"""A server with at least this share of the mean requests counts as used."""


@dataclass(frozen=True, slots=True)
class RoutedOutcome:
    at_s: float
    server: int
    ttft_s: float
    """Seconds to the first token; of a request that failed, to its failure."""
    tokens: int
    hit_tokens: int
    blocks: int
    hit_blocks: int
    answer_s: float
    """Seconds to the last token or the failure."""
    output_tokens: int
    believed_tokens: int
    """Prompt tokens that the decision took for cached."""
    router: int = 0
    failed: bool = False

    @property
    def token_s(self) -> float | None:
        """Seconds per token after the first; None: no such token."""
        if self.failed or self.output_tokens < 2:
            return None
        return (self.answer_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def overbelieved(self) -> bool:
        """True if at least a block that the decision took for cached was not."""
        return self.believed_tokens - self.hit_tokens > BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class RoutingMetrics:
    """Latencies, hit rates and balance of a simulation. Requests that failed count in the times to the first token and
    of whole answers until their failure.
    """

    requests: int
    failed: int
    mean_s: float
    """Time to the first token."""
    p50_s: float
    p90_s: float
    p99_s: float
    token_s: float
    """Time per token after the first: mean over requests."""
    token_p99_s: float
    all_tokens_s: float
    """Time per token after the first: mean over all tokens."""
    answer_s: float
    answer_p99_s: float
    token_hits: float
    block_hits: float
    overbelieved: float
    """Share of requests with at least a block that was taken for cached and was not."""
    servers_used: float
    """Share of servers with at least a quarter of the mean requests."""
    worst_share: float
    """Largest share of a server in any window of 60 s, relative to the mean."""
    spread: float  # of requests per server: standard deviation over mean

    def as_json(self) -> dict[str, float]:
        return {name: value if isinstance(value, int) else round(value, 6) for name, value in asdict(self).items()}


def measured(outcomes: Sequence[RoutedOutcome], servers: int, from_s: float = 0.0) -> RoutingMetrics:
    """Return the metrics of the requests that arrived at ``from_s`` or later.

    Raises:
        InvalidInput: no request.
    """
    late = [outcome for outcome in outcomes if outcome.at_s >= from_s]
    if not late:
        raise InvalidInput(f"no request arrived at {from_s:g} s or later")
    ttfts_s = np.array([outcome.ttft_s for outcome in late])
    answers_s = np.array([outcome.answer_s for outcome in late])
    p50_s, p90_s, p99_s = (percentile(ttfts_s.tolist(), percent) for percent in (50, 90, 99))
    tokens_s = [token_s for outcome in late if (token_s := outcome.token_s) is not None]
    weights = [outcome.output_tokens - 1 for outcome in late if outcome.token_s is not None]
    counts = np.bincount([outcome.server for outcome in late], minlength=servers)
    return RoutingMetrics(
        requests=len(late),
        failed=sum(outcome.failed for outcome in late),
        mean_s=float(ttfts_s.mean()),
        p50_s=p50_s,
        p90_s=p90_s,
        p99_s=p99_s,
        token_s=float(np.mean(tokens_s)) if tokens_s else 0.0,
        token_p99_s=percentile(tokens_s, 99) if tokens_s else 0.0,
        all_tokens_s=float(np.average(tokens_s, weights=weights)) if tokens_s else 0.0,
        answer_s=float(answers_s.mean()),
        answer_p99_s=percentile(answers_s.tolist(), 99),
        token_hits=sum(outcome.hit_tokens for outcome in late) / sum(outcome.tokens for outcome in late),
        block_hits=sum(outcome.hit_blocks for outcome in late) / max(1, sum(outcome.blocks for outcome in late)),
        overbelieved=sum(outcome.overbelieved for outcome in late) / len(late),
        servers_used=float((counts >= USED * counts.mean()).mean()),
        worst_share=worst_share([(outcome.at_s, outcome.server) for outcome in late], servers),
        spread=float(counts.std() / counts.mean()),
    )


def worst_share(
    arrivals: Sequence[tuple[float, int]], servers: int, window_s: float = WINDOW_S, least: int = WINDOW_REQUESTS
) -> float:
    """Return the largest ratio of a server's requests to the mean, in windows with at least ``least`` requests.

    ``arrivals`` are (s, server) in order of time.
    """
    arriving = [(at_s, 1, server) for at_s, server in arrivals]
    leaving = [(at_s + window_s, 0, server) for at_s, server in arrivals]
    counts = [0] * servers
    inside, worst, before_s = 0, 0.0, None
    for at_s, is_new, server in heapq.merge(leaving, arriving):
        if at_s != before_s and inside >= least:
            worst = max(worst, max(counts) * servers / inside)
        step = 1 if is_new else -1
        counts[server] += step
        inside += step
        before_s = at_s
    return worst
