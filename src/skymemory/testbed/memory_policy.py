"""What a constellation's satellites do with a full memory and with dead blocks: a part of the plan."""

from __future__ import annotations

from dataclasses import dataclass

from skymemory.errors import InvalidInput
from skymemory.protocol.eviction import EvictionConfig, parse_policies
from skymemory.protocol.replacement import DEFAULT_REPLACEMENT, REPLACEMENTS


@dataclass(frozen=True, slots=True)
class MemoryPolicy:
    """``eviction``: names of ``protocol.eviction`` with commas between, or ``none``; ``sweep_s``: between sweeps."""

    eviction: str = "lazy"
    replacement: str = DEFAULT_REPLACEMENT
    sweep_s: float = 30.0

    def __post_init__(self) -> None:
        parse_policies(self.eviction)
        if self.replacement not in REPLACEMENTS:
            raise InvalidInput(f"replacement {self.replacement!r}: expected one of {', '.join(REPLACEMENTS)}")
        if not 0.1 <= self.sweep_s <= 1e6:
            raise InvalidInput(f"a sweep every {self.sweep_s} s: expected 0.1 to 1000000")

    @property
    def lazy(self) -> bool:
        """Whether a client that finds a hole evicts the rest."""
        return "lazy" in parse_policies(self.eviction)

    def satellites(self, replicas: int = 1) -> EvictionConfig:
        """What the satellites do of it, where so many copies are kept."""
        return EvictionConfig.of(parse_policies(self.eviction), self.sweep_s, replicas)
