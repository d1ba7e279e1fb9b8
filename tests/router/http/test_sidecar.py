"""The sidecar of a decode engine: requests name their prefill server in a header that is not believed blindly."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.router.http.pairs import PROMPT, bodies, books_are_closed, engine, release, sent
from tests.router.mock_engine import MockEngine
from tests.router.processes import engine as engine_process
from tests.router.processes import router
from tests.router.running import Running, until

from skymemory.errors import InvalidInput
from skymemory.router.http import sidecar
from skymemory.router.prefillers import PRIVATE, Prefillers, read_host_port
from skymemory.router.settings import settings_from

Run = Callable[..., Running]
MODEL = {"model": "small", "prompt": PROMPT}
HEADER = "x-prefiller-host-port"
PARAMS = {"do_remote_prefill": True, "sky_tokens": 32}


def start(run: Run, prefill: int = 1, **settings: Any) -> Running:
    """A sidecar before d0; p0 and so on are engines that it does not know."""
    running = run(engines=0)
    running.close_server()
    for name in ("d0", *(f"p{number}" for number in range(prefill))):
        each = MockEngine(name)
        running.loop.run(each.start())
        running.engines.append(each)
    named = {"engine": running.engines[0].url, **settings.pop("sidecar", {})}
    running.restart(backends=[], sidecar=named, **settings)
    return running


def at(running: Running, *names: str) -> str:
    return ", ".join(f"127.0.0.1:{engine(running, name).port}" for name in names)


def test_a_named_server_prefills_and_the_local_engine_answers(run: Run) -> None:
    running = start(run)
    answer = running.complete({HEADER: at(running, "p0"), "x-data-parallel-host-port": "10.0.0.1:1"}, stream=True)
    assert answer.status == 200 and answer.headers["X-Engine"] == "d0" and answer.body.endswith(b"[DONE]\n\n")
    assert bodies(running, "p0") == [
        {**MODEL, "stream": False, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    ]
    assert bodies(running, "d0") == [{**MODEL, "stream": True, "kv_transfer_params": PARAMS}]
    for name in ("p0", "d0"):
        headers = engine(running, name).seen[0]["headers"]
        assert not any(word in each for each in headers for word in ("prefiller", "data-parallel"))
    until(lambda: books_are_closed(running))
    assert running.metric("server_healthy", server=at(running, "p0"), role="prefill") == 1
    assert running.metric("prefills_total", server=at(running, "p0"), outcome="handed-over") == 1


@pytest.mark.parametrize("header", [{}, {HEADER: ""}, {HEADER: " , "}])
def test_without_a_name_the_local_engine_does_it_all(run: Run, header: dict[str, str]) -> None:
    running = start(run)
    assert running.complete(header, n=1).headers["X-Engine"] == "d0"
    assert bodies(running, "d0") == [{**MODEL, "n": 1}] and not engine(running, "p0").seen
    assert running.metric("alone_total", reason="no-header") == 1
    assert running.complete({HEADER: at(running, "d0")}).status == 200, "the engine itself is no other server"
    assert len(engine(running, "d0").seen) == 2


def test_the_older_of_two_spellings_holds_as_with_llm_d(run: Run) -> None:
    running = start(run, prefill=2)
    running.complete({HEADER: at(running, "p0"), "x-llm-d-prefiller-host-port": at(running, "p1")})
    assert engine(running, "p0").seen and not engine(running, "p1").seen
    running.complete({"x-llm-d-prefiller-host-port": at(running, "p1")})
    assert engine(running, "p1").seen


@pytest.mark.parametrize("handover", ["after", "overlap"])
def test_of_several_the_next_stands_in_for_one_that_fails(run: Run, handover: str) -> None:
    running = start(run, prefill=3, disaggregation={"handover": handover}, retries={"most": 1})
    for name in ("p0", "p1"):
        engine(running, name).mock = {"status": 500}
    engine(running, "d0").mock = {"hold": True}
    with sent(running, MODEL, f"{HEADER}: {at(running, 'p0', 'p2')}\r\n".encode()) as client:
        until(lambda: len(engine(running, "p2").seen) == 1)
        release(running, "d0")
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
    assert bodies(running, "d0")[-1]["kv_transfer_params"]["do_remote_prefill"]
    assert running.complete({HEADER: at(running, "p0", "p1", "p2")}).status == 200
    if handover == "after":  # else the engine is asked before
        assert bodies(running, "d0")[-1] == MODEL, "one retry, then the engine does it all"
    until(lambda: books_are_closed(running))


def test_a_client_that_leaves_ends_both_steps(run: Run) -> None:
    running = start(run)
    engine(running, "p0").mock = {"hold": True}
    client = sent(running, MODEL, f"{HEADER}: {at(running, 'p0')}\r\n".encode())
    until(lambda: engine(running, "p0").held == 1)
    client.close()
    until(lambda: engine(running, "p0").abandoned == 1 and books_are_closed(running))
    assert not engine(running, "d0").seen


@pytest.mark.parametrize("named", ["8.8.8.8:80", "169.254.169.254:80", "metadata.google.internal:80", "[fe80::1]:80"])
def test_what_is_not_allowed_is_refused_and_not_asked(run: Run, named: str) -> None:
    running = start(run)
    answer = running.complete({HEADER: f"{at(running, 'p0')}, {named}"})
    assert answer.status == 403 and "sidecar: prefillers" in answer.json["error"]["message"]
    assert not engine(running, "p0").seen and not engine(running, "d0").seen
    assert running.complete({HEADER: named}).status == 403


@pytest.mark.parametrize(
    "named", ["127.0.0.1", "127.0.0.1:0", "127.0.0.1:70000", "http://127.0.0.1:1/x", "a b:1", "u@h:1"]
)
def test_what_names_no_server_is_a_bad_request(run: Run, named: str) -> None:
    running = start(run)
    answer = running.complete({HEADER: named})
    assert answer.status == 400 and "expected host:port" in answer.json["error"]["message"]
    assert running.complete({HEADER: ",".join(["127.0.0.1:1"] * 17)}).status == 400
    until(lambda: books_are_closed(running))


def test_the_list_is_of_the_operator(run: Run) -> None:
    running = start(run, sidecar={"prefillers": ["10.0.0.0/8"]})
    assert running.complete({HEADER: at(running, "p0")}).status == 403


def test_other_paths_are_the_engines_and_its_own_are_below_sidecar(run: Run) -> None:
    running = start(run)
    assert b"vllm:num_requests_waiting" in running.ask("GET", "/metrics").body
    assert running.ask("GET", "/v1/models").json["data"][0]["id"] == "small"
    assert running.ask("POST", "/v1/load_lora_adapter", {"lora_name": "x"}).headers["X-Engine"] == "d0"
    engine(running, "d0").healthy = False
    assert running.ask("GET", "/health").status == 503, "a probe of the engine"
    assert running.ask("GET", "/sidecar/health").status == 200
    assert b"skymemory_router_in_flight" in running.ask("GET", "/sidecar/metrics").body
    assert running.metric("ttft_seconds_count", server=engine(running, "d0").url.removeprefix("http://")) == 0
    assert running.ask("GET", "/v1/completions").status == 405


def test_servers_that_were_named_once_are_forgotten(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecar, "MAX_KNOWN", 4)
    running = start(run, retries={"most": 0})
    busy = sent(running, MODEL, f"{HEADER}: {at(running, 'p0')}\r\n".encode())
    for port in range(1, 9):
        assert running.complete({HEADER: f"127.0.0.{port + 1}:1"}).status == 200  # refused there: served here
    busy.close()
    assert running.server is not None
    assert len(running.server.picker.fleet) == 4
    until(lambda: books_are_closed(running))


# -- settings


def test_networks_addresses_and_names_perhaps_with_a_port() -> None:
    allowed = Prefillers(["10.0.0.0/8", "192.168.1.7:8000", "Prefill-0.Pool.svc", "other:81", "fd00::/8", "[::1]:9"])
    for host, port in (
        *(("10.1.2.3", 1), ("192.168.1.7", 8000), ("prefill-0.pool.svc", 5), ("other", 81), ("fd00::7", 2), ("::1", 9)),
        ("::ffff:10.0.0.1", 3),
    ):
        assert allowed.allow(host, port), host
    for host, port in (
        ("11.0.0.1", 1),
        ("192.168.1.7", 8001),
        ("other", 80),
        ("pool.svc", 5),
        ("::1", 8),
        ("::ffff:8.8.8.8", 1),
    ):
        assert not allowed.allow(host, port), host
    private = Prefillers(PRIVATE)
    assert private.allow("172.31.255.1", 1) and private.allow("::1", 1)
    assert not any(
        private.allow(each, 80) for each in ("172.32.0.1", "169.254.169.254", "0.0.0.0", "localhost", "fe80::1")
    )
    assert read_host_port(" http://Prefill:80") == ("prefill", 80) and read_host_port("[::1]:9") == ("::1", 9)


@given(st.text("[]:.%-@/ abz019\u00e9", max_size=24) | st.ip_addresses().map("[{}]:80".format))
def test_what_is_read_of_a_header_is_a_host_and_a_port(word: str) -> None:
    try:
        host, port = read_host_port(word)
    except InvalidInput:
        return
    assert 0 < port < 65536 and host and not set(host) & set("[]%@/ ")
    parts = urlsplit(f"http://{sidecar.host_port(host, port)}")
    assert (parts.hostname, parts.port, parts.username) == (host, port, None), "no way to name another host"


@pytest.mark.parametrize("entry", ["10.0.0.1/8", "10.0.0.0/33", "a_b", "", "x:0", "x:y", "1.2.3.4.5", "http://x"])
def test_an_entry_that_is_none_of_these_is_refused(entry: str) -> None:
    with pytest.raises(InvalidInput, match="prefillers: "):
        settings_from({"sidecar": {"engine": "http://a:1", "prefillers": [entry]}})


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"backends": ["http://b:1"]}, "leave out the backends"),
        ({"strategy": "radix"}, "leave out `strategy`"),
        ({"admission": {"rule": "goodput", "ttft": "1s"}}, "leave out `admission`"),
        ({"sidecar": {"engine": "a:1"}}, "is not the address of a server"),
    ],
)
def test_what_contradicts_a_sidecar_is_refused(table: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        settings_from({"sidecar": {"engine": "http://a:1"}, **table})


def test_a_sidecar_s_engine_is_its_backend() -> None:
    sidecar = {"engine": "http://127.0.0.1:8200", "prefillers": ["10.0.0.0/8", "prefill:8000"]}
    settings = settings_from({"sidecar": sidecar})
    assert settings.sidecar.prefillers == ("10.0.0.0/8", "prefill:8000")
    assert [(each.url, each.role) for each in settings.backends] == [("http://127.0.0.1:8200", "decode")]


@pytest.mark.slow
def test_a_sidecar_as_a_process_before_engines_that_are_killed() -> None:
    with engine_process("d") as (_, decode), engine_process("p") as (prefill, port):
        sidecar = f'log_requests = true\n[sidecar]\nengine = "http://127.0.0.1:{decode}"\nprefillers = ["127.0.0.1"]'
        with router(settings=sidecar) as (process, own):
            running = _Client(own)
            assert running.complete({HEADER: f"127.0.0.1:{port}"}) == (200, "d")
            process.says(rf"200 answered server=127\.0\.0\.1:{decode} prefill=127\.0\.0\.1:{port} ")
            assert running.complete({HEADER: "10.0.0.1:1"})[0] == 403
            prefill.close()
            assert running.complete({HEADER: f"127.0.0.1:{port}"}) == (200, "d"), "it computes the prompt itself"
            process.says(r"why='127\.0\.0\.1:\d+: no connection")
            assert not any("Traceback" in line for line in process.said)


class _Client:
    def __init__(self, port: int) -> None:
        self._port = port

    def complete(self, headers: dict[str, str]) -> tuple[int, str | None]:
        import http.client

        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=20)
        connection.request("POST", "/v1/completions", json.dumps(MODEL), headers)
        response = connection.getresponse()
        response.read()
        connection.close()
        return response.status, response.headers["X-Engine"]
