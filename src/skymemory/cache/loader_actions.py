"""What the loader asks for, and what it says of a prompt in the end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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
    """Fetches that nobody needs any more; what still comes of them is ignored."""
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
