"""Routers that exchange over TCP: real sockets, strangers, slow and dead peers."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest
from tests.conductor.sharing.replica_fleets import Replica
from tests.router.replica_tools import until

from skymemory.conductor.request import Decision
from skymemory.conductor.sharing.messages import MAX_MESSAGE_BYTES, VERSION
from skymemory.errors import SkyMemoryError
from skymemory.keys import first_ring
from skymemory.router import peers as peers_module
from skymemory.router.peer_frames import MAGIC, FrameCodec, greeting, read_greeting
from skymemory.router.peers import PeerExchange
from skymemory.router.settings import settings_from

KIND = "bytes-64"


@asynccontextmanager
async def exchanging(
    replica: Replica, *ports: int, kind: str = KIND, listen: str = "127.0.0.1:0", **how: Any
) -> AsyncIterator[PeerExchange]:
    peers = [f"127.0.0.1:{port}" for port in ports]
    exchange = PeerExchange(replica.state, kind, listen, peers, every_s=0.02, **how)
    await exchange.start()
    try:
        yield exchange
    finally:
        await exchange.close()


def run(work: Any) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def test_what_one_sends_the_others_count() -> None:
    async def work() -> None:
        one, other, third = Replica.of(1), Replica.of(2), Replica.of(3)
        async with (
            exchanging(one) as first,
            exchanging(other, first.port) as second,
            exchanging(third, first.port, second.port),
        ):
            decision = third.send(1, asyncio.get_running_loop().time(), ("b",))
            await until(lambda: all(replica.elsewhere()["b"][0] == 1 for replica in (one, other)))
            other.send(2, 0.0, ("c",))
            await until(lambda: one.elsewhere()["c"][0] == 1)
            assert third.elsewhere()["c"][0] == 0, "it does not listen to them"
            third.picker.succeeded(decision, 0.0)
            third.picker.on_request_end(decision, 0.0)
            await until(lambda: all(replica.elsewhere()["b"][0] == 0 for replica in (one, other)))
        assert one.state.heard() == set(), "who stops says so"

    run(work())


def test_own_addresses_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a name that stands for all replicas."""
    ports: list[int] = []

    async def work() -> None:
        one, other = Replica.of(1), Replica.of(2)
        async with exchanging(one) as first, exchanging(other) as second:
            ports[:] = [first.port, second.port]

            async def all_of_them() -> set[tuple[str, int]]:
                return {("127.0.0.1", port) for port in ports}

            for exchange in (first, second):
                monkeypatch.setattr(exchange, "_addresses", all_of_them)
            monkeypatch.setattr(peers_module, "RESOLVE_S", 0.05)
            for exchange in (first, second):
                await exchange.close()
            async with exchanging(one, listen=f"127.0.0.1:{ports[0]}") as first:
                monkeypatch.setattr(first, "_addresses", all_of_them)
                async with exchanging(other, listen=f"127.0.0.1:{ports[1]}") as second:
                    monkeypatch.setattr(second, "_addresses", all_of_them)
                    one.send(1, 0.0)
                    other.send(2, 0.0)
                    await until(lambda: len(one.state.elsewhere) == len(other.state.elsewhere) == 1)
                    await asyncio.sleep(0.2)
                    assert (first.connected, second.connected) == (1, 1)
                    assert one.state.heard() == {"02020202"} and other.state.heard() == {"01010101"}

    run(work())


def test_a_name_stands_for_its_addresses_and_keeps_them_while_it_cannot_be_resolved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> None:
        exchange = PeerExchange(Replica.of(1).state, KIND, "", ["localhost:7", "no-such-name.invalid:8"])
        found = await exchange._addresses()
        assert ("127.0.0.1", 7) in found and {port for _, port in found} == {7}

        async def fails(*_: Any, **__: Any) -> Any:
            raise OSError("no name server")

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", fails)
        assert await exchange._addresses() == found

    run(work())


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        MAGIC + b"\xff\xff\xff\xff",
        MAGIC + b"\x04\x00\x00\x00abcd",
        MAGIC + b"\x00\x00\x00\x00",
        b"*1\r\n$4\r\nPING\r\n",
    ],
)
def test_strangers_protocols_end_the_connection(said: bytes) -> None:
    async def work() -> None:
        one, other = Replica.of(1), Replica.of(2)
        async with exchanging(one) as first:
            reader, writer = await asyncio.open_connection("127.0.0.1", first.port)
            writer.write(said)
            with pytest.raises(ConnectionError):
                while await reader.read(4096):
                    pass
                raise ConnectionResetError
            writer.close()
            assert one.state.counts.refused == 1 and "127.0.0.1" in first.refused
            async with exchanging(other, first.port):
                other.send(1, 0.0)
                await until(lambda: len(one.state.elsewhere) == 1)

    run(work())


async def greeted(port: int, kind: str = KIND) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, FrameCodec]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    hello, packed = greeting(bytes(16), kind, None)
    writer.write(packed)
    return reader, writer, FrameCodec.of(hello, await read_greeting(reader), None)


def test_invalid_messages_end_the_connection_and_change_nothing() -> None:
    async def work() -> None:
        dice, one = random.Random(3), Replica.of(1)
        good = Replica.of(0)
        good.send(1, 0.0)
        (snapshot,) = good.state.next_messages(peers_module.Cursor(), 0.0)
        stranger = Replica.of(9)
        (foreign,) = stranger.state.next_messages(peers_module.Cursor(), 0.0)
        async with exchanging(one) as first:
            frames = [(MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"), len(foreign).to_bytes(4, "little") + foreign]
            for _ in range(20):
                noise = dice.randbytes(dice.randrange(1, 60))
                frames.append(len(noise).to_bytes(4, "little") + noise)
            for frame in frames:
                reader, writer, _ = await greeted(first.port)
                writer.write(frame)
                with suppress(ConnectionError):
                    assert await asyncio.wait_for(reader.read(), 5) == b""
                writer.close()
            assert not len(one.state.elsewhere)
            _, writer, codec = await greeted(first.port)
            writer.write(codec.pack(snapshot))
            await until(lambda: len(one.state.elsewhere) == 1)
            writer.close()

    run(work())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({0: VERSION + 1}, "version"),
        ({2: "bytes-32"}, "kind 'bytes-32'"),
        ({4: 7}, "a router with keys"),
        ({1: b"short"}, "invalid hello"),
    ],
)
def test_routers_of_another_version_kind_or_key_are_refused(change: dict[int, Any], says: str) -> None:
    async def work() -> None:
        one = Replica.of(1)
        async with exchanging(one) as first:
            reader, writer = await asyncio.open_connection("127.0.0.1", first.port)
            fields = [VERSION, bytes(16), KIND, bytes(16), 0]
            for at, value in change.items():
                fields[at] = value
            packed = msgspec.msgpack.encode(fields)
            writer.write(MAGIC + len(packed).to_bytes(4, "little") + packed)
            await until(lambda: says in first.refused)
            writer.close()
            assert one.state.counts.refused == 1
            assert reader is not None

    run(work())


def test_keys_authenticate_every_message() -> None:
    async def work() -> None:
        ring, stranger = first_ring(bytes(range(32))), first_ring(bytes(32))
        rotated = ring.with_key(bytes(range(1, 33)), from_s=0.0)
        one, other, third, none = (Replica.of(number) for number in range(1, 5))
        async with (
            exchanging(one, keys=rotated) as first,
            exchanging(other, first.port, keys=rotated),
            exchanging(third, first.port, keys=stranger),
            exchanging(none, first.port),
        ):
            for replica in (other, third, none):
                replica.send(1, 0.0)
            await until(lambda: len(one.state.elsewhere) == 1)
            await until(lambda: one.state.counts.refused >= 2)
            assert one.state.heard() == {"02020202"}

    run(work())


def test_a_repeated_or_changed_frame_is_not_authentic() -> None:
    async def work() -> None:
        ring = first_ring(bytes(range(32)))
        one, _ = greeting(bytes(16), KIND, ring)
        other, _ = greeting(b"\x01" * 16, KIND, ring)
        sender = FrameCodec.of(one, other, ring)
        frames = [sender.pack(b"first"), sender.pack(b"second")]
        for sent in ([0, 0], [1], [0, 1]):
            receiver, reader = FrameCodec.of(other, one, ring), asyncio.StreamReader()
            for number in sent:
                reader.feed_data(frames[number])
            if sent == [0, 1]:
                assert [await receiver.read(reader), await receiver.read(reader)] == [b"first", b"second"]
                continue
            with pytest.raises(SkyMemoryError, match="not authentic"):
                for _ in sent:
                    await receiver.read(reader)
        # What one side sent is no message of the other side.
        reader = asyncio.StreamReader()
        reader.feed_data(frames[0])
        with pytest.raises(SkyMemoryError, match="not authentic"):
            await FrameCodec.of(one, other, ring).read(reader)

    run(work())


def test_a_peer_that_reads_nothing_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "STUCK_S", 0.5)
    monkeypatch.setattr(peers_module, "MAX_BACKLOG_BYTES", 100_000)
    monkeypatch.setattr("skymemory.conductor.sharing.own_requests.MAX_CHANGES", 500)
    ended: list[bool] = []

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting(bytes(16), KIND, None)[1])
        await read_greeting(reader)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: bool(ended))
        writer.transport.abort()

    async def work() -> None:
        server = await asyncio.start_server(deaf, "127.0.0.1", 0)
        one, other = Replica.of(1), Replica.of(2)
        deaf_port = server.sockets[0].getsockname()[1]
        async with exchanging(other) as second, exchanging(one, deaf_port, second.port) as first:
            await until(lambda: first.connected == 2)
            link = first._links["127.0.0.1", deaf_port]
            longest, aborted, waiting = 0, False, deque[Decision]()
            for number in range(600):
                for _ in range(20):
                    waiting.append(one.send(number, 0.0, blocks=512))
                    if len(waiting) > 200:
                        one.picker.failed(waiting.popleft(), 0.0)
                await asyncio.sleep(0.005)
                if link._connection is None:
                    aborted = True
                    break
                longest = max(longest, link._connection[1].transport.get_write_buffer_size())
            assert aborted, "the connection is given up"
            assert longest < 100_000 + 2_000_000, "one message more than the limit"
            await until(lambda: len(other.state.elsewhere) == len(waiting))
            ended.append(True)
        server.close()

    run(work())


def test_a_restarted_peer_is_found_again() -> None:
    async def work() -> None:
        one, other, again = Replica.of(1), Replica.of(2), Replica.of(3)
        one.send(1, 0.0, ("a",))
        async with exchanging(other) as second:
            port = second.port
            async with exchanging(one, port):
                await until(lambda: len(other.state.elsewhere) == 1)
                await second.close()
                async with exchanging(again, listen=f"127.0.0.1:{port}"):
                    await until(lambda: len(again.state.elsewhere) == 1)

    run(work())


def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "MAX_ACCEPTED", 3)
    monkeypatch.setattr(peers_module, "CONNECT_S", 1.0)

    async def work() -> None:
        one, other = Replica.of(1), Replica.of(2)
        async with exchanging(one) as first:
            idle = [await asyncio.open_connection("127.0.0.1", first.port) for _ in range(8)]
            await asyncio.sleep(0.1)
            assert len(first._accepted) == 3
            async with exchanging(other, first.port):
                other.send(1, 0.0)  # once those that say nothing are given up
                await until(lambda: len(one.state.elsewhere) == 1)
            for _, writer in idle:
                writer.close()

    run(work())


def test_a_taken_port_is_said() -> None:
    async def work() -> None:
        async with exchanging(Replica.of(1)) as first:
            with pytest.raises(SkyMemoryError, match="replicas: cannot listen at"):
                async with exchanging(Replica.of(2), listen=f"127.0.0.1:{first.port}"):
                    pass

    run(work())


def test_nothing_listens_unless_it_is_set() -> None:
    settings = settings_from({})
    assert not settings.replicas.are_set and settings.replicas.listen == ""
    assert settings_from({"replicas": {"peers": ["a:1"]}}).replicas.are_set
