"""Messages between the connector's scheduler side and its worker side with each step.

Block numbers are vLLM's, of its block tables: a table for each of its *groups* of layers. A *value* is stored under a
key: ``blocks_per_value`` consecutive blocks of a prompt, over all layers of a *part*. A model has a single part, or a
part for each attention window, of at least one group each (``cache.blocks.Part``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Shape:
    block_tokens: int
    blocks_per_value: int

    @property
    def value_tokens(self) -> int:
        return self.block_tokens * self.blocks_per_value


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive values of one part of a request's prompt, and the destinations of their blocks."""

    part: int
    keys: tuple[bytes, ...]
    first_value: int
    """Number of the first value in the request."""
    skipped_blocks: int
    """Leading blocks of the first value that vLLM has already, or does not need."""
    blocks: tuple[tuple[int, ...], ...]
    """Destinations of the other blocks, by group of the part. The last value's may end early, since a prompt's last
    token is always computed.
    """
    first_block: int = 0
    """Number of ``blocks[...][0]`` in the request."""

    def places(self, value: int, blocks_per_value: int) -> tuple[int, tuple[tuple[int, ...], ...]]:
        """Return the number of skipped blocks of ``keys[value]``, and the destinations of the others, by group."""
        first = value * blocks_per_value - self.skipped_blocks
        span = slice(max(0, first), max(0, first + blocks_per_value))
        return max(0, -first), tuple(blocks[span] for blocks in self.blocks)


@dataclass(frozen=True, slots=True)
class Load:
    """Values of a request's prompt, to be loaded into its blocks during this and the following steps."""

    request: str
    pieces: tuple[Piece, ...]
    """Pieces by part, in the order in which they are read."""
    tokens: int
    """Tokens that vLLM counts as computed after the load."""
    backward: bool = False
    """True for Cake: the last value is loaded first, while the request computes from the front; of a single part."""
    wait_s: float = 0.0
    """Longest wait for the next value, if above 0: another engine is storing these values, and each is loaded as soon
    as it is stored.
    """

    @property
    def values(self) -> int:
        return sum(len(piece.keys) for piece in self.pieces)

    def at(self, index: int) -> tuple[Piece, int]:
        """Return the piece that contains value ``index`` of all pieces, and the value's place in it."""
        for piece in self.pieces:
            if index < len(piece.keys):
                return piece, index
            index -= len(piece.keys)
        raise IndexError(index)


@dataclass(frozen=True, slots=True)
class Save:
    """Complete value, to be copied out after the forward pass of this step."""

    part: int
    key: bytes
    depth: int
    """Number of values of the prompt before it."""
    parent: bytes | None
    blocks: tuple[tuple[int, ...], ...]
    """Block numbers, by group of the part."""


@dataclass(slots=True)
class Plan:
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    tokens: int = 0
    fences: dict[str, int] = field(default_factory=dict)
    """Fences of requests with a backward load: blocks below are computed by this step and must not be written."""
    ends: list[str] = field(default_factory=list)
    """Requests whose backward load ends before this step, since their blocks may then belong to another request; or
    whose waiting load ends, since the request is gone.
    """


GIVEN_UP = "deadline"
"""Reason of a load that took longer than computing."""


@dataclass(frozen=True, slots=True)
class Loaded:
    lost: int
    """Number in the request of the value that was not loaded; values after it (before it, in a backward load) were not
    placed.
    """
    reason: str
    """Reason of the failure; empty if all were loaded."""
    size_bytes: int
    seconds: float
    missing_tokens: int = 0
    """Tokens that vLLM counts as cached but computes."""
    waited: bool = False
    """True if it waited for another engine: ``seconds`` then does not measure the store."""


@dataclass(slots=True)
class Outcome:
    """Message from the workers to the scheduler about the time since the last step."""

    loaded: dict[str, Loaded] = field(default_factory=dict)
    lowest: dict[str, int] = field(default_factory=dict)
    """First block from which on all are in place, by request with a backward load."""
    step_s: float = 0.0
    step_tokens: int = 0
    counts: dict[str, float] = field(default_factory=dict)
    saving: int = 0
    read_back: list[tuple[int, float]] = field(default_factory=list)
    """Bytes and seconds of loads of values that had just been saved."""
    saved: list[bytes] = field(default_factory=list)
    """Keys that the store now has; listed once by each rank."""
    unsaved: list[bytes] = field(default_factory=list)

    def aggregate(self, other: Outcome) -> Outcome:
        """Combine workers' outcomes: a value is in place if all ranks have their share of it (called by vLLM)."""
        loaded: dict[str, Loaded] = dict(self.loaded)
        for request, theirs in other.loaded.items():
            ours = loaded.get(request, theirs)
            failed = min((one for one in (ours, theirs) if one.reason), key=lambda one: one.lost, default=ours)
            size_bytes = ours.size_bytes + theirs.size_bytes if request in self.loaded else theirs.size_bytes
            missing = max(ours.missing_tokens, theirs.missing_tokens)
            seconds = max(ours.seconds, theirs.seconds)
            loaded[request] = Loaded(failed.lost, failed.reason, size_bytes, seconds, missing, ours.waited)
        lowest = {name: max(self.lowest[name], block) for name, block in other.lowest.items() if name in self.lowest}
        return Outcome(
            loaded,
            lowest,
            max(self.step_s, other.step_s),
            max(self.step_tokens, other.step_tokens),
            added(self.counts, other.counts),
            self.saving + other.saving,
            self.read_back + other.read_back,
            self.saved + other.saved,
            self.unsaved + other.unsaved,
        )


COUNTS = {
    "lookups": "Questions to the store how much of a prompt it has",
    "lookups_given_up": "Of these, those that were not waited for",
    "lookups_failed": "Of these, those that failed by a fault of the connector",
    "loads": "Loads that were planned",
    "requested_tokens": "Tokens of these loads",
    "loaded_tokens": "Tokens that they brought",
    "used_tokens": "Of these, those behind which a request went on: they were not computed",
    "unused_tokens": "Of these, those that were computed all the same, or that no request needed any more, by reason",
    "failed_loads": "Loads that brought less, by reason",
    "recomputed_tokens": "Tokens that vLLM counts as cached, and computed since their load failed",
    "slower_than_computing_tokens": "Stored tokens that were computed since loading them seemed slower",
    "waited_loads": "Of the loads, those of values that another engine was to store",
    "waited_values": "Values that these have loaded so far",
    "waiting_ms": "Milliseconds that these took, from the first question to the end",
    "waits_given_up": "Of these, those that ended without all values since no more came",
    "cake_tokens": "Tokens that were loaded from the back while the front was computed",
    "saved_values": "Values stored",
    "saved_bytes": "Bytes of values stored",
    "saving_us": "Microseconds that storing took",
    "present_values": "Values not stored since the store had them",
    "refused_values": "Values that could not be copied out, or that the store did not take",
    "dropped_values": "Values not stored since too many bytes waited",
}
WITH_REASON = frozenset({"failed_loads", "unused_tokens"})
"""Counters by reason, which follows the name after a space."""


def added(ours: Mapping[str, float], theirs: Mapping[str, float]) -> dict[str, float]:
    return {name: ours.get(name, 0) + theirs.get(name, 0) for name in {**ours, **theirs}}


def part_key(key: bytes, part: int) -> bytes:
    """Return the key of a part of a value: the first part has the value's own key."""
    return key if part == 0 else hashlib.sha256(b"part %d of " % part + key).digest()


def rank_key(key: bytes, rank: int) -> bytes:
    return key if rank == 0 else hashlib.sha256(b"rank %d of " % rank + key).digest()
