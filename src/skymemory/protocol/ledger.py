"""A satellite's books in bytes: what came in is held, or went, and for every byte that went there is a cause.

A chunk counts as ``ChunkStore.used_bytes`` counts it: its payload and its 72 bytes of reference. For every satellite,
at any moment,

    set + migrated in = held + replaced + evicted + deleted + migrated out + lost.

Both sides are gross: storing again what is here already counts once as set (or migrated in) and once as replaced. A
copy that a handover has made counts at both ends until the old one is deleted, a grace period after its
acknowledgement; only then has it migrated out. Lost is what a satellite held when it died and came back empty under the
same books; a process that is killed takes its books with it, and the next one opens new ones at nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

Cause = Literal["replaced", "evicted", "deleted", "migrated_out", "lost"]
"""``replaced``: by another of the same name. ``evicted``: for room, by age or by a policy. ``deleted``: by command."""
CAUSES: tuple[Cause, ...] = ("replaced", "evicted", "deleted", "migrated_out", "lost")

Named = TypeVar("Named")


@dataclass(slots=True)
class Ledger:
    """Monotonic counters of bytes."""

    set_bytes: int = 0
    migrated_in_bytes: int = 0
    replaced_bytes: int = 0
    evicted_bytes: int = 0
    deleted_bytes: int = 0
    migrated_out_bytes: int = 0
    lost_bytes: int = 0

    def came(self, size_bytes: int, migrated: bool) -> None:
        """A writer, or (``migrated``) another satellite, brought so much."""
        if migrated:
            self.migrated_in_bytes += size_bytes
        else:
            self.set_bytes += size_bytes

    def went(self, size_bytes: int, cause: Cause) -> None:
        if cause == "replaced":
            self.replaced_bytes += size_bytes
        elif cause == "evicted":
            self.evicted_bytes += size_bytes
        elif cause == "deleted":
            self.deleted_bytes += size_bytes
        elif cause == "migrated_out":
            self.migrated_out_bytes += size_bytes
        else:
            self.lost_bytes += size_bytes

    def figures(self) -> dict[str, int]:
        """As ``messages.HOUSEKEEPING_FIELDS`` names them."""
        return {
            "bytes_set": self.set_bytes, "bytes_migrated_in": self.migrated_in_bytes,
            "bytes_replaced": self.replaced_bytes, "bytes_evicted": self.evicted_bytes,
            "bytes_deleted": self.deleted_bytes, "bytes_migrated_out": self.migrated_out_bytes,
            "bytes_lost": self.lost_bytes,
        }  # fmt: skip


def unaccounted_bytes(figures: Mapping[str, int]) -> int:
    """What came in and is neither held nor gone with a cause, by one satellite's housekeeping: 0 if its books close."""
    came = figures["bytes_set"] + figures["bytes_migrated_in"]
    return came - figures["memory_used_bytes"] - sum(figures[f"bytes_{cause}"] for cause in CAUSES)


def open_books(satellites: Mapping[Named, Mapping[str, int]]) -> dict[Named, int]:
    """The satellites whose books do not close, with the bytes they cannot account for; empty is as it must be."""
    gaps = {name: unaccounted_bytes(figures) for name, figures in satellites.items()}
    return {name: gap for name, gap in gaps.items() if gap}


def total(satellites: Mapping[Named, Mapping[str, int]]) -> dict[str, int]:
    """The books of all satellites together."""
    names = ["bytes_set", "bytes_migrated_in", "memory_used_bytes", *(f"bytes_{cause}" for cause in CAUSES)]
    return {name: sum(figures[name] for figures in satellites.values()) for name in names}
