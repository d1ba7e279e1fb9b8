"""Strategies by name, with their options by name: for configuration files, flags and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from skymemory.conductor.options import converted, nearest
from skymemory.conductor.prefix_index.approximate import ApproximatePrefixIndex
from skymemory.conductor.prefix_index.base import PrefixIndex
from skymemory.conductor.prefix_index.precise import PreciseIndex
from skymemory.conductor.strategies.approximate import Approximate, ApproximateSettings
from skymemory.conductor.strategies.base import Scorer
from skymemory.conductor.strategies.block_cost import BlockCost, BlockCostSettings
from skymemory.conductor.strategies.chwbl import BoundedRing, ChwblSettings
from skymemory.conductor.strategies.hash_trie import HashTrie, HashTrieSettings
from skymemory.conductor.strategies.least_ttft import LeastTtft, LeastTtftSettings
from skymemory.conductor.strategies.lmetric import LMetric, LMetricSettings
from skymemory.conductor.strategies.plain import AtRandom, InTurn, LeastLoad
from skymemory.conductor.strategies.precise import Precise, PreciseSettings
from skymemory.conductor.strategies.radix import Radix, RadixSettings
from skymemory.conductor.strategies.session import SessionAffinity, SessionSettings
from skymemory.conductor.strategies.simhash import NearestSignature, SimHashSettings
from skymemory.conductor.strategies.speeds import PrefillCost
from skymemory.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class NoSettings:
    """Of a strategy that has none."""


Build = Callable[[Any, PrefixIndex | None, PrefillCost | None], Scorer]


@dataclass(frozen=True, slots=True)
class Named:
    description: str
    """One line, for help."""
    settings: type[Any]
    """A frozen dataclass: the strategy's options, with their defaults."""
    build: Build


def _approximate(settings: ApproximateSettings, index: PrefixIndex | None, cost: PrefillCost | None) -> Scorer:
    table = index or ApproximatePrefixIndex(settings.blocks_per_server, settings.max_match_blocks or None)
    return Approximate(table, settings)


def _radix(settings: RadixSettings, index: PrefixIndex | None, cost: PrefillCost | None) -> Scorer:
    return Radix(index or ApproximatePrefixIndex(settings.blocks_per_server), settings)


def _precise(settings: PreciseSettings, index: PrefixIndex | None, cost: PrefillCost | None) -> Scorer:
    if index is not None and not isinstance(index, PreciseIndex):
        raise InvalidInput("strategy 'precise' takes an index that events feed (PreciseIndex)")
    return Precise(index or PreciseIndex(settings.block_tokens, settings.weights()), settings)


def _least_ttft(settings: LeastTtftSettings, index: PrefixIndex | None, cost: PrefillCost | None) -> Scorer:
    if index is None:
        blocks = settings.blocks_per_server
        index = PreciseIndex(settings.block_tokens) if settings.events else ApproximatePrefixIndex(blocks)
    return LeastTtft(index, settings, cost)


STRATEGIES: Mapping[str, Named] = {
    "least-ttft": Named(
        "the least estimated time to first token: waiting there, plus computing what is not cached there",
        LeastTtftSettings,
        _least_ttft,
    ),
    "approximate": Named(
        "queue, KV use and matched prefix, weighted 2:2:3, by what was sent (the endpoint picker's)",
        ApproximateSettings,
        _approximate,
    ),
    "precise": Named(
        "queue, KV use and matched prefix, weighted 2:2:3, by what engines tell of their caches (llm-d's)",
        PreciseSettings,
        _precise,
    ),
    "radix": Named(
        "load first when it differs much, else the longest match over 0.3, else least load (SGLang's)",
        RadixSettings,
        _radix,
    ),
    "lmetric": Named(
        "the least product of tokens to compute and requests there (SGLang's LMetric)",
        LMetricSettings,
        lambda settings, index, cost: LMetric(index or ApproximatePrefixIndex(settings.blocks_per_server)),
    ),
    "block-cost": Named(
        "the fewest blocks to prefill, less those held, and kept by its requests (Dynamo's)",
        BlockCostSettings,
        lambda settings, index, cost: BlockCost(index or ApproximatePrefixIndex(settings.blocks_per_server), settings),
    ),
    "hash-trie": Named(
        "one of the servers that served the longest match, in a tree of blocks (production-stack's)",
        HashTrieSettings,
        lambda settings, index, cost: HashTrie(settings),
    ),
    "simhash": Named(
        "where the most similar prompt was served (production-stack's, with nearness kept)",
        SimHashSettings,
        lambda settings, index, cost: NearestSignature(settings),
    ),
    "chwbl": Named(
        "consistent hashing of the first 100 characters, with bounded loads (KubeAI's)",
        ChwblSettings,
        lambda settings, index, cost: BoundedRing(settings),
    ),
    "session": Named(
        "one server per session, least load without one",
        SessionSettings,
        lambda settings, index, cost: SessionAffinity(settings),
    ),
    "least-load": Named("the fewest requests", NoSettings, lambda settings, index, cost: LeastLoad()),
    "round-robin": Named("in turn", NoSettings, lambda settings, index, cost: InTurn()),
    "random": Named("at random, from a seed", NoSettings, lambda settings, index, cost: AtRandom()),
}
NAMES = tuple(STRATEGIES)
DEFAULT = "least-ttft"
ESTIMATES = ("least-ttft",)
"""Strategies that say when a first token will come: what admission needs."""


def named(
    name: str = DEFAULT, *, index: PrefixIndex | None = None, cost: PrefillCost | None = None, **options: object
) -> Scorer:
    """The strategy of that name. Words are taken for numbers, as they come from flags.

    ``index``: in place of the strategy's own, for those that have one. ``cost``: what a prefill takes, for
    ``least-ttft``, where it is known; else it learns it.

    Raises:
        InvalidInput: no strategy or option of that name (with the nearest that there is), or a value it cannot have.
    """
    found = STRATEGIES.get(name)
    if found is None:
        raise InvalidInput(f"no routing strategy {name!r}{nearest(name, NAMES)}; there are {', '.join(NAMES)}")
    known = options_of(name)
    given = {}
    for option, value in options.items():
        if option not in known:
            there = f"; there are {', '.join(known)}" if known else "; it has none"
            raise InvalidInput(f"strategy {name!r} has no option {option!r}{nearest(option, known)}{there}")
        given[option] = converted(f"option {option!r} of strategy {name!r}", value, known[option])
    return found.build(found.settings(**given), index, cost)


def options_of(name: str) -> dict[str, bool | int | float]:
    """The options of a strategy, with their defaults."""
    defaults = STRATEGIES[name].settings()
    return {field.name: getattr(defaults, field.name) for field in fields(defaults)}
