"""One request on its way through the simulated cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from skymemory.conductor.request import Request
from skymemory.conductor.scheduler import Placement
from skymemory.sim.cluster.batch import Stream
from skymemory.sim.cluster.pool_base import Loaded


@dataclass(slots=True, eq=False)
class Job:
    """What an attempt changes is as of the last attempt, but ``spent_s``, which all attempts add to."""

    number: int
    """In the order of arrival."""
    at_s: float
    prompt_tokens: int
    output_tokens: int
    """At least 1: a prefill gives a token."""
    ids: tuple[int, ...]
    """Of the blocks that caches keep."""
    asked: Request = field(repr=False)
    placement: Placement | None = None
    prefill: int = -1
    decode: int = -1
    attempts: int = 0
    work_s: float = 0.0
    """What its prefill is believed to take."""
    loading: Loaded | None = None
    """What it began to load when it was placed."""
    begun_s: float = -1.0
    first_token_s: float = -1.0
    held_tokens: int = 0
    sources: Mapping[str, int] = field(default_factory=dict)
    """Tokens loaded, by source."""
    computed_tokens: int = 0
    spent_s: float = 0.0
    """Machine time of its prefills so far."""
    there_s: float = 0.0
    """When the last of its KV is at the decoding instance."""
    prefilled: bool = False
    leaving: bool = False
    """Prefilled, and some of its KV is not yet where it will decode."""
    decoding: bool = False
    """It is, or was, in a batch."""
    over: bool = False

    @property
    def priority(self) -> int:
        return self.asked.priority

    @property
    def placed(self) -> Placement:
        assert self.placement is not None, "it was let in"
        return self.placement

    def restart(self, placement: Placement, prefill: int) -> None:
        """It is sent, for the first time or again."""
        self.placement, self.prefill, self.attempts = placement, prefill, self.attempts + 1
        self.loading = None
        self.begun_s = self.first_token_s = -1.0
        self.prefilled = self.leaving = self.decoding = False

    def stream(self) -> Stream:
        """Its answer, from the first token on."""
        return Stream(self.number, self.prompt_tokens, self.output_tokens, self.first_token_s, self.priority)
