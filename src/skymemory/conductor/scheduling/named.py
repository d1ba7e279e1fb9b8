"""Schedulers by name, with their options by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skymemory.conductor.cost_model import CostModel, Medium, network_of
from skymemory.conductor.picker import Fleet, Picker
from skymemory.conductor.prefix_index.approximate import PrefixIndex
from skymemory.conductor.scheduler import Admission, Scheduler
from skymemory.conductor.scheduling.decode import LeastTbt
from skymemory.conductor.scheduling.kvcache_centric import NETWORK, KvCacheCentric, KvCacheCentricSettings
from skymemory.conductor.scheduling.prefill import (
    OVERDUE,
    UNDER_WAY_BLOCKS,
    CacheAware,
    FarTiers,
    LeastQueue,
    LinkWaits,
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
    media: Mapping[str, Medium] | None = None,
    far: FarTiers | None = None,
    links: LinkWaits | None = None,
    fleet: Fleet | None = None,
    prefill_cost: PrefillCost | None = None,
    **options: object,
) -> PrefillScheduler:
    """Return the prefill scheduler named ``name``. Option values may be text.

    Args:
        holdings: the prefix index.
        media: bandwidths by name, ``network`` between servers.
        far: tiers that all servers can load from.
        links: waits at the servers' links; None: those caused by its own plans.
        fleet: further servers to load from.
        prefill_cost: cost on servers that are not a single machine.

    Raises:
        InvalidInput: unknown scheduler or option, or an invalid value.
    """
    settings, estimated = SCHEDULERS.settings(name, options), prefill_cost or cost
    if not isinstance(settings, KvCacheCentricSettings):
        return SCHEDULERS[name].build(holdings, estimated, settings.overdue, settings.under_way_blocks)
    media = {NETWORK: network_of(cost)} if media is None else media
    shape = cost.shape
    return KvCacheCentric(
        holdings, estimated, shape.kv_bytes_per_token, media, far, fleet, settings, shape.layers, links
    )


def build(
    name: str = DEFAULT,
    *,
    prefill: Fleet,
    decode: Fleet | None,
    cost: CostModel,
    admission: Admission | None = None,
    kv_tokens: int | None = None,
    decode_s: float | None = None,
    seed: int = 0,
    **options: Any,
) -> Scheduler:
    """Return a ``Scheduler``; ``options`` are further arguments of ``prefill_scorer``.

    Raises:
        InvalidInput: as ``prefill_scorer``.
    """
    picker = Picker(prefill, prefill_scorer(name, cost=cost, fleet=prefill, **options), seed)
    if decode is None:
        return Scheduler(picker, None, admission)
    # Another seed: ties among decode servers must not follow those among prefill servers.
    decoding = LeastTbt(cost, decode, kv_tokens, decode_s)
    return Scheduler(picker, Picker(decode, decoding, seed + 1), admission, decoding)
