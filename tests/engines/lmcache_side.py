"""LMCache in a process of its own: its RemoteBackend over our connector, on its stand-in for a device.

It answers questions (``tests.engines.sides``).
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend
from tests.engines.sides import answering

CHUNKS = 6


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    dtype = getattr(torch, asked.get("dtype", "float32"))
    heads, chunk, ranks = asked.get("heads", 2), asked.get("chunk", 16), asked.get("ranks", 2)
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=chunk,
        local_cpu=False,
        max_local_cpu_size=0.02,
        remote_storage_plugins=["sky"],
        remote_serde="naive",
        blocking_timeout_secs=20,
        extra_config={
            "remote_storage_plugin.sky.module_path": "skymemory.engine.lmcache",
            "remote_storage_plugin.sky.class_name": "SkyMemoryConnector",
            **{f"skymemory.{name}": value for name, value in asked["options"].items()},
        },
    )
    metadata = LMCacheMetadata(
        model_name=asked.get("model", "small"),
        world_size=ranks,
        local_world_size=ranks,
        worker_id=asked.get("rank", 0),
        local_worker_id=asked.get("rank", 0),
        kv_dtype=dtype,
        kv_shape=(3, 2, chunk, heads, 8),
        chunk_size=chunk,
        role="worker",
    )
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    local = LocalCPUBackend(config, metadata, "cpu")
    try:
        backend = RemoteBackend(config, metadata, loop, local, "cpu", plugin_name="sky")
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    connector = backend.connection.getWrappedConnector()
    keys = [CacheEngineKey(metadata.model_name, ranks, metadata.worker_id, 1000 + at, dtype) for at in range(CHUNKS)]
    (shape,) = metadata.get_shapes()

    def number(at: int) -> torch.Tensor:
        """The last chunk of a prompt is shorter."""
        tokens = chunk if at < CHUNKS - 1 else chunk - 3
        return (torch.arange(shape.numel()).reshape(shape) % 251 + at).to(dtype)[:, :, :tokens].contiguous()

    def room() -> int:
        """How many chunks there is memory for."""
        taken = []
        while (one := local.allocate(shape, dtype, MemoryFormat.KV_2LTD, eviction=False)) is not None:
            taken.append(one)
        for one in taken:
            one.ref_count_down()
        return len(taken)

    before = room()
    began_s = time.monotonic()
    said: dict[str, Any] = {"keys": [connector.values.key(key.to_string()).hex() for key in keys]}
    if asked["do"] == "store":
        memories = []
        for at in range(CHUNKS):
            memory = local.allocate(number(at).shape, dtype, MemoryFormat.KV_2LTD)
            memory.tensor.copy_(number(at))
            memories.append(memory)
        backend.batched_submit_put_task(keys, memories)
        for memory in memories:
            memory.ref_count_down()
        while any(memory.get_ref_count() for memory in memories) and time.monotonic() < began_s + 60:
            time.sleep(0.01)
        said["held"] = sum(memory.get_ref_count() for memory in memories)
    elif asked["do"] == "give up":

        async def give_up() -> list[Any]:
            """Cancelled in the loop: what ends while another thread cancels it would be lost."""
            begun = [loop.create_task(connector.batched_get(keys)) for _ in range(20)]
            await asyncio.sleep(0)
            for one in begun:
                one.cancel()
            return await asyncio.gather(*begun, return_exceptions=True)

        for found in asyncio.run_coroutine_threadsafe(give_up(), loop).result(60):
            for one in found if isinstance(found, list) else ():
                one.ref_count_down()
    else:
        said["one"] = backend.contains(keys[0])
        said["prefix"] = backend.batched_contains(keys)
        later = asyncio.run_coroutine_threadsafe(backend.batched_async_contains("1", keys), loop)
        said["prefix_async"] = later.result(60)
        found = backend.batched_get_blocking(keys)
        said["loaded"] = [one is not None for one in found]
        said["equal"] = [one is None or torch.equal(one.tensor, number(at)) for at, one in enumerate(found)]
        alone = backend.get_blocking(keys[0])
        said["alone"] = alone is not None and torch.equal(alone.tensor, number(0))
        begun = asyncio.run_coroutine_threadsafe(backend.batched_get_non_blocking("1", keys), loop).result(60)
        said["begun"] = len(begun)
        for one in [*found, alone, *begun]:
            if one is not None:
                one.ref_count_down()
        said["freed"] = all(one is None or one.get_ref_count() == 0 for one in [*found, alone, *begun])
    said["seconds"] = time.monotonic() - began_s
    backend.close()  # the threads have ended: a load that LMCache gave up holds nothing
    said["leaked"] = before - room()
    said["counters"] = connector.values.counters.as_dict()
    return said


if __name__ == "__main__":
    answering(answer)
