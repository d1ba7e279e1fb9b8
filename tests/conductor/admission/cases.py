"""Requests, estimates and outlooks for tests of admission."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from skymemory.conductor.request import Decision, Prompt, Request
from skymemory.conductor.scheduler import DecodeForecast, ScheduledRequest

_NO_BLOCKS = np.empty(0, np.uint64)


def request(tokens: int = 1000, tenant: str = "", priority: int = 0) -> Request:
    return Request(Prompt(_NO_BLOCKS, _NO_BLOCKS, 512.0, tokens), tenant=tenant, priority=priority)


class Believed:
    """An forecast that is given as a function of the instant."""

    decode_s = 5.0

    def __init__(self, tbt_s: Callable[[float], float]) -> None:
        self._tbt_s = tbt_s
        self.asked: list[tuple[float, float]] = []

    def expected(self, request: Request, at_s: float) -> None:
        pass

    def tbt_s(self, at_s: float, now_s: float, request: Request | None = None) -> float:
        self.asked.append((at_s, now_s))
        return self._tbt_s(at_s)

    def own_tbt_s(self, decode: Decision, joins_s: float, now_s: float) -> float:
        return self.tbt_s(joins_s, now_s)


def case(
    ttft_s: float | None = 1.0,
    tbt_s: float | None = None,
    compute_s: float | None = None,
    *,
    servers: int = 1,
    forecast: DecodeForecast | None = None,
    tenant: str = "",
    priority: int = 0,
    at_s: float = 0.0,
    tokens: int = 1000,
) -> ScheduledRequest:
    """``tbt_s``: of the decoding server; None: there is none. ``compute_s``: all of the estimate, if not said."""
    asked = request(tokens, tenant=tenant, priority=priority)
    compute_s = ttft_s if compute_s is None else compute_s
    others = tuple(f"p{number}" for number in range(1, servers))
    prefill = Decision(asked, "p0", (others, ()), "t", 0.0, 0, at_s, ttft_s, estimated_compute_s=compute_s)
    decode = None if tbt_s is None else Decision(asked, "d0", ((), ()), "t", 0.0, 0, at_s, estimated_tbt_s=tbt_s)
    return ScheduledRequest(asked, prefill, decode, forecast)
