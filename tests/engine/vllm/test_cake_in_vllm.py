"""Cake by the connector: a prompt computed from its front and loaded from its back, whatever comes when."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.vllm.engine import BLOCK, CONTEXT, SIZE, Door, Engine, Request
from tests.engine.vllm.test_both_sides import filled, prompt

from skymemory.kv.block import hash_blocks
from skymemory.store.base import LoadTicket
from skymemory.store.memory import MemoryStore

VALUE = BLOCK * SIZE
TOKENS = 24 * VALUE + 3


class Slow(MemoryStore):
    """Loads take up to ``most_s``; those of ``lost`` bring nothing."""

    def __init__(self, most_s: float, seed: int = 0) -> None:
        super().__init__(1 << 20)
        self.most_s = most_s
        self.lost: set[bytes] = set()
        self._dice = random.Random(seed)

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        time.sleep(self._dice.uniform(0, self.most_s))
        values = super().complete_load(ticket)
        return [None if key in self.lost else value for key, value in zip(ticket.keys, values, strict=True)]


def prefill(engine: Engine, request: Request, door: Door, step_s: float) -> None:
    """Until all of it is computed or loaded."""
    for _ in range(1000):
        if request.num_computed_tokens >= request.num_tokens:
            return
        time.sleep(step_s)
        engine.step((request, min(door.step_tokens, request.num_tokens - request.num_computed_tokens)))
    raise AssertionError("it does not end")


@settings(max_examples=30)
@given(
    st.sampled_from([0.0, 0.001, 0.01]),
    st.sampled_from([0.0, 0.001, 0.01]),
    st.sets(st.integers(0, 23), max_size=2),
    st.sampled_from([0, VALUE, 3 * BLOCK]),
    st.integers(0, 9),
)
def test_whatever_comes_when_all_blocks_are_sound(
    load_s: float, step_s: float, lost: set[int], local: int, seed: int
) -> None:
    words = prompt(TOKENS, seed)
    with Slow(load_s, seed) as store:
        filled(store, words)
        keys = hash_blocks(CONTEXT.digest(), words, VALUE)
        store.lost = {keys[at] for at in lost}
        door = Door()
        engine, request = Engine(store, 128, cake=door), Request("second", words)
        assert engine.matched(request, local) == (0, False)
        engine.admit(request, 0, local)
        for block in range(local // BLOCK):
            before, request.num_computed_tokens = request.num_computed_tokens, block * BLOCK
            engine._compute(request, BLOCK)
            request.num_computed_tokens = before
        prefill(engine, request, door, step_s)
        assert engine.sound(request, TOKENS)
        assert not engine.invalid and not engine.finished
        for computed, end in door.jumps:
            assert computed < end <= (TOKENS - 1) // BLOCK * BLOCK
        engine.close()
        store.most_s = 0.0
        assert store.prefix(keys) == len(keys), "what was lost is saved again, and nothing else was deleted"


def test_a_fast_link_loads_most_and_a_slow_one_nothing() -> None:
    words = prompt(TOKENS)
    for load_s, step_s in ((0.0, 0.02), (2.0, 0.0)):
        with Slow(load_s) as store:
            filled(store, words)
            door = Door()
            engine, request = Engine(store, 128, cake=door), Request("second", words)
            engine.matched(request)
            engine.admit(request)
            prefill(engine, request, door, step_s)
            if load_s:
                assert not door.jumps
            else:
                assert door.jumps and door.jumps[0][0] <= 2 * door.step_tokens
                assert engine.scheduler.counts()["cake_tokens"] > TOKENS // 2
            engine.close()


@pytest.mark.parametrize("how", ["preempted", "finished"])
def test_after_a_request_has_lost_its_blocks_they_are_not_written(how: str) -> None:
    words = prompt(TOKENS)
    with Slow(0.005) as store:
        filled(store, words)
        door = Door()
        engine, request = Engine(store, 128, cake=door), Request("second", words)
        engine.matched(request)
        engine.admit(request)
        engine.step((request, door.step_tokens))
        if how == "preempted":
            engine.step(preempted=request)
        else:
            engine.release(request)
            engine.step()
        engine.memory[:] = 9
        time.sleep(0.1)
        for _ in range(5):
            engine.step()
        assert (engine.memory == 9).all() and not engine.worker._backward
        engine.close()


def test_beside_other_requests_or_without_room_it_is_loaded_or_computed() -> None:
    words = prompt(TOKENS)
    with Slow(0.0) as store:
        filled(store, words)
        door = Door()
        engine, request, other = Engine(store, 128, cake=door), Request("second", words), Request("other", prompt(9, 4))
        engine.scheduler.new(other)
        found, beside = engine.matched(request)
        assert found > 20 * VALUE and beside
        engine.scheduler.finished(other)
        assert engine.matched(request) == (0, False)
        door.has_room = False
        engine.admit(request)
        prefill(engine, request, door, 0.001)
        assert not door.jumps and engine.sound(request, TOKENS)
        engine.close()
