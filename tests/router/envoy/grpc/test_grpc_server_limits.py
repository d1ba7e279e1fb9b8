"""What one connection may have of the door's time and memory, without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.router.envoy.grpc.frames import REQUEST, frame, frames, setting, word

from skymemory.router.envoy.grpc import grpc_server
from skymemory.router.envoy.grpc import http2 as h
from skymemory.router.envoy.grpc.grpc_server import (
    READ_BYTES,
    WORK_AT_ONCE,
    Answers,
    GrpcCall,
    GrpcConnection,
    GrpcServer,
)

CALL = h.literals((name.encode(), value.encode()) for name, value in REQUEST)
BEGIN = h.PREFACE + frame(h.SETTINGS, 0, 0)


class Notes(GrpcCall):
    """Records what it receives, and may be given an action for it."""

    def __init__(self, world: World, answers: Answers) -> None:
        self.world, self.answers = world, answers
        self.heard: list[bytes] = []
        self.over = False
        world.calls.append(self)

    def message(self, data: bytes) -> None:
        self.heard.append(data)
        self.world.heard += 1
        if data.startswith(b"much"):
            self.answers.send_all(b"%d" % number * 1000 for number in range(50))

    def on_messages_end(self) -> None:
        self.answers.finish()

    def on_closed(self) -> None:
        self.over = True

    def held_bytes(self) -> int:
        return sum(map(len, self.heard))


class Transport:
    def __init__(self) -> None:
        self.said = b""
        self.reads, self.gone = True, False

    def write(self, data: bytes) -> None:
        self.said += data

    def set_write_buffer_limits(self, high: int) -> None: ...

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def is_closing(self) -> bool:
        return self.gone

    def close(self) -> None:
        self.gone = True

    abort = close

    def kinds(self) -> list[int]:
        return [kind for kind, *_ in frames(self.said)]


class World:
    def __init__(self, **options: Any) -> None:
        self.calls: list[Notes] = []
        self.refusals: list[str] = []
        self.heard = 0
        self.door = GrpcServer(
            {"/service/Call": lambda answers: Notes(self, answers)},
            options.pop("most_message_bytes", 1 << 20),
            options.pop("most_streams", 100),
            refused=self.refusals.append,
            **options,
        )

    def connect(self) -> tuple[GrpcConnection, Transport]:
        connection, transport = self.door.connect(), Transport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        self.say(connection, BEGIN)
        transport.said = b""
        return connection, transport

    def say(self, connection: GrpcConnection, data: bytes) -> None:
        for at in range(0, len(data), READ_BYTES):
            piece = data[at : at + READ_BYTES]
            connection.get_buffer(-1)[: len(piece)] = piece
            connection.buffer_updated(len(piece))


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


def opened(stream: int = 1) -> bytes:
    return frame(h.HEADERS, h.END_HEADERS, stream, CALL)


def message(data: bytes) -> bytes:
    return b"\0" + len(data).to_bytes(4, "big") + data


def data(stream: int, payload: bytes) -> bytes:
    size = h.MAX_FRAME_BYTES
    return b"".join(frame(h.DATA, 0, stream, payload[at : at + size]) for at in range(0, len(payload), size))


async def turns(number: int = 1) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No slice ends by the clock, however busy this computer is."""
    monkeypatch.setattr(grpc_server, "SLICE_S", 3600.0)
    monkeypatch.setattr(grpc_server, "TURN_S", 3600.0)


@pytest.fixture
def no_time(monkeypatch: pytest.MonkeyPatch, all_the_time: None) -> None:
    """Each slice ends at the first look at the clock, each turn with the first connection."""
    monkeypatch.setattr(grpc_server, "SLICE_S", 0.0)
    monkeypatch.setattr(grpc_server, "TURN_S", 0.0)


@pytest.mark.usefixtures("no_time")
def test_what_comes_at_once_is_dealt_with_bit_by_bit_and_others_have_their_turns() -> None:
    async def test() -> None:
        world = World()
        greedy, its = world.connect()
        modest, _ = world.connect()
        world.say(greedy, opened() + data(1, message(b"x")) * 200)
        assert world.heard < WORK_AT_ONCE and not its.reads, "a slice, and no more is read"
        world.say(modest, opened() + data(1, message(b"y")))
        assert [each.heard for each in world.calls][1] == [b"y"], "at once, even with a request waiting"
        before = world.heard
        await turns()
        assert 0 < world.heard - before <= WORK_AT_ONCE
        await turns(200)
        assert world.heard == 201 and its.reads and not greedy.http2.waiting

    run(test)


@pytest.mark.usefixtures("no_time")
def test_connections_that_wait_have_their_turns_one_after_the_other() -> None:
    async def test() -> None:
        world = World()
        peers = [world.connect()[0] for _ in range(3)]
        for peer in peers:
            world.say(peer, opened() + data(1, message(b"x")) * 100)
        await turns(9)
        counts = [len(each.heard) for each in world.calls]
        assert max(counts) - min(counts) <= WORK_AT_ONCE and min(counts) > 2 * WORK_AT_ONCE

    run(test)


@pytest.mark.usefixtures("no_time")
def test_a_frame_full_of_messages_is_no_way_around_that() -> None:
    async def test() -> None:
        world = World()
        peer, _ = world.connect()
        world.say(peer, opened() + frame(h.DATA, 0, 1, message(b"") * 3_000))
        assert world.heard <= 4 * grpc_server.MESSAGES_AT_ONCE
        await turns(200)
        assert world.heard == 3_000

    run(test)


def test_after_a_full_read_others_come_first() -> None:
    async def test() -> None:
        world = World()
        peer, transport = world.connect()
        world.say(peer, opened())
        world.say(peer, data(1, message(bytes(READ_BYTES)))[:READ_BYTES])
        assert not transport.reads, "the socket may have more, and a loop that reads on would not come to others"
        await turns()
        assert transport.reads

    run(test)


@pytest.mark.usefixtures("no_time")
def test_a_long_answer_is_said_bit_by_bit_and_in_order() -> None:
    async def test() -> None:
        world = World()
        peer, transport = world.connect()
        more = frame(h.WINDOW_UPDATE, 0, 0, word(1 << 24)) + frame(h.SETTINGS, 0, 0, setting(4, 1 << 24))
        world.say(peer, more + opened())
        await turns(3)
        world.say(peer, data(1, message(b"much") + message(b"next")))
        assert len(transport.said) < 10_000 and world.calls[0].heard == [b"much"], "what comes behind it waits"
        await turns(60)
        said = b"".join(payload for kind, _, _, payload in frames(transport.said) if kind == h.DATA)
        assert said == b"".join(message(b"%d" % number * 1000) for number in range(50))
        assert world.calls[0].heard == [b"much", b"next"]

    run(test)


def test_of_more_connections_the_one_that_is_silent_for_longest_is_cut_off() -> None:
    async def test() -> None:
        world = World(most_connections=3)
        first, transport = world.connect()
        world.say(first, opened())
        second, its = world.connect()
        third, thirds = world.connect()
        first.heard_s, second.heard_s, third.heard_s = 0.0, 1.0, 2.0
        fourth, _ = world.connect()
        assert its.gone and not transport.gone and not thirds.gone, "a call is under way on the first"
        for peer in (third, fourth):
            world.say(peer, opened())
        _, fifths = world.connect()
        assert fifths.gone and len(world.door.connections) == 3
        assert world.refusals == ["connections", "connections"]

    run(test)


def test_streams_of_all_connections_are_bounded_and_one_cannot_have_them_all() -> None:
    async def test() -> None:
        world = World(most_streams=4)
        said = b""
        for _ in range(3):
            peer, transport = world.connect()
            world.say(peer, b"".join(opened(2 * number + 1) for number in range(5)))
            said += transport.said
        refused = [payload for kind, _, _, payload in frames(said) if kind == h.RST_STREAM]
        assert refused == [word(h.REFUSED_STREAM)] * 7 and world.door.calls == 8
        assert world.refusals == ["streams"] * 7
        for connection in list(world.door.connections):
            connection.connection_lost(None)
        assert not world.door.calls and all(each.over for each in world.calls)

    run(test)


def test_who_holds_most_of_what_may_be_held_is_refused_and_short_ones_go_on() -> None:
    async def test() -> None:
        world = World(most_message_bytes=40_000, most_held_bytes=80_000)
        peer, transport = world.connect()
        world.say(peer, opened(1) + data(1, message(bytes(36_000))[:-1]))
        world.say(peer, opened(3) + data(3, message(bytes(900))[:-1]))
        world.say(peer, opened(5) + data(5, message(bytes(35_000))[:-1]))
        assert not world.refusals
        world.say(peer, opened(7) + data(7, message(bytes(20_000))[:-1]))
        assert world.refusals == ["bytes"] and world.calls[0].over
        assert [each.over for each in world.calls] == [True, False, False, False]
        world.say(peer, data(3, b"\0"))
        assert len(world.calls[1].heard[0]) == 900
        assert b"grpc-status\x018" in transport.said
        for stream in (3, 5, 7):
            world.say(peer, frame(h.RST_STREAM, 0, stream, word(h.CANCEL)))
        assert not world.door._held and not world.door._held_bytes

    run(test)


def test_answers_that_wait_for_windows_count_as_held() -> None:
    async def test() -> None:
        world = World(most_message_bytes=10_000, most_held_bytes=120_000)
        peer, transport = world.connect()
        world.say(peer, frame(h.SETTINGS, 0, 0, setting(h.SET_INITIAL_WINDOW, 0)))
        for stream in (1, 3):
            world.say(peer, opened(stream) + data(stream, message(b"much")))
            await turns(50)
            world.say(peer, data(stream, message(b"?")))
        assert world.refusals == ["bytes"]
        assert [payload for kind, _, _, payload in frames(transport.said) if kind == h.RST_STREAM] == [
            word(h.ENHANCE_YOUR_CALM)
        ]

    run(test)


def test_of_those_who_take_no_answers_the_first_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(grpc_server, "MAX_BLOCKED", 2)
        world = World()
        peers = [world.connect() for _ in range(4)]
        for connection, transport in peers[:3]:
            connection.pause_writing()
            assert not transport.reads
        assert [transport.gone for _, transport in peers] == [True, False, False, False]
        peers[1][0].resume_writing()
        assert peers[1][1].reads
        peers[3][0].pause_writing()
        assert world.refusals == ["unread-answers"] and not peers[3][1].gone

    run(test)


def test_a_preface_without_settings_is_none() -> None:
    async def test() -> None:
        world = World(preface_s=0.01)
        connection, transport = world.door.connect(), Transport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        world.say(connection, h.PREFACE)
        await asyncio.sleep(0.05)
        assert transport.gone and world.refusals == ["preface"]

    run(test)
