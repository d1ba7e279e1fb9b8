"""Replicas that share through a real Redis: they agree, go on without it, and find each other again."""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.conductor.sharing.replica_fleets import Replica
from tests.router.replica_tools import KIND, an_index, chain, until
from tests.store.real_redis import RedisServer

from skymemory.conductor.prefix_index.replicated import SharedPrefixIndex
from skymemory.conductor.sharing.replica_state import ReplicaState
from skymemory.errors import InvalidInput
from skymemory.keys import KeyRing, first_ring
from skymemory.router.replicas import RedisReplicas, StreamSettings
from skymemory.store.redis import RedisLink, pack

STREAM = f"skymemory:replicas:{KIND}".encode()


@pytest.fixture
def server() -> Iterator[RedisServer]:
    directory = Path(tempfile.mkdtemp())  # a socket's path must be short
    server = RedisServer(directory)
    yield server
    server.stop()
    shutil.rmtree(directory)


@asynccontextmanager
async def sharing(
    index: SharedPrefixIndex,
    server: RedisServer,
    kind: str = KIND,
    keys: KeyRing | None = None,
    state: ReplicaState | None = None,
    **how: Any,
) -> AsyncIterator[RedisReplicas]:
    settings = StreamSettings(**{"interval_s": 0.02, "timeout_s": 0.5} | how)
    replicas = RedisReplicas(index, server.url, kind, keys=keys, settings=settings, state=state)
    await replicas.start()
    try:
        yield replicas
    finally:
        await replicas.close()


def ask(server: RedisServer, *command: bytes) -> object:
    link = RedisLink(server.url, 2.0)
    (reply,) = link.ask([pack(*command)], 1)
    link.close()
    return reply


def test_what_one_learns_all_match(server: RedisServer) -> None:
    async def run() -> None:
        one, other, late = an_index("a", "b"), an_index("b", "a"), an_index("a")
        one.learn(1, chain(1))
        async with sharing(one, server) as first, sharing(other, server) as second:
            await until(lambda: not first.status.degraded and not second.status.degraded)
            one.learn(0, chain(2))
            took_s = await until(lambda: other.match(chain(2), [1]) == [20])
            assert took_s < 5
            assert other.match(chain(1), [0, 1]) == [20, 0], "what it knew before it began to share"
            one.correct(0, chain(2), 5)
            await until(lambda: other.match(chain(2), [1]) == [5])
            other.learn(1, chain(3, 700))
            await until(lambda: one.match(chain(3, 700), [0]) == [700])
            async with sharing(late, server):
                await until(lambda: late.match(chain(2), [0]) == [5] and late.match(chain(3, 700), [0]) == [700])
            await until(lambda: (first.status.sent, second.status.sent) == (3, 1))
            await until(lambda: (first.status.received, second.status.received) == (1, 3))

    asyncio.run(asyncio.wait_for(run(), 120))


def test_a_killed_server_is_reported_and_found_again(server: RedisServer) -> None:
    async def run() -> None:
        one, other, late = an_index("a"), an_index("a"), an_index("a")
        async with sharing(one, server) as first, sharing(other, server) as second:
            one.learn(0, chain(1))
            await until(lambda: other.match(chain(1), [0]) == [20])
            await until(lambda: not first.status.degraded and not second.status.degraded)
            server.stop()
            await until(lambda: bool(first.status.degraded and second.status.degraded))
            assert "Redis does not answer since" in first.status.degraded
            one.learn(0, chain(2))
            other.learn(0, chain(3))
            assert one.match(chain(2), [0]) == [20] and other.match(chain(2), [0]) == [0], "each goes on by itself"
            (Path(server.socket)).unlink(missing_ok=True)
            await asyncio.to_thread(server.start)
            await until(lambda: other.match(chain(2), [0]) == [20] and one.match(chain(3), [0]) == [20], 15)
            await until(lambda: not first.status.degraded and not second.status.degraded)
            # The server came back empty; who joins now hears what the others still keep.
            async with sharing(late, server):
                await until(lambda: [late.match(chain(n), [0]) for n in (1, 2, 3)] == [[20]] * 3)

    asyncio.run(asyncio.wait_for(run(), 120))


def test_a_server_that_is_emptied_is_sent_everything_again(server: RedisServer) -> None:
    async def run() -> None:
        one, other, late = an_index("a"), an_index("a"), an_index("a")
        async with sharing(one, server), sharing(other, server):
            one.learn(0, chain(1))
            await until(lambda: other.match(chain(1), [0]) == [20])
            ask(server, b"FLUSHALL")
            other.learn(0, chain(2))
            async with sharing(late, server):
                await until(lambda: [late.match(chain(n), [0]) for n in (1, 2)] == [[20]] * 2)

    asyncio.run(asyncio.wait_for(run(), 120))


def test_a_broken_connection_goes_on_where_it_stopped(server: RedisServer) -> None:
    async def run() -> None:
        one, other = an_index("a"), an_index("a")
        # Patient: after a time-out, whose outcome is unknown, a delta may be published twice.
        async with sharing(one, server, timeout_s=60) as first, sharing(other, server, timeout_s=60) as second:
            one.learn(0, chain(1))
            await until(lambda: other.match(chain(1), [0]) == [20])
            closed = 0
            while closed < 6:
                now = ask(server, b"CLIENT", b"KILL", b"TYPE", b"normal")
                assert isinstance(now, int)
                closed += now
                await asyncio.sleep(0.03)
            one.learn(0, chain(2))
            await until(lambda: other.match(chain(2), [0]) == [20])
            # Each counts when it has done all that follows: the prefix is found before.
            await until(lambda: first.status.sent >= 2 and second.status.received >= 2)
            assert (first.status.sent, second.status.received) == (2, 2), "nothing is published twice"

    asyncio.run(asyncio.wait_for(run(), 120))


def test_a_restarted_replica_hears_what_it_published_before(server: RedisServer) -> None:
    async def run() -> None:
        before, after = an_index("a", "b"), an_index("b", "a")
        async with sharing(before, server) as replicas:
            before.learn(0, chain(1))
            await until(lambda: replicas.status.sent == 1)
        async with sharing(after, server):
            await until(lambda: after.match(chain(1), [1]) == [20])
            assert after.log_end == 0, "what was heard is not passed on"

    asyncio.run(asyncio.wait_for(run(), 120))


def test_replicas_of_other_blocks_do_not_hear_each_other(server: RedisServer) -> None:
    async def run() -> None:
        ring = first_ring(bytes(range(32)))
        one, other = an_index("a"), an_index("a")
        async with (
            sharing(one, server, keys=ring) as first,
            sharing(other, server, keys=ring, kind="characters 64") as second,
        ):
            one.learn(0, chain(1))
            other.learn(0, chain(2))
            await until(lambda: (first.status.sent, second.status.sent) == (1, 1))
            # Nor does an entry deceive them that is copied from one stream to the other: its MAC names the stream.
            reply = ask(server, b"XRANGE", STREAM, b"-", b"+")
            assert isinstance(reply, list) and isinstance(reply[0], list) and isinstance(reply[0][1], list)
            ask(server, b"XADD", b"skymemory:replicas:characters 64", b"*", *reply[0][1])
            await until(lambda: second.status.refused == 1)
            assert (first.status.received, second.status.received) == (0, 0)

    asyncio.run(asyncio.wait_for(run(), 120))


@pytest.mark.slow
def test_a_server_that_hangs_delays_no_request(server: RedisServer) -> None:
    async def run() -> None:
        one = an_index("a")
        async with sharing(one, server, timeout_s=1.5) as replicas:
            await until(lambda: not replicas.status.degraded)
            server.process.send_signal(signal.SIGSTOP)
            longest_s = 0.0
            try:
                ends_s = time.monotonic() + 2.5
                while time.monotonic() < ends_s:
                    started_s = time.perf_counter()
                    one.learn(0, chain(2))
                    await asyncio.sleep(0)
                    longest_s = max(longest_s, time.perf_counter() - started_s)
                    await asyncio.sleep(0.005)
                assert "Timeout" in replicas.status.degraded
            finally:
                server.process.send_signal(signal.SIGCONT)
            assert longest_s < 1.2
            await until(lambda: not replicas.status.degraded)

    asyncio.run(asyncio.wait_for(run(), 120))


def test_too_much_to_keep_is_counted_as_lost(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skymemory.conductor.prefix_index.replicated.MAX_DELTAS", 4)

    async def run() -> None:
        one, other = an_index("a"), an_index("a")
        for number in range(10):
            one.learn(0, chain(number))
        async with sharing(one, server) as first, sharing(other, server):
            await until(lambda: other.match(chain(9), [0]) == [20])
            await until(lambda: (first.status.lost, first.status.sent) == (6, 4))
            assert other.match(chain(5), [0]) == [0] and other.match(chain(6), [0]) == [20]

    asyncio.run(asyncio.wait_for(run(), 120))


def test_the_stream_is_bounded_and_expires(server: RedisServer) -> None:
    async def run() -> None:
        one = an_index("a", blocks_per_server=100_000)
        async with sharing(one, server, entries=10, ttl_s=77) as replicas:
            for number in range(400):
                one.learn(0, chain(number, 3000))
            await until(lambda: replicas.status.sent == 400)
        length, ttl_s = ask(server, b"XLEN", STREAM), ask(server, b"TTL", STREAM)
        assert isinstance(length, int) and length < 120, "redis trims whole nodes of a hundred entries"
        assert isinstance(ttl_s, int) and 60 < ttl_s <= 77

    asyncio.run(asyncio.wait_for(run(), 120))


def test_entries_of_strangers_are_refused(server: RedisServer) -> None:
    async def run() -> None:
        ring, stranger = first_ring(bytes(range(32))), first_ring(bytes(32))
        rotated: KeyRing = ring.with_key(bytes(range(1, 33)), from_s=0.0)
        one, other, third, none = (an_index("a") for _ in range(4))
        async with (
            sharing(one, server, keys=ring),
            sharing(other, server, keys=rotated) as second,
            sharing(third, server, keys=stranger),
            sharing(none, server),
        ):
            one.learn(0, chain(1))
            third.learn(0, chain(3))
            none.learn(0, chain(4))
            await until(lambda: other.match(chain(1), [0]) == [20] and second.status.refused == 2)
            assert [other.match(chain(n), [0]) for n in (3, 4)] == [[0], [0]]
            for number, key in ((3, b""), (4, b"9" * 5000)):  # longer than int() reads
                ask(server, b"XADD", STREAM, b"*", b"from", b"x", b"key", key, b"deltas", b"\x09nonsense")
                await until(lambda: second.status.refused == number)  # noqa: B023
            one.learn(0, chain(5))
            await until(lambda: other.match(chain(5), [0]) == [20])

    asyncio.run(asyncio.wait_for(run(), 120))


def test_an_address_that_is_none() -> None:
    with pytest.raises(InvalidInput, match="redis://HOST"):
        RedisReplicas(an_index("a"), "http://there", KIND)


def test_requests_are_shared_and_old_messages_skipped(server: RedisServer) -> None:
    async def run() -> None:
        ring = first_ring(bytes(range(32)))
        one, other, late = Replica.of(1), Replica.of(2), Replica.of(3)

        def exchange(replica: Replica) -> AbstractAsyncContextManager[RedisReplicas]:
            return sharing(replica.picker.scorer.index, server, keys=ring, state=replica.state)  # type: ignore[attr-defined]

        async with exchange(one), exchange(other) as second:
            decision = one.send(1, 0.0, ("b",))
            await until(lambda: other.elsewhere()["b"][:2] == (1, 1))
            one.picker.succeeded(decision, 0.1)
            await until(lambda: other.elsewhere()["b"][:2] == (1, 0))
            assert other.state.counts.refused == 0
            for number in range(2, 22):
                one.picker.failed(one.send(number, 0.0), 0.0)
                await until(lambda: one.state.counts.sent > number)  # noqa: B023
            taken = late.state.counts.received
            async with exchange(late):
                await until(lambda: late.elsewhere()["b"][:2] == (1, 0))
                # Signs of life, and the snapshots asked for: nothing that was sent before.
                assert late.state.counts.received - taken <= 6
                ask(server, b"XADD", STREAM + b":requests", b"*", b"from", b"x", b"deltas", b"\x09nonsense")
                await until(lambda: second.status.refused == 1)
                one.picker.on_request_end(decision, 0.2)
                await until(lambda: other.elsewhere()["b"][0] == late.elsewhere()["b"][0] == 0)
            # A router that stops says so.
            await until(lambda: one.state.heard() == {"02020202"} and other.state.heard() == {"01010101"})

    asyncio.run(asyncio.wait_for(run(), 120))
