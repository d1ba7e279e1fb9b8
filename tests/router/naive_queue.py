"""The router's queue by its definition: lists that are searched from end to end. Judge of the one with heaps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from skymemory.router.queue import QueueEntry, QueueSettings


@dataclass
class Level:
    virtual: float = 0.0
    start: dict[str, float] = field(default_factory=dict)
    """Tags of tenants, of those that do not wait, too."""
    since: dict[str, int] = field(default_factory=dict)
    """Of tenants that wait: the number of the entry with which they began to."""


class NaiveQueue:
    def __init__(self, settings: QueueSettings, weights: Mapping[str, float]) -> None:
        self.settings = settings
        self.weights = weights
        self.entries: list[tuple[int, QueueEntry]] = []
        self.levels: dict[int, Level] = {}
        self.numbers = 0

    def offer(self, entry: QueueEntry, now_s: float) -> tuple[bool, list[QueueEntry]]:
        """Whether it waits, and who left for it."""
        if self.leave_s(entry) <= now_s or entry.size_bytes > self.settings.most_bytes:
            return False, []
        self.numbers += 1
        away: list[tuple[int, QueueEntry]] = []
        before = list(self.entries)
        self.entries.append((self.numbers, entry))
        self.settle()
        tags = self._copy()
        while not self._within():
            worst = min(self.entries, key=self._worth)
            self.entries.remove(worst)
            if worst[1] is entry:
                self.entries = before
                self.levels = tags
                self.settle()
                return False, []
            away.append(worst)
            self.settle()
        return True, [victim for _, victim in away]

    def next(self, now_s: float, fits: Callable[[QueueEntry], bool]) -> QueueEntry | None:
        able = [(number, entry) for number, entry in self.entries if fits(entry)]
        if not able:
            return None
        priority = max(entry.request.priority for _, entry in able)
        level = self.levels[priority]
        able = [one for one in able if one[1].request.priority == priority]
        tenant = min(
            {entry.request.tenant for _, entry in able}, key=lambda name: (level.start[name], level.since[name])
        )
        of_it = [one for one in able if one[1].request.tenant == tenant]
        number, entry = min(of_it, key=lambda one: (self.leave_s(one[1]), one[0]))
        start = level.start[tenant]
        waiting = {each.request.tenant for _, each in self.entries if each.request.priority == priority}
        for other in waiting:
            if (level.start[other], level.since[other]) < (start, level.since[tenant]):  # it was skipped
                level.start[other] = max(level.start[other], start)
        level.virtual = max(start, level.virtual + entry.work / sum(self.weight(each) for each in waiting))
        level.start[tenant] = start + entry.work / self.weight(tenant)
        self.entries.remove((number, entry))
        self.settle()
        return entry

    def expire(self, now_s: float) -> list[QueueEntry]:
        over = [entry for _, entry in self.entries if self.leave_s(entry) <= now_s]
        for entry in over:
            self.remove(entry)
        return over

    def remove(self, entry: QueueEntry) -> bool:
        before = len(self.entries)
        self.entries = [one for one in self.entries if one[1] is not entry]
        self.settle()
        return len(self.entries) < before

    def leave_s(self, entry: QueueEntry) -> float:
        promise_s = math.inf if entry.slo is None else entry.slo.ttft_s
        return entry.arrived_s + min(self.settings.most_wait_s, promise_s)

    def weight(self, tenant: str) -> float:
        return self.weights.get(tenant, 1.0)

    def settle(self) -> None:
        """Levels and tenants that begin or end to wait."""
        priorities = {entry.request.priority for _, entry in self.entries}
        self.levels = {priority: self.levels.get(priority, Level()) for priority in priorities}
        for priority, level in self.levels.items():
            waiting: dict[str, int] = {}
            for number, entry in self.entries:
                if entry.request.priority == priority:
                    waiting.setdefault(entry.request.tenant, number)
            for tenant in waiting:
                if tenant not in level.since:
                    level.start[tenant] = max(level.virtual, level.start.get(tenant, level.virtual))
            level.since = {tenant: level.since.get(tenant, number) for tenant, number in waiting.items()}

    def _within(self) -> bool:
        settings = self.settings
        size = sum(entry.size_bytes for _, entry in self.entries)
        return len(self.entries) <= settings.most_requests and size <= settings.most_bytes

    def _worth(self, one: tuple[int, QueueEntry]) -> tuple[float, ...]:
        """The lowest leaves first."""
        number, entry = one
        request = entry.request
        same = [
            each
            for _, each in self.entries
            if (each.request.priority, each.request.tenant) == (request.priority, request.tenant)
        ]
        requests = len(same) / self.settings.most_requests
        room = sum(each.size_bytes for each in same) / self.settings.most_bytes
        part = max(requests, room) / self.weight(request.tenant)
        since = self.levels[request.priority].since[request.tenant]
        return (request.priority, -part, -since, -self.leave_s(entry), -number)

    def _copy(self) -> dict[int, Level]:
        return {at: Level(level.virtual, dict(level.start), dict(level.since)) for at, level in self.levels.items()}
