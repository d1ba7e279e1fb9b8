"""Prometheus metrics of the HTTP proxy, and of the queue.

Labels are servers, outcomes, kinds and configured tenants, never text of a request.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from skymemory.conductor.picker import Fleet, Server
from skymemory.conductor.request import Decision
from skymemory.router.queue import Figures, RequestQueue
from skymemory.router.settings import PREFILL

OUTCOMES = (
    "answered",  # complete, with a status below 400
    "client-error",  # complete: the server answered 400 to 499
    "server-error",  # complete: the server answered 500 or more
    "bad-request",  # refused by the router: 400, 404, 405, 408, 413
    "limited",  # refused by the router: 429
    "refused",  # refused by the admission rule or the queue: 429
    "no-server",  # no server takes requests: 503
    "unreachable",  # every server that was tried failed before its first byte: 502
    "timeout",  # the first byte, or the next, did not arrive in time: 504, or a stream cut off
    "broken",  # the server failed in the middle of its response
    "client-gone",  # the client disconnected, or read nothing for too long
    "stopped",  # the router stopped before it ended
    "failed",  # internal error of the router: 500
)
PREFILLS = (
    "handed-over",  # the decode server has its values
    "no-params",  # it answered without kv_transfer_params: the decode server computes the prompt
    "failed",  # no answer, an invalid, too large or too late one, or an error status
    "client-error",  # it answered 400 to 499, which the client gets
    "wasted",  # done, and the admission rule refused the decoding: 429
    "dropped",  # the request ended before its answer came
)
"""Outcomes of the prefill step, if prefill and decode are separate."""
ALONE = (
    "few-tokens",  # it lacks fewer tokens of the prompt than `split_from`
    "whole",  # the request cannot be split
    "no-prefill-server",  # no prefill server takes requests
    "prefill-failed",  # every prefill server that was tried failed
    "params-refused",  # the decode server refused kv_transfer_params: it has no connector, or another one
    "no-header",  # the sidecar's request names no prefill server
    "stream-continued",  # it continues a stream that another server broke off
)
"""Reasons why a single server served a prompt although prefill and decode are separate."""
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)


Family = type[CounterMetricFamily] | type[GaugeMetricFamily]


def family(
    kind: Family, name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], float]]
) -> CounterMetricFamily | GaugeMetricFamily:
    metric = kind(name, text, labels=labels)
    for values, number in rows:
        metric.add_metric(values, number)
    return metric


class _Histogram:
    """Histogram at a tenth of the cost of prometheus-client's."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        names = (*(str(bound) for bound in self._bounds), "+Inf")
        return list(zip(names, map(float, accumulate(self.counts)), strict=True))


@dataclass(slots=True)
class ServerCounts:
    outcomes: dict[str, int] = field(default_factory=dict)  # its requests
    prompt_tokens: int = 0
    matched_tokens: int = 0  # part of `prompt_tokens`: cached by the prefix index
    reported_tokens: int = 0  # prompts whose answers report cached tokens
    cached_tokens: int = 0  # part of `reported_tokens`
    retries: int = 0  # failed attempts that were retried elsewhere
    ejections: int = 0
    prefills: dict[str, int] = field(default_factory=dict)  # outcomes of prefills for other servers
    ttft: _Histogram = field(default_factory=lambda: _Histogram(_SECONDS))


class ProxyMetrics:
    def __init__(
        self,
        fleet: Fleet,
        decode: Fleet | None,
        role_of: Callable[[str], str],
        is_ejected: Callable[[str], bool],
    ) -> None:
        """``decode``: separate decode servers; gauges then have a role label."""
        self.registry = CollectorRegistry()
        self._servers: dict[str, ServerCounts] = {}
        self._decisions: dict[tuple[str, str], int] = {}
        self.refusals = Counter(
            "skymemory_router_refusals",
            "Requests refused by the admission rule or the queue: why, and the tenant if it has a weight by name",
            ["reason", "tenant"],
            registry=self.registry,
        )
        self.promises = Counter(
            "skymemory_router_promises",
            "Answers under a promise: kept, its first token late, or its tokens slow",
            ["outcome"],
            registry=self.registry,
        )
        self.reloads = Counter(
            "skymemory_router_reloads", "Reloads of settings: taken or refused", ["outcome"], registry=self.registry
        )
        self.evictions = Counter(
            "skymemory_router_evictions",
            "Connections closed and requests refused as a limit that clients share was reached, by limit",
            ["limit"],
            registry=self.registry,
        )
        self.faults = Counter(
            "skymemory_router_faults",
            "Unexpected exceptions of the router, by where; its log has them",
            ["where"],
            registry=self.registry,
        )
        self.denied_retries = Counter(
            "skymemory_router_denied_retries",
            "Retries that the budget of all requests did not allow",
            registry=self.registry,
        )
        self.two_steps = Counter(
            "skymemory_router_two_steps",
            "Prompts that went to a prefill server and a decode server",
            registry=self.registry,
        )
        self.alone = Counter(
            "skymemory_router_alone",
            "Prompts that one server served alone, though prefill and decode are apart: why",
            ["reason"],
            registry=self.registry,
        )
        self.read_seconds = _Histogram((5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.05))
        self.in_flight = Gauge("skymemory_router_in_flight", "Requests in flight", registry=self.registry)
        self.registry.register(self)
        self.registry.register(_FleetGauges(fleet, decode, role_of, is_ejected))

    def of(self, server: str) -> ServerCounts:
        counts = self._servers.get(server)
        if counts is None:
            counts = self._servers[server] = ServerCounts()
        return counts

    def decided(self, decision: Decision) -> None:
        tokens, matched = decision.request.prompt.tokens, decision.matched_tokens
        key = decision.strategy, decision.kind
        self._decisions[key] = self._decisions.get(key, 0) + 1
        server = self.of(decision.server)
        server.prompt_tokens += tokens
        server.matched_tokens += matched if matched < tokens else tokens

    def prefilled(self, server: str, outcome: str) -> None:
        counts = self.of(server).prefills
        counts[outcome] = counts.get(outcome, 0) + 1

    def record_request_end(self, server: str, outcome: str, ttft_s: float | None) -> ServerCounts:
        counts = self.of(server)
        counts.outcomes[outcome] = counts.outcomes.get(outcome, 0) + 1
        if ttft_s is not None:
            counts.ttft.observe(ttft_s)
        return counts

    def forget(self, server: str) -> None:
        self._servers.pop(server, None)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        servers = list(self._servers.items())
        yield family(
            CounterMetricFamily,
            "skymemory_router_requests",
            "Requests by the last server that got them, and by outcome",
            ("server", "outcome"),
            (((name, outcome), count) for name, counts in servers for outcome, count in counts.outcomes.items()),
        )
        for key, text in _BY_SERVER.items():
            rows = (((name,), getattr(counts, _FIELDS.get(key, key))) for name, counts in servers)
            yield family(CounterMetricFamily, f"skymemory_router_{key}", text, ("server",), rows)
        yield family(
            CounterMetricFamily,
            "skymemory_router_prefills",
            "Prefills of requests that another server answers, by outcome",
            ("server", "outcome"),
            (((name, outcome), count) for name, counts in servers for outcome, count in counts.prefills.items()),
        )
        decisions, labels = "Routing decisions by strategy and kind", ("strategy", "kind")
        yield family(CounterMetricFamily, "skymemory_router_decisions", decisions, labels, self._decisions.items())
        ttft = HistogramMetricFamily(
            "skymemory_router_ttft_seconds",
            "From a request's arrival to the first byte of its response",
            labels=["server"],
        )
        for name, counts in servers:
            ttft.add_metric([name], counts.ttft.buckets(), counts.ttft.sum)
        yield ttft
        read = HistogramMetricFamily(
            "skymemory_router_read_seconds", "Time to read a prompt: JSON, blocks or tokens, hashes", labels=[]
        )
        read.add_metric([], self.read_seconds.buckets(), self.read_seconds.sum)
        yield read


_BY_SERVER = {
    "prompt_tokens": "Tokens of prompts sent to a server, estimated without a tokenizer",
    "matched_tokens": "Of prompt_tokens, those in the server's cache by the prefix index",
    "reported_prompt_tokens": "Tokens of prompts whose responses report cached tokens",
    "reported_cached_tokens": "Of reported_prompt_tokens, those the server had cached",
    "retries": "Attempts that failed before their first byte and were retried elsewhere",
    "ejections": "Times a server was ejected",
}
_FIELDS = {"reported_prompt_tokens": "reported_tokens", "reported_cached_tokens": "cached_tokens"}


class _FleetGauges:
    """Gauges of all servers, labelled by role if decode servers are separate."""

    def __init__(
        self, fleet: Fleet, decode: Fleet | None, role_of: Callable[[str], str], is_ejected: Callable[[str], bool]
    ) -> None:
        self._fleet, self._decode, self._role_of, self._is_ejected = fleet, decode, role_of, is_ejected
        self._labels = ("server",) if decode is None else ("server", "role")

    def _servers(self) -> list[tuple[Server, tuple[str, ...]]]:
        if self._decode is None:
            return [(server, (server.name,)) for server in self._fleet]
        labelled: list[tuple[Server, tuple[str, ...]]] = [(server, (server.name, PREFILL)) for server in self._fleet]
        return labelled + [(server, (server.name, self._role_of(server.name))) for server in self._decode]

    def collect(self) -> Iterator[Metric]:
        servers, now_s = self._servers(), time.monotonic()
        yield self._gauge(
            "healthy",
            "1: it is not ejected",
            ((labels, not self._is_ejected(server.name)) for server, labels in servers),
        )
        yield self._gauge(
            "draining", "1: it gets no new requests", ((labels, server.draining) for server, labels in servers)
        )
        yield self._gauge(
            "in_flight", "Requests in flight at it", ((labels, server.in_flight) for server, labels in servers)
        )
        prefilling = "Of in_flight, those without a first byte"
        yield self._gauge("prefilling", prefilling, ((labels, server.prefilling) for server, labels in servers))
        ages = ((labels, now_s - server.reported.at_s) for server, labels in servers if server.reported is not None)
        yield self._gauge("report_age_seconds", "Since its last load report", ages)

    def _gauge(self, name: str, text: str, values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
        return family(GaugeMetricFamily, f"skymemory_router_server_{name}", text, self._labels, values)


class QueueFigures(Collector):
    """Metrics of the queue. Tenants are those of the settings, ``other`` and ``unknown``."""

    def __init__(self, queue: RequestQueue, prefix: str) -> None:
        self._queue = queue
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        figures = [((str(priority), tenant), counts) for (priority, tenant), counts in self._queue.figures().items()]
        labels = ("priority", "tenant")

        def of(kind: Family, name: str, text: str, value: Callable[[Figures], float]) -> Metric:
            rows = ((names, value(counts)) for names, counts in figures)
            return family(kind, f"{self._prefix}_queue_{name}", text, labels, rows)

        yield of(GaugeMetricFamily, "requests", "Queued requests", lambda counts: counts.requests)
        yield of(GaugeMetricFamily, "bytes", "Bytes of their bodies", lambda counts: counts.size_bytes)
        yield of(CounterMetricFamily, "served", "Requests served after queueing", lambda counts: counts.served)
        yield of(CounterMetricFamily, "waited_seconds", "Their queueing time, in total", lambda counts: counts.waited_s)
        cancelled = "Queued requests whose client disconnected"
        yield of(CounterMetricFamily, "cancelled", cancelled, lambda counts: counts.cancelled)
        refused = "Queued requests that were refused, by reason"
        rows = (((*names, reason), count) for names, counts in figures for reason, count in counts.refused.items())
        yield family(CounterMetricFamily, f"{self._prefix}_queue_refused", refused, (*labels, "reason"), rows)
