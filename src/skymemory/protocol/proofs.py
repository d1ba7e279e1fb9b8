"""Is a chunk really nowhere? What a satellite must know before it drops the rest of a value that others hold, too.

That a chunk is not where it belongs is no proof of its loss: it may be on its way there, or with a satellite that could
not hand it over, or be another copy's. So all satellites are asked where it can have been since its setting, of every
copy and chunk by chunk (CHECK). Lost is what all of them lack who answer within ``PROOF_S``, at one count of moves,
with nothing of it under way. Where one is silent nothing is proved, and nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from skymemory.constellation.torus import SatelliteId
from skymemory.placement.locate import Moves
from skymemory.protocol.checks import MAX_CHECKS_PER_PACKET, Answer, Check, Checks, Found
from skymemory.protocol.dead import setting_of
from skymemory.protocol.messages import KEY_BYTES
from skymemory.protocol.motion import SkyMap
from skymemory.protocol.transfer import PROOF_S
from skymemory.protocol.whereabouts import Whereabouts
from skymemory.protocol.wire import TAG_BYTES, TAG_OFFSET, ChunkRef

MOST_QUESTIONS = 128
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

    def __init__(
        self, here: SatelliteId, replicas: int, whereabouts: Whereabouts, sky: SkyMap, checks: Checks
    ) -> None:  # fmt: skip
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
            if ref.chunks > _MOST_CHUNKS or questions > MOST_QUESTIONS or len(places) > _MOST_PLACEMENTS:
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
