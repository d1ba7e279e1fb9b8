"""Outcome of one request of a replay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

REFUSALS = frozenset({429, 503})
"""HTTP statuses of an overloaded server."""


class Status(StrEnum):
    COMPLETED = "completed"
    REFUSED = "refused"
    """Answered with one of ``REFUSALS``."""
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """The replay was stopped before the answer ended."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Times in seconds since the start of the replay; None and nan: it did not get that far, or was not reported."""

    number: int
    status: Status
    due_s: float
    sent_s: float
    wanted_prompt_tokens: int
    wanted_output_tokens: int
    first_s: float = math.nan
    """When the first chunk with content arrived."""
    end_s: float = math.nan
    gaps_s: tuple[float, ...] = ()
    """Between consecutive chunks of the answer."""
    prompt_tokens: int | None = None
    """As reported by the server, like the next two."""
    cached_tokens: int | None = None
    output_tokens: int | None = None
    http_status: int | None = None
    retry_after_s: float | None = None
    error: str = ""
    """Why it was refused or failed: kind of fault, colon, details."""
    whole: bool = True
    """Whether the stream ended with ``[DONE]``."""
    held_up_s: float = 0.0
    """The part of its lateness spent waiting for the concurrency limit."""

    @property
    def late_s(self) -> float:
        """From its due time until it was sent."""
        return self.sent_s - self.due_s

    @property
    def ttft_s(self) -> float:
        """From sending to the first chunk."""
        return self.first_s - self.sent_s

    @property
    def due_ttft_s(self) -> float:
        """From its due time to the first chunk: the user's wait, where the client sent late."""
        return self.first_s - self.due_s

    @property
    def tbt_s(self) -> float:
        """Mean time between tokens: from the first to the last chunk, over the tokens after the first."""
        after = (self.output_tokens or len(self.gaps_s) + 1) - 1
        return sum(self.gaps_s) / after if after > 0 else math.nan

    def as_json(self) -> dict[str, object]:
        """As a JSON object: no nan, times to the microsecond."""
        fields: dict[str, object] = {
            "number": self.number,
            "status": str(self.status),
            "due_s": _rounded(self.due_s),
            "sent_s": _rounded(self.sent_s),
            "late_s": _rounded(self.late_s),
            "ttft_s": _rounded(self.ttft_s),
            "tbt_s": _rounded(self.tbt_s),
            "end_s": _rounded(self.end_s),
            "gaps_s": [_rounded(gap) for gap in self.gaps_s],
        }
        for name in (
            "wanted_prompt_tokens",
            "prompt_tokens",
            "cached_tokens",
            "wanted_output_tokens",
            "output_tokens",
            "http_status",
            "retry_after_s",
            "error",
        ):
            fields[name] = getattr(self, name)
        return fields


def _rounded(seconds: float) -> float | None:
    return round(seconds, 6) if math.isfinite(seconds) else None
