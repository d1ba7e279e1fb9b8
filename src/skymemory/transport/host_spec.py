"""What one host process is to run: its satellites, where all the others are, how slow and how bad the links are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from skymemory.constellation.orbit import Shell
from skymemory.constellation.torus import RoutingMode, SatelliteId
from skymemory.protocol.authentication import Authority
from skymemory.protocol.eviction import EvictionConfig
from skymemory.protocol.motion import MoveClock, SkyMap
from skymemory.protocol.replacement import DEFAULT_REPLACEMENT
from skymemory.transport.faults import FaultInjector

Endpoint = tuple[str, int]


@dataclass(frozen=True, slots=True)
class HostSpec:
    """What one host process runs.

    ``mine`` are its own satellites, ``everyone`` all of the constellation. ``delay_scale`` 0 holds nothing; 1 holds as
    long as light takes along the links of ``shell``. ``link_rate_bit_s`` 0 is unlimited. ``onboard`` is the satellite
    that the client's host is part of: its beam has no length.
    """

    mine: Mapping[SatelliteId, Endpoint]
    everyone: Mapping[SatelliteId, Endpoint]
    sky: SkyMap
    shell: Shell
    clock: MoveClock
    memory_bytes: int
    delay_scale: float = 1.0
    link_rate_bit_s: float = 0.0
    faults: FaultInjector | None = None
    routing: RoutingMode = "greedy"
    replacement: str = DEFAULT_REPLACEMENT
    eviction: EvictionConfig = field(default_factory=EvictionConfig)
    onboard: SatelliteId | None = None
    authority: Authority | None = None
    """Whose commands the satellites obey; None: anybody's."""
