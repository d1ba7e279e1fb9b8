"""Answers that are errors, in the form in which OpenAI's API gives them and its clients expect them."""

from __future__ import annotations

import msgspec

from skymemory.errors import SkyMemoryError

_KINDS = {
    400: "invalid_request_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    502: "bad_gateway_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_encode = msgspec.json.Encoder().encode


class BadRequest(SkyMemoryError):
    """A request that cannot be served as it is: an HTTP status, and a sentence for whoever sent it."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> bytes:
        return error_body(self.status, self.message, self.param, self.code)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> bytes:
    """``{"error": {"message", "type", "param", "code"}}`` as JSON; ``code`` is the status if nothing finer is said."""
    kind = _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return _encode({"error": {"message": message, "type": kind, "param": param, "code": code or status}})


def error_event(status: int, message: str) -> bytes:
    """The same as an event of a stream: clients of OpenAI's API raise it as an error."""
    return b"data: " + error_body(status, message) + b"\n\n"
