"""Prefill and decode apart behind Envoy: the picker names a decode server, and in a header the one that prefills."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from typing import Any

import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse
from tests.router.envoy.exchanges import (
    GET,
    POST,
    Exchange,
    SmallReader,
    a_completion,
    header_destination,
    request_body,
    request_headers,
    response_body,
    response_headers,
)

from skymemory.conductor.picker import Fleet, Picker
from skymemory.conductor.scheduler import Scheduler
from skymemory.conductor.strategies.simple import RoundRobin
from skymemory.router.backends import Backends
from skymemory.router.decoding import alone_schedulers, decode_picker
from skymemory.router.envoy.endpoints import BothSources, SettingsSource, endpoint
from skymemory.router.envoy.ext_proc import PickerService
from skymemory.router.envoy.messages import BUFFERED
from skymemory.router.prefillers import HEADER as PREFILLER
from skymemory.router.settings import DECODE, PREFILL, Backend, PickerSettings, Settings, read_settings

P = [f"10.0.1.{number}:8000" for number in range(2)]
D = [f"10.0.2.{number}:8000" for number in range(2)]
SSE = "text/event-stream"
SPOOFED = {**POST, PREFILLER: "169.254.169.254:80", "x-llm-d-prefiller-host-port": "10.9.9.9:1"}


def with_role(name: str, role: str) -> Backend:
    backend = endpoint(name)
    return Backend(url=backend.url, name=backend.name, role=role)


def a_service(prefill: int = 2, decode: int = 2, split_from: int = 0, **settings: Any) -> PickerService:
    """As ``endpoint_picker`` builds it."""
    picker, decoding = Picker(Fleet(), RoundRobin()), decode_picker(Settings())
    backends = Backends(picker, are_checked=False, decode=decoding)
    backends.set([with_role(name, PREFILL) for name in P[:prefill]] + [with_role(name, DECODE) for name in D[:decode]])
    service = PickerService(
        Scheduler(picker, decoding),
        SmallReader(),  # type: ignore[arg-type]
        backends,
        PickerSettings(**settings),
    )
    service.alone, service.split_from = alone_schedulers(service.scheduler, 0)[1], split_from
    return service


def set_header(answer: ProcessingResponse, name: str) -> str | None:
    common = getattr(answer, str(answer.WhichOneof("response"))).response
    found = [each.header for each in common.header_mutation.set_headers if each.header.key == name]
    return found[0].raw_value.decode() if found else None


def removed(answer: ProcessingResponse) -> set[str]:
    return set(getattr(answer, str(answer.WhichOneof("response"))).response.header_mutation.remove_headers)


def asked(
    service: PickerService, body: bytes | None = None, now_s: float = 0.0, headers: Any = None, **more: Any
) -> tuple[Exchange, ProcessingResponse]:
    exchange = Exchange(service)
    exchange.receive(request_headers(headers or SPOOFED, **more), now_s)
    answers = exchange.receive(request_body(body or a_completion("x" * 800)), now_s)
    return exchange, answers[0]


def in_flight(service: PickerService) -> dict[str, int]:
    return {name: known.server.in_flight for name, known in service.backends.known.items() if known.server.in_flight}


def test_the_destination_decodes_and_the_header_names_who_prefills() -> None:
    service = a_service()
    answers = [asked(service)[1] for _ in range(2)]
    assert {header_destination(answer) for answer in answers} == {*D}
    assert {set_header(answer, PREFILLER) for answer in answers} == {*P}
    for answer in answers:
        assert removed(answer) == {"x-llm-d-prefiller-host-port"}, "what a client says is never passed on"
    assert in_flight(service) == dict.fromkeys(P + D, 1)


def test_a_buffered_body_gets_the_header_as_well() -> None:
    service = a_service()
    config = {"request_body_mode": BUFFERED, "response_body_mode": BUFFERED}
    exchange = Exchange(service)
    exchange.receive(request_headers(SPOOFED, config=config), 0.0)
    (answer,) = exchange.receive(request_body(a_completion()), 0.0)
    assert header_destination(answer) in D
    assert set_header(answer, PREFILLER) in P


@pytest.mark.parametrize(
    "body",
    [json.dumps({"prompt": "x", "n": 2}), json.dumps({"prompt": "x", "kv_transfer_params": {"do_remote_prefill": 1}})],
)
def test_what_cannot_be_split_is_served_alone_and_names_no_prefiller(body: str) -> None:
    service = a_service()
    _, answer = asked(service, body.encode())
    assert header_destination(answer) in D
    assert set_header(answer, PREFILLER) is None
    assert removed(answer) == {PREFILLER, "x-llm-d-prefiller-host-port"}
    assert sum(in_flight(service).values()) == 1


def test_a_request_without_a_prompt_goes_to_one_that_answers() -> None:
    service = a_service()
    exchange = Exchange(service)
    (answer,) = exchange.receive(request_headers({**GET, PREFILLER: "10.9.9.9:1"}, end=True), 0.0)
    assert header_destination(answer) in D
    assert PREFILLER in removed(answer)


def test_without_a_prefill_server_the_decode_server_computes_the_prompt() -> None:
    service = a_service(prefill=1)
    service.backends.known[P[0]].server.healthy = False
    _, answer = asked(service)
    assert header_destination(answer) in D
    assert (set_header(answer, PREFILLER), PREFILLER in removed(answer)) == (None, True)


def test_without_a_server_that_answers_it_is_503() -> None:
    service = a_service(decode=0)
    _, answer = asked(service)
    assert answer.immediate_response.status.code == 503
    assert in_flight(service) == {}


def test_a_subset_binds_both() -> None:
    service = a_service()
    _, answer = asked(service, subset=[P[1], D[1]])
    assert (header_destination(answer), set_header(answer, PREFILLER)) == (D[1], P[1])
    _, answer = asked(service, subset=[D[0]])
    assert (header_destination(answer), set_header(answer, PREFILLER)) == (D[0], None)


def test_both_lives_end_with_the_answer() -> None:
    service = a_service()
    exchange, answer = asked(service)
    names = str(set_header(answer, PREFILLER)), str(header_destination(answer))
    prefill, decode = (service.backends.known[name].server for name in names)
    assert (prefill.prefilling, decode.in_flight) == (1, 1)
    exchange.receive(response_headers(kind=SSE), 1.0)
    exchange.receive(response_body(b"data: {}\n\n", end=False), 1.0)
    assert (prefill.in_flight, decode.in_flight) == (0, 1), "who answers decodes, the prefill is done"
    exchange.receive(response_body(b"data: [DONE]\n\n"), 2.0)
    exchange.closed(2.0)
    assert in_flight(service) == {}


def test_a_decode_server_in_the_place_of_the_chosen_one_gets_the_request_in_the_books() -> None:
    service = a_service(fallbacks=1)
    exchange, answer = asked(service)
    first, second = str(header_destination(answer)).split(",")
    exchange.receive(response_headers(kind=SSE, served=second), 1.0)
    assert in_flight(service) == {str(set_header(answer, PREFILLER)): 1, second: 1} and first != second
    assert service.counters.get("fallbacks_total", second) == 1
    exchange.receive(response_body(b"data: {}\n\n", end=False), 1.0)
    exchange.closed(2.0)
    assert in_flight(service) == {}


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_all_lives_end(seed: int) -> None:
    """Streamed and whole answers, errors, fallbacks, streams that end early, servers that come and go."""
    dice, service = random.Random(seed), a_service(fallbacks=1, split_from=100)
    for at in itertools.count():
        if at == 60:
            break
        known = [*service.backends.known.values()]
        dice.choice(known).server.healthy = dice.random() < 0.8
        exchange, answer = asked(service, a_completion("x" * dice.choice((40, 800))), float(at))
        if answer.HasField("immediate_response"):
            exchange.closed(at + 0.1)
            continue
        served = dice.choice(str(header_destination(answer)).split(","))
        steps = [
            response_headers(dice.choice((200, 200, 503)), kind=dice.choice((SSE, "application/json")), served=served),
            response_body(b'data: {"usage": {"prompt_tokens": 9}}\n\n', end=False),
            response_body(b"data: [DONE]\n\n"),
        ]
        for step in steps[: dice.randint(0, 3)]:
            exchange.receive(step, at + 0.5)
        exchange.closed(at + 0.9)
    service.deferred.flush()
    assert in_flight(service) == {}


def test_the_answer_to_a_client_that_asks_names_both() -> None:
    service = a_service(tell_decisions=True)
    exchange, asked_for = asked(service, headers={**POST, "x-skymemory-decision": "1"})
    (answer,) = exchange.receive(response_headers(), 1.0)
    given = json.loads(str(set_header(answer, "x-skymemory-decision")))
    pair = set_header(asked_for, PREFILLER), header_destination(asked_for)
    assert (given["server"], given["decode"]["server"]) == pair


def test_two_dns_names_are_one_list_and_the_first_wins() -> None:
    first = SettingsSource([with_role(D[0], DECODE)])
    both = BothSources(first, SettingsSource([with_role(P[0], PREFILL), with_role(D[0], PREFILL)]))
    found = asyncio.run(both.endpoints())
    assert found is not None
    assert {each.name: each.role for each in found} == {D[0]: DECODE, P[0]: PREFILL}


def test_settings_say_when_prefill_and_decode_are_apart(tmp_path: Any) -> None:
    def splits(**picker: Any) -> bool:
        return read_settings(None, {"picker": picker}).splits

    assert not Settings().splits
    assert splits(discover="d.svc:80", discover_prefill="p.svc:80")
    assert splits(endpoints=str(tmp_path / "servers"), apart=True)
    for wrong in ({"discover_prefill": "p.svc:80"}, {"apart": True}):
        with pytest.raises(Exception, match="discover" if "discover_prefill" in wrong else "apart"):
            splits(**wrong)


# -- prompts that are not worth two steps


def test_a_decode_server_that_lacks_little_is_named_alone() -> None:
    service = a_service(split_from=100)
    exchange, answer = asked(service, a_completion("x" * 396))
    assert header_destination(answer) in D and set_header(answer, PREFILLER) is None
    assert removed(answer) == {PREFILLER, "x-llm-d-prefiller-host-port"}
    exchange.receive(response_headers(kind=SSE), 1.0)
    exchange.receive(response_body(b"data: [DONE]\n\n"), 2.0)
    exchange.closed(2.0)
    _, answer = asked(service, a_completion("x" * 400))
    assert set_header(answer, PREFILLER) in P
    counted = service.counters
    assert (counted.get("two_steps_total"), counted.get("alone_total", "few-tokens")) == (1, 1)
    service.deferred.flush()
    assert sum(in_flight(service).values()) == 2
