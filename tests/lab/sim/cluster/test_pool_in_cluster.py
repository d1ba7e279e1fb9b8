"""What the pool says of time is what requests wait: from an SSD, from a node to which it is still on its way."""

from __future__ import annotations

import pytest

from skymemory.conductor.cost_model import LLAMA_70B_8xA800 as COST
from skymemory.conductor.cost_model import Medium
from skymemory_lab.sim.cluster.setup import ClusterSetup, PoolSettings, SkySetup
from skymemory_lab.sim.cluster.simulation import run_cluster
from skymemory_lab.sim.trace import TraceRequest
from skymemory_lab.sim.workload import CONVERSATIONS, generate

BLOCK = COST.kv_bytes(512)


def request(at_s: float, *ids: int) -> TraceRequest:
    return TraceRequest(at_s, 512 * len(ids), 1, ids)


def test_a_prompt_on_the_ssd_waits_for_it() -> None:
    slow = PoolSettings(3 * BLOCK, ssd_bytes=9 * BLOCK, ssd=Medium("ssd", BLOCK / 10))
    setup = ClusterSetup(prefill=1, decode=1, pool=slow)
    run = run_cluster([request(0, 1, 2, 3), request(100, 7, 8, 9), request(200, 1, 2, 3, 4)], setup)
    computed_s = COST.prefill_s(2048, 1536)
    last = run.outcomes[-1]
    assert (last.held_tokens, last.loaded_tokens) == (0, {"ssd": 1536})
    assert last.ttft_s == pytest.approx(30 + computed_s / COST.shape.layers, abs=0.1)  # three blocks of ten seconds


def test_an_unused_sky_changes_nothing_but_gets_copies() -> None:
    requests = [request(0, 1, 2), request(5, 1, 2, 3)]
    alone = run_cluster(requests, ClusterSetup(prefill=2, decode=1))
    below = run_cluster(requests, ClusterSetup(prefill=2, decode=1, pool=PoolSettings(sky=SkySetup(servers=9))))
    assert alone.outcomes == below.outcomes


def test_every_byte_of_a_run_is_carried_once_and_every_loaded_token_reported() -> None:
    sky = SkySetup(servers=9, packing=0.5)
    setup = ClusterSetup(prefill=3, decode=2, pool=PoolSettings(150 * BLOCK, sky=sky))
    requests = generate(CONVERSATIONS, 100.0, seed=5)
    run = run_cluster(requests, setup, "kvcache-centric")
    assert {one.status for one in run.outcomes} == {"completed"}
    reported = {name: sum(one.loaded_tokens.get(name, 0) for one in run.outcomes) for name in ("node", "sky")}
    assert min(reported.values()) > 5_000
    for name, tokens in reported.items():  # of a prompt that is there whole, the last token is computed all the same
        assert 0 <= run.pool[f"{name}_tokens"] - tokens <= len(requests)
    per_token = COST.kv_bytes(1)
    sky_bytes = run.pool["sky_tokens"] * per_token * sky.packing
    assert run.pool["sky_down_bytes"] == sky_bytes
    streamed = sum(one.prompt_tokens for one in run.outcomes)
    assert run.pool["network_bytes"] == (run.pool["node_tokens"] + streamed) * per_token + sky_bytes
    assert run.pool["sky_up_bytes"] == (run.pool["sky_blocks"] + run.pool["sky_evicted_blocks"]) * BLOCK * sky.packing
