"""Error responses in OpenAI's format."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from skymemory.errors import SkyMemoryError

_CODES = {401: "invalid_api_key", 405: "method_not_supported", 429: "rate_limit_exceeded"}
OF_CLIENT = "invalid_request_error"
_encode = msgspec.json.Encoder().encode


class ApiError(SkyMemoryError):
    """Error that the client gets as an HTTP response in OpenAI's format."""

    headers: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param  # field of the request that is at fault
        self.code = code  # word for programs, such as "overloaded"; None: by the status
        self.kind = kind  # `type` of OpenAI's errors; None: by the status
        self.retry_after_s = retry_after_s  # header Retry-After

    def body(self) -> bytes:
        return error_body(self.status, self.message, self.param, self.code, self.kind)


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None, kind: str | None = None
) -> bytes:
    """Return ``{"error": {"message", "type", "param", "code"}}`` as JSON; ``kind`` is its ``type``."""
    error = {"message": message, "type": kind or kind_of(status), "param": param, "code": code or _CODES.get(status)}
    return _encode({"error": error})


def kind_of(status: int) -> str:
    if status == 429:
        return "requests"
    return "server_error" if status >= 500 else OF_CLIENT


def error_event(status: int, message: str) -> bytes:
    """Return a server-sent event, which OpenAI's clients raise in a stream."""
    return b"data: " + error_body(status, message) + b"\n\n"
