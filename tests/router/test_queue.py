"""What a client, a timer and a page of metrics see of the router's queue. Its order is in tests/properties."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace

import numpy as np
import pytest

from skymemory.conductor.request import Prompt, Request, Slo
from skymemory.conductor.scheduler import Refusal
from skymemory.errors import InvalidInput
from skymemory.router.queue import USUAL_OUTPUT_TOKENS, QueueEntry, QueueSettings, RequestQueue, work_of


def request(tenant: str = "", priority: int = 0, tokens: int = 1000, output: int | None = None) -> Request:
    prompt = Prompt(np.empty(0, np.uint64), np.empty(0, np.uint64), 16.0, tokens)
    return Request(prompt, tenant=tenant, priority=priority, output_tokens=output)


def entry(now_s: float = 0.0, tenant: str = "", priority: int = 0, work: float = 100.0, **more: object) -> QueueEntry:
    size_bytes = more.pop("size_bytes", 100)
    return QueueEntry(request(tenant, priority), work, size_bytes, now_s, **more)  # type: ignore[arg-type]


def queue(most: int = 4, most_bytes: int = 1 << 20, most_wait_s: float = 10.0, **more: object) -> RequestQueue:
    return RequestQueue(QueueSettings(most, most_bytes, most_wait_s), **more)  # type: ignore[arg-type]


Evicted = list[tuple[QueueEntry, Refusal]]


def waits(answer: Evicted | Refusal) -> Evicted:
    assert not isinstance(answer, Refusal)
    return answer


def refused(answer: Evicted | Refusal) -> Refusal:
    assert isinstance(answer, Refusal)
    return answer


def test_work_is_what_is_computed_and_generated() -> None:
    assert work_of(request(tokens=1000, output=50)) == 1050
    assert work_of(request(tokens=1000)) == 1000 + USUAL_OUTPUT_TOKENS
    assert work_of(replace(request(tokens=1000, output=50), answers=3)) == 1150


def test_without_room_it_is_as_if_there_were_no_queue() -> None:
    one = queue(0)
    assert refused(one.offer(entry(), 0.0)).kind == "queue" and len(one) == 0 and one.next(0.0) is None
    assert refused(queue(4, 1000).offer(entry(size_bytes=1001), 0.0)).reason.startswith("it has 1,001 bytes")


def test_it_leaves_when_the_promise_cannot_be_kept_any_more_or_its_time_is_over() -> None:
    one = queue()
    hurried = entry(slo=Slo(1.5, math.inf))
    patient, late = entry(slo=Slo(60.0, math.inf)), entry(-1.0, slo=Slo(0.4, 0.1))
    assert refused(one.offer(late, 0.0)).kind == "ttft", "it could not be kept from the beginning"
    waits(one.offer(patient, 0.0))
    waits(one.offer(hurried, 0.0))
    assert one.next_deadline_s == 1.5 and one.expire(1.49) == []
    [(left, refusal)] = one.expire(1.5)
    assert left is hurried and refusal.kind == "ttft"
    assert refusal.reason == (
        "its first token cannot come within the promised 1.5 s: it waited 1.5 s for a server with room"
    )
    assert one.next_deadline_s == 10.0
    [(left, refusal)] = one.expire(12.0)
    assert left is patient and refusal.kind == "queue" and "waited 12 s" in refusal.reason
    assert one.next_deadline_s == math.inf and len(one) == 0


def test_an_expired_request_is_not_sent_to_a_server_and_is_reported_at_once() -> None:
    one = queue()
    first, second = entry(slo=Slo(1.0, 1.0)), entry()
    one.offer(first, 0.0)
    one.offer(second, 0.0)
    assert one.next(2.0) is second
    assert one.next_deadline_s == -math.inf, "a timer set by it runs out now"
    assert [each for each, _ in one.expire(2.0)] == [first]


def test_a_request_that_must_leave_gets_the_reason() -> None:
    one = queue(2)
    low, big, other = entry(priority=-1), entry(tenant="a"), entry(tenant="a")
    waits(one.offer(low, 0.0))
    waits(one.offer(big, 0.0))
    [(left, refusal)] = waits(one.offer(other, 0.0))
    assert left is low and refusal.kind == "priority" and "priority 0" in refusal.reason
    [(left, refusal)] = waits(one.offer(entry(tenant="b"), 0.0))
    assert left is other and refusal.kind == "share"
    answer = refused(one.offer(entry(tenant="b"), 0.0))
    assert answer.kind == "queue" and answer.reason.startswith("2 requests wait already")
    one = queue(1)
    waits(one.offer(entry(tenant="a", slo=Slo(9.0, 1.0)), 0.0))
    [(left, refusal)] = waits(one.offer(entry(tenant="a", slo=Slo(3.0, 1.0)), 0.0))
    assert refusal.kind == "queue" and "earlier deadline" in refusal.reason


def test_a_large_and_least_urgent_request_displaces_no_other() -> None:
    one = queue(9, 1000)
    small = [entry(tenant=tenant, size_bytes=300) for tenant in "abc"]
    for each in small:
        waits(one.offer(each, 0.0))
    assert isinstance(one.offer(entry(tenant="d", size_bytes=950), 0.0), Refusal)
    assert len(one) == 3 and one.size_bytes == 900
    assert [one.next(0.0) for _ in range(4)] == [*small, None]


def test_when_to_come_again_is_the_queue_over_its_rate() -> None:
    one = queue(100, most_wait_s=1000.0)
    for _ in range(40):
        one.offer(entry(work=500.0), 0.0)
    assert one.retry_after_s(0, 0.0) == 1.0, "nothing is known of the rate yet"
    for step in range(1, 11):
        assert one.next(step * 0.5) is not None
    assert one.retry_after_s(0, 5.0) == pytest.approx(30 * 500 / 1000, rel=0.01), "1,000 tokens a second"
    assert one.retry_after_s(1, 5.0) == 1.0, "nothing waits at priority 1"
    assert one.retry_after_s(0, 25.0) > 3 * one.retry_after_s(0, 5.0), "nothing has gone for 20 s"
    while one.next(30.0) is not None:
        pass
    one.offer(entry(30.0), 500.0)
    assert one.retry_after_s(0, 500.0) == 1.0, "time in which nothing waited is none in which nothing was served"


def test_what_a_request_took_in_the_end_counts_for_its_tenant() -> None:
    one = queue(20)
    for tenant in "aabbab":
        one.offer(entry(tenant=tenant, work=1000.0), 0.0)
    first, second = one.next(0.0), one.next(0.0)
    assert first is not None and second is not None
    assert [first.request.tenant, second.request.tenant] == ["a", "b"]
    one.corrected(second, 10.0)  # it asked for much, and used little
    order = [one.next(0.0) for _ in range(4)]
    assert [each.request.tenant for each in order if each] == ["b", "a", "b", "a"]
    assert len(one) == 0
    one.corrected(first, 10.0)  # older than any waiting request
    one.offer(entry(tenant="a"), 0.0)
    one.corrected(first, 1e9)
    one.offer(entry(tenant="b"), 0.0)
    after = one.next(0.0)
    assert after is not None and after.request.tenant == "a"


def test_a_group_without_room_delays_no_other_and_is_asked_about_once() -> None:
    one = queue(200)
    for number in range(100):
        one.offer(entry(tenant=f"t{number % 7}", group="busy"), 0.0)
    other = entry(tenant="late", priority=-3, group="idle")
    one.offer(other, 0.0)
    asked: list[object] = []

    def fits(each: QueueEntry) -> bool:
        asked.append(each.group)
        return each.group == "idle"

    assert one.next(0.0, fits) is other
    assert asked == ["busy", "idle"]
    assert one.next(0.0, fits) is None and len(one) == 100


def test_who_has_gone_is_not_kept_alive() -> None:
    class Body:
        pass

    one = queue(50, most_wait_s=1e6)
    bodies = []
    for number in range(300):
        body = Body()
        bodies.append(weakref.ref(body))
        each = entry(tenant=f"t{number}", item=body)
        one.offer(each, 0.0)
        if number % 2:
            one.cancel(each)
        else:
            one.next(0.0)
        del each, body
    gc.collect()
    assert len(one) == 0 and all(ref() is None for ref in bodies)


@pytest.mark.brief()
def test_books_stay_small_however_many_come_and_go() -> None:
    one = queue(8, most_wait_s=1e6)
    one.offer(entry(tenant="stays", priority=0, group="never"), 0.0)
    for number in range(20_000):
        one.offer(entry(tenant=f"t{number}", work=7.0), 0.0)
        if number % 3:
            one.next(0.0, lambda each: each.group is None)
    level = one._levels[0]
    sizes = [len(one._deadlines), len(level._order), len(level._parts), len(level.idle), len(one._waiting)]
    assert max(sizes[:3]) <= 300 and sizes[3] <= 4096 and sizes[4] <= 8
    assert set(one.figures()) == {(0, "other")}, "names of tenants without a weight are no labels"


def test_figures_are_by_priority_and_by_tenants_that_the_operator_named() -> None:
    one = queue(3, weights={"gold": 3.0, "key": 1.0})
    first = entry(tenant="gold", priority=2)
    one.offer(first, 0.0)
    one.offer(entry(tenant="key", size_bytes=40), 0.0)
    one.offer(entry(), 0.0)
    assert one.next(3.0) is first
    one.expire(10.0)
    figures = one.figures()
    assert {key: figure.requests for key, figure in figures.items()} == {
        (2, "gold"): 0,
        (0, "key"): 0,
        (0, "unknown"): 0,
    }
    assert (figures[2, "gold"].served, figures[2, "gold"].waited_s) == (1, 3.0)
    assert figures[0, "key"].refused == {"queue": 1}
    gone = entry(10.0, tenant="other")
    one.offer(gone, 10.0)
    assert figures[0, "other"].requests == 1 and figures[0, "other"].size_bytes == 100
    assert one.cancel(gone) and not one.cancel(gone)
    assert figures[0, "other"].cancelled == 1 and figures[0, "other"].size_bytes == 0


def test_settings_can_change_while_it_runs() -> None:
    one = queue(6)
    for _ in range(6):
        one.offer(entry(tenant="a"), 0.0)
    one.configure(QueueSettings(2, 1 << 20, 10.0), {"b": 2.0})
    answer = waits(one.offer(entry(tenant="b"), 0.0))
    assert len(one) == 2 and len(answer) == 5
    one.configure(QueueSettings(0))
    assert isinstance(one.offer(entry(), 0.0), Refusal) and len(one) == 2
    assert one.next(0.0) is not None and one.next(0.0) is not None
    with pytest.raises(InvalidInput, match="max_wait"):
        QueueSettings(5, most_wait_s=math.inf)
