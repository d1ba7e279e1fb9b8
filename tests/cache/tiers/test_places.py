"""Where a block stands, by its writer's word: through cache, tiers and wrappers into the index and the shelves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.cache.test_manager import LAYOUT, context, load, save
from tests.contract.store_contract import chain, key, value
from tests.store.conftest import simulated, store_over

from skymemory.cache.blocks import BlockCache
from skymemory.cache.tiers.store import HierarchySettings, TieredStore
from skymemory.cache.tiers.tier import TierSettings
from skymemory.errors import InvalidInput
from skymemory.keys import first_ring
from skymemory.kv.block import Place
from skymemory.store.accounting import Inventory
from skymemory.store.base import Store
from skymemory.store.memory import MemoryStore
from skymemory.store.sealed import SealedStore
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.store.sky.store import ConstellationStore
from skymemory.store.wrappers import AdmittingStore, RateLimited, TenantStore

LOCAL, REMOTE = TierSettings(local=True), TierSettings()
RING = first_ring(bytes(range(32)))


@pytest.fixture
def index(tmp_path: Path) -> Iterator[SharedIndex]:
    """What another process makes of the journal that ``sky`` writes."""
    index = SharedIndex(tmp_path / "index")
    yield index
    index.close()


@pytest.fixture
def sky(tmp_path: Path) -> Iterator[ConstellationStore]:
    store = store_over(simulated(), index=SharedIndex(tmp_path / "index", born=True))
    yield store
    store.close()


def over(far: Store, near_bytes: int = 1 << 20, write_back: bool = False) -> TieredStore:
    return TieredStore([(MemoryStore(near_bytes), LOCAL), (far, REMOTE)], HierarchySettings(write_back=write_back))


@pytest.mark.parametrize("write_back", [False, True], ids=["through", "back"])
def test_a_prompt_that_goes_on_behind_one_in_both_tiers_is_found_whole_in_the_sky(
    sky: ConstellationStore, index: SharedIndex, write_back: bool
) -> None:
    """A stored prefix in memory keeps the far tier from hearing of it when the rest is looked up."""
    cache = BlockCache(context(), LAYOUT, over(sky, write_back=write_back))
    tokens = np.arange(34)
    assert save(cache, tokens[:18]) == 4 and save(cache, tokens) == 4
    assert isinstance(cache.store, TieredStore) and cache.store.flush(5)
    hashes = cache.hashes(tokens)
    assert index.before(hashes[-1], 99) == hashes[-2::-1]
    cold = BlockCache(context(), LAYOUT, sky)
    assert load(cold, tokens)[0].loaded_blocks == 8
    cache.store.close()


def test_what_a_tier_evicts_goes_down_with_its_place(sky: ConstellationStore, index: SharedIndex) -> None:
    keys, places = chain(8)
    tiers = over(sky, near_bytes=8000)
    assert all(tiers.put_many([(k, value(1)) for k in keys], places))
    sky.delete(keys[6:])
    assert index.before(keys[7], 9) == []
    assert all(tiers.put_many([(key(n), value(n)) for n in range(50, 52)])), "in the nearest tier two had to go"
    assert tiers.flush(5)
    assert index.before(keys[7], 9) == keys[6::-1]
    tiers.close()


def test_every_wrapper_passes_places_on(sky: ConstellationStore, index: SharedIndex) -> None:
    keys, places = chain(6)
    admitting = AdmittingStore(
        SealedStore(RateLimited(TenantStore(sky, "a", 1 << 20), 1e12), lambda: RING, lambda: 0.0)
    )
    assert (
        admitting.put_many([(keys[at], value(at)) for at in (0, 2, 5)], [places[at] for at in (0, 2, 5)]) == [False] * 3
    )
    assert admitting.put_many([(k, value(1)) for k in keys], places) == [True, False, True, False, False, True]
    assert index.before(keys[5], 9) == [keys[4]] and index.before(keys[2], 9) == [keys[1]]
    assert all(admitting.put_many([(k, value(1)) for k in keys], places))
    assert index.before(keys[5], 9) == keys[4::-1]


@pytest.mark.parametrize("indexed", [True, False])
def test_a_block_is_touched_when_its_successor_is_stored_without_a_joint_lookup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indexed: bool
) -> None:
    """From any writer: by the index, or without one by what was looked up and the writer's word where they meet."""
    satellites = simulated()
    first, second = (
        store_over(satellites, ground, SharedIndex(tmp_path / "index") if indexed else None) for ground in (1, 2)
    )
    keys, places = chain(8)
    assert all(first.put_many([(k, value(1)) for k in keys[:4]], places[:4]))
    touched: list[bytes] = []
    touch = second._touch
    monkeypatch.setattr(second, "_touch", lambda infos: (touched.extend(i.key for i in infos), touch(infos)))
    if not indexed:
        assert second.prefix(keys[:4]) == 4
    assert all(second.put_many([(k, value(1)) for k in keys[4:]], places[4:]))
    assert touched == keys[:4]
    first.close(), second.close()


def test_a_shelf_believes_the_writer_and_not_the_order_of_blocks_of_several_prompts() -> None:
    shelf = Inventory(10_000, 0, "length")
    one, other = [key(n) for n in range(3)], [key(n) for n in range(10, 13)]
    items = [(k, bytes(1000)) for k in (one[2], other[0], one[1])]
    places = [Place(2, one[1]), Place(0), Place(1, one[0])]
    ticket, given = shelf.open_store(items, places, 0.0, 30.0, "shelf")
    assert given == [True] * 3
    for (k, data), place in zip(items, places, strict=True):
        shelf.put(k, len(data), place)
    shelf.end_store(ticket)
    assert [shelf.order.before(k) for k in (one[2], one[1], other[0])] == [one[1], one[0], None]
    _, given = shelf.open_store([(key(99), bytes(8000))], (), 0.0, 30.0, "shelf")
    assert given == [True]
    assert shelf.in_the_way([(key(99), 8000)]) == (1, [one[2]]), "the block with the longest prefix before it"
    shelf.evict(one[2])
    assert shelf.take_place(one[2]) == Place(2, one[1])


@pytest.mark.parametrize("depth, parent", [(0, bytes(32)), (1, None), (-1, None), (2, b"short"), (2**32, bytes(32))])
def test_a_place_that_cannot_be_is_refused(depth: int, parent: bytes | None) -> None:
    with pytest.raises(InvalidInput):
        Place(depth, parent)
