"""Where a chunk with a given placement tag must be, as one satellite works it out from the clock."""

from __future__ import annotations

import math

from skymemory.constellation.torus import SatelliteId
from skymemory.placement.locate import Moves, Placement
from skymemory.protocol.clock import MoveClock, SkyMap
from skymemory.protocol.congestion import Throttle
from skymemory.protocol.wire import TAG_BYTES, TAG_OFFSET

MOST_PUSHED_AT_ONCE = 10_000
"""Moves by which one ADVANCE may change what is added to the clock, each way."""
MOST_PUSHED = 1_000_000
"""Moves that may be added to the clock in all, each way: as many as a plan holds."""
_PUSHES_AT_ONCE = 16
"""So many changes may follow on each other at once, then one a second: each may cost a handover of all there is."""
_REMEMBERED_TAGS = 65_536


class Whereabouts:
    """The current moves, and the satellite of every placement tag at them, remembered until the box moves."""

    def __init__(self, here: SatelliteId, sky: SkyMap, clock: MoveClock, now_s: float) -> None:
        self._here = here
        self._sky = sky
        self._clock = clock
        self._homes: dict[bytes, SatelliteId] = {}
        self.settled: set[bytes] = set()
        """Packed tags whose chunks are known to belong here now."""
        self.moves: Moves = clock.moves(now_s)
        self.before: Moves = self.moves
        """The moves that held until they last changed."""
        self.next_move_s = clock.next_move_s(now_s)
        self._pushing = Throttle(_PUSHES_AT_ONCE, 0.0)

    @property
    def pushed(self) -> Moves:
        """What operators have added to the clock."""
        return self._clock.pushed

    def may_push_to(self, pushed: Moves, now_s: float, most: int = MOST_PUSHED_AT_ONCE) -> bool:
        """Whether ``push_to`` may follow: not too far, in all or by more than ``most`` at once, and not too often.
        What is so already costs nothing.
        """
        if pushed == self.pushed:
            return True
        steps = (abs(new - old) for new, old in zip(pushed, self.pushed, strict=True))
        if max(map(abs, pushed)) > MOST_PUSHED or max(steps) > most or not self._pushing.is_open(now_s):
            return False
        self._pushing.done(now_s)
        return True

    def push_to(self, pushed: Moves) -> None:
        """Set what is added to the clock (absolute: a repeat changes nothing). ``follow`` makes it count."""
        self._clock = self._clock.push(pushed[0] - self.pushed[0], pushed[1] - self.pushed[1])

    def follow(self, now_s: float) -> bool:
        """Bring the moves up to date; whether they changed."""
        self.next_move_s = self._clock.next_move_s(now_s)
        moves = self._clock.moves(now_s)
        if moves == self.moves:
            return False
        self.before, self.moves = self.moves, moves
        self._forget()
        return True

    def interval_s(self, now_s: float) -> float:
        """How long until the box moves again: the mean of the next two times. Slot and plane moves may follow on each
        other at once, and what the second finds unsent goes where that one wants it.
        """
        if self.next_move_s is None:
            return math.inf
        following_s = self._clock.next_move_s(self.next_move_s)
        return math.inf if following_s is None else (following_s - now_s) / 2

    def moves_since(self, set_moves: Moves, placement: Placement, now_s: float) -> list[Moves]:
        """Counts of moves that name every satellite where a chunk that was set at ``set_moves`` can have been left."""
        return self._clock.moves_since(set_moves, placement, now_s)

    def is_past(self, moves: Moves) -> bool:
        """Whether who counts so many moves is behind us (a box that goes back makes who is ahead look so)."""
        return sum(moves) < sum(self.moves)

    def home(self, ref: bytes) -> SatelliteId:
        """Where the chunk with this packed reference must be now.

        Raises:
            InvalidInput: its placement is impossible here (unknown strategy, more servers than satellites).
        """
        return self.home_of_tag(ref[TAG_OFFSET : TAG_OFFSET + TAG_BYTES])

    def home_of_tag(self, tag: bytes) -> SatelliteId:
        found = self._homes.get(tag)
        if found is None:
            if len(self._homes) > _REMEMBERED_TAGS:
                self._forget()
            servers, number = int.from_bytes(tag[0:2], "big"), int.from_bytes(tag[2:4], "big")
            set_slot_moves = int.from_bytes(tag[8:12], "big", signed=True)
            set_plane_moves = int.from_bytes(tag[12:16], "big", signed=True)
            placement = self._sky.placement(tag[4], servers)
            found = placement.locate(number - 1, (set_slot_moves, set_plane_moves), self.moves, tag[5])
            self._homes[tag] = found
            if found == self._here:
                self.settled.add(tag)
        return found

    def _forget(self) -> None:
        self._homes.clear()
        self.settled.clear()
