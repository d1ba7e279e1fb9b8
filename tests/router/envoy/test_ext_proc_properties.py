"""Whatever a data plane sends, in whatever order: no exception, the account closes, and answers keep their order."""

from __future__ import annotations

from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.router.envoy.exchanges import (
    GET,
    POST,
    Exchange,
    a_completion,
    a_service,
    kinds,
    request_body,
    request_headers,
    request_trailers,
    response_body,
    response_headers,
    response_trailers,
)

MODES = st.sampled_from(ProcessingMode.BodySendMode.values())
NAMES = st.sampled_from(["", "10.0.0.0:8000", "10.0.0.2:8000", "9.9.9.9:1", "nonsense"])
BODIES = st.sampled_from([b"", b"{", a_completion(), b"x" * 70_000, b'data: {"usage": {}}\n\n'])
CONFIGS = st.none() | st.fixed_dictionaries({"request_body_mode": MODES, "response_body_mode": MODES})
SUBSETS = st.none() | st.lists(NAMES, max_size=3)
MESSAGES = st.one_of(
    st.builds(request_headers, st.sampled_from([GET, POST, {}]), end=st.booleans(), subset=SUBSETS, config=CONFIGS),
    st.builds(request_body, BODIES, end=st.booleans()),
    st.builds(request_trailers),
    st.builds(
        response_headers,
        st.sampled_from([200, 404, 500, 503]),
        kind=st.sampled_from(["application/json", "text/event-stream", ""]),
        served=NAMES,
        attribute=NAMES,
        details=st.sampled_from(["", "via_upstream", "route_not_found"]),
        end=st.booleans(),
    ),
    st.builds(response_body, BODIES, end=st.booleans()),
    st.builds(response_trailers),
    st.just(ProcessingRequest()),
)
ORDER = ["request_headers", "request_body", "request_trailers"]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(MESSAGES, max_size=12), max_size=4), st.booleans())
def test_any_messages_in_any_order_leave_a_closed_account(
    streams: list[list[ProcessingRequest]], limited: bool
) -> None:
    service = a_service(fallbacks=2, max_requests=1 if limited else 0, most_body_bytes=100_000, tell_decisions=True)
    now_s = 0.0
    exchanges = [Exchange(service) for _ in streams]
    for exchange, messages in zip(exchanges, streams, strict=True):
        for message in messages:
            now_s += 0.1
            exchange.receive(message, now_s)
    for exchange in exchanges:
        exchange.closed(now_s)
    assert service.streams == 0
    assert {(s.in_flight, s.prefilling, s.prefill_tokens) for s in service.picker.fleet} == {(0, 0, 0.0)}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.builds(request_body, BODIES, end=st.just(False)), max_size=5), st.booleans(), BODIES)
def test_answers_to_a_request_come_once_and_in_order(
    pieces: list[ProcessingRequest], trailers: bool, last: bytes
) -> None:
    exchange = Exchange(a_service())
    ending = [request_trailers()] if trailers else [request_body(last)]
    answers = [kind for m in (request_headers(), *pieces, *ending) for kind in kinds(exchange.receive(m, 0.0))]
    if answers != ["immediate_response"]:
        assert answers == sorted(answers, key=ORDER.index)
        assert answers.count("request_headers") == 1 and answers.count("request_trailers") == int(trailers)
