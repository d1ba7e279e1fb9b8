"""Chat completions as translators see them: a sequence of parts.

``PartReader`` reports begin, pieces and end of each part (reasoning, text or a tool call) in turn, as Responses and
Messages stream them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import msgspec

MAX_EVENT_BYTES = 16 << 20
MAX_ANSWER_BYTES = 64 << 20
REASONING, TEXT, TOOL = "reasoning", "text", "tool"
BEGIN, PIECE, END = "begin", "piece", "end"
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class UnreadableAnswer(Exception): ...


@dataclass(slots=True)
class ContentPart:
    """Part of an answer. ``kind``: REASONING, TEXT or TOOL."""

    kind: str
    number: int  # among the answer's parts
    call_id: str = ""  # tool call
    name: str = ""  # tool
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Text, or a tool call's arguments as JSON."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class PartEvent:
    what: str
    part: ContentPart
    text: str = ""
    logprobs: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class ChatUsage:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


class PartReader:
    """Reader of stream chunks or a complete answer; ``end`` closes open parts."""

    def __init__(self) -> None:
        self.id = ""
        self.model = ""
        self.created_s = 0
        self.finish = ""
        self.stop_text = ""  # stop sequence: vLLM's `stop_reason`, SGLang's `matched_stop`
        self.usage: ChatUsage | None = None
        self.parts: list[ContentPart] = []
        self._open: ContentPart | None = None
        self._tools: dict[int, ContentPart] = {}  # tool calls by index
        self._held: dict[int, list[str]] = {}  # arguments of calls that have not begun

    def read(self, chunk: Mapping[str, Any]) -> Iterator[PartEvent]:
        """Report a chunk's parts.

        Raises:
            UnreadableAnswer: a field has an unexpected type.
        """
        self.id = self.id or _text(chunk.get("id")) or uuid4().hex  # clients store answers under it
        self.model = self.model or _text(chunk.get("model"))
        created = chunk.get("created")
        if not self.created_s and isinstance(created, int | float):
            self.created_s = int(created)
        self._read_usage(chunk.get("usage"))
        choices = chunk.get("choices")
        if not isinstance(choices, list):
            raise UnreadableAnswer("it has no list of `choices`")
        for choice in choices[:1]:
            if not isinstance(choice, dict):
                raise UnreadableAnswer("a choice is no object")
            yield from self._read_choice(choice)

    def read_whole(self, answer: Mapping[str, Any]) -> list[PartEvent]:
        """Read a complete answer.

        Raises:
            UnreadableAnswer: an unexpected type, or empty ``choices``.
        """
        events = [*self.read(answer), *self.end()]
        if not answer["choices"]:
            raise UnreadableAnswer("its list of `choices` is empty")
        return events

    def end(self) -> Iterator[PartEvent]:
        yield from self._close()
        for index in list(self._held):
            yield from self._release(index)
            yield from self._close()

    def _read_choice(self, choice: Mapping[str, Any]) -> Iterator[PartEvent]:
        message = choice.get("delta") or choice.get("message") or {}
        if not isinstance(message, dict):
            raise UnreadableAnswer("a choice has neither `delta` nor `message`")
        if reasoning := _text(message.get("reasoning") or message.get("reasoning_content")):
            yield from self._add(REASONING, reasoning)
        logprobs = choice.get("logprobs")
        tokens = logprobs.get("content") if isinstance(logprobs, dict) else None
        token_logprobs = tuple(token for token in tokens if isinstance(token, dict)) if isinstance(tokens, list) else ()
        if (text := _text(message.get("content")) or _text(message.get("refusal"))) or (
            token_logprobs and self._is_text
        ):
            yield from self._add(TEXT, text, token_logprobs)
        calls = message.get("tool_calls") or ()
        if not isinstance(calls, list | tuple):
            raise UnreadableAnswer("`tool_calls` is no list")
        for at, call in enumerate(calls):
            if not isinstance(call, dict):
                raise UnreadableAnswer("a call of a tool is no object")
            yield from self._read_call(call, at)
        if isinstance(finish := choice.get("finish_reason"), str):
            self.finish = finish
            stopped_by = choice.get("stop_reason") or choice.get("matched_stop")
            self.stop_text = stopped_by if isinstance(stopped_by, str) else ""

    @property
    def _is_text(self) -> bool:
        return self._open is not None and self._open.kind == TEXT

    def _read_call(self, call: Mapping[str, Any], at: int) -> Iterator[PartEvent]:
        """Report a tool call; interleaved calls are held until the open call ends."""
        function = call.get("function") or {}
        if not isinstance(function, dict):
            raise UnreadableAnswer("a call's `function` is no object")
        index = call.get("index")
        index = index if isinstance(index, int) else at
        arguments = function.get("arguments")
        # Some engines send arguments as an object instead of its JSON text.
        words = arguments if isinstance(arguments, str) else "" if arguments is None else _encode(arguments).decode()
        part = self._tools.get(index)
        if part is None:
            name, call_id = _text(function.get("name")), _text(call.get("id"))
            part = self._tools[index] = ContentPart(TOOL, -1, call_id or f"call_{self.id}_{index}", name)
            self._held[index] = []
            if self._open is None or self._open.kind != TOOL or _is_whole(self._open.text):
                yield from self._close()
                yield from self._release(index)
        if index in self._held:
            if words:
                self._held[index].append(words)
            # The open call ends when its arguments are complete: then the next call may begin.
            if self._open is not None and _is_whole(self._open.text):
                yield from self._close()
                yield from self._release(next(iter(self._held)))
        elif words and part is self._open:
            part.pieces.append(words)
            yield PartEvent(PIECE, part, words)
        elif words:
            raise UnreadableAnswer(f"arguments of the tool {part.name!r} came after they were complete")

    def _release(self, index: int) -> Iterator[PartEvent]:
        part, arguments = self._tools[index], self._held.pop(index)
        yield from self._begin(part)
        if arguments:
            part.pieces += arguments
            yield PartEvent(PIECE, part, "".join(arguments))

    def _add(self, kind: str, text: str, logprobs: tuple[Mapping[str, Any], ...] = ()) -> Iterator[PartEvent]:
        part = self._open
        if part is None or part.kind != kind:
            yield from self._close()
            part = ContentPart(kind, -1)
            yield from self._begin(part)
        part.logprobs += logprobs
        part.pieces.append(text)
        yield PartEvent(PIECE, part, text, logprobs)

    def _begin(self, part: ContentPart) -> Iterator[PartEvent]:
        part.number = len(self.parts)
        self.parts.append(part)
        self._open = part
        yield PartEvent(BEGIN, part)

    def _close(self) -> Iterator[PartEvent]:
        part, self._open = self._open, None
        if part is not None:
            yield PartEvent(END, part)

    def _read_usage(self, usage: object) -> None:
        if isinstance(usage, dict):
            prompt, output = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
            self.usage = ChatUsage(
                _count(usage, "prompt_tokens"),
                min(_count(prompt, "cached_tokens"), _count(usage, "prompt_tokens")),
                _count(usage, "completion_tokens"),
                _count(output, "reasoning_tokens") or _count(usage, "reasoning_tokens"),
            )


def error_in(chunk: Mapping[str, Any]) -> str:
    """Return the message of an error event, or nothing."""
    error = chunk.get("error")
    if isinstance(error, dict):
        return _text(error.get("message")) or "error of the engine"
    if isinstance(error, str) and error:
        return error
    return _text(chunk.get("message")) or "error of the engine" if chunk.get("object") == "error" else ""


class EventLines:
    """Parser of server-sent events."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0

    def read(self, piece: bytes) -> Iterator[bytes]:
        """Yield the data of complete events.

        Raises:
            UnreadableAnswer: an event exceeds ``MAX_EVENT_BYTES``.
        """
        received = self._rest + piece
        # A trailing CR may be the first half of a line end.
        cut = max(received.rfind(b"\n"), received.rfind(b"\r", 0, -1)) + 1
        self._rest = received[cut:]
        if len(self._rest) + self._size > MAX_EVENT_BYTES:
            raise UnreadableAnswer(f"an event of its stream is longer than {MAX_EVENT_BYTES} bytes")
        for line in received[:cut].splitlines():
            if not line:
                if self._data:
                    yield b"\n".join(self._data)
                    self._data, self._size = [], 0
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
                self._size += len(line)


def event(name: str, content: Mapping[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), _encode(content))


def as_object(data: bytes) -> dict[str, Any]:
    """Decode a JSON object.

    Raises:
        UnreadableAnswer: it is none.
    """
    try:
        decoded = _decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UnreadableAnswer(f"it is no JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise UnreadableAnswer("it is no JSON object")
    return decoded


def _is_whole(arguments: str) -> bool:
    if not arguments.rstrip().endswith("}"):
        return False
    try:
        _decode(arguments.encode("utf-8", "replace"))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False
    return True


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _count(table: object, name: str) -> int:
    value = table.get(name) if isinstance(table, dict) else None
    return value if isinstance(value, int) and value > 0 else 0
