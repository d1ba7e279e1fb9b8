"""The SkyMemory paper's latency model (§4, equations 1 to 4) and the sweep of its figure 16.

Settings are from the authors' published script, not their table 2 (2..21 MB, 160..2000 km).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from skymemory.constellation.orbit import neighbour_chord_m
from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.errors import InvalidInput
from skymemory.placement.layout import Strategy, layout

PAPER_LIGHT_M_S = 2.998e8
"""The speed of light as the authors' script rounds it."""
PAPER_TORUS = Torus(15, 15)
PAPER_CENTRE = SatelliteId(7, 7)
PAPER_STRATEGIES: tuple[Strategy, ...] = ("rotation", "hop", "rotation_hop")

Parameter = Literal["kvc_bytes", "servers", "processing_s", "altitude_m"]
SWEEPS: dict[Parameter, tuple[float, ...]] = {
    "kvc_bytes": tuple(mebibytes * 2**20 for mebibytes in range(1, 22)),
    "servers": (9, 25, 49, 81),
    "processing_s": tuple(milliseconds / 1000 for milliseconds in range(2, 21, 2)),
    "altitude_m": tuple(range(160_000, 2_000_000, 220_000)),
}
"""Values of figure 16, varied one parameter at a time. The others keep their last value."""


@dataclass(frozen=True, slots=True)
class LatencySetting:
    """Parameters of the model. Defaults are the fixed values of figure 16."""

    strategy: Strategy = "rotation_hop"
    kvc_bytes: int = 21 * 2**20
    servers: int = 81
    processing_s: float = 0.020
    altitude_m: float = 1_920_000.0
    chunk_bytes: int = 12_288

    def __post_init__(self) -> None:
        if self.kvc_bytes <= 0 or self.chunk_bytes <= 0:
            raise InvalidInput(f"kvc_bytes {self.kvc_bytes}, chunk_bytes {self.chunk_bytes}: expected > 0")
        if self.processing_s < 0 or self.altitude_m <= 0:
            raise InvalidInput(
                f"processing_s {self.processing_s:g}, altitude_m {self.altitude_m:g}: expected ≥ 0 and > 0"
            )

    @property
    def chunks(self) -> int:
        return -(-self.kvc_bytes // self.chunk_bytes)


class SweepPoint(NamedTuple):
    """Point of figure 16: latency of the slowest server."""

    parameter: Parameter
    value: float
    strategy: Strategy
    worst_s: float


class ModelledClaim(NamedTuple):
    """Conclusion of the paper, beside its model's result."""

    what: str
    paper: str
    model: str


@lru_cache(maxsize=64)
def _offsets(strategy: Strategy, servers: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    # Return each server's distance from the centre, in slots and in planes.
    cells = np.array(layout(strategy, servers, PAPER_TORUS).cells, dtype=np.float64)
    return np.abs(cells[:, 0]), np.abs(cells[:, 1])


def server_latencies_s(setting: LatencySetting) -> NDArray[np.float64]:
    """Return each server's latency: the one-way delay plus the processing of its chunks."""
    d_slot, d_plane = _offsets(setting.strategy, setting.servers)
    d_m = neighbour_chord_m(PAPER_TORUS.slots_per_plane, setting.altitude_m)
    d_n = neighbour_chord_m(PAPER_TORUS.planes, setting.altitude_m)
    # On board, a packet follows the grid. From the ground, light takes the straight line (equations 3 and 4).
    if setting.strategy == "hop":
        distance_m = d_m * d_slot + d_n * d_plane
    else:
        distance_m = np.sqrt((d_m * d_slot) ** 2 + (d_n * d_plane) ** 2 + setting.altitude_m**2)
    # Chunks are dealt in the layout's order, so the first ``remainder`` servers have one chunk more.
    per_server, remainder = divmod(setting.chunks, setting.servers)
    chunks = per_server + (np.arange(setting.servers) < remainder)
    latencies: NDArray[np.float64] = distance_m / PAPER_LIGHT_M_S + setting.processing_s * chunks
    return latencies[chunks > 0]


def worst_latency_s(setting: LatencySetting) -> float:
    return float(server_latencies_s(setting).max())


def settings() -> Iterator[tuple[Parameter, float, LatencySetting]]:
    """Yield the 132 settings of figure 16 with the varied parameter and its value."""
    for parameter, values in SWEEPS.items():
        for strategy in PAPER_STRATEGIES:
            fixed = LatencySetting(strategy)
            for value in values:
                yield parameter, value, replace(fixed, **{parameter: value})  # type: ignore[arg-type]


def figure_16() -> list[SweepPoint]:
    return [
        SweepPoint(parameter, value, setting.strategy, worst_latency_s(setting))
        for parameter, value, setting in settings()
    ]


def satellites_for_link_s(one_way_s: float, altitude_m: float) -> int:
    """Return the fewest satellites per plane (or planes) with neighbours nearer than ``one_way_s``."""
    count = 2
    while neighbour_chord_m(count, altitude_m) / PAPER_LIGHT_M_S >= one_way_s:
        count += 1
    return count


def claims() -> list[ModelledClaim]:
    """Compare the paper's conclusions from figures 1, 2 and 16 with its model."""
    fewest, most = LatencySetting(servers=9), LatencySetting(servers=81)
    saved = 1 - worst_latency_s(most) / worst_latency_s(fewest)
    rotation_s = worst_latency_s(LatencySetting("rotation"))
    gain_s = rotation_s - worst_latency_s(LatencySetting("rotation_hop"))
    even = LatencySetting(kvc_bytes=81 * 22 * 12_288)
    even_gain_s = worst_latency_s(replace(even, strategy="rotation")) - worst_latency_s(even)
    spreads = []
    for parameter in ("kvc_bytes", "processing_s"):
        points = [point for point in figure_16() if point.parameter == parameter]
        for value in SWEEPS[parameter]:
            at_value = [point.worst_s for point in points if point.value == value]
            spreads.append(max(at_value) / min(at_value) - 1)
    needed = satellites_for_link_s(0.002, 550_000.0)
    return [
        ModelledClaim("8× the servers", "latency falls by about 90 %", f"9× the servers: by {saved:.1%}"),
        ModelledClaim(
            "rotation_hop against rotation",
            "lower at every altitude",
            f"by {gain_s * 1e3:.0f} ms of {rotation_s * 1e3:.0f}, one chunk's processing: the remainder of "
            f"chunks / servers lies near, not in a corner; by {even_gain_s * 1e3:.0f} ms without remainder",
        ),
        ModelledClaim(
            "KV cache size and processing time",
            "the strategies are similar",
            f"apart by {min(spreads):.0%} to {max(spreads):.0%}",
        ),
        ModelledClaim("links under 2 ms", "with 50+ satellites in a plane", f"with {needed}+ at 550 km"),
    ]
