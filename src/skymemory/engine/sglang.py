"""SGLang's HiCache: its pages in any store, by the backend "dynamic" (docs/guide/sglang.md).

It has all interfaces: copied pages (``batch_get``, ``batch_set``), pages by pointer (``_v1``; ``"interface_v1": 1``),
and pools of hybrid models (``_v2``).
"""

from __future__ import annotations

import ctypes
import logging
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Literal

import sglang
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolTransferResult
from sglang.srt.observability.metrics_collector import StorageMetrics

from skymemory.cache.patience import ending_within
from skymemory.engine.plugin import PluginSettings, PluginStore, warn_untested
from skymemory.errors import InvalidInput
from skymemory.kv.context import CacheContext

# Pages are only read from these buffers, never written to them.
warnings.filterwarnings("ignore", message="The given buffer is not writable")

_log = logging.getLogger(__name__)
_KV = "kv"
# Pools cut by rank although keys and values are not: states, and a draft model's, which one rank stores.
_BY_RANK = ("mamba", "draft", "draft_swa")


@dataclass(frozen=True, slots=True)
class _ExtraPool:
    host: Any
    values: PluginStore


class SkyMemoryStorage(HiCacheStorage):  # type: ignore[misc]
    """Storage of HiCache's pages in any store."""

    def __init__(self, storage_config: Any, kwargs: dict[str, Any]) -> None:
        warn_untested("SGLang", sglang.__version__, "0.5.23")
        self._config = storage_config
        where = "hicache-storage-backend-extra-config, skymemory"
        processes = storage_config.tp_size * storage_config.pp_size * storage_config.attn_cp_size
        table = (storage_config.extra_config or {}).get("skymemory", {})
        self._settings, self._where = PluginSettings.read(table, where, processes), where
        if "queue" in table:
            raise InvalidInput(
                f"{where}: queue: SGLang saves in a thread of its own, and nothing waits here: leave it out"
            )
        self._values: PluginStore | None = None
        self._pools: dict[str, _ExtraPool] = {}
        self._counting = Lock()
        self._metrics = StorageMetrics()

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the store: all that pages depend on is known now."""
        super().register_mem_pool_host(mem_pool_host)
        if not hasattr(mem_pool_host, "get_size_per_token"):
            raise InvalidInput(
                f"SGLang's pool {type(mem_pool_host).__name__} has no pages of its own, which is not supported: use "
                "another backend for this model"
            )
        kv_dtype = self._settings.type_of(getattr(mem_pool_host, "dtype", None), self._where)
        context = _context(self._settings.weights, kv_dtype, self._config, mem_pool_host, _KV)
        page_bytes = mem_pool_host.get_size_per_token() * mem_pool_host.page_size
        self._values = PluginStore(self._settings, context, page_bytes)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Register a further pool of pages, such as recurrent states of a hybrid model."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if (name := str(host_pool_name)) == _KV:  # registered by ``register_mem_pool_host``
            return
        dtype = f"{getattr(host_pool, 'dtype', None)} {self._settings.kv_dtype}".rstrip()
        context = _context(self._settings.weights, dtype, self._config, host_pool, name)
        page_bytes = _bytes_of(host_pool.get_dummy_flat_data_page()).nbytes
        self._pools[name] = _ExtraPool(host_pool, self.values.with_context(context, page_bytes))

    @property
    def values(self) -> PluginStore:
        if self._values is None:
            raise InvalidInput("no pool of pages is registered yet: expected register_mem_pool_host first")
        return self._values

    # --- lookups ---

    def exists(self, key: str) -> bool:
        return self.values.present([self._name(key)]) == [True]

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return self.values.prefix([self._name(key) for key in keys])

    def _name(self, key: str) -> str:
        """Return a page's name: pages by pointer may be cut in another order."""
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

        loaded = self._load(self.values, [_copied(key) for key in keys], place)
        return [target if ok else None for target, ok in zip(targets, loaded, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        names = [_copied(key) for key in keys]
        return all(self._save(self.values, names, lambda at: [_bytes_of(values[at].contiguous())]))

    # --- pages by pointer ---

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Load pages into SGLang's host memory at ``host_indices``; return for each if it was loaded."""
        pages = self._pages(len(keys), host_indices)

        def place(at: int, value: memoryview) -> bool:
            if sum(piece.nbytes for piece in pages[at]) != value.nbytes:
                return False
            for piece in pages[at]:
                piece[:] = value[: piece.nbytes]
                value = value[piece.nbytes :]
            return True

        return self._load(self.values, [_by_pointer(key) for key in keys], place)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        pages = self._pages(len(keys), host_indices)
        return self._save(self.values, [_by_pointer(key) for key in keys], lambda at: pages[at])

    def _pages(self, count: int, host_indices: torch.Tensor) -> list[Sequence[memoryview]]:
        # Return each page's pieces of host memory.
        pointers, sizes = self.mem_pool_host.get_page_buffer_meta(host_indices)
        pieces_per_page, remainder = divmod(len(pointers), count)
        if remainder:
            raise InvalidInput(f"{len(pointers)} pieces for {count} pages: expected as many for each")
        pieces = [_memory(at, size) for at, size in zip(pointers, sizes, strict=True)]
        return [pieces[page * pieces_per_page : (page + 1) * pieces_per_page] for page in range(count)]

    # --- pages of several pools ---

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[Any] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """Return the longest prefix at whose end every pool has what its hit policy requires."""
        pages = self.batch_exists(keys)
        hits = {_KV: pages} if pages else {}
        restorable = set(range(1, pages + 1))
        for transfer in pool_transfers or []:
            if not restorable:
                break
            name, ends = str(transfer.name), set(restorable)
            present = self._pools[name].values.present([_of_pool(key) for key in keys[:pages]])
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                ends = set(range(1, (present.index(False) if False in present else pages) + 1))
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                window_pages = max(1, len(transfer.keys or ()))
                ends = {end for end in range(1, pages + 1) if all(present[max(0, end - window_pages) : end])}
            else:
                raise InvalidInput(f"pool {name} has the hit policy {transfer.hit_policy}, which is not supported")
            if ends:
                hits[name] = max(ends)
            restorable &= ends
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        with ending_within(self._settings.load_deadline_s):  # of all pools together
            return {str(transfer.name): self._transfer(transfer, self._load_pages) for transfer in transfers}

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        with ending_within(self._settings.store_deadline_s):
            return {str(transfer.name): self._transfer(transfer, self._save_pages) for transfer in transfers}

    def _transfer(self, transfer: Any, pages: Callable[[_ExtraPool, list[str], list[int]], list[bool]]) -> list[bool]:
        # Call ``pages`` to load or save the pages of a pool at their places in host memory.
        name, keys, indices = str(transfer.name), transfer.keys or [], transfer.host_indices
        pool = _ExtraPool(self.mem_pool_host, self.values) if name == _KV else self._pools[name]
        size = getattr(pool.host, "page_size", 1) or 1
        if indices is None or indices.numel() != len(keys) * size:
            index_count = 0 if indices is None else indices.numel()
            _log.error("pool %s: %d indices for %d pages of %d: expected as many", name, index_count, len(keys), size)
            return [False] * len(keys)
        names = [_copied(key) if name == _KV else _of_pool(key) for key in keys]
        return pages(pool, names, [int(indices[at * size]) for at in range(len(keys))])

    def _load_pages(self, pool: _ExtraPool, names: list[str], places: list[int]) -> list[bool]:
        dummy = pool.host.get_dummy_flat_data_page()

        def place(at: int, value: memoryview) -> bool:
            if dummy.nbytes != value.nbytes:
                return False
            # Copied from the store's memory into the pool's.
            page = torch.frombuffer(value, dtype=torch.uint8).view(dummy.dtype).reshape(dummy.shape)
            pool.host.set_from_flat_data_page(places[at], page)
            return True

        return self._load(pool.values, names, place)

    def _save_pages(self, pool: _ExtraPool, names: list[str], places: list[int]) -> list[bool]:
        def read(at: int) -> list[memoryview]:
            return [_bytes_of(pool.host.get_data_page(places[at], flat=True).contiguous())]

        return self._save(pool.values, names, read)

    # --- statistics ---

    def _load(self, values: PluginStore, names: list[str], place: Callable[[int, memoryview], bool]) -> list[bool]:
        started_s = time.monotonic()
        done = values.load(names, place)
        self._count("prefetch", sum(done), values, started_s)
        return done

    def _save(self, values: PluginStore, names: list[str], read: Callable[[int], Sequence[memoryview]]) -> list[bool]:
        started_s = time.monotonic()
        saved = values.save(names, read)
        self._count("backup", sum(saved.written), values, started_s)
        return saved.done

    def _count(self, what: Literal["prefetch", "backup"], pages: int, values: PluginStore, began_s: float) -> None:
        if self._config.enable_storage_metrics:
            rate = pages * values.value_bytes / (time.monotonic() - began_s) / (1 << 30)
            with self._counting:
                getattr(self._metrics, f"{what}_pgs").append(pages)
                getattr(self._metrics, f"{what}_bandwidth").append(rate)

    def get_stats(self) -> StorageMetrics | None:
        if not self._config.enable_storage_metrics:
            return None
        with self._counting:
            metrics, self._metrics = self._metrics, StorageMetrics()
        return metrics

    # --- clearing, closing ---

    def clear(self) -> bool:
        """Clear nothing: other engines use the store, too."""
        _log.warning("pages in a store of SkyMemory are not cleared: unused ones are evicted")
        return False

    def close(self) -> None:
        if self._values is not None:
            self._values.close()


def _copied(key: str) -> str:
    return f"page {key}"


def _by_pointer(key: str) -> str:
    return f"pieces {key}"


def _of_pool(key: str) -> str:
    return f"pool {key}"


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _memory(address: int, size_bytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size_bytes).from_address(address)).cast("B")


def _context(weights: str, dtype: str, config: Any, pool: Any, name: str) -> CacheContext:
    """Return the context: all that SGLang's hashes leave out. (They name tokens, adapter and salt.)"""
    # If every rank of tensor parallelism has the same pages, a single rank writes for all.
    ranks = None if config.is_mla_model and name not in _BY_RANK else (config.tp_rank, config.tp_size)
    what = ("layer_num", "head_num", "head_dim", "v_head_dim")
    packing = (
        sglang.__version__,
        type(pool).__name__,
        *(getattr(pool, attribute, None) for attribute in ("layout", "storage_format_tag")),
        pool.get_size_per_token(),
        *(getattr(pool, attribute, None) for attribute in what),
        tuple(getattr(pool, attribute, None) for attribute in ("start_layer", "end_layer")),
        ranks,
        (config.pp_rank, config.pp_size, config.attn_cp_rank, config.attn_cp_size, config.dcp_rank, config.dcp_size),
        *(() if name == _KV else (name, _bytes_of(pool.get_dummy_flat_data_page()).nbytes)),
    )
    return CacheContext(
        model=f"sglang:{config.model_name}",
        weights=weights,
        tokenizer="token ids",
        kv_dtype=dtype,
        layout=f"sglang{packing}",
        block_tokens=getattr(pool, "page_size", 1) or 1,
    )
