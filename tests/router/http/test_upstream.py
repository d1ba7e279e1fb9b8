"""Connections to servers: kept, used again, and never the reason that a request fails."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from skymemory.router.failure.budget import Sends
from skymemory.router.http import upstream
from skymemory.router.http.upstream import Pool, ResponseHead, UpstreamCall, UpstreamError

HEAD = b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def new_loops() -> list[Any]:
    """Event loops that the router runs on."""
    loops: list[Any] = [pytest.param(asyncio.new_event_loop, id="asyncio")]
    try:
        import uvloop
    except ImportError:
        return loops
    return [*loops, pytest.param(uvloop.new_event_loop, id="uvloop")]


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def against(serve: Serve, ask: Callable[[Pool, list[int]], Coroutine[Any, Any, None]]) -> None:
    """``ask`` gets a pool before a server that does ``serve`` with each connection, and how many there were."""

    async def run() -> None:
        connections: list[int] = []

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.append(1)
            try:
                await serve(reader, writer)
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        pool = Pool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", 2.0)
        try:
            async with asyncio.timeout(60):
                await ask(pool, connections)
        finally:
            pool.close()
            server.close()

    asyncio.run(run())


async def one(reader: asyncio.StreamReader) -> None:
    await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(4)


class Asked:
    """A request, and what comes back of it."""

    def __init__(self, pool: Pool, body: bytes = b"body", head: bytes = HEAD, sends: Sends | None = None) -> None:
        self.head: ResponseHead | None = None
        self.body = b""
        self.first = asyncio.Event()
        self.over: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.call: UpstreamCall = pool.ask(self, head, body, True, sends)

    def response_begins(self, head: ResponseHead) -> None:
        assert self.head is None and not self.over.done()
        self.head = head

    def response_data(self, piece: bytes, at_end: bool) -> None:
        assert self.head is not None and not self.over.done()
        self.body += piece
        self.first.set()
        if at_end:
            self.over.set_result(self.body)

    def response_failed(self, error: UpstreamError) -> None:
        self.over.set_exception(error)


async def whole(pool: Pool) -> bytes:
    return await Asked(pool).over


async def again_and_again(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        await one(reader)
        writer.write(OK)


async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Closes afterwards without having said so, as a server does that was idle for too long."""
    await one(reader)
    writer.write(OK)


def test_a_connection_is_used_again() -> None:
    async def ask(pool: Pool, connections: list[int]) -> None:
        assert [await whole(pool) for _ in range(5)] == [b"ok"] * 5 and len(connections) == 1
        assert await asyncio.gather(whole(pool), whole(pool), whole(pool)) == [b"ok"] * 3 and len(connections) == 3

    against(again_and_again, ask)


def test_one_that_was_closed_meanwhile_is_replaced_unseen() -> None:
    async def ask(pool: Pool, connections: list[int]) -> None:
        for number in range(1, 4):
            assert await whole(pool) == b"ok" and len(connections) == number

    against(once, ask)


def test_what_is_sent_again_counts_and_ends() -> None:
    async def twice(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await one(reader)
        writer.write(OK)
        await one(reader)  # and closes the connection without an answer

    async def ask(pool: Pool, connections: list[int]) -> None:
        assert await whole(pool) == b"ok"
        sends = Sends(1)
        with pytest.raises(UpstreamError, match="before the first byte"):
            await Asked(pool, sends=sends).over
        assert sends.count == 1 and len(connections) == 1, "it may have been read: it is not sent again"
        assert await whole(pool) == b"ok"
        sends = Sends(2)
        assert await Asked(pool, sends=sends).over == b"ok"
        assert sends.count == 2 and len(connections) == 3

    against(twice, ask)


def test_unused_ones_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "KEEP_S", 0.1)
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await one(reader)
        writer.write(OK)
        assert await reader.read() == b""
        closed.set()

    async def ask(pool: Pool, connections: list[int]) -> None:
        assert await whole(pool) == b"ok"
        await closed.wait()

    against(serve, ask)


def test_who_does_not_want_the_rest_is_gone_at_once() -> None:
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await one(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n")
        try:
            await reader.read()
        finally:
            gone.set()

    async def ask(pool: Pool, connections: list[int]) -> None:
        asked = Asked(pool)
        await asked.first.wait()
        assert asked.body == b"ok" and not asked.over.done()
        asked.call.close()
        await gone.wait()
        assert not asked.over.done(), "nothing is reported any more"

    against(serve, ask)


def test_hints_before_an_answer_are_passed_over_and_an_early_answer_ends_the_connection() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + OK)
        await reader.read()

    async def ask(pool: Pool, connections: list[int]) -> None:
        asked = Asked(pool, b"x" * 50_000_000, HEAD.replace(b": 4", b": 50000000"))
        assert await asked.over == b"ok" and asked.head is not None and asked.head.status == 200
        assert await whole(pool) == b"ok" and len(connections) == 2

    against(serve, ask)


@pytest.mark.parametrize(
    "said", [b"SSH-2.0-OpenSSH_9\r\n\r\n", b"HTTP/1.1 101 Over\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", b""]
)
def test_what_is_no_answer_is_an_error(said: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await one(reader)
        writer.write(said)

    async def ask(pool: Pool, connections: list[int]) -> None:
        with pytest.raises(UpstreamError) as raised:
            await whole(pool)
        assert raised.value.connected

    against(serve, ask)


def test_no_listener_and_no_server_that_accepts() -> None:
    async def ask(pool: Pool, connections: list[int]) -> None:
        with pytest.raises(UpstreamError) as raised:
            await whole(Pool("http://127.0.0.1:1", 2.0))
        assert raised.value.refused and not raised.value.connected

    against(once, ask)


def test_a_name_of_several_addresses_refuses_where_all_of_them_do(monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolved(*args: Any, **more: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{last}", 1)) for last in (1, 2)]

    async def ask(pool: Pool, connections: list[int]) -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "_ensure_resolved", resolved)
        with pytest.raises(UpstreamError, match=r"^no connection: Connection refused$") as raised:
            await whole(Pool("http://two.example:1", 2.0))
        assert raised.value.refused and not raised.value.connected

    against(once, ask)


def test_a_burst_makes_a_bounded_number_of_connections_at_once_and_all_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upstream, "MAX_CONNECTING", 3)

    async def ask(pool: Pool, connections: list[int]) -> None:
        asked = [Asked(pool) for _ in range(50)]
        asked[30].call.close()
        assert len(pool._connecting) == 3
        assert {await each.over for each in asked if each is not asked[30]} == {b"ok"}
        assert not asked[30].over.done() and len(connections) < 50

    against(again_and_again, ask)


def test_an_answer_without_a_length_ends_where_its_connection_does() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await one(reader)
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + b"x" * 300_000)

    async def ask(pool: Pool, connections: list[int]) -> None:
        asked = Asked(pool)
        assert await asked.over == b"x" * 300_000 and asked.head is not None and not asked.head.framed

    against(serve, ask)


@pytest.mark.parametrize("framing", [b"Content-Length: 20", b"Transfer-Encoding: chunked"])
def test_an_answer_that_is_cut_off_is_not_taken_for_whole(framing: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await one(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n\r\n5\r\nhello\r\n")

    async def ask(pool: Pool, connections: list[int]) -> None:
        with pytest.raises(UpstreamError, match="in the middle"):
            await whole(pool)

    against(serve, ask)


EVIL = b"HTTP/1.1 299 EVIL\r\nX-Evil: yes\r\nContent-Length: 400\r\n\r\nevil"


@pytest.mark.parametrize("behind", range(1, len(EVIL) + 1, 3))
def test_bytes_of_another_answer_behind_one_are_nobodys(behind: int) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = True
        while True:
            await one(reader)
            writer.write(OK + (EVIL[:behind] if first else b""))
            first = False

    async def ask(pool: Pool, connections: list[int]) -> None:
        for number in range(3):
            asked = Asked(pool)
            assert await asked.over == b"ok"
            assert asked.head is not None and asked.head.status == 200 and asked.head.reason == "OK"
            assert "x-evil" not in asked.head.headers and asked.head.headers["content-length"] == "2"
            assert len(connections) == number + 1, "the connection is used again"

    against(serve, ask)


@pytest.mark.parametrize("new_loop", new_loops())
def test_a_fast_server_does_not_hold_up_the_others(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """A turn of the event loop takes what one read takes, however much waits."""
    answer = bytes(4_000_000)
    by_turn = [0]

    class Counted(Asked):
        def response_data(self, piece: bytes, at_end: bool) -> None:
            by_turn[-1] += len(piece)
            super().response_data(piece, at_end)

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer))
            connection.sendall(answer)

    async def ask(port: int) -> None:
        pool = Pool(f"http://127.0.0.1:{port}", 2.0)
        asked = Counted(pool)
        await asked.first.wait()
        time.sleep(0.3)
        while not asked.over.done():
            by_turn.append(0)
            await asyncio.sleep(0)
        assert len(await asked.over) == len(answer)
        pool.close()

    with socket.create_server(("127.0.0.1", 0)) as listener, asyncio.Runner(loop_factory=new_loop) as runner:
        server = threading.Thread(target=serve, args=(listener,))
        server.start()
        runner.run(asyncio.wait_for(ask(listener.getsockname()[1]), 60))
        server.join()
    assert max(by_turn) <= 2 * 262_144
