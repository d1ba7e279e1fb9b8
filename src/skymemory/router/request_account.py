"""Accounting of a request: its load and prefix in the scheduler's books, and the tokens of its response."""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, NamedTuple

import msgspec

from skymemory.conductor.request import Decision
from skymemory.conductor.scheduler import Refusal, ScheduledRequest, Scheduler

log = logging.getLogger("skymemory.router")

MAX_JSON_BYTES = 1 << 20
TAIL_BYTES = 8192
"""Bytes kept of a stream's end, which carries the usage."""
HEAD_BYTES = 2048
"""Bytes kept of a stream's start: in Messages, the prompt's tokens."""
Work = Callable[[], object]


class DeferredWork:
    """Executor of accounting in order: at once or, so that no response waits, when the event loop is idle."""

    def __init__(self, on_fault: Callable[[], None] = lambda: None) -> None:
        """``on_fault`` is called for each exception."""
        self.schedule: Callable[[Work], object] | None = None
        self._on_fault = on_fault
        self._pending: deque[Work] = deque()

    def run(self, work: Work) -> None:
        if self.schedule is None:
            work()
            return
        if not self._pending:
            self.schedule(self.flush)
        self._pending.append(work)

    def flush(self) -> None:
        while self._pending:
            work = self._pending.popleft()
            try:
                work()
            except Exception:
                log.exception("accounting of a request failed")
                self._on_fault()


class Usage(NamedTuple):
    """Token counts that an engine reports; None: not reported."""

    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int | None = None

    def cached_of(self, tokens: int) -> int | None:
        """Scale the cached tokens from the engine's to the router's count of the prompt."""
        if self.cached_tokens is None or not self.prompt_tokens:
            return self.cached_tokens
        return round(self.cached_tokens * tokens / self.prompt_tokens)

    @property
    def work(self) -> float | None:
        """Tokens computed and generated."""
        if self.output_tokens is None:
            return None
        return float(self.prompt_tokens - (self.cached_tokens or 0) + self.output_tokens)


class RequestAccount:
    """A request in the scheduler's books: begun on construction, moved if another server takes it, ended once.

    Repeated events do not count.
    """

    __slots__ = ("_deferred", "_has_first_byte", "_is_open", "_placement", "_scheduler", "decision")

    def __init__(
        self, scheduler: Scheduler, placement: ScheduledRequest, now_s: float, deferred: DeferredWork | None = None
    ) -> None:
        self.decision: Decision = placement.prefill
        self._scheduler = scheduler
        self._placement = placement
        self._deferred = deferred
        self._is_open = True
        self._has_first_byte = False  # the prefill has ended
        self._run_or_defer(scheduler.begin, placement, now_s)

    @property
    def waits(self) -> bool:
        return self._is_open and not self._has_first_byte

    @property
    def is_open(self) -> bool:
        return self._is_open

    @property
    def placement(self) -> ScheduledRequest:
        return self._placement

    def as_json(self) -> dict[str, object]:
        return self.decision.as_json()

    def served_by(self, server: str, now_s: float) -> bool:
        """Record the server. Return True if it is not the chosen server; no prefix is assumed there."""
        decision = self.decision
        if not self.waits or server == decision.server:
            return False
        self._run_or_defer(self._scheduler.failed, self._placement, now_s, False)
        self.decision = decision.taken_by(server)
        self._placement = replace(self._placement, prefill=self.decision)
        self._run_or_defer(self._scheduler.begin, self._placement, now_s)
        return True

    def first_byte(self, now_s: float, cached_tokens: int | None = None) -> None:
        if self.waits:
            self._has_first_byte = True
            self._run_or_defer(self._scheduler.prefilled, self._placement, now_s, cached_tokens)

    def on_request_end(self, now_s: float, usage: Usage | None = None, met: bool | None = None) -> None:
        """Record the end. ``met``: the promise was kept (None: no promise, or unknown)."""
        cached_tokens = output_tokens = None
        if usage is not None:
            decision, output_tokens = self.decision, usage.output_tokens
            prompt_tokens = decision.request.prompt.tokens
            cached_tokens = usage.cached_of(prompt_tokens)
            server = self._scheduler.prefill.fleet.servers.get(decision.server)
            if server is not None:
                server.reported_tokens(prompt_tokens, usage.prompt_tokens)
        if self.waits:  # not streamed: the first byte is only reported now, and the cached tokens with it
            self.first_byte(now_s, cached_tokens)
            cached_tokens = None
        if self._is_open:
            self._is_open = False
            self._run_or_defer(
                self._scheduler.on_request_end, self._placement, now_s, met, cached_tokens, output_tokens
            )

    def failed(self, now_s: float) -> None:
        if self.waits:
            self._is_open = False
            self._run_or_defer(self._scheduler.failed, self._placement, now_s, False)

    def close(self, now_s: float) -> None:
        """End what is open, as failed if there was no first byte."""
        self.failed(now_s)
        self.on_request_end(now_s)

    # Entries of a request keep their order even if deferred: `DeferredWork` is first in, first out. `_is_open` and
    # `_has_first_byte` change immediately, so that a second report of the same event is ignored even before the flush.

    def _run_or_defer(self, entry: Callable[..., object], *arguments: Any) -> None:
        if self._deferred is None:
            entry(*arguments)
        else:
            self._deferred.run(partial(entry, *arguments))


class PairAccount(RequestAccount):
    """A request with two entries, prefill and decode, which end independently.

    ``decision`` is the decode server's. Decoding may begin before the prefill ends.
    """

    __slots__ = ("_is_prefilling",)

    def __init__(self, scheduler: Scheduler, placement: ScheduledRequest, now_s: float) -> None:
        super().__init__(scheduler, placement, now_s)
        self._is_prefilling = True
        self._set_placement(placement)

    def _set_placement(self, placement: ScheduledRequest) -> None:
        assert placement.decode is not None
        self._placement, self.decision = placement, placement.decode

    @property
    def prefill(self) -> Decision:
        return self._placement.prefill

    def as_json(self) -> dict[str, object]:
        decode = {key: value for key, value in self.decision.as_json().items() if key in _OF_DECODE}
        tbt_s = self.decision.estimated_tbt_s
        decode["estimated_tbt_s"] = None if tbt_s is None else round(tbt_s, 6)
        return {**self.prefill.as_json(), "decode": decode}

    def prefilled(self, now_s: float, usage: Usage | None = None) -> Refusal | None:
        """Record the prefill's answer. A refusal ends the request."""
        if not self._is_prefilling or not self._is_open:
            return None
        self._is_prefilling = False
        cached_tokens, prompt_tokens = None, self.prefill.request.prompt.tokens
        server = self._scheduler.prefill.fleet.servers.get(self.prefill.server)
        if usage is not None and server is not None:
            cached_tokens = usage.cached_of(prompt_tokens)
            server.reported_tokens(prompt_tokens, usage.prompt_tokens)
        refusal = self._scheduler.prefilled(self._placement, now_s, cached_tokens, decodes=self._has_first_byte)
        if refusal is not None:
            self._is_open = False
        return refusal

    def prefill_lost(self, now_s: float) -> None:
        if self._is_prefilling and self._is_open:
            self._is_prefilling = False
            self._scheduler.prefill_lost(self._placement, now_s)

    def prefill_again(self, now_s: float, among: Collection[str] | None) -> None:
        """Move the prefill.

        Raises:
            NoServer: nothing has changed.
        """
        assert self._is_prefilling and self._is_open
        self._set_placement(self._scheduler.prefill_again(self._placement, now_s, among))

    def decode_again(self, now_s: float, among: Collection[str] | None) -> None:
        """Move the decoding before its first byte.

        Raises:
            NoServer: nothing has changed.
        """
        assert self._is_open
        self._set_placement(self._scheduler.decode_again(self._placement, now_s, self._has_first_byte, among))
        self._has_first_byte = False

    def first_byte(self, now_s: float, cached_tokens: int | None = None) -> None:
        """Record the first byte, or that an unstreamed answer is computed."""
        if self.waits:
            self._has_first_byte = True
            self._scheduler.decoding(self._placement, now_s)

    def on_request_end(self, now_s: float, usage: Usage | None = None, met: bool | None = None) -> None:
        if not self._is_open:
            return
        self.prefill_lost(now_s)
        self.first_byte(now_s)
        self._is_open = False
        # The cached tokens of this usage are what the decode server got from the prefill server: they are not passed
        # on.
        output_tokens = None if usage is None else usage.output_tokens
        self._scheduler.on_request_end(self._placement, now_s, met, output_tokens=output_tokens)

    def failed(self, now_s: float) -> None:
        if self._is_open and not self._has_first_byte:
            self._is_open = False
            self._scheduler.failed(self._placement, now_s, not self._is_prefilling)


class ObservedPair(PairAccount):
    """A pair whose steps a sidecar runs: the answer's first byte ends the prefill."""

    __slots__ = ()

    def served_by(self, server: str, now_s: float) -> bool:
        if not self.waits or server == self.decision.server:
            return False
        self._set_placement(self._scheduler.decode_taken(self._placement, server, now_s))
        return True

    def first_byte(self, now_s: float, cached_tokens: int | None = None) -> None:
        super().first_byte(now_s)  # first, since a request that decodes already is not refused
        self.prefilled(now_s)

    def on_request_end(self, now_s: float, usage: Usage | None = None, met: bool | None = None) -> None:
        if self._is_open:
            self.first_byte(now_s)
        super().on_request_end(now_s, usage, met)


_OF_DECODE = frozenset(("server", "fallbacks", "strategy", "score", "reasons"))


_Count = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]  # token count in the range that floats add exactly


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None


class _ReportedUsage(msgspec.Struct):
    """``usage`` as all APIs name its fields."""

    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: _Count | None = None
    output_tokens: _Count | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: _Count | None = None
    cache_creation_input_tokens: _Count | None = None

    @property
    def prompt(self) -> int | None:
        if self.input_tokens is None:
            return self.prompt_tokens
        # Messages counts cached tokens separately; in Responses `input_tokens` includes them.
        return self.input_tokens + (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)

    @property
    def cached(self) -> int | None:
        if self.cache_read_input_tokens is not None:
            return self.cache_read_input_tokens
        details = self.prompt_tokens_details or self.input_tokens_details
        return None if details is None else details.cached_tokens

    @property
    def output(self) -> int | None:
        return self.completion_tokens if self.output_tokens is None else self.output_tokens


class _Inner(msgspec.Struct):
    usage: _ReportedUsage | None = None


class _Response(msgspec.Struct):
    usage: _ReportedUsage | None = None
    response: _Inner | None = None  # field of events of Responses
    message: _Inner | None = None  # field of the first event of Messages


_decode = msgspec.json.Decoder(_Response).decode
_decode_usage = msgspec.json.Decoder(_ReportedUsage).decode
_FIRST_EVENT = re.compile(rb"data: ?(\{.*\})\r?\n")
# Usage in an event longer than the kept tail: the last event of Responses contains the whole answer.
_USAGE = re.compile(rb'"usage": ?(\{(?:[^{}]|\{[^{}]*\})*\})')


class UsageReader:
    __slots__ = ("_head", "_json_pieces", "_tail", "events", "streams")

    def __init__(self, content_type: bytes, content_encoding: bytes = b"") -> None:
        self.streams = content_type.startswith(b"text/event-stream")
        is_readable = not content_encoding and (self.streams or content_type.startswith(b"application/json"))
        self._json_pieces: list[bytes] | None = [] if is_readable else None
        self._head = self._tail = b""
        self.events = 0  # events of a stream: engines send at least one per token

    @property
    def between_events(self) -> bool:
        """True if the router may insert its own event."""
        return not self._tail or self._tail.endswith((b"\n\n", b"\r\n\r\n"))

    def add(self, piece: bytes) -> None:
        """Keep what ``usage`` needs of a piece of the response."""
        if self.streams:
            self.events += piece.count(b"data:")
            if len(self._head) < HEAD_BYTES:
                self._head += piece[:HEAD_BYTES]
            self._tail = piece[-TAIL_BYTES:] if len(piece) >= TAIL_BYTES else (self._tail + piece)[-TAIL_BYTES:]
        elif self._json_pieces is not None:
            self._json_pieces.append(piece)
            if len(self._json_pieces) > 1 and sum(map(len, self._json_pieces)) > MAX_JSON_BYTES:
                self._json_pieces = None

    def usage(self) -> Usage | None:
        """Return the engine's counts, of a stream the last."""
        if self._json_pieces is None:
            return None
        if not self.streams:
            return usage_in(b"".join(self._json_pieces))
        tail, at = self._tail, len(self._tail)
        while (at := tail.rfind(b'"usage"', 0, at)) >= 0:
            begin, end = tail.rfind(b"\n", 0, at) + 1, tail.find(b"\n", at)
            line, at = tail[begin : end if end >= 0 else len(tail)], begin
            if line.startswith(b"data:"):
                candidate = _read_usage(line[5:])
            else:  # the start of the line is not kept
                candidate = _last_usage(line)
            if candidate is not None and (usage := _get_valid_usage(candidate, self._first_usage())) is not None:
                return usage
        return None

    def _first_usage(self) -> _ReportedUsage | None:
        """Return the first event's usage: the last event of Messages may omit the prompt's tokens."""
        first = _FIRST_EVENT.search(self._head)
        return None if first is None or b'"message_start"' not in first[1] else _read_usage(first[1])


def usage_in(json: bytes) -> Usage | None:
    raw = _read_usage(json)
    return None if raw is None else _get_valid_usage(raw)


def _read_usage(json: bytes) -> _ReportedUsage | None:
    try:
        response = _decode(json)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if response.usage is not None:
        return response.usage
    inner = response.response or response.message
    return None if inner is None else inner.usage


def _last_usage(line: bytes) -> _ReportedUsage | None:
    last = None
    for match in _USAGE.finditer(line):
        last = match[1]
    try:
        return None if last is None else _decode_usage(last)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _get_valid_usage(usage: _ReportedUsage, first: _ReportedUsage | None = None) -> Usage | None:
    """Return plausible counts. ``first``: usage of the stream's first event."""
    prompt, of_prompt, output = usage.prompt, usage, usage.output
    if prompt is None and first is not None:
        prompt, of_prompt = first.prompt, first
    cached = of_prompt.cached
    if prompt is None or prompt < 0:
        return None
    if cached is not None and not 0 <= cached <= prompt:
        cached = None
    return Usage(prompt, cached, None if output is not None and output < 0 else output)
