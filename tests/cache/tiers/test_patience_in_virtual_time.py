"""Tiers that are slow, healthy or hung, in virtual time: what each costs a prompt, and that the slow ones are used."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract.store_contract import key, value

from skymemory.cache.patience import MIN_PATIENCE_S, PATIENCE_SHARE, TIMES_P99, recompute_cost
from skymemory.cache.tiers import tier as tier_module
from skymemory.cache.tiers.load import InFlightBudget, TierLoad
from skymemory.cache.tiers.tier import Tier, TierSettings
from skymemory.cache.tiers.workers import WorkerCall
from skymemory.metrics import SharedCounters
from skymemory.reasons import Miss
from skymemory.store.base import KeyLocks, KeyReport, LoadReport, LoadTicket
from skymemory.store.memory import MemoryStore

NEVER_S = 1e9
SIZE_BYTES = 1000


class World:
    """A clock, and threads of a tier whose every call takes as long as ``takes_s`` says."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.takes_s: Callable[[str], float] = lambda work: 0.0
        """By the name of what is to be done."""
        self._due: list[tuple[float, int, WorkerCall[object]]] = []
        self._number = 0

    def submit(self, call: WorkerCall[object]) -> bool:
        """It is begun at once, and answered when it has taken its time."""
        call.begun = True
        self._number += 1
        heapq.heappush(self._due, (self.now_s + self.takes_s(call._work.__qualname__), self._number, call))
        return True

    def wait(self, call: WorkerCall[object], timeout_s: float) -> bool:
        return call._ended or self.pass_until(self.now_s + max(0.0, timeout_s), call)

    def pass_until(self, until_s: float, call: WorkerCall[object] | None = None) -> bool:
        """Time goes on, until ``call`` has ended if that is before."""
        while self._due and self._due[0][0] <= until_s:
            self.now_s, _, ended = heapq.heappop(self._due)
            ended.result = result = ended._work()
            ended._ended = True
            if ended._on_late is not None:
                ended._on_late(result)
            if ended is call:
                return True
        self.now_s = max(self.now_s, until_s)
        return False

    def heal(self) -> None:
        """What would never have been answered is answered now."""
        self._due = [(min(due_s, self.now_s), *rest) for due_s, *rest in self._due]
        heapq.heapify(self._due)


@contextmanager
def far_tier() -> Iterator[tuple[World, Tier]]:
    """A tier behind threads that holds four values."""
    world = World()

    store = MemoryStore(name="far", clock=lambda: world.now_s)
    store.put_many([(key(number), value(number, SIZE_BYTES)) for number in range(4)])
    with mock.patch.object(tier_module, "TierWorkers", lambda name, threads: world):
        yield world, Tier(store, TierSettings(), 1, KeyLocks(), SharedCounters(), lambda: world.now_s)


def prompt(world: World, tier: Tier, computing_s: float) -> tuple[float, bool]:
    """One prompt that the tier has: how long it was waited for, and whether it came."""
    began_s = world.now_s
    keys = [key(number) for number in range(4)]
    with recompute_cost(computing_s):
        if not tier.prefix(keys) or (load := TierLoad.lease(tier, keys)) is None:
            return world.now_s - began_s, False
        load.start(InFlightBudget(1 << 30), math.inf)
        good, _ = load.end()
        load.release()
    return world.now_s - began_s, len(good) == 4


TIMES_S = st.sampled_from([0.0001, 0.001, 0.005, 0.012, 0.03, 0.1, 0.24])
COMPUTING_S = st.sampled_from([0.005, 0.02, 0.1, 1.0, 10.0, 60.0])
PROMPTS = st.lists(st.tuples(st.floats(1.0, 1.9), st.floats(0.0, 2.0)), min_size=3, max_size=20)
"""How many times its least each call of the tier takes, and how long after one prompt the next comes."""


@settings(max_examples=150)
@given(least_s=TIMES_S, computing_s=COMPUTING_S, drawn=PROMPTS)
def test_a_slow_tier_is_used_once_it_is_known_however_little_computing_takes(
    least_s: float, computing_s: float, drawn: list[tuple[float, float]]
) -> None:
    """Each kind of call (lookup, load) is given up once at most; what is twice its usual never."""
    with far_tier() as (world, tier):
        missed = 0
        for times, pause_s in drawn:
            world.takes_s = lambda work, times=times: least_s * times  # type: ignore[misc]
            missed += not prompt(world, tier, computing_s)[1]
            world.pass_until(world.now_s + computing_s + pause_s + 2 * least_s)
        assert missed <= 2 and tier.breaker.times_opened == 0
        if least_s * 1.9 <= max(PATIENCE_SHARE * computing_s, MIN_PATIENCE_S):
            assert not missed


@settings(max_examples=150)
@given(least_s=TIMES_S, computing_s=COMPUTING_S, drawn=PROMPTS, known=st.booleans())
def test_a_tier_that_hangs_costs_one_prompt_a_tenth_of_computing_or_twice_its_usual(
    least_s: float, computing_s: float, drawn: list[tuple[float, float]], known: bool
) -> None:
    """Also where it has never been asked before; the prompts after it wait for nothing, however long it hangs."""
    with far_tier() as (world, tier):
        slowest_s = 0.0
        for times, _ in drawn if known else ():
            world.takes_s = lambda work, times=times: least_s * times  # type: ignore[misc]
            prompt(world, tier, computing_s)
            slowest_s = max(slowest_s, least_s * times)
            world.pass_until(world.now_s + 10.0)
        world.takes_s = lambda work: NEVER_S
        most_s = max(PATIENCE_SHARE * computing_s, TIMES_P99 * slowest_s, MIN_PATIENCE_S)
        waited_s = [0.0]
        for _, pause_s in drawn:
            took_s, came = prompt(world, tier, computing_s)
            assert not came
            waited_s.append(took_s)
            world.pass_until(world.now_s + pause_s)
        assert sum(waited_s) == max(waited_s) <= most_s + 1e-9
        world.heal()
        world.takes_s = lambda work: least_s
        world.pass_until(world.now_s + 1.0)
        for _ in range(4):
            came = prompt(world, tier, computing_s)[1]
            world.pass_until(world.now_s + 40.0)
        assert came, "it is found again"


def test_a_tier_whose_index_goes_on_answering_is_waited_for_once_too() -> None:
    """As the sky: what is there is known here, absent keys are answered at once, and a load fails in the end."""
    with far_tier() as (world, tier):
        prompt(world, tier, 1.0)

        def loads_fail(ticket: LoadTicket) -> list[memoryview | None]:
            reason = Miss.ABSENT if key(99) in ticket.keys else Miss.TIMEOUT
            ticket.report = LoadReport(tuple(KeyReport(reason=reason) for _ in ticket.keys), 0.8)
            return [None] * len(ticket.keys)

        def takes_s(work: str) -> float:
            hangs = "TierLoad.start" in work or ("probe" in work and tier._probe_key != key(99))
            return 0.8 if hangs else 0.0001

        world.takes_s = takes_s
        waited_s = []
        with mock.patch.object(tier.store, "complete_load", loads_fail):
            for _ in range(60):
                waited_s.append(prompt(world, tier, 1.0)[0])
                world.pass_until(world.now_s + 0.9)
                with recompute_cost(1.0):
                    tier.prefix([key(99)])  # another prompt, of which it has nothing
                world.pass_until(world.now_s + 0.1)
        assert sum(waited > 0.001 for waited in waited_s) == 1 and max(waited_s) <= PATIENCE_SHARE + 0.001
        world.takes_s = lambda work: 0.0001
        world.pass_until(world.now_s + 40.0)
        prompt(world, tier, 1.0)
        world.pass_until(world.now_s + 1.0)
        assert prompt(world, tier, 1.0)[1], "it is found again"
