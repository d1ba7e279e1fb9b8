"""Replicas that tell each other, over real sockets: agreement, gaps, restarts, strangers."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.router.replica_tools import KIND, an_index, chain, until

from skymemory.conductor.prefix_index.shared import SharedPrefixIndex
from skymemory.errors import InvalidInput
from skymemory.keys import first_ring
from skymemory.router import gossip
from skymemory.router.gossip import GossipReplicas

RING = first_ring(bytes(range(32)))
HERE = "127.0.0.1:0"


@asynccontextmanager
async def gossiping(index: SharedPrefixIndex, *peers: str, **how: object) -> AsyncIterator[GossipReplicas]:
    how = {"keys": RING, "interval_s": 0.01, "timeout_s": 2.0, "kind": KIND, "listen": HERE} | how
    replicas = GossipReplicas(index, lambda: range(3), peers=peers, **how)  # type: ignore[arg-type]
    await replicas.start()
    try:
        yield replicas
    finally:
        await replicas.close()


def address(replicas: GossipReplicas) -> str:
    return f"127.0.0.1:{replicas.port}"


def test_three_agree_and_nothing_goes_in_circles() -> None:
    async def run() -> None:
        indices = [an_index("a", "b", "c"), an_index("c", "b", "a"), an_index("b", "a")]
        indices[0].learn(0, chain(1))
        async with gossiping(indices[0]) as one, gossiping(indices[1]) as two, gossiping(indices[2]) as three:
            everybody = (one, two, three)
            for replicas in everybody:
                for other in everybody:
                    replicas.add_peer(address(other))
            await until(lambda: not any(replicas.status().degraded for replicas in everybody))
            indices[1].learn(1, chain(2, 700))
            indices[2].learn(0, chain(3))
            a, b = (0, 2, 1), (1, 1, 0)  # slots of the servers of these names
            await until(lambda: [i.match(chain(1), [slot]) for i, slot in zip(indices, a, strict=True)] == [[20]] * 3)
            await until(lambda: [i.match(chain(2, 700), [s]) for i, s in zip(indices, b, strict=True)] == [[700]] * 3)
            indices[0].correct(1, chain(3), 4)
            await until(lambda: indices[2].match(chain(3), [0]) == [4] == indices[1].match(chain(3), [1]))
            await asyncio.sleep(0.1)
            assert [index.told for index in indices] == [2, 1, 1]
            assert all(peer.full_states == 1 for r in everybody for peer in r.peers if not peer.ourselves)
            assert [sum(peer.ourselves for peer in r.peers) for r in everybody] == [1, 1, 1]

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_gap_is_filled_by_the_whole_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skymemory.conductor.prefix_index.shared.MAX_TOLD", 4)
    monkeypatch.setattr(gossip, "_FRAME_BYTES", 100)

    async def run() -> None:
        one, other = an_index("a"), an_index("a")
        async with gossiping(one) as teller, gossiping(other, address(teller)) as listener:
            (peer,) = listener.peers
            await until(lambda: peer.full_states == 1)
            one.learn(0, chain(1))
            await until(lambda: other.match(chain(1), [0]) == [20])
            assert (peer.number, peer.full_states) == (1, 1), "what follows is told by itself"
            for number in range(2, 12):  # more than is kept, before anybody could ask
                one.learn(0, chain(number))
            await until(lambda: peer.full_states == 2)
            assert [other.match(chain(number), [0]) for number in range(1, 12)] == [[20]] * 11
            assert peer.number == one.told == 11

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_broken_connection_goes_on_where_it_stopped() -> None:
    async def run() -> None:
        one, other = an_index("a"), an_index("a")
        async with gossiping(one) as teller:
            ears: list[asyncio.StreamWriter] = []

            async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                there_reader, there_writer = await asyncio.open_connection("127.0.0.1", teller.port)
                ears.extend((writer, there_writer))

                async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
                    while data := await source.read(4096):
                        target.write(data)

                await asyncio.gather(copy(reader, there_writer), copy(there_reader, writer), return_exceptions=True)

            server = await asyncio.start_server(relay, "127.0.0.1", 0)
            between = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with gossiping(other, between) as listener:
                (peer,) = listener.peers
                await until(lambda: peer.full_states == 1)
                for ear in ears:
                    ear.close()
                await until(lambda: bool(listener.status().degraded))
                one.learn(0, chain(1))
                await until(lambda: other.match(chain(1), [0]) == [20] and not listener.status().degraded)
                assert peer.full_states == 1
            server.close()

    asyncio.run(asyncio.wait_for(run(), 30))


CHILD = """
import asyncio, sys
from tests.router.replica_tools import KIND, an_index, chain
from skymemory.keys import first_ring
from skymemory.router.gossip import GossipReplicas
async def run():
    index = an_index("a", "b")
    index.learn(0, chain(int(sys.argv[1])))
    replicas = GossipReplicas(index, lambda: range(2), f"127.0.0.1:{sys.argv[2]}", sys.argv[3:], KIND,
                              keys=first_ring(bytes(range(32))), interval_s=0.01)
    await replicas.start()
    print(replicas.port, flush=True)
    while True:
        for number in range(100):
            if index.match(chain(number), [0]) == [20] and index.match(chain(number), [1]) == [0]:
                index.learn(1, chain(number))
        await asyncio.sleep(0.02)
asyncio.run(run())
"""


def _child(number: int, port: int, *peers: str) -> tuple[subprocess.Popen[str], int]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([".", *sys.path])}
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(number), str(port), *peers],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    return child, int(child.stdout.readline())


def test_two_processes_one_killed_and_started_again() -> None:
    async def run() -> None:
        index = an_index("a", "b")
        children = []
        try:
            async with gossiping(index) as ours:
                child, port = await asyncio.to_thread(_child, 1, 0, address(ours))
                children.append(child)
                ours.add_peer(f"127.0.0.1:{port}")
                await until(lambda: index.match(chain(1), [0, 1]) == [20, 20], 20)
                index.learn(0, chain(2))  # told to the child, which learns it for its other server and tells us that
                await until(lambda: index.match(chain(2), [1]) == [20])
                child.send_signal(signal.SIGKILL)
                await until(lambda: bool(ours.status().degraded))
                assert index.match(chain(1), [0]) == [20] and f"127.0.0.1:{port}: " in ours.status().degraded
                child, same = await asyncio.to_thread(_child, 3, port, address(ours))
                children.append(child)
                assert same == port
                await until(lambda: index.match(chain(3), [0, 1]) == [20, 20] and not ours.status().degraded, 20)
                await until(lambda: ours.peers[0].full_states == 2)  # another life, another state
        finally:
            for child in children:
                child.kill()
                child.wait()
                if child.stdout is not None:
                    child.stdout.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_strangers_and_other_blocks_are_refused_and_told_of() -> None:
    async def run() -> None:
        index = an_index("a")
        index.learn(0, chain(1))
        async with gossiping(index) as ours:
            for how, why in (
                ({"keys": first_ring(bytes(32))}, "IncompleteRead|bytes read|know the key"),
                ({"keys": None}, "bytes read|know the key"),
                ({"kind": "characters 64"}, "its blocks are 'tokens 16', ours 'characters 64'"),
            ):
                stranger = an_index("a")
                refused = ours.status().refused
                async with gossiping(stranger, address(ours), **how) as theirs:
                    await until(lambda: ours.status().refused > refused)  # noqa: B023
                    await until(lambda: "reached" not in theirs.status().degraded)
                    assert re.search(why, theirs.status().degraded), theirs.status()
                    assert stranger.match(chain(1), [0]) == [0]

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_changed_frame_ends_the_connection() -> None:
    async def run() -> None:
        index, theirs = an_index("a"), an_index("a")
        async with gossiping(index) as ours:

            async def spoil(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                there_reader, there_writer = await asyncio.open_connection("127.0.0.1", ours.port)

                async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter, change: bool) -> None:
                    while data := await source.read(4096):
                        target.write(
                            bytes([*data[:-1], data[-1] ^ 1]) if change and b"a" in data and len(data) > 200 else data
                        )

                await asyncio.gather(
                    copy(reader, there_writer, False), copy(there_reader, writer, True), return_exceptions=True
                )

            server = await asyncio.start_server(spoil, "127.0.0.1", 0)
            async with gossiping(theirs, f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as listener:
                await until(lambda: not listener.status().degraded)
                index.learn(0, chain(1, 100))
                await until(lambda: "damaged or forged" in listener.status().degraded)
                assert theirs.match(chain(1, 100), [0]) == [0] and listener.status().refused >= 1
            server.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_garbage_on_the_port_is_refused() -> None:
    async def run() -> None:
        async with gossiping(an_index("a"), timeout_s=0.5) as ours:
            for garbage in (b"GET / HTTP/1.1\r\n\r\n" * 9, os.urandom(500), b""):
                reader, writer = await asyncio.open_connection("127.0.0.1", ours.port)
                writer.write(garbage)
                assert len(await asyncio.wait_for(reader.read(), 5)) == 40, "the greeting, and then nothing"
                writer.close()
            assert ours.status().refused == 2

    asyncio.run(asyncio.wait_for(run(), 30))


def test_addresses_that_cannot_be_used() -> None:
    index = an_index("a")
    for listen, peers, why in (
        ("10.1.2.3:5", (), "beyond this computer: give all of them a file of keys"),
        (HERE, ("router-2:7000",), "beyond this computer"),
        ("nowhere", (), "expected HOST:PORT"),
        (HERE, ("a:b",), "expected HOST:PORT"),
    ):
        with pytest.raises(InvalidInput, match=why):
            GossipReplicas(index, list, listen, peers, KIND)

    async def run() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            replicas = GossipReplicas(index, list, f"127.0.0.1:{taken.getsockname()[1]}", [], KIND)
            with pytest.raises(InvalidInput, match="cannot be awaited"):
                await replicas.start()

    asyncio.run(asyncio.wait_for(run(), 10))
