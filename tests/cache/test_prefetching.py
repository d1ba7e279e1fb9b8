"""The scheduler: what is expected is prefetched once and in time; a tier that fails is asked again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.cache.test_predictor import chain

from skymemory.cache.predictor import DAY_S
from skymemory.cache.prefetching import PrefetchScheduler
from skymemory.errors import ConstellationError, InvalidInput


class Tier:
    """Notes what it is asked to bring, and answers as it is told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[bytes, ...], float]] = []
        self.answer: bool | Exception = True

    def prefetch(self, keys: Sequence[bytes], at: float) -> list[bool]:
        self.asked.append((tuple(keys), at))
        if isinstance(self.answer, Exception):
            raise self.answer
        return [self.answer] * len(keys)


def learned(tier: Tier, lead_s: float = 600.0) -> PrefetchScheduler:
    scheduler = PrefetchScheduler(tier, lead_s=lead_s)
    for day in range(3):
        scheduler.saw(chain("daily"), day * DAY_S + 9 * 3600)
    return scheduler


def test_it_is_brought_once_within_the_lead_and_the_next_day_again() -> None:
    tier = Tier()
    scheduler = learned(tier)
    brought = {at_s: scheduler.tick(at_s) for at_s in range(int(3 * DAY_S), int(4 * DAY_S), 60)}
    assert tier.asked == [(tuple(chain("daily")), 3 * DAY_S + 9 * 3600)]
    when_s, count = next((at_s, count) for at_s, count in brought.items() if count)
    assert 3 * DAY_S + 9 * 3600 - 600 <= when_s < 3 * DAY_S + 9 * 3600 - 530 and count == 4
    scheduler.saw(chain("daily"), 3 * DAY_S + 9 * 3600)
    scheduler.tick(4 * DAY_S + 9 * 3600 - 100)
    assert len(tier.asked) == 2


@pytest.mark.parametrize("answer", [False, ConstellationError("no sky"), OSError("no net"), RuntimeError("no idea")])
def test_a_tier_that_fails_is_asked_three_times(answer: bool | Exception) -> None:
    tier = Tier()
    tier.answer = answer
    scheduler = learned(tier)
    for second in range(590):
        assert scheduler.tick(3 * DAY_S + 9 * 3600 - 595 + second) == 0
    assert len(tier.asked) == 3
    assert scheduler.counters.get("prefetches_total") == 3


def test_a_tier_that_recovers_gets_what_it_missed() -> None:
    tier = Tier()
    tier.answer = ConstellationError("no sky")
    scheduler = learned(tier)
    assert scheduler.tick(3 * DAY_S + 9 * 3600 - 500) == 0
    tier.answer = True
    assert scheduler.tick(3 * DAY_S + 9 * 3600 - 400) == 4
    assert scheduler.tick(3 * DAY_S + 9 * 3600 - 300) == 0


def test_a_lead_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidInput):
        PrefetchScheduler(Tier(), lead_s=0)
