"""One request from its prompt to the last byte of its answer: choose, send, try again elsewhere, pass on.

Nothing reaches the client before the first byte of a body has come from a server, so until then another can be tried.
From then on bytes are passed as they come, and a stream that ends too early is never made to look complete.
"""

from __future__ import annotations

import asyncio
import json
import time

import aiohttp
from aiohttp import web

from skymemory.conductor.admission.base import Refusal
from skymemory.conductor.picker import NoServer
from skymemory.conductor.request import Request
from skymemory.conductor.scheduler import Placement, Scheduler
from skymemory.router.bad_request import BadRequest, error_event
from skymemory.router.proxy_admission import Promises, TurnedAway
from skymemory.router.proxy_attempt import Attempt, Told, Unanswered
from skymemory.router.proxy_backends import Backends
from skymemory.router.proxy_headers import DECISION_HEADER, headers_for_client
from skymemory.router.proxy_metrics import ProxyMetrics
from skymemory.router.proxy_usage import UsageReader
from skymemory.router.relayed import Relayed, is_framed
from skymemory.router.settings import Settings
from skymemory.router.upstream import Answer, Pool

AT_ONCE_BYTES = 32_768
"""An answer that has come whole, and is no larger, is written without a watch on the client."""


class Exchanges:
    """Carries requests to servers and answers back."""

    def __init__(
        self, backends: Backends, metrics: ProxyMetrics, settings: Settings, promises: Promises | None = None
    ) -> None:
        self.settings = settings
        self._backends = backends
        self._metrics = metrics
        self._promises = promises

    async def carry(
        self,
        incoming: web.BaseRequest,
        headers: bytes,
        body: bytes,
        request: Request,
        scheduler: Scheduler,
        told: Told,
    ) -> web.StreamResponse:
        """
        Raises:
            NoServer: nobody can take it.
            TurnedAway: the rule of admission does not let it in (429).
            BadRequest: all who could have too much waiting (429), or all who were tried failed (502, 504).
        """
        tried: set[str] = set()
        placement: Placement | None = None
        while True:
            placement = self._place(request, scheduler, placement, tried, told)
            attempt = Attempt(scheduler, placement)
            try:
                answer, first = await self._first_byte(incoming, attempt, headers, body, last=self._is_last(told))
                try:
                    return await self._pass_on(incoming, attempt, answer, first, told)
                finally:
                    attempt.met = self._kept(attempt, told)
                    answer.close()  # a connection whose answer came whole went back to the pool by itself
            except Unanswered as failure:
                server = attempt.decision.server
                told.why = f"{server}: {failure}"
                if not failure.again or self._is_last(told):
                    raise BadRequest(failure.status, f"no answer from server {told.why}") from failure
                told.retries += 1
                self._metrics.retries.labels(server).inc()
                tried.add(server)
            finally:
                attempt.close()

    def _is_last(self, told: Told) -> bool:
        return told.retries >= self.settings.retries.most

    def _place(
        self, request: Request, scheduler: Scheduler, before: Placement | None, tried: set[str], told: Told
    ) -> Placement:
        """``before``: where it was tried last; who was let in is not turned away later."""
        now_s = time.monotonic()
        most = self.settings.limits.max_waiting
        able = self._backends.able(request, tried, most)
        try:
            placed = (
                scheduler.place(request, now_s, able) if before is None else scheduler.place_again(before, now_s, able)
            )
        except NoServer as error:
            if tried:
                raise BadRequest(502, f"no answer from server {told.why}, and no other takes requests") from error
            if most and self._backends.full(request, most):
                raise BadRequest(429, f"every server has {most} requests waiting; try again soon") from error
            raise
        if isinstance(placed, Refusal):
            raise TurnedAway(request, placed)
        told.decision = placed.prefill
        self._metrics.decided(placed.prefill)
        return placed

    def _kept(self, attempt: Attempt, told: Told) -> bool | None:
        """Whether it came as promised; None: nothing was promised, or it did not end as it should."""
        if self._promises is None or not attempt.first_byte or told.outcome != "answered" or told.ttft_s is None:
            return None
        tokens = None if told.usage is None else told.usage.output_tokens
        return self._promises.kept(told.ttft_s, time.monotonic() - told.began_s, tokens)

    async def _first_byte(
        self, incoming: web.BaseRequest, attempt: Attempt, headers: bytes, body: bytes, last: bool
    ) -> tuple[Answer, bytes]:
        """The server's answer and the first piece of its body (empty if the body is)."""
        name = attempt.decision.server
        answer: Answer | None = None
        pool = self._backends.known[name].pool
        try:
            async with asyncio.timeout(self.settings.timeouts.first_byte_s):
                head = _head(incoming, pool, headers, len(body))
                answer = await pool.request(head, body, incoming.method != "HEAD")
                if answer.status in self.settings.retries.statuses and not last:
                    raise Unanswered(f"it answered {answer.status}")
                first = await answer.content.readany()
        except aiohttp.ConnectionTimeoutError as error:
            self._backends.failed(name, str(error))
            raise Unanswered(str(error)) from error
        except TimeoutError as error:
            # It may well be computing: to ask another would only double the load.
            _close(answer)
            first_byte_s = self.settings.timeouts.first_byte_s
            raise Unanswered(f"no first byte in {first_byte_s:g} s", again=False, status=504) from error
        except aiohttp.ClientError as error:
            _close(answer)
            self._backends.failed(name, f"it hung up: {error}")
            raise Unanswered(f"it hung up before the first byte ({type(error).__name__})") from error
        except OSError as error:
            self._backends.failed(name, f"no connection: {error}", gone=isinstance(error, ConnectionRefusedError))
            raise Unanswered(f"no connection: {error.strerror or error}") from error
        except BaseException:
            _close(answer)
            raise
        self._backends.answered(name)
        return answer, first

    async def _pass_on(
        self, incoming: web.BaseRequest, attempt: Attempt, answer: Answer, piece: bytes, told: Told
    ) -> web.StreamResponse:
        # An error says nothing of what is cached: the attempt closes as one that failed.
        computed = answer.status < 400
        if computed:
            told.ttft_s = time.monotonic() - told.began_s
        told.status = answer.status
        framed = is_framed(answer.headers, answer.status)
        relayed = told.relayed = Relayed(answer.status, answer.reason or "", headers_for_client(answer.headers), framed)
        if DECISION_HEADER in incoming.headers:
            relayed.headers[DECISION_HEADER] = json.dumps(attempt.decision.as_json())
        reader = UsageReader(answer.headers.get("Content-Type", ""), answer.headers.get("Content-Encoding", ""))
        told.outcome = "client-gone"  # unless something else comes
        try:
            if not await self._pass_at_once(incoming, relayed, answer.content, piece, reader, told):
                if computed and (attempt.decision.request.streams or reader.streams):
                    attempt.succeeded()
                await self._pass_pieces(incoming, relayed, answer.content, piece, reader, told)
        finally:
            if computed:
                told.usage = attempt.usage = reader.usage()
                if not attempt.first_byte:
                    # Learnt after the client has its answer: it waits for nothing of ours. One that does not stream
                    # says at its end what was cached.
                    attempt.succeeded()
                if told.usage is not None:
                    server = self._backends.known[attempt.decision.server].server
                    server.reported_tokens(attempt.decision.request.prompt.tokens, told.usage.prompt_tokens)
        if told.outcome == "broken":
            self._backends.failed(attempt.decision.server, told.why)
        return relayed

    async def _pass_at_once(
        self,
        incoming: web.BaseRequest,
        relayed: Relayed,
        content: aiohttp.StreamReader,
        piece: bytes,
        reader: UsageReader,
        told: Told,
    ) -> bool:
        """Pass on an answer that has come whole, where that waits for nobody; False where it might."""
        transport = incoming.transport
        if transport is None or not content.at_eof() or len(piece) > AT_ONCE_BYTES or transport.get_write_buffer_size():
            return False
        await relayed.prepare(incoming)
        await relayed.write_eof(piece)
        reader.add(piece)
        told.bytes_out = len(piece)
        told.outcome = _outcome(told.status)
        return True

    async def _pass_pieces(
        self,
        incoming: web.BaseRequest,
        relayed: Relayed,
        content: aiohttp.StreamReader,
        piece: bytes,
        reader: UsageReader,
        told: Told,
    ) -> None:
        timeouts = self.settings.timeouts
        writing = True
        try:
            async with asyncio.timeout(timeouts.client_s) as timer:
                await relayed.prepare(incoming)
                while piece:
                    await relayed.write(piece)
                    told.bytes_out += len(piece)
                    reader.add(piece)
                    writing = False
                    _put_off(timer, timeouts.idle_s)
                    try:
                        piece = await content.readany()
                    except (aiohttp.ClientError, OSError) as error:
                        told.outcome, told.why = "broken", f"it hung up in the middle of its answer: {error}"
                        await self._cut(relayed, reader, "the server went away in the middle of its answer")
                        return
                    writing = True
                    _put_off(timer, timeouts.client_s)
                await relayed.write_eof()
        except TimeoutError:
            if writing:
                told.outcome, told.why = "client-gone", f"it took nothing for {timeouts.client_s:g} s"
                relayed.abort()
                return
            told.outcome, told.why = "timeout", f"nothing came for {timeouts.idle_s:g} s"
            await self._cut(relayed, reader, f"the server sent nothing for {timeouts.idle_s:g} s")
            return
        except ConnectionError:
            told.outcome, told.why = "client-gone", "it hung up"
            return
        told.outcome = _outcome(told.status)

    async def _cut(self, relayed: Relayed, reader: UsageReader, why: str) -> None:
        """End an answer that is not complete so that nobody takes it for one: where events stream, with an event that
        says so (if the last one came whole), and then without the mark of a proper end.
        """
        if reader.streams and reader.between_events:
            await relayed.write(error_event(502, why))
        relayed.cut()


def _outcome(status: int) -> str:
    return "answered" if status < 400 else "client-error" if status < 500 else "server-error"


def _put_off(timer: asyncio.Timeout, seconds: float) -> None:
    """Move a deadline, if it has come nearer than three quarters of what it should be: not for every piece."""
    now_s = asyncio.get_running_loop().time()
    when = timer.when()
    if when is None or not 0.75 * seconds <= when - now_s <= seconds:
        timer.reschedule(now_s + seconds)


def _head(incoming: web.BaseRequest, pool: Pool, headers: bytes, body_bytes: int) -> bytes:
    """A request's line and headers, for one server."""
    path = incoming.raw_path
    if not path.startswith("/") or not path.isascii():
        path = incoming.rel_url.raw_path_qs
    length = (
        b""
        if not body_bytes and incoming.method in ("GET", "HEAD", "OPTIONS")
        else b"Content-Length: %d\r\n" % body_bytes
    )
    line = b"%s %s%s HTTP/1.1\r\nHost: %s\r\n" % (incoming.method.encode(), pool.path, path.encode(), pool.host)
    return b"".join((line, headers, length, b"\r\n"))


def _close(answer: Answer | None) -> None:
    if answer is not None:
        answer.close()
