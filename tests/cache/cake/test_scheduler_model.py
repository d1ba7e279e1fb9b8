"""The loader among failures, stalls, budgets that change and aborts, in any order: nothing twice, nothing forgotten."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from skymemory.cache.cake.pace import SpeedEstimate
from skymemory.cache.cake.scheduler import BidirectionalLoader, ComputeStep, PromptChunk

KINDS = st.lists(st.tuples(st.sampled_from((7, 20, 20, 33)), st.sampled_from("sssssh")), min_size=1, max_size=8)
MOSTLY = st.sampled_from((True, True, True, False))


class LoaderMachine(RuleBasedStateMachine):
    """A shell that executes every action, well, badly, late or never."""

    @initialize(
        kinds=KINDS,
        resident=st.sampled_from((0, 0, 1, 2)),
        budget=st.sampled_from((20, 50, 7, 0)),
        room=st.sampled_from((1, 4000, 60_000)),
        warm=st.booleans(),
        computes=MOSTLY,
        loads=MOSTLY,
    )
    def begin(
        self,
        kinds: list[tuple[int, str]],
        resident: int,
        budget: int,
        room: int,
        warm: bool,
        computes: bool,
        loads: bool,
    ) -> None:
        self.chunks, first = [], 0
        for number, (tokens, kind) in enumerate(kinds):
            there = number < resident
            self.chunks.append(PromptChunk(first, tokens, tokens * 100, kind == "s" and not there, there))
            first += tokens
        pace = SpeedEstimate()
        if warm:
            pace.step_took(10, 1.0)
            pace.load_took(1000, 0.5)
        self.now_s = 0.0
        self.loads, self.budget, self.room = loads, budget, room
        self.loader = BidirectionalLoader(
            max_in_flight_bytes=room, budget_tokens=budget, pace=pace, computes=computes, loads=loads
        )
        pushed = self.loader.push_seq(self.chunks, 0.0)
        self.loadable = {index for index, _ in pushed}
        assert self.loadable == {i for i, c in enumerate(self.chunks) if c.loadable and loads}
        self.step: ComputeStep | None = None
        self.asked: set[int] = set()
        self.in_flight: list[int] = []
        self.failed: set[int] = set()
        self.came: dict[int, str] = {}
        self.wake_s: float | None = None
        self.aborted = False
        self.computed_tokens = 0
        self.ask()

    def ask(self) -> None:
        """Poll and check the requests; a second poll at once adds none."""
        actions = self.loader.poll(self.now_s)
        for index in actions.cancel:
            self.in_flight.remove(index)
        for index in actions.fetch:
            assert index in self.loadable and index not in self.asked and not self.aborted
            assert not self.loader.is_resident(index)
            self.asked.add(index)
            self.in_flight.append(index)
        sizes = [self.chunks[index].size_bytes for index in self.in_flight]
        assert len(sizes) <= 1 or sum(sizes) <= self.room
        if actions.compute is not None:
            assert self.step is None and not self.aborted and self.budget
            self.check_step(actions.compute)
            self.step = actions.compute
        self.wake_s = actions.wake_s
        assert self.wake_s is None or self.wake_s >= self.now_s - 1e-6
        again = self.loader.poll(self.now_s)
        assert (again.compute, again.fetch, again.cancel) == (None, (), ())
        if not self.loader.done and not self.aborted and self.budget:
            assert self.step or self.in_flight or self.wake_s is not None, "nothing will ever happen"

    def check_step(self, step: ComputeStep) -> None:
        chunk = self.chunks[step.index]
        assert 0 < step.tokens <= self.budget
        assert chunk.first_token <= step.first_token < chunk.first_token + chunk.tokens
        last = self.chunks[step.indices[-1]]
        assert last.first_token < step.first_token + step.tokens <= last.first_token + last.tokens
        for index, other in enumerate(self.chunks):
            if other.first_token + other.tokens <= step.first_token:
                assert self.loader.is_resident(index), "computed with a hole before it"
            elif other.first_token < step.first_token + step.tokens:
                assert not self.loader.is_resident(index), "computed what is there"

    @precondition(lambda self: self.step is not None)
    @rule(took_s=st.sampled_from((1.0, 0.0, 5.0)))
    def step_ends(self, took_s: float) -> None:
        self.now_s += took_s
        assert self.step is not None
        self.computed_tokens += self.step.tokens
        self.step = None
        self.loader.chunk_computed(self.now_s)
        self.ask()

    @precondition(lambda self: self.in_flight)
    @rule(
        which=st.sampled_from((0, 0, 1)),
        took_s=st.sampled_from((1.0, 0.0, 5.0)),
        fails=st.booleans(),
        twice=st.booleans(),
    )
    def fetch_ends(self, which: int, took_s: float, fails: bool, twice: bool) -> None:
        """In any order: the second may overtake the first."""
        index = self.in_flight.pop(which % len(self.in_flight))
        self.now_s += took_s
        for _ in range(1 + twice):
            if fails:
                self.failed.add(index)
                self.loader.load_failed(index, self.now_s)
            else:
                self.loader.chunk_loaded(index, self.now_s)
        self.ask()

    @rule(passes_s=st.sampled_from((0.3, 2.0, 50.0)))
    def nothing_happens(self, passes_s: float) -> None:
        """A stall; the shell wakes where it was asked to."""
        until_s = self.now_s + passes_s
        while self.wake_s is not None and self.wake_s <= until_s:
            self.now_s = max(self.now_s, self.wake_s)
            self.ask()
            assert self.wake_s is None or self.wake_s > self.now_s, "woken for nothing"
        self.now_s = until_s

    @rule(tokens=st.sampled_from((0, 7, 20, 50)))
    def budget_changes(self, tokens: int) -> None:
        self.budget = tokens
        self.loader.budget_changed(tokens)
        self.ask()

    @rule(chance=st.integers(0, 9))
    def request_is_gone(self, chance: int) -> None:
        if not chance and not self.loader.done:
            self.aborted = True
            self.loader.abort(self.now_s)
            self.ask()
            assert not self.in_flight

    @invariant()
    def what_came_stays_what_it_is(self) -> None:
        for index, chunk in enumerate(self.chunks):
            origin = self.loader.origin(index)
            assert self.came.get(index, origin) == origin
            assert bool(origin) == self.loader.is_resident(index)
            assert (origin == "resident") == chunk.resident
            assert origin != "loaded" or (index in self.asked and index not in self.failed)
            if origin:
                self.came[index] = origin

    def teardown(self) -> None:
        """Let everything go well from here: the prompt gets done, and the books are right."""
        if not hasattr(self, "loader"):
            return
        self.budget_changes(16)
        for _ in range(1000):
            if self.loader.done:
                break
            if self.in_flight and (self.step is None or len(self.in_flight) % 2):
                self.fetch_ends(0, 0.1, False, False)
            elif self.step is not None:
                self.step_ends(1.0)
            else:
                self.nothing_happens(1.0)
        assert self.loader.done
        self.what_came_stays_what_it_is()
        result = self.loader.result()
        if not self.aborted:
            done = result.resident_tokens + result.computed_tokens + result.loaded_tokens
            assert done == sum(chunk.tokens for chunk in self.chunks)
            assert result.computed_tokens + result.wasted_tokens == self.computed_tokens
        loaded = sum(self.chunks[i].size_bytes for i, origin in self.came.items() if origin == "loaded")
        assert result.loaded_bytes == loaded
        asked = sum(self.chunks[i].size_bytes for i in self.asked)
        in_flight = sum(self.chunks[i].size_bytes for i in self.in_flight)
        assert result.wasted_bytes == asked - loaded - in_flight
        assert result.failed_loads <= len(self.failed)


TestLoaderMachine = LoaderMachine.TestCase
TestLoaderMachine.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_for_longer() -> None:
    run_state_machine_as_test(
        LoaderMachine, settings=settings(max_examples=2000, stateful_step_count=40, deadline=None)
    )
