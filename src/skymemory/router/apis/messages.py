"""Anthropic's Messages (``POST /v1/messages``, ``/v1/messages/count_tokens``) as a chat completion and back.

If an engine cannot count tokens, the usage of a completion of one token does (``counting_request``). Turns are joined
as in vLLM's Messages API, so that prompts are the same.
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
    ContentPart,
    PartEvent,
    PartReader,
    UnreadableAnswer,
    event,
)
from skymemory.router.apis.reading import (
    Fields,
    function_tool,
    further,
    joined,
    list_of,
    object_of,
    refuse,
    text_of,
    tool_call,
    without_none,
)

PATH = "/v1/messages"
COUNT_PATH = "/v1/messages/count_tokens"
_MAPPED = ("model", "max_tokens", "messages", "system", "stop_sequences", "stream", "tools", "tool_choice", "metadata")
_LABELS = ("service_tier", "inference_geo", "thinking", "context_management", "cache_control", "betas", "speed")
_ACCOUNTS = ("diagnostics", "user_profile_id", "workspace_id")
_SAME = ("temperature", "top_p", "top_k")
_REFUSED = ("mcp_servers", "container")
_KNOWN = frozenset((*_MAPPED, *_LABELS, *_ACCOUNTS, *_REFUSED, "output_config", "output_format"))
# Prefix of a text of Claude Code with a hash per request: no prompts would share a prefix. vLLM drops it, too.
_BILLING = "x-anthropic-billing-header"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


def chat_request(fields: Fields, strict: bool = True, needs_limit: bool = False) -> dict[str, Any]:
    """Translate a Messages request to a chat completion's body.

    Args:
        strict: refuse what it cannot express; else keep it, to compare prompts.
        needs_limit: refuse a request without ``max_tokens``.

    Raises:
        ApiError: 400.
    """
    if needs_limit and fields.get("max_tokens") is None:
        refuse("max_tokens", "is missing: how many tokens the answer may have")
    body: dict[str, Any] = further(fields, _KNOWN)
    body |= without_none(
        model=fields.get("model"), max_tokens=fields.get("max_tokens"), stop=fields.get("stop_sequences")
    )
    body["messages"] = _MessageTurns(strict).read(fields)
    if tools := _translate_tools(fields, strict):
        body["tools"] = tools
    metadata = fields.get("metadata")
    if isinstance(metadata, dict) and isinstance(metadata.get("user_id"), str):
        body["user"] = metadata["user_id"]
    if strict:
        for name in _REFUSED:
            if fields.get(name):
                refuse(name, "is not supported by the engine: leave it out")
        if "tools" in body and (choice := fields.get("tool_choice")) is not None:
            body |= _translate_tool_choice(object_of(choice, "tool_choice"))
        body |= _translate_output_settings(fields)
    if fields.get("stream"):
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def counting_request(fields: Fields) -> dict[str, Any]:
    counted_fields = {
        name: value for name, value in fields.items() if name not in ("stream", "stop_sequences", "output_config")
    }
    return {**chat_request(counted_fields), "max_tokens": 1}


def _translate_tool_choice(choice: dict[str, Any]) -> dict[str, Any]:
    alone = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") is True else {}
    kind = choice.get("type")
    if kind == "tool":
        name = text_of(choice.get("name"), "tool_choice.name")
        return {"tool_choice": {"type": "function", "function": {"name": name}}, **alone}
    if not isinstance(kind, str) or kind not in _CHOICES:
        refuse("tool_choice.type", "is not one of auto, any, tool and none")
    return {"tool_choice": _CHOICES[kind], **alone}


def _translate_tools(fields: Fields, strict: bool) -> list[Any]:
    tools: list[Any] = []
    for at, tool in enumerate(list_of(fields.get("tools") or [], "tools")):
        param = f"tools[{at}]"
        definition = object_of(tool, param)
        if definition.get("type") in (None, "custom"):
            schema, description = definition.get("input_schema"), definition.get("description")
            tools.append(function_tool(definition.get("name"), description, schema, definition.get("strict"), param))
        elif strict:
            kind = str(definition.get("type"))[:40]
            refuse(param, f"is a tool of type {kind!r}, which the engine does not have: give it an `input_schema`")
        else:
            tools.append(definition)
    return tools


def _translate_output_settings(fields: Fields) -> dict[str, Any]:
    body: dict[str, Any] = {}
    settings = object_of(fields.get("output_config") or {}, "output_config")
    shape = settings.get("format") or fields.get("output_format")
    if shape is not None:
        if object_of(shape, "output_config.format").get("type") != "json_schema":
            refuse("output_config.format", "is not of type json_schema")
        schema = {"name": "answer", "schema": shape.get("schema"), "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if (effort := settings.get("effort")) is not None:
        body["reasoning_effort"] = effort
    return body


class _MessageTurns:
    def __init__(self, strict: bool) -> None:
        self._strict = strict

    def read(self, fields: Fields) -> list[dict[str, Any]]:
        system = self._join_system_texts(fields.get("system"), "system")
        messages = list_of(fields.get("messages"), "messages")
        turns: list[dict[str, Any]] = []
        for at, message in enumerate(messages):
            param = f"messages[{at}]"
            turn = object_of(message, param)
            role, content = turn.get("role"), turn.get("content")
            if role == "system":
                system += self._join_system_texts(content, f"{param}.content")
            elif role not in ("user", "assistant"):
                refuse(f"{param}.role", "is not user, assistant or system")
            elif isinstance(content, str):
                turns.append({"role": role, "content": content})
            else:
                blocks = list_of(content, f"{param}.content")
                turns += (
                    self._translate_assistant_turn(blocks, param)
                    if role == "assistant"
                    else self._translate_user_turn(blocks, param)
                )
        if not turns:
            refuse("messages", "has no turn: expected at least one")
        return [{"role": "system", "content": system}, *turns] if system else turns

    def _join_system_texts(self, content: object, param: str) -> str:
        if content is None or isinstance(content, str):
            return content or ""
        texts = []
        for at, block in enumerate(list_of(content, param)):
            texts.append(text_of(object_of(block, f"{param}[{at}]").get("text"), f"{param}[{at}].text"))
        return "".join(text for text in texts if not text.startswith(_BILLING))

    def _translate_user_turn(self, blocks: list[Any], param: str) -> Iterator[dict[str, Any]]:
        """Yield tool results as separate turns, before the user's text."""
        parts: list[dict[str, Any]] = []
        for at, entry in enumerate(blocks):
            where = f"{param}.content[{at}]"
            block = object_of(entry, where)
            if block.get("type") != "tool_result":
                parts.append(self._translate_part(block, where))
                continue
            result = block.get("content")
            if result is None or isinstance(result, str):
                content, images = result or "", []
            else:
                results = [
                    self._translate_part(object_of(item, where), where) for item in list_of(result, f"{where}.content")
                ]
                content = "\n".join(part["text"] for part in results if part.get("type") == "text")
                images = [part for part in results if part.get("type") != "text"]
            call_id = text_of(block.get("tool_use_id"), f"{where}.tool_use_id")
            yield {"role": "tool", "tool_call_id": call_id, "content": content}
            if images:
                yield {"role": "user", "content": images}
        if parts:
            yield {"role": "user", "content": joined(parts)}

    def _translate_assistant_turn(self, blocks: list[Any], param: str) -> Iterator[dict[str, Any]]:
        parts, calls, thoughts = [], [], []
        for at, entry in enumerate(blocks):
            where = f"{param}.content[{at}]"
            block = object_of(entry, where)
            kind = block.get("type")
            if kind == "tool_use":
                arguments = msgspec.json.encode(block.get("input") or {}).decode()
                call_id, name = text_of(block.get("id"), f"{where}.id"), text_of(block.get("name"), f"{where}.name")
                calls.append(tool_call(call_id, name, arguments))
            elif kind == "thinking":
                thoughts.append(text_of(block.get("thinking"), f"{where}.thinking"))
            elif kind != "redacted_thinking":
                parts.append(self._translate_part(block, where))
        turn: dict[str, Any] = {"role": "assistant", "content": joined(parts) if parts else None}
        if calls:
            turn["tool_calls"] = calls
        if thoughts:
            turn["reasoning"] = turn["reasoning_content"] = "".join(thoughts)  # vLLM and SGLang use different names
        if parts or calls or thoughts:
            yield turn

    def _translate_part(self, block: dict[str, Any], param: str) -> dict[str, Any]:
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


def translate_answer(fields: Fields, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a chat completion to a Messages answer.

    Raises:
        UnreadableAnswer: it is none.
    """
    reader = PartReader()
    events = reader.read_whole(answer)
    return {
        **_make_message(fields, reader, [_make_block(item.part) for item in events if item.what == END]),
        **_get_stop_reason(fields, reader),
        "usage": _make_usage(reader.usage),
    }


def count(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the prompt's tokens.

    Raises:
        UnreadableAnswer: it is no chat completion, or has no usage.
    """
    reader = PartReader()
    list(reader.read(answer))
    if reader.usage is None:
        raise UnreadableAnswer("it has no usage")
    return {"input_tokens": reader.usage.prompt_tokens}


class MessageStream:
    def __init__(self, fields: Fields) -> None:
        self._fields = fields
        self._reader = PartReader()
        self._has_begun = False

    @property
    def finish(self) -> str:
        return self._reader.finish

    def read(self, chunk: Mapping[str, Any]) -> Iterator[bytes]:
        events = list(self._reader.read(chunk))
        yield from self._begin_once()
        for part_event in events:
            yield from self._translate_part_event(part_event)

    def end(self) -> Iterator[bytes]:
        yield from self._begin_once()
        for part_event in list(self._reader.end()):
            yield from self._translate_part_event(part_event)
        usage = _make_usage(self._reader.usage)
        yield _make_event("message_delta", delta=_get_stop_reason(self._fields, self._reader), usage=usage)
        yield _make_event("message_stop")

    def fail(self, status: int, message: str) -> Iterator[bytes]:
        yield error_event(status, message)

    def _begin_once(self) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            message = _make_message(self._fields, self._reader, [])
            unknown = {
                "stop_reason": None,
                "stop_sequence": None,
                "usage": {**_make_usage(self._reader.usage), "output_tokens": 0},
            }
            yield _make_event("message_start", message={**message, **unknown})

    def _translate_part_event(self, event: PartEvent) -> Iterator[bytes]:
        part, at = event.part, event.part.number
        if event.what == BEGIN:
            yield _make_event("content_block_start", index=at, content_block=_make_empty_block(part))
        elif event.what == PIECE and event.text:
            yield _make_event("content_block_delta", index=at, delta=_make_delta(part, event.text))
        elif event.what == END:
            if part.kind == REASONING:
                yield _make_event("content_block_delta", index=at, delta={"type": "signature_delta", "signature": ""})
            yield _make_event("content_block_stop", index=at)


def _make_message(fields: Fields, reader: PartReader, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": f"msg_{reader.id.removeprefix('chatcmpl-') or '0'}",
        "type": "message",
        "role": "assistant",
        "model": reader.model or fields.get("model") or "",
        "content": content,
    }


def _make_block(part: ContentPart) -> dict[str, Any]:
    if part.kind == TEXT:
        return {"type": "text", "text": part.text}
    if part.kind == REASONING:
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": _read_arguments(part.text)}


def _make_empty_block(part: ContentPart) -> dict[str, Any]:
    if part.kind == TEXT:
        return {"type": "text", "text": ""}
    if part.kind == REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}


def _make_delta(part: ContentPart, text: str) -> dict[str, Any]:
    if part.kind == TEXT:
        return {"type": "text_delta", "text": text}
    if part.kind == REASONING:
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "input_json_delta", "partial_json": text}


def _read_arguments(arguments: str) -> dict[str, Any]:
    try:
        decoded = msgspec.json.decode(arguments.encode("utf-8", "replace")) if arguments.strip() else {}
    except (msgspec.MsgspecError, ValueError, RecursionError):
        decoded = None
    return decoded if isinstance(decoded, dict) else {"arguments": arguments}


def _get_stop_reason(fields: Fields, reader: PartReader) -> dict[str, Any]:
    reason = _STOP_REASONS.get(reader.finish, "end_turn")
    stops = fields.get("stop_sequences")
    if reason == "end_turn" and isinstance(stops, list) and reader.stop_text and reader.stop_text in stops:
        return {"stop_reason": "stop_sequence", "stop_sequence": reader.stop_text}
    if reason == "end_turn" and any(part.kind == TOOL for part in reader.parts):
        reason = "tool_use"  # some engines say "stop" if the client chose the tool
    return {"stop_reason": reason, "stop_sequence": None}


def _make_usage(usage: ChatUsage | None) -> dict[str, Any]:
    """Return the usage; Anthropic's ``input_tokens`` exclude cached tokens."""
    counts = usage or ChatUsage()
    return {
        "input_tokens": counts.prompt_tokens - counts.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached_tokens,
        "output_tokens": counts.output_tokens,
    }


def _make_event(name: str, **content: Any) -> bytes:
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
    return _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")


def error_body(status: int, message: str) -> bytes:
    return msgspec.json.encode({"type": "error", "error": {"type": kind_of(status), "message": message}})


def error_event(status: int, message: str) -> bytes:
    return b"event: error\ndata: %s\n\n" % error_body(status, message)
