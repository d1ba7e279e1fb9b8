"""The OpenAI-compatible proxy: checks requests, answers the router's pages, forwards the others, and logs results."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any
from urllib.parse import unquote

from skymemory.conductor.admission.registry import weights_of
from skymemory.conductor.request import Request
from skymemory.router import paths
from skymemory.router.api_error import ApiError
from skymemory.router.api_keys import KeyFile
from skymemory.router.http.connection import HttpConnection, Incoming
from skymemory.router.http.elastic import ElasticRoles
from skymemory.router.http.exchange import UNANSWERED, Exchange, Exchanges, RequestLog, outcome_of, send_error
from skymemory.router.http.health import HealthWatch
from skymemory.router.limits.connections import ConnectionTable, State
from skymemory.router.limits.files import LEAST_CONNECTIONS, client_connections, open_files
from skymemory.router.limits.held_bytes import HeldBytes
from skymemory.router.limits.shares import SharedLimit
from skymemory.router.prefix_state import PrefixState
from skymemory.router.queue import RequestQueue
from skymemory.router.router_metrics import QueueFigures
from skymemory.router.settings import BY_LOAD, Settings
from skymemory.router.waiting_room import WaitingRoom

log = logging.getLogger("skymemory.router")
requests_log = logging.getLogger("skymemory.router.requests")

JSON = b"Content-Type: application/json\r\n"
METRICS_TEXT = b"Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
MAX_UNREAD_BYTES = 256 << 20
_MAX_SKIPPED_IDLE = 8  # idle connections that an eviction may skip: their next request has arrived
_MAX_FREED_FILES = 4
MakeExchange = Callable[[Exchanges, Incoming, Callable[[Incoming, RequestLog], None]], Exchange]


class Proxy:
    """Handler of all connections' requests (`connection.Application`)."""

    def __init__(
        self,
        exchanges: Exchanges,
        health: HealthWatch,
        prefix_state: PrefixState,
        exchange: MakeExchange = Exchange,
        roles: ElasticRoles | None = None,
    ) -> None:
        settings = exchanges.settings
        self.draining = False
        self._last_call_s = math.inf
        self.connections: dict[HttpConnection, None] = {}  # oldest first
        self.table: ConnectionTable[HttpConnection] = ConnectionTable(LEAST_CONNECTIONS)
        self.arriving: HeldBytes[Incoming | HttpConnection] = HeldBytes(0)
        self.unread: HeldBytes[HttpConnection] = HeldBytes(MAX_UNREAD_BYTES)
        self._request_slots = SharedLimit(0)  # requests in flight
        self.metrics = exchanges.metrics
        self.backends = exchanges.backends
        self._scheduler = exchanges.scheduler
        self._reader = exchanges.reader
        self._health = health
        self._prefix_state = prefix_state
        self._make_exchange = exchange
        self._tasks: set[asyncio.Task[None]] = set()
        self._access = exchanges.access
        exchanges.pools.on_files_short = self.close_idle
        self._exchanges = exchanges
        if roles is not None:
            exchanges.on_tokens = roles.record_tokens
        self._queue = RequestQueue(settings.queue)
        self.metrics.registry.register(QueueFigures(self._queue, "skymemory_router"))
        self._waiting_room = WaitingRoom(self._queue, self._has_room, asyncio.get_running_loop())
        self._configure(settings, self._access.read(settings))

    def reset(self, settings: Settings) -> None:
        """Apply changed settings.

        Raises:
            InvalidInput: certificates or keys cannot be read; nothing has changed.
        """
        keys = self._access.read(settings)
        self._exchanges.pools.set(settings.backends, settings.timeouts.connect_s)
        self.backends.set(settings.backends)
        self.backends.health = settings.health
        self._configure(settings, keys)
        self._health.follow()

    def _configure(self, settings: Settings, keys: KeyFile | None) -> None:
        self._access.configure(settings, keys, time.monotonic())
        self.settings = self._exchanges.settings = settings
        weights = weights_of("weights", settings.admission.options.get("weights", {}))
        self._queue.configure(settings.queue, {**self._access.weights, **weights})
        self._exchanges.retries.share, self._exchanges.retries.floor = settings.retries.budget, settings.retries.floor
        self._exchanges.room = self._waiting_room if settings.queue.most_requests else None
        self._reader.max_body_bytes = self.max_body_bytes = settings.limits.max_body_bytes
        self.arriving.limit.most = settings.limits.most_held_bytes
        self._request_slots.most = settings.limits.max_in_flight
        self.table.most = client_connections(open_files(), len(settings.backends), 2 if settings.splits else 1)
        self.client_s = settings.timeouts.client_s
        self.head_s = min(settings.timeouts.head_s, self.client_s)
        self.least_rate = settings.limits.least_rate
        self.keep_alive_s = min(settings.timeouts.keep_alive_s, self._last_call_s)

    def _has_room(self, request: Request, among: frozenset[str] | None) -> bool:
        if self.backends.full(request, self.settings.limits.max_waiting):
            return False
        return not self.backends.is_busy(request, time.monotonic())

    def drain(self, last_call_s: float) -> None:
        self.draining, self._last_call_s = True, last_call_s
        self.keep_alive_s = min(self.keep_alive_s, last_call_s)
        for connection in list(self.connections):
            connection.last_call()

    def stop(self) -> None:
        self._waiting_room.close()
        for connection in list(self.connections):
            current = connection.current
            if current is not None and current.listener is not None:
                current.listener.stop()
            else:
                connection.abort()
        self._exchanges.deferred.flush()

    # -- from connections (`connection.Application`)

    def admit(self, connection: HttpConnection, address: str) -> None:
        """Seat a connection, and evict others, or this one, from an over-full table."""
        connection.sit(address)
        table, now_s = self.table, time.monotonic()
        skipped = 0
        while table.is_over:
            seat = table.victim(now_s)
            is_idle = seat is not None and seat.state in (State.IDLE, State.KEPT)
            if seat is not None and is_idle and skipped < _MAX_SKIPPED_IDLE and seat.owner.has_input():
                skipped += 1
                table.mark_idle(seat, now_s)  # the kernel has its next request
                continue
            self.evicted("connections")
            (connection if seat is None else seat.owner).evict()

    def close_idle(self) -> None:
        """Free open files by evicting connections."""
        now_s = time.monotonic()
        for _ in range(_MAX_FREED_FILES):
            seat = self.table.victim(now_s)
            if seat is None:
                return
            self.evicted("files")
            seat.owner.evict()

    def opened(self, connection: HttpConnection) -> None:
        self.connections[connection] = None

    def closed(self, connection: HttpConnection) -> None:
        self.connections.pop(connection, None)

    def evicted(self, limit: str) -> None:
        self.metrics.evictions.labels(limit).inc()

    def refusal(self, request: Incoming) -> ApiError | None:
        if not self._access.is_open:
            refusal = self._access.refusal(request)
            if refusal is not None or request.is_preflight:
                return refusal
        return paths.refusal(request.path, request.method, request.headers, self.settings.unknown_paths == BY_LOAD)

    def refuse(self, request: Incoming, error: ApiError) -> None:
        if self._goes_to_server(request.path):
            result = RequestLog(request.began_s, outcome_of(error.status), error.status, error.message)
            self._on_request_end(request, result)
        try:
            send_error(request, error)
        except Exception as fault:
            self.fault(f"{request.method} {request.path}", fault)
            request.connection.abort()

    def fault(self, what: str, error: BaseException | None) -> None:
        log.error(what, exc_info=error)
        self.metrics.faults.labels("connection").inc()

    def handle(self, request: Incoming) -> None:
        try:
            if request.is_preflight:
                request.connection.respond(204, b"", b"")
            elif self._goes_to_server(request.path):
                self._forward(request)
            else:
                self._answer_own_page(request)
        except Exception:
            log.exception("%s %s", request.method, request.path)
            self.metrics.faults.labels("request").inc()
            request.connection.abort()

    # -- requests for servers

    def _goes_to_server(self, path: str) -> bool:
        return paths.goes_to_server(path, self.settings.unknown_paths == BY_LOAD)

    def _forward(self, request: Incoming) -> None:
        """Pass a request on, unless it loops or too many are in flight."""
        if b"via" in request.headers.first and (looped := self._exchanges.via.refusal(request.headers)) is not None:
            self.refuse(request, looped)
            return
        slots, holder = self._request_slots, request.holder
        if not slots.take(holder):
            if not self._drop_slow_reader(holder):
                message = (
                    f"{slots.held} requests are already in flight, {slots.of(holder)} of them of this client; at most "
                    f"{slots.most} are allowed, and a client has a share of them; try again soon"
                )
                self.refuse(request, ApiError(429, message, retry_after_s=1))
                return
            slots.change(holder, 1)
        self._make_exchange(self._exchanges, request, self._on_exchange_end).begin()

    def _drop_slow_reader(self, holder: str) -> bool:
        """Free a slot by evicting a client that does not read."""
        seat = self.table.slow_reader(time.monotonic())
        if seat is None or seat.owner.current is None:
            return False
        if seat.owner.current.holder != holder and self._request_slots.held < self._request_slots.most:
            return False  # the holder itself has too many
        self.evicted("in_flight")
        seat.owner.evict()
        return True

    @property
    def in_flight(self) -> int:
        return self._request_slots.held

    def _on_exchange_end(self, request: Incoming, result: RequestLog) -> None:
        self._request_slots.change(request.holder, -1)
        self._on_request_end(request, result)

    def _on_request_end(self, request: Incoming, result: RequestLog) -> None:
        server = "" if result.decision is None else result.decision.server
        if result.lease is not None:
            streamed = None if result.outcome in UNANSWERED else result.streamed_tokens
            self._access.release(result.lease, result.usage, streamed, time.monotonic())
        figures, usage = self.metrics.record_request_end(server, result.outcome, result.ttft_s), result.usage
        if usage is not None and usage.cached_tokens is not None and result.prefill is None:
            figures.reported_tokens += usage.prompt_tokens
            figures.cached_tokens += usage.cached_tokens
        if self.settings.log_requests:
            took_s = time.monotonic() - result.began_s
            requests_log.info(request_line(request.method, request.path, result, took_s))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- the router's own pages

    def _answer_own_page(self, request: Incoming) -> None:
        path, connection = request.path, request.connection
        if path == "/health":
            connection.respond(200, JSON, b"{}")
        elif path == "/ready":
            ready, reasons = self.readiness()
            page: dict[str, object] = {"ready": ready, "reasons": reasons}
            if self._scheduler.decode is not None:
                page["servers"] = self.backends.states()
            body = json.dumps(page).encode()
            connection.respond(200 if ready else 503, JSON, body)
        elif path == "/metrics":
            self.metrics.in_flight.set(self.in_flight)
            connection.respond(200, METRICS_TEXT, self.metrics.text())
        else:
            which = unquote(path.removeprefix("/v1/models").lstrip("/"))  # "org/model" comes as "org%2Fmodel"
            self._spawn(self._answer_models(request, which))

    def readiness(self) -> tuple[bool, list[str]]:
        """Return True if requests can be served, and the servers' problems."""
        reasons = ["the router is stopping, and finishes the requests it has"] if self.draining else []
        able = 0
        for name, known in self.backends.known.items():
            if known.server.takes_requests and not self.backends.policy.is_refusing(name):
                able += 1
            if known.why:
                reasons.append(f"server {name} is ejected: {known.why}")
            elif not known.server.takes_requests:
                reasons.append(f"server {name} is draining")
        reasons += self._prefix_state.troubles()
        if not self.backends.known:
            reasons.append("no server is configured")
        return able > 0 and not self.draining, reasons

    async def _answer_models(self, request: Incoming, which: str) -> None:
        silent = [known for known in self.backends.known.values() if known.server.takes_requests and not known.models]
        answers = await asyncio.gather(*(self._health.models_of(known) for known in silent), return_exceptions=True)
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
            send_error(request, ApiError(404, f"no server lists a model {which!r}", "model", "model_not_found"))
            return
        if request.connection.current is request:
            request.connection.respond(200, JSON, json.dumps(body).encode())


def request_line(method: str, path: str, result: RequestLog, took_s: float) -> str:
    """Return ``POST /v1/completions 200 answered server=… matched=512/600 cached=496/600 …``."""
    parts = [method, path, str(result.status or "-"), result.outcome]
    decision = result.decision
    if decision is not None:
        parts.append(f"server={decision.server}")
        prefill = result.prefill or decision
        if result.prefill is not None:
            parts.append(f"prefill={prefill.server}")
        parts.append(f"matched={prefill.matched_tokens}/{prefill.request.prompt.tokens}")
    if result.usage is not None and result.usage.cached_tokens is not None:
        parts.append(f"cached={result.usage.cached_tokens}/{result.usage.prompt_tokens}")
    if result.ttft_s is not None:
        parts.append(f"ttft_ms={result.ttft_s * 1e3:.1f}")
    parts.append(f"ms={took_s * 1e3:.1f}")
    parts.append(f"bytes={result.bytes_out}")
    if result.retries:
        parts.append(f"retries={result.retries}")
    if result.why:
        parts.append("why=" + repr(result.why[:200]))
    return " ".join(parts)
