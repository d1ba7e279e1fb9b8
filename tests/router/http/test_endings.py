"""Where a response ends: by its length, its chunks or its connection's proper end, and never by a loss."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.router.http.scripted_server import FIN, NOTIFY, RESET, scripted
from tests.router.http.test_upstream import Asked, new_loops
from tests.router.running import PATIENCE_S, Running

from skymemory.router.http.codings import transfer_codings
from skymemory.router.http.connection import Headers
from skymemory.router.http.upstream import Pool, UpstreamError
from skymemory.router.tls import Access, self_signed

Run = Callable[..., Running]
OPEN_END = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nhello"
CHUNKS = b"5\r\nhello\r\n0\r\n\r\n"


def fetch(
    url: str,
    new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
    tls: ssl.SSLContext | None = None,
) -> bytes:
    """The whole body of a response.

    Raises:
        UpstreamError: it is none, or not whole.
    """

    async def ask() -> bytes:
        pool = Pool(url, 5.0, Access(tls))
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await Asked(pool).over
        finally:
            pool.close()

    loop = new_loop()
    try:
        return loop.run_until_complete(ask())
    finally:
        loop.close()


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The server's, and a client's that trusts it."""
    pem: Path = tmp_path_factory.mktemp("tls") / "pair.pem"
    pair = self_signed()
    pem.write_bytes(pair.key + b"\n" + pair.chain)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(pem)
    return server, ssl.create_default_context(cadata=pair.chain.decode())


@pytest.mark.parametrize("new_loop", new_loops())
@pytest.mark.parametrize(("ending", "whole"), [(FIN, True), (RESET, False)])
def test_a_response_without_a_length_is_whole_only_if_its_server_ended_it(
    new_loop: Any, ending: str, whole: bool
) -> None:
    with scripted(OPEN_END, ending) as server:
        if whole:
            assert fetch(server.url, new_loop) == b"hello"
        else:
            with pytest.raises(UpstreamError, match="reset the connection in the middle"):
                fetch(server.url, new_loop)


@pytest.mark.parametrize("new_loop", new_loops())
@pytest.mark.parametrize(("ending", "whole"), [(NOTIFY, True), (FIN, False), (RESET, False)])
def test_with_tls_the_server_has_to_say_that_it_ends(
    new_loop: Any, ending: str, whole: bool, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    with scripted(OPEN_END, ending, contexts[0]) as server:
        if whole:
            assert fetch(server.url, new_loop, contexts[1]) == b"hello"
        else:
            with pytest.raises(UpstreamError, match="in the middle"):
                fetch(server.url, new_loop, contexts[1])


def client_sees(running: Running, version: str) -> tuple[bytes, bool]:
    """What a client gets, and whether its connection was reset."""
    body = json.dumps({"prompt": "x"}).encode()
    came = b""
    with socket.create_connection(("127.0.0.1", running.port), PATIENCE_S) as raw:
        raw.sendall(b"POST /v1/completions HTTP/%s\r\nHost: x\r\nConnection: close\r\n" % version.encode())
        raw.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        try:
            while piece := raw.recv(65536):
                came += piece
        except ConnectionResetError:
            return came, True
    return came, False


@pytest.mark.parametrize("answer", [OPEN_END, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"])
@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_lost_response_differs_from_a_whole_one_for_the_client(run: Run, answer: bytes, version: str) -> None:
    with scripted(answer, RESET) as server:
        running = run(engines=0, backends=[{"url": server.url}])
        came, was_reset = client_sees(running, version)
    # Chunks without a last one, or, for clients that know no chunks, a reset.
    assert b"hello" in came and not came.endswith(b"0\r\n\r\n")
    assert was_reset if version == "1.0" else b"chunked" in came.lower()


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_whole_response_without_a_length_is_whole_for_the_client(run: Run, version: str) -> None:
    with scripted(OPEN_END, FIN) as server:
        running = run(engines=0, backends=[{"url": server.url}])
        came, was_reset = client_sees(running, version)
    assert not was_reset and came.endswith(CHUNKS if version == "1.1" else b"\r\n\r\nhello")


@pytest.mark.parametrize(
    ("lines", "codings"),
    [
        ([b"chunked"], [b"chunked"]),
        ([b" Chunked "], [b"chunked"]),
        ([b", chunked,,"], [b"chunked"]),
        ([b"gzip, chunked"], [b"gzip", b"chunked"]),
        ([b"gzip", b"chunked"], [b"gzip", b"chunked"]),
        ([b"xchunked"], [b"xchunked"]),
        ([b'a;b="c, chunked"'], [b'a;b="c, chunked"']),
        ([b'a;b="c\\", d", chunked'], [b'a;b="c\\", d"', b"chunked"]),
        ([b'"chunked'], [b'"chunked']),
        ([], []),
    ],
)
def test_transfer_codings_are_a_list(lines: list[bytes], codings: list[bytes]) -> None:
    headers = Headers([(b"Host", b"a"), *((b"Transfer-Encoding", line) for line in lines)])
    assert transfer_codings(headers.all_of(b"transfer-encoding")) == codings


@pytest.mark.parametrize(
    "codings",
    ["gzip, chunked", "gzip\r\nTransfer-Encoding: chunked", "xchunked", "chunked, gzip", "chunked;a=b", "identity"]
    + ["chunked, chunked", "chunked,", "chunked\r\nTransfer-Encoding: ", '"chunked"', "gzip", 'a;b=", chunked"'],
)
def test_a_response_with_another_coding_than_chunked_is_refused(run: Run, codings: str) -> None:
    """None was asked for, and the client would get a body whose coding no header names."""
    with scripted(f"HTTP/1.1 200 OK\r\nTransfer-Encoding: {codings}\r\n\r\n".encode() + CHUNKS, FIN) as server:
        answer = run(engines=0, backends=[{"url": server.url}], retries={"most": 0}).complete()
    assert answer.status == 502 and "Transfer-Encoding" in answer.json["error"]["message"]


def test_empty_elements_of_the_list_of_codings_mean_nothing() -> None:
    with scripted(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: , chunked\r\n\r\n" + CHUNKS) as server:
        assert fetch(server.url) == b"hello"


@pytest.mark.parametrize(
    "head",
    [f"HTTP/1.1 {status} So" for status in ("000", "001", "099", "600", "999", "1000", "20")]
    + ["HTTP/2.0 200 OK", "HTTP/1.1 200 OK\r\nContent-Length: 5", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked"],
)
def test_a_response_that_is_none_is_broken(head: str) -> None:
    """A status that does not exist, another version of HTTP, or a second length or framing."""
    with scripted(f"{head}\r\nContent-Length: 5\r\n\r\nhello".encode()) as server, pytest.raises(UpstreamError):
        fetch(server.url)


@pytest.mark.parametrize("status", [100, 102, 103, 199])
def test_informational_responses_are_passed_over(status: int) -> None:
    with scripted(f"HTTP/1.1 {status} So\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok".encode()) as server:
        assert fetch(server.url) == b"ok"


@pytest.mark.parametrize("status", [204, 304])
def test_a_response_without_a_body_has_no_chunks(run: Run, status: int) -> None:
    with scripted(f"HTTP/1.1 {status} So\r\nTransfer-Encoding: chunked\r\n\r\n".encode()) as server:
        running = run(engines=0, backends=[{"url": server.url}])
        answer = running.complete()
    assert (answer.status, answer.body, answer.headers["Transfer-Encoding"]) == (status, b"", None)


@pytest.mark.parametrize(
    ("coding", "status"),
    [("gzip, chunked", 501), ("xyz, chunked", 501), ("xchunked", 400), ("chunked, gzip", 400), (", chunked", 200)],
)
def test_a_request_with_another_coding_than_chunked_is_refused(run: Run, coding: str, status: int) -> None:
    running = run(engines=1)
    body = json.dumps({"prompt": "x"}).encode()
    with socket.create_connection(("127.0.0.1", running.port), PATIENCE_S) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: %s\r\n\r\n" % coding.encode())
        raw.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        assert int(raw.recv(65536).split(b" ")[1]) == status
