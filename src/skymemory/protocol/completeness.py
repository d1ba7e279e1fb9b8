"""Is the rest of this block still there? How one satellite finds out, with a bounded number of questions.

Of each key it knows from the placement tag which servers hold chunks, and how many each. Its own share it can count.
Of the others it asks one (HAS): the server one further in the ring of the key's servers, at the next sweep two further,
then four: so word of a hole reaches all S servers in about log2 S sweeps, by one question a key and sweep.

Nothing is dropped on a first suspicion. A block may just be being written, or be on its way to other satellites: what
looks incomplete is looked at again after ``confirm_s``, and dropped only if it still does and the box has not moved.

With copies a block is dead when *no* copy of a server's share is whole: reads mix copies chunk by chunk. So all places
of a share are asked (CHECK), also of those that are not whole here, and one that has it will do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput
from skymemory.metrics import Counters
from skymemory.placement.locate import Moves
from skymemory.protocol import messages
from skymemory.protocol.checks import ANSWER_S, MAX_CHECKS_PER_PACKET, Check, Checks, Found
from skymemory.protocol.chunk_store import ChunkStore
from skymemory.protocol.copies import Copies
from skymemory.protocol.dead import Dead, setting_of
from skymemory.protocol.departures import Departures
from skymemory.protocol.eviction import EvictionConfig
from skymemory.protocol.messages import MAX_KEYS_PER_PACKET, Packet
from skymemory.protocol.motion import SkyMap
from skymemory.protocol.share import told_by
from skymemory.protocol.whereabouts import Whereabouts
from skymemory.protocol.wire import ChunkRef, Op

MOST_QUESTIONS = 8
"""HAS packets of one sweep, and of one handover: so many times 180 keys."""

_MOST_LOOKS = 4
_FOUND = 1 << 30
"""Some place has it: no count of the others brings this down to 0."""


@dataclass(slots=True)
class _Question:
    """One HAS on its way. ``expected``: chunks that the asked satellite must hold of each key."""

    keys: list[bytes]
    expected: list[int]
    distance: int
    asked_s: float
    lacking: dict[bytes, int]
    """Shared by the questions about one key: how many places are left that may have it. Without their answers it is
    taken to be whole.
    """


@dataclass(slots=True)
class _Suspect:
    distance: int
    """How far round the ring the server is that lacks it; 0: our own share is not whole."""
    due_s: float
    moves: Moves = (0, 0)
    server: int = -1
    """Whose share it is, where there are copies: of that ring there may be more than one to ask for."""
    looks: int = 0


class Completeness:
    """Suspicions of one satellite, and how they are cleared or confirmed. ``purge`` is told of what is dead."""

    def __init__(
        self, here: SatelliteId, config: EvictionConfig, store: ChunkStore, whereabouts: Whereabouts, sky: SkyMap,
        departures: Departures, counters: Counters, checks: Checks, purge: Callable[[list[Dead], float], None],
    ) -> None:  # fmt: skip
        self._here = here
        self._confirm_s = config.confirm_s
        self._copies = Copies(here, config.replicas, store, whereabouts, sky) if config.replicas > 1 else None
        self._checks = checks
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
        packets, left = 0, list[bytes]()
        for key in keys:
            ref = self._ref(key)
            if ref is None:
                continue
            if not self._own_share_is_whole(key):
                self._suspect(key, 0, now_s)
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
            for place in places:
                asked, expected = by_place.setdefault(place, ([], []))
                asked.append(key)
                expected.append(_chunks_of(server, ref))
        for place, (asked, expected) in by_place.items():
            for at in range(0, len(asked), MAX_KEYS_PER_PACKET):
                page = slice(at, at + MAX_KEYS_PER_PACKET)
                self._ask(place, _Question(asked[page], expected[page], distance, now_s, lacking))
        return left

    def _look_at_copies(
        self, copies: Copies, keys: Iterable[bytes], distance: int, now_s: float, before: Moves | None
    ) -> list[bytes]:
        """``look_at`` where there are copies: also for what is not whole here."""
        by_place: dict[SatelliteId, list[Check]] = {}
        lacking: dict[tuple[bytes, int], int] = {}
        asked, left = 0, list[bytes]()

        def heard(
            place: SatelliteId, checks: list[Check], found: list[Found], same_moves: bool, heard_s: float
        ) -> None:
            for check, what in zip(checks, found, strict=True):
                name = check.key, check.server
                if what is Found.WHOLE:
                    lacking[name] = _FOUND
                    self._clear(check.key, distance, check.server)
                else:
                    lacking[name] -= 1
                    if lacking[name] == 0 and same_moves:
                        self._suspect(check.key, distance, heard_s, check.server)

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
                self._clear(key, question.distance)
                question.lacking[key] = _FOUND
            else:
                question.lacking[key] -= 1
                if question.lacking[key] == 0 and same_moves:
                    self._suspect(key, question.distance, now_s)

    def handle_timer(self, now_s: float) -> None:
        """Look again at what is due; what has been suspected twice is dead."""
        due = [key for key, suspect in self._suspects.items() if suspect.due_s <= now_s]
        again: dict[int, list[bytes]] = {}
        dead = []
        for key in due:
            suspect = self._suspects[key]
            moved = suspect.moves != self._whereabouts.moves
            if self._ref(key) is None or moved or (self._copies is not None and suspect.looks == _MOST_LOOKS):
                del self._suspects[key]
            elif suspect.distance == 0 and self._copies is None:
                del self._suspects[key]
                if not self._own_share_is_whole(key):
                    dead.append(key)
            else:
                suspect.due_s = now_s + self._confirm_s
                suspect.looks += 1
                again.setdefault(suspect.distance, []).append(key)
        self._drop(dead, now_s)
        for distance, keys in again.items():
            for key in self.look_at(keys, distance, now_s):
                self._suspects.pop(key, None)

    def _suspect(self, key: bytes, distance: int, now_s: float, server: int = -1) -> None:
        known = self._suspects.get(key)
        if known is None:
            self._suspects[key] = _Suspect(distance, now_s + self._confirm_s, self._whereabouts.moves, server)
            return
        again = known.server == server and (known.looks > 0 if server >= 0 else known.distance == distance > 0)
        if again and known.moves == self._whereabouts.moves:
            del self._suspects[key]
            self._drop([key], now_s)

    def _clear(self, key: bytes, distance: int, server: int = -1) -> None:
        """It is there: no suspicion."""
        known = self._suspects.get(key)
        if known is not None and known.server == server and (server >= 0 or known.distance == distance):
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

    def _own_share_is_whole(self, key: bytes) -> bool:
        """Whether all chunks are here that belong to the servers of which we hold any.

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
        return all(count >= _chunks_of(server, ref) for server, count in held.items())

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
