"""Anthropic's Messages (``POST /v1/messages``, ``/v1/messages/count_tokens``) as a chat completion and back.

``chat_request`` reads a request. ``whole`` makes its answer from a chat completion, ``MessageStream`` the events of a
stream. Where an engine has no way to count tokens, they are those of the prompt of a completion of one token
(``counting_request``). Turns are joined as vLLM's own Messages API joins them, so that prompts are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from skymemory.router.apis.chat import (
    BEGIN,
    END,
    PIECE,
    REASONING,
    TEXT,
    TOOL,
    ChatUsage,
    Part,
    PartEvent,
    PartReader,
    event,
)
from skymemory.router.apis.reading import (
    Fields,
    function_tool,
    further,
    given,
    joined,
    list_of,
    object_of,
    refuse,
    text_of,
    tool_call,
)

PATH = "/v1/messages"
COUNT_PATH = "/v1/messages/count_tokens"
_MAPPED = ("model", "max_tokens", "messages", "system", "stop_sequences", "stream", "tools", "tool_choice", "metadata")
_LABELS = ("service_tier", "inference_geo", "thinking", "context_management", "cache_control", "betas", "speed")
_ACCOUNTS = ("diagnostics", "user_profile_id", "workspace_id")
_SAME = ("temperature", "top_p", "top_k")
_REFUSED = ("mcp_servers", "container")
_KNOWN = frozenset((*_MAPPED, *_LABELS, *_ACCOUNTS, *_REFUSED, "output_config", "output_format"))
_BILLING = "x-anthropic-billing-header"
"""Begin of a text that Claude Code puts before the system prompt, with a hash of each request: no two prompts would
begin alike. vLLM leaves it out, too.
"""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


def chat_request(fields: Fields, strict: bool = True, needs_limit: bool = False) -> dict[str, Any]:
    """The body of the same chat completion.

    Args:
        strict: refuse what a chat completion cannot say. False: only the prompt matters, to be compared with others;
            what has no counterpart stays in it as it is.
        needs_limit: refuse a request without ``max_tokens``, which the API demands.

    Raises:
        ApiError: 400.
    """
    if needs_limit and fields.get("max_tokens") is None:
        refuse("max_tokens", "is missing: how many tokens the answer may have")
    body: dict[str, Any] = further(fields, _KNOWN)
    body |= given(model=fields.get("model"), max_tokens=fields.get("max_tokens"), stop=fields.get("stop_sequences"))
    body["messages"] = _Turns(strict).read(fields)
    if tools := _tools(fields, strict):
        body["tools"] = tools
    metadata = fields.get("metadata")
    if isinstance(metadata, dict) and isinstance(metadata.get("user_id"), str):
        body["user"] = metadata["user_id"]
    if strict:
        for name in _REFUSED:
            if fields.get(name):
                refuse(name, "is not supported by the engine: leave it out")
        if "tools" in body and (choice := fields.get("tool_choice")) is not None:
            body |= _tool_choice(object_of(choice, "tool_choice"))
        body |= _output_settings(fields)
    if fields.get("stream"):
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def counting_request(fields: Fields) -> dict[str, Any]:
    """A chat completion of one token, whose usage has the prompt's tokens."""
    kept = {name: value for name, value in fields.items() if name not in ("stream", "stop_sequences", "output_config")}
    return {**chat_request(kept), "max_tokens": 1}


def _tool_choice(choice: dict[str, Any]) -> dict[str, Any]:
    alone = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") is True else {}
    kind = choice.get("type")
    if kind == "tool":
        name = text_of(choice.get("name"), "tool_choice.name")
        return {"tool_choice": {"type": "function", "function": {"name": name}}, **alone}
    if not isinstance(kind, str) or kind not in _CHOICES:
        refuse("tool_choice.type", "is not one of auto, any, tool and none")
    return {"tool_choice": _CHOICES[kind], **alone}


def _tools(fields: Fields, strict: bool) -> list[Any]:
    found: list[Any] = []
    for at, tool in enumerate(list_of(fields.get("tools") or [], "tools")):
        param = f"tools[{at}]"
        each = object_of(tool, param)
        if each.get("type") in (None, "custom"):
            schema, description = each.get("input_schema"), each.get("description")
            found.append(function_tool(each.get("name"), description, schema, each.get("strict"), param))
        elif strict:
            kind = str(each.get("type"))[:40]
            refuse(param, f"is a tool of type {kind!r}, which the engine does not have: give it an `input_schema`")
        else:
            found.append(each)
    return found


def _output_settings(fields: Fields) -> dict[str, Any]:
    found: dict[str, Any] = {}
    settings = object_of(fields.get("output_config") or {}, "output_config")
    shape = settings.get("format") or fields.get("output_format")
    if shape is not None:
        if object_of(shape, "output_config.format").get("type") != "json_schema":
            refuse("output_config.format", "is not of type json_schema")
        schema = {"name": "answer", "schema": shape.get("schema"), "strict": True}
        found["response_format"] = {"type": "json_schema", "json_schema": schema}
    if (effort := settings.get("effort")) is not None:
        found["reasoning_effort"] = effort
    return found


class _Turns:
    """The turns of a chat, from ``system`` and ``messages``."""

    def __init__(self, strict: bool) -> None:
        self._strict = strict

    def read(self, fields: Fields) -> list[dict[str, Any]]:
        system = self._system(fields.get("system"), "system")
        messages = list_of(fields.get("messages"), "messages")
        turns: list[dict[str, Any]] = []
        for at, message in enumerate(messages):
            param = f"messages[{at}]"
            each = object_of(message, param)
            role, said = each.get("role"), each.get("content")
            if role == "system":
                system += self._system(said, f"{param}.content")
            elif role not in ("user", "assistant"):
                refuse(f"{param}.role", "is not user, assistant or system")
            elif isinstance(said, str):
                turns.append({"role": role, "content": said})
            else:
                blocks = list_of(said, f"{param}.content")
                turns += self._assistant(blocks, param) if role == "assistant" else self._user(blocks, param)
        if not turns:
            refuse("messages", "has no turn: expected at least one")
        return [{"role": "system", "content": system}, *turns] if system else turns

    def _system(self, said: object, param: str) -> str:
        if said is None or isinstance(said, str):
            return said or ""
        texts = []
        for at, block in enumerate(list_of(said, param)):
            texts.append(text_of(object_of(block, f"{param}[{at}]").get("text"), f"{param}[{at}].text"))
        return "".join(text for text in texts if not text.startswith(_BILLING))

    def _user(self, blocks: list[Any], param: str) -> Iterator[dict[str, Any]]:
        """Results of tools are turns of their own, before what else the user says."""
        parts: list[dict[str, Any]] = []
        for at, each in enumerate(blocks):
            where = f"{param}.content[{at}]"
            block = object_of(each, where)
            if block.get("type") != "tool_result":
                parts.append(self._part(block, where))
                continue
            said = block.get("content")
            if said is None or isinstance(said, str):
                content, images = said or "", []
            else:
                found = [self._part(object_of(one, where), where) for one in list_of(said, f"{where}.content")]
                content = "\n".join(one["text"] for one in found if one.get("type") == "text")
                images = [one for one in found if one.get("type") != "text"]
            call_id = text_of(block.get("tool_use_id"), f"{where}.tool_use_id")
            yield {"role": "tool", "tool_call_id": call_id, "content": content}
            if images:
                yield {"role": "user", "content": images}
        if parts:
            yield {"role": "user", "content": joined(parts)}

    def _assistant(self, blocks: list[Any], param: str) -> Iterator[dict[str, Any]]:
        parts, calls, thoughts = [], [], []
        for at, each in enumerate(blocks):
            where = f"{param}.content[{at}]"
            block = object_of(each, where)
            kind = block.get("type")
            if kind == "tool_use":
                arguments = msgspec.json.encode(block.get("input") or {}).decode()
                call_id, name = text_of(block.get("id"), f"{where}.id"), text_of(block.get("name"), f"{where}.name")
                calls.append(tool_call(call_id, name, arguments))
            elif kind == "thinking":
                thoughts.append(text_of(block.get("thinking"), f"{where}.thinking"))
            elif kind != "redacted_thinking":
                parts.append(self._part(block, where))
        turn: dict[str, Any] = {"role": "assistant", "content": joined(parts) if parts else None}
        if calls:
            turn["tool_calls"] = calls
        if thoughts:
            turn["reasoning"] = turn["reasoning_content"] = "".join(thoughts)  # vLLM and SGLang call it differently
        if parts or calls or thoughts:
            yield turn

    def _part(self, block: dict[str, Any], param: str) -> dict[str, Any]:
        kind, source = block.get("type"), block.get("source")
        if kind == "text":
            return {"type": "text", "text": text_of(block.get("text"), f"{param}.text")}
        if kind in ("image", "document") and isinstance(source, dict):
            media, data = source.get("media_type"), source.get("data")
            if kind == "document" and source.get("type") == "text" and isinstance(data, str):
                return {"type": "text", "text": data}
            if kind == "image" and source.get("type") == "url" and isinstance(source.get("url"), str):
                return {"type": "image_url", "image_url": {"url": source["url"]}}
            if kind == "image" and source.get("type") == "base64" and isinstance(data, str):
                return {"type": "image_url", "image_url": {"url": f"data:{media};base64,{data}"}}
        if self._strict:
            refuse(param, f"is a block of type {str(kind)[:40]!r} that the engine cannot read")
        return block


# The answer


def whole(fields: Fields, answer: Mapping[str, Any]) -> dict[str, Any]:
    """The message made of a whole chat completion.

    Raises:
        UnreadableAnswer: it is none.
    """
    reader = PartReader()
    events = reader.read_whole(answer)
    return {
        **_message(fields, reader, [_block(each.part) for each in events if each.what == END]),
        **_stop(fields, reader),
        "usage": _usage(reader.usage),
    }


def count(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a count of tokens, made of that to ``counting_request``."""
    reader = PartReader()
    list(reader.read(answer))
    return {"input_tokens": 0 if reader.usage is None else reader.usage.prompt_tokens}


class MessageStream:
    """The events of a stream, made of the chunks of a chat completion."""

    def __init__(self, fields: Fields) -> None:
        self._fields = fields
        self._reader = PartReader()
        self._has_begun = False

    @property
    def finish(self) -> str:
        return self._reader.finish

    def read(self, chunk: Mapping[str, Any]) -> Iterator[bytes]:
        """
        Raises:
            UnreadableAnswer: it is no chunk of a chat completion.
        """
        events = list(self._reader.read(chunk))
        yield from self._begin()
        for each in events:
            yield from self._part_event(each)

    def end(self) -> Iterator[bytes]:
        yield from self._begin()
        for each in list(self._reader.end()):
            yield from self._part_event(each)
        usage = _usage(self._reader.usage)
        yield _event("message_delta", delta=_stop(self._fields, self._reader), usage=usage)
        yield _event("message_stop")

    def fail(self, status: int, message: str) -> Iterator[bytes]:
        """The engine failed in the middle: what came is all that comes."""
        yield error_event(status, message)

    def _begin(self) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            message = _message(self._fields, self._reader, [])
            unknown = {
                "stop_reason": None,
                "stop_sequence": None,
                "usage": {**_usage(self._reader.usage), "output_tokens": 0},
            }
            yield _event("message_start", message={**message, **unknown})

    def _part_event(self, each: PartEvent) -> Iterator[bytes]:
        part, at = each.part, each.part.number
        if each.what == BEGIN:
            yield _event("content_block_start", index=at, content_block=_begun(part))
        elif each.what == PIECE and each.text:
            yield _event("content_block_delta", index=at, delta=_delta(part, each.text))
        elif each.what == END:
            if part.kind == REASONING:
                yield _event("content_block_delta", index=at, delta={"type": "signature_delta", "signature": ""})
            yield _event("content_block_stop", index=at)


def _message(fields: Fields, reader: PartReader, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": f"msg_{reader.id.removeprefix('chatcmpl-') or '0'}",
        "type": "message",
        "role": "assistant",
        "model": reader.model or fields.get("model") or "",
        "content": content,
    }


def _block(part: Part) -> dict[str, Any]:
    if part.kind == TEXT:
        return {"type": "text", "text": part.text}
    if part.kind == REASONING:
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": _input(part.text)}


def _begun(part: Part) -> dict[str, Any]:
    if part.kind == TEXT:
        return {"type": "text", "text": ""}
    if part.kind == REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}


def _delta(part: Part, text: str) -> dict[str, Any]:
    if part.kind == TEXT:
        return {"type": "text_delta", "text": text}
    if part.kind == REASONING:
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "input_json_delta", "partial_json": text}


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments as the object that they should be; what the model wrote instead stays readable."""
    try:
        found = msgspec.json.decode(arguments.encode("utf-8", "replace")) if arguments.strip() else {}
    except (msgspec.MsgspecError, ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"arguments": arguments}


def _stop(fields: Fields, reader: PartReader) -> dict[str, Any]:
    reason = _STOP_REASONS.get(reader.finish, "end_turn")
    stops = fields.get("stop_sequences")
    if reason == "end_turn" and isinstance(stops, list) and reader.stop_text and reader.stop_text in stops:
        return {"stop_reason": "stop_sequence", "stop_sequence": reader.stop_text}
    if reason == "end_turn" and any(part.kind == TOOL for part in reader.parts):
        reason = "tool_use"  # of a tool that the client has named, some engines say "stop"
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(usage: ChatUsage | None) -> dict[str, Any]:
    """Anthropic's ``input_tokens`` are those that no cache had."""
    found = usage or ChatUsage()
    return {
        "input_tokens": found.prompt_tokens - found.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": found.cached_tokens,
        "output_tokens": found.output_tokens,
    }


def _event(name: str, **content: Any) -> bytes:
    return event(name, {"type": name, **content})


# Errors

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def kind_of(status: int) -> str:
    """The ``type`` of Anthropic's error object."""
    return _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")


def error_body(status: int, message: str) -> bytes:
    return msgspec.json.encode({"type": "error", "error": {"type": kind_of(status), "message": message}})


def error_event(status: int, message: str) -> bytes:
    return b"event: error\ndata: %s\n\n" % error_body(status, message)
