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
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from itertools import accumulate

from skymemory.conductor.admission.base import LATER_S, Case, Refusal, Slo, too_late, too_slow
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
            too_late(ttft_s, case.promised(self.slo).ttft_s)
            or too_slow(tbt_s, self._limit_s(case), case.outlook, now_s)
            or self._too_long(case, now_s)
            or self._too_large(case, tbt_s, now_s)
        )

    def before_decode(self, case: Case, now_s: float) -> Refusal | None:
        if case.decode is None:
            return None
        return too_slow(case.decode.estimated_tbt_s, self._limit_s(case), case.outlook, now_s)

    def refused(self, case: Case, refusal: Refusal, now_s: float) -> None:
        self._asked(case, now_s)

    def accepted(self, case: Case, now_s: float) -> None:
        self._asked(case, now_s)
        if case.decode is not None and case.decode.estimated_tbt_s is not None:
            self._batches.entered(case.request.prompt.tokens, case.decode.estimated_tbt_s, now_s)

    def prefilled(self, case: Case, now_s: float) -> None:
        if case.prefill.estimated_ttft_s is not None:
            self._ttft.came(case.prefill.estimated_ttft_s, now_s - case.prefill.at_s)
        if case.decode is not None and now_s - case.prefill.at_s > case.promised(self.slo).ttft_s:
            self._late.add(id(case))  # the scheduler keeps the case, and this number, until it tells of its end

    def ended(self, case: Case, now_s: float, met: bool | None) -> None:
        if case.decode is not None and case.decode.estimated_tbt_s is not None:
            self._batches.left(case.request.prompt.tokens, now_s)
            if met is not None and id(case) not in self._late:
                self._headroom.ended(case.decode.estimated_tbt_s / case.promised(self.slo).tbt_s, met)
        self._late.discard(id(case))

    def _asked(self, case: Case, now_s: float) -> None:
        self._prefills.asked(case.prefill.estimated_compute_s or 0.0, now_s)
        if case.decode is not None:
            self._contexts.asked(case.request.prompt.tokens, now_s)

    def _limit_s(self, case: Case) -> float:
        return case.promised(self.slo).tbt_s * self._headroom.share

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
        if tbt_s is None or tbt_s < self.settings.batch_share * self._limit_s(case):
            return None
        most, stay_s = self._batches.most_tokens(self._limit_s(case)) * self.settings.fill, self._batches.stay_s
        if math.isinf(most) or stay_s <= 0:
            return None
        tokens = case.request.prompt.tokens
        largest = self._contexts.dearest(most / stay_s, most - self._batches.tokens, now_s)
        if tokens <= largest:
            return None
        reason = f"its context has {tokens} tokens; those up to {largest:.0f} fit"
        return Refusal(reason, max(LATER_S, stay_s / 4), kind="cost")


# The most that a request may cost so that those which ask fit into what there is, the cheapest first.


_MOST = 4096
"""Requests that are remembered: of a busier time than that, only the latest part."""
_REFRESH = 64
"""Times per window that the remembered are sorted anew."""


class Price:
    """Of a knapsack, the cost at which it is full: what asked lately stands for what will ask."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._asked: deque[tuple[float, float]] = deque(maxlen=_MOST)
        self._sorted: list[float] = []
        self._sums: list[float] = []
        self._sorted_s = -math.inf

    def asked(self, cost: float, now_s: float) -> None:
        """One asked that costs so much; whether it was let in does not matter."""
        self._asked.append((now_s, cost))
        if now_s - self._sorted_s < self._window_s / _REFRESH:
            return
        while self._asked[0][0] < now_s - self._window_s:
            self._asked.popleft()
        self._sorted = sorted(cost for _, cost in self._asked)
        self._sums = list(accumulate(self._sorted))
        self._sorted_s = now_s

    def dearest(self, per_s: float, room: float, now_s: float) -> float:
        """The cost of the dearest that fits; infinite where all do.

        ``per_s``: of what they cost, what there is a second; ``room``: what there is once beside, below 0 where so much
        must be made good.
        """
        if not self._sums:
            return math.inf
        span_s = min(self._window_s, now_s - self._asked[0][0])
        fit = bisect_right(self._sums, per_s * span_s + room)
        return math.inf if fit == len(self._sums) else self._sorted[fit - 1] if fit else 0.0


# What outcomes teach: how much later first tokens come than estimated, how near to its promise a batch may go.


_STEP = 0.05
"""Weight of one outcome in a mean of the latest."""
_MOST_BIAS = 3.0
_SHORT = 0.05
"""Of the promise: estimates below it say nothing of the error of those that matter."""


class LearntTtft:
    """The factor between what was estimated and what came; of estimates that are no small part of the promise."""

    def __init__(self, promised_s: float) -> None:
        self._promised_s = promised_s
        self.bias = 1.0

    def corrected_s(self, estimated_s: float) -> float:
        return estimated_s * self.bias

    def came(self, estimated_s: float, took_s: float) -> None:
        if estimated_s >= _SHORT * self._promised_s:
            factor = min(_MOST_BIAS, max(1 / _MOST_BIAS, took_s / estimated_s))
            self.bias += _STEP * (factor - self.bias)


class LearntHeadroom:
    """The part of the promised time between tokens up to which requests are let in.

    A tracker of a quantile: one broken promise lowers it by a step, a kept one raises it by so much less that both
    balance where ``broken`` of those near the limit break.
    """

    step = 0.01
    near = 0.8
    """Of the limit: who decodes with less load says nothing about the limit."""

    def __init__(self, least: float, broken: float) -> None:
        self._least, self._broken = least, broken
        self.share = 1.0

    def ended(self, load: float, met: bool) -> None:
        """``load``: the estimated time between tokens of its batch, as a part of the promise."""
        if load < self.near * self.share:
            return
        if met:
            self.share = min(1.0, self.share + self.step * self._broken / (1 - self._broken))
        else:
            self.share = max(self._least, self.share - self.step)


# How many tokens of context the decoding servers can have at once: learnt from estimates made at different loads.


_FORGETTING = 0.005
"""Weight of one estimate in the means."""
_LEAST = 50
"""Estimates before anything is said."""
_SPREAD = 0.05
"""Standard deviation of the tokens, as a part of their mean, below which nothing is learnt from a line through them."""


class Batches:
    """What was let in and has not ended, and a line through (its tokens, the estimated time between tokens)."""

    def __init__(self) -> None:
        self.tokens = 0
        """Of prompts that were let in and have not ended."""
        self._seen = 0
        self._mean_tokens = self._mean_tbt_s = self._var = self._cov = 0.0
        self._line: tuple[float, float] | None = None
        """Seconds between tokens without any context, and per token of it."""
        self._inside = 0
        self._since_s = 0.0
        self._waited_s = self._ended = 0.0
        """Seconds that all have been inside, and how many of them ended; both forget alike."""

    def entered(self, tokens: int, tbt_s: float, now_s: float) -> None:
        """One was let in; ``tbt_s`` is estimated with it."""
        self._count(now_s)
        self._inside += 1
        self.tokens += tokens
        self._seen += 1
        weight = max(_FORGETTING, 1 / self._seen)
        off, off_s = self.tokens - self._mean_tokens, tbt_s - self._mean_tbt_s
        self._mean_tokens += weight * off
        self._mean_tbt_s += weight * off_s
        self._var += weight * ((1 - weight) * off * off - self._var)
        self._cov += weight * ((1 - weight) * off * off_s - self._cov)
        if self._seen >= _LEAST and self._var > (_SPREAD * self._mean_tokens) ** 2 and self._cov > 0:
            slope = self._cov / self._var
            self._line = (self._mean_tbt_s - slope * self._mean_tokens, slope)

    def left(self, tokens: int, now_s: float) -> None:
        """One is over."""
        self._count(now_s)
        self._inside -= 1
        self.tokens -= tokens
        self._waited_s *= 1 - _FORGETTING
        self._ended = self._ended * (1 - _FORGETTING) + 1

    @property
    def stay_s(self) -> float:
        """From being let in to the end, usually; 0 while none has ended.

        Those that are inside count with the time they have had: of the first that end one would think that all are
        short.
        """
        return self._waited_s / self._ended if self._ended else 0.0

    def _count(self, now_s: float) -> None:
        if self._inside:
            self._waited_s += self._inside * (now_s - self._since_s)
        self._since_s = now_s

    def most_tokens(self, limit_s: float) -> float:
        """Tokens with which the time between tokens would be ``limit_s``; infinite while that is not known."""
        if self._line is None:
            return math.inf
        empty_s, slope_s = self._line
        return max(0.0, (limit_s - empty_s) / slope_s)
