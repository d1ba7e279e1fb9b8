"""Streaming client of an OpenAI endpoint that records the arrival of chunks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from skymemory.addresses import without_api_path
from skymemory.errors import InvalidInput, SkyMemoryError, connection_reason
from skymemory_lab.replay.prompts import PlannedRequest, Prompt
from skymemory_lab.replay.report import REFUSALS, ReplayOutcome, ResponseStatus

_USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
FEATURES: tuple[dict[str, Any], ...] = ({**_USAGE, "ignore_eos": True}, _USAGE, {})
"""Optional fields, most first: some servers refuse fields unknown to OpenAI."""
_AFTER_DONE_S = 1.0  # time to read on after ``[DONE]``, so that the connection can be reused
_WORDS_OF_ERROR = 300

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Target:
    """Endpoint, and options of each request."""

    url: str
    model: str
    chat: bool = False
    patience_s: float = 300.0  # for a whole answer
    features: dict[str, Any] = field(default_factory=lambda: FEATURES[0])

    @property
    def endpoint(self) -> str:
        return f"{self.url}/v1/{'chat/completions' if self.chat else 'completions'}"

    def body(self, prompt: Prompt, output_tokens: int) -> bytes:
        prompt_fields = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        options = {"max_tokens": output_tokens, "temperature": 0, "stream": True, **self.features}
        return json.dumps({"model": self.model, **prompt_fields, **options}).encode()


def base_url(text: str) -> str:
    """Return ``text`` without /v1 and the path after it."""
    url = without_api_path(text)
    if not url.startswith(("http://", "https://")) or len(url.partition("://")[2]) < 1:
        raise InvalidInput(f"{text!r}: expected an address such as http://127.0.0.1:8000")
    return url


class Client:
    def __init__(self, session: aiohttp.ClientSession, target: Target) -> None:
        self._session = session
        self.target = target

    async def send(
        self,
        request: PlannedRequest,
        body: bytes,
        clock: Clock,
        on_outcome: Callable[[ReplayOutcome], object],
        held_up_s: float = 0.0,
    ) -> None:
        """Send the request; call ``on_outcome`` exactly once, even if cancelled."""
        sent_s = clock()
        reader = AnswerReader()
        fields: dict[str, Any] = {"status": ResponseStatus.INTERRUPTED}
        try:
            await self._exchange(body, clock, reader, fields)
            fields["status"] = ResponseStatus.COMPLETED
        except _Refused as refusal:
            fields |= {"status": ResponseStatus.REFUSED, "error": str(refusal), "retry_after_s": refusal.retry_after_s}
        except BadAnswer as error:
            fields |= {"status": ResponseStatus.FAILED, "error": str(error)}
        except TimeoutError:
            missing = "no token" if math.isnan(reader.first_s) else "no end of the answer"
            fields |= {
                "status": ResponseStatus.FAILED,
                "error": f"{missing} in time: within {self.target.patience_s:g} s",
            }
        except aiohttp.ClientConnectorError as error:
            fields |= {"status": ResponseStatus.FAILED, "error": f"no connection: {connection_reason(error)}"}
        except (aiohttp.ClientError, OSError) as error:
            fields |= {"status": ResponseStatus.FAILED, "error": f"connection broken: {connection_reason(error)}"}
        finally:
            on_outcome(
                ReplayOutcome(
                    number=request.number,
                    due_s=request.due_s,
                    sent_s=sent_s,
                    held_up_s=held_up_s,
                    wanted_prompt_tokens=request.prompt_tokens,
                    wanted_output_tokens=request.output_tokens,
                    first_s=reader.first_s,
                    end_s=fields.pop("end_s", clock()),
                    gaps_s=tuple(reader.gaps_s),
                    prompt_tokens=reader.prompt_tokens,
                    cached_tokens=reader.cached_tokens,
                    output_tokens=reader.output_tokens,
                    whole=reader.done,
                    **fields,
                )
            )

    async def probe(self, prompt: Prompt, output_tokens: int, clock: Clock) -> ReplayOutcome:
        outcomes: list[ReplayOutcome] = []
        wanted = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        request = PlannedRequest(0, clock(), (), wanted, output_tokens)
        await self.send(request, self.target.body(prompt, output_tokens), clock, outcomes.append)
        return outcomes[0]

    async def models(self) -> list[tuple[str, int | None]]:
        """Return the listed models, with their context lengths if reported."""
        url = f"{self.target.url}/v1/models"
        try:
            timeout = aiohttp.ClientTimeout(total=min(10.0, self.target.patience_s))
            async with self._session.get(url, timeout=timeout, allow_redirects=False) as answer:
                if answer.status != 200:
                    raise SkyMemoryError(f"{url} answered {answer.status}: {await _words(answer)}")
                listed = await answer.json(content_type=None)
            return [(str(model["id"]), _tokens(model.get("max_model_len"))) for model in listed["data"]]
        except TimeoutError as error:
            raise SkyMemoryError(f"{url} did not answer in time") from error
        except aiohttp.InvalidURL as error:
            raise InvalidInput(f"{url} is not a valid address") from error
        except (aiohttp.ClientError, OSError) as error:
            raise SkyMemoryError(f"{url} cannot be reached: {connection_reason(error)}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SkyMemoryError(f"{url} lists no models as OpenAI's endpoints do") from error

    async def _exchange(self, body: bytes, clock: Clock, reader: AnswerReader, fields: dict[str, Any]) -> None:
        # Post the body and read the answer; ``fields`` receives the outcome's status code and end.
        async with self._session.post(
            self.target.endpoint,
            data=body,
            headers={"Content-Type": "application/json", "Accept": "text/event-stream"},
            timeout=aiohttp.ClientTimeout(total=self.target.patience_s),
            allow_redirects=False,  # two requests would be measured as one
        ) as answer:
            fields["http_status"] = answer.status
            if answer.status in REFUSALS:
                raise _Refused(answer.status, await _words(answer), _seconds(answer.headers.get("Retry-After")))
            if answer.status != 200:
                raise BadAnswer(f"status {answer.status}: {await _words(answer)}")
            if answer.content_type != "text/event-stream":
                raise BadAnswer(f"not a stream: the answer is {answer.content_type}, {await _words(answer)}")
            async for piece in answer.content.iter_any():
                reader.feed(piece, clock())
                if reader.done:
                    break
            reader.close()
            fields["end_s"] = clock()  # before the remaining stream is read, which is not part of the answer
            with contextlib.suppress(TimeoutError, aiohttp.ClientError):
                async with asyncio.timeout(_AFTER_DONE_S):
                    await answer.content.read()


class _Refused(Exception):
    def __init__(self, status: int, words: str, retry_after_s: float | None) -> None:
        super().__init__(f"refused {status}: {words}")
        self.retry_after_s = retry_after_s


async def _words(answer: aiohttp.ClientResponse) -> str:
    """Return an error's message, or the start of another body."""
    text = (await answer.content.read(1 << 16)).decode(errors="replace")
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        body = json.loads(text)
        error = body.get("error", body)
        text = str(error["message"] if isinstance(error, dict) else error)
    return " ".join(text.split())[:_WORDS_OF_ERROR] or "empty body"


def _seconds(header: str | None) -> float | None:
    """Return Retry-After in seconds; 0 for a date."""
    if header is None:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, float(header))
    return 0.0


def _tokens(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


class BadAnswer(ValueError):
    """Malformed answer; the message begins with the kind of fault."""


class AnswerReader:
    """Parser of a streamed answer: call ``feed`` with its bytes as they arrive, then ``close``."""

    def __init__(self) -> None:
        self.first_s = math.nan
        self.gaps_s: list[float] = []
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.output_tokens: int | None = None
        self.finish: str | None = None
        self.done = False
        self._events = EventReader()
        self._last_s = math.nan

    def feed(self, piece: bytes, now_s: float) -> None:
        """Parse received bytes.

        Raises:
            BadAnswer: no events, no JSON, or an error object.
        """
        try:
            events = self._events.feed(piece)
        except MalformedStream as error:
            raise BadAnswer(f"not server-sent events: {error}") from error
        for data in events:
            if data.strip() == "[DONE]":
                self.done = True
            elif not self.done:
                self._take(data, now_s)

    def close(self) -> None:
        """End the stream.

        Raises:
            BadAnswer: the answer is incomplete.
        """
        if not self.done and self.finish is None:
            ending = "in mid-event" if self._events.unfinished else "without finish_reason or [DONE]"
            raise BadAnswer(f"stream cut short: it ended {ending}")

    def _take(self, data: str, now_s: float) -> None:
        try:
            chunk = json.loads(data)
        except ValueError as error:
            raise BadAnswer(f"not JSON: {data[:80]!r}") from error
        if not isinstance(chunk, dict):
            raise BadAnswer(f"not a chunk: {data[:80]!r}")
        if chunk.get("error") is not None:
            fault = chunk["error"]
            raise BadAnswer(f"error in the stream: {fault.get('message') if isinstance(fault, dict) else fault}")
        if isinstance(chunk.get("usage"), dict):
            self._count(chunk["usage"])
        choices = chunk.get("choices")
        if choices is not None and not isinstance(choices, list):
            raise BadAnswer(f"not a chunk: {data[:80]!r}")
        for choice in choices or ():
            if not isinstance(choice, dict):
                raise BadAnswer(f"not a chunk: {data[:80]!r}")
            if _has_token(choice):
                self._record_token(now_s)
            self.finish = choice.get("finish_reason") or self.finish

    def _record_token(self, now_s: float) -> None:
        if math.isnan(self.first_s):
            self.first_s = now_s
        else:
            self.gaps_s.append(now_s - self._last_s)
        self._last_s = now_s

    def _count(self, usage: dict[str, Any]) -> None:
        self.prompt_tokens = _to_count(usage.get("prompt_tokens"))
        self.output_tokens = _to_count(usage.get("completion_tokens"))
        details = usage.get("prompt_tokens_details")
        self.cached_tokens = _to_count(details.get("cached_tokens")) if isinstance(details, dict) else None


def _has_token(choice: dict[str, Any]) -> bool:
    # Return True for a chunk with text or half of a character; not for a chat's first, which may come early.
    delta = choice.get("delta")
    if isinstance(delta, dict):
        has_content = any(
            delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")
        )
        return has_content or ("role" not in delta and choice.get("finish_reason") is None)
    return bool(choice.get("text")) or choice.get("finish_reason") is None


def _to_count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


MOST_LINE_BYTES = 8 << 20


class MalformedStream(ValueError):
    pass


class EventReader:
    """Incremental parser of server-sent events (WHATWG HTML, §9.2.6); ``feed`` returns completed events.

    Raises:
        MalformedStream: a line is not UTF-8, is too long, or is not a field.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []
        self._first = True

    @property
    def unfinished(self) -> bool:
        return bool(self._rest or self._data)

    def feed(self, piece: bytes) -> list[str]:
        buffered = self._rest + piece
        if self._first:
            if len(buffered) < 3 and b"\xef\xbb\xbf".startswith(buffered):
                self._rest = buffered
                return []
            self._first = False
            buffered = buffered.removeprefix(b"\xef\xbb\xbf")
        # A carriage return at the very end may be half of a line end: it is kept until more bytes arrive.
        ends_in_cr = buffered.endswith(b"\r")
        lines = (buffered[:-1] if ends_in_cr else buffered).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop() + (b"\r" if ends_in_cr else b"")
        if len(self._rest) > MOST_LINE_BYTES:
            raise MalformedStream(f"a line of more than {MOST_LINE_BYTES} bytes")
        events = []
        for line in lines:
            if line:
                self._take(line)
            elif self._data:
                events.append("\n".join(self._data))
                self._data = []
        return events

    def _take(self, line: bytes) -> None:
        try:
            field, colon, value = line.decode().partition(":")
        except UnicodeDecodeError as error:
            raise MalformedStream(f"a line that is not UTF-8: {line[:60]!r}") from error
        if field == "data":
            self._data.append(value.removeprefix(" "))
        elif not colon and field not in ("event", "id", "retry"):
            raise MalformedStream(f"a line that is not a field: {line[:60].decode(errors='replace')!r}")
