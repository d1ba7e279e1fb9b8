"""Suffix first: under pressure a block does not outlive those before it, so presence stays prefix-closed."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from tests.store.conftest import simulated, store_over

from skymemory.eviction import REPLACEMENTS
from skymemory.store.base import Presence
from skymemory.store.sky.probing import PrefixSearch
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.store.sky.store import ConstellationStore
from skymemory.transport.faults import FaultInjector
from skymemory.transport.simulated import SimulatedConstellation

CHUNK_BYTES, CHUNKS = 600, 20
BLOCK_BYTES = CHUNK_BYTES * CHUNKS


def key(*path: int) -> bytes:
    return random.Random(str(path)).randbytes(32)


def chain(shared: int, tail: int, prompt: int) -> list[bytes]:
    """``shared`` blocks of one of three system prompts, then the prompt's own."""
    root = prompt % 3
    return [key(root, depth) for depth in range(shared)] + [key(root, shared, prompt, d) for d in range(tail)]


def serve(store: ConstellationStore, keys: list[bytes]) -> int:
    """What an engine does with a prompt: load the longest prefix, compute and store the rest. Blocks that hit."""
    found = store.prefix(keys)
    loaded = store.get_many(keys[:found]) if found else []
    hits = next((at for at, value in enumerate(loaded) if value is None), found)
    assert all(bytes(value) == key_value(k) for k, value in zip(keys, loaded, strict=False) if value is not None)
    missing = [k for k, there in zip(keys, store.lookup(keys), strict=True) if there is Presence.MISS]
    store.put_many([(k, key_value(k)) for k in missing])
    return hits


def key_value(k: bytes) -> bytes:
    return random.Random(k).randbytes(BLOCK_BYTES)


def complete(sky: SimulatedConstellation, k: bytes) -> bool:
    held = [machine.store.presence(k) for machine in sky.satellites.values()]
    return sum(presence.held for presence in held if presence is not None) == CHUNKS


def violations(sky: SimulatedConstellation, chains: list[list[bytes]]) -> int:
    """Satellites that hold a block's chunks without those of the block before it, summed over all chains."""
    return sum(
        machine.store.presence(later) is not None and machine.store.presence(earlier) is None
        for keys in chains
        for earlier, later in pairwise(keys)
        for machine in sky.satellites.values()
    )


@pytest.mark.brief()
@pytest.mark.parametrize("replacement", REPLACEMENTS)
@pytest.mark.parametrize("indexed", [True, False])
def test_presence_stays_prefix_closed_and_a_bare_binary_search_is_right(replacement: str, indexed: bool) -> None:
    sky = simulated(40 * (CHUNK_BYTES + 72), replacement=replacement)
    store = store_over(sky, index=SharedIndex() if indexed else None, chunk_bytes=CHUNK_BYTES)
    rng = random.Random(5)
    chains: list[list[bytes]] = []
    for step in range(45):
        keys = chain(rng.choice([2, 4]), rng.choice([1, 2, 3]), rng.randrange(12))
        chains.append(keys)
        serve(store, keys)
        sky.settle(sky.now_s + 5.0)  # what has just been stored may still be on its way, and is not proved lost
        assert violations(sky, chains) == 0, step
        for one in chains:
            truth = [complete(sky, k) for k in one]
            search = PrefixSearch(len(one), verify=False)
            while not search.done:
                search.answer({at: truth[at] for at in search.next_probe()})
            assert search.result == (truth.index(False) if False in truth else len(one))
    assert sum(machine.counters.get("chunks_evicted") for machine in sky.satellites.values()) > 500


@pytest.mark.brief()
def test_lost_and_reordered_packets_disturb_the_order_only_for_a_while() -> None:
    """The touch after a write sets it right, so holes do not add up."""
    sky = simulated(40 * (CHUNK_BYTES + 72), faults=FaultInjector(loss=0.02, reorder=0.05, seed=3))
    store = store_over(sky, index=SharedIndex(), chunk_bytes=CHUNK_BYTES)
    rng = random.Random(5)
    chains: list[list[bytes]] = []
    seen = []
    for _ in range(60):
        keys = chain(4, rng.choice([1, 2, 3]), rng.randrange(12))
        chains.append(keys)
        serve(store, keys)
        sky.settle(sky.now_s + 0.1)
        seen.append(violations(sky, chains) / len(chains) / len(sky.satellites))
    assert max(seen) < 0.05


def test_what_is_stored_last_block_first_keeps_the_beginning_where_all_does_not_fit() -> None:
    sky = simulated(10 * (CHUNK_BYTES + 72))
    store = store_over(sky, index=SharedIndex(), chunk_bytes=CHUNK_BYTES)
    keys = chain(8, 0, 1)
    store.put_many([(k, key_value(k)) for k in keys])
    there = [complete(sky, k) for k in keys]
    assert there[0] and there == sorted(there, reverse=True)


@pytest.mark.brief()
def test_without_the_touch_the_order_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the check: blocks stored behind a prefix that was there would outlive it, by LRU often."""
    sky = simulated(40 * (CHUNK_BYTES + 72), replacement="lru")
    store = store_over(sky, index=SharedIndex(), chunk_bytes=CHUNK_BYTES)
    monkeypatch.setattr(store._catalog, "before", lambda key: [])
    rng = random.Random(5)
    chains: list[list[bytes]] = []
    seen = 0
    for _ in range(45):
        keys = chain(rng.choice([2, 4]), rng.choice([1, 2, 3]), rng.randrange(12))
        chains.append(keys)
        serve(store, keys)
        sky.settle(sky.now_s + 0.1)
        seen += violations(sky, chains)
    assert seen > 0
