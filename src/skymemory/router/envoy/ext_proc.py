"""One HTTP request and its response, as Envoy tells of them on one gRPC stream: messages in, messages out.

No I/O and no clock: ``ext_proc_server`` moves the messages, tests call ``receive``. With full-duplex bodies, which the
protocol is about, nothing is answered until the request has come whole; then its headers go on with the endpoint in
them, and behind them its body, as it was. In the other modes Envoy waits for an answer to each message: with buffered
bodies the endpoint goes into the answer to the body, and where the body is not shown before the headers are answered
the request goes by load alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import chain

from envoy.service.ext_proc.v3.external_processor_pb2 import HttpBody, HttpHeaders, ProcessingRequest

from skymemory.conductor.admission import base
from skymemory.conductor.request import Request
from skymemory.router.admission import kept
from skymemory.router.envoy import messages as say
from skymemory.router.envoy.picker_service import NO_PROMPT, Desk, Refusal, overloaded
from skymemory.router.http.usage import UsageReader
from skymemory.router.queue import Entry
from skymemory.router.request_account import RequestAccount

ASKS_FOR_DECISION = "x-skymemory-decision"
UNAVAILABLE = ("502", "503", "504")
PIECE_COST_BYTES = 48
TOLD_BY_RESPONSES = frozenset((":status", "content-type", "content-encoding"))


class Exchange:
    """``receive`` every message of the stream, then call ``closed`` once, however it ended."""

    def __init__(self, desk: Desk, later: Callable[[Iterable[bytes]], None] = lambda answers: None) -> None:
        """``later``: takes what is to be sent back to a request that had to wait for a server."""
        self._desk = desk
        self._later = later
        self._turned_away = desk.streams >= desk.settings.most_streams
        desk.streams += 1
        self._request_mode = self._response_mode = say.FULL_DUPLEX
        self._headers: dict[str, str] = {}
        self._subset: frozenset[str] | None = None
        self._body: list[bytes] = []
        """In the pieces in which it came: one buffer that grows would be copied as it does, and leave holes behind."""
        self._body_bytes = 0
        self._whole: bytes | None = None
        """All of it, where it was read elsewhere: to join 16 MB twice would keep the event loop for some ms."""
        self._has_body = False
        self._answered = False
        """Whether the request's headers were let go on, or the request was refused."""
        self._read: Request | Refusal | None = None
        self._waiting: tuple[Request, bytes, bool] | None = None
        """While it waits for a server: the request, its body, and whether trailers ended it."""
        self._entry: Entry | None = None
        """Its place in the queue, if it was in it."""
        self._began_s = self._first_s = 0.0
        self._account: RequestAccount | None = None
        self._usage: UsageReader | None = None

    def ends_request(self, message: ProcessingRequest, least: int) -> bool:
        """Whether ``message`` completes a request with a body of ``least`` bytes or more, and is to be answered."""
        last = message.request_body
        size = self._body_bytes + len(last.body)
        ends = last.end_of_stream or message.WhichOneof("request") == "request_trailers"
        return ends and not self._answered and least <= size <= self._desk.settings.most_body_bytes

    def whole_request(self, message: ProcessingRequest) -> tuple[Mapping[str, str], bytes]:
        """Headers and body of the request that ``message`` completes: for whoever has the time of reading it spent
        elsewhere, and gives ``receive`` what came of it.
        """
        self._whole = b"".join((*self._body, message.request_body.body))
        return self._headers, self._whole

    def receive(
        self, message: ProcessingRequest, now_s: float, read: Request | Refusal | None = None
    ) -> Iterable[bytes]:
        """What to send back now, in this order, encoded: a tuple, empty where more must come first. Of a long body it
        is an iterator, whose pieces are made as they are asked for.

        ``read``: what came of reading ``whole_request``; None: it is read here.
        """
        self._read = read
        if message.HasField("protocol_config"):
            # Only in a stream's first message, and only from data planes that tell; the others speak full duplex.
            self._request_mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        if message.observability_mode:
            return ()
        match message.WhichOneof("request"):
            case "request_headers":
                return self._request_headers(message, message.request_headers, now_s)
            case "request_body":
                return self._request_body(message.request_body, now_s)
            case "request_trailers":
                if self._answered:
                    return (say.request_trailers(),)
                return self._choose(now_s, trailers=True)
            case "response_headers":
                return self._response_headers(message, message.response_headers, now_s)
            case "response_body":
                return self._response_body(message.response_body, now_s)
            case "response_trailers":
                self._response_ends(now_s)
                return (say.response_trailers(),)
        return ()

    def held_bytes(self) -> int:
        """Of the request's body, until it ends; a piece takes some bytes beside its own."""
        return self._body_bytes + PIECE_COST_BYTES * len(self._body)

    def too_much(self) -> Iterable[bytes]:
        """The picker holds more bodies than it may, and this is one of the longest: it is not waited for."""
        message = "the picker waits for the ends of as many bodies as it can hold; try again"
        return self._refuse(Refusal(503, message, self._desk.settings.retry_after_s)) if not self._answered else ()

    def closed(self, now_s: float) -> None:
        """The stream is over: the exchange has ended, or the client or Envoy went away."""
        self._desk.streams -= 1
        if self._waiting is not None and self._entry is not None and self._desk.room is not None:
            self._waiting = None
            self._desk.room.leave(self._entry)
        if self._account is not None:
            if self._account.waits:
                self._desk.counters.add("requests_abandoned_total")
            self._account.close(now_s)
            self._desk.look()

    # The queue

    def called(self, now_s: float) -> None:
        waited, self._waiting = self._waiting, None
        if waited is not None:
            self._later(self._route(*waited, now_s))

    def turned_away(self, refusal: base.Refusal) -> None:
        self._waiting = None
        self._later(self._refuse(overloaded(refusal)))

    # The request

    def _request_headers(self, message: ProcessingRequest, headers: HttpHeaders, now_s: float) -> Iterable[bytes]:
        if self._headers or self._answered:
            return ()  # one stream is one request; a second one's headers are of no protocol
        self._began_s = now_s
        self._headers = say.headers_of(headers)
        self._subset = say.subset_of(message)
        self._desk.counters.add("requests_total")
        if self._turned_away:
            most = self._desk.settings.most_streams
            return self._refuse(Refusal(429, f"{most} requests are under way", self._desk.settings.retry_after_s))
        if headers.end_of_stream:
            return self._choose(now_s)
        if self._request_mode not in (say.FULL_DUPLEX, say.BUFFERED):
            return self._choose(now_s, blind=True)
        return () if self._request_mode == say.FULL_DUPLEX else (say.request_headers(),)

    def _request_body(self, body: HttpBody, now_s: float) -> Iterable[bytes]:
        if self._answered:
            # Some versions of Envoy send a large body's last piece twice (envoy#46237). In other modes than full
            # duplex every piece wants its answer, and passes.
            return () if self._request_mode == say.FULL_DUPLEX else (say.request_body(),)
        self._has_body = True
        most = self._desk.settings.most_body_bytes
        piece = body.body
        if self._body_bytes + len(piece) > most:
            return self._refuse(Refusal(413, f"the request's body is longer than {most:,} bytes"))
        if piece:
            self._body.append(piece)
            self._body_bytes += len(piece)
        return self._choose(now_s) if body.end_of_stream or self._request_mode == say.BUFFERED else ()

    def _choose(self, now_s: float, trailers: bool = False, blind: bool = False) -> Iterable[bytes]:
        """``blind``: there is a body, and it is not shown before this is answered."""
        if self._read is not None and self._whole is not None:
            body = self._whole
        else:
            body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._forget_body()
        try:
            if isinstance(self._read, Refusal):
                raise self._read
            request = NO_PROMPT if blind else self._read or self._desk.read(self._headers, body)
            if self._response_mode == say.NONE:
                request = replace(request, streams=False)  # its headers, which are all we see, come before its prefill
        except Refusal as refusal:
            return self._refuse(refusal)
        room = self._desk.must_wait(request, self._subset, now_s)
        if room is None:
            return self._route(request, body, trailers, now_s)
        self._waiting = request, body, trailers
        said = room.wait(self, request, len(body), self._subset)
        if isinstance(said, base.Refusal):
            self._waiting = None
            return self._refuse(overloaded(said))
        self._entry = said
        return ()

    def _route(self, request: Request, body: bytes, trailers: bool, now_s: float) -> Iterable[bytes]:
        try:
            placement = self._desk.choose(request, self._subset, now_s)
        except Refusal as refusal:
            return self._refuse(refusal)
        self._answered = True
        self._account = RequestAccount(self._desk.scheduler, placement, now_s, self._desk.after)
        decision = placement.prefill
        self._desk.counters.add("picks_total", label=decision.server)
        self._desk.counters.add("prompt_tokens_total", request.prompt.tokens)
        self._desk.counters.add("matched_tokens_total", decision.matched_tokens)
        return self._go_on(body, self._desk.endpoints(decision), trailers)

    def _go_on(self, body: bytes, endpoints: str, trailers: bool) -> Iterable[bytes]:
        if self._has_body and self._request_mode == say.BUFFERED:
            return (say.request_body(endpoints),)
        pieces = say.streamed_request(body, end=not trailers) if self._has_body else ()
        answers = chain((say.request_headers(endpoints),), pieces, (say.request_trailers(),) if trailers else ())
        return answers if len(body) > say.PIECE_BYTES else tuple(answers)

    def _refuse(self, refusal: Refusal) -> Iterable[bytes]:
        self._answered = True
        self._forget_body()
        self._desk.counters.add("requests_refused_total", label=str(refusal.status))
        return (say.immediate(refusal.status, refusal.message, refusal.retry_after_s),)

    def _forget_body(self) -> None:
        self._body.clear()
        self._body_bytes, self._whole = 0, None

    # The response

    def _response_headers(self, message: ProcessingRequest, headers: HttpHeaders, now_s: float) -> Iterable[bytes]:
        told = say.some_headers(headers, TOLD_BY_RESPONSES)
        added = {}
        if self._account is not None:
            self._response_begins(self._account, told.get(":status", ""), message, now_s)
            if self._desk.settings.tell_decisions and ASKS_FOR_DECISION in self._headers:
                added[ASKS_FOR_DECISION] = json.dumps(self._account.decision.as_json())
        self._usage = UsageReader(
            told.get("content-type", "").encode("latin-1"), told.get("content-encoding", "").encode("latin-1")
        )
        if headers.end_of_stream:
            self._response_ends(now_s)
        return (say.response_headers(added),)

    def _response_begins(self, account: RequestAccount, status: str, message: ProcessingRequest, now_s: float) -> None:
        chosen, served, by_envoy = account.decision.server, say.served_of(message), say.is_envoys_own(message)
        if served and account.served_by(served, now_s):
            # A label only of what we know: what Envoy says may be an address that has left, or never was one of ours.
            label = served if served in self._desk.picker.fleet.servers else "other"
            self._desk.counters.add("fallbacks_total", label=label)
            self._refused_by(chosen, now_s)
        if by_envoy or (by_envoy is None and status in UNAVAILABLE):
            # The server that it names is then the last that was tried, and did not answer.
            self._refused_by(served or chosen, now_s)
        else:
            self._desk.backends.answered(served or chosen)
        self._desk.counters.add("responses_total", label=f"{status[:1]}xx")
        if not status.startswith("2"):
            account.failed(now_s)
            self._desk.look()
        elif self._response_mode == say.NONE:
            self._first_s = now_s
            account.first_byte(now_s)
            self._desk.look()

    def _response_body(self, body: HttpBody, now_s: float) -> Iterable[bytes]:
        if self._usage is not None and body.body:
            self._usage.add(body.body)
            # What is not streamed comes when all is done, and tells at its end what was cached.
            if self._usage.streams and self._account is not None and self._account.waits:
                self._first_s = now_s
                self._account.first_byte(now_s)
                self._desk.look()
        if body.end_of_stream:
            self._response_ends(now_s)
        if self._response_mode != say.FULL_DUPLEX:
            return (say.response_body(),)
        pieces = say.streamed_response(body.body, body.end_of_stream)
        return pieces if len(body.body) > say.PIECE_BYTES else tuple(pieces)

    def _response_ends(self, now_s: float) -> None:
        reader, account, self._usage = self._usage, self._account, None
        if reader is None or account is None:
            return
        usage, decision = reader.usage(), account.decision
        if usage is None:
            account.ended(now_s, met=self._kept(account, None, now_s))
        else:
            cached, output = usage.cached_of(decision.request.prompt.tokens), usage.output_tokens
            account.ended(now_s, cached, output, self._kept(account, output, now_s))
            server = self._desk.picker.fleet.servers.get(decision.server)
            if server is not None:
                server.reported_tokens(decision.request.prompt.tokens, usage.prompt_tokens)
            if self._entry is not None and output is not None:
                work = usage.prompt_tokens - (usage.cached_tokens or 0) + output
                self._desk.queue.corrected(self._entry, float(work))
            if usage.cached_tokens is not None:
                self._desk.counters.add("cached_tokens_total", usage.cached_tokens)
                self._desk.counters.add("told_prompt_tokens_total", usage.prompt_tokens)
        self._desk.look()

    def _kept(self, account: RequestAccount, output_tokens: int | None, now_s: float) -> bool | None:
        """Whether it came as promised; None: nothing was, or it failed."""
        slo = account.decision.request.slo
        if slo is None or not account.is_open:
            return None
        ttft_s = (self._first_s or now_s) - self._began_s
        became = kept(slo, ttft_s, now_s - self._began_s, output_tokens)
        self._desk.counters.add("promises_total", label=became)
        return became == "kept"

    def _refused_by(self, server: str, now_s: float) -> None:
        self._desk.backends.failed(server, "it did not take a request", now_s)
