"""Requests of the endpoint picker, as Envoy reports them (ext_proc). No I/O.

1. An ``ExtProcExchange`` collects headers and body. Full-duplex bodies are answered at their end, buffered bodies
   message by message. If Envoy sends no body before an answer, the request is routed by load alone.
2. ``PickerService`` picks a server (or queues the request).
3. The response's messages update the request's account.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

from skymemory.conductor.picker import NoServer, Picker
from skymemory.conductor.request import Decision, Request
from skymemory.conductor.scheduler import Refusal, ScheduledRequest, Scheduler
from skymemory.conductor.strategies.strategy_base import requests_at
from skymemory.errors import missing_extra
from skymemory.metrics import Counters
from skymemory.router import paths
from skymemory.router.admission import DECISION_HEADER, Overloaded, slo_outcome
from skymemory.router.api_error import ApiError
from skymemory.router.apis.translation import COUNT_TOKENS, error_body
from skymemory.router.backends import Backends
from skymemory.router.decoding import lacking_few
from skymemory.router.failure.evidence import Attempts
from skymemory.router.failure.faults import Fault, fault_of, retry_after_s
from skymemory.router.failure.silence import FIRST_TOKEN, NO_PROMPT, WHOLE
from skymemory.router.prompts.reader import PROMPT_PATHS, PromptReader, without_prompt
from skymemory.router.prompts.splitting import fields_of, why_whole
from skymemory.router.prompts.unpacking import is_packed, unpacked
from skymemory.router.queue import QueueEntry, QueueSettings, RequestQueue
from skymemory.router.request_account import DeferredWork, ObservedPair, RequestAccount, UsageReader
from skymemory.router.settings import PickerSettings
from skymemory.router.waiting_room import WaitingRoom

try:
    from envoy.service.ext_proc.v3.external_processor_pb2 import HttpBody, HttpHeaders, ProcessingRequest

    from skymemory.router.envoy import messages as say
except ImportError as error:
    raise missing_extra("the endpoint picker", str(error.name), "envoy", "router") from error

COUNTED_BY_SERVER = ("picks_total", "prefill_picks_total", "fallbacks_total", "ejections_total")
RETRY_AFTER_S = 1
WITHOUT_PROMPT = without_prompt()
PIECE_COST_BYTES = 48
RESPONSE_HEADERS = frozenset((":status", "content-type", "content-encoding", "retry-after"))


@dataclass(slots=True)
class PickerService:
    scheduler: Scheduler
    reader: PromptReader
    backends: Backends
    settings: PickerSettings = field(default_factory=PickerSettings)
    most_body_bytes: int = 16 << 20
    counters: Counters = field(default_factory=Counters)
    thread_bytes: int | None = None  # length from which threads read bodies; None: none
    streams: int = 0
    deferred: DeferredWork = field(init=False)
    queue: RequestQueue = field(default_factory=lambda: RequestQueue(QueueSettings()))
    room: WaitingRoom | None = None  # queue; None while the picker does not run: requests are refused
    alone: Scheduler | None = None  # scheduler of requests for a single server; None without roles
    refuses_unknown_paths: bool = False
    split_from: int = 0  # missing tokens below which a decode server serves a prompt alone

    def __post_init__(self) -> None:
        self.backends.on_ejected, self.backends.on_removed = self._on_ejected, self._on_removed
        self.deferred = DeferredWork(lambda: self.counters.add("faults_total"))

    @property
    def picker(self) -> Picker:
        return self.scheduler.prefill

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        self.deferred.schedule = loop.call_soon
        self.room = WaitingRoom(self.queue, self.has_room, loop, self.deferred.flush)

    def close(self) -> None:
        self.deferred.flush()
        self.deferred.schedule = None
        if self.room is not None:
            self.room.close()

    def _on_ejected(self, server: str) -> None:
        self.counters.add("ejections_total", label=server)

    def _on_removed(self, server: str) -> None:
        for name in COUNTED_BY_SERVER:
            self.counters.forget(name, server)

    def read(self, headers: Mapping[str, str], body: bytes) -> Request:
        """Parse a request.

        Raises:
            ApiError: no engine could read it, or its path is refused.
        """
        known = _get_prompt_path(headers)
        if known is None and self.refuses_unknown_paths and not paths.is_known_end(path := _get_path(headers)):
            raise paths.unknown(path)
        return WITHOUT_PROMPT if known is None else self.reader.read(known, headers, body)

    def unpacked(self, headers: Mapping[str, str], body: bytes) -> bytes:
        """Decompress a prompt's body; Envoy passes it on as received.

        Raises:
            ApiError: it cannot be decompressed, or is too long then.
        """
        coding = headers.get("content-encoding")
        if not coding or _get_prompt_path(headers) is None:
            return body
        return unpacked(body, coding.encode("latin-1", "replace"), self.most_body_bytes)

    def splits(self, headers: Mapping[str, str], body: bytes) -> bool:
        if self.alone is None or (path := _get_prompt_path(headers)) is None:
            return False
        fields = fields_of(body)
        return fields is not None and not why_whole(path, fields)

    def must_wait(self, request: Request, among: frozenset[str] | None, now_s: float) -> WaitingRoom | None:
        """Return the waiting room if others wait or no server has room."""
        self.deferred.flush()
        room = self.room
        if room is None or not self.queue.settings.most_requests or not self.settings.max_requests:
            return None
        self.backends.review(now_s)
        return None if room.is_open_to(request, among) else room

    def poll_waiting_room(self) -> None:
        """Serve waiting requests after the deferred work that makes room."""
        if self.room is not None and len(self.queue):
            self.deferred.run(self.room.poll)

    def choose(
        self, request: Request, among: Collection[str] | None, now_s: float, splits: bool = False, client: str = ""
    ) -> ScheduledRequest:
        """Choose the server or servers of a request.

        Args:
            splits: prefill and decode may be separate.
            client: sender, whose failures keep it away from servers.

        Raises:
            ApiError: no server may have it (503), or all are full or admission refuses it (429).
        """
        self.backends.policy.on_request(client, now_s)
        avoid = self.backends.avoided(client, now_s)
        # Four filters: servers of the model, Envoy's subset, servers to avoid after failures, and room. The strategy
        # ranks what remains.
        serving = self.backends.serving(request)
        if serving is not None:
            among = serving if among is None else [name for name in among if name in serving]
        if avoid:
            among = self.backends.without(self.backends.known.keys() if among is None else frozenset(among), avoid)
        scheduler, decode_among, why_alone = self.scheduler, None, ""
        if self.alone is not None:
            few_token_servers = lacking_few(scheduler, request, among, self.split_from) if splits else ()
            if few_token_servers:
                scheduler, among, why_alone = self.alone, few_token_servers, "few-tokens"
            elif splits and self.backends.has_prefill(among):
                decode_among = among
            else:
                scheduler, alone_servers = self.alone, self.backends.alone(request, ())
                among = alone_servers if among is None else [name for name in among if name in alone_servers]
                why_alone = "no-prefill-server" if splits else "whole"
        if scheduler is self.scheduler:
            among = self._get_servers_with_room(among, now_s)
        try:
            placement = scheduler.place(request, now_s, among, decode_among)
        except NoServer as error:
            raise ApiError(503, str(error), retry_after_s=RETRY_AFTER_S) from error
        if isinstance(placement, Refusal):
            raise Overloaded(placement)
        if why_alone:
            self.counters.add("alone_total", label=why_alone)
        elif self.alone is not None:
            self.counters.add("two_steps_total")
        return placement

    def book(self, placement: ScheduledRequest, now_s: float) -> RequestAccount:
        if placement.decode is not None:
            return ObservedPair(self.scheduler, placement, now_s)
        return RequestAccount(self.alone or self.scheduler, placement, now_s, self.deferred)

    def endpoints(self, decision: Decision) -> str:
        """Return ``ip:port`` of the server and the fallbacks, best first."""
        most = self.settings.fallbacks  # the decision sorts its fallbacks only when they are read
        return ",".join((decision.server, *decision.fallbacks[:most])) if most else decision.server

    def has_room(self, request: Request, among: frozenset[str] | None) -> bool:
        """Return True if a server for the request is not full, or none is up, which is an error at once."""
        serving, now_s = self.backends.serving(request), time.monotonic()
        if serving is not None:
            among = serving if among is None else among & serving
        try:
            self._get_servers_with_room(among, now_s)
        except ApiError:
            return False
        return True

    def _get_servers_with_room(self, among: Collection[str] | None, now_s: float) -> Collection[str] | None:
        """Return servers that are not full (None: all), or raise ``ApiError`` (429)."""
        most = self.settings.max_requests
        if not most:
            return among
        able = [
            server for server in self.picker.fleet if server.takes_requests and (among is None or server.name in among)
        ]
        roomy = [server.name for server in able if requests_at(server, now_s) < most]
        if able and not roomy:
            message = f"all {len(able)} servers have {most} requests or more; try again"
            raise ApiError(429, message, retry_after_s=RETRY_AFTER_S)
        return roomy if len(roomy) < len(able) else among


def _get_path(headers: Mapping[str, str]) -> str:
    return headers.get(":path", "").partition("?")[0]


def _get_prompt_path(headers: Mapping[str, str]) -> str | None:
    # A gateway may strip the prefix of a path after it has asked, so the end of the path decides.
    path = _get_path(headers)
    prompt_path = next((prompt_path for prompt_path in PROMPT_PATHS if path.endswith(prompt_path)), None)
    return prompt_path if headers.get(":method") == "POST" else None


class ExtProcExchange:
    """A request and its response. ``receive`` every message, then call ``closed`` once."""

    def __init__(self, service: PickerService, later: Callable[[Iterable[bytes]], None] = lambda answers: None) -> None:
        """``later`` sends the answers of a queued request."""
        self._service = service
        self._send_later = later
        self._is_refused_at_once = service.streams >= service.settings.max_streams
        service.streams += 1
        self._request_mode = self._response_mode = say.FULL_DUPLEX
        self._headers: dict[str, str] = {}
        self._subset: frozenset[str] | None = None  # endpoints that Envoy allows; None: all
        self._body: list[bytes] = []  # pieces as received: a growing buffer would be copied and fragment the heap
        self._body_bytes = 0
        self._joined_body: bytes | None = None  # body joined in a thread: 16 MB would block for some ms
        self._plain_body: bytes | None = None  # decompressed
        self._has_body = False
        self._has_answered = False
        self._read_request: Request | ApiError | None = None
        self._queued_request: tuple[Request, bytes, bool, bool] | None = None  # arguments of `_choose_server`
        self._queue_entry: QueueEntry | None = None
        self._began_s = self._first_s = 0.0  # times of the request and of its first token
        self._account: RequestAccount | None = None
        self._attempts = Attempts("")
        self._usage: UsageReader | None = None

    def is_read_in_thread(self, message: ProcessingRequest) -> bool:
        """Return True if ``message`` completes a long or compressed body."""
        service, last = self._service, message.request_body
        size = self._body_bytes + len(last.body)
        ends = last.end_of_stream or message.WhichOneof("request") == "request_trailers"
        if not ends or self._has_answered or size > service.most_body_bytes:
            return False
        if size and self._is_packed:
            return _get_prompt_path(self._headers) is not None
        return service.thread_bytes is not None and service.thread_bytes <= size

    def read_whole(self, message: ProcessingRequest) -> Request | ApiError:
        """Read the request that ``message`` completes, in a thread. Errors are returned."""
        self._joined_body = b"".join((*self._body, message.request_body.body))
        try:
            self._plain_body = self._service.unpacked(self._headers, self._joined_body)
            return self._service.read(self._headers, self._plain_body)
        except ApiError as error:
            return error

    def may_be_longer_than(self, size_bytes: int) -> bool:
        return self.held_bytes() >= size_bytes or self._is_packed

    @property
    def _is_packed(self) -> bool:
        return is_packed(self._headers.get("content-encoding", "").encode("latin-1", "replace"))

    def receive(
        self, message: ProcessingRequest, now_s: float, read: Request | ApiError | None = None
    ) -> Iterable[bytes]:
        """Process a message; return the messages to send, for a long body encoded on demand. ``read``: result of
        ``read_whole``.
        """
        self._read_request = read
        if message.HasField("protocol_config"):
            # Only the first message of a stream has it, and not from all data planes; the others use full duplex.
            self._request_mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        if message.observability_mode:
            return ()
        match message.WhichOneof("request"):
            case "request_headers":
                return self._on_request_headers(message, message.request_headers, now_s)
            case "request_body":
                return self._on_request_body(message.request_body, now_s)
            case "request_trailers":
                if self._has_answered:
                    return (say.REQUEST_TRAILERS,)
                return self._read_and_route(now_s, trailers=True)
            case "response_headers":
                return self._on_response_headers(message, message.response_headers, now_s)
            case "response_body":
                return self._on_response_body(message.response_body, now_s)
            case "response_trailers":
                self._on_response_end(now_s)
                return (say.RESPONSE_TRAILERS,)
        return ()

    def held_bytes(self) -> int:
        return self._body_bytes + PIECE_COST_BYTES * len(self._body)

    def too_much(self) -> Iterable[bytes]:
        """Refuse the request: the memory for bodies is full."""
        if self._has_answered:
            return ()
        return self._refuse(self._get_busy_error(503, "the picker's memory for request bodies is full; try again"))

    def closed(self, now_s: float) -> None:
        self._service.streams -= 1
        if self._queued_request is not None and self._queue_entry is not None and self._service.room is not None:
            self._queued_request = None
            self._service.room.leave(self._queue_entry)
        if self._account is not None:
            if self._account.waits:
                self._service.counters.add("requests_abandoned_total")
                self._service.backends.on_dropped(self._attempts, self._account.decision.server, now_s)
            self._account.close(now_s)
            self._service.poll_waiting_room()

    # The queue

    def called(self, now_s: float) -> None:
        waited, self._queued_request = self._queued_request, None
        if waited is not None:
            self._send_later(self._choose_server(*waited, now_s))

    def turned_away(self, refusal: Refusal) -> None:
        self._queued_request = None
        self._send_later(self._refuse(Overloaded(refusal)))

    # The request

    def _on_request_headers(self, message: ProcessingRequest, headers: HttpHeaders, now_s: float) -> Iterable[bytes]:
        """Answer at once only if no body follows, or Envoy waits for that before the body."""
        if self._headers or self._has_answered:
            return ()  # a stream is a single request: no protocol sends further headers
        self._began_s = now_s
        self._headers = say.headers_of(headers)
        self._subset = say.subset_of(message)
        self._service.counters.add("requests_total")
        if self._is_refused_at_once:
            most = self._service.settings.max_streams
            return self._refuse(self._get_busy_error(429, f"{most} requests are in flight; try again"))
        if headers.end_of_stream:
            return self._read_and_route(now_s)
        if self._request_mode not in (say.FULL_DUPLEX, say.BUFFERED):
            return self._read_and_route(now_s, blind=True)
        return () if self._request_mode == say.FULL_DUPLEX else (say.request_headers(),)

    def _on_request_body(self, body: HttpBody, now_s: float) -> Iterable[bytes]:
        if self._has_answered:
            # Some versions of Envoy send the last piece of a large body twice (envoy#46237). In all modes but full
            # duplex Envoy waits for an answer to each piece.
            return () if self._request_mode == say.FULL_DUPLEX else (say.request_body(),)
        self._has_body = True
        most = self._service.most_body_bytes
        piece = body.body
        if self._body_bytes + len(piece) > most:
            return self._refuse(ApiError(413, f"the request's body is longer than {most:,} bytes"))
        if piece:
            self._body.append(piece)
            self._body_bytes += len(piece)
        return self._read_and_route(now_s) if body.end_of_stream or self._request_mode == say.BUFFERED else ()

    def _read_and_route(self, now_s: float, trailers: bool = False, blind: bool = False) -> Iterable[bytes]:
        """Read the request, then route or queue it. ``blind``: Envoy sends the body only after this is answered."""
        if self._read_request is not None and self._joined_body is not None:
            body, plain_body = self._joined_body, self._plain_body
        else:
            body, plain_body = self._body[0] if len(self._body) == 1 else b"".join(self._body), None
        self._forget_body()
        try:
            if isinstance(self._read_request, ApiError):
                raise self._read_request
            if plain_body is None and not blind:
                plain_body = self._service.unpacked(self._headers, body)
            request = (
                WITHOUT_PROMPT if blind else self._read_request or self._service.read(self._headers, plain_body or b"")
            )
            splits = not blind and self._service.splits(self._headers, plain_body or b"")
            if self._response_mode == say.NONE:
                # Only the response's headers are reported, and streamed responses send them before the prefill.
                request = replace(request, streams=False)
        except ApiError as error:
            return self._refuse(error)
        room = self._service.must_wait(request, self._subset, now_s)
        if room is None:
            return self._choose_server(request, body, splits, trailers, now_s)
        self._queued_request = request, body, splits, trailers
        entry = room.wait(self, request, len(body), self._subset)
        if isinstance(entry, Refusal):
            self._queued_request = None
            return self._refuse(Overloaded(entry))
        self._queue_entry = entry
        return ()

    def _choose_server(
        self, request: Request, body: bytes, splits: bool, trailers: bool, now_s: float
    ) -> Iterable[bytes]:
        try:
            client = self._attempts.client = _get_client(request, self._headers)
            placement = self._service.choose(request, self._subset, now_s, splits, client)
        except ApiError as error:
            return self._refuse(error)
        self._has_answered = True
        account = self._account = self._service.book(placement, now_s)
        self._on_sent(account, now_s)
        # `prefiller`: server named to the sidecar; None: there are no sidecars; empty: the sidecar's engine prefills.
        counters, prefiller = self._service.counters, None if self._service.alone is None else ""
        if placement.decode is not None:
            prefiller = placement.prefill.server
            counters.add("prefill_picks_total", label=prefiller)
        counters.add("picks_total", label=account.decision.server)
        counters.add("prompt_tokens_total", request.prompt.tokens)
        counters.add("matched_tokens_total", placement.prefill.matched_tokens)
        return self._answer_with_endpoints(body, self._service.endpoints(account.decision), prefiller, trailers)

    def _on_sent(self, account: RequestAccount, now_s: float) -> None:
        decision = account.decision
        kind = NO_PROMPT if decision.request is WITHOUT_PROMPT else FIRST_TOKEN
        if kind == FIRST_TOKEN and not decision.request.streams:
            kind = WHOLE
        estimate_s = decision.estimated_ttft_s or 0.0
        self._service.backends.policy.on_sent(self._attempts, decision.server, now_s, estimate_s, kind)

    def _answer_with_endpoints(
        self, body: bytes, endpoints: str, prefiller: str | None, trailers: bool
    ) -> Iterable[bytes]:
        """Return the answer's messages. ``prefiller``: prefill server, for the sidecar."""
        if self._has_body and self._request_mode == say.BUFFERED:
            return (say.request_body(endpoints, prefiller),)
        pieces = say.streamed_request(body, end=not trailers) if self._has_body else ()
        headers = say.request_headers(endpoints, prefiller)
        answers = chain((headers,), pieces, (say.REQUEST_TRAILERS,) if trailers else ())
        return answers if len(body) > say.PIECE_BYTES else tuple(answers)

    def _get_busy_error(self, status: int, message: str) -> ApiError:
        return ApiError(status, message, retry_after_s=RETRY_AFTER_S)

    def _refuse(self, error: ApiError) -> Iterable[bytes]:
        self._has_answered = True
        self._forget_body()
        self._service.counters.add("requests_refused_total", label=str(error.status))
        body = error_body(_get_path(self._headers), error)
        return (say.immediate(error.status, body, error.retry_after_s),)

    def _forget_body(self) -> None:
        self._body.clear()
        self._body_bytes, self._joined_body, self._plain_body = 0, None, None

    # The response

    def _on_response_headers(self, message: ProcessingRequest, headers: HttpHeaders, now_s: float) -> Iterable[bytes]:
        values = say.some_headers(headers, RESPONSE_HEADERS)
        added = {}
        if self._account is not None:
            self._on_response_begin(self._account, values, message, now_s)
            if self._service.settings.tell_decisions and DECISION_HEADER in self._headers:
                added[DECISION_HEADER] = json.dumps(self._account.as_json())
        self._usage = UsageReader(
            values.get("content-type", "").encode("latin-1"), values.get("content-encoding", "").encode("latin-1")
        )
        if headers.end_of_stream:
            self._on_response_end(now_s)
        return (say.response_headers(added),)

    def _on_response_begin(
        self, account: RequestAccount, headers: Mapping[str, str], message: ProcessingRequest, now_s: float
    ) -> None:
        """Report the answer or fault of the server asked, which may be a fallback."""
        backends, status = self._service.backends, headers.get(":status", "")
        chosen, served, by_envoy = account.decision.server, say.served_of(message), say.is_envoys_own(message)
        if served and account.served_by(served, now_s):
            # Only known names become labels: Envoy may name an address that has left, or never was an endpoint.
            label = served if backends.server(served) is not None else "other"
            self._service.counters.add("fallbacks_total", label=label)
            backends.on_fault(self._attempts, chosen, Fault.RESET, now_s)
            self._on_sent(account, now_s)
        # If Envoy made the response, the server named is the last that it tried, which did not answer.
        fault, wait_s = self._get_fault(headers, by_envoy, message), 0.0
        if fault is not None:
            wait_s = retry_after_s(headers.get("retry-after", "").encode("latin-1")) or 0.0
            backends.on_fault(self._attempts, served or chosen, fault, now_s, wait_s)
            backends.on_end(self._attempts, now_s)
        elif self._response_mode == say.NONE or not headers.get("content-type", "").startswith("text/event-stream"):
            backends.on_answer(self._attempts, served or chosen, now_s, status.startswith("2"))
        self._service.counters.add("responses_total", label=f"{status[:1]}xx")
        if not status.startswith("2"):
            account.failed(now_s)
            self._service.poll_waiting_room()
        elif self._response_mode == say.NONE:
            self._first_s = now_s
            account.first_byte(now_s)
            self._service.poll_waiting_room()

    def _on_response_body(self, body: HttpBody, now_s: float) -> Iterable[bytes]:
        if self._usage is not None and body.body:
            self._usage.add(body.body)
            # A response that is not streamed arrives after decoding, and reports at its end what was cached.
            if self._usage.streams and self._account is not None and self._account.waits:
                self._first_s = now_s
                self._service.backends.on_answer(self._attempts, self._account.decision.server, now_s)
                self._account.first_byte(now_s)
                self._service.poll_waiting_room()
        if body.end_of_stream:
            self._on_response_end(now_s)
        if self._response_mode != say.FULL_DUPLEX:
            return (say.RESPONSE_BODY,)
        pieces = say.streamed_response(body.body, body.end_of_stream)
        return pieces if len(body.body) > say.PIECE_BYTES else tuple(pieces)

    def _on_response_end(self, now_s: float) -> None:
        reader, account, self._usage = self._usage, self._account, None
        if reader is None or account is None:
            return
        if _get_path(self._headers).endswith(COUNT_TOKENS):
            account.close(now_s)  # it reports nothing about the cache
            self._service.poll_waiting_room()
            return
        usage, slo, met = reader.usage(), account.decision.request.slo, None
        if slo is not None and account.is_open:
            ttft_s, took_s = (self._first_s or now_s) - self._began_s, now_s - self._began_s
            outcome = slo_outcome(slo, ttft_s, took_s, None if usage is None else usage.output_tokens)
            self._service.counters.add("promises_total", label=outcome)
            met = outcome == "kept"
        account.on_request_end(now_s, usage, met)
        if usage is not None:
            if self._queue_entry is not None and (work := usage.work) is not None:
                self._service.queue.corrected(self._queue_entry, work)
            if usage.cached_tokens is not None:
                self._service.counters.add("cached_tokens_total", usage.cached_tokens)
                self._service.counters.add("told_prompt_tokens_total", usage.prompt_tokens)
        self._service.poll_waiting_room()

    @staticmethod
    def _get_fault(headers: Mapping[str, str], by_envoy: bool | None, message: ProcessingRequest) -> Fault | None:
        if by_envoy:
            return Fault.UNCONNECTED if say.is_unconnected(message) else Fault.RESET
        status = headers.get(":status", "")
        return fault_of(int(status), "retry-after" in headers) if status.isascii() and status.isdigit() else None


def _get_client(request: Request, headers: Mapping[str, str]) -> str:
    return request.tenant or headers.get("x-forwarded-for", "").rpartition(",")[2].strip()
