"""The response's half: passed on as it is, read on the way, and accounted to the server that really served it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse
from tests.router.envoy.exchanges import (
    GET,
    POST,
    Exchange,
    a_completion,
    a_service,
    header_destination,
    kinds,
    request_body,
    request_headers,
    response_body,
    response_headers,
    response_trailers,
)

from skymemory.conductor.picker import Server
from skymemory.conductor.request import Request
from skymemory.conductor.strategies.simple import RoundRobin
from skymemory.router.envoy import messages as say
from skymemory.router.envoy.ext_proc import PickerService
from skymemory.router.envoy.messages import PIECE_BYTES

USAGE = {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 64}}
SSE = "text/event-stream; charset=utf-8"


class Remembering(RoundRobin):
    """What a strategy learns, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.learned: list[tuple[Any, ...]] = []

    def succeeded(self, request: Request, server: Server, now_s: float, cached_tokens: int | None) -> None:
        self.learned.append(("succeeded", server.name, now_s, cached_tokens))

    def corrected(self, request: Request, server: Server, now_s: float, cached_tokens: int) -> None:
        self.learned.append(("corrected", server.name, now_s, cached_tokens))

    def failed(self, request: Request, server: Server, now_s: float) -> None:
        self.learned.append(("failed", server.name, now_s))


def sent(service: PickerService, now_s: float = 0.0) -> tuple[Exchange, str]:
    """An exchange whose request is on its way, and to whom."""
    exchange = Exchange(service)
    exchange.receive(request_headers({**POST, "x-skymemory-decision": "1"}), now_s)
    first, *_ = exchange.receive(request_body(a_completion("x" * 800)), now_s)
    return exchange, str(header_destination(first)).partition(",")[0]


def in_flight(service: PickerService) -> dict[str, int]:
    return {server.name: server.in_flight for server in service.picker.fleet if server.in_flight}


def test_a_response_passes_as_it_is_and_in_order() -> None:
    exchange, _ = sent(a_service())
    (headers,) = exchange.receive(response_headers(), 1.0)
    assert not headers.response_headers.response.header_mutation.set_headers
    body = b"y" * 150_000
    answers = list(exchange.receive(response_body(body, end=False), 1.0))
    pieces = [answer.response_body.response.body_mutation.streamed_response for answer in answers]
    assert b"".join(piece.body for piece in pieces) == body and len(pieces) == 3
    assert all(len(piece.body) <= PIECE_BYTES and not piece.end_of_stream for piece in pieces)
    (trailers,) = exchange.receive(response_trailers(), 1.0)
    assert kinds([headers, *answers, trailers]) == ["response_headers", *["response_body"] * 3, "response_trailers"]


def test_the_last_piece_says_that_it_is_the_last() -> None:
    exchange, _ = sent(a_service())
    exchange.receive(response_headers(), 1.0)
    (answer,) = exchange.receive(response_body(b""), 1.0)
    assert answer.response_body.response.body_mutation.streamed_response.end_of_stream


def test_a_streamed_answer_succeeds_with_its_first_byte_and_ends_with_its_last() -> None:
    scorer = Remembering()
    service = a_service(scorer=scorer)
    exchange, server = sent(service)
    exchange.receive(response_headers(kind=SSE), 1.0)
    assert scorer.learned == []
    exchange.receive(response_body(b"data: {}\n\n", end=False), 2.0)
    assert scorer.learned == [("succeeded", server, 2.0, None)] and in_flight(service) == {server: 1}
    exchange.receive(response_body(f"data: {json.dumps({'usage': USAGE})}\n\ndata: [DONE]\n\n".encode()), 3.0)
    assert in_flight(service) == {} and scorer.learned[1:] == [("corrected", server, 3.0, 128)]
    exchange.closed(4.0)
    assert in_flight(service) == {} and len(scorer.learned) == 2
    assert service.counters.get("cached_tokens_total") == 64 and service.counters.get("told_prompt_tokens_total") == 100


def test_an_answer_in_one_piece_reports_what_was_cached_when_it_succeeds() -> None:
    scorer = Remembering()
    service = a_service(scorer=scorer)
    exchange, server = sent(service)
    exchange.receive(response_headers(), 1.0)
    text = json.dumps({"choices": [], "usage": USAGE}).encode()
    exchange.receive(response_body(text[:20], end=False), 2.0)
    exchange.receive(response_body(text[20:]), 3.0)
    assert scorer.learned == [("succeeded", server, 3.0, 128)] and in_flight(service) == {}
    assert service.picker.fleet.servers[server].read_per_token == 2.0, "it counts 100 tokens where we do 200"


def test_an_error_teaches_nothing() -> None:
    for status in (400, 404, 429, 500):
        scorer = Remembering()
        service = a_service(scorer=scorer)
        exchange, server = sent(service)
        exchange.receive(response_headers(status, served=server), 1.0)
        exchange.receive(response_body(b"{}"), 1.0)
        exchange.closed(1.0)
        assert scorer.learned == [("failed", server, 1.0)] and in_flight(service) == {}


@pytest.mark.parametrize("how", ["served", "attribute"])
def test_the_endpoint_that_served_gets_the_request_in_its_account(how: str) -> None:
    scorer = Remembering()
    service = a_service(scorer=scorer, fallbacks=2)
    exchange, chosen = sent(service)
    other = next(server.name for server in service.picker.fleet if server.name != chosen)
    exchange.receive(response_headers(kind=SSE, **{how: other}), 1.0)
    assert in_flight(service) == {other: 1}
    exchange.receive(response_body(b"data: {}\n\n"), 2.0)
    assert scorer.learned == [("failed", chosen, 1.0), ("succeeded", other, 2.0, None)] and in_flight(service) == {}
    assert service.counters.get("fallbacks_total", other) == 1

    exchange, chosen = sent(service)
    exchange.receive(response_headers(kind=SSE, **{how: "192.0.2.1:1"}), 3.0)
    exchange.closed(4.0)
    assert service.counters.get("fallbacks_total", "other") == 1, "no label but those of servers that are known"


def test_a_server_that_never_takes_its_requests_is_left_alone_for_a_while() -> None:
    service = a_service(servers=2, fallbacks=1)
    dead, alive = "10.0.0.0:8000", "10.0.0.1:8000"
    chosen = []
    for number in range(12):
        exchange, server = sent(service, float(number))
        chosen.append(server)
        exchange.receive(response_headers(served=alive), float(number))
        exchange.closed(float(number))
    assert chosen.count(dead) == 3 and service.counters.get("ejections_total", dead) == 1
    assert chosen[-5:] == [alive] * 5
    # Back after ten seconds, for one request: it fails again and is left alone at once.
    later = [sent(service, 30.0)[1] for _ in range(2)]
    assert dead in later


@pytest.mark.parametrize("learned", [{}, {"attribute": True, "details": "upstream_reset_before_response_started{}"}])
def test_envoys_own_503_counts_against_the_server_it_tried(learned: dict[str, Any]) -> None:
    service = a_service(servers=2)
    bad, _ = service.picker.fleet
    for number in range(40):
        exchange, server = sent(service, float(number) / 4)
        # Envoy names the last that it tried although that did not answer.
        more = {**learned, "attribute": server} if learned else {}
        answer = response_headers(503, **more) if server == bad.name else response_headers(200)
        exchange.receive(answer, float(number) / 4)
        exchange.closed(float(number) / 4)
    assert not bad.healthy and service.counters.get("picks_total", bad.name) == 3


@pytest.mark.parametrize("status", [429, 500, 503])
def test_where_all_servers_answer_errors_all_are_used(status: int) -> None:
    service = a_service(servers=2)
    for number in range(10):
        exchange, server = sent(service, float(number))
        exchange.receive(response_headers(status, attribute=server, details="via_upstream"), float(number))
        exchange.closed(float(number))
    assert all(server.healthy for server in service.picker.fleet)
    assert all(service.counters.get("picks_total", server.name) >= 3 for server in service.picker.fleet)


@pytest.mark.parametrize("status", [429, 500])
def test_a_server_that_answers_errors_at_once_does_not_look_fastest(status: int) -> None:
    service = a_service(servers=3)
    bad = next(iter(service.picker.fleet)).name
    for number in range(200):
        exchange, server = sent(service, number / 40)
        answer = response_headers(status if server == bad else 200, attribute=server, details="via_upstream")
        exchange.receive(answer, number / 40)
        exchange.closed(number / 40)
    assert service.counters.get("picks_total", bad) <= 3


@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_goes_away_closes_the_account(begun: bool) -> None:
    scorer = Remembering()
    service = a_service(scorer=scorer)
    exchange, server = sent(service)
    if begun:
        exchange.receive(response_headers(kind=SSE), 1.0)
        exchange.receive(response_body(b"data: {}\n\n", end=False), 1.0)
    exchange.closed(2.0)
    assert in_flight(service) == {} and service.streams == 0
    assert scorer.learned == ([("succeeded", server, 1.0, None)] if begun else [("failed", server, 2.0)])
    assert service.counters.get("requests_abandoned_total") == int(not begun)


def test_a_decision_is_disclosed_only_where_that_is_allowed() -> None:
    for allowed in (False, True):
        exchange, server = sent(a_service(tell_decisions=allowed))
        (answer,) = exchange.receive(response_headers(), 1.0)
        added = {h.header.key: h.header.raw_value for h in answer.response_headers.response.header_mutation.set_headers}
        assert bool(added) == allowed
        if allowed:
            assert json.loads(added["x-skymemory-decision"])["server"] == server


def test_bodies_that_envoy_keeps_are_not_sent_back() -> None:
    exchange = Exchange(a_service())
    modes = {
        "request_body_mode": ProcessingMode.BodySendMode.Value("FULL_DUPLEX_STREAMED"),
        "response_body_mode": ProcessingMode.BodySendMode.Value("BUFFERED"),
    }
    exchange.receive(request_headers(GET, end=True, config=modes), 0.0)
    exchange.receive(response_headers(), 1.0)
    (answer,) = exchange.receive(response_body(b"x"), 1.0)
    assert kinds([answer]) == ["response_body"] and not answer.response_body.HasField("response")


def test_a_response_without_a_request_of_ours_passes() -> None:
    # Envoy's own answer to a request that it refused itself goes by before anything was chosen.
    exchange = Exchange(a_service())
    exchange.receive(request_headers(), 0.0)
    assert kinds(list(exchange.receive(response_headers(408), 1.0))) == ["response_headers"]
    assert kinds(list(exchange.receive(response_body(b"slow"), 1.0))) == ["response_body"]
    exchange.closed(1.0)


@pytest.mark.parametrize("size", [0, 1, 126, 127, 128, 16_300, 16_384, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES])
@pytest.mark.parametrize("end", [True, False])
def test_pieces_are_encoded_as_protobuf_encodes_them(size: int, end: bool) -> None:
    body = bytes(size)
    for kind, made in (("request_body", say.streamed_request), ("response_body", say.streamed_response)):
        pieces = list(made(body, end))
        for number, piece in enumerate(pieces):
            said = ProcessingResponse.FromString(piece)
            streamed = getattr(said, kind).response.body_mutation.streamed_response
            assert said.SerializeToString(deterministic=True) == piece and said.WhichOneof("response") == kind
            assert streamed.end_of_stream == (end and number == len(pieces) - 1)
        whole = b"".join(
            getattr(ProcessingResponse.FromString(x), kind).response.body_mutation.streamed_response.body
            for x in pieces
        )
        assert whole == body
