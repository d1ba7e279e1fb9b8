"""The scheduler: what is expected is prefetched once and in time; a tier that fails is asked again."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
from tests.cache.test_predictor import chain

from skymemory.cache.blocks import BlockCache, Part, Parts
from skymemory.cache.predictor import DAY_S
from skymemory.cache.prefetching import PrefetchScheduler
from skymemory.errors import ConstellationError, InvalidInput
from skymemory.kv.block import KVLayout
from skymemory.kv.context import CacheContext
from skymemory.store.base import Prefetching
from skymemory.store.memory import MemoryStore
from skymemory.store.wrappers import Wrapped

NINE_S = 9 * 3600


class Tier:
    """Records the keys to prefetch, and answers as scripted."""

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[bytes, ...], float]] = []
        self.answer: bool | Exception = True

    def prefetch(self, keys: Sequence[bytes], at: float) -> list[bool]:
        self.asked.append((tuple(keys), at))
        if isinstance(self.answer, Exception):
            raise self.answer
        return [self.answer] * len(keys)


class Clock:
    """A scheduler with a time that the test sets."""

    def __init__(self, tier: Tier, lead_s: float = 600.0) -> None:
        self.now_s = 0.0
        self.scheduler = PrefetchScheduler(tier, lead_s=lead_s, clock=lambda: self.now_s)

    def saw(self, now_s: float) -> None:
        self.now_s = now_s
        self.scheduler.record_prompt(chain("daily"))

    def tick(self, now_s: float) -> int:
        self.now_s = now_s
        return self.scheduler.tick()


def learned(tier: Tier) -> Clock:
    clock = Clock(tier)
    for day in range(3):
        clock.saw(day * DAY_S + NINE_S)
    return clock


def test_it_is_brought_once_within_the_lead_and_the_next_day_again() -> None:
    tier = Tier()
    clock = learned(tier)
    brought = {at_s: clock.tick(at_s) for at_s in range(int(3 * DAY_S), int(4 * DAY_S), 60)}
    assert tier.asked == [(tuple(chain("daily")), 3 * DAY_S + NINE_S)]
    when_s, count = next((at_s, count) for at_s, count in brought.items() if count)
    assert 3 * DAY_S + NINE_S - 600 <= when_s < 3 * DAY_S + NINE_S - 530 and count == 4
    clock.saw(3 * DAY_S + NINE_S)
    clock.tick(4 * DAY_S + NINE_S - 100)
    assert len(tier.asked) == 2


@pytest.mark.parametrize("answer", [False, ConstellationError("no sky"), OSError("no net"), RuntimeError("no idea")])
def test_a_tier_that_fails_is_asked_three_times(answer: bool | Exception) -> None:
    tier = Tier()
    tier.answer = answer
    clock = learned(tier)
    for second in range(590):
        assert clock.tick(3 * DAY_S + NINE_S - 595 + second) == 0
    assert len(tier.asked) == 3
    assert clock.scheduler.counters.get("prefetches_total") == 3


def test_a_tier_that_recovers_gets_what_it_missed() -> None:
    tier = Tier()
    tier.answer = ConstellationError("no sky")
    clock = learned(tier)
    assert clock.tick(3 * DAY_S + NINE_S - 500) == 0
    tier.answer = True
    assert clock.tick(3 * DAY_S + NINE_S - 400) == 4
    assert clock.tick(3 * DAY_S + NINE_S - 300) == 0


def test_it_runs_by_itself_and_stops() -> None:
    tier = Tier()
    clock = learned(tier)
    clock.now_s = 3 * DAY_S + NINE_S - 100
    with clock.scheduler.running(every_s=0.01):
        deadline_s = time.monotonic() + 30
        while not tier.asked and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert len(tier.asked) == 1
    assert "prefetch" not in [thread.name for thread in threading.enumerate()]


class Engine:
    def place(self, index: int, block: memoryview) -> None:
        pytest.fail("nothing is stored")


def test_a_cache_reports_every_prompt_it_looks_up() -> None:
    """From tokens to the tier's door: what recurs daily in a ``BlockCache`` is prefetched."""
    tier, now_s = Tier(), [0.0]
    scheduler = PrefetchScheduler(tier, clock=lambda: now_s[0])
    layout = KVLayout(layers=1, kv_heads=1, head_dim=8, block_tokens=4, dtype="float32")
    context = CacheContext("m", "w", "t", layout.dtype, layout.describe(), lossless=True, block_tokens=4)
    cache = BlockCache(context, layout, MemoryStore())
    cache.on_prompt = scheduler.record_prompt
    tokens = list(range(42))
    for day in range(3):
        now_s[0] = day * DAY_S + NINE_S
        assert Parts([Part(cache)]).load(tokens, [Engine()]).found_blocks == 0
    now_s[0] = 3 * DAY_S + NINE_S - 60
    assert scheduler.tick() == 10
    assert tier.asked == [(tuple(cache.hashes(tokens)), 3 * DAY_S + NINE_S)]


def test_behind_other_rules_and_in_a_tier_without_distance_it_still_works() -> None:
    """Wrappers pass it on; in plain memory whatever is there is near."""
    store = Wrapped(MemoryStore())
    assert isinstance(store, Prefetching) and not isinstance(store.store, Prefetching)
    store.put_many([(chain("daily")[0], b"value")])
    scheduler, now_s = PrefetchScheduler(store, clock=lambda: now_s), 0.0
    for day in range(3):
        now_s = day * DAY_S + NINE_S
        scheduler.record_prompt(chain("daily"))
    now_s += DAY_S - 60
    assert scheduler.tick() == 1
    assert scheduler.counters.get("not_prefetched_blocks_total") == 3


def test_a_lead_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidInput):
        PrefetchScheduler(Tier(), lead_s=0)
