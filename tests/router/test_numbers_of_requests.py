"""Every number that a request has, in its body or its headers, at every door: read, or refused with what was expected.

Numbers are drawn over their digits, signs and exponents, and what stands in their place: booleans, texts, lists, names
that are no JSON. No answer is 500, no call of the picker fails, and no count that is kept is changed for the worse.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse
from hypothesis import given
from hypothesis import strategies as st
from tests.router.drawn_numbers import NUMBERS, VALUES
from tests.router.envoy.exchanges import POST, a_service, request_body, request_headers
from tests.router.running import PATIENCE_S, Loop, Running

from skymemory.router.api_error import ApiError
from skymemory.router.envoy.ext_proc import ExtProcExchange
from skymemory.router.prompts.reader import (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    FAIRNESS_HEADERS,
    MAX_OUTPUT_TOKENS,
    OBJECTIVE_HEADERS,
    TPOT_HEADERS,
    TTFT_HEADERS,
    PromptReader,
)
from skymemory.router.queue import work_of
from skymemory.router.request_account import usage_in
from skymemory.router.settings import settings_from

FIELDS = ("max_tokens", "max_completion_tokens", "user", "priority", "n", "best_of", "seed", "temperature", "prompt")
HEADERS = ("x-skymemory-priority", *TTFT_HEADERS, *TPOT_HEADERS, *OBJECTIVE_HEADERS, *FAIRNESS_HEADERS)
LONGEST_HEADER = 20_000
"""Longer heads are refused whole."""
SETTINGS = {
    "limits": {"max_waiting": 8},
    "queue": {"max_requests": 8},
    "admission": {"rule": "baseline", "ttft": 1e6, "fair": True, "objectives": {"gold": 3}},
    "picker": {"max_requests": 8},
}
READER = PromptReader(settings_from(SETTINGS))


def body_of(path: str, field: str, value: str) -> bytes:
    prompt = '"prompt": "a"' if path == COMPLETIONS else '"messages": [{"role": "user", "content": "a"}]'
    return f'{{{prompt}, "{field}": {value}}}'.encode()


@given(path=st.sampled_from([COMPLETIONS, CHAT_COMPLETIONS]), field=st.sampled_from(FIELDS), value=VALUES)
def test_a_number_of_a_body_is_read_or_refused(path: str, field: str, value: str) -> None:
    try:
        request = READER.read(path, {}, body_of(path, field, value))
    except ApiError as error:
        assert error.status == 400 and len(error.message) < 1000
        return
    output = request.output_tokens
    assert output is None or (type(output) is int and 0 <= output <= MAX_OUTPUT_TOKENS)
    assert 0 <= work_of(request) <= 2.0**53, "else it would be a credit to a tenant, or swallow the work of others"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", ["9" * 309, "9" * 4300, "9" * 5000, "1.5", "1e300", "-1e30", str(2**63)])
def test_what_was_expected_of_a_limit_is_said(field: str, value: str) -> None:
    with pytest.raises(ApiError, match="64 bits") as caught:
        READER.read(COMPLETIONS, {}, body_of(COMPLETIONS, field, value))
    assert caught.value.status == 400 and caught.value.param == field


@given(name=st.sampled_from(HEADERS), value=VALUES.filter(lambda value: len(value) < LONGEST_HEADER))
def test_a_number_of_a_header_is_read_or_refused(name: str, value: str) -> None:
    try:
        request = READER.read(COMPLETIONS, {name: value}, b'{"prompt": "a"}')
    except ApiError as error:
        assert error.status == 400 and "expected" in error.message and len(error.message) < 1000
        return
    assert -10 <= request.priority <= 10
    assert request.slo is not None and request.slo.ttft_s > 0 and request.slo.tbt_s > 0


@given(field=st.sampled_from(FIELDS), value=VALUES, name=st.sampled_from(HEADERS), header=VALUES)
def test_no_number_fails_a_call_of_the_picker(field: str, value: str, name: str, header: str) -> None:
    service = a_service()
    service.reader = READER
    exchange = ExtProcExchange(service)
    exchange.receive(request_headers({**POST, name: header[:LONGEST_HEADER]}), 0.0)
    for answer in exchange.receive(request_body(body_of(COMPLETIONS, field, value)), 0.0):
        said = ProcessingResponse.FromString(answer)
        if said.WhichOneof("response") == "immediate_response":
            assert said.immediate_response.status.code == 400, said
    exchange.closed(1.0)


@pytest.fixture(scope="module")
def routed(loop: Loop) -> Iterator[Running]:
    running = Running(loop).start(2, **SETTINGS, strategy="least-ttft")
    yield running
    running.close()


def ask(connection: http.client.HTTPConnection, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    connection.request("POST", COMPLETIONS, body, headers)
    response = connection.getresponse()
    return response.status, response.read()


@given(field=st.sampled_from(FIELDS), value=VALUES, name=st.sampled_from(HEADERS), header=NUMBERS)
def test_the_proxy_never_answers_500_to_a_number(
    routed: Running, field: str, value: str, name: str, header: str
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", routed.port, timeout=PATIENCE_S)
    headers = {name: header.encode("utf-8").decode("latin-1")[:LONGEST_HEADER].strip()}
    status, answer = ask(connection, body_of(COMPLETIONS, field, value), headers)
    connection.close()
    assert status in (200, 400), answer
    assert routed.metric("faults_total", where="request") == 0


@pytest.mark.parametrize("zeros", [0, 100, 4300, 5000, 10_000])
def test_a_length_may_have_zeros_in_front(routed: Running, zeros: int) -> None:
    body = b'{"prompt": "a"}'
    connection = http.client.HTTPConnection("127.0.0.1", routed.port, timeout=PATIENCE_S)
    status, answer = ask(connection, body, {"Content-Length": "0" * zeros + str(len(body))})
    assert status == 200, answer
    connection.close()


@pytest.mark.parametrize(
    "length", ["9" * 19, "0" * 5000 + "9" * 19, str(2**64 - 1), str(2**64), "9" * 5000, "-1", "+5"]
)
def test_a_length_that_is_none_or_too_large_is_refused(routed: Running, length: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", routed.port, timeout=PATIENCE_S)
    status, answer = ask(connection, b'{"prompt": "a"}', {"Content-Length": length})
    assert status in (400, 413) and b"error" in answer
    connection.close()


@given(value=VALUES)
def test_a_port_of_a_sidecars_header_is_a_port(value: str) -> None:
    from skymemory.errors import InvalidInput
    from skymemory.router.prefillers import read_host_port

    try:
        _, port = read_host_port(f"10.0.0.1:{value}")
    except InvalidInput:
        return
    assert 0 < port < 65536


@given(prompt=NUMBERS, output=NUMBERS, cached=NUMBERS)
def test_an_engines_own_numbers_are_counted_or_left_out(prompt: str, output: str, cached: str) -> None:
    usage = usage_in(
        f'{{"usage": {{"prompt_tokens": {prompt}, "completion_tokens": {output}, '
        f'"prompt_tokens_details": {{"cached_tokens": {cached}}}}}}}'.encode()
    )
    for tokens in () if usage is None else usage:
        assert tokens is None or (0 <= tokens <= 2**53 and json.dumps(float(tokens)))
    if usage is not None:
        assert usage.work is None or usage.work >= 0


def test_numbers_of_a_request_are_the_engines_to_judge_where_the_router_reads_none() -> None:
    """What the router does not read passes: engines differ in what they allow."""
    body: dict[str, Any] = {"prompt": "a", "temperature": 1e300, "top_k": -1, "seed": 2**70}
    assert READER.read(COMPLETIONS, {}, json.dumps(body).encode()).prompt.tokens == 1
