"""The index of who learns from answers alone: what was sent to a server and answered, it is believed to hold.

Per server the blocks last used, as many as its cache has (``set_capacity``, from what it reports), in an order that
evicts the end of a prefix before its head. Engines evict by other rules than ours and do not tell: where one says how
much of a prompt it had, ``correct`` makes the belief smaller.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from skymemory import native
from skymemory.conductor.prefix_index.base import Blocks
from skymemory.errors import InvalidInput

BLOCKS_PER_SERVER = 31_250
"""What is believed of a server that does not report its capacity (the endpoint picker's default)."""
MAX_MATCH = 256
"""Blocks of a prompt that the endpoint picker looks at."""
Table = type[native.PrefixTable]


class ApproximatePrefixIndex:
    """``max_match``: of a prompt, no more than so many blocks are learnt or matched; None: all.

    ``secret``: an odd number of 64 bits that nobody outside knows (see ``native.PrefixTable``). ``table``: for tests.

    Raises:
        InvalidInput: a capacity or a slot that cannot be; the table's ``ValueError`` says why.
    """

    def __init__(
        self,
        blocks_per_server: int = BLOCKS_PER_SERVER,
        max_match: int | None = None,
        secret: int | None = None,
        table: Table = native.PrefixTable,
    ) -> None:
        if max_match is not None and max_match < 1:
            raise InvalidInput(f"at most {max_match} blocks matched: expected 1 or more, or none for no limit")
        try:
            self._table = table(blocks_per_server) if secret is None else table(blocks_per_server, secret)
        except (ValueError, OverflowError) as error:
            raise InvalidInput(f"blocks per server: {error}") from None
        self.max_match = max_match
        self.secret = secret

    @property
    def whole_table(self) -> native.PrefixTable | None:
        """The table, where whole prompts are matched in it."""
        return self._table if self.max_match is None else None

    def match(self, blocks: Blocks, slots: Sequence[int]) -> list[int]:
        return self._table.match(self._chain(blocks), slots)

    def learn(self, slot: int, blocks: Blocks) -> None:
        self._table.learn(slot, self._chain(blocks))

    def correct(self, slot: int, blocks: Blocks, cached_blocks: int) -> int:
        chain = self._chain(blocks)
        if not 0 <= cached_blocks < len(chain):
            return 0
        return self._table.drop(slot, int(chain[cached_blocks]))

    def forget(self, slot: int) -> None:
        self._table.forget(slot)

    def blocks_of(self, slot: int) -> int:
        return self._table.held(slot)

    def set_capacity(self, slot: int, blocks: int) -> None:
        """The server's cache has ``blocks`` blocks; what was believed beyond is no longer.

        Raises:
            InvalidInput: a number of blocks that no cache has.
        """
        try:
            if self._table.capacity(slot) != blocks:
                self._table.set_capacity(slot, blocks)
        except ValueError as error:
            raise InvalidInput(str(error)) from None

    def capacity_of(self, slot: int) -> int:
        return self._table.capacity(slot)

    @property
    def distinct_blocks(self) -> int:
        return self._table.blocks()

    def dump(self, slot: int) -> bytes:
        """What ``slot`` holds, for ``load``: see ``native.PrefixTable.dump``."""
        return self._table.dump(slot)

    def load(self, slot: int, dump: bytes) -> None:
        """In place of what ``slot`` held.

        Raises:
            InvalidInput: bytes that no ``dump`` gives.
        """
        try:
            self._table.load(slot, dump)
        except ValueError as error:
            raise InvalidInput(f"what a server held cannot be read: {error}") from None

    def _chain(self, blocks: Blocks) -> Blocks:
        chain = blocks if self.max_match is None else blocks[: self.max_match]
        return np.ascontiguousarray(chain, dtype=np.uint64)
