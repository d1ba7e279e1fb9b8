"""``SkyMemoryConnector``: vLLM's KV connector, version 1, by module path and without a patch.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "SkyMemoryConnector",
      "kv_connector_module_path": "skymemory.engine.vllm", "kv_role": "kv_both",
      "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"store": "unix:///run/sky.sock"}}'

vLLM creates a connector in its scheduler (``scheduler`` decides) and in each worker (``worker`` executes).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

import vllm
from skymemory import __version__
from skymemory.cache.blocks import BlockCache, Part, Parts
from skymemory.engine.page_locked import LockedMemory
from skymemory.engine.vllm import register
from skymemory.engine.vllm.announcements import Announced, Announcements
from skymemory.engine.vllm.copier import (
    STAGING_BYTES,
    BlockCopier,
    PartCopier,
    copier_of,
    device_of,
    states_of,
)
from skymemory.engine.vllm.identity import EngineReport, Seeds, block_bytes_of, context_of, layout_of
from skymemory.engine.vllm.plan import COUNTS, WITH_REASON, Shape, StepPlan, WorkerOutcome, added
from skymemory.engine.vllm.scheduler import SchedulerSide
from skymemory.engine.vllm.settings import TESTED_VERSIONS, ConnectorSettings, check_engine, is_tested, parts_of
from skymemory.engine.vllm.trial import check_interface, try_copier
from skymemory.engine.vllm.worker import WorkerSide
from skymemory.errors import InvalidInput
from skymemory.metrics import SharedCounters
from skymemory.store.base import InPlace
from skymemory.store.redis import RedisStore
from skymemory.testbed.open_store import open_store

_log = logging.getLogger("vllm.skymemory")  # vLLM shows lines of its own loggers only
# Kinds of a store by vLLM's words; others are "external_unspecified".
_SOURCES = {"memory": CacheHitSource.HOST, "host": CacheHitSource.HOST, "disk": CacheHitSource.DISK}


class SkyMemoryConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """KV connector. Raises InvalidInput for a configuration that would give wrong tokens, or lose requests."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        settings = ConnectorSettings.read(transfer.kv_connector_extra_config)
        self._groups = kv_cache_config.kv_cache_groups
        check_engine(vllm_config, self._groups)
        if role is KVConnectorRole.SCHEDULER and not is_tested(vllm.__version__):
            _check_untested()
        self._parts_of_model = parts_of(self._groups)
        block_tokens = self._groups[0].kv_cache_spec.block_size
        has_states = any(part.has_states for part in self._parts_of_model)
        # Of a value of several blocks the states after all but the last would be missing.
        shape = Shape(block_tokens, 1 if has_states else settings.blocks_per_value(block_tokens))
        layouts = [
            layout_of(vllm_config, kv_cache_config, part, shape.blocks_per_value, vllm.__version__)
            for part in self._parts_of_model
        ]
        context = context_of(vllm_config, layouts)
        self._settings = settings
        self._store = open_store(settings.store)
        counters = SharedCounters()
        parts = Parts(
            [
                Part(BlockCache(context, layout, self._store, counters=counters), part.window)
                for part, layout in zip(self._parts_of_model, layouts, strict=True)
            ]
        )
        is_plain = len(self._groups) == 1 and self._parts_of_model[0].window is None
        self._announcements: Announcements | None = None
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            seeds = Seeds(context)
            ranks = vllm_config.parallel_config.tensor_parallel_size
            events = vllm_config.kv_events_config
            if events is not None and events.enable_kv_cache_events:
                self._announcements = Announcements(ranks)
            self._scheduler = SchedulerSide(
                parts,
                shape,
                seeds,
                self._block_ids,
                cake=_Door(self, vllm_config) if is_plain and cakes(vllm_config) else None,
                announcements=self._announcements,
                ranks=ranks,
                loads=transfer.is_kv_consumer,
                saves=transfer.is_kv_producer,
                wait_s=settings.wait_s,
                kind_of_store=self._kind_of_store,
                has_states=has_states,
            )
            self._report = EngineReport(
                vllm=vllm.__version__,
                skymemory=__version__,
                store=settings.store,
                role=transfer.kv_role,
                block_tokens=block_tokens,
                value_tokens=shape.value_tokens,
                value_bytes=sum(layout.block_bytes for layout in layouts),
                longest_tokens=vllm_config.model_config.max_model_len,
                context=context.describe(),
            )
            self._report.log()
            self._seeds = seeds
            if transfer.is_kv_producer and not vllm_config.shutdown_timeout:
                _log.info(
                    "SkyMemory: `vllm serve` loses what waits to be saved when it is stopped; with "
                    "--shutdown-timeout 10 it saves that first, within 10 s"
                )
        else:
            rank = vllm_config.parallel_config.rank % vllm_config.parallel_config.tensor_parallel_size
            self._worker = WorkerSide(
                parts, shape, by_request=not is_plain, rank=rank, queue_bytes=settings.queue_bytes
            )
        self.cake_scheduler: CakeScheduler | None = None
        self._value_bytes = [layout.block_bytes for layout in layouts]
        self._block_count = kv_cache_config.num_blocks

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a lost save is only a later miss."""
        return False

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close(self._settings.drain_s)
        if self._scheduler is not None:
            self._scheduler.close()
        self._store.close()

    # --- in the scheduler ---

    def go_on_by(self, scheduler: CakeScheduler) -> None:
        self.cake_scheduler = scheduler

    def _kind_of_store(self) -> str:
        if isinstance(self._store, RedisStore):
            return self._store.server_info().get("store", "")
        return self._settings.store.partition(":")[0]

    def _block_ids(self, request_id: str) -> list[list[list[int]]]:
        tables = self._kv_cache_manager.get_block_ids(request_id)
        return [[tables[group] for group in part.groups] for part in self._parts_of_model]

    def on_new_request(self, request: Any) -> None:
        assert self._scheduler is not None
        self._scheduler.new(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self._scheduler is not None
        self._scheduler.allocated(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        assert self._scheduler is not None
        return self._scheduler.plan(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        assert self._scheduler is not None
        if isinstance(connector_output.kv_connector_worker_meta, WorkerOutcome):
            self._scheduler.update(connector_output.kv_connector_worker_meta)

    def take_events(self) -> Iterable[KVCacheEvent]:
        if self._announcements is None or self._scheduler is None or not self._scheduler.store_kind:
            return ()  # its locality is not known yet
        return map(self._event, self._announcements.take())

    def _event(self, announced: Announced) -> KVCacheEvent:
        assert self._scheduler is not None
        names = [maybe_convert_block_hash(name) for name in announced.names]
        where = {
            "medium": MEDIUM_STORAGE,
            "group_idx": self._parts_of_model[0].groups[0],
            "locality": "LOCAL" if self._scheduler.store_kind in _SOURCES else "REMOTE",
        }
        if not announced.stored:
            return BlockRemoved(block_hashes=names, **where)
        block_tokens = self._groups[0].kv_cache_spec.block_size
        return BlockStored(
            block_hashes=names,
            parent_block_hash=None,
            token_ids=[],
            block_size=block_tokens,
            lora_id=None,
            lora_name=None,
            **where,
        )

    def has_pending_push_work(self) -> bool:
        """Return True while saving: vLLM then keeps stepping, also without requests."""
        return self._scheduler is not None and self._scheduler.saving

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """Attribute all tokens to the store: its tiers are known only after a load."""
        return {self._source(): num_external_tokens} if num_external_tokens else {}

    def _source(self) -> CacheHitSource:
        assert self._scheduler is not None
        return _SOURCES.get(self._scheduler.store_kind, CacheHitSource.EXTERNAL_UNSPECIFIED)

    def reset_cache(self) -> bool:
        """Reset when vLLM's weights may have changed."""
        assert self._scheduler is not None
        pool = self._kv_cache_manager.block_pool
        # The null block is always in use.
        done = self._scheduler.reset(pool.num_gpu_blocks - pool.get_num_free_blocks() == 1)
        replace(self._report, context=self._seeds.context(self._seeds.generation).describe()).log()
        return done

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        return False, self._scheduler.finished(request)  # values are copied out at each step's end: no block is kept

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    # --- in a worker ---

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Make a copier for each part of the model's caches, and try it on unused blocks."""
        assert self._worker is not None
        size = self._worker.shape.blocks_per_value
        memory = None
        if isinstance(self._store, InPlace):
            (cache, *_) = kv_caches.values()
            memory = LockedMemory(self._store, device_of(cache[0].device))
        copiers = []
        for part, expected_bytes in zip(self._parts_of_model, self._value_bytes, strict=True):
            copier = PartCopier([self._copier_of(group, kv_caches, size, memory) for group in part.groups])
            if (size_bytes := copier.block_bytes * size) != expected_bytes:
                raise InvalidInput(f"values of {size_bytes} bytes in the registered caches, expected {expected_bytes}")
            tried = try_copier(copier, part.groups, size, self._block_count)
            _log.info("SkyMemory: %d blocks of groups %s were copied in and out: equal", tried, part.groups)
            copiers.append(copier)
        self._worker.register(copiers, memory)

    def _copier_of(self, group: int, kv_caches: dict[str, Any], size: int, memory: LockedMemory | None) -> BlockCopier:
        named, blocks = self._groups[group], self._block_count
        layers = {name: kv_caches[name] for name in named.layer_names}
        if any(part.has_states and group in part.groups for part in self._parts_of_model):
            size_bytes = block_bytes_of(named.kv_cache_spec)
            layers = {name: states_of(name, cache, blocks, size_bytes) for name, cache in layers.items()}
        staging_bytes = STAGING_BYTES // len(self._groups)
        return copier_of(layers, self._block_count, size, staging_bytes=staging_bytes, memory=memory)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert self._worker is not None
        self._worker.begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing: no forward pass waits for loads."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request is scheduled when all layers are loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: all layers are copied out together, after the pass."""

    def wait_for_save(self) -> None:
        assert self._worker is not None
        self._worker.end()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        assert self._worker is not None
        return None, self._worker.finished()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self._worker is not None
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving = self._worker.failed()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self._worker is not None
        return self._worker.invalid_blocks()

    def build_connector_worker_meta(self) -> WorkerOutcome | None:
        assert self._worker is not None
        return self._worker.outcome()

    # --- statistics ---

    def get_kv_connector_stats(self) -> SkyMemoryStats | None:
        if self._scheduler is None or not (counts := self._scheduler.counts()):
            return None
        return SkyMemoryStats(data=dict(counts))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> SkyMemoryStats:
        return SkyMemoryStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> SkyMemoryMetrics:
        return SkyMemoryMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _check_untested() -> None:
    check_interface(SkyMemoryConnector, KVConnectorBase_V1, ("go_on_by",))
    _log.warning(
        "SkyMemory was tested with vLLM %s, not with %s: that has the same interface, and copies of its blocks are "
        "tried now; compare answers with those of plain vLLM before you rely on it",
        ", ".join(TESTED_VERSIONS),
        vllm.__version__,
    )


def cakes(config: Any) -> bool:
    """Return True if Cake is possible in this configuration."""
    # No step may run when the number of computed tokens is raised, and the model runner must take it from the scheduler
    # (version 1 with each step, version 2 at a resume).
    scheduler = config.scheduler_config
    return not scheduler.async_scheduling and (
        not config.use_v2_model_runner or issubclass(scheduler.get_scheduler_cls(), CakeScheduler)
    )


class CakeScheduler(Scheduler):  # type: ignore[misc]
    """``--scheduler-cls skymemory.engine.vllm.CakeScheduler``: vLLM's scheduler, with Cake for model runner version 2.
    A request that continues after loaded blocks is preempted, keeps its blocks, and is resumed by the next step.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for connector in (self.connector, *getattr(self.connector, "_connectors", ())):
            if isinstance(connector, SkyMemoryConnector):
                connector.go_on_by(self)

    def resume(self, request: Any) -> None:
        self.running.remove(request)
        self._inflight_prefills.discard(request)
        request.status = RequestStatus.PREEMPTED
        self.reset_preempted_req_ids.add(request.request_id)
        self._enqueue_waiting_request(request)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Reset; requests that wait for their resume give up their blocks."""
        if reset_running_requests:
            for request in [
                waiting for waiting in self.kv_holding_waiting if waiting.status is RequestStatus.PREEMPTED
            ]:
                self.kv_holding_waiting.remove_request(request)
                request.status = RequestStatus.RUNNING
                self.running.append(request)
        done: bool = super().reset_prefix_cache(reset_running_requests, reset_connector)
        return done


class _Door:
    """Cake's access to vLLM's scheduler."""

    def __init__(self, connector: SkyMemoryConnector, config: Any) -> None:
        self._connector = connector
        self._needs_scheduler = config.use_v2_model_runner
        self.step_tokens = int(config.scheduler_config.max_num_batched_tokens)

    def reserve(self, request: Any, computed_tokens: int) -> bool:
        """Reserve blocks while vLLM schedules the request's first chunk, which it counts afterwards."""
        if self._needs_scheduler and self._connector.cake_scheduler is None:
            return False
        blocks = self._connector._kv_cache_manager.allocate_slots(
            request,
            request.num_tokens - computed_tokens,
            num_new_computed_tokens=computed_tokens,
            delay_cache_blocks=True,
        )
        return blocks is not None

    def go_on_from(self, request: Any, tokens: int) -> None:
        """Continue a request after ``tokens`` tokens, the last of which were loaded."""
        loaded = tokens - request.num_computed_tokens
        if self._connector.cake_scheduler is not None:
            self._connector.cake_scheduler.resume(request)
        request.num_computed_tokens = tokens
        self._connector._kv_cache_manager.cache_blocks(request, tokens)
        if (stats := request.prefill_stats) is not None:
            # A request that is preempted and loaded again has loaded some tokens twice.
            most = stats.num_prompt_tokens - stats.num_local_cached_tokens
            external_tokens = min(stats.num_external_cached_tokens + loaded, most)
            stats.set(stats.num_prompt_tokens, stats.num_local_cached_tokens, external_tokens)


class SkyMemoryStats(KVConnectorStats):  # type: ignore[misc]
    """Counts since the last report, which vLLM sums."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: SkyMemoryStats) -> SkyMemoryStats:
        self.data = added(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not any(self.data.values())


class SkyMemoryMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Counts at ``/metrics``, such as ``vllm:skymemory_saved_values_total``."""

    def __init__(self, *of_vllm: Any) -> None:
        super().__init__(*of_vllm)
        self._counters = {
            name: self._counter_cls(
                name=f"vllm:skymemory_{name}",
                documentation=f"{what}.",
                labelnames=[*self._labelnames, *(["reason"] if name in WITH_REASON else [])],
            )
            for name, what in COUNTS.items()
        }
        for name, counter in self._counters.items():
            for labels in self.per_engine_labelvalues.values():
                if name not in WITH_REASON:
                    counter.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for label, amount in transfer_stats_data.items():
            name, _, reason = label.partition(" ")
            labels = [*self.per_engine_labelvalues[engine_idx], *([reason] if reason else [])]
            self._counters[name].labels(*labels).inc(amount)


register()
