"""One habit: a prompt, its time of day, and on which of the last days it was seen; whether it comes on a given day.

Two rules compete, and for each habit the one that would have been right more often in the last three weeks decides:

- *daily*: it comes while the days on which it came, old ones decayed, weigh enough;
- *weekly*: it comes if it came on most of the last three days of the same name. So Mondays are learned, and weekends.

Neither expects what was seen once: the weekly rule wants two of those days.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

WEEK_DAYS = 7
_WEEKS = 3
_JUDGED_DAYS = 3 * WEEK_DAYS
KEPT_DAYS = _JUDGED_DAYS + _WEEKS * WEEK_DAYS
"""How far back sightings are remembered: for each day judged, the weeks before it."""


@dataclass(slots=True, eq=False)
class Habit:
    """Days are counted from any one; times are seconds of the local day."""

    keys: tuple[bytes, ...]
    time_s: float
    day: int
    """Of the last sighting."""
    first_day: int
    seen: int = 1
    """Bit n: seen on day - n."""

    @property
    def recurs(self) -> bool:
        return self.seen != 1

    def saw(self, day: int) -> None:
        """Seen on this day, later than the last."""
        self.seen = (self.seen << min(day - self.day, KEPT_DAYS) | 1) & (1 << KEPT_DAYS) - 1
        self.day = day

    def was_seen(self, day: int) -> bool:
        return day <= self.day and bool(self.seen >> (self.day - day) & 1)

    def weight_on(self, day: int, *, today: int, decay: float, least_weight: float) -> float | None:
        """How much speaks for it on ``day``, after the last sighting and not before ``today``; None if too little does.

        By the daily rule days on which it was seen, old ones less; by the weekly one the weeks.
        """
        if day - self.day > KEPT_DAYS:
            return None
        weeks = self._weeks(day)
        if self._weekly_is_better(today, decay, least_weight):
            return float(sum(weeks)) if sum(weeks) >= 2 and _most(weeks) else None
        weight = next((weight for at, weight in self._weights(day, decay) if at == day), 0.0)
        return weight if weight >= least_weight else None

    def _weekly_is_better(self, today: int, decay: float, least_weight: float) -> bool:
        """Whether, over the days before ``today`` for which there was a week to go by, it was wrong less often."""
        daily_wrong = weekly_wrong = 0
        for day, weight in self._weights(today - 1, decay):
            weeks = self._weeks(day)
            if day >= today - _JUDGED_DAYS and weeks:
                came = self.was_seen(day)
                daily_wrong += (weight >= least_weight) != came
                weekly_wrong += _most(weeks) != came
        return weekly_wrong < daily_wrong

    def _weights(self, last_day: int, decay: float) -> Iterator[tuple[int, float]]:
        """Each day until ``last_day``, with what the days before it weigh."""
        weight = 0.0
        for day in range(max(self.first_day, self.day - KEPT_DAYS + 1), last_day + 1):
            yield day, weight
            weight = (weight + self.was_seen(day)) * decay

    def _weeks(self, day: int) -> list[bool]:
        """Whether it came one, two, three weeks before ``day``, as far as it was known then."""
        oldest = max(self.first_day, self.day - KEPT_DAYS + 1)
        before = (day - WEEK_DAYS * number for number in range(1, _WEEKS + 1))
        return [self.was_seen(at) for at in before if at >= oldest]


def _most(weeks: list[bool]) -> bool:
    return 2 * sum(weeks) > len(weeks)
