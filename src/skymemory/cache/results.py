"""Results of loading and storing one prompt: tokens by source, bytes, and seconds by phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from skymemory.units import format_duration, format_size


@dataclass(frozen=True, slots=True)
class LoadResult:
    """One prompt looked up. ``prompt_tokens == computed_tokens + sum(hit_tokens.values())``, always."""

    prompt_tokens: int
    hit_tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens supplied, by tier; a full hit still leaves the last token to compute."""
    blocks: int = 0
    """Full blocks in the prompt."""
    found_blocks: int = 0
    """Leading blocks that the lookup found."""
    loaded_blocks: int = 0
    """Leading blocks that were loaded and valid; of layers with a window, those in sight of their end."""
    failed_blocks: Mapping[str, int] = field(default_factory=dict)
    """Blocks found but not usable, by reason: "absent", "corrupt", "foreign", "behind a failed block" …"""
    not_found: str = ""
    """Why the first block behind those found is missing: "absent", "unreachable", "uncertain" …; "shorter than a block"
    for a prompt without a full block; empty if all were found.
    """
    size_bytes: int = 0
    """Bytes fetched and used, as stored."""
    retransmitted: int = 0
    """Packets that the tier had to request again."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By phase, in order: tokenize, hash, lookup, then fetch and decode, or cake."""
    loader: LoaderResult | None = None
    """With Cake: what was computed meanwhile, and where both sides met."""

    @property
    def cached_tokens(self) -> int:
        return sum(self.hit_tokens.values())

    @property
    def computed_tokens(self) -> int:
        """Tokens not supplied, at least one unless the prompt is empty. With Cake some are computed already."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def left_tokens(self) -> int:
        """Tokens that the model still has to compute."""
        if self.loader is None:
            return self.computed_tokens
        return max(self.computed_tokens - self.loader.computed_tokens, 1)  # the last one, for its logits

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
    """Full blocks in the prompt."""
    present_blocks: int = 0
    """Stored before (or being stored by another client)."""
    stored_blocks: int = 0
    refused_blocks: int = 0
    """Not acknowledged: no room, no answer, or no source to store them from."""
    prefilled_tokens: int = 0
    """Tokens computed only to be stored; 0 after a generate."""
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


@dataclass(frozen=True, slots=True)
class LoaderResult:
    """What Cake computed and loaded of one prompt."""

    resident_tokens: int
    computed_tokens: int
    loaded_tokens: int
    loaded_bytes: int
    met_at_token: int | None
    """First token of the chunk where both sides met; None if one side did all, or before the end."""
    wasted_bytes: int
    """Bytes of cancelled, late or failed loads."""
    wasted_tokens: int
    """Tokens computed for chunks that were loaded first."""
    failed_loads: int
    seconds: float
    aborted: bool
