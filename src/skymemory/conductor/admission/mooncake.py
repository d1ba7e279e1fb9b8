"""Mooncake's three admission rules (FAST'25, section 4.2.6)."""

from __future__ import annotations

from dataclasses import dataclass

from skymemory.conductor.request import Slo
from skymemory.conductor.scheduler import RETRY_S, Admission, DecodeForecast, Refusal, ScheduledRequest

_LOOKAHEADS = 12


def too_late(ttft_s: float | None, limit_s: float) -> Refusal | None:
    if ttft_s is None or ttft_s <= limit_s:
        return None
    reason = f"its first token is estimated to take {ttft_s:.3g} s; the limit is {limit_s:.3g} s"
    return Refusal(reason, max(RETRY_S, ttft_s - limit_s), kind="ttft")


def too_slow(tbt_s: float | None, limit_s: float, forecast: DecodeForecast | None, now_s: float) -> Refusal | None:
    if tbt_s is None or tbt_s <= limit_s:
        return None
    reason = f"tokens are estimated to take {tbt_s * 1000:.4g} ms; the limit is {limit_s * 1000:.4g} ms"
    return Refusal(reason, room_in_s(forecast, limit_s, now_s), kind="tbt")


def room_in_s(forecast: DecodeForecast | None, limit_s: float, now_s: float) -> float:
    """Return the seconds until the decode servers are forecast to meet the objective again."""
    if forecast is None:
        return RETRY_S
    ahead_s = RETRY_S
    for _ in range(_LOOKAHEADS):
        if forecast.tbt_s(now_s + ahead_s, now_s) <= limit_s:
            break
        ahead_s *= 2
    return ahead_s


class Baseline(Admission):
    """Rule that checks the decode load only after the prefill, which a refusal wastes."""

    name = "baseline"

    def __init__(self, slo: Slo) -> None:
        self.slo = slo

    def on_arrival(self, placement: ScheduledRequest, now_s: float) -> Refusal | None:
        return too_late(placement.prefill.estimated_ttft_s, placement.slo(self.slo).ttft_s)

    def before_decode(self, placement: ScheduledRequest, now_s: float) -> Refusal | None:
        return self._too_slow(placement.decoder.estimated_tbt_s, placement, now_s)

    def _too_slow(self, tbt_s: float | None, placement: ScheduledRequest, now_s: float) -> Refusal | None:
        return too_slow(tbt_s, placement.slo(self.slo).tbt_s, placement.forecast, now_s)


@dataclass(frozen=True, slots=True)
class EarlySettings:
    promised: bool = False
    """True: also count admitted requests outside any batch, unlike the published rule (figure 9)."""


class Early(Baseline):
    """Rule that checks the current decode load, with the new request, already on arrival. Loads then oscillate."""

    name = "early"

    def __init__(self, slo: Slo, settings: EarlySettings | None = None) -> None:
        super().__init__(slo)
        self.settings = settings or EarlySettings()

    def on_arrival(self, placement: ScheduledRequest, now_s: float) -> Refusal | None:
        refusal, forecast = super().on_arrival(placement, now_s), placement.forecast
        tbt_s = placement.decoder.estimated_tbt_s
        if refusal is not None or tbt_s is None:
            return refusal
        if forecast is not None and not self.settings.promised:
            tbt_s = forecast.tbt_s(now_s, now_s, placement.request)
        return self._too_slow(tbt_s, placement, now_s)


class Predicted(Baseline):
    """Rule that checks, on arrival, the decode load forecast for the end of the prefill."""

    name = "predicted"
    looks_ahead = True

    def on_arrival(self, placement: ScheduledRequest, now_s: float) -> Refusal | None:
        refusal, forecast = super().on_arrival(placement, now_s), placement.forecast
        tbt_s = placement.decoder.estimated_tbt_s
        if refusal is not None or tbt_s is None:
            return refusal
        if forecast is not None:
            then_s = now_s + (placement.prefill.estimated_ttft_s or 0.0)
            tbt_s = forecast.tbt_s(then_s, now_s, placement.request)
        return self._too_slow(tbt_s, placement, now_s)
