"""gRPC over a real socket, asked by gRPC's own client: what is refused, who waits, who is let go."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from tests.router.envoy.grpc.frames import REQUEST, frame, setting, word

from skymemory.router.envoy.grpc import http2 as h
from skymemory.router.envoy.grpc.grpc_server import Answers, GrpcCall, GrpcServer
from skymemory.router.envoy.grpc.http2 import PREFACE, WINDOW_BYTES

LOOP = asyncio.new_event_loop()
"""One for all tests here: gRPC's client keeps one poller for a process, and it complains of loops that were closed."""
MOST = 8 << 20


class Echo(GrpcCall):
    """Says again what it hears; words that it knows it obeys."""

    made: list[Echo]

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.over = 0
        Echo.made.append(self)

    def message(self, data: bytes) -> None:
        if data == b"fault":
            raise RuntimeError("asked for")
        if data == b"hold":
            self.answers.hold()
            return
        self.answers.send(data)

    def on_messages_end(self) -> None:
        self.answers.finish()

    def on_closed(self) -> None:
        self.over += 1


class World:
    def __init__(self, door: GrpcServer, port: int) -> None:
        self.door, self.port = door, port
        self.faults = 0

    def channel(self, **options: Any) -> Any:
        most = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        return grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", options=most, **options)


def with_door(test: Callable[[World], Awaitable[None]], **options: Any) -> World:
    Echo.made = []
    methods: dict[str, Callable[[Answers], GrpcCall]] = {"/s/Echo": Echo}

    async def run() -> World:
        door = GrpcServer(methods, MOST, 100, **options)
        listener = await LOOP.create_server(door.connect, "127.0.0.1", 0)
        world = World(door, listener.sockets[0].getsockname()[1])
        door.faults = lambda: setattr(world, "faults", world.faults + 1)
        try:
            await asyncio.wait_for(test(world), 60)
        finally:
            listener.close()
            await door.close(0)
        assert not door.connections
        return world

    world = LOOP.run_until_complete(run())
    assert all(each.over == 1 for each in Echo.made), "each call is over once"
    return world


def a_call(channel: Any, method: str = "/s/Echo") -> Any:
    return channel.stream_stream(method)()


async def refusal(call: Any) -> tuple[Any, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.read()
    return refused.value.code(), refused.value.details()


def test_messages_of_any_size_come_back_whole_and_in_order() -> None:
    async def test(world: World) -> None:
        async with world.channel() as channel:
            call = a_call(channel)
            sizes = [0, 1, 5, 16_379, 16_384, 70_000, 5_000_000, 3]

            async def write_all() -> None:
                for size in sizes:
                    await call.write(b"x" * size)
                await call.done_writing()

            telling = asyncio.create_task(write_all())
            assert [len(await call.read()) for _ in sizes] == sizes
            await telling
            assert await call.read() is grpc.aio.EOF and await call.code() == grpc.StatusCode.OK

    with_door(test)


def test_what_it_cannot_do_is_said_with_grpcs_own_words() -> None:
    async def test(world: World) -> None:
        async with world.channel() as channel, world.channel(compression=grpc.Compression.Gzip) as small:
            assert await refusal(a_call(channel, "/s/Nothing")) == (
                grpc.StatusCode.UNIMPLEMENTED,
                "unknown method /s/Nothing",
            )
            call = a_call(small)
            await call.write(b"x" * 1000)
            assert await refusal(call) == (grpc.StatusCode.UNIMPLEMENTED, "compressed messages are not supported")
            call = a_call(channel)
            await call.write(b"x" * (MOST + 1))
            assert (await refusal(call))[0] == grpc.StatusCode.RESOURCE_EXHAUSTED

    with_door(test)


def test_a_fault_ends_one_call_and_is_counted() -> None:
    async def test(world: World) -> None:
        async with world.channel() as channel:
            well, bad = a_call(channel), a_call(channel)
            await well.write(b"1")
            assert await well.read() == b"1"
            await bad.write(b"fault")
            assert (await refusal(bad))[0] == grpc.StatusCode.UNKNOWN
            await well.write(b"2")
            assert await well.read() == b"2"

    assert with_door(test).faults == 1


def test_what_comes_while_a_call_holds_waits_and_stays_in_order() -> None:
    async def test(world: World) -> None:
        async with world.channel() as channel:
            call = a_call(channel)
            pieces = [bytes([number]) * 100_000 for number in range(30)]
            await call.write(b"hold")

            async def write_all() -> None:
                for piece in pieces:
                    await call.write(piece)
                await call.done_writing()

            telling = asyncio.create_task(write_all())
            await asyncio.sleep(0.2)
            (echo,) = Echo.made
            kept = len(echo.answers._buffer)
            assert WINDOW_BYTES // 2 < kept <= WINDOW_BYTES, "the sender is not allowed to go on"
            echo.answers.go_on()
            assert [await call.read() for _ in pieces] == pieces
            await telling
            assert await call.read() is grpc.aio.EOF

    with_door(test)


def test_a_call_that_ends_while_it_holds_ends_when_it_goes_on() -> None:
    async def test(world: World) -> None:
        async with world.channel() as channel:
            call = a_call(channel)
            await call.write(b"hold")
            await call.write(b"after")
            await call.done_writing()
            await asyncio.sleep(0.05)
            Echo.made[0].answers.go_on()
            assert await call.read() == b"after" and await call.read() is grpc.aio.EOF

    with_door(test)


async def raw(world: World, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
    writer.write(data)
    return reader, writer


def test_who_says_nothing_is_let_go() -> None:
    async def test(world: World) -> None:
        silent, _ = await raw(world, b"")
        gone, _ = await raw(world, PREFACE + bytes(3) + b"\x04" + bytes(5))  # settings, and never an answer to a ping
        for reader in (silent, gone):
            with pytest.raises(asyncio.IncompleteReadError):
                await asyncio.wait_for(reader.readexactly(100_000), 2)

    with_door(test, preface_s=0.1, keepalive_s=0.1)


def test_who_answers_pings_may_be_silent() -> None:
    async def test(world: World) -> None:
        async with world.channel() as channel:
            call = a_call(channel)
            await call.write(b"1")
            assert await call.read() == b"1"
            await asyncio.sleep(0.5)
            await call.write(b"2")
            assert await call.read() == b"2"

    with_door(test, preface_s=0.05, keepalive_s=0.05)


def test_http_that_is_no_grpc_is_415_and_no_http2_is_closed() -> None:
    async def test(world: World) -> None:
        # GET / of HTTP/2: three names of HPACK's static table.
        reader, _ = await raw(world, PREFACE + bytes(3) + b"\x04" + bytes(5) + b"\0\0\3\1\5\0\0\0\1\x82\x84\x86")
        assert b":status\x03415" in await reader.readuntil(b"415")
        other, _ = await raw(world, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"no HTTP/2 preface" in await other.read()

    with_door(test)


def test_who_takes_no_answers_is_not_listened_to_and_others_are() -> None:
    async def test(world: World) -> None:
        # Each message is said again, the peer's windows have room, and nothing is read.
        begin = frame(h.SETTINGS, 0, 0, setting(h.SET_INITIAL_WINDOW, h.LARGEST_WINDOW))
        begin += frame(h.WINDOW_UPDATE, 0, 0, word(h.LARGEST_WINDOW - h.FIRST_WINDOW))
        call = [(name.encode(), value.encode()) for name, value in REQUEST if name != ":path"]
        begin += frame(h.HEADERS, h.END_HEADERS, 1, h.literals([(b":path", b"/s/Echo"), *call]))
        reader, writer = await raw(world, PREFACE + begin)
        reader._limit = 1  # type: ignore[attr-defined]
        more = frame(h.DATA, 0, 1, b"\0" + (10_000).to_bytes(4, "big") + bytes(10_000)) * 100
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.7):
                while True:
                    writer.write(more)
                    await writer.drain()
        (connection,) = world.door.connections
        assert connection._transport is not None
        assert connection._transport.get_write_buffer_size() < 8 << 20
        async with world.channel() as channel:
            call = a_call(channel)
            await call.write(b"1")
            assert await call.read() == b"1"
            await call.done_writing()
        writer.transport.abort()

    with_door(test)


def test_a_close_lets_calls_end_and_cuts_those_off_that_do_not() -> None:
    async def test(world: World) -> None:
        async with world.channel() as channel:
            ends, stays = a_call(channel), a_call(channel)
            for call in (ends, stays):
                await call.write(b"1")
                assert await call.read() == b"1"
            closing = asyncio.create_task(world.door.close(0.5))
            await asyncio.sleep(0.1)
            await ends.write(b"2")
            assert await ends.read() == b"2"
            await ends.done_writing()
            assert await ends.code() == grpc.StatusCode.OK and not closing.done()
            await closing
            assert (await refusal(stays))[0] == grpc.StatusCode.UNAVAILABLE

    with_door(test)
