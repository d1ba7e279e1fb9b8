"""What an endpoint picker tells Prometheus: counters of its desk, and gauges of the servers, over HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from skymemory.errors import SkyMemoryError
from skymemory.router.envoy.picker_service import Desk
from skymemory.router.waiting_room import QueueFigures

PREFIX = "skymemory_epp_"
COUNTERS = {
    "requests_total": ("", "Requests that Envoy asked about."),
    "requests_refused_total": ("status", "Requests answered here: unreadable, too long, no server, too many."),
    "requests_abandoned_total": ("", "Requests that ended before anything of an answer came."),
    "picks_total": ("server", "Requests sent to a server."),
    "prompt_tokens_total": ("", "Tokens of the prompts that were sent on, estimated without a tokenizer."),
    "matched_tokens_total": ("", "Of those, tokens that the chosen server was believed to hold."),
    "told_prompt_tokens_total": ("", "Tokens of prompts, by engines that told how many they had cached."),
    "cached_tokens_total": ("", "Of those, tokens that the engine had cached."),
    "responses_total": ("class", "Answers by class of status."),
    "fallbacks_total": ("server", "Requests that a server took after the one chosen did not."),
    "ejections_total": ("server", "Times a server was left alone because it took no requests."),
    "promises_total": ("outcome", "Answers under a promise: kept, its first token late, or its tokens slow."),
    "reloads_total": ("outcome", "Changed settings: taken or refused."),
    "door_refusals_total": (
        "reason",
        "Streams, calls and connections that were refused or cut off for what their peers did, by what that was.",
    ),
    "faults_total": ("", "Exceptions of the picker's own that nothing was made of; its log has them."),
}


class Collects(Protocol):
    """Whatever Prometheus' registry asks."""

    def collect(self) -> Iterable[Metric]: ...


class DeskCollector:
    """Read when asked: nothing is kept twice."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def collect(self) -> Iterator[Metric]:
        self._desk.after.settle()
        read: dict[str, dict[str, int]] = {name: {} for name in COUNTERS}
        for key, value in self._desk.counters.as_dict().items():
            name, _, label = key.partition("{")
            read.setdefault(name, {})[label.removesuffix("}")] = value
        for name, values in read.items():
            label, text = COUNTERS.get(name, ("", name))
            family = CounterMetricFamily(PREFIX + name.removesuffix("_total"), text, labels=[label] if label else None)
            for of, value in (values or ({} if label else {"": 0})).items():
                family.add_metric([of] if label else [], value)
            yield family
        streams = GaugeMetricFamily(PREFIX + "streams", "Requests under way in this picker.", self._desk.streams)
        yield streams
        gauges = {
            "server_healthy": "Whether it is asked.",
            "server_requests": "Requests sent to it that have not ended.",
            "server_prefill_tokens": "Tokens it is believed to compute before its answers begin.",
        }
        families = {name: GaugeMetricFamily(PREFIX + name, text, labels=["server"]) for name, text in gauges.items()}
        for server in self._desk.picker.fleet:
            families["server_healthy"].add_metric([server.name], float(server.takes_requests))
            families["server_requests"].add_metric([server.name], server.in_flight)
            families["server_prefill_tokens"].add_metric([server.name], server.prefill_tokens)
        yield from families.values()


class MetricsPage:
    """``GET /metrics`` on an address of its own."""

    def __init__(self, desk: Desk, listen: str, collectors: Iterable[Collects] = ()) -> None:
        """``collectors``: what else is told there."""
        self._registry = CollectorRegistry()
        for each in (DeskCollector(desk), QueueFigures(desk.queue, "skymemory_epp"), *collectors):
            self._registry.register(each)
        self._listen = listen
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self) -> None:
        """
        Raises:
            SkyMemoryError: the address cannot be bound.
        """
        app = web.Application()
        app.router.add_get("/metrics", self._answer)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        host, _, port = self._listen.rpartition(":")
        site = web.TCPSite(self._runner, host.strip("[]"), int(port))
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise SkyMemoryError(f"cannot listen on {self._listen}: {error.strerror or error}") from error
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_LATEST})
