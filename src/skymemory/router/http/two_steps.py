"""A request with separate steps: a prefill server computes the prompt, a decode server answers.

1. The scheduler chooses the pair. A request that cannot be split (``splitting``), or of which a decode server lacks few
   tokens (``decoding``), goes to a single server.
2. The prefill server gets the prompt for one token (``_PrefillCall``).
3. The decode server gets the request and the answer's ``kv_transfer_params``.

With ``handover = "overlap"`` both are asked at once, and KV values are fetched while they are computed.

After failed prefills the decode server computes the prompt. A failed decode server is replaced before its first byte; a
server that refuses ``kv_transfer_params`` is asked without them. Only two results of a prefill end the request: a
client error (except 408, 429 and complaints about ``kv_transfer_params``), and a refusal by admission.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from skymemory.conductor.picker import NoServer
from skymemory.conductor.scheduler import Refusal, ScheduledRequest
from skymemory.pacing import backoff_s
from skymemory.router.admission import DECISION_HEADER, Overloaded
from skymemory.router.api_error import ApiError
from skymemory.router.decoding import lacking_few
from skymemory.router.failure.budget import FIRST_S, MOST_S, Sends
from skymemory.router.failure.faults import RULES, Fault, fault_of
from skymemory.router.failure.silence import DECODED, FIRST_TOKEN, WHOLE
from skymemory.router.http.exchange import (
    ASKING,
    PAUSED,
    STREAMING,
    Exchange,
    decision_line,
    fault_of_error,
    request_head,
)
from skymemory.router.http.upstream import Pool, ResponseHead, UpstreamCall, UpstreamError
from skymemory.router.prefillers import HEADER, LATER_HEADER
from skymemory.router.prompts.continuation import Rest
from skymemory.router.prompts.splitting import (
    ASKS_FOR_KV,
    Fields,
    decode_body,
    fields_of,
    prefill_body,
    read_prefilled,
    refuses_params,
    why_whole,
)
from skymemory.router.request_account import PairAccount, RequestAccount, Usage
from skymemory.router.settings import OVERLAP

if TYPE_CHECKING:
    import msgspec

log = logging.getLogger("skymemory.router")

MAX_ANSWER_BYTES = 4 << 20
"""Limit of a prefill answer: a token, and parameters of thousands of blocks."""
PREFILLER_HEADERS = frozenset((HEADER.encode(), LATER_HEADER.encode()))
"""Headers by which llm-d's sidecar chooses a prefill server."""
_READ_HERE = frozenset((b"accept-encoding",))
_SERVER_TROUBLE = frozenset((408, 429))


class TwoStepExchange(Exchange):
    """A request with up to two calls: while ``ASKING``, to a prefill server (``_prefill``), then to a decode server
    (``_call``); with ``overlap`` to both. The account of a split request is a ``PairAccount``.
    """

    _left_out = PREFILLER_HEADERS
    _fields: Fields | None = None
    """Body fields of a split request."""
    _prefill: _PrefillCall | None = None
    _params: msgspec.Raw | None = None
    _prefill_retries = 0
    _decode_retries = 0
    _prefill_sends: Sends | None = None
    _prefill_pause: asyncio.TimerHandle | None = None
    _is_streamed = False
    _request_id = b""
    _prefill_usage: Usage | None = None
    _since_s: float | None = None
    """Time of its last tokens; unstreamed: start of decoding."""

    # -- the pair

    def _pick(self, before: ScheduledRequest | None, now_s: float) -> ScheduledRequest | Refusal:
        of, request = self._of, self._request
        if before is None and self._scheduler is of.scheduler:
            self._split()
        if self._fields is not None:
            avoid = self._avoided(now_s)
            decoding = of.backends.able(request, (), 0, avoid)
            if few := lacking_few(self._scheduler, request, decoding, self._split_from):
                self._serve_alone("few-tokens")
                return self._scheduler.place(request, now_s, few)
            able = self._prefill_servers()
            limits = of.settings.limits
            if of.backends.has_prefill(able) or of.backends.full(request, limits.max_waiting or 1 << 30):
                # The answer to step 1 marks the end of the prefill, streamed or not.
                self._request = replace(request, streams=True)
                return self._scheduler.place(self._request, now_s, able, decoding)
            if not of.settings.disaggregation.fallback:
                raise NoServer("no prefill server takes requests, and `disaggregation: fallback` is off")
            self._serve_alone("no-prefill-server")
        able = of.backends.alone(request, self._tried, self._avoided(now_s))
        if before is None:
            return self._scheduler.place(request, now_s, able)
        return self._scheduler.place_again(before, now_s, able)

    def _split(self) -> None:
        fields = fields_of(self.incoming.body)
        if fields is None or (why := why_whole(self.incoming.path, fields)):
            log.debug("served by one server, because of its field %s", "" if fields is None else why)
            self._serve_alone("whole")
            return
        self._fields, self._is_streamed = fields, self._request.streams

    def _serve_alone(self, reason: str) -> None:
        self._of.metrics.alone.labels(reason).inc()
        self._fields = None
        assert self._of.alone is not None
        self._scheduler = self._of.alone

    @property
    def _split_from(self) -> int:
        return self._of.settings.disaggregation.split_from

    def _prefill_servers(self) -> Collection[str] | None:
        of = self._of
        avoid = self._avoided(time.monotonic())
        return of.backends.able(self._request, self._tried, of.settings.limits.max_waiting, avoid)

    def _send(self, placement: ScheduledRequest) -> None:
        if self._fields is None:
            super()._send(placement)
            return
        self._of.metrics.two_steps.inc()
        self._account = account = PairAccount(self._scheduler, placement, time.monotonic())
        self._request_id = b"" if b"x-request-id" in self.incoming.headers.first else uuid.uuid4().hex.encode()
        self._log.prefill = account.prefill
        self._ask_prefill(account)
        if self._of.settings.disaggregation.handover == OVERLAP:
            self._params = ASKS_FOR_KV
            self._ask_decode(account)

    def _head_for(self, pool: Pool, body: bytes, without: frozenset[bytes]) -> bytes:
        head = request_head(self.incoming, pool, len(body), self._of.via, without)
        # Both steps carry the same id, to find them in the engines' logs.
        return head[:-2] + b"X-Request-Id: %s\r\n\r\n" % self._request_id if self._request_id else head

    # -- step 1

    def _ask_prefill(self, account: PairAccount) -> None:
        assert self._fields is not None
        body = prefill_body(self._fields)
        server = account.prefill.server
        pool = self._of.pools[server]
        head = self._head_for(pool, body, self._left_out | _READ_HERE)
        now_s, estimate_s = time.monotonic(), account.prefill.estimated_ttft_s or 0.0
        self._of.backends.policy.on_sent(self, server, now_s, estimate_s, FIRST_TOKEN)
        if self._prefill_sends is None:
            self._prefill_sends = Sends(self._sends.most)
        self._prefill = _PrefillCall(self, server, self._of.settings.disaggregation.prefill_s)
        self._prefill.ask(pool, head, body, self._prefill_sends)

    def prefill_answered(self, server: str, head: ResponseHead, body: bytes) -> None:
        status = head.status
        if not 200 <= status < 300:
            is_of_request = 400 <= status < 500 and status not in _SERVER_TROUBLE and not refuses_params(body)
            if is_of_request and status not in self._of.settings.retries.statuses:
                self._answer_as_prefill(server, head, body)
            else:
                fault = fault_of(status, b"retry-after" in head.headers.first) or Fault.GATEWAY
                why = f"it answered {status}" + " to kv_transfer_params" * refuses_params(body)
                self.prefill_failed(server, why, fault)
            return
        answer = read_prefilled(body)
        if answer is None:
            why = "its answer is not one to a prefill: expected JSON with kv_transfer_params"
            self.prefill_failed(server, why, Fault.GATEWAY)
            return
        of, account, now_s = self._of, self._pair, time.monotonic()
        self._prefill, self._prefill_usage = None, answer.usage
        of.backends.on_answer(self, server, now_s)
        if answer.usage is not None and answer.usage.cached_tokens is not None:
            figures = of.metrics.of(server)
            figures.reported_tokens += answer.usage.prompt_tokens
            figures.cached_tokens += answer.usage.cached_tokens
        if self._state is STREAMING:
            account.first_byte(now_s)  # it decodes already, so the admission rule must not refuse it
        refusal = account.prefilled(now_s, answer.usage)
        if refusal is not None:
            of.metrics.prefilled(server, "wasted")
            self._drop_call()
            self._refuse(Overloaded(refusal))
            return
        of.metrics.prefilled(server, "no-params" if answer.params is None else "handed-over")
        self._continue(account, answer.params)

    def prefill_failed(self, server: str, why: str, fault: Fault | None) -> None:
        """Try another prefill server, or do without. ``fault``: None for a timeout."""
        of, result, now_s = self._of, self._log, time.monotonic()
        self._prefill = None
        of.metrics.prefilled(server, "failed")
        if fault is None:
            of.backends.on_dropped(self, server, now_s)
        else:
            of.backends.on_fault(self, server, fault, now_s)
        self._tried.add(server)
        result.why = f"{server}: {why}"
        sends = self._prefill_sends
        is_last = self._prefill_retries >= of.settings.retries.most or sends is None or not sends.remaining
        if self._state is STREAMING or is_last or (fault is not None and not self._may_spend(fault, server)):
            self._do_without_prefill()
        else:
            self._prefill_retries += 1
            wait_s = 0.0
            if fault is None or RULES[fault].backs_off:
                wait_s = backoff_s(self._prefill_retries, FIRST_S, MOST_S, of.random.random)
            if wait_s:
                again = partial(self._ask_prefill_again, server)
                self._prefill_pause = asyncio.get_running_loop().call_later(wait_s, again)
            else:
                self._ask_prefill_again(server)

    def _ask_prefill_again(self, failed: str) -> None:
        self._prefill_pause = None
        of, account, result = self._of, self._pair, self._log
        try:
            if self._state is STREAMING:
                raise NoServer("the decode server has answered by itself")
            account.prefill_again(time.monotonic(), self._prefill_servers())
        except NoServer:
            self._do_without_prefill()
        except Exception:
            self._fault()
        else:
            result.retries += 1
            of.metrics.of(failed).retries += 1
            result.prefill = account.prefill
            of.metrics.decided(account.prefill)
            self._ask_prefill(account)

    def _do_without_prefill(self) -> None:
        of, account, result = self._of, self._pair, self._log
        account.prefill_lost(time.monotonic())
        if self._state is STREAMING:
            return  # the decode server has answered by itself
        if not of.settings.disaggregation.fallback:
            self._drop_call()
            self._fail(ApiError(502, f"no prefill from server {result.why}, and `disaggregation: fallback` is off"))
            return
        of.metrics.alone.labels("prefill-failed").inc()
        self._continue(account, None)

    def _continue(self, account: PairAccount, params: msgspec.Raw | None) -> None:
        if self._of.room is not None:
            self._of.deferred.run(self._of.room.poll)  # a prefill server has room now
        self._params = params
        if self._state is STREAMING:
            return
        if self._state is PAUSED:
            return  # the next attempt gets the parameters
        if self._call is not None and params is None:
            call, self._call = self._call, None
            call.close()  # it waits for values that will not arrive
            self._sends.most += 1  # the next send is another request
        if self._call is None:
            self._ask_decode(account)
        elif not self._is_streamed:
            self._since_s = time.monotonic()
            account.first_byte(self._since_s)

    def _answer_as_prefill(self, server: str, head: ResponseHead, body: bytes) -> None:
        self._prefill = None
        self._of.backends.on_answer(self, server, time.monotonic(), is_good=False)
        self._of.metrics.prefilled(server, "client-error")
        if self._state is STREAMING:
            self._pair.prefill_lost(time.monotonic())
            return
        self._drop_call()
        incoming, result = self.incoming, self._log
        result.outcome, result.status, result.decision = "client-error", head.status, self._pair.prefill
        result.bytes_out = len(body)
        content_type = head.headers.first.get(b"content-type", b"application/json")
        headers = b"Content-Type: %s\r\n" % content_type
        if incoming.headers.first.get(DECISION_HEADER.encode()):
            headers += decision_line(self._pair)
        self._finish()
        incoming.connection.respond(head.status, headers, body)

    # -- step 2

    @property
    def _pair(self) -> PairAccount:
        account = self._account
        assert isinstance(account, PairAccount)
        return account

    def _ask_decode(self, account: PairAccount) -> None:
        assert self._fields is not None
        params, incoming, of = self._params, self.incoming, self._of
        body = incoming.body if params is None else decode_body(self._fields, params)
        pool = of.pools[account.decision.server]
        incoming.connection.deadline.set(of.settings.timeouts.first_byte_s, self._first_byte_timeout)
        self._head, self._log.decision, self._fault_of_answer = None, account.decision, None
        kind = DECODED if self._is_streamed else WHOLE
        of.backends.policy.on_sent(self, account.decision.server, time.monotonic(), 0.0, kind)
        if self._prefill is None and not self._is_streamed:
            self._since_s = time.monotonic()
            account.first_byte(self._since_s)
        self._call = pool.ask(self, self._head_for(pool, body, self._left_out), body, True, self._sends)

    def _begin(self, piece: bytes, at_end: bool) -> None:
        head = self._head
        has_params = self._fields is not None and self._params is not None
        may_do_without = has_params and self._of.settings.disaggregation.fallback
        if may_do_without and head is not None and 400 <= head.status < 500 and refuses_params(piece):
            # The server has no connector, or a different connector. The client's request itself is valid.
            self._of.metrics.alone.labels("params-refused").inc()
            call, self._call, self._params = self._call, None, None
            if call is not None:
                call.close()
            self._sends.most += 1  # the next send is another request
            self._ask_decode(self._pair)
            return
        super()._begin(piece, at_end)

    @property
    def _is_last(self) -> bool:
        if self._fields is None:
            return super()._is_last
        return self._decode_retries >= self._of.settings.retries.most or not self._sends.remaining

    @property
    def _may_wait(self) -> bool:
        return self._fields is None

    def _end_attempt(self, account: RequestAccount) -> None:
        if self._fields is None:
            super()._end_attempt(account)
        else:
            self._drop_call()  # the pair stays booked: its prefill also serves the next decode server

    def _count_retry(self, server: str, fault: Fault) -> None:
        super()._count_retry(server, fault)
        if self._fields is not None:
            self._decode_retries += 1

    def _try_again(self) -> None:
        if self._fields is None:
            super()._try_again()
            return
        self._enter(ASKING)
        of, account, now_s = self._of, self._pair, time.monotonic()
        try:
            account.decode_again(now_s, of.backends.able(self._request, self._tried, 0, self._avoided(now_s)))
        except NoServer:
            self._fail(self._no_answer(", and no other takes requests"))
            return
        self._ask_decode(account)

    def _place_rest(self, before: ScheduledRequest, continuation: Rest, now_s: float) -> ScheduledRequest:
        """Place the continuation at a single server: the KV values went to the failed server."""
        if self._fields is not None:
            prefill, self._prefill = self._prefill, None
            if prefill is not None:
                prefill.drop()
                self._of.metrics.prefilled(prefill.server, "dropped")
            self._serve_alone("stream-continued")
        able = self._able_to_continue(self._of.backends.alone(self._request, self._tried), continuation)
        placement = self._scheduler.place(self._request, now_s, able)
        if isinstance(placement, Refusal):
            raise NoServer(placement.reason)
        return placement

    def move_on(self, server: str, why: str) -> None:
        prefill = self._prefill
        if prefill is None or prefill.server != server:
            super().move_on(server, why)
            return
        prefill.drop()
        try:
            self.prefill_failed(server, f"it was ejected ({why})", Fault.SILENT)
        except Exception:
            self._fault()

    def _pass_on(self, piece: bytes, at_end: bool, head: bytes = b"") -> None:
        super()._pass_on(piece, at_end, head)
        on_tokens, account, reader = self._of.on_tokens, self._account, self._reader
        if on_tokens is None or account is None or reader is None or not reader.streams:
            return
        events = piece.count(b"\n\n") - piece.count(b"data: [DONE]")
        if events > 0:
            since_s, self._since_s = self._since_s, time.monotonic()
            if since_s is not None:
                on_tokens(account.decision.server, events, self._since_s - since_s)

    def client_ready(self) -> None:
        self._since_s = None  # the pause was the client's
        super().client_ready()

    # -- the end

    def _close_account(self) -> None:
        super()._close_account()
        on_tokens, account, usage, since_s = self._of.on_tokens, self._account, self._log.usage, self._since_s
        is_unstreamed = self._fields is not None and not self._is_streamed
        if (
            is_unstreamed
            and on_tokens is not None
            and account is not None
            and usage is not None
            and since_s is not None
        ):
            on_tokens(account.decision.server, usage.output_tokens or 0, time.monotonic() - since_s)

    def _work_of(self, usage: Usage) -> float | None:
        prefill_usage = self._prefill_usage
        if prefill_usage is None or prefill_usage.cached_tokens is None or usage.output_tokens is None:
            return super()._work_of(usage)
        # The tokens that the decode server reports as cached were computed for this request by the prefill server,
        # except those that the prefill server itself had cached.
        return float(usage.prompt_tokens - min(prefill_usage.cached_tokens, usage.prompt_tokens) + usage.output_tokens)

    def _finish(self) -> None:
        # Every end calls this: a disconnect, an error response, or a decode server that was faster.
        prefill, self._prefill = self._prefill, None
        if self._prefill_pause is not None:
            self._prefill_pause.cancel()
            self._prefill_pause = None
        if prefill is not None:
            prefill.drop()
            self._of.backends.on_dropped(self, prefill.server, time.monotonic())
            self._of.metrics.prefilled(prefill.server, "dropped")
        super()._finish()

    def prefill_fault(self) -> None:
        self._fault()


class _PrefillCall:
    """Step 1 at a server."""

    def __init__(self, exchange: TwoStepExchange, server: str, within_s: float) -> None:
        self.server = server
        self._exchange = exchange
        self._within_s = within_s
        self._call: UpstreamCall | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._head: ResponseHead | None = None
        self._pieces: list[bytes] = []
        self._size_bytes = 0

    def ask(self, pool: Pool, head: bytes, body: bytes, sends: Sends) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._within_s, self._late)
        self._call = pool.ask(self, head, body, True, sends)

    def drop(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.close()
        if self._timer is not None:
            self._timer.cancel()

    def response_begins(self, head: ResponseHead) -> None:
        self._head = head

    def response_data(self, piece: bytes, at_end: bool) -> None:
        self._pieces.append(piece)
        self._size_bytes += len(piece)
        if self._size_bytes > MAX_ANSWER_BYTES:
            self._failed(f"its answer is longer than {MAX_ANSWER_BYTES} bytes", Fault.GATEWAY)
        elif at_end:
            self.drop()
            assert self._head is not None
            try:
                self._exchange.prefill_answered(self.server, self._head, b"".join(self._pieces))
            except Exception:
                self._exchange.prefill_fault()

    def response_failed(self, error: UpstreamError) -> None:
        self._failed(str(error), fault_of_error(error))

    def _late(self) -> None:
        # It may still be computing: slow is not broken.
        self._failed(f"no answer in {self._within_s:g} s", None)

    def _failed(self, why: str, fault: Fault | None) -> None:
        self.drop()
        try:
            self._exchange.prefill_failed(self.server, why, fault)
        except Exception:
            self._exchange.prefill_fault()
