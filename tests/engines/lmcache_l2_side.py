"""LMCache's multi-process storage in a process of its own: its manager over our L2 adapter, on the CPU.

It answers questions (``tests.engines.sides``).
"""

from __future__ import annotations

import time
from typing import Any

import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.distributed.storage_manager import StorageManager
from tests.engines.sides import answering

COUNT = 6
WAIT_S = 20.0


def manager_of(options: dict[str, Any]) -> StorageManager:
    adapter = PluginL2AdapterConfig("skymemory.engine.lmcache_l2", "SkyMemoryL2Adapter", options)
    memory = L1MemoryManagerConfig(64 << 20, use_lazy=False, shm_name="")
    return StorageManager(
        StorageManagerConfig(L1ManagerConfig(memory), EvictionConfig("LRU"), L2AdaptersConfig([adapter]))
    )


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    dtype, tokens = getattr(torch, asked.get("dtype", "float32")), asked.get("chunk", 16)
    layout = MemoryLayoutDesc([torch.Size([2, 3, tokens, 16])], [dtype])
    group = asked.get("group", 0)

    def keys_of(rank: int) -> list[ObjectKey]:
        model, salt = asked.get("model", "small"), asked.get("salt", "")
        return [ObjectKey(bytes([at]) * 32, model, rank, group, salt) for at in range(COUNT)]

    keys = keys_of(asked.get("rank", 0))

    def number(at: int) -> torch.Tensor:
        return (torch.arange(2 * 3 * tokens * 16) % 251 + at).to(dtype).reshape(layout.shapes[0])

    try:
        manager = manager_of(asked["options"])
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    try:
        ((_, adapter),) = manager.l2_adapters()
        began_s = time.monotonic()
        if asked["do"] == "store":
            reserved = manager.reserve_write(keys, layout)
            for at, key in enumerate(keys):
                reserved[key].tensor.copy_(number(at).reshape(reserved[key].tensor.shape))
            manager.finish_write(keys)
            counters: dict[str, Any] = {}
            while time.monotonic() < began_s + WAIT_S:
                counters = adapter.values.counters.as_dict()
                stored = sum(count for name, count in counters.items() if name.startswith(("stored_total", "present")))
                refused = sum(count for name, count in counters.items() if name.startswith("refused_total"))
                if stored + refused >= COUNT:
                    break
                time.sleep(0.01)
            said = {"stored": stored, "refused": refused}
            if asked.get("unanswered"):
                adapter.values.present = lambda names: [False] * len(names)
                lookup = adapter.submit_lookup_and_lock_task(keys, {})
                while (found := adapter.query_lookup_and_lock_result(lookup)) is None:
                    time.sleep(0.01)
                assert not any(found.test(at) for at in range(COUNT))
        else:
            rows = [keys, *(keys_of(rank) for rank in asked.get("others", ()))]
            window = asked.get("window", -1)
            spec = PrefetchTaskSpec([GroupedObjectKeys(row, group, layout, window) for row in rows])
            handle = manager.submit_prefetch_task(spec)
            assert manager.wait_prefetch_status(handle, WAIT_S)
            result = manager.query_prefetch_status(handle)
            hits = result.l2_hit_cells[0]
            loaded = [hits.test(at) for at in range(COUNT)]
            found = [key for key, there in zip(keys, loaded, strict=True) if there]
            equal = True
            if found:
                with manager.read_prefetched_results(found, result.l1_owners) as objects:
                    for key, one in zip(found, objects, strict=True):
                        expected = number(keys.index(key))
                        equal = equal and torch.equal(one.tensor.reshape(expected.shape), expected)
                manager.finish_read_prefetched(found)
            said = {"loaded": loaded, "equal": equal}
        usage = adapter.get_usage()
        said |= {"used": usage.total_bytes_used, "healthy": adapter.report_status()["is_healthy"]}
        said |= {"seconds": time.monotonic() - began_s, "counters": adapter.values.counters.as_dict()}
        said["keys"] = [adapter.values.key(f"object {_name(key)}").hex() for key in keys]
        if asked.get("delete"):
            adapter.delete(keys)
            said["after"] = adapter.get_usage().total_bytes_used
        return said
    finally:
        manager.close()


def _name(key: ObjectKey) -> str:
    return "@".join(
        (key.model_name, f"{key.kv_rank:x}", str(key.object_group_id), key.cache_salt, key.chunk_hash.hex())
    )


if __name__ == "__main__":
    answering(answer)
