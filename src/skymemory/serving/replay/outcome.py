"""What became of one request of a replay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

REFUSALS = frozenset({429, 503})
"""Statuses by which a server says that it has too much to do."""


class Status(StrEnum):
    COMPLETED = "completed"
    REFUSED = "refused"
    """With one of ``REFUSALS``, before any of the answer."""
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """By us: the replay was ended before the answer."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Times in seconds from the replay's beginning; ``None`` and nan: it did not come to that, or was not told."""

    number: int
    status: Status
    due_s: float
    sent_s: float
    wanted_prompt_tokens: int
    wanted_output_tokens: int
    first_s: float = math.nan
    """The first piece of the answer that says something."""
    end_s: float = math.nan
    gaps_s: tuple[float, ...] = ()
    """Between the answer's pieces, in their order."""
    prompt_tokens: int | None = None
    """By the server's word, as are the next two."""
    cached_tokens: int | None = None
    output_tokens: int | None = None
    http_status: int | None = None
    retry_after_s: float | None = None
    error: str = ""
    """Why it was refused or failed: the kind of fault, a colon, and what was seen."""
    whole: bool = True
    """The stream ended with ``[DONE]``, as OpenAI's do."""
    held_up_s: float = 0.0
    """Of its lateness, what it waited because as many requests were under way as may be."""

    @property
    def late_s(self) -> float:
        """From when it was due until it was sent."""
        return self.sent_s - self.due_s

    @property
    def ttft_s(self) -> float:
        """From its sending to the first piece of its answer."""
        return self.first_s - self.sent_s

    @property
    def due_ttft_s(self) -> float:
        """The same from when it was due: what a user waits whose request the client sent late."""
        return self.first_s - self.due_s

    @property
    def tbt_s(self) -> float:
        """Mean time between tokens: from the first to the last, over the tokens after the first."""
        after = (self.output_tokens or len(self.gaps_s) + 1) - 1
        return sum(self.gaps_s) / after if after > 0 else math.nan

    def as_json(self) -> dict[str, object]:
        """For a line of JSON: no nan, times to the microsecond."""
        told: dict[str, object] = {
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
            told[name] = getattr(self, name)
        return told


def _rounded(seconds: float) -> float | None:
    return round(seconds, 6) if math.isfinite(seconds) else None
