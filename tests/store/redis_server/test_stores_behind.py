"""The contract of stores, through daemons in other processes: stored by one client, asked by another."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import redis
from tests.contract.store_contract import StoreContract, Tier, key, value
from tests.end_to_end.in_process import skymemory
from tests.store.redis_server.daemons import daemon

from skymemory import open_store
from skymemory.store.redis import RedisStore
from skymemory.testbed.key_file import new_keys


def client(path: str) -> RedisStore:
    return RedisStore(f"unix://{path}", timeout_s=20.0)


@contextmanager
def emptied(path: str) -> Iterator[Tier]:
    """A client of the daemon at ``path``, over what the contract's cases before have left: nothing."""
    with client(path) as store:
        assert None not in store.delete([key(number) for number in range(400)])
        yield Tier(store, pins=False, leases=False, another=lambda: client(path))


class Behind(StoreContract):
    """Its own daemon for all cases of one store."""

    can = frozenset[str]()

    @pytest.fixture(scope="class")
    def path(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
        with daemon(self.address(tmp_path_factory.mktemp("store"))) as path:
            yield path

    @pytest.fixture
    def tier(self, path: str) -> Iterator[Tier]:
        with emptied(path) as tier:
            yield tier

    def address(self, folder: Path) -> str:
        raise TypeError("a class below names its store")


class TestDisk(Behind):
    def address(self, folder: Path) -> str:
        return f"disk://{folder}/cache?budget=64MiB"

    @pytest.mark.slow
    @pytest.mark.seeded
    def test_lifetimes_are_kept_by_it(self, path: str) -> None:
        asked = redis.Redis(unix_socket_path=path)
        before = asked.dbsize()
        assert asked.set("mortal", b"v", px=100) and asked.set("stays", b"v", ex=1000) and asked.ttl("stays") == 1000
        assert asked.get("mortal") == b"v"
        time.sleep(0.15)
        assert asked.mget("mortal", "stays") == [None, b"v"] and asked.dbsize() == before + 1
        assert asked.set(b"\xff odd", b"v") and asked.scan(0) == (0, [b"\xff odd", b"stays"])
        assert list(asked.scan_iter("st*")) == [b"stays"]
        assert asked.delete("stays", b"\xff odd") == 2


class TestTiers(Behind):
    def address(self, folder: Path) -> str:
        """So little memory in front that most of what is asked again comes from the disk."""
        return f"tiers:?tier=memory://100KiB&tier=disk://{folder}/cache?budget%3D64MiB"

    def test_lifetimes_are_refused(self, path: str) -> None:
        """A copy in one tier would outlive that in another."""
        asked = redis.Redis(unix_socket_path=path)
        with pytest.raises(redis.ResponseError, match="a tiers store does not expire values: store it without EX"):
            asked.set("mortal", b"v", ex=10)
        assert asked.get("mortal") is None
        assert asked.set("a", b"v") and asked.expire("a", 0) == 1 and asked.get("a") is None
        with pytest.raises(redis.ResponseError, match="a tiers store does not count its values"):
            asked.dbsize()

    @pytest.mark.slow
    @pytest.mark.seeded
    def test_names_in_any_tier_are_listed(self, path: str) -> None:
        """Of eight values of 30 KB at most three are in memory."""
        asked = redis.Redis(unix_socket_path=path)
        names = [b"name %d" % number for number in range(8)]
        for name in names:
            assert asked.set(name, bytes(30_000))
        assert asked.scan(0) == (0, names) and list(asked.scan_iter("*7")) == [b"name 7"]
        assert asked.delete(*names[1:]) == 7 and asked.scan(0) == (0, names[:1])
        assert asked.delete(names[0]) == 1


class TestSealed(Behind):
    def address(self, folder: Path) -> str:
        new_keys(folder / "keys")
        return f"memory://64MiB?seal={folder}/keys"


@pytest.mark.slow
class TestConstellation(Behind):
    """Satellites in two processes, over UDP."""

    @pytest.fixture(scope="class")
    def path(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
        run = tmp_path_factory.mktemp("sky") / "run"
        options = ("--hosts", "2", "--delay", "off", "--base-port", "auto", "--run-dir", str(run))
        code, _, err = skymemory("constellation", "up", *options)
        assert code == 0, err
        try:
            with daemon(f"constellation://{run}") as path:
                yield path
        finally:
            skymemory("constellation", "down", "--run-dir", str(run))


@pytest.mark.slow
def test_what_a_daemon_stored_on_disk_is_there_after_it(tmp_path: Path) -> None:
    address = f"disk://{tmp_path}/cache?budget=64MiB"
    big = os.urandom(3_000_000)
    for turn in range(2):
        with daemon(address) as path, closing(client(path)) as store:
            if turn == 0:
                assert store.put_many([(key(1), big), (key(2), value(2))]) == [True, True]
            assert store.get_many([key(1), key(2)]) == [big, value(2)]
    with open_store(address) as store:
        assert store.get_many([key(1)]) == [big]


@pytest.mark.slow
def test_a_sealed_store_s_values_are_sealed_on_disk(tmp_path: Path) -> None:
    new_keys(tmp_path / "keys")
    below = f"disk://{tmp_path}/cache?budget=64MiB"
    with daemon(f"{below}&seal={tmp_path}/keys") as path, closing(client(path)) as store:
        assert store.put_many([(key(1), b"plain text " * 10)]) == [True]
        assert store.get_many([key(1)]) == [b"plain text " * 10]
    with open_store(below) as store:
        (found,) = store.get_many([key(1)])
        assert found is not None and b"plain text" not in bytes(found)
