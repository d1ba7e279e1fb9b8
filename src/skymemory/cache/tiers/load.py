"""Load over all tiers: leased in the nearest that hold the keys, loaded concurrently, retried in farther tiers.

A tier that hangs for longer than ``Tier.deadline_s`` misses by DEADLINE (``TierLoad.end``); a tier that failed or was
skipped is UNREACHABLE.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from skymemory.cache.blocks import TIER_FAILURES
from skymemory.cache.tiers.outbound import Moving, Outbound
from skymemory.cache.tiers.tier import Tier
from skymemory.cache.tiers.workers import WorkerCall
from skymemory.errors import InvalidInput
from skymemory.pacing import ByteBudget
from skymemory.reasons import UNANSWERED, Miss
from skymemory.store.base import KeyReport, LoadReport, LoadTicket, Presence, Store

OUTBOUND = "outbound"
"""Tier name reported for values moving between tiers."""
_NO_TIER = -1

_Held = tuple[list[bytes], LoadTicket | None]
Loaded = tuple[dict[bytes, memoryview], dict[bytes, KeyReport]]


class TieredLoad:
    """Leases on ``keys`` in the nearest tiers that hold them."""

    def __init__(
        self, keys: Sequence[bytes], tiers: Sequence[Tier], outbound: Outbound, versions: dict[bytes, int]
    ) -> None:
        self._keys = keys
        self._tiers = tiers
        self._outbound = outbound
        self.versions = versions  # of the keys, to notice writes until promotion
        self.sources: dict[bytes, int] = {}  # tier of each value; -1 if it was moving
        self._loads: list[TierLoad] = []
        self._moving: dict[bytes, Moving] = {}
        self._tier_skipped = False
        remaining = list(dict.fromkeys(keys))
        for tier in tiers:
            if tier.number == 1:
                self._moving = outbound.get(remaining)
                remaining = [key for key in remaining if key not in self._moving]
            if remaining and not tier.usable(remaining):
                self._tier_skipped = True
            elif (load := TierLoad.lease(tier, remaining)) is not None:
                self._loads.append(load)
                leased = set(load.keys)
                remaining = [key for key in remaining if key not in leased]

    def complete(self, budget: InFlightBudget, deadline_s: float) -> tuple[dict[bytes, memoryview], LoadReport]:
        """Load from all leased tiers at once, then what failed from farther tiers. Return values and a report."""
        clock = self._tiers[0].clock
        started_s = clock()
        until_s = started_s + deadline_s
        values: dict[bytes, memoryview] = {}
        reports: dict[bytes, KeyReport] = {}
        tried: dict[bytes, int] = {}
        self._from_memory(self._moving.values(), values, reports)
        self._run(self._loads, budget, until_s, values, reports, tried)
        # Failed keys may now be moving between tiers, or be held by a farther tier.
        failed = [key for key in tried if key not in values]
        if failed:
            self._from_memory(self._outbound.get(failed).values(), values, reports)
        for tier in self._tiers if failed else ():
            remaining = [key for key in failed if key not in values and tried[key] < tier.number]
            if remaining and clock() < until_s and (load := TierLoad.lease(tier, remaining)) is not None:
                self._loads.append(load)
                self._run([load], budget, until_s, values, reports, tried)
        absent = KeyReport(reason=self._why_absent())
        ordered_reports = tuple(reports.get(key, absent) for key in self._keys)
        seconds = max([clock() - started_s, *(report.seconds for report in ordered_reports)])
        ordered = {key: values[key] for key in self._keys if key in values}
        return ordered, LoadReport(ordered_reports, seconds)

    def _why_absent(self) -> Miss:
        """Return why no tier holds the keys; only a load shows a silent tier."""
        if self._tier_skipped:
            return Miss.UNREACHABLE
        for tier in self._tiers if not self._loads and self._keys else ():
            if tier.settings.local:
                continue
            if not tier.usable(self._keys):  # its lookup was given up
                return Miss.UNREACHABLE
            if tier.ask(partial(_miss_reason, tier, self._keys[0])) in UNANSWERED:
                return Miss.UNREACHABLE
        return Miss.ABSENT

    def _run(
        self,
        loads: Sequence[TierLoad],
        budget: InFlightBudget,
        until_s: float,
        values: dict[bytes, memoryview],
        reports: dict[bytes, KeyReport],
        tried: dict[bytes, int],
    ) -> None:
        """Run loads concurrently, those in this thread last. Fills the mappings, ``tried`` with tiers by key."""
        ordered = sorted(loads, key=lambda load: (load.tier.settings.local, load.tier.at_once is not None))
        for load in ordered:
            load.start(budget, until_s)
        for load in ordered:
            good, load_reports = load.end()
            values.update(good)
            reports.update(load_reports)
            tried.update(dict.fromkeys(load.keys, load.tier.number))
            self.sources.update(dict.fromkeys(good, load.tier.number))

    def _from_memory(
        self, movings: Iterable[Moving], values: dict[bytes, memoryview], reports: dict[bytes, KeyReport]
    ) -> None:
        """Add values that are moving between tiers."""
        counters = self._tiers[0].counters
        for moving in movings:
            values[moving.key] = memoryview(moving.value)
            reports[moving.key] = KeyReport(OUTBOUND, len(moving.value))
            self.sources[moving.key] = _NO_TIER
            counters.add("tier_hits_total", label=OUTBOUND)
            counters.add("tier_bytes_total", len(moving.value), OUTBOUND)

    def release(self) -> None:
        for load in self._loads:
            load.release()


def _miss_reason(tier: Tier, key: bytes) -> Miss | None:
    ticket = tier.store.prepare_load([key])
    try:
        tier.store.complete_load(ticket)
        return ticket.report.keys[0].reason if ticket.report is not None else None
    finally:
        tier.store.release(ticket)


def _complete(store: Store, ticket: LoadTicket) -> list[memoryview | None]:
    try:
        return store.complete_load(ticket)
    except BaseException:
        with suppress(*TIER_FAILURES):
            store.release(ticket)
        raise


class TierLoad:
    def __init__(self, tier: Tier, keys: list[bytes], ticket: LoadTicket) -> None:
        self.tier = tier
        self.keys = keys
        self._ticket: LoadTicket | None = ticket
        self._call: WorkerCall[list[memoryview | None]] | None = None
        self._values: list[memoryview | None] | None = None
        self._until_s = 0.0
        self._budget: InFlightBudget | None = None
        self._reserved_bytes: list[int] = []  # empty once given back
        self._failure = Miss.UNREACHABLE

    @classmethod
    def lease(cls, tier: Tier, keys: Sequence[bytes]) -> TierLoad | None:
        """Lease the ``keys`` that the tier has; None if it has none, or is silent."""
        if not keys or not tier.usable(keys):
            return None

        def work() -> _Held:
            presence = tier.store.lookup(keys)
            present_keys = [
                key
                for key, state in zip(keys, presence, strict=True)
                if state is Presence.HIT and key not in tier.dirty_keys
            ]
            return present_keys, tier.store.prepare_load(present_keys) if present_keys else None

        def release_late(result: _Held | None) -> None:
            if result is not None and result[1] is not None:
                tier.store.release(result[1])

        lease = tier.ask_index(work, release_late)
        return cls(tier, lease[0], lease[1]) if lease is not None and lease[1] is not None else None

    @property
    def expected_bytes(self) -> int:
        return int(len(self.keys) * self.tier.mean_value_bytes)

    def start(self, budget: InFlightBudget, until_s: float) -> None:
        """Begin once ``budget`` admits the expected bytes (not of a local tier); ends by ``until_s`` or the tier's
        deadline.
        """
        ticket, store = self._ticket, self.tier.store
        if ticket is None or not self.tier.usable(self.keys):
            return
        if self.tier.at_once is not None and (values := self.tier.at_once.load_now(ticket)) is not None:
            self._values = values
            return
        self._until_s = until_s = min(until_s, self.tier.clock() + self.tier.deadline_s("load", self.expected_bytes))
        if self.tier.settings.local:
            self._call = self.tier.start(lambda: _complete(store, ticket))
            return
        size_bytes = self.expected_bytes
        if not budget.take(size_bytes, until_s - self.tier.clock()):
            self._failure = Miss.TOO_MANY_BYTES
            self.tier.counters.add("loads_without_room_total", label=self.tier.name)
            return
        self._budget = budget
        self._reserved_bytes.append(size_bytes)

        def work() -> list[memoryview | None]:
            try:
                return _complete(store, ticket)
            finally:
                self._give_back()

        self._call = self.tier.start(work)
        if self._call is None:
            self._give_back()

    def _give_back(self) -> None:
        with suppress(IndexError):
            size_bytes = self._reserved_bytes.pop()
            if self._budget is not None:
                self._budget.give_back(size_bytes)

    def end(self) -> Loaded:
        """Return the verified values that arrived in time, and reports."""
        ticket, tier = self._ticket, self.tier
        if ticket is not None and self._values is not None:
            return self._verified(self._values, ticket.report.keys if ticket.report is not None else ())
        call = self._call
        if call is None or ticket is None:
            return {}, {key: KeyReport(reason=self._failure) for key in self.keys}

        def release_late(values: list[memoryview | None] | None) -> None:
            self._give_back()
            tier.store.release(ticket)

        def is_answer(values: list[memoryview | None]) -> bool:
            reports = ticket.report.keys if ticket.report is not None else ()
            return not any(
                value is None and report.reason in UNANSWERED for value, report in zip(values, reports, strict=False)
            )

        values = tier.result_by(
            call,
            self._until_s,
            release_late,
            is_answer=is_answer,
            kind="load",
            moved=_size_bytes,
            present_keys=self.keys,
        )
        if values is None:
            self._give_back()  # other loads must not wait for a load that was given up
            if call.error is None:
                self._ticket = None  # released when it ends late
            reason = Miss.UNREACHABLE if call.error is not None else Miss.DEADLINE
            return {}, {key: KeyReport(reason=reason) for key in self.keys}
        reports = ticket.report.keys if ticket.report is not None else ()
        return self._verified(values, reports if len(reports) == len(self.keys) else ())

    def _verified(self, values: list[memoryview | None], tier_reports: Sequence[KeyReport]) -> Loaded:
        """Return the values that pass the tier's check, and reports; others are to be deleted there."""
        tier, verify = self.tier, self.tier.settings.verify
        good: dict[bytes, memoryview] = {}
        reports: dict[bytes, KeyReport] = {}
        wrong: list[bytes] = []
        for at, key in enumerate(self.keys):
            value = values[at] if at < len(values) else None
            report = tier_reports[at] if tier_reports else KeyReport()
            if value is None or key in tier.dirty_keys:
                reports[key] = replace(report, tier="", size_bytes=0, reason=report.reason or Miss.ABSENT)
            elif verify is not None and not verify(key, value):
                wrong.append(key)
                reports[key] = replace(report, tier="", size_bytes=0, reason=Miss.CORRUPT)
            else:
                good[key] = value
                if not report.tier or report.size_bytes != value.nbytes or report.reason:
                    report = replace(report, tier=report.tier or tier.name, size_bytes=value.nbytes, reason=None)
                reports[key] = report
                tier.mean_value_bytes += (value.nbytes - tier.mean_value_bytes) / 8
        if wrong:
            tier.counters.add("tier_corrupt_total", len(wrong), tier.name)
            tier.dirty_keys.add(wrong)
        tier.counters.add("tier_hits_total", len(good), tier.name)
        tier.counters.add("tier_bytes_total", sum(value.nbytes for value in good.values()), tier.name)
        return good, reports

    def release(self) -> None:
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self.tier.release(ticket)


def _size_bytes(values: list[memoryview | None]) -> int:
    return sum(value.nbytes for value in values if value is not None)


class InFlightBudget:
    """Limit of the bytes being loaded from slow tiers, over all threads. A larger load runs alone."""

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes <= 0:
            raise InvalidInput(f"in_flight_bytes must be > 0, got {limit_bytes}")
        self.bytes = ByteBudget(limit_bytes)
        self._changed = threading.Condition()

    def take(self, size_bytes: int, timeout_s: float) -> bool:
        """Reserve bytes, waiting up to ``timeout_s``."""
        with self._changed:
            if has_room := self._changed.wait_for(lambda: self.bytes.has_room(size_bytes), max(0.0, timeout_s)):
                self.bytes.change(size_bytes)
            return has_room

    def give_back(self, size_bytes: int) -> None:
        with self._changed:
            self.bytes.change(-size_bytes)
            self._changed.notify_all()
