"""What an experiment is told with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from skymemory.conductor.cost_model import CostModel, LLAMA_70B_4xA100, LLAMA_70B_8xA100, LLAMA_70B_8xA800
from skymemory.sim.sweeps import Way
from skymemory.sim.workload import Source

COST = LLAMA_70B_8xA800.decoding_as(LLAMA_70B_8xA100)
"""Prefills at half of the machine's speed, which the paper leaves open; decoding steps as were published of vLLM with
that model on eight A100, which differ from the paper's A800 by their NVLink."""
DECODINGS: Mapping[str, CostModel] = {"vllm": COST, "turbomind": LLAMA_70B_8xA800.decoding_as(LLAMA_70B_4xA100)}
"""Where it matters which engine decodes: steps of 45 ms and more, and of 29 ms and more (on half of the machine)."""
VLLM_WORDS = "decoding vllm: steps published of vLLM with this model on 8×A100 (45 ms one request)"
DECODING_WORDS = f"{VLLM_WORDS}; turbomind: of TurboMind on 4×A100 (29 ms), half of the machine"
BOTH: Mapping[str, CostModel] = {"memory": LLAMA_70B_8xA800, "vllm": COST}
"""Where coupled machines are compared: the least that the memory allows (9 ms and more), beside vLLM's, the rival's."""
MEMORY_WORDS = "decoding memory: the memory's time and nothing else (9 ms one request): a bound, which nobody measured"
FAST_CONTEXTS = replace(COST, memory_share=1.0, decode_fixed_s=0.0357, decode_request_s=3.76e-4)
"""vLLM's published steps met as nearly as by ``COST`` (2.3 % off in place of 2.1 %), another part of each being fixed.
None of those steps reads more than 36,864 tokens of contexts; where batches of long prompts read ten times as many, the
two are far apart, and what was published does not say which is right.
"""
FAST_CONTEXTS_WORDS = (
    "decoding fast contexts: vLLM's published steps met as nearly (2.3 % off, not 2.1 %) with contexts read at the"
    " memory's whole speed, not a fifth of it; no published step reads more than 36,864 tokens"
)


@dataclass(frozen=True, slots=True)
class Told:
    """One figure that was published, beside ours."""

    what: str
    unit: str
    published: float | str | None
    """None: nothing was."""
    ours: float
    why: str = ""
    """Why they differ, or what ours says that theirs does not."""
    digits: int = 2


@dataclass(frozen=True, slots=True)
class Experiment:
    """What came of one."""

    name: str
    published_as: str
    title: str
    source: str
    """Whose requests."""
    assumed: tuple[str, ...]
    """What the papers leave open, and what was taken."""
    header: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]
    told: tuple[Told, ...]
    series: Mapping[str, tuple[tuple[float, ...], ...]] = field(default_factory=dict)
    """Curves for a drawing, by name: columns of equal length."""

    def as_json(self) -> dict[str, object]:
        return {
            "experiment": self.name,
            "published_as": self.published_as,
            "title": self.title,
            "requests": self.source,
            "assumed": list(self.assumed),
            "told": [
                {
                    "what": one.what,
                    "unit": one.unit,
                    "published": one.published,
                    "ours": plain(one.ours),
                    "why": one.why,
                }
                for one in self.told
            ],
            "rows": [dict(zip(self.header, map(plain, row), strict=True)) for row in self.rows],
        }


def plain(value: object) -> object:
    """As JSON can hold it: six digits that count; None for what is no number, or has no end."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


@dataclass(frozen=True, slots=True)
class Setting:
    """How an experiment is run."""

    source: Source
    way: Way = "processes"
    jobs: int | None = None
    progress: Callable[[int, int], None] = lambda done, of: None

    @property
    def seed(self) -> int:
        return self.source.seed

    @property
    def quick(self) -> bool:
        return self.source.quick
