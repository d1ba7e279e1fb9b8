"""Cake by the connector: a prompt computed from its front and loaded from its back, whatever comes when."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.vllm.engine import BLOCK, CONTEXT, SIZE, Door, Engine, Request
from tests.engine.vllm.test_both_sides import filled, prompt

from skymemory.engine.vllm import worker
from skymemory.engine.vllm.copier import Mark
from skymemory.engine.vllm.plan import StepPlan
from skymemory.kv.block import hash_blocks
from skymemory.store.base import LoadTicket
from skymemory.store.memory import MemoryStore

VALUE = BLOCK * SIZE
TOKENS = 24 * VALUE + 3
pytestmark = pytest.mark.usefixtures("place")


class Slow(MemoryStore):
    """Loads take up to ``most_s``."""

    def __init__(self, most_s: float, seed: int = 0) -> None:
        super().__init__(1 << 20)
        self.most_s = most_s
        self._dice = random.Random(seed)

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        time.sleep(self._dice.uniform(0, self.most_s))
        return super().complete_load(ticket)


def watch_the_fence(engine: Engine) -> None:
    """Fails if a block is written that computing has reached."""
    begin, copier = engine.worker.begin, engine.worker._copiers[0]
    assert copier is not None
    write, fences = copier.write, [0]

    def noted(plan: StepPlan) -> None:
        begin(plan)
        fences.append(max(plan.fences.values(), default=0))

    def checked(blocks: Sequence[int], value: memoryview, skipped: int, of: int, after: Mark) -> Mark:
        table = engine.tables["second"]
        assert min(map(table.index, blocks)) >= fences[-1]
        return write(blocks, value, skipped, of, after)

    engine.worker.begin = noted  # type: ignore[method-assign]
    copier.write = checked  # type: ignore[method-assign]


def prefill(engine: Engine, request: Request, door: Door, step_s: float) -> None:
    """Until all of it is computed or loaded."""
    for _ in range(1000):
        if request.num_computed_tokens >= request.num_tokens:
            return
        time.sleep(step_s)
        engine.step((request, min(door.step_tokens, request.num_tokens - request.num_computed_tokens)))
    raise AssertionError("it does not end")


@pytest.mark.brief()
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
        door = Door()
        engine, request = Engine(store, 128, cake=door), Request("second", words)
        assert engine.matched(request, local) == (0, False)
        store.delete([keys[at] for at in lost])  # evicted after the lookup
        watch_the_fence(engine)
        engine.admit(request, 0, local)
        for block in range(local // BLOCK):  # vLLM has them already
            before, request.num_computed_tokens = request.num_computed_tokens, block * BLOCK
            engine._give(request, BLOCK)
            request.num_computed_tokens = before
        prefill(engine, request, door, step_s)
        assert engine.sound(request, TOKENS)
        assert not [name for name in engine.scheduler.counts() if name.endswith("fault")]
        assert not engine.invalid and not engine.finished
        for computed, end in door.jumps:
            assert computed < end <= (TOKENS - 1) // BLOCK * BLOCK
        tried = [at for at in lost if at >= max((computed for computed, _ in door.jumps), default=TOKENS) // VALUE]
        engine.close()
        store.most_s = 0.0
        assert all(store.prefix([keys[at]]) for at in tried), "what was seen to be lost is saved again"


def test_a_fast_link_loads_most_and_a_slow_one_nothing() -> None:
    words = prompt(TOKENS)
    for load_s, step_s in ((0.0, 0.05), (2.0, 0.0)):
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
                assert door.jumps and door.jumps[0][0] <= 6 * door.step_tokens
                assert engine.scheduler.counts()["cake_tokens"] > TOKENS // 2
            engine.close()


def test_a_load_takes_until_its_last_value_comes_not_until_the_step_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or every store would seem as slow as a step, and none fast enough to be loaded from without computing."""
    words, give, step_s = prompt(TOKENS), Engine._give, [0.8]

    def slow(engine: Engine, request: Request, tokens: int) -> None:
        time.sleep(step_s[0])
        give(engine, request, tokens)

    monkeypatch.setattr(Engine, "_give", slow)
    with Slow(0.0) as store:
        filled(store, words)
        door = Door()
        engine, first, other = Engine(store, 256, cake=door), Request("first", words), Request("other", prompt(128, 9))
        assert engine.matched(first) == (0, False)
        engine.admit(first)
        prefill(engine, first, door, 0.0)
        engine.release(first)
        step_s[0] = 0.15  # the load of this store is faster than such steps, too
        assert engine.matched(other) == (0, False)
        engine.admit(other)
        prefill(engine, other, door, 0.0)
        engine.release(other)
        assert engine.matched(Request("second", words)) == ((TOKENS - 1) // BLOCK * BLOCK, True)
        engine.close()


@pytest.mark.parametrize(("paired_s", "most"), [(0.0, 1), (60.0, 2)])
def test_over_a_slow_link_one_value_is_loaded_at_a_time(
    paired_s: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two would each take twice as long, at last longer than a store may take to answer."""
    monkeypatch.setattr(worker, "_PAIRED_S", paired_s)
    words, loading, seen = prompt(TOKENS), [0], [0]

    class Counting(Slow):
        def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
            loading[0] += 1
            seen[0] = max(seen[0], loading[0])
            time.sleep(0.02)
            loading[0] -= 1
            return super().complete_load(ticket)

    with Counting(0.0) as store:
        filled(store, words)
        door = Door()
        engine, request = Engine(store, 128, cake=door), Request("second", words)
        engine.matched(request)
        engine.admit(request)
        seen[0] = 0
        prefill(engine, request, door, 0.05)
        assert door.jumps and seen[0] == most
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
        assert (engine.memory[:] == 9).all() and not engine.worker._backward
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


def test_who_must_not_read_a_cache_computes_all_and_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """For log probabilities of the prompt, or pooling over all tokens, vLLM needs each of them computed."""
    words = prompt(TOKENS)
    with Slow(0.0) as store:
        filled(store, words)
        keys = hash_blocks(CONTEXT.digest(), words, VALUE)
        store.delete([keys[-1]])
        door = Door()
        engine, request = Engine(store, 128, cake=door), Request("second", words, skip_reading_prefix_cache=True)
        asked: list[bytes] = []
        monkeypatch.setattr(engine.scheduler, "_find_prefix", lambda *how: asked.append(b"") or 0)
        assert engine.matched(request) == (0, False) and not asked
        engine.admit(request)
        prefill(engine, request, door, 0.0)
        assert not door.jumps and not engine.worker._backward and engine.sound(request, TOKENS)
        engine.close()
        assert store.prefix(keys) == len(keys)
