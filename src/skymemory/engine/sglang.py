"""SGLang's HiCache: its pages in any store, by the backend "dynamic" (docs/guide/sglang.md).

Both of its interfaces: pages copied out by SGLang (``batch_get``, ``batch_set``), and pages by pointer
(``batch_get_v1``, ``batch_set_v1``; ``"interface_v1": 1``). SGLang calls them in threads of its own.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import Any

import sglang
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from skymemory.engine.plugin import PluginSettings, PluginStore, warn_untested
from skymemory.errors import InvalidInput
from skymemory.kv.context import CacheContext

_log = logging.getLogger(__name__)


class SkyMemoryStorage(HiCacheStorage):  # type: ignore[misc]
    """Raises InvalidInput for a wrong option."""

    def __init__(self, storage_config: Any, kwargs: dict[str, Any]) -> None:
        warn_untested("SGLang", sglang.__version__, "0.5.23")
        self._config = storage_config
        where = "hicache-storage-backend-extra-config, skymemory"
        processes = storage_config.tp_size * storage_config.pp_size * storage_config.attn_cp_size
        table = (storage_config.extra_config or {}).get("skymemory", {})
        self._settings = PluginSettings.read(table, where, processes)
        if "queue" in table:
            raise InvalidInput(
                f"{where}: queue: SGLang saves in a thread of its own, and nothing waits here: leave it out"
            )
        self._values: PluginStore | None = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pages are known, and with them all that they depend on."""
        super().register_mem_pool_host(mem_pool_host)
        context = _context(self._settings.weights, self._config, mem_pool_host)
        page_bytes = mem_pool_host.get_size_per_token() * mem_pool_host.page_size
        self._values = PluginStore(self._settings, context, page_bytes)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        if str(host_pool_name) != "kv":
            raise InvalidInput(
                f"this model has a pool {host_pool_name} beside its keys and values, which is not supported: run it "
                "without --hicache-storage-backend"
            )

    @property
    def values(self) -> PluginStore:
        if self._values is None:
            raise InvalidInput("no pool of pages is registered yet: expected register_mem_pool_host first")
        return self._values

    # --- is it there ---

    def exists(self, key: str) -> bool:
        return self.values.present([self._name(key)]) == [True]

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return self.values.prefix([self._name(key) for key in keys])

    def _name(self, key: str) -> str:
        """Pages by pointer may be cut in another order than copied ones."""
        by_pointer = bool((self._config.extra_config or {}).get("interface_v1", 0))
        return _by_pointer(key) if by_pointer else _copied(key)

    # --- pages that SGLang copies ---

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self.batch_get([key], [target_location], target_sizes)[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        targets = list(target_locations)

        def place(at: int, value: memoryview) -> bool:
            room = _bytes_of(targets[at])
            if room.nbytes != value.nbytes:
                return False
            room[:] = value
            return True

        loaded = self.values.load([_copied(key) for key in keys], place)
        return [target if ok else None for target, ok in zip(targets, loaded, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return all(self.values.save([_copied(key) for key in keys], lambda at: [_bytes_of(values[at].contiguous())]))

    # --- pages by pointer ---

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        pages = self._pages(len(keys), host_indices)

        def place(at: int, value: memoryview) -> bool:
            if sum(piece.nbytes for piece in pages[at]) != value.nbytes:
                return False
            for piece in pages[at]:
                piece[:] = value[: piece.nbytes]
                value = value[piece.nbytes :]
            return True

        return self.values.load([_by_pointer(key) for key in keys], place)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        pages = self._pages(len(keys), host_indices)
        return self.values.save([_by_pointer(key) for key in keys], lambda at: pages[at])

    def _pages(self, count: int, host_indices: torch.Tensor) -> list[Sequence[memoryview]]:
        """The pieces of each page in the host's pool, in the pool's order."""
        pointers, sizes = self.mem_pool_host.get_page_buffer_meta(host_indices)
        each, rest = divmod(len(pointers), count)
        if rest:
            raise InvalidInput(f"{len(pointers)} pieces for {count} pages: expected as many for each")
        pieces = [_memory(at, size) for at, size in zip(pointers, sizes, strict=True)]
        return [pieces[page * each : (page + 1) * each] for page in range(count)]

    # --- the rest ---

    def clear(self) -> bool:
        """Others use the store as well: what is not used is evicted."""
        _log.warning("pages in a store of SkyMemory are not cleared: unused ones are evicted")
        return False

    def close(self) -> None:
        if self._values is not None:
            self._values.close()


def _copied(key: str) -> str:
    return f"page {key}"


def _by_pointer(key: str) -> str:
    return f"pieces {key}"


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous tensor's memory."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _memory(address: int, size_bytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size_bytes).from_address(address)).cast("B")


def _context(weights: str, config: Any, pool: Any) -> CacheContext:
    """All that SGLang's page hashes leave out: they name the tokens, the adapter and the request's salt."""
    # Where every rank of tensor parallelism has the same pages one writes for all.
    ranks = None if config.is_mla_model else (config.tp_rank, config.tp_size)
    packing = (
        sglang.__version__,
        type(pool).__name__,
        pool.layout,
        pool.storage_format_tag,
        pool.get_size_per_token(),
        *(getattr(pool, name, None) for name in ("layer_num", "head_num", "head_dim", "v_head_dim")),
        (pool.start_layer, pool.end_layer),
        ranks,
        (config.pp_rank, config.pp_size, config.attn_cp_rank, config.attn_cp_size, config.dcp_rank, config.dcp_size),
    )
    return CacheContext(
        model=f"sglang:{config.model_name}",
        weights=weights,
        tokenizer="token ids",
        kv_dtype=str(pool.dtype),
        layout=f"sglang{packing}",
        block_tokens=pool.page_size,
    )
