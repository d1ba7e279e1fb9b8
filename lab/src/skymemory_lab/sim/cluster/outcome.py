"""Records and metrics (docs/reference/cluster-metrics.md) of a simulated run."""

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
from skymemory_lab.sim.trace import BLOCK_TOKENS

Status = Literal["completed", "refused", "refused_after_prefill", "failed"]


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    at_s: float
    status: Status
    prompt_tokens: int
    output_tokens: int
    prefill: int | None = None
    """Prefill instance; None: never started."""
    decode: int | None = None
    """Decode instance; equal to ``prefill`` if coupled."""
    held_tokens: int = 0
    """Tokens in the prefill instance's own memory."""
    loaded_tokens: Mapping[str, int] = field(default_factory=dict)
    computed_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    """Compute time, summed over a pipeline's machines and all attempts."""
    ttft_s: float | None = None
    end_s: float | None = None
    """Time of its last token, refusal or failure."""
    tbt_mean_s: float | None = None
    tbt_max_s: float | None = None

    @property
    def cached_tokens(self) -> int:
        return self.held_tokens + sum(self.loaded_tokens.values())


@dataclass(frozen=True, slots=True)
class LoadSample:
    """Loads of the instances; 1: at the objective."""

    t_s: float
    prefill: float
    """Largest predicted TTFT of an instance over its objective."""
    decode: float
    """Largest time between tokens of an instance over its objective."""
    waiting: int = 0
    decoding: int = 0
    prefill_mean: float = 0.0
    decode_mean: float = 0.0
    prefilling: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """Time that a request spent on ``what`` at an instance."""

    instance: str
    what: str
    begin_s: float
    end_s: float
    request: int
    notes: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RoleSpan:
    """Time in one role, including its drain and the next set-up."""

    instance: str
    role: Role
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class ClusterRun:
    outcomes: Sequence[RequestOutcome]
    loads: Sequence[LoadSample]
    prefill_busy_s: Sequence[float]
    decode_busy_s: Sequence[float]
    spans: Sequence[Span] = ()
    gap_seconds: Sequence[float] = ()
    """Mean of each class of times between tokens."""
    gap_tokens: Sequence[int] = ()
    pool: Mapping[str, float] = field(default_factory=dict)
    roles: Sequence[RoleSpan] = ()

    @property
    def end_s(self) -> float:
        return max((outcome.end_s for outcome in self.outcomes if outcome.end_s is not None), default=0.0)


TbtRule = Literal["mean", "max"]
"""Rule for a request: its mean or longest time between tokens must meet the objective."""


@dataclass(frozen=True, slots=True)
class Quantiles:
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
        """Return the smallest values that the shares do not exceed."""
        total = sum(counts)
        if not total:
            return cls(math.nan, math.nan, math.nan, math.nan)
        # There are millions of gaps, so they come as classes 1 % wide, and a percentile is exact to 1 %.
        order = np.argsort(values)
        sizes, up_to = np.asarray(values)[order], np.cumsum(np.asarray(counts)[order])
        p50, p90, p99 = (float(sizes[np.searchsorted(up_to, part * total)]) for part in (0.5, 0.9, 0.99))
        return cls(float(np.dot(values, counts)) / total, p50, p90, p99)


@dataclass(frozen=True, slots=True)
class Hits:
    """Cache hits of the prompts that began a prefill, as shares."""

    tokens: float
    tokens_by_source: dict[str, float]
    blocks: float
    all_blocks: float
    """Share including partial blocks, as published tables count."""

    @classmethod
    def of(cls, outcomes: Sequence[RequestOutcome]) -> Hits:
        tokens = sum(outcome.prompt_tokens for outcome in outcomes)
        cached: Counter[str] = Counter()
        for outcome in outcomes:
            cached["local"] += outcome.held_tokens
            cached.update(outcome.loaded_tokens)
        # The last token of a fully cached prompt is computed; its last block still counts as a hit.
        hit = sum(-(-outcome.cached_tokens // BLOCK_TOKENS) for outcome in outcomes)
        return cls(
            tokens=_part(sum(cached.values()), tokens),
            tokens_by_source={source: _part(count, tokens) for source, count in sorted(cached.items())},
            blocks=_part(hit, sum(outcome.prompt_tokens // BLOCK_TOKENS for outcome in outcomes)),
            all_blocks=_part(hit, sum(-(-outcome.prompt_tokens // BLOCK_TOKENS) for outcome in outcomes)),
        )


@dataclass(frozen=True, slots=True)
class ClusterMetrics:
    """Metrics of a run. Shares are 0 to 1; NaN without a denominator."""

    requests: int
    completed: int
    refused: int
    refused_after_prefill: int
    failed: int
    ttft_s: Quantiles
    tbt_request_s: Quantiles
    tbt_token_s: Quantiles
    """All times between tokens; without a histogram, the requests' means weighted by tokens."""
    tbt_max_s: Quantiles
    ttft_met: float
    tbt_met: float
    longest_tbt_met: float
    met: int
    attainment: float
    """Share of ``met`` in all arrivals, including refused requests."""
    goodput_per_s: float
    """Rate of ``met`` requests, from the first arrival to the last end."""
    elapsed_s: float
    prefill_s: float
    wasted_prefill_s: float
    """Prefill seconds of requests then refused or failed."""
    late_prefill_s: float
    """Prefill seconds of requests that completed outside an objective."""
    hits: Hits
    prefill_utilisation: float
    decode_utilisation: float
    role_changes: int = 0

    def as_json(self) -> dict[str, object]:
        return {name: _to_json_value(value) for name, value in asdict(self).items()}


def measured(
    run: ClusterRun, slo: Slo, from_s: float = -math.inf, until_s: float = math.inf, tbt_rule: TbtRule = "mean"
) -> ClusterMetrics:
    """Return the metrics of the arrivals from ``from_s`` to before ``until_s``.

    Raises:
        InvalidInput: no request.
    """
    ours = [outcome for outcome in run.outcomes if from_s <= outcome.at_s < until_s]
    if not ours:
        raise InvalidInput(f"no request arrived between {from_s:g} s and {until_s:g} s")
    ends = Counter(outcome.status for outcome in ours)
    done = [outcome for outcome in ours if outcome.status == "completed"]
    good = [outcome for outcome in done if keeps(outcome, slo, tbt_rule)]
    elapsed_s = max(outcome.end_s if outcome.end_s is not None else outcome.at_s for outcome in ours) - min(
        outcome.at_s for outcome in ours
    )
    run_s = run.end_s - min(outcome.at_s for outcome in run.outcomes)
    answers = [outcome for outcome in done if outcome.tbt_mean_s is not None]
    if run.gap_seconds:
        tokens = Quantiles.of_histogram(run.gap_seconds, run.gap_tokens)
    else:
        tokens = Quantiles.of_histogram(
            [outcome.tbt_mean_s or 0.0 for outcome in answers], [outcome.output_tokens - 1 for outcome in answers]
        )
    return ClusterMetrics(
        requests=len(ours),
        completed=len(done),
        refused=ends["refused"],
        refused_after_prefill=ends["refused_after_prefill"],
        failed=ends["failed"],
        ttft_s=Quantiles.of([outcome.ttft_s for outcome in done if outcome.ttft_s is not None]),
        tbt_request_s=Quantiles.of([outcome.tbt_mean_s for outcome in answers if outcome.tbt_mean_s is not None]),
        tbt_token_s=tokens,
        tbt_max_s=Quantiles.of([outcome.tbt_max_s for outcome in answers if outcome.tbt_max_s is not None]),
        ttft_met=_part(sum(outcome.ttft_s is not None and outcome.ttft_s <= slo.ttft_s for outcome in done), len(done)),
        tbt_met=_part(sum(_tbt_s(outcome, tbt_rule) <= slo.tbt_s for outcome in done), len(done)),
        longest_tbt_met=_part(sum(_tbt_s(outcome, "max") <= slo.tbt_s for outcome in done), len(done)),
        met=len(good),
        attainment=len(good) / len(ours),
        goodput_per_s=_part(len(good), elapsed_s),
        elapsed_s=elapsed_s,
        prefill_s=sum(outcome.prefill_s for outcome in ours),
        wasted_prefill_s=sum(outcome.prefill_s for outcome in ours if outcome.status != "completed"),
        late_prefill_s=sum(outcome.prefill_s for outcome in done) - sum(outcome.prefill_s for outcome in good),
        hits=Hits.of([outcome for outcome in ours if outcome.prefill is not None]),
        prefill_utilisation=_utilisation(run, "prefill", run_s),
        decode_utilisation=_utilisation(run, "decode", run_s),
        role_changes=_role_changes(run),
    )


def keeps(outcome: RequestOutcome, slo: Slo, tbt_rule: TbtRule = "mean") -> bool:
    """Return True if the request met both objectives."""
    if outcome.status != "completed" or outcome.ttft_s is None:
        return False
    return outcome.ttft_s <= slo.ttft_s and _tbt_s(outcome, tbt_rule) <= slo.tbt_s


def _tbt_s(outcome: RequestOutcome, rule: TbtRule) -> float:
    tbt_s = outcome.tbt_mean_s if rule == "mean" else outcome.tbt_max_s
    return 0.0 if tbt_s is None else tbt_s


def _utilisation(run: ClusterRun, role: Role, elapsed_s: float) -> float:
    busy_s = run.prefill_busy_s if role == "prefill" else run.decode_busy_s
    available_s = len(busy_s) * elapsed_s
    if run.roles:
        # The last sample follows the end of the run.
        available_s = sum(
            max(0.0, min(span.end_s, run.end_s) - span.begin_s) for span in run.roles if span.role == role
        )
    return _part(sum(busy_s), available_s)


def _role_changes(run: ClusterRun) -> int:
    return len(run.roles) - len({span.instance for span in run.roles})


def _part(count: float, of: float) -> float:
    return count / of if of else math.nan


def _to_json_value(value: object) -> object:
    if isinstance(value, float):
        return None if math.isnan(value) else round(value, 6)
    if isinstance(value, dict):
        return {name: _to_json_value(inner) for name, inner in value.items()}
    return value


_COUNTERS_PID = 1


def chrome_trace(run: ClusterRun) -> dict[str, object]:
    """Export the run in Trace Event Format for chrome://tracing and Perfetto.

    Instances are processes with lanes (threads) of spans.
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
    for sample in loads:
        moment = {"ph": "C", "pid": _COUNTERS_PID, "tid": 0, "ts": _us(sample.t_s)}
        yield {**moment, "name": "load", "args": {"prefill": sample.prefill, "decode": sample.decode}}
        yield {**moment, "name": "requests", "args": {"waiting": sample.waiting, "decoding": sample.decoding}}


def _complete(pid: int, spans: Iterable[Span]) -> Iterator[dict[str, object]]:
    # Yield an instance's spans; those of a kind that overlap get separate lanes.
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


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, object]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": f"{kind}_name", "args": {"name": name}}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
