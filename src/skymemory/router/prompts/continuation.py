"""Continuation of a streamed answer by another server if its own fails.

1. Events pass through ``add`` to the client, each as soon as it is complete; their content is kept.
2. ``prepare_rest`` returns the request for the rest: the text so far ends the prompt, in a chat as the assistant's
   message with ``continue_final_message`` and without ``add_generation_prompt`` (vLLM from 0.6.3, SGLang from 0.4.4).
   The token limit falls by what was sent.
3. Events of the other server pass through ``add`` and join the stream.

An answer is not continued if the text does not determine the rest or the client would get something twice: several
choices, log probabilities, tool calls, reasoning, a grammar, token ids without a tokenizer. Chat templates cut off
trailing spaces: repeated spaces are dropped.

Sent tokens are counted by the tokenizer, the usage in the chunks, or the number of chunks.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec

from skymemory.router.limits.shares import SharedLimit
from skymemory.router.prompts.reader import CHAT_COMPLETIONS, COMPLETIONS
from skymemory.router.prompts.splitting import Fields, fields_of

ENGINES = frozenset(("vllm", "sglang", "skymemory"))
"""Engines (``owned_by``) that continue a chat's last message."""
COMPLETION_TOKENS = 16
MAX_HELD_BYTES = 1 << 20
MAX_TEXT_BYTES = 1 << 20
"""Text that is kept of a stream; of all streams ``MAX_KEPT_BYTES``."""
MAX_KEPT_BYTES = 128 << 20
COMPACT_BYTES = 16_384
DONE = b"data: [DONE]\n\n"
_DONE_LINES = (b"data: [DONE]", b"data:[DONE]")

_UNSET = (b"", b"null")
_OFF = (*_UNSET, b"false")
# Fields that prevent a continuation, except with these values.
_NOT_CONTINUED: Mapping[str, tuple[bytes, ...]] = {
    **dict.fromkeys(("n", "best_of"), (*_UNSET, b"1")),
    **dict.fromkeys(("logprobs", "echo", "use_beam_search", "return_token_ids", "return_tokens_as_token_ids"), _OFF),
    **dict.fromkeys(("top_logprobs", "prompt_logprobs", "prompt_embeds", "kv_transfer_params", "audio"), _UNSET),
    **dict.fromkeys(("truncate_prompt_tokens", "modalities", "functions", "function_call", "structural_tag"), _UNSET),
    **dict.fromkeys(("structured_outputs", "regex", "ebnf", "json_schema", "prediction"), _UNSET),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), _UNSET),
    "suffix": (*_UNSET, b'""'),
    "response_format": (*_UNSET, b'{"type":"text"}'),
    "tool_choice": (*_UNSET, b'"auto"', b'"none"'),
}
_SERVERS_ERRORS = ("server_error", "InternalServerError")
_SPACES = re.compile(rb'("(?:[^"\\]|\\.)*")|\s+')
_TOKEN_LIMITS = ("max_tokens", "max_completion_tokens", "min_tokens")
_EVENT_END = re.compile(rb"\r?\n\r?\n")


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    tool_calls: Any = None
    function_call: Any = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    audio: Any = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    logprobs: Any = None
    token_ids: Any = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_chunk = msgspec.json.Decoder(_Chunk)
_object = msgspec.json.Decoder(dict[str, Any])
_value = msgspec.json.Decoder()
_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class Rest:
    """Request for the rest of a broken stream."""

    body: bytes = b""  # body of the request; empty: none is needed
    ending: bytes = b""  # events that end the stream for the client
    by_chat: bool = False  # the server must continue a chat's last message


class KeptText:
    """Text sent by a stream, in memory that all streams share."""

    def __init__(self, limit: SharedLimit, holder: Hashable) -> None:
        self._limit, self._holder = limit, holder
        self._parts: list[str] = []
        self._bytes = 0

    def add(self, text: str) -> bool:
        """Add text. Return False if there is no room: then all is dropped."""
        size_bytes = sys.getsizeof(text)
        self._parts.append(text)
        self._bytes += size_bytes
        if self._limit.add(self._holder, size_bytes) and self._bytes <= MAX_TEXT_BYTES:
            return True
        self.drop()
        return False

    def drop(self) -> None:
        self._limit.change(self._holder, -self._bytes)
        self._parts, self._bytes = [], 0

    def text(self) -> str:
        return "".join(self._parts)


class StreamContinuation:
    def __init__(
        self,
        path: str,
        body: bytes,
        tokens_of: Callable[[str], list[int]] | None = None,
        kept: KeptText | None = None,
    ) -> None:
        self._path, self._body, self._tokens_of = path, body, tokens_of
        self._kept = kept or KeptText(SharedLimit(MAX_KEPT_BYTES), path)
        self._held = b""  # incomplete event
        self._unread: list[bytes] = []  # events passed on, whose text is not read yet
        self._unread_bytes = 0
        self._is_over_long = False
        self._fields: Fields | None = None  # the request's
        self.failure = ""  # error event by which the server reports its failure. It and what follows are withheld.
        self.withheld = b""
        # State of what was sent:
        self._cannot = self._is_done = False  # it cannot be continued; its last event was sent
        self._text: list[str] = []  # text of the events that are being read
        self._chunks = 0  # with text
        self._blank_chunks = 0  # at the end, with white space only
        self._reported_tokens: int | None = None
        self._prompt_tokens: int | None = None
        self._had_role = self._had_usage = False
        self._finish: str | None = None
        self._first: dict[str, Any] | None = None  # fields of the first chunk
        # State of the current server, unless it is the first:
        self._is_continued = self._is_discarding = False
        self._blanks = ""  # white space that was sent, but is not in the prompt
        self._tokens_before = 0  # sent by former servers

    # -- events on their way to the client

    def add(self, piece: bytes, at_end: bool = False) -> bytes:
        """Return the complete events to forward. ``at_end``: the response is complete."""
        if self._is_over_long:
            return piece
        data = self._held + piece if self._held else piece
        self._held = b""
        if not at_end and not data.endswith(b"\n\n"):
            at = _last_end(data)
            data, self._held = data[:at], data[at:]
            if len(self._held) > MAX_HELD_BYTES:
                self._is_over_long = self._cannot = True
                self._kept.drop()
                data, self._held = data + self._held, b""
        if not data:
            return b""
        if data.find(b'"error"') >= 0:  # `in` first tries whether it is a number, which takes five times as long
            data = self._before_failure(data)
        self._is_done = self._is_done or (data.find(b"[DONE]") >= 0 and _last_line(data) in _DONE_LINES)
        if self._is_continued:
            data = b"".join(self._of_one_stream(event) for event in _events(data))
        if not self._cannot:
            self._unread.append(data)
            self._unread_bytes += len(data)
            if self._unread_bytes > COMPACT_BYTES:
                self._read()
        return data

    def _before_failure(self, data: bytes) -> bytes:
        events = _events(data)
        for at, event in enumerate(events):
            if message := _failure_in(event):
                self.failure, self.withheld = message, b"".join(events[at:]) + self._held
                return b"".join(events[:at])
        return data

    def _read(self) -> None:
        """Learn the text so far from the events passed on."""
        data, self._unread, self._unread_bytes = b"".join(self._unread), [], 0
        if self._fields is None:
            self._fields = fields_of(self._body) or {}
            self._cannot |= not _is_continuable(self._fields)
        for event in _events(data):
            if self._cannot:
                break
            if (json := _json_of(event)) is not None:
                self._read_chunk(json)
        if self._text:
            self._cannot |= not self._kept.add("".join(self._text))
            self._text = []
        if self._cannot:
            self._kept.drop()

    def _read_chunk(self, json: bytes) -> None:
        try:
            chunk = _chunk.decode(json)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            self._cannot = True
            return
        if self._first is None:
            first = _object.decode(json)
            self._first = {name: value for name, value in first.items() if name not in ("choices", "usage")}
        if chunk.usage is not None:
            self._had_usage |= not chunk.choices
            self._prompt_tokens, self._reported_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
        self._cannot = chunk.error is not None or len(chunk.choices) > 1
        for choice in chunk.choices:
            delta = choice.delta
            self._cannot |= choice.index != 0 or choice.logprobs is not None or choice.token_ids is not None
            if delta is not None:
                self._had_role |= delta.role is not None
                calls = delta.tool_calls, delta.function_call, delta.reasoning_content, delta.reasoning
                self._cannot |= any((*calls, delta.refusal, delta.audio))
            self._add_text((delta.content if delta is not None else choice.text) or "")
            self._finish = choice.finish_reason or self._finish

    def _add_text(self, text: str) -> None:
        if text:
            self._text.append(text)
            self._chunks += 1
            self._blank_chunks = 0 if text.strip() else self._blank_chunks + 1

    # -- the end or failure of the server

    @property
    def is_complete(self) -> bool:
        """True if the answer has ended, or its state is unknown."""
        if self._is_done or self._is_over_long:
            return True
        self._read()
        return self._cannot or self._finish is not None

    def prepare_rest(self) -> Rest | None:
        """Return what remains; None: no other server can continue."""
        self._held = self.withheld = b""
        self.failure = ""
        if self._is_done:
            return Rest()
        self._read()
        fields = self._fields
        if self._cannot or not fields:
            return None
        text = self._kept.text()
        is_chat = self._path == CHAT_COMPLETIONS
        prompt_text = text.rstrip() if is_chat else text
        sent = self._tokens_sent(prompt_text)
        limit = _limit(fields, self._path)
        if not is_chat and limit is not None and _raw(fields, "max_tokens") in _UNSET and sent > limit:
            return None  # the limit is the server's default, which the other server may not have
        is_over = self._finish is not None or (limit is not None and sent >= limit)
        wants_usage = _wants_usage(fields) and not self._had_usage
        if is_over and not wants_usage:
            return Rest(ending=self._finishing() + DONE)
        changed = self._with_text(fields, prompt_text)
        if changed is None:
            return None
        limits = _token_limits(fields, None if is_chat else limit)
        if is_over:  # request one token, which is dropped, for the usage
            changed |= {"max_tokens": 1, **{name: 1 for name in limits if name != "min_tokens"}}
            changed.pop("min_tokens", None)
        else:
            changed |= {name: max(0, value - sent) for name, value in limits.items()}
        self._is_continued, self._is_discarding = True, is_over
        self._blanks = text[len(prompt_text) :]
        self._tokens_before = sent
        return Rest(_encode(changed), by_chat=is_chat and bool(prompt_text))

    def _tokens_sent(self, text: str) -> int:
        if self._tokens_of is not None:
            return len(self._tokens_of(text))
        tokens = self._chunks if self._reported_tokens is None else self._reported_tokens
        return max(0, tokens - (self._blank_chunks if self._path == CHAT_COMPLETIONS else 0))

    def _with_text(self, fields: Fields, text: str) -> dict[str, Any] | None:
        """Return the fields with the sent text in the prompt; None: impossible."""
        changed: dict[str, Any] = dict(fields)
        if not text:
            return changed
        if self._path == COMPLETIONS:
            prompt = self._prompt_with(_value.decode(_raw(fields, "prompt")), text)
            return None if prompt is None else {**changed, "prompt": prompt}
        messages = _value.decode(_raw(fields, "messages"))
        if _raw(fields, "continue_final_message") == b"true":
            last = messages[-1] if isinstance(messages, list) and messages else None
            if not isinstance(last, dict) or not isinstance(last.get("content"), str):
                return None
            messages = [*messages[:-1], {**last, "content": last["content"] + text}]
        elif _raw(fields, "add_generation_prompt") == b"false" or not isinstance(messages, list):
            return None
        else:
            messages = [*messages, {"role": "assistant", "content": text}]
        return {**changed, "messages": messages, "continue_final_message": True, "add_generation_prompt": False}

    def _prompt_with(self, prompt: Any, text: str) -> Any:
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return prompt + text
        is_tokens = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        return [*prompt, *self._tokens_of(text)] if is_tokens and self._tokens_of is not None else None

    def _finishing(self) -> bytes:
        if self._finish is not None or self._first is None:
            return b""
        content: dict[str, Any] = {"delta": {}} if self._path == CHAT_COMPLETIONS else {"text": ""}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": "length"}
        return b"data: " + _encode({**self._first, "choices": [choice]}) + b"\n\n"

    # -- events of another server

    def _of_one_stream(self, event: bytes) -> bytes:
        """Rewrite an event as the first server's; empty: the client has it already."""
        json = _json_of(event)
        if json is None:
            return event
        try:
            chunk = _object.decode(json)
            choices = [self._choice(choice) for choice in chunk.get("choices", ())]
            usage = chunk.get("usage")
            if usage is not None:
                chunk["usage"] = self._usage(usage)
        except (msgspec.MsgspecError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
            return event  # an error of the server, which the client has to see
        if "error" in chunk:
            return event
        if choices and not any(choices) and usage is None:
            return b""
        chunk["choices"] = [choice for choice in choices if choice is not None]
        return b"data: " + _encode({**chunk, **(self._first or {})}) + b"\n\n"

    def _choice(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        """Rewrite the new server's choice; None: it adds nothing."""
        delta = choice.get("delta")
        holder, name = (choice, "text") if delta is None else (delta, "content")
        if delta is not None and self._had_role:
            delta.pop("role", None)
        text = holder.get(name) or ""
        if self._is_discarding:
            holder[name] = ""
            if choice.get("finish_reason") is None or self._finish is not None:
                return None
            choice["finish_reason"] = "length"
            return choice
        if text:
            holder[name] = self._without_blanks(text)
        says_nothing = not any((delta or {"text": holder.get(name)}).values())
        return None if says_nothing and choice.get("finish_reason") is None else choice

    def _without_blanks(self, text: str) -> str:
        """Drop repeated leading spaces: chat templates cut them off the prompt."""
        while self._blanks and text:
            if not text[0].isspace():
                self._blanks = ""
            else:
                self._blanks = self._blanks[1:] if text[0] == self._blanks[0] else self._blanks
                text = text[1:]
        return text

    def _usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Compute the complete answer's usage: the rest's prompt contains the text sent before."""
        before, prompt = self._tokens_before, usage["prompt_tokens"]
        if self._prompt_tokens is not None and self._prompt_tokens <= prompt:
            before = prompt - self._prompt_tokens
        prompt = max(0, prompt - before)
        output = before + (0 if self._is_discarding else usage["completion_tokens"])
        usage |= {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            details["cached_tokens"] = min(details["cached_tokens"], prompt)
        return usage


def _is_continuable(fields: Fields) -> bool:
    return all(_compact(_raw(fields, name)) in values for name, values in _NOT_CONTINUED.items())


def _limit(fields: Fields, path: str) -> int | None:
    """Return the answer's token limit; None: as many as fit."""
    limits = _token_limits(fields, None)
    limits.pop("min_tokens", None)
    if path == COMPLETIONS and _raw(fields, "max_tokens") == b"":
        return COMPLETION_TOKENS
    return limits.get("max_completion_tokens", limits.get("max_tokens"))


def _token_limits(fields: Fields, default: int | None) -> dict[str, int]:
    limits = {} if default is None else {"max_tokens": default}
    for name in _TOKEN_LIMITS:
        if (raw := _raw(fields, name)) not in _UNSET:
            value = _value.decode(raw)
            if isinstance(value, int | float) and value >= 0:
                limits[name] = int(value)
    return limits


def _wants_usage(fields: Fields) -> bool:
    options = _raw(fields, "stream_options")
    values = None if options in _UNSET else _value.decode(options)
    return isinstance(values, dict) and bool(values.get("include_usage"))


def _raw(fields: Fields, name: str) -> bytes:
    value = fields.get(name)
    return b"" if value is None else bytes(value).strip()


def _compact(raw: bytes) -> bytes:
    return _SPACES.sub(lambda match: match[1] or b"", raw) if len(raw) < 100 else raw


def _last_end(data: bytes) -> int:
    """Return where the last complete event ends, or 0."""
    return max(
        (at + len(end) for end in (b"\n\n", b"\n\r\n") if (at := data.rfind(end)) >= 0),
        default=0,
    )


def _last_line(data: bytes) -> bytes:
    stripped = data.rstrip()
    return stripped[stripped.rfind(b"\n") + 1 :]


def _events(data: bytes) -> list[bytes]:
    if data.find(b"\r") < 0:
        complete = data.split(b"\n\n")
        last = complete.pop()
        return [event + b"\n\n" for event in complete] + ([last] if last else [])
    ends = [0, *(end.end() for end in _EVENT_END.finditer(data))]
    events = [data[begin:end] for begin, end in pairwise(ends)]
    return [*events, data[ends[-1] :]] if data[ends[-1] :] else events


def _failure_in(event: bytes) -> str:
    """Return the message of an error of the server (not of the request), or nothing."""
    if (json := _json_of(event)) is None:
        return ""
    try:
        error = _object.decode(json).get("error")
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ""
    if not isinstance(error, dict):
        return ""
    code = error.get("code")
    is_servers = error.get("type") in _SERVERS_ERRORS or (isinstance(code, int) and 500 <= code <= 599)
    return str(error.get("message") or "an error") if is_servers else ""


def _json_of(event: bytes) -> bytes | None:
    if event.startswith(b"data: {") and event.find(b"\n") == len(event) - 2:
        return event[6:-2]
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    data = b"\n".join(lines)
    return None if not data or data == b"[DONE]" else data
