"""Mooncake's three rules (FAST'25, section 4.2.6), each by when it looks at the decoding servers.

All three refuse on arrival what would get its first token too late, and all three look again when the prefill is done,
since the load may have changed: what is refused then was computed for nothing. They differ in what they know of the
decoding servers on arrival: nothing (``Baseline``), what their load is now (``Early``: loads of prefill and decoding
then swing against each other, for the load that a request meets is another one), or what it is believed to be when the
prefill will be done (``Predicted``).
"""

from __future__ import annotations

from dataclasses import dataclass

from skymemory.conductor.admission.base import Case, Refusal, Slo, Unlearning, too_late, too_slow


class Baseline(Unlearning):
    """On arrival only the first token's time counts; the decoding server's load when its turn comes."""

    name = "baseline"

    def __init__(self, slo: Slo) -> None:
        self.slo = slo

    def on_arrival(self, case: Case, now_s: float) -> Refusal | None:
        return too_late(case.prefill.estimated_ttft_s, case.promised(self.slo).ttft_s)

    def before_decode(self, case: Case, now_s: float) -> Refusal | None:
        if case.decode is None:
            return None
        return too_slow(case.decode.estimated_tbt_s, case.promised(self.slo).tbt_s, case.outlook, now_s)


@dataclass(frozen=True, slots=True)
class EarlySettings:
    promised: bool = False
    """Requests count that were let in and are not there yet. Published is without: where the load of now is taken for
    the load then, both loads swing (figure 9)."""


class Early(Baseline):
    """The decoding servers' load counts on arrival, as it is then: of the requests that are in their batches and of the
    one that asks. It must be counted: the look before decoding keeps the load without it below the promise, and
    nobody would ever be refused early.

    Without an outlook, and with ``promised``: as it is estimated of the server that was chosen.
    """

    name = "early"

    def __init__(self, slo: Slo, settings: EarlySettings | None = None) -> None:
        super().__init__(slo)
        self.settings = settings or EarlySettings()

    def on_arrival(self, case: Case, now_s: float) -> Refusal | None:
        refusal = super().on_arrival(case, now_s)
        if refusal is not None or case.decode is None:
            return refusal
        if case.outlook is None or self.settings.promised:
            return too_slow(case.decode.estimated_tbt_s, case.promised(self.slo).tbt_s, case.outlook, now_s)
        return too_slow(
            case.outlook.tbt_s(now_s, now_s, case.request), case.promised(self.slo).tbt_s, case.outlook, now_s
        )


class Predicted(Baseline):
    """The decoding servers' load counts as it is believed to be when the prefill is done.

    The mean over the servers, of requests that decode for the usual time and of the one that asks.
    Without an outlook it is ``Early``.
    """

    name = "predicted"

    def on_arrival(self, case: Case, now_s: float) -> Refusal | None:
        refusal = super().on_arrival(case, now_s)
        if refusal is not None or case.decode is None:
            return refusal
        if case.outlook is None:
            return too_slow(case.decode.estimated_tbt_s, case.promised(self.slo).tbt_s, None, now_s)
        then_s = now_s + (case.prefill.estimated_ttft_s or 0.0)
        return too_slow(
            case.outlook.tbt_s(then_s, now_s, case.request), case.promised(self.slo).tbt_s, case.outlook, now_s
        )
