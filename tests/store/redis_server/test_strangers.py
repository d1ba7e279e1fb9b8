"""What a web page or another protocol's client sends to the daemon executes nothing and ends the connection."""

from __future__ import annotations

import http.client
import logging
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import redis
from tests.store.redis_server.daemons import request

from skymemory.store.memory import MemoryStore
from skymemory.store.named_values import NamedValues
from skymemory.store.redis_server.commands import Commands
from skymemory.store.redis_server.daemon import Daemon, ServerLimits


@contextmanager
def on_loopback(store: MemoryStore, **options: bytes) -> Iterator[tuple[int, Commands]]:
    """The port of a daemon without TLS, as a web page could reach it, and its commands."""
    commands = Commands(store, **options)  # type: ignore[arg-type]
    daemon = Daemon(commands, ServerLimits())
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=daemon.serve, args=([listener],))
    thread.start()
    try:
        yield listener.getsockname()[1], commands
    finally:
        daemon.stop()
        thread.join(60)


def client_hello() -> bytes:
    """The first packet of https:// and wss://."""
    outgoing = ssl.MemoryBIO()
    context = ssl.create_default_context()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


BODY = b"\r\nSET owned yes\r\nDEL victim\r\n" + request(b"SET", b"owned", b"yes") + request(b"DEL", b"victim")
HEADERS = b"Host: 127.0.0.1:6379\r\nOrigin: https://evil.example\r\nContent-Type: text/plain\r\n\r\n"
METHODS = (b"POST", b"GET", b"HEAD", b"PUT", b"DELETE", b"OPTIONS", b"PATCH", b"CONNECT", b"TRACE", b"PROPFIND")
COMMANDS_AS_METHODS = (b"SET", b"DEL", b"INCR", b"GETDEL", b"MSET", b"FLUSHDB", b"KEYS", b"EXPIRE", b"MULTI", b"PING")
"""A page that has its own name resolve to 127.0.0.1 chooses the method."""
STRANGERS = {
    **{method.decode(): method + b" / HTTP/1.1\r\n" + HEADERS for method in METHODS + COMMANDS_AS_METHODS},
    "DEL of a key": b"DEL victim HTTP/1.1\r\n" + HEADERS,
    "lower case": b"post / http/1.1\r\n" + HEADERS,
    "HTTP/1.0": b"GET victim HTTP/1.0\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/2 frames": b"\0\0\x12\4\0\0\0\0\0" + bytes(18),
    "a quote in the path": b'SET /" HTTP/1.1\r\n' + HEADERS,
    "an empty line first": b"\r\n\r\nPOST / HTTP/1.1\r\n" + HEADERS,
    "line feeds alone": b"GET /victim HTTP/1.1\nHost: a\n\n",
    "Host alone": HEADERS,
    "host in lower case": b"host:a\r\n",
    "POST without a version": b"POST /\r\n",
    "POST in an array": request(b"POST", b"/"),
    "Host in an array": request(b"host:", b"a"),
    "TLS": client_hello(),
    "TLS 1.0 record": b"\x16\x03\x01\x02\x00\x01",
    "SSL 2": b"\x80\x2e\x01\x03\x01",
    "STUN of WebRTC": b"\0\1\0\x08\x21\x12\xa4\x42" + bytes(12) + b"\0\6\0\4user",
    "PostgreSQL": b"\0\0\0\x08\x04\xd2\x16\x2f",
    "SSH": b"SSH-2.0-OpenSSH_9.6\r\n",
    "SMTP": b"EHLO evil.example\r\n",
    "FTP": b"USER anonymous\r\n",
    "RTSP": b"DESCRIBE rtsp://a/ RTSP/1.0\r\n",
    "memcached": b"stats\r\n",
    "PROXY": b"PROXY TCP4 1.2.3.4 1.2.3.4 1 2\r\n",
    "DICT of curl": b"CLIENT libcurl 8.5.0\r\n",
    "too many words": b"GET victim 0 0\r\n",
    "too few words": b"SET owned\r\n",
}


def end_of(port: int, *packets: bytes) -> bytes:
    """All that the daemon says until it ends the connection, which the client leaves open."""
    with socket.create_connection(("127.0.0.1", port), 60) as sock:
        with suppress(OSError):
            for packet in packets:
                sock.sendall(packet)
        said = bytearray()
        with suppress(ConnectionError):
            while part := sock.recv(1 << 16):
                said += part
        return bytes(said)


@pytest.fixture(scope="module", params=[False, True], ids=["without a password", "with a password"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[int, MemoryStore, Commands]]:
    options = {"password": b"secret"} if request.param else {}
    with MemoryStore(1 << 22) as store, on_loopback(store, **options) as (port, commands):
        yield port, store, commands


@pytest.mark.brief(every=3)
@pytest.mark.parametrize("packets", ["one packet", "the body apart", "byte by byte"])
def test_a_stranger_executes_nothing_and_is_ended(served: tuple[int, MemoryStore, Commands], packets: str) -> None:
    port, store, commands = served
    values = NamedValues(store)
    for name, packet in STRANGERS.items():
        values.put("victim", b"precious")
        before = commands.counters.get("strangers"), commands.counters.get("commands")
        data = {
            "one packet": [packet + BODY],
            "the body apart": [packet, BODY],
            "byte by byte": [bytes([byte]) for byte in (packet + BODY)[:200]],
        }
        said = end_of(port, *data[packets])
        assert not said or (said.startswith(b"-ERR this port speaks the Redis") and said.count(b"\r\n") == 1), name
        assert values.get("victim") == b"precious" and values.get("owned") is None, name
        assert store.stats()["entries"] == 1 and commands.counters.get("strangers") == before[0] + 1, name
        assert commands.counters.get("commands") - before[1] <= ("array" in name), name


def test_what_came_before_a_stranger_is_executed(served: tuple[int, MemoryStore, Commands]) -> None:
    port, store, commands = served
    if commands.asks_password:
        pytest.skip("a stranger has none")
    said = end_of(port, request(b"SET", b"mine", b"1") + b"get mine\r\n" + STRANGERS["POST"] + BODY)
    assert said.startswith(b"+OK\r\n$1\r\n1\r\n-ERR this port") and NamedValues(store).get("owned") is None
    NamedValues(store).delete("mine")


def test_a_large_argument_makes_no_command_of_it(served: tuple[int, MemoryStore, Commands]) -> None:
    port, _, commands = served
    said = end_of(port, b"*2\r\n$4\r\nPOST\r\n$400000\r\n" + BODY)
    assert said.startswith(b"-ERR Protocol error: invalid bulk" if commands.asks_password else b"-ERR this port speaks")


def test_a_page_s_post_by_an_http_client(served: tuple[int, MemoryStore, Commands]) -> None:
    port, store, _ = served
    NamedValues(store).put("victim", b"precious")
    for _ in range(3):
        browser = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        with pytest.raises((http.client.HTTPException, OSError)):
            browser.request("POST", "/", body=BODY, headers={"Origin": "https://evil.example"})
            browser.getresponse()
        browser.close()
    assert NamedValues(store).get("victim") == b"precious" and NamedValues(store).get("owned") is None


def test_they_are_said_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    with MemoryStore(1 << 20) as store, on_loopback(store) as (port, _):
        with caplog.at_level(logging.INFO, "skymemory.store.daemon"):
            for _ in range(3):
                end_of(port, STRANGERS["POST"] + BODY)
            info = redis.Redis(port=port).info()
        (said,) = [record for record in caplog.records if "another protocol" in record.message]
        assert said.levelname == "WARNING" and "HTTP" in said.message
        assert info["strangers"] == 3


@pytest.mark.parametrize(
    "line", [b"SET k HTTP\r\n", b'SET "k" "HTTP/1.1"\r\n', b"  get  k \r\n", b"ping\r\n", b"\r\nPING\n"]
)
def test_a_line_that_is_a_command_is_no_stranger_s(served: tuple[int, MemoryStore, Commands], line: bytes) -> None:
    port, store, commands = served
    before = commands.counters.get("strangers")
    with socket.create_connection(("127.0.0.1", port), 60) as sock:
        said = sock.makefile("rb")
        if commands.asks_password:
            sock.sendall(request(b"AUTH", b"secret"))
            said.readline()
        sock.sendall(line + request(b"PING", b"there"))
        while (reply := said.readline()) != b"there\r\n":
            assert reply and not reply.startswith(b"-")
    assert commands.counters.get("strangers") == before
    NamedValues(store).delete("k")
