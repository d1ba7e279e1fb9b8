"""OpenAI's Responses (``POST /v1/responses``), without state, as a chat completion and back.

Stream events have the order that OpenAI's clients expect: created, in progress; for each item added, deltas, done;
finally completed or incomplete.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from skymemory.router.api_error import kind_of
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
    event,
)
from skymemory.router.apis.reading import (
    Fields,
    function_tool,
    further,
    is_whole,
    joined,
    list_of,
    object_of,
    refuse,
    text_of,
    tool_call,
    without_none,
)

PATH = "/v1/responses"
_STATE = {
    "previous_response_id": "names a stored response, and nothing is stored here: send all turns as `input`",
    "conversation": "names a stored conversation, and nothing is stored here: send its items as `input`",
    "prompt": "names a stored prompt, and nothing is stored here: send `instructions` and `input`",
    "background": "asks for an answer that is stored, and nothing is stored here: leave it out",
}
_LABELS = ("metadata", "service_tier", "safety_identifier", "store", "prompt_cache_retention", "prompt_cache_options")
_REFUSED = ("image", "moderation")
_READ = ("model", "input", "instructions", "max_output_tokens", "tools", "tool_choice", "text", "reasoning", "include")
_WITHOUT_EFFECT = (
    "access_programs",
    "background_options",
    "truncation",
    "max_tool_calls",
    "stream_options",
    "context_management",
    "top_logprobs",
    "stream",
)
_KNOWN = frozenset((*_STATE, *_LABELS, *_REFUSED, *_READ, *_WITHOUT_EFFECT))
_LOGPROBS = "message.output_text.logprobs"
_ITEM_IDS = {TEXT: "msg", REASONING: "rs", TOOL: "fc"}
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


def check(fields: Fields) -> None:
    """Refuse stored state: the next request may reach another server.

    Raises:
        ApiError: 400.
    """
    for name, why in _STATE.items():
        if fields.get(name) not in (None, False):
            refuse(name, why)


def chat_request(fields: Fields, strict: bool = True) -> dict[str, Any]:
    """Translate a Responses request to a chat completion's body.

    Args:
        strict: refuse what it cannot express; else keep it, to compare prompts.

    Raises:
        ApiError: 400.
    """
    check(fields)
    body: dict[str, Any] = further(fields, _KNOWN)
    limit = fields.get("max_output_tokens")
    if limit is not None and not is_whole(limit):
        refuse("max_output_tokens", "is not a whole number of at most 64 bits")
    body |= without_none(model=fields.get("model"), max_tokens=limit)
    body["messages"] = _InputTurns(strict).read(fields)
    if tools := _translate_tools(fields, strict):
        body["tools"] = tools
    if strict:
        body |= _translate_strict_fields(fields, body)
    if fields.get("stream"):
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def _translate_strict_fields(fields: Fields, body: dict[str, Any]) -> dict[str, Any]:
    body_fields: dict[str, Any] = {}
    for name in _REFUSED:
        if fields.get(name):
            refuse(name, "is not supported by the engine: leave it out")
    choice = fields.get("tool_choice")
    if choice is not None and "tools" in body:
        body_fields |= _translate_tool_choice(choice, body)
    if "tools" not in body:
        body.pop("parallel_tool_calls", None)  # meaningless without tools
    text = fields.get("text")
    if text is not None:
        body_fields |= _translate_text_settings(object_of(text, "text"))
    reasoning = fields.get("reasoning")
    if reasoning is not None and (effort := object_of(reasoning, "reasoning").get("effort")) is not None:
        if effort not in _EFFORTS:
            refuse("reasoning.effort", f"is not one of {', '.join(_EFFORTS)}")
        body_fields["reasoning_effort"] = effort
    top_logprobs = fields.get("top_logprobs")
    if top_logprobs or _LOGPROBS in list_of(fields.get("include") or [], "include"):
        body_fields |= {"logprobs": True, "top_logprobs": top_logprobs or 0}
    return body_fields


def _translate_tools(fields: Fields, strict: bool) -> list[Any]:
    tools: list[Any] = []
    for at, tool in enumerate(list_of(fields.get("tools") or [], "tools")):
        param = f"tools[{at}]"
        definition = object_of(tool, param)
        if definition.get("type") == "function":
            tools.append(
                function_tool(
                    definition.get("name"),
                    definition.get("description"),
                    definition.get("parameters"),
                    definition.get("strict"),
                    param,
                )
            )
        elif strict:
            kind = str(definition.get("type"))[:40]
            refuse(param, f"is a tool of type {kind!r}, which the engine does not have: only functions can be called")
        else:
            tools.append(definition)
    return tools


def _translate_tool_choice(choice: Any, body: dict[str, Any]) -> dict[str, Any]:
    if isinstance(choice, str):
        return {"tool_choice": choice}
    kind = object_of(choice, "tool_choice").get("type")
    if kind == "function":
        return {"tool_choice": {"type": "function", "function": {"name": choice.get("name")}}}
    if kind == "allowed_tools":
        allowed = [object_of(tool, "tool_choice.tools") for tool in list_of(choice.get("tools"), "tool_choice.tools")]
        names = {tool.get("name") for tool in allowed if tool.get("type") == "function"}
        body["tools"] = [tool for tool in body["tools"] if tool["function"]["name"] in names]
        if not body["tools"]:
            refuse("tool_choice.tools", "allows none of `tools`")
        return {"tool_choice": choice.get("mode", "auto")}
    return refuse("tool_choice", f"asks for {str(kind)[:40]!r}: the engine can call functions only")


def _translate_text_settings(text: dict[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    shape = object_of(text.get("format") or {"type": "text"}, "text.format")
    kind = shape.get("type")
    if kind == "json_schema":
        schema = {name: shape[name] for name in ("name", "description", "schema", "strict") if name in shape}
        settings["response_format"] = {"type": kind, "json_schema": schema}
    elif kind == "json_object":
        settings["response_format"] = {"type": kind}
    elif kind != "text":
        refuse("text.format", "is not of type text, json_schema or json_object")
    if text.get("verbosity") not in (None, "medium"):
        settings["verbosity"] = text["verbosity"]
    return settings


class _InputTurns:
    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._turns: list[dict[str, Any]] = []
        self._thoughts = ""

    def read(self, fields: Fields) -> list[dict[str, Any]]:
        instructions, given_input = fields.get("instructions"), fields.get("input")
        if instructions:
            self._turns.append({"role": "system", "content": text_of(instructions, "instructions")})
        if isinstance(given_input, str):
            self._turns.append({"role": "user", "content": given_input})
        elif isinstance(given_input, list):
            for at, item in enumerate(given_input):
                self._read_item(object_of(item, f"input[{at}]"), f"input[{at}]")
        else:
            refuse("input", f"is {'missing' if given_input is None else 'neither'}: expected a text or a list of items")
        if not self._turns:
            refuse("input", "is an empty list")
        return self._turns

    def _read_item(self, item: dict[str, Any], param: str) -> None:
        kind = item.get("type") or "message"
        if kind == "message":
            self._read_message(item, param)
        elif kind == "function_call":
            self._call(
                text_of(item.get("call_id"), f"{param}.call_id"),
                text_of(item.get("name"), f"{param}.name"),
                text_of(item.get("arguments"), f"{param}.arguments"),
            )
        elif kind == "function_call_output":
            output = item.get("output")
            content = output if isinstance(output, str) else self._translate_content(output, f"{param}.output")
            call_id = text_of(item.get("call_id"), f"{param}.call_id")
            self._turns.append({"role": "tool", "tool_call_id": call_id, "content": content})
        elif kind == "reasoning":
            parts = list_of(item.get("content") or [], f"{param}.content")
            self._thoughts = "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
        elif kind == "item_reference":
            refuse(
                param,
                "refers to a stored item, and nothing is stored here: set `store` to false in your client, so that it "
                "sends the item itself",
            )
        elif self._strict:
            refuse(param, f"is an item of type {str(kind)[:40]!r}, which the engine does not know")
        else:
            self._turns.append({"role": str(kind), "content": [item]})

    def _read_message(self, item: dict[str, Any], param: str) -> None:
        role = text_of(item.get("role"), f"{param}.role")
        if role not in ("user", "assistant", "system", "developer"):
            refuse(f"{param}.role", f"is {role[:40]!r}: expected user, assistant, system or developer")
        given_content = item.get("content")
        content = (
            given_content
            if isinstance(given_content, str)
            else self._translate_content(given_content, f"{param}.content")
        )
        # Templates of open models have no role "developer".
        turn = {"role": "system" if role == "developer" else role, "content": content}
        self._turns.append(self._with_thoughts(turn) if role == "assistant" else turn)

    def _with_thoughts(self, turn: dict[str, Any]) -> dict[str, Any]:
        thoughts, self._thoughts = self._thoughts, ""
        # vLLM and SGLang use different names.
        return {**turn, "reasoning": thoughts, "reasoning_content": thoughts} if thoughts else turn

    def _call(self, call_id: str, name: str, arguments: str) -> None:
        if not self._turns or self._turns[-1]["role"] != "assistant":
            self._turns.append(self._with_thoughts({"role": "assistant", "content": None}))
        self._turns[-1].setdefault("tool_calls", []).append(tool_call(call_id, name, arguments))

    def _translate_content(self, parts: object, param: str) -> str | list[dict[str, Any]]:
        content = []
        for at, part in enumerate(list_of(parts, param)):
            content.append(self._translate_part(object_of(part, f"{param}[{at}]"), f"{param}[{at}]"))
        return joined(content)

    def _translate_part(self, part: dict[str, Any], param: str) -> dict[str, Any]:
        kind = part.get("type")
        if kind in ("input_text", "output_text", "text", "summary_text"):
            return {"type": "text", "text": text_of(part.get("text"), f"{param}.text")}
        if kind == "refusal":
            return {"type": "text", "text": text_of(part.get("refusal"), f"{param}.refusal")}
        if kind == "input_image" and isinstance(part.get("image_url"), str):
            detail = without_none(detail=part.get("detail"))
            return {"type": "image_url", "image_url": {"url": part["image_url"], **detail}}
        if kind == "input_audio" and isinstance(part.get("input_audio"), dict):
            return {"type": "input_audio", "input_audio": part["input_audio"]}
        if self._strict:
            refuse(
                param, f"is a part of type {str(kind)[:40]!r} that the engine cannot read: files are not stored here"
            )
        return part


# The answer


def translate_answer(fields: Fields, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a chat completion to a Responses answer.

    Raises:
        UnreadableAnswer: it is none.
    """
    reader = PartReader()
    events = reader.read_whole(answer)
    builder = _Builder(fields, reader)
    items = [builder.item(item.part, "completed") for item in events if item.what == END]
    return builder.response(_status(reader.finish), items)


class ResponseStream:
    def __init__(self, fields: Fields) -> None:
        self._reader = PartReader()
        self._builder = _Builder(fields, self._reader)
        self._number = 0
        self._has_begun = False
        self._items: list[dict[str, Any]] = []

    @property
    def finish(self) -> str:
        return self._reader.finish

    def read(self, chunk: Mapping[str, Any]) -> Iterator[bytes]:
        events = list(self._reader.read(chunk))
        yield from self._begin()
        for part_event in events:
            yield from self._translate_part_event(part_event)

    def end(self) -> Iterator[bytes]:
        yield from self._begin()
        for part_event in list(self._reader.end()):
            yield from self._translate_part_event(part_event)
        status = _status(self._reader.finish)
        yield self._event(f"response.{status}", response=self._builder.response(status, self._items))

    def fail(self, status: int, message: str) -> Iterator[bytes]:
        yield from self._begin()
        error = {"code": "server_error", "message": message}
        yield self._event("response.failed", response=self._builder.response("failed", self._items, error))

    def _begin(self) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            for name in ("response.created", "response.in_progress"):
                yield self._event(name, response=self._builder.response("in_progress", []))

    def _translate_part_event(self, event: PartEvent) -> Iterator[bytes]:
        part, builder = event.part, self._builder
        if part.kind == TOOL:
            yield from self._call_events(event)
            return
        at = {"item_id": builder.item_id(part), "output_index": part.number}
        place = {**at, "content_index": 0}
        name = "response.output_text" if part.kind == TEXT else "response.reasoning_text"
        logprobs = {"logprobs": [_translate_logprob(token) for token in event.logprobs]} if part.kind == TEXT else {}
        if event.what == BEGIN:
            yield self._event("response.output_item.added", output_index=part.number, item=builder.item(part, ""))
            yield self._event("response.content_part.added", **place, part=builder.content(part, ""))
        elif event.what == PIECE and (event.text or event.logprobs):
            yield self._event(f"{name}.delta", **place, delta=event.text, **logprobs)
        elif event.what == END:
            done = {"logprobs": [_translate_logprob(token) for token in part.logprobs]} if part.kind == TEXT else {}
            yield self._event(f"{name}.done", **place, text=part.text, **done)
            yield self._event("response.content_part.done", **place, part=builder.content(part, part.text))
            yield self._done(part)

    def _call_events(self, event: PartEvent) -> Iterator[bytes]:
        part, about = event.part, "response.function_call_arguments"
        at = {"item_id": self._builder.item_id(part), "output_index": part.number}
        if event.what == BEGIN:
            added = {**self._builder.item(part, "in_progress"), "arguments": ""}
            yield self._event("response.output_item.added", output_index=part.number, item=added)
        elif event.what == PIECE:
            yield self._event(f"{about}.delta", **at, delta=event.text)
        else:
            yield self._event(f"{about}.done", **at, name=part.name, arguments=part.text)
            yield self._done(part)

    def _done(self, part: ContentPart) -> bytes:
        item = self._builder.item(part, "completed")
        self._items.append(item)
        return self._event("response.output_item.done", output_index=part.number, item=item)

    def _event(self, kind: str, /, **content: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return event(kind, {"type": kind, "sequence_number": number, **content})


class _Builder:
    def __init__(self, fields: Fields, reader: PartReader) -> None:
        self._fields = fields
        self._reader = reader

    @property
    def _base(self) -> str:
        return self._reader.id.removeprefix("chatcmpl-") or "0"

    def item_id(self, part: ContentPart) -> str:
        return f"{_ITEM_IDS[part.kind]}_{self._base}_{part.number}"

    def item(self, part: ContentPart, status: str) -> dict[str, Any]:
        """Return an output item. ``status``: empty at its begin."""
        own = {"id": self.item_id(part), "status": status or "in_progress"}
        content = [self.content(part, part.text)] if status else []
        if part.kind == TEXT:
            return {**own, "type": "message", "role": "assistant", "content": content}
        if part.kind == REASONING:
            return {**own, "type": "reasoning", "summary": [], "content": content, "encrypted_content": None}
        return {**own, "type": "function_call", "call_id": part.call_id, "name": part.name, "arguments": part.text}

    def content(self, part: ContentPart, text: str) -> dict[str, Any]:
        if part.kind == REASONING:
            return {"type": "reasoning_text", "text": text}
        logprobs = [_translate_logprob(token) for token in part.logprobs] if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def response(
        self, status: str, items: list[dict[str, Any]], error: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        fields, reader = self._fields, self._reader
        text = fields.get("text") or {}
        reasoning = fields.get("reasoning") or {}
        reason = "content_filter" if reader.finish == "content_filter" else "max_output_tokens"
        done = status != "in_progress"
        return {
            "id": f"resp_{self._base}",
            "object": "response",
            "created_at": reader.created_s,
            "completed_at": reader.created_s if status == "completed" else None,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": {"reason": reason} if status == "incomplete" else None,
            "instructions": fields.get("instructions"),
            "max_output_tokens": fields.get("max_output_tokens"),
            "max_tool_calls": fields.get("max_tool_calls"),
            "model": reader.model or fields.get("model") or "",
            "output": items,
            "parallel_tool_calls": fields.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "prompt_cache_key": fields.get("prompt_cache_key"),
            "reasoning": {"effort": reasoning.get("effort"), "summary": None},
            "safety_identifier": fields.get("safety_identifier"),
            "service_tier": "default",
            "store": False,
            "temperature": fields.get("temperature"),
            "text": {"format": text.get("format") or {"type": "text"}, **without_none(verbosity=text.get("verbosity"))},
            "tool_choice": fields.get("tool_choice") or "auto",
            "tools": fields.get("tools") or [],
            "top_logprobs": fields.get("top_logprobs") or 0,
            "top_p": fields.get("top_p"),
            "truncation": fields.get("truncation") or "disabled",
            "usage": _make_usage(reader.usage) if done and reader.usage is not None else None,
            "user": fields.get("user"),
            "metadata": fields.get("metadata") or {},
        }


def _status(finish: str) -> str:
    return "incomplete" if finish in ("length", "content_filter") else "completed"


def _make_usage(usage: ChatUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }


def _translate_logprob(token: Mapping[str, Any]) -> dict[str, Any]:
    alternatives = token.get("top_logprobs")
    likeliest = (
        [alternative for alternative in alternatives if isinstance(alternative, dict)]
        if isinstance(alternatives, list)
        else []
    )
    own = {name: token.get(name) for name in ("token", "logprob", "bytes")}
    return {**own, "top_logprobs": [{name: alternative.get(name) for name in own} for alternative in likeliest]}


def error_event(status: int, message: str) -> bytes:
    return event("error", {"type": "error", "code": kind_of(status), "message": message, "param": None})
