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
    """A request with up to two calls: while ``ASKING``, to a prefill server (``_prefill_call``), then to a decode
    server (``_call``); with ``overlap`` to both. The account of a split request is a ``PairAccount``.
    """

    _left_out_headers = PREFILLER_HEADERS
    _split_fields: Fields | None = None  # body fields of a split request
    _prefill_call: _PrefillCall | None = None
    _kv_transfer_params: msgspec.Raw | None = None
    _prefill_retries = 0
    _decode_retries = 0
    _prefill_sends: Sends | None = None
    _prefill_backoff_timer: asyncio.TimerHandle | None = None
    _wants_stream = False
    _request_id = b""
    _prefill_usage: Usage | None = None
    _last_tokens_s: float | None = None  # time of its last tokens; unstreamed: start of decoding

    # -- the pair

    def _pick_server(self, before: ScheduledRequest | None, now_s: float) -> ScheduledRequest | Refusal:
        """Choose a pair, or a single server if the request cannot or need not be split."""
        shared, request = self._shared, self._request
        if before is None and self._scheduler is shared.scheduler:
            self._split_if_possible()
        if self._split_fields is not None:
            avoid = self._get_avoided_servers(now_s)
            decoding = shared.backends.able(request, (), 0, avoid)
            if few := lacking_few(self._scheduler, request, decoding, self._split_from_tokens):
                self._choose_single_server("few-tokens")
                return self._scheduler.place(request, now_s, few)
            able = self._get_prefill_servers()
            limits = shared.settings.limits
            if shared.backends.has_prefill(able) or shared.backends.full(request, limits.max_waiting or 1 << 30):
                # The answer to step 1 marks the end of the prefill, streamed or not.
                self._request = replace(request, streams=True)
                return self._scheduler.place(self._request, now_s, able, decoding)
            if not shared.settings.disaggregation.fallback:
                raise NoServer("no prefill server takes requests, and `disaggregation: fallback` is off")
            self._choose_single_server("no-prefill-server")
        able = shared.backends.alone(request, self._tried_servers, self._get_avoided_servers(now_s))
        if before is None:
            return self._scheduler.place(request, now_s, able)
        return self._scheduler.place_again(before, now_s, able)

    def _split_if_possible(self) -> None:
        fields = fields_of(self.incoming.body)
        if fields is None or (why := why_whole(self.incoming.path, fields)):
            log.debug("served by one server, because of its field %s", "" if fields is None else why)
            self._choose_single_server("whole")
            return
        self._split_fields, self._wants_stream = fields, self._request.streams

    def _choose_single_server(self, reason: str) -> None:
        self._shared.metrics.alone.labels(reason).inc()
        self._split_fields = None
        assert self._shared.alone is not None
        self._scheduler = self._shared.alone

    @property
    def _split_from_tokens(self) -> int:
        return self._shared.settings.disaggregation.split_from

    def _get_prefill_servers(self) -> Collection[str] | None:
        shared = self._shared
        avoid = self._get_avoided_servers(time.monotonic())
        return shared.backends.able(self._request, self._tried_servers, shared.settings.limits.max_waiting, avoid)

    def _send_to_server(self, placement: ScheduledRequest) -> None:
        if self._split_fields is None:
            super()._send_to_server(placement)
            return
        self._shared.metrics.two_steps.inc()
        self._account = account = PairAccount(self._scheduler, placement, time.monotonic())
        self._request_id = b"" if b"x-request-id" in self.incoming.headers.first else uuid.uuid4().hex.encode()
        self._log.prefill = account.prefill
        self._send_prefill(account)
        if self._shared.settings.disaggregation.handover == OVERLAP:
            self._kv_transfer_params = ASKS_FOR_KV
            self._send_decode(account)

    def _get_request_head(self, pool: Pool, body: bytes, without: frozenset[bytes]) -> bytes:
        head = request_head(self.incoming, pool, len(body), self._shared.via, without)
        # Both steps carry the same id, to find them in the engines' logs.
        return head[:-2] + b"X-Request-Id: %s\r\n\r\n" % self._request_id if self._request_id else head

    # -- step 1

    def _send_prefill(self, account: PairAccount) -> None:
        assert self._split_fields is not None
        body = prefill_body(self._split_fields)
        server = account.prefill.server
        pool = self._shared.pools[server]
        head = self._get_request_head(pool, body, self._left_out_headers | _READ_HERE)
        now_s, estimate_s = time.monotonic(), account.prefill.estimated_ttft_s or 0.0
        self._shared.backends.policy.on_sent(self, server, now_s, estimate_s, FIRST_TOKEN)
        if self._prefill_sends is None:
            self._prefill_sends = Sends(self._sends.most)
        self._prefill_call = _PrefillCall(self, server, self._shared.settings.disaggregation.prefill_s)
        self._prefill_call.ask(pool, head, body, self._prefill_sends)

    def prefill_answered(self, server: str, head: ResponseHead, body: bytes) -> None:
        """Decode, try another prefill server, or end the request."""
        status = head.status
        if not 200 <= status < 300:
            is_of_request = 400 <= status < 500 and status not in _SERVER_TROUBLE and not refuses_params(body)
            if is_of_request and status not in self._shared.settings.retries.statuses:
                self._answer_client_error(server, head, body)
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
        shared, account, now_s = self._shared, self._pair, time.monotonic()
        self._prefill_call, self._prefill_usage = None, answer.usage
        shared.backends.on_answer(self, server, now_s)
        if answer.usage is not None and answer.usage.cached_tokens is not None:
            figures = shared.metrics.of(server)
            figures.reported_tokens += answer.usage.prompt_tokens
            figures.cached_tokens += answer.usage.cached_tokens
        if self._state is STREAMING:
            account.first_byte(now_s)  # it decodes already, so the admission rule must not refuse it
        refusal = account.prefilled(now_s, answer.usage)
        if refusal is not None:
            shared.metrics.prefilled(server, "wasted")
            self._drop_call()
            self._answer_refusal(Overloaded(refusal))
            return
        shared.metrics.prefilled(server, "no-params" if answer.params is None else "handed-over")
        self._continue_with_decode(account, answer.params)

    def prefill_failed(self, server: str, why: str, fault: Fault | None) -> None:
        """Try another prefill server, or do without. ``fault``: None for a timeout."""
        shared, result, now_s = self._shared, self._log, time.monotonic()
        self._prefill_call = None
        shared.metrics.prefilled(server, "failed")
        if fault is None:
            shared.backends.on_dropped(self, server, now_s)
        else:
            shared.backends.on_fault(self, server, fault, now_s)
        self._tried_servers.add(server)
        result.why = f"{server}: {why}"
        sends = self._prefill_sends
        is_last = self._prefill_retries >= shared.settings.retries.most or sends is None or not sends.remaining
        if self._state is STREAMING or is_last or (fault is not None and not self._take_from_budget(fault, server)):
            self._continue_without_prefill()
        else:
            self._prefill_retries += 1
            wait_s = 0.0
            if fault is None or RULES[fault].backs_off:
                wait_s = backoff_s(self._prefill_retries, FIRST_S, MOST_S, shared.random.random)
            if wait_s:
                again = partial(self._retry_prefill, server)
                self._prefill_backoff_timer = asyncio.get_running_loop().call_later(wait_s, again)
            else:
                self._retry_prefill(server)

    def _retry_prefill(self, failed: str) -> None:
        self._prefill_backoff_timer = None
        shared, account, result = self._shared, self._pair, self._log
        try:
            if self._state is STREAMING:
                raise NoServer("the decode server has answered by itself")
            account.prefill_again(time.monotonic(), self._get_prefill_servers())
        except NoServer:
            self._continue_without_prefill()
        except Exception:
            self._on_exception()
        else:
            result.retries += 1
            shared.metrics.of(failed).retries += 1
            result.prefill = account.prefill
            shared.metrics.decided(account.prefill)
            self._send_prefill(account)

    def _continue_without_prefill(self) -> None:
        """Let the decode server compute the prompt, or fail if the settings forbid that."""
        shared, account, result = self._shared, self._pair, self._log
        account.prefill_lost(time.monotonic())
        if self._state is STREAMING:
            return  # the decode server has answered by itself
        if not shared.settings.disaggregation.fallback:
            self._drop_call()
            self._answer_error(
                ApiError(502, f"no prefill from server {result.why}, and `disaggregation: fallback` is off")
            )
            return
        shared.metrics.alone.labels("prefill-failed").inc()
        self._continue_with_decode(account, None)

    def _continue_with_decode(self, account: PairAccount, params: msgspec.Raw | None) -> None:
        """Send the decode step, unless it is under way already. ``params``: None without a prefill."""
        if self._shared.room is not None:
            self._shared.deferred.run(self._shared.room.poll)  # a prefill server has room now
        self._kv_transfer_params = params
        if self._state is STREAMING:
            return
        if self._state is PAUSED:
            return  # the next attempt gets the parameters
        if self._call is not None and params is None:
            call, self._call = self._call, None
            call.close()  # it waits for values that will not arrive
            self._sends.most += 1  # the next send is another request
        if self._call is None:
            self._send_decode(account)
        elif not self._wants_stream:
            self._last_tokens_s = time.monotonic()
            account.first_byte(self._last_tokens_s)

    def _answer_client_error(self, server: str, head: ResponseHead, body: bytes) -> None:
        """Give the client the prefill server's error, which its request caused."""
        self._prefill_call = None
        self._shared.backends.on_answer(self, server, time.monotonic(), is_good=False)
        self._shared.metrics.prefilled(server, "client-error")
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
        self._end_exchange()
        incoming.connection.respond(head.status, headers, body)

    # -- step 2

    @property
    def _pair(self) -> PairAccount:
        account = self._account
        assert isinstance(account, PairAccount)
        return account

    def _send_decode(self, account: PairAccount) -> None:
        assert self._split_fields is not None
        params, incoming, shared = self._kv_transfer_params, self.incoming, self._shared
        body = incoming.body if params is None else decode_body(self._split_fields, params)
        pool = shared.pools[account.decision.server]
        incoming.connection.deadline.set(shared.settings.timeouts.first_byte_s, self._first_byte_timeout)
        self._response_head, self._log.decision, self._answer_fault = None, account.decision, None
        kind = DECODED if self._wants_stream else WHOLE
        shared.backends.policy.on_sent(self, account.decision.server, time.monotonic(), 0.0, kind)
        if self._prefill_call is None and not self._wants_stream:  # no first byte will show that it decodes
            self._last_tokens_s = time.monotonic()
            account.first_byte(self._last_tokens_s)
        self._call = pool.ask(self, self._get_request_head(pool, body, self._left_out_headers), body, True, self._sends)

    def _begin_response(self, piece: bytes, at_end: bool) -> None:
        """Pass the response on; a server that refuses ``kv_transfer_params`` is asked again without them."""
        head = self._response_head
        has_params = self._split_fields is not None and self._kv_transfer_params is not None
        may_do_without = has_params and self._shared.settings.disaggregation.fallback
        if may_do_without and head is not None and 400 <= head.status < 500 and refuses_params(piece):
            # The server has no connector, or a different connector. The client's request itself is valid.
            self._shared.metrics.alone.labels("params-refused").inc()
            call, self._call, self._kv_transfer_params = self._call, None, None
            if call is not None:
                call.close()
            self._sends.most += 1  # the next send is another request
            self._send_decode(self._pair)
            return
        super()._begin_response(piece, at_end)

    @property
    def _has_no_retry_left(self) -> bool:
        if self._split_fields is None:
            return super()._has_no_retry_left
        return self._decode_retries >= self._shared.settings.retries.most or not self._sends.remaining

    @property
    def _may_queue_again(self) -> bool:
        return self._split_fields is None

    def _end_attempt(self, account: RequestAccount) -> None:
        if self._split_fields is None:
            super()._end_attempt(account)
        else:
            self._drop_call()  # the pair stays booked: its prefill also serves the next decode server

    def _count_retry(self, server: str, fault: Fault) -> None:
        super()._count_retry(server, fault)
        if self._split_fields is not None:
            self._decode_retries += 1

    def _send_again(self) -> None:
        if self._split_fields is None:
            super()._send_again()
            return
        self._enter_state(ASKING)
        shared, account, now_s = self._shared, self._pair, time.monotonic()
        try:
            account.decode_again(
                now_s, shared.backends.able(self._request, self._tried_servers, 0, self._get_avoided_servers(now_s))
            )
        except NoServer:
            self._answer_error(self._get_no_answer_error(", and no other takes requests"))
            return
        self._send_decode(account)

    def _place_continuation(self, before: ScheduledRequest, continuation: Rest, now_s: float) -> ScheduledRequest:
        """Place a broken stream's continuation at a single server: the KV values went to the failed server."""
        if self._split_fields is not None:
            prefill, self._prefill_call = self._prefill_call, None
            if prefill is not None:
                prefill.drop()
                self._shared.metrics.prefilled(prefill.server, "dropped")
            self._choose_single_server("stream-continued")
        able = self._get_servers_for_continuation(
            self._shared.backends.alone(self._request, self._tried_servers), continuation
        )
        placement = self._scheduler.place(self._request, now_s, able)
        if isinstance(placement, Refusal):
            raise NoServer(placement.reason)
        return placement

    def move_on(self, server: str, why: str) -> None:
        prefill = self._prefill_call
        if prefill is None or prefill.server != server:
            super().move_on(server, why)
            return
        prefill.drop()
        try:
            self.prefill_failed(server, f"it was ejected ({why})", Fault.SILENT)
        except Exception:
            self._on_exception()

    def _send_to_client(self, piece: bytes, at_end: bool, head: bytes = b"") -> None:
        super()._send_to_client(piece, at_end, head)
        on_tokens, account, reader = self._shared.on_tokens, self._account, self._usage_reader
        if on_tokens is None or account is None or reader is None or not reader.streams:
            return
        # Report the decode server's speed: an event is about a token.
        events = piece.count(b"\n\n") - piece.count(b"data: [DONE]")
        if events > 0:
            since_s, self._last_tokens_s = self._last_tokens_s, time.monotonic()
            if since_s is not None:
                on_tokens(account.decision.server, events, self._last_tokens_s - since_s)

    def client_ready(self) -> None:
        self._last_tokens_s = None  # the pause was the client's
        super().client_ready()

    # -- the end

    def _close_account(self) -> None:
        super()._close_account()
        on_tokens, account, usage, since_s = self._shared.on_tokens, self._account, self._log.usage, self._last_tokens_s
        is_unstreamed = self._split_fields is not None and not self._wants_stream
        # Report the decode server's speed; of a stream, `_send_to_client` does.
        if (
            is_unstreamed
            and on_tokens is not None
            and account is not None
            and usage is not None
            and since_s is not None
        ):
            on_tokens(account.decision.server, usage.output_tokens or 0, time.monotonic() - since_s)

    def _get_work(self, usage: Usage) -> float | None:
        prefill_usage = self._prefill_usage
        if prefill_usage is None or prefill_usage.cached_tokens is None or usage.output_tokens is None:
            return super()._get_work(usage)
        # The tokens that the decode server reports as cached were computed for this request by the prefill server,
        # except those that the prefill server itself had cached.
        return float(usage.prompt_tokens - min(prefill_usage.cached_tokens, usage.prompt_tokens) + usage.output_tokens)

    def _end_exchange(self) -> None:
        # Every end calls this: a disconnect, an error response, or a decode server that was faster.
        prefill, self._prefill_call = self._prefill_call, None
        if self._prefill_backoff_timer is not None:
            self._prefill_backoff_timer.cancel()
            self._prefill_backoff_timer = None
        if prefill is not None:
            prefill.drop()
            self._shared.backends.on_dropped(self, prefill.server, time.monotonic())
            self._shared.metrics.prefilled(prefill.server, "dropped")
        super()._end_exchange()

    def on_prefill_exception(self) -> None:
        self._on_exception()


class _PrefillCall:
    """Step 1 at a server."""

    def __init__(self, exchange: TwoStepExchange, server: str, within_s: float) -> None:
        self.server = server
        self._exchange = exchange
        self._within_s = within_s
        self._call: UpstreamCall | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._response_head: ResponseHead | None = None
        self._answer_pieces: list[bytes] = []
        self._size_bytes = 0

    def ask(self, pool: Pool, head: bytes, body: bytes, sends: Sends) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._within_s, self._on_timeout)
        self._call = pool.ask(self, head, body, True, sends)

    def drop(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.close()
        if self._timer is not None:
            self._timer.cancel()

    def response_begins(self, head: ResponseHead) -> None:
        self._response_head = head

    def response_data(self, piece: bytes, at_end: bool) -> None:
        self._answer_pieces.append(piece)
        self._size_bytes += len(piece)
        if self._size_bytes > MAX_ANSWER_BYTES:
            self._on_failure(f"its answer is longer than {MAX_ANSWER_BYTES} bytes", Fault.GATEWAY)
        elif at_end:
            self.drop()
            assert self._response_head is not None
            try:
                self._exchange.prefill_answered(self.server, self._response_head, b"".join(self._answer_pieces))
            except Exception:
                self._exchange.on_prefill_exception()

    def response_failed(self, error: UpstreamError) -> None:
        self._on_failure(str(error), fault_of_error(error))

    def _on_timeout(self) -> None:
        # It may still be computing: slow is not broken.
        self._on_failure(f"no answer in {self._within_s:g} s", None)

    def _on_failure(self, why: str, fault: Fault | None) -> None:
        self.drop()
        try:
            self._exchange.prefill_failed(self.server, why, fault)
        except Exception:
            self._exchange.on_prefill_exception()
