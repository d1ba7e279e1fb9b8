"""A host arena as the nearest tier of a hierarchy: its clients get farther tiers' values, and theirs go there."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.contract.store_contract import chain, key, value
from tests.store.host.test_host_processes import in_time

from skymemory.cache.tiers.store import HierarchySettings, TieredStore
from skymemory.cache.tiers.tier import TierSettings
from skymemory.kv.block import Place
from skymemory.store.base import LoadTicket, Presence
from skymemory.store.host.client import HostStore
from skymemory.store.host.server import ServedArena
from skymemory.store.memory import MemoryStore
from skymemory.testbed.open_store import open_store


class SlowStore(MemoryStore):
    """A farther tier that counts the values it is asked for."""

    pause_s = 0.0

    def __init__(self) -> None:
        super().__init__(64 << 20, name="far")
        self.asked: list[bytes] = []

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        self.asked += ticket.keys
        time.sleep(self.pause_s)
        return super().complete_load(ticket)


@pytest.fixture
def far() -> SlowStore:
    return SlowStore()


@pytest.fixture
def tiers(folder: Path, far: SlowStore) -> Iterator[TieredStore]:
    arena = ServedArena(folder, 4 << 20)
    settings = HierarchySettings(promote="second hit")
    with TieredStore([(arena, TierSettings(local=True)), (far, TierSettings())], settings) as store:
        yield store


@pytest.fixture
def client(folder: Path, tiers: TieredStore) -> Iterator[HostStore]:
    with HostStore(folder) as store:
        yield store


def read(values: Sequence[memoryview | None]) -> list[bytes | None]:
    return [None if view is None else bytes(view) for view in values]


def test_what_farther_tiers_have_is_found_and_loaded_once_for_all(
    client: HostStore, far: SlowStore, folder: Path
) -> None:
    keys, places = chain(5)
    far.put_many([(each, value(at, 50_000)) for at, each in enumerate(keys)], places)
    assert client.lookup([*keys, key(99)]) == [Presence.HIT] * 5 + [Presence.MISS]
    assert client.sizes([keys[2], key(99)]) == [50_000, None] and client.prefix([*keys, key(99)]) == 5
    assert client.leases is False
    far.pause_s = 0.3
    with HostStore(folder) as other:
        got: list[list[bytes | None]] = []
        threads = [threading.Thread(target=lambda s=s: got.append(read(s.get_many(keys)))) for s in (client, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == [[value(at, 50_000) for at in range(5)]] * 2
    assert sorted(far.asked) == sorted(keys), "once"
    ticket = client.prepare_load(keys)
    assert read(client.load_now(ticket) or []) == [value(at, 50_000) for at in range(5)], "from now on at once"


@pytest.mark.parametrize("placed", [True, False])
def test_what_a_client_stores_goes_to_farther_tiers(client: HostStore, far: SlowStore, placed: bool) -> None:
    keys, places = chain(4)
    items = [(each, value(at, 20_000)) for at, each in enumerate(keys)]
    assert client.put_many(items, places if placed else ()) == [True] * 4
    in_time(lambda: far.lookup(keys) == [Presence.HIT] * 4)
    assert read(far.get_many(keys)) == [data for _, data in items]
    client.put_many([(keys[0], b"another")], places[:1] if placed else ())
    if not placed:  # a block's bytes never change
        in_time(lambda: read(far.get_many(keys[:1])) == [b"another"])
    assert client.delete(keys) == [True] * 4 and far.lookup(keys) == [Presence.MISS] * 4


def test_what_was_evicted_from_the_arena_comes_back_from_below(client: HostStore, far: SlowStore) -> None:
    for at in range(60):
        assert client.put_many([(key(at), value(at % 5, 200_000))], [Place(0)]) == [True]
    keys = [key(at) for at in range(60)]
    in_time(lambda: far.lookup(keys).count(Presence.HIT) == 60)
    assert client.prefix(keys) == 60
    for at in range(60):
        assert read(client.get_many([key(at)])) == [value(at % 5, 200_000)]


def test_a_farther_tier_that_is_slow_holds_up_no_reader_of_the_arena(
    folder: Path, tiers: TieredStore, far: SlowStore
) -> None:
    far.put_many([(key(1), value(1))])
    far.pause_s = 1.0
    with HostStore(folder, fetch_s=0.2) as late, HostStore(folder) as quick:
        quick.put_many([(key(2), value(2))])
        thread = threading.Thread(target=late.get_many, args=([key(1)],))
        thread.start()
        began_s = time.monotonic()
        assert read(quick.get_many([key(2)])) == [value(2)] and quick.put_many([(key(3), b"x")]) == [True]
        assert time.monotonic() - began_s < 0.5
        thread.join()
        assert read(late.get_many([key(2), key(1)]))[0] == value(2)


def test_by_their_addresses_with_a_disk_below(folder: Path, tmp_path: Path) -> None:
    disk = f"disk://{tmp_path}/values?budget=64MiB"
    address = f"tiers:?tier=host://4MiB?at={folder}&tier={disk.replace('&', '%26')}"
    keys, places = chain(3)
    with open_store(address), open_store(f"host://{folder}") as client:
        client.put_many([(each, value(at)) for at, each in enumerate(keys)], places)
    with open_store(address), open_store(f"host://{folder}") as client:
        assert read(client.get_many(keys)) == [value(at) for at in range(3)], "from the disk, after all has ended"


def test_an_owner_that_starts_again_costs_its_clients_no_value_of_farther_tiers(folder: Path, tmp_path: Path) -> None:
    address = f"tiers:?tier=host://4MiB?at={folder}&tier=disk://{tmp_path}/values?budget=64MiB"
    first = open_store(address)
    with HostStore(folder) as client:
        assert client.put_many([(key(number), value(number)) for number in range(3)]) == [True] * 3
        assert client.lookup([key(9)]) == [Presence.MISS], "by a connection that stays open"
        first.close()
        with open_store(address):
            in_time(
                lambda: client._follow_owner() is client._mapping and client._counters.as_dict().get("reconnects") == 1
            )
            assert read(client.get_many([key(0)])) == [value(0)] and client.lookup([key(1)]) == [Presence.HIT]
            assert client.put_many([(key(3), value(3))]) == [True]
            assert "unanswered_total" not in client.stats()


def test_a_named_value_is_in_all_tiers_when_it_is_acknowledged(
    client: HostStore, far: SlowStore, tiers: TieredStore
) -> None:
    for version in (b"old" * 9_000, b"new" * 9_000):
        assert client.put_many([(key(1), version), (key(2), version)]) == [True, True]
        assert read(far.get_many([key(1), key(2)])) == [version] * 2
    for at in range(60):  # it is evicted
        client.put_many([(key(100 + at), value(at % 5, 200_000))], [Place(0)])
    assert tiers.tiers[0].store.sizes([key(1)]) == [None]
    assert read(client.get_many([key(1)])) == [b"new" * 9_000]


def test_what_is_fetched_replaces_no_newer_value(client: HostStore, far: SlowStore, folder: Path) -> None:
    far.put_many([(key(1), b"old")])
    far.pause_s = 0.3
    with HostStore(folder) as other:
        reader = threading.Thread(target=other.get_many, args=([key(1)],))
        reader.start()
        in_time(lambda: far.asked == [key(1)])
        assert client.put_many([(key(1), b"new")]) == [True]
        reader.join()
        assert read(other.get_many([key(1)])) == [b"new"] == read(client.get_many([key(1)]))


def test_a_value_that_fits_the_arena_no_more_is_read_there_no_more(
    client: HostStore, tiers: TieredStore, far: SlowStore
) -> None:
    assert client.put_many([(key(1), b"old")]) == [True]
    assert tiers.put_many([(key(1), value(1, 5 << 20))]) == [True]
    assert read(client.get_many([key(1)])) != [b"old"]
    assert read(tiers.get_many([key(1)])) == [value(1, 5 << 20)]


def test_a_slow_fetch_holds_up_no_other_question_of_the_client(client: HostStore, far: SlowStore) -> None:
    far.put_many([(key(number), value(number)) for number in range(3)])
    far.pause_s = 1.0
    thread = threading.Thread(target=client.get_many, args=([key(1)],))
    thread.start()
    in_time(lambda: far.asked == [key(1)])
    began_s = time.monotonic()
    assert client.lookup([key(0), key(9)]) == [Presence.HIT, Presence.MISS]
    assert time.monotonic() - began_s < 0.5
    thread.join()


def test_the_time_to_load_from_farther_tiers_is_estimated(client: HostStore, far: SlowStore) -> None:
    client.put_many([(key(0), value(0))], [Place(0)])
    far.put_many([(key(1), value(1, 100_000))])
    near, both = (client.estimate_load_s(keys, 0.0) for keys in ([key(0)], [key(0), key(1)]))
    assert 0.0 < near < both < 1.0 and client.estimate_load_s([key(0), key(9)], 0.0) == float("inf")


def test_a_damaged_value_goes_to_no_farther_tier(folder: Path, tiers: TieredStore, far: SlowStore) -> None:
    arena = tiers.tiers[0].store
    assert isinstance(arena, ServedArena)
    arena.end_sharing()  # its thread would find the damage
    client = arena.connect()
    number, (offset,) = arena.reserve(client, [(key(1), 1_000)], [Place(0)])
    assert offset is not None
    assert arena.commit(client, number, [12345]) == [True], "a checksum of other bytes"
    for at in range(60):
        arena.put_many([(key(100 + at), value(at % 5, 200_000))], [Place(0)])
    assert arena.sizes([key(1)]) == [None] and tiers.flush(10.0)
    assert far.lookup([key(1)]) == [Presence.MISS] and far.lookup([key(100)]) == [Presence.HIT]


def test_blocks_of_clients_reach_the_disk_before_a_clean_end(folder: Path, tmp_path: Path) -> None:
    disk = f"disk://{tmp_path}/values?budget=256MiB"
    keys, places = chain(200)
    with (
        open_store(f"tiers:?tier=host://64MiB?at={folder}&tier={disk.replace('&', '%26')}"),
        open_store(f"host://{folder}") as client,
    ):
        assert client.put_many([(each, value(at, 100_000)) for at, each in enumerate(keys)], places) == [True] * 200
    with open_store(disk) as store:
        assert store.prefix(keys) == 200
