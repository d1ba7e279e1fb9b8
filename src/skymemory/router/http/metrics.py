"""What the router counts, for Prometheus. Labels are servers, outcomes and kinds: none comes out of a request."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

from skymemory.conductor.fleet import Fleet
from skymemory.conductor.request import Decision

OUTCOMES = (
    "answered",  # passed on to its end, with a status below 400
    "client-error",  # passed on to its end: the server answered 400 to 499
    "server-error",  # passed on to its end: the server answered 500 or more
    "bad-request",  # refused by the router: 400, 404, 405, 408, 413
    "limited",  # refused by the router: 429
    "refused",  # not let in by the rule of admission: 429
    "no-server",  # no server took requests: 503
    "unreachable",  # every server that was tried failed before its first byte: 502
    "timeout",  # the first byte, or the next, did not come in time: 504, or a stream cut off
    "broken",  # the server went away in the middle of its answer
    "client-gone",  # the client went away, or took nothing for too long
    "stopped",  # the router was told to stop, and it did not end in time
    "failed",  # a fault of the router: 500
)
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)


class OfServer:
    """What is counted of one server at every request: looked up once, since looking up costs more than counting."""

    __slots__ = (
        "_metrics",
        "_name",
        "_outcomes",
        "cached_tokens",
        "matched_tokens",
        "prompt_tokens",
        "reported_tokens",
        "ttft",
    )

    def __init__(self, metrics: ProxyMetrics, name: str) -> None:
        self._metrics, self._name = metrics, name
        self.prompt_tokens = metrics.prompt_tokens.labels(name)
        self.matched_tokens = metrics.matched_tokens.labels(name)
        self.reported_tokens = metrics.reported_tokens.labels(name)
        self.cached_tokens = metrics.cached_tokens.labels(name)
        self.ttft = metrics.ttft.labels(name)
        self._outcomes: dict[str, Counter] = {}

    def ended(self, outcome: str) -> None:
        counter = self._outcomes.get(outcome)
        if counter is None:
            counter = self._outcomes[outcome] = self._metrics.requests.labels(self._name, outcome)
        counter.inc()


class ProxyMetrics:
    """All of it in one registry of its own."""

    def __init__(self, fleet: Fleet) -> None:
        self.registry = CollectorRegistry()
        self._by_server: list[Counter | Histogram] = []
        self._servers: dict[str, OfServer] = {}
        self._decided: dict[tuple[str, str], Counter] = {}
        self.requests = self._counter(
            "requests", "Requests by the server that got them last and what became of them", "outcome"
        )
        self.prompt_tokens = self._counter(
            "prompt_tokens", "Tokens of prompts sent to a server, estimated without a tokenizer"
        )
        self.matched_tokens = self._counter("matched_tokens", "Of prompt_tokens, those the server was believed to hold")
        self.reported_tokens = self._counter(
            "reported_prompt_tokens", "Tokens of prompts of answers that tell cached tokens"
        )
        self.cached_tokens = self._counter(
            "reported_cached_tokens", "Of reported_prompt_tokens, those the server had cached"
        )
        self.retries = self._counter(
            "retries", "Attempts that failed before their first byte and were made again elsewhere"
        )
        self.ejections = self._counter("ejections", "Times a server was taken out for failing")
        self.decisions = Counter(
            "skymemory_router_decisions", "Decisions by what decided", ["strategy", "kind"], registry=self.registry
        )
        self.refusals = Counter(
            "skymemory_router_refusals",
            "Requests that the rule of admission did not let in: why, and the tenant if it has a weight by name",
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
            "skymemory_router_reloads", "Changed settings files: taken or refused", ["outcome"], registry=self.registry
        )
        self.faults = Counter(
            "skymemory_router_faults",
            "Exceptions of the router's own beside requests, by where; its log has them",
            ["where"],
            registry=self.registry,
        )
        self.ttft = Histogram(
            "skymemory_router_ttft_seconds",
            "From a request's arrival to the first byte of its answer",
            ["server"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.read_seconds = Histogram(
            "skymemory_router_read_seconds",
            "Reading a prompt: JSON, blocks or tokens, hashes",
            buckets=(5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.05),
            registry=self.registry,
        )
        self.in_flight = Gauge("skymemory_router_in_flight", "Requests that have not ended", registry=self.registry)
        self._by_server.append(self.ttft)
        self.registry.register(_FleetGauges(fleet))

    def of(self, server: str) -> OfServer:
        found = self._servers.get(server)
        if found is None:
            found = self._servers[server] = OfServer(self, server)
        return found

    def decided(self, decision: Decision) -> None:
        tokens = decision.request.prompt.tokens
        kind = "matched" if decision.matched_tokens > 0 else "unmatched"
        if decision.reasons and decision.reasons[0].startswith("adapter "):
            kind = "adapter-" + kind
        counter = self._decided.get((decision.strategy, kind))
        if counter is None:
            counter = self._decided[decision.strategy, kind] = self.decisions.labels(decision.strategy, kind)
        counter.inc()
        server = self.of(decision.server)
        server.prompt_tokens.inc(tokens)
        server.matched_tokens.inc(min(decision.matched_tokens, tokens))

    def forget(self, server: str) -> None:
        """It left the fleet; what was counted of it goes."""
        self._servers.pop(server, None)
        for metric in self._by_server:
            metric.remove_by_labels({"server": server})

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, says: str, *labels: str) -> Counter:
        counter = Counter(f"skymemory_router_{name}", says, ["server", *labels], registry=self.registry)
        self._by_server.append(counter)
        return counter


class _FleetGauges:
    """What stands in the fleet, read when it is asked for."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[GaugeMetricFamily]:
        def gauge(name: str, says: str, values: Iterable[tuple[str, float]]) -> GaugeMetricFamily:
            family = GaugeMetricFamily(f"skymemory_router_server_{name}", says, labels=["server"])
            for server, value in values:
                family.add_metric([server], value)
            return family

        fleet = list(self._fleet)
        yield gauge("healthy", "1: it is not ejected", ((server.name, server.healthy) for server in fleet))
        yield gauge("draining", "1: it gets nothing new", ((server.name, server.draining) for server in fleet))
        yield gauge("in_flight", "Requests sent to it that have not ended", ((s.name, s.in_flight) for s in fleet))
        now_s = time.monotonic()
        ages = ((server.name, now_s - server.reported.at_s) for server in fleet if server.reported is not None)
        yield gauge("report_age_seconds", "Since it told its load", ages)
        yield gauge("prefilling", "Of those, without a first byte", ((s.name, s.prefilling) for s in fleet))
