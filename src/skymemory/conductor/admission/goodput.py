"""The rule ``goodput`` (ours): under overload it maximises the number of requests that meet both objectives."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from itertools import accumulate

from skymemory.conductor.admission.mooncake import too_late, too_slow
from skymemory.conductor.request import Slo
from skymemory.conductor.scheduler import RETRY_S, Admission, Refusal, ScheduledRequest
from skymemory.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class GoodputSettings:
    window_s: float = 60.0
    """Age up to which a request counts as a sample."""
    queue_share: float = 0.75
    """Queue, as a share of the TTFT objective, from which costly prefills are refused."""
    use: float = 1.0
    """Share of the servers' time given to prefills."""
    batch_share: float = 0.6
    """Decode load, as a share of its limit, from which large contexts are refused."""
    fill: float = 0.9
    """Tokens in decode batches, as a share of those that meet the objective."""
    broken: float = 0.5
    """Tolerated share of missed objectives among requests near the limit."""
    least_headroom: float = 0.7
    """Lower bound of the learnt limit (``LearntHeadroom``)."""

    def __post_init__(self) -> None:
        if self.window_s <= 0:
            raise InvalidInput("admission 'goodput': expected window_s above 0")
        shares = (self.queue_share, self.use, self.batch_share, self.fill, self.least_headroom)
        if not all(0 < share <= 1 for share in shares):
            raise InvalidInput(
                "admission 'goodput': expected queue_share, use, batch_share, fill, least_headroom in (0, 1]"
            )
        if not 0 < self.broken < 1:
            raise InvalidInput(f"admission 'goodput': broken is {self.broken:g}; expected above 0 and below 1")


class Goodput(Admission):
    name = "goodput"

    def __init__(self, slo: Slo, settings: GoodputSettings | None = None) -> None:
        self.slo = slo
        self.settings = settings = settings or GoodputSettings()
        self._prefills = Price(settings.window_s)
        self._contexts = Price(settings.window_s)
        self._batches = Batches()
        self._ttft = LearntTtft(slo.ttft_s)
        self._headroom = LearntHeadroom(settings.least_headroom, settings.broken)
        self._late: set[int] = set()  # requests with a late first token, not counted against decoding

    def on_arrival(self, placement: ScheduledRequest, now_s: float) -> Refusal | None:
        """Refuse a request that would be late, slow, or cost more than others that fit."""
        # A request that would be late anyway is not judged by its cost.
        estimated_s = placement.prefill.estimated_ttft_s
        ttft_s = None if estimated_s is None else self._ttft.corrected_s(estimated_s)
        decode, forecast = placement.decode, placement.forecast
        tbt_s = None if decode is None else decode.estimated_tbt_s
        if decode is not None and tbt_s is not None and forecast is not None:
            tbt_s = forecast.own_tbt_s(decode, now_s + (ttft_s or 0.0), now_s)
        return (
            too_late(ttft_s, placement.slo(self.slo).ttft_s)
            or too_slow(tbt_s, self._limit_s(placement), placement.forecast, now_s)
            or self._prefill_too_long(placement, now_s)
            or self._context_too_large(placement, tbt_s, now_s)
        )

    def before_decode(self, placement: ScheduledRequest, now_s: float) -> Refusal | None:
        if placement.decode is None:
            return None
        return too_slow(placement.decode.estimated_tbt_s, self._limit_s(placement), placement.forecast, now_s)

    def refused(self, placement: ScheduledRequest, refusal: Refusal, now_s: float) -> None:
        self._record_request(placement, now_s)

    def accepted(self, placement: ScheduledRequest, now_s: float) -> None:
        self._record_request(placement, now_s)
        if placement.decode is not None and placement.decode.estimated_tbt_s is not None:
            self._batches.entered(placement.request.prompt.tokens, placement.decode.estimated_tbt_s, now_s)

    def prefilled(self, placement: ScheduledRequest, now_s: float) -> None:
        if placement.prefill.estimated_ttft_s is not None:
            self._ttft.record_ttft(placement.prefill.estimated_ttft_s, now_s - placement.prefill.at_s)
        if placement.decode is not None and now_s - placement.prefill.at_s > placement.slo(self.slo).ttft_s:
            self._late.add(id(placement.request))  # alive until ``on_request_end``

    def on_request_end(self, placement: ScheduledRequest, now_s: float, met: bool | None) -> None:
        """Learn from the outcome, unless a late prefill explains it."""
        if placement.decode is not None and placement.decode.estimated_tbt_s is not None:
            self._batches.record_end(placement.request.prompt.tokens, now_s)
            if met is not None and id(placement.request) not in self._late:
                self._headroom.record_outcome(placement.decode.estimated_tbt_s / placement.slo(self.slo).tbt_s, met)
        self._late.discard(id(placement.request))

    def _record_request(self, placement: ScheduledRequest, now_s: float) -> None:
        self._prefills.record_request(placement.prefill.estimated_compute_s or 0.0, now_s)
        if placement.decode is not None:
            self._contexts.record_request(placement.request.prompt.tokens, now_s)

    def _limit_s(self, placement: ScheduledRequest) -> float:
        return placement.slo(self.slo).tbt_s * self._headroom.share

    def _prefill_too_long(self, placement: ScheduledRequest, now_s: float) -> Refusal | None:
        # Refuse, if queues are long, a prefill costlier than the cheapest recent ones that fill the servers' time.
        compute_s, ttft_s = placement.prefill.estimated_compute_s, placement.prefill.estimated_ttft_s
        if compute_s is None or ttft_s is None:
            return None
        # The sample covers the whole cluster, so capacities are sums over all servers.
        servers = 1 + len(placement.prefill.fallbacks)
        room_s = self.settings.queue_share * self.slo.ttft_s - max(0.0, ttft_s - compute_s)
        if room_s > 0:  # a server must not idle because no cheaper request arrives
            return None
        max_cost_s = self._prefills.max_cost(servers * self.settings.use, servers * room_s, now_s)
        if compute_s <= max_cost_s:
            return None
        reason = f"it takes {compute_s:.3g} s of compute; prefills up to {max_cost_s:.3g} s fit"
        return Refusal(reason, max(RETRY_S, compute_s), kind="cost")

    def _context_too_large(self, placement: ScheduledRequest, tbt_s: float | None, now_s: float) -> Refusal | None:
        # Refuse, if batches fill up, a context larger than the smallest recent ones that fit.
        if tbt_s is None or tbt_s < self.settings.batch_share * self._limit_s(placement):
            return None
        # Little's law: batches of ``most`` tokens that stay for ``stay_s`` admit ``most / stay_s`` tokens per second.
        most, stay_s = self._batches.max_tokens(self._limit_s(placement)) * self.settings.fill, self._batches.stay_s
        if math.isinf(most) or stay_s <= 0:
            return None
        tokens = placement.request.prompt.tokens
        largest = self._contexts.max_cost(most / stay_s, most - self._batches.tokens, now_s)
        if tokens <= largest:
            return None
        reason = f"its context has {tokens} tokens; contexts up to {largest:.0f} fit"
        return Refusal(reason, max(RETRY_S, stay_s / 4), kind="cost")


_MOST = 4096
_REFRESH = 64


class Price:
    """Largest cost that fits a capacity if the cheapest of the recent requests go first."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._asked: deque[tuple[float, float]] = deque(maxlen=_MOST)
        self._sorted: list[float] = []
        self._sums: list[float] = []
        self._sorted_s = -math.inf

    def record_request(self, cost: float, now_s: float) -> None:
        # Admitted or refused: the price depends on all that was asked for.
        self._asked.append((now_s, cost))
        if now_s - self._sorted_s < self._window_s / _REFRESH:
            return
        # Sort a few times per window instead of per request: the price moves slowly, and up to 4,096 costs are sorted.
        while self._asked[0][0] < now_s - self._window_s:
            self._asked.popleft()
        self._sorted = sorted(cost for _, cost in self._asked)
        self._sums = list(accumulate(self._sorted))
        self._sorted_s = now_s

    def max_cost(self, per_s: float, room: float, now_s: float) -> float:
        """Return the largest cost that fits ``per_s`` and ``room`` (negative: a backlog); infinite if all fit."""
        if not self._sums:
            return math.inf
        # The sampled requests arrived within ``span_s``, a capacity of ``per_s * span_s``. In order of cost, the last
        # request that still fits sets the price.
        span_s = min(self._window_s, now_s - self._asked[0][0])
        fit = bisect_right(self._sums, per_s * span_s + room)
        return math.inf if fit == len(self._sums) else self._sorted[fit - 1] if fit else 0.0


_STEP = 0.02
_MOST_BIAS = 3.0


class LearntTtft:
    """Learnt ratio of measured to estimated times to first token, which corrects estimates."""

    def __init__(self, promised_s: float) -> None:
        self._promised_s = promised_s
        self.bias = 1.0

    def corrected_s(self, estimated_s: float) -> float:
        return estimated_s * self.bias

    def record_ttft(self, estimated_s: float, took_s: float) -> None:
        # By the share of the promise: only estimates near it decide anything. Bounded: a single hung prefill must not
        # multiply all later estimates.
        weight = _STEP * min(1.0, estimated_s / self._promised_s)
        factor = min(_MOST_BIAS, max(1 / _MOST_BIAS, took_s / max(estimated_s, 1e-9)))
        self.bias += weight * (factor - self.bias)


class LearntHeadroom:
    """Learnt share of the objective between tokens up to which requests are admitted.

    In balance, a share ``broken`` of the requests near the limit miss.
    """

    step = 0.01
    near = 0.8

    def __init__(self, least: float, broken: float) -> None:
        self._least, self._broken = least, broken
        self.share = 1.0

    def record_outcome(self, load: float, met: bool) -> None:
        """Record an outcome; ``load`` is relative to the objective."""
        # In balance, ``broken`` misses times ``step`` down equal the sum of the steps up.
        if load < self.near * self.share:
            return
        if met:
            self.share = min(1.0, self.share + self.step * self._broken / (1 - self._broken))
        else:
            self.share = max(self._least, self.share - self.step)


_FORGETTING = 0.005
_LEAST = 50
_SPREAD = 0.05


class Batches:
    """Admitted requests, and a learnt line of the time between tokens over context tokens."""

    def __init__(self) -> None:
        self.tokens = 0
        # Running statistics of context tokens and time between tokens, and the line through them.
        self._seen = 0
        self._mean_tokens = self._mean_tbt_s = self._var = self._cov = 0.0
        self._line: tuple[float, float] | None = None
        # For ``stay_s``: admitted requests, their time so far, and how many ended.
        self._inside = 0
        self._since_s = 0.0
        self._waited_s = self._ended = 0.0  # both decay at the same rate

    def entered(self, tokens: int, tbt_s: float, now_s: float) -> None:
        """Add an admitted request; learn from the time between tokens estimated for it."""
        self._count(now_s)
        self._inside += 1
        self.tokens += tokens
        self._seen += 1
        # Exponentially weighted means, variance and covariance (Finch, "Incremental calculation of weighted mean
        # and variance", 2009, section 9); plain means for the first samples.
        weight = max(_FORGETTING, 1 / self._seen)
        off, off_s = self.tokens - self._mean_tokens, tbt_s - self._mean_tbt_s
        self._mean_tokens += weight * off
        self._mean_tbt_s += weight * off_s
        self._var += weight * ((1 - weight) * off * off - self._var)
        self._cov += weight * ((1 - weight) * off * off_s - self._cov)
        if self._seen >= _LEAST and self._var > (_SPREAD * self._mean_tokens) ** 2 and self._cov > 0:
            slope = self._cov / self._var
            self._line = (self._mean_tbt_s - slope * self._mean_tokens, slope)

    def record_end(self, tokens: int, now_s: float) -> None:
        self._count(now_s)
        self._inside -= 1
        self.tokens -= tokens
        self._waited_s *= 1 - _FORGETTING
        self._ended = self._ended * (1 - _FORGETTING) + 1

    @property
    def stay_s(self) -> float:
        """Usual time from admission to the end."""
        # Requests in progress contribute their time so far, as short requests end first.
        return self._waited_s / self._ended if self._ended else 0.0

    def _count(self, now_s: float) -> None:
        if self._inside:
            self._waited_s += self._inside * (now_s - self._since_s)
        self._since_s = now_s

    def max_tokens(self, limit_s: float) -> float:
        """Return the context tokens at which a token takes ``limit_s``; infinite while unknown."""
        if self._line is None:
            return math.inf
        empty_s, slope_s = self._line
        return max(0.0, (limit_s - empty_s) / slope_s)
