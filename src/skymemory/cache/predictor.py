"""Prediction of recurring prompts from the times of their sightings; has no clock.

A *habit* is a prompt (the blocks that its sightings share) with a local time of day and days. Sightings on a single day
predict nothing. Habits that share less than half of their blocks are separate: a common system prompt merges no
documents. Memory must hold a day's prompts (for weekly habits, a week's).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from skymemory.errors import InvalidInput

DAY_S = 86_400.0
_FOLLOW = 0.3  # weight of a new sighting in a habit's time of day


@dataclass(frozen=True, slots=True)
class Expectation:
    """Blocks expected at about ``at_s``; ``weight`` in decayed days, or weeks."""

    keys: tuple[bytes, ...]
    at_s: float
    weight: float


class Predictor:
    """Predictor of prompts; all times are seconds of one clock. Days begin at multiples of ``day_s``, or at midnight in
    ``zone`` (times are then Unix time).
    """

    def __init__(
        self,
        *,
        decay: float = 0.7,
        least_weight: float = 0.9,
        tolerance_s: float = 1800.0,
        capacity_blocks: int = 100_000,
        day_s: float = DAY_S,
        zone: str | None = None,
    ) -> None:
        """``decay``: factor of a weight per day, below ``least_weight``, so that a single sighting never suffices.
        ``tolerance_s``: largest distance from a habit's time.
        """
        if not 0 < decay < least_weight:
            raise InvalidInput(f"decay {decay} and least weight {least_weight}: expected 0 < decay < least weight")
        if zone is not None and day_s != DAY_S:
            raise InvalidInput(f"days of {day_s} s in {zone}: a time zone has days of {DAY_S:.0f} s")
        if not 0 < tolerance_s < day_s / 2 or capacity_blocks < 1:
            raise InvalidInput(
                f"tolerance of {tolerance_s} s, {capacity_blocks} blocks: "
                f"expected less than half a day of {day_s} s, and at least one block"
            )
        self._decay = decay
        self._least_weight = least_weight
        self._tolerance_s = tolerance_s
        self._capacity_blocks = capacity_blocks
        self._day_s = day_s
        self._local = LocalTime(zone)
        self._by_root: dict[bytes, list[Habit]] = {}  # habits by first block
        self._once: OrderedDict[Habit, None] = OrderedDict()  # seen on a single day
        self._recurring: OrderedDict[Habit, None] = OrderedDict()
        self._once_blocks = 0
        self._recurring_blocks = 0

    @property
    def blocks(self) -> int:
        return self._once_blocks + self._recurring_blocks

    def record_prompt(self, keys: Sequence[bytes], at_s: float) -> None:
        """Record a sighting, in its habit or a new habit."""
        chain = tuple(keys[: self._capacity_blocks])
        if not chain:
            return
        local_s = self._local.to_local(at_s)
        habit = self._habit_of(chain, local_s)
        if habit is None:
            day = math.floor(local_s / self._day_s)
            habit = Habit(chain, local_s - day * self._day_s, day, day)
        else:
            self._take_out(habit)
            self._refresh(habit, chain, local_s)
        self._put_in(habit)
        self._make_room()

    def expected(self, now_s: float, horizon_s: float) -> list[Expectation]:
        """Return the prompts expected within ``horizon_s``, soonest first."""
        expectations = [self._next(habit, now_s, now_s + horizon_s) for habit in self._recurring]
        return sorted((next_one for next_one in expectations if next_one), key=lambda expectation: expectation.at_s)

    def _next(self, habit: Habit, now_s: float, until_s: float) -> Expectation | None:
        local_now_s = self._local.to_local(now_s)
        today = math.floor(local_now_s / self._day_s)
        first = max(math.ceil((local_now_s - habit.time_s) / self._day_s), habit.day + 1)
        for day in range(first, first + WEEK_DAYS):
            at_s = self._local.from_local(day * self._day_s + habit.time_s)
            if at_s >= until_s:
                break
            weight = habit.weight_on(day, today=today, decay=self._decay, least_weight=self._least_weight)
            if weight is not None and at_s >= now_s:
                return Expectation(habit.keys, at_s, weight)
        return None

    @property
    def zone(self) -> str | None:
        return self._local.zone

    @property
    def habits(self) -> list[Habit]:
        """All habits, each kind in order of eviction; read-only."""
        return [*self._once, *self._recurring]

    def restore(self, habits: Iterable[Habit]) -> None:
        for habit in habits:
            self._put_in(habit)
        self._make_room()

    def _habit_of(self, chain: tuple[bytes, ...], at_s: float) -> Habit | None:
        """Return the habit of a sighting: most common blocks, at a similar time of day."""
        best, longest = None, 0
        for habit in self._by_root.get(chain[0], ()):
            shared = _shared(habit.keys, chain)
            off_s = abs(at_s - self._day_of(habit, at_s) * self._day_s - habit.time_s)
            if off_s <= self._tolerance_s and 2 * shared >= min(len(habit.keys), len(chain)) and shared > longest:
                best, longest = habit, shared
        return best

    def _day_of(self, habit: Habit, at_s: float) -> int:
        return round((at_s - habit.time_s) / self._day_s)

    def _refresh(self, habit: Habit, chain: tuple[bytes, ...], at_s: float) -> None:
        habit.keys = chain[: _shared(habit.keys, chain)]
        day = self._day_of(habit, at_s)
        if day > habit.day:
            habit.time_s += _FOLLOW * (at_s - day * self._day_s - habit.time_s)
            habit.record_day(day)

    def _put_in(self, habit: Habit) -> None:
        siblings = self._by_root.setdefault(habit.keys[0], [])
        if habit not in siblings:
            siblings.append(habit)
        if habit.recurs:
            self._recurring[habit] = None
            self._recurring_blocks += len(habit.keys)
        else:
            self._once[habit] = None
            self._once_blocks += len(habit.keys)

    def _take_out(self, habit: Habit) -> None:
        if habit in self._recurring:
            del self._recurring[habit]
            self._recurring_blocks -= len(habit.keys)
        else:
            del self._once[habit]
            self._once_blocks -= len(habit.keys)

    def _make_room(self) -> None:
        while self._recurring_blocks > max(1, self._capacity_blocks * 3 // 4) and len(self._recurring) > 1:
            self._forget(next(iter(self._recurring)))
        while self.blocks > self._capacity_blocks:
            self._forget(next(iter(self._once or self._recurring)))

    def _forget(self, habit: Habit) -> None:
        self._take_out(habit)
        root = habit.keys[0]
        siblings = self._by_root[root]
        siblings.remove(habit)
        if not siblings:
            del self._by_root[root]


def _shared(first: Sequence[bytes], second: Sequence[bytes]) -> int:
    """Return the common prefix's length; equal chained hashes imply equal prefixes."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[middle - 1] == second[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


# --- one habit: is it expected on a given day? ---
#
# The rule that would have been right more often in the last three weeks decides for each habit:
# - daily: expected while the decayed number of its days is high enough;
# - weekly: expected if it occurred on most of the last three days of this weekday, and on at least two.


WEEK_DAYS = 7
_WEEKS = 3
_JUDGED_DAYS = 3 * WEEK_DAYS
KEPT_DAYS = _JUDGED_DAYS + _WEEKS * WEEK_DAYS


@dataclass(slots=True, eq=False)
class Habit:
    """Recurring prompt. Days are day numbers; ``time_s`` is local."""

    keys: tuple[bytes, ...]
    time_s: float
    day: int
    first_day: int
    seen: int = 1
    """Bit n is set if it was seen on day - n."""

    @property
    def recurs(self) -> bool:
        return self.seen != 1

    def record_day(self, day: int) -> None:
        self.seen = (self.seen << min(day - self.day, KEPT_DAYS) | 1) & (1 << KEPT_DAYS) - 1
        self.day = day

    def was_seen(self, day: int) -> bool:
        return day <= self.day and bool(self.seen >> (self.day - day) & 1)

    def weight_on(self, day: int, *, today: int, decay: float, least_weight: float) -> float | None:
        """Return how strongly the habit suggests ``day``: the decayed count of days with a sighting or, if weeks
        predict better, of weeks; None below ``least_weight``.
        """
        if day - self.day > KEPT_DAYS:
            return None
        weeks = self._weeks(day)
        if self._weekly_is_better(today, decay, least_weight):
            return float(sum(weeks)) if sum(weeks) >= 2 and _most(weeks) else None
        weight = next((weight for at, weight in self._weights(day, decay) if at == day), 0.0)
        return weight if weight >= least_weight else None

    def _weekly_is_better(self, today: int, decay: float, least_weight: float) -> bool:
        """Return True if the weekly rule was wrong less often lately than the daily."""
        daily_wrong = weekly_wrong = 0
        for day, weight in self._weights(today - 1, decay):
            weeks = self._weeks(day)
            if day >= today - _JUDGED_DAYS and weeks:
                occurred = self.was_seen(day)
                daily_wrong += (weight >= least_weight) != occurred
                weekly_wrong += _most(weeks) != occurred
        return weekly_wrong < daily_wrong

    def _weights(self, last_day: int, decay: float) -> Iterator[tuple[int, float]]:
        """Yield each day with the decayed weight of the days before it."""
        weight = 0.0
        for day in range(max(self.first_day, self.day - KEPT_DAYS + 1), last_day + 1):
            yield day, weight
            weight = (weight + self.was_seen(day)) * decay

    def _weeks(self, day: int) -> list[bool]:
        oldest = max(self.first_day, self.day - KEPT_DAYS + 1)
        before = (day - WEEK_DAYS * number for number in range(1, _WEEKS + 1))
        return [self.was_seen(at) for at in before if at >= oldest]


def _most(weeks: list[bool]) -> bool:
    return 2 * sum(weeks) > len(weeks)


_EPOCH = datetime(1970, 1, 1)


class LocalTime:
    """Conversion of Unix seconds to local seconds since 1970 and back; identity without a zone.

    In an hour that occurs twice the first is used; a skipped time maps to an hour later.
    """

    def __init__(self, zone: str | None = None) -> None:
        self.zone = zone  # name in the tz database
        try:
            self._zone = None if zone is None else ZoneInfo(zone)
        except (ZoneInfoNotFoundError, ValueError, OSError) as error:
            raise InvalidInput(f"unknown time zone {zone!r}: expected a name such as Europe/Berlin") from error

    def to_local(self, at_s: float) -> float:
        if self._zone is None:
            return at_s
        offset = datetime.fromtimestamp(at_s, self._zone).utcoffset()
        return at_s + (offset.total_seconds() if offset is not None else 0.0)

    def from_local(self, local_s: float) -> float:
        if self._zone is None:
            return local_s
        wall = (_EPOCH + timedelta(seconds=local_s)).replace(tzinfo=self._zone)
        return wall.astimezone(UTC).timestamp()
