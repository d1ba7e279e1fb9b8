"""Elastic pools: roles of servers follow the load, as ``conductor.pools`` decides.

Every period the servers are sampled, and a decision is executed by draining. A sample has:

    queue_s      estimated seconds of unfinished prefills
    tbt_s        seconds between a server's events (tokens); unstreamed, time per token. 0 if nothing decodes
    kv_share     reported by the engine; if requests wait at two reports in a row, running plus waiting over running
                 (not with ``overlap``, which waits for prefills)

A decode pool is measured against the minimum time between tokens of a lone request, if known. Each model has its own
pool.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from skymemory.conductor.pools import ROLES, ElasticSettings, InstanceSample, PoolController, Role
from skymemory.conductor.strategies.least_ttft import LeastTtft
from skymemory.conductor.strategies.strategy_base import STALE_S
from skymemory.errors import InvalidInput
from skymemory.router.backends import Backends, KnownServer
from skymemory.router.prompts.reader import slo_of
from skymemory.router.router_metrics import family
from skymemory.router.settings import BOTH, OVERLAP, PREFILL, Settings

log = logging.getLogger("skymemory.router")

LEAST_TOKENS = 8
LATE_PERIODS = 5.0
MOST_IDLE = 0.9
"""Upper bound of ``idle_tbt_s`` as a share of the objective: else one request would be an overload."""
OUTCOMES = ("done", "called-off", "gone")


@dataclass(slots=True)
class _Pace:
    """Figures of a server. ``seconds / tokens`` is this period's time between tokens."""

    seconds: float = 0.0  # sum over its requests: gaps between events of streams, decoding times of unstreamed answers
    tokens: int = 0  # tokens decoded in these seconds; an event counts as one
    tbt_s: float = 0.0  # seconds between tokens, when last measured
    decoding: int = 0  # requests that decode
    is_steady: bool = False  # True if ``decoding`` is as a period ago
    waiting: int = 0  # requests without room in its last report
    report_at_s: float = -math.inf
    kv_share: float = 0.0  # used part of its KV cache; above 1: requests wait


@dataclass(slots=True)
class _Pool:
    """Servers of a model, and the controller of their roles."""

    controller: PoolController
    change: tuple[str, Role] | None = None  # server that drains, and its new role
    least_tbt_s: dict[int, float] = field(default_factory=dict)  # minimum by concurrent requests

    def idle_tbt_s(self) -> float:
        return self.least_tbt_s.get(1, math.inf)

    def shared_tbt_s(self) -> float:
        """Return the part of the time between tokens that concurrent requests share."""
        alone_s = self.idle_tbt_s()
        each_s = [(tbt_s - alone_s) / (count - 1) for count, tbt_s in self.least_tbt_s.items() if count > 1]
        if not each_s or math.isinf(alone_s):
            return math.inf
        return max(0.0, alone_s - max(0.0, median(each_s)))


class ElasticRoles(Collector):
    """Control loop of the roles. Lives in one event loop.

    Raises:
        InvalidInput: the strategy does not estimate prefills, or there are no objectives.
    """

    def __init__(self, settings: Settings, backends: Backends, strategy: object) -> None:
        slo = slo_of(settings.admission)
        if slo is None:
            raise InvalidInput("backends: elastic: set the objectives, admission: ttft and tbt")
        if not isinstance(strategy, LeastTtft):
            raise InvalidInput(
                f"backends: elastic: strategy {settings.strategy!r} does not estimate how long prefills take; "
                f"expected {LeastTtft.name!r}"
            )
        self._slo, self._backends, self._strategy = slo, backends, strategy
        self._counts_waiting_requests = settings.disaggregation.handover != OVERLAP
        self.every_s = settings.elastic.every_s
        self._pool_settings = ElasticSettings(
            smoothing_s=settings.elastic.smoothing_s,
            settle_s=settings.elastic.settle_s,
            most_drain_s=settings.elastic.most_drain_s,
        )
        self._paces: dict[str, _Pace] = {}
        self._pools: dict[str, _Pool] = {}
        self._change_counts: dict[tuple[str, str], int] = {}
        self._last_s: float | None = None
        self._skipped_s = 0.0
        self._was_last_period_late = False

    # -- from requests

    def record_tokens(self, server: str, tokens: int, seconds: float) -> None:
        pace = self._paces.setdefault(server, _Pace())
        pace.seconds += seconds
        pace.tokens += tokens

    # -- every period

    def observe(self, now_s: float) -> bool:
        """Sample the servers, and begin or call off a change; True: a server left its fleet."""
        moved = self._backends.remove_drained()
        if self._skip_after_pause(now_s):
            return moved
        known = self._backends.known
        for name in self._paces.keys() - known.keys():
            del self._paces[name]
        by_model: dict[str, list[InstanceSample]] = {model: [] for model in self._pools}
        for name, server in known.items():
            by_model.setdefault(server.base_model, []).append(self._sample(name, server, now_s))
        for model, samples in by_model.items():
            pool = self._pools.get(model)
            if pool is None:
                pool = self._pools[model] = _Pool(PoolController(self._slo, self._pool_settings))
            self._record_ended_change(pool)
            self._learn_least_tbt(pool, samples)
            idle_s = pool.idle_tbt_s()
            pool.controller.idle_tbt_s = 0.0 if math.isinf(idle_s) else min(idle_s, MOST_IDLE * self._slo.tbt_s)
            pool.controller.shared_tbt_s = pool.shared_tbt_s()
            change = pool.controller.observe(samples, now_s - self._skipped_s)
            if change is not None:
                self._begin_or_call_off_change(pool, change.instance, change.role, change.reason)
            if not samples and pool.change is None:
                del self._pools[model]
        return moved

    def _skip_after_pause(self, now_s: float) -> bool:
        """Return True if this or the last period is invalid: the event loop stood still."""
        elapsed_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        late = elapsed_s > LATE_PERIODS * self.every_s
        if not late and not self._was_last_period_late:
            return False
        self._skipped_s += elapsed_s
        self._was_last_period_late = late
        for pace in self._paces.values():
            pace.seconds, pace.tokens = 0.0, 0
        return True

    def _begin_or_call_off_change(self, pool: _Pool, name: str, role: Role, reason: str) -> None:
        if pool.change is not None:
            self._count_change(pool.change[1], "called-off")
            pool.change = None
            log.warning("server %s keeps the role %r: %s", name, role, reason)
        else:
            pool.change = name, role
            log.info("server %s drains to get the role %r: %s", name, role, reason)
        self._backends.change_role(name, role)

    def _record_ended_change(self, pool: _Pool) -> None:
        if pool.change is None:
            return
        name, role = pool.change
        known = self._backends.known.get(name)
        if known is None or known.next_backend is None:
            at = "gone" if known is None else "done" if known.backend.role == role else "called-off"
            if known is not None and known.leaving:
                return  # removed from the settings, but it still has requests
            self._count_change(role, at)
            pool.change = None

    def _count_change(self, role: str, outcome: str) -> None:
        self._change_counts[role, outcome] = self._change_counts.get((role, outcome), 0) + 1

    # -- the samples

    def _sample(self, name: str, known: KnownServer, now_s: float) -> InstanceSample:
        server, backend = known.server, known.backend
        pace = self._paces.setdefault(name, _Pace())
        role: Role = "prefill" if backend.role == PREFILL else "decode"
        decoding = server.in_flight - server.prefilling
        pace.is_steady, pace.decoding = decoding == pace.decoding, decoding
        tbt_s = self._take_tbt_s(pace)
        return InstanceSample(
            name,
            role,
            known.state,
            fixed=not backend.elastic,
            queue_s=self._strategy.queue_s(server, now_s) if role == "prefill" else 0.0,
            tbt_s=tbt_s if role == "decode" else 0.0,
            kv_share=self._update_kv_share(known, pace, now_s) if role == "decode" else 0.0,
            in_flight=server.in_flight,
        )

    def _take_tbt_s(self, pace: _Pace) -> float:
        if pace.tokens:
            pace.tbt_s = pace.seconds / pace.tokens
        pace.seconds = 0.0
        return pace.tbt_s if pace.decoding else 0.0

    def _update_kv_share(self, known: KnownServer, pace: _Pace, now_s: float) -> float:
        """Return the used part of the KV cache, above 1 if requests wait for room."""
        report = known.server.fresh_report(now_s, STALE_S)
        if report is None:
            return 0.0
        if report.at_s > pace.report_at_s:
            # A new request counts as waiting until the engine's next step, even if the engine has room.
            waiting = min(pace.waiting, report.waiting) if self._counts_waiting_requests else 0
            pace.waiting, pace.report_at_s = report.waiting, report.at_s
            running = max(1, report.running)
            pace.kv_share = (running + waiting) / running if waiting else max(0.0, report.kv_usage)
        return pace.kv_share

    def _learn_least_tbt(self, pool: _Pool, samples: Iterable[InstanceSample]) -> None:
        """Learn the minimum time between tokens by concurrent requests."""
        for sample in samples:
            pace = self._paces[sample.name]
            count, before_s = pace.decoding, pool.least_tbt_s.get(pace.decoding, math.inf)
            # If several streams run now, fewer may have run earlier in the period, which were faster. A lone stream's
            # time can only be too large, which the minimum tolerates.
            if sample.tbt_s and count and pace.tokens >= LEAST_TOKENS * count and (count == 1 or pace.is_steady):
                pool.least_tbt_s[count] = min(before_s, sample.tbt_s)
            pace.tokens = 0

    # -- Prometheus

    def collect(self) -> Iterator[Metric]:
        states: dict[tuple[str, str], int] = {}
        for known in self._backends.known.values():
            at = known.backend.role, known.state
            states[at] = states.get(at, 0) + 1
        for role in (BOTH, *ROLES):  # a role without servers is 0
            states.setdefault((role, "serving"), 0)
        yield family(
            GaugeMetricFamily,
            "skymemory_router_role_servers",
            "Servers by their role now and their state: serving, draining or down",
            ("role", "state"),
            states.items(),
        )
        yield family(
            CounterMetricFamily,
            "skymemory_router_role_changes",
            "Changes of role that the load caused, by the new role: done, called-off, or the server is gone",
            ("role", "outcome"),
            self._change_counts.items(),
        )
        loads = [
            ((model, role), load)
            for model, pool in self._pools.items()
            for role in ROLES
            if math.isfinite(load := pool.controller.load(role))
        ]
        what = "Work of a model's servers of one role; 1: no more fits within the objective"
        yield family(GaugeMetricFamily, "skymemory_router_role_load", what, ("model", "role"), loads)
        needs = [((model, role), pool.controller.need(role)) for model, pool in self._pools.items() for role in ROLES]
        what = "How far a model's requests are from the objective of one role; 1: at it"
        yield family(GaugeMetricFamily, "skymemory_router_role_need", what, ("model", "role"), needs)
