"""What a look-up and a storing say of themselves: tokens by source, bytes, and seconds by phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from skymemory.units import format_duration, format_size


@dataclass(frozen=True, slots=True)
class LoadResult:
    """One prompt looked up. ``prompt_tokens == computed_tokens + sum(hit_tokens.values())``, always."""

    prompt_tokens: int
    hit_tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens supplied, by tier. A full hit still leaves the last token to compute."""
    blocks: int = 0
    """Full blocks in the prompt."""
    found_blocks: int = 0
    """Leading blocks that the store said it has."""
    loaded_blocks: int = 0
    """Leading blocks that came and were right; of layers with a window, those that are seen from their end."""
    failed_blocks: Mapping[str, int] = field(default_factory=dict)
    """Blocks found but not usable, by reason: "absent", "corrupt", "foreign", "behind a failed block" …"""
    not_found: str = ""
    """Why the first block that was not found was not: "absent", "unreachable", "uncertain" …; "shorter than a block"
    where the prompt has none; empty where all were found.
    """
    size_bytes: int = 0
    """Bytes fetched and used, as stored."""
    retransmitted: int = 0
    """What the tier had to ask for again."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By phase, in order: tokenize, hash, lookup, then fetch and decode, or (loaded from both ends) cake."""
    loader: LoaderResult | None = None
    """Where a prompt was loaded from both ends: what was computed meanwhile, and where they met."""

    @property
    def cached_tokens(self) -> int:
        return sum(self.hit_tokens.values())

    @property
    def computed_tokens(self) -> int:
        """Tokens for the model; at least one unless the prompt is empty. Some of them it may have computed already."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def left_tokens(self) -> int:
        """Tokens that the model has still to compute."""
        if self.loader is None:
            return self.computed_tokens
        return max(self.computed_tokens - self.loader.computed_tokens, 1)  # the last one, for what it leads to

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    def describe(self) -> str:
        """One line for people and logs."""
        tiers = ", ".join(f"{tokens} from {tier}" for tier, tokens in self.hit_tokens.items())
        failed = "".join(f", {count} blocks {reason}" for reason, count in self.failed_blocks.items())
        if self.not_found and not self.failed_blocks:
            failed = f", the next is {self.not_found}" if self.blocks else f", {self.not_found}"
        meanwhile = ""
        if self.loader is not None:
            met = self.loader.met_at_token
            meanwhile = f", {self.loader.computed_tokens} computed" + (f" (met at {met})" if met is not None else "")
        return (
            f"{self.prompt_tokens} tokens: {tiers or 'none cached'}{meanwhile}, {self.left_tokens} to compute; "
            f"{self.loaded_blocks} of {self.blocks} blocks, {format_size(self.size_bytes)} in "
            f"{format_duration(self.total_s)}{failed}"
        )


@dataclass(frozen=True, slots=True)
class StoreResult:
    """One prompt's blocks stored. ``blocks == present + stored + refused``."""

    prompt_tokens: int
    blocks: int = 0
    """Full blocks in the prompt; a prompt shorter than a block has none, and nothing is stored."""
    present_blocks: int = 0
    """Already there (or being stored by someone else)."""
    stored_blocks: int = 0
    refused_blocks: int = 0
    """Not acknowledged: no room, no answer, or nothing to store them from."""
    prefilled_tokens: int = 0
    """Tokens computed on purpose to have something to store; 0 after a generate."""
    size_bytes: int = 0
    """Bytes stored, headers included."""
    raw_bytes: int = 0
    """The same blocks before the codec."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By phase, in order: tokenize, hash, lookup, prefill, encode, store."""

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    def describe(self) -> str:
        """One line for people and logs."""
        if not self.blocks:
            return f"{self.prompt_tokens} tokens: shorter than a block, 0 blocks to store"
        refused = f", {self.refused_blocks} refused" if self.refused_blocks else ""
        return (
            f"{self.prompt_tokens} tokens: {self.stored_blocks} of {self.blocks} blocks stored, "
            f"{self.present_blocks} there before{refused}; {format_size(self.size_bytes)} in "
            f"{format_duration(self.total_s)}, {self.prefilled_tokens} tokens computed for it"
        )


# What the loader asks for, and what it says of a prompt in the end.


class Origin(Enum):
    """Where a chunk's KV came from; None stands for not there yet."""

    RESIDENT = "resident"
    COMPUTED = "computed"
    LOADED = "loaded"


@dataclass(frozen=True, slots=True)
class ComputeStep:
    """Prefill these tokens now; answer with ``chunk_computed``."""

    index: int
    """The chunk it begins in."""
    first_token: int
    tokens: int
    chunks: int = 1
    """That it reaches into, one behind another; the last may not become whole."""

    @property
    def indices(self) -> range:
        """The chunks it reaches into."""
        return range(self.index, self.index + self.chunks)


@dataclass(frozen=True, slots=True)
class Actions:
    """What to do now. One step is under way at most; fetches are served in the order in which they were asked for."""

    compute: ComputeStep | None = None
    fetch: tuple[int, ...] = ()
    cancel: tuple[int, ...] = ()
    """Cancelled fetches; what still arrives for them is ignored."""
    wake_s: float | None = None
    """Ask again then, even if nothing has happened."""


@dataclass(frozen=True, slots=True)
class LoaderResult:
    """What became of one prompt."""

    resident_tokens: int
    computed_tokens: int
    loaded_tokens: int
    loaded_bytes: int
    met_at_token: int | None
    """First token of the last chunk that joined the two sides; None where one side did all, or before the end."""
    wasted_bytes: int
    """Asked for and not used: cancelled, late or failed loads, counted in full."""
    wasted_tokens: int
    """Computed for chunks that were loaded first."""
    failed_loads: int
    seconds: float
    aborted: bool
