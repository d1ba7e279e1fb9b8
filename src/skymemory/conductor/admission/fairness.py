"""Who goes first under overload: priorities, and a fair share for every tenant. Around any rule.

What is shared is the time of the prefilling servers. In a sliding window every tenant has a demand (what it asked for)
and a use (what of that was let in). The use of all is shared out by max-min fairness: nobody gets more than it asks
for, and what one leaves the others have, in proportion to their weights. Once somebody was refused, whoever has had
its share is, from a load of ``overload`` on, so that in the queue there is room for those who have not; and nobody
whose whole demand is within its share is refused for being dear. Below that load nobody is refused here, and where only
one tenant asks, none ever: no server stands still for fairness' sake.

The load is the worse of the estimated time to first token and the decoding server's time between tokens, each as a part
of its promise. Of it a request may meet the less the more levels of priority above its own are in use: what is worth
least is refused first. Below 0, the priority of who names none, one level more is always taken to be in use.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from skymemory.conductor.admission.base import LATER_S, Admission, Case, Refusal, Slo
from skymemory.errors import InvalidInput

_NONE: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class FairnessSettings:
    share_window_s: float = 60.0
    """How long what was asked for and what was let in counts."""
    overload: float = 0.5
    """The load from which shares matter."""
    priority_step: float = 0.2
    """Of the load, what one level of priority above takes away."""
    least_load: float = 0.2
    """No priority is refused below it."""
    weights: Mapping[str, float] = field(default_factory=lambda: _NONE)
    """Of tenants, where not 1."""

    def __post_init__(self) -> None:
        if self.share_window_s <= 0:
            raise InvalidInput(f"fairness: share_window_s is {self.share_window_s:g}; expected above 0")
        if not (0 < self.overload <= 1 and 0 <= self.priority_step <= 1 and 0 < self.least_load <= 1):
            raise InvalidInput("fairness: overload and least_load are above 0, priority_step from 0, all at most 1")
        for tenant, weight in self.weights.items():
            if not 0 < weight < float("inf"):
                raise InvalidInput(f"fairness: the weight of tenant {tenant!r} is {weight:g}; expected above 0")


class Fair:
    """``rule``, with priorities and shares before it."""

    def __init__(self, rule: Admission, slo: Slo, settings: FairnessSettings | None = None) -> None:
        self.settings = settings = settings or FairnessSettings()
        self.rule = rule
        self.slo = slo
        self.name = f"{rule.name}+fair"
        self._shares = Shares(settings.share_window_s, settings.weights)
        self._levels: dict[int, float] = {}
        """Priorities, and when one last asked."""

    def on_arrival(self, case: Case, now_s: float) -> Refusal | None:
        load = self._load(case)
        refusal = self._behind_others(case.request.priority, load, now_s) or self._had_its_share(case, load)
        if refusal is not None:
            return refusal
        refusal = self.rule.on_arrival(case, now_s)
        if refusal is not None and refusal.kind == "cost" and self._shares.fits(case.request.tenant, _cost_s(case)):
            return None
        return refusal

    def before_decode(self, case: Case, now_s: float) -> Refusal | None:
        return self.rule.before_decode(case, now_s)

    def refused(self, case: Case, refusal: Refusal, now_s: float) -> None:
        self._asked(case, False, now_s)
        self.rule.refused(case, refusal, now_s)

    def accepted(self, case: Case, now_s: float) -> None:
        self._asked(case, True, now_s)
        self.rule.accepted(case, now_s)

    def prefilled(self, case: Case, now_s: float) -> None:
        self.rule.prefilled(case, now_s)

    def ended(self, case: Case, now_s: float, met: bool | None) -> None:
        self.rule.ended(case, now_s, met)

    def _asked(self, case: Case, let_in: bool, now_s: float) -> None:
        self._shares.asked(case.request.tenant, _cost_s(case), let_in, now_s)
        self._levels[case.request.priority] = now_s
        if len(self._levels) > 1:
            since_s = now_s - self.settings.share_window_s
            self._levels = {level: at_s for level, at_s in self._levels.items() if at_s >= since_s}

    def _load(self, case: Case) -> float:
        ttft_s = case.prefill.estimated_ttft_s or 0.0
        tbt_s = None if case.decode is None else case.decode.estimated_tbt_s
        slo = case.promised(self.slo)
        return max(ttft_s / slo.ttft_s, (tbt_s or 0.0) / slo.tbt_s)

    def _behind_others(self, priority: int, load: float, now_s: float) -> Refusal | None:
        since_s = now_s - self.settings.share_window_s
        above = {level for level, at_s in self._levels.items() if level > priority and at_s >= since_s}
        if priority < 0:
            above.add(0)
        if not above:
            return None
        limit = max(self.settings.least_load, 1.0 - self.settings.priority_step * len(above))
        if load <= limit:
            return None
        reason = f"priority {priority} is served up to a load of {limit:.2f}, and it is {load:.2f}"
        return Refusal(reason, self._retry_s(load - limit), kind="priority")

    def _had_its_share(self, case: Case, load: float) -> Refusal | None:
        if load < self.settings.overload:
            return None
        used_s, share_s = self._shares.of(case.request.tenant)
        if used_s + _cost_s(case) <= share_s:
            return None
        window_s = self.settings.share_window_s
        reason = f"its tenant had {used_s:.3g} s of computing in {window_s:g} s; its share is {share_s:.3g} s"
        return Refusal(reason, self._retry_s(load - self.settings.overload), kind="share")

    def _retry_s(self, excess: float) -> float:
        """Seconds until the queue has fallen by that much load, if nothing came."""
        return max(LATER_S, excess * self.slo.ttft_s)


def _cost_s(case: Case) -> float:
    """Seconds of a prefill server. Where they are not estimated: thousands of tokens, which share out as well."""
    seconds = case.prefill.estimated_compute_s
    return (case.request.prompt.tokens - case.prefill.matched_tokens) / 1000 if seconds is None else seconds


# What each tenant asked for lately, what it got, and what its share of all that was given is: max-min, weighted.


_MOST = 65_536
"""Requests that are remembered: of a busier window than that, the latest part."""
_REFRESH = 256
"""Times per window that shares are computed anew."""


@dataclass(slots=True)
class _Account:
    asked: float = 0.0
    used: float = 0.0
    requests: int = 0


class Shares:
    def __init__(self, window_s: float, weights: Mapping[str, float]) -> None:
        self._window_s = window_s
        self._weights = weights
        self._log: deque[tuple[float, str, float, bool]] = deque()
        self._accounts: dict[str, _Account] = {}
        self._used = 0.0
        self._level = math.inf
        self._levelled_s = -math.inf

    def asked(self, tenant: str, cost: float, let_in: bool, now_s: float) -> None:
        """``tenant`` asked for ``cost``, and was let in or not."""
        self._log.append((now_s, tenant, cost, let_in))
        account = self._accounts.setdefault(tenant, _Account())
        account.requests += 1
        account.asked += cost
        if let_in:
            account.used += cost
            self._used += cost
        while self._log[0][0] < now_s - self._window_s or len(self._log) > _MOST:
            self._forget_first()
        if now_s - self._levelled_s >= self._window_s / _REFRESH:
            self._level, self._levelled_s = self._levelled(), now_s

    def of(self, tenant: str) -> tuple[float, float]:
        """What it used, and its share; both of the window.

        The share is infinite where nobody else asked, and where nobody was refused.
        """
        account = self._accounts.get(tenant)
        used = 0.0 if account is None else account.used
        others = len(self._accounts) > (account is not None)
        return used, self._weight(tenant) * self._level if others else math.inf

    def fits(self, tenant: str, cost: float) -> bool:
        """Whether all it asked for, and ``cost`` with it, is within its share, and somebody else asks too."""
        account = self._accounts.get(tenant)
        asked = 0.0 if account is None else account.asked
        others = len(self._accounts) > (account is not None)
        return others and asked + cost <= self._weight(tenant) * self._level

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _forget_first(self) -> None:
        _, tenant, cost, let_in = self._log.popleft()
        account = self._accounts[tenant]
        account.requests -= 1
        if not account.requests:
            self._used -= account.used
            del self._accounts[tenant]
            return
        account.asked -= cost
        if let_in:
            account.used -= cost
            self._used -= cost

    def _levelled(self) -> float:
        """The share per weight at which all that was used is given out: tenants that ask for less get what they ask."""
        left = self._used
        if sum(account.asked for account in self._accounts.values()) <= left * (1 + 1e-9):
            return math.inf  # nobody was refused
        weights = 0.0
        wants = []
        for tenant, account in self._accounts.items():
            weight = self._weight(tenant)
            weights += weight
            wants.append((account.asked / weight, weight))
        wants.sort()
        for want, weight in wants:
            if want * weights >= left:
                return max(0.0, left / weights)
            left -= want * weight
            weights -= weight
        return math.inf
