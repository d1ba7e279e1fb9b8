"""CHECK and CHECKED: does another satellite hold all chunks of a server of a value? And proofs of loss.

HAS cannot answer that if values have copies: a satellite may hold different servers of different copies.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from typing import NamedTuple

from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput, MalformedPacket
from skymemory.placement.locate import Moves
from skymemory.protocol.clock import PROOF_S
from skymemory.protocol.messages import KEY_BYTES, SETTING_BYTES, pack_verdicts, unpack_verdicts
from skymemory.protocol.satellite.memory import Share, latest_ref, setting_of
from skymemory.protocol.satellite.state import SatelliteState
from skymemory.protocol.wire import (
    CHUNK_REF_BYTES,
    FLAG_SETTLED,
    MAX_CHUNK_BYTES,
    TAG_BYTES,
    TAG_OFFSET,
    Buffer,
    ChunkRef,
    Op,
    Packet,
)

MAX_CHECKS_PER_PACKET = 100
ANSWER_S = 0.3
MOST_QUESTIONS_OF_PROOFS = 128
_MOST_PLACEMENTS = 32
_MOST_CHUNKS = 0xFFFF
_PLACEMENT = slice(TAG_OFFSET, TAG_OFFSET + TAG_BYTES)
_COUNT = struct.Struct(">HH")
_CHECK = struct.Struct(">32s12sHHII")
assert _CHECK.size == KEY_BYTES + SETTING_BYTES + 12


# --- The messages ---


class Check(NamedTuple):
    """Question to a satellite: does it hold all chunks of a server of a value?"""

    key: bytes
    setting: bytes  # identity of the write of the value: chunks of other writes of the key do not count
    servers: int  # number of servers; to ask about a single chunk, number of chunks
    server: int  # 0-based: chunk ``i`` belongs to server ``i % servers``
    chunks: int  # number of chunks of the whole value
    length_bytes: int  # length of a chunk, by which the satellite estimates if it has room for missing chunks

    @classmethod
    def of(cls, packed: bytes, server: int) -> Check:
        # ``packed``: reference of any chunk of the value.
        ref = ChunkRef.unpack(packed)
        return cls(ref.key, setting_of(packed), ref.tag.servers, server, ref.chunks, ref.length_bytes)

    @property
    def expected(self) -> int:
        # Return the number of chunks of the server.
        return -(-(self.chunks - self.server) // self.servers)

    def held_in(self, share: Share) -> list[int]:
        # Return the indices of the server's chunks that are in the share.
        return [
            index
            for index, (ref, _) in share.items()
            if index % self.servers == self.server and index < self.chunks and setting_of(ref) == self.setting
        ]


class CheckResult(IntEnum):
    """Result of a check; frozen numbers."""

    WHOLE = 0
    LACKING = 1
    """Some chunks are missing, and there is room for them."""
    NO_ROOM = 2
    """Some chunks are missing and not wanted: no room, another setting in their places, or a dead value."""


def pack_checks(checks: Sequence[Check]) -> bytes:
    if not 1 <= len(checks) <= MAX_CHECKS_PER_PACKET:
        raise InvalidInput(f"{len(checks)} in one CHECK: expected 1 to {MAX_CHECKS_PER_PACKET}")
    packed = (_CHECK.pack(c.key, c.setting, c.servers, c.server + 1, c.chunks, c.length_bytes) for c in checks)
    return _COUNT.pack(len(checks), 0) + b"".join(packed)


def unpack_checks(body: Buffer) -> list[Check]:
    count = _COUNT.unpack_from(body)[0] if len(body) >= _COUNT.size else 0
    if not 1 <= count <= MAX_CHECKS_PER_PACKET or len(body) != _COUNT.size + count * _CHECK.size:
        raise MalformedPacket(f"CHECK of {count} in {len(body)} bytes")
    checks = []
    for key, setting, servers, number, chunks, length_bytes in _CHECK.iter_unpack(body[_COUNT.size :]):
        if not 1 <= number <= min(servers, chunks) or length_bytes > MAX_CHUNK_BYTES:
            raise MalformedPacket(f"CHECK of server {number} of {servers}, {chunks} chunks of {length_bytes} bytes")
        checks.append(Check(key, setting, servers, number - 1, chunks, length_bytes))
    return checks


def pack_found(results: Sequence[CheckResult]) -> bytes:
    return pack_verdicts(results)


def unpack_found(body: Buffer) -> list[CheckResult]:
    return unpack_verdicts(body, Op.CHECKED, CheckResult)


# --- Questions and answers ---


@dataclass(frozen=True, slots=True)
class CheckAnswer:
    """Results from satellite ``place``, a result for each check.

    ``same_moves``: it counts the same moves. ``settled``: none of this is being handed over or written there.
    """

    place: SatelliteId
    checks: list[Check]
    found: list[CheckResult]
    same_moves: bool
    settled: bool


OnAnswer = Callable[[CheckAnswer, float], None]


@dataclass(slots=True)
class _Asked:
    place: SatelliteId
    checks: list[Check]
    on_answer: OnAnswer
    until_s: float


class Checks:
    def __init__(self, state: SatelliteState) -> None:
        self._state = state
        self._store = state.store
        self._dead_settings = state.history.dead
        self._locator = state.locator
        self._outbox = state.outbox
        self._counters = state.counters
        self._pending_questions: dict[int, _Asked] = {}
        self._next_request_id = 0xC0000000 | state.config.first_request_id & 0x3FFFFFFF

    @property
    def asking(self) -> bool:
        return bool(self._pending_questions)

    def ask(
        self, place: SatelliteId, checks: list[Check], on_answer: OnAnswer, now_s: float, answer_s: float = ANSWER_S
    ) -> None:
        """Send CHECKs; ``on_answer`` is called for each packet answered in time. Nothing is repeated."""
        self._pending_questions = {
            n: question for n, question in self._pending_questions.items() if question.until_s > now_s
        }
        for at in range(0, len(checks), MAX_CHECKS_PER_PACKET):
            page = checks[at : at + MAX_CHECKS_PER_PACKET]
            number = self._next_request_id
            self._next_request_id = 0xC0000000 | (number + 1) & 0x3FFFFFFF
            self._pending_questions[number] = _Asked(place, page, on_answer, now_s + answer_s)
            self._counters.add("questions_asked")
            self._outbox.command(Op.CHECK, place, number, pack_checks(page), now_s)

    def answered(self, packet: Packet, now_s: float) -> None:
        question = self._pending_questions.pop(packet.header.request_id, None)
        results = unpack_found(packet.body)
        if question is not None and len(results) == len(question.checks):
            same_moves = (packet.header.slot_moves, packet.header.plane_moves) == self._locator.moves
            settled = bool(packet.header.flags & FLAG_SETTLED)
            question.on_answer(CheckAnswer(question.place, question.checks, results, same_moves, settled), now_s)

    def receive(self, packet: Packet, now_s: float) -> None:
        """Answer a CHECK: which shares are whole here, and which may be sent. Free memory is offered once."""
        room_bytes = self._store.limit_bytes - self._store.used_bytes
        results, settled = [], True
        for check in unpack_checks(packet.body):
            share = self._store.shares.get(check.key, {})
            held_indices = check.held_in(share)  # never more than is stored, whatever number of chunks a packet claims
            settled = settled and self._state.is_settled(check.key, held_indices, now_s)
            missing = check.expected - len(held_indices)
            size_bytes = missing * (check.length_bytes + CHUNK_REF_BYTES)
            if missing <= 0:
                results.append(CheckResult.WHOLE)
            elif (
                size_bytes > room_bytes
                or self._dead_settings.get(check.key) == check.setting
                or _is_taken_by_others(check, share)
            ):
                results.append(CheckResult.NO_ROOM)
            else:
                room_bytes -= size_bytes
                results.append(CheckResult.LACKING)
        self._outbox.reply(packet.header, Op.CHECKED, pack_found(results), now_s, flags=FLAG_SETTLED if settled else 0)


def _is_taken_by_others(check: Check, share: Share) -> bool:
    return any(
        index % check.servers == check.server and setting_of(ref) != check.setting for index, (ref, _) in share.items()
    )


# --- Where the copies of a share are ---


class Replicas:
    """Shares that are not whole here, and the places of their other copies."""

    def __init__(self, state: SatelliteState) -> None:
        self._here = state.here
        self._replicas = range(state.config.eviction.replicas)
        self._store = state.store
        self._locator = state.locator
        self._sky = state.sky

    def to_ask(
        self, key: bytes, distance: int, before: Moves | None = None
    ) -> list[tuple[Check, tuple[SatelliteId, ...]]]:
        """Return shares of a stored key that must be whole elsewhere, with satellites that may have them: those not
        whole here, and that of the server ``distance`` further in the ring. With ``before``, earlier moves, both places
        may have a share, and none needs to be here yet.
        """
        share = self._store.shares.get(key)
        if not share:
            return []
        packed = latest_ref(share)
        ref = ChunkRef.unpack(packed)
        further = (ref.tag.server + distance) % min(ref.tag.servers, ref.chunks)
        shares = [*self._get_checks_of_incomplete(packed, before is None), Check.of(packed, further)]
        wanted = dict.fromkeys(shares if self.missing(shares[-1]) else shares[:-1])
        return [(check, places) for check in wanted if (places := self.get_other_places(packed, check.server, before))]

    def find_incomplete_shares(
        self, packed: bytes, before: Moves | None = None
    ) -> list[tuple[Check, tuple[SatelliteId, ...]]]:
        """Return a value's shares that are not whole here, with the other copies' satellites."""
        return [
            (check, self.get_other_places(packed, check.server, before))
            for check in self._get_checks_of_incomplete(packed, True)
        ]

    def missing(self, check: Check) -> list[int]:
        """Return a share's missing chunks, limited because a reference may claim any number."""
        held_indices = set(check.held_in(self._store.shares.get(check.key, {})))
        missing = (index for index in range(check.server, check.chunks, check.servers) if index not in held_indices)
        return list(islice(missing, MAX_CHECKS_PER_PACKET))

    def get_other_places(self, packed: bytes, server: int, before: Moves | None = None) -> tuple[SatelliteId, ...]:
        """Return the other satellites of a server's copies, now or at the moves ``before``."""
        places: dict[SatelliteId, None] = {}
        for moves in dict.fromkeys((self._locator.moves, before or self._locator.moves)):
            for replica in self._replicas:
                try:
                    places[self._get_satellites(packed, moves, replica)[server]] = None
                except InvalidInput:  # a box too small for all copies, or an unknown placement
                    break
        return tuple(place for place in places if place != self._here)

    def _get_checks_of_incomplete(self, packed: bytes, ours: bool) -> list[Check]:
        """Return shares that are here in part and, with ``ours``, those that should be here."""
        ref = ChunkRef.unpack(packed)
        share = self._store.shares.get(ref.key, {})
        servers = {index % ref.tag.servers for index in share} if share else set[int]()
        if ours:
            servers |= self._get_own_servers(packed)
        checks = [Check.of(packed, server) for server in sorted(servers) if server < ref.chunks]
        held_counts = {check: len(check.held_in(share)) for check in checks}
        return [check for check in checks if held_counts[check] < check.expected and (held_counts[check] or ours)]

    def _get_own_servers(self, packed: bytes) -> set[int]:
        """Return the value's servers of which any copy belongs on this satellite."""
        belonging = set[int]()
        for replica in self._replicas:
            try:
                places = self._get_satellites(packed, self._locator.moves, replica)
            except InvalidInput:
                break
            belonging.update(server for server, place in enumerate(places) if place == self._here)
        return belonging

    def _get_satellites(self, packed: bytes, moves: Moves, replica: int) -> tuple[SatelliteId, ...]:
        tag = ChunkRef.unpack(packed).tag
        set_moves = tag.slot_moves, tag.plane_moves
        return self._sky.servers_at(tag.strategy, tag.servers, set_moves, moves, replica)


# --- Proofs of loss ---
#
# A chunk that is not where it belongs is not proved lost: it may be on its way there, be held by a satellite that could
# not hand it over, or be another copy's. So every satellite on which it can have been since its setting is asked, about
# every copy and chunk by chunk. A chunk is lost if all of them lack it, answer within ``PROOF_S`` at the same count of
# moves, and are settled. If a satellite is silent, nothing is proved, and nothing is dropped.

OnProof = Callable[[bytes, bool, float], None]
"""Callback: packed reference, True if a chunk is lost or False if all exist, time. Not called if neither is certain."""


@dataclass(slots=True)
class _Case:
    """Value suspected lost. ``left``: for each missing chunk, the satellites that have not yet proved its absence
    there.
    """

    packed: bytes
    left: dict[int, set[SatelliteId]]
    asked_s: float
    moves: Moves
    on_proof: OnProof


class LossProofs:
    def __init__(self, state: SatelliteState, checks: Checks) -> None:
        self._state = state
        self._here = state.here
        self._replicas = range(state.config.eviction.replicas)
        self._locator = state.locator
        self._sky = state.sky
        self._checks = checks

    def ask(self, values: Sequence[tuple[bytes, Collection[int]]], on_proof: OnProof, now_s: float) -> None:
        """Ask all satellites that may hold missing chunks of ``values`` (packed references, chunk indices). Values
        beyond the limit are skipped.
        """
        by_place: dict[SatelliteId, list[tuple[_Case, Check]]] = {}
        places: dict[tuple[bytes, int], set[SatelliteId]] = {}
        questions = 0
        for packed, indices in values:
            ref = ChunkRef.unpack(packed)
            if ref.chunks > _MOST_CHUNKS or questions > MOST_QUESTIONS_OF_PROOFS or len(places) > _MOST_PLACEMENTS:
                continue
            case = _Case(packed, {}, now_s, self._locator.moves, on_proof)
            for index in sorted(indices)[:MAX_CHECKS_PER_PACKET]:
                name = packed[_PLACEMENT], index % ref.tag.servers
                if name not in places:
                    places[name] = self._get_places(ref, name[1], now_s)
                case.left[index] = set(places[name])
            new_packets = 0
            for index, satellites in case.left.items():
                check = Check(ref.key, setting_of(packed), ref.chunks, index, ref.chunks, ref.length_bytes)
                for place in sorted(satellites):
                    place_questions = by_place.setdefault(place, [])
                    new_packets += len(place_questions) % MAX_CHECKS_PER_PACKET == 0
                    place_questions.append((case, check))
            questions += new_packets if questions or len(places) > 1 else 1
            self._report_if_lost(case, now_s)  # for some chunk, there may be no satellite to ask
        for place, place_questions in by_place.items():
            for at in range(0, len(place_questions), MAX_CHECKS_PER_PACKET):
                self._send_questions(place, place_questions[at : at + MAX_CHECKS_PER_PACKET], now_s)

    def _send_questions(self, place: SatelliteId, questions: Sequence[tuple[_Case, Check]], now_s: float) -> None:
        """Send CHECKs to a satellite. Its answers clear found chunks, or prove that a chunk is lost."""

        def on_answer(answer: CheckAnswer, answered_s: float) -> None:
            for (case, check), what in zip(questions, answer.found, strict=True):
                if check.server not in case.left:
                    continue
                if what is CheckResult.WHOLE:
                    del case.left[check.server]
                    if not case.left:
                        case.on_proof(case.packed, False, answered_s)
                elif answer.same_moves and answer.settled and answered_s - case.asked_s <= PROOF_S:
                    case.left[check.server].discard(place)
                    self._report_if_lost(case, answered_s)

        self._checks.ask(place, [check for _, check in questions], on_answer, now_s, PROOF_S)

    def _report_if_lost(self, case: _Case, now_s: float) -> None:
        lost = [index for index, places in case.left.items() if not places]
        if lost and case.moves == self._locator.moves and self._state.is_settled(case.packed[:KEY_BYTES], lost, now_s):
            case.left.clear()
            case.on_proof(case.packed, True, now_s)

    def _get_places(self, ref: ChunkRef, server: int, now_s: float) -> set[SatelliteId]:
        """Return the other satellites that can have had a server's chunks since the SET."""
        tag = ref.tag
        set_moves, placement = (tag.slot_moves, tag.plane_moves), self._sky.placement(tag.strategy, tag.servers)
        replicas = range(min(len(self._replicas), placement.box.width * placement.box.height))
        return {
            placement.locate(server, set_moves, moves, replica)
            for moves in self._locator.moves_since(set_moves, placement, now_s)
            for replica in replicas
        } - {self._here}
