"""Mooncake's three admission rules (FAST'25, section 4.2.6).

All three refuse on arrival if the time to first token is too long, and check the decode load again after the prefill,
where a refusal wastes it. They differ in the decode load they see on arrival: none (``Baseline``), the current one
(``Early``, under which prefill and decode loads oscillate), or the one forecast for the end of the prefill
(``Predicted``).
"""

from __future__ import annotations

from dataclasses import dataclass

from skymemory.conductor.admission.base import Case, Refusal, Slo, StatelessRule, too_late, too_slow


class Baseline(StatelessRule):
    """Checks the time to first token on arrival, the decode load after the prefill."""

    name = "baseline"

    def __init__(self, slo: Slo) -> None:
        self.slo = slo

    def on_arrival(self, case: Case, now_s: float) -> Refusal | None:
        return too_late(case.prefill.estimated_ttft_s, case.slo(self.slo).ttft_s)

    def before_decode(self, case: Case, now_s: float) -> Refusal | None:
        if case.decode is None:
            return None
        return too_slow(case.decode.estimated_tbt_s, case.slo(self.slo).tbt_s, case.forecast, now_s)


@dataclass(frozen=True, slots=True)
class EarlySettings:
    promised: bool = False
    """Count admitted requests that have not joined a batch yet. The published rule does not, and oscillates (figure
    9)."""


class Early(Baseline):
    """Also checks the current decode load on arrival: the requests in batches and the new one. The new one must count:
    the check before decoding keeps the load without it below the objective, so none would be refused early.

    Without a forecast, and with ``promised``, it is the estimate of the chosen server.
    """

    name = "early"

    def __init__(self, slo: Slo, settings: EarlySettings | None = None) -> None:
        super().__init__(slo)
        self.settings = settings or EarlySettings()

    def on_arrival(self, case: Case, now_s: float) -> Refusal | None:
        refusal = super().on_arrival(case, now_s)
        if refusal is not None or case.decode is None:
            return refusal
        if case.forecast is None or self.settings.promised:
            return too_slow(case.decode.estimated_tbt_s, case.slo(self.slo).tbt_s, case.forecast, now_s)
        return too_slow(case.forecast.tbt_s(now_s, now_s, case.request), case.slo(self.slo).tbt_s, case.forecast, now_s)


class Predicted(Baseline):
    """Also checks on arrival the decode load that is forecast for the end of the prefill: the mean over the servers,
    with the new request. Without a forecast it is ``Early``.
    """

    name = "predicted"

    def on_arrival(self, case: Case, now_s: float) -> Refusal | None:
        refusal = super().on_arrival(case, now_s)
        if refusal is not None or case.decode is None:
            return refusal
        if case.forecast is None:
            return too_slow(case.decode.estimated_tbt_s, case.slo(self.slo).tbt_s, None, now_s)
        then_s = now_s + (case.prefill.estimated_ttft_s or 0.0)
        return too_slow(
            case.forecast.tbt_s(then_s, now_s, case.request), case.slo(self.slo).tbt_s, case.forecast, now_s
        )
