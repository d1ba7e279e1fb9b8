"""LMCache in a process of its own: its RemoteBackend over its own clients of Redis, ``redis://`` (redis-py) and
``resp://`` (native).

It answers questions (``tests.engines.sides``).
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from functools import cache
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend
from tests.engines.sides import answering

CHUNK_TOKENS, HEADS, HEAD = 256, 4, 64


@cache
def backend_at(url: str) -> tuple[RemoteBackend, LocalCPUBackend, LMCacheMetadata]:
    """Never closed: LMCache 0.5.6 waits there on its own event loop, without end, over Redis itself, too."""
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK_TOKENS,
        local_cpu=False,
        max_local_cpu_size=0.1,
        remote_url=url,
        remote_serde="naive",
        blocking_timeout_secs=20,
        save_unfull_chunk=False,
        extra_config={"save_chunk_meta": False, "resp_num_threads": 4},
    )
    metadata = LMCacheMetadata(
        model_name="small",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.float32,
        kv_shape=(4, 2, CHUNK_TOKENS, HEADS, HEAD),
        chunk_size=CHUNK_TOKENS,
        role="worker",
    )
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    local = LocalCPUBackend(config, metadata, "cpu")
    return RemoteBackend(config, metadata, loop, local, "cpu"), local, metadata


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """``do``: "store", "contains" or "load", of ``keys``, a list of numbers."""
    backend, local, metadata = backend_at(asked["options"]["store"])
    keys = [CacheEngineKey("small", 1, 0, 1000 + number, torch.float32) for number in asked["keys"]]
    (shape,) = metadata.get_shapes()

    def number(at: int) -> torch.Tensor:
        return (torch.arange(shape.numel()).reshape(shape) % 251 + at).to(torch.float32)

    began_s = time.monotonic()
    said: dict[str, Any] = {"bytes": shape.numel() * 4}
    if asked["do"] == "store":
        memories = []
        for at in asked["keys"]:
            memory = local.allocate(shape, torch.float32, MemoryFormat.KV_2LTD)
            memory.tensor.copy_(number(at))
            memories.append(memory)
        backend.batched_submit_put_task(keys, memories)
        for memory in memories:
            memory.ref_count_down()
        while any(memory.get_ref_count() for memory in memories) and time.monotonic() < began_s + 60:
            time.sleep(0.01)
        said["held"] = sum(memory.get_ref_count() for memory in memories)
    elif asked["do"] == "contains":
        said["contains"] = [backend.contains(key) for key in keys]
    else:
        found = [backend.get_blocking(key) for key in keys]
        said["loaded"] = [one is not None for one in found]
        said["equal"] = [
            one is None or torch.equal(one.tensor, number(at)) for at, one in zip(asked["keys"], found, strict=True)
        ]
        if all(said["loaded"]):
            together = backend.batched_get_blocking(keys)
            said["together"] = [
                one is not None and torch.equal(one.tensor, number(at))
                for at, one in zip(asked["keys"], together, strict=True)
            ]
    said["seconds"] = time.monotonic() - began_s
    return said


if __name__ == "__main__":
    answering(answer)
    os._exit(0)  # past the threads of what was not closed
