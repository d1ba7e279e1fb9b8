"""The HTTP door by its bytes: what is refused, and what a client may do that few do."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
from tests.router.running import PATIENCE_S, Running, until

from skymemory.router.http.connection import SLICE_BYTES, HttpConnection
from skymemory.router.limits.held_bytes import HeldBytes

Run = Callable[..., Running]
BODY = json.dumps({"model": "small", "prompt": "abcd" * 40}).encode()
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def plain(loop):  # type: ignore[no-untyped-def]
    """One router for all tests that change nothing."""
    running = Running(loop).start(2)
    yield running
    running.close()


@contextlib.contextmanager
def connected(running: Running) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", running.port), PATIENCE_S) as raw:
        yield raw


def all_of(raw: socket.socket) -> bytes:
    """Everything until the other side closes."""
    came = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := raw.recv(65536):
            came += piece
    return came


def answers(raw: socket.socket, count: int) -> list[bytes]:
    """Answers with a length, one after the other."""
    came, found = b"", []
    while len(found) < count:
        piece = raw.recv(65536)
        assert piece, came
        came += piece
        while b"\r\n\r\n" in came:
            head, _, rest = came.partition(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            if len(rest) < length:
                break
            found.append(head + b"\r\n\r\n" + rest[:length])
            came = rest[length:]
    assert not came
    return found


def chunked(*pieces: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + end


CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
HOSTILE = {
    "length and chunks": POST + LENGTH + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(BODY),
    "chunks and length": POST + b"Transfer-Encoding: chunked\r\n" + LENGTH + b"\r\n" + chunked(BODY),
    "two lengths": POST + LENGTH + b"Content-Length: 1\r\n\r\n" + BODY,
    "one length twice": POST + LENGTH + LENGTH + b"\r\n" + BODY,
    "lengths in a list": POST + b"Content-Length: 5, 5\r\n\r\nabcde",
    "a signed length": POST + b"Content-Length: +5\r\n\r\nabcde",
    "a negative length": POST + b"Content-Length: -5\r\n\r\nabcde",
    "a hexadecimal length": POST + b"Content-Length: 0x5\r\n\r\nabcde",
    "an empty length": POST + b"Content-Length: \r\n\r\nabcde",
    "a length of words": POST + b"Content-Length: five\r\n\r\nabcde",
    "a length beyond 64 bits": POST + b"Content-Length: 18446744073709551621\r\n\r\nabcde",
    "an unknown coding": POST + b"Transfer-Encoding: xchunked\r\n\r\n" + chunked(BODY),
    "chunked not last": POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n" + chunked(BODY),
    "coded before chunked": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + chunked(BODY),
    "chunked twice": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(BODY),
    "identity": POST + b"Transfer-Encoding: identity\r\n\r\nabc",
    "identity and length": POST + LENGTH + b"Transfer-Encoding: identity\r\n\r\n" + BODY,
    "chunks in HTTP/1.0": CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + chunked(BODY),
    "a space before the colon": POST + b"Content-Length : 3\r\n\r\nabc",
    "a tab before the colon": POST + b"Content-Length\t: 3\r\n\r\nabc",
    "a line that goes on": POST + b"X: a\r\n b\r\n" + LENGTH + b"\r\n" + BODY,
    "a first header that goes on": b"POST /v1/completions HTTP/1.1\r\n Host: x\r\n" + LENGTH + b"\r\n" + BODY,
    "bare line feeds": (POST + LENGTH + b"\r\n").replace(b"\r\n", b"\n") + BODY,
    "one bare line feed": POST + b"X: a\n" + LENGTH + b"\r\n" + BODY,
    "bare carriage returns": (POST + LENGTH + b"\r\n").replace(b"\r\n", b"\r") + BODY,
    "a carriage return in a value": POST + b"X: a\rY: b\r\n" + LENGTH + b"\r\n" + BODY,
    "a zero in a value": POST + b"X: a\0b\r\n" + LENGTH + b"\r\n" + BODY,
    "a zero in a name": POST + b"X\0: a\r\n" + LENGTH + b"\r\n" + BODY,
    "a name of two words": POST + b"X Y: a\r\n" + LENGTH + b"\r\n" + BODY,
    "no name": POST + b": a\r\n" + LENGTH + b"\r\n" + BODY,
    "no colon": POST + b"Xa\r\n" + LENGTH + b"\r\n" + BODY,
    "a space before a chunk's size": CHUNKED + b" 5\r\nabcde\r\n0\r\n\r\n",
    "a space behind a chunk's size": CHUNKED + b"5 \r\nabcde\r\n0\r\n\r\n",
    "a chunk's size with 0x": CHUNKED + b"0x5\r\nabcde\r\n0\r\n\r\n",
    "a negative chunk": CHUNKED + b"-5\r\nabcde\r\n0\r\n\r\n",
    "a chunk beyond 64 bits": CHUNKED + b"10000000000000005\r\nabcde\r\n0\r\n\r\n",
    "a chunk longer than it says": CHUNKED + b"5\r\nabcdefg\r\n0\r\n\r\n",
    "chunks with bare line feeds": CHUNKED + b"5\nabcde\n0\n\n",
    "no version": b"POST /v1/completions\r\nHost: x\r\n\r\n",
    "HTTP/0.9": (POST + LENGTH + b"\r\n").replace(b"HTTP/1.1", b"HTTP/0.9") + BODY,
    "HTTP/1.2": (POST + LENGTH + b"\r\n").replace(b"HTTP/1.1", b"HTTP/1.2") + BODY,
    "HTTP/2.0": (POST + LENGTH + b"\r\n").replace(b"HTTP/1.1", b"HTTP/2.0") + BODY,
    "HTTP/2's preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a space in the path": POST.replace(b"completions", b"comple tions") + LENGTH + b"\r\n" + BODY,
    "a space behind the version": POST.replace(b"1.1\r\n", b"1.1 \r\n") + LENGTH + b"\r\n" + BODY,
    "two hosts": POST + b"Host: y\r\n" + LENGTH + b"\r\n" + BODY,
    "no host": POST.replace(b"Host: x\r\n", b"") + LENGTH + b"\r\n" + BODY,
    **{
        f"a host {what}": POST.replace(b"x", host, 1) + LENGTH + b"\r\n" + BODY
        for what, host in {
            "of two words": b"a b",
            "with a path": b"a/b",
            "with a user": b"me@x",
            "with half a bracket": b"[::1",
            "with a name for a port": b"x:http",
            "with a long port": b"x:123456",
            "with half an escape": b"x%2",
        }.items()
    },
    "a target without a host": POST.replace(b"/v1", b"http:///v1") + LENGTH + b"\r\n" + BODY,
    "a target with a host and no Host": POST.replace(b"/v1", b"http://x/v1").replace(b"Host: x\r\n", b"")
    + LENGTH
    + b"\r\n"
    + BODY,
    "another server's user": POST.replace(b"/v1", b"http://me@x/v1") + LENGTH + b"\r\n" + BODY,
    "a path that is none": POST.replace(b"/v1/completions", b"*") + LENGTH + b"\r\n" + BODY,
    "a fragment": POST.replace(b"completions", b"completions#a") + LENGTH + b"\r\n" + BODY,
    "a small method": POST.replace(b"POST", b"post") + LENGTH + b"\r\n" + BODY,
    "a tunnel": b"CONNECT x:80 HTTP/1.1\r\nHost: x:80\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "40 KB of headers": POST + b"X: " + b"a" * 40_000 + b"\r\n" + LENGTH + b"\r\n" + BODY,
    "40 KB of a path": POST.replace(b"completions", b"a" * 40_000) + LENGTH + b"\r\n" + BODY,
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("pieces", [1, 2])
def test_what_could_be_read_in_two_ways_is_refused(plain: Running, name: str, pieces: int) -> None:
    """In one piece, or in two: once with 4xx, 501 or 505, and nothing behind it is taken for a request."""
    before = [len(engine.seen) for engine in plain.engines]
    data = HOSTILE[name] + POST + LENGTH + b"\r\n" + BODY
    with connected(plain) as raw:
        with contextlib.suppress(ConnectionError):
            for at in range(pieces):
                raw.sendall(data[len(data) * at // pieces : len(data) * (at + 1) // pieces])
                time.sleep(0.01 * (pieces - 1))
        came = all_of(raw)
    assert came.startswith((b"HTTP/1.1 4", b"HTTP/1.1 501", b"HTTP/1.1 505")), came[:100]
    assert came.count(b"HTTP/1.1 ") == 1 and b'"error"' in came
    assert [len(engine.seen) for engine in plain.engines] == before


def test_requests_sent_at_once_are_answered_in_their_order(run: Run) -> None:
    running = run(engines=1)
    asked = []
    for number in range(8):
        body = json.dumps({"prompt": f"{number} " * 9, "mock": {"body_bytes": number + 1, "first_byte_s": 0.02}})
        asked.append(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body.encode())
    with connected(running) as raw:
        raw.sendall(b"".join(asked) + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        came = answers(raw, 9)
    texts = [json.loads(answer.partition(b"\r\n\r\n")[2]) for answer in came]
    assert [each["choices"][0]["text"] for each in texts[:8]] == ["x" * n for n in range(1, 9)] and texts[8] == {}
    assert len(running.engines[0].seen) == 8


def test_a_long_request_is_not_counted_as_the_head_behind_it(plain: Running) -> None:
    body = json.dumps({"prompt": "x" * 33_000}).encode()
    first = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    second = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Padding: " + b"x" * 1000 + b"\r\n\r\n"
    for at in (1, 20, 500, len(second) - 1):
        with connected(plain) as raw:
            raw.sendall(first + second[:at])
            time.sleep(0.05)
            raw.sendall(second[at:])
            assert all(answer.startswith(b"HTTP/1.1 200") for answer in answers(raw, 2))


def test_more_than_may_wait_on_one_connection_are_refused_and_those_before_are_answered(plain: Running) -> None:
    with connected(plain) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 200)
        came = all_of(raw)
    assert 64 <= came.count(b"HTTP/1.1 200") < 100 and came.count(b"HTTP/1.1 429") == 1
    assert came.index(b"HTTP/1.1 429") > came.rindex(b"HTTP/1.1 200")


def test_a_request_may_come_byte_by_byte(plain: Running) -> None:
    with connected(plain) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in CHUNKED + chunked(BODY[:7], BODY[7:]):
            raw.sendall(bytes((byte,)))
        [answer] = answers(raw, 1)
    assert answer.startswith(b"HTTP/1.1 200")


def test_trailers_are_read_and_not_passed_on(run: Run) -> None:
    running = run(engines=1)
    with connected(running) as raw:
        raw.sendall(CHUNKED + chunked(BODY, end=b"0\r\nAuthorization: late\r\nX-Trailer: a\r\n\r\n"))
        came = answers(raw, 1)
        raw.sendall(POST + LENGTH + b"\r\n" + BODY)
        came += answers(raw, 1)
    assert all(answer.startswith(b"HTTP/1.1 200") for answer in came)
    for seen in running.engines[0].seen:  # the next one's headers are its own, too
        assert seen["body"] == BODY and not seen["headers"].keys() & {"authorization", "x-trailer"}


def test_who_asks_for_another_protocol_is_served_in_this_one(run: Run) -> None:
    """As Java's client asks for HTTP/2 with its first request."""
    running = run(engines=1)
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAA\r\n"
    with connected(running) as raw:
        raw.sendall(POST + upgrade + LENGTH + b"\r\n" + BODY + POST + LENGTH + b"\r\n" + BODY)
        came = answers(raw, 2)
        raw.sendall(POST + upgrade + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(BODY))
        came += answers(raw, 1)
    assert all(answer.startswith(b"HTTP/1.1 200") for answer in came)
    assert [seen["body"] for seen in running.engines[0].seen] == [BODY] * 3
    assert not any(seen["headers"].keys() & {"upgrade", "http2-settings"} for seen in running.engines[0].seen)


def test_a_client_of_http_1_0(plain: Running) -> None:
    """Its connection closes unless it asks otherwise, and it gets no chunks, which it does not know."""
    old = POST.replace(b"1.1", b"1.0")
    with connected(plain) as raw:
        raw.sendall(old + LENGTH + b"\r\n" + BODY)
        came = all_of(raw)
    assert came.startswith(b"HTTP/1.1 200") and came.endswith(b"}")
    with connected(plain) as raw:
        raw.sendall((old + b"Connection: keep-alive\r\n" + LENGTH + b"\r\n" + BODY) * 2)
        came = b"".join(answers(raw, 2))
    assert came.count(b"Connection: keep-alive") == 2
    body = json.dumps({"prompt": "x", "stream": True}).encode()
    with connected(plain) as raw:
        raw.sendall(old + b"Connection: keep-alive\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        came = all_of(raw)
    assert b"chunked" not in came.lower() and came.endswith(b"data: [DONE]\n\n")


def test_who_waits_to_be_asked_on_is_asked_when_it_is_its_turn(run: Run) -> None:
    running = run(engines=1, limits={"max_body": 1000})
    waiting = POST + b"Expect: 100-continue\r\n"
    slow = json.dumps({"prompt": "x", "mock": {"first_byte_s": 0.3}}).encode()
    with connected(running) as raw:
        raw.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(slow) + slow + waiting + LENGTH + b"\r\n")
        came = b""
        while not came.endswith(b"HTTP/1.1 100 Continue\r\n\r\n"):
            came += raw.recv(65536)
        assert came.startswith(b"HTTP/1.1 200"), "the first answer comes first"
        raw.sendall(BODY)
        assert answers(raw, 1)[0].startswith(b"HTTP/1.1 200")
        raw.sendall(waiting + b"Content-Length: 5000\r\n\r\n")
        assert raw.recv(1000).startswith(b"HTTP/1.1 413"), "it need not send what would be refused"
    with connected(running) as raw:
        raw.sendall(POST + b"Expect: the-best\r\n" + LENGTH + b"\r\n" + BODY)
        assert raw.recv(1000).startswith(b"HTTP/1.1 417")
    for expected in (b"100-continue", b"the-best"):
        with connected(running) as raw:  # HTTP/1.0 knows neither
            raw.sendall(POST.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Expect: " + expected + b"\r\n" + LENGTH + b"\r\n")
            time.sleep(0.1)
            raw.sendall(BODY)
            assert all_of(raw).startswith(b"HTTP/1.1 200")


def test_who_sends_on_sees_why_it_was_refused(run: Run) -> None:
    """Bytes left unread would reset the connection, and the reset would overtake the answer."""
    running = run(engines=1, limits={"max_body": 1000})
    with connected(running) as raw:
        raw.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 4 << 20:
                sent += len(chunked(b"x" * 65536, end=b""))
                raw.sendall(chunked(b"x" * 65536, end=b""))
        came = raw.recv(65536)
    assert came.startswith(b"HTTP/1.1 413") and b"at most 1000 bytes" in came
    assert running.ask("GET", "/health").status == 200


def test_heads_and_bodies_that_drip_are_cut_off_in_the_time_of_one(run: Run) -> None:
    running = run(engines=1, timeouts={"client": "300ms", "keep_alive": "10s"})
    for begun, drip, says in (
        (POST, b"X: a\r\n", b"HTTP/1.1 408"),
        (POST + b"Content-Length: 100000\r\n\r\n", b"x", b"HTTP/1.1 408"),
        (CHUNKED, b"1\r\nx\r\n", b"HTTP/1.1 408"),
    ):
        began_s = time.monotonic()
        with connected(running) as raw:
            raw.settimeout(0.05)
            raw.sendall(begun)
            came = b""
            with contextlib.suppress(ConnectionError):
                while time.monotonic() - began_s < 20:
                    try:
                        piece = raw.recv(65536)
                        came += piece
                        if not piece:
                            break
                    except TimeoutError:
                        raw.sendall(drip)
        assert time.monotonic() - began_s < 15 and came.startswith(says) and bool(came) == bool(says)


@pytest.mark.brief()
def test_an_answer_waits_in_the_server_where_its_client_reads_slowly(run: Run) -> None:
    """Not in the router's memory: of 100 MB it holds a few hundred KB."""
    running = run(engines=1)
    body = json.dumps({"prompt": "x", "mock": {"body_bytes": 100_000_000}}).encode()
    with connected(running) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        raw.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        until(lambda: len(running.engines[0].seen) == 1)

        def unsent_bytes() -> int:
            assert running.server is not None
            return sum(each.unsent_bytes for each in running.server.proxy.connections if each.current is not None)

        until(lambda: unsent_bytes() > 0)
        for _ in range(10):
            time.sleep(0.02)
            assert 0 < unsent_bytes() < 1 << 20
        came = 0
        while piece := raw.recv(1 << 20):
            came += len(piece)
            if came > 100_000_000:
                break
    assert came > 100_000_000


def test_a_client_that_takes_one_answer_slowly_gets_the_next_one_too(run: Run) -> None:
    """The connection may still be full of the first, and get room, while the second is computed."""
    running = run(engines=1, timeouts={"client": "200ms", "idle": "200ms", "first_byte": "10s"})
    body = json.dumps({"prompt": "y", "mock": {"first_byte_s": 1.0}}).encode()

    async def full(is_full: bool) -> None:
        assert running.server is not None
        [connection] = running.server.proxy.connections
        (connection.pause_writing if is_full else connection.resume_writing)()

    for ends_full in (False, True):
        with connected(running) as raw:
            raw.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            until(lambda: running.server is not None and running.server.proxy.in_flight == 1)
            running.loop.run(full(True))
            if not ends_full:
                running.loop.run(full(False))
            assert answers(raw, 1)[0].startswith(b"HTTP/1.1 200"), "longer than between two pieces, not too long"
        until(lambda: running.server is not None and not running.server.proxy.connections)


def test_an_answer_to_head_has_no_body_whatever_its_headers_say(run: Run) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        said = b"Transfer-Encoding: chunked" if asked.startswith(b"HEAD") else b"Content-Length: 0"
        writer.write(b"HTTP/1.1 200 OK\r\n" + said + b"\r\n\r\n")
        writer.close()

    running = run(engines=0)
    server = running.loop.run(asyncio.start_server(serve, "127.0.0.1", 0))
    port = server.sockets[0].getsockname()[1]
    running.close_server()
    running.restart(backends=[{"url": f"http://127.0.0.1:{port}"}])
    with connected(running) as raw:
        raw.sendall(b"HEAD /tokenize HTTP/1.1\r\nHost: x\r\n\r\n" * 2)
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        came = all_of(raw)
    heads = came.split(b"\r\n\r\n")
    assert [head[:12] for head in heads[:3]] == [b"HTTP/1.1 200"] * 3 and heads[3] == b"{}" and len(heads) == 4
    server.close()


def test_draining_ends_connections_and_loses_no_request(run: Run) -> None:
    running = run(engines=2)
    server = running.server
    assert server is not None
    idle = socket.create_connection(("127.0.0.1", running.port), PATIENCE_S)
    asked = [
        running.open("POST", "/v1/completions", {"prompt": "x", "stream": True, "mock": {"events": 6, "gap_s": 0.1}})
        for _ in range(4)
    ]
    kept = socket.create_connection(("127.0.0.1", running.port), PATIENCE_S)
    kept.sendall(POST + LENGTH)  # in the middle of its head: it may still be served
    time.sleep(0.05)
    ended: list[bool] = []
    draining = threading.Thread(target=lambda: ended.append(running.loop.run(server.drain(10.0))))
    draining.start()
    time.sleep(0.05)
    kept.sendall(b"\r\n" + BODY)
    came = all_of(kept)
    assert b"200" in came[:20] and b"Connection: close" in came
    assert idle.recv(10) == b""
    assert all(response.read().endswith(b"data: [DONE]\n\n") for response in asked)
    draining.join(PATIENCE_S)
    assert ended == [True]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", running.port), 1.0)
    idle.close()
    kept.close()


@pytest.mark.parametrize("kept", [False, True])
def test_a_request_that_was_sent_when_draining_begins_is_answered(run: Run, kept: bool) -> None:
    """On a connection that only the kernel has accepted, and on one that was idle: neither was read from yet."""
    running = run(engines=1)
    server = running.server
    assert server is not None
    raw = socket.create_connection(("127.0.0.1", running.port), PATIENCE_S)
    if kept:
        raw.sendall(POST + LENGTH + b"\r\n" + BODY)
        until(lambda: raw.recv(1 << 16, socket.MSG_PEEK).endswith(b"}"))
        raw.recv(1 << 16)
    else:
        raw.close()

    async def sent_and_stopped() -> tuple[socket.socket, bool]:
        """Without a turn of the event loop between."""
        asking = raw if kept else socket.create_connection(("127.0.0.1", running.port), PATIENCE_S)
        asking.sendall(POST + LENGTH + b"\r\n" + BODY)
        return asking, await server.drain(10.0)

    asking, ended = running.loop.run(sent_and_stopped())
    came = all_of(asking)
    assert came.startswith(b"HTTP/1.1 200") and b"Connection: close" in came and ended
    asking.close()


def test_a_request_that_waits_in_the_kernel_when_its_idle_connection_is_due_is_answered(run: Run) -> None:
    """The event loop was busy, and looks at its timers before it reads."""
    running = run(engines=1, timeouts={"keep_alive": "100ms"})
    with connected(running) as raw:
        asked = POST + LENGTH + b"\r\n" + BODY
        raw.sendall(asked)
        until(lambda: raw.recv(1 << 16).endswith(b"}"))

        ours, theirs = socket.socketpair()
        with ours, theirs:

            def read_for_long() -> None:
                ours.recv(1)
                raw.sendall(asked)
                time.sleep(0.3)

            async def listen(to: bool) -> None:
                loop = asyncio.get_running_loop()
                loop.add_reader(ours, read_for_long) if to else loop.remove_reader(ours)

            running.loop.run(listen(True))
            theirs.send(b"x")
            assert raw.recv(1 << 16).startswith(b"HTTP/1.1 200")
            running.loop.run(listen(False))


def test_own_pages_answer_head_without_a_body_and_say_when(plain: Running) -> None:
    with connected(plain) as raw:
        raw.sendall(
            b"HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        )
        came = all_of(raw)
    head, _, rest = came.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and b"\r\nDate: " in head and b"Content-Length: " in head
    assert rest.startswith(b"HTTP/1.1 200") and rest.endswith(b"\r\n\r\n{}")


def test_bodies_of_all_requests_are_bounded_and_given_back(run: Run) -> None:
    """Of clients that send a megabyte and never end, too, and of bodies that grow as they are unpacked."""
    running = run(engines=1)
    assert running.server is not None
    proxy = running.server.proxy
    proxy.arriving.limit.most = 5 << 20
    head = POST + b"Content-Length: 2000000\r\n\r\n"
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(connected(running)) for _ in range(10)]
        for raw in sockets:
            raw.setblocking(True)
            with contextlib.suppress(ConnectionError):
                raw.sendall(head + b"x" * 1_000_000)
        refused = 0
        for raw in sockets:
            raw.settimeout(0.5)
            with contextlib.suppress(TimeoutError):
                refused += raw.recv(12) in (b"HTTP/1.1 503", b"HTTP/1.1 408")
        assert 5 <= refused <= 7 and 3_000_000 <= proxy.arriving.held_bytes <= 4 << 20
    until(lambda: proxy.arriving.held_bytes == 0)
    assert running.complete(prompt="x" * 1_000_000).status == 200
    assert running.complete(mock={"status": 400}).status == 400
    for prompt_bytes, status in ((3_000_000, 200), (6_000_000, 503)):
        packed = gzip.compress(json.dumps({"prompt": "x" * prompt_bytes}).encode())
        answer = running.ask("POST", "/v1/completions", packed, {"Content-Encoding": "gzip"})
        assert answer.status == status
    until(lambda: proxy.arriving.held_bytes == 0)


def test_of_too_many_connections_the_oldest_idle_one_is_closed(run: Run) -> None:
    running = run(engines=1)
    assert running.server is not None
    running.server.proxy.table.most = 3
    asked = POST + b"Content-Length: %d\r\n\r\n" % len(BODY)
    with contextlib.ExitStack() as stack:
        busy, idle, third = (stack.enter_context(connected(running)) for _ in range(3))
        busy.sendall(asked)
        until(lambda: running.server is not None and sum(not c.is_idle for c in running.server.proxy.connections) == 1)
        late = stack.enter_context(connected(running))
        assert all_of(idle) == b""
        for raw, rest in ((busy, BODY), (third, asked + BODY), (late, asked + BODY)):
            raw.sendall(rest)
            assert answers(raw, 1)[0].startswith(b"HTTP/1.1 200")


@pytest.mark.brief()
def test_a_thousand_connections_at_once_are_all_answered(run: Run) -> None:
    """Each with its own request, all open before the first is answered; with as many servers' connections as needed."""
    # Servers, router and clients share a loop here: on a busy computer checks and connections take their time.
    running = run(engines=2, health={"every": 60}, timeouts={"connect": "30s"})
    body = json.dumps({"prompt": "x", "mock": {"first_byte_s": 0.5}}).encode()
    asked = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(connected(running)) for _ in range(1000)]
        for raw in sockets:
            raw.sendall(asked)
        statuses = [answers(raw, 1)[0][:12] for raw in sockets]
    assert statuses == [b"HTTP/1.1 200"] * 1000


# What is beside the bytes of a body, and what takes long to parse


@pytest.mark.parametrize(
    ("begin", "flood"),
    [
        (b"1;a=", b"b" * 100_000),
        (b"", (b"1;" + b"x" * 3000 + b"\r\n \r\n") * 30),
        (b"1\r\n \r\n0\r\n", b"X-A: b\r\n" * 10_000),
        (b"1\r\n \r\n0\r\nX-A: ", b"b" * 100_000),
        (b"", b"%064x\r\n \r\n" % 1 * 1000),
    ],
    ids=["an extension", "extensions", "trailers", "a trailer", "zeros"],
)
def test_framing_of_chunks_is_bounded_by_its_bytes(plain: Running, begin: bytes, flood: bytes) -> None:
    with connected(plain) as raw:
        raw.settimeout(PATIENCE_S)
        raw.sendall(CHUNKED + begin)
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 8 << 20:
                raw.sendall(flood)
                sent += len(flood)
                if select.select([raw], [], [], 0)[0]:
                    break
            came = raw.recv(65_536)
            assert came.startswith(b"HTTP/1.1 400") and sent < 8 << 20
    assert plain.complete().status == 200


@pytest.mark.parametrize("size", [1, 2, 7, 4096])
def test_honest_chunks_of_any_size_are_served(plain: Running, size: int) -> None:
    body = json.dumps({"model": "small", "prompt": "abcd" * 20_000}).encode()
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    with connected(plain) as raw:
        raw.sendall(CHUNKED + chunked(*pieces, end=b"0\r\nX-Sum: 1\r\n\r\n"))
        assert answers(raw, 1)[0].startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "piece",
    [b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n", b"GET /x HTTP/1.1\r\nA: b\r\n"],
    ids=["unknown", "health", "half"],
)
def test_behind_the_end_of_a_connections_output_nothing_is_answered(
    plain: Running, piece: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Many pipelined requests, of which one is refused, with more than the headers of one request behind it."""
    with connected(plain) as raw:
        with contextlib.suppress(ConnectionError):
            raw.sendall(piece * 600 + b"GET /x HT")
        came = all_of(raw)
    assert came.startswith(b"HTTP/1.1 ")
    last = came.rpartition(b"HTTP/1.1 ")[2]
    assert last[:3] in (b"400", b"404", b"429", b"431") and b"Connection: close\r\n" in last
    assert came.count(b"Connection: close\r\n") == 1
    assert plain.metric("faults_total", where="connection") == 0 and "Traceback" not in caplog.text


def test_a_fault_of_a_connection_is_counted(plain: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plain.server is not None
    before = plain.metric("faults_total", where="connection")
    monkeypatch.setattr(plain.server.proxy, "refusal", lambda request: 1 // 0)
    with connected(plain) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert all_of(raw) == b""
    assert plain.metric("faults_total", where="connection") == before + 1


class _Later:
    """An event loop whose callbacks run when the test says."""

    def __init__(self) -> None:
        self.soon: list[Callable[[], None]] = []

    def call_soon(self, call: Callable[[], None]) -> None:
        self.soon.append(call)

    def call_at(self, when_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.TimerHandle(when_s, call, (), self)  # type: ignore[arg-type]

    def time(self) -> float:
        return 0.0

    def get_debug(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: object) -> None: ...

    def turn(self) -> None:
        calls, self.soon = self.soon, []
        for call in calls:
            call()


def _connection(app: mock.MagicMock, loop: _Later, transport: mock.MagicMock) -> HttpConnection:
    app.arriving, app.max_body_bytes = HeldBytes(64 << 20), 16 << 20
    app.client_s = app.head_s = app.keep_alive_s = 60.0
    app.least_rate, app.refusal.return_value = 1024, None
    transport.is_closing.return_value = False
    transport.get_extra_info.return_value = ("127.0.0.1", 1)
    made = HttpConnection(app, loop)  # type: ignore[arg-type]
    made.connection_made(transport)
    return made


def test_a_connection_of_tiny_chunks_parses_a_slice_in_each_turn() -> None:
    """In the order of an event loop: another connection's request, read in the same turn, waits for one slice."""
    app, loop, transport = mock.MagicMock(), _Later(), mock.MagicMock()
    chunky = _connection(app, loop, transport)
    read = CHUNKED + chunked(*[b" "] * 40_000, end=b"")
    chunky.data_received(read)
    reading = chunky._incomplete_request
    assert reading is not None and 0 < reading.body_bytes < SLICE_BYTES
    assert transport.pause_reading.called and not transport.resume_reading.called
    assert app.arriving.held_bytes > len(read) - SLICE_BYTES, "what waits counts, too"
    turns = 0
    while loop.soon:
        before = reading.body_bytes
        loop.turn()
        turns += 1
        assert reading.body_bytes - before < SLICE_BYTES
    assert reading.body_bytes == 40_000 == app.arriving.held_bytes and transport.resume_reading.called
    assert turns >= len(read) // SLICE_BYTES
    chunky.data_received(b"0\r\n\r\n")
    assert app.handle.call_args.args[0].body == b" " * 40_000


def test_a_large_body_is_parsed_at_once() -> None:
    app = mock.MagicMock()
    plain = _connection(app, _Later(), mock.MagicMock())
    plain.data_received(POST + b"Content-Length: 250000\r\n\r\n" + b"x" * 250_000)
    assert app.handle.call_args.args[0].body == b"x" * 250_000
