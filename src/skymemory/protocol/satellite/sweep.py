"""Periodic checks of the stored keys: incomplete blocks are dropped, lost copies are made again.

``Sweep`` counts the own share of each key and asks another server (HAS): the next in the ring of the key's servers, at
later sweeps the second, fourth … So all S servers learn of a hole in about log2 S sweeps.

1. A share that is not whole makes its key *suspect*: it may be on its way or being written.
2. After ``confirm_s`` without a move, the satellite tries to prove that a chunk is lost (``LossProofs``).
3. If it is, the rest of the block is dropped; after ``_MOST_ATTEMPTS`` attempts, the suspicion ends.

With copies, all places of a share are asked (CHECK), and any whole copy prevents a suspicion.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput
from skymemory.placement.locate import Moves
from skymemory.protocol import messages
from skymemory.protocol.messages import KEY_BYTES, MAX_KEYS_PER_PACKET, Dead
from skymemory.protocol.satellite.checks import (
    ANSWER_S,
    MAX_CHECKS_PER_PACKET,
    Check,
    CheckAnswer,
    CheckResult,
    Checks,
    LossProofs,
    Replicas,
)
from skymemory.protocol.satellite.gossip import Gossip
from skymemory.protocol.satellite.handover import MigrateBurst
from skymemory.protocol.satellite.memory import as_copy, latest_ref, names_by_tag, setting_of
from skymemory.protocol.satellite.state import SatelliteState
from skymemory.protocol.wire import CHUNK_REF_BYTES, REPLICA_OFFSET, ChunkRef, Op, Packet

MOST_QUESTIONS = 8
MOST_BYTES = 16 << 20
_SWEEP_PAGES = 8
_REPAIR_PAGES = 8
_MOST_ATTEMPTS = 4
_MOST_HELD_BACK = 1 << 14
_DISTANCES = (1, 2, 4, 8)
_FOUND = 1 << 30


@dataclass(slots=True)
class _Question:
    """HAS in flight: its keys, the chunks expected of each, and the server asked about."""

    keys: list[bytes]
    expected: list[int]
    servers: dict[bytes, int]
    asked_s: float
    lacking: dict[bytes, int]
    """Places that may still have each key, shared by its questions."""


@dataclass(slots=True)
class _Suspect:
    """Suspicion that a key lacks chunks of ``server``; ``nothing``: no chunk of them was found."""

    server: int
    due_s: float
    moves: Moves
    nothing: bool
    attempts: int = 0


class Sweep:
    def __init__(self, state: SatelliteState, checks: Checks, proofs: LossProofs, gossip: Gossip, now_s: float) -> None:
        self._here = state.here
        self._config = config = state.config.eviction
        self._sky = state.sky
        self._store = state.store
        self._handover = state.handover
        self._locator = state.locator
        self._outbox = state.outbox
        self._counters = state.counters
        self._checks = checks
        self._proofs = proofs
        self._gossip = gossip
        self._replicas = Replicas(state) if config.replicas > 1 else None
        self._questions: dict[int, _Question] = {}
        self._suspects: dict[bytes, _Suspect] = {}
        self._next_request_id = 0x80000000 | state.config.first_request_id & 0x3FFFFFFF
        self._sweep_s = now_s + config.sweep_s if config.periodic else math.inf
        self._rounds = 0
        self._last_swept_key = b""
        self._swept_moves = state.locator.moves
        self._held_back: dict[Dead, Moves] = {}

    # --- The periodic sweep ---

    def next_sweep_s(self) -> float:
        return self._sweep_s

    def sweep(self, now_s: float) -> None:
        """Examine the next keys, unless a handover runs. The distance doubles with each round."""
        if now_s < self._sweep_s:
            return
        self._sweep_s = now_s + self._config.sweep_s
        still = self._locator.moves == self._swept_moves and self._handover.at_rest
        self._swept_moves = self._locator.moves
        if not still:
            return
        keys = self._store.keys_after(self._last_swept_key, _SWEEP_PAGES * MAX_KEYS_PER_PACKET)
        # Distances 1, 2, 4 … 512, then again from 1.
        unasked = self._check_keys(keys, 1 << self._rounds % 10, now_s)
        done = [key for key in keys if not unasked or key < unasked[0]]
        self._last_swept_key = (
            done[-1] if done and (unasked or len(keys) == _SWEEP_PAGES * MAX_KEYS_PER_PACKET) else b""
        )
        self._rounds += not self._last_swept_key

    # --- Around a handover ---

    def before_handover(self, now_s: float) -> None:
        """Check, after a move, that what leaves is whole; new bursts wait for the answers.

        Only after a single step are the earlier places known.
        """
        moves, before = self._locator.moves, self._locator.before
        if not self._config.migration or abs(moves[0] - before[0]) + abs(moves[1] - before[1]) != 1:
            return
        leaving = {
            name[0]
            for tag, names in names_by_tag(self._store.shares).items()
            if self._locator.home_of_tag(tag) != self._here
            for name in names
        }
        for distance in _DISTANCES:
            self._check_keys(sorted(leaving), distance, now_s, before)
        if self._is_asking:
            self._handover.fresh_from_s = now_s + ANSWER_S

    def release_handover(self) -> None:
        if not self._is_asking:
            self._handover.fresh_from_s = 0.0

    @property
    def _is_asking(self) -> bool:
        return bool(self._questions) or self._checks.asking

    def hold_back(self, burst: MigrateBurst, now_s: float) -> None:
        """Delay a burst of a suspected key: what is probably dead need not follow the box."""
        if not self._suspects or not burst.names:
            return
        key = burst.names[0][0]
        share = self._store.shares.get(key)
        if share and key in self._suspects and self._may_hold_back((key, setting_of(latest_ref(share)))):
            waiting = list(burst.names)
            for name in waiting:
                self._handover.stray(name, now_s + 2 * self._config.confirm_s)
            self._handover.forget(burst, waiting)

    def _may_hold_back(self, suspected: Dead) -> bool:
        """Return True if a setting may be held back: only while the moves are the same, since held back at each move,
        it would never follow the box.
        """
        moves = self._held_back.setdefault(suspected, self._locator.moves)
        while len(self._held_back) > _MOST_HELD_BACK:
            del self._held_back[next(iter(self._held_back))]
        return moves == self._locator.moves

    # --- Questions ---

    def _check_keys(
        self, keys: Iterable[bytes], distance: int, now_s: float, before: Moves | None = None
    ) -> list[bytes]:
        """Check that keys are whole: the own share, and the server ``distance`` further in the ring.

        Return keys beyond the limit. With ``before``, the earlier moves, either place suffices.
        """
        if self._replicas is not None:
            return self._check_keys_with_copies(self._replicas, keys, distance, now_s, before)
        # 1. Count the own share; choose the satellites to ask about the other server.
        self._questions = {n: q for n, q in self._questions.items() if q.asked_s + ANSWER_S > now_s}
        by_place: dict[SatelliteId, tuple[list[bytes], list[int]]] = {}
        places_left: dict[bytes, int] = {}
        servers: dict[bytes, int] = {}
        packets, unasked = 0, list[bytes]()
        for key in keys:
            ref = self._get_ref(key)
            if ref is None:
                continue
            own = self._get_incomplete_server(key)
            if own is not None:
                self._add_suspicion(key, own, now_s)
                continue
            ring = min(ref.tag.servers, ref.chunks)
            server = (ref.tag.server + distance) % ring
            places = self._get_places(ref, server, before) if server != ref.tag.server else []
            # A satellite asked about a full packet of keys already needs another packet.
            new_packets = sum(len(by_place.get(place, ((), ()))[0]) % MAX_KEYS_PER_PACKET == 0 for place in places)
            if not places:
                continue
            if packets + new_packets > MOST_QUESTIONS:
                unasked.append(key)
                continue
            packets += new_packets
            places_left[key] = len(places)
            servers[key] = server
            for place in places:
                place_keys, expected = by_place.setdefault(place, ([], []))
                place_keys.append(key)
                expected.append(_chunks_of(server, ref))
        # 2. Ask each satellite about all its keys, a packet at a time.
        for place, (place_keys, expected) in by_place.items():
            for at in range(0, len(place_keys), MAX_KEYS_PER_PACKET):
                page = slice(at, at + MAX_KEYS_PER_PACKET)
                self._send_question(place, _Question(place_keys[page], expected[page], servers, now_s, places_left))
        return unasked

    def _check_keys_with_copies(
        self, replicas: Replicas, keys: Iterable[bytes], distance: int, now_s: float, before: Moves | None
    ) -> list[bytes]:
        """Do as ``_check_keys`` with CHECKs to the satellites of all copies; a whole copy anywhere ends a suspicion."""
        by_place: dict[SatelliteId, list[Check]] = {}
        places_left: dict[tuple[bytes, int], int] = {}
        question_count, unasked = 0, list[bytes]()

        def on_answer(answer: CheckAnswer, answered_s: float) -> None:
            for check, what in zip(answer.checks, answer.found, strict=True):
                name = check.key, check.server
                if what is CheckResult.WHOLE:
                    places_left[name] = _FOUND
                    self._remove_suspicion(check.key, check.server)
                elif answer.same_moves:
                    places_left[name] -= 1
                    if places_left[name] == 0:
                        self._add_suspicion(check.key, check.server, answered_s)

        for key in keys:
            for check, places in replicas.to_ask(key, distance, before):
                if question_count + len(places) > MOST_QUESTIONS * MAX_CHECKS_PER_PACKET:
                    unasked.append(key)
                    break
                question_count += len(places)
                places_left[key, check.server] = len(places)
                for place in places:
                    by_place.setdefault(place, []).append(check)
        for place, checks in by_place.items():
            self._checks.ask(place, checks, on_answer, now_s)
        return unasked

    def answered(self, packet: Packet, now_s: float) -> None:
        self._on_presences(packet, now_s)
        self.release_handover()

    def _on_presences(self, packet: Packet, now_s: float) -> None:
        question = self._questions.pop(packet.header.request_id, None)
        presences = messages.unpack_presences(packet.body)
        if question is None or len(presences) != len(question.keys):
            return
        same_moves = (packet.header.slot_moves, packet.header.plane_moves) == self._locator.moves
        for key, expected, presence in zip(question.keys, question.expected, presences, strict=True):
            if presence is not None and presence.held >= expected:
                self._remove_suspicion(key, question.servers[key])
                question.lacking[key] = _FOUND
            elif same_moves:
                question.lacking[key] -= 1
                if question.lacking[key] == 0:
                    self._add_suspicion(key, question.servers[key], now_s, presence is None)

    def _send_question(self, place: SatelliteId, question: _Question) -> None:
        number = self._next_request_id
        self._next_request_id = 0x80000000 | (number + 1) & 0x3FFFFFFF
        self._questions[number] = question
        self._counters.add("questions_asked")
        self._outbox.command(Op.HAS, place, number, messages.pack_keys(question.keys), question.asked_s)

    def _get_ref(self, key: bytes) -> ChunkRef | None:
        share = self._store.shares.get(key)
        return ChunkRef.unpack(latest_ref(share)) if share else None

    def _get_incomplete_server(self, key: bytes) -> int | None:
        """Return a server of which some chunks, but not all, are here; other settings do not count."""
        share = self._store.shares[key]
        packed = latest_ref(share)
        ref = ChunkRef.unpack(packed)
        counts: dict[int, int] = {}
        for index, (chunk_ref, _) in share.items():
            if setting_of(chunk_ref) == setting_of(packed):
                server = index % ref.tag.servers
                counts[server] = counts.get(server, 0) + 1
        return min((server for server, count in counts.items() if count < _chunks_of(server, ref)), default=None)

    def _get_places(self, ref: ChunkRef, server: int, before: Moves | None) -> Sequence[SatelliteId]:
        """Return that server's satellites now and before; none if this satellite is among them."""
        tag, places = ref.tag, list[SatelliteId]()
        for moves in dict.fromkeys((self._locator.moves, before or self._locator.moves)):
            try:
                placement = self._sky.placement(tag.strategy, tag.servers)
            except InvalidInput:
                return ()
            places.append(placement.locate(server, (tag.slot_moves, tag.plane_moves), moves))
        return () if self._here in places else tuple(dict.fromkeys(places))

    # --- Suspicions ---

    def next_confirmation_s(self) -> float:
        if not self._suspects:
            return math.inf
        return min([suspect.due_s for suspect in self._suspects.values()])

    def confirm_suspicions(self, now_s: float) -> None:
        """Try to prove losses that are due; drop other suspicions."""
        values = []
        for key in [key for key, suspect in self._suspects.items() if suspect.due_s <= now_s]:
            suspect = self._suspects[key]
            missing = self._get_missing_chunks(key, suspect)
            if not missing or suspect.moves != self._locator.moves or suspect.attempts == _MOST_ATTEMPTS:
                del self._suspects[key]
                continue
            suspect.due_s = now_s + self._config.confirm_s
            suspect.attempts += 1
            share = self._store.shares[key]
            values.append((latest_ref(share), missing))
        if values:
            self._proofs.ask(values, self._on_proof, now_s)

    def _get_missing_chunks(self, key: bytes, suspect: _Suspect) -> list[int]:
        """Return the suspected share's missing chunks, at most a packet's."""
        share = self._store.shares.get(key)
        if not share:
            return []
        packed = latest_ref(share)
        ref = ChunkRef.unpack(packed)
        chunks = range(suspect.server, ref.chunks, ref.tag.servers)
        missing = (index for index in chunks if index not in share or setting_of(share[index][0]) != setting_of(packed))
        return list(islice(missing, 1 if suspect.nothing else MAX_CHECKS_PER_PACKET))

    def _on_proof(self, packed: bytes, lost: bool, now_s: float) -> None:
        key = packed[:KEY_BYTES]
        share = self._store.shares.get(key)
        if self._suspects.pop(key, None) is not None and lost and share:
            dead = [(key, setting_of(latest_ref(share)))]
            self._gossip.purge(dead, now_s)
            self._gossip.notify_ground(dead, now_s)

    def _add_suspicion(self, key: bytes, server: int, now_s: float, nothing: bool = False) -> None:
        if key not in self._suspects:
            self._suspects[key] = _Suspect(server, now_s + self._config.confirm_s, self._locator.moves, nothing)

    def _remove_suspicion(self, key: bytes, server: int) -> None:
        known = self._suspects.get(key)
        if known is not None and known.server == server:
            del self._suspects[key]


def _chunks_of(server: int, ref: ChunkRef) -> int:
    return -(-(ref.chunks - server) // ref.tag.servers)


# --- Repair of copies ---
#
# A satellite asks, for each server's share that it holds whole, the satellite of the *next* copy (after the last copy
# comes the first) if that copy is whole too. So a satellite or plane that came back empty is filled again by the live
# satellites, whether it is read or not. Chunks evicted for lack of room are not pushed back in. During a handover,
# nothing is asked or sent.


class ReplicaRepair:
    def __init__(self, state: SatelliteState, checks: Checks, now_s: float) -> None:
        self._here = state.here
        self._replicas = state.config.eviction.replicas
        self._sweep_s = state.config.eviction.sweep_s
        self._store = state.store
        self._handover = state.handover
        self._locator = state.locator
        self._counters = state.counters
        self._checks = checks
        self._last_swept_key = b""
        self._swept_moves = state.locator.moves
        self._bytes_left = 0
        self._next_s = now_s + self._sweep_s if self._replicas > 1 else math.inf

    def next_timer_s(self) -> float:
        return self._next_s

    def handle_timer(self, now_s: float) -> None:
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._sweep_s
        still = self._locator.moves == self._swept_moves and self._handover.at_rest
        self._swept_moves = self._locator.moves
        if still:
            self._bytes_left = MOST_BYTES
            self._send_checks(now_s)

    def _send_checks(self, now_s: float) -> None:
        """Ask, for the next keys, if each share that is whole here is whole at its next copy's satellite."""
        limit = _REPAIR_PAGES * MAX_CHECKS_PER_PACKET
        keys = self._store.keys_after(self._last_swept_key, limit)
        self._last_swept_key = keys[-1] if len(keys) == limit else b""
        by_place: dict[SatelliteId, list[Check]] = {}
        question_count = 0
        for key in keys:
            for place, check in self._get_next_copies(key):
                by_place.setdefault(place, []).append(check)
                question_count += 1
            if question_count >= limit:
                self._last_swept_key = key
                break
        for place, checks in by_place.items():
            self._checks.ask(place, checks, self._send_lacking, now_s)

    def _get_next_copies(self, key: bytes) -> list[tuple[SatelliteId, Check]]:
        """Return a key's shares that are whole and belong here, each with the next copy's satellite."""
        copies = []
        for (_, replica), (check, indices) in self._find_whole_shares(key).items():
            ref = self._store.shares[key][indices[0]][0]
            try:
                place = self._locator.home(as_copy(ref, (replica + 1) % self._replicas))
                ours = self._locator.home(ref) == self._here
            except InvalidInput:  # a box too small for all copies
                continue
            if ours and place != self._here:
                copies.append((place, check))
        return copies

    def _find_whole_shares(self, key: bytes) -> dict[tuple[int, int], tuple[Check, list[int]]]:
        """Return a key's whole shares, by server and replica, with their chunk indices."""
        share = self._store.shares.get(key)
        if not share:
            return {}
        latest = latest_ref(share)
        servers = ChunkRef.unpack(latest).tag.servers
        groups: dict[tuple[int, int], list[int]] = {}
        for index, (ref, _) in sorted(share.items()):
            if setting_of(ref) == setting_of(latest):
                groups.setdefault((index % servers, ref[REPLICA_OFFSET]), []).append(index)
        checks = {name: (Check.of(latest, name[0]), indices) for name, indices in sorted(groups.items())}
        return {name: entry for name, entry in checks.items() if len(entry[1]) == entry[0].expected}

    def _send_lacking(self, answer: CheckAnswer, now_s: float) -> None:
        """Queue shares that a satellite lacks and has room for, as its copy."""
        if not answer.same_moves:
            return
        for check, what in zip(answer.checks, answer.found, strict=True):
            if what is not CheckResult.LACKING or self._bytes_left <= 0:
                continue
            for (server, replica), (ours, indices) in self._find_whole_shares(check.key).items():
                copy = (replica + 1) % self._replicas
                if server != check.server or ours.setting != check.setting:
                    continue
                ref = self._store.shares[check.key][indices[0]][0]
                if self._locator.home(as_copy(ref, copy)) == answer.place:
                    self._bytes_left -= len(indices) * (check.length_bytes + CHUNK_REF_BYTES)
                    self._counters.add("copies_mended", len(indices))
                    self._handover.enqueue(answer.place, [(check.key, index, copy) for index in indices])
