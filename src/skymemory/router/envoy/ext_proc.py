"""One HTTP request and its response, as Envoy tells of them on one gRPC stream: messages in, messages out.

No I/O and no clock: ``ext_proc_server`` moves the messages, tests call ``receive``. With full-duplex bodies, which the
protocol is about, nothing is answered until the request has come whole; then its headers go on with the endpoint in
them, and behind them its body, as it was. In the other modes Envoy waits for an answer to each message: with buffered
bodies the endpoint goes into the answer to the body, and where the body is not shown before the headers are answered
the request goes by load alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HeaderMutation,
    HttpBody,
    HttpHeaders,
    ProcessingRequest,
    ProcessingResponse,
)
from google.protobuf.struct_pb2 import Struct

from skymemory.conductor.request import Request
from skymemory.router import ext_proc_messages as say
from skymemory.router.booking import Booking
from skymemory.router.desk import NO_PROMPT, Desk, Refusal
from skymemory.router.proxy_usage import UsageReader

ASKS_FOR_DECISION = "x-skymemory-decision"
UNAVAILABLE = ("502", "503", "504")


class Exchange:
    """``receive`` every message of the stream, then call ``closed`` once, however it ended."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._turned_away = desk.streams >= desk.settings.most_streams
        desk.streams += 1
        self._request_mode = self._response_mode = say.FULL_DUPLEX
        self._headers: dict[str, str] = {}
        self._subset: frozenset[str] | None = None
        self._body = bytearray()
        self._has_body = False
        self._answered = False
        """Whether the request's headers were let go on, or the request was refused."""
        self._read: Request | Refusal | None = None
        self._booking: Booking | None = None
        self._usage: UsageReader | None = None

    def whole_request(self, message: ProcessingRequest) -> tuple[Mapping[str, str], bytes] | None:
        """Headers and body of the request if ``message`` completes it: for whoever has the time of reading it spent
        elsewhere, and gives ``receive`` what came of it. Changes nothing.
        """
        last = message.request_body
        ends = last.end_of_stream or message.WhichOneof("request") == "request_trailers"
        if self._answered or not ends or len(self._body) + len(last.body) > self._desk.settings.most_body_bytes:
            return None
        return self._headers, bytes(self._body) + last.body

    def receive(
        self, message: ProcessingRequest, now_s: float, read: Request | Refusal | None = None
    ) -> Sequence[ProcessingResponse]:
        """What to send back now, in this order; nothing where more must come first.

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

    def closed(self, now_s: float) -> None:
        """The stream is over: the exchange has ended, or the client or Envoy went away."""
        self._desk.streams -= 1
        if self._booking is not None:
            if self._booking.waits:
                self._desk.counters.add("requests_abandoned_total")
            self._booking.close(now_s)

    # The request

    def _request_headers(
        self, message: ProcessingRequest, headers: HttpHeaders, now_s: float
    ) -> Sequence[ProcessingResponse]:
        if self._headers or self._answered:
            return ()  # one stream is one request; a second one's headers are of no protocol
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

    def _request_body(self, body: HttpBody, now_s: float) -> Sequence[ProcessingResponse]:
        if self._answered:
            # Some versions of Envoy send a large body's last piece twice (envoy#46237). In other modes than full
            # duplex every piece wants its answer, and passes.
            return () if self._request_mode == say.FULL_DUPLEX else (say.request_body(),)
        self._has_body = True
        most = self._desk.settings.most_body_bytes
        if len(self._body) + len(body.body) > most:
            return self._refuse(Refusal(413, f"the request's body is longer than {most:,} bytes"))
        self._body += body.body
        return self._choose(now_s) if body.end_of_stream or self._request_mode == say.BUFFERED else ()

    def _choose(self, now_s: float, trailers: bool = False, blind: bool = False) -> Sequence[ProcessingResponse]:
        """``blind``: there is a body, and it is not shown before this is answered."""
        body = bytes(self._body)
        self._body.clear()
        try:
            if isinstance(self._read, Refusal):
                raise self._read
            request = NO_PROMPT if blind else self._read or self._desk.read(self._headers, body)
            if self._response_mode == say.NONE:
                request = replace(request, streams=False)  # its headers, which are all we see, come before its prefill
            decision = self._desk.choose(request, self._subset, now_s)
        except Refusal as refusal:
            return self._refuse(refusal)
        self._answered = True
        self._booking = Booking(self._desk.picker, decision, now_s, self._desk.after)
        self._desk.counters.add("picks_total", label=decision.server)
        self._desk.counters.add("prompt_tokens_total", request.prompt.tokens)
        self._desk.counters.add("matched_tokens_total", decision.matched_tokens)
        mutation, metadata = say.destination(self._desk.endpoints(decision))
        return self._go_on(body, mutation, metadata, trailers)

    def _go_on(
        self, body: bytes, mutation: HeaderMutation, metadata: Struct, trailers: bool
    ) -> Sequence[ProcessingResponse]:
        if self._has_body and self._request_mode == say.BUFFERED:
            return (say.request_body(mutation, metadata),)
        answers = [say.request_headers(mutation, metadata)]
        if self._has_body:
            answers += say.streamed_request(body, end=not trailers)
        if trailers:
            answers.append(say.request_trailers())
        return answers

    def _refuse(self, refusal: Refusal) -> Sequence[ProcessingResponse]:
        self._answered = True
        self._body.clear()
        self._desk.counters.add("requests_refused_total", label=str(refusal.status))
        return (say.immediate(refusal.status, refusal.message, refusal.retry_after_s),)

    # The response

    def _response_headers(
        self, message: ProcessingRequest, headers: HttpHeaders, now_s: float
    ) -> Sequence[ProcessingResponse]:
        told = say.headers_of(headers)
        added = {}
        if self._booking is not None:
            self._response_begins(self._booking, told.get(":status", ""), message, now_s)
            if self._desk.settings.tell_decisions and ASKS_FOR_DECISION in self._headers:
                added[ASKS_FOR_DECISION] = json.dumps(self._booking.decision.as_json())
        self._usage = UsageReader(told.get("content-type", ""), told.get("content-encoding", ""))
        if headers.end_of_stream:
            self._response_ends(now_s)
        return (say.response_headers(added),)

    def _response_begins(self, booking: Booking, status: str, message: ProcessingRequest, now_s: float) -> None:
        chosen, served, by_envoy = booking.decision.server, say.served_of(message), say.is_envoys_own(message)
        if served and booking.served_by(served, now_s):
            # A label only of what we know: what Envoy says may be an address that has left, or never was one of ours.
            label = served if served in self._desk.picker.fleet.servers else "other"
            self._desk.counters.add("fallbacks_total", label=label)
            self._refused_by(chosen, now_s)
        if by_envoy or (by_envoy is None and status in UNAVAILABLE):
            # The server that it names is then the last that was tried, and did not answer.
            self._refused_by(served or chosen, now_s)
        else:
            self._desk.ejection.took(served or chosen)
        self._desk.counters.add("responses_total", label=f"{status[:1]}xx")
        if not status.startswith("2"):
            booking.failed(now_s)
        elif self._response_mode == say.NONE:
            booking.first_byte(now_s)

    def _response_body(self, body: HttpBody, now_s: float) -> Sequence[ProcessingResponse]:
        if self._usage is not None and body.body:
            self._usage.add(body.body)
            # What is not streamed comes when all is done, and tells at its end what was cached.
            if self._usage.streams and self._booking is not None:
                self._booking.first_byte(now_s)
        if body.end_of_stream:
            self._response_ends(now_s)
        if self._response_mode != say.FULL_DUPLEX:
            return (say.response_body(),)
        return tuple(say.streamed_response(body.body, body.end_of_stream))

    def _response_ends(self, now_s: float) -> None:
        if self._usage is None or self._booking is None:
            return
        usage = self._usage.usage()
        if usage is None:
            self._booking.ended(now_s, None)
        else:
            decision = self._booking.decision
            self._booking.ended(now_s, usage.cached_of(decision.request.prompt.tokens), usage.output_tokens)
            server = self._desk.picker.fleet.servers.get(decision.server)
            if server is not None:
                server.reported_tokens(decision.request.prompt.tokens, usage.prompt_tokens)
        if usage is not None and usage.cached_tokens is not None:
            self._desk.counters.add("cached_tokens_total", usage.cached_tokens)
            self._desk.counters.add("told_prompt_tokens_total", usage.prompt_tokens)
        self._usage = None

    def _refused_by(self, server: str, now_s: float) -> None:
        if self._desk.ejection.refused(server, now_s):
            self._desk.counters.add("ejections_total", label=server)
