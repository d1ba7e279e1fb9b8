"""A rule that cannot shut itself out: now and then one is let in, whatever is estimated.

Estimates that are learnt are learnt from requests that are served. Where they have become so bad that nobody is let in
any more (a server that hung for a while, a promise shorter than what is believed of an unknown one), they would stay
so for ever.
"""

from __future__ import annotations

import math

from skymemory.conductor.admission.base import Admission, Case, Refusal


class Probing:
    """``rule``, but when nobody was let in for ``every_s`` the next one is."""

    def __init__(self, rule: Admission, every_s: float) -> None:
        self.rule = rule
        self.name = rule.name
        self._every_s = every_s
        self._let_in_s = -math.inf

    def on_arrival(self, case: Case, now_s: float) -> Refusal | None:
        return None if now_s - self._let_in_s >= self._every_s else self.rule.on_arrival(case, now_s)

    def before_decode(self, case: Case, now_s: float) -> Refusal | None:
        return self.rule.before_decode(case, now_s)

    def refused(self, case: Case, refusal: Refusal, now_s: float) -> None:
        self.rule.refused(case, refusal, now_s)

    def accepted(self, case: Case, now_s: float) -> None:
        self._let_in_s = now_s
        self.rule.accepted(case, now_s)

    def prefilled(self, case: Case, now_s: float) -> None:
        self.rule.prefilled(case, now_s)

    def ended(self, case: Case, now_s: float, met: bool | None) -> None:
        self.rule.ended(case, now_s, met)
