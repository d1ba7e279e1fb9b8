"""One proxied request, from its prompt to the last byte of its response: read, pick, send, retry, stream back.

1. ``begin`` reads the prompt. One that takes long (compressed, or with much new text to tokenize) is read in a thread.
2. ``_start`` picks a server, or queues the request until one has room (``called``, ``turned_away``). A prompt goes to
   the server that the strategy picks, a request without one to the server with the least load.
3. Nothing reaches the client before the first byte of a body: until then a failed attempt is retried on another server.
4. From then on bytes are passed on as they come. A response that ends too early never looks complete.
5. The accounting closes after the client has its response.

``two_steps`` builds on it where prefill and decode are apart.

The exchange is a state machine of callbacks; only a prompt in a thread has a task. The client's connection reports
disconnects and backpressure, the upstream connection reports the response, and one deadline runs at a time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from skymemory import native
from skymemory.conductor.admission.named import weights_of
from skymemory.conductor.picker import NoServer
from skymemory.conductor.request import Decision, Request
from skymemory.conductor.scheduler import Placement, Refusal, Scheduler
from skymemory.router.admission import DECISION_HEADER, Overloaded, slo_outcome
from skymemory.router.api_error import ApiError, error_event
from skymemory.router.api_keys import QuotaLease
from skymemory.router.apis.translation import API_PATHS, COUNT_TOKENS, Translation
from skymemory.router.apis.translation import error_body as body_of_error
from skymemory.router.apis.translation import error_event as event_of_error
from skymemory.router.backends import Backends
from skymemory.router.http.access_control import AccessControl
from skymemory.router.http.connection import Headers, Incoming, connection_line, header_lines, status_line, too_large
from skymemory.router.http.translated import MISSING_STATUSES, MissingApis, TranslatedResponse
from skymemory.router.http.upstream import Call, Pool, Pools, ResponseHead, UpstreamError
from skymemory.router.metrics import ProxyMetrics
from skymemory.router.prompts.reader import (
    BYTES_PER_TOKEN,
    CHAT_COMPLETIONS,
    PROMPT_PATHS,
    PromptReader,
    without_prompt,
)
from skymemory.router.prompts.tokenizing import TooMuchNewText
from skymemory.router.queue import Entry
from skymemory.router.request_account import DeferredWork, RequestAccount, Usage, UsageReader
from skymemory.router.settings import Settings
from skymemory.router.waiting_room import WaitingRoom

log = logging.getLogger("skymemory.router")

_DECISION = DECISION_HEADER.encode()

# Headers that concern one connection only (RFC 9110, section 7.6.1) are not passed on.
_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding"
    b" upgrade".split()
)
# A body is read whole and decompressed before it is sent: its length is set again, and "100 Continue" is not needed.
_OF_BODY = frozenset(b"host content-length content-encoding expect x-forwarded-for http2-settings".split())
_NOT_TO_SERVERS = _HOP_BY_HOP | _OF_BODY | {_DECISION}
_NOT_TO_SERVERS_KEYED = _NOT_TO_SERVERS | {b"authorization", b"x-api-key"}
_READ_HERE = frozenset((b"accept-encoding", b"anthropic-version", b"anthropic-beta"))
"""Not sent with what is translated: its answer is read here."""
_NOT_TO_CLIENTS = _HOP_BY_HOP | {_DECISION}
# Where the router answers CORS, a server's own headers would be a second, contradictory answer.
_CORS = (b"allow-origin", b"allow-credentials", b"allow-methods", b"allow-headers", b"expose-headers", b"max-age")
_NOT_TO_CLIENTS_CORS = _NOT_TO_CLIENTS | {b"access-control-" + name for name in _CORS}
IN_THREAD_BYTES = 32_768
"""With a tokenizer, longer bodies are read in a thread: in the event loop they would delay others by milliseconds."""
MAX_NEW_LETTERS = 1024
"""A body with more letters outside the pieces whose tokens are cached is read in a thread, too."""
_KEEP_OR_CLOSE = (b"", b"keep-alive", b"close")


@dataclass(slots=True, eq=False)
class RequestLog:
    """Result of a request, for metrics and the access log."""

    began_s: float
    outcome: str = ""
    status: int = 0
    decision: Decision | None = None
    prefill: Decision | None = None
    """Of the server that prefilled, where another one answers (``decision``)."""
    ttft_s: float | None = None
    usage: Usage | None = None
    retries: int = 0
    why: str = ""
    bytes_out: int = 0
    lease: QuotaLease | None = None
    """What it holds of its tenant's quota."""


@dataclass(slots=True, eq=False)
class Exchanges:
    """What all exchanges share."""

    settings: Settings
    access: AccessControl
    reader: PromptReader
    scheduler: Scheduler
    least_load: Scheduler
    """For requests without a prompt."""
    backends: Backends
    pools: Pools
    metrics: ProxyMetrics
    deferred: DeferredWork
    alone: Scheduler | None = None
    """For prompts that one server serves alone, where prefill and decode are apart (``two_steps``)."""
    room: WaitingRoom | None = None
    """Where requests wait until a server has room; None: they are refused."""
    missing_apis: MissingApis = field(default_factory=MissingApis)
    on_tokens: Callable[[str, int, float], None] | None = None
    """Is called with a server, tokens of an answer and the seconds in which they came, where roles follow the load."""


class Exchange:
    """One request; ``begin`` starts it, and ``done`` is called once at its end."""

    _left_out: frozenset[bytes] = frozenset()
    """Headers of clients that no server gets, beside those of ``headers_for_server``."""

    def __init__(self, of: Exchanges, incoming: Incoming, done: Callable[[Incoming, RequestLog], None]) -> None:
        self.incoming = incoming
        self._of = of
        self._log = RequestLog(incoming.began_s)
        self._done: Callable[[Incoming, RequestLog], None] | None = done
        self._reading: asyncio.Task[None] | None = None
        self._account: RequestAccount | None = None
        self._call: Call | None = None
        self._tried: set[str] = set()
        self._head: ResponseHead | None = None
        self._reader: UsageReader | None = None
        self._waits = False
        """It is in the queue."""
        self._entry: Entry | None = None
        """Its place in the queue, if it was in it."""
        self._streaming = False
        """The client has the response's head: there is no other attempt."""
        self._translated: TranslatedResponse | None = None
        """Of a request that goes to its server as a chat completion."""

    # Its states, by what is set:
    #   _reading      a thread reads its prompt
    #   _waits        it is in the queue
    #   _call         an attempt: nothing has reached the client, so another server may be tried
    #   _streaming    the client has the head: from now on a failure can only cut the response off
    #   not _done     closed
    # Client, timeouts and shutdown can end it in each of them. All ends go through `_finish`, and `_close` runs once.

    # -- reading the prompt

    def begin(self) -> None:
        packed = self.incoming.headers.first.get(b"content-encoding", b"").strip().lower()
        if packed:
            self._read_in_thread(packed)
        elif self._has_tokens:
            self._tokenize()
        else:
            self._start()

    @property
    def _has_tokens(self) -> bool:
        """Its prompt is read with a tokenizer, or translated, and is long."""
        path = self.incoming.path
        if self._of.settings.prompts.tokenizer is None:
            return path in API_PATHS and len(self.incoming.body) >= IN_THREAD_BYTES
        return path in PROMPT_PATHS

    def _read(self, most_new: int | None = None) -> Request:
        incoming = self.incoming
        return self._of.reader.read(incoming.path, incoming.headers, incoming.body, incoming.remote, most_new)

    def _tokenize(self) -> None:
        """Read the prompt here, if most of its tokens are cached, else in a thread."""
        if len(self.incoming.body) < IN_THREAD_BYTES:
            try:
                read = self._read(MAX_NEW_LETTERS)
            except TooMuchNewText:
                pass
            except ApiError as error:
                self._fail(error)
                return
            else:
                self._start(read)
                return
        self._read_in_thread(b"")

    def _read_in_thread(self, packed: bytes) -> None:
        self.incoming.listener = self
        self._reading = asyncio.get_running_loop().create_task(self._read_slowly(packed))

    async def _read_slowly(self, packed: bytes) -> None:
        """Decompress and tokenize in a thread, so that no other request waits for it."""
        read, incoming = None, self.incoming
        try:
            if packed:
                most_bytes = self._of.settings.limits.max_body_bytes
                incoming.connection.replace_body(
                    incoming, await asyncio.to_thread(_unpacked, incoming.body, packed, most_bytes)
                )
            if self._has_tokens:
                read = await asyncio.to_thread(self._read)
        except ApiError as error:
            self._fail(error)
        except Exception:
            self._fault()
        else:
            self._start(read)

    # -- picking and sending

    def _start(self, read: Request | None = None) -> None:
        """Read the prompt, if that is not done, and send the request, or queue it."""
        of, incoming = self._of, self.incoming
        self._scheduler = of.scheduler
        try:
            if incoming.path not in PROMPT_PATHS:  # some load, by the body's size
                read, self._scheduler = without_prompt(max(1, len(incoming.body) // BYTES_PER_TOKEN)), of.least_load
            elif read is None:
                began_s = time.perf_counter()
                read = self._read()
                of.metrics.read_seconds.observe(time.perf_counter() - began_s)
            if incoming.tenant is not None:
                read, self._log.lease = of.access.acquire(incoming, read, time.monotonic())
            self._request = read
            of.deferred.flush()  # may free room, and call requests that wait for it
            incoming.listener = self
            if of.room is None or of.room.is_open_to(read):
                self._try(None)
            else:
                self._wait(of.room)
        except ApiError as error:
            self._fail(error)
        except Exception:
            self._fault()

    def _wait(self, room: WaitingRoom) -> None:
        self._waits = True
        entry = room.wait(self, self._request, len(self.incoming.body))
        if isinstance(entry, Refusal):
            self.turned_away(entry)
        else:
            self._entry = entry

    # -- from the queue

    def called(self, now_s: float) -> None:
        self._waits = False
        self._try(None)

    def turned_away(self, refusal: Refusal) -> None:
        self._waits = False
        self._refuse(Overloaded(refusal))

    def _refuse(self, error: Overloaded) -> None:
        """Answer 429, with the reason and when to retry."""
        result, incoming = self._log, self.incoming
        result.outcome, result.status, result.why = "refused", error.status, error.refusal.reason
        # Tenants with a weight by name are counted each, all others together.
        weights = weights_of("weights", self._of.settings.admission.options.get("weights", {}))
        tenant = self._request.tenant
        label = tenant if tenant in weights else "other" if tenant else "unknown"
        self._of.metrics.refusals.labels(error.refusal.kind, label).inc()
        headers = b""
        if incoming.headers.first.get(_DECISION):
            headers = b"%s: %s\r\n" % (_DECISION, error.as_header().encode())
        self._finish()
        send_error(incoming, error, headers)

    # -- attempts

    def _try(self, before: Placement | None) -> None:
        """Place and send it, and answer with an error where that is not possible."""
        try:
            self._send(self._place(before))
        except Overloaded as error:
            self._refuse(error)
        except NoServer as error:
            self._fail(ApiError(503, str(error), retry_after_s=math.ceil(self._of.settings.health.every_s)))
        except ApiError as error:
            self._fail(error)
        except Exception:
            self._fault()

    def _place(self, before: Placement | None) -> Placement:
        """``before``: the last attempt's placement. An admitted request is not refused later."""
        of, request = self._of, self._request
        most = of.settings.limits.max_waiting
        try:
            placed = self._pick(before, time.monotonic())
        except NoServer as error:
            if self._tried:
                raise ApiError(502, f"no answer from server {self._log.why}, and no other takes requests") from error
            if most and of.backends.full(request, most):
                message = f"every server has {most} requests waiting; try again soon"
                raise ApiError(429, message, retry_after_s=1) from error
            raise
        if isinstance(placed, Refusal):
            raise Overloaded(placed)
        self._log.decision = placed.prefill
        of.metrics.decided(placed.prefill)
        return placed

    def _pick(self, before: Placement | None, now_s: float) -> Placement | Refusal:
        """Choose among the servers that serve it and were not tried.

        Raises:
            NoServer: none takes requests.
        """
        able = self._of.backends.able(self._request, self._tried, self._of.settings.limits.max_waiting)
        scheduler = self._scheduler
        if before is None:
            return scheduler.place(self._request, now_s, able)
        return scheduler.place_again(before, now_s, able)

    def _send(self, placement: Placement) -> None:
        incoming = self.incoming
        account = self._account = RequestAccount(self._scheduler, placement, time.monotonic())
        server = account.decision.server
        pool = self._of.pools[server]
        incoming.connection.deadline.set(self._of.settings.timeouts.first_byte_s, self._first_byte_timeout)
        self._head = self._translated = None
        if incoming.path in API_PATHS and self._of.missing_apis.is_missing(server, incoming.path, time.monotonic()):
            self._send_translated(server)
            return
        head = request_head(incoming, pool, len(incoming.body), self._left_out)
        self._call = pool.ask(self, head, incoming.body, incoming.method != "HEAD")

    def _send_translated(self, server: str) -> None:
        """Send it as a chat completion.

        Raises:
            ApiError: 400, it asks for what a chat completion cannot do.
        """
        incoming, pool = self.incoming, self._of.pools[server]
        translation = Translation(incoming.path, incoming.body)
        head = request_head(incoming, pool, len(translation.body), self._left_out | _READ_HERE, CHAT_COMPLETIONS)
        receiver = self._translated = TranslatedResponse(self, translation)
        self._call = receiver.call = pool.ask(receiver, head, translation.body)

    def _sends_translated_instead(self, head: ResponseHead) -> bool:
        """Whether the server has not the API that was asked, and is asked for a chat completion instead."""
        incoming, account = self.incoming, self._account
        if account is None:
            return False
        if self._translated is not None:
            if head.status not in MISSING_STATUSES:
                self._of.missing_apis.learn(account.decision.server, incoming.path, time.monotonic())
            return False
        if head.status not in MISSING_STATUSES:
            return False
        call, self._call = self._call, None  # the same attempt: nothing was executed
        if call is not None:
            call.close()
        try:
            self._send_translated(account.decision.server)
        except ApiError as error:
            self._fail(error)
        return True

    @property
    def _is_last(self) -> bool:
        return self._log.retries >= self._of.settings.retries.most

    def _retry(self, why: str, *, elsewhere: bool = True, status: int = 502) -> None:
        """The attempt failed before its first byte: try another server, or answer with an error."""
        account, result = self._account, self._log
        assert account is not None
        server = account.decision.server
        result.why = f"{server}: {why}"
        self._drop_call()
        account.close(time.monotonic())
        if not elsewhere or self._is_last:
            self._fail(ApiError(status, f"no answer from server {result.why}"))
            return
        result.retries += 1
        self._of.metrics.of(server).retries += 1
        self._tried.add(server)
        self._of.deferred.flush()
        self._try(account.placement)

    def _fail(self, error: ApiError) -> None:
        """Answer with an error: no byte of a response was passed on."""
        result = self._log
        result.outcome, result.status, result.why = outcome_of(error.status), error.status, result.why or error.message
        self._finish()
        send_error(self.incoming, error)

    # -- from the server

    def response_begins(self, head: ResponseHead) -> None:
        try:
            if self.incoming.path in API_PATHS and self._sends_translated_instead(head):
                return
        except Exception:
            self._fault()
            return
        if head.status not in self._of.settings.retries.statuses or self._is_last:
            self._head = head
            return
        try:
            self._retry(f"it answered {head.status}")
        except Exception:
            self._fault()

    def response_data(self, piece: bytes, ended: bool) -> None:
        try:
            if self._streaming:
                self._pass_on(piece, ended)
            else:
                self._begin(piece, ended)
        except Exception:
            self._fault()

    def response_failed(self, error: UpstreamError) -> None:
        try:
            self._lost(error)
        except Exception:
            self._fault()

    def _lost(self, error: UpstreamError) -> None:
        account = self._account
        assert account is not None
        self._call = None
        backends, server, result = self._of.backends, account.decision.server, self._log
        if self._streaming:
            result.outcome, result.why = "broken", str(error)
            self._cut("the server went away in the middle of its answer")
            backends.failed(server, result.why, time.monotonic())
            return
        backends.failed(server, str(error), time.monotonic(), gone=error.refused)
        self._retry(str(error))

    # -- streaming

    def _begin(self, piece: bytes, ended: bool) -> None:
        """Write the response's head with the first piece of its body (or its end): the client now has this response."""
        response, account, result, incoming = self._head, self._account, self._log, self.incoming
        assert response is not None and account is not None
        self._of.backends.answered(account.decision.server)
        result.status = response.status
        headers, first = response.headers, response.headers.first
        self._reader = reader = UsageReader(first.get(b"content-type", b""), first.get(b"content-encoding", b""))
        # An error says nothing of what is cached: its account closes as failed.
        if response.status < 400:
            now_s = time.monotonic()
            result.ttft_s = now_s - result.began_s
            if not ended and (self._request.streams or reader.streams):
                self._of.deferred.run(partial(self._succeeded, account, now_s))
        self._streaming = True
        connection = incoming.connection
        if incoming.method == "HEAD":
            response.chunked = False  # there is no body, and no end of one
        if response.chunked and incoming.version == "1.0":
            response.chunked = response.framed = False  # HTTP/1.0 has no chunks: the connection's end ends the body
        keep = connection.keeps(response.framed)
        head = [status_line(response.status, response.reason), headers_for_client(headers, incoming.has_cors)]
        if response.chunked:
            head.append(b"Transfer-Encoding: chunked\r\n")
        if incoming.headers.first.get(_DECISION):
            head.append(decision_line(account))
        head += (incoming.response_headers, connection_line(incoming, keep), b"\r\n")
        self._pass_on(piece, ended, b"".join(head))

    def _succeeded(self, account: RequestAccount, now_s: float) -> None:
        account.first_byte(now_s)
        if self._of.room is not None:
            self._of.room.look()

    def _pass_on(self, piece: bytes, ended: bool, head: bytes = b"") -> None:
        response, result, connection, reader = self._head, self._log, self.incoming.connection, self._reader
        assert response is not None and reader is not None
        result.bytes_out += len(piece)
        if response.chunked:
            framed = b"%x\r\n%b\r\n" % (len(piece), piece) if piece else b""
            connection.write(head + framed + (b"0\r\n\r\n" if ended else b""))
        elif head or piece:
            connection.write(head + piece)
        reader.add(piece)
        if ended:
            status = result.status
            result.outcome = "answered" if status < 400 else "client-error" if status < 500 else "server-error"
            self._call = None
            self._finish()
            connection.end(connection.keeps(response.framed))
        elif connection.full:
            self.client_full()
        else:
            connection.deadline.set(self._of.settings.timeouts.idle_s, self._idle_timeout)

    def _cut(self, why: str) -> None:
        """End an incomplete response so that no client takes it for complete: without the mark of a proper end, and in
        an event stream with an error event, if the last event came whole.
        """
        connection, reader, response = self.incoming.connection, self._reader, self._head
        assert reader is not None and response is not None
        if reader.streams and reader.between_events and (event := self._error_event(502, why)):
            connection.write(b"%x\r\n%b\r\n" % (len(event), event) if response.chunked else event)
        self._finish()
        connection.cut()

    def _error_event(self, status: int, why: str) -> bytes:
        if self._translated is not None:
            return self._translated.error_event(status, why)
        return event_of_error(self.incoming.path, status, why) or error_event(status, why)

    # -- timeouts

    def _first_byte_timeout(self) -> None:
        # The server may well be computing: another attempt would only double the load.
        first_byte_s = self._of.settings.timeouts.first_byte_s
        self._retry(f"no first byte in {first_byte_s:g} s", elsewhere=False, status=504)

    def _idle_timeout(self) -> None:
        idle_s = self._of.settings.timeouts.idle_s
        self._log.outcome, self._log.why = "timeout", f"the server sent nothing for {idle_s:g} s"
        self._drop_call()
        self._cut(self._log.why)

    def _client_timeout(self) -> None:
        self._end_without_response("client-gone", f"it read nothing for {self._of.settings.timeouts.client_s:g} s")
        self.incoming.connection.abort()

    # -- from the client

    def client_gone(self) -> None:
        self._end_without_response("client-gone", "it disconnected")

    def client_full(self) -> None:
        if self._call is not None and self._streaming:  # else the response before this one fills its buffer
            self._call.pause()
            self.incoming.connection.deadline.set(self._of.settings.timeouts.client_s, self._client_timeout)

    def client_ready(self) -> None:
        if self._call is not None and self._streaming:
            self._call.resume()
            self.incoming.connection.deadline.set(self._of.settings.timeouts.idle_s, self._idle_timeout)

    def stop(self) -> None:
        """The router stops before the request has ended."""
        self._end_without_response("stopped", "the router stops")
        self.incoming.connection.abort()

    # -- the end

    def _end_without_response(self, outcome: str, why: str) -> None:
        if self._waits and self._entry is not None and self._of.room is not None:
            self._waits = False
            self._of.room.leave(self._entry)
        if self._reading is not None:
            self._reading.cancel()
        self._drop_call()
        self._log.outcome, self._log.why = outcome, why
        self._finish()

    def _drop_call(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.close()

    def _fault(self) -> None:
        """An exception of the router's own. A response that has begun is cut: an error page behind it would be read as
        its rest.
        """
        log.exception("%s %s", self.incoming.method, self.incoming.path)
        self._of.metrics.faults.labels("request").inc()
        self._drop_call()
        self._log.outcome = "failed"
        began = self._streaming
        if not began:
            self._log.status = 500
        self._finish()
        if began:
            self.incoming.connection.cut()
        else:
            send_error(self.incoming, internal_error())

    def _finish(self) -> None:
        """Detach from the client, and close the account once the response is out."""
        if self._done is None:
            return
        self.incoming.listener = None
        self.incoming.connection.deadline.clear()
        self._of.deferred.run(self._close)

    def _close(self) -> None:
        done, self._done = self._done, None
        if done is None:
            return
        try:
            self._close_account()
        except Exception:
            self._log.outcome = "failed"
            raise
        finally:
            done(self.incoming, self._log)
            if self._of.room is not None:
                self._of.room.look()

    def _close_account(self) -> None:
        account, response, result, reader = self._account, self._head, self._log, self._reader
        if account is None:
            return
        now_s = time.monotonic()
        counts_only = self.incoming.path == COUNT_TOKENS and self._translated is None
        if reader is None or response is None or response.status >= 400 or counts_only:
            account.close(now_s)  # an error, or a count of tokens, says nothing of what is cached
            return
        usage = result.usage = reader.usage()
        slo, met = self._request.slo, None
        if slo is not None and result.outcome == "answered" and result.ttft_s is not None:
            took_s, output_tokens = now_s - result.began_s, None if usage is None else usage.output_tokens
            kept = slo_outcome(slo, result.ttft_s, took_s, output_tokens)
            self._of.metrics.promises.labels(kept).inc()
            met = kept == "kept"
        work = None if usage is None or self._entry is None else self._work_of(usage)
        if work is not None and self._entry is not None and self._of.room is not None:
            self._of.room.queue.corrected(self._entry, work)
        account.ended(now_s, usage, met)

    def _work_of(self, usage: Usage) -> float | None:
        """Tokens that were computed for it; None: unknown."""
        return usage.work


def decision_line(account: RequestAccount) -> bytes:
    """The header that explains the routing decision to a client that asked for it."""
    return b"%s: %s\r\n" % (_DECISION, json.dumps(account.as_json()).encode())


def send_error(incoming: Incoming, error: ApiError, headers: bytes = b"") -> None:
    """Answer with an error in the format of the path's API."""
    if error.retry_after_s is not None and not error.headers.keys() & {"Retry-After", "x-should-retry"}:
        headers += b"Retry-After: %d\r\n" % max(1, error.retry_after_s)
    headers += header_lines(error.headers.items()) + b"Content-Type: application/json\r\n"
    body = body_of_error(incoming.path, error)
    incoming.connection.respond(error.status, headers, body, close=not incoming.has_come)


def internal_error() -> ApiError:
    return ApiError(500, "internal error of the router; see its log")


def _unpacked(body: bytes, packed: bytes, most_bytes: int) -> bytes:
    """
    Raises:
        ApiError: an unsupported encoding (415), invalid data (400), or too large when decompressed (413).
    """
    if packed == b"identity":
        return body
    if packed not in (b"gzip", b"x-gzip", b"deflate"):
        raise ApiError(
            415, f"Content-Encoding {packed[:40].decode('latin-1')!r} is not supported; gzip and deflate are"
        )
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 32)  # detects gzip or zlib
    try:
        data = unpacker.decompress(body, most_bytes + 1)
    except zlib.error as error:
        raise ApiError(400, f"the body cannot be decompressed: {error}") from error
    if len(data) > most_bytes:
        raise too_large(most_bytes)
    if not unpacker.eof:
        raise ApiError(400, "the body cannot be decompressed: it ends too early")
    return data


def outcome_of(status: int) -> str:
    """Of a request that the router refused with this status."""
    return {429: "limited", 502: "unreachable", 503: "no-server", 504: "timeout"}.get(status, "bad-request")


def request_head(
    incoming: Incoming, pool: Pool, body_bytes: int, without: frozenset[bytes] = frozenset(), target: str = ""
) -> bytes:
    """Request line and headers for one server, for a body of this length; ``without`` these of the client's. Where the
    server has a key of its own, or the client's is for the router, the client's key is left out.

    ``target``: where a translated request goes.
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
    return b"".join((line, headers, authorization, length, b"\r\n"))


def _key_of_messages(headers: Headers) -> bytes:
    """A key as Anthropic's clients send it, as a header line that engines of chat completions read."""
    key = headers.first.get(b"x-api-key")
    return b"Authorization: Bearer %s\r\n" % key if key and b"authorization" not in headers.first else b""


def headers_for_server(
    headers: Headers, client: str, without_key: bool = False, without: frozenset[bytes] = frozenset()
) -> bytes:
    """A request's header lines for its server, with the client's address; ``without_key``: no ``Authorization``;
    ``without``: nor these.
    """
    left_out = _NOT_TO_SERVERS_KEYED if without_key else _NOT_TO_SERVERS
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
    """A response's header lines for its client; ``without_cors``: the router has set its own CORS headers."""
    left_out = _NOT_TO_CLIENTS_CORS if without_cors else _NOT_TO_CLIENTS
    if headers.first.get(b"connection", b"").lower() not in _KEEP_OR_CLOSE:
        left_out = left_out | set(headers.words_of(b"connection"))
    return native.header_lines(headers.raw, left_out)
