"""The contract of prefix indices.

A prompt is a chain of blocks: uint64 hashes, each of a block and all before it (``native.chain_hashes``, seeded by
``conductor.request``), so that equal hashes mean equal prefixes that may be shared. Servers are the slots of the fleet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.uint64]
"""One dimension, contiguous."""


class PrefixIndex(Protocol):
    """A prefix index. Blocks behind a block that a slot lacks do not count."""

    def match(self, blocks: Blocks, slots: Sequence[int]) -> list[int]:
        """Number of leading blocks that each of ``slots`` holds, without a gap.

        Changes no state: a match is not a use.
        """
        ...

    def learn(self, slot: int, blocks: Blocks) -> None:
        """The server of ``slot`` holds this chain now and has just used it."""
        ...

    def correct(self, slot: int, blocks: Blocks, cached_blocks: int) -> int:
        """The server reported only ``cached_blocks`` of this chain as cached. Returns the number of blocks dropped.

        Blocks that follow the missing one are dropped too, also in other chains.
        """
        ...

    def forget(self, slot: int) -> None:
        """Drops all blocks of ``slot``: the server left or restarted."""
        ...

    def blocks_of(self, slot: int) -> int:
        """Number of blocks of ``slot``."""
        ...
