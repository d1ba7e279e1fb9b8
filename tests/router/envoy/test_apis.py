"""Responses and Messages behind Envoy: passed on, by the prompt that chat would have; unknown paths by the setting."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from tests.router.envoy.exchanges import (
    Exchange,
    a_completion,
    request_body,
    request_headers,
    response_body,
    response_headers,
)

from skymemory.router.envoy.endpoints import endpoint
from skymemory.router.envoy.ext_proc import PickerService
from skymemory.router.envoy.picker_server import endpoint_picker
from skymemory.router.settings import settings_from

CHAT, RESPONSES, MESSAGES, COUNT = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"


def a_picker(**more: Any) -> PickerService:
    backends = [{"url": f"http://10.0.0.{number}:8000"} for number in range(3)]
    service = endpoint_picker(settings_from({"strategy": "approximate", "backends": backends, **more}), print).service
    service.backends.set([endpoint(f"10.0.0.{number}:8000") for number in range(3)])  # it does so when it is started
    return service


def answers(service: PickerService, path: str, body: bytes, now_s: float = 0.0, reply: bytes = b"{}") -> list[Any]:
    exchange = Exchange(service)
    exchange.receive(request_headers({":method": "POST", ":path": path}), now_s)
    found = list(exchange.receive(request_body(body), now_s))
    if not found[0].HasField("immediate_response"):
        exchange.receive(response_headers(), now_s)
        exchange.receive(response_body(reply), now_s)
    exchange.closed(now_s)
    return found


def bodies(path: str) -> list[bytes]:
    draw = random.Random(5)
    systems = [f"Assistant {number}. " + " ".join(str(draw.random()) for _ in range(60)) for number in range(6)]
    found = []
    for _ in range(60):
        system, question = draw.choice(systems), f"Question {draw.randrange(10**6)}"
        turn: dict[str, Any] = {"role": "user", "content": question}
        body: dict[str, Any] = {"model": "m"}
        if path == CHAT:
            body["messages"] = [{"role": "system", "content": system}, turn]
        elif path == RESPONSES:
            body |= {"instructions": system, "input": [{**turn, "content": [{"type": "input_text", "text": question}]}]}
        else:
            body |= {"system": [{"type": "text", "text": system}], "messages": [turn], "max_tokens": 5}
        found.append(json.dumps(body).encode())
    return found


def matched_share(path: str) -> float:
    service = a_picker()
    for at, body in enumerate(bodies(path)):
        passed = answers(service, path, body, at / 10)
        assert passed[1].request_body.response.body_mutation.streamed_response.body == body
    return service.counters.total("matched_tokens_total") / service.counters.total("prompt_tokens_total")


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_as_much_is_matched_as_of_chats(path: str) -> None:
    expected = matched_share(CHAT)
    assert expected > 0.6 and matched_share(path) == pytest.approx(expected, abs=0.01)


def test_a_count_of_tokens_teaches_nothing() -> None:
    service = a_picker()
    for _ in range(3):
        answers(service, COUNT, bodies(MESSAGES)[0])
    assert service.counters.total("matched_tokens_total") == 0


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        (RESPONSES, {"input": "x", "previous_response_id": "resp_1"}, ("invalid_request_error", "nothing is stored")),
        (MESSAGES, {"messages": []}, ("invalid_request_error", "no turn")),
        ("/prefix/v1/messages", {"messages": [3]}, ("invalid_request_error", "not an object")),
    ],
)
def test_refusals_are_in_the_format_of_the_path(path: str, body: Any, error: tuple[str, str]) -> None:
    refused = answers(a_picker(), path, json.dumps(body).encode())[0].immediate_response
    found = json.loads(refused.body)
    assert refused.status.code == 400 and found["error"]["type"] == error[0] and error[1] in found["error"]["message"]
    assert (found.get("type") == "error") is path.endswith(MESSAGES)


def test_unknown_paths_go_by_load_or_are_refused() -> None:
    assert not answers(a_picker(), "/v1/fancy", b"{}")[0].HasField("immediate_response")
    strict = a_picker(unknown_paths="refuse")
    assert answers(strict, "/v1/fancy", b"{}")[0].immediate_response.status.code == 404
    for known in ("/v1/embeddings", "/prefix/v1/models", "/health", "/v1/models/small"):
        assert not answers(strict, known, b"{}")[0].HasField("immediate_response")
    assert not answers(strict, "/v1/completions", a_completion())[0].HasField("immediate_response")
