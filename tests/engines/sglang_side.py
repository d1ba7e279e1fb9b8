"""SGLang's HiCache in a process of its own: its factory makes our backend, over pages of its own host pool, on the CPU.

It answers questions (``tests.engines.sides``).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import sys
import time
import types
from typing import Any

import torch
import transformers.image_utils  # noqa: F401 - before the stand-in below, which it would take for the real one


class _Anything(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


def _any(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything(name, (), {})


class _NoPictures(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for torchvision, whose build for the CPU is not available here: pools of pages use none of it."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        ours = name.partition(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = _any  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """It is empty."""


sys.meta_path.append(_NoPictures())

from sglang.srt.mem_cache.device_pool_info import (  # noqa: E402
    KVBufferLayout,
    KVBuffers,
    MambaStateBufferInfo,
    MHABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheFile,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope  # noqa: E402
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory  # noqa: E402
from tests.engines.sides import answering  # noqa: E402

PAGES = 6
LAYERS, DIM = 3, 8


def pool_of(dtype: torch.dtype, heads: int, page: int, layout: str) -> Any:
    """A host pool of twice as many pages as are stored, over an empty pool of a device that is the CPU."""
    empty = tuple(torch.zeros(page, heads, DIM, dtype=dtype) for _ in range(LAYERS))
    pointers = torch.tensor([one.data_ptr() for one in empty], dtype=torch.uint64)
    buffers = KVBuffers(k=empty, v=empty, k_data_ptrs=pointers, v_data_ptrs=pointers, layout=KVBufferLayout.NHD)
    about = MHABufferInfo(
        buffers=buffers,
        page_size=page,
        head_num=heads,
        head_dim=DIM,
        v_head_dim=DIM,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    with host_memory_budget_scope(1 << 30):
        return MHATokenToKVPoolHost(
            about,
            host_to_device_ratio=1.0,
            host_size=0,
            page_size=page,
            layout=layout,
            pin_memory=False,
            device_capacity_tokens=page,
            start_layer=0,
            end_layer=LAYERS,
            host_token_capacity=2 * PAGES * page,
        )


def states_of() -> Any:
    """A host pool of recurrent states, one a page."""
    temporal = torch.zeros(2, 4, 3, 5)
    about = MambaStateBufferInfo(temporal=temporal, conv=(torch.zeros(2, 4, 6, dtype=torch.bfloat16),))
    with host_memory_budget_scope(1 << 30):
        return MambaPoolHost(
            about, host_to_device_ratio=4.0, host_size=0, device_capacity=4, pin_memory=False, layout="page_first"
        )


def hybrid(asked: dict[str, Any], backend: Any, config: Any, pool: Any) -> dict[str, Any]:
    """Pages of keys and values, of a window and of states: stored, or looked up and loaded. Each lookup is made of
    SGLang's own backend for files, too, which has the same pages.
    """
    window, states = pool_of(torch.float32, 1, 4, "page_first"), states_of()
    pools = {PoolName.KV: pool, PoolName.SWA: window, PoolName.MAMBA: states}
    keys = [f"{at:064x}" for at in range(PAGES)]

    def page(name: PoolName, at: int) -> torch.Tensor:
        flat = pools[name].get_dummy_flat_data_page()
        noise = torch.Generator().manual_seed(1000 * list(pools).index(name) + at)
        drawn = torch.randint(0, 255, (flat.numel() * flat.element_size(),), dtype=torch.uint8, generator=noise)
        return (drawn % 60).view(flat.dtype)  # no NaN

    def transfer(name: PoolName, which: list[int], policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES) -> PoolTransfer:
        size = pools[name].page_size
        places = torch.cat([torch.arange(at * size, (at + 1) * size) for at in which])
        return PoolTransfer(name, host_indices=places, keys=[keys[at] for at in which], hit_policy=policy)

    for one in (backend, files := HiCacheFile(config, asked["folder"])):
        for name, host in pools.items():
            one.register_mem_host_pool_v2(host, name)
    stored = {PoolName[name]: which for name, which in asked["stored"].items()}
    if asked["do"] == "store":
        for name, which in stored.items():
            for at in which:
                pools[name].set_from_flat_data_page(at * pools[name].page_size, page(name, at))
        wanted = [transfer(name, which) for name, which in stored.items() if which]
        for name, which in stored.items():
            for at in which:
                files.set(files._log_key(name, keys[at]), page(name, at))
        said: dict[str, Any] = {"stored": backend.batch_set_v2(wanted)}
    else:
        policies = {"all": PoolHitPolicy.ALL_PAGES, "last": PoolHitPolicy.TRAILING_PAGES}
        others = [
            transfer(PoolName[name], list(range(count)), policies[policy]) for name, policy, count in asked["others"]
        ]
        found, expected = (one.batch_exists_v2(keys, others) for one in (backend, files))
        said = {"found": found.kv_hit_pages, "same": found == expected, "of files": str(expected)}
        hits = found.kv_hit_pages
        sights = {PoolName[name]: hits if policy == "all" else count for name, policy, count in asked["others"]}
        wanted = [transfer(name, list(range(max(0, hits - sight), hits))) for name, sight in sights.items() if hits]
        wanted += [transfer(PoolName.KV, list(range(hits)))] if hits else []
        said["loaded"] = backend.batch_get_v2(wanted)
        said["equal"] = all(
            torch.equal(
                pools[one.name].get_data_page(keys.index(key) * pools[one.name].page_size).view(torch.uint8),
                page(one.name, keys.index(key)).view(torch.uint8),
            )
            for one in wanted
            for key in one.keys
        )
    said["stats"] = [sum(backend.get_stats().prefetch_pgs), sum(backend.get_stats().prefetch_pgs)]
    backend.close()
    return said


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    dtype = getattr(torch, asked.get("dtype", "float32"))
    heads, page, layout = asked.get("heads", 2), asked.get("page", 4), asked.get("layout", "page_first")
    by_pointer = asked.get("v1", False)
    pool = pool_of(dtype, heads, page, layout)
    config = HiCacheStorageConfig(
        tp_rank=asked.get("rank", 0),
        tp_size=asked.get("ranks", 2),
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=asked.get("mla", False),
        enable_storage_metrics=asked.get("metrics", True),
        is_page_first_layout=layout == "page_first",
        model_name=asked.get("model", "small"),
        extra_config={
            "backend_name": "skymemory",
            "module_path": "skymemory.engine.sglang",
            "class_name": "SkyMemoryStorage",
            "interface_v1": int(by_pointer),
            "skymemory": asked["options"],
        },
    )
    try:
        backend = StorageBackendFactory.create_backend("dynamic", config, pool)
        backend.register_mem_pool_host(pool)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    if "stored" in asked:
        return hybrid(asked, backend, config, pool)
    keys = [f"{at:064x}" for at in range(PAGES)]
    flat = pool.get_dummy_flat_data_page()

    def number(at: int) -> torch.Tensor:
        return (torch.arange(flat.numel()) % 251 + at).to(dtype)

    places = torch.arange(PAGES * page)
    if asked["do"] == "store":
        for at in range(PAGES):
            pool.set_from_flat_data_page(at * page, number(at))
    began_s = time.monotonic()
    names = [("pieces " if by_pointer else "page ") + key for key in keys]
    said: dict[str, Any] = {"keys": [backend.values.key(name).hex() for name in names]}
    if asked["do"] == "store" and by_pointer:
        said["stored"] = backend.batch_set_v1(keys, places)
    elif asked["do"] == "store":
        said["stored"] = backend.batch_set(keys, [pool.get_data_page(at * page) for at in range(PAGES)])
        said["again"] = backend.set(keys[0], pool.get_data_page(0))
    else:
        said["one"] = backend.exists(keys[0])
        said["prefix"] = backend.batch_exists(keys)
        if by_pointer:
            said["loaded"] = backend.batch_get_v1(keys, places)
        else:
            found = backend.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys])
            said["loaded"] = [one is not None for one in found]
            for at, one in enumerate(found):
                if one is not None:
                    pool.set_from_flat_data_page(at * page, one)
            alone = backend.get(keys[0], pool.get_dummy_flat_data_page())
            said["alone"] = alone is not None and torch.equal(alone, number(0))
        pages = [pool.get_data_page(at * page) for at in range(PAGES)]
        said["equal"] = [
            torch.equal(one, number(at) if ok else torch.zeros_like(one))
            for at, (one, ok) in enumerate(zip(pages, said["loaded"], strict=True))
        ]
    said["seconds"] = time.monotonic() - began_s
    said["counters"] = backend.values.counters.as_dict()
    said["noted"] = len(backend._metrics.prefetch_pgs) + len(backend._metrics.backup_pgs)
    backend.close()
    return said


if __name__ == "__main__":
    logging.basicConfig(level="INFO")  # as SGLang's server does
    answering(answer)
