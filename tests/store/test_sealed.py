"""Sealed values: the contract of every tier holds, and what is not the tenant's own is a miss, counted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st
from tests.contract.store_contract import Clock, StoreContract, Tier
from tests.store.conftest import connection, put_forward, stopped, store_on, udp_sky_and_loop

from skymemory import open_store
from skymemory.errors import InvalidInput
from skymemory.keys import MAX_KEY_ID, KeyRing, SecretKey, first_ring
from skymemory.reasons import Miss
from skymemory.store.memory import MemoryStore
from skymemory.store.named_values import get_named, put_named
from skymemory.store.sealed import OVERHEAD_BYTES, SealedStore
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.testbed.key_file import new_keys

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
RING = first_ring(bytes(range(32)))
NOW_S = 1000.0


def sealed(below, ring: KeyRing = RING, now_s: float = NOW_S) -> SealedStore:
    return SealedStore(below, lambda: ring, lambda: now_s)


class TestSealedMemory(StoreContract):
    can = frozenset({"limit", "leases", "pins", "clock"})

    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        clock = Clock()
        store = sealed(MemoryStore(256_000, clock=clock))
        yield Tier(store, most_bytes=256_000, later=clock.later)
        store.close()


class TestSealedConstellation(StoreContract):
    can = frozenset({"clock", "outage"})
    test_what_is_put_again_in_vain_is_there_as_before = None  # sealed again it is other bytes, which overwrite these

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        with udp_sky_and_loop() as (plan, loop):
            below = store_on(plan, SharedIndex(tmp_path / "index", born=True))
            store, client = sealed(below), connection(below)

            def another() -> SealedStore:
                return sealed(store_on(plan, SharedIndex(tmp_path / "index"), None, 8))

            yield Tier(
                store,
                pins=False,
                leases=False,
                another=another,
                later=lambda seconds: put_forward(client, seconds),
                outage=lambda: stopped(loop, client),
            )
            store.close()


def test_the_bytes_below_are_what_the_library_alone_would_open() -> None:
    below = MemoryStore(1 << 20)
    sealed(below).put_many([(KEY, b"a prompt")])
    (raw,) = below.get_many([KEY])
    raw = bytes(raw)
    assert b"prompt" not in raw and len(raw) == len(b"a prompt") + OVERHEAD_BYTES
    assert raw[:8] == b"SKYE\1\0\0\1"
    secret = RING.keys[0].derive(b"skymemory payloads 1")
    assert AESGCM(secret).decrypt(raw[8:20], raw[20:], raw[:20] + KEY) == b"a prompt"


def test_no_nonce_twice_also_for_the_same_value() -> None:
    below = MemoryStore(1 << 20)
    store = sealed(below)
    nonces = set()
    for number in range(300):
        store.put_many([(bytes([number % 256]) * 32, b"same"), (KEY, b"same")])
        nonces |= {bytes(value)[8:20] for value in below.get_many([bytes([number % 256]) * 32, KEY])}
    assert len(nonces) == 600


@pytest.mark.parametrize(
    "harm",
    [
        lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]),
        lambda raw: raw[:30] + bytes([raw[30] ^ 0x80]) + raw[31:],
        lambda raw: raw[:10] + bytes([raw[10] ^ 1]) + raw[11:],
        lambda raw: raw[:7] + b"\2" + raw[8:],
        lambda raw: b"SKYV" + raw[4:],
        lambda raw: raw[:-1],
        lambda raw: raw[:OVERHEAD_BYTES],
        lambda raw: raw[: OVERHEAD_BYTES - 1],
        lambda raw: b"",
        lambda raw: raw + b"x",
    ],
)
def test_a_tampered_value_is_a_miss_and_counted(harm) -> None:
    below = MemoryStore(1 << 20)
    store = sealed(below)
    store.put_many([(KEY, b"v" * 100), (OTHER_KEY, b"sound")])
    below.put_many([(KEY, harm(bytes(below.get_many([KEY])[0])))])
    ticket = store.prepare_load([KEY, OTHER_KEY, KEY])
    assert store.complete_load(ticket) == [None, b"sound", None]
    (reason,) = {key.reason for key in ticket.report.keys} - {None}
    store.release(ticket)
    assert reason in (Miss.NOT_AUTHENTIC, Miss.UNKNOWN_KEY), "the number of a key may be that of one to come"
    assert store.stats()[f"values_{reason.replace(' ', '_')}"] == 1 and store.stats()["values_opened"] == 1


def test_a_value_moved_to_another_key_is_a_miss() -> None:
    below = MemoryStore(1 << 20)
    store = sealed(below)
    store.put_many([(KEY, b"mine")])
    below.put_many([(OTHER_KEY, below.get_many([KEY])[0])])
    assert store.get_many([OTHER_KEY, KEY]) == [None, b"mine"]


def test_another_tenants_values_are_misses_and_stay_where_they_are() -> None:
    below = MemoryStore(1 << 20)
    mine, other = sealed(below), sealed(below, first_ring(os.urandom(32)))
    assert put_named(mine, "notes", b"secret").ok
    found = get_named(other, "notes")
    assert found.value is None and found.reason == Miss.NOT_AUTHENTIC
    assert get_named(mine, "notes").value == b"secret"


def test_plain_values_are_misses_to_a_sealed_store() -> None:
    below = MemoryStore(1 << 20)
    below.put_many([(KEY, os.urandom(500))])
    assert sealed(below).get_many([KEY]) == [None]


def test_rotation_reads_what_the_old_key_sealed_until_it_is_retired() -> None:
    below, both = MemoryStore(1 << 20), RING.with_key(bytes(32), from_s=NOW_S)
    sealed(below).put_many([(KEY, b"old")])
    after = sealed(below, both)
    after.put_many([(OTHER_KEY, b"new")])
    assert after.get_many([KEY, OTHER_KEY]) == [b"old", b"new"]
    retired = sealed(below, both.without({1}, NOW_S))
    assert retired.get_many([KEY, OTHER_KEY]) == [None, b"new"]


def test_a_key_that_was_retired_differs_from_one_that_has_not_come_yet() -> None:
    below, both = MemoryStore(1 << 20), RING.with_key(bytes(32), from_s=NOW_S)
    retired = both.without({1}, NOW_S)
    sealed(below).put_many([(KEY, b"old")])
    sealed(below, both).put_many([(OTHER_KEY, b"new")])
    for ring, reasons in (
        (RING, [None, Miss.UNKNOWN_KEY]),
        (both, [None, None]),
        (retired, [Miss.NOT_AUTHENTIC, None]),
    ):
        store = sealed(below, ring)
        ticket = store.prepare_load([KEY, OTHER_KEY])
        store.complete_load(ticket)
        assert [key.reason for key in ticket.report.keys] == reasons
        assert store.stats()["values_unknown_key"] == reasons.count(Miss.UNKNOWN_KEY)
        assert store.stats()["values_not_authentic"] == reasons.count(Miss.NOT_AUTHENTIC)


@pytest.mark.parametrize("rotations", [1, 3, 40])
@pytest.mark.parametrize("first", [1, 7, MAX_KEY_ID - 2, MAX_KEY_ID])
def test_numbers_of_keys_go_round_and_later_ones_are_known(first: int, rotations: int) -> None:
    ring = KeyRing((SecretKey(first, bytes(32)),))
    later = ring
    for at in range(rotations):
        later = later.with_key(os.urandom(32), float(at))
        later = later.without({key.key_id for key in later.keys[:-2]}, 1e9)
        assert ring.may_come(later.keys[-1].key_id)
        assert not later.may_come(first) or later.find(first)
    assert not any(later.may_come(key.key_id) for key in later.keys)


@given(st.binary(max_size=200))
def test_any_bytes_below_raise_nothing(raw: bytes) -> None:
    below = MemoryStore(1 << 20)
    below.put_many([(KEY, raw)])
    assert sealed(below).get_many([KEY]) == [None]


def test_views_are_true_until_released_and_read_only() -> None:
    store = sealed(MemoryStore(1 << 20))
    store.put_many([(KEY, b"one"), (OTHER_KEY, b"two")])
    first = store.prepare_load([KEY])
    (kept,) = store.complete_load(first)
    assert store.get_many([OTHER_KEY]) == [b"two"] and kept == b"one" and kept.readonly
    with pytest.raises(InvalidInput, match="once"):
        store.complete_load(first)


def test_a_store_is_sealed_by_its_address(tmp_path: Path) -> None:
    new_keys(tmp_path / "tenant")
    store = open_store(f"memory://1MiB?seal={tmp_path / 'tenant'}")
    store.put_many([(KEY, b"value")])
    assert isinstance(store, SealedStore) and store.get_many([KEY]) == [b"value"]
    with pytest.raises(InvalidInput, match="no key file"):
        open_store(f"memory://1MiB?seal={tmp_path / 'none'}")
    with pytest.raises(InvalidInput, match="unknown option"):
        open_store(f"memory://1MiB?seal={tmp_path / 'tenant'}&colour=red")
