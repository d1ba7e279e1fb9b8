"""The life of a proxied request.

1. ``begin`` reads the prompt, in a thread if it takes long.
2. ``_start_request`` picks a server (without a prompt, that with the least load), or queues the request.
3. Before the first byte of a response body, a failed attempt may be retried elsewhere: a rule per fault, ``Sends`` per
   request, a retry budget for all.
4. Then bytes are passed on. A truncated response never looks complete.
5. The account is closed after the client has its response.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Collection, Set
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from random import Random
from typing import TypeVar

from skymemory import native
from skymemory.conductor.admission.registry import weights_of
from skymemory.conductor.picker import NoServer
from skymemory.conductor.request import Decision, Request
from skymemory.conductor.scheduler import Refusal, ScheduledRequest, Scheduler
from skymemory.pacing import backoff_s
from skymemory.router.admission import DECISION_HEADER, Overloaded, slo_outcome
from skymemory.router.api_error import ApiError, error_event
from skymemory.router.api_keys import QuotaLease
from skymemory.router.apis.translation import API_PATHS, COUNT_TOKENS, Translation
from skymemory.router.apis.translation import error_body as body_of_error
from skymemory.router.apis.translation import error_event as event_of_error
from skymemory.router.backends import Backends
from skymemory.router.failure.budget import FIRST_S, MOST_S, RetryBudget, Sends
from skymemory.router.failure.evidence import Attempts
from skymemory.router.failure.faults import RULES, Fault, fault_of, retry_after_s
from skymemory.router.failure.silence import FIRST_TOKEN, NO_PROMPT, WHOLE
from skymemory.router.http.access_control import AccessControl
from skymemory.router.http.connection import Headers, Incoming, connection_line, header_lines, status_line
from skymemory.router.http.translated import MISSING_STATUSES, MissingApis, TranslatedResponse
from skymemory.router.http.upstream import Pool, Pools, ResponseHead, UpstreamCall, UpstreamError
from skymemory.router.http.via import Via
from skymemory.router.limits.shares import SharedLimit
from skymemory.router.limits.turns import Turns
from skymemory.router.prompts.continuation import ENGINES, MAX_KEPT_BYTES, KeptText, Rest, StreamContinuation
from skymemory.router.prompts.item_limits import is_read_in_loop
from skymemory.router.prompts.reader import (
    BYTES_PER_TOKEN,
    CHAT_COMPLETIONS,
    PROMPT_PATHS,
    PromptReader,
    without_prompt,
)
from skymemory.router.prompts.tokenizing import TooMuchNewText
from skymemory.router.prompts.unpacking import unpacked
from skymemory.router.queue import QueueEntry
from skymemory.router.request_account import DeferredWork, RequestAccount, Usage, UsageReader
from skymemory.router.router_metrics import ProxyMetrics
from skymemory.router.settings import Settings
from skymemory.router.waiting_room import WaitingRoom

log = logging.getLogger("skymemory.router")
T = TypeVar("T")

_DECISION = DECISION_HEADER.encode()

# Hop-by-hop headers (RFC 9110, section 7.6.1) are not passed on.
_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding"
    b" upgrade".split()
)
# The whole body is read and decompressed before it is sent: its length is set again, and "100 Continue" is not needed.
_OF_BODY = frozenset(b"host content-length content-encoding expect x-forwarded-for http2-settings".split())
_NOT_TO_SERVERS = _HOP_BY_HOP | _OF_BODY | {_DECISION}
_NOT_TO_SERVERS_WITHOUT_KEY = _NOT_TO_SERVERS | {b"authorization", b"x-api-key"}
# Headers left out of translated requests: the router itself reads the response.
_READ_HERE = frozenset((b"accept-encoding", b"anthropic-version", b"anthropic-beta"))
_NOT_TO_CLIENTS = _HOP_BY_HOP | {_DECISION}
# If the router answers CORS, a server's own CORS headers could contradict it.
_CORS = (b"allow-origin", b"allow-credentials", b"allow-methods", b"allow-headers", b"expose-headers", b"max-age")
_NOT_TO_CLIENTS_CORS = _NOT_TO_CLIENTS | {b"access-control-" + name for name in _CORS}
IN_THREAD_BYTES = 32_768
"""Size from which tokenizing takes a thread."""
MAX_NEW_LETTERS = 1024
LARGE_BYTES = 1 << 20
"""Size from which bodies are read one at a time, to have one decoded copy in memory."""
MOST_EXPANSION = 1032
MOST_BACKOFFS = 5
"""Back-offs while the budget is empty or all servers refuse; 0.4 s in total."""
UNANSWERED = frozenset(
    ("unreachable", "no-server", "server-error", "client-error", "refused", "limited", "bad-request", "failed")
)
"""Outcomes that cost no quota. After a timeout or a disconnect the answer may have been computed."""
_FORBIDDEN = (401, 403)
_EVENT_STREAM = b"text/event-stream"
_KEEP_OR_CLOSE = (b"", b"keep-alive", b"close")


class RequestLog:
    """Result of a request, for log, metrics and quotas."""

    # Class attributes as defaults: most requests never set them.
    decision: Decision | None = None  # the answering server
    prefill: Decision | None = None  # the prefill server, if another
    ttft_s: float | None = None
    usage: Usage | None = None
    streamed_tokens: int = 0  # lower bound of a stream without usage
    retries: int = 0
    bytes_out: int = 0
    lease: QuotaLease | None = None  # charge to the tenant's quota

    def __init__(self, began_s: float, outcome: str = "", status: int = 0, why: str = "") -> None:
        self.began_s, self.outcome, self.status, self.why = began_s, outcome, status, why


@dataclass(slots=True, eq=False)
class Exchanges:
    """Parts of the router that all requests share."""

    settings: Settings
    access: AccessControl
    reader: PromptReader
    scheduler: Scheduler
    least_load: Scheduler
    backends: Backends
    pools: Pools
    metrics: ProxyMetrics
    deferred: DeferredWork
    alone: Scheduler | None = None  # scheduler of requests not split into prefill and decode
    room: WaitingRoom | None = None
    via: Via = field(default_factory=Via)
    missing_apis: MissingApis = field(default_factory=MissingApis)
    retries: RetryBudget = field(default_factory=RetryBudget)
    turns: Turns = field(default_factory=Turns)
    # Texts of streams that could be continued.
    kept_text: SharedLimit = field(default_factory=lambda: SharedLimit(MAX_KEPT_BYTES))
    random: Random = field(default_factory=Random)
    on_tokens: Callable[[str, int, float], None] | None = None  # called with server, output tokens and their seconds


class ExchangeState(Enum):
    """State of a request. The client, timeouts and shutdown can end it in each; every end calls ``_end_exchange``.

    A transition not in ``allowed`` is a fault of the router, and ends this request alone (``_on_exception``).
    """

    allowed: tuple[ExchangeState, ...]  # states that may follow

    READING = "the prompt is read, in a thread if it takes long"
    QUEUED = "it waits for a server with room"
    ASKING = "an attempt runs; nothing has reached the client, so another server may be tried"
    PAUSED = "it backs off before the next attempt"
    STREAMING = "the client has the head: a failure continues the stream elsewhere or cuts the response"
    ENDED = "nothing more is sent; its account is closed after the client has its response"


READING, QUEUED, ASKING, PAUSED, STREAMING, ENDED = ExchangeState
READING.allowed = ASKING, QUEUED, ENDED
QUEUED.allowed = ASKING, ENDED
ASKING.allowed = STREAMING, ASKING, PAUSED, QUEUED, ENDED  # again at another server; queued again: all were busy
PAUSED.allowed = PAUSED, ASKING, ENDED  # again: the retry budget is empty
STREAMING.allowed = (ENDED,)
ENDED.allowed = ()


class Exchange(Attempts):
    """A request and its attempts. ``done`` is called exactly once."""

    _left_out_headers: frozenset[bytes] = frozenset()

    # Class attributes as defaults: most requests never set them.
    _reading: asyncio.Task[None] | None = None
    _account: RequestAccount | None = None
    _call: UpstreamCall | None = None
    _is_in_retry_budget = False
    _backoff_timer: asyncio.TimerHandle | None = None
    _error_status, _retry_after_s = 0, 0.0
    _answer_fault: Fault | None = None
    _response_head: ResponseHead | None = None
    _usage_reader: UsageReader | None = None
    _continuation: StreamContinuation | None = None
    _kept_text: KeptText | None = None
    _is_continued = False
    _state = READING
    _queue_entry: QueueEntry | None = None
    _translating: asyncio.Task[None] | None = None
    _translated: TranslatedResponse | None = None
    _pieces_sent = 0

    def __init__(self, shared: Exchanges, incoming: Incoming, done: Callable[[Incoming, RequestLog], None]) -> None:
        self.client = incoming.remote if incoming.tenant is None else incoming.tenant.name
        self.incoming = incoming
        self._shared = shared
        self._log = RequestLog(incoming.began_s)
        self._on_end = done
        self._tried_servers: set[str] = set()
        self._sends = Sends(1 + shared.settings.retries.most)

    def _enter_state(self, state: ExchangeState) -> None:
        if state not in self._state.allowed:
            raise RuntimeError(f"a request cannot go from {self._state.name} to {state.name}")
        self._state = state

    # -- reading the prompt

    def begin(self) -> None:
        """Read the prompt, in a thread if that takes long, and start the request."""
        incoming = self.incoming
        packed = incoming.headers.first.get(b"content-encoding", b"")
        if packed:
            packed = b", ".join(incoming.headers.all_of(b"content-encoding")).strip().lower()
        is_long = incoming.is_in_pieces or (incoming.path in PROMPT_PATHS and not is_read_in_loop(incoming.body))
        if packed or is_long:
            self._read_in_thread(packed)
        elif self._has_tokens:
            self._read_tokens_and_start()
        else:
            self._start_request()

    @property
    def _has_tokens(self) -> bool:
        path = self.incoming.path
        if not self._shared.reader.has_tokenizer:
            return path in API_PATHS and len(self.incoming.body) >= IN_THREAD_BYTES
        return path in PROMPT_PATHS

    def _read_prompt(self, most_new: int | None = None, *, is_counted: bool = False) -> Request:
        incoming = self.incoming
        return self._shared.reader.read(
            incoming.path, incoming.headers, incoming.body, incoming.remote, most_new, is_counted=is_counted
        )

    def _read_tokens_and_start(self) -> None:
        if len(self.incoming.body) < IN_THREAD_BYTES:
            try:
                request = self._read_prompt(MAX_NEW_LETTERS, is_counted=True)
            except TooMuchNewText:
                pass  # a thread tokenizes it
            except ApiError as error:
                self._answer_error(error)
                return
            else:
                self._start_request(request)
                return
        self._read_in_thread(b"")

    def _read_in_thread(self, packed: bytes) -> None:
        self.incoming.listener = self
        self._reading = asyncio.get_running_loop().create_task(self._read_and_start(packed))

    async def _read_and_start(self, packed: bytes) -> None:
        """Join and decompress the body and read its prompt, in threads, then start the request."""
        request, incoming = None, self.incoming
        most_bytes = self._shared.settings.limits.max_body_bytes
        try:
            if incoming.is_in_pieces:
                incoming.set_body(await self._in_thread(incoming.joined, incoming.body_bytes))
            if packed:  # the body's Content-Encoding; empty: it is not compressed
                unpacked_bytes = min(most_bytes, MOST_EXPANSION * len(incoming.body))
                unpack = partial(unpacked, incoming.body, packed, most_bytes)
                incoming.connection.replace_body(incoming, await self._in_thread(unpack, unpacked_bytes))
            if incoming.path in PROMPT_PATHS:
                request = await self._in_thread(self._read_prompt, len(incoming.body))
        except ApiError as error:
            self._answer_error(error)
        except Exception:
            self._on_exception()
        else:
            self._start_request(request)

    async def _in_thread(self, work: Callable[[], T], size_bytes: int) -> T:
        """Run ``work`` in a thread; one at a time if its result is large."""
        if size_bytes < LARGE_BYTES:
            return await asyncio.to_thread(work)
        return await self._shared.turns.run(self.incoming.holder, work)

    # -- picking and sending

    def _start_request(self, read: Request | None = None) -> None:
        """Charge the quota, then send or queue the request. ``read``: None if it is still to be read."""
        shared, incoming = self._shared, self.incoming
        self._scheduler = shared.scheduler
        try:
            if incoming.path not in PROMPT_PATHS:  # an estimate of its load by the body's size
                read, self._scheduler = without_prompt(max(1, len(incoming.body) // BYTES_PER_TOKEN)), shared.least_load
            elif read is None:
                started_s = time.perf_counter()
                read = self._read_prompt(is_counted=True)
                shared.metrics.read_seconds.observe(time.perf_counter() - started_s)
            if incoming.tenant is not None:
                read, self._log.lease = shared.access.acquire(incoming, read, time.monotonic())
            self._request = read
            now_s = time.monotonic()
            self._is_in_retry_budget = True
            shared.retries.on_request(now_s)
            shared.backends.policy.on_request(self.client, now_s)
            shared.deferred.flush()  # may free room and call waiting requests
            incoming.listener = self
            if shared.room is None or shared.room.is_open_to(read):
                self._try_to_send(None)
            else:
                self._wait_for_room(shared.room)
        except ApiError as error:
            self._answer_error(error)
        except Exception:
            self._on_exception()

    def _wait_for_room(self, room: WaitingRoom) -> None:
        self._enter_state(QUEUED)
        entry = room.wait(self, self._request, len(self.incoming.body))
        if isinstance(entry, Refusal):
            self.turned_away(entry)
        else:
            self._queue_entry = entry

    # -- from the queue

    def called(self, now_s: float) -> None:
        self._try_to_send(None if self._account is None else self._account.placement)

    def turned_away(self, refusal: Refusal) -> None:
        self._answer_refusal(Overloaded(refusal))

    def _answer_refusal(self, error: Overloaded) -> None:
        result, incoming = self._log, self.incoming
        result.outcome, result.status, result.why = "refused", error.status, error.refusal.reason
        # Tenants that have a weight get their own label; all others share a label.
        weights = weights_of("weights", self._shared.settings.admission.options.get("weights", {}))
        tenant = self._request.tenant
        label = tenant if tenant in weights else "other" if tenant else "unknown"
        self._shared.metrics.refusals.labels(error.refusal.kind, label).inc()
        headers = b""
        if incoming.headers.first.get(_DECISION):
            headers = b"%s: %s\r\n" % (_DECISION, error.as_header().encode())
        self._end_exchange()
        send_error(incoming, error, headers)

    # -- attempts

    def _try_to_send(self, before: ScheduledRequest | None) -> None:
        """Send the request to the best server, or answer an error. ``before``: the last placement."""
        try:
            self._enter_state(ASKING)
            self._send_to_server(self._place_or_raise(before))
        except Overloaded as error:
            self._answer_refusal(error)
        except NoServer as error:
            self._answer_error(ApiError(503, str(error), retry_after_s=math.ceil(self._shared.settings.health.every_s)))
        except ApiError as error:
            self._answer_error(error)
        except Exception:
            self._on_exception()

    def _place_or_raise(self, before: ScheduledRequest | None) -> ScheduledRequest:
        """Place the request. An admitted request is not refused later."""
        shared, request = self._shared, self._request
        max_waiting = shared.settings.limits.max_waiting
        try:
            placement = self._pick_server(before, time.monotonic())
        except NoServer as error:
            if self._tried_servers:
                raise self._get_no_answer_error(", and no other takes requests") from error
            if max_waiting and shared.backends.full(request, max_waiting):
                message = f"every server has {max_waiting} requests waiting; try again soon"
                raise ApiError(429, message, retry_after_s=1) from error
            raise
        if isinstance(placement, Refusal):
            raise Overloaded(placement)
        self._log.decision = placement.prefill
        shared.metrics.decided(placement.prefill)
        return placement

    def _pick_server(self, before: ScheduledRequest | None, now_s: float) -> ScheduledRequest | Refusal:
        """Choose an untried server, or raise ``NoServer``."""
        avoid = self._get_avoided_servers(now_s)
        able = self._shared.backends.able(
            self._request, self._tried_servers, self._shared.settings.limits.max_waiting, avoid
        )
        scheduler = self._scheduler
        if before is None:
            return scheduler.place(self._request, now_s, able)
        return scheduler.place_again(before, now_s, able)

    def _get_avoided_servers(self, now_s: float) -> Set[str]:
        return self._shared.backends.avoided(self.client, now_s, is_retry=bool(self._tried_servers))

    def _send_to_server(self, placement: ScheduledRequest) -> None:
        incoming, now_s = self.incoming, time.monotonic()
        account = self._account = RequestAccount(self._scheduler, placement, now_s)
        decision = account.decision
        server, pool = decision.server, self._shared.pools[decision.server]
        incoming.connection.deadline.set(self._shared.settings.timeouts.first_byte_s, self._first_byte_timeout)
        self._response_head = self._answer_fault = self._translated = None
        kind = (
            NO_PROMPT if self._scheduler is self._shared.least_load else FIRST_TOKEN if self._request.streams else WHOLE
        )
        self._shared.backends.policy.on_sent(self, server, now_s, decision.estimated_ttft_s or 0.0, kind)
        if incoming.path in API_PATHS and self._shared.missing_apis.is_missing(server, incoming.path, now_s):
            self._send_translated(server)
            return
        head = request_head(incoming, pool, len(incoming.body), self._shared.via, self._left_out_headers)
        self._call = pool.ask(self, head, incoming.body, incoming.method != "HEAD", self._sends)

    def _send_translated(self, server: str) -> None:
        """Send the request as a chat completion, or raise ``ApiError`` (400)."""
        incoming = self.incoming
        if is_read_in_loop(incoming.body):
            self._ask_translated(server, Translation(incoming.path, incoming.body))
        else:
            self._translating = asyncio.get_running_loop().create_task(self._translate_in_thread(server))

    async def _translate_in_thread(self, server: str) -> None:
        incoming = self.incoming
        size_bytes = 2 * len(incoming.body)  # its fields and the translated body
        try:
            incoming.connection.hold(incoming, size_bytes)
            translation = await self._in_thread(partial(Translation, incoming.path, incoming.body), size_bytes)
            self._translating = None
            self._ask_translated(server, translation)
        except ApiError as error:
            self._translating = None
            self._answer_error(error)
        except Exception:
            self._on_exception()

    def _ask_translated(self, server: str, translation: Translation) -> None:
        incoming, pool, left_out = self.incoming, self._shared.pools[server], self._left_out_headers | _READ_HERE
        head = request_head(incoming, pool, len(translation.body), self._shared.via, left_out, CHAT_COMPLETIONS)
        receiver = self._translated = TranslatedResponse(self, translation, self._on_exception)
        self._call = receiver.call = pool.ask(receiver, head, translation.body, True, self._sends)

    def _send_translated_if_missing(self, head: ResponseHead) -> bool:
        """Return True if it is sent again as a chat completion, since the engine lacks its API."""
        incoming, account = self.incoming, self._account
        if account is None:
            return False
        if self._translated is not None:
            if head.status not in MISSING_STATUSES:
                self._shared.missing_apis.learn(account.decision.server, incoming.path, time.monotonic())
            return False
        server, apis = account.decision.server, self._shared.missing_apis
        if head.status not in MISSING_STATUSES:
            if head.status < 400:
                apis.on_answer(server, incoming.path)
            return False
        if apis.is_there(server, incoming.path):
            return False
        call, self._call = self._call, None  # the same attempt: the server executed nothing
        if call is not None:
            call.close()
        self._sends.take_back()
        try:
            self._send_translated(account.decision.server)
        except ApiError as error:
            self._answer_error(error)
        return True

    # After a failed attempt, `_may_retry` checks the fault's rule and the request's limits, `_retry_or_fail` backs off,
    # and `_retry_within_budget` asks the retry budget. After an error response the budget is asked first: if it
    # refuses, the response is passed on.

    @property
    def _has_no_retry_left(self) -> bool:
        return self._log.retries >= self._shared.settings.retries.most or not self._sends.remaining

    @property
    def _may_queue_again(self) -> bool:
        return True

    def _may_retry(self, fault: Fault, server: str) -> bool:
        max_retries = RULES[fault].retries
        return (
            not self._has_no_retry_left
            and (max_retries is None or self.retries.get(fault, 0) < max_retries)
            and self._shared.backends.has_other(self._request, self._tried_servers, server)
        )

    def _take_from_budget(self, fault: Fault, server: str) -> bool:
        if fault is Fault.REFUSED:
            return True  # nothing was sent
        is_free = fault is Fault.SILENT or self._shared.backends.policy.is_free_retry(server)
        if self._shared.retries.take(time.monotonic(), is_free=is_free):
            return True
        self._shared.metrics.denied_retries.inc()
        return False

    def _retry_or_fail(self, why: str, fault: Fault, *, is_paid: bool = False) -> None:
        """Try another server, or fail. ``is_paid``: the budget has allowed it."""
        account, result = self._account, self._log
        assert account is not None
        server = account.decision.server
        result.why = f"{server}: {why}"
        may_retry = self._may_retry(fault, server)
        self._end_attempt(account)
        may_wait = not may_retry and self._have_all_refused(fault)
        if not may_retry and not may_wait:
            self._answer_error(
                self._get_no_answer_error("" if self._has_no_retry_left else ", and no other takes requests")
            )
            return
        self._count_retry(server, fault)
        if may_wait:
            self._tried_servers.clear()
        self._shared.deferred.flush()
        if RULES[fault].backs_off or may_wait:
            self.incoming.connection.deadline.clear()
            self._back_off(server, fault, result.retries, is_paid)
        else:
            self._retry_within_budget(server, fault, result.retries, is_paid)

    def _have_all_refused(self, fault: Fault) -> bool:
        """Return True if all servers refused: a restarted server may soon accept."""
        return fault is Fault.REFUSED and not self._sends.count and self._log.retries < MOST_BACKOFFS

    def _end_attempt(self, account: RequestAccount) -> None:
        self._drop_call()
        account.close(time.monotonic())

    def _count_retry(self, server: str, fault: Fault) -> None:
        self._log.retries += 1
        self._shared.metrics.of(server).retries += 1
        self._tried_servers.add(server)
        self.count_retry(fault)

    def _back_off(self, server: str, fault: Fault, number: int, is_paid: bool) -> None:
        self._enter_state(PAUSED)
        again = partial(self._retry_within_budget, server, fault, number, is_paid)
        wait_s = backoff_s(number, FIRST_S, MOST_S, self._shared.random.random)
        self._backoff_timer = asyncio.get_running_loop().call_later(wait_s, again)

    def _retry_within_budget(self, server: str, fault: Fault, number: int, is_paid: bool) -> None:
        self._backoff_timer = None
        if is_paid or self._take_from_budget(fault, server):
            self._send_again()
        elif RULES[fault].backs_off and number < MOST_BACKOFFS:  # `number`: of the back-off
            # Meanwhile the server's check may end: if it finds the server dead, retries are free of the budget.
            self._back_off(server, fault, number + 1, is_paid)
        else:
            self._answer_error(self._get_no_answer_error(", and too many requests are being retried"))

    def _send_again(self) -> None:
        assert self._account is not None
        self._try_to_send(self._account.placement)

    def _get_no_answer_error(self, more: str = "") -> ApiError:
        """Return 502; 503 if no server was reached; 429 or 503 if the last server answered that."""
        if self.failed:
            self._shared.backends.on_end(self, time.monotonic())
        status = self._error_status if self._error_status in (429, 503) else 502 if self._sends.count else 503
        retry_after_s = (
            None if status == 502 else math.ceil(max(self._retry_after_s, self._shared.settings.health.every_s))
        )
        return ApiError(status, f"no answer from server {self._log.why}{more}", retry_after_s=retry_after_s)

    def _requeue(self, room: WaitingRoom, why: str) -> None:
        """Queue the request again: all servers are full."""
        account = self._account
        assert account is not None
        self._log.why = f"{account.decision.server}: {why}"
        self._count_retry(account.decision.server, Fault.BUSY)
        self._end_attempt(account)
        self._tried_servers.clear()
        self.incoming.connection.deadline.clear()
        self._shared.deferred.flush()
        self._wait_for_room(room)

    def move_on(self, server: str, why: str) -> None:
        """Leave an ejected server for another."""
        account = self._account
        if self._state is ENDED or account is None or account.decision.server != server:
            return
        if self._call is None and self._translating is None:
            return
        try:
            if self._state is STREAMING:
                self._try_to_continue(f"it was ejected ({why})")  # else the server may still send the remainder
            elif self._may_retry(Fault.SILENT, server):
                self._shared.backends.on_fault(self, server, Fault.SILENT, time.monotonic())
                self._retry_or_fail(f"it was ejected ({why})", Fault.SILENT)
        except Exception:
            self._on_exception()

    def _answer_error(self, error: ApiError) -> None:
        result = self._log
        result.outcome, result.status, result.why = outcome_of(error.status), error.status, result.why or error.message
        self._end_exchange()
        send_error(self.incoming, error)

    # -- from the server

    def response_begins(self, head: ResponseHead) -> None:
        if self._state is STREAMING:
            self._on_continuation_begins(head)
            return
        try:
            if self.incoming.path in API_PATHS and self._send_translated_if_missing(head):
                return
            if head.status < 400 or (fault := self._get_fault(head)) is None:
                self._response_head = head
            else:
                self._on_error_answer(head, fault)
        except Exception:
            self._on_exception()

    def _get_fault(self, head: ResponseHead) -> Fault | None:
        if head.status in _FORBIDDEN:
            account = self._account
            has_own_key = account is not None and bool(self._shared.pools[account.decision.server].authorization)
            return Fault.ERROR if has_own_key else None  # else the client's key is wrong
        return None if head.status < 429 else fault_of(head.status, b"retry-after" in head.headers.first)

    def _on_error_answer(self, head: ResponseHead, fault: Fault) -> None:
        shared, account, now_s = self._shared, self._account, time.monotonic()
        assert account is not None
        server, why = account.decision.server, f"it answered {head.status}"
        wait_s = retry_after_s(head.headers.first.get(b"retry-after", b"")) or 0.0
        self._error_status, self._retry_after_s = head.status, wait_s
        shared.backends.on_fault(self, server, fault, now_s, wait_s)
        if head.status in shared.settings.retries.statuses:
            if self._may_retry(fault, server) and self._take_from_budget(fault, server):
                self._retry_or_fail(why, fault, is_paid=True)
                return
            room = (
                shared.room if self._may_queue_again and fault is Fault.BUSY and not self._has_no_retry_left else None
            )
            if room is not None and self._take_from_budget(fault, server):
                self._requeue(room, why)
                return
        self._response_head, self._answer_fault = head, fault
        shared.backends.on_end(self, now_s)

    def response_data(self, piece: bytes, at_end: bool) -> None:
        try:
            if self._state is STREAMING:
                self._send_to_client(piece, at_end)
                return
            head = self._response_head
            is_plain = piece and head is not None and head.headers.first.get(b"content-type") == b"application/json"
            if not is_plain and (why := self._get_reason_unusable(piece, at_end)) and self._retry_bad_answer(why):
                return
            self._begin_response(piece, at_end)
        except Exception:
            self._on_exception()

    def response_failed(self, error: UpstreamError) -> None:
        try:
            self._on_connection_failed(error)
        except Exception:
            self._on_exception()

    def _on_connection_failed(self, error: UpstreamError) -> None:
        account = self._account
        assert account is not None
        self._call = None
        backends, server = self._shared.backends, account.decision.server
        if self._state is STREAMING:
            backends.on_fault(self, server, Fault.BROKEN, time.monotonic())
            self._continue_or_cut(str(error))
            return
        fault, self._error_status = fault_of_error(error), 0
        backends.on_fault(self, server, fault, time.monotonic())
        self._retry_or_fail(str(error), fault)

    def _get_reason_unusable(self, piece: bytes, at_end: bool) -> str:
        """Return the reason to reject a successful answer; empty: it is usable."""
        head = self._response_head
        is_prompt = self.incoming.method == "POST" and self.incoming.path in PROMPT_PATHS
        if head is None or not is_prompt or not 200 <= head.status < 300:
            return ""
        if at_end and not piece:
            return "its answer is empty"
        kind = head.headers.first.get(b"content-type", b"")
        return "its answer is a web page" if kind.lower().startswith(b"text/html") else ""

    def _retry_bad_answer(self, why: str) -> bool:
        """Return True if another server is asked; else the answer is passed on."""
        account, backends = self._account, self._shared.backends
        assert account is not None
        server = account.decision.server
        backends.on_fault(self, server, Fault.ERROR, time.monotonic())
        if self._may_retry(Fault.ERROR, server) and self._take_from_budget(Fault.ERROR, server):
            self._retry_or_fail(why, Fault.ERROR, is_paid=True)
            return True
        backends.on_end(self, time.monotonic())
        self._answer_fault = Fault.ERROR
        return False

    # -- streaming

    def _begin_response(self, piece: bytes, at_end: bool) -> None:
        """Send the head and first piece to the client; then no attempt can be repeated unseen."""
        response, account, result, incoming = self._response_head, self._account, self._log, self.incoming
        assert response is not None and account is not None
        headers, first, now_s = response.headers, response.headers.first, time.monotonic()
        kind, is_good = first.get(b"content-type", b""), response.status < 400
        if self._answer_fault is None:
            is_whole = at_end and not kind.startswith(_EVENT_STREAM)
            self._shared.backends.on_answer(self, account.decision.server, now_s, is_good, is_whole)
        result.status = response.status
        self._enter_state(STREAMING)
        self._usage_reader = reader = UsageReader(kind, first.get(b"content-encoding", b""))
        # An error says nothing about the cache, so its account closes as failed.
        if is_good:
            result.ttft_s = now_s - result.began_s
            if not at_end and (self._request.streams or reader.streams):
                self._shared.deferred.run(partial(self._on_first_byte, account, now_s))
        if reader.streams and self._may_continue(response):
            shared, of_reader = self._shared, self._shared.reader
            tokens_of = of_reader.tokens_of if of_reader.has_tokenizer else None
            self._kept_text = KeptText(shared.kept_text, incoming.holder)
            self._continuation = StreamContinuation(incoming.path, incoming.body, tokens_of, self._kept_text)
        connection = incoming.connection
        if incoming.method == "HEAD":
            response.chunked = False  # a response to HEAD has no body
        elif incoming.version == "1.0":
            response.framed = response.framed and not response.chunked
            response.chunked = False  # HTTP/1.0 has no chunks: the body ends with the connection
        elif not response.framed:
            response.chunked = response.framed = True  # so that a proper end differs from a lost connection
        keep = connection.keeps(response.framed)
        head = [status_line(response.status, response.reason), headers_for_client(headers, incoming.has_cors)]
        if response.chunked:
            head.append(b"Transfer-Encoding: chunked\r\n")
        if incoming.headers.first.get(_DECISION):
            head.append(decision_line(account))
        if response.status in (429, 503) and b"retry-after" not in first:
            head.append(b"Retry-After: 1\r\n")
        head += (self._shared.via.lines["1.1"], incoming.response_headers, connection_line(incoming, keep), b"\r\n")
        self._send_to_client(piece, at_end, b"".join(head))

    def _on_first_byte(self, account: RequestAccount, now_s: float) -> None:
        account.first_byte(now_s)
        if self._shared.room is not None:
            self._shared.room.poll()

    def _send_to_client(self, piece: bytes, at_end: bool, head: bytes = b"") -> None:
        """Pass on a piece; a stream that fails or ends early is continued elsewhere."""
        response, result, connection, reader = (
            self._response_head,
            self._log,
            self.incoming.connection,
            self._usage_reader,
        )
        assert response is not None and reader is not None
        self._pieces_sent += 1
        if (stream := self._continuation) is not None:
            piece = stream.add(piece, at_end)
            if stream.failure:
                self._on_error_event(stream, piece, at_end, head)
                return
            if at_end and not stream.is_complete:
                self._on_answer_ended_early(piece, head)
                return
        result.bytes_out += len(piece)
        if response.chunked:
            framed = b"%x\r\n%b\r\n" % (len(piece), piece) if piece else b""
            if data := head + framed + (b"0\r\n\r\n" if at_end else b""):
                connection.write(data)
        elif head or piece:
            connection.write(head + piece)
        reader.add(piece)
        if at_end:
            status = result.status
            result.outcome = "answered" if status < 400 else "client-error" if status < 500 else "server-error"
            self._call = None
            if self._pieces_sent > 1 or reader.streams:  # else `_begin_response` reported it as a whole answer
                self._report_complete(status < 400)
            self._end_exchange()
            connection.end(connection.keeps(response.framed))
            return
        self.heard_s = time.monotonic()
        if connection.full:
            self.client_full()
        else:
            connection.deadline.set(self._shared.settings.timeouts.idle_s, self._idle_timeout)

    def _report_complete(self, is_good: bool) -> None:
        account = self._account
        if account is not None and self._answer_fault is None:
            server = account.decision.server
            self._shared.backends.on_complete(self, server, time.monotonic(), self._pieces_sent, is_good)

    def _on_answer_ended_early(self, piece: bytes, head: bytes) -> None:
        account, stream = self._account, self._continuation
        assert account is not None
        self._continuation = self._call = None  # the piece has passed through it already
        if head or piece:
            self._send_to_client(piece, False, head)
        self._continuation = stream
        self._shared.backends.on_fault(self, account.decision.server, Fault.BROKEN, time.monotonic())
        self._continue_or_cut("it ended its answer before the last event")

    # -- continuing a stream at another server: `_continuation` holds what the client has received

    def _may_continue(self, response: ResponseHead) -> bool:
        is_readable = not response.headers.first.get(b"content-encoding") and (response.chunked or not response.framed)
        return (
            self._shared.settings.retries.continue_streams
            and response.status == 200
            and is_readable
            and self.incoming.path in PROMPT_PATHS
            and self.incoming.path not in API_PATHS
        )

    def _continue_or_cut(self, why: str) -> None:
        if not self._try_to_continue(why):
            self._drop_call()
            self._log.outcome = "broken"
            self._shared.backends.on_end(self, time.monotonic())
            self._cut_response("the server went away in the middle of its answer")

    def _try_to_continue(self, why: str) -> bool:
        """Return True if another server sends the remainder, or nothing remains."""
        account, stream = self._account, self._continuation
        assert account is not None
        self._log.why = f"{account.decision.server}: {why}"
        remainder = None if stream is None or self._has_no_retry_left else stream.prepare_rest()
        if remainder is None:
            return False
        if not remainder.body:
            self._drop_call()
            self._continuation = None
            self._send_to_client(remainder.ending, True)
            return True
        now_s = time.monotonic()
        self._tried_servers.add(account.decision.server)
        try:
            placement = self._place_continuation(account.placement, remainder, now_s)
        except NoServer as error:
            log.debug("no server for the rest of a stream: %s", error)
            return False
        self._drop_call()
        account.close(now_s)
        self._send_continuation(placement, remainder, now_s)
        return True

    def _on_error_event(self, stream: StreamContinuation, piece: bytes, at_end: bool, head: bytes) -> None:
        """Pass on what preceded an error event, then the remainder, or the error."""
        account, failure, withheld = self._account, stream.failure, stream.withheld
        assert account is not None
        self._continuation = None
        if head or piece:
            self._send_to_client(piece, False, head)
        self._continuation = stream
        self._shared.backends.on_fault(self, account.decision.server, Fault.ERROR, time.monotonic())
        if not self._try_to_continue(failure):
            self._continuation = None
            self._send_to_client(withheld, at_end)

    def _place_continuation(self, before: ScheduledRequest, continuation: Rest, now_s: float) -> ScheduledRequest:
        """Place the continuation of a stream, or raise ``NoServer``."""
        able = self._shared.backends.able(self._request, self._tried_servers, 0, self._get_avoided_servers(now_s))
        return self._scheduler.place_again(before, now_s, self._get_servers_for_continuation(able, continuation))

    def _get_servers_for_continuation(self, able: Collection[str] | None, continuation: Rest) -> Collection[str] | None:
        """Return servers that can continue the stream; a chat needs certain engines."""
        if not continuation.by_chat:
            return able
        known = self._shared.backends.known
        names = known if able is None else able
        return [
            name for name in names if any(model.get("owned_by") in ENGINES for model in known[name].models.values())
        ]

    def _send_continuation(self, placement: ScheduledRequest, continuation: Rest, now_s: float) -> None:
        incoming, before, shared = self.incoming, self._account, self._shared
        assert before is not None
        self._is_continued = True
        self._log.retries += 1
        shared.metrics.of(before.decision.server).retries += 1
        account = self._account = RequestAccount(self._scheduler, placement, now_s)
        shared.metrics.decided(account.decision)
        server, pool = account.decision.server, shared.pools[account.decision.server]
        incoming.connection.deadline.set(shared.settings.timeouts.first_byte_s, self._idle_timeout)
        estimate_s = account.decision.estimated_ttft_s or 0.0
        shared.backends.policy.on_sent(self, server, now_s, estimate_s, FIRST_TOKEN)
        head = request_head(incoming, pool, len(continuation.body), shared.via, self._left_out_headers)
        self._call = pool.ask(self, head, continuation.body, True, self._sends)

    def _on_continuation_begins(self, head: ResponseHead) -> None:
        """Check the head of a stream's new server; the client has a head already."""
        account, first = self._account, head.headers.first
        assert account is not None
        is_stream = first.get(b"content-type", b"").startswith(_EVENT_STREAM)
        if head.status != 200 or not is_stream or first.get(b"content-encoding"):
            try:
                if (fault := fault_of(head.status, b"retry-after" in first)) is not None:
                    self._shared.backends.on_fault(self, account.decision.server, fault, time.monotonic())
                self._continue_or_cut(f"it answered {head.status} to the request for the rest")
            except Exception:
                self._on_exception()
            return
        now_s = time.monotonic()
        self._shared.backends.on_answer(self, account.decision.server, now_s, True, is_whole=False)
        self._shared.deferred.run(partial(self._on_first_byte, account, now_s))

    def _cut_response(self, why: str) -> None:
        """End an incomplete response so that it looks incomplete. Between events a stream gets an error event."""
        connection, reader, response = self.incoming.connection, self._usage_reader, self._response_head
        assert reader is not None and response is not None
        if reader.streams and reader.between_events and (event := self._error_event(502, why)):
            connection.write(b"%x\r\n%b\r\n" % (len(event), event) if response.chunked else event)
        self._end_exchange()
        connection.cut(response.framed)

    def _error_event(self, status: int, why: str) -> bytes:
        if self._translated is not None:
            return self._translated.error_event(status, why)
        return event_of_error(self.incoming.path, status, why) or error_event(status, why)

    # -- timeouts

    def _first_byte_timeout(self) -> None:
        # The server may still be computing: another attempt would double the load.
        first_byte_s = self._shared.settings.timeouts.first_byte_s
        account = self._account
        assert account is not None
        self._log.why = f"{account.decision.server}: no first byte in {first_byte_s:g} s"
        self._drop_call()
        account.close(time.monotonic())
        self._answer_error(ApiError(504, f"no answer from server {self._log.why}"))

    def _idle_timeout(self) -> None:
        idle_s = self._shared.settings.timeouts.idle_s
        self._log.outcome, self._log.why = "timeout", f"the server sent nothing for {idle_s:g} s"
        self._drop_call()
        self._cut_response(self._log.why)

    def _client_timeout(self) -> None:
        self._end_without_response("client-gone", f"it read nothing for {self._shared.settings.timeouts.client_s:g} s")
        self.incoming.connection.abort()

    # -- from the client

    def client_gone(self) -> None:
        self._end_without_response("client-gone", "it disconnected")

    def client_full(self) -> None:
        if self._call is not None and self._state is STREAMING:  # else the previous response fills the buffer
            self._call.pause()
            self.incoming.connection.deadline.set(self._shared.settings.timeouts.client_s, self._client_timeout)

    def client_ready(self) -> None:
        if self._call is not None and self._state is STREAMING:
            self._call.resume()
            self.incoming.connection.deadline.set(self._shared.settings.timeouts.idle_s, self._idle_timeout)

    def stop(self) -> None:
        self._end_without_response("stopped", "the router stops")
        self.incoming.connection.abort()

    # -- the end

    def _end_without_response(self, outcome: str, why: str) -> None:
        if self._state is QUEUED and self._queue_entry is not None and self._shared.room is not None:
            self._shared.room.leave(self._queue_entry)
        if self._reading is not None:
            self._reading.cancel()
        self._drop_call()
        self._log.outcome, self._log.why = outcome, why
        self._end_exchange()

    def _drop_call(self) -> None:
        """Abort the call, back-off or translation in progress."""
        call, self._call = self._call, None
        if self._backoff_timer is not None:
            self._backoff_timer.cancel()
            self._backoff_timer = None
        translating, self._translating = self._translating, None
        if translating is not None:
            translating.cancel()
        if call is not None:
            call.close()
        if (call is not None or translating is not None) and self._account is not None:
            self._shared.backends.on_dropped(self, self._account.decision.server, time.monotonic())

    def _on_exception(self) -> None:
        """Handle an exception. A begun response is cut: an error page would be read as its body."""
        log.exception("%s %s", self.incoming.method, self.incoming.path)
        self._shared.metrics.faults.labels("request").inc()
        self._drop_call()
        self._log.outcome = "failed"
        has_begun = self._usage_reader is not None
        if not has_begun:
            self._log.status = 500
        self._end_exchange()
        if has_begun:
            self.incoming.connection.cut(self._response_head is not None and self._response_head.framed)
        else:
            send_error(self.incoming, internal_error())

    def _end_exchange(self) -> None:
        if self._state is ENDED:
            return
        if self._state is ASKING and self._account is not None:  # nothing may have been sent, or it was not answered
            self._shared.backends.on_dropped(self, self._account.decision.server, time.monotonic())
        self._enter_state(ENDED)
        self.incoming.listener = None
        self.incoming.connection.deadline.clear()
        self._shared.deferred.run(self._close_exchange)

    def _close_exchange(self) -> None:
        if self._is_in_retry_budget:
            self._shared.retries.on_request_end()
        try:
            self._close_account()
        except Exception:
            self._log.outcome = "failed"
            raise
        finally:
            self._translated = None  # it refers to this object
            if self._kept_text is not None:
                self._kept_text.drop()
            self._on_end(self.incoming, self._log)
            if self._shared.room is not None:
                self._shared.room.poll()

    def _close_account(self) -> None:
        account, response, result, reader = self._account, self._response_head, self._log, self._usage_reader
        if account is None:
            return
        now_s = time.monotonic()
        counts_only = self.incoming.path == COUNT_TOKENS and self._translated is None
        if reader is None or response is None or response.status >= 400 or counts_only:
            account.close(now_s)  # an error or a token count is no evidence about the cache
            return
        usage = result.usage = reader.usage()
        if usage is None and reader.streams:
            result.streamed_tokens = self._request.prompt.tokens + reader.events
        slo, is_slo_met = self._request.slo, None
        if slo is not None and result.outcome == "answered" and result.ttft_s is not None:
            took_s, output_tokens = now_s - result.began_s, None if usage is None else usage.output_tokens
            slo_result = slo_outcome(slo, result.ttft_s, took_s, output_tokens)
            self._shared.metrics.promises.labels(slo_result).inc()
            is_slo_met = slo_result == "kept"
        work = None if usage is None or self._queue_entry is None else self._get_work(usage)
        if work is not None and self._queue_entry is not None and self._shared.room is not None:
            self._shared.room.queue.corrected(self._queue_entry, work)
        # The usage of a continued stream covers the whole answer; this server's part is unknown.
        account.on_request_end(now_s, None if self._is_continued else usage, is_slo_met)

    def _get_work(self, usage: Usage) -> float | None:
        return usage.work


def fault_of_error(error: UpstreamError) -> Fault:
    if error.refused:
        return Fault.REFUSED
    return Fault.RESET if error.connected else Fault.UNCONNECTED


def decision_line(account: RequestAccount) -> bytes:
    return b"%s: %s\r\n" % (_DECISION, json.dumps(account.as_json()).encode())


def send_error(incoming: Incoming, error: ApiError, headers: bytes = b"") -> None:
    if error.retry_after_s is not None and not error.headers.keys() & {"Retry-After", "x-should-retry"}:
        headers += b"Retry-After: %d\r\n" % max(1, error.retry_after_s)
    headers += header_lines(error.headers.items()) + b"Content-Type: application/json\r\n"
    body = body_of_error(incoming.path, error)
    incoming.connection.respond(error.status, headers, body, close=not incoming.is_body_complete)


def internal_error() -> ApiError:
    return ApiError(500, "internal error of the router; see its log")


def outcome_of(status: int) -> str:
    return {429: "limited", 502: "unreachable", 503: "no-server", 504: "timeout"}.get(status, "bad-request")


def request_head(
    incoming: Incoming,
    pool: Pool,
    body_bytes: int,
    via: Via,
    without: frozenset[bytes] = frozenset(),
    target: str = "",
) -> bytes:
    """Return the request line and headers for a server.

    The client's key is left out if the router checks keys or the server has its own.

    Args:
        target: path of a translated request.
    """
    authorization = pool.authorization
    if target and not authorization and incoming.tenant is None:
        authorization = _key_of_messages(incoming.headers)
    without_key = bool(authorization) or incoming.tenant is not None
    headers = headers_for_server(incoming.headers, incoming.remote, without_key, without)
    has_length = body_bytes or incoming.method not in ("GET", "HEAD", "OPTIONS")
    length = b"Content-Length: %d\r\n" % body_bytes if has_length else b""
    line = b"%s %s%s HTTP/1.1\r\nHost: %s\r\n" % (
        incoming.method.encode(),
        pool.path,
        (target or incoming.target).encode(),
        pool.host,
    )
    return b"".join((line, headers, via.lines[incoming.version], authorization, length, b"\r\n"))


def _key_of_messages(headers: Headers) -> bytes:
    key = headers.first.get(b"x-api-key")
    return b"Authorization: Bearer %s\r\n" % key if key and b"authorization" not in headers.first else b""


def headers_for_server(
    headers: Headers, client: str, without_key: bool = False, without: frozenset[bytes] = frozenset()
) -> bytes:
    """Return the headers to forward. ``without_key``: drop the client's API key."""
    left_out = _NOT_TO_SERVERS_WITHOUT_KEY if without_key else _NOT_TO_SERVERS
    if without:
        left_out = left_out | without
    if headers.first.get(b"connection", b"").lower() not in _KEEP_OR_CLOSE:
        left_out = left_out | set(headers.words_of(b"connection"))
    lines = native.header_lines(headers.raw, left_out)
    came_from = headers.all_of(b"x-forwarded-for")
    if client:
        came_from.append(client.encode("ascii", "replace"))
    return b"%sX-Forwarded-For: %s\r\n" % (lines, b", ".join(came_from)) if came_from else lines


def headers_for_client(headers: Headers, without_cors: bool = False) -> bytes:
    left_out = _NOT_TO_CLIENTS_CORS if without_cors else _NOT_TO_CLIENTS
    if headers.first.get(b"connection", b"").lower() not in _KEEP_OR_CLOSE:
        left_out = left_out | set(headers.words_of(b"connection"))
    return native.header_lines(headers.raw, left_out)
