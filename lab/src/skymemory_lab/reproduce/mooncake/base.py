"""Settings, cost models and results of Mooncake's experiments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from skymemory.conductor.cost_model import CostModel, LLAMA_70B_4xA100, LLAMA_70B_8xA100, LLAMA_70B_8xA800
from skymemory_lab.sim.cluster.outcome import ClusterMetrics
from skymemory_lab.sim.sweeps import Way
from skymemory_lab.sim.workload import ConversationSource

COST = LLAMA_70B_8xA800.decoding_as(LLAMA_70B_8xA100)
"""Cost model of the experiments.

Prefills at half the machine's speed (not stated in the paper). Decoding steps as published for vLLM on eight A100,
which differ from the paper's A800 in NVLink.
"""
DECODINGS: Mapping[str, CostModel] = {"vllm": COST, "turbomind": LLAMA_70B_8xA800.decoding_as(LLAMA_70B_4xA100)}
VLLM_WORDS = "decoding vllm: steps published of vLLM with this model on 8×A100 (45 ms one request)"
DECODING_WORDS = f"{VLLM_WORDS}; turbomind: of TurboMind on 4×A100 (29 ms), half of the machine"
BOTH: Mapping[str, CostModel] = {"memory": LLAMA_70B_8xA800, "vllm": COST}
"""Cost models for comparisons with coupled machines: the memory bound, and vLLM's steps."""
MEMORY_WORDS = "decoding memory: the memory's time and nothing else (9 ms one request): a bound, not a measurement"
FAST_CONTEXTS = replace(COST, memory_share=1.0, decode_fixed_s=0.0357, decode_request_s=3.76e-4)
"""Alternative fit of vLLM's published steps."""
FAST_CONTEXTS_WORDS = (
    "decoding fast contexts: vLLM's published steps met as nearly (2.3 % off, not 2.1 %) with contexts read at the"
    " memory's whole speed, not a fifth of it; no published step reads more than 36,864 tokens"
)


CAPTIONS: Mapping[str, tuple[str, str]] = {
    "popularity": ("arXiv figure 6", "Blocks by number of prompts"),
    "hits": ("arXiv table 1; FAST'25 section 4", "Hits by capacity and policy"),
    "layer-wise": ("arXiv figure 7", "Latency of storing KV: after the prefill, and layer by layer within it"),
    "scheduling": (
        "FAST'25 figure 5; arXiv figure 8",
        "Mean time to first token by scheduler, 8 machines that prefill and 8 that decode",
    ),
    "bandwidth": ("FAST'25, transfer bandwidth from 24 to 400 Gbit/s", "Time to first token by the network's rate"),
    "ratio": ("FAST'25, prefill:decode ratio on 16 nodes", "Machines that prefill, of 16"),
    "datasets": ("arXiv figure 11", "Requests per second within both SLOs, four machines"),
    "simulated": ("arXiv figure 12", "Requests per second within both SLOs, four machines"),
    "real": ("arXiv figure 13", "The real workload: 20 machines, apart and coupled"),
    "rejections": ("arXiv table 3", "Rejected requests, goodput and wasted prefill under overload"),
    "swings": ("arXiv figures 9 and 10", "Loads of prefill and decode over time, by rule"),
}


@dataclass(frozen=True, slots=True)
class Value:
    """Figure of an experiment beside the published figure."""

    what: str
    unit: str
    published: float | str | None
    """Value; None: not published."""
    ours: float
    why: str = ""  # reason of a difference
    digits: int = 2  # decimals when printed


@dataclass(frozen=True, slots=True)
class Experiment:
    """Result: a table, and values beside published values."""

    name: str
    """Key of ``CAPTIONS``."""
    source: str  # where the requests come from
    assumed: tuple[str, ...]
    """Assumptions for settings that the papers leave open."""
    header: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]
    values: tuple[Value, ...]
    series: Mapping[str, tuple[tuple[float, ...], ...]] = field(default_factory=dict)
    """Curves by name: columns of equal length."""

    @property
    def published_as(self) -> str:
        return CAPTIONS[self.name][0]

    @property
    def title(self) -> str:
        return CAPTIONS[self.name][1]

    def as_json(self) -> dict[str, object]:
        return {
            "experiment": self.name,
            "published_as": self.published_as,
            "title": self.title,
            "requests": self.source,
            "assumed": list(self.assumed),
            # This key is kept for programs that read the JSON.
            "told": [  # words: keep
                {
                    "what": value.what,
                    "unit": value.unit,
                    "published": value.published,
                    "ours": to_json_value(value.ours),
                    "why": value.why,
                }
                for value in self.values
            ],
            "rows": [dict(zip(self.header, map(to_json_value, row), strict=True)) for row in self.rows],
        }


# Columns with another name than the field of ``ClusterMetrics``.
_COLUMNS: Mapping[str, Callable[[ClusterMetrics], float]] = {
    "rejected": lambda metrics: metrics.refused + metrics.refused_after_prefill,
    "mean_ttft_s": lambda metrics: metrics.ttft_s.mean,
    "p50_ttft_s": lambda metrics: metrics.ttft_s.p50,
    "p90_ttft_s": lambda metrics: metrics.ttft_s.p90,
    "p99_ttft_s": lambda metrics: metrics.ttft_s.p99,
    "p90_tbt_s": lambda metrics: metrics.tbt_request_s.p90,
    "mean_tbt_ms": lambda metrics: metrics.tbt_request_s.mean * 1e3,
    "p90_tbt_ms": lambda metrics: metrics.tbt_request_s.p90 * 1e3,
    "p90_longest_tbt_s": lambda metrics: metrics.tbt_max_s.p90,
    "token_hits": lambda metrics: metrics.hits.tokens,
}


def columns(metrics: ClusterMetrics | None, header: Sequence[str]) -> tuple[object, ...]:
    if metrics is None:
        return (None,) * len(header)
    return tuple(_COLUMNS[name](metrics) if name in _COLUMNS else getattr(metrics, name) for name in header)


def to_json_value(value: object) -> object:
    """Convert for JSON: six significant digits, None for NaN and infinity."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


@dataclass(frozen=True, slots=True)
class ExperimentSetting:
    """Requests of an experiment, and how its simulations run."""

    source: ConversationSource
    way: Way = "processes"
    jobs: int | None = None  # in parallel; None: one per core
    progress: Callable[[int, int], None] = lambda done, of: None

    @property
    def seed(self) -> int:
        return self.source.seed

    @property
    def quick(self) -> bool:
        return self.source.quick
