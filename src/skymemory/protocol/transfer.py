"""One value on its way: which of its chunks are here (or there), and which to ask for (or send) next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from skymemory import native
from skymemory.constellation.torus import SatelliteId
from skymemory.errors import ValueTooLarge
from skymemory.placement.locate import Moves
from skymemory.protocol.messages import KEY_BYTES, Buffer
from skymemory.protocol.segments import pack_refs
from skymemory.protocol.wire import MAX_CHUNK_BYTES

Where = Callable[[Moves], tuple[SatelliteId, ...]]
"""The satellite of each server of this value at the given moves."""

WRITE_BURST_CHUNKS = 10
_MAX_RELOCATIONS = 3


@dataclass(frozen=True, slots=True)
class ValueInfo:
    """All a reader must know of a value beside its key; the index keeps it, a probe (HAS) recovers it."""

    key: bytes
    chunks: int
    chunk_bytes: int
    value_bytes: int
    value_crc: int
    strategy: int
    servers: int
    set_moves: Moves


@dataclass(slots=True)
class TransferReport:
    """What one transfer cost. Bytes count payload only; ``requests`` are GET or SET requests sent."""

    value_bytes: int = 0
    chunks: int = 0
    satellites: int = 0
    requests: int = 0
    retransmitted_chunks: int = 0
    duplicate_chunks: int = 0
    corrupt_chunks: int = 0
    seconds: float = 0.0
    failure: str = ""


@dataclass(slots=True)
class Burst:
    """Chunks to ask one satellite for, or to send to it, in one request."""

    satellite: SatelliteId
    indices: list[int]


class ReadTransfer:
    """Fetches one value into ``out`` (writable, at least ``value_bytes`` long)."""

    def __init__(self, info: ValueInfo, out: memoryview, where: Where, moves: Moves, burst_chunks: int) -> None:
        self.info = info
        self.out = out
        self.arrived = bytearray(info.chunks)
        self.crcs = np.zeros(info.chunks, dtype=np.uint32)
        self.missing = info.chunks
        self.report = TransferReport(info.value_bytes, info.chunks)
        self._where = where
        self._candidates: dict[int, list[SatelliteId]] = {}
        self._relocations = 0
        self.pending: deque[Burst] = deque()
        self._plan(moves, burst_chunks)

    def _plan(self, moves: Moves, burst_chunks: int) -> None:
        servers = self._where(moves)
        stride = self.info.servers
        rounds: list[list[Burst]] = []
        for server in range(min(stride, self.info.chunks)):
            indices = list(range(server, self.info.chunks, stride))
            for turn, at in enumerate(range(0, len(indices), burst_chunks)):
                if turn == len(rounds):
                    rounds.append([])
                rounds[turn].append(Burst(servers[server], indices[at : at + burst_chunks]))
        self.report.satellites = len({burst.satellite for turn in rounds for burst in turn})
        for turn_bursts in rounds:
            self.pending.extend(turn_bursts)

    def place(self, view: memoryview, segment_bytes: int) -> tuple[int, int, int, int]:
        """Take DATA packets: ``(placed, duplicates, corrupt, foreign)`` counts of their chunks."""
        info = self.info
        counts = native.place_segments(
            view, segment_bytes, info.key, info.chunks, info.chunk_bytes, info.value_bytes, info.value_crc,
            self.out, self.arrived, self.crcs,
        )  # fmt: skip
        self.missing -= counts[0]
        self.report.duplicate_chunks += counts[1]
        self.report.corrupt_chunks += counts[2]
        return counts

    def absent(self, indices: list[int], satellite: SatelliteId, moves: Moves, now_moves: Moves) -> bool:
        """``satellite`` has not got these chunks: look where else they may be while the box is moving.

        Only servers of the column or row that has just changed place have a second candidate: a chunk is there
        until its copy has been acknowledged and aged, so the way is now → before → now again. Returns False when a
        chunk is nowhere: the value is a miss.
        """
        bursts: dict[SatelliteId, list[int]] = {}
        for index in indices:
            if self.arrived[index]:
                continue
            left = self._candidates.get(index)
            if left is None:
                left = self._others(index % self.info.servers, satellite, now_moves)
            if not left:
                return False
            self._candidates[index] = left[1:]
            bursts.setdefault(left[0], []).append(index)
        self.pending.extend(Burst(target, wanted) for target, wanted in bursts.items())
        return True

    def _others(self, server: int, asked: SatelliteId, moves: Moves) -> list[SatelliteId]:
        slot_moves, plane_moves = moves
        here = self._where(moves)[server]
        around = [
            self._where(near)[server]
            for near in (
                (slot_moves - 1, plane_moves),
                (slot_moves, plane_moves - 1),
                (slot_moves + 1, plane_moves),
            )
        ]
        if here != asked:
            around.insert(0, here)
        unique = [place for place in dict.fromkeys(around) if place != asked]
        return [*unique, here] if unique else []

    def verified(self) -> bool:
        """Whether the whole value's checksum is right: it is combined from the chunks' own, which were checked."""
        info = self.info
        return native.crc32_join(self.crcs, info.chunk_bytes, info.value_bytes) == info.value_crc


@dataclass(slots=True)
class WriteTransfer:
    """Sends one value: references and checksums made once, payloads as views of the caller's buffer."""

    info: ValueInfo
    refs: np.ndarray
    payloads: list[memoryview]
    acknowledged: bytearray
    missing: int
    pending: deque[Burst]
    report: TransferReport = field(default_factory=TransferReport)

    @classmethod
    def of(
        cls,
        key: bytes,
        value: Buffer,
        chunk_bytes: int,
        strategy: int,
        servers: int,
        moves: Moves,
        where: Where,
    ) -> WriteTransfer:
        """Raises ``ValueTooLarge`` for a chunk that no datagram carries or a value beyond the 4 GiB of the wire."""
        view = memoryview(value).cast("B")
        if not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
            raise ValueTooLarge(f"chunks of {chunk_bytes} bytes: one datagram carries 1 to {MAX_CHUNK_BYTES} bytes")
        if len(view) >= 1 << 32 or len(key) != KEY_BYTES:
            raise ValueTooLarge(f"a value of {len(view)} bytes, key of {len(key)}: expected < 4 GiB and {KEY_BYTES}")
        crcs = native.crc32_chunks(view, chunk_bytes) if len(view) else np.zeros(1, dtype=np.uint32)
        chunks = len(crcs)
        value_crc = native.crc32_join(crcs, chunk_bytes, len(view))
        info = ValueInfo(key, chunks, chunk_bytes, len(view), value_crc, strategy, servers, moves)
        refs = pack_refs(key, range(chunks), crcs, chunk_bytes, len(view), value_crc, servers, strategy, moves)
        payloads = [view[at : at + chunk_bytes] for at in range(0, len(view), chunk_bytes)] or [view[:0]]
        satellites = where(moves)
        rounds: list[list[Burst]] = []
        for server in range(min(servers, chunks)):
            indices = list(range(server, chunks, servers))
            for turn, at in enumerate(range(0, len(indices), WRITE_BURST_CHUNKS)):
                if turn == len(rounds):
                    rounds.append([])
                rounds[turn].append(Burst(satellites[server], indices[at : at + WRITE_BURST_CHUNKS]))
        pending = deque(burst for turn_bursts in rounds for burst in turn_bursts)
        report = TransferReport(len(view), chunks, len({burst.satellite for burst in pending}))
        return cls(info, refs, payloads, bytearray(chunks), chunks, pending, report)

    def acknowledge(self, indices: list[int]) -> int:
        """Chunks newly known to be stored."""
        fresh = 0
        for index in indices:
            if index < len(self.acknowledged) and not self.acknowledged[index]:
                self.acknowledged[index] = 1
                fresh += 1
        self.missing -= fresh
        return fresh
