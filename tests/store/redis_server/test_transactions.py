"""MULTI, EXEC, DISCARD and WATCH: all or nothing of what is queued, and no other writer in between."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import redis
from tests.store.redis_server.daemons import Elsewhere, Forgetful, connected, replies_to, request, serving, until

from skymemory.store.base import Buffer
from skymemory.store.memory import MemoryStore
from skymemory.store.named_values import NamedValues
from skymemory.store.redis import RedisStore
from skymemory.store.redis_server.daemon import ServerLimits

MIB = 1 << 20


@pytest.fixture(params=[MemoryStore, Elsewhere])
def store(request: pytest.FixtureRequest) -> MemoryStore:
    made: MemoryStore = request.param(64 * MIB)
    return made


def test_what_is_queued_is_executed_by_exec_alone(store: MemoryStore, short: Path) -> None:
    with store, serving(store, short) as (path, _, _), connected(path) as sock:
        sock.sendall(request(b"MULTI") + request(b"SET", b"a", b"1") * 2 + request(b"GET", b"a") * 2 + b"INCR a\r\n")
        said = sock.makefile("rb")
        assert [said.readline() for _ in range(6)] == [b"+OK\r\n"] + [b"+QUEUED\r\n"] * 5
        assert store.stats()["entries"] == 0
        sock.sendall(request(b"EXEC") + request(b"GET", b"a"))
        expected = b"*5\r\n+OK\r\n+OK\r\n$1\r\n1\r\n$1\r\n1\r\n:2\r\n$1\r\n2\r\n"
        assert said.read(len(expected)) == expected


def test_nothing_of_a_transaction_with_an_error_is_executed(store: MemoryStore, short: Path) -> None:
    with store, serving(store, short, ServerLimits(value_bytes=MIB)) as (path, _, commands):
        large = request(b"SET", b"a", bytes(2 * MIB))
        for wrong in (request(b"LPUSH", b"a", b"1"), request(b"GET"), request(b"FLUSHDB"), b"HELLO 3\r\n", large):
            data = request(b"MULTI"), request(b"SET", b"a", b"1") + wrong, request(b"EXEC") + request(b"GET", b"a")
            lines = replies_to(path, *data).splitlines()
            assert lines[:2] == [b"+OK", b"+QUEUED"] and lines[2].startswith(b"-ERR"), wrong[:50]
            assert lines[3:] == [b"-EXECABORT Transaction discarded because of previous errors.", b"$-1"]
        until(lambda: commands.budget.used_bytes == 0)


def test_a_command_that_fails_in_exec_costs_the_others_nothing(store: MemoryStore, short: Path) -> None:
    """As in Redis: there is no rolling back."""
    with store, serving(store, short) as (path, _, _):
        pipe = redis.Redis(unix_socket_path=path).pipeline().set("a", "x").incr("a").set("b", "y")
        first, second, third = pipe.execute(raise_on_error=False)
        assert first and isinstance(second, redis.ResponseError) and third
        assert NamedValues(store).get("b") == b"y"


@pytest.mark.parametrize("end", [request(b"DISCARD"), b""], ids=["discard", "the connection ends"])
def test_what_is_not_executed_leaves_nothing(store: MemoryStore, short: Path, end: bytes) -> None:
    with store, serving(store, short) as (path, _, commands):
        replies_to(path, request(b"WATCH", b"a"), request(b"MULTI") + request(b"SET", b"a", bytes(MIB)) * 3 + end)
        until(lambda: commands.budget.used_bytes == 0 and not commands.watches._by_key)
        assert store.stats()["entries"] == 0


def test_they_are_not_nested(short: Path) -> None:
    with MemoryStore(MIB) as store, serving(store, short) as (path, _, _):
        said = replies_to(
            path, request(b"MULTI") + request(b"MULTI") + b"WATCH a\r\nSET a 1\r\nEXEC\r\nEXEC\r\nDISCARD\r\n"
        )
        assert [line.partition(b" ")[2] or line for line in said.splitlines()] == [
            b"+OK",
            b"MULTI calls can not be nested",
            b"WATCH inside MULTI is not allowed",
            b"+QUEUED",
            b"*1",
            b"+OK",
            b"EXEC without MULTI",
            b"DISCARD without MULTI",
        ]


class Pausing(Elsewhere):
    """Its first write waits in the middle until ``go``."""

    def __init__(self, budget_bytes: int) -> None:
        super().__init__(budget_bytes)
        self.waits, self.go = threading.Event(), threading.Event()

    def put_many(self, items: Sequence[tuple[bytes, Buffer]], places: object = ()) -> list[bool]:
        done = super().put_many(items)
        if not self.waits.is_set():
            self.waits.set()
            assert self.go.wait(60)
        return done


@pytest.mark.parametrize("verb", ["set", "delete", "incr", "setex", "getset"])
def test_no_other_client_writes_between_two_commands(short: Path, verb: str) -> None:
    """The other writes to the key that comes second; it has its turn afterwards."""
    with Pausing(MIB) as store, serving(store, short) as (path, _, _):
        transaction = threading.Thread(
            target=redis.Redis(unix_socket_path=path).pipeline().set("a", 1).set("b", 2).get("b").execute
        )
        client = redis.Redis(unix_socket_path=path)
        writes = {"set": ("b", 7), "delete": ("b",), "incr": ("b",), "setex": ("b", 100, 7), "getset": ("b", 7)}
        transaction.start()
        assert store.waits.wait(60)
        answers: list[object] = []
        other = threading.Thread(target=lambda: answers.append(getattr(client, verb)(*writes[verb])))
        other.start()
        time.sleep(0.05)
        assert other.is_alive() and not answers
        store.go.set()
        transaction.join(60)
        other.join(60)
        after = redis.Redis(unix_socket_path=path).get("b")
        assert (answers, after) == {
            "set": ([True], b"7"),
            "delete": ([1], None),
            "incr": ([3], b"3"),
            "setex": ([True], b"7"),
            "getset": ([b"2"], b"7"),
        }[verb]


@pytest.mark.brief()
def test_counts_of_many_clients_are_all_counted(store: MemoryStore, short: Path) -> None:
    """By INCR, by transactions, and by WATCH with a value that the client computes."""
    with store, serving(store, short) as (path, _, _):

        def watched(client: redis.Redis) -> None:
            def add(pipe: redis.client.Pipeline) -> None:
                before = int(pipe.get("count") or 0)
                pipe.multi()
                pipe.set("count", before + 1)

            client.transaction(add, "count")

        adds = [lambda client: client.incr("count"), lambda client: client.pipeline().incr("count").execute(), watched]

        def work(number: int) -> None:
            client = redis.Redis(unix_socket_path=path)
            for _ in range(30):
                adds[number % len(adds)](client)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert NamedValues(store).get("count") == b"180"


CHANGES = [
    (b"SET", b"a", b"new"),
    (b"SETEX", b"a", b"100", b"new"),
    (b"MSET", b"x", b"1", b"a", b"new"),
    (b"INCR", b"a"),
    (b"DEL", b"a"),
    (b"GETDEL", b"a"),
    (b"GETSET", b"a", b"new"),
    (b"GETEX", b"a", b"EX", b"100"),
    (b"EXPIRE", b"a", b"100"),
    (b"EXPIRE", b"a", b"-1"),
    (b"PERSIST", b"a"),
    (b"FLUSHDB",),
]
KEPT = [
    (b"GET", b"a"),
    (b"SETNX", b"a", b"new"),
    (b"SET", b"b", b"new"),
    (b"SET", b"a", b"new", b"NX"),
    (b"DEL", b"b"),
    (b"GETEX", b"a"),
    (b"EXPIRE", b"a", b"100", b"NX"),
    (b"TOUCH", b"a"),
]


@pytest.mark.parametrize("words", CHANGES + KEPT, ids=lambda words: b" ".join(words).decode())
def test_exec_executes_nothing_where_a_watched_key_changed(
    store: MemoryStore, short: Path, words: tuple[bytes, ...]
) -> None:
    with store, serving(store, short) as (path, _, commands), connected(path) as sock:
        said = sock.makefile("rb")
        assert replies_to(path, request(b"SET", b"a", b"5", b"EX", b"1000")) == b"+OK\r\n"
        sock.sendall(request(b"WATCH", b"z", b"a"))
        assert said.readline() == b"+OK\r\n"
        assert not replies_to(path, request(*words)).startswith(b"-")
        sock.sendall(
            request(b"MULTI") + request(b"SET", b"done", b"1") + request(b"EXEC") + request(b"EXISTS", b"done")
        )
        answers = [said.readline() for _ in range(3)]
        assert answers[2] == (b"*-1\r\n" if words in CHANGES else b"*1\r\n")
        if words in KEPT:
            said.readline()
        assert said.readline() == (b":0\r\n" if words in CHANGES else b":1\r\n")
        assert not commands.watches._by_key


def test_a_watched_key_that_ends_or_is_evicted_has_changed(short: Path) -> None:
    with Forgetful(MIB) as store, serving(store, short) as (path, _, _):
        client = redis.Redis(unix_socket_path=path)
        for end in ("lifetime", "eviction"):
            client.set("a", 1, px=30 if end == "lifetime" else None)
            with client.pipeline() as pipe:
                pipe.watch("a")
                pipe.multi()
                pipe.set("b", 1)
                if end == "lifetime":
                    time.sleep(0.05)
                else:
                    store.lose()
                with pytest.raises(redis.WatchError):
                    pipe.execute()
            assert client.exists("b") == 0


def test_unwatch_forgets(short: Path) -> None:
    with MemoryStore(MIB) as store, serving(store, short) as (path, _, _):
        said = replies_to(path, b"WATCH a\r\nSET a 1\r\nUNWATCH\r\nMULTI\r\nSET a 2\r\nEXEC\r\n")
        assert said.endswith(b"*1\r\n+OK\r\n")


def test_watch_is_refused_where_others_write_too(short: Path) -> None:
    """Of a Redis behind the daemon; MULTI alone is not."""
    (short / "below").mkdir()
    with (
        MemoryStore(MIB) as memory,
        serving(memory, short / "below") as (below, _, _),
        RedisStore(f"unix://{below}") as store,
        serving(store, short) as (path, _, _),
    ):
        client = redis.Redis(unix_socket_path=path)
        with pytest.raises(redis.ResponseError, match="has other writers, whom WATCH would not see"):
            client.pipeline().watch("a")
        assert client.pipeline().set("a", 1).get("a").execute() == [True, b"1"]


@pytest.mark.brief()
def test_what_waits_for_exec_is_bounded(short: Path) -> None:
    """By the bytes in flight: a queue that finds no room is dropped, and EXEC says so."""
    options = {"in_flight_bytes": 4 * MIB, "wait_s": 5.0}
    with (
        MemoryStore(64 * MIB) as store,
        serving(store, short, ServerLimits(value_bytes=MIB), **options) as (path, _, commands),
    ):
        client = redis.Redis(unix_socket_path=path)
        for values, size in ((10, MIB - 10), (400, 20_000), (10_000, 1)):
            pipe = client.pipeline()
            for number in range(values):
                pipe.set(f"{number}", bytes(size))
            with pytest.raises(redis.RedisError, match=r"in flight|previous errors"):
                pipe.execute()
            assert client.dbsize() == 0
            until(lambda: commands.budget.used_bytes == 0)
        assert client.pipeline().set("a", bytes(MIB - 10)).set("b", b"1").execute() == [True, True]


def test_large_replies_of_exec_are_sent_from_where_they_lie(short: Path) -> None:
    """Of most of the budget; a reply beyond it is refused, and the others are not."""
    with Elsewhere(64 * MIB) as store, serving(store, short, in_flight_bytes=8 * MIB) as (path, _, commands):
        client = redis.Redis(unix_socket_path=path)
        for name, value in (("a", bytes(5 * MIB)), ("b", bytes(5 * MIB)), ("c", b"1")):
            client.set(name, value)
        assert client.pipeline().get("a").get("c").execute() == [bytes(5 * MIB), b"1"]
        answers = client.pipeline().get("a").mget("c", "b").get("c").execute(raise_on_error=False)
        assert answers[0] == bytes(5 * MIB) and "in flight" in str(answers[1]) and answers[2] == b"1"
        until(lambda: commands.budget.used_bytes == 0)
        assert store.stats()["open_leases"] == 0


def test_a_client_that_does_not_read_holds_no_key(short: Path) -> None:
    with MemoryStore(64 * MIB) as store, serving(store, short) as (path, _, commands), connected(path) as slow:
        client = redis.Redis(unix_socket_path=path)
        client.set("large", bytes(16 * MIB))
        slow.sendall(request(b"MULTI") + request(b"GET", b"large") + request(b"EXEC"))
        until(lambda: commands.budget.used_bytes > 0)
        assert client.set("large", b"new")


def test_a_lease_that_is_lost_in_exec_ends_the_connection_after_the_others(short: Path) -> None:
    with Forgetful(MIB) as store, serving(store, short) as (path, _, commands):
        commands.leases._protects = True
        client = redis.Redis(unix_socket_path=path, retry=None)
        client.set("a", b"v")
        assert client.exists("a") == 1
        store.lose()
        with pytest.raises(redis.ConnectionError):
            client.pipeline().get("a").set("b", b"w").execute()
        assert client.get("b") == b"w"
