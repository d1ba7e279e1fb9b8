"""Schedulers by name, with their options by name: for settings, flags and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from skymemory.conductor.admission.base import Admission
from skymemory.conductor.cost_model import CostModel
from skymemory.conductor.cost_model.model import Medium, network_of
from skymemory.conductor.fleet import Fleet
from skymemory.conductor.picker import Picker
from skymemory.conductor.prefix_index.base import PrefixIndex
from skymemory.conductor.scheduler import Scheduler
from skymemory.conductor.scheduling.decode import LeastTbt
from skymemory.conductor.scheduling.kvcache_centric import NETWORK, KvCacheCentric, KvCacheCentricSettings
from skymemory.conductor.scheduling.prefill import (
    OVERDUE,
    UNDER_WAY_BLOCKS,
    Anywhere,
    CacheAware,
    FarTiers,
    LeastQueue,
    PrefillScheduler,
    Ways,
)
from skymemory.conductor.strategies.estimates import PrefillCost
from skymemory.config import Entry, Registry


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """Of a scheduler whose servers use what they hold themselves."""

    overdue: float = OVERDUE
    under_way_blocks: int = UNDER_WAY_BLOCKS


@dataclass(frozen=True, slots=True)
class Parts:
    """What a scheduler of prefills is made with."""

    prefill_cost: PrefillCost
    kv_token_bytes: int
    layers: int
    holdings: PrefixIndex
    media: Mapping[str, Medium]
    far: FarTiers | None
    fleet: Fleet | None
    ways: Ways | None


Build = Callable[[Parts, Any], PrefillScheduler]


def _local(kind: type[PrefillScheduler]) -> Callable[[Parts, LocalSettings], PrefillScheduler]:
    return lambda parts, settings: kind(parts.holdings, parts.prefill_cost, settings.overdue, settings.under_way_blocks)


def _kvcache_centric(parts: Parts, settings: KvCacheCentricSettings) -> PrefillScheduler:
    return KvCacheCentric(
        parts.holdings,
        parts.prefill_cost,
        parts.kv_token_bytes,
        parts.media,
        parts.far,
        parts.fleet,
        settings,
        parts.layers,
        parts.ways,
    )


SCHEDULERS: Registry[Build] = Registry(
    "scheduler",
    {
        "random": Entry("at random, from a seed", LocalSettings, _local(Anywhere)),
        "load-balance": Entry(
            "the least estimated waiting, whatever is cached there", LocalSettings, _local(LeastQueue)
        ),
        "cache-aware": Entry(
            "the least waiting plus computing what is not cached there", LocalSettings, _local(CacheAware)
        ),
        "kvcache-centric": Entry(
            "the least time to the first token, where each server computes or loads, or both (Mooncake's)",
            KvCacheCentricSettings,
            _kvcache_centric,
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
    ways: Ways | None = None,
    fleet: Fleet | None = None,
    prefill_cost: PrefillCost | None = None,
    **options: object,
) -> PrefillScheduler:
    """The scheduler of prefills of that name, to be put into a ``Picker``. Words are taken for numbers.

    ``holdings``: who holds what. ``media``: ways by name, of which ``network`` is the one from server to server; None:
    the network of ``cost``'s machine. ``far``: tiers behind all servers. ``ways``: how busy servers' ways are; None:
    as far as it plans it itself. ``fleet``: servers that can be loaded from, though they take no requests.
    ``prefill_cost``: of servers that are not one machine, such as pipelines.

    Raises:
        InvalidInput: no scheduler or option of that name (with the nearest that there is), or a value it cannot have.
    """
    settings = SCHEDULERS.settings(name, options)
    network = {NETWORK: network_of(cost)} if media is None else media
    parts = Parts(
        prefill_cost or cost, cost.shape.kv_bytes_per_token, cost.shape.layers, holdings, network, far, fleet, ways
    )
    return SCHEDULERS[name].build(parts, settings)


def build(
    name: str = DEFAULT,
    *,
    prefill: Fleet,
    decode: Fleet | None,
    cost: CostModel,
    holdings: PrefixIndex,
    media: Mapping[str, Medium] | None = None,
    far: FarTiers | None = None,
    ways: Ways | None = None,
    admission: Admission | None = None,
    prefill_cost: PrefillCost | None = None,
    kv_tokens: int | None = None,
    decode_s: float | None = None,
    seed: int = 0,
    **options: object,
) -> Scheduler:
    """Prefills by the scheduler of that name, decoding by the least time between tokens, and ``admission``.

    ``decode`` None: the servers that prefill decode too. ``kv_tokens``: what the KV cache of a server that decodes
    holds. ``decode_s``: the usual time of decoding; None: learnt. The rest as for ``prefill_scorer``.

    Raises:
        InvalidInput: as ``prefill_scorer``.
    """
    scorer = prefill_scorer(
        name,
        cost=cost,
        holdings=holdings,
        media=media,
        far=far,
        ways=ways,
        fleet=prefill,
        prefill_cost=prefill_cost,
        **options,
    )
    picker = Picker(prefill, scorer, seed)
    if decode is None:
        return Scheduler(picker, None, admission)
    decoding = LeastTbt(cost, decode, kv_tokens, decode_s)
    return Scheduler(picker, Picker(decode, decoding, seed + 1), admission, decoding)
