"""Where the chunks of a prompt come from, as far as a loading session needs to know."""

from __future__ import annotations

from typing import Protocol


class FetchedChunk(Protocol):
    """A chunk's bytes, here but not yet in their place."""

    def place(self) -> bool:
        """Verify, decode and put them in place. False: they are not what was asked for. Asks no tier: others wait."""

    def release(self) -> None:
        """They are not needed any more."""


class ChunkSource(Protocol):
    """Called from several threads at once."""

    def fetch(self, index: int) -> FetchedChunk | None:
        """Wait for a chunk; None where it does not come whole. Raises nothing that a broken tier raises."""

    def give_up(self, index: int) -> None:
        """The fetch of this chunk did not end in time. Asks no tier."""

    def close(self) -> None:
        """Nothing is put in its place any more."""
