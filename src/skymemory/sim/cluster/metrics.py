"""Every metric of a simulated cluster, in one place; docs/reference/cluster-metrics.md defines them in words.

All are of the requests that arrived in a window (``from_s`` to ``until_s``); a request counts where it arrived,
whenever it ends.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from skymemory.conductor.admission.base import Slo
from skymemory.errors import InvalidInput
from skymemory.sim.cluster.outcome import ClusterRun, RequestOutcome
from skymemory.sim.trace import BLOCK_TOKENS

TbtRule = Literal["mean", "max"]
"""What of a request's times between tokens is held against the promise: their mean, or the longest of them."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of seconds; NaN where there was none."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles:
        if not values:
            return cls(math.nan, math.nan, math.nan, math.nan)
        p50, p90, p99 = (float(value) for value in np.percentile(values, [50, 90, 99]))
        return cls(float(np.mean(values)), p50, p90, p99)

    @classmethod
    def of_histogram(cls, values: Sequence[float], counts: Sequence[int]) -> Quantiles:
        """Of values that came so often: the smallest that such a part of all does not exceed."""
        total = sum(counts)
        if not total:
            return cls(math.nan, math.nan, math.nan, math.nan)
        order = np.argsort(values)
        sizes, up_to = np.asarray(values)[order], np.cumsum(np.asarray(counts)[order])
        p50, p90, p99 = (float(sizes[np.searchsorted(up_to, part * total)]) for part in (0.5, 0.9, 0.99))
        return cls(float(np.dot(values, counts)) / total, p50, p90, p99)


@dataclass(frozen=True, slots=True)
class Hits:
    """Of the prompts that began a prefill: what was not computed."""

    tokens: float
    """As a part of all their tokens."""
    tokens_by_source: dict[str, float]
    """The same, by where they were: ``local``, and each tier or peer they were loaded from."""
    blocks: float
    """As a part of their whole blocks."""
    all_blocks: float
    """The same hits as a part of all begun blocks, as published tables count."""

    @classmethod
    def of(cls, begun: Sequence[RequestOutcome]) -> Hits:
        tokens = sum(one.prompt_tokens for one in begun)
        cached: Counter[str] = Counter()
        for one in begun:
            cached["local"] += one.held_tokens
            cached.update(one.loaded_tokens)
        # Of a prompt that is cached whole one token is computed: its last block hit all the same.
        hit = sum(-(-one.cached_tokens // BLOCK_TOKENS) for one in begun)
        return cls(
            tokens=_part(sum(cached.values()), tokens),
            tokens_by_source={source: _part(count, tokens) for source, count in sorted(cached.items())},
            blocks=_part(hit, sum(one.prompt_tokens // BLOCK_TOKENS for one in begun)),
            all_blocks=_part(hit, sum(-(-one.prompt_tokens // BLOCK_TOKENS) for one in begun)),
        )


@dataclass(frozen=True, slots=True)
class ClusterMetrics:
    """Of one run. Shares are parts, 0 to 1; NaN where nothing is there to be divided by."""

    requests: int
    completed: int
    refused: int
    """On arrival: nothing was computed for them."""
    refused_after_prefill: int
    failed: int
    ttft_s: Quantiles
    """Of those that completed."""
    tbt_request_s: Quantiles
    """Of each completed request's mean time between tokens."""
    tbt_token_s: Quantiles
    """Of each token's time after the one before it, over the whole run; over the requests' means, weighted by their
    tokens, where the run kept no histogram."""
    tbt_max_s: Quantiles
    """Of each completed request's longest time between tokens."""
    ttft_met: float
    """Of those that completed, the part whose first token came as early as promised."""
    tbt_met: float
    longest_tbt_met: float
    """The same of each request's longest time between tokens."""
    met: int
    """Completed with both promises kept."""
    attainment: float
    """Those, as a part of all that arrived: who was refused was not served as promised."""
    goodput_per_s: float
    """Those, per second from the first arrival until the last of all requests was over."""
    elapsed_s: float
    prefill_s: float
    """Seconds that instances computed prefills of these requests."""
    wasted_prefill_s: float
    """Of them, for requests that were refused or failed afterwards."""
    late_prefill_s: float
    """Of them, for requests that completed with a promise broken."""
    hits: Hits
    prefill_utilisation: float
    """Mean over the prefilling instances of their busy part of the elapsed time, whole run."""
    decode_utilisation: float

    def as_json(self) -> dict[str, object]:
        return {name: _plain(value) for name, value in asdict(self).items()}


def measured(
    run: ClusterRun,
    slo: Slo,
    from_s: float = -math.inf,
    until_s: float = math.inf,
    tbt_rule: TbtRule = "mean",
) -> ClusterMetrics:
    """The metrics of the requests that arrived at ``from_s`` or later, and before ``until_s``.

    Raises:
        InvalidInput: there are none.
    """
    ours = [one for one in run.outcomes if from_s <= one.at_s < until_s]
    if not ours:
        raise InvalidInput(f"no request arrived between {from_s:g} s and {until_s:g} s: nothing to measure")
    ends = Counter(one.status for one in ours)
    done = [one for one in ours if one.status == "completed"]
    good = [one for one in done if keeps(one, slo, tbt_rule)]
    elapsed_s = max(one.end_s if one.end_s is not None else one.at_s for one in ours) - min(one.at_s for one in ours)
    run_s = run.end_s - min(one.at_s for one in run.outcomes)
    answers = [one for one in done if one.tbt_mean_s is not None]
    if run.gap_seconds:
        tokens = Quantiles.of_histogram(run.gap_seconds, run.gap_tokens)
    else:
        tokens = Quantiles.of_histogram(
            [one.tbt_mean_s or 0.0 for one in answers], [one.output_tokens - 1 for one in answers]
        )
    return ClusterMetrics(
        requests=len(ours),
        completed=len(done),
        refused=ends["refused"],
        refused_after_prefill=ends["refused_after_prefill"],
        failed=ends["failed"],
        ttft_s=Quantiles.of([one.ttft_s for one in done if one.ttft_s is not None]),
        tbt_request_s=Quantiles.of([one.tbt_mean_s for one in answers if one.tbt_mean_s is not None]),
        tbt_token_s=tokens,
        tbt_max_s=Quantiles.of([one.tbt_max_s for one in answers if one.tbt_max_s is not None]),
        ttft_met=_part(sum(one.ttft_s is not None and one.ttft_s <= slo.ttft_s for one in done), len(done)),
        tbt_met=_part(sum(_tbt_s(one, tbt_rule) <= slo.tbt_s for one in done), len(done)),
        longest_tbt_met=_part(sum(_tbt_s(one, "max") <= slo.tbt_s for one in done), len(done)),
        met=len(good),
        attainment=len(good) / len(ours),
        goodput_per_s=_part(len(good), elapsed_s),
        elapsed_s=elapsed_s,
        prefill_s=sum(one.prefill_s for one in ours),
        wasted_prefill_s=sum(one.prefill_s for one in ours if one.status != "completed"),
        late_prefill_s=sum(one.prefill_s for one in done) - sum(one.prefill_s for one in good),
        hits=Hits.of([one for one in ours if one.prefill is not None]),
        prefill_utilisation=_utilisation(run.prefill_busy_s, run_s),
        decode_utilisation=_utilisation(run.decode_busy_s, run_s),
    )


def keeps(outcome: RequestOutcome, slo: Slo, tbt_rule: TbtRule = "mean") -> bool:
    """Whether it completed, with its first token and its times between tokens as promised."""
    if outcome.status != "completed" or outcome.ttft_s is None:
        return False
    return outcome.ttft_s <= slo.ttft_s and _tbt_s(outcome, tbt_rule) <= slo.tbt_s


def _tbt_s(outcome: RequestOutcome, rule: TbtRule) -> float:
    """An answer of one token has no time between tokens: it is never late."""
    found = outcome.tbt_mean_s if rule == "mean" else outcome.tbt_max_s
    return 0.0 if found is None else found


def _utilisation(busy_s: Sequence[float], elapsed_s: float) -> float:
    return _part(sum(busy_s), len(busy_s) * elapsed_s)


def _part(count: float, of: float) -> float:
    return count / of if of else math.nan


def _plain(value: object) -> object:
    """What JSON can hold: six digits, and nothing where there was nothing to measure."""
    if isinstance(value, float):
        return None if math.isnan(value) else round(value, 6)
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return value
