"""Messages between the connector's scheduler and worker sides with each step.

Block numbers are vLLM's, by *group* of layers. A *value*, stored under a key, has ``blocks_per_value`` consecutive
blocks of a prompt, over all layers of a *part*, at least one group (``cache.blocks.Part``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from skymemory.reasons import Miss


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a value, the unit that is stored under a key."""

    block_tokens: int
    blocks_per_value: int

    @property
    def value_tokens(self) -> int:
        return self.block_tokens * self.blocks_per_value


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive values of a part of a prompt, and the destinations of their blocks."""

    part: int
    keys: tuple[bytes, ...]
    first_value: int
    skipped_blocks: int
    """Leading blocks that vLLM has already, or does not need."""
    blocks: tuple[tuple[int, ...], ...]
    """Destinations of the other blocks, by group. The last value's may end early, since a prompt's last token is always
    computed.
    """
    first_block: int = 0
    """Number of ``blocks[...][0]`` in the request."""

    def places(self, value: int, blocks_per_value: int) -> tuple[int, tuple[tuple[int, ...], ...]]:
        """Return the skipped blocks of ``keys[value]``, and destinations of the others, by group."""
        first = value * blocks_per_value - self.skipped_blocks
        span = slice(max(0, first), max(0, first + blocks_per_value))
        return max(0, -first), tuple(blocks[span] for blocks in self.blocks)


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Values to be loaded into a request's blocks during this and the following steps."""

    request: str
    pieces: tuple[Piece, ...]
    tokens: int
    """Tokens that vLLM counts as computed then."""
    backward: bool = False
    """True for Cake: the last value is loaded first; of a single part."""
    wait_s: float = 0.0
    """Longest wait for the next value, if above 0: another engine is storing these values."""

    @property
    def values(self) -> int:
        return sum(len(piece.keys) for piece in self.pieces)

    def at(self, index: int) -> tuple[Piece, int]:
        """Return the piece with value ``index``, and the value's place in it."""
        for piece in self.pieces:
            if index < len(piece.keys):
                return piece, index
            index -= len(piece.keys)
        raise IndexError(index)


@dataclass(frozen=True, slots=True)
class Save:
    """Complete value, to be copied out after this step's forward pass."""

    part: int
    key: bytes
    depth: int
    """Number of the value in the prompt."""
    parent: bytes | None
    """Key of the value before it."""
    blocks: tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class StepPlan:
    """Message from the scheduler to the workers with a step."""

    loads: list[LoadRequest] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    tokens: int = 0
    fences: dict[str, int] = field(default_factory=dict)
    """First blocks that may be written, by request with a backward load: this step computes those before."""
    ends: list[str] = field(default_factory=list)
    """Requests whose backward load ends before this step, as their blocks may then be another's; or whose waiting load
    ends, as the request is gone.
    """


@dataclass(frozen=True, slots=True)
class Loaded:
    lost: int
    """Number of the value not loaded; values after it (before it, in a backward load) were not placed."""
    reason: Miss | None
    size_bytes: int
    seconds: float
    missing_tokens: int = 0
    """Tokens that vLLM counts as cached but computes."""
    waited: bool = False
    """True if ``seconds`` does not measure the store."""


@dataclass(slots=True)
class WorkerOutcome:
    """Message from the workers about the time since the last step."""

    loaded: dict[str, Loaded] = field(default_factory=dict)
    lowest: dict[str, int] = field(default_factory=dict)
    """First block from which on all are in place, by request with a backward load."""
    step_s: float = 0.0
    step_tokens: int = 0
    counts: dict[str, float] = field(default_factory=dict)
    saving: int = 0
    read_back: list[tuple[int, float]] = field(default_factory=list)
    """Bytes and seconds of loads of values just saved."""
    saved: list[bytes] = field(default_factory=list)
    """Keys that the store now has; once by each rank."""
    unsaved: list[bytes] = field(default_factory=list)

    def aggregate(self, other: WorkerOutcome) -> WorkerOutcome:
        """Combine workers' outcomes: a value is in place if all ranks have their share (called by vLLM)."""
        loaded: dict[str, Loaded] = dict(self.loaded)
        for request, theirs in other.loaded.items():
            ours = loaded.get(request, theirs)
            failed = min((load for load in (ours, theirs) if load.reason), key=lambda load: load.lost, default=ours)
            size_bytes = ours.size_bytes + theirs.size_bytes if request in self.loaded else theirs.size_bytes
            missing = max(ours.missing_tokens, theirs.missing_tokens)
            seconds = max(ours.seconds, theirs.seconds)
            loaded[request] = Loaded(failed.lost, failed.reason, size_bytes, seconds, missing, ours.waited)
        lowest = {name: max(self.lowest[name], block) for name, block in other.lowest.items() if name in self.lowest}
        return WorkerOutcome(
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
    "saved_in_place": "Of these, those that were copied out straight into the store's memory",
    "saved_bytes": "Bytes of values stored",
    "saving_us": "Microseconds that storing took",
    "present_values": "Values not stored since the store had them",
    "refused_values": "Values that could not be copied out, or that the store did not take",
    "dropped_values": "Values not stored since too many bytes waited",
}
WITH_REASON = frozenset({"failed_loads", "unused_tokens"})
"""Counters with a reason after their name and a space."""


def added(ours: Mapping[str, float], theirs: Mapping[str, float]) -> dict[str, float]:
    return {name: ours.get(name, 0) + theirs.get(name, 0) for name in {**ours, **theirs}}


def part_key(key: bytes, part: int) -> bytes:
    return key if part == 0 else hashlib.sha256(b"part %d of " % part + key).digest()


def rank_key(key: bytes, rank: int) -> bytes:
    return key if rank == 0 else hashlib.sha256(b"rank %d of " % rank + key).digest()
