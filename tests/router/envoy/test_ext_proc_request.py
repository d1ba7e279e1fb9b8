"""The request's half of an exchange: when Envoy is answered, with which endpoint, and what becomes of the body."""

from __future__ import annotations

import gzip
import json
import zlib

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
    metadata_destination,
    request_body,
    request_headers,
    request_trailers,
)

from skymemory.conductor.picker import ReportedLoad
from skymemory.conductor.strategies.simple import LeastLoad
from skymemory.router.api_error import ApiError
from skymemory.router.envoy.messages import OVERWRITE, PIECE_BYTES

MODE = ProcessingMode.BodySendMode


def streamed(answers: list[ProcessingResponse]) -> list[tuple[bytes, bool]]:
    pieces = [answer.request_body.response.body_mutation.streamed_response for answer in answers]
    return [(piece.body, piece.end_of_stream) for piece in pieces]


def test_headers_are_held_until_the_body_has_come_whole() -> None:
    exchange = Exchange(a_service())
    body = a_completion()
    assert exchange.receive(request_headers(), 0.0) == ()
    assert exchange.receive(request_body(body[:10], end=False), 0.1) == ()
    answers = list(exchange.receive(request_body(body[10:]), 0.2))
    assert kinds(answers) == ["request_headers", "request_body"]
    assert streamed(answers[1:]) == [(body, True)]


def test_the_endpoint_is_sent_in_the_header_and_in_the_metadata_and_is_the_same() -> None:
    for fallbacks, addresses in ((0, 1), (1, 2), (7, 3)):
        exchange = Exchange(a_service(fallbacks=fallbacks))
        exchange.receive(request_headers(), 0.0)
        first, *_ = exchange.receive(request_body(a_completion()), 0.0)
        endpoints = header_destination(first)
        assert endpoints == metadata_destination(first)
        assert endpoints is not None and len(set(endpoints.split(","))) == addresses
        assert all(endpoint in {f"10.0.0.{n}:8000" for n in range(3)} for endpoint in endpoints.split(","))


def test_what_a_client_put_into_the_header_is_overwritten() -> None:
    exchange = Exchange(a_service())
    exchange.receive(request_headers({**POST, "x-gateway-destination-endpoint": "169.254.169.254:80"}), 0.0)
    first, *_ = exchange.receive(request_body(a_completion()), 0.0)
    (option,) = first.request_headers.response.header_mutation.set_headers
    assert option.append_action == OVERWRITE and b"169.254" not in option.header.raw_value


def test_fallbacks_are_best_first() -> None:
    service = a_service(scorer=LeastLoad(), fallbacks=2)
    for number, waiting in enumerate((5, 1, 3)):
        service.picker.fleet.servers[f"10.0.0.{number}:8000"].reported = ReportedLoad(at_s=0.0, waiting=waiting)
    exchange = Exchange(service)
    (answer,) = exchange.receive(request_headers(GET, end=True), 0.0)
    assert header_destination(answer) == "10.0.0.1:8000,10.0.0.2:8000,10.0.0.0:8000"


def test_a_large_body_goes_on_in_pieces_that_envoy_takes() -> None:
    exchange = Exchange(a_service())
    body = a_completion("x" * 1_000_000)
    exchange.receive(request_headers(), 0.0)
    for start in range(0, len(body), 100_000):
        answers = list(
            exchange.receive(request_body(body[start : start + 100_000], end=start + 100_000 >= len(body)), 0.0)
        )
    pieces = streamed(answers[1:])
    assert b"".join(piece for piece, _ in pieces) == body
    assert max(len(piece) for piece, _ in pieces) <= PIECE_BYTES <= 62_000
    assert [end for _, end in pieces] == [False] * (len(pieces) - 1) + [True]


def test_a_body_without_end_of_stream_ends_with_its_trailers() -> None:
    exchange = Exchange(a_service())
    body = a_completion()
    exchange.receive(request_headers(), 0.0)
    assert exchange.receive(request_body(body, end=False), 0.0) == ()
    answers = list(exchange.receive(request_trailers(), 0.0))
    assert kinds(answers) == ["request_headers", "request_body", "request_trailers"]
    assert streamed(answers[1:2]) == [(body, False)]


def test_an_empty_last_piece_is_answered_and_a_repeated_one_is_not() -> None:
    exchange = Exchange(a_service())
    exchange.receive(request_headers({":method": "POST", ":path": "/tokenize"}), 0.0)
    answers = list(exchange.receive(request_body(b""), 0.0))
    assert kinds(answers) == ["request_headers", "request_body"] and streamed(answers[1:]) == [(b"", True)]
    assert exchange.receive(request_body(b"again"), 0.0) == ()


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/v1/embeddings", "/v1/completions"])
def test_requests_without_a_prompt_get_an_endpoint_too(path: str) -> None:
    exchange = Exchange(a_service())
    (answer,) = exchange.receive(request_headers({":method": "GET", ":path": path}, end=True), 0.0)
    assert kinds([answer]) == ["request_headers"] and header_destination(answer)


def test_paths_below_a_gateways_prefix_and_with_a_query_are_read() -> None:
    service = a_service()
    exchange = Exchange(service)
    exchange.receive(request_headers({":method": "POST", ":path": "/llama/v1/chat/completions?x=1"}), 0.0)
    assert kinds(list(exchange.receive(request_body(b"no json"), 0.0))) == ["immediate_response"]


def test_a_body_that_no_engine_could_read_is_refused() -> None:
    service = a_service()
    exchange = Exchange(service)
    exchange.receive(request_headers(), 0.0)
    (answer,) = exchange.receive(request_body(b"{"), 0.0)
    assert answer.immediate_response.status.code == 400
    assert json.loads(answer.immediate_response.body)["error"]["message"] == "the body is not JSON"
    assert exchange.receive(request_body(b"{"), 0.0) == ()
    exchange.closed(1.0)
    assert all(server.in_flight == 0 for server in service.picker.fleet) and service.streams == 0


def test_a_body_over_the_limit_is_refused_before_it_is_kept() -> None:
    exchange = Exchange(a_service(most_body_bytes=1000))
    exchange.receive(request_headers(), 0.0)
    assert exchange.receive(request_body(b"x" * 1000, end=False), 0.0) == ()
    (answer,) = exchange.receive(request_body(b"x", end=False), 0.0)
    assert answer.immediate_response.status.code == 413


@pytest.mark.parametrize("subset", [["10.0.0.2:8000", "9.9.9.9:1"], "9.9.9.9:1, 10.0.0.2:8000"])
def test_a_subset_is_kept_to_in_choice_and_fallbacks(subset: object) -> None:
    service = a_service(fallbacks=5)
    for _ in range(5):
        exchange = Exchange(service)
        (answer,) = exchange.receive(request_headers(GET, end=True, subset=subset), 0.0)
        assert header_destination(answer) == metadata_destination(answer) == "10.0.0.2:8000"


@pytest.mark.parametrize("subset", [[], "", ["9.9.9.9:1"]])
def test_a_subset_that_allows_none_is_503(subset: object) -> None:
    exchange = Exchange(a_service())
    exchange.receive(request_headers(subset=subset), 0.0)
    (answer,) = exchange.receive(request_body(a_completion()), 0.0)
    assert answer.immediate_response.status.code == 503


def test_without_a_subset_all_of_the_pool_are_picked_from() -> None:
    service = a_service()
    addresses = set()
    for _ in range(3):
        (answer,) = Exchange(service).receive(request_headers(GET, end=True), 0.0)
        addresses.add(header_destination(answer))
    assert addresses == {f"10.0.0.{n}:8000" for n in range(3)}


def test_no_endpoint_is_503_with_a_time_to_come_back() -> None:
    for service in (a_service(servers=0), a_service()):
        for server in service.picker.fleet:
            server.healthy = False
        (answer,) = Exchange(service).receive(request_headers(GET, end=True), 0.0)
        headers = {h.header.key: h.header.raw_value for h in answer.immediate_response.headers.set_headers}
        assert answer.immediate_response.status.code == 503 and headers["retry-after"] == b"1"


def test_too_many_at_every_server_is_429_and_room_at_one_is_used() -> None:
    service = a_service(servers=2, max_requests=2)
    addresses = [Exchange(service).receive(request_headers(GET, end=True), 0.0)[0] for _ in range(5)]
    assert [answer.WhichOneof("response") for answer in addresses] == ["request_headers"] * 4 + ["immediate_response"]
    assert addresses[4].immediate_response.status.code == 429
    headers = {h.header.key: h.header.raw_value for h in addresses[4].immediate_response.headers.set_headers}
    assert headers["retry-after"] == b"1"
    # Of two servers the one with room is taken, even out of turn.
    for name in ("10.0.0.1:8000", "10.0.0.1:8000", "10.0.0.0:8000", "10.0.0.0:8000"):
        service.picker.fleet.servers[name].in_flight = 1
        (answer,) = Exchange(service).receive(request_headers(GET, end=True), 0.0)
        assert header_destination(answer) == name


def test_more_streams_than_allowed_are_turned_away() -> None:
    service = a_service(max_streams=1)
    first = Exchange(service)
    second = Exchange(service)
    (answer,) = second.receive(request_headers(), 0.0)
    assert answer.immediate_response.status.code == 429
    second.closed(0.0)
    first.closed(0.0)
    assert Exchange(service).receive(request_headers(), 0.0) == ()


def test_buffered_bodies_get_the_endpoint_with_the_body() -> None:
    exchange = Exchange(a_service())
    (held,) = exchange.receive(request_headers(config={"request_body_mode": MODE.Value("BUFFERED")}), 0.0)
    assert kinds([held]) == ["request_headers"] and header_destination(held) is None
    (answer,) = exchange.receive(request_body(a_completion()), 0.0)
    assert kinds([answer]) == ["request_body"] and header_destination(answer) == metadata_destination(answer) != None  # noqa: E711
    assert not answer.request_body.response.HasField("body_mutation")


@pytest.mark.parametrize("mode", ["NONE", "STREAMED", "BUFFERED_PARTIAL"])
def test_a_body_that_is_not_shown_in_time_is_routed_by_load(mode: str) -> None:
    exchange = Exchange(a_service())
    (answer,) = exchange.receive(request_headers(config={"request_body_mode": MODE.Value(mode)}), 0.0)
    assert header_destination(answer)
    (passed,) = exchange.receive(request_body(b"{", end=False), 0.0)
    assert kinds([passed]) == ["request_body"] and not passed.request_body.response.HasField("body_mutation")


def test_a_request_is_read_in_a_thread_once_it_is_whole_and_what_was_read_of_it_is_taken() -> None:
    service = a_service(most_body_bytes=1000)
    service.thread_bytes = 1
    exchange = Exchange(service)
    assert not exchange.is_read_in_thread(request_headers())
    exchange.receive(request_headers(), 0.0)
    assert not exchange.is_read_in_thread(request_body(b"a", end=False))
    exchange.receive(request_body(b"a", end=False), 0.0)
    assert not exchange.is_read_in_thread(request_body(b"x" * 1000))
    for last in (request_body(b"b"), request_trailers()):
        service.thread_bytes = 1
        assert exchange.is_read_in_thread(last)
        service.thread_bytes = 1000
        assert not exchange.is_read_in_thread(last)
        read = exchange.read_whole(last)
        assert isinstance(read, ApiError) and read.status == 400
    (answer,) = exchange.receive(request_body(b"b"), 0.0, ApiError(400, "no"))
    assert answer.immediate_response.status.code == 400 and not exchange.is_read_in_thread(request_body(b"b"))


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("coding", ["gzip", "x-gzip", "deflate", "GZIP ", "identity"])
def test_a_compressed_body_is_read_and_passed_on_as_it_came(coding: str, in_thread: bool) -> None:
    plain = a_completion("a prompt of forty letters, or a few more.")
    packed = {"deflate": zlib.compress, "identity": bytes}.get(coding, gzip.compress)(plain)
    service = a_service()
    exchange = Exchange(service)
    exchange.receive(request_headers({**POST, "content-encoding": coding}), 0.0)
    last = request_body(packed)
    assert exchange.is_read_in_thread(last) == (coding != "identity")
    answers = list(exchange.receive(last, 0.0, exchange.read_whole(last) if in_thread else None))
    assert kinds(answers) == ["request_headers", "request_body"] and streamed(answers[1:]) == [(packed, True)]
    assert service.counters.total("prompt_tokens_total") == 10


UNREADABLE = {
    "an unknown coding": ("br", b"x", 415),
    "no gzip": ("gzip", b"no gzip", 400),
    "cut off": ("gzip", gzip.compress(a_completion())[:-9], 400),
    "a bomb": ("gzip", gzip.compress(bytes(50_000_000), 9), 413),
    "a little too long": ("deflate", zlib.compress(a_completion("x" * 1100)), 413),
    "coded twice": ("gzip, gzip", gzip.compress(gzip.compress(a_completion())), 415),
    "no JSON": ("gzip", gzip.compress(b"{"), 400),
}


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("name", UNREADABLE)
def test_a_compressed_body_that_cannot_be_read_is_refused(name: str, in_thread: bool) -> None:
    coding, body, status = UNREADABLE[name]
    exchange = Exchange(a_service(most_body_bytes=1000 if len(body) < 1000 else 100_000))
    exchange.receive(request_headers({**POST, "content-encoding": coding}), 0.0)
    last = request_body(body)
    (answer,) = exchange.receive(last, 0.0, exchange.read_whole(last) if in_thread else None)
    assert answer.immediate_response.status.code == status


def test_a_compressed_body_without_a_prompt_is_not_read() -> None:
    exchange = Exchange(a_service())
    exchange.receive(request_headers({":method": "POST", ":path": "/v1/embeddings", "content-encoding": "br"}), 0.0)
    answers = list(exchange.receive(request_body(b"x"), 0.0))
    assert kinds(answers) == ["request_headers", "request_body"]


def test_who_only_looks_on_is_not_answered() -> None:
    service = a_service()
    message = request_headers(GET, end=True)
    message.observability_mode = True
    exchange = Exchange(service)
    assert exchange.receive(message, 0.0) == ()
    exchange.closed(0.0)
    assert all(server.in_flight == 0 for server in service.picker.fleet)
