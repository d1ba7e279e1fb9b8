"""Routing strategies and their options by name.

A new one is a subclass of ``conductor.picker.Scorer`` (with a prefix index: ``strategy_base.Indexed``) and an entry in
``STRATEGIES``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from skymemory.conductor.picker import Scorer
from skymemory.conductor.prefix_index.approximate import ApproximatePrefixIndex, PrefixIndex
from skymemory.conductor.prefix_index.precise import PreciseIndex
from skymemory.conductor.strategies.block_cost import BlockCost, BlockCostSettings
from skymemory.conductor.strategies.estimates import PrefillCost
from skymemory.conductor.strategies.hash_trie import HashTrie, HashTrieSettings
from skymemory.conductor.strategies.hashing import BoundedRing, ChwblSettings, NearestSignature, SimHashSettings
from skymemory.conductor.strategies.least_ttft import LeastTtft, LeastTtftSettings
from skymemory.conductor.strategies.sglang import LMetric, LMetricSettings, Radix, RadixSettings
from skymemory.conductor.strategies.simple import LeastLoad, RandomChoice, RoundRobin, SessionAffinity, SessionSettings
from skymemory.conductor.strategies.weighted import Approximate, ApproximateSettings, Precise, PreciseSettings
from skymemory.config import NoSettings, Registry, RegistryEntry
from skymemory.errors import InvalidInput

Build = Callable[[Any, PrefixIndex | None, PrefillCost | None], Scorer]


def _approximate(settings: ApproximateSettings, index: PrefixIndex | None, cost: PrefillCost | None) -> Scorer:
    table = index or ApproximatePrefixIndex(settings.blocks_per_server, settings.most_blocks)
    return Approximate(table, settings)


def _radix(settings: RadixSettings, index: PrefixIndex | None, cost: PrefillCost | None) -> Scorer:
    return Radix(index or ApproximatePrefixIndex(settings.blocks_per_server), settings)


def _precise(settings: PreciseSettings, index: PrefixIndex | None, cost: PrefillCost | None) -> Scorer:
    if index is not None and not isinstance(index, PreciseIndex):
        raise InvalidInput("strategy 'precise' needs a PreciseIndex, which KV events feed")
    return Precise(index or PreciseIndex(settings.block_tokens, settings.weights()), settings)


def _least_ttft(settings: LeastTtftSettings, index: PrefixIndex | None, cost: PrefillCost | None) -> Scorer:
    if index is None:
        blocks = settings.blocks_per_server
        index = PreciseIndex(settings.block_tokens) if settings.events else ApproximatePrefixIndex(blocks)
    return LeastTtft(index, settings, cost)


STRATEGIES: Registry[Build] = Registry(
    "routing strategy",
    {
        "least-ttft": RegistryEntry(
            "the least estimated time to first token: queue plus compute of the uncached part",
            LeastTtftSettings,
            _least_ttft,
        ),
        "approximate": RegistryEntry(
            "queue, KV use and matched prefix, weighted 2:2:3, by requests sent (the endpoint picker's)",
            ApproximateSettings,
            _approximate,
        ),
        "precise": RegistryEntry(
            "queue, KV use and matched prefix, weighted 2:2:3, by the engines' KV events (llm-d's)",
            PreciseSettings,
            _precise,
        ),
        "radix": RegistryEntry(
            "load first when it differs much, else the longest match over 0.3, else least load (SGLang's)",
            RadixSettings,
            _radix,
        ),
        "lmetric": RegistryEntry(
            "the least product of tokens to compute and requests there (SGLang's LMetric)",
            LMetricSettings,
            lambda settings, index, cost: LMetric(index or ApproximatePrefixIndex(settings.blocks_per_server)),
        ),
        "block-cost": RegistryEntry(
            "the fewest blocks to prefill, less those held, and kept by its requests (Dynamo's)",
            BlockCostSettings,
            lambda settings, index, cost: BlockCost(
                index or ApproximatePrefixIndex(settings.blocks_per_server), settings
            ),
        ),
        "hash-trie": RegistryEntry(
            "one of the servers that served the longest match, in a tree of blocks (production-stack's)",
            HashTrieSettings,
            lambda settings, index, cost: HashTrie(settings),
        ),
        "simhash": RegistryEntry(
            "where the most similar prompt was served (production-stack's, with nearness kept)",
            SimHashSettings,
            lambda settings, index, cost: NearestSignature(settings),
        ),
        "chwbl": RegistryEntry(
            "consistent hashing of the first 100 characters, with bounded loads (KubeAI's)",
            ChwblSettings,
            lambda settings, index, cost: BoundedRing(settings),
        ),
        "session": RegistryEntry(
            "one server per session, least load without one",
            SessionSettings,
            lambda settings, index, cost: SessionAffinity(settings),
        ),
        "least-load": RegistryEntry("the fewest requests", NoSettings, lambda settings, index, cost: LeastLoad()),
        "round-robin": RegistryEntry("round robin", NoSettings, lambda settings, index, cost: RoundRobin()),
        "random": RegistryEntry("random, seeded", NoSettings, lambda settings, index, cost: RandomChoice()),
    },
)
NAMES = tuple(STRATEGIES)
DEFAULT = "least-ttft"
ESTIMATES = ("least-ttft",)
"""Strategies that admission can use."""


def named(
    name: str = DEFAULT, *, index: PrefixIndex | None = None, cost: PrefillCost | None = None, **options: object
) -> Scorer:
    """Return a strategy; option values may be text. ``cost`` is for ``least-ttft``; None: learnt."""
    return STRATEGIES.entry(name).build(STRATEGIES.settings(name, options), index, cost)
