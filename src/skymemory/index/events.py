"""What happened to blocks, told to whoever keeps an index of them.

Sequence numbers grow by one per event of a source; a gap means events were lost and the receiver asks for a
snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stored:
    """A chain of blocks is now in ``medium`` (``memory``, ``constellation``, …): ``hashes[0]`` at depth
    ``start``.
    """

    sequence: int
    medium: str
    hashes: tuple[bytes, ...]
    start: int = 0
    parent: bytes | None = None
    context: bytes = b""


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks that are no longer in ``medium``; other media may still hold them."""

    sequence: int
    medium: str
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """Everything in ``medium`` is gone, or everything of one cache context when ``context`` is not empty."""

    sequence: int
    medium: str
    context: bytes = b""


Event = Stored | Removed | Cleared
