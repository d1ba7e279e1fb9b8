"""Prometheus metrics of the endpoint picker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from skymemory.addresses import host_and_port
from skymemory.errors import SkyMemoryError, cannot_listen
from skymemory.router.envoy.ext_proc import PickerService
from skymemory.router.router_metrics import QueueFigures

PREFIX = "skymemory_epp_"
COUNTERS = {
    "requests_total": ("", "Requests that Envoy asked about."),
    "requests_refused_total": ("status", "Requests refused by the picker: unreadable, too long, no server, too many."),
    "requests_abandoned_total": ("", "Requests that ended before the first byte of their response."),
    "picks_total": ("server", "Requests routed to a server."),
    "prefill_picks_total": ("server", "Requests whose prefill a server got, where another one answers."),
    "two_steps_total": ("", "Prompts that went to a prefill server and a decode server."),
    "alone_total": ("reason", "Requests that one server serves alone, though prefill and decode are apart: why."),
    "prompt_tokens_total": ("", "Tokens of the prompts that were routed, estimated without a tokenizer."),
    "matched_tokens_total": ("", "Of those, tokens in the chosen server's cache by the prefix index."),
    "told_prompt_tokens_total": ("", "Tokens of prompts whose responses report cached tokens."),
    "cached_tokens_total": ("", "Of those, tokens that the engine had cached."),
    "responses_total": ("class", "Responses by class of status."),
    "fallbacks_total": ("server", "Requests that a fallback served because the chosen server did not."),
    "ejections_total": ("server", "Times a server was ejected."),
    "promises_total": ("outcome", "Answers under a promise: kept, its first token late, or its tokens slow."),
    "reloads_total": ("outcome", "Reloads of settings: taken or refused."),
    "door_refusals_total": (
        "reason",
        "Streams, calls and connections refused or aborted because of their peers' behaviour, by reason.",
    ),
    "faults_total": ("", "Unexpected exceptions of the picker; its log has them."),
}


class PickerCollector(Collector):
    def __init__(self, service: PickerService) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        self._service.deferred.flush()
        read: dict[str, dict[str, int]] = {name: {} for name in COUNTERS}
        for key, value in self._service.counters.as_dict().items():
            name, _, label = key.partition("{")
            read.setdefault(name, {})[label.removesuffix("}")] = value
        for name, values in read.items():
            label, text = COUNTERS.get(name, ("", name))
            family = CounterMetricFamily(PREFIX + name.removesuffix("_total"), text, labels=[label] if label else None)
            for label_value, value in (values or ({} if label else {"": 0})).items():
                family.add_metric([label_value] if label else [], value)
            yield family
        yield GaugeMetricFamily(PREFIX + "streams", "Requests in flight in this picker.", self._service.streams)
        gauges = {
            "server_healthy": "1: it is neither ejected nor draining.",
            "server_requests": "Requests in flight at it.",
            "server_prefill_tokens": "Estimated tokens in its prefill queue.",
        }
        families = {name: GaugeMetricFamily(PREFIX + name, text, labels=["server"]) for name, text in gauges.items()}
        backends = self._service.backends
        for server in (known.server for known in backends.known.values()):
            is_healthy = server.takes_requests and not backends.policy.is_ejected(server.name)
            families["server_healthy"].add_metric([server.name], float(is_healthy))
            families["server_requests"].add_metric([server.name], server.in_flight)
            families["server_prefill_tokens"].add_metric([server.name], server.prefill_tokens)
        yield from families.values()


class MetricsPage:
    def __init__(self, service: PickerService, listen: str, collectors: Iterable[Collector] = ()) -> None:
        self._registry = CollectorRegistry()
        for collector in (PickerCollector(service), QueueFigures(service.queue, "skymemory_epp"), *collectors):
            self._registry.register(collector)
        self._listen = listen
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen.

        Raises:
            SkyMemoryError: the address cannot be bound.
        """
        app = web.Application()
        app.router.add_get("/metrics", self._answer)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, *host_and_port(self._listen))
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise SkyMemoryError(cannot_listen(self._listen, error)) from error
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_LATEST})
