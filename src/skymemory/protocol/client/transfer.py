"""Transfer of a value: which chunks to request (or send) next, and where; ``requests`` repeats what is lost.

A read asks the satellite on which the clock places a chunk; after a MISS (``absent``), the likely places in turn, then
all possible places. For a silent satellite (``redirect``, ``avoid``), another copy or its stand-ins are asked: the
satellites that held the chunk before it.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from skymemory import native
from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput, ValueTooLarge
from skymemory.native import Landing, Rows
from skymemory.native.twin.segments import out_fits
from skymemory.placement.locate import Moves
from skymemory.protocol.client.liveness import Suspects
from skymemory.protocol.clock import PROOF_S
from skymemory.protocol.congestion import Window
from skymemory.protocol.messages import KEY_BYTES, MAX_KEYS_PER_PACKET, WRITING_S, Retain, pack_retain, pack_steps
from skymemory.protocol.wire import (
    CHUNK_REF_BYTES,
    MAX_CHUNK_BYTES,
    REPLICA_OFFSET,
    TELEMETRY_PREFIX_BYTES,
    Buffer,
    Slices,
)
from skymemory.reasons import Miss

Everywhere = Callable[[], Sequence[Moves]]
"""Moves at which a chunk may have been left, now's first."""
Where = Callable[[Moves], tuple[SatelliteId, ...]]
"""Satellite of each server at given moves."""

WRITE_BURST_CHUNKS = 64
CHUNK_OVERHEAD_BYTES = TELEMETRY_PREFIX_BYTES + CHUNK_REF_BYTES
_CRC_BYTES = 4
_CACHED_PLAN_CHUNKS = 1 << 16
_MAX_STAND_INS = 8
_MAX_RENEWALS = 3


class StandIns(NamedTuple):
    """Satellites to ask in place of a silent satellite, by moves."""

    at: Everywhere
    quiet: Callable[[SatelliteId], bool]


@dataclass(frozen=True, slots=True)
class ValueInfo:
    """Parameters to find and verify a stored value; ``strategy`` (a wire code), ``servers`` and ``set_moves``
    determine its satellites.
    """

    key: bytes
    chunks: int
    chunk_bytes: int
    value_bytes: int
    value_crc: int
    strategy: int
    servers: int
    set_moves: Moves

    def check(self) -> None:
        """Refuse numbers, from an index or a probe, that contradict each other (InvalidInput)."""
        fits = 0 < self.chunk_bytes <= MAX_CHUNK_BYTES and 0 <= self.value_bytes < 1 << 32
        if not fits or self.chunks != max(1, -(-self.value_bytes // self.chunk_bytes)) or len(self.key) != KEY_BYTES:
            raise InvalidInput(
                f"{self.chunks} chunks of {self.chunk_bytes} bytes for a value of {self.value_bytes}, "
                f"key of {len(self.key)} bytes: no value has these numbers"
            )


class Striping(NamedTuple):
    """Layout with which a value is written; ``replicas`` are its copies."""

    chunk_bytes: int
    strategy: int
    servers: int
    replicas: int = 1

    def chunks_of(self, size_bytes: int) -> int:
        return max(1, -(-size_bytes // self.chunk_bytes)) if self.chunk_bytes > 0 else 0


@dataclass(slots=True)
class TransferReport:
    """Cost of a transfer. Bytes count payload only. ``clock_ahead_s`` is a pinged satellite's lead, accurate to half
    the round trip.
    """

    value_bytes: int = 0
    chunks: int = 0
    satellites: int = 0
    requests: int = 0
    retransmitted_chunks: int = 0
    duplicate_chunks: int = 0
    corrupt_chunks: int = 0
    seconds: float = 0.0
    failure: Miss | None = None
    clock_ahead_s: float = 0.0


class Burst(NamedTuple):
    """Chunks of a request to a satellite; ``steps`` is their packed selection, if known."""

    satellite: SatelliteId
    indices: Sequence[int]
    steps: bytes = b""


class WaitingBursts:
    """Bursts of a write yet to be sent; those to a full window are put aside."""

    __slots__ = ("_bursts", "_bursts_aside", "_next_bursts")

    def __init__(self, bursts: Iterable[Burst] = ()) -> None:
        self._bursts: dict[SatelliteId, deque[tuple[int, Burst]]] = {}
        for order, burst in enumerate(bursts):
            self._bursts.setdefault(burst.satellite, deque()).append((order, burst))
        self._next_bursts = [(queue[0][0], satellite) for satellite, queue in self._bursts.items()]
        self._bursts_aside: list[tuple[tuple[int, SatelliteId], Window, int, int]] = []

    def __bool__(self) -> bool:
        return bool(self._next_bursts or self._bursts_aside)

    def __iter__(self) -> Iterator[Burst]:
        return (burst for _, burst in sorted(chain.from_iterable(self._bursts.values()), key=itemgetter(0)))

    def first(self) -> Burst | None:
        return self._bursts[self._next_bursts[0][1]][0][1] if self._next_bursts else None

    def drop(self, chunks: int) -> None:
        """Remove the first ``chunks`` chunks of the first burst."""
        order, satellite = self._next_bursts[0]
        queue = self._bursts[satellite]
        indices = queue[0][1].indices
        if chunks < len(indices):
            queue[0] = order, Burst(satellite, indices[chunks:])
            return
        queue.popleft()
        if queue:
            heapq.heapreplace(self._next_bursts, (queue[0][0], satellite))
        else:
            heapq.heappop(self._next_bursts)
            del self._bursts[satellite]

    def put_aside(self, window: Window) -> None:
        self._bursts_aside.append((heapq.heappop(self._next_bursts), window, window.passed_bytes, window.limit_bytes))

    def resume(self, all_of_them: bool) -> None:
        """Queue again bursts whose window has changed since they were put aside, or ``all_of_them``."""
        if self._bursts_aside:
            aside, self._bursts_aside = self._bursts_aside, []
            for entry in aside:
                head, window, passed_bytes, limit_bytes = entry
                if all_of_them or window.passed_bytes != passed_bytes or window.limit_bytes != limit_bytes:
                    heapq.heappush(self._next_bursts, head)
                else:
                    self._bursts_aside.append(entry)

    def clear(self) -> None:
        self._bursts.clear()
        self._next_bursts.clear()
        self._bursts_aside.clear()


def _bursts_in_turn(
    chunks: int, satellites: Sequence[SatelliteId], servers: int, burst_chunks: int
) -> Iterator[tuple[SatelliteId, range]]:
    """Yield satellites and chunk indices of bursts; chunk i is on server i modulo ``servers``."""
    # In turn, so that all satellites start to answer with the first requests.
    round_chunks = servers * burst_chunks
    for first in range(0, chunks, round_chunks):
        for server in range(min(servers, chunks - first)):
            yield satellites[server], range(first + server, min(first + round_chunks, chunks), servers)


@lru_cache(maxsize=32)
def _plan_bursts(
    chunks: int, satellites: tuple[SatelliteId, ...], servers: int, burst_chunks: int
) -> tuple[tuple[Burst, ...], int]:
    bursts = tuple(
        Burst(satellite, indices, pack_steps(indices))
        for satellite, indices in _bursts_in_turn(chunks, satellites, servers, burst_chunks)
    )
    return bursts, len({burst.satellite for burst in bursts})


def planned(
    chunks: int, satellites: tuple[SatelliteId, ...], servers: int, burst_chunks: int
) -> tuple[tuple[Burst, ...], int]:
    plan = _plan_bursts if chunks <= _CACHED_PLAN_CHUNKS else _plan_bursts.__wrapped__
    return plan(chunks, satellites, servers, burst_chunks)


class Absence(NamedTuple):
    """MISS of some chunks, and what a reader then knows.

    ``nearby``: moves at which they may be found, now's first; ``everywhere``: all at which they may have been left.
    ``settled``: no handover of the key is in progress there. ``counted``: the satellite's moves.
    """

    satellite: SatelliteId
    nearby: Sequence[Moves]
    everywhere: Everywhere
    settled: bool
    counted: Moves
    asked_s: float
    now_s: float

    @property
    def moves(self) -> Moves:
        return self.nearby[0]


@dataclass(slots=True)
class _Search:
    """Search for a chunk that was not in its place at moves ``at``.

    The satellites ``left`` are asked in turn, then all possible satellites at once, of which ``silent`` have not
    answered. ``proof``: their answers so far prove that the chunk is lost.
    """

    at: Moves
    left: deque[SatelliteId]
    renewals: int = 0
    silent: set[SatelliteId] | None = None
    since_s: float = 0.0
    proof: bool = True
    silence: Miss | None = None
    """Failure of the satellite in whose place stand-ins are asked."""

    def renew(self, moves: Moves) -> bool:
        if self.at == moves or self.renewals == _MAX_RENEWALS:
            return False
        self.renewals += 1
        self.at, self.silent, self.silence = moves, None, None
        return True


class ReadTransfer:
    """Read of a value into ``out``: writable and at least as long, or rows of exactly the value."""

    def __init__(self, info: ValueInfo, out: memoryview | Rows, where: Where, moves: Moves, burst_chunks: int) -> None:
        info.check()
        if not can_hold(out, info.value_bytes):
            size_bytes = out.size_bytes if isinstance(out, Rows) else len(out)
            raise InvalidInput(
                f"a buffer of {size_bytes} bytes for a value of {info.value_bytes}: too small or read-only"
            )
        self.info = info
        self.out = out
        self.landing = landing_of(info, out)
        self.arrived = self.landing[6]
        self.missing = info.chunks
        bursts, satellites = planned(info.chunks, where(moves), info.servers, burst_chunks)
        self.pending = deque(bursts)
        self.checked_suspects: int | None = None
        self.report = TransferReport(info.value_bytes, info.chunks, satellites)
        self._where = where
        self._searches: dict[int, _Search] = {}
        self._bursts_aside: list[Burst] = []
        self._asked_of_stand_ins: set[int] = set()
        self._first_failures: dict[SatelliteId, Miss] = {}
        """First failure of each satellite that needed stand-ins."""

    def on_chunks_placed(self, chunks: int, duplicates: int, corrupt: int) -> None:
        self.missing -= chunks
        self.report.duplicate_chunks += duplicates
        self.report.corrupt_chunks += corrupt
        self._resume_aside()

    def _resume_aside(self) -> None:
        if self._bursts_aside and all(self.arrived[index] for index in self._asked_of_stand_ins):
            self.pending.extend(self._bursts_aside)
            self._bursts_aside.clear()
            self.checked_suspects = None

    def has(self, indices: Sequence[int]) -> bool:
        if isinstance(indices, range):
            return 0 not in self.arrived[indices.start : indices.stop : indices.step]
        return all(map(self.arrived.__getitem__, indices))

    def absent(self, indices: list[int], answer: Absence) -> Miss | None:
        """Search for chunks that a satellite does not hold.

        1. The likely places in turn, at last now's again: a chunk stays in its old place until its copy is stored.
        2. All places where it can have been left, at once.

        Return why the read must end: MISSING if all places have denied it within ``PROOF_S``, at the same moves, with
        no handover in progress; otherwise UNDER_WAY.
        """
        bursts: dict[SatelliteId, list[int]] = {}
        for index in indices:
            if self.arrived[index]:
                continue
            search = self._searches.get(index)
            if search is None:  # the first MISS of this chunk
                search = self._searches[index] = _Search(answer.moves, self._get_likely_places(index, answer))
            elif search.silent is not None:  # all places are being asked
                if answer.asked_s < search.since_s or not self._answered_everywhere(search, answer):
                    continue
                if search.proof and answer.now_s - search.since_s <= PROOF_S:
                    return Miss.MISSING
                if not search.renew(answer.moves):
                    return self.why_ended((index,), Miss.UNDER_WAY) if search.silence else Miss.UNDER_WAY
                search.left = self._get_likely_places(index, answer)
            elif not search.left and search.renew(answer.moves):  # the box has moved: other places are likely now
                search.left = self._get_likely_places(index, answer)
            if search.left:
                bursts.setdefault(search.left.popleft(), []).append(index)
            else:
                for place in self._search_everywhere(index, search, answer):
                    bursts.setdefault(place, []).append(index)
        self.pending.extend(Burst(target, wanted) for target, wanted in bursts.items())
        self.checked_suspects = None
        return None

    def _get_likely_places(self, index: int, answer: Absence) -> deque[SatelliteId]:
        return self._get_other_places(index, answer.satellite, answer.nearby)

    def _search_everywhere(self, index: int, search: _Search, answer: Absence) -> set[SatelliteId]:
        server = index % self.info.servers
        search.silent = set(self._get_places(server, answer.everywhere()))
        search.at, search.since_s, search.proof = answer.moves, answer.now_s, True
        return search.silent

    def _answered_everywhere(self, search: _Search, answer: Absence) -> bool:
        assert search.silent is not None
        search.silent.discard(answer.satellite)
        search.proof = search.proof and answer.settled and answer.moves == search.at == answer.counted
        return not search.silent

    def _get_places(self, server: int, at: Sequence[Moves]) -> dict[SatelliteId, None]:
        return dict.fromkeys(self._where(moves)[server] for moves in at)

    def _get_other_places(self, index: int, satellite: SatelliteId, nearby: Sequence[Moves]) -> deque[SatelliteId]:
        places = self._get_places(index % self.info.servers, nearby)
        other_places = [place for place in places if place != satellite]
        return deque([*other_places, next(iter(places))] if other_places else [])

    def redirect(
        self, indices: Sequence[int], satellite: SatelliteId, failure: Miss, stand_ins: StandIns | None = None
    ) -> bool:
        """Read these chunks elsewhere, because ``satellite`` is dead. Return False if they are nowhere else.

        The stand-ins are asked, since it may have died before its handover, unless all places are being asked.
        """
        bursts: dict[SatelliteId, list[int]] = {}
        for index in indices:
            search = self._searches.get(index)
            if self.arrived[index]:
                continue
            if search is None or search.silent is None:
                if stand_ins is None:
                    return False
                search = self._search_stand_ins(index, satellite, failure, stand_ins)
                for place in search.silent or ():
                    bursts.setdefault(place, []).append(index)
            assert search.silent is not None
            search.proof = False
            search.silent.discard(satellite)
            if not search.silent:
                return False
        self.pending.extend(Burst(target, wanted) for target, wanted in bursts.items())
        return True

    def _search_stand_ins(self, index: int, silent: SatelliteId, failure: Miss, stand_ins: StandIns) -> _Search:
        """Begin to ask all at once the satellites that may hold a silent satellite's chunk."""
        at = stand_ins.at()
        known_places = self._get_places(index % self.info.servers, at)
        places = [place for place in known_places if place != silent and not stand_ins.quiet(place)]
        before = self._searches.get(index)
        search = _Search(at[0], deque(), before.renewals if before else 0, set(places[:_MAX_STAND_INS]))
        search.silence = self._first_failures.setdefault(silent, failure)
        self._searches[index] = search
        return search

    def why_ended(self, indices: Sequence[int], failure: Miss) -> Miss:
        """Return the reason of a read that ends because these chunks' satellite failed: of all failures, also those
        that made stand-ins necessary, the most certain.
        """
        silences = {index: search.silence for index, search in self._searches.items() if not self.arrived[index]}
        failures = {silence for silence in silences.values() if silence}
        if not any(silences.get(index) for index in indices):
            failures.add(failure)
        return min(failures, key=lambda reason: (reason is Miss.TIMEOUT, reason is not Miss.UNREACHABLE, reason))

    def avoid(self, suspects: Suspects, stand_ins: StandIns) -> bool:
        """Ask the stand-ins of suspects first; other bursts wait. Return False if a chunk has no stand-ins."""
        bursts, self.pending = self.pending, deque()
        for burst in bursts:
            one_of_many = self.is_one_of_many(burst.indices)
            if burst.satellite in suspects and not one_of_many:
                self._asked_of_stand_ins.update(burst.indices)
                if not self.redirect(burst.indices, burst.satellite, Miss.UNREACHABLE, stand_ins):
                    return False
            elif one_of_many or not self._asked_of_stand_ins.isdisjoint(burst.indices):
                self.pending.append(burst)  # not put aside: what is put aside waits for it
            else:
                self._bursts_aside.append(burst)
        self._resume_aside()
        return True

    def is_one_of_many(self, indices: Sequence[int]) -> bool:
        """Return True if all possible satellites are being asked: the silence of any then does not end the read."""
        searches = (self._searches.get(index) for index in indices if not self.arrived[index])
        return all(search is not None and search.silent is not None for search in searches)

    def in_place_of_silent(self, indices: Sequence[int]) -> bool:
        searches = (self._searches.get(index) for index in indices if not self.arrived[index])
        return any(search is not None and search.silence for search in searches)

    def on_all_requested(self, landing: Landing) -> None:
        self.landing = landing
        self.arrived = landing[6]
        self.pending.clear()


def can_hold(out: memoryview | Rows, value_bytes: int) -> bool:
    buffers = out[:2] if isinstance(out, Rows) else (out,)
    return out_fits(out, value_bytes) and not any(buffer.readonly for buffer in buffers)


def landing_of(info: ValueInfo, out: memoryview | Rows) -> Landing:
    arrived, crcs = bytearray(info.chunks), bytearray(info.chunks * _CRC_BYTES)
    return info.key, info.chunks, info.chunk_bytes, info.value_bytes, info.value_crc, out, arrived, crcs


def verified(info: ValueInfo, landing: Landing) -> bool:
    if info.value_bytes == 0:  # a value without bytes has one chunk without bytes
        return info.value_crc == 0
    return native.crc32_join(landing[7], info.chunk_bytes, info.value_bytes) == info.value_crc


@dataclass(slots=True)
class WriteTransfer:
    """Write of a value; payloads are views of the caller's buffer."""

    info: ValueInfo
    refs: bytes | bytearray
    payloads: Sequence[memoryview]
    acknowledged: bytearray
    missing: int
    pending: WaitingBursts
    checked_suspects: int = 0
    report: TransferReport = field(default_factory=TransferReport)

    @classmethod
    def of(cls, key: bytes, value: Buffer, striping: Striping, moves: Moves, where: Where) -> WriteTransfer:
        view = memoryview(value).cast("B")
        chunk_bytes, strategy, servers, _ = striping
        if not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
            raise ValueTooLarge(f"chunks of {chunk_bytes} bytes: one datagram carries 1 to {MAX_CHUNK_BYTES} bytes")
        if len(view) >= 1 << 32 or len(key) != KEY_BYTES:
            raise ValueTooLarge(f"a value of {len(view)} bytes, key of {len(key)}: expected < 4 GiB and {KEY_BYTES}")
        places = where(moves)  # first: it refuses what this constellation does not have
        packed, value_crc = native.value_refs(view, key, chunk_bytes, servers, strategy, moves)
        chunks = len(packed) // CHUNK_REF_BYTES
        info = ValueInfo(key, chunks, chunk_bytes, len(view), value_crc, strategy, servers, moves)
        payloads = Slices(view, chunk_bytes, range(chunks))
        bursts, satellites = planned(chunks, places, servers, WRITE_BURST_CHUNKS)
        report = TransferReport(len(view), chunks, satellites)
        return cls(info, packed, payloads, bytearray(chunks), chunks, WaitingBursts(bursts), report=report)

    def refs_and_payloads_of(self, indices: Sequence[int]) -> tuple[bytes | bytearray, Sequence[memoryview]]:
        if indices == range(len(self.acknowledged)):
            return self.refs, self.payloads
        refs = _rows(self.refs)
        if isinstance(indices, range):
            chosen = slice(indices.start, indices.stop, indices.step)
            return refs[chosen].tobytes(), self.payloads[chosen]
        return refs[indices].tobytes(), [self.payloads[index] for index in indices]

    def of_request(self, indices: Sequence[int], request_indices: Sequence[int]) -> Sequence[int]:
        """Return the chunks of a request that an answer's ``indices`` mean."""
        return indices

    def waive(self, indices: Sequence[int]) -> bool:
        """Give up these chunks. Return True if the value is whole without them."""
        return False

    def acknowledge(self, indices: Sequence[int]) -> int:
        """Record stored chunks. Return how many were new."""
        if isinstance(indices, range):
            chosen = slice(indices.start, indices.stop, indices.step)
            before = self.acknowledged[chosen]
            newly_stored = before.count(0)
            self.acknowledged[chosen] = b"\1" * len(before)
        else:
            known = {index for index in indices if index < len(self.acknowledged)}
            newly_stored = sum(not self.acknowledged[index] for index in known)
            for index in known:
                self.acknowledged[index] = 1
        self.missing -= newly_stored
        return newly_stored


def _rows(refs: bytes | bytearray) -> np.ndarray:
    return np.frombuffer(refs, dtype=np.uint8).reshape(-1, CHUNK_REF_BYTES)


_WAIVED = 2


class ReplicatedRead(ReadTransfer):
    """Read of a value with copies: the next copy is asked if a satellite is dead or late by ``hedge`` round trips (0:
    all at once).
    """

    def __init__(
        self,
        info: ValueInfo,
        out: memoryview | Rows,
        copies: Sequence[Where],
        moves: Moves,
        burst_chunks: int,
        hedge: float,
    ) -> None:
        super().__init__(info, out, copies[0], moves, burst_chunks)
        self.hedge = hedge
        self._copies = copies
        self._moves = moves
        self._failed_satellites: set[SatelliteId] = set()
        if hedge == 0:
            for copy in copies[1:]:
                self.pending.extend(planned(info.chunks, copy(moves), info.servers, burst_chunks)[0])

    def redirect(
        self, indices: Sequence[int], satellite: SatelliteId, failure: Miss, stand_ins: StandIns | None = None
    ) -> bool:
        """Read these chunks from other copies; without a live copy, from stand-ins."""
        self._failed_satellites.add(satellite)
        if super().redirect(indices, satellite, failure):
            return True
        bursts = self._get_bursts_to_copies(indices, satellite)
        if bursts is None:
            return super().redirect(indices, satellite, failure, stand_ins)
        self.pending.extendleft(bursts)
        return True

    def ask_next(self, indices: Sequence[int], satellite: SatelliteId) -> bool:
        bursts = self._get_bursts_to_copies(indices, satellite)
        self.pending.extend(bursts or ())
        return bool(bursts)

    def _get_bursts_to_copies(self, indices: Sequence[int], satellite: SatelliteId) -> list[Burst] | None:
        """Return bursts to other copies; None if a missing chunk has none."""
        places = [copy(self._moves) for copy in self._copies]
        wanted: dict[SatelliteId, list[int]] = {}
        for index in indices:
            if self.arrived[index]:
                continue
            satellites = (place[index % self.info.servers] for place in places)
            other = next(
                (
                    candidate
                    for candidate in satellites
                    if candidate != satellite and candidate not in self._failed_satellites
                ),
                None,
            )
            if other is None:
                return None
            wanted.setdefault(other, []).append(index)
        return [Burst(other, chunks) for other, chunks in wanted.items()]

    def _get_other_places(self, index: int, satellite: SatelliteId, nearby: Sequence[Moves]) -> deque[SatelliteId]:
        places = self._get_places(index % self.info.servers, nearby)
        other_places = [place for place in places if place != satellite and place not in self._failed_satellites]
        return deque([*other_places, next(iter(places))] if other_places else [])

    def _get_places(self, server: int, at: Sequence[Moves]) -> dict[SatelliteId, None]:
        return dict.fromkeys(copy(moves)[server] for moves in at for copy in self._copies)


class ReplicatedWrite(WriteTransfer):
    """Write of a value with copies, successful if every chunk is stored once.

    Copy r of chunk i has the index r · chunks + i, except on the wire.
    """

    __slots__ = ()

    @classmethod
    def of_copies(cls, transfer: WriteTransfer, copies: Sequence[Where], moves: Moves) -> ReplicatedWrite:
        """Create the write of all ``copies`` (the satellites of each)."""
        chunks, servers = transfer.info.chunks, transfer.info.servers
        refs = np.concatenate([_rows(transfer.refs)] * len(copies))
        pending: list[Burst] = []
        for replica, copy in enumerate(copies):
            first = replica * chunks
            refs[first : first + chunks, REPLICA_OFFSET] = replica
            for satellite, indices, _ in planned(chunks, copy(moves), servers, WRITE_BURST_CHUNKS)[0]:
                pending.append(Burst(satellite, range(indices[0] + first, indices[-1] + first + 1, servers)))
        total = chunks * len(copies)
        transfer.report.satellites = len({burst.satellite for burst in pending})
        payloads = list(transfer.payloads) * len(copies)
        return cls(
            transfer.info,
            refs.tobytes(),
            payloads,
            bytearray(total),
            total,
            WaitingBursts(pending),
            report=transfer.report,
        )

    def of_request(self, indices: Sequence[int], request_indices: Sequence[int]) -> Sequence[int]:
        first = request_indices[0] - request_indices[0] % self.info.chunks
        if isinstance(indices, range):
            return range(indices.start + first, indices.stop + first, indices.step)
        return [index + first for index in indices if index < self.info.chunks]

    def waive(self, indices: Sequence[int]) -> bool:
        """Give up these chunks. Return False if any has no other copy left."""
        chunks = self.info.chunks
        for index in indices:
            if not self.acknowledged[index]:
                self.acknowledged[index] = _WAIVED
                self.missing -= 1
        return all(set(self.acknowledged[index % chunks :: chunks]) != {_WAIVED} for index in indices)


_ANNOUNCE_EVERY_S = 0.5
_MAX_SILENCE_S = WRITING_S - 1.0


class WriteKeepalive:
    """Announcements of writes in progress (RETAIN with WRITING), since a half-written value looks lost. A writer that
    paused too long has failed: its first chunks may be gone.
    """

    def __init__(self) -> None:
        self._writes: dict[int, tuple[WriteTransfer, float]] = {}
        self.next_s = math.inf

    def on_write_begin(self, number: int, transfer: WriteTransfer, now_s: float) -> None:
        if number not in self._writes:
            self._writes[number] = transfer, now_s
            self.next_s = min(self.next_s, now_s + _ANNOUNCE_EVERY_S)

    def on_write_end(self, number: int, now_s: float) -> bool:
        """Forget a write. Return True if satellites may consider it abandoned."""
        _, announced_s = self._writes.pop(number, (None, now_s))
        if not self._writes:
            self.next_s = math.inf
        return now_s - announced_s > _MAX_SILENCE_S

    def take_due(
        self, now_s: float, places: Callable[[WriteTransfer, float], Iterable[SatelliteId]]
    ) -> tuple[list[int], list[tuple[SatelliteId, bytes]]]:
        """Return writes announced too late, and RETAIN bodies for the others' satellites (``places``)."""
        late = [number for number, (_, at_s) in self._writes.items() if now_s - at_s > _MAX_SILENCE_S]
        keys: dict[SatelliteId, dict[bytes, None]] = {}
        for number, (transfer, _) in self._writes.items():
            if number not in late:
                self._writes[number] = transfer, now_s
                for satellite in places(transfer, now_s):
                    keys.setdefault(satellite, {})[transfer.info.key] = None
        self.next_s = now_s + _ANNOUNCE_EVERY_S if self._writes else math.inf
        return late, [
            (satellite, pack_retain(Retain.WRITING, 0.0, list(keys_of)[at : at + MAX_KEYS_PER_PACKET]))
            for satellite, keys_of in keys.items()
            for at in range(0, len(keys_of), MAX_KEYS_PER_PACKET)
        ]
