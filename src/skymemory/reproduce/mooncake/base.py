"""What an experiment is told with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from skymemory.conductor.cost_model import CostModel, LLAMA_70B_4xA100, LLAMA_70B_8xA100, LLAMA_70B_8xA800
from skymemory.sim.sources import Source
from skymemory.sim.sweeps import Way

COST = LLAMA_70B_8xA800.decoding_as(LLAMA_70B_8xA100)
"""Prefills at half of the machine's speed, which the paper leaves open; decoding steps as were published of vLLM with
that model on eight A100, which differ from the paper's A800 by their NVLink."""
DECODINGS: Mapping[str, CostModel] = {"vllm": COST, "turbomind": LLAMA_70B_8xA800.decoding_as(LLAMA_70B_4xA100)}
"""Where it matters which engine decodes: steps of 45 ms and more, and of 29 ms and more (on half of the machine)."""
DECODING_WORDS = (
    "decoding vllm: steps published of vLLM with this model on 8×A100 (45 ms one request); turbomind: of TurboMind on"
    " 4×A100 (29 ms), half of the machine"
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
