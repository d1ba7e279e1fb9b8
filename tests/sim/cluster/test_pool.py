"""The pool by hand: who holds what, and when what is loaded has come."""

from __future__ import annotations

import numpy as np
import pytest

from skymemory.conductor.cost_model import LLAMA_70B_8xA800 as COST
from skymemory.conductor.cost_model.transfer import Medium
from skymemory.conductor.request import Plan
from skymemory.sim.cluster.pool import ClusterPool, PoolSettings

BLOCK = COST.kv_bytes(512)
NETWORK = Medium("network", BLOCK, 0.5)
"""A block a second, half a second before the first byte."""


def pool(blocks: int = 4) -> ClusterPool:
    return ClusterPool(["a", "b", "d"], COST, PoolSettings(dram_bytes=blocks * BLOCK, network=NETWORK))


def plan(split: int, loaded: int, source: str = "a") -> Plan:
    return Plan(0, split * 512, loaded * 512, source)


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
    loaded = here.load(1, (1, 2, 3, 4), Plan(512, 1024, 512, "a"), 0.0)
    assert (loaded.held_tokens, loaded.split_tokens, loaded.loaded_tokens) == (512, 1024, 512)
    assert here.leading(1, (1, 2, 3)) == 1  # what lies between is not there before it is computed
