"""One request from its prompt to the last byte of its answer: choose, send, try again elsewhere, pass on.

Nothing reaches the client before the first byte of a body has come from a server, so until then another can be tried.
From then on bytes are passed as they come, and a stream that ends too early is never made to look complete.

It is a machine of calls, without a task: the client's connection tells it that the client has gone, is full or ready;
the server's connection tells it of the answer; one deadline runs at a time.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from skymemory.conductor.admission.base import Refusal
from skymemory.conductor.admission.named import weights_of
from skymemory.conductor.picker import NoServer
from skymemory.conductor.request import Decision, Request
from skymemory.conductor.scheduler import Placement, Scheduler
from skymemory.router.admission import TurnedAway, kept
from skymemory.router.api_keys import Entered
from skymemory.router.backends import Backends
from skymemory.router.bad_request import BadRequest, error_event
from skymemory.router.deferred import Afterwards
from skymemory.router.http.connection import Incoming, connection_line, header_lines, status_line
from skymemory.router.http.headers import DECISION_HEADER, headers_for_client, headers_for_server
from skymemory.router.http.metrics import ProxyMetrics
from skymemory.router.http.upstream import AnswerHead, Call, Pool, Pools, UpstreamError
from skymemory.router.http.usage import Usage, UsageReader
from skymemory.router.queue import Entry
from skymemory.router.request_account import RequestAccount
from skymemory.router.settings import Settings
from skymemory.router.waiting_room import WaitingRoom

log = logging.getLogger("skymemory.router")

_DECISION = DECISION_HEADER.encode()


@dataclass(slots=True, eq=False)
class RequestLog:
    """What is known of a request when it has ended, for metrics and the log."""

    began_s: float
    outcome: str = ""
    status: int = 0
    decision: Decision | None = None
    ttft_s: float | None = None
    usage: Usage | None = None
    retries: int = 0
    why: str = ""
    bytes_out: int = 0
    entered: Entered | None = None
    """What it took of its tenant's quota."""


class Exchanges:
    """What all exchanges share."""

    def __init__(
        self,
        backends: Backends,
        pools: Pools,
        metrics: ProxyMetrics,
        settings: Settings,
        after: Afterwards,
    ) -> None:
        self.settings = settings
        self.backends = backends
        self.pools = pools
        self.metrics = metrics
        self.after = after
        self.room: WaitingRoom | None = None
        """Where requests wait until a server has room; None: they are refused."""


class Exchange:
    """Made for one request; ``start`` begins it, and ``done`` is called once when all is over."""

    __slots__ = (
        "_account",
        "_answer",
        "_call",
        "_done",
        "_entry",
        "_log",
        "_of",
        "_passing",
        "_reader",
        "_request",
        "_scheduler",
        "_tried",
        "_waits",
        "incoming",
    )

    def __init__(
        self, of: Exchanges, incoming: Incoming, log: RequestLog, done: Callable[[Incoming, RequestLog], None]
    ) -> None:
        self.incoming = incoming
        self._of = of
        self._log = log
        self._done: Callable[[Incoming, RequestLog], None] | None = done
        self._account: RequestAccount | None = None
        self._call: Call | None = None
        self._tried: set[str] = set()
        self._answer: AnswerHead | None = None
        self._reader: UsageReader | None = None
        self._waits = False
        """In the queue, for a server with room."""
        self._entry: Entry | None = None
        """Its place there, if it was in it."""
        self._passing = False
        """The client has got the answer's head, or more."""

    def start(self, request: Request, scheduler: Scheduler) -> None:
        """
        Raises:
            NoServer: nobody can take it.
            TurnedAway: the rule of admission does not let it in (429).
            BadRequest: all who could have too much waiting (429).
        """
        self._request = request
        self._scheduler = scheduler
        self._of.after.settle()  # before the look for room: it may call others who wait for it
        room = self._of.room
        if room is None or room.is_open_to(request):
            self._send(self._place(None))
            self.incoming.listener = self
            return
        self._waits = True
        self.incoming.listener = self
        waits = room.wait(self, request, len(self.incoming.body))
        if isinstance(waits, Refusal):
            self._waits = False
            self.incoming.listener = None
            raise TurnedAway(request, waits)
        self._entry = waits

    # -- from the queue

    def called(self, now_s: float) -> None:
        self._waits = False
        try:
            self._send(self._place(None))
        except TurnedAway as error:
            self.turn_away(error)
        except NoServer as error:
            self._fail(BadRequest(503, str(error)))
        except BadRequest as error:
            self._fail(error)
        except Exception:
            self._fault()

    def turned_away(self, refusal: Refusal) -> None:
        self._waits = False
        self.turn_away(TurnedAway(self._request, refusal))

    def _count(self, refused: TurnedAway) -> None:
        """By reason and by class of tenant: those with a weight by name, all others together."""
        weights = weights_of("weights", self._of.settings.admission.options.get("weights", {}))
        tenant = refused.request.tenant
        known = tenant if tenant in weights else "other" if tenant else "unknown"
        self._of.metrics.refusals.labels(refused.refusal.kind, known).inc()

    def turn_away(self, error: TurnedAway) -> None:
        """It is not served, and told why and when to come again."""
        told, incoming = self._log, self.incoming
        told.outcome, told.status, told.why = "refused", error.status, error.refusal.reason
        self._count(error)
        headers = b""
        if incoming.headers.first.get(_DECISION):
            headers = b"%s: %s\r\n" % (_DECISION, error.as_header().encode())
        self._over()
        refuse(incoming, error, error.retry_after_s, headers)

    # -- choosing, sending

    def _place(self, before: Placement | None) -> Placement:
        """``before``: where it was tried last; who was let in is not turned away later."""
        of, tried, request = self._of, self._tried, self._request
        now_s = time.monotonic()
        most = of.settings.limits.max_waiting
        able = of.backends.able(request, tried, most)
        scheduler = self._scheduler
        try:
            placed = (
                scheduler.place(request, now_s, able) if before is None else scheduler.place_again(before, now_s, able)
            )
        except NoServer as error:
            if tried:
                raise BadRequest(502, f"no answer from server {self._log.why}, and no other takes requests") from error
            if most and of.backends.full(request, most):
                raise BadRequest(429, f"every server has {most} requests waiting; try again soon") from error
            raise
        if isinstance(placed, Refusal):
            raise TurnedAway(request, placed)
        self._log.decision = placed.prefill
        of.metrics.decided(placed.prefill)
        return placed

    def _send(self, placement: Placement) -> None:
        incoming = self.incoming
        account = self._account = RequestAccount(self._scheduler, placement, time.monotonic())
        pool = self._of.pools[account.decision.server]
        incoming.connection.deadline.set(self._of.settings.timeouts.first_byte_s, self._no_first_byte)
        self._answer = None
        head = _head(incoming, pool)
        self._call = pool.ask(self, head, incoming.body, incoming.method != "HEAD")

    @property
    def _is_last(self) -> bool:
        return self._log.retries >= self._of.settings.retries.most

    def _again(self, why: str, *, elsewhere: bool = True, status: int = 502) -> None:
        """The attempt failed before its first byte: try another server, or say so."""
        account, told = self._account, self._log
        assert account is not None
        server = account.decision.server
        told.why = f"{server}: {why}"
        self._drop_call()
        account.close(time.monotonic())
        if not elsewhere or self._is_last:
            self._fail(BadRequest(status, f"no answer from server {told.why}"))
            return
        told.retries += 1
        self._of.metrics.of(server).retries += 1
        self._tried.add(server)
        self._of.after.settle()
        try:
            self._send(self._place(account.placement))
        except NoServer as error:
            self._fail(BadRequest(503, str(error)))
        except BadRequest as error:
            self._fail(error)

    def _fail(self, error: BadRequest) -> None:
        """Nothing was passed on: the client is told why."""
        told = self._log
        told.outcome, told.status = outcome_of_refusal(error.status), error.status
        self._over()
        retry_after_s = 1 if error.status in (429, 503) else None
        refuse(self.incoming, error, retry_after_s)

    # -- from the server

    def answer_begins(self, head: AnswerHead) -> None:
        if head.status not in self._of.settings.retries.statuses or self._is_last:
            self._answer = head
            return
        try:
            self._again(f"it answered {head.status}")
        except Exception:
            self._fault()

    def answer_comes(self, piece: bytes, ended: bool) -> None:
        try:
            if self._passing:
                self._pass(piece, ended)
            else:
                self._begin(piece, ended)
        except Exception:
            self._fault()

    def answer_lost(self, error: UpstreamError) -> None:
        try:
            self._lost(error)
        except Exception:
            self._fault()

    def _lost(self, error: UpstreamError) -> None:
        account = self._account
        assert account is not None
        self._call = None
        backends, server, told = self._of.backends, account.decision.server, self._log
        if self._passing:
            told.outcome, told.why = "broken", str(error)
            self._cut("the server went away in the middle of its answer")
            backends.failed(server, told.why, time.monotonic())
            return
        backends.failed(server, str(error), time.monotonic(), gone=error.refused)
        self._again(str(error))

    # -- passing on

    def _begin(self, piece: bytes, ended: bool) -> None:
        """The first piece of the body, or its end where there is none: from here on the client has this answer."""
        answer, account, told, incoming = self._answer, self._account, self._log, self.incoming
        assert answer is not None and account is not None
        self._of.backends.answered(account.decision.server)
        told.status = answer.status
        headers, first = answer.headers, answer.headers.first
        self._reader = reader = UsageReader(first.get(b"content-type", b""), first.get(b"content-encoding", b""))
        # An error says nothing of what is cached: the attempt closes as one that failed.
        if answer.status < 400:
            now_s = time.monotonic()
            told.ttft_s = now_s - told.began_s
            if not ended and (self._request.streams or reader.streams):
                self._of.after.do(partial(self._succeeded, account, now_s))
        self._passing = True
        connection = incoming.connection
        if incoming.method == "HEAD":
            answer.chunked = False  # there is no body, and no end of one
        if answer.chunked and incoming.version == "1.0":
            answer.chunked = answer.framed = False  # it knows no chunks: the end of the connection is the end
        keep = connection.keeps(answer.framed)
        head = [status_line(answer.status, answer.reason), headers_for_client(headers, incoming.speaks_cors)]
        if answer.chunked:
            head.append(b"Transfer-Encoding: chunked\r\n")
        if incoming.headers.first.get(_DECISION):
            head.append(b"%s: %s\r\n" % (_DECISION, json.dumps(account.decision.as_json()).encode()))
        head += (incoming.answer_headers, connection_line(incoming, keep), b"\r\n")
        self._pass(piece, ended, b"".join(head))

    def _succeeded(self, account: RequestAccount, now_s: float) -> None:
        account.first_byte(now_s)
        if self._of.room is not None:
            self._of.room.look()

    def _pass(self, piece: bytes, ended: bool, head: bytes = b"") -> None:
        answer, told, connection, reader = self._answer, self._log, self.incoming.connection, self._reader
        assert answer is not None and reader is not None
        told.bytes_out += len(piece)
        if answer.chunked:
            framed = b"%x\r\n%b\r\n" % (len(piece), piece) if piece else b""
            connection.write(head + framed + (b"0\r\n\r\n" if ended else b""))
        elif head or piece:
            connection.write(head + piece)
        reader.add(piece)
        if ended:
            told.outcome = "answered" if told.status < 400 else "client-error" if told.status < 500 else "server-error"
            self._call = None
            self._over()
            connection.end(connection.keeps(answer.framed))
        elif connection.full:
            self.client_full()
        else:
            connection.deadline.set(self._of.settings.timeouts.idle_s, self._silent)

    def _cut(self, why: str) -> None:
        """End an answer that is not complete so that nobody takes it for one: where events stream, with an event that
        says so (if the last one came whole), and then without the mark of a proper end.
        """
        connection, reader, answer = self.incoming.connection, self._reader, self._answer
        assert reader is not None and answer is not None
        if reader.streams and reader.between_events:
            event = error_event(502, why)
            connection.write(b"%x\r\n%b\r\n" % (len(event), event) if answer.chunked else event)
        self._over()
        connection.cut()

    # -- time

    def _no_first_byte(self) -> None:
        # It may well be computing: to ask another would only double the load.
        first_byte_s = self._of.settings.timeouts.first_byte_s
        self._again(f"no first byte in {first_byte_s:g} s", elsewhere=False, status=504)

    def _silent(self) -> None:
        idle_s = self._of.settings.timeouts.idle_s
        self._log.outcome, self._log.why = "timeout", f"nothing came for {idle_s:g} s"
        self._drop_call()
        self._cut(f"the server sent nothing for {idle_s:g} s")

    def _not_taken(self) -> None:
        self._log.outcome = "client-gone"
        self._log.why = f"it took nothing for {self._of.settings.timeouts.client_s:g} s"
        self._drop_call()
        self._over()
        self.incoming.connection.abort()

    # -- from the client

    def client_gone(self) -> None:
        self._leave_queue()
        self._drop_call()
        self._log.outcome, self._log.why = "client-gone", "it hung up"
        self._over()

    def client_full(self) -> None:
        if self._call is not None and self._passing:  # else it is full of the answer before this one
            self._call.pause()
            self.incoming.connection.deadline.set(self._of.settings.timeouts.client_s, self._not_taken)

    def client_ready(self) -> None:
        if self._call is not None and self._passing:
            self._call.resume()
            self.incoming.connection.deadline.set(self._of.settings.timeouts.idle_s, self._silent)

    def stop(self) -> None:
        """The router stops, and it has not ended in time."""
        self._leave_queue()
        self._drop_call()
        self._log.outcome, self._log.why = "stopped", "the router stops"
        self._over()
        self.incoming.connection.abort()

    # -- the end

    def _leave_queue(self) -> None:
        if self._waits and self._entry is not None and self._of.room is not None:
            self._waits = False
            self._of.room.leave(self._entry)

    def _drop_call(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.close()

    def _fault(self) -> None:
        """An exception of ours. An answer behind one that has begun would be taken for its rest, or for the next."""
        log.exception("%s %s", self.incoming.method, self.incoming.path)
        self._drop_call()
        self._log.outcome = "failed"
        began = self._passing
        if not began:
            self._log.status = 500
        self._over()
        if began:
            self.incoming.connection.cut()
        else:
            refuse(self.incoming, BadRequest(500, "the router failed; its log says why"))

    def _over(self) -> None:
        """Once: the account is closed after the client has its answer, which waits for nothing of that."""
        if self._done is None:
            return
        self.incoming.listener = None
        self.incoming.connection.deadline.clear()
        self._of.after.do(self._settle_account)

    def _settle_account(self) -> None:
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
        account, answer, told, reader = self._account, self._answer, self._log, self._reader
        if account is None:
            return
        now_s = time.monotonic()
        if reader is None or answer is None or answer.status >= 400:
            account.close(now_s)  # an error says nothing of what is cached
            return
        prompt_tokens, usage = account.decision.request.prompt.tokens, reader.usage()
        if usage is None:
            account.ended(now_s, met=self._kept(None, now_s))
            return
        told.usage = usage
        known = self._of.backends.known.get(account.decision.server)
        if known is not None:
            known.server.reported_tokens(prompt_tokens, usage.prompt_tokens)
        output_tokens = usage.output_tokens
        if self._entry is not None and self._of.room is not None and output_tokens is not None:
            work = usage.prompt_tokens - (usage.cached_tokens or 0) + output_tokens
            self._of.room.queue.corrected(self._entry, float(work))
        # One that does not stream says at its end what was cached: that is told with its first byte.
        account.ended(now_s, usage.cached_of(prompt_tokens), output_tokens, self._kept(output_tokens, now_s))

    def _kept(self, output_tokens: int | None, now_s: float) -> bool | None:
        """Whether it came as promised; None: nothing was promised, or it did not end as it should."""
        slo, told = self._request.slo, self._log
        if slo is None or told.outcome != "answered" or told.ttft_s is None:
            return None
        became = kept(slo, told.ttft_s, now_s - told.began_s, output_tokens)
        self._of.metrics.promises.labels(became).inc()
        return became == "kept"


def refuse(incoming: Incoming, error: BadRequest, retry_after_s: int | None = None, headers: bytes = b"") -> None:
    """Answer with an error as OpenAI's API tells it."""
    if retry_after_s is not None and not error.headers.keys() & {"Retry-After", "x-should-retry"}:
        headers += b"Retry-After: %d\r\n" % max(1, retry_after_s)
    headers += header_lines(error.headers.items()) + b"Content-Type: application/json\r\n"
    incoming.connection.respond(error.status, headers, error.body(), close=not incoming.has_come)


def outcome_of_refusal(status: int) -> str:
    return {429: "limited", 502: "unreachable", 503: "no-server", 504: "timeout"}.get(status, "bad-request")


def _head(incoming: Incoming, pool: Pool) -> bytes:
    """A request's line and headers, for one server. A client's key for us, or for nobody, is not shown to it."""
    authorization = pool.authorization
    headers = headers_for_server(incoming.headers, incoming.remote, bool(authorization) or incoming.tenant is not None)
    body_bytes = len(incoming.body)
    length = (
        b""
        if not body_bytes and incoming.method in ("GET", "HEAD", "OPTIONS")
        else b"Content-Length: %d\r\n" % body_bytes
    )
    line = b"%s %s%s HTTP/1.1\r\nHost: %s\r\n" % (
        incoming.method.encode(),
        pool.path,
        incoming.target.encode(),
        pool.host,
    )
    return b"".join((line, headers, authorization, length, b"\r\n"))
