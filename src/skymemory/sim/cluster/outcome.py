"""What a simulated cluster says of a run: one record per request, loads over time, and what its machines did.

Everything in ``metrics.py`` and in the reports is computed from these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["completed", "refused", "refused_after_prefill", "failed"]


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """How one request ended. Times that never came are None."""

    at_s: float
    status: Status
    prompt_tokens: int
    output_tokens: int
    """Of its answer, as asked for; a request that completed got them all."""
    prefill: int | None = None
    """The instance that prefilled it; None: it never began."""
    decode: int | None = None
    """The instance that decoded it; of a coupled instance the same as ``prefill``."""
    held_tokens: int = 0
    """Of the prompt, what was in the prefilling instance's own memory."""
    loaded_tokens: Mapping[str, int] = field(default_factory=dict)
    """What came from elsewhere, by source: ``peer``, ``ssd``, ``constellation``, whatever the pool calls its tiers."""
    computed_tokens: int = 0
    queue_s: float = 0.0
    """From its arrival until its prefill began."""
    prefill_s: float = 0.0
    """How long its prefill kept an instance busy; of a group of instances, summed over them."""
    ttft_s: float | None = None
    end_s: float | None = None
    """When it was over: its last token, or when it was refused or failed."""
    tbt_mean_s: float | None = None
    """Mean time from token to token, from the first to the last; None with fewer than two tokens."""
    tbt_max_s: float | None = None

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not computed."""
        return self.held_tokens + sum(self.loaded_tokens.values())


@dataclass(frozen=True, slots=True)
class LoadSample:
    """The cluster at one moment. Loads are parts of what was promised: 1 is the promise itself."""

    t_s: float
    prefill: float
    """Worst predicted time to first token of the prefilling instances, over its promise."""
    decode: float
    """Worst time between tokens of the decoding instances, over its promise."""
    waiting: int = 0
    """Requests in line for a prefill."""
    decoding: int = 0
    """Requests in batches."""
    prefill_mean: float = 0.0
    """As ``prefill``, the mean of the instances."""
    decode_mean: float = 0.0


@dataclass(frozen=True, slots=True)
class Span:
    """Something that an instance did, for a chart of time."""

    instance: str
    what: str
    """``prefill``, ``decode``, ``load`` or ``transfer``."""
    begin_s: float
    end_s: float
    request: int
    """Its number, in the order of arrival."""
    notes: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClusterRun:
    """One run of the simulator."""

    outcomes: Sequence[RequestOutcome]
    """In the order of arrival."""
    loads: Sequence[LoadSample]
    prefill_busy_s: Sequence[float]
    """Per prefilling (or coupled) instance: seconds in which it computed prefills."""
    decode_busy_s: Sequence[float]
    """Per decoding instance: seconds in which its batch was not empty."""
    spans: Sequence[Span] = ()
    gap_seconds: Sequence[float] = ()
    """Times from token to token, one per class of a histogram; empty: the run kept none."""
    gap_tokens: Sequence[int] = ()
    """How many tokens came that long after the one before."""
    pool: Mapping[str, float] = field(default_factory=dict)
    """The pool's counts: bytes by way, blocks evicted, blocks resident."""

    @property
    def end_s(self) -> float:
        """When the last request was over."""
        return max((one.end_s for one in self.outcomes if one.end_s is not None), default=0.0)
