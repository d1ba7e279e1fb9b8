"""One value on its way: which of its chunks are here (or there), and which to ask for (or send) next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from skymemory import native
from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput, ValueTooLarge
from skymemory.native import Landing
from skymemory.placement.locate import Moves
from skymemory.protocol.client.peers import Suspects
from skymemory.protocol.clock import PROOF_S
from skymemory.protocol.messages import KEY_BYTES, Buffer, pack_steps
from skymemory.protocol.segments import Slices, pack_refs
from skymemory.protocol.wire import CHUNK_REF_BYTES, MAX_CHUNK_BYTES, REPLICA_OFFSET, TELEMETRY_PREFIX_BYTES

Everywhere = Callable[[], Sequence[Moves]]
"""The moves at which a chunk of this value may ever have been left, those of now first."""


class StandIns(NamedTuple):
    """Whom to ask in place of a silent satellite: places by moves, but those who are ``quiet`` themselves."""

    at: Everywhere
    quiet: Callable[[SatelliteId], bool]


Where = Callable[[Moves], tuple[SatelliteId, ...]]
"""The satellite of each server of this value at the given moves."""

WRITE_BURST_CHUNKS = 64
"""Chunks of one SET request, which is answered as a whole; the windows may cut it."""
CHUNK_OVERHEAD_BYTES = TELEMETRY_PREFIX_BYTES + CHUNK_REF_BYTES
"""What a chunk weighs in the air beyond its payload."""
_CRC_BYTES = 4
_PLANNED_CHUNKS = 1 << 16
"""The bursts of larger values are not remembered: working them out costs little beside the value."""

_MOST_STAND_INS = 8
"""Where a satellite is silent, so many others are asked for its chunks: those that had them last, or are next."""
_MAX_RENEWALS = 3
"""How often the search for one chunk begins anew because the box has moved again."""


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

    def check(self) -> None:
        """Raises ``InvalidInput`` where the numbers contradict each other: an index may be old, a probe false."""
        fits = 0 < self.chunk_bytes <= MAX_CHUNK_BYTES and 0 <= self.value_bytes < 1 << 32
        if not fits or self.chunks != max(1, -(-self.value_bytes // self.chunk_bytes)) or len(self.key) != KEY_BYTES:
            raise InvalidInput(
                f"{self.chunks} chunks of {self.chunk_bytes} bytes for a value of {self.value_bytes}, "
                f"key of {len(self.key)} bytes: not a value we could have stored"
            )


@dataclass(slots=True)
class TransferReport:
    """What one transfer cost. Bytes count payload only; ``requests`` are GET or SET requests sent.

    ``clock_ahead_s``, of a ping: how far the satellite's clock is before ours, to within half the round trip.
    """

    value_bytes: int = 0
    chunks: int = 0
    satellites: int = 0
    requests: int = 0
    retransmitted_chunks: int = 0
    duplicate_chunks: int = 0
    corrupt_chunks: int = 0
    seconds: float = 0.0
    failure: str = ""
    clock_ahead_s: float = 0.0


class Burst(NamedTuple):
    """Chunks to ask one satellite for, or to send to it, in one request. ``steps`` is what ``pack_steps`` makes of
    them, or empty.
    """

    satellite: SatelliteId
    indices: Sequence[int]
    steps: bytes = b""


def _bursts_in_turn(
    chunks: int, satellites: Sequence[SatelliteId], servers: int, burst_chunks: int
) -> Iterator[tuple[SatelliteId, range]]:
    """All chunks of a value: the first burst of every server, then the second of every server, and so on."""
    round_chunks = servers * burst_chunks
    for first in range(0, chunks, round_chunks):
        for server in range(min(servers, chunks - first)):
            yield satellites[server], range(first + server, min(first + round_chunks, chunks), servers)


@lru_cache(maxsize=32)
def _plan(
    chunks: int, satellites: tuple[SatelliteId, ...], servers: int, burst_chunks: int
) -> tuple[tuple[Burst, ...], int]:
    """The bursts of a transfer and the number of its satellites: the same for every value of one size in one place."""
    bursts = tuple(
        Burst(satellite, indices, pack_steps(indices))
        for satellite, indices in _bursts_in_turn(chunks, satellites, servers, burst_chunks)
    )
    return bursts, len({burst.satellite for burst in bursts})


def planned(
    chunks: int, satellites: tuple[SatelliteId, ...], servers: int, burst_chunks: int
) -> tuple[tuple[Burst, ...], int]:
    plan = _plan if chunks <= _PLANNED_CHUNKS else _plan.__wrapped__
    return plan(chunks, satellites, servers, burst_chunks)


class Absence(NamedTuple):
    """What a reader knows when a satellite says that it has not got some chunks.

    ``nearby`` are the moves at which they may be found, those of now (``moves``) first; ``everywhere`` all at which
    they may ever have been left. ``settled``: the satellite says that no handover of the key is under way there;
    ``counted`` are the moves by its count. It was asked at ``asked_s`` and answered by ``now_s``.
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
    """Where a chunk that was not in its place has yet to be looked for, as seen at moves ``at``.

    First place by place (``left``), then at all places where it can be at once: then ``silent`` are those that have not
    answered, and ``proof`` says whether those that have leave no way for it to be anywhere.
    """

    at: Moves
    left: deque[SatelliteId]
    renewals: int = 0
    silent: set[SatelliteId] | None = None
    since_s: float = 0.0
    proof: bool = True
    in_place_of_silent: bool = False
    """Whether these are asked because another is silent."""

    def renew(self, moves: Moves) -> bool:
        """Begin anew where the box has moved since, if that has not been done too often."""
        if self.at == moves or self.renewals == _MAX_RENEWALS:
            return False
        self.renewals += 1
        self.at, self.silent, self.in_place_of_silent = moves, None, False
        return True


class ReadTransfer:
    """Fetches one value into ``out`` (writable, at least ``value_bytes`` long)."""

    def __init__(self, info: ValueInfo, out: memoryview, where: Where, moves: Moves, burst_chunks: int) -> None:
        """Raises ``InvalidInput`` for a description of a value that cannot be, or a buffer it does not fit into."""
        info.check()
        if len(out) < info.value_bytes or out.readonly:
            raise InvalidInput(
                f"a buffer of {len(out)} bytes for a value of {info.value_bytes}: too small or read-only"
            )
        self.info = info
        self.out = out
        self.arrived = bytearray(info.chunks)
        self.crcs = bytearray(info.chunks * _CRC_BYTES)
        self.missing = info.chunks
        bursts, satellites = planned(info.chunks, where(moves), info.servers, burst_chunks)
        self.pending = deque(bursts)
        self.checked_suspects: int | None = None
        """``Suspects.added`` when none of ``pending`` was for one of them."""
        self.report = TransferReport(info.value_bytes, info.chunks, satellites)
        self.landing: Landing = (
            info.key,
            info.chunks,
            info.chunk_bytes,
            info.value_bytes,
            info.value_crc,
            out,
            self.arrived,
            self.crcs,
        )
        """Where its chunks go as they come."""
        self._where = where
        self._searches: dict[int, _Search] = {}
        self._aside: list[Burst] = []
        """Not asked for until all is here that others are asked for in place of silent satellites."""
        self._sought: set[int] = set()
        self.silence = ""
        """What was first wrong with a satellite that others were asked in place of: if in vain, that ended the read."""

    def placed(self, placed: int, duplicates: int, corrupt: int) -> None:
        """So many chunks have come to their places, come again, or come damaged."""
        self.missing -= placed
        self.report.duplicate_chunks += duplicates
        self.report.corrupt_chunks += corrupt
        self._take_up()

    def _take_up(self) -> None:
        """Ask for what was put aside, once all is here that others are asked for in place of silent satellites."""
        if self._aside and all(self.arrived[index] for index in self._sought):
            self.pending.extend(self._aside)
            self._aside.clear()
            self.checked_suspects = None

    def has(self, indices: Sequence[int]) -> bool:
        """Whether all of these have arrived."""
        if isinstance(indices, range):
            return 0 not in self.arrived[indices.start : indices.stop : indices.step]
        return all(map(self.arrived.__getitem__, indices))

    def absent(self, indices: list[int], answer: Absence) -> str:
        """A satellite has not got these chunks: look where else they may be while the box is moving.

        First at the likely places in turn. Only servers of the column or row that has just changed place have a second
        candidate: a chunk is there until its copy has been acknowledged and aged, so the way is now → nearby → now
        again. Then at all places where it can have been left, at once.

        Returns why the read must end, or nothing: "missing" is proved (all places where the chunk can be have said so,
        within ``PROOF_S``, at one count of moves, with no handover under way), "under way" is all else.
        """
        bursts: dict[SatelliteId, list[int]] = {}
        for index in indices:
            if self.arrived[index]:
                continue
            search = self._searches.get(index)
            if search is None:
                search = self._searches[index] = _Search(answer.moves, self._likely(index, answer))
            elif search.silent is not None:
                if answer.asked_s < search.since_s or not self._answered_everywhere(search, answer):
                    continue
                if search.proof and answer.now_s - search.since_s <= PROOF_S:
                    return "missing"
                if not search.renew(answer.moves):
                    return self.silence if search.in_place_of_silent else "under way"
                search.left = self._likely(index, answer)
            elif not search.left and search.renew(answer.moves):
                search.left = self._likely(index, answer)
            if search.left:
                bursts.setdefault(search.left.popleft(), []).append(index)
            else:
                for place in self._begin_everywhere(index, search, answer):
                    bursts.setdefault(place, []).append(index)
        self.pending.extend(Burst(target, wanted) for target, wanted in bursts.items())
        self.checked_suspects = None
        return ""

    def _likely(self, index: int, answer: Absence) -> deque[SatelliteId]:
        return self._others(index, answer.satellite, answer.nearby)

    def _begin_everywhere(self, index: int, search: _Search, answer: Absence) -> set[SatelliteId]:
        server = index % self.info.servers
        search.silent = set(self._places(server, answer.everywhere()))
        search.at, search.since_s, search.proof = answer.moves, answer.now_s, True
        return search.silent

    def _answered_everywhere(self, search: _Search, answer: Absence) -> bool:
        """Note one answer of the look at all places; whether it was the last."""
        assert search.silent is not None
        search.silent.discard(answer.satellite)
        search.proof = search.proof and answer.settled and answer.moves == search.at == answer.counted
        return not search.silent

    def _places(self, server: int, at: Sequence[Moves]) -> dict[SatelliteId, None]:
        """Where the chunks of a server are, or were, at these moves: each once."""
        return dict.fromkeys(self._where(moves)[server] for moves in at)

    def _others(self, index: int, asked: SatelliteId, nearby: Sequence[Moves]) -> deque[SatelliteId]:
        places = self._places(index % self.info.servers, nearby)
        others = [place for place in places if place != asked]
        return deque([*others, next(iter(places))] if others else [])

    def redirect(
        self, indices: Sequence[int], satellite: SatelliteId, failure: str = "", others: StandIns | None = None
    ) -> bool:
        """``satellite`` is dead: get these chunks elsewhere. False if they are nowhere else.

        One of many that are asked whether they have a chunk need not answer: but then nothing is proved. In place of
        another, those are asked that had the chunks before it, for it may have died before they were handed over;
        if these have them neither, the read ends with ``failure``.
        """
        bursts: dict[SatelliteId, list[int]] = {}
        for index in indices:
            search = self._searches.get(index)
            if self.arrived[index]:
                continue
            if search is None or search.silent is None:
                if others is None:
                    return False
                search = self._stand_ins(index, satellite, failure, others)
                for place in search.silent or ():
                    bursts.setdefault(place, []).append(index)
            assert search.silent is not None
            search.proof = False
            search.silent.discard(satellite)
            if not search.silent:
                return False
        self.pending.extend(Burst(target, wanted) for target, wanted in bursts.items())
        return True

    def _stand_ins(self, index: int, silent: SatelliteId, failure: str, others: StandIns) -> _Search:
        at = others.at()
        found = self._places(index % self.info.servers, at)
        places = [place for place in found if place != silent and not others.quiet(place)]
        before = self._searches.get(index)
        search = _Search(at[0], deque(), before.renewals if before else 0, set(places[:_MOST_STAND_INS]))
        search.in_place_of_silent = True
        self.silence = self.silence or failure
        self._searches[index] = search
        return search

    def avoid(self, suspects: Suspects, others: StandIns) -> bool:
        """Some of those that are to be asked are silent: others first, and the rest only when these had the chunks.
        False where there are none.
        """
        bursts, self.pending = self.pending, deque()
        for burst in bursts:
            one_of_many = self.is_one_of_many(burst.indices)
            if burst.satellite in suspects and not one_of_many:
                self._sought.update(burst.indices)
                if not self.redirect(burst.indices, burst.satellite, "unreachable", others):
                    return False
            elif one_of_many or not self._sought.isdisjoint(burst.indices):
                self.pending.append(burst)  # what is put aside waits for the answer to it
            else:
                self._aside.append(burst)
        self._take_up()
        return True

    def is_one_of_many(self, indices: Sequence[int]) -> bool:
        """Whether these are being asked for everywhere, so that one place that is silent does not end the read."""
        found = (self._searches.get(index) for index in indices if not self.arrived[index])
        return all(search is not None and search.silent is not None for search in found)

    def in_place_of_silent(self, indices: Sequence[int]) -> bool:
        """Whether these are asked for because another satellite is silent: worth a try, and no long wait."""
        found = (self._searches.get(index) for index in indices if not self.arrived[index])
        return any(search is not None and search.in_place_of_silent for search in found)

    def verified(self) -> bool:
        """Whether the whole value's checksum is right: it is combined from the chunks' own, which were checked."""
        info = self.info
        if info.value_bytes == 0:
            return info.value_crc == 0
        return native.crc32_join(self.crcs, info.chunk_bytes, info.value_bytes) == info.value_crc


@dataclass(slots=True)
class WriteTransfer:
    """Sends one value: references and checksums made once, payloads as views of the caller's buffer."""

    info: ValueInfo
    refs: np.ndarray
    payloads: Sequence[memoryview]
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
        value_crc = native.crc32_join(crcs.data, chunk_bytes, len(view)) if len(view) else 0
        info = ValueInfo(key, chunks, chunk_bytes, len(view), value_crc, strategy, servers, moves)
        refs = pack_refs(key, range(chunks), crcs, chunk_bytes, len(view), value_crc, servers, strategy, moves)
        payloads = Slices(view, chunk_bytes, range(chunks))
        bursts, satellites = planned(chunks, where(moves), servers, WRITE_BURST_CHUNKS)
        report = TransferReport(len(view), chunks, satellites)
        return cls(info, refs, payloads, bytearray(chunks), chunks, deque(bursts), report)

    def of_these(self, indices: Sequence[int]) -> tuple[bytes, Sequence[memoryview]]:
        """Packed references and payloads of these chunks."""
        if isinstance(indices, range):
            its = slice(indices.start, indices.stop, indices.step)
            return self.refs[its].tobytes(), self.payloads[its]
        return self.refs[indices].tobytes(), [self.payloads[index] for index in indices]

    def of_request(self, indices: Sequence[int], asked: Sequence[int]) -> Sequence[int]:
        """What an answer to a request for ``asked`` means by ``indices``."""
        return indices

    def waive(self, indices: Sequence[int]) -> bool:
        """These cannot be stored where they should be: whether that can be borne."""
        return False

    def acknowledge(self, indices: Sequence[int]) -> int:
        """Chunks newly known to be stored."""
        if isinstance(indices, range):
            its = slice(indices.start, indices.stop, indices.step)
            before = self.acknowledged[its]
            fresh = before.count(0)
            self.acknowledged[its] = b"\1" * len(before)
        else:
            inside = {index for index in indices if index < len(self.acknowledged)}
            fresh = sum(not self.acknowledged[index] for index in inside)
            for index in inside:
                self.acknowledged[index] = 1
        self.missing -= fresh
        return fresh


# Values with copies: every chunk is on the satellites of several replicas, and whichever answers first is taken.
#
# Replica 0 is where a value without copies is. A read asks it first and the next copy where an answer is late or a
# satellite dead; a write is good when every chunk is stored once at least.


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
