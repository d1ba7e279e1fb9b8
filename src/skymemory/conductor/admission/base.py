"""The contract of every rule that says who is let in.

A rule is asked twice: when a request arrives, before anything was computed for it, and when its prefill is done and a
decoding server would take it. Refused then, its prefill was for nothing. What a rule knows is what was estimated: the
prefill's time to first token, the decoding server's time between tokens, and what that will be later (``Outlook``).
It is told what became of every request, the refused ones too, and may learn from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from skymemory.conductor.request import Decision, Request
from skymemory.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Slo:
    """What was promised: seconds to the first token, and seconds from token to token."""

    ttft_s: float
    tbt_s: float

    def __post_init__(self) -> None:
        if not (self.ttft_s > 0 and self.tbt_s > 0):
            raise InvalidInput(f"promises of {self.ttft_s:g} s and {self.tbt_s:g} s per token cannot be kept; above 0")


KINDS = ("ttft", "tbt", "cost", "share", "priority")
"""Its first token would come too late; tokens would come too slowly; it costs more than others that could be served
for it; its tenant has had its share; others go before it."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request is not served, and why."""

    reason: str
    """One sentence with figures."""
    retry_after_s: float
    """When it would have a chance, as far as that can be told."""
    computed: bool = False
    """Its prefill was done already, and is lost."""
    kind: str = ""
    """What stood against it in one word, one of ``KINDS``: for counting."""


class Outlook(Protocol):
    """What the decoding servers are believed to do later."""

    @property
    def decode_s(self) -> float:
        """How long a request usually decodes; infinite while nothing is known."""
        ...

    def expected(self, request: Request, at_s: float) -> None:
        """A request that a decoding server was promised is believed to join its batch at ``at_s``."""
        ...

    def tbt_s(self, at_s: float, now_s: float, request: Request | None = None) -> float:
        """Mean of the servers' seconds between tokens at ``at_s``, each with ``request`` in its batch besides.

        Of the requests decoding or being prefilled now: those are in that will have come by then and will not have
        ended, each decoding for the usual time.
        """
        ...


@dataclass(frozen=True, slots=True)
class Case:
    """A request, and where it would go."""

    request: Request
    prefill: Decision
    decode: Decision | None = None
    """None: the server that prefills decodes too."""
    outlook: Outlook | None = None


class Admission(Protocol):
    """A rule. It does no I/O and reads no clock; equal calls give equal answers."""

    name: str

    def on_arrival(self, case: Case, now_s: float) -> Refusal | None:
        """None: let it in. Changes nothing that a later call could see."""
        ...

    def before_decode(self, case: Case, now_s: float) -> Refusal | None:
        """The prefill is done; ``case.decode`` is estimated anew. None: let it go on."""
        ...

    def refused(self, case: Case, refusal: Refusal, now_s: float) -> None:
        """It was turned away on arrival, by this rule or by one around it."""
        ...

    def accepted(self, case: Case, now_s: float) -> None:
        """It was let in."""
        ...

    def prefilled(self, case: Case, now_s: float) -> None:
        """Its first token is there. Told before ``before_decode`` is asked."""
        ...

    def ended(self, case: Case, now_s: float, met: bool | None) -> None:
        """It is over: whether its promises were ``met``.

        None: that cannot be told, it failed, or it was refused before decoding.
        """
        ...


class Unlearning:
    """What a rule does that learns nothing."""

    def refused(self, case: Case, refusal: Refusal, now_s: float) -> None:
        pass

    def accepted(self, case: Case, now_s: float) -> None:
        pass

    def prefilled(self, case: Case, now_s: float) -> None:
        pass

    def ended(self, case: Case, now_s: float, met: bool | None) -> None:
        pass


class AdmitAll(Unlearning):
    """Nobody is turned away."""

    name = "all"

    def on_arrival(self, case: Case, now_s: float) -> Refusal | None:
        return None

    def before_decode(self, case: Case, now_s: float) -> Refusal | None:
        return None
