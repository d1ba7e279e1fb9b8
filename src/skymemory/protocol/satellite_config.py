"""What one satellite is told about itself before it starts."""

from __future__ import annotations

from dataclasses import dataclass, field

from skymemory.constellation.torus import RoutingMode, SatelliteId
from skymemory.protocol.authentication import Authority
from skymemory.protocol.eviction import EvictionConfig
from skymemory.protocol.replacement import DEFAULT_REPLACEMENT


@dataclass(frozen=True, slots=True)
class SatelliteConfig:
    """``credit_bytes`` is what the transport's receive buffer really holds; it is offered to senders."""

    address: SatelliteId
    memory_bytes: int
    routing: RoutingMode = "greedy"
    credit_bytes: int = 1 << 20
    max_backlog_bytes: int = 64 << 20
    handover_window_bursts: int = 32
    handover_timeout_s: float = 0.1
    handover_grace_s: float = 1.0
    handover_gap_s: float = 0.002
    """Seconds a burst of a handover, at least, if all is sent in time that way (0: as fast as they go)."""
    replacement: str = DEFAULT_REPLACEMENT
    """One of ``replacement.REPLACEMENTS``: what goes first when the memory is full."""
    eviction: EvictionConfig = field(default_factory=EvictionConfig)
    neighbour_patience_s: float = 0.05
    """How long a neighbour may take to answer a question; the transport knows how long its links are."""
    authority: Authority | None = field(default=None, repr=False)
    """Whose commands it obeys; None: anybody's."""
