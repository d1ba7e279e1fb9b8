"""Who plays in the arena, on what, and with which settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from _predicted_latency import PredictedLatency
from skymemory.conductor.picker import Scorer
from skymemory.conductor.prefix_index.approximate import ApproximatePrefixIndex
from skymemory.conductor.request import Request
from skymemory_lab.sim.routed_strategies import strategy_for
from skymemory_lab.sim.routing import CacheEvents, RoutingSetup, as_routed
from skymemory_lab.sim.trace import TraceRequest, jittered, read_trace
from skymemory_lab.sim.workload import WORKLOADS, generate

OURS, GIVEN, PREDICTED = "least-ttft", "least-ttft, given speeds", "predicted-latency"
ERROR = 0.1
"""Standard deviation of our estimates' own error, beside what learning errs by: see ``sim.routed_strategies``."""
DURATIONS_S = {"conversations": 1_200.0, "tenants": 300.0, "agents": 900.0}
"""Of the generator's families; the second half is measured."""
TRACE_TUNED = 0.7
"""Of a trace, the part that was tuned on; what comes behind it is measured."""


@dataclass(frozen=True, slots=True)
class Original:
    """A strategy of the router, and whose it is."""

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


ORIGINALS = (
    Original(
        "approximate",
        "Gateway API inference extension / llm-d: queue, KV use and prefix, 2:2:3",
        "llm-d-inference-scheduler@520af47 config/charts/epplib/templates/_config.yaml, "
        "pkg/epp/framework/plugins/requestcontrol/dataproducer/approximateprefix/plugin.go",
        setting="prefix_weight",
        values=(1.0, 2.0, 5.0, 10.0, 20.0),
    ),
    Original(
        "precise",
        "llm-d: the same by engines' events",
        "llm-d-inference-scheduler@520af47 pkg/epp/framework/plugins/scheduling/scorer/preciseprefixcache/"
        "precise_prefix_cache.go",
        setting="speculative_s",
        values=(1.0, 2.0, 5.0, 20.0),
        swept=20.0,
    ),
    Original(
        PREDICTED,
        "llm-d: predicted latency, learned with XGBoost",
        "llm-d-inference-scheduler@520af47 config/charts/epplib, pkg/epp/framework/plugins/scheduling/scorer/latency/"
        "plugin.go; gateway-api-inference-extension@0074568 latencypredictor/training_server.py",
        setting="picks_best",
        values=(1.0,),
        swept=1.0,
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
        "production-stack src/vllm_router/routers/routing_logic.py",
        setting="load_factor",
        values=(1.0, 1.5, 2.0, 4.0),
        swept=4.0,
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
        index = ApproximatePrefixIndex(setup.cache_blocks)
        return PredictedLatency(index, setup.seed, bool(dict(player.options).get("picks_best", 0))), None
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
