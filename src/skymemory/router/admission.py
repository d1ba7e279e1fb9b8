"""Who is let in by a proxy: the rule of its settings, what is promised, and how a refusal is told.

The servers behind a proxy prefill and decode, so what is known of a request is the estimate of its first token at the
server it would go to. What is promised between tokens cannot be estimated; it is measured, and counted.
"""

from __future__ import annotations

import json
import math

from skymemory.conductor.admission.base import Admission, AdmitAll, Probing, Refusal, Slo
from skymemory.conductor.admission.named import FAIR, admission
from skymemory.conductor.request import Request
from skymemory.conductor.strategies.named import DEFAULT, ESTIMATES
from skymemory.errors import InvalidInput
from skymemory.router.bad_request import BadRequest
from skymemory.router.prompts.reader import slo_of
from skymemory.router.settings import Settings

CODE = "overloaded"
"""Of an error's body, where OpenAI's clients look for what kind of 429 it is."""

PROBE_S = 10.0
"""When nobody was let in for so long, the next one is: speeds are learnt from those who are served."""


class TurnedAway(BadRequest):
    """A request that is not let in: 429."""

    def __init__(self, request: Request, refusal: Refusal) -> None:
        super().__init__(429, f"overloaded: {refusal.reason}; try again later", code=CODE)
        self.request = request
        self.refusal = refusal

    @property
    def retry_after_s(self) -> int:
        return max(1, math.ceil(min(self.refusal.retry_after_s, 3600.0)))

    def as_header(self) -> str:
        """For the header that tells decisions; nothing of the prompt is in it."""
        refusal = self.refusal
        return json.dumps({"refused": refusal.kind, "reason": refusal.reason, "retry_after_s": self.retry_after_s})


def kept(slo: Slo, ttft_s: float, took_s: float, tokens: int | None) -> str:
    """What became of a promise, by an answer of so many ``tokens`` (None: it does not say) that took ``took_s`` in
    all: "kept", "late" (its first token) or "slow" (the others).
    """
    if ttft_s > slo.ttft_s:
        return "late"
    if tokens is not None and tokens > 1 and (took_s - ttft_s) / (tokens - 1) > slo.tbt_s:
        return "slow"
    return "kept"


def rule_of(settings: Settings) -> Admission:
    """
    Raises:
        InvalidInput: there is no such rule or option, nothing is promised, or the strategy does not estimate when a
            first token will come.
    """
    said = settings.admission
    if said.rule == "all" and not said.fair and not said.options:
        return AdmitAll()
    if said.rule.endswith(FAIR):
        raise InvalidInput(f"admission: for rule {said.rule!r} say {said.rule.removesuffix(FAIR)!r}, and `fair = true`")
    name = said.rule + (FAIR if said.fair else "")
    slo = slo_of(said)
    rule = admission(name, slo or Slo(1.0, 1.0), **said.options)
    if slo is None:
        raise InvalidInput(f"admission: rule {name!r} needs `ttft`, the time to the first token that is promised")
    strategy = settings.strategy or DEFAULT
    if strategy not in ESTIMATES:
        raise InvalidInput(
            f"admission: rule {name!r} goes by the estimated time to the first token, and strategy {strategy!r} "
            f"estimates none; strategies that do: {', '.join(ESTIMATES)}"
        )
    return Probing(rule, PROBE_S)
