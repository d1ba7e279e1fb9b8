"""Reading of a decoded JSON request; wrong types are refused."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, NoReturn, TypeGuard

from skymemory.router.api_error import ApiError

Fields = Mapping[str, Any]
WHOLE_LIMIT = 1 << 63
_HALF_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")
_TAIL_BYTES = 24


def refuse(param: str, why: str) -> NoReturn:
    raise ApiError(400, f"`{param}` {why}", param)


def reason_of(error: Exception, raw: bytes | memoryview) -> str:
    """Return why JSON was refused; msgspec calls a lone surrogate near the end truncated."""
    words = str(error)
    if "truncated" in words and _HALF_PAIR.search(bytes(raw[-_TAIL_BYTES:])):
        return "a text has one half of a surrogate pair (\\ud800 to \\udfff) without the other"
    return words


def is_whole(value: object) -> TypeGuard[int | float]:
    """Return True for an integer of 64 bits, which JSON may write as 16.0."""
    is_integer = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return is_integer and -WHOLE_LIMIT <= value < WHOLE_LIMIT  # type: ignore[operator]


def text_of(value: object, param: str) -> str:
    if value is None:
        refuse(param, "is missing: expected a text")
    if not isinstance(value, str):
        refuse(param, "is not a text")
    return value


def list_of(value: object, param: str) -> list[Any]:
    if value is None:
        refuse(param, "is missing: expected a list")
    if not isinstance(value, list):
        refuse(param, "is not a list")
    return value


def object_of(value: object, param: str) -> dict[str, Any]:
    if value is None:
        refuse(param, "is missing: expected an object")
    if not isinstance(value, dict):
        refuse(param, "is not an object")
    return value


def further(fields: Fields, known: Collection[str]) -> dict[str, Any]:
    """Return an engine's extensions."""
    return {name: value for name, value in fields.items() if name not in known}


def without_none(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def function_tool(name: object, description: object, parameters: object, strict: object, param: str) -> dict[str, Any]:
    function = {"name": text_of(name, f"{param}.name"), **without_none(description=description, parameters=parameters)}
    return {"type": "function", "function": {**function, **without_none(strict=strict)}}


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return a turn's content; a single text without its list."""
    return parts[0]["text"] if len(parts) == 1 and parts[0].get("type") == "text" else parts
