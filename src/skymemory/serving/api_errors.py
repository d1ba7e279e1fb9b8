"""What a client of the engine is told when its request cannot be served: a status and OpenAI's error object."""

from __future__ import annotations

from skymemory.errors import SkyMemoryError


class ApiError(SkyMemoryError):
    """``status`` and the fields of OpenAI's error object; ``retry_after_s`` where trying again is worth it."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def as_json(self) -> dict[str, object]:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
