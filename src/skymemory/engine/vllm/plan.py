"""What the scheduler's side of the connector sends to the workers' side with each step, and what comes back.

Block numbers are vLLM's, of its block tables: one for each of its *groups* of layers. A *value* is what is stored under
one key: ``blocks_per_value`` consecutive blocks of a prompt, over all layers of one *part*. A model has one part, or
one for each attention window, of one or more groups each (``cache.blocks.Part``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Shape:
    """How prompts are cut."""

    block_tokens: int
    """Of vLLM's blocks."""
    blocks_per_value: int

    @property
    def value_tokens(self) -> int:
        return self.block_tokens * self.blocks_per_value


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive values of one part of a request's prompt, and where their blocks go."""

    part: int
    keys: tuple[bytes, ...]
    """Of the values, in order."""
    first_value: int
    """Number of the first in the request."""
    skipped_blocks: int
    """Leading blocks of the first value that vLLM has already, or does not need."""
    blocks: tuple[tuple[int, ...], ...]
    """Of each group of the part, where the others go; the last value's may end early, since a prompt's last token is
    always computed.
    """
    first_block: int = 0
    """Number of ``blocks[...][0]`` in the request."""

    def places(self, value: int, blocks_per_value: int) -> tuple[int, tuple[tuple[int, ...], ...]]:
        """For ``keys[value]``: how many of its blocks are skipped, and where those behind them go, by group."""
        first = value * blocks_per_value - self.skipped_blocks
        here = slice(max(0, first), max(0, first + blocks_per_value))
        return max(0, -first), tuple(blocks[here] for blocks in self.blocks)


@dataclass(frozen=True, slots=True)
class Load:
    """Values of one request's prompt, to be put into its blocks beside this and the following steps."""

    request: str
    pieces: tuple[Piece, ...]
    """One of each part, in the order in which they are read."""
    tokens: int
    """That vLLM counts as computed once they are there."""
    backward: bool = False
    """Cake: the last value first, while the request computes from the front; of one part."""
    wait_s: float = 0.0
    """Above 0: another engine is storing these values. Each is loaded as soon as it is there, until for so long no more
    has come.
    """

    @property
    def values(self) -> int:
        return sum(len(piece.keys) for piece in self.pieces)

    def at(self, index: int) -> tuple[Piece, int]:
        """The piece that has the value ``index`` of all, and its place in there."""
        for piece in self.pieces:
            if index < len(piece.keys):
                return piece, index
            index -= len(piece.keys)
        raise IndexError(index)


@dataclass(frozen=True, slots=True)
class Save:
    """One whole value, to be copied out after the forward of this step."""

    part: int
    key: bytes
    depth: int
    """Values of the prompt before it."""
    parent: bytes | None
    blocks: tuple[tuple[int, ...], ...]
    """By group of the part."""


@dataclass(slots=True)
class Plan:
    """For one step, from the scheduler to every worker."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    tokens: int = 0
    """That the step computes."""
    fences: dict[str, int] = field(default_factory=dict)
    """Of requests with a backward load: blocks below are computed, or will be by this step; they are not written."""
    ends: list[str] = field(default_factory=list)
    """Requests whose backward load ends before this step, since their blocks may be another's in it; or whose waiting
    load does, since they are gone.
    """


GIVEN_UP = "deadline"
"""Reason of a load that took longer than computing."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The end of one load."""

    lost: int
    """Number in the request of the value that did not come; those behind it (before it, of a backward load) were not
    put into place.
    """
    reason: str
    """Why not; empty if all came."""
    size_bytes: int
    seconds: float
    missing_tokens: int = 0
    """That vLLM counts as cached and computes all the same."""
    waited: bool = False
    """For another engine, so that ``seconds`` says nothing of the store."""


@dataclass(slots=True)
class Outcome:
    """Since the last step, from the workers to the scheduler."""

    loaded: dict[str, Loaded] = field(default_factory=dict)
    """By request."""
    lowest: dict[str, int] = field(default_factory=dict)
    """Of requests with a backward load: the first block from which on all are in place."""
    step_s: float = 0.0
    step_tokens: int = 0
    counts: dict[str, float] = field(default_factory=dict)
    """Since the last step, by name."""
    saving: int = 0
    """Values that wait to be saved, or are being saved."""
    read_back: list[tuple[int, float]] = field(default_factory=list)
    """Bytes and seconds of loads of what had just been saved."""
    saved: list[bytes] = field(default_factory=list)
    """Keys that the store has now; once for each rank."""
    unsaved: list[bytes] = field(default_factory=list)
    """Keys of saves that came to nothing."""

    def aggregate(self, other: Outcome) -> Outcome:
        """As of one worker: a value is in place where all have their part of it (called by vLLM)."""
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
"""What the connector counts."""
WITH_REASON = frozenset({"failed_loads", "unused_tokens"})
"""Of these, those that are counted by reason, which follows the name after a space."""


def added(ours: Mapping[str, float], theirs: Mapping[str, float]) -> dict[str, float]:
    """Sums by name."""
    return {name: ours.get(name, 0) + theirs.get(name, 0) for name in {**ours, **theirs}}


def part_key(key: bytes, part: int) -> bytes:
    """Under which a part of a value is stored: the first under the value's own key."""
    return key if part == 0 else hashlib.sha256(b"part %d of " % part + key).digest()


def rank_key(key: bytes, rank: int) -> bytes:
    """Under which a tensor-parallel rank stores its part of a value."""
    return key if rank == 0 else hashlib.sha256(b"rank %d of " % rank + key).digest()
