"""Keys, quotas, browsers and TLS at the HTTP door, over real sockets."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.router.http.test_waiting_room import Asking, prompts, waiting
from tests.router.running import PATIENCE_S, Running, assert_no_cycles, until

from skymemory.errors import InvalidInput
from skymemory.keys import KeyRing
from skymemory.router.api_keys import new_key, with_key
from skymemory.router.http.proxy_server import serve
from skymemory.router.settings import settings_from
from skymemory.router.tls import Certificate, self_signed

Run = Callable[..., Running]
GOLD, IRON, LATE = new_key(b"g" * 32), new_key(b"i" * 32), new_key(b"l" * 32)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    said = "[tenants.gold]\npriority = 3\n\n[tenants.iron]\nrequests_per_minute = 2\nmax_in_flight = 1\n"
    file = tmp_path / "keys.toml"
    file.write_text(with_key(with_key(said, "gold", GOLD), "iron", IRON))
    return file


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_only_who_has_a_key_may_ask_and_no_server_sees_it(run: Run, keys: Path) -> None:
    running = run(engines=1, door={"api_keys": str(keys)})
    for headers in ({}, bearer("sk-sky-wrong"), {"Authorization": f"Basic {GOLD}"}):
        answer = running.complete(headers)
        assert answer.status == 401 and answer.json["error"]["code"] == "invalid_api_key"
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert running.ask("GET", "/v1/models", headers=headers).status == 401
    assert not running.engines[0].seen
    assert (
        running.complete(bearer(GOLD)).status == 200
        and running.ask("GET", "/v1/models", headers=bearer(GOLD)).status == 200
    )
    [seen] = running.engines[0].seen
    assert "authorization" not in seen["headers"]
    for page in ("/health", "/ready", "/metrics"):
        assert running.ask("GET", page).status == 200
    assert GOLD.encode() not in running.ask("GET", "/metrics").body


def test_who_has_no_key_need_not_send_his_body(run: Run, keys: Path) -> None:
    running = run(engines=1, door={"api_keys": str(keys)})
    with socket.create_connection(("127.0.0.1", running.port), PATIENCE_S) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\n\r\n")
        assert raw.recv(1000).startswith(b"HTTP/1.1 401")


def test_quotas_are_reported_and_enforced(run: Run, keys: Path) -> None:
    running = run(engines=1, door={"api_keys": str(keys)})
    answers = [running.complete(bearer(IRON)) for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
    assert int(answers[2].headers["Retry-After"]) > 1 and answers[2].json["error"]["code"] == "rate_limit_exceeded"
    assert len(answers[2].headers.get_all("Retry-After", [])) == 1
    assert running.complete(bearer(GOLD)).status == 200


def test_requests_at_once_are_given_back_however_they_end(run: Run, keys: Path) -> None:
    said = keys.read_text().replace("requests_per_minute = 2\n", "")
    keys.write_text(said)
    running = run(engines=1, door={"api_keys": str(keys)})
    body = json.dumps({"prompt": "x", "mock": {"first_byte_s": 5}}).encode()
    with socket.create_connection(("127.0.0.1", running.port), PATIENCE_S) as raw:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {IRON}\r\nContent-Length: {len(body)}"
        )
        raw.sendall(head.encode() + b"\r\n\r\n" + body)
        until(lambda: len(running.engines[0].seen) == 1)
        assert running.complete(bearer(IRON)).status == 429
    until(lambda: running.complete(bearer(IRON)).status == 200)
    running.engines[0].mock = {"die": "before"}
    assert running.complete(bearer(IRON)).status == 502
    running.engines[0].mock = {}
    until(lambda: running.complete(bearer(IRON)).status == 200)


@pytest.mark.parametrize(
    ("mock", "status", "is_charged"),
    [
        ({"status": 500}, 500, False),
        ({"status": 503}, 503, False),
        ({"status": 400}, 400, False),
        ({"die": "before"}, 502, False),
        ({}, 200, True),
    ],
)
def test_tokens_are_charged_for_what_was_answered(
    run: Run, keys: Path, mock: dict[str, Any], status: int, is_charged: bool
) -> None:
    keys.write_text(keys.read_text().replace("requests_per_minute = 2\n", "tokens_per_minute = 100000\n"))
    running = run(engines=1, door={"api_keys": str(keys)})

    def left() -> int:
        """Tokens, as an answer reports them: before its own charge."""
        answer = running.complete(bearer(IRON), prompt="x", max_tokens=1)
        return int(answer.headers["x-ratelimit-remaining-tokens"])

    engine = running.engines[0]
    engine.prompt_tokens = 1
    before = left()
    engine.mock, engine.prompt_tokens = mock, 90_000
    assert running.complete(bearer(IRON), prompt="words " * 60_000, max_tokens=1000).status == status
    began_s = time.monotonic()
    engine.mock, engine.prompt_tokens = {}, 1
    until(lambda: (before - left() > 1000) == is_charged)
    assert time.monotonic() - began_s < 40.0  # a minute refills it, whatever was charged


def test_a_stream_without_usage_is_charged_by_its_events(run: Run, keys: Path) -> None:
    keys.write_text(keys.read_text().replace("requests_per_minute = 2\n", "tokens_per_minute = 100000\n"))
    running = run(engines=1, door={"api_keys": str(keys)})
    running.engines[0].mock = {"events": 3000, "usage": False}
    assert running.complete(bearer(IRON), stream=True).status == 200
    running.engines[0].mock, running.engines[0].prompt_tokens = {}, 1
    until(lambda: 95_000 < int(running.complete(bearer(IRON)).headers["x-ratelimit-remaining-tokens"]) < 97_100)


def test_a_tenants_urgency_is_its_operators_word(run: Run, keys: Path) -> None:
    """A client may say that it is less urgent than its tenant may be, not that it is more."""
    running = run(engines=1, door={"api_keys": str(keys)}, limits={"max_waiting": 1}, queue={"max_requests": 9})
    asked: list[Asking] = []
    for prompt, headers in (
        ("first", bearer(GOLD)),
        ("modest", {**bearer(GOLD), "x-skymemory-priority": "-1"}),
        ("iron", {**bearer(IRON), "x-skymemory-priority": "9"}),
        ("gold", bearer(GOLD)),
    ):
        asked.append(Asking(running, prompt, headers, first_byte_s=0.4 if prompt == "first" else 0.0))
        until(lambda: len(running.engines[0].seen) + waiting(running) == len(asked))
    assert [each.answer.status for each in asked] == [200] * 4
    assert prompts(running) == ["first", "gold", "iron", "modest"]


def test_keys_and_quotas_are_taken_up_without_a_restart(run: Run, keys: Path) -> None:
    running = run(engines=1, door={"api_keys": str(keys)})
    assert running.complete(bearer(IRON)).status == 200
    server = running.server
    assert server is not None
    late = new_key(b"l" * 32)
    keys.write_text(with_key(keys.read_text().replace("= 2", "= 1"), "late", late))

    async def again() -> None:
        server.reset(replace(server.settings))

    running.loop.run(again())
    assert running.complete(bearer(late)).status == 200
    assert running.complete(bearer(IRON)).status == 429, "what was had stays had"
    keys.write_text("[[keys]]\n")
    with pytest.raises(InvalidInput, match=r"keys\.toml: line 1"):
        running.loop.run(again())
    assert running.complete(bearer(late)).status == 200


def test_browsers_learn_which_origins_are_allowed(run: Run, keys: Path) -> None:
    running = run(engines=1, door={"api_keys": str(keys)}, cors={"origins": ["https://app.example"]})
    asks = {
        "Origin": "https://app.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    preflight = running.ask("OPTIONS", "/v1/completions", headers=asks)
    assert preflight.status == 204 and not preflight.body and "Content-Length" not in preflight.headers
    assert preflight.headers["Access-Control-Allow-Origin"] == "https://app.example"
    assert preflight.headers["Access-Control-Allow-Headers"] == "authorization, content-type"
    served = running.complete({**bearer(GOLD), "Origin": "https://app.example"})
    refused = running.complete({"Origin": "https://app.example"})
    for answer, status in ((served, 200), (refused, 401)):
        assert answer.status == status and answer.headers.get_all("Access-Control-Allow-Origin") == [
            "https://app.example"
        ]
    other = running.ask("OPTIONS", "/v1/completions", headers={**asks, "Origin": "https://evil.example"})
    assert "Access-Control-Allow-Origin" not in other.headers


def test_what_servers_say_to_browsers_does_not_stand_beside_what_we_say(run: Run) -> None:
    """vLLM allows every origin; a browser that sees two of these headers shows the page nothing."""
    running = run(engines=1, cors={"origins": ["*"]})
    engine, reply = running.engines[0], running.engines[0]._reply
    allows = "Access-Control-Allow-Origin: *\r\naccess-control-expose-headers: x\r\n"
    engine._reply = lambda writer, status, body, kind="application/json", more="": reply(  # type: ignore[method-assign]
        writer, status, body, kind, more + allows
    )
    answer = running.complete({"Origin": "https://app.example"})
    assert answer.headers.get_all("Access-Control-Allow-Origin") == ["*"]
    assert len(answer.headers.get_all("Access-Control-Expose-Headers", [])) == 1
    plain = run(engines=1)
    plain.engines[0]._reply = engine._reply  # type: ignore[method-assign]
    assert plain.complete().headers.get_all("Access-Control-Allow-Origin") == ["*"], "without CORS of ours it passes"


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    made = self_signed()
    chain, key = folder / f"{name}.pem", folder / f"{name}.key"
    chain.write_bytes(made.chain)
    key.write_bytes(made.key)
    return chain, key


def test_tls_at_the_door_and_another_certificate_without_a_restart(run: Run, tmp_path: Path) -> None:
    chain, key = certificate(tmp_path, "a")
    running = run(engines=1, door={"tls_cert": str(chain), "tls_key": str(key)})
    server = running.server
    assert server is not None

    def asked(authority: Path) -> http.client.HTTPResponse:
        context = ssl.create_default_context(cafile=str(authority))
        connection = http.client.HTTPSConnection("localhost", running.port, timeout=PATIENCE_S, context=context)
        body = json.dumps({"prompt": "x", "stream": True, "mock": {"body_bytes": 10}})
        connection.request("POST", "/v1/completions", body)
        return connection.getresponse()

    assert asked(chain).read().endswith(b"data: [DONE]\n\n")
    old = tmp_path / "old.pem"
    old.write_bytes(chain.read_bytes())
    other, other_key = certificate(tmp_path, "b")
    os.replace(other, chain)
    os.replace(other_key, key)

    async def again() -> None:
        server.reset(replace(server.settings))

    running.loop.run(again())
    assert asked(chain).status == 200
    with pytest.raises(ssl.SSLCertVerificationError):
        asked(old)
    key.write_bytes(b"nothing")
    with pytest.raises(InvalidInput, match="not a pair"):
        running.loop.run(again())
    assert asked(chain).status == 200
    with socket.create_connection(("127.0.0.1", running.port), PATIENCE_S) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert not raw.recv(100).startswith(b"HTTP/1.1 200")


def test_draining_waits_for_who_is_agreeing_upon_tls(run: Run, tmp_path: Path) -> None:
    chain, key = certificate(tmp_path, "a")
    running = run(engines=1, door={"tls_cert": str(chain), "tls_key": str(key)})
    server = running.server
    assert server is not None
    raw = socket.create_connection(("127.0.0.1", running.port), PATIENCE_S)
    until(lambda: server._listener.is_setting_up)
    draining = asyncio.run_coroutine_threadsafe(server.drain(10.0), running.loop.loop)
    time.sleep(0.1)
    assert not draining.done()
    context = ssl.create_default_context(cafile=str(chain))
    with context.wrap_socket(raw, server_hostname="localhost") as asking:
        body = json.dumps({"prompt": "x"}).encode()
        asking.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert asking.recv(1 << 16).startswith(b"HTTP/1.1 200")
    assert draining.result(PATIENCE_S)


def test_a_reload_is_taken_up_whole_or_not_at_all(run: Run, tmp_path: Path, keys: Path) -> None:
    chain, key = certificate(tmp_path, "a")
    said = {"tls_cert": str(chain), "tls_key": str(key), "api_keys": str(keys)}
    running = run(engines=1, door=said)
    server = running.server
    assert server is not None and server._certificate is not None
    settings = server.settings
    shown: list[str] = []
    server._certificate.load = lambda *_: shown.append("another certificate")  # type: ignore[method-assign]

    async def again(ca: str | None = None) -> None:
        table = {"url": "https://127.0.0.1:1", "name": "new", **({} if ca is None else {"ca": ca})}
        server.reset(replace(settings, backends=settings_from({"backends": [table]}).backends))

    before = keys.read_text()
    keys.write_text("[[keys]]\n")
    with pytest.raises(InvalidInput, match=r"keys\.toml"):
        running.loop.run(again())
    assert not shown and "new" not in server.backends.known
    keys.write_text(with_key(before, "late", LATE))
    with pytest.raises(InvalidInput, match=r"none\.pem"):
        running.loop.run(again(str(tmp_path / "none.pem")))
    assert not shown and server.proxy._access.keys is not None and "late" not in server.proxy._access.keys.weights
    running.loop.run(again())
    assert shown and "late" in server.proxy._access.keys.weights


def test_a_certificate_whose_key_comes_later_is_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its two files are seldom written at once; what was no pair becomes one without a word to the router."""
    monkeypatch.setattr("skymemory.router.tasks.LOOK_S", 0.05)
    chain, key = certificate(tmp_path, "a")
    new_chain, new_key_file = certificate(tmp_path, "b")
    said: list[str] = []
    table = {
        "listen": "127.0.0.1:0",
        "backends": ["http://127.0.0.1:1"],
        "door": {"tls_cert": str(chain), "tls_key": str(key)},
        "drain": 1.0,
    }

    def replaced() -> bool:
        try:
            until(lambda: bool(said))
            port = int(said[0].split(":")[2])

            def shown() -> str:
                return ssl.get_server_certificate(("127.0.0.1", port), timeout=PATIENCE_S)

            first, want = shown(), new_chain.read_text()
            os.replace(new_chain, chain)
            time.sleep(0.3)
            assert shown() == first
            os.replace(new_key_file, key)
            deadline_s = time.monotonic() + PATIENCE_S
            while time.monotonic() < deadline_s and shown() != want:
                time.sleep(0.05)
            return shown() == want
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    async def both() -> tuple[int, bool]:
        asking = asyncio.create_task(asyncio.to_thread(replaced))
        return await serve(lambda: settings_from(table), None, said.append, lambda file: KeyRing(())), await asking

    ended, came = asyncio.run(both())
    assert came and ended == 0


def test_no_connection_over_tls_is_left_to_the_garbage_collector(run: Run, tmp_path: Path) -> None:
    chain, key = certificate(tmp_path, "a")
    running = run(engines=1, door={"tls_cert": str(chain), "tls_key": str(key)})
    context = ssl.create_default_context(cafile=str(chain))

    def ask() -> None:
        for body in (b'{"prompt": "x"}', b"{"):
            connection = http.client.HTTPSConnection("localhost", running.port, timeout=PATIENCE_S, context=context)
            connection.request("POST", "/v1/completions", body)
            connection.getresponse().read()
            connection.close()
        with socket.create_connection(("localhost", running.port), PATIENCE_S) as raw:
            raw.sendall(b"\x16\x03\x01\x02\x00\x01")
        with socket.create_connection(("localhost", running.port), PATIENCE_S) as raw:
            tls = context.wrap_socket(raw, server_hostname="localhost")
            tls.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nx")
            tls.close()

    assert_no_cycles(ask)


def test_keys_of_two_tenants_are_refused(run: Run, keys: Path) -> None:
    running = run(engines=1, door={"api_keys": str(keys)})
    for name, prefix in (("Authorization", "Bearer "), ("x-api-key", "")):
        with socket.create_connection(("127.0.0.1", running.port), PATIENCE_S) as raw:
            lines = "".join(f"{name}: {prefix}{key}\r\n" for key in (GOLD, IRON))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{lines}Content-Length: 15\r\n\r\n"
            raw.sendall(head.encode() + b'{"prompt": "x"}')
            assert raw.recv(1000).startswith(b"HTTP/1.1 400")
    assert not running.engines[0].seen


def test_a_large_body_passes_over_tls(run: Run, tmp_path: Path) -> None:
    chain, key = certificate(tmp_path, "a")
    running = run(engines=1, door={"tls_cert": str(chain), "tls_key": str(key)})
    context = ssl.create_default_context(cafile=str(chain))
    connection = http.client.HTTPSConnection("localhost", running.port, timeout=PATIENCE_S, context=context)
    body = json.dumps({"prompt": "abc " * 500_000, "mock": {"body_bytes": 3_000_000}})
    connection.request("POST", "/v1/completions", body)
    answer = json.loads(connection.getresponse().read())
    assert len(answer["choices"][0]["text"]) == 3_000_000 and running.engines[0].seen[0]["body"] == body.encode()


@pytest.mark.parametrize(
    ("door", "says"),
    [
        ({"tls_cert": "a.pem"}, "tls_cert and tls_key go together"),
        ({"api_key": "x"}, "did you mean 'api_keys'"),
    ],
)
def test_settings_that_cannot_be_meant(door: dict[str, str], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        settings_from({"backends": ["http://127.0.0.1:1"], "door": door})


def test_files_that_are_missing_are_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"none\.pem"):
        Certificate(tmp_path / "none.pem", tmp_path / "none.key")
