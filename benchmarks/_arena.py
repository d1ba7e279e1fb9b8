"""Who plays in the arena, on what, and with which settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from _predicted_latency import PredictedLatency
from _rivals import RIVALS, rival
from skymemory.conductor.picker import Scorer
from skymemory.conductor.prefix_index.approximate import ApproximatePrefixIndex
from skymemory.conductor.request import Request
from skymemory_lab.sim.routed_strategies import strategy_for
from skymemory_lab.sim.routing import CacheEvents, RoutingSetup, as_routed
from skymemory_lab.sim.trace import TraceRequest, jittered, read_trace
from skymemory_lab.sim.workload import WORKLOADS, generate

NO_BOUND = 1e9
OURS, GIVEN, PREDICTED = "least-ttft", "least-ttft, given speeds", "predicted-latency"
ERROR = 0.1
"""Standard deviation of our estimates' own error, beside what learning errs by: see ``sim.routed_strategies``."""
DURATIONS_S = {"conversations": 1_200.0, "tenants": 300.0, "agents": 900.0}
"""Of the generator's families; the second half is measured."""
TRACE_TUNED = 0.7
"""Of a trace, the part that was tuned on; what comes behind it is measured."""


@dataclass(frozen=True, slots=True)
class Original:
    """A strategy of the router or of `_rivals`, and whose it is."""

    strategy: str
    of: str
    source: str
    published: Mapping[str, float] = field(default_factory=dict)
    """Its authors' settings, where they are not our defaults."""
    setting: str = ""
    """The one that is swept, over ``values``; none: it has none that matters here."""
    values: tuple[float, ...] = ()
    swept: float | None = None
    """The best of them on the tuning part, by ``arena.py --tune``."""


ROUTER = "llm-d-router@ebab687"
PLUGINS = "pkg/epp/framework/plugins"
GUIDES = "llm-d guides"
ORIGINALS = (
    Original(
        "approximate",
        "llm-d (once Gateway API inference extension): queue, KV use and prefix, 2:2:3",
        f"{ROUTER} config/charts/routerlib/templates/_config.yaml, {PLUGINS}/requestcontrol/dataproducer/"
        "approximateprefix",
        setting="prefix_weight",
        values=(1.0, 2.0, 5.0, 10.0, 20.0),
    ),
    Original(
        "precise",
        "llm-d: the same by engines' events, 1:1:2",
        f"{ROUTER} deploy/config/epp-precise-prefix-cache-config.yaml, {PLUGINS}/requestcontrol/dataproducer/"
        "preciseprefixcache",
        published={"queue_weight": 1.0, "kv_weight": 1.0, "prefix_weight": 2.0},
        setting="speculative_s",
        values=(1.0, 2.0, 5.0, 20.0),
        swept=20.0,
    ),
    Original(
        PREDICTED,
        "llm-d: predicted latency, learned with XGBoost",
        f"{ROUTER} config/charts/routerlib, {PLUGINS}/scheduling/scorer/latency; "
        "llm-d-latency-predictor@04e44cd training/training_server.py",
        setting="picks_best",
        values=(1.0,),
        swept=1.0,
    ),
    Original(
        "token-load",
        "llm-d: the fewest tokens to compute",
        f"{ROUTER} {PLUGINS}/scheduling/scorer/tokenload, {PLUGINS}/requestcontrol/dataproducer/inflightload",
    ),
    Original(
        "affinity",
        "llm-d: the same among servers that hold four fifths, by the machine's prefill throughput",
        f"{ROUTER} {PLUGINS}/scheduling/filter/prefixcacheaffinity; {GUIDES}/optimized-baseline",
        setting="prefill_tokens_per_s",
        values=(500.0, 1_000.0, 2_000.0, 4_000.0, 8_940.0),
        swept=4_000.0,
    ),
    Original(
        "precise-affinity",
        "llm-d: the same by engines' events",
        f"{ROUTER} {PLUGINS}/scheduling/filter/prefixcacheaffinity; {GUIDES}/precise-prefix-cache-routing (PR 2071)",
        setting="prefill_tokens_per_s",
        values=(500.0, 1_000.0, 2_000.0, 4_000.0, 8_940.0),
        swept=8_940.0,
    ),
    Original(
        "no-hit-lru",
        "llm-d: approximate, new prompts where the last one is longest ago, 2:2:3:2",
        f"{ROUTER} {PLUGINS}/scheduling/scorer/nohitlru, test/perf/config/router-configs/optimized-baseline.yaml",
        setting="no_hit_weight",
        values=(0.5, 1.0, 4.0, 8.0),
    ),
    Original(
        "radix",
        "SGLang's gateway: cache_aware",
        "sglang@053b63f sgl-model-gateway/src/policies/cache_aware.rs",
        setting="balance_absolute",
        values=(2.0, 4.0, 8.0, 16.0, 32.0),
    ),
    Original("lmetric", "SGLang's gateway: LMetric", "sglang@acaa759 sgl-model-gateway/src/policies/lmetric.rs"),
    Original(
        "block-cost",
        "Dynamo's KV router",
        "dynamo@07a6c9c lib/kv-router/src/scheduling/selector/default.rs",
        setting="prefill_scale",
        values=(0.5, 2.0, 4.0, 8.0, 32.0),
        swept=32.0,
    ),
    Original(
        "hash-trie",
        "vLLM production-stack: prefixaware",
        "production-stack@a6c01db src/vllm_router/routers/routing_logic.py, src/vllm_router/prefix/hashtrie.py",
        published={"min_match_ratio": 0.0, "load_factor": NO_BOUND},
        setting="min_match_tokens",
        values=(512, 1_024, 2_048, 4_096, 8_192),
        swept=1_024,
    ),
    Original(
        "load-aware",
        "vLLM production-stack: loadaware",
        "production-stack src/vllm_router/routers/routing_logic.py (PR 1035)",
        setting="beta",
        values=(0.1, 0.25, 0.5, 2.0, 4.0),
        swept=0.5,
    ),
    Original(
        "sticky-least-loaded",
        "vLLM's router: sticky_least_loaded",
        "vllm-project/router@861c578 src/policies/sticky_least_loaded.rs (PR 235)",
        setting="expires_s",
        values=(30.0, 120.0, 600.0),
    ),
    Original(
        "chwbl",
        "KubeAI: consistent hashing with bounded loads",
        "kubeai internal/loadbalancer/balance_chwbl.go",
        setting="prefix_characters",
        values=(200, 400, 1_000),
    ),
    Original(
        "session",
        "rendezvous hashing of the session",
        "",
        setting="load_factor",
        values=(1.25, 1.5, 4.0),
        swept=4.0,
    ),
    Original("least-load", "the fewest requests", ""),
    Original("round-robin", "in turn", ""),
)


@dataclass(frozen=True, slots=True)
class Player:
    name: str
    strategy: str
    options: tuple[tuple[str, float], ...] = ()


def players() -> list[Player]:
    """Ours as it is, each original as published, and once more with its one setting swept."""
    found = [Player(OURS, OURS), Player(GIVEN, OURS)]
    for one in ORIGINALS:
        found.append(Player(one.strategy, one.strategy, tuple(one.published.items())))
        if one.swept is not None:
            found.append(swept(one, one.swept))
    return found


def swept(one: Original, value: float) -> Player:
    options = {**one.published, one.setting: value}
    return Player(f"{one.strategy}, {one.setting} {value:g}", one.strategy, tuple(options.items()))


def scorer_of(player: Player, setup: RoutingSetup) -> tuple[Scorer, CacheEvents | None]:
    if player.strategy == PREDICTED:
        index, picks_best = (
            ApproximatePrefixIndex(setup.cache_blocks),
            bool(dict(player.options).get("picks_best", 0)),
        )
        return PredictedLatency(index, setup.seed, picks_best, streams=setup.whole < 1), None
    if player.strategy in RIVALS:
        return rival(player.strategy, **dict(player.options))
    return strategy_for(player.strategy, setup, ERROR, cost_known=player.name == GIVEN, **dict(player.options))


@cache
def requests_of(family: str, seed: int, trace: Path | None) -> tuple[list[TraceRequest], list[Request]]:
    """At the family's own rate; and as a router reads them, which says nothing of when they come.

    Of a trace the seed moves arrivals within the 3 s between its batches; the generator's families are drawn from it.
    """
    if trace is not None:
        requests = jittered(read_trace(trace), seed)
    else:
        requests = generate(WORKLOADS[family], DURATIONS_S[family], seed=seed)
        if WORKLOADS[family].batch_s:
            requests = jittered(requests, seed)
    return requests, [as_routed(request) for request in requests]
