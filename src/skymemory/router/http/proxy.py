"""The OpenAI-compatible proxy: which path is served how, what is refused, and what is logged of each request.

Prompts (/v1/completions, /v1/chat/completions) go where the strategy says; what has no prompt to match goes to the
server with the least load; everything else is answered here, or with a 404 that says why.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
import zlib
from collections.abc import Coroutine, Mapping
from typing import Any
from urllib.parse import unquote

import numpy as np

from skymemory.conductor.admission.named import weights_of
from skymemory.conductor.picker import NoServer, Picker
from skymemory.conductor.request import Prompt, Request
from skymemory.conductor.scheduler import Scheduler
from skymemory.conductor.strategies.simple import LeastLoad
from skymemory.router.admission import TurnedAway
from skymemory.router.api_keys import KeyFile
from skymemory.router.backends import Backends
from skymemory.router.bad_request import BadRequest
from skymemory.router.deferred import Afterwards
from skymemory.router.http.connection import Connection, Incoming, too_large
from skymemory.router.http.exchange import Exchange, Exchanges, RequestLog, outcome_of_refusal, refuse
from skymemory.router.http.gate import Gate
from skymemory.router.http.health import HealthWatch
from skymemory.router.http.metrics import ProxyMetrics
from skymemory.router.http.upstream import Pools
from skymemory.router.prefix_state import Knowledge
from skymemory.router.prompts.reader import BYTES_PER_TOKEN, PROMPT_PATHS, PromptReader
from skymemory.router.prompts.tokenizing import NotKnown
from skymemory.router.queue import RequestQueue
from skymemory.router.settings import Settings
from skymemory.router.waiting_room import QueueFigures, WaitingRoom

log = logging.getLogger("skymemory.router")
requests_log = logging.getLogger("skymemory.router.requests")

JSON = b"Content-Type: application/json\r\n"
METRICS_TEXT = b"Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
MOST_CONNECTIONS = 8192
"""Of clients. Beyond, the oldest on which nothing is asked is closed for each that comes."""
MOST_HELD_BYTES = 512 << 20
"""Of the bodies of all requests under way, which are kept until they are answered; at least four of the longest."""
IN_THREAD_BYTES = 32_768
"""With a tokenizer, longer bodies are read in a thread: one would hold up all others for milliseconds."""
AT_ONCE_LETTERS = 1024
"""So are those with more letters than this that are in no piece whose tokens are known."""
PASSED_ON = frozenset(
    (
        "/v1/embeddings",
        "/v1/rerank",
        "/v2/rerank",
        "/rerank",
        "/v1/score",
        "/score",
        "/pooling",
        "/classify",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/tokenize",
        "/detokenize",
    )
)
"""To the server with the least load: they have no prefix that a cache could hold."""

_WHY_NOT = {
    "/v1/responses": "the router does not serve /v1/responses: it keeps state at one server; use /v1/chat/completions",
    "/v1/conversations": "the router keeps no conversations; send the turns with /v1/chat/completions",
    "/v1/assistants": "the router serves no assistants; use /v1/chat/completions",
    "/v1/threads": "the router serves no threads; use /v1/chat/completions",
    "/v1/files": "the router keeps no files",
    "/v1/batches": "the router takes no batches; send their requests one by one",
    "/v1/fine_tuning": "the router trains nothing",
    "/v1/images": "the router passes on no images to be made",
    "/v1/messages": "the router does not speak Anthropic's API; use /v1/chat/completions",
    "/generate": "the router serves OpenAI's API only; use /v1/completions",
    "/inference": "the router serves OpenAI's API only; use /v1/completions",
    "/v1/load_lora_adapter": "adapters are loaded at each server, not through the router",
    "/v1/unload_lora_adapter": "adapters are unloaded at each server, not through the router",
}
_OWN = frozenset(("/health", "/ready", "/metrics", "/v1/models"))
_NONE = np.empty(0, dtype=np.uint64)


class Proxy:
    """Answers requests; their connections bring them (`connection.Application`)."""

    def __init__(
        self,
        settings: Settings,
        scheduler: Scheduler,
        reader: PromptReader,
        probes: HealthWatch,
        backends: Backends,
        pools: Pools,
        metrics: ProxyMetrics,
        knowledge: Knowledge,
        after: Afterwards,
    ) -> None:
        self.draining = False
        """Finishes what it has."""
        self._last_call_s = math.inf
        self.connections: dict[Connection, None] = {}
        """In the order in which they were made."""
        self.most_connections = MOST_CONNECTIONS
        self.held_bytes = 0
        self.in_flight = 0
        self.metrics = metrics
        self.backends = backends
        self._scheduler = scheduler
        self._least_load = Scheduler(Picker(scheduler.prefill.fleet, LeastLoad(), settings.seed))
        self._reader = reader
        self._watch = probes
        self._knowledge = knowledge
        self._tasks: set[asyncio.Task[None]] = set()
        self._exchanges = Exchanges(backends, pools, metrics, settings, after)
        self._gate = Gate()
        self._queue = RequestQueue(settings.queue)
        metrics.registry.register(QueueFigures(self._queue, "skymemory_router"))
        self._room = WaitingRoom(self._queue, self._has_room, asyncio.get_running_loop())
        self._take_up(settings, self._gate.read(settings))

    def reset(self, settings: Settings) -> None:
        """Take up changed settings: backends, limits, timeouts, health, retries.

        Raises:
            InvalidInput: a backend's certificates or the file of keys cannot be read; all stays as it was.
        """
        keys = self._gate.read(settings)
        self._exchanges.pools.set(settings.backends, settings.timeouts.connect_s)
        self.backends.set(settings.backends)
        self.backends.health = settings.health
        self._take_up(settings, keys)
        self._watch.follow()

    def _take_up(self, settings: Settings, keys: KeyFile | None) -> None:
        self._gate.take_up(settings, keys, time.monotonic())
        self.settings = self._exchanges.settings = settings
        weights = weights_of("weights", settings.admission.options.get("weights", {}))
        self._queue.configure(settings.queue, {**self._gate.weights, **weights})
        self._exchanges.room = self._room if settings.queue.most_requests else None
        self._reader.max_body_bytes = self.max_body_bytes = settings.limits.max_body_bytes
        self.most_held_bytes = max(MOST_HELD_BYTES, 4 * self.max_body_bytes)
        self.client_s = settings.timeouts.client_s
        self.keep_alive_s = min(settings.timeouts.keep_alive_s, self._last_call_s)

    def _has_room(self, request: Request, among: frozenset[str] | None) -> bool:
        return not self.backends.full(request, self.settings.limits.max_waiting)

    def drain(self, last_call_s: float) -> None:
        """Close each connection behind its next answer, or when nothing is asked on it for ``last_call_s``: a request
        may be on its way on one that is idle.
        """
        self.draining, self._last_call_s = True, last_call_s
        self.keep_alive_s = min(self.keep_alive_s, last_call_s)
        for connection in list(self.connections):
            connection.last_call()

    def stop(self) -> None:
        """Cut off what has not ended."""
        self._room.close()
        for connection in list(self.connections):
            current = connection.current
            if current is not None and current.listener is not None:
                current.listener.stop()
            else:
                connection.abort()
        self._exchanges.after.settle()

    # -- from connections

    def opened(self, connection: Connection) -> None:
        self.connections[connection] = None
        if len(self.connections) > self.most_connections:
            # Rather one on which nothing is asked than one that asks; clients make another when they need it.
            idle = next((each for each in self.connections if each.is_idle and not each.closing), connection)
            (connection if idle is connection else idle).abort()

    def closed(self, connection: Connection) -> None:
        self.connections.pop(connection, None)

    def refusal(self, request: Incoming) -> BadRequest | None:
        path, method = request.path, request.method
        if not self._gate.is_plain:
            refusal = self._gate.refusal(request)
            if refusal is not None or request.is_preflight:
                return refusal
        if path in PROMPT_PATHS:
            return None if method == "POST" else BadRequest(405, f"{path} takes POST, not {method}")
        if path in PASSED_ON:
            return None
        if method not in ("GET", "HEAD") or not _is_own(path):
            return BadRequest(*why_not(path, method))
        return None

    def refuse(self, request: Incoming, error: BadRequest) -> None:
        if request.path in PROMPT_PATHS or request.path in PASSED_ON:
            told = RequestLog(request.began_s, outcome_of_refusal(error.status), error.status, why=error.message)
            self._ended(request, told)
        refuse(request, error)

    def handle(self, request: Incoming) -> None:
        try:
            if request.is_preflight:
                request.connection.respond(204, b"", b"")
            elif request.path in PROMPT_PATHS or request.path in PASSED_ON:
                self._carry(request)
            else:
                self._own(request)
        except Exception:
            log.exception("%s %s", request.method, request.path)
            self.metrics.faults.labels("request").inc()
            request.connection.abort()

    # -- requests for servers

    def _carry(self, request: Incoming) -> None:
        told = RequestLog(request.began_s)
        self.in_flight += 1
        exchange = Exchange(self._exchanges, request, told, self._done)
        limits = self.settings.limits
        if self.in_flight > limits.max_in_flight:
            message = f"{limits.max_in_flight} requests are under way already; try again soon"
            self._turn_away(request, told, BadRequest(429, message), 1)
        elif packed := request.headers.first.get(b"content-encoding", b"").strip().lower():
            request.listener = waiting = _Preparing(self, request, told)
            waiting.task = self._spawn(self._carry_slowly(request, told, exchange, packed))
        elif self._reads_elsewhere and request.path in PROMPT_PATHS:
            self._carry_tokenized(request, told, exchange)
        else:
            self._begin(request, told, exchange)

    @property
    def _reads_elsewhere(self) -> bool:
        return self.settings.prompts.tokenizer is not None

    def _begin(self, request: Incoming, told: RequestLog, exchange: Exchange, read: Request | None = None) -> None:
        """Read its prompt, if that is not done, and send it."""
        try:
            scheduler = self._scheduler
            if request.path not in PROMPT_PATHS:
                read, scheduler = _without_prompt(request.body), self._least_load
            elif read is None:
                began_s = time.perf_counter()
                read = self._reader.read(request.path, request.headers, request.body, request.remote)
                self.metrics.read_seconds.observe(time.perf_counter() - began_s)
            if request.tenant is not None:
                read, told.entered = self._gate.enter(request, read, time.monotonic())
            exchange.start(read, scheduler)
        except TurnedAway as error:
            exchange.turn_away(error)
        except BadRequest as error:
            self._turn_away(request, told, error, 1 if error.status == 429 else None)
        except NoServer as error:
            self._turn_away(request, told, BadRequest(503, str(error)), math.ceil(self.settings.health.every_s))
        except Exception:
            log.exception("%s %s", request.method, request.path)
            told.outcome = "failed"
            self._turn_away(request, told, BadRequest(500, "the router failed; its log says why"))

    def _turn_away(
        self,
        request: Incoming,
        told: RequestLog,
        error: BadRequest,
        retry_after_s: int | None = None,
    ) -> None:
        told.outcome = told.outcome or outcome_of_refusal(error.status)
        told.status, told.why = error.status, told.why or error.message
        self._done(request, told)
        refuse(request, error, retry_after_s)

    def _carry_tokenized(self, request: Incoming, told: RequestLog, exchange: Exchange) -> None:
        if len(request.body) < IN_THREAD_BYTES:
            try:
                read = self._reader.read(request.path, request.headers, request.body, request.remote, AT_ONCE_LETTERS)
            except NotKnown:
                pass
            except BadRequest as error:
                self._turn_away(request, told, error)
                return
            else:
                self._begin(request, told, exchange, read)
                return
        request.listener = waiting = _Preparing(self, request, told)
        waiting.task = self._spawn(self._carry_slowly(request, told, exchange, b""))

    async def _carry_slowly(self, request: Incoming, told: RequestLog, exchange: Exchange, packed: bytes) -> None:
        """What would hold up all others is done in a thread: unpacking, and making tokens of much new text."""
        read: Request | None = None
        try:
            if packed:
                request.body = await asyncio.to_thread(_unpacked, request.body, packed, self.max_body_bytes)
                self.held_bytes += len(request.body) - request.body_bytes
                request.body_bytes = len(request.body)
                if self.held_bytes > self.most_held_bytes:
                    raise BadRequest(503, "the router holds as many bodies as it can; try again soon")
            if self._reads_elsewhere and request.path in PROMPT_PATHS:
                read = await asyncio.to_thread(
                    self._reader.read, request.path, request.headers, request.body, request.remote
                )
        except BadRequest as error:
            self._turn_away(request, told, error)
            return
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("%s %s", request.method, request.path)
            told.outcome = "failed"
            self._turn_away(request, told, BadRequest(500, "the router failed; its log says why"))
            return
        self._begin(request, told, exchange, read)

    def _done(self, request: Incoming, told: RequestLog) -> None:
        self.in_flight -= 1
        self._ended(request, told)

    def _ended(self, request: Incoming, told: RequestLog) -> None:
        server = "" if told.decision is None else told.decision.server
        if told.entered is not None:
            self._gate.left(told.entered, told.usage, time.monotonic())
        counted, usage = self.metrics.ended(server, told.outcome, told.ttft_s), told.usage
        if usage is not None and usage.cached_tokens is not None:
            counted.reported_tokens += usage.prompt_tokens
            counted.cached_tokens += usage.cached_tokens
        if self.settings.log_requests:
            took_s = time.monotonic() - told.began_s
            requests_log.info(request_line(request.method, request.path, told, took_s))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- pages of our own

    def _own(self, request: Incoming) -> None:
        path, connection = request.path, request.connection
        if path == "/health":
            connection.respond(200, JSON, b"{}")
        elif path == "/ready":
            ready, reasons = self.readiness()
            body = json.dumps({"ready": ready, "reasons": reasons}).encode()
            connection.respond(200 if ready else 503, JSON, body)
        elif path == "/metrics":
            self.metrics.in_flight.set(self.in_flight)
            connection.respond(200, METRICS_TEXT, self.metrics.text())
        else:
            which = unquote(path.removeprefix("/v1/models").lstrip("/"))  # "org/model" comes as "org%2Fmodel"
            self._spawn(self._models(request, which))

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

    async def _models(self, request: Incoming, which: str) -> None:
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
        if not which:
            body: object = {"object": "list", "data": list(models.values())}
        elif which in models:
            body = models[which]
        else:
            refuse(request, BadRequest(404, f"no server lists a model {which!r}", "model", "model_not_found"))
            return
        if request.connection.current is request:
            request.connection.respond(200, JSON, json.dumps(body).encode())


class _Preparing:
    """The listener of a request whose prompt is being read in a thread."""

    def __init__(self, proxy: Proxy, request: Incoming, told: RequestLog) -> None:
        self.task: asyncio.Task[None] | None = None
        self._proxy, self._request, self._told = proxy, request, told

    def client_gone(self) -> None:
        if self.task is not None:
            self.task.cancel()
        self._told.outcome, self._told.why = "client-gone", "it hung up"
        self._proxy._done(self._request, self._told)

    def client_full(self) -> None:
        pass

    def client_ready(self) -> None:
        pass

    def stop(self) -> None:
        self._told.outcome, self._told.why = "stopped", "the router stops"
        if self.task is not None:
            self.task.cancel()
        self._proxy._done(self._request, self._told)
        self._request.connection.abort()


def _is_own(path: str) -> bool:
    return path in _OWN or path.startswith("/v1/models/")


def why_not(path: str, method: str) -> tuple[int, str]:
    """Status and sentence for a request that is not served."""
    if path in _OWN:
        return 405, f"{path} takes GET, not {method}"
    for known, why in _WHY_NOT.items():
        if path == known or path.startswith(known + "/"):
            return 404, why
    shown = path if len(path) <= 100 else path[:100] + "…"
    return 404, (
        f"the router does not serve {shown}; it serves /v1/completions, /v1/chat/completions, /v1/models, "
        "/v1/embeddings and their like, /health, /ready and /metrics"
    )


def _without_prompt(body: bytes) -> Request:
    """Nothing to match, and some work, by the size of the body."""
    return Request(Prompt(_NONE, _NONE, 16, max(1, len(body) // BYTES_PER_TOKEN)))


def _unpacked(body: bytes, packed: bytes, most_bytes: int) -> bytes:
    """
    Raises:
        BadRequest: it is packed as we cannot unpack (415), not packed at all (400), or too large unpacked (413).
    """
    if packed == b"identity":
        return body
    if packed not in (b"gzip", b"x-gzip", b"deflate"):
        raise BadRequest(
            415, f"Content-Encoding {packed[:40].decode('latin-1')!r} is not understood; gzip and deflate are"
        )
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 32)  # gzip or zlib, whichever it begins as
    try:
        data = unpacker.decompress(body, most_bytes + 1)
    except zlib.error as error:
        raise BadRequest(400, f"the body cannot be unpacked: {error}") from error
    if len(data) > most_bytes:
        raise too_large(most_bytes)
    if not unpacker.eof:
        raise BadRequest(400, "the body cannot be unpacked: it ends too early")
    return data


def request_line(method: str, path: str, told: RequestLog, took_s: float) -> str:
    """``POST /v1/completions 200 answered server=… matched=512/600 cached=496/600 ttft_ms=41.2 ms=845.0 …``."""
    parts = [method, path, str(told.status or "-"), told.outcome]
    decision = told.decision
    if decision is not None:
        parts.append(f"server={decision.server}")
        parts.append(f"matched={decision.matched_tokens}/{decision.request.prompt.tokens}")
    if told.usage is not None and told.usage.cached_tokens is not None:
        parts.append(f"cached={told.usage.cached_tokens}/{told.usage.prompt_tokens}")
    if told.ttft_s is not None:
        parts.append(f"ttft_ms={told.ttft_s * 1e3:.1f}")
    parts.append(f"ms={took_s * 1e3:.1f}")
    parts.append(f"bytes={told.bytes_out}")
    if told.retries:
        parts.append(f"retries={told.retries}")
    if told.why:
        parts.append("why=" + repr(told.why[:200]))
    return " ".join(parts)
