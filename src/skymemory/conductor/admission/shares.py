"""What each tenant asked for lately, what it got, and what its share of all that was given is: max-min, weighted."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

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
