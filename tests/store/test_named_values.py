"""Values by text keys from Python, in every kind of store; what a store cannot do is said before anything is done."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.store.conftest import simulated, store_over

import skymemory
from skymemory import NamedValues, open_store
from skymemory.cache.tiers.store import TieredStore
from skymemory.cache.tiers.tier import TierSettings
from skymemory.errors import InvalidInput, ValueTooLarge
from skymemory.keys import first_ring
from skymemory.kv.block import OpaqueLayout
from skymemory.kv.value import block_header
from skymemory.store.base import Expiring, Store
from skymemory.store.memory import MemoryStore
from skymemory.store.named_values import NOT_PROMISED, get_named, unwrap_store
from skymemory.store.redis import RedisStore
from skymemory.store.sealed import SealedStore
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.store.sky.store import ConstellationStore
from skymemory.store.wrappers import TenantStore
from skymemory.transport.simulated import SimulatedConstellation

RING = first_ring(bytes(range(32)))


@pytest.fixture
def sky() -> SimulatedConstellation:
    return simulated()


@pytest.fixture
def constellation(sky: SimulatedConstellation) -> Iterator[ConstellationStore]:
    with store_over(sky, index=SharedIndex()) as store:
        yield store


def sealed(store: Store) -> SealedStore:
    return SealedStore(TenantStore(store, "a", 1 << 24), lambda: RING, lambda: 0.0)


@pytest.mark.parametrize("kind", ["memory", "disk", "tiers", "sealed"])
def test_put_get_and_delete_by_name_in_any_store(tmp_path: Path, kind: str) -> None:
    where = {
        "memory": "memory",
        "sealed": "memory",
        "disk": f"disk://{tmp_path}/d?budget=1MiB",
        "tiers": f"tiers:?tier=memory&tier=disk://{tmp_path}/d?budget=1MiB",
    }[kind]
    with open_store(where) as opened:
        values = NamedValues(sealed(opened) if kind == "sealed" else opened)
        assert values.get("a name") is None and "a name" not in values and not values.delete("a name")
        assert values.put("a name", b"1" * 3000).ok and values.put("ümläut/…", bytearray(b"")).ok
        assert values.get("a name") == b"1" * 3000 and values.get("ümläut/…") == b""
        assert values.put("a name", memoryview(b"again")).ok and values.get("a name") == b"again"
        assert "a name" in values and 7 not in values
        assert values.delete("a name") and values.get("a name") is None and "a name" not in values
        for wrong in ("text", None, memoryview(b"0123456")[::2]):
            with pytest.raises(InvalidInput, match="value"):
                values.put("a name", wrong)  # type: ignore[arg-type]
        for name in ("", "\ud800", 7, b"bytes"):
            with pytest.raises(InvalidInput, match="key"):
                values.put(name, b"x")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="closed"):
        opened.lookup([bytes(32)])


def test_a_store_closes_itself_behind_an_error_too() -> None:
    with pytest.raises(ZeroDivisionError), open_store("memory") as store:
        raise ZeroDivisionError
    with pytest.raises(InvalidInput, match="closed"):
        NamedValues(store).get("x")


@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "sealed"])
def test_a_lifetime_and_a_pin_in_the_sky(
    sky: SimulatedConstellation, constellation: ConstellationStore, wrapped: bool
) -> None:
    values = NamedValues(sealed(constellation) if wrapped else constellation)
    assert values.put("short", b"x" * 30_000, ttl_s=60.0).ok and values.put("long", b"y" * 30_000).ok
    assert values.pin("long", 3600.0) and not values.pin("absent", 3600.0)
    sky.settle(sky.now_s + 50)
    assert values.get("short") == b"x" * 30_000
    sky.settle(sky.now_s + 20)
    assert values.get("short") is None and values.get("long") == b"y" * 30_000
    assert values.expire("long", 30.0) and values.expire("long", math.inf) and not values.expire("absent", 30.0)
    sky.settle(sky.now_s + 60)
    assert values.get("long") == b"y" * 30_000
    assert values.expire("long", 1.0)
    sky.settle(sky.now_s + 5)
    assert values.get("long") is None


@pytest.fixture(params=["constellation", "memory", "disk", "tiers"])
def listing(request: pytest.FixtureRequest, tmp_path: Path, constellation: ConstellationStore) -> Iterator[Store]:
    if request.param == "constellation":
        yield constellation
        return
    disk = f"disk://{tmp_path}/it?budget=64MiB"
    tiers = f"tiers:?tier=memory://25KiB&tier=disk://{tmp_path}/it?budget%3D64MiB"
    with open_store({"memory": "memory://64MiB", "disk": disk, "tiers": tiers}[request.param]) as store:
        yield store


def test_names_are_listed_but_no_blocks_and_not_those_under_a_seal(listing: Store) -> None:
    values, long = NamedValues(listing), "long " * 800
    assert values.put("b", b"2" * 20_000).ok and values.put("a", b"1").ok and values.put(long, b"4").ok
    assert NamedValues(sealed(listing)).put("hidden", b"3").ok
    block = block_header(bytes([7]) * 32, OpaqueLayout("test", 32, 1000), 0, bytes(1000)) + bytes(1000)
    assert listing.put_many([(bytes([7]) * 32, block), (bytes(31) + b"1", b"no header")]) == [True, True]
    assert [(one.name, one.size_bytes) for one in values.names()] == [("a", 1), ("b", 20_000), (long, 1)]
    assert [one.name for one in NamedValues(sealed(listing)).names()] == ["a", "b", long]
    assert values.delete("b")
    if isinstance(listing, TieredStore):
        assert [one.name for one in values.names()] == ["a", long]
        return
    assert values.expire("a", 0.01)
    time.sleep(0.05)
    if not isinstance(listing, ConstellationStore):  # its clock is the test's
        assert [one.name for one in values.names()] == [long]


def test_what_a_store_cannot_do_is_said_and_nothing_is_stored() -> None:
    values = NamedValues(MemoryStore(1 << 20))
    tiers = NamedValues(TieredStore([(MemoryStore(1 << 20), TierSettings(local=True))]))
    redis = NamedValues(TieredStore([(RedisStore("redis://127.0.0.1:1"), TierSettings())]))
    for call in (
        lambda: tiers.put("a", b"x", ttl_s=60.0),
        lambda: tiers.expire("a", 60.0),
        redis.names,
        lambda: values.put("a", b"x", ttl_s=0.0),
        lambda: values.put("a", b"x", ttl_s=math.nan),
        lambda: values.put("", b"x"),
        lambda: values.get(""),
    ):
        with pytest.raises(InvalidInput):
            call()
    assert "a" not in values
    with pytest.raises(ValueTooLarge, match="budget"):
        values.put("a", bytes(2 << 20))


def test_a_lifetime_that_a_silent_satellite_did_not_promise_is_said(
    constellation: ConstellationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constellation, "expire", lambda keys, ttl_s: [False])
    done = NamedValues(constellation).put("a", b"x", ttl_s=60.0)
    assert not done.ok and done.reason == NOT_PROMISED
    assert get_named(constellation, "a").value == b"x"


def test_what_holds_the_values_is_found_behind_all_that_is_around_it(constellation: ConstellationStore) -> None:
    assert unwrap_store(sealed(constellation)) is constellation is unwrap_store(constellation)
    assert isinstance(constellation, Expiring) and not isinstance(
        TieredStore([(MemoryStore(), TierSettings())]), Expiring
    )
    assert skymemory.NamedValues is NamedValues
