"""The contract of prefix indices, and the approximate index, learnt from requests.

A prompt is a chain of blocks: uint64 hashes, each of a block and all blocks before it (``native.chain_hashes``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from skymemory import native
from skymemory.errors import InvalidInput

Blocks = NDArray[np.uint64]
"""Chain of block hashes; one dimension, contiguous."""


class PrefixIndex(Protocol):
    """Index of the prompt blocks in each server's KV cache; a *slot* is a server's number.

    Only a prefix counts: blocks after a block that a server lacks do not.
    """

    def match(self, blocks: Blocks, slots: Sequence[int]) -> list[int]:
        """Return the leading blocks that each of ``slots`` holds; change no state."""
        ...

    def learn(self, slot: int, blocks: Blocks) -> None:
        """Record that the server holds this chain and has just used it."""
        ...

    def correct(self, slot: int, blocks: Blocks, cached_blocks: int) -> int:
        """Drop the blocks after ``cached_blocks``, which the server turned out to lack, also in other chains; return
        their number.
        """
        ...

    def forget(self, slot: int) -> None: ...

    def blocks_of(self, slot: int) -> int: ...


BLOCKS_PER_SERVER = 31_250
"""The endpoint picker's default."""
Table = type[native.PrefixTable]


class ApproximatePrefixIndex:
    """Prefix index that assumes that a server holds the prompts that it answered, up to its cache's capacity.

    The end of a prefix is evicted before its head; engines evict by other rules. ``max_match`` limits the blocks per
    prompt. ``secret`` is an odd 64-bit number for ``native.PrefixTable``.
    """

    def __init__(
        self,
        blocks_per_server: int = BLOCKS_PER_SERVER,
        max_match: int | None = None,
        secret: int | None = None,
        table: Table = native.PrefixTable,
    ) -> None:
        if max_match is not None and max_match < 1:
            raise InvalidInput(f"max_match is {max_match}; expected 1 or more, or None")
        try:
            self._table = table(blocks_per_server) if secret is None else table(blocks_per_server, secret)
        except (ValueError, OverflowError) as error:
            raise InvalidInput(f"blocks per server: {error}") from None
        self.max_match = max_match
        self.secret = secret

    @property
    def whole_table(self) -> native.PrefixTable | None:
        return self._table if self.max_match is None else None

    def match(self, blocks: Blocks, slots: Sequence[int]) -> list[int]:
        return self._table.match(self._chain(blocks), slots)

    def learn(self, slot: int, blocks: Blocks) -> None:
        self._table.learn(slot, self._chain(blocks))

    def correct(self, slot: int, blocks: Blocks, cached_blocks: int) -> int:
        chain = self._chain(blocks)
        if not 0 <= cached_blocks < len(chain):
            return 0
        # Dropping the first missing block is enough: the table also drops its successors in all chains.
        return self._table.drop(slot, int(chain[cached_blocks]))

    def forget(self, slot: int) -> None:
        self._table.forget(slot)

    def blocks_of(self, slot: int) -> int:
        return self._table.block_count(slot)

    def set_capacity(self, slot: int, blocks: int) -> None:
        """Set the capacity of a server's cache and evict beyond it."""
        try:
            if self._table.capacity(slot) != blocks:  # set with every report, but it changes only at a restart
                self._table.set_capacity(slot, blocks)
        except ValueError as error:
            raise InvalidInput(str(error)) from None

    def capacity_of(self, slot: int) -> int:
        return self._table.capacity(slot)

    @property
    def distinct_blocks(self) -> int:
        return self._table.blocks()

    def dump(self, slot: int) -> bytes:
        return self._table.dump(slot)

    def load(self, slot: int, dump: bytes) -> None:
        """Replace the blocks of ``slot`` by those in the output of ``dump``."""
        try:
            self._table.load(slot, dump)
        except ValueError as error:
            raise InvalidInput(f"invalid dump of a server's blocks: {error}") from None

    def _chain(self, blocks: Blocks) -> Blocks:
        return blocks if self.max_match is None else blocks[: self.max_match]
