"""What a simulated cluster's pool is made of. Bytes are of KV as the model computes it, rates in bytes a second."""

from __future__ import annotations

import math
from dataclasses import dataclass

from skymemory.conductor.cost_model.transfer import DRAM, SSD, Medium
from skymemory.errors import InvalidInput
from skymemory.store.policies import POLICIES


@dataclass(frozen=True, slots=True)
class SkySetup:
    """A constellation behind the cluster: one ground station, and a box of satellites that stays over it."""

    bytes_per_s: float = 100e9 / 8
    """Between ground and satellites, in each direction, shared by all nodes."""
    preset: str = "starlink-a"
    strategy: str = "rotation_hop"
    servers: int = 81
    access: str = "hybrid"
    gateway: str = "climbing"
    memory_bytes_per_satellite: float = 256e9
    isl_bytes_per_s: float = 100e9 / 8
    """Of one link between satellites: what the box hands over as it moves must pass it within a slot move."""
    packing: float = 1.0
    """Bytes in the sky for each byte of KV: 0.5 where numbers of two bytes are quantized to one."""
    most_queued_s: float = 10.0
    """Nothing more is written while the way up is busy for longer than this."""
    picky_queued_s: float = 5.0
    """While it is busy for longer than this, only what was offered before is written."""
    geometry_s: float = 10.0
    """Lengths of beams are taken anew so often; which satellite holds what is exact at every moment."""

    def __post_init__(self) -> None:
        rates = (self.bytes_per_s, self.isl_bytes_per_s, self.memory_bytes_per_satellite, self.geometry_s)
        if not (
            all(rate > 0 for rate in rates)
            and 0 < self.packing <= 1
            and min(self.most_queued_s, self.picky_queued_s) >= 0
        ):
            raise InvalidInput("a sky needs memory, links with rates above 0, and a packing above 0 and at most 1")


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """What each node has, and what is between and behind them."""

    dram_bytes: float = 1e12
    """In the memory of each node that caches."""
    policy: str = "lru"
    """Who is evicted from it: one of ``store.policies.POLICIES``."""
    ssd_bytes: float = 0.0
    """Behind it, for what it evicts; the SSD itself goes by LRU."""
    network: Medium | None = None
    """Of each node, in each direction; None: the cost model's machine."""
    dram: Medium = DRAM
    """From a node's memory to its accelerators."""
    ssd: Medium = SSD
    jitter_s: float = 0.0
    """Mean of what every transfer between nodes or from the sky comes late by chance (exponential, seeded)."""
    seed: int = 0
    sky: SkySetup | None = None

    def __post_init__(self) -> None:
        for name, size in (("dram_bytes", self.dram_bytes), ("ssd_bytes", self.ssd_bytes), ("jitter_s", self.jitter_s)):
            if not 0 <= size < math.inf:
                raise InvalidInput(f"{name} {size:g}: 0 or more is needed")
        if self.policy not in POLICIES:
            raise InvalidInput(f"policy {self.policy!r}: expected one of {', '.join(POLICIES)}")
