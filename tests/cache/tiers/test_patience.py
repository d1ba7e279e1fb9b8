"""What a tier that hangs costs a prompt: a share of computing it, or twice what is usual; and once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from tests.cache.test_manager import LAYOUT, Engine, context, load
from tests.cache.tiers.small_tiers import items, soon
from tests.cache.tiers.test_load_deadlines import Hanging
from tests.contract.store_contract import key

from skymemory.cache.blocks import BlockCache
from skymemory.cache.cake.pace import SpeedEstimate
from skymemory.cache.patience import (
    _RECOMPUTE_COST_S,
    MIN_PATIENCE_S,
    PATIENCE_SHARE,
    TIMES_P99,
    ComputeRate,
    Latencies,
    recompute_cost,
)
from skymemory.cache.tiers import workers as tier_workers
from skymemory.cache.tiers.store import HierarchySettings, TieredStore
from skymemory.cache.tiers.tier import TierSettings
from skymemory.cache.tiers.workers import TierWorkers, WorkerCall
from skymemory.circuit_breaker import CircuitBreaker
from skymemory.store.base import KeyLocks, Presence
from skymemory.store.memory import MemoryStore

SLACK_S = 20.0
"""For a busy computer; what is measured would take a minute or more without patience."""
PATIENT = TierSettings(ask_deadline_s=60.0, load_deadline_s=60.0, store_deadline_s=60.0, threads=4)
PROMPT_S = 1.0
"""What computing a prompt takes here."""


def prompts(count: int, tokens: int = 24) -> list[np.ndarray]:
    return [np.arange(number * 1000, number * 1000 + tokens) for number in range(count)]


@contextmanager
def hierarchy() -> Iterator[tuple[BlockCache, Hanging]]:
    """An empty memory over a tier that can hang; how fast both it and computing are is known."""
    far = Hanging(name="far")
    near = MemoryStore(name="near")
    tiers = TieredStore(
        [(near, TierSettings(local=True)), (far, PATIENT)],
        HierarchySettings(promote="never", load_deadline_s=60.0),
    )
    cache = BlockCache(context(), LAYOUT, tiers)
    for prompt in prompts(12):
        cache.save(cache.hashes(prompt), range(6), Engine(prompt))
        near.delete(cache.hashes(prompt))
        assert load(cache, prompt)[0].hit_tokens == {"far": 23}
    cache.compute.record(1000 * len(prompts(1)[0]), 1000 * PROMPT_S)
    try:
        yield cache, far
    finally:
        far.method = ""
        far.gate.set()
        tiers.close()


def patience_s(cache: BlockCache) -> float:
    """The longest that a call about a prompt may be waited for: on a busy computer twice the usual is the most."""
    assert isinstance(cache.store, TieredStore)
    with recompute_cost(PROMPT_S):
        return max(cache.store.tiers[1].deadline_s(kind, 10_000) for kind in ("ask", "load", "store"))


def waits_in_vain(cache: BlockCache) -> float:
    """Calls that were given up."""
    return cache.store.stats().get("tier_deadlines_total{far}", 0)


@contextmanager
def timed() -> Iterator[list[float]]:
    took_s = [0.0]
    began_s = time.monotonic()
    yield took_s
    took_s[0] = time.monotonic() - began_s


@pytest.mark.parametrize("method", ["prefix", "lookup", "prepare_load", "complete_load"])
def test_a_tier_that_hangs_is_waited_for_once_and_for_a_tenth_of_computing(method: str) -> None:
    with hierarchy() as (cache, far):
        far.method = method
        longest_s = patience_s(cache)
        with timed() as took_s:
            for prompt in prompts(12):
                assert load(cache, prompt)[0].hit_tokens == {}
        assert far.hung == 1, "once, and not by each of the twelve"
        assert took_s[0] < longest_s + SLACK_S


def test_a_prompt_that_is_stored_waits_no_longer_than_it_is_worth() -> None:
    with hierarchy() as (cache, far):
        far.method = "complete_store"
        prompt = np.arange(50_000, 50_024)
        longest_s = patience_s(cache)
        with timed() as took_s:
            for _ in range(5):
                assert cache.save(cache.hashes(prompt), range(6), Engine(prompt))[0] == 6
        assert far.hung == 1 and took_s[0] < longest_s + SLACK_S


def test_a_tier_that_answers_late_is_used_again_as_soon_as_it_has() -> None:
    with hierarchy() as (cache, far):
        far.method = "complete_load"
        prompt = prompts(1)[0]
        assert load(cache, prompt)[0].failed_blocks == {"deadline": 1, "behind a failed block": 5}
        assert load(cache, prompt)[0].found_blocks == 0, "until it has answered it is left alone"
        far.method = ""
        far.gate.set()
        assert soon(lambda: load(cache, prompt)[0].hit_tokens == {"far": 23})
        assert cache.store.stats()["far_breaker_opened_total"] == 0


def test_a_tier_that_never_answers_is_open_after_its_longest_deadline_and_probed() -> None:
    far = Hanging(name="far")
    settings = TierSettings(ask_deadline_s=0.1, load_deadline_s=0.1, threads=4)
    tiers = TieredStore([(MemoryStore(name="near"), TierSettings(local=True)), (far, settings)])
    far.put_many(items(1))
    far.method = "complete_load"
    with recompute_cost(0.0):
        assert tiers.get_many([key(1)]) == [None]
    tier = tiers.tiers[1]
    assert tier.breaker.closed and not tier.usable([key(1)])
    assert soon(lambda: not tier.usable([key(1)]) and not tier.breaker.closed)
    far.method = ""
    far.gate.set()
    assert soon(lambda: tiers.get_many([key(1)]) == [items(1)[0][1]])
    tiers.close()


def test_the_first_prompt_of_all_waits_for_one_question_at_most() -> None:
    """Nothing is known, neither of the tier nor of computing: the longest deadline of a question holds, once."""
    far = Hanging(name="far")
    tiers = TieredStore([(MemoryStore(name="near"), TierSettings(local=True)), (far, TierSettings())])
    cache = BlockCache(context(), LAYOUT, tiers)
    far.method = "prefix"
    for prompt in prompts(5):
        assert load(cache, prompt)[0].hit_tokens == {}
    assert waits_in_vain(cache) == 1
    far.gate.set()
    tiers.close()


def test_what_is_worth_much_is_waited_for() -> None:
    """A load of a second, where computing takes a minute, is no hang."""
    with hierarchy() as (cache, far):
        cache.compute.record(10**9, 10**9)
        far.method = "complete_load"
        far.gate.clear()
        threading.Timer(0.3, far.gate.set).start()
        assert load(cache, prompts(1)[0])[0].hit_tokens == {"far": 23}


def test_a_put_does_not_wait_for_a_move_that_hangs() -> None:
    locks = KeyLocks()
    with locks.try_lock([key(1)]), timed() as took_s:
        with locks.exclusive([key(1), key(2)], 0.05) as ours:
            assert not ours
        with locks.exclusive([key(2)], 0.05) as ours:
            assert ours
    assert 0.05 <= took_s[0] < 0.05 + SLACK_S
    with locks.exclusive([key(1)]) as ours:
        assert ours


def test_worth_is_the_threads_own_and_ends_with_it() -> None:
    assert _RECOMPUTE_COST_S.get() is None
    with recompute_cost(3.0):
        with recompute_cost(None):
            assert _RECOMPUTE_COST_S.get() is None
        assert _RECOMPUTE_COST_S.get() == 3.0
    assert _RECOMPUTE_COST_S.get() is None


def test_the_usual_is_the_99th_percentile_of_calls_alike() -> None:
    usual = Latencies()
    assert usual.p99_s() is None
    for at in range(7):
        usual.record(0.0005 * (at + 1))
        assert usual.p99_s() == 0.0005 * (at + 1), "of a few the longest"
    for at in range(100):
        usual.record(0.001 * (at + 1))
    assert usual.p99_s() == pytest.approx(0.099)
    loads = Latencies()
    for _ in range(20):
        loads.record(0.01, 1000)
    assert loads.p99_s(1000) == loads.p99_s(300) == loads.p99_s(3000) == 0.01
    assert loads.p99_s(100_000) == pytest.approx(1.0), "as if they had gone on at their rate"
    assert loads.p99_s(1) == 0.01, "what is small is not known to be faster"
    empty = Latencies()
    empty.record(0.01)
    assert empty.p99_s(100_000) == 0.01, "what has moved nothing has no rate"
    for _ in range(20):
        loads.record(0.2, 100_000)
    assert loads.p99_s(100_000) == 0.2 and loads.p99_s(1000) == 0.01
    for _ in range(128):
        loads.record(0.5, 1000)
    assert loads.p99_s(1000) == 0.5, "what was long ago is forgotten"


def test_how_long_computing_takes_is_what_passes_took() -> None:
    rate, pace = ComputeRate(), SpeedEstimate()
    assert rate.seconds(100) is None and pace.prompt_s(100, 10) is None
    rate.record(1, 5.0)
    assert rate.seconds(100) is None, "a step of decoding says nothing of prompts"
    rate.record(100, 1.0)
    assert rate.seconds(300) == pytest.approx(3.0)
    for _ in range(20):
        rate.record(100, 2.0)
    assert rate.seconds(300) == pytest.approx(6.0, rel=0.01)
    for position in (5.0, 15.0, 25.0):
        pace.step_took(position, 0.1 + 0.01 * position)
    whole_s = sum(0.1 + 0.01 * position for position in (5.0, 15.0, 25.0, 35.0))
    assert pace.prompt_s(40, 10) == pytest.approx(whole_s)


def test_a_hang_opens_a_breaker_at_once() -> None:
    breaker = CircuitBreaker()
    breaker.timed_out(1.0)
    assert breaker.state == "open" and breaker.times_opened == 1
    breaker.timed_out(1.1)
    assert breaker.times_opened == 1 and breaker.probe_due(1.6)


def test_patience_is_the_largest_of_three() -> None:
    far = MemoryStore(name="far")
    tiers = TieredStore([(MemoryStore(name="near"), TierSettings(local=True)), (far, TierSettings())])
    tier = tiers.tiers[1]
    assert tier.deadline_s("load", 10) == 5.0, "its worth is unknown"
    with recompute_cost(40.0):
        assert tier.deadline_s("load", 10) == pytest.approx(PATIENCE_SHARE * 40.0)
    with recompute_cost(1.0):
        assert tier.deadline_s("load") == tier.deadline_s("ask") == PATIENCE_SHARE, "nothing is known of the tier"
    with recompute_cost(0.01):
        assert tier.deadline_s("load") == tier.deadline_s("ask") == MIN_PATIENCE_S
        tier._latencies["ask"].record(0.001)
        tier._latencies["load"].record(0.3, 10)
        assert tier.deadline_s("ask") == MIN_PATIENCE_S
        assert tier.deadline_s("load", 10) == pytest.approx(TIMES_P99 * 0.3)
        tier._latencies["load"].record(30.0, 10)
        assert tier.deadline_s("load", 10) == 5.0, "never longer than its settings say"
    tiers.close()


@pytest.mark.parametrize("starved_s", [0.0, 0.5], ids=["with a processor", "without one"])
def test_what_a_thread_waits_for_a_processor_is_not_waited_for_its_tier(
    starved_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kernel counts it: half a second of the time in which the call is under way."""
    monkeypatch.setattr(tier_workers, "_starved_now_s", lambda schedstat: 1.0)
    monkeypatch.setattr(tier_workers, "_starved_s", lambda thread: 1.0 + starved_s)
    workers, gate = TierWorkers("busy"), threading.Event()
    call = WorkerCall(lambda: gate.wait(5) and "answered")
    assert workers.submit(call)  # type: ignore[arg-type]
    assert soon(lambda: call._thread > 0)
    threading.Timer(0.1, gate.set).start()
    assert workers.wait(call, 0.02) == (starved_s > 0)
    workers.close()


def test_a_thread_counts_for_itself_what_others_count_for_it() -> None:
    here = threading.get_native_id()
    with tier_workers._schedstat_of(here) as schedstat:
        if schedstat is None:
            pytest.skip("this kernel does not count how long a thread waits")
        until_s = time.monotonic() + 0.05
        while time.monotonic() < until_s:
            pass
        counts = [tier_workers._starved_s(here), tier_workers._starved_now_s(schedstat), tier_workers._starved_s(here)]
        assert counts == sorted(counts)
    assert tier_workers._starved_s(1 << 30) == 0.0


def test_a_call_that_no_thread_took_up_in_time_says_nothing_of_its_tier() -> None:
    far = Hanging(name="far")
    tiers = TieredStore([(MemoryStore(name="near"), TierSettings(local=True)), (far, TierSettings(threads=1))])
    tier, gate = tiers.tiers[1], threading.Event()
    assert tier.start(lambda: gate.wait(5)) is not None
    with recompute_cost(0.001):
        assert tier.lookup([key(1)]) == [Presence.MISS] and not tier.usable([key(1)])
    gate.set()
    assert soon(lambda: tier.usable([key(1)]))
    assert tier.breaker.closed and tier.breaker.times_opened == 0
    tiers.close()
