"""Schedulers and their options by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from skymemory.conductor.cost_model import CostModel, network_of
from skymemory.conductor.picker import Fleet, Picker
from skymemory.conductor.prefix_index.approximate import PrefixIndex
from skymemory.conductor.scheduler import Admission, Scheduler
from skymemory.conductor.scheduling.decode import LeastTbt
from skymemory.conductor.scheduling.kvcache_centric import KvCacheCentric, KvCacheCentricSettings, LoadSources
from skymemory.conductor.scheduling.prefill import (
    OVERDUE,
    UNDER_WAY_BLOCKS,
    CacheAware,
    LeastQueue,
    PrefillScheduler,
    RandomServer,
)
from skymemory.conductor.strategies.estimates import PrefillCost
from skymemory.config import Registry, RegistryEntry


@dataclass(frozen=True, slots=True)
class LocalSettings:
    overdue: float = OVERDUE
    under_way_blocks: int = UNDER_WAY_BLOCKS


SCHEDULERS: Registry[type[PrefillScheduler]] = Registry(
    "scheduler",
    {
        "random": RegistryEntry("random, seeded", LocalSettings, RandomServer),
        "load-balance": RegistryEntry("shortest estimated queue, ignoring caches", LocalSettings, LeastQueue),
        "cache-aware": RegistryEntry("shortest queue plus compute of the uncached part", LocalSettings, CacheAware),
        "kvcache-centric": RegistryEntry(
            "shortest time to the first token; servers compute, load, or both (Mooncake's)",
            KvCacheCentricSettings,
            KvCacheCentric,
        ),
    },
)
NAMES = tuple(SCHEDULERS)
DEFAULT = "kvcache-centric"


def prefill_scorer(
    name: str = DEFAULT,
    *,
    cost: CostModel,
    holdings: PrefixIndex,
    sources: LoadSources | None = None,
    prefill_cost: PrefillCost | None = None,
    **options: object,
) -> PrefillScheduler:
    """Return the prefill scheduler named ``name``. Option values may be text.

    Args:
        holdings: the prefix index.
        sources: None: the network of ``cost``.
        prefill_cost: cost on servers of several machines.
    """
    settings, estimated = SCHEDULERS.settings(name, options), prefill_cost or cost
    if not isinstance(settings, KvCacheCentricSettings):
        return SCHEDULERS[name].build(holdings, estimated, settings.overdue, settings.under_way_blocks)
    sources, shape = sources or LoadSources(network_of(cost)), cost.shape
    return KvCacheCentric(holdings, estimated, shape.kv_bytes_per_token, sources, settings, shape.layers)


def build(
    name: str = DEFAULT,
    *,
    prefill: Fleet,
    decoding: LeastTbt | None,
    cost: CostModel,
    admission: Admission | None = None,
    seed: int = 0,
    **options: Any,
) -> Scheduler:
    """Return a ``Scheduler``; ``options`` are further arguments of ``prefill_scorer``.

    KV is also loaded from unranked servers of ``prefill``. Without ``decoding`` the prefill server decodes, too.
    """
    sources = replace(options.pop("sources", None) or LoadSources(network_of(cost)), fleet=prefill)
    picker = Picker(prefill, prefill_scorer(name, cost=cost, sources=sources, **options), seed)
    if decoding is None:
        return Scheduler(picker, None, admission)
    # Another seed: ties among decode servers must not follow those among prefill servers.
    return Scheduler(picker, Picker(decoding.fleet, decoding, seed + 1), admission, decoding)
