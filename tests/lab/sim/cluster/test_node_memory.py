"""What a node caches: closed under prefixes, whatever the policy; the policies as the tiers have them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymemory.eviction import POLICIES
from skymemory.store.base import Presence
from skymemory.store.memory import MemoryStore
from skymemory_lab.sim.cluster.pool import NodeMemory, PolicyMemory, PrefixCache, memory_of
from skymemory_lab.sim.workload import CONVERSATIONS, generate

CHAINS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=40)


def tree(choices: Sequence[int]) -> tuple[int, ...]:
    """A way down a tree of three branches each: the ids of its nodes."""
    ids, at = [], 0
    for choice in choices:
        at = at * 3 + choice + 1
        ids.append(at)
    return tuple(ids)


def parent(block: int) -> int:
    return (block - 1) // 3


@given(CHAINS, st.sampled_from(POLICIES), st.integers(1, 8), st.sampled_from([0, 3, 20]))
def test_no_block_stays_without_its_parent(prompts: list[list[int]], policy: str, blocks: int, ssd: int) -> None:
    node = NodeMemory(blocks, policy, ssd)
    seen: set[int] = set()
    for chain in map(tree, prompts):
        held = node.leading(chain)
        seen.update(chain)
        node.use(chain)
        assert node.leading(chain) >= min(held, blocks)
        assert 1 <= node.in_memory(chain) <= node.leading(chain)
        assert len(node.memory) <= blocks
        assert len(node) <= blocks + ssd
        for here in (node.leading, node.in_memory):
            resident = {block for block in seen if here((block,))}
            assert all(parent(block) in resident for block in resident if parent(block))


def test_what_memory_evicts_is_on_the_ssd_and_comes_back() -> None:
    node = NodeMemory(3, "lru", 4)
    node.use((1, 2, 3))
    node.use((10, 11))
    assert (node.in_memory((1, 2, 3)), node.leading((1, 2, 3))) == (1, 3)
    node.use((1, 2, 3))
    assert (node.in_memory((1, 2, 3)), node.in_memory((10, 11)), node.leading((10, 11))) == (3, 0, 2)
    assert (node.evicted, node.dropped) == (4, 0)
    node.use((20, 21, 22))
    assert node.leading((10, 11)) == 1  # the SSD holds four: 3, 2, 1 and the older ones' root
    assert (node.evicted, node.dropped) == (7, 1)


def test_what_is_coming_is_ready_when_it_has_come() -> None:
    node = NodeMemory(5)
    node.comes((1, 2), 4.0)
    assert (node.ready_s((1, 9), 1.0), node.ready_s((9,), 1.0), node.ready_s((), 1.0)) == (4.0, 1.0, 1.0)
    assert node.ready_s((1,), 5.0) == 5.0
    assert not node.coming


def test_lru_by_the_shelf_is_lru_by_the_fast_path() -> None:
    dice = random.Random(4)
    fast, shelf = PrefixCache(9), PolicyMemory(9, "lru")
    for _ in range(600):
        chain = tree([dice.randrange(3) for _ in range(dice.randint(1, 6))])
        assert fast.leading(chain) == shelf.leading(chain)
        assert sorted(fast.use(chain)) == sorted(shelf.use(chain))
    assert isinstance(memory_of(3, "lru"), PrefixCache)
    nothing = memory_of(0, "arc")
    assert nothing.use([1, 2]) == [2, 1] and nothing.leading([1]) == len(nothing) == 0


@pytest.mark.brief("lru")
@pytest.mark.parametrize("policy", POLICIES)
def test_hits_are_those_of_the_memory_tier(policy: str) -> None:
    """The calls of ``benchmarks/policies.py`` on the tier itself."""
    requests = [request.blocks() for request in generate(CONVERSATIONS, 150.0, seed=3)][:250]
    store, node = MemoryStore(400, policy=policy, pin_fraction=0), PolicyMemory(400, policy)
    for chain in requests:
        keys = [block.to_bytes(32) for block in chain]
        found = store.prefix(keys)
        assert node.leading(chain) == found
        store.get_many(keys[:found])
        there = store.lookup(keys)
        store.put_many([(key, b"x") for key, one in zip(keys, there, strict=True) if one is Presence.MISS])
        node.use(chain)
    assert len(node) == 400


@given(CHAINS, st.integers(1, 8), st.sampled_from([0, 2, 5]))
def test_memory_and_ssd_are_one_lru_cut_in_two(prompts: list[list[int]], blocks: int, ssd: int) -> None:
    """What each holds follows from when each block was last used: no eviction is looked at (Wong, Wilkes 2002)."""
    node, last_use, clock = NodeMemory(blocks, "lru", ssd), dict[int, int](), 0
    for chain in map(tree, prompts):
        node.use(chain)
        for block in reversed(chain[:blocks]):
            clock += 1
            last_use[block] = clock
        latest = sorted(last_use, key=lambda block: -last_use[block])
        for at, block in enumerate(latest):
            assert node.in_memory((block,)) == (at < blocks)
            assert node.leading((block,)) == (at < blocks + ssd)
        assert node.dropped <= node.evicted
