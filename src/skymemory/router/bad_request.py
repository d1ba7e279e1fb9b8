"""Answers that are errors, in the form in which OpenAI's API gives them and its clients expect them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from skymemory.errors import SkyMemoryError

_CODES = {401: "invalid_api_key", 405: "method_not_supported", 429: "rate_limit_exceeded"}
"""What OpenAI's API says in ``code`` where one status has one meaning; most errors have null there."""
_encode = msgspec.json.Encoder().encode


class BadRequest(SkyMemoryError):
    """A request that cannot be served as it is: an HTTP status, and a sentence for whoever sent it."""

    headers: Mapping[str, str] = MappingProxyType({})
    """For the answer."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, kind: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.kind = kind

    def body(self) -> bytes:
        return error_body(self.status, self.message, self.param, self.code, self.kind)


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None, kind: str | None = None
) -> bytes:
    """``{"error": {"message", "type", "param", "code"}}`` as JSON, ``kind`` being the type.

    Types are OpenAI's: ``requests`` or ``tokens`` by what there was too much of (429), ``server_error`` from 500 on,
    else ``invalid_request_error``. ``code`` is a word or null; clients compare it with words.
    """
    said = {"message": message, "type": kind or kind_of(status), "param": param, "code": code or _CODES.get(status)}
    return _encode({"error": said})


def kind_of(status: int) -> str:
    """The ``type`` of OpenAI's error object, where nothing finer is known."""
    if status == 429:
        return "requests"
    return "server_error" if status >= 500 else "invalid_request_error"


def error_event(status: int, message: str) -> bytes:
    """The same as an event of a stream: clients of OpenAI's API raise it as an error."""
    return b"data: " + error_body(status, message) + b"\n\n"
