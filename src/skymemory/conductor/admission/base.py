"""The contract of every rule that says who is let in.

A rule is asked twice: when a request arrives, before anything was computed for it, and when its prefill is done and a
decoding server would take it. Refused then, its prefill was for nothing. What a rule knows is what was estimated: the
prefill's time to first token, the decoding server's time between tokens, and what that will be later (``Outlook``).
It is told what became of every request, the refused ones too, and may learn from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from skymemory.conductor.request import Decision, Request
from skymemory.conductor.request import Slo as Slo

KINDS = ("ttft", "tbt", "cost", "share", "priority", "queue")
"""Its first token would come too late; tokens would come too slowly; it costs more than others that could be served
for it; its tenant has had its share; others go before it; there is no more room to wait, or it waited long enough."""


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


@dataclass(slots=True)
class Case:
    """A request, and where it would go. Nobody changes one: see ``Prompt``."""

    request: Request
    prefill: Decision
    decode: Decision | None = None
    """None: the server that prefills decodes too."""
    outlook: Outlook | None = None

    def promised(self, usually: Slo) -> Slo:
        """What this request is promised, if not what requests ``usually`` are."""
        return self.request.slo or usually


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


# Which promise a request would break, by what is estimated of it: the sentences all rules refuse with.


LATER_S = 1.0
"""When to try again, where nothing says when there will be room."""
_LOOKS = 12
"""Ahead, each twice as far as the one before."""


def too_late(ttft_s: float | None, promised_s: float) -> Refusal | None:
    """Its first token would come later than was promised; what is not estimated is taken to be in time."""
    if ttft_s is None or ttft_s <= promised_s:
        return None
    reason = f"its first token would come in {ttft_s:.3g} s; {promised_s:.3g} s are promised"
    return Refusal(reason, max(LATER_S, ttft_s - promised_s), kind="ttft")


def too_slow(tbt_s: float | None, promised_s: float, outlook: Outlook | None, now_s: float) -> Refusal | None:
    """Tokens would come more slowly than was promised, to it or to those who decode beside it."""
    if tbt_s is None or tbt_s <= promised_s:
        return None
    reason = f"tokens would come every {tbt_s * 1000:.4g} ms; {promised_s * 1000:.4g} ms are promised"
    return Refusal(reason, room_in_s(outlook, promised_s, now_s), kind="tbt")


def room_in_s(outlook: Outlook | None, promised_s: float, now_s: float) -> float:
    """Seconds until the decoding servers are believed to keep the promise again, if nothing new came."""
    if outlook is None:
        return LATER_S
    ahead_s = LATER_S
    for _ in range(_LOOKS):
        if outlook.tbt_s(now_s + ahead_s, now_s) <= promised_s:
            break
        ahead_s *= 2
    return ahead_s


# A rule that cannot shut itself out: now and then one is let in, whatever is estimated.
#
# Estimates that are learnt are learnt from requests that are served. Where they have become so bad that nobody is let
# in
# any more (a server that hung for a while, a promise shorter than what is believed of an unknown one), they would stay
# so for ever.


class Probing:
    """``rule``, but when nobody was let in for ``every_s`` the next one is."""

    def __init__(self, rule: Admission, every_s: float) -> None:
        self.rule = rule
        self.name = rule.name
        self._every_s = every_s
        self._let_in_s = -math.inf

    def on_arrival(self, case: Case, now_s: float) -> Refusal | None:
        return None if now_s - self._let_in_s >= self._every_s else self.rule.on_arrival(case, now_s)

    def before_decode(self, case: Case, now_s: float) -> Refusal | None:
        return self.rule.before_decode(case, now_s)

    def refused(self, case: Case, refusal: Refusal, now_s: float) -> None:
        self.rule.refused(case, refusal, now_s)

    def accepted(self, case: Case, now_s: float) -> None:
        self._let_in_s = now_s
        self.rule.accepted(case, now_s)

    def prefilled(self, case: Case, now_s: float) -> None:
        self.rule.prefilled(case, now_s)

    def ended(self, case: Case, now_s: float, met: bool | None) -> None:
        self.rule.ended(case, now_s, met)
