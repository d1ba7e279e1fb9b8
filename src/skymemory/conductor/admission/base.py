"""The contract of admission rules.

A rule decides twice: when a request arrives, and when its prefill is done, before it joins a decode batch (a refusal
then wastes the prefill). It sees estimates only: the time to first token, the decode server's time between tokens, and
a forecast of the latter (``DecodeForecast``). It is notified of the outcome of every request, and may learn from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from skymemory.conductor.request import Decision, Request
from skymemory.conductor.request import Slo as Slo

KINDS = ("ttft", "tbt", "cost", "share", "priority", "queue")
"""Estimated time to first token too long; time between tokens too long; costs more than others that fit; the tenant's
share is used up; higher priorities go first; the queue is full, or the wait in it too long."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is refused."""

    reason: str
    """One sentence with figures."""
    retry_after_s: float
    """Estimated time until a retry may be admitted."""
    computed: bool = False
    """Its prefill had been computed, and is wasted."""
    kind: str = ""
    """One of ``KINDS``, for metrics."""


class DecodeForecast(Protocol):
    """Forecast of the decode servers' load."""

    @property
    def decode_s(self) -> float:
        """Usual duration of decoding; infinite while unknown."""
        ...

    def expected(self, request: Request, at_s: float) -> None:
        """A request placed on a decode server is estimated to join its batch at ``at_s``."""
        ...

    def tbt_s(self, at_s: float, now_s: float, request: Request | None = None) -> float:
        """Mean over the servers of the seconds between tokens at ``at_s``, with ``request`` added to each batch.

        Counts the requests that are decoding or in prefill now, that will have joined by then and not ended, if each
        decodes for the usual time.
        """
        ...


@dataclass(slots=True)
class Case:
    """A request and its candidate placement, for an admission rule. Immutable by convention."""

    request: Request
    prefill: Decision
    decode: Decision | None = None
    """None: the prefill server decodes too."""
    forecast: DecodeForecast | None = None

    def slo(self, default: Slo) -> Slo:
        """The request's own objectives, else ``default``."""
        return self.request.slo or default


class Admission(Protocol):
    """An admission rule. No I/O, no clock; equal calls give equal answers."""

    name: str

    def on_arrival(self, case: Case, now_s: float) -> Refusal | None:
        """None: admitted. Changes no state."""
        ...

    def before_decode(self, case: Case, now_s: float) -> Refusal | None:
        """The prefill is done; ``case.decode`` is a current estimate. None: it may decode."""
        ...

    def refused(self, case: Case, refusal: Refusal, now_s: float) -> None:
        """It was refused on arrival, by this rule or by one around it."""
        ...

    def accepted(self, case: Case, now_s: float) -> None:
        """It was admitted."""
        ...

    def prefilled(self, case: Case, now_s: float) -> None:
        """The first token came. Called before ``before_decode``."""
        ...

    def ended(self, case: Case, now_s: float, met: bool | None) -> None:
        """It ended; ``met``: whether its objectives were met.

        None: unknown, it failed, or it was refused before decoding.
        """
        ...


class StatelessRule:
    """Base of rules that learn nothing."""

    def refused(self, case: Case, refusal: Refusal, now_s: float) -> None:
        pass

    def accepted(self, case: Case, now_s: float) -> None:
        pass

    def prefilled(self, case: Case, now_s: float) -> None:
        pass

    def ended(self, case: Case, now_s: float, met: bool | None) -> None:
        pass


class AdmitAll(StatelessRule):
    """Refuses nothing."""

    name = "all"

    def on_arrival(self, case: Case, now_s: float) -> Refusal | None:
        return None

    def before_decode(self, case: Case, now_s: float) -> Refusal | None:
        return None


RETRY_S = 1.0
"""Retry-After where no estimate says when there will be room."""
_LOOKAHEADS = 12
"""Points of the forecast to try, each twice as far ahead as the one before."""


def too_late(ttft_s: float | None, limit_s: float) -> Refusal | None:
    """A refusal if the estimated time to first token exceeds the objective; without an estimate None."""
    if ttft_s is None or ttft_s <= limit_s:
        return None
    reason = f"its first token is estimated to take {ttft_s:.3g} s; the limit is {limit_s:.3g} s"
    return Refusal(reason, max(RETRY_S, ttft_s - limit_s), kind="ttft")


def too_slow(tbt_s: float | None, limit_s: float, forecast: DecodeForecast | None, now_s: float) -> Refusal | None:
    """A refusal if the estimated time between tokens, which all of a batch share, exceeds the objective."""
    if tbt_s is None or tbt_s <= limit_s:
        return None
    reason = f"tokens are estimated to take {tbt_s * 1000:.4g} ms; the limit is {limit_s * 1000:.4g} ms"
    return Refusal(reason, room_in_s(forecast, limit_s, now_s), kind="tbt")


def room_in_s(forecast: DecodeForecast | None, limit_s: float, now_s: float) -> float:
    """Forecast seconds until the decode servers meet the objective again, without new requests."""
    if forecast is None:
        return RETRY_S
    ahead_s = RETRY_S
    for _ in range(_LOOKAHEADS):
        if forecast.tbt_s(now_s + ahead_s, now_s) <= limit_s:
            break
        ahead_s *= 2
    return ahead_s


class Probing:
    """``rule``, but admits the next request when none was admitted for ``every_s``.

    Estimates are learnt from served requests. Once they are so wrong that all are refused (after a server hung, or
    with an objective below the default estimate), only a probe can correct them.
    """

    def __init__(self, rule: Admission, every_s: float) -> None:
        self.rule = rule
        self.name = rule.name
        self._every_s = every_s
        self._admitted_s = -math.inf

    def on_arrival(self, case: Case, now_s: float) -> Refusal | None:
        return None if now_s - self._admitted_s >= self._every_s else self.rule.on_arrival(case, now_s)

    def before_decode(self, case: Case, now_s: float) -> Refusal | None:
        return self.rule.before_decode(case, now_s)

    def refused(self, case: Case, refusal: Refusal, now_s: float) -> None:
        self.rule.refused(case, refusal, now_s)

    def accepted(self, case: Case, now_s: float) -> None:
        self._admitted_s = now_s
        self.rule.accepted(case, now_s)

    def prefilled(self, case: Case, now_s: float) -> None:
        self.rule.prefilled(case, now_s)

    def ended(self, case: Case, now_s: float, met: bool | None) -> None:
        self.rule.ended(case, now_s, met)
