"""One load over all tiers: leased near to far, loaded at once, and asked of the next tier where one fails."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from skymemory.cache.blocks import FAILING_REASONS
from skymemory.cache.tiers.outbound import Moving, Outbound
from skymemory.cache.tiers.tier import Tier
from skymemory.cache.tiers.workers import Call
from skymemory.errors import InvalidInput
from skymemory.store.base import KeyReport, LoadReport, LoadTicket, Presence

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


# One load at one tier, from its lease to its release.


_Held = tuple[list[bytes], LoadTicket | None]
Loaded = tuple[dict[bytes, memoryview], dict[bytes, KeyReport]]
"""The values that came, and a report on every key asked for."""


class TierLoad:
    """What ``tier`` holds of a load: ``keys``, leased. Ask ``lease`` for one."""

    def __init__(self, tier: Tier, keys: list[bytes], ticket: LoadTicket) -> None:
        self.tier = tier
        self.keys = keys
        self._ticket: LoadTicket | None = ticket
        self._call: Call[list[memoryview | None]] | None = None
        self._budget: InFlightBudget | None = None
        self._taken: list[int] = []
        self._why = "unreachable"

    @classmethod
    def lease(cls, tier: Tier, keys: Sequence[bytes]) -> TierLoad | None:
        """Those of ``keys`` that the tier has; None where it has none, or does not answer."""
        if not keys or not tier.usable(keys):
            return None

        def work() -> _Held:
            told = tier.store.lookup(keys)
            held = [key for key, one in zip(keys, told, strict=True) if one is Presence.HIT and key not in tier.doubts]
            return held, tier.store.prepare_load(held) if held else None

        def late(held: _Held | None) -> None:
            if held is not None and held[1] is not None:
                tier.store.release(held[1])

        told = tier.ask(work, late)
        return cls(tier, told[0], told[1]) if told is not None and told[1] is not None else None

    @property
    def expected_bytes(self) -> int:
        return int(len(self.keys) * self.tier.mean_value_bytes)

    def start(self, budget: InFlightBudget, until_s: float) -> None:
        """Begin to load, once there is room for the bytes expected (a local tier's are not in flight)."""
        ticket, store = self._ticket, self.tier.store
        if ticket is None or not self.tier.usable(self.keys):
            return
        if self.tier.settings.local:
            self._call = self.tier.start(lambda: store.complete_load(ticket))
            return
        size_bytes = self.expected_bytes
        if not budget.take(size_bytes, until_s - self.tier.clock()):
            self._why = "too many bytes in flight"
            self.tier.counters.add("loads_without_room_total", label=self.tier.name)
            return
        self._budget = budget
        self._taken.append(size_bytes)

        def work() -> list[memoryview | None]:
            try:
                return store.complete_load(ticket)
            finally:
                self._give_back()

        self._call = self.tier.start(work)
        if self._call is None:
            self._give_back()

    def _give_back(self) -> None:
        """Once, by the caller or the tier's thread, whichever is first; nothing of a local tier."""
        with suppress(IndexError):
            size_bytes = self._taken.pop()
            if self._budget is not None:
                self._budget.give_back(size_bytes)

    def end(self, until_s: float) -> Loaded:
        """What has come by ``until_s``."""
        ticket, tier = self._ticket, self.tier
        call = self._call
        if call is None or ticket is None:
            return {}, {key: KeyReport(reason=self._why) for key in self.keys}

        def late(values: list[memoryview | None] | None) -> None:
            self._give_back()
            tier.store.release(ticket)

        def sound(values: list[memoryview | None]) -> bool:
            told = ticket.report.keys if ticket.report is not None else ()
            return not any(
                value is None and one.reason in FAILING_REASONS for value, one in zip(values, told, strict=False)
            )

        values = tier.end(call, until_s, late, sound=sound, kind="load", moved=_size_bytes, held=self.keys)
        if values is None:
            self._give_back()  # what others load does not wait for a load that was given up
            if call.error is None:
                self._ticket = None  # released when it lands
            why = "unreachable" if call.error is not None else "deadline"
            return {}, {key: KeyReport(reason=why) for key in self.keys}
        told = ticket.report.keys if ticket.report is not None else ()
        return self._judge(values, told if len(told) == len(self.keys) else ())

    def _judge(self, values: list[memoryview | None], told: Sequence[KeyReport]) -> Loaded:
        """Whatever the tier says, a value counts only if it is one for this key."""
        tier, verify = self.tier, self.tier.settings.verify
        good: dict[bytes, memoryview] = {}
        reports: dict[bytes, KeyReport] = {}
        wrong: list[bytes] = []
        for at, key in enumerate(self.keys):
            value = values[at] if at < len(values) else None
            report = told[at] if told else KeyReport()
            if value is None or key in tier.doubts:
                reports[key] = replace(report, tier="", size_bytes=0, reason=report.reason or "absent")
            elif verify is not None and not verify(key, value):
                wrong.append(key)
                reports[key] = replace(report, tier="", size_bytes=0, reason="corrupt")
            else:
                good[key] = value
                reports[key] = replace(report, tier=report.tier or tier.name, size_bytes=value.nbytes, reason="")
                tier.mean_value_bytes += (value.nbytes - tier.mean_value_bytes) / 8
        if wrong:
            tier.counters.add("tier_corrupt_total", len(wrong), tier.name)
            tier.doubts.add(wrong)
        tier.counters.add("tier_hits_total", len(good), tier.name)
        tier.counters.add("tier_bytes_total", sum(value.nbytes for value in good.values()), tier.name)
        return good, reports

    def release(self) -> None:
        """Give up the lease, or the views. May be repeated."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self.tier.post(lambda: self.tier.store.release(ticket))


def _size_bytes(values: list[memoryview | None]) -> int:
    return sum(value.nbytes for value in values if value is not None)


# Bytes in flight: how much may be on its way out of slow tiers at once, over all threads.


class InFlightBudget:
    """At most ``limit_bytes`` taken at once. What is larger than all of it goes alone, not never."""

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes <= 0:
            raise InvalidInput(f"bytes in flight must be bounded by more than 0, got {limit_bytes}")
        self.limit_bytes = limit_bytes
        self.taken_bytes = 0
        self.most_bytes = 0
        """The most that was ever taken at once."""
        self._changed = threading.Condition()

    def take(self, size_bytes: int, timeout_s: float) -> bool:
        """Wait until there is room, ``timeout_s`` at most; whether there was. What is taken has to be given back."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._fits(size_bytes), max(0.0, timeout_s)):
                return False
            self.taken_bytes += size_bytes
            self.most_bytes = max(self.most_bytes, self.taken_bytes)
            return True

    def give_back(self, size_bytes: int) -> None:
        with self._changed:
            self.taken_bytes -= size_bytes
            self._changed.notify_all()

    def _fits(self, size_bytes: int) -> bool:
        return self.taken_bytes == 0 or self.taken_bytes + size_bytes <= self.limit_bytes
