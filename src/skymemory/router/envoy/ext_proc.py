"""One HTTP request and its response, as Envoy reports them on one gRPC stream (ext_proc): messages in, messages out.

No I/O and no clock: ``ext_proc_server`` moves the messages, tests call ``receive``.

1. The request's headers and body are collected. With full-duplex bodies, the protocol's mode, nothing is answered
   before the end of the body. With buffered bodies Envoy waits for an answer to each message; where it sends no body
   before the headers are answered, the request is routed by load alone.
2. The service picks a server (or queues the request); the answer names its endpoint, and returns the body unchanged.
3. The response's messages update the request's account: status, first byte, usage.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import chain

from envoy.service.ext_proc.v3.external_processor_pb2 import HttpBody, HttpHeaders, ProcessingRequest

from skymemory.conductor.request import Request
from skymemory.conductor.scheduler import Refusal
from skymemory.router.admission import DECISION_HEADER, Overloaded, slo_outcome
from skymemory.router.api_error import ApiError
from skymemory.router.envoy import messages as say
from skymemory.router.envoy.picker_service import NO_PROMPT, RETRY_AFTER_S, PickerService
from skymemory.router.queue import Entry
from skymemory.router.request_account import RequestAccount, UsageReader

UNAVAILABLE = ("502", "503", "504")
PIECE_COST_BYTES = 48
"""Memory of a piece of a body beside its bytes."""
RESPONSE_HEADERS = frozenset((":status", "content-type", "content-encoding"))


class Exchange:
    """``receive`` every message of the stream, then call ``closed`` once, however it ended."""

    def __init__(self, service: PickerService, later: Callable[[Iterable[bytes]], None] = lambda answers: None) -> None:
        """``later``: sends the answers of a request that had to wait for a server."""
        self._service = service
        self._later = later
        self._turned_away = service.streams >= service.settings.max_streams
        service.streams += 1
        self._request_mode = self._response_mode = say.FULL_DUPLEX
        self._headers: dict[str, str] = {}
        self._subset: frozenset[str] | None = None
        self._body: list[bytes] = []
        """In pieces as received: a growing buffer would be copied again and again, and fragment the heap."""
        self._body_bytes = 0
        self._whole: bytes | None = None
        """The joined body, where a thread has read it: joining 16 MB again would block the event loop for some ms."""
        self._has_body = False
        self._answered = False
        """The request was routed, or refused."""
        self._read: Request | ApiError | None = None
        self._waiting: tuple[Request, bytes, bool] | None = None
        """While it is queued: the request, its body, and whether trailers ended it."""
        self._entry: Entry | None = None
        """Its place in the queue, if it was in it."""
        self._began_s = self._first_s = 0.0
        self._account: RequestAccount | None = None
        self._usage: UsageReader | None = None

    def ends_request(self, message: ProcessingRequest, least: int) -> bool:
        """Whether ``message`` completes an unanswered request with a body of ``least`` bytes or more."""
        last = message.request_body
        size = self._body_bytes + len(last.body)
        ends = last.end_of_stream or message.WhichOneof("request") == "request_trailers"
        return ends and not self._answered and least <= size <= self._service.most_body_bytes

    def whole_request(self, message: ProcessingRequest) -> tuple[Mapping[str, str], bytes]:
        """Headers and body of the request that ``message`` completes, to be read in a thread before ``receive``."""
        self._whole = b"".join((*self._body, message.request_body.body))
        return self._headers, self._whole

    def receive(
        self, message: ProcessingRequest, now_s: float, read: Request | ApiError | None = None
    ) -> Iterable[bytes]:
        """The encoded messages to send now, in order: a tuple, empty where further messages must come first. For a long
        body it is an iterator, which encodes each piece on demand.

        ``read``: the result of reading ``whole_request``; None: it is read here.
        """
        self._read = read
        if message.HasField("protocol_config"):
            # Only in a stream's first message, and not from all data planes; the others use full duplex.
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
                    return (say.REQUEST_TRAILERS,)
                return self._choose(now_s, trailers=True)
            case "response_headers":
                return self._response_headers(message, message.response_headers, now_s)
            case "response_body":
                return self._response_body(message.response_body, now_s)
            case "response_trailers":
                self._response_ends(now_s)
                return (say.RESPONSE_TRAILERS,)
        return ()

    def held_bytes(self) -> int:
        """Memory of the request's body, until it is complete."""
        return self._body_bytes + PIECE_COST_BYTES * len(self._body)

    def too_much(self) -> Iterable[bytes]:
        """Refuse it: the memory for incomplete bodies is full, and this one is among the longest."""
        if self._answered:
            return ()
        return self._refuse(self._busy(503, "the picker's memory for request bodies is full; try again"))

    def closed(self, now_s: float) -> None:
        """The stream has ended: the exchange is complete, or the client or Envoy disconnected."""
        self._service.streams -= 1
        if self._waiting is not None and self._entry is not None and self._service.room is not None:
            self._waiting = None
            self._service.room.leave(self._entry)
        if self._account is not None:
            if self._account.waits:
                self._service.counters.add("requests_abandoned_total")
            self._account.close(now_s)
            self._service.look()

    # The queue

    def called(self, now_s: float) -> None:
        waited, self._waiting = self._waiting, None
        if waited is not None:
            self._later(self._route(*waited, now_s))

    def turned_away(self, refusal: Refusal) -> None:
        self._waiting = None
        self._later(self._refuse(Overloaded(refusal)))

    # The request

    def _request_headers(self, message: ProcessingRequest, headers: HttpHeaders, now_s: float) -> Iterable[bytes]:
        if self._headers or self._answered:
            return ()  # one stream is one request: no protocol sends further headers
        self._began_s = now_s
        self._headers = say.headers_of(headers)
        self._subset = say.subset_of(message)
        self._service.counters.add("requests_total")
        if self._turned_away:
            most = self._service.settings.max_streams
            return self._refuse(self._busy(429, f"{most} requests are in flight; try again"))
        if headers.end_of_stream:
            return self._choose(now_s)
        if self._request_mode not in (say.FULL_DUPLEX, say.BUFFERED):
            return self._choose(now_s, blind=True)
        return () if self._request_mode == say.FULL_DUPLEX else (say.request_headers(),)

    def _request_body(self, body: HttpBody, now_s: float) -> Iterable[bytes]:
        if self._answered:
            # Some versions of Envoy send a large body's last piece twice (envoy#46237). In all modes but full duplex
            # Envoy waits for an answer to each piece.
            return () if self._request_mode == say.FULL_DUPLEX else (say.request_body(),)
        self._has_body = True
        most = self._service.most_body_bytes
        piece = body.body
        if self._body_bytes + len(piece) > most:
            return self._refuse(ApiError(413, f"the request's body is longer than {most:,} bytes"))
        if piece:
            self._body.append(piece)
            self._body_bytes += len(piece)
        return self._choose(now_s) if body.end_of_stream or self._request_mode == say.BUFFERED else ()

    def _choose(self, now_s: float, trailers: bool = False, blind: bool = False) -> Iterable[bytes]:
        """``blind``: Envoy sends the body only after this is answered."""
        if self._read is not None and self._whole is not None:
            body = self._whole
        else:
            body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._forget_body()
        try:
            if isinstance(self._read, ApiError):
                raise self._read
            request = NO_PROMPT if blind else self._read or self._service.read(self._headers, body)
            if self._response_mode == say.NONE:
                # Only the response's headers are reported, and streamed ones come before the prefill.
                request = replace(request, streams=False)
        except ApiError as error:
            return self._refuse(error)
        room = self._service.must_wait(request, self._subset, now_s)
        if room is None:
            return self._route(request, body, trailers, now_s)
        self._waiting = request, body, trailers
        entry = room.wait(self, request, len(body), self._subset)
        if isinstance(entry, Refusal):
            self._waiting = None
            return self._refuse(Overloaded(entry))
        self._entry = entry
        return ()

    def _route(self, request: Request, body: bytes, trailers: bool, now_s: float) -> Iterable[bytes]:
        try:
            placement = self._service.choose(request, self._subset, now_s)
        except ApiError as error:
            return self._refuse(error)
        self._answered = True
        self._account = RequestAccount(self._service.scheduler, placement, now_s, self._service.deferred)
        decision = placement.prefill
        self._service.counters.add("picks_total", label=decision.server)
        self._service.counters.add("prompt_tokens_total", request.prompt.tokens)
        self._service.counters.add("matched_tokens_total", decision.matched_tokens)
        return self._go_on(body, self._service.endpoints(decision), trailers)

    def _go_on(self, body: bytes, endpoints: str, trailers: bool) -> Iterable[bytes]:
        if self._has_body and self._request_mode == say.BUFFERED:
            return (say.request_body(endpoints),)
        pieces = say.streamed_request(body, end=not trailers) if self._has_body else ()
        answers = chain((say.request_headers(endpoints),), pieces, (say.REQUEST_TRAILERS,) if trailers else ())
        return answers if len(body) > say.PIECE_BYTES else tuple(answers)

    def _busy(self, status: int, message: str) -> ApiError:
        return ApiError(status, message, retry_after_s=RETRY_AFTER_S)

    def _refuse(self, error: ApiError) -> Iterable[bytes]:
        self._answered = True
        self._forget_body()
        self._service.counters.add("requests_refused_total", label=str(error.status))
        return (say.immediate(error.status, error.message, error.retry_after_s),)

    def _forget_body(self) -> None:
        self._body.clear()
        self._body_bytes, self._whole = 0, None

    # The response

    def _response_headers(self, message: ProcessingRequest, headers: HttpHeaders, now_s: float) -> Iterable[bytes]:
        found = say.some_headers(headers, RESPONSE_HEADERS)
        added = {}
        if self._account is not None:
            self._response_begins(self._account, found.get(":status", ""), message, now_s)
            if self._service.settings.tell_decisions and DECISION_HEADER in self._headers:
                added[DECISION_HEADER] = json.dumps(self._account.decision.as_json())
        self._usage = UsageReader(
            found.get("content-type", "").encode("latin-1"), found.get("content-encoding", "").encode("latin-1")
        )
        if headers.end_of_stream:
            self._response_ends(now_s)
        return (say.response_headers(added),)

    def _response_begins(self, account: RequestAccount, status: str, message: ProcessingRequest, now_s: float) -> None:
        chosen, served, by_envoy = account.decision.server, say.served_of(message), say.is_envoys_own(message)
        if served and account.served_by(served, now_s):
            # Only known names become labels: Envoy may name an address that has left, or that never was an endpoint.
            label = served if served in self._service.picker.fleet.servers else "other"
            self._service.counters.add("fallbacks_total", label=label)
            self._refused_by(chosen, now_s)
        if by_envoy or (by_envoy is None and status in UNAVAILABLE):
            # The server named is then the last that Envoy tried, and it did not answer.
            self._refused_by(served or chosen, now_s)
        else:
            self._service.backends.answered(served or chosen)
        self._service.counters.add("responses_total", label=f"{status[:1]}xx")
        if not status.startswith("2"):
            account.failed(now_s)
            self._service.look()
        elif self._response_mode == say.NONE:
            self._first_s = now_s
            account.first_byte(now_s)
            self._service.look()

    def _response_body(self, body: HttpBody, now_s: float) -> Iterable[bytes]:
        if self._usage is not None and body.body:
            self._usage.add(body.body)
            # A response that is not streamed comes after decoding, and reports at its end what was cached.
            if self._usage.streams and self._account is not None and self._account.waits:
                self._first_s = now_s
                self._account.first_byte(now_s)
                self._service.look()
        if body.end_of_stream:
            self._response_ends(now_s)
        if self._response_mode != say.FULL_DUPLEX:
            return (say.RESPONSE_BODY,)
        pieces = say.streamed_response(body.body, body.end_of_stream)
        return pieces if len(body.body) > say.PIECE_BYTES else tuple(pieces)

    def _response_ends(self, now_s: float) -> None:
        reader, account, self._usage = self._usage, self._account, None
        if reader is None or account is None:
            return
        usage, slo, met = reader.usage(), account.decision.request.slo, None
        if slo is not None and account.is_open:
            ttft_s, took_s = (self._first_s or now_s) - self._began_s, now_s - self._began_s
            kept = slo_outcome(slo, ttft_s, took_s, None if usage is None else usage.output_tokens)
            self._service.counters.add("promises_total", label=kept)
            met = kept == "kept"
        account.ended(now_s, usage, met)
        if usage is not None:
            if self._entry is not None and (work := usage.work) is not None:
                self._service.queue.corrected(self._entry, work)
            if usage.cached_tokens is not None:
                self._service.counters.add("cached_tokens_total", usage.cached_tokens)
                self._service.counters.add("told_prompt_tokens_total", usage.prompt_tokens)
        self._service.look()

    def _refused_by(self, server: str, now_s: float) -> None:
        self._service.backends.failed(server, "it accepted no request", now_s)
