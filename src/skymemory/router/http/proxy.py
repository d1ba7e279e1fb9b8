"""The OpenAI-compatible proxy: which path is served how, what is refused, and what is told of each request.

Prompts (/v1/completions, /v1/chat/completions) go where the strategy says; what has no prompt to match goes to the
server with the least load; everything else is answered here, or with a 404 that says why.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Mapping

from aiohttp import web
from multidict import CIMultiDict

from skymemory.conductor.picker import NoServer, Picker
from skymemory.conductor.request import Request
from skymemory.conductor.scheduler import Scheduler
from skymemory.conductor.strategies.plain import LeastLoad
from skymemory.router.bad_request import BadRequest, error_body
from skymemory.router.knowledge import Knowledge
from skymemory.router.prompts import PROMPT_PATHS, PromptReader
from skymemory.router.proxy_admission import Promises, TurnedAway, count, promised
from skymemory.router.proxy_attempt import Told
from skymemory.router.proxy_backends import Backends
from skymemory.router.proxy_body import read_request_body
from skymemory.router.proxy_exchange import Exchanges
from skymemory.router.proxy_headers import DECISION_HEADER, headers_for_server
from skymemory.router.proxy_health import HealthWatch
from skymemory.router.proxy_log import request_line
from skymemory.router.proxy_metrics import ProxyMetrics
from skymemory.router.proxy_paths import PASSED_ON, why_not
from skymemory.router.proxy_prompts import without_prompt
from skymemory.router.settings import Settings
from skymemory.router.token_pieces import NotKnown

log = logging.getLogger("skymemory.router")
requests_log = logging.getLogger("skymemory.router.requests")

JSON = "application/json"
IN_THREAD_BYTES = 32_768
"""With a tokenizer, longer bodies are read in a thread: one would hold up all others for milliseconds."""
AT_ONCE_LETTERS = 1024
"""So are those with more letters than this that are in no piece whose tokens are known."""


class Proxy:
    """Answers requests; `proxy_server` brings them."""

    def __init__(
        self,
        settings: Settings,
        scheduler: Scheduler,
        reader: PromptReader,
        probes: HealthWatch,
        backends: Backends,
        metrics: ProxyMetrics,
        knowledge: Knowledge,
    ) -> None:
        self.settings = settings
        self.draining = False
        """Finishes what it has."""
        self.stopping = False
        """Cuts off what it has."""
        self.busy: set[web.RequestHandler] = set()
        """Connections with a request under way."""
        self.in_flight = 0
        self.metrics = metrics
        self.backends = backends
        self._scheduler = scheduler
        self._least_load = Scheduler(Picker(scheduler.prefill.fleet, LeastLoad(), settings.seed))
        self._reader = reader
        self._watch = probes
        self._knowledge = knowledge
        slo = promised(settings)
        promises = None if slo is None else Promises(slo, metrics)
        self._exchanges = Exchanges(backends, metrics, settings, promises)

    def reset(self, settings: Settings) -> None:
        """Take up changed settings: backends, limits, timeouts, health, retries.

        Raises:
            InvalidInput: a backend's certificates cannot be read; all stays as it was.
        """
        self.backends.set(settings.backends, settings.timeouts.connect_s)
        self.backends.health = settings.health
        self.settings = self._exchanges.settings = settings
        self._reader.max_body_bytes = settings.limits.max_body_bytes
        self._watch.follow()

    async def handle(self, incoming: web.BaseRequest) -> web.StreamResponse:
        """The answer to any request."""
        path = incoming.path
        connection = incoming.protocol
        self.busy.add(connection)
        try:
            if path in PROMPT_PATHS or path in PASSED_ON:
                return await self._carry(incoming, path)
            return await self._own(incoming, path)
        except BadRequest as error:
            return _refusal(error)
        finally:
            self.busy.discard(connection)

    async def _carry(self, incoming: web.BaseRequest, path: str) -> web.StreamResponse:
        told = Told(time.monotonic())
        server = ""
        self.in_flight += 1
        try:
            try:
                return await self._answered(incoming, path, told)
            except TurnedAway as error:
                told.outcome, told.status, told.why = "refused", error.status, error.refusal.reason
                count(error, self.settings, self.metrics)
                response = _refusal(error, error.retry_after_s)
                if DECISION_HEADER in incoming.headers:
                    response.headers[DECISION_HEADER] = error.as_header()
                return response
            except BadRequest as error:
                told.outcome, told.why = _outcome_of(error.status), told.why or error.message
                told.status = error.status
                return _refusal(error, 1 if error.status == 429 else None)
            except NoServer as error:
                told.outcome, told.status, told.why = "no-server", 503, str(error)
                return _refusal(BadRequest(503, str(error)), math.ceil(self.settings.health.every_s))
            except (asyncio.CancelledError, ConnectionError):
                told.outcome, told.why = (
                    ("stopped", "the router stops") if self.stopping else ("client-gone", "it hung up")
                )
                raise
            except Exception:
                log.exception("%s %s", incoming.method, path)
                if told.relayed is not None and told.relayed.prepared:
                    told.outcome = "failed"
                    told.relayed.cut()  # another answer behind this one would be taken for its rest, or for the next
                    return told.relayed
                told.outcome, told.status = "failed", 500
                return _refusal(BadRequest(500, "the router failed; its log says why"))
        finally:
            self.in_flight -= 1
            if told.decision is not None:
                server = told.decision.server
            self._tell(incoming, path, told, server)

    async def _answered(self, incoming: web.BaseRequest, path: str, told: Told) -> web.StreamResponse:
        limits = self.settings.limits
        if self.in_flight > limits.max_in_flight:
            raise BadRequest(429, f"{limits.max_in_flight} requests are under way already; try again soon")
        if path in PROMPT_PATHS and incoming.method != "POST":
            raise BadRequest(405, f"{path} takes POST, not {incoming.method}")
        body = await read_request_body(incoming, limits.max_body_bytes, self.settings.timeouts.client_s)
        client = incoming.remote or ""
        began_s = time.perf_counter()
        if path in PROMPT_PATHS:
            request = await self._read(path, incoming.headers, body, client)
            scheduler = self._scheduler
        else:
            request, scheduler = without_prompt(body), self._least_load
        self.metrics.read_seconds.observe(time.perf_counter() - began_s)
        headers = headers_for_server(incoming.raw_headers, client)
        return await self._exchanges.carry(incoming, headers, body, request, scheduler, told)

    async def _read(self, path: str, headers: Mapping[str, str], body: bytes, client: str) -> Request:
        if self.settings.prompts.tokenizer is None:
            return self._reader.read(path, headers, body, client)
        if len(body) < IN_THREAD_BYTES:
            try:
                return self._reader.read(path, headers, body, client, AT_ONCE_LETTERS)
            except NotKnown:
                pass
        return await asyncio.to_thread(self._reader.read, path, headers, body, client)

    def _tell(self, incoming: web.BaseRequest, path: str, told: Told, server: str) -> None:
        counted = self.metrics.of(server)
        counted.ended(told.outcome)
        if told.ttft_s is not None:
            counted.ttft.observe(told.ttft_s)
        if told.usage is not None and told.usage.cached_tokens is not None:
            counted.reported_tokens.inc(told.usage.prompt_tokens)
            counted.cached_tokens.inc(told.usage.cached_tokens)
        if self.settings.log_requests:
            requests_log.info(request_line(incoming.method, path, told, time.monotonic() - told.began_s))

    async def _own(self, incoming: web.BaseRequest, path: str) -> web.StreamResponse:
        """What the router answers itself."""
        if incoming.method not in ("GET", "HEAD"):
            raise BadRequest(*why_not(path, incoming.method))
        if path == "/health":
            return web.Response(body=b"{}", content_type=JSON)
        if path == "/ready":
            ready, reasons = self.readiness()
            return web.Response(
                status=200 if ready else 503,
                body=json.dumps({"ready": ready, "reasons": reasons}).encode(),
                content_type=JSON,
            )
        if path == "/metrics":
            self.metrics.in_flight.set(self.in_flight)
            return web.Response(
                body=self.metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
            )
        if path == "/v1/models" or path.startswith("/v1/models/"):
            return await self._models(path.removeprefix("/v1/models").lstrip("/"))
        raise BadRequest(*why_not(path, incoming.method))

    def readiness(self) -> tuple[bool, list[str]]:
        """Whether requests can be served, and what stands against it, server by server."""
        reasons = ["the router is told to stop, and finishes what it has"] if self.draining else []
        able = 0
        for name, known in self.backends.known.items():
            if known.server.takes_requests:
                able += 1
            elif not known.server.healthy:
                reasons.append(f"server {name} is ejected: {known.why}")
            else:
                reasons.append(f"server {name} drains")
        reasons += self._knowledge.troubles()
        if not self.backends.known:
            reasons.append("no server is known")
        return able > 0 and not self.draining, reasons

    async def _models(self, which: str) -> web.StreamResponse:
        """What the servers list, each model once; asked of those that never told."""
        silent = [known for known in self.backends.known.values() if known.server.takes_requests and not known.models]
        answers = await asyncio.gather(*(self._watch.models_of(known) for known in silent), return_exceptions=True)
        for known, listed in zip(silent, answers, strict=True):
            if not isinstance(listed, BaseException):
                self.backends.lists(known.backend.name, listed)
        models: dict[str, Mapping[str, object]] = {}
        for known in self.backends.known.values():
            if known.server.takes_requests:
                for name in sorted(known.names):
                    entry = known.models.get(name) or {"id": name, "object": "model", "owned_by": "skymemory"}
                    models.setdefault(name, entry)
        if which:
            if which not in models:
                raise BadRequest(404, f"no server lists a model {which!r}", "model", "model_not_found")
            return web.Response(body=json.dumps(models[which]).encode(), content_type=JSON)
        return web.Response(
            body=json.dumps({"object": "list", "data": list(models.values())}).encode(), content_type=JSON
        )


def _outcome_of(status: int) -> str:
    return {429: "limited", 502: "unreachable", 504: "timeout"}.get(status, "bad-request")


def _refusal(error: BadRequest, retry_after_s: int | None = None) -> web.Response:
    headers: CIMultiDict[str] = CIMultiDict()
    if retry_after_s is not None:
        headers["Retry-After"] = str(max(1, retry_after_s))
    response = web.Response(status=error.status, body=error.body(), headers=headers, content_type=JSON)
    if error.status in (408, 413):
        response.force_close()
    return response


__all__ = ["Proxy", "error_body"]
