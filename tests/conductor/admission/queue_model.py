"""Servers as one number each: seconds of work in line. Enough to see who is let in when there is too much."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from tests.conductor.admission.cases import case

from skymemory.conductor.request import Slo
from skymemory.conductor.scheduler import Admission, Refusal


@dataclass
class Asked:
    at_s: float
    cost_s: float
    tenant: str = ""
    priority: int = 0


@dataclass
class Outcome:
    """Of one kind of requests (tenant and priority): seconds of work, and how many."""

    asked_s: Counter[tuple[str, int]] = field(default_factory=Counter)
    served_s: Counter[tuple[str, int]] = field(default_factory=Counter)
    asked: Counter[tuple[str, int]] = field(default_factory=Counter)
    served: Counter[tuple[str, int]] = field(default_factory=Counter)
    refusals: list[tuple[float, Asked, float, Refusal]] = field(default_factory=list)
    """When, who, the load it met (its estimate as a part of the promise), and why."""
    wait_s: float = 0.0
    """Summed over those who were served."""


def poisson(
    dice: random.Random, until_s: float, load: float, cost_s: float, tenant: str = "", begin_s: float = 0.0
) -> list[Asked]:
    """Requests of about ``cost_s`` (exponential), that ask for ``load`` seconds of work a second."""
    found = []
    at_s = begin_s + dice.expovariate(load / cost_s)
    while at_s < until_s:
        found.append(Asked(at_s, dice.expovariate(1 / cost_s), tenant))
        at_s += dice.expovariate(load / cost_s)
    return found


def run(rule: Admission, slo: Slo, requests: list[Asked], servers: int = 4) -> Outcome:
    """Each to the server with the least work; estimates are true."""
    outcome = Outcome()
    busy_until = [0.0] * servers
    for one in sorted(requests, key=lambda asked: asked.at_s):
        who = (one.tenant, one.priority)
        now_s = one.at_s
        at = min(range(servers), key=lambda server: busy_until[server])
        ttft_s = max(0.0, busy_until[at] - now_s) + one.cost_s
        given = case(
            ttft_s, compute_s=one.cost_s, servers=servers, tenant=one.tenant, priority=one.priority, at_s=now_s
        )
        outcome.asked[who] += 1
        outcome.asked_s[who] += one.cost_s
        refusal = rule.on_arrival(given, now_s)
        if refusal is not None:
            rule.refused(given, refusal, now_s)
            outcome.refusals.append((now_s, one, ttft_s / slo.ttft_s, refusal))
            continue
        rule.accepted(given, now_s)
        outcome.wait_s += ttft_s - one.cost_s
        busy_until[at] = now_s + ttft_s
        rule.prefilled(given, now_s + ttft_s)  # early, as the rule sees it: it learns that estimates are true
        rule.on_request_end(given, now_s + ttft_s, ttft_s <= slo.ttft_s)
        outcome.served[who] += 1
        outcome.served_s[who] += one.cost_s
    return outcome
