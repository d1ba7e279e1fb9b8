"""Priorities and fair shares of tenants under overload, as a wrapper of any admission rule."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from skymemory.conductor.request import Slo
from skymemory.conductor.scheduler import RETRY_S, Admission, Refusal, RuleAround, ScheduledRequest
from skymemory.errors import InvalidInput

_NONE: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class FairnessSettings:
    """Settings of ``Fair``. A load is a request's estimated latency relative to its objective."""

    share_window_s: float = 60.0
    overload: float = 0.5
    """Load from which tenants above their share are refused."""
    priority_step: float = 0.2
    """Decrease of the admissible load per higher priority in use."""
    least_load: float = 0.2
    """Load below which no priority is refused."""
    weights: Mapping[str, float] = field(default_factory=lambda: _NONE)
    """Weights of tenants; 1 for a tenant not listed."""

    def __post_init__(self) -> None:
        if self.share_window_s <= 0:
            raise InvalidInput(f"fairness: share_window_s is {self.share_window_s:g}; expected above 0")
        if not (0 < self.overload <= 1 and 0 <= self.priority_step <= 1 and 0 < self.least_load <= 1):
            raise InvalidInput("fairness: expected overload, least_load above 0, priority_step from 0, all at most 1")
        for tenant, weight in self.weights.items():
            if not 0 < weight < float("inf"):
                raise InvalidInput(f"fairness: the weight of tenant {tenant!r} is {weight:g}; expected above 0")


class Fair(RuleAround):
    """Rule that refuses low priorities and tenants above their share, and asks the wrapped ``rule`` for the others."""

    def __init__(self, rule: Admission, slo: Slo, settings: FairnessSettings | None = None) -> None:
        self.settings = settings = settings or FairnessSettings()
        super().__init__(rule)
        self.slo = slo
        self.name = f"{rule.name}+fair"
        self._shares = TenantShares(settings.share_window_s, settings.weights)
        # Time of the last request, by priority.
        self._levels: dict[int, float] = {}

    def on_arrival(self, placement: ScheduledRequest, now_s: float) -> Refusal | None:
        """Refuse by priority and share; no tenant within its share is refused for cost."""
        load = self._load(placement)
        # The order of precedence: the operator's priorities, fairness, then throughput (the wrapped rule).
        refusal = self._priority_refusal(placement.request.priority, load, now_s) or self._share_refusal(
            placement, load
        )
        if refusal is not None:
            return refusal
        refusal = super().on_arrival(placement, now_s)
        if (
            refusal is not None
            and refusal.kind == "cost"
            and self._shares.fits(placement.request.tenant, _cost_s(placement))
        ):
            return None
        return refusal

    def refused(self, placement: ScheduledRequest, refusal: Refusal, now_s: float) -> None:
        self._record_request(placement, False, now_s)
        super().refused(placement, refusal, now_s)

    def accepted(self, placement: ScheduledRequest, now_s: float) -> None:
        self._record_request(placement, True, now_s)
        super().accepted(placement, now_s)

    def _record_request(self, placement: ScheduledRequest, admitted: bool, now_s: float) -> None:
        self._shares.record_request(placement.request.tenant, _cost_s(placement), admitted, now_s)
        self._levels[placement.request.priority] = now_s
        if len(self._levels) > 1:
            since_s = now_s - self.settings.share_window_s
            self._levels = {level: at_s for level, at_s in self._levels.items() if at_s >= since_s}

    def _load(self, placement: ScheduledRequest) -> float:
        ttft_s = placement.prefill.estimated_ttft_s or 0.0
        tbt_s = None if placement.decode is None else placement.decode.estimated_tbt_s
        slo = placement.slo(self.slo)
        return max(ttft_s / slo.ttft_s, (tbt_s or 0.0) / slo.tbt_s)

    def _priority_refusal(self, priority: int, load: float, now_s: float) -> Refusal | None:
        # Refuse above a load that falls by a step for each higher priority in recent use.
        since_s = now_s - self.settings.share_window_s
        above = {level for level, at_s in self._levels.items() if level > priority and at_s >= since_s}
        if priority < 0:
            above.add(0)  # batch work yields even if no other request is in progress
        if not above:
            return None
        limit = max(self.settings.least_load, 1.0 - self.settings.priority_step * len(above))
        if load <= limit:
            return None
        reason = f"priority {priority} is admitted up to a load of {limit:.2f}; the load is {load:.2f}"
        return Refusal(reason, self._retry_s(load - limit), kind="priority")

    def _share_refusal(self, placement: ScheduledRequest, load: float) -> Refusal | None:
        # Refuse a request under overload that would raise its tenant's recent usage above its share.
        if load < self.settings.overload:
            return None
        used_s, share_s = self._shares.of(placement.request.tenant)
        if used_s + _cost_s(placement) <= share_s:
            return None
        window_s = self.settings.share_window_s
        reason = f"its tenant used {used_s:.3g} s of compute in {window_s:g} s; its share is {share_s:.3g} s"
        return Refusal(reason, self._retry_s(load - self.settings.overload), kind="share")

    def _retry_s(self, excess: float) -> float:
        """Return the seconds in which the queue shrinks by this load without arrivals."""
        return max(RETRY_S, excess * self.slo.ttft_s)


def _cost_s(placement: ScheduledRequest) -> float:
    """Return compute seconds, or without an estimate thousands of uncached tokens."""
    seconds = placement.prefill.estimated_compute_s
    return (placement.request.prompt.tokens - placement.prefill.matched_tokens) / 1000 if seconds is None else seconds


_MOST = 65_536
_REFRESH = 256


@dataclass(slots=True)
class _Account:
    asked: float = 0.0
    used: float = 0.0
    requests: int = 0


class TenantShares:
    """Demand, usage and weighted max-min fair share per tenant, in compute seconds within a sliding window."""

    def __init__(self, window_s: float, weights: Mapping[str, float]) -> None:
        self._window_s = window_s
        self._weights = weights
        # Time, tenant, cost and admission of each request in the window.
        self._log: deque[tuple[float, str, float, bool]] = deque()
        self._accounts: dict[str, _Account] = {}
        self._used = 0.0
        # Share per unit of weight, and when it was computed.
        self._level = math.inf
        self._level_at_s = -math.inf

    def record_request(self, tenant: str, cost: float, admitted: bool, now_s: float) -> None:
        """Add a request and forget those that left the window; update the level of shares now and then."""
        self._log.append((now_s, tenant, cost, admitted))
        account = self._accounts.setdefault(tenant, _Account())
        account.requests += 1
        account.asked += cost
        if admitted:
            account.used += cost
            self._used += cost
        while self._log[0][0] < now_s - self._window_s or len(self._log) > _MOST:
            self._forget_first()
        if now_s - self._level_at_s >= self._window_s / _REFRESH:
            self._level, self._level_at_s = self._max_min_level(), now_s

    def of(self, tenant: str) -> tuple[float, float]:
        """Return usage and share of a tenant; the share is infinite without competing tenants or refusals."""
        # Fairness never idles a server: a tenant may use everything while it is alone or nothing was refused.
        account = self._accounts.get(tenant)
        used = 0.0 if account is None else account.used
        has_others = len(self._accounts) > (account is not None)
        return used, self._weight(tenant) * self._level if has_others else math.inf

    def fits(self, tenant: str, cost: float) -> bool:
        """Return True if other tenants compete and the demand plus ``cost`` is within the share."""
        account = self._accounts.get(tenant)
        demand = 0.0 if account is None else account.asked
        has_others = len(self._accounts) > (account is not None)
        return has_others and demand + cost <= self._weight(tenant) * self._level

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _forget_first(self) -> None:
        _, tenant, cost, admitted = self._log.popleft()
        account = self._accounts[tenant]
        account.requests -= 1
        if not account.requests:
            self._used -= account.used
            del self._accounts[tenant]
            return
        account.asked -= cost
        if admitted:
            account.used -= cost
            self._used -= cost

    def _max_min_level(self) -> float:
        """Return the share per unit of weight at which all tenants' shares add up to the usage."""
        remaining = self._used
        # Water filling in the order of demand per weight. A tenant that wants less than an even split of the remaining
        # usage gets its demand; the first that wants more sets the level for itself and all later tenants.
        if sum(account.asked for account in self._accounts.values()) <= remaining * (1 + 1e-9):
            return math.inf  # nothing was refused
        weights = 0.0
        wants = []
        for tenant, account in self._accounts.items():
            weight = self._weight(tenant)
            weights += weight
            wants.append((account.asked / weight, weight))
        wants.sort()
        for want, weight in wants:
            if want * weights >= remaining:
                return max(0.0, remaining / weights)
            remaining -= want * weight
            weights -= weight
        return math.inf
