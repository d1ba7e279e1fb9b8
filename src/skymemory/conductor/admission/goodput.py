"""Ours: as many requests as can be served within both promises, of those that ask.

A prefill server has so many seconds, and a request that keeps its promises counts one, however many of them it takes.
Under overload, then, those are served that take the fewest: a rule that goes by the queue alone lets in what comes
first, and one long prompt costs twenty short ones. Four parts:

- ``price``: of the requests that asked lately, the cheapest that fit into the time of all servers are let in; a queue
  shorter than ``queue_share`` of the promise makes room for more, a longer one for fewer. Below overload all fit.
- a request whose first token would come too late by the estimate times its learnt error (``LearntTtft``) is refused.
- the decoding servers' load counts as it will be from the end of the prefill on, not at one instant: others that were
  let in join later.
- how near that load may come to the promise is learnt from who kept it (``LearntHeadroom``): contexts grow and
  estimates err, and a batch that is too slow breaks the promises of all in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from skymemory.conductor.admission.base import Case, Refusal, Slo
from skymemory.conductor.admission.learnt import LearntHeadroom, LearntTtft
from skymemory.conductor.admission.price import Price
from skymemory.conductor.admission.promises import LATER_S, too_late, too_slow
from skymemory.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class GoodputSettings:
    window_s: float = 60.0
    """Of past requests, how long one counts as one of those to come."""
    queue_share: float = 0.5
    """Of the time promised to the first token, what queues are held at under overload."""
    use: float = 1.0
    """Of the servers' time, what can be had for prefills."""
    looks: int = 4
    """Instants, evenly over the time promised to the first token behind the end of the prefill, at which the decoding
    servers' load is estimated."""
    broken: float = 0.02
    """Of requests that decode near the limit, how many may break their promise."""
    least_headroom: float = 0.7
    """The limit never falls below this part of the promise."""

    def __post_init__(self) -> None:
        if self.window_s <= 0 or self.looks < 1:
            raise InvalidInput("admission 'goodput': window_s is above 0 and looks at least 1")
        if not (0 < self.queue_share <= 1 and 0 < self.use <= 1 and 0 < self.least_headroom <= 1):
            raise InvalidInput("admission 'goodput': queue_share, use and least_headroom are above 0, at most 1")
        if not 0 < self.broken < 1:
            raise InvalidInput(f"admission 'goodput': broken is {self.broken:g}; a part between 0 and 1 is wanted")


class Goodput:
    name = "goodput"

    def __init__(self, slo: Slo, settings: GoodputSettings | None = None) -> None:
        self.slo = slo
        self.settings = settings = settings or GoodputSettings()
        self._price = Price(settings.window_s)
        self._ttft = LearntTtft(slo.ttft_s)
        self._headroom = LearntHeadroom(settings.least_headroom, settings.broken)

    def on_arrival(self, case: Case, now_s: float) -> Refusal | None:
        estimated_s = case.prefill.estimated_ttft_s
        ttft_s = None if estimated_s is None else self._ttft.corrected_s(estimated_s)
        return (
            too_late(ttft_s, self.slo.ttft_s)
            or self._too_dear(case, now_s)
            or self._too_slow(case, 0.0 if ttft_s is None else ttft_s, now_s)
        )

    def before_decode(self, case: Case, now_s: float) -> Refusal | None:
        if case.decode is None:
            return None
        limit_s = self.slo.tbt_s * self._headroom.share
        return too_slow(case.decode.estimated_tbt_s, limit_s, case.outlook, now_s)

    def refused(self, case: Case, refusal: Refusal, now_s: float) -> None:
        self._price.asked(_compute_s(case), now_s)

    def accepted(self, case: Case, now_s: float) -> None:
        self._price.asked(_compute_s(case), now_s)

    def prefilled(self, case: Case, now_s: float) -> None:
        if case.prefill.estimated_ttft_s is not None:
            self._ttft.came(case.prefill.estimated_ttft_s, now_s - case.prefill.at_s)

    def ended(self, case: Case, now_s: float, met: bool | None) -> None:
        if met is not None and case.decode is not None and case.decode.estimated_tbt_s is not None:
            self._headroom.ended(case.decode.estimated_tbt_s / self.slo.tbt_s, met)

    def _too_dear(self, case: Case, now_s: float) -> Refusal | None:
        compute_s = _compute_s(case)
        if compute_s <= 0 or case.prefill.estimated_ttft_s is None:
            return None
        wait_s = max(0.0, case.prefill.estimated_ttft_s - compute_s)
        servers = 1 + len(case.prefill.fallbacks)
        room_s = self.settings.queue_share * self.slo.ttft_s - wait_s
        price_s = self._price.dearest_s(servers, self.settings.use, room_s, now_s)
        if compute_s <= price_s:
            return None
        reason = f"it takes {compute_s:.3g} s of computing; those up to {price_s:.3g} s fit"
        return Refusal(reason, max(LATER_S, compute_s), kind="cost")

    def _too_slow(self, case: Case, ttft_s: float, now_s: float) -> Refusal | None:
        if case.decode is None:
            return None
        limit_s = self.slo.tbt_s * self._headroom.share
        outlook = case.outlook
        if outlook is None:
            return too_slow(case.decode.estimated_tbt_s, limit_s, None, now_s)
        step_s = self.slo.ttft_s / self.settings.looks
        then_s = now_s + ttft_s
        worst_s = max(outlook.tbt_s(then_s + look * step_s, now_s) for look in range(self.settings.looks))
        return too_slow(worst_s, limit_s, outlook, now_s)


def _compute_s(case: Case) -> float:
    """Seconds of a prefill server that it takes; 0 where that is not estimated."""
    decision = case.prefill
    return decision.estimated_compute_s or 0.0
