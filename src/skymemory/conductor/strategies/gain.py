"""When a prefix is worth following: the threshold that every prefix strategy shares."""

from __future__ import annotations

from dataclasses import dataclass

from skymemory.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class GainThreshold:
    """More than ``tokens`` must match, and more than ``ratio`` of the prompt; nothing matched is never worth it.

    One of them at 0 leaves the other to decide alone. Below the threshold only load counts (prefix-aware-routing:
    "only use prefix affinity if the expected gain is high enough", by length, by ratio, or by both).
    """

    tokens: int = 0
    ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise InvalidInput(f"min_match_tokens is {self.tokens}; expected 0 or more")
        if not 0.0 <= self.ratio < 1.0:
            raise InvalidInput(f"min_match_ratio is {self.ratio}; expected 0 or more and less than 1")

    def worth(self, matched_tokens: float, prompt_tokens: int) -> bool:
        return matched_tokens > self.tokens and matched_tokens > self.ratio * prompt_tokens

    def why_not(self, matched_tokens: float, prompt_tokens: int) -> str:
        """The reason to tell when it is not worth it."""
        if not prompt_tokens:
            return "load only: the prompt is empty"
        if matched_tokens <= 0:
            return f"load only: nothing of the prompt's {prompt_tokens} tokens matches anywhere"
        asked = [f"{self.tokens} tokens"] if self.tokens else []
        asked += [f"{self.ratio:.0%} of the prompt"] if self.ratio else []
        return (
            f"load only: the best match, {matched_tokens:.0f} of {prompt_tokens} tokens,"
            f" is not over the threshold of {' and '.join(asked)}"
        )
