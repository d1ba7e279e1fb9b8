"""One load over all tiers: leased near to far, loaded at once, and asked of the next tier where one fails."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from skymemory.cache.in_flight_budget import InFlightBudget
from skymemory.cache.manager import FAILING_REASONS
from skymemory.cache.outbound import Moving, Outbound
from skymemory.cache.tier import Tier
from skymemory.cache.tier_loads import TierLoad
from skymemory.store.base import KeyReport, LoadReport

OUTBOUND = "outbound"
"""Supplied by no tier: it was on its way from one to the next."""
_NOWHERE = -1


class TieredLoad:
    """Leases on ``keys`` in the nearest tiers that hold them. ``versions`` are those of the keys before that."""

    def __init__(
        self, keys: Sequence[bytes], tiers: Sequence[Tier], outbound: Outbound, versions: dict[bytes, int]
    ) -> None:
        self._keys = keys
        self._tiers = tiers
        self._outbound = outbound
        self.versions = versions
        self.sources: dict[bytes, int] = {}
        """The number of the tier that supplied each value; of what was on its way, -1."""
        self._loads: list[TierLoad] = []
        self._moving: dict[bytes, Moving] = {}
        self._silent = False
        """A tier could not be asked: what was not found may be there."""
        rest = list(dict.fromkeys(keys))
        for tier in tiers:
            if tier.number == 1:
                self._moving = outbound.get(rest)
                rest = [key for key in rest if key not in self._moving]
            if rest and not tier.usable(rest):
                self._silent = True
            elif (load := TierLoad.lease(tier, rest)) is not None:
                self._loads.append(load)
                leased = set(load.keys)
                rest = [key for key in rest if key not in leased]

    def complete(self, budget: InFlightBudget, deadline_s: float) -> tuple[dict[bytes, memoryview], LoadReport]:
        """What came within ``deadline_s``, and the report on all of the load's keys in their order."""
        clock = self._tiers[0].clock
        started_s = clock()
        until_s = started_s + deadline_s
        values: dict[bytes, memoryview] = {}
        reports: dict[bytes, KeyReport] = {}
        tried: dict[bytes, int] = {}
        self._take(self._moving.values(), values, reports)
        self._run(self._loads, budget, until_s, values, reports, tried)
        failed = [key for key in tried if key not in values]
        if failed:
            self._take(self._outbound.get(failed).values(), values, reports)
        for tier in self._tiers if failed else ():
            rest = [key for key in failed if key not in values and tried[key] < tier.number]
            if rest and clock() < until_s and (load := TierLoad.lease(tier, rest)) is not None:
                self._loads.append(load)
                self._run([load], budget, until_s, values, reports, tried)
        absent = KeyReport(reason=self._why_absent())
        told = tuple(reports.get(key, absent) for key in self._keys)
        seconds = max([clock() - started_s, *(one.seconds for one in told)])
        ordered = {key: values[key] for key in self._keys if key in values}
        return ordered, LoadReport(told, seconds)

    def _why_absent(self) -> str:
        """Why what no tier says it has is not there. A tier that does not answer may say so by a load alone."""
        if self._silent:
            return "unreachable"
        for tier in self._tiers if not self._loads and self._keys else ():
            reason = None if tier.settings.local else tier.ask(partial(_reason, tier, self._keys[0]))
            if reason in FAILING_REASONS:
                return "unreachable"
        return "absent"

    def _run(
        self,
        loads: Sequence[TierLoad],
        budget: InFlightBudget,
        until_s: float,
        values: dict[bytes, memoryview],
        reports: dict[bytes, KeyReport],
        tried: dict[bytes, int],
    ) -> None:
        """Have ``loads`` run at once; the local ones last, for they run in this thread."""
        begun = []
        for load in sorted(loads, key=lambda load: load.tier.settings.local):
            tier = load.tier
            tier_until_s = min(until_s, tier.clock() + tier.deadline_s("load", load.expected_bytes))
            load.start(budget, tier_until_s)
            begun.append((load, tier_until_s))
        for load, tier_until_s in begun:
            good, told = load.end(tier_until_s)
            values.update(good)
            reports.update(told)
            tried.update(dict.fromkeys(load.keys, load.tier.number))
            self.sources.update(dict.fromkeys(good, load.tier.number))

    def _take(
        self, movings: Iterable[Moving], values: dict[bytes, memoryview], reports: dict[bytes, KeyReport]
    ) -> None:
        """Out of memory, and counted as any tier's."""
        counters = self._tiers[0].counters
        for moving in movings:
            values[moving.key] = memoryview(moving.value)
            reports[moving.key] = KeyReport(OUTBOUND, len(moving.value))
            self.sources[moving.key] = _NOWHERE
            counters.add("tier_hits_total", label=OUTBOUND)
            counters.add("tier_bytes_total", len(moving.value), OUTBOUND)

    def release(self) -> None:
        for load in self._loads:
            load.release()


def _reason(tier: Tier, key: bytes) -> str:
    """Why a load of the key brings nothing; empty where it brings something."""
    ticket = tier.store.prepare_load([key])
    tier.store.complete_load(ticket)
    report = ticket.report
    tier.store.release(ticket)
    return report.keys[0].reason if report is not None else ""
