"""Ours: as many requests as can be served within both promises, of those that ask.

A prefill server has so many seconds, and a request that keeps its promises counts one, however many of them it takes.
Under overload, then, those are served that take the fewest: a rule that goes by the queue alone lets in what comes
first, and one long prompt costs twenty short ones. Four parts:

- ``price``: where the shortest queue is longer than ``queue_share`` of the promise, of the requests that asked lately
  the cheapest that fit into the time of all servers are let in, the fewer the longer it is. Before a shorter queue all
  are: what was asked says nothing sure of what will be, and a machine that stands still keeps no promise. Contexts have
  a price like this, where decoding is believed to take more than ``batch_share`` of its promise.
- a request whose first token would come too late by the estimate times its learnt error (``LearntTtft``) is refused.
- the decoding servers' load counts as it is with all that were let in, those too whose prefill is not done; where the
  own prefill will be done later than a request usually decodes, as it is believed to be then.
- how near that load may come to the promise is learnt from who kept it (``LearntHeadroom``): contexts grow and
  estimates err, and a batch that is too slow breaks the promises of all in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from skymemory.conductor.admission.base import Case, Refusal, Slo
from skymemory.conductor.admission.batches import Batches
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
    batch_share: float = 0.6
    """Of the time promised between tokens, what decoding must be believed to take before contexts are too large."""
    fill: float = 0.9
    """Of the tokens that the decoding servers can have within the promise, what they are held at under overload."""
    broken: float = 0.2
    """Of requests that decode near the limit, how many may break their promise."""
    least_headroom: float = 0.7
    """The limit never falls below this part of the promise."""

    def __post_init__(self) -> None:
        if self.window_s <= 0:
            raise InvalidInput("admission 'goodput': window_s is above 0")
        shares = (self.queue_share, self.use, self.batch_share, self.fill, self.least_headroom)
        if not all(0 < share <= 1 for share in shares):
            raise InvalidInput(
                "admission 'goodput': queue_share, use, batch_share, fill and least_headroom are above 0, at most 1"
            )
        if not 0 < self.broken < 1:
            raise InvalidInput(f"admission 'goodput': broken is {self.broken:g}; a part between 0 and 1 is wanted")


class Goodput:
    name = "goodput"

    def __init__(self, slo: Slo, settings: GoodputSettings | None = None) -> None:
        self.slo = slo
        self.settings = settings = settings or GoodputSettings()
        self._prefills = Price(settings.window_s)
        self._contexts = Price(settings.window_s)
        self._batches = Batches()
        self._ttft = LearntTtft(slo.ttft_s)
        self._headroom = LearntHeadroom(settings.least_headroom, settings.broken)
        self._late: set[int] = set()
        """Requests inside whose first token was late, by their cases: their promise was not broken by decoding."""

    def on_arrival(self, case: Case, now_s: float) -> Refusal | None:
        estimated_s = case.prefill.estimated_ttft_s
        ttft_s = None if estimated_s is None else self._ttft.corrected_s(estimated_s)
        tbt_s = None if case.decode is None else case.decode.estimated_tbt_s
        if tbt_s is not None and case.outlook is not None and (ttft_s or 0.0) > case.outlook.decode_s:
            tbt_s = case.outlook.tbt_s(now_s + (ttft_s or 0.0), now_s, case.request)
        return (
            too_late(ttft_s, self.slo.ttft_s)
            or too_slow(tbt_s, self._limit_s(), case.outlook, now_s)
            or self._too_long(case, now_s)
            or self._too_large(case, tbt_s, now_s)
        )

    def before_decode(self, case: Case, now_s: float) -> Refusal | None:
        if case.decode is None:
            return None
        return too_slow(case.decode.estimated_tbt_s, self._limit_s(), case.outlook, now_s)

    def refused(self, case: Case, refusal: Refusal, now_s: float) -> None:
        self._asked(case, now_s)

    def accepted(self, case: Case, now_s: float) -> None:
        self._asked(case, now_s)
        if case.decode is not None and case.decode.estimated_tbt_s is not None:
            self._batches.entered(case.request.prompt.tokens, case.decode.estimated_tbt_s, now_s)

    def prefilled(self, case: Case, now_s: float) -> None:
        if case.prefill.estimated_ttft_s is not None:
            self._ttft.came(case.prefill.estimated_ttft_s, now_s - case.prefill.at_s)
        if case.decode is not None and now_s - case.prefill.at_s > self.slo.ttft_s:
            self._late.add(id(case))  # the scheduler keeps the case, and this number, until it tells of its end

    def ended(self, case: Case, now_s: float, met: bool | None) -> None:
        if case.decode is not None and case.decode.estimated_tbt_s is not None:
            self._batches.left(case.request.prompt.tokens, now_s)
            if met is not None and id(case) not in self._late:
                self._headroom.ended(case.decode.estimated_tbt_s / self.slo.tbt_s, met)
        self._late.discard(id(case))

    def _asked(self, case: Case, now_s: float) -> None:
        self._prefills.asked(case.prefill.estimated_compute_s or 0.0, now_s)
        if case.decode is not None:
            self._contexts.asked(case.request.prompt.tokens, now_s)

    def _limit_s(self) -> float:
        return self.slo.tbt_s * self._headroom.share

    def _too_long(self, case: Case, now_s: float) -> Refusal | None:
        """Prefills that cost less fit into the servers' time."""
        compute_s, ttft_s = case.prefill.estimated_compute_s, case.prefill.estimated_ttft_s
        if compute_s is None or ttft_s is None:
            return None
        servers = 1 + len(case.prefill.fallbacks)
        room_s = self.settings.queue_share * self.slo.ttft_s - max(0.0, ttft_s - compute_s)
        if room_s > 0:  # no machine is to stand still for want of cheaper requests
            return None
        dearest_s = self._prefills.dearest(servers * self.settings.use, servers * room_s, now_s)
        if compute_s <= dearest_s:
            return None
        reason = f"it takes {compute_s:.3g} s of computing; those up to {dearest_s:.3g} s fit"
        return Refusal(reason, max(LATER_S, compute_s), kind="cost")

    def _too_large(self, case: Case, tbt_s: float | None, now_s: float) -> Refusal | None:
        """Smaller contexts fit into the decoding servers' batches, whose tokens are believed to take ``tbt_s``."""
        if tbt_s is None or tbt_s < self.settings.batch_share * self._limit_s():
            return None
        most, stay_s = self._batches.most_tokens(self._limit_s()) * self.settings.fill, self._batches.stay_s
        if math.isinf(most) or stay_s <= 0:
            return None
        tokens = case.request.prompt.tokens
        largest = self._contexts.dearest(most / stay_s, most - self._batches.tokens, now_s)
        if tokens <= largest:
            return None
        reason = f"its context has {tokens} tokens; those up to {largest:.0f} fit"
        return Refusal(reason, max(LATER_S, stay_s / 4), kind="cost")
