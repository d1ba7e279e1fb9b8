"""Records of a simulated run (one per request, loads over time, spans of the instances), and its metrics.

Metrics are of the requests that arrived in a window (``from_s`` to ``until_s``), whenever they end;
docs/reference/cluster-metrics.md defines them. ``write_chrome_trace`` exports a run for Perfetto.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from skymemory.conductor.pools import Role
from skymemory.conductor.request import Slo
from skymemory.errors import InvalidInput
from skymemory.metrics import percentile
from skymemory.sim.trace import BLOCK_TOKENS

Status = Literal["completed", "refused", "refused_after_prefill", "failed"]


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """How one request ended. Missing times are None."""

    at_s: float
    status: Status
    prompt_tokens: int
    output_tokens: int
    """Requested length of the answer; a completed request got it."""
    prefill: int | None = None
    """Number of the prefill instance; None: it never started."""
    decode: int | None = None
    """Number of the decode instance; equal to ``prefill`` if coupled."""
    held_tokens: int = 0
    """Tokens in the prefill instance's own memory."""
    loaded_tokens: Mapping[str, int] = field(default_factory=dict)
    """Loaded tokens by source, as the pool names them."""
    computed_tokens: int = 0
    queue_s: float = 0.0
    """From arrival to the start of the prefill."""
    prefill_s: float = 0.0
    """Compute time of its prefill, summed over a pipeline's machines."""
    ttft_s: float | None = None
    end_s: float | None = None
    """Time of its last token, refusal or failure."""
    tbt_mean_s: float | None = None
    """Mean time between tokens; None with fewer than two tokens."""
    tbt_max_s: float | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return self.held_tokens + sum(self.loaded_tokens.values())


@dataclass(frozen=True, slots=True)
class LoadSample:
    """The cluster's load at one time, relative to the objectives (1: at the objective)."""

    t_s: float
    prefill: float
    """Largest predicted TTFT of the prefill instances over its objective."""
    decode: float
    """Largest time between tokens of the decode instances over its objective."""
    waiting: int = 0
    """Requests queued for prefill."""
    decoding: int = 0
    """Requests in batches."""
    prefill_mean: float = 0.0
    """As ``prefill``, mean of the instances."""
    decode_mean: float = 0.0
    prefilling: int = 0
    """Instances that prefill, those that drain included."""


@dataclass(frozen=True, slots=True)
class Span:
    """An activity of an instance, for timelines."""

    instance: str
    what: str
    """``prefill``, ``decode``, ``load`` or ``transfer``."""
    begin_s: float
    end_s: float
    request: int
    """Number of the request, by arrival."""
    notes: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RoleSpan:
    """A time in which an instance of elastic pools had one role, its drain and set-up for the next one included."""

    instance: str
    role: Role
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class ClusterRun:
    """One run of the simulator."""

    outcomes: Sequence[RequestOutcome]
    """In order of arrival."""
    loads: Sequence[LoadSample]
    prefill_busy_s: Sequence[float]
    """Seconds of prefill per prefill (or coupled) instance."""
    decode_busy_s: Sequence[float]
    """Seconds of decoding per decode instance."""
    spans: Sequence[Span] = ()
    gap_seconds: Sequence[float] = ()
    """Histogram of the times between tokens: mean of each class; may be empty."""
    gap_tokens: Sequence[int] = ()
    """Its counts."""
    pool: Mapping[str, float] = field(default_factory=dict)
    """The pool's counters."""
    roles: Sequence[RoleSpan] = ()
    """Elastic pools: who had which role when."""

    @property
    def end_s(self) -> float:
        """End of the last request."""
        return max((one.end_s for one in self.outcomes if one.end_s is not None), default=0.0)


TbtRule = Literal["mean", "max"]
"""Which of a request's times between tokens must meet the objective: their mean, or the longest."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Mean and percentiles of seconds; NaN without values."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles:
        if not values:
            return cls(math.nan, math.nan, math.nan, math.nan)
        p50, p90, p99 = (percentile(values, percent) for percent in (50, 90, 99))
        return cls(float(np.mean(values)), p50, p90, p99)

    @classmethod
    def of_histogram(cls, values: Sequence[float], counts: Sequence[int]) -> Quantiles:
        """Of values with counts: the smallest value that this share of all does not exceed."""
        total = sum(counts)
        if not total:
            return cls(math.nan, math.nan, math.nan, math.nan)
        # Of gaps there are millions, so they come as classes 1 % wide: a percentile is a class, within 1 %.
        order = np.argsort(values)
        sizes, up_to = np.asarray(values)[order], np.cumsum(np.asarray(counts)[order])
        p50, p90, p99 = (float(sizes[np.searchsorted(up_to, part * total)]) for part in (0.5, 0.9, 0.99))
        return cls(float(np.dot(values, counts)) / total, p50, p90, p99)


@dataclass(frozen=True, slots=True)
class Hits:
    """Cache hits of the prompts that began a prefill, as shares."""

    tokens: float
    """Of all tokens."""
    tokens_by_source: dict[str, float]
    """Of all tokens, by source: ``local``, and each tier or peer."""
    blocks: float
    """Of full blocks."""
    all_blocks: float
    """Of all blocks with partial ones, as published tables count."""

    @classmethod
    def of(cls, begun: Sequence[RequestOutcome]) -> Hits:
        tokens = sum(one.prompt_tokens for one in begun)
        cached: Counter[str] = Counter()
        for one in begun:
            cached["local"] += one.held_tokens
            cached.update(one.loaded_tokens)
        # One token of a fully cached prompt is computed; its last block counts as a hit.
        hit = sum(-(-one.cached_tokens // BLOCK_TOKENS) for one in begun)
        return cls(
            tokens=_part(sum(cached.values()), tokens),
            tokens_by_source={source: _part(count, tokens) for source, count in sorted(cached.items())},
            blocks=_part(hit, sum(one.prompt_tokens // BLOCK_TOKENS for one in begun)),
            all_blocks=_part(hit, sum(-(-one.prompt_tokens // BLOCK_TOKENS) for one in begun)),
        )


@dataclass(frozen=True, slots=True)
class ClusterMetrics:
    """Metrics of one run. Shares are 0 to 1; NaN without a denominator."""

    requests: int
    completed: int
    refused: int
    """On arrival."""
    refused_after_prefill: int
    failed: int
    ttft_s: Quantiles
    """Of completed requests."""
    tbt_request_s: Quantiles
    """Of the completed requests' mean times between tokens."""
    tbt_token_s: Quantiles
    """Of all times between tokens of the run; without a histogram, of the requests' means weighted by tokens."""
    tbt_max_s: Quantiles
    """Of the completed requests' longest times between tokens."""
    ttft_met: float
    """Share of completed requests that met the TTFT objective."""
    tbt_met: float
    longest_tbt_met: float
    """Share whose longest time between tokens met the objective."""
    met: int
    """Completed within both objectives."""
    attainment: float
    """``met`` as a share of all arrivals, refused ones included."""
    goodput_per_s: float
    """``met`` per second, from the first arrival to the last end."""
    elapsed_s: float
    prefill_s: float
    """Compute seconds of these requests' prefills."""
    wasted_prefill_s: float
    """Of requests that were refused or failed afterwards."""
    late_prefill_s: float
    """Of requests that completed outside an objective."""
    hits: Hits
    prefill_utilisation: float
    """Mean busy share of the prefill instances, whole run."""
    decode_utilisation: float
    role_changes: int = 0
    """Of elastic pools, whole run."""

    def as_json(self) -> dict[str, object]:
        return {name: _plain(value) for name, value in asdict(self).items()}


def measured(
    run: ClusterRun, slo: Slo, from_s: float = -math.inf, until_s: float = math.inf, tbt_rule: TbtRule = "mean"
) -> ClusterMetrics:
    """Metrics of the requests that arrived from ``from_s`` to before ``until_s``.

    Raises:
        InvalidInput: no request.
    """
    ours = [one for one in run.outcomes if from_s <= one.at_s < until_s]
    if not ours:
        raise InvalidInput(f"no request arrived between {from_s:g} s and {until_s:g} s")
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
        prefill_utilisation=_utilisation(run, "prefill", run_s),
        decode_utilisation=_utilisation(run, "decode", run_s),
        role_changes=_role_changes(run),
    )


def keeps(outcome: RequestOutcome, slo: Slo, tbt_rule: TbtRule = "mean") -> bool:
    """Whether it completed within both objectives."""
    if outcome.status != "completed" or outcome.ttft_s is None:
        return False
    return outcome.ttft_s <= slo.ttft_s and _tbt_s(outcome, tbt_rule) <= slo.tbt_s


def _tbt_s(outcome: RequestOutcome, rule: TbtRule) -> float:
    """Time between tokens by the rule; 0 for an answer of one token."""
    found = outcome.tbt_mean_s if rule == "mean" else outcome.tbt_max_s
    return 0.0 if found is None else found


def _utilisation(run: ClusterRun, role: Role, elapsed_s: float) -> float:
    busy_s = run.prefill_busy_s if role == "prefill" else run.decode_busy_s
    there_s = len(busy_s) * elapsed_s
    if run.roles:
        # The last sample comes behind the run's end.
        there_s = sum(max(0.0, min(one.end_s, run.end_s) - one.begin_s) for one in run.roles if one.role == role)
    return _part(sum(busy_s), there_s)


def _role_changes(run: ClusterRun) -> int:
    return len(run.roles) - len({one.instance for one in run.roles})


def _part(count: float, of: float) -> float:
    return count / of if of else math.nan


def _plain(value: object) -> object:
    """For JSON: six digits, None for NaN."""
    if isinstance(value, float):
        return None if math.isnan(value) else round(value, 6)
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return value


_COUNTERS_PID = 1


def chrome_trace(run: ClusterRun) -> dict[str, object]:
    """The run for chrome://tracing and Perfetto (Trace Event Format, JSON object form), with spans if it kept them.

    Each instance is a process; its overlapping spans are in lanes, the threads of that process. Loads are counters of a
    process of their own. Times are microseconds.
    """
    events: list[dict[str, object]] = [_named("process", _COUNTERS_PID, 0, "cluster")]
    events += _counters(run.loads)
    instances = sorted({span.instance for span in run.spans})
    for pid, instance in enumerate(instances, _COUNTERS_PID + 1):
        events.append(_named("process", pid, 0, instance))
        events += _complete(pid, [span for span in run.spans if span.instance == instance])
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(run: ClusterRun, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(chrome_trace(run), ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
    return path


def _counters(loads: Iterable[LoadSample]) -> Iterator[dict[str, object]]:
    for one in loads:
        moment = {"ph": "C", "pid": _COUNTERS_PID, "tid": 0, "ts": _us(one.t_s)}
        yield {**moment, "name": "load", "args": {"prefill": one.prefill, "decode": one.decode}}
        yield {**moment, "name": "requests", "args": {"waiting": one.waiting, "decoding": one.decoding}}


def _complete(pid: int, spans: Iterable[Span]) -> Iterator[dict[str, object]]:
    """An instance's spans, each in the first free lane of its kind."""
    kinds: dict[str, list[tuple[int, int]]] = {}
    """Lanes by kind: thread, end of the last span in µs."""
    lanes = 0
    for span in sorted(spans, key=lambda span: (span.begin_s, span.end_s)):
        begin, end = _us(span.begin_s), _us(span.end_s)
        own = kinds.setdefault(span.what, [])
        at = next((at for at, (_, until) in enumerate(own) if until <= begin), None)
        if at is None:
            lanes += 1
            yield _named("thread", pid, lanes, f"{span.what} {len(own) + 1}")
            own.append((lanes, end))
            at = len(own) - 1
        thread = own[at][0]
        own[at] = (thread, end)
        yield {
            "ph": "X",
            "pid": pid,
            "tid": thread,
            "ts": begin,
            "dur": end - begin,
            "cat": span.what,
            "name": f"{span.what} {span.request}",
            "args": {"request": span.request, **span.notes},
        }


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, object]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": f"{what}_name", "args": {"name": name}}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
