"""Queue of requests that wait for a server: the order of service and of eviction.

The next request is chosen by:

1. **Priority**, strictly: the lowest may never be served.
2. **Fair shares** between a priority's tenants, by weight, in tokens to compute and generate: start-time fair queueing
   (Goyal et al., 1996) with a tag per tenant, the virtual time at which its next request starts. The lowest tag is
   served and rises by work / weight. Between two tenants that always wait, service per weight differs by at most one
   request of each. New tenants start at the level's virtual time, which also rises by work over the weight of all
   waiting tenants; otherwise a stream of them would starve old tenants. Actual work corrects the tag: few requests
   use up ``max_tokens``.
3. **Earliest deadline**: promised first token or longest wait.

Above the limit, the least urgent request is evicted, possibly the new request: lowest priority, then the tenant with
the largest part of the queue per weight, then the latest deadline (if that came first, a tenant could evict others by
promising itself less time).

``fits`` is asked once per ``group``; a group that does not fit does not block others.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from types import MappingProxyType
from typing import Any

from skymemory.conductor.request import Request, Slo
from skymemory.conductor.scheduler import RETRY_S, Refusal
from skymemory.config import duration, setting, size, whole_number
from skymemory.errors import InvalidInput

USUAL_OUTPUT_TOKENS = 256
_NO_WEIGHTS: Mapping[str, float] = MappingProxyType({})
_RATE_HALF_S = 10.0
_MAX_IDLE = 4096
_SLACK = 64  # stale items allowed in a heap in addition to as many as live items


@dataclass(frozen=True, slots=True)
class QueueSettings:
    most_requests: int = setting(
        "max_requests", whole_number, 0, "requests that may wait; 0: none, they are refused at once"
    )
    most_bytes: int = setting("max_bytes", size, 256 << 20, "of their bodies, in total")
    most_wait_s: float = setting("max_wait", duration, 30.0, "before a request is refused")

    def __post_init__(self) -> None:
        if not 0 < self.most_wait_s < math.inf:
            raise InvalidInput(f"max_wait is {self.most_wait_s:g} s; expected a finite time above 0")
        if self.most_bytes < 1:
            raise InvalidInput("max_bytes: expected above 0")


@dataclass(slots=True, eq=False)
class QueueEntry:
    """A waiting request. The queue sets the private fields."""

    request: Request
    work: float  # tokens to compute and generate
    size_bytes: int  # its body
    arrived_s: float
    slo: Slo | None = None  # promised times, which may set an earlier deadline
    group: Hashable = None  # equal for requests that can go to the same servers
    item: Any = None  # the owner's handler of the request

    _number: int = field(default=0, init=False)  # in order of arrival
    _leave_s: float = field(default=math.inf, init=False)  # deadline: then it is refused
    _level: _Level | None = field(default=None, init=False, repr=False)  # its priority's tenants

    @property
    def leave_s(self) -> float:
        return self._leave_s


def work_of(request: Request) -> float:
    """Return the tokens to compute and generate if nothing is cached."""
    output = USUAL_OUTPUT_TOKENS if request.output_tokens is None else request.output_tokens
    return float(request.prompt.tokens + request.answers * output)


@dataclass(slots=True)
class Figures:
    """Metrics of a priority and tenant: what waits now, and totals."""

    requests: int = 0
    size_bytes: int = 0
    served: int = 0
    waited_s: float = 0.0  # sum of served requests
    refused: dict[str, int] = field(default_factory=dict)  # by kind
    cancelled: int = 0  # their clients disconnected


class RequestQueue:
    """Priority queue with fair shares. No I/O; not thread-safe; ``now_s`` must not decrease."""

    def __init__(self, settings: QueueSettings, weights: Mapping[str, float] = _NO_WEIGHTS) -> None:
        """``weights`` are 1 by default; only their tenants are named in ``figures``."""
        self.settings = settings
        self.size_bytes = 0
        self.work = 0.0  # tokens of the waiting entries
        self._weights = weights
        self._waiting: dict[int, QueueEntry] = {}  # by number
        self._levels: dict[int, _Level] = {}  # by negated priority
        self._order: list[int] = []  # negated priorities in use, ascending
        self._deadlines: list[tuple[float, int]] = []  # heap of (deadline, number)
        self._overdue_entries: list[tuple[QueueEntry, Refusal]] = []  # removed, for `expire`
        self._last_number = 0
        self._figures: dict[tuple[int, str], Figures] = {}
        self._rate = _Rate()

    # `_add_entry` and `_remove_entry` keep the four places of an entry consistent:
    #   _waiting             entries by number. A number that is not in it is stale in every heap.
    #   _deadlines           heap of all entries, for `expire`
    #   _levels[-priority]   tenants (flows); each has a heap per group (next to serve) and `latest` (next to evict)
    #   the sums             of requests, bytes and work, in the queue, its levels, flows and figures
    # Only `_waiting` and the sums change immediately. Heaps drop stale numbers when these reach the top or outnumber
    # the live numbers.

    def __len__(self) -> int:
        return len(self._waiting)

    def configure(self, settings: QueueSettings, weights: Mapping[str, float] = _NO_WEIGHTS) -> None:
        """Change the settings. A lower limit evicts at the next offer."""
        self.settings, self._weights = settings, weights

    @property
    def next_deadline_s(self) -> float:
        if self._overdue_entries:
            return -math.inf
        self._drop_stale(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else math.inf

    def offer(self, entry: QueueEntry, now_s: float) -> list[tuple[QueueEntry, Refusal]] | Refusal:
        """Queue a request: return its refusal, or the entries evicted for it."""
        self._collect_overdue(now_s)
        settings = self.settings
        entry._leave_s = entry.arrived_s + min(settings.most_wait_s, _promise_s(entry))
        refusal = self._get_refusal_at_once(entry, now_s)
        if refusal is not None:
            return self._record_refusal(entry, refusal)
        self._last_number += 1
        entry._number = self._last_number
        if not self._waiting:
            self._rate.begins(now_s)
        # The entry is put in first and may itself be the victim, so that a single rule decides who leaves. In that case
        # the entries evicted for it are put back with their former tags, as if it had never been offered.
        self._add_entry(entry)
        victims: list[tuple[QueueEntry, _Flow]] = []
        while len(self._waiting) > settings.most_requests or self.size_bytes > settings.most_bytes:
            victim = self._find_least_urgent()
            flow = self._get_flow(victim)
            self._remove_entry(victim)
            if victim is entry:
                for evicted, former in reversed(victims):
                    self._add_entry(evicted, former)
                words = f"{len(self._waiting)} requests wait already, and it would be the least urgent of them"
                retry_s = self.retry_after_s(entry.request.priority, now_s)
                return self._record_refusal(entry, Refusal(words, retry_s, kind="queue"))
            victims.append((victim, flow))
        return [
            (evicted, self._record_refusal(evicted, self._get_eviction_refusal(evicted, entry, now_s)))
            for evicted, _ in victims
        ]

    def next(self, now_s: float, fits: Callable[[QueueEntry], bool] = lambda _: True) -> QueueEntry | None:
        """Remove and return the entry to serve now; None: no entry ``fits``."""
        self._collect_overdue(now_s)
        if not self._waiting:
            return None
        able: dict[Hashable, bool] = {}
        for negated in self._order:
            entry = self._find_first_that_fits(self._levels[negated], fits, able)
            if entry is not None:
                break
        else:
            return None
        self._serve(entry, now_s)
        return entry

    def expire(self, now_s: float) -> list[tuple[QueueEntry, Refusal]]:
        self._collect_overdue(now_s)
        expired, self._overdue_entries = self._overdue_entries, []
        return expired

    def cancel(self, entry: QueueEntry) -> bool:
        if self._waiting.get(entry._number) is not entry:
            return False
        self._remove_entry(entry)
        self._figures_of(entry).cancelled += 1
        return True

    def corrected(self, entry: QueueEntry, work: float) -> None:
        """Charge a served entry's actual work to its tenant instead of the estimate."""
        level, tenant = self._levels.get(-entry.request.priority), entry.request.tenant
        if level is None or level is not entry._level:
            return  # the level was empty in the meantime, and its tags have restarted
        difference = (work - entry.work) / self._get_weight(tenant)
        flow = level.flows.get(tenant)
        if flow is not None:
            level.move(flow, flow.start + difference)
        elif tenant in level.idle:
            level.idle[tenant] += difference

    def retry_after_s(self, priority: int, now_s: float) -> float:
        """Estimate the time to serve all entries of this and higher priorities."""
        rate = self._rate.of(now_s)
        return max(RETRY_S, self._get_work_from(priority) / rate) if rate else RETRY_S

    def figures(self) -> Mapping[tuple[int, str], Figures]:
        """Return metrics by priority and tenant: those with a weight, ``other``, ``unknown`` (no name)."""
        return MappingProxyType(self._figures)

    # Service

    def _find_first_that_fits(
        self, level: _Level, fits: Callable[[QueueEntry], bool], able: dict[Hashable, bool]
    ) -> QueueEntry | None:
        """Return the first entry that fits. Skipped tenants stay ahead of the served tenant."""
        skipped: list[_Flow] = []
        entry = None
        while (flow := level.first()) is not None:
            entry = self._find_first_of_flow(flow, fits, able)
            if entry is not None or all(able.get(group) is False for group in level.groups):
                break
            skipped.append(level.skip())
        for skipped_flow in skipped:
            # A skipped tenant could not use the server with room: it stays first but accumulates no credit.
            level.move(
                skipped_flow,
                skipped_flow.start if entry is None or flow is None else max(skipped_flow.start, flow.start),
            )
        return entry

    def _find_first_of_flow(
        self, flow: _Flow, fits: Callable[[QueueEntry], bool], able: dict[Hashable, bool]
    ) -> QueueEntry | None:
        """Return the tenant's earliest deadline that fits. ``able`` caches ``fits`` by group."""
        best: tuple[float, int] | None = None
        for group, lane in flow.lanes.items():
            self._drop_stale(lane)
            if best is not None and best < lane[0]:
                continue
            if group not in able:
                able[group] = fits(self._waiting[lane[0][1]])
            if able[group]:
                best = lane[0]
        return None if best is None else self._waiting[best[1]]

    def _serve(self, entry: QueueEntry, now_s: float) -> None:
        level, flow = self._levels[-entry.request.priority], self._get_flow(entry)
        # The virtual time follows the served tag (start-time fair queueing), and rises by at least the work per weight
        # of all waiting tenants. Otherwise new tenants, which start at the virtual time, would always precede older
        # tenants.
        work = max(1.0, entry.work)
        level.virtual = max(flow.start, level.virtual + work / max(level.weight, flow.weight))
        level.move(flow, flow.start + work / flow.weight)
        self._remove_entry(entry)
        self._rate.served(entry.work, now_s)
        figures = self._figures_of(entry)
        figures.served += 1
        figures.waited_s += now_s - entry.arrived_s

    # Refusal and eviction

    def _get_refusal_at_once(self, entry: QueueEntry, now_s: float) -> Refusal | None:
        if now_s >= entry._leave_s:
            return self._get_overdue_refusal(entry, now_s)
        settings = self.settings
        if not settings.most_requests:
            return Refusal("no server has room, and queueing is off", RETRY_S, kind="queue")
        if entry.size_bytes > settings.most_bytes:
            words = f"it has {entry.size_bytes:,} bytes; the queue may have {settings.most_bytes:,} in total"
            return Refusal(words, self.retry_after_s(entry.request.priority, now_s), kind="queue")
        return None

    def _collect_overdue(self, now_s: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now_s:
            entry = self._waiting.get(heappop(self._deadlines)[1])
            if entry is not None:
                self._remove_entry(entry)
                self._overdue_entries.append(
                    (entry, self._record_refusal(entry, self._get_overdue_refusal(entry, now_s)))
                )

    def _get_overdue_refusal(self, entry: QueueEntry, now_s: float) -> Refusal:
        retry_s = self.retry_after_s(entry.request.priority, now_s)
        waited_s = max(0.0, now_s - entry.arrived_s)
        if entry.slo is not None and _promise_s(entry) <= self.settings.most_wait_s:
            promised = f"the promised {entry.slo.ttft_s:.3g} s"
            words = f"its first token cannot come within {promised}: it waited {waited_s:.3g} s for a server with room"
            return Refusal(words, retry_s, kind="ttft")
        return Refusal(f"it waited {waited_s:.3g} s for a server with room, the longest allowed", retry_s, kind="queue")

    def _find_least_urgent(self) -> QueueEntry:
        flow = self._levels[self._order[-1]].largest()
        while -flow.latest[0][1] not in self._waiting:
            heappop(flow.latest)
        return self._waiting[-flow.latest[0][1]]

    def _get_eviction_refusal(self, entry: QueueEntry, by: QueueEntry, now_s: float) -> Refusal:
        kind, why = "queue", "with an earlier deadline"
        if entry.request.priority != by.request.priority:
            kind, why = "priority", f"of priority {by.request.priority}"
        elif entry.request.tenant != by.request.tenant:
            kind, why = "share", "of a tenant with fewer waiting"
        words = f"a request {why} took its place: no more than {len(self._waiting)} wait"
        return Refusal(words, self.retry_after_s(entry.request.priority, now_s), kind=kind)

    # Bookkeeping

    def _add_entry(self, entry: QueueEntry, former: _Flow | None = None) -> None:
        """Add an entry to its four places. ``former``: flow whose tag and rank its tenant gets back."""
        request, number, leave_s = entry.request, entry._number, entry._leave_s
        level = self._levels.get(-request.priority)
        if level is None:
            back = None if former is None else entry._level
            level = self._levels[-request.priority] = back or _Level()
            insort(self._order, -request.priority)
        entry._level = level
        flow = level.flows.get(request.tenant)
        if flow is None:
            flow = level.join(request.tenant, self._get_weight(request.tenant), number, former)
        lane = flow.lanes.get(entry.group)
        if lane is None:
            lane = flow.lanes[entry.group] = []
            flow.counts[entry.group] = 0
        self._push(lane, flow.counts[entry.group], (leave_s, number))
        self._push(self._deadlines, len(self._waiting), (leave_s, number))
        self._push(flow.latest, flow.requests, (-leave_s, -number), -1)
        self._waiting[number] = entry
        flow.counts[entry.group] += 1
        level.groups[entry.group] = level.groups.get(entry.group, 0) + 1
        level.work += entry.work
        self.work += entry.work
        self.size_bytes += entry.size_bytes
        flow.requests += 1
        flow.size_bytes += entry.size_bytes
        level.grown(flow, self._get_part(flow))
        figures = self._figures_of(entry)
        figures.requests += 1
        figures.size_bytes += entry.size_bytes

    def _remove_entry(self, entry: QueueEntry) -> None:
        """Remove an entry from the sums; heaps drop it later."""
        del self._waiting[entry._number]
        negated = -entry.request.priority
        level, flow = self._levels[negated], self._get_flow(entry)
        figures = self._figures_of(entry)
        figures.requests -= 1
        figures.size_bytes -= entry.size_bytes
        self.work -= entry.work
        self.size_bytes -= entry.size_bytes
        level.work -= entry.work
        flow.requests -= 1
        flow.size_bytes -= entry.size_bytes
        flow.counts[entry.group] -= 1
        level.groups[entry.group] -= 1
        if not flow.counts[entry.group]:
            del flow.counts[entry.group], flow.lanes[entry.group]
        if not level.groups[entry.group]:
            del level.groups[entry.group]
        if flow.requests:
            flow.part = self._get_part(flow)
        else:
            level.leave(flow)
        if not level.flows:  # tags only matter between tenants that wait at the same time
            del self._levels[negated]
            self._order.remove(negated)
        if not self._waiting:
            self.work = 0.0  # remove rounding errors
            self._deadlines.clear()

    def _get_part(self, flow: _Flow) -> float:
        requests, size_bytes = max(1, self.settings.most_requests), self.settings.most_bytes
        return max(flow.requests / requests, flow.size_bytes / size_bytes) / flow.weight

    def _get_flow(self, entry: QueueEntry) -> _Flow:
        return self._levels[-entry.request.priority].flows[entry.request.tenant]

    def _push(self, heap: list[tuple[float, int]], live: int, item: tuple[float, int], sign: int = 1) -> None:
        if len(heap) > 2 * live + _SLACK:
            heap[:] = [live_item for live_item in heap if sign * live_item[1] in self._waiting]
            heapify(heap)
        heappush(heap, item)

    def _drop_stale(self, heap: list[tuple[float, int]]) -> None:
        while heap and heap[0][1] not in self._waiting:
            heappop(heap)

    def _get_weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _get_work_from(self, priority: int) -> float:
        return sum(level.work for negated, level in self._levels.items() if -negated >= priority)

    def _figures_of(self, entry: QueueEntry) -> Figures:
        tenant = entry.request.tenant
        # Only configured tenants become labels of metrics, not names from requests.
        label = tenant if tenant in self._weights else "other" if tenant else "unknown"
        key = (entry.request.priority, label)
        figures = self._figures.get(key)
        if figures is None:
            figures = self._figures[key] = Figures()
        return figures

    def _record_refusal(self, entry: QueueEntry, refusal: Refusal) -> Refusal:
        refused = self._figures_of(entry).refused
        refused[refusal.kind] = refused.get(refusal.kind, 0) + 1
        return refusal


@dataclass(slots=True, eq=False)
class _Flow:
    """Waiting requests of a tenant at one priority."""

    tenant: str
    weight: float
    number: int  # number of its first entry; breaks ties
    start: float  # tag: virtual time at which its next request starts
    lanes: dict[Hashable, list[tuple[float, int]]] = field(default_factory=dict)  # heap of (deadline, number) by group
    counts: dict[Hashable, int] = field(default_factory=dict)  # waiting entries by group
    latest: list[tuple[float, int]] = field(default_factory=list)  # heap of (-deadline, -number)
    requests: int = 0
    size_bytes: int = 0
    part: float = 0.0  # fraction of the queue's limit, in requests or bytes (the larger), per weight
    listed: float = -1.0  # `part` in the level's heap; never less than `part`
    at: int = 0
    listed_at: int = 0  # serial numbers of its valid heap items; 0: none


class _Level:
    """Tenants of one priority. ``virtual``: its virtual time."""

    def __init__(self) -> None:
        self.virtual = 0.0  # virtual time of fair queueing
        self.weight = 0.0  # sum of the waiting tenants
        self.work = 0.0  # tokens, sum of the waiting entries
        self.flows: dict[str, _Flow] = {}  # waiting tenants
        self.groups: dict[Hashable, int] = {}  # waiting entries by group
        self.idle: dict[str, float] = {}  # tags of idle tenants that may soon return
        self._serial = 0
        # Heap by tag. Items are valid if their serial number is the flow's `at`.
        self._order: list[tuple[float, int, int, _Flow]] = []
        self._parts: list[tuple[float, int, int, _Flow]] = []  # heap by negated part, valid by `listed_at`

    def join(self, tenant: str, weight: float, number: int, former: _Flow | None) -> _Flow:
        """Add a tenant that begins to wait. ``former``: its evicted state."""
        start = max(self.virtual, self.idle.get(tenant, self.virtual))
        if former is not None:
            start, number = former.start, former.number
        self.idle.pop(tenant, None)
        flow = self.flows[tenant] = _Flow(tenant, weight, number, start)
        self.weight += weight
        self.move(flow, start)
        return flow

    def leave(self, flow: _Flow) -> None:
        """Remove a tenant that waits no more; remember its tag."""
        del self.flows[flow.tenant]
        self.weight -= flow.weight
        flow.at = flow.listed_at = 0
        self.idle[flow.tenant] = flow.start
        if len(self.idle) > _MAX_IDLE:
            # Other tags have no effect: `join` starts at the virtual time or later.
            ahead = [(tenant, start) for tenant, start in self.idle.items() if start > self.virtual]
            self.idle = dict(ahead[-_MAX_IDLE // 2 :])
        if len(self._order) > 2 * len(self.flows) + _SLACK:
            self._order = [item for item in self._order if item[3].at == item[2]]
            heapify(self._order)

    def move(self, flow: _Flow, start: float) -> None:
        self._serial += 1
        flow.start, flow.at = start, self._serial
        heappush(self._order, (start, flow.number, self._serial, flow))

    def first(self) -> _Flow | None:
        order = self._order
        while order and order[0][3].at != order[0][2]:
            heappop(order)
        return order[0][3] if order else None

    def skip(self) -> _Flow:
        return heappop(self._order)[3]

    def grown(self, flow: _Flow, part: float) -> None:
        flow.part = part
        if part > flow.listed:
            self._list_part(flow)
            if len(self._parts) > 2 * len(self.flows) + _SLACK:
                self._parts = [item for item in self._parts if item[3].listed_at == item[2]]
                heapify(self._parts)

    def largest(self) -> _Flow:
        """Return the tenant with the largest part of the queue."""
        while True:
            _, _, serial, flow = self._parts[0]
            if flow.listed_at == serial and flow.part == flow.listed:
                return flow
            heappop(self._parts)
            if flow.listed_at == serial:
                self._list_part(flow)

    def _list_part(self, flow: _Flow) -> None:
        self._serial += 1
        flow.listed, flow.listed_at = flow.part, self._serial
        heappush(self._parts, (-flow.part, -flow.number, self._serial, flow))


class _Rate:
    """Recent work served per second while requests wait."""

    def __init__(self) -> None:
        self._work = self._seconds = 0.0
        self._since_s = 0.0

    def begins(self, now_s: float) -> None:
        self._since_s = now_s

    def served(self, work: float, now_s: float) -> None:
        took_s = now_s - self._since_s
        keep = 0.5 ** (took_s / _RATE_HALF_S)
        self._work = self._work * keep + work
        self._seconds = self._seconds * keep + took_s
        self._since_s = now_s

    def of(self, now_s: float) -> float:
        seconds = self._seconds + max(0.0, now_s - self._since_s)
        return self._work / seconds if seconds > 0 else 0.0


def _promise_s(entry: QueueEntry) -> float:
    return math.inf if entry.slo is None else entry.slo.ttft_s
