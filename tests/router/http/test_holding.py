"""What clients share, over real sockets: who holds pays, and others are served meanwhile and afterwards."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.router.running import PATIENCE_S, Running, until

from skymemory.router.api_keys import new_key, with_key
from skymemory.router.http import exchange
from skymemory.router.limits import connections, held_bytes, rates
from skymemory.router.limits.connections import State
from skymemory.router.prompts.reader import PromptReader
from skymemory.router.tls import self_signed

Run = Callable[..., Running]
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@contextlib.contextmanager
def many(running: Running, count: int, data: bytes) -> Iterator[list[socket.socket]]:
    """Connections that have sent this."""
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(count):
            raw = stack.enter_context(socket.create_connection(("127.0.0.1", running.port), PATIENCE_S))
            with contextlib.suppress(ConnectionError):
                raw.sendall(data)
            made.append(raw)
        yield made


def ended(sockets: list[socket.socket]) -> list[bytes]:
    """How each began to be answered, of those that were closed."""
    found = []
    for raw in sockets:
        raw.settimeout(0.05)
        with contextlib.suppress(TimeoutError):
            try:
                found.append(raw.recv(65_536)[:12])
            except ConnectionError:
                found.append(b"reset")
    return found


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What may take a second may take a tenth."""
    monkeypatch.setattr(held_bytes, "SLOW_S", 0.1)


def test_bodies_that_lack_a_byte_pay_and_others_are_served(run: Run) -> None:
    running = run(engines=1, limits={"max_body": "1MiB", "max_held": "4MiB"})
    held = POST + b"Content-Length: 1000000\r\n\r\n" + bytes(999_999)
    with many(running, 16, held) as sockets:
        time.sleep(0.3)
        for _ in range(20):
            assert running.complete(prompt="x" * 100_000).status == 200
        answers = ended(sockets)
        assert 12 <= len(answers) < 16 and set(answers) <= {b"HTTP/1.1 408", b"HTTP/1.1 503"}
        assert running.metric("evictions_total", limit="arriving") >= 12
        assert running.server is not None and running.server.proxy.arriving.held_bytes <= 4 << 20
    until(lambda: running.server is not None and running.server.proxy.arriving.held_bytes == 0)
    assert running.complete(prompt="x" * 900_000).status == 200


def test_a_body_behind_a_request_that_is_being_answered_pays_too(run: Run) -> None:
    running = run(engines=1, limits={"max_body": "1MiB", "max_held": "4MiB"})
    body = json.dumps({"prompt": "x", "mock": {"first_byte_s": 3.0}}).encode()
    first = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with many(running, 4, first + POST + b"Content-Length: 1000000\r\n\r\n" + bytes(900_000)):
        time.sleep(0.3)
        assert running.complete(prompt="x" * 900_000).status == 200


def test_bodies_that_wait_to_be_read_take_nothing_from_others(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large ones are read one after the other: until its turn each takes its own bytes."""
    go_on, read = threading.Event(), PromptReader.read

    def in_its_time(self: PromptReader, path: str, headers: Any, body: bytes, *more: Any, **named: Any) -> Any:
        if len(body) >= exchange.LARGE_BYTES:
            go_on.wait(PATIENCE_S)
        return read(self, path, headers, body, *more, **named)

    monkeypatch.setattr(PromptReader, "read", in_its_time)
    running = run(engines=1, limits={"max_body": "2MiB", "max_held": "8MiB"})
    body = json.dumps({"prompt": "x" * 1_500_000}).encode()
    with many(running, 4, POST + b"Content-Length: %d\r\n\r\n" % len(body) + body) as sockets:
        until(lambda: running.server is not None and running.server.proxy.arriving.held_bytes >= 4 * len(body))
        assert running.complete().status == 200
        go_on.set()
        assert {raw.recv(12) for raw in sockets} == {b"HTTP/1.1 200"}


def test_half_heads_pay_and_others_connect(run: Run) -> None:
    running = run(engines=1)
    assert running.server is not None
    running.server.proxy.table.most = 20
    with many(running, 60, POST) as sockets:
        for _ in range(10):
            assert running.complete().status == 200
        answers = ended(sockets)
        assert 40 <= len(answers) <= 60 and set(answers) <= {b"HTTP/1.1 408", b"", b"reset"}
        assert running.server.proxy.table.count <= 20
    until(lambda: running.server is not None and running.server.proxy.table.count == 0)


def test_heads_take_no_more_memory_than_bodies_may(run: Run) -> None:
    """8 KB each of a hundred heads; and a head of many short lines is refused, not kept."""
    running = run(engines=1, limits={"max_body": 1000, "max_held": "400KiB"})
    with many(running, 100, POST + b"X: " + b"a" * 8000) as sockets:
        time.sleep(0.3)
        assert running.complete(prompt="x" * 700).status == 200
        assert len(ended(sockets)) >= 50
        assert running.server is not None and running.server.proxy.arriving.held_bytes <= 400 << 10
    with many(running, 1, POST + b"a:b\r\n" * 3000) as (raw,):
        assert raw.recv(1000).startswith(b"HTTP/1.1 431"), "incomplete, too"
    with many(running, 1, POST + b"a:b\r\n" * 300 + b"\r\n") as (raw,):
        assert raw.recv(1000).startswith(b"HTTP/1.1 431")
    until(lambda: running.server is not None and running.server.proxy.arriving.held_bytes == 0)


def test_a_body_slower_than_the_least_rate_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that pauses for less is not."""
    monkeypatch.setattr(rates, "GRACE_S", 0.4)
    running = run(engines=1, limits={"least_rate": 100_000})
    with many(running, 1, POST + b"Content-Length: 1000000\r\n\r\n" + bytes(300_000)) as (raw,):
        time.sleep(0.2)
        raw.sendall(b"x")
        assert raw.recv(12) == b"HTTP/1.1 408"
        assert b"100000 bytes per second" in raw.recv(1000)
    body = json.dumps({"prompt": "x" * 90_000}).encode()
    with many(running, 1, POST + b"Content-Length: %d\r\n\r\n" % len(body)) as (raw,):
        for at in range(0, len(body), 30_000):
            raw.sendall(body[at : at + 30_000])
            time.sleep(0.2)
        assert raw.recv(12) == b"HTTP/1.1 200"


def reads_nothing(running: Running, count: int) -> contextlib.AbstractContextManager[list[socket.socket]]:
    body = json.dumps({"prompt": "x", "mock": {"body_bytes": 30_000_000}}).encode()
    return many(running, count, POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)


@pytest.mark.brief()
def test_clients_that_do_not_read_pay_and_others_are_served(run: Run) -> None:
    running = run(engines=1)
    assert running.server is not None
    proxy = running.server.proxy
    proxy.unread.limit.most = 1 << 20
    with reads_nothing(running, 12):
        until(lambda: running.metric("evictions_total", limit="unread") >= 6)
        assert running.complete().status == 200
        assert proxy.unread.held_bytes <= 1 << 20
    until(lambda: proxy.unread.held_bytes == 0 and proxy.in_flight == 0)


def test_a_client_that_does_not_read_gives_its_place_in_flight_to_one_that_does(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "LATE_S", 0.1)
    running = run(engines=1, limits={"max_in_flight": 4})
    proxy = running.server.proxy  # type: ignore[union-attr]
    with reads_nothing(running, 4):
        until(lambda: sum(c.full for c in proxy.connections) == 4)
        until(lambda: proxy.table.slow_reader(time.monotonic()) is not None)
        assert [running.complete().status for _ in range(3)] == [200] * 3
    until(lambda: proxy.in_flight == 0)


@pytest.mark.brief()
def test_answers_that_are_not_read_do_not_pile_up(run: Run) -> None:
    """One client asks for pages without end and reads none: the router asks no more of it, and then ends it."""
    running = run(engines=1, timeouts={"client": "1s", "keep_alive": "10min"})
    asked = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
    with many(running, 1, b"") as (raw,):
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.settimeout(1.0)
        proxy = running.server.proxy  # type: ignore[union-attr]
        until(lambda: len(proxy.connections) == 1)
        [connection] = proxy.connections
        for _ in range(3000):
            raw.sendall(asked)
            time.sleep(0.004)
            until(lambda: connection.is_idle or connection.full)
            if connection.full:
                break
        for _ in range(50):
            raw.sendall(asked)
        time.sleep(0.1)
        assert connection.full and connection.unsent_bytes < 1 << 20
        until(lambda: connection not in proxy.connections)
    assert running.ask("GET", "/health").status == 200


def test_a_client_that_reads_again_gets_all_of_its_answers(run: Run) -> None:
    running = run(engines=1)
    page = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
    with many(running, 1, page * 40) as (raw,):
        time.sleep(0.3)
        found = b""
        while found.count(b"HTTP/1.1 200") < 40:
            piece = raw.recv(65_536)
            assert piece
            found += piece
        for _ in range(40):  # one after the other, unread: its buffers fill meanwhile
            raw.sendall(page)
            time.sleep(0.002)
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        while piece := raw.recv(65_536):
            found += piece
    assert found.count(b"HTTP/1.1 200") == 81 and found.endswith(b"{}")


def test_a_last_request_behind_an_answer_that_is_read_slowly_is_answered(run: Run) -> None:
    running = run(engines=1)
    body = json.dumps({"prompt": "x", "mock": {"body_bytes": 10_000_000}}).encode()
    last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with many(running, 1, POST + b"Content-Length: %d\r\n\r\n" % len(body) + body + last) as (raw,):
        until(lambda: any(c.full for c in running.server.proxy.connections))  # type: ignore[union-attr]
        found = b""
        while piece := raw.recv(1 << 20):
            found += piece
    assert len(found) > 10_000_000 and found.count(b"HTTP/1.1 200") == 2 and found.endswith(b"{}")


def test_half_handshakes_pay_and_others_agree_upon_tls(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    made = self_signed()
    (tmp_path / "a.pem").write_bytes(made.chain)
    (tmp_path / "a.key").write_bytes(made.key)
    door = {"tls_cert": str(tmp_path / "a.pem"), "tls_key": str(tmp_path / "a.key")}
    running = run(engines=1, door=door, timeouts={"head": "1s"})
    import ssl

    context = ssl.create_default_context(cafile=tmp_path / "a.pem")
    server = running.server
    assert server is not None
    server.proxy.table.most = 10
    with many(running, 30, b"\x16\x03\x01\x02\x00\x01") as sockets:
        for _ in range(3):
            with (
                socket.create_connection(("127.0.0.1", running.port), PATIENCE_S) as raw,
                context.wrap_socket(raw, server_hostname="localhost") as asking,
            ):
                asking.sendall(b"GET /health HTTP/1.1\r\nHost: router.example\r\n\r\n")
                assert asking.recv(1000).startswith(b"HTTP/1.1 200")
        assert server.proxy.table.count <= 10 and len(ended(sockets)) >= 20
        until(lambda: not server._listener.is_setting_up)  # a handshake takes a second at most
        assert len(ended(sockets)) == 30 - 20 or server.proxy.table.count <= 3
    until(lambda: server.proxy.table.count == 0)


def test_a_tenant_leaves_others_a_share_of_what_is_in_flight(run: Run, tmp_path: Path) -> None:
    keys = [new_key(b"a" * 32), new_key(b"b" * 32)]
    file = tmp_path / "keys.toml"
    file.write_text(with_key(with_key("[tenants.many]\n[tenants.few]\n", "many", keys[0]), "few", keys[1]))
    running = run(engines=1, door={"api_keys": str(file)}, limits={"max_in_flight": 10})
    body = json.dumps({"prompt": "x", "mock": {"hold": True}}).encode()
    head = POST + b"Authorization: Bearer %s\r\nContent-Length: %d\r\n\r\n" % (keys[0].encode(), len(body))
    with many(running, 12, head + body) as sockets:
        until(lambda: len(running.engines[0].seen) == 8)
        answers = ended(sockets)
        assert answers == [b"HTTP/1.1 429"] * 4
        assert running.complete({"Authorization": f"Bearer {keys[1]}"}).status == 200
    until(lambda: running.server is not None and running.server.proxy.in_flight == 0)


def test_seats_follow_what_connections_do(run: Run) -> None:
    running = run(engines=1)
    proxy = running.server.proxy  # type: ignore[union-attr]

    def states() -> list[State]:
        seats = [c._seat for c in proxy.connections if c._seat is not None]
        return sorted(State.BUSY if seat.is_busy else seat.state for seat in seats)

    body = json.dumps({"prompt": "x", "mock": {"first_byte_s": 0.5}}).encode()
    with many(running, 1, b"") as (raw,):
        until(lambda: states() == [State.HEAD])
        raw.sendall(POST)
        time.sleep(0.05)
        assert states() == [State.HEAD]
        raw.sendall(b"Content-Length: %d\r\n\r\n" % len(body))
        until(lambda: states() == [State.BODY])
        raw.sendall(body)
        until(lambda: states() == [State.BUSY])
        assert raw.recv(12) == b"HTTP/1.1 200"
        until(lambda: states() == [State.IDLE])
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        until(lambda: states() == [State.KEPT])
        raw.sendall(POST)
        until(lambda: states() == [State.HEAD])
    until(lambda: proxy.table.count == 0)


@pytest.mark.parametrize(
    "line", [b"PING\r\n", b"hello\r\n", b"\x00\x01", b"*1\r\n$4\r\nPING\r\n", b"SSH-2.0-x\r\n", b"\r\n\r\n*"]
)
def test_a_connection_whose_first_line_is_not_http_is_ended(run: Run, line: bytes) -> None:
    running = run(engines=1)
    with many(running, 1, line + b"POST /v1/completions HTTP/1.1\r\n") as (raw,):
        found = b""
        with contextlib.suppress(ConnectionError):
            while piece := raw.recv(1000):
                found += piece
        assert found.startswith(b"HTTP/1.1 400") and found.count(b"HTTP/1.1") == 1
    assert not running.engines[0].seen


EVIL = {"Origin": "https://evil.example"}


def test_web_pages_of_strangers_are_refused_on_loopback(run: Run) -> None:
    running = run(engines=1)
    for headers in (EVIL, {"Host": "evil.example"}, {"Origin": "null"}):
        refused = running.complete(headers)
        assert refused.status == 403 and refused.json["error"]["type"] == "invalid_request_error"
    with socket.create_connection(("127.0.0.1", running.port), PATIENCE_S) as raw:
        raw.sendall(
            b"POST http://evil.example/v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"
        )
        assert raw.recv(1000).startswith(b"HTTP/1.1 403"), "the target's host counts"
    assert not running.engines[0].seen
    for headers in ({"Host": "router:1"}, {"Origin": "http://localhost:3000"}, {"Host": "[::1]"}):
        assert running.complete(headers).status == 200


@pytest.mark.parametrize(
    ("settings", "headers"),
    [
        ({"cors": {"origins": ["https://evil.example"]}}, EVIL),
        ({"cors": {"origins": ["*"]}}, EVIL),
        ({"door": {"hosts": ["router.example"]}}, {"Host": "Router.Example:443"}),
        ({"listen": "0.0.0.0:0"}, {**EVIL, "Host": "router.example"}),
    ],
)
def test_what_the_settings_allow_is_served(run: Run, settings: dict[str, object], headers: dict[str, str]) -> None:
    assert run(engines=1, **settings).complete(headers).status == 200


def test_who_shows_a_key_is_not_a_stranger(run: Run, tmp_path: Path) -> None:
    key, file = new_key(b"a" * 32), tmp_path / "keys.toml"
    file.write_text(with_key("[tenants.a]\n", "a", key))
    running = run(engines=1, door={"api_keys": str(file)})
    assert running.complete({**EVIL, "Host": "router.example", "Authorization": f"Bearer {key}"}).status == 200


def test_what_is_read_counts_while_it_is_read_and_one_at_a_time(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain and compressed: what it decodes to is beside what is counted, of one request at a time."""
    running = run(engines=1)
    assert running.server is not None
    arriving = running.server.proxy.arriving
    at_once, most, held = 0, 0, []
    read = PromptReader.read

    def watched(self: PromptReader, *args: object, **options: object) -> object:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        held.append(arriving.held_bytes)
        time.sleep(0.05)
        try:
            return read(self, *args, **options)  # type: ignore[arg-type]
        finally:
            at_once -= 1

    monkeypatch.setattr(PromptReader, "read", watched)
    body = json.dumps({"model": "small", "prompt": "abcd" * 400_000}).encode()
    packed = gzip.compress(body)
    with ThreadPoolExecutor(4) as clients:
        plain = [clients.submit(running.ask, "POST", "/v1/completions", body) for _ in range(2)]
        headers = {"Content-Encoding": "gzip"}
        plain += [clients.submit(running.ask, "POST", "/v1/completions", packed, headers) for _ in range(2)]
        assert [each.result(PATIENCE_S).status for each in plain] == [200] * 4
    assert most == 1 and min(held) >= len(body)
    until(lambda: arriving.held_bytes == 0)


def test_a_small_body_of_many_items_is_refused_and_gives_all_back(run: Run) -> None:
    running = run(engines=1)
    packed = gzip.compress(b'{"model": "small", "prompt": [' + b"[1]," * 1_000_000 + b"[1]]}")
    assert len(packed) < 8192
    answer = running.ask("POST", "/v1/completions", packed, {"Content-Encoding": "gzip"})
    assert answer.status == 400 and "at most 32,768 are allowed" in answer.json["error"]["message"]
    assert not running.engines[0].seen
    until(lambda: running.server is not None and running.server.proxy.arriving.held_bytes == 0)
