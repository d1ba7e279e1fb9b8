"""Records of a simulated run: one per request, loads over time, spans of the instances. Metrics are computed from
them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

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

    @property
    def end_s(self) -> float:
        """End of the last request."""
        return max((one.end_s for one in self.outcomes if one.end_s is not None), default=0.0)
