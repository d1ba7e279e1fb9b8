"""The contract of every strategy.

A scorer ranks servers for a request and learns from what becomes of requests. It does no I/O, reads no clock and rolls
no dice of its own: equal calls give equal scores. ``picker.Picker`` does the rest for all of them: who may be chosen at
all, adapters, ties, counting what is in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from skymemory.conductor.fleet import Server
from skymemory.conductor.request import Plan, Request


@dataclass(slots=True)
class Ranking:
    """One entry per server that was asked about, in that order."""

    scores: Sequence[float]
    """Higher is better. Equal scores are a tie, and the picker breaks it."""
    matched_tokens: Sequence[int] | None = None
    """Tokens of the prompt that each is believed to hold; None where the strategy does not know of caches."""
    estimated_ttft_s: Sequence[float] | None = None
    reasons: tuple[str, ...] = ()
    """Why it came out so, as far as it is the same for all servers."""
    weights: tuple[tuple[str, Sequence[float]], ...] = field(default=())
    """Named parts of the scores, one figure per server: the chosen one's are told as reasons."""
    estimated_tbt_s: Sequence[float] | None = None
    """Seconds between tokens, of servers that decode."""
    plans: Sequence[Plan] | None = None
    """How each would come by the prompt's KV."""
    estimated_compute_s: Sequence[float] | None = None
    """Of ``estimated_ttft_s``, what each would compute; where there are plans, they say it."""


class Scorer(Protocol):
    """A strategy."""

    name: str

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        """Scores of ``servers`` (at least one) for ``request``. Changes nothing that a later call could see."""
        ...

    def routed(self, request: Request, server: Server, now_s: float) -> None:
        """``request`` goes to ``server``. Nothing is known yet of how that will end."""
        ...

    def succeeded(self, request: Request, server: Server, now_s: float, cached_tokens: int | None) -> None:
        """The first byte of its answer came: the server has computed the prompt and holds it.

        ``cached_tokens``: of the prompt, what the server says it did not have to compute, where it says so.
        """
        ...

    def corrected(self, request: Request, server: Server, now_s: float, cached_tokens: int) -> None:
        """Its answer has ended and says of how many tokens of the prompt the server had what it needs.

        Comes after ``succeeded`` where the server says so only with the end of its answer, as OpenAI's usage does.
        """
        ...

    def ended(self, request: Request, server: Server, now_s: float, output_tokens: int | None = None) -> None:
        """Its last byte came, or it was given up after ``succeeded``. Comes once, before ``corrected``.

        ``output_tokens``: of its answer, where that came to its end and says so.
        """
        ...

    def failed(self, request: Request, server: Server, now_s: float) -> None:
        """It ended before the first byte: nothing may be believed to be cached by it."""
        ...

    def forget(self, server: Server) -> None:
        """The server left the fleet, or restarted: nothing it held is there any more."""
        ...


class Forgetful:
    """What a strategy does that learns nothing."""

    def routed(self, request: Request, server: Server, now_s: float) -> None:
        pass

    def succeeded(self, request: Request, server: Server, now_s: float, cached_tokens: int | None) -> None:
        pass

    def corrected(self, request: Request, server: Server, now_s: float, cached_tokens: int) -> None:
        pass

    def ended(self, request: Request, server: Server, now_s: float, output_tokens: int | None = None) -> None:
        pass

    def failed(self, request: Request, server: Server, now_s: float) -> None:
        pass

    def forget(self, server: Server) -> None:
        pass
