"""Movement of the box over time, and the satellite of each server: pure functions of the clock.

Slot moves and plane moves count how often the overhead point passed to the next slot or plane since the epoch.
"""

from __future__ import annotations

import math
from collections import Counter as Tally
from collections import deque
from collections.abc import Container
from dataclasses import dataclass, replace
from itertools import chain

from skymemory.constellation.ground_track import Track
from skymemory.constellation.sight import Sight
from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.errors import InvalidInput
from skymemory.metrics import Counters
from skymemory.placement.layout import Strategy
from skymemory.placement.locate import Moves, Placement
from skymemory.protocol.congestion import Throttle
from skymemory.protocol.wire import TAG_BYTES, TAG_OFFSET

STRATEGY_CODES: dict[Strategy, int] = {"rotation": 1, "hop": 2, "rotation_hop": 3, "cost": 4, "baseline": 5}
"""Wire numbers; frozen."""
STRATEGY_NAMES = {code: name for name, code in STRATEGY_CODES.items()}
DISPLACEMENTS = (0, 1, -1, 2, -2, 3, -3, 5, -5, 8, -8, 12, -12, 18, -18)
"""Planes to the south by which a box is displaced around dead satellites; indexed by its strategy's upper four bits.
Frozen.
"""
_DISPLACEMENT_BITS = 4
PROOF_S = 0.8
"""Seconds within which a loss must be proved: copies outlive their handover by 1 s."""
HANDED_OVER_S = 0.3
"""Seconds after a move during which readers look first in the old places."""
MOST_PUSHED_AT_ONCE = 10_000
MOST_PUSHED = 1_000_000
LISTENERS = 5
TOLERATED_STEPS = 1

_ROUNDING_STEPS = 1 << 12
_FINEST_AT_S = 1.0
_MOST_EARLIER = 256
_FIRST_SPAN_S, _LONGEST_SPAN_S = 600.0, 1e8
_PUSHES_AT_ONCE = 16
_REMEMBERED_TAGS = 65_536
_REMEMBERED_MOVES = 4
_LEAST_AGREEING = 2
_REPORT_KEPT_S = 30.0


@dataclass(frozen=True, slots=True)
class MoveClock:
    """Moves as a function of time. ``time_scale`` 0 stands still, 1 is real time.

    The periods are seconds between moves in real time; a ``track`` replaces them.
    """

    epoch_s: float = 0.0
    slot_period_s: float = math.inf
    plane_period_s: float = math.inf
    time_scale: float = 0.0
    pushed: Moves = (0, 0)
    track: Track | None = None

    def sky_s(self, now_s: float) -> float:
        return (now_s - self.epoch_s) * self.time_scale

    def moves(self, now_s: float) -> Moves:
        """Return the moves since the epoch, with those that operators pushed."""
        elapsed_s = (now_s - self.epoch_s) * self.time_scale
        if self.track is not None:
            slot_moves, plane_moves = self.track.moves(elapsed_s)
            return self.pushed[0] + slot_moves, self.pushed[1] + plane_moves
        return (
            self.pushed[0] + math.floor(elapsed_s / self.slot_period_s),
            self.pushed[1] + math.floor(elapsed_s / self.plane_period_s),
        )

    def next_move_s(self, now_s: float) -> float | None:
        """Return a time at which the moves have just changed, never too early by rounding."""
        if self.time_scale <= 0:
            return None
        moves, time_s = self.moves(now_s), now_s
        least_s = 0.0 if self.track is None else _FINEST_AT_S / self.time_scale
        while (time_s := self._next_edge_s(time_s)) < math.inf:
            step_s = math.ulp(max(abs(time_s), abs(self.epoch_s), least_s))
            most_s = time_s + _ROUNDING_STEPS * step_s
            while time_s < most_s:
                if self.moves(time_s) != moves:
                    return time_s
                time_s += step_s
                step_s *= 2
        return None

    def moves_before(self, now_s: float, most: int) -> list[Moves]:
        """Return up to ``most`` earlier counts, latest first; some repeat if a track turns back."""
        if self.time_scale <= 0 or most <= 0:
            return []
        moves, span_s = self.moves(now_s), _FIRST_SPAN_S / self.time_scale
        while span_s < _LONGEST_SPAN_S:
            before = self.moves(now_s - span_s)
            if abs(moves[0] - before[0]) + abs(moves[1] - before[1]) >= most:
                break
            span_s *= 2
        time_s: float | None = now_s - span_s
        counts: deque[Moves] = deque(maxlen=most + 1)
        while time_s is not None and time_s <= now_s:
            counts.appendleft(self.moves(time_s))
            time_s = self.next_move_s(time_s)
        return list(counts)[1:]

    def moves_since(self, set_moves: Moves, placement: Placement, now_s: float) -> list[Moves]:
        """Return counts, latest first, that cover every satellite that may hold a chunk set at ``set_moves``.

        If unknown (after a push) or too many, they cover every place that the chunk can ever have.
        """
        known = [self.moves(now_s), *self.moves_before(now_s, _MOST_EARLIER)]
        if set_moves not in known or any(self.pushed):
            return [known[0], *placement.moves_of_all_places(set_moves)]
        while known[-1] != set_moves:
            known.pop()
        return list(dict.fromkeys(known))

    def _next_edge_s(self, now_s: float) -> float:
        """Return when the overhead point next passes to another slot or plane, up to rounding."""
        elapsed_s = self.sky_s(now_s)
        if self.track is not None:
            next_s = self.track.next_crossing_s(elapsed_s)
        else:
            periods_s = [period_s for period_s in (self.slot_period_s, self.plane_period_s) if math.isfinite(period_s)]
            next_s = min(
                ((math.floor(elapsed_s / period_s) + 1) * period_s for period_s in periods_s), default=math.inf
            )
        return max(self.epoch_s + next_s / self.time_scale, math.nextafter(now_s, math.inf))

    def push(self, slot_moves: int, plane_moves: int) -> MoveClock:
        return replace(self, pushed=(self.pushed[0] + slot_moves, self.pushed[1] + plane_moves))


def displaced(strategy: int, displacement: int) -> int:
    return strategy & ((1 << _DISPLACEMENT_BITS) - 1) | displacement << _DISPLACEMENT_BITS


def placement_name(code: int) -> str:
    """Return a code's name, ``rotation_hop+2`` if displaced by two planes to the south.

    Raises:
        KeyError: no such code.
    """
    planes = DISPLACEMENTS[_displacement_of(code)]
    return STRATEGY_NAMES[displaced(code, 0)] + (f"{planes:+d}" if planes else "")


def placement_code(name: str) -> int:
    """Invert ``placement_name``.

    Raises:
        KeyError, ValueError: no such name.
    """
    at = max(name.find("+"), name.find("-"))
    strategy, planes = (name, 0) if at < 0 else (name[:at], int(name[at:]))
    return displaced(STRATEGY_CODES[strategy], DISPLACEMENTS.index(planes))  # type: ignore[index]


def _displacement_of(code: int) -> int:
    displacement = code >> _DISPLACEMENT_BITS
    if not 0 <= displacement < len(DISPLACEMENTS):
        raise KeyError(code)
    return displacement


class SkyMap:
    """Cached mapping of placements to satellites; the link delays are for ``cost``."""

    def __init__(
        self,
        torus: Torus,
        centre: SatelliteId,
        slot_link_s: float = 1.0,
        plane_link_s: float = 1.0,
        sight: Sight | None = None,
    ) -> None:
        self.torus = torus
        self.centre = centre
        self.sight = sight
        self._links_s = (slot_link_s, plane_link_s)
        self._placements: dict[tuple[int, int], Placement] = {}
        self._located: dict[tuple[int, int, Moves, Moves, int], tuple[SatelliteId, ...]] = {}

    def placement(self, strategy: int, servers: int) -> Placement:
        """Return the placement of a strategy code."""
        placement = self._placements.get((strategy, servers))
        if placement is None:
            if len(self._placements) > 256:
                self._placements.clear()
            try:
                name, planes = STRATEGY_NAMES[displaced(strategy, 0)], DISPLACEMENTS[_displacement_of(strategy)]
            except KeyError:
                raise InvalidInput(f"placement strategy {strategy}: expected one of {STRATEGY_NAMES}") from None
            centre = self.torus.wrap(self.centre.plane + planes, self.centre.slot)
            placement = Placement.of(name, servers, self.torus, centre, *self._links_s)
            self._placements[strategy, servers] = placement
        return placement

    def servers_at(
        self, strategy: int, servers: int, set_moves: Moves, now_moves: Moves, replica: int = 0
    ) -> tuple[SatelliteId, ...]:
        """Return the satellite of each server at ``now_moves``, of a value set at ``set_moves``; ``replica``: number of
        the copy.
        """
        key = (strategy, servers, set_moves, now_moves, replica)
        satellites = self._located.get(key)
        if satellites is None:
            if len(self._located) > 1024:
                self._located.clear()
            placement = self.placement(strategy, servers)
            satellites = (
                tuple(placement.locate(server, set_moves, now_moves, replica) for server in range(servers))
                if replica
                else placement.locate_all(set_moves, now_moves)
            )
            self._located[key] = satellites
        return satellites

    def displacement_around(
        self, strategy: int, servers: int, moves: Moves, chunks: int, replicas: int, dead: Container[SatelliteId]
    ) -> int:
        """Return the code of the smallest displacement that leaves each chunk a live copy; otherwise ``strategy``."""
        for displacement in range(len(DISPLACEMENTS)):
            code = displaced(strategy, displacement)
            copies = [self.servers_at(code, servers, moves, moves, replica) for replica in range(replicas)]
            if all(any(place not in dead for place in places) for places in list(zip(*copies, strict=True))[:chunks]):
                return code
        return strategy

    def displaced_boxes(self, strategy: int, servers: int, moves: Moves) -> list[SatelliteId]:
        """Return the satellites of the box and of boxes displaced by at most its height."""
        height = self.placement(strategy, servers).box.height
        codes = [displaced(strategy, at) for at, planes in enumerate(DISPLACEMENTS) if abs(planes) <= height]
        boxes = (self.placement(code, servers).box_satellites(moves) for code in codes)
        return list(dict.fromkeys(chain.from_iterable(boxes)))

    def links_s(self, start: SatelliteId, target: SatelliteId) -> float:
        slots, planes = self.torus.delta(start, target)
        return abs(slots) * self._links_s[0] + abs(planes) * self._links_s[1]

    def centre_at(self, moves: Moves) -> SatelliteId:
        return self.torus.wrap(self.centre.plane + moves[1], self.centre.slot - moves[0])


class Locator:
    """Count of moves at a satellite, and the satellite of each placement tag."""

    def __init__(self, own: SatelliteId, sky: SkyMap, clock: MoveClock, now_s: float) -> None:
        self._here = own
        self._sky = sky
        self._clock = clock
        self._homes: dict[bytes, SatelliteId] = {}
        self.settled: set[bytes] = set()
        self.moves: Moves = clock.moves(now_s)
        self.before: Moves = self.moves
        self.next_move_s = clock.next_move_s(now_s)
        self._push_throttle = Throttle(_PUSHES_AT_ONCE, 0.0)

    @property
    def pushed(self) -> Moves:
        return self._clock.pushed

    def may_push_to(self, pushed: Moves, now_s: float, most: int = MOST_PUSHED_AT_ONCE) -> bool:
        """Return True if an operator may set these total pushed moves: not too far at once, nor too often."""
        if pushed == self.pushed:
            return True
        steps = (abs(new - old) for new, old in zip(pushed, self.pushed, strict=True))
        if max(map(abs, pushed)) > MOST_PUSHED or max(steps) > most or not self._push_throttle.is_open(now_s):
            return False
        self._push_throttle.done(now_s)
        return True

    def push_to(self, pushed: Moves) -> None:
        """Set the total pushed moves (idempotent), effective from the next ``follow``."""
        self._clock = self._clock.push(pushed[0] - self.pushed[0], pushed[1] - self.pushed[1])

    def follow(self, now_s: float) -> bool:
        """Update ``moves`` by the clock. Return True if the box has moved."""
        self.next_move_s = self._clock.next_move_s(now_s)
        moves = self._clock.moves(now_s)
        if moves == self.moves:
            return False
        self.before, self.moves = self.moves, moves
        self._clear_homes()
        return True

    def next_timer_s(self) -> float:
        return math.inf if self.next_move_s is None else self.next_move_s

    def interval_s(self, now_s: float) -> float:
        """Return the time until the next move, averaged over two: slot and plane moves may coincide."""
        if self.next_move_s is None:
            return math.inf
        following_s = self._clock.next_move_s(self.next_move_s)
        return math.inf if following_s is None else (following_s - now_s) / 2

    def moves_since(self, set_moves: Moves, placement: Placement, now_s: float) -> list[Moves]:
        return self._clock.moves_since(set_moves, placement, now_s)

    def is_past(self, moves: Moves) -> bool:
        return sum(moves) < sum(self.moves)

    def home(self, ref: bytes) -> SatelliteId:
        """Return the satellite to which a chunk belongs now."""
        return self.home_of_tag(ref[TAG_OFFSET : TAG_OFFSET + TAG_BYTES])

    def home_of_tag(self, tag: bytes) -> SatelliteId:
        """Return where chunks with this packed ``PlacementTag`` belong now, cached."""
        satellite = self._homes.get(tag)
        if satellite is None:
            if len(self._homes) > _REMEMBERED_TAGS:
                self._clear_homes()
            servers, number = int.from_bytes(tag[0:2], "big"), int.from_bytes(tag[2:4], "big")
            set_slot_moves = int.from_bytes(tag[8:12], "big", signed=True)
            set_plane_moves = int.from_bytes(tag[12:16], "big", signed=True)
            placement = self._sky.placement(tag[4], servers)
            satellite = placement.locate(number - 1, (set_slot_moves, set_plane_moves), self.moves, tag[5])
            self._homes[tag] = satellite
            if satellite == self._here:
                self.settled.add(tag)
        return satellite

    def _clear_homes(self) -> None:
        self._homes.clear()
        self.settled.clear()


class FollowedClock:
    """A ground host's count of moves: its own clock, corrected by a majority of the satellites heard last, since an
    operator may push the box. A single satellite's report only adds a place to look.
    """

    def __init__(self, clock: MoveClock, counters: Counters | None = None) -> None:
        self._own_clock = clock
        self._clock = clock
        self._counters = counters if counters is not None else Counters()
        self._latest: Moves | None = None
        self._same_from_s = self._same_until_s = math.inf
        self._moves_since_set: dict[tuple[Moves, str, int], list[Moves]] = {}
        self._moves_since_valid_at: tuple[MoveClock, Moves] | None = None
        self._earlier_moves: deque[Moves] = deque(maxlen=_REMEMBERED_MOVES)
        self._reports: dict[SatelliteId, tuple[Moves, float]] = {}

    def moves(self, now_s: float) -> Moves:
        """Return the box's moves by the corrected clock, cached until the next move."""
        if self._latest is not None and self._same_from_s <= now_s < self._same_until_s:
            return self._latest
        moves = self._clock.moves(now_s)
        next_s = self._clock.next_move_s(now_s)
        self._same_from_s, self._same_until_s = now_s, math.inf if next_s is None else next_s
        if moves != self._latest:
            if self._latest is None:  # the moves before the start follow from the clock
                self._earlier_moves.extend(dict.fromkeys(self._clock.moves_before(now_s, _REMEMBERED_MOVES)))
            if moves in self._earlier_moves:
                self._earlier_moves.remove(moves)
            if self._latest is not None:
                self._earlier_moves.appendleft(self._latest)
            self._latest = moves
        return moves

    def to_read_at(self, set_moves: Moves, now_s: float) -> Moves:
        """Return the moves at which to look first: those of ``HANDED_OVER_S`` ago, whose handovers are complete, but
        none from before the SET.
        """
        moves, looked_at_s = self.moves(now_s), now_s - HANDED_OVER_S
        if looked_at_s >= self._same_from_s:
            return moves
        before = self._clock.moves(looked_at_s)
        while any(
            (now - then) * (then_set - then) > 0 for now, then, then_set in zip(moves, before, set_moves, strict=True)
        ):
            next_s = self._clock.next_move_s(looked_at_s)
            if next_s is None or next_s >= now_s:
                return moves
            looked_at_s, before = next_s, self._clock.moves(next_s)
        return before

    def at(self, time_s: float) -> Moves:
        return self._clock.moves(time_s)

    def moves_before(self, now_s: float, most: int) -> list[Moves]:
        return self._clock.moves_before(now_s, most)

    def sky_s(self, now_s: float) -> float:
        return self._clock.sky_s(now_s)

    def report(self, satellite: SatelliteId, moves: Moves, round_trip_s: float, now_s: float) -> None:
        """Record the moves in a satellite's answer, right if they were so a round trip ago. A majority corrects this
        clock.
        """
        ours = self.moves(now_s)
        if moves == ours or moves == self._clock.moves(now_s - round_trip_s):
            added = self._adopted_push
        else:
            base = self._own_clock.moves(now_s)
            added = moves[0] - base[0], moves[1] - base[1]
        self._reports.pop(satellite, None)
        self._reports[satellite] = added, now_s
        if len(self._reports) > LISTENERS:
            del self._reports[next(iter(self._reports))]
        if added != self._adopted_push:
            self._adopt_majority(now_s)
            agreed = self.moves(now_s)
            if max(abs(moves[0] - agreed[0]), abs(moves[1] - agreed[1])) > TOLERATED_STEPS:
                self._counters.add("clocks_beyond_bound")

    @property
    def _adopted_push(self) -> Moves:
        now, base = self._clock.pushed, self._own_clock.pushed
        return now[0] - base[0], now[1] - base[1]

    def _adopt_majority(self, now_s: float) -> None:
        """Correct the clock if most satellites heard recently report the same push."""
        reports = [added for added, reported_s in self._reports.values() if reported_s >= now_s - _REPORT_KEPT_S]
        added, count = Tally(reports).most_common(1)[0]
        if added != self._adopted_push and count >= _LEAST_AGREEING and 2 * count > len(reports):
            self._clock = self._own_clock.push(*added)
            self._same_from_s = self._same_until_s = math.inf
            self._counters.add("clock_corrected")
            self.moves(now_s)

    def nearby(self, now_s: float) -> list[Moves]:
        """Return the moves at which to look for a chunk, the current first, since clocks differ."""
        r, p = self.moves(now_s)
        base = self._own_clock.moves(now_s)
        reported = [(base[0] + slots, base[1] + planes) for (slots, planes), _ in reversed(self._reports.values())]
        # A chunk may have been left at an earlier count, or be expected already where a clock is ahead.
        return list(
            dict.fromkeys([(r, p), *self._earlier_moves, *reported, (r - 1, p), (r, p - 1), (r + 1, p), (r, p + 1)])
        )

    def everywhere(self, now_s: float, set_moves: Moves, placement: Placement) -> list[Moves]:
        """Return counts that cover every satellite that may hold a chunk set at ``set_moves``."""
        value = set_moves, placement.strategy, placement.servers
        if self._moves_since_valid_at != (self._clock, self.moves(now_s)):
            self._moves_since_set, self._moves_since_valid_at = {}, (self._clock, self.moves(now_s))
        if value not in self._moves_since_set:
            self._moves_since_set[value] = self._clock.moves_since(set_moves, placement, now_s)
        return list(dict.fromkeys([*self.nearby(now_s), *self._moves_since_set[value]]))
