"""The contract of every index of prefixes.

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
    """An index. What a slot holds behind a block that it does not hold counts for nothing."""

    def match(self, blocks: Blocks, slots: Sequence[int]) -> list[int]:
        """How many blocks from the first on, without a gap, each of ``slots`` holds, in that order.

        Changes nothing: asking is no use.
        """
        ...

    def learn(self, slot: int, blocks: Blocks) -> None:
        """The server of ``slot`` holds this whole chain now, and has just used it."""
        ...

    def correct(self, slot: int, blocks: Blocks, cached_blocks: int) -> int:
        """The server said that it held only ``cached_blocks`` of this chain: how many blocks are no longer believed.

        What follows the block that it lacked is not believed either, in other chains too.
        """
        ...

    def forget(self, slot: int) -> None:
        """The server of ``slot`` holds nothing: it left, or it restarted."""
        ...

    def blocks_of(self, slot: int) -> int:
        """Blocks that ``slot`` holds."""
        ...
