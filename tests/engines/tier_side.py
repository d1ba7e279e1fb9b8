"""vLLM's tiered offloading in a process of its own: its manager and CPU tier over our secondary tier, without workers.

It answers questions (``tests.engines.sides``). What a worker would copy from a device is written into the CPU tier.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

import numpy as np
from tests.engines.sides import answering
from vllm.logger import _configure_vllm_root_logger
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

CHUNKS = 6
CHUNK_BYTES = 8192
STEPS_S = 60.0


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    ranks = asked.get("ranks", 1)
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(asked.get("page", 16), tuple(asked.get("layers", ["0", "1"])), 0),),
        worker_kv_bytes_per_block=CHUNK_BYTES // ranks,
        enable_kv_cache_events=False,
        extra_config={
            "cpu_bytes_to_use": 2 * CHUNKS * CHUNK_BYTES,
            "secondary_tiers": [
                {
                    "type": "SkyMemoryTier",
                    "module_path": "skymemory.engine.vllm.tier",
                    "skymemory": asked["options"],
                }
            ],
        },
        engine_id=f"test-{uuid.uuid4().hex}",
        model=OffloadingModelConfig(asked.get("model", "small"), asked.get("dtype", "float32")),
        cache=OffloadingCacheConfig(tokens_per_hash=asked.get("page", 16), blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=ranks,
            tp_size=ranks,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=asked.get("replicas", 1),
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
        kv_cache_layout=asked.get("layout", "NHD"),
    )
    try:
        manager = TieringOffloadingSpec(config).get_manager()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    (tier,) = manager.secondary_tiers
    memory = np.frombuffer(manager.primary_tier.get_kv_memoryview().cast("B"), np.uint8).reshape(-1, CHUNK_BYTES)
    keys = [make_offload_key(bytes([at]) * 32, 0) for at in range(CHUNKS)]
    request = ReqContext(req_id="one")
    step = ScheduleEndContext(new_req_ids=["one"], preempted_req_ids=[])
    slowest_s = 0.0

    def number(at: int) -> np.ndarray:
        return (np.arange(CHUNK_BYTES) % 251 + at).astype(np.uint8)

    def timed(call: Any) -> Any:
        nonlocal slowest_s
        began_s = time.monotonic()
        found = call()
        slowest_s = max(slowest_s, time.monotonic() - began_s)
        return found

    began_s = time.monotonic()
    said: dict[str, Any] = {"keys": [tier.values.key(key.hex()).hex() for key in keys]}
    manager.on_new_request(request)
    if asked["do"] == "store":
        output = manager.prepare_store(keys, request)
        for at, chunk in enumerate(output.store_spec.chunk_ids):
            memory[chunk] = number(at)
        timed(lambda: manager.complete_store(keys, request))
        timed(lambda: manager.on_schedule_end(step))
        tier.drain_jobs()
        said["stored"] = [result.success for result in tier.get_finished_jobs()]
    else:
        found = dict.fromkeys(keys, LookupResult.RETRY)
        first = None
        while any(one in (LookupResult.RETRY, LookupResult.HIT_PENDING) for one in found.values()):
            assert time.monotonic() < began_s + STEPS_S, found
            for key in keys:
                found[key] = timed(lambda key=key: manager.lookup(key, request))
            first = first or [one.name for one in found.values()]
            timed(lambda: manager.on_schedule_end(step))
            time.sleep(0.005)
        said["first"] = first
        said["loaded"] = [one is LookupResult.HIT for one in found.values()]
        hits = [at for at, key in enumerate(keys) if found[key] is LookupResult.HIT]
        chunks = manager.prepare_load([keys[at] for at in hits], request).chunk_ids if hits else []
        said["equal"] = [bool((memory[chunk] == number(at)).all()) for at, chunk in zip(hits, chunks, strict=True)]
    said["seconds"], said["slowest_s"] = time.monotonic() - began_s, slowest_s
    manager.on_request_finished(request)
    said["counters"] = tier.values.counters.as_dict()
    del memory
    manager.shutdown()
    return said


if __name__ == "__main__":
    _configure_vllm_root_logger()  # as vLLM's engine does
    answering(answer)
