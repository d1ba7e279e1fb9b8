"""Elastic pools behind the proxy: roles of servers follow the load, as ``conductor.pools`` decides.

Every period the servers are sampled, with what the router knows of them, and a decision is carried out by draining
(``Backends.change_role``). The samples:

    queue_s      seconds of prefills that were sent and are not done, as the strategy estimates them
    tbt_s        seconds between the events of the server's streams since the last sample, each taken for a token; of
                 answers that come whole, their time by their tokens. 0 where nothing decodes at the moment
    kv_share     the engine's own report; requests that it has waiting at two reports in a row are counted beside those
                 that run, as its batch or its memory is full. Not with the handover ``overlap``: there they may wait
                 for their prefill

Seconds between tokens of a request that is alone, which a decode load is measured against, are the least that was seen
of one; before that the load is the time over its objective. Servers of different models are different pools. A restart
begins with the roles of the settings.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from skymemory.conductor.pools import ROLES, ElasticSettings, InstanceSample, PoolController, Role
from skymemory.conductor.strategies.base import STALE_S
from skymemory.conductor.strategies.least_ttft import LeastTtft
from skymemory.errors import InvalidInput
from skymemory.router.backends import Backends, KnownServer
from skymemory.router.metrics import family
from skymemory.router.prompts.reader import slo_of
from skymemory.router.settings import BOTH, OVERLAP, PREFILL, Settings

log = logging.getLogger("skymemory.router")

LEAST_TOKENS = 8
"""Fewer in a period say nothing of the time between tokens of a request that is alone."""
MOST_IDLE = 0.9
"""That time, as a share of the objective at most: else one request would be an overload."""
OUTCOMES = ("done", "called-off", "gone")


@dataclass(slots=True)
class _Pace:
    """What a server's streams have brought since the last sample."""

    seconds: float = 0.0
    tokens: int = 0
    tbt_s: float = 0.0
    """The last known time between tokens."""
    decoding: int = 0
    """Requests that it answers at the moment."""
    waiting: int = 0
    """Requests that waited at the engine, by the report before."""
    report_at_s: float = -math.inf
    share: float = 0.0


@dataclass(slots=True)
class _Pool:
    """The servers of one model."""

    controller: PoolController
    change: tuple[str, Role] | None = None
    """The server that drains, and the role that it gets."""
    idle_tbt_s: float = math.inf
    """The least time between tokens that was seen."""


class ElasticRoles(Collector):
    """See the module. Lives in one event loop.

    Raises:
        InvalidInput: a strategy that does not estimate prefills, or no objectives.
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
        self._reads_waiting = settings.disaggregation.handover != OVERLAP
        self.every_s = settings.elastic.every_s
        self._controlled = ElasticSettings(
            smoothing_s=settings.elastic.smoothing_s,
            settle_s=settings.elastic.settle_s,
            most_drain_s=settings.elastic.most_drain_s,
        )
        self._paces: dict[str, _Pace] = {}
        self._pools: dict[str, _Pool] = {}
        self._changes: dict[tuple[str, str], int] = {}

    # -- from requests

    def came(self, server: str, tokens: int, seconds: float) -> None:
        """``tokens`` of one answer came in ``seconds``."""
        pace = self._paces.setdefault(server, _Pace())
        pace.seconds += seconds
        pace.tokens += tokens

    # -- every period

    def observe(self, now_s: float) -> bool:
        """Sample the servers, and begin or call off a change of role; whether a server has left its fleet."""
        moved = self._backends.remove_drained()
        known = self._backends.known
        for name in self._paces.keys() - known.keys():
            del self._paces[name]
        by_model: dict[str, list[InstanceSample]] = {model: [] for model in self._pools}
        for name, each in known.items():
            by_model.setdefault(each.base_model, []).append(self._sample(name, each, now_s))
        for model, samples in by_model.items():
            pool = self._pools.get(model)
            if pool is None:
                pool = self._pools[model] = _Pool(PoolController(self._slo, self._controlled))
            self._settle(pool)
            pool.controller.idle_tbt_s = self._idle_tbt_s(pool, samples)
            change = pool.controller.observe(samples, now_s)
            if change is not None:
                self._carry_out(pool, change.instance, change.role, change.reason)
            if not samples and pool.change is None:
                del self._pools[model]
        return moved

    def _carry_out(self, pool: _Pool, name: str, role: Role, reason: str) -> None:
        if pool.change is not None:
            self._count(pool.change[1], "called-off")
            pool.change = None
            log.warning("server %s keeps the role %r: %s", name, role, reason)
        else:
            pool.change = name, role
            log.info("server %s drains to get the role %r: %s", name, role, reason)
        self._backends.change_role(name, role)

    def _settle(self, pool: _Pool) -> None:
        """Count a change that has ended."""
        if pool.change is None:
            return
        name, role = pool.change
        known = self._backends.known.get(name)
        if known is None or known.next_backend is None:
            at = "gone" if known is None else "done" if known.backend.role == role else "called-off"
            if known is not None and known.leaving:
                return  # removed from the settings, it still has requests
            self._count(role, at)
            pool.change = None

    def _count(self, role: str, outcome: str) -> None:
        self._changes[role, outcome] = self._changes.get((role, outcome), 0) + 1

    # -- the samples

    def _sample(self, name: str, known: KnownServer, now_s: float) -> InstanceSample:
        server, backend = known.server, known.backend
        pace = self._paces.setdefault(name, _Pace())
        role: Role = "prefill" if backend.role == PREFILL else "decode"
        pace.decoding = server.in_flight - server.prefilling
        tbt_s = self._tbt_s(pace)
        return InstanceSample(
            name,
            role,
            known.state,
            fixed=not backend.elastic,
            queue_s=self._strategy.queue_s(server, now_s) if role == "prefill" else 0.0,
            tbt_s=tbt_s if role == "decode" else 0.0,
            kv_share=self._kv_share(known, pace, now_s) if role == "decode" else 0.0,
            in_flight=server.in_flight,
        )

    def _tbt_s(self, pace: _Pace) -> float:
        if pace.tokens:
            pace.tbt_s = pace.seconds / pace.tokens
        pace.seconds = 0.0
        return pace.tbt_s if pace.decoding else 0.0

    def _kv_share(self, known: KnownServer, pace: _Pace, now_s: float) -> float:
        report = known.server.fresh_report(now_s, STALE_S)
        if report is None:
            return 0.0
        if report.at_s > pace.report_at_s:
            # A request is among those that wait until the next step, even in an engine that has room.
            waiting = min(pace.waiting, report.waiting) if self._reads_waiting else 0
            pace.waiting, pace.report_at_s = report.waiting, report.at_s
            running = max(1, report.running)
            pace.share = (running + waiting) / running if waiting else max(0.0, report.kv_usage)
        return pace.share

    def _idle_tbt_s(self, pool: _Pool, samples: Iterable[InstanceSample]) -> float:
        for one in samples:
            pace = self._paces[one.name]
            if one.tbt_s and pace.decoding == 1 and pace.tokens >= LEAST_TOKENS:
                pool.idle_tbt_s = min(pool.idle_tbt_s, one.tbt_s)
            pace.tokens = 0
        return 0.0 if math.isinf(pool.idle_tbt_s) else min(pool.idle_tbt_s, MOST_IDLE * self._slo.tbt_s)

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
            self._changes.items(),
        )
        loads = [
            ((model, role), load)
            for model, pool in self._pools.items()
            for role in ROLES
            if math.isfinite(load := pool.controller.load(role))
        ]
        what = "Load of a model's servers of one role; 1: at the objective"
        yield family(GaugeMetricFamily, "skymemory_router_role_load", what, ("model", "role"), loads)
