"""How a hierarchy of tiers behaves as a whole."""

from __future__ import annotations

from dataclasses import dataclass

from skymemory.errors import InvalidInput

PROMOTIONS = ("always", "second hit", "never")


@dataclass(frozen=True, slots=True)
class HierarchySettings:
    """Rules for what moves, and bounds on what is held and waited for."""

    promote: str = "always"
    """When a value that a farther tier supplied goes to the nearest: "always", on its "second hit", "never"."""
    demote: bool = True
    """Whether what a tier evicts is offered to the next one (tiers that can tell, see ``store.base.Evicting``)."""
    write_back: bool = False
    """False: a put waits for all tiers. True: for the nearest; the others get it later, from memory."""
    load_deadline_s: float = 10.0
    """What has not come by then is a miss."""
    close_deadline_s: float = 10.0
    """How long ``close`` waits for what has not been written back. What is left is counted as lost."""
    outbound_bytes: int = 256 << 20
    """Values on their way between tiers. With no room for more, a put waits for all tiers again."""
    in_flight_bytes: int = 256 << 20
    """Expected bytes being loaded from tiers that are not local, over all threads."""

    def __post_init__(self) -> None:
        if self.promote not in PROMOTIONS:
            raise InvalidInput(f"promote={self.promote!r}: expected one of {', '.join(map(repr, PROMOTIONS))}")
        if self.outbound_bytes < 0 or self.load_deadline_s <= 0 or self.close_deadline_s < 0:
            raise InvalidInput(f"deadlines and budgets of a hierarchy must not be negative, got {self}")
