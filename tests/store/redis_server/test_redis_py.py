"""What users of redis-py do: pipelines with and without a transaction, lifetimes, counters, keys, asyncio."""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from tests.store.redis_server.daemons import Elsewhere, serving

from skymemory.store.base import Store
from skymemory.store.disk import DiskStore
from skymemory.store.memory import MemoryStore

pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated")


@contextmanager
def store_named(name: str, folder: Path) -> Iterator[Store]:
    store: Store = {
        "memory": lambda: MemoryStore(1 << 24),
        "elsewhere": lambda: Elsewhere(1 << 24),
        "disk": lambda: DiskStore(folder / "disk", 1 << 24),
    }[name]()
    with store:
        yield store


@pytest.fixture(params=["memory", "elsewhere", "disk"])
def path(short: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    with store_named(request.param, short) as store, serving(store, short) as (path, _, _):
        yield path


@pytest.fixture(params=[2, 3])
def client(path: str, request: pytest.FixtureRequest) -> redis.Redis:
    return redis.Redis(unix_socket_path=path, protocol=request.param, decode_responses=True)


def test_the_default_pipeline_is_a_transaction(client: redis.Redis) -> None:
    with client.pipeline() as pipe:
        answers = pipe.set("a", 1).get("a").incr("a", 5).mget("a", "b").expire("a", 100).ttl("a").delete("a").execute()
    assert answers == [True, "1", 6, ["6", None], True, 100, 1]
    assert client.pipeline().execute() == []


def test_a_pipeline_without_a_transaction(client: redis.Redis) -> None:
    with client.pipeline(transaction=False) as pipe:
        for number in range(100):
            pipe.set(f"{number}", number)
        pipe.mget(*range(100))
        assert pipe.execute() == [True] * 100 + [[str(number) for number in range(100)]]
        pipe.get("0").execute_command("LPUSH", "a", 1).get("1")
        first, error, last = pipe.execute(raise_on_error=False)
        assert (first, last) == ("0", "1") and "unknown command 'LPUSH'" in str(error)


def test_an_error_in_a_transaction_executes_nothing(client: redis.Redis) -> None:
    with pytest.raises(redis.ResponseError, match="unknown command 'LPUSH'"):
        client.pipeline().set("a", 1).lpush("a", 1).execute()
    assert client.exists("a") == 0
    with pytest.raises(redis.ResponseError, match="not an integer"):
        client.pipeline().set("a", "x").incr("a").set("b", 1).execute()
    assert client.mget("a", "b") == ["x", "1"]


def test_a_watched_key(client: redis.Redis, path: str) -> None:
    other = redis.Redis(unix_socket_path=path)
    client.set("count", 1)
    tries: list[int] = []

    def add(pipe: redis.client.Pipeline) -> int:
        before = int(pipe.get("count") or 0)
        if not tries:
            other.set("count", 10)
        tries.append(before)
        pipe.multi()
        pipe.set("count", before + 1)
        return before

    assert client.transaction(add, "count", value_from_callable=True) == 10 and tries == [1, 10]
    assert client.get("count") == "11"
    with client.pipeline() as pipe:
        pipe.watch("count")
        pipe.unwatch()
        other.set("count", 20)
        assert pipe.get("count") is not None and pipe.execute() is not None


def test_lifetimes(client: redis.Redis) -> None:
    now = datetime.datetime.now(datetime.UTC)
    assert client.setex("a", 100, "v") and client.ttl("a") == 100
    assert client.setex("a", datetime.timedelta(seconds=50), "v") and client.ttl("a") == 50
    assert client.psetex("a", 90_000, "v") and 80_000 < client.pttl("a") <= 90_000
    assert client.persist("a") and not client.persist("a") and client.ttl("a") == -1 == client.pttl("a")
    assert client.pexpire("a", 70_000) and 60 < client.ttl("a") <= 70
    assert client.expireat("a", now + datetime.timedelta(hours=1)) and 3500 < client.ttl("a") <= 3600
    assert client.pexpireat("a", int(now.timestamp() * 1000) + 100_000) and 90 < client.ttl("a") <= 100
    assert client.expire("a", 10, nx=True) == 0 and client.expire("a", 10, lt=True) == 1
    assert (
        client.set("a", "w", keepttl=True) and client.ttl("a") == 10 and client.set("a", "w") and client.ttl("a") == -1
    )
    assert client.set("a", "v", exat=int(time.time()) + 1000) and 900 < client.ttl("a") <= 1000
    assert client.getex("a", px=80_000) == "v" and 70 < client.ttl("a") <= 80
    assert client.getex("a", persist=True) == "v" and client.ttl("a") == -1
    assert client.set("a", "v", px=30)
    time.sleep(0.05)
    assert client.get("a") is None and client.ttl("a") == -2 == client.pttl("a") and client.type("a") == "none"


def test_values_and_conditions(client: redis.Redis) -> None:
    assert client.setnx("a", 1) and not client.setnx("a", 2)
    assert client.set("a", 3, xx=True) and client.set("b", 1, xx=True) is None
    assert client.set("a", 4, get=True) == "3" and client.set("b", 5, get=True) is None
    assert client.getset("a", 5) == "4" and client.getdel("b") == "5" and client.getdel("b") is None
    assert client.msetnx({"c": 1, "d": 2}) and not client.msetnx({"d": 3, "e": 4}) and client.exists("e") == 0
    assert client.type("a") == "string" and client.echo("hello") == "hello" and client.ping()
    assert client.incr("n") == 1 and client.incrby("n", 9) == 10 and client.decr("n", 3) == 7 and client.get("n") == "7"


def test_keys(client: redis.Redis) -> None:
    client.mset({"user:1": 1, "user:2": 2, "usher": 3, "a*b": 4})
    assert sorted(client.keys("user:*")) == ["user:1", "user:2"] == sorted(client.scan_iter("user:?"))
    assert client.keys("us[^h]er") == [] and client.keys("us[a-i]er") == ["usher"] and client.keys(r"a\*b") == ["a*b"]
    assert sorted(client.keys()) == ["a*b", "user:1", "user:2", "usher"] and client.dbsize() == 4
    assert client.scan(0, match="u*", _type="hash") == (0, [])
    assert client.flushdb() and client.keys() == [] and client.dbsize() == 0 and client.flushdb(asynchronous=True)


def test_asyncio(path: str) -> None:
    from redis.asyncio import Redis

    async def run() -> list[object]:
        async with Redis(unix_socket_path=path) as client, client.pipeline() as pipe:
            return [*await pipe.set("a", 1).incr("a").execute(), await client.get("a")]

    assert asyncio.run(run()) == [True, 2, b"2"]


def test_flushdb_takes_blocks_too_and_ends_leases(client: redis.Redis) -> None:
    block = b"skymemory:" + bytes(32)
    from skymemory.store.redis import trailer_of

    client.set(block, b"data" + trailer_of(bytes(32), memoryview(b"data")))
    client.set("a", 1)
    assert client.dbsize() == 2 and client.exists("a") == 1
    assert client.flushdb() and client.dbsize() == 0 and client.get("a") is None
