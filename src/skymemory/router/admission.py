"""Admission control, which answers 429.

A rule judges the estimated time to first token; the time between tokens is only measured. All is decided before the
prefill, so that no refusal wastes it.
"""

from __future__ import annotations

import json
import math

from skymemory.conductor.admission.registry import FAIR, admission
from skymemory.conductor.request import Slo
from skymemory.conductor.scheduler import Admission, AdmitAll, Corrected, Probing, Refusal
from skymemory.conductor.strategies.registry import DEFAULT, ESTIMATES
from skymemory.errors import InvalidInput
from skymemory.router.api_error import ApiError
from skymemory.router.prompts.reader import slo_of
from skymemory.router.settings import Settings

CODE = "overloaded"
"""``code`` of the error body; an exceeded quota has another."""

DECISION_HEADER = "x-skymemory-decision"
"""Header that asks for the routing decision, and has it as JSON in the response."""

DECODE_RULES = ("baseline", "early", "predicted")

PROBE_S = 10.0
"""Time without an admission after which a request is admitted: only served requests teach speeds."""


class Overloaded(ApiError):
    """Response 429 to a refused request."""

    def __init__(self, refusal: Refusal) -> None:
        retry_after_s = max(1, math.ceil(min(refusal.retry_after_s, 3600.0)))
        message = f"overloaded: {refusal.reason}; try again later"
        super().__init__(429, message, code=CODE, retry_after_s=retry_after_s)
        self.refusal = refusal

    def as_header(self) -> str:
        refusal = self.refusal
        return json.dumps({"refused": refusal.kind, "reason": refusal.reason, "retry_after_s": self.retry_after_s})


def slo_outcome(slo: Slo, ttft_s: float, took_s: float, tokens: int | None) -> str:
    """Return "kept", "late" (first token) or "slow" (other tokens), by the promised times."""
    if ttft_s > slo.ttft_s:
        return "late"
    if tokens is not None and tokens > 1 and (took_s - ttft_s) / (tokens - 1) > slo.tbt_s:
        return "slow"
    return "kept"


def rule_of(settings: Settings) -> Admission:
    """Return the admission rule."""
    chosen = settings.admission
    if chosen.rule == "all" and not chosen.fair and not chosen.options:
        return AdmitAll()
    if chosen.rule.endswith(FAIR):
        raise InvalidInput(
            f"admission: instead of rule {chosen.rule!r} set rule {chosen.rule.removesuffix(FAIR)!r} and `fair = true`"
        )
    name = chosen.rule + (FAIR if chosen.fair else "")
    slo = slo_of(chosen)
    rule = admission(name, slo or Slo(1.0, 1.0), settings.splits, **chosen.options)
    if slo is None:
        raise InvalidInput(f"admission: rule {name!r} needs `ttft`, the promised time to the first token")
    strategy = settings.strategy or DEFAULT
    if strategy not in ESTIMATES:
        raise InvalidInput(
            f"admission: rule {name!r} needs the estimated time to the first token, and strategy {strategy!r} "
            f"estimates none; strategies that do: {', '.join(ESTIMATES)}"
        )
    looks_at_decoding = chosen.rule in DECODE_RULES and slo.tbt_s < math.inf
    if settings.splits and settings.cost is None and looks_at_decoding:
        raise InvalidInput(
            f"admission: rule {name!r} needs `cost`, a cost model, to estimate the time between tokens at the decode "
            "servers: a file of `skymemory fit`, or a preset"
        )
    if chosen.rule in DECODE_RULES:  # goodput corrects its estimates itself
        rule = Corrected(rule)
    return Probing(rule, PROBE_S)


def without_probes(rule: Admission) -> Admission:
    return rule.rule if isinstance(rule, Probing) else rule
