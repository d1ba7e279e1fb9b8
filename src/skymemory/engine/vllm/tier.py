"""Secondary tier of vLLM's own offloading: chunks of its CPU tier in any store, by module path.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
      "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592, "secondary_tiers": [{
        "type": "SkyMemoryTier", "module_path": "skymemory.engine.vllm.tier",
        "skymemory": {"store": "unix:///run/sky.sock", "weights": "revision 1"}}]}}'

Its methods run in vLLM's scheduler and must not block: lookups return RETRY until vLLM's lookup thread is done.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import (
    JobResult,
    SecondaryTierManager,
)

import vllm
from skymemory.engine.plugin import PluginSettings, PluginStore, warn_untested
from skymemory.kv.context import CacheContext


class SkyMemoryTier(SecondaryTierManager):  # type: ignore[misc]
    """Secondary tier that keeps vLLM's chunks in any store."""

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        skymemory: object = None,
        backpressure_detector: Any = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        warn_untested("vLLM", vllm.__version__, "0.32.0")
        parallel = offloading_spec.config.parallel
        settings = PluginSettings.read(
            skymemory or {}, "secondary_tiers, skymemory", max(1, parallel.data_parallel_size)
        )
        dtype = settings.type_of(offloading_spec.config.model.dtype, "secondary_tiers, skymemory")
        context = _context(settings.weights, dtype, offloading_spec.config, self.block_size_bytes)
        # vLLM shows only loggers below its own.
        log = logging.getLogger("vllm.skymemory")
        self.values = PluginStore(settings, context, self.block_size_bytes, log=log)
        self._bytes = primary_kv_view.cast("B")
        self._lookups = _Lookups(self.values, tier_type)
        self._loading = ThreadPoolExecutor(4, "vllm tier load")
        self._saving = ThreadPoolExecutor(2, "vllm tier save")
        self._jobs: dict[int, Future[JobResult]] = {}
        self._load_keys: dict[int, list[bytes]] = {}

    # --- called by the scheduler ---

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        is_stored = self._lookups.lookup(key, req_context)
        if is_stored is None:
            return LookupResult.RETRY
        return LookupResult.HIT if is_stored else LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:
        self._lookups.flush()

    def on_request_finished(self, req_context: Any) -> None:
        self._lookups.cleanup(req_context.req_id)

    def submit_load(self, job_metadata: Any) -> None:
        job = job_metadata
        self._load_keys[job.job_id] = list(job.keys)
        self._jobs[job.job_id] = self._loading.submit(self._load, job.job_id, list(job.keys), job.chunk_ids.tolist())

    def submit_store(self, job_metadata: Any) -> None:
        job = job_metadata
        size_bytes = len(job.keys) * self.block_size_bytes
        if not self.values.queue(size_bytes):
            self._jobs[job.job_id] = Future()
            self._jobs[job.job_id].set_result(JobResult(job_id=job.job_id, success=False))
            return
        self._jobs[job.job_id] = self._saving.submit(self._save, job.job_id, list(job.keys), job.chunk_ids.tolist())

    def get_finished_jobs(self) -> Iterable[JobResult]:
        finished_ids = [job_id for job_id, future in self._jobs.items() if future.done()]
        results = [self._jobs.pop(job_id).result() for job_id in finished_ids]
        for result in results:
            keys = self._load_keys.pop(result.job_id, [])
            loaded = set(result.successful_keys or ())
            if not result.success:  # else the scheduler would ask for them again without end
                self._lookups.mark_miss([key for key in keys if key not in loaded])
        return results

    def drain_jobs(self) -> None:
        """Wait for all jobs; each ends by its deadlines."""
        wait(list(self._jobs.values()))

    def shutdown(self) -> None:
        self._saving.shutdown()
        self._loading.shutdown()
        self._lookups.shutdown()
        self._bytes.release()
        self.values.close()

    # --- in threads ---

    def _chunk(self, chunk: int) -> memoryview:
        return self._bytes[chunk * self.block_size_bytes : (chunk + 1) * self.block_size_bytes]

    def _load(self, job_id: int, keys: Sequence[bytes], chunks: Sequence[int]) -> JobResult:
        # Copy stored chunks into vLLM's CPU tier, in a thread.

        def place(at: int, value: memoryview) -> bool:
            if value.nbytes != self.block_size_bytes:
                return False
            self._chunk(chunks[at])[:] = value
            return True

        def work() -> list[bool]:
            return self.values.load([_name(key) for key in keys], place)

        return self._result(job_id, keys, work)

    def _save(self, job_id: int, keys: Sequence[bytes], chunks: Sequence[int]) -> JobResult:
        def work() -> list[bool]:
            return self.values.save([_name(key) for key in keys], lambda at: [self._chunk(chunks[at])]).done

        try:
            return self._result(job_id, keys, work)
        finally:
            self.values.dequeue(len(keys) * self.block_size_bytes)

    def _result(self, job_id: int, keys: Sequence[bytes], work: Callable[[], list[bool]]) -> JobResult:
        # Run a job's transfers; return success by key as vLLM expects it.
        started_s = time.monotonic()
        done = work()
        good = [key for key, ok in zip(keys, done, strict=True) if ok]
        return JobResult(
            job_id=job_id,
            success=all(done),
            successful_keys=None if all(done) else tuple(good) or None,
            transfer_time=time.monotonic() - started_s,
            transfer_bytes=len(good) * self.block_size_bytes,
        )


class _Lookups(AsyncLookupManager):  # type: ignore[misc]
    def __init__(self, values: PluginStore, tier_type: str) -> None:
        self._values = values
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys: Collection[bytes], req_context: Any) -> Iterable[bool]:
        return self._values.present([_name(key) for key in keys])


def _name(key: bytes) -> str:
    return key.hex()


def _context(weights: str, dtype: str, config: Any, chunk_bytes: int) -> CacheContext:
    """Return the context: all that vLLM's keys leave out. (They name tokens, adapter, media and salt.)"""
    parallel = config.parallel
    packing = (
        vllm.__version__,
        chunk_bytes,
        config.worker_kv_bytes_per_block,
        config.kv_cache_layout,
        (config.canonical_layout, config.replicated_layout),
        [(group.group_id, group.tokens_per_block, group.layer_names) for group in config.groups],
        (config.cache.tokens_per_hash, config.cache.blocks_per_chunk),
        (parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size),
    )
    return CacheContext(
        model=f"vllm tier:{config.model.name}",
        weights=weights,
        tokenizer="token ids",
        kv_dtype=dtype,
        layout=f"vllm tier{packing}",
        block_tokens=config.cache.tokens_per_hash * config.cache.blocks_per_chunk,
    )
