"""One load at one tier, from its lease to its release."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from skymemory.cache.in_flight_budget import InFlightBudget
from skymemory.cache.manager import FAILING_REASONS
from skymemory.cache.tier import Tier
from skymemory.cache.tier_workers import Call
from skymemory.store.base import KeyReport, LoadTicket, Presence

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
