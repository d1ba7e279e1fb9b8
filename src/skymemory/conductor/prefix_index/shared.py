"""An approximate index that keeps a list of what it learnt, for other replicas, and takes in what they learnt.

What a replica hears is not told on: everybody hears it from whoever learnt it. That a server left or restarted is not
told either, since every replica checks its servers itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import numpy as np

from skymemory.conductor.prefix_index.approximate import ApproximatePrefixIndex
from skymemory.conductor.prefix_index.base import Blocks
from skymemory.conductor.prefix_index.deltas import Delta, Dropped, Learnt
from skymemory.conductor.prefix_index.snapshot import NO_PARENT, rows_of
from skymemory.metrics import Counters

MAX_TOLD = 8192
"""Deltas kept for others; beyond, the oldest is lost to those who have not had it."""


class SharedPrefixIndex(ApproximatePrefixIndex):
    """``name_of`` gives the name of a slot's server, ``slot_of`` the slot of a name; None where there is none.

    Deltas are numbered from 0, ``told`` being the number of the next.
    """

    def __init__(
        self,
        name_of: Callable[[int], str | None],
        slot_of: Callable[[str], int | None],
        blocks_per_server: int,
        max_match: int | None = None,
        secret: int | None = None,
    ) -> None:
        super().__init__(blocks_per_server, max_match, secret)
        self.counters = Counters()
        self.told = 0
        self._name_of, self._slot_of = name_of, slot_of
        self._log: deque[Delta] = deque(maxlen=MAX_TOLD)

    def learn(self, slot: int, blocks: Blocks) -> None:
        super().learn(slot, blocks)
        if len(blocks):
            self._tell(slot, lambda name: Learnt(name, self._chain(blocks)))

    def correct(self, slot: int, blocks: Blocks, cached_blocks: int) -> int:
        gone = super().correct(slot, blocks, cached_blocks)
        if gone:
            self._tell(slot, lambda name: Dropped(name, int(blocks[cached_blocks])))
        return gone

    def _tell(self, slot: int, delta: Callable[[str], Delta]) -> None:
        name = self._name_of(slot)
        if name is not None:
            self._log.append(delta(name))
            self.told += 1

    @property
    def kept_from(self) -> int:
        """The number of the oldest delta that is still kept."""
        return self.told - len(self._log)

    def since(self, number: int) -> list[Delta] | None:
        """Deltas from ``number`` on; None where some of them are no longer kept, or were never made."""
        if not self.kept_from <= number <= self.told:
            return None
        return list(islice(self._log, number - self.kept_from, None))

    def absorb(self, deltas: Iterable[Delta]) -> None:
        """What others learnt. Servers that are not in our fleet are left out."""
        for delta in deltas:
            slot = self._slot_of(delta.server)
            if slot is None:
                self.counters.add("deltas_of_unknown_servers")
            elif isinstance(delta, Learnt):
                super().learn(slot, delta.blocks)
                self.counters.add("deltas_absorbed")
            else:
                super().correct(slot, np.array([delta.block], dtype=np.uint64), 0)
                self.counters.add("deltas_absorbed")

    def state(self, slots: Sequence[int]) -> Iterator[Learnt]:
        """Deltas that make an empty index hold what this one does: the chain of every last block, in order of use."""
        for slot in slots:
            name = self._name_of(slot)
            if name is not None:
                for chain in chains_of(self.dump(slot)):
                    yield Learnt(name, chain)


def chains_of(dump: bytes) -> Iterator[Blocks]:
    """The chain of every block of a slot's dump that nothing follows, the one used longest ago first."""
    rows = rows_of(dump)
    hashes, parents = rows["hash"], rows["parent"].astype(np.int64)
    none = parents == NO_PARENT
    followed = np.zeros(len(rows), dtype=bool)
    followed[parents[~none]] = True
    parents[none] = -1
    before = parents.tolist()
    for last in np.flatnonzero(~followed)[::-1].tolist():
        places = []
        at = last
        while at >= 0:
            places.append(at)
            at = before[at]
        yield hashes[places[::-1]].astype(np.uint64)
