"""The router's queue against its naive twin, and what it promises whatever comes: bounds, shares, no starving."""

from __future__ import annotations

import math
import random
from functools import partial

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.router.naive_queue import NaiveQueue

from skymemory.conductor.request import Prompt, Request, Slo
from skymemory.conductor.scheduler import KINDS, Refusal
from skymemory.router.queue import QueueEntry, QueueSettings, RequestQueue

PROMPT = Prompt(np.empty(0, np.uint64), np.empty(0, np.uint64), 16.0, 1)
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}
ROOM = QueueSettings(most_requests=6, most_bytes=1000, most_wait_s=20.0)


def entry(now_s: float, tenant: str = "a", work: float = 100.0, priority: int = 0, **more: object) -> QueueEntry:
    size_bytes = int(more.pop("size_bytes", 10))  # type: ignore[call-overload]
    return QueueEntry(Request(PROMPT, tenant=tenant, priority=priority), work, size_bytes, now_s, **more)  # type: ignore[arg-type]


def _is_in(groups: set[str], one: QueueEntry) -> bool:
    return one.group in groups


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 4]), st.sampled_from([0.1, 0.3, 0.45]))
@example(
    28, 4, 0.1
)  # a refused request emptied a level for a moment, and with it the tags of tenants that had been served
@example(120, 2, 0.1)  # … or made a tenant the last to come
@settings(max_examples=80, deadline=None)
def test_whatever_happens_it_is_what_the_naive_twin_says(seed: int, tenants: int, serving: float) -> None:
    """A walk of 200 events, at different loads, of one tenant to four."""
    dice = random.Random(seed)
    queue, twin = RequestQueue(ROOM, WEIGHTS), NaiveQueue(ROOM, WEIGHTS)
    now_s, offered = 0.0, []
    for _ in range(200):
        chance = dice.random()
        if chance < serving:
            fits = partial(_is_in, dice.choice([{"x"}, {"y"}, {"x", "y"}, {"x", "y"}]))
            assert queue.next(now_s, fits) is twin.next(now_s, fits)
        elif chance < 0.5 and offered:
            one = dice.choice(offered[-12:])
            assert queue.cancel(one) == twin.remove(one)
        elif chance < 0.6:
            now_s += dice.choice([0.25, 1.0, 3.0])
            assert {id(each) for each, _ in queue.expire(now_s)} == {id(each) for each in twin.expire(now_s)}
        else:
            promised_s = dice.choice([None, None, 1e-12, 1.5, 3.5, 49.5])
            one = entry(
                now_s,
                "abcd"[dice.randrange(tenants)],
                dice.choice([1.0, 8.0, 64.0, 1024.0]),
                dice.choice([-1, 0, 0, 0, 3]),
                size_bytes=dice.choice([0, 10, 100, 300, 700, 1001]),
                group=dice.choice("xy"),
                slo=None if promised_s is None else Slo(promised_s, math.inf),
            )
            offered.append(one)
            answer = queue.offer(one, now_s)
            waits, away = twin.offer(one, now_s)
            assert waits == (not isinstance(answer, Refusal))
            if isinstance(answer, Refusal):
                assert answer.kind in KINDS and answer.retry_after_s >= 1
            else:
                assert [each for each, _ in answer] == away
                assert all(refusal.kind in KINDS and refusal.retry_after_s >= 1 for _, refusal in answer)
        waiting = [each for _, each in twin.entries]
        assert len(queue) == len(waiting) <= ROOM.most_requests
        assert queue.size_bytes == sum(each.size_bytes for each in waiting) <= ROOM.most_bytes
        assert queue.work == pytest.approx(sum(each.work for each in waiting))
        assert queue.next_deadline_s == min((twin.leave_s(each) for each in waiting), default=math.inf)
        figures = queue.figures().values()
        assert sum(each.requests for each in figures) == len(queue)
        assert sum(each.size_bytes for each in figures) == queue.size_bytes


@given(
    st.dictionaries(st.sampled_from("abcde"), st.sampled_from([0.25, 1.0, 3.0]), min_size=2),
    st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_what_tenants_that_wait_got_differs_by_one_request_of_each(weights: dict[str, float], seed: int) -> None:
    """Goyal's bound, between every two and over every stretch of time from the beginning."""
    dice = random.Random(seed)
    queue = RequestQueue(QueueSettings(most_requests=1000, most_wait_s=1e6), weights)
    got = dict.fromkeys(weights, 0.0)
    largest = dict.fromkeys(weights, 0.0)
    for tenant in weights:
        for _ in range(40):
            queue.offer(entry(0.0, tenant, dice.choice([1.0, 10.0, 500.0, 4000.0])), 0.0)
    for _ in range(30):
        one = queue.next(1.0)
        assert one is not None
        got[one.request.tenant] += one.work
        queue.offer(entry(1.0, one.request.tenant, dice.choice([1.0, 10.0, 500.0, 4000.0])), 1.0)
        largest[one.request.tenant] = max(largest[one.request.tenant], one.work)
        for this in weights:
            for other in weights:
                gap = got[this] / weights[this] - got[other] / weights[other]
                assert gap <= largest[this] / weights[this] + 4000.0 / weights[other] + 1e-6


@given(st.integers(0, 2**32), st.integers(2, 12), st.booleans())
@settings(max_examples=60, deadline=None)
def test_no_tenant_starves_however_many_new_tenants_come(seed: int, crowd: int, always_new: bool) -> None:
    """Others refill the queue as fast as it empties, under new names or old ones, with short deadlines. Two requests
    of one tenant are both served before the others got more than they had waiting, and a request each, twice over."""
    dice = random.Random(seed)
    queue = RequestQueue(QueueSettings(most_requests=crowd + 2, most_wait_s=1e6))
    for number in range(crowd):
        queue.offer(entry(0.0, f"old {number}", 100.0, slo=Slo(1e5, 1.0)), 0.0)
    patient = [entry(0.0, "patient", 100.0), entry(0.0, "patient", 100.0)]
    for one in patient:
        assert not isinstance(queue.offer(one, 0.0), Refusal)
    served: list[QueueEntry] = []
    for number in range(4 * crowd + 8):
        one = queue.next(1.0)
        assert one is not None
        served.append(one)
        name = f"new {number}" if always_new else f"old {dice.randrange(crowd)}"
        queue.offer(entry(1.0, name, dice.choice([50.0, 100.0]), slo=Slo(1e5, 1.0)), 1.0)
    assert all(any(one is each for each in served) for one in patient)


@given(st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_within_one_tenant_nothing_waits_behind_later_deadlines(seed: int) -> None:
    dice = random.Random(seed)
    queue = RequestQueue(QueueSettings(most_requests=100, most_wait_s=50.0))
    for _ in range(40):
        slo = Slo(dice.uniform(1, 90), 1.0) if dice.random() < 0.7 else None
        queue.offer(entry(0.0, slo=slo, group=dice.randrange(3)), 0.0)
    deadlines = []
    while (one := queue.next(0.5)) is not None:
        deadlines.append(one.leave_s)
    assert len(deadlines) == 40 and deadlines == sorted(deadlines)
