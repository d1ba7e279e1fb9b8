"""Values with copies: every chunk is on the satellites of several replicas, and whichever answers first is taken.

Replica 0 is where a value without copies is. A read asks it first and the next copy where an answer is late or a
satellite dead; a write is good when every chunk is stored once at least.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from skymemory.constellation.torus import SatelliteId
from skymemory.placement.locate import Moves
from skymemory.protocol.transfer import (
    WRITE_BURST_CHUNKS,
    Burst,
    ReadTransfer,
    StandIns,
    ValueInfo,
    Where,
    WriteTransfer,
    planned,
)
from skymemory.protocol.wire import REPLICA_OFFSET

_WAIVED = 2
"""Of a chunk's copy: not stored, because its satellite is dead or full; another copy has to do."""


class ReplicatedRead(ReadTransfer):
    """``hedge``: after so many round trips without an answer the next copy is asked too; 0: all are asked at once."""

    def __init__(
        self, info: ValueInfo, out: memoryview, copies: Sequence[Where], moves: Moves, burst_chunks: int, hedge: float
    ) -> None:
        super().__init__(info, out, copies[0], moves, burst_chunks)
        self.hedge = hedge
        self._copies = copies
        self._moves = moves
        self._failed: set[SatelliteId] = set()
        if hedge == 0:
            for copy in copies[1:]:
                self.pending.extend(planned(info.chunks, copy(moves), info.servers, burst_chunks)[0])

    def redirect(
        self, indices: Sequence[int], satellite: SatelliteId, failure: str = "", others: StandIns | None = None
    ) -> bool:
        self._failed.add(satellite)
        if super().redirect(indices, satellite):
            return True
        bursts = self._elsewhere(indices, satellite)
        if bursts is None:
            return super().redirect(indices, satellite, failure, others)
        self.pending.extendleft(bursts)
        return True

    def ask_next(self, indices: Sequence[int], satellite: SatelliteId) -> bool:
        """These are late: ask for them elsewhere too, if they are anywhere else. Whether there is something to ask."""
        bursts = self._elsewhere(indices, satellite)
        self.pending.extend(bursts or ())
        return bool(bursts)

    def _elsewhere(self, indices: Sequence[int], satellite: SatelliteId) -> list[Burst] | None:
        """Who else has those of these chunks that have not come; None if nobody has one of them."""
        places = [copy(self._moves) for copy in self._copies]
        wanted: dict[SatelliteId, list[int]] = {}
        for index in indices:
            if self.arrived[index]:
                continue
            its = (place[index % self.info.servers] for place in places)
            other = next((one for one in its if one != satellite and one not in self._failed), None)
            if other is None:
                return None
            wanted.setdefault(other, []).append(index)
        return [Burst(other, chunks) for other, chunks in wanted.items()]

    def _others(self, index: int, asked: SatelliteId, nearby: Sequence[Moves]) -> deque[SatelliteId]:
        places = self._places(index % self.info.servers, nearby)
        others = [place for place in places if place != asked and place not in self._failed]
        return deque([*others, next(iter(places))] if others else [])

    def _places(self, server: int, at: Sequence[Moves]) -> dict[SatelliteId, None]:
        return dict.fromkeys(copy(moves)[server] for moves in at for copy in self._copies)


class ReplicatedWrite(WriteTransfer):
    """Copy r of chunk i has the index r · chunks + i in everything but on the wire."""

    __slots__ = ()

    @classmethod
    def of_copies(cls, one: WriteTransfer, copies: Sequence[Where], moves: Moves) -> ReplicatedWrite:
        """The write ``one`` with all its copies."""
        chunks, servers = one.info.chunks, one.info.servers
        refs = np.concatenate([one.refs] * len(copies))
        pending: deque[Burst] = deque()
        for replica, copy in enumerate(copies):
            first = replica * chunks
            refs[first : first + chunks, REPLICA_OFFSET] = replica
            for satellite, its, _ in planned(chunks, copy(moves), servers, WRITE_BURST_CHUNKS)[0]:
                pending.append(Burst(satellite, range(its[0] + first, its[-1] + first + 1, servers)))
        total = chunks * len(copies)
        one.report.satellites = len({burst.satellite for burst in pending})
        return cls(one.info, refs, list(one.payloads) * len(copies), bytearray(total), total, pending, one.report)

    def of_request(self, indices: Sequence[int], asked: Sequence[int]) -> Sequence[int]:
        first = asked[0] - asked[0] % self.info.chunks
        if isinstance(indices, range):
            return range(indices.start + first, indices.stop + first, indices.step)
        return [index + first for index in indices if index < self.info.chunks]

    def waive(self, indices: Sequence[int]) -> bool:
        chunks = self.info.chunks
        for index in indices:
            if not self.acknowledged[index]:
                self.acknowledged[index] = _WAIVED
                self.missing -= 1
        return all(set(self.acknowledged[index % chunks :: chunks]) != {_WAIVED} for index in indices)
