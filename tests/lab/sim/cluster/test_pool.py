"""The pool by hand: who holds what, and when what is loaded has come."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymemory.conductor.cost_model import LLAMA_70B_8xA800 as COST
from skymemory.conductor.cost_model import Medium
from skymemory.conductor.request import PromptPlan
from skymemory_lab.sim.cluster.pool import ClusterPool
from skymemory_lab.sim.cluster.setup import PoolSettings, SkySetup
from skymemory_lab.sim.cluster.simulation import new_pool

BLOCK = COST.kv_bytes(512)
NETWORK = Medium("network", BLOCK, 0.5)
"""A block a second, half a second before the first byte."""


def pool(blocks: int = 4) -> ClusterPool:
    return ClusterPool(["a", "b", "d"], COST, PoolSettings(dram_bytes=blocks * BLOCK, network=NETWORK))


def plan(split: int, loaded: int, source: str = "a") -> PromptPlan:
    return PromptPlan(0, split * 512, loaded * 512, source)


def test_loading_from_another_node_takes_its_bytes_over_the_links_and_is_cached() -> None:
    here = pool()
    here.stored(0, (1, 2, 3), 0.0)
    loaded = here.load(1, (1, 2, 3, 4), plan(0, 3), 10.0)
    assert (loaded.held_tokens, loaded.split_tokens, loaded.loaded_tokens) == (0, 0, 1536)
    assert loaded.done_s == pytest.approx(10 + 3 + 0.5)
    assert loaded.sources == {"node": 1536}
    assert here.match(np.array([1, 2, 3, 4], dtype=np.uint64), [0, 1, 2]) == [3, 3, 0]


def test_a_second_load_waits_for_the_first_on_the_link_that_they_share() -> None:
    here = pool()
    here.stored(0, (1, 2, 3), 0.0)
    here.load(1, (1, 2, 3), plan(0, 3), 10.0)
    assert here.load(2, (1, 2), plan(0, 2), 11.0).done_s == pytest.approx(13 + 2 + 0.5)
    assert here.stream(1, 0, 512, 11.0) == pytest.approx(11 + 1 + 0.5)  # other links


def test_what_the_source_lost_is_not_loaded() -> None:
    here = pool()
    here.stored(0, (1, 2, 3), 0.0)
    here.lost(0, 1.0)
    loaded = here.load(1, (1, 2, 3), plan(0, 3), 2.0)
    assert (loaded.cached_tokens, loaded.done_s) == (0, 2.0)


def test_a_plan_with_a_split_loads_what_follows_it() -> None:
    here = pool()
    here.stored(0, (1, 2, 3), 0.0)
    here.stored(1, (1,), 0.0)
    loaded = here.load(1, (1, 2, 3, 4), PromptPlan(512, 1024, 512, "a"), 0.0)
    assert (loaded.held_tokens, loaded.split_tokens, loaded.loaded_tokens) == (512, 1024, 512)
    assert here.leading(1, (1, 2, 3)) == 1  # what lies between is not there before it is computed


def test_what_is_on_its_way_is_ready_when_it_has_come_and_not_before() -> None:
    here = pool()
    here.stored(0, (1, 2, 3), 0.0)
    here.load(1, (1, 2, 3), plan(0, 3), 10.0)  # comes at 13.5
    again = here.load(1, (1, 2, 9), None, 11.0)
    assert (again.held_tokens, again.held_s, again.done_s) == (1024, 13.5, 13.5)
    onward = here.load(2, (1, 2), plan(0, 2, "b"), 11.0)
    assert onward.done_s == pytest.approx(13.5 + 2 + 0.5)
    assert here.load(1, (1, 2), None, 14.0).held_s == 14.0


def test_what_memory_evicted_is_read_from_the_ssd() -> None:
    settings = PoolSettings(3 * BLOCK, ssd_bytes=9 * BLOCK, network=NETWORK, ssd=Medium("ssd", BLOCK / 2, 0.1))
    here = ClusterPool(["a", "b"], COST, settings)
    here.stored(0, (1, 2, 3), 0.0)
    here.stored(0, (7, 8), 0.0)
    assert here.match(np.array([1, 2, 3], dtype=np.uint64), [0, 1]) == [3, 0]
    remote = here.load(1, (1, 2, 3), plan(0, 3), 5.0)  # two blocks from the SSD at 4.1, three over the network at 3.5
    assert remote.done_s == pytest.approx(5 + 4.1 + 0.5)
    loaded = here.load(0, (1, 2, 3), None, 10.0)
    assert loaded.sources == {"dram": 512, "ssd": 1024}
    assert (loaded.held_tokens, loaded.loaded_tokens, loaded.held_s) == (1536, 0, pytest.approx(10 + 4 + 0.1))
    assert here.load(0, (1, 2, 3), None, 20.0).sources == {"dram": 1536}


def test_the_sky_is_a_source_and_gets_copies() -> None:
    settings = PoolSettings(3 * BLOCK, network=NETWORK, sky=SkySetup(bytes_per_s=2 * BLOCK, servers=9))
    here = new_pool(["a", "b"], COST, settings)
    prompt = np.array([1, 2, 3, 4], dtype=np.uint64)
    here.at(0.5)
    here.stored(0, (1, 2, 3), 0.5)
    assert here.far(prompt) == []  # not yet up there
    here.lost(0, 60.0)
    here.at(60.0)
    assert (here.match(prompt, [0, 1]), [(far.tier, far.blocks) for far in here.far(prompt)]) == ([0, 0], [("sky", 3)])
    light_s = here.far(prompt)[0].medium.latency_s
    loaded = here.load(1, (1, 2, 3, 4), PromptPlan(0, 512, 1024, "sky"), 60.0)
    assert (loaded.split_tokens, loaded.loaded_tokens, loaded.sources) == (512, 1024, {"sky": 1024})
    assert loaded.done_s == pytest.approx(60 + 2 + light_s, abs=1.1)  # its own node's link is the slower: two seconds


def test_what_comes_late_by_chance_is_seeded_and_only_later() -> None:
    def ends(seed: int) -> list[float]:
        here = ClusterPool(["a", "b"], COST, PoolSettings(4 * BLOCK, network=NETWORK, jitter_s=0.2, seed=seed))
        return [here.stream(0, 1, 512, 10.0 * at) - (10.0 * at + 1.5) for at in range(200)]

    assert ends(1) == ends(1)
    assert ends(1) != ends(2)
    assert min(ends(1)) > 0
    assert sum(ends(1)) / 200 == pytest.approx(0.2, rel=0.25)


@given(
    st.lists(
        st.tuples(st.sampled_from("lsxd"), st.integers(0, 2), st.integers(0, 2), st.integers(1, 6), st.integers(0, 3)),
        max_size=40,
    )
)
def test_every_byte_is_carried_once_and_a_lost_node_holds_nothing(
    steps: list[tuple[str, int, int, int, int]],
) -> None:
    here, now_s, moved = pool(5), 0.0, 0
    for kind, node, other, length, root in steps:
        now_s += 0.25
        ids = tuple(root * 100 + at for at in range(length))
        if kind == "l":
            held, there = here.leading(node, ids), here.leading(other, ids)
            loaded = here.load(node, ids, PromptPlan(held * 512, held * 512, 512 * length, here.names[other]), now_s)
            extra = max(0, there - held) if other != node else 0
            assert (loaded.held_tokens, loaded.loaded_tokens) == (held * 512, extra * 512)
            assert loaded.done_s >= loaded.held_s >= now_s
            assert (loaded.done_s >= now_s + extra + 0.5) if extra else True
            moved += extra
        elif kind == "s":
            here.stored(node, ids, now_s)
            assert here.leading(node, ids) == min(length, 5)
        elif kind == "x":
            done_s = here.stream(node, other, length * 512, now_s)
            assert done_s >= now_s + (length if node != other else 0)
            moved += length if node != other else 0
        else:
            here.lost(node, now_s)
            assert (here.blocks_of(node), here.leading(node, ids)) == (0, 0)
        assert here.blocks_of(node) <= 5
    assert here.figures()["network_bytes"] == moved * BLOCK
