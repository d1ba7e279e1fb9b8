"""A prompt as work: what computing or loading any run of its chunks takes, each from sums made once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from skymemory.cache.pace import Pace
from skymemory.cache.prompt_chunks import PromptChunk


class PromptWork:
    """Sums over the chunks of a prompt: tokens to compute, where they stand, bytes to load."""

    def __init__(self, chunks: Sequence[PromptChunk], loads: bool) -> None:
        missing = [0 if chunk.resident else chunk.tokens for chunk in chunks]
        self._first = [chunk.first_token for chunk in chunks]
        self._tokens = [0, *accumulate(missing)]
        self._moment = [
            0.0,
            *accumulate(n * (c.first_token + c.tokens / 2) for n, c in zip(missing, chunks, strict=True)),
        ]
        wanted = [chunk.size_bytes if loads and chunk.loadable and not chunk.resident else 0 for chunk in chunks]
        self._bytes = [0, *accumulate(wanted)]

    def bytes_between(self, first: int, last: int) -> int:
        """Bytes of the loadable chunks ``first`` .. ``last``; 0 where there are none."""
        return self._bytes[last + 1] - self._bytes[first] if last >= first else 0

    def compute_s(self, first: int, computed: int, last: int, pace: Pace, budget_tokens: int) -> float | None:
        """Seconds to compute chunks ``first`` (but for its ``computed`` tokens) .. ``last`` in steps of our budget.

        None before anything was measured.
        """
        line = pace.line()
        if line is None:
            return None
        at_zero_s, slope = line
        tokens = self._tokens[last + 1] - self._tokens[first] - computed
        moment = self._moment[last + 1] - self._moment[first] - computed * (self._first[first] + computed / 2)
        seconds = (at_zero_s * tokens + slope * moment) / budget_tokens
        if over := tokens % budget_tokens:
            # The last step is not full, and costs more than its share.
            filled = over / budget_tokens
            seconds += (pace.part(filled) - filled) * (at_zero_s + slope * self._first[last])
        return max(seconds, 0.0)
