"""Errors in the form of OpenAI's API: what its clients compare is a word or null, never a number."""

from __future__ import annotations

import json
from typing import Any

import pytest

from skymemory.router.api_error import ApiError, error_body, error_event


def said(body: bytes) -> dict[str, Any]:
    return dict(json.loads(body)["error"])


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        (400, "invalid_request_error", None),
        (401, "invalid_request_error", "invalid_api_key"),
        (404, "invalid_request_error", None),
        (405, "invalid_request_error", "method_not_supported"),
        (413, "invalid_request_error", None),
        (429, "requests", "rate_limit_exceeded"),
        (500, "server_error", None),
        (502, "server_error", None),
        (503, "server_error", None),
        (504, "server_error", None),
    ],
)
def test_types_and_codes_are_openais(status: int, kind: str, code: str | None) -> None:
    assert said(error_body(status, "why")) == {"message": "why", "type": kind, "param": None, "code": code}


def test_what_is_known_more_finely_is_said() -> None:
    error = ApiError(404, "no such model", "model", "model_not_found")
    assert said(error.body())["code"] == "model_not_found" and said(error.body())["param"] == "model"
    assert said(ApiError(429, "too many", kind="tokens").body())["type"] == "tokens"
    event = error_event(502, "it went away")
    assert event.startswith(b"data: ") and event.endswith(b"\n\n") and said(event[6:])["type"] == "server_error"
