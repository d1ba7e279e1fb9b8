"""Mooncake's experiments by name, and by the figures and tables in which they were published."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from skymemory.errors import InvalidInput
from skymemory.sim.mooncake.base import Experiment, Setting
from skymemory.sim.mooncake.blocks import hits, popularity
from skymemory.sim.mooncake.coupled import public_datasets, real, simulated
from skymemory.sim.mooncake.layers import layer_wise
from skymemory.sim.mooncake.overload import load_swings, rejections
from skymemory.sim.mooncake.scheduling import bandwidth, ratio, scheduling

EXPERIMENTS: Mapping[str, Callable[[Setting], Experiment]] = {
    "popularity": popularity,
    "hits": hits,
    "layer-wise": layer_wise,
    "scheduling": scheduling,
    "bandwidth": bandwidth,
    "ratio": ratio,
    "datasets": public_datasets,
    "simulated": simulated,
    "real": real,
    "rejections": rejections,
    "swings": load_swings,
}
PUBLISHED = {
    "5": "scheduling", "6": "popularity", "7": "layer-wise", "8": "scheduling", "9": "swings", "10": "swings",
    "11": "datasets", "12": "simulated", "13": "real", "table1": "hits", "table3": "rejections",
}  # fmt: skip
"""Figure 5 is FAST'25's; all others have the numbers of the report on arXiv."""


def chosen(names: Sequence[str]) -> list[str]:
    """The experiments of these names, figures or tables, each once; all of them where none is named.

    Raises:
        InvalidInput: one that there is not.
    """
    found = []
    for name in names:
        key = PUBLISHED.get(name.replace(" ", "").lower(), name)
        if key not in EXPERIMENTS:
            raise InvalidInput(
                f"Mooncake's {name!r} is not reproduced; there are {', '.join(EXPERIMENTS)}, or {', '.join(PUBLISHED)}"
            )
        found.append(key)
    return list(dict.fromkeys(found)) or list(EXPERIMENTS)
