"""Overload through real sockets: who is let in, what a refusal says, what is counted; off unless it is asked for."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.router.running import Running, until

from skymemory.errors import InvalidInput
from skymemory.router.api_error import ApiError
from skymemory.router.http.proxy_server import ProxyServer
from skymemory.router.prompts.reader import Clients
from skymemory.router.settings import read_settings, settings_from

Run = Callable[..., Running]
PROMPT = "hear me of the sea and of the ships that go there " * 40
SLOW = {"first_byte_s": 0.15}


def taught(run: Run, **admission: Any) -> Running:
    """A router before one engine that takes 0.15 s for a prompt, and knows it."""
    running = run(engines=1, strategy="least-ttft", admission=admission)
    for number in range(4):
        assert running.complete(mock=SLOW, prompt=f"{number} {PROMPT}", stream=True).status == 200
    return running


def flood(running: Running, count: int, headers: dict[str, str] | None = None, stagger_s: float = 0.01) -> list[Any]:
    """So many at once, each with words of its own; their answers in the order of asking."""
    answers: list[Any] = [None] * count

    def ask(number: int) -> None:
        body = {"prompt": f"{time.monotonic_ns()} {PROMPT}", "stream": True, "mock": SLOW}
        answers[number] = running.ask("POST", "/v1/completions", body, {"x-skymemory-decision": "1", **(headers or {})})

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
        time.sleep(stagger_s)
    for thread in threads:
        thread.join(20)
    return answers


def figure(running: Running, line: str) -> float:
    text = running.ask("GET", "/metrics").body.decode()
    return sum(float(each.rsplit(" ", 1)[1]) for each in text.splitlines() if each.startswith(line))


def test_what_would_come_too_late_is_refused_with_a_reason_and_a_time(run: Run) -> None:
    running = taught(run, rule="early", ttft="400ms")
    answers = flood(running, 12)
    refused = [answer for answer in answers if answer.status == 429]
    served = [answer for answer in answers if answer.status == 200]
    assert 1 <= len(served) <= 6 and len(refused) == 12 - len(served)
    for answer in refused:
        error = answer.json["error"]
        assert error["type"] == "requests" and error["code"] == "overloaded"
        assert "the limit is 0.4 s" in error["message"]
        assert int(answer.headers["Retry-After"]) >= 1
        decision = json.loads(answer.headers["x-skymemory-decision"])
        assert decision["refused"] == "ttft" and "the limit is" in decision["reason"]
    assert running.engines[0].seen[4:] and len(running.engines[0].seen) == 4 + len(served), "no engine saw them"
    assert figure(running, 'skymemory_router_refusals_total{reason="ttft",tenant="unknown"}') == len(refused)
    assert figure(running, 'skymemory_router_requests_total{outcome="refused",server=""}') == len(refused)
    assert figure(running, "skymemory_router_promises_total") == 4 + len(served)
    until(lambda: figure(running, "skymemory_router_server_in_flight") == 0)
    assert running.complete(mock=SLOW, prompt=PROMPT, stream=True).status == 200, "afterwards all is as before"


def test_no_request_is_refused_unless_configured(run: Run) -> None:
    running = run(engines=1, strategy="least-ttft")
    assert [answer.status for answer in flood(running, 12)] == [200] * 12
    assert figure(running, "skymemory_router_refusals_total") == 0
    assert figure(running, "skymemory_router_promises_total") == 0


def test_what_has_no_prompt_is_let_in(run: Run) -> None:
    running = run(engines=1, strategy="least-ttft", admission={"rule": "early", "ttft": "1ms"})
    assert running.complete(mock=SLOW, prompt=PROMPT).status == 200, "speeds are learnt from some server"
    assert running.complete(mock=SLOW, prompt=PROMPT).status == 429
    assert running.ask("POST", "/v1/embeddings", {"input": "x", "model": "small"}).status == 200


def test_a_retry_elsewhere_is_not_asked_to_be_let_in_again(run: Run) -> None:
    running = run(engines=2, strategy="least-ttft", admission={"rule": "early", "ttft": "5s"})
    running.engines[0].mock = {"die": "before"}
    answers = [running.complete(prompt=f"{number} {PROMPT}") for number in range(6)]
    assert [answer.status for answer in answers] == [200] * 6
    assert figure(running, "skymemory_router_promises_total") == 6


def test_the_less_urgent_are_refused_first(run: Run) -> None:
    running = taught(run, rule="early", ttft="1200ms", fair=True, options={"priority_step": 0.75})
    body = {"stream": True, "mock": SLOW}
    held = [running.open("POST", "/v1/completions", {**body, "prompt": f"{at} {PROMPT}"}) for at in range(1)]
    threads = [threading.Thread(target=flood, args=(running, 2)) for _ in range(1)]
    for thread in threads:
        thread.start()
    until(lambda: figure(running, "skymemory_router_server_prefilling") >= 2)
    low = running.complete({"x-skymemory-priority": "-1"}, mock=SLOW, prompt=f"low {PROMPT}", stream=True)
    usual = running.complete(mock=SLOW, prompt=f"usual {PROMPT}", stream=True)
    assert (low.status, usual.status) == (429, 200)
    assert "priority -1" in low.json["error"]["message"]
    for thread in threads:
        thread.join(20)
    for each in held:
        each.read()


def test_a_flood_of_one_tenant_leaves_room_for_another(run: Run) -> None:
    running = taught(
        run, rule="early", ttft="600ms", fair=True, tenant_header="X-Tenant", options={"weights": "gold=2"}
    )
    stop = threading.Event()
    statuses: list[int] = []

    def keep_flooding() -> None:
        while not stop.is_set():
            statuses.extend(answer.status for answer in flood(running, 8, {"x-tenant": "flood"}, 0.02))

    thread = threading.Thread(target=keep_flooding)
    thread.start()
    try:
        until(lambda: statuses.count(429) >= 4)
        running.complete({"x-tenant": "gold"}, mock=SLOW, prompt=f"first {PROMPT}", stream=True)
        served = 0
        for number in range(6):
            time.sleep(0.1)
            answer = running.complete({"x-tenant": "gold"}, mock=SLOW, prompt=f"{number} {PROMPT}", stream=True)
            served += answer.status == 200
    finally:
        stop.set()
        thread.join(20)
    assert served >= 4
    assert figure(running, 'skymemory_router_refusals_total{reason="share",tenant="other"}') >= 1
    assert figure(running, 'skymemory_router_refusals_total{reason="ttft",tenant="flood"}') == 0, (
        "no label from clients"
    )


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"rule": "godput", "ttft": 1}, "did you mean 'goodput'"),
        ({"rule": "early"}, "needs `ttft`"),
        ({"fair": True}, "needs `ttft`"),
        ({"rule": "goodput+fair", "ttft": 1}, "set rule 'goodput' and `fair = true`"),
        ({"rule": "early", "ttft": 1, "fair": True, "options": {"weights": "gold=many"}}, "expected a number"),
        ({"rule": "goodput", "ttft": 1, "options": {"windows": 1}}, "did you mean 'window_s'"),
        ({"rule": "predicted", "ttft": 1, "options": {"weights": {}}}, "there are none"),
    ],
)
def test_what_cannot_work_is_an_error_at_the_start(table: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        ProxyServer(settings_from({"backends": ["http://127.0.0.1:1"], "admission": table}))


def test_a_strategy_that_estimates_nothing_cannot_go_with_a_rule() -> None:
    table = {"backends": ["http://127.0.0.1:1"], "strategy": "radix", "admission": {"rule": "early", "ttft": 1}}
    with pytest.raises(InvalidInput, match="strategy 'radix' estimates none; strategies that do: least-ttft"):
        ProxyServer(settings_from(table))


def test_it_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    file.write_text(
        'backends = ["http://a:1"]\n[admission]\nrule = "goodput"\nttft = "2s"\ntbt = "50ms"\nfair = true\n'
        "[admission.options]\nwindow_s = 30\nweights = {gold = 3}\n"
    )
    said = read_settings(file, {"admission": {"ttft": 4.0}}).admission
    assert (said.rule, said.ttft_s, said.tbt_s, said.fair) == ("goodput", 4.0, 0.05, True)
    assert said.options == {"window_s": 30, "weights": {"gold": 3}}
    ProxyServer(read_settings(file))


def test_a_tenant_is_its_header_or_its_key_or_its_user() -> None:
    clients = Clients("x-tenant", "x-priority")
    assert clients.tenant({"x-tenant": "a", "authorization": "Bearer s"}, "u") == "a"
    digest = clients.tenant({"authorization": "Bearer secret"}, "u")
    assert digest.startswith("key-") and "secret" not in digest
    assert digest != clients.tenant({"authorization": "Bearer other"}, "u")
    assert clients.tenant({}, "u") == "u"
    assert clients.tenant({}, "") == ""
    assert len(clients.tenant({"x-tenant": "a" * 9999}, "")) == 256


def test_a_priority_is_its_header_or_what_vllm_calls_so() -> None:
    clients = Clients("", "x-priority")
    assert clients.priority({"x-priority": "3"}, b"7") == 3
    assert clients.priority({}, b"7") == -7, "vLLM serves the lower first"
    assert clients.priority({}, b"") == 0
    assert clients.priority({}, b"null") == 0
    assert clients.priority({}, b"7.0") == -7 and clients.priority({}, b"-%d" % 2**62) == 10
    for field in (b'"high"', b"1.5", b"true", b"9" * 400, b"9" * 5000):
        with pytest.raises(ApiError, match=r"[Ee]xpected"):
            clients.priority({}, field)
    assert clients.priority({"x-priority": "-999"}, b"") == -10
    assert Clients("", "").priority({"x-priority": "3"}, b"7") == 0
    with pytest.raises(ApiError, match="expected a whole number"):
        clients.priority({"x-priority": "high"}, b"")
