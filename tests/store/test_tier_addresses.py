"""Disk and Redis stores by their addresses."""

from __future__ import annotations

from pathlib import Path

import pytest

from skymemory import open_store
from skymemory.errors import InvalidInput, NoConstellation


def test_a_disk_store_by_its_address(tmp_path: Path) -> None:
    address = f"disk://{tmp_path}/cache?budget=1MiB&sync=each"
    store = open_store(address)
    assert store.name == "disk" and store.stats()["budget_bytes"] == 1 << 20
    assert store.put_many([(bytes(32), b"kept")]) == [True]
    store.close()
    again = open_store(f"{address}&admit=second")
    assert again.get_many([bytes(32)]) == [b"kept"]
    again.close()


def test_a_memory_store_with_the_policy_of_its_address() -> None:
    """The most requested goes last under LFU, and first under LRU where its last request is the oldest."""
    often, later, last = bytes(32), bytes([1]) * 32, bytes([2]) * 32
    left = {}
    for policy in ("lfu", "lru"):
        store = open_store(f"memory://2000?policy={policy}")
        store.put_many([(often, bytes(1000))])
        store.get_many([often])
        store.put_many([(later, bytes(1000))])
        store.put_many([(last, bytes(1000))])
        left[policy] = store.get_many([often, later, last])
        store.close()
    assert [value is not None for value in left["lfu"]] == [True, False, True]
    assert [value is not None for value in left["lru"]] == [False, True, True]


def test_a_redis_store_by_its_address() -> None:
    pytest.importorskip("redis")
    store = open_store("redis://localhost:1/3?timeout=100ms")
    assert store.name == "redis" and store.get_many([bytes(32)]) == [None]
    store.close()


@pytest.mark.parametrize("query", ["index=no&access=gateway", "admit=second", "tenant=A&quota=1GiB"])
def test_options_follow_a_bare_name_too(query: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYMEMORY_RUN_DIR", str(tmp_path))
    with pytest.raises(NoConstellation):  # so it is looked for, here where none is
        open_store(f"constellation?{query}")


def test_the_memory_store_takes_rules_with_and_without_a_size() -> None:
    for address in ("memory?admit=second", "memory://1MiB?admit=second"):
        store = open_store(address)
        assert [store.put_many([(bytes(32), b"once")]) for _ in range(2)] == [[False], [True]]


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("disk:///tmp/x", "budget=SIZE"),
        ("disk://?budget=1MiB", "budget=SIZE"),
        ("disk:///tmp/x?budget=much", "not a size"),
        ("disk:///tmp/x?budget=1MiB&sync=now", "sync='now'"),
        ("disk:///tmp/x?budget=1MiB&index=no", "unknown option 'index'"),
        ("disk:///tmp/x?budget=1MiB&policy=best", "policy 'best'"),
        ("memory://1MiB?policy=best", "lru, lfu"),
        ("redis://localhost?timeout=soon", "not a duration"),
        ("redis://localhost?budget=1MiB", "unknown option 'budget'"),
        ("redis://localhost/blocks", "database 'blocks'"),
        ("redis://localhost/1/2", "database '1/2'"),
        ("redis://localhost/-1", "database '-1'"),
        ("unix://", "unix:///REDIS.sock"),
        ("constellation?index=nope", "index=nope"),
        ("memory?tenant=&quota=1MiB", "tenant=NAME"),
        ("tape://x", "disk:///DIRECTORY"),
    ],
)
def test_a_wrong_address_says_what_was_expected(query: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        open_store(query)
