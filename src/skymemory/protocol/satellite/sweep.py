"""Is the rest of this block still there? How one satellite finds out, with a bounded number of questions.

Of each key it knows from the placement tag which servers hold chunks, and how many each. Its own share it can count.
Of the others it asks one (HAS): the server one further in the ring of the key's servers, at the next sweep two further,
then four: so word of a hole reaches all S servers in about log2 S sweeps, by one question a key and sweep.

Nothing is dropped on a suspicion. A block may be on its way to other satellites, or be written still: what looks
incomplete is looked at again after ``confirm_s``, if the box has not moved, and dropped only if it is proved then that
one of its chunks is lost (``proofs``); while we hear of a writer that is at it, nothing proves that (``latecomers``).

With copies no suspicion is raised where any copy of a share is whole: so all places of it are asked (CHECK), also of
shares that are not whole here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput
from skymemory.metrics import Counters
from skymemory.placement.locate import Moves
from skymemory.protocol import messages
from skymemory.protocol.clock import PROOF_S, SkyMap
from skymemory.protocol.messages import KEY_BYTES, MAX_KEYS_PER_PACKET, Packet
from skymemory.protocol.satellite.config import EvictionConfig
from skymemory.protocol.satellite.locator import Whereabouts
from skymemory.protocol.satellite.memory import ChunkStore, told_by
from skymemory.protocol.satellite.outbox import Departures
from skymemory.protocol.satellite.repair import ANSWER_S, MAX_CHECKS_PER_PACKET, Answer, Check, Checks, Copies, Found
from skymemory.protocol.satellite.tombstones import Dead, setting_of
from skymemory.protocol.wire import TAG_BYTES, TAG_OFFSET, ChunkRef, Op

MOST_QUESTIONS = 8
"""HAS packets of one sweep, and of one handover: so many times 180 keys."""

_MOST_LOOKS = 4
"""So often a proof is tried; then the suspicion ends, until a sweep finds the same again."""
_FOUND = 1 << 30
"""Some place has it: no count of the others brings this down to 0."""


@dataclass(slots=True)
class _Question:
    """One HAS on its way. ``expected``: chunks that the asked satellite must hold of each key."""

    keys: list[bytes]
    expected: list[int]
    servers: dict[bytes, int]
    """Of each key the server that the question is about."""
    asked_s: float
    lacking: dict[bytes, int]
    """Shared by the questions about one key: how many places are left that may have it. Without their answers it is
    taken to be whole.
    """


@dataclass(slots=True)
class _Suspect:
    server: int
    """Whose share is not whole."""
    due_s: float
    moves: Moves
    nothing: bool
    """Nothing at all of the key is where that share is to be: so any of its chunks is missing there."""
    looks: int = 0


class Completeness:
    """Suspicions of one satellite, and how they are cleared or confirmed. ``purge`` is told of what is dead."""

    def __init__(
        self,
        here: SatelliteId,
        config: EvictionConfig,
        store: ChunkStore,
        whereabouts: Whereabouts,
        sky: SkyMap,
        departures: Departures,
        counters: Counters,
        checks: Checks,
        proofs: Proofs,
        purge: Callable[[list[Dead], float], None],
    ) -> None:
        self._here = here
        self._confirm_s = config.confirm_s
        self._copies = Copies(here, config.replicas, store, whereabouts, sky) if config.replicas > 1 else None
        self._checks = checks
        self._proofs = proofs
        self._store = store
        self._whereabouts = whereabouts
        self._sky = sky
        self._departures = departures
        self._counters = counters
        self._purge = purge
        self._questions: dict[int, _Question] = {}
        self._suspects: dict[bytes, _Suspect] = {}
        self._next_request_id = 0x80000000

    @property
    def next_s(self) -> float:
        if not self._suspects:
            return math.inf
        return min(suspect.due_s for suspect in self._suspects.values())

    def suspects(self, key: bytes) -> bool:
        """Whether the key is under suspicion: it is better not handed over yet."""
        return key in self._suspects

    @property
    def asking(self) -> bool:
        """Whether answers are awaited."""
        return bool(self._questions) or self._checks.asking

    def look_at(self, keys: Iterable[bytes], distance: int, now_s: float, before: Moves | None = None) -> list[bytes]:
        """Look whether these keys, which are here, are whole: our own share, and the server ``distance`` further.

        ``before`` the box moved, it was elsewhere: then both places are asked, and one that has it will do. Returns
        those that there was no question left for.
        """
        if self._copies is not None:
            return self._look_at_copies(self._copies, keys, distance, now_s, before)
        self._questions = {n: q for n, q in self._questions.items() if q.asked_s + ANSWER_S > now_s}
        by_place: dict[SatelliteId, tuple[list[bytes], list[int]]] = {}
        lacking: dict[bytes, int] = {}
        servers: dict[bytes, int] = {}
        packets, left = 0, list[bytes]()
        for key in keys:
            ref = self._ref(key)
            if ref is None:
                continue
            own = self._own_share_that_is_not_whole(key)
            if own is not None:
                self._suspect(key, own, now_s)
                continue
            ring = min(ref.tag.servers, ref.chunks)
            server = (ref.tag.server + distance) % ring
            places = self._places(ref, server, before) if server != ref.tag.server else []
            fresh = sum(len(by_place.get(place, ((), ()))[0]) % MAX_KEYS_PER_PACKET == 0 for place in places)
            if not places:
                continue
            if packets + fresh > MOST_QUESTIONS:
                left.append(key)
                continue
            packets += fresh
            lacking[key] = len(places)
            servers[key] = server
            for place in places:
                asked, expected = by_place.setdefault(place, ([], []))
                asked.append(key)
                expected.append(_chunks_of(server, ref))
        for place, (asked, expected) in by_place.items():
            for at in range(0, len(asked), MAX_KEYS_PER_PACKET):
                page = slice(at, at + MAX_KEYS_PER_PACKET)
                self._ask(place, _Question(asked[page], expected[page], servers, now_s, lacking))
        return left

    def _look_at_copies(
        self, copies: Copies, keys: Iterable[bytes], distance: int, now_s: float, before: Moves | None
    ) -> list[bytes]:
        """``look_at`` where there are copies: also for what is not whole here."""
        by_place: dict[SatelliteId, list[Check]] = {}
        lacking: dict[tuple[bytes, int], int] = {}
        asked, left = 0, list[bytes]()

        def heard(answer: Answer, heard_s: float) -> None:
            for check, what in zip(answer.checks, answer.found, strict=True):
                name = check.key, check.server
                if what is Found.WHOLE:
                    lacking[name] = _FOUND
                    self._clear(check.key, check.server)
                elif answer.same_moves:
                    lacking[name] -= 1
                    if lacking[name] == 0:
                        self._suspect(check.key, check.server, heard_s)

        for key in keys:
            for check, places in copies.to_ask(key, distance, before):
                if asked + len(places) > MOST_QUESTIONS * MAX_CHECKS_PER_PACKET:
                    left.append(key)
                    break
                asked += len(places)
                lacking[key, check.server] = len(places)
                for place in places:
                    by_place.setdefault(place, []).append(check)
        for place, checks in by_place.items():
            self._checks.ask(place, checks, heard, now_s)
        return left

    def answered(self, packet: Packet, now_s: float) -> None:
        """A PRESENCE for us."""
        question = self._questions.pop(packet.header.request_id, None)
        presences = messages.unpack_presences(packet.body)
        if question is None or len(presences) != len(question.keys):
            return
        same_moves = (packet.header.slot_moves, packet.header.plane_moves) == self._whereabouts.moves
        for key, expected, presence in zip(question.keys, question.expected, presences, strict=True):
            if presence is not None and presence.held >= expected:
                self._clear(key, question.servers[key])
                question.lacking[key] = _FOUND
            elif same_moves:
                question.lacking[key] -= 1
                if question.lacking[key] == 0:
                    self._suspect(key, question.servers[key], now_s, presence is None)

    def handle_timer(self, now_s: float) -> None:
        """Have what is due proved, or not."""
        values = []
        for key in [key for key, suspect in self._suspects.items() if suspect.due_s <= now_s]:
            suspect = self._suspects[key]
            missing = self._missing(key, suspect)
            if not missing or suspect.moves != self._whereabouts.moves or suspect.looks == _MOST_LOOKS:
                del self._suspects[key]
                continue
            suspect.due_s = now_s + self._confirm_s
            suspect.looks += 1
            share = self._store.shares[key]
            values.append((share[told_by(share)][0], missing))
        if values:
            self._proofs.ask(values, self._proved, now_s)

    def _missing(self, key: bytes, suspect: _Suspect) -> list[int]:
        """Chunks of the suspected share that are not here, the first of them: as many as a proof asks about, whatever
        number a reference claims; one will do where none is in its place.
        """
        share = self._store.shares.get(key)
        if not share:
            return []
        packed = share[told_by(share)][0]
        ref = ChunkRef.unpack(packed)
        its = range(suspect.server, ref.chunks, ref.tag.servers)
        missing = (index for index in its if index not in share or setting_of(share[index][0]) != setting_of(packed))
        return list(islice(missing, 1 if suspect.nothing else MAX_CHECKS_PER_PACKET))

    def _proved(self, packed: bytes, lost: bool, now_s: float) -> None:
        key = packed[:KEY_BYTES]
        if self._suspects.pop(key, None) is not None and lost:
            self._drop([key], now_s)

    def _suspect(self, key: bytes, server: int, now_s: float, nothing: bool = False) -> None:
        if key not in self._suspects:
            self._suspects[key] = _Suspect(server, now_s + self._confirm_s, self._whereabouts.moves, nothing)

    def _clear(self, key: bytes, server: int) -> None:
        """It is there: no suspicion."""
        known = self._suspects.get(key)
        if known is not None and known.server == server:
            del self._suspects[key]

    def _drop(self, dead: list[bytes], now_s: float) -> None:
        shares = self._store.shares
        found = [(key, setting_of(shares[key][told_by(shares[key])][0])) for key in dead if shares.get(key)]
        if found:
            self._purge(found, now_s)

    def _ask(self, place: SatelliteId, question: _Question) -> None:
        number = self._next_request_id
        self._next_request_id = 0x80000000 | (number + 1) & 0x3FFFFFFF
        self._questions[number] = question
        self._counters.add("questions_asked")
        self._departures.command(Op.HAS, place, number, messages.pack_keys(question.keys), question.asked_s)

    def _ref(self, key: bytes) -> ChunkRef | None:
        share = self._store.shares.get(key)
        return ChunkRef.unpack(share[told_by(share)][0]) if share else None

    def _own_share_that_is_not_whole(self, key: bytes) -> int | None:
        """A server of whose chunks we hold some, but not all.

        Leftovers of an earlier value or placement of the key say nothing of this one, and are not counted.
        """
        share = self._store.shares[key]
        packed = share[told_by(share)][0]
        ref = ChunkRef.unpack(packed)
        held: dict[int, int] = {}
        for index, (its_ref, _) in share.items():
            if setting_of(its_ref) == setting_of(packed):
                server = index % ref.tag.servers
                held[server] = held.get(server, 0) + 1
        return next((server for server, count in held.items() if count < _chunks_of(server, ref)), None)

    def _places(self, ref: ChunkRef, server: int, before: Moves | None) -> Sequence[SatelliteId]:
        """Where that server is now, and where it was; empty where that is this satellite itself."""
        tag, places = ref.tag, list[SatelliteId]()
        for moves in dict.fromkeys((self._whereabouts.moves, before or self._whereabouts.moves)):
            try:
                placement = self._sky.placement(tag.strategy, tag.servers)
            except InvalidInput:
                return ()
            places.append(placement.locate(server, (tag.slot_moves, tag.plane_moves), moves))
        return () if self._here in places else tuple(dict.fromkeys(places))


def _chunks_of(server: int, ref: ChunkRef) -> int:
    """How many chunks of the value its server ``server`` (0-based) holds."""
    return -(-(ref.chunks - server) // ref.tag.servers)


# Is a chunk really nowhere? What a satellite must know before it drops the rest of a value that others hold, too.
#
# That a chunk is not where it belongs is no proof of its loss: it may be on its way there, or with a satellite that
# could
# not hand it over, or be another copy's. So all satellites are asked where it can have been since its setting, of
# every
# copy and chunk by chunk (CHECK). Lost is what all of them lack who answer within ``PROOF_S``, at one count of moves,
# with nothing of it under way. Where one is silent nothing is proved, and nothing is dropped.


MOST_QUESTIONS_OF_PROOFS = 128
"""CHECK packets of one call, beyond those for its first value: each for 100 chunks."""
_MOST_PLACEMENTS = 32
"""Placements that one call works the places out for: values that were set together share one."""
_MOST_CHUNKS = 0xFFFF
"""Of larger values a CHECK cannot name a single chunk: of them nothing is proved."""
_PLACEMENT = slice(TAG_OFFSET, TAG_OFFSET + TAG_BYTES)

Proved = Callable[[bytes, bool, float], None]
"""Told of a value, by one of its packed references, that a chunk of it is lost (True) or that all in question are there
(False), and when. Not told at all where neither is certain.
"""


@dataclass(slots=True)
class _Case:
    """One value: of each chunk in question the satellites that may have it still, as far as is known."""

    packed: bytes
    left: dict[int, set[SatelliteId]]
    asked_s: float
    moves: Moves
    proved: Proved


class Proofs:
    """Those of one satellite. ``replicas`` of each chunk are kept."""

    def __init__(self, here: SatelliteId, replicas: int, whereabouts: Whereabouts, sky: SkyMap, checks: Checks) -> None:
        self._here = here
        self._replicas = range(replicas)
        self._whereabouts = whereabouts
        self._sky = sky
        self._checks = checks

    def ask(self, values: Sequence[tuple[bytes, Collection[int]]], proved: Proved, now_s: float) -> None:
        """Of each value one packed reference, and chunks of its setting that are not here. What there are not enough
        questions for is not asked about.
        """
        by_place: dict[SatelliteId, list[tuple[_Case, Check]]] = {}
        places: dict[tuple[bytes, int], set[SatelliteId]] = {}
        questions = 0
        for packed, indices in values:
            ref = ChunkRef.unpack(packed)
            if ref.chunks > _MOST_CHUNKS or questions > MOST_QUESTIONS_OF_PROOFS or len(places) > _MOST_PLACEMENTS:
                continue
            case = _Case(packed, {}, now_s, self._whereabouts.moves, proved)
            for index in sorted(indices)[:MAX_CHECKS_PER_PACKET]:
                name = packed[_PLACEMENT], index % ref.tag.servers
                if name not in places:
                    places[name] = self._places(ref, name[1], now_s)
                case.left[index] = set(places[name])
            fresh = 0
            for index, others in case.left.items():
                check = Check(ref.key, setting_of(packed), ref.chunks, index, ref.chunks, ref.length_bytes)
                for place in others:
                    asked = by_place.setdefault(place, [])
                    fresh += len(asked) % MAX_CHECKS_PER_PACKET == 0
                    asked.append((case, check))
            questions += fresh if questions or len(places) > 1 else 1
            self._judge(case, now_s)  # of some chunk there may be nobody to ask
        for place, asked in by_place.items():
            for at in range(0, len(asked), MAX_CHECKS_PER_PACKET):
                self._ask(place, asked[at : at + MAX_CHECKS_PER_PACKET], now_s)

    def _ask(self, place: SatelliteId, asked: Sequence[tuple[_Case, Check]], now_s: float) -> None:
        def heard(answer: Answer, heard_s: float) -> None:
            for (case, check), what in zip(asked, answer.found, strict=True):
                if check.server not in case.left:
                    continue
                if what is Found.WHOLE:
                    del case.left[check.server]
                    if not case.left:
                        case.proved(case.packed, False, heard_s)
                elif answer.same_moves and answer.settled and heard_s - case.asked_s <= PROOF_S:
                    case.left[check.server].discard(place)
                    self._judge(case, heard_s)

        self._checks.ask(place, [check for _, check in asked], heard, now_s, PROOF_S)

    def _judge(self, case: _Case, now_s: float) -> None:
        """Whether one of the chunks is where nobody can have it any more: told once."""
        lost = [index for index, places in case.left.items() if not places]
        if (
            lost
            and case.moves == self._whereabouts.moves
            and self._checks.settled(case.packed[:KEY_BYTES], lost, now_s)
        ):
            case.left.clear()
            case.proved(case.packed, True, now_s)

    def _places(self, ref: ChunkRef, server: int, now_s: float) -> set[SatelliteId]:
        """Every other satellite where chunks of a server can have been since their setting, as any copy."""
        tag = ref.tag
        set_moves, placement = (tag.slot_moves, tag.plane_moves), self._sky.placement(tag.strategy, tag.servers)
        replicas = range(min(len(self._replicas), placement.box.width * placement.box.height))
        return {
            placement.locate(server, set_moves, moves, replica)
            for moves in self._whereabouts.moves_since(set_moves, placement, now_s)
            for replica in replicas
        } - {self._here}
