"""Cake where something comes between: a request resumed at once, ranks that have come less far, another connector."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.engine.vllm.engine import (
    BLOCK,
    CONTEXT,
    LAYER_BYTES,
    LAYERS,
    SHAPE,
    SIZE,
    Door,
    Engine,
    Request,
    kv_of,
    one_part,
)
from tests.engine.vllm.test_both_sides import filled, prompt

from skymemory.engine.vllm.copier import CpuCopier, PartCopier
from skymemory.engine.vllm.identity import Seeds
from skymemory.engine.vllm.scheduler import SchedulerSide
from skymemory.engine.vllm.worker import WorkerSide
from skymemory.kv.block import hash_blocks
from skymemory.store.base import LoadTicket
from skymemory.store.memory import MemoryStore

VALUE = BLOCK * SIZE
TOKENS = 24 * VALUE + 3
WORDS = prompt(TOKENS)


class Late(MemoryStore):
    """Each load takes ``delay_s``."""

    delay_s = 0.0

    def complete_load(self, ticket: LoadTicket) -> list[Any]:
        time.sleep(self.delay_s)
        return super().complete_load(ticket)


@pytest.fixture
def store() -> Iterator[Late]:
    with Late(1 << 20) as store:
        filled(store, WORDS)
        store.delay_s = 0.05
        yield store


def begun(store: Late) -> tuple[Engine, Request]:
    """One block is computed, and the back is being loaded."""
    engine, request = Engine(store, 256, cake=Door()), Request("second", WORDS)
    assert engine.matched(request) == (0, False)
    engine.admit(request)
    engine.step((request, BLOCK))
    assert engine.worker._backward
    return engine, request


def preempted(engine: Engine, request: Request) -> None:
    """As by vLLM between two steps: its next step names it as preempted, though it has been resumed by then."""
    engine.free = engine.tables.pop(request.request_id) + engine.free
    request.num_computed_tokens = 0


def test_a_request_that_is_resumed_in_the_step_that_says_it_was_preempted(store: Late) -> None:
    engine, request = begun(store)
    old = engine.worker._backward["second"]
    preempted(engine, request)
    engine.matched(request)
    engine.admit(request)
    engine.step((request, BLOCK), preempted=request)
    known = engine.scheduler._known["second"]
    new = engine.worker._backward["second"]
    assert old._closed and new is not old and not new._closed and known.backward is not None
    engine.release(request)
    engine.step()
    assert new._closed and not engine.worker._backward, "an aborted request's load writes no more"
    engine.close()


def test_what_was_loaded_backward_for_a_preempted_request_is_not_written_into_anothers_blocks(store: Late) -> None:
    engine, request = begun(store)
    other = Request("other", prompt(TOKENS, 5))
    engine.scheduler.new(other)
    preempted(engine, request)
    engine.matched(other)
    engine.admit(other)
    tokens, _ = engine.matched(request)
    engine.admit(request, tokens)
    engine.step((other, TOKENS), preempted=request)
    time.sleep(1.0)
    assert engine.sound(other, TOKENS)
    engine.close()


@pytest.mark.parametrize(("counted", "step"), [(12 * VALUE, 0), (12 * VALUE, 1), (0, 0)])
def test_beside_a_connector_that_loads_the_request_nothing_is_loaded_from_the_back(
    store: Late, counted: int, step: int
) -> None:
    """``MultiConnector``: another child has announced twelve values, and the request waits for them, or has them."""
    engine, request = Engine(store, 256, cake=Door()), Request("second", WORDS)
    assert engine.matched(request) == (0, False)
    engine.admit(request)
    request.num_computed_tokens = counted
    for _ in range(20):
        engine.step(*(((request, 1),) if step else ()))
        time.sleep(0.02)
    assert not engine.worker._backward and engine.scheduler._known["second"].backward is None
    assert request.num_computed_tokens == counted + 20 * step
    engine.close()


class LateMark:
    """Of a device that has done a forward 30 ms after it was given it."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def done(self) -> bool:
        return time.perf_counter() - self._at_s > 0.03

    def wait(self) -> None:
        time.sleep(max(0.0, 0.03 - (time.perf_counter() - self._at_s)))

    def seconds_after(self, earlier: LateMark) -> float:
        return self._at_s - earlier._at_s


class Device(CpuCopier):
    def mark(self) -> Any:
        return LateMark()


class Ranks:
    """Two workers with tensors of their own, and vLLM's rule for what they say: one that says nothing is left out."""

    def __init__(self, store: MemoryStore, door: Door) -> None:
        self.memory = [np.zeros((LAYERS, 256, LAYER_BYTES), np.uint8) for _ in range(2)]
        self.table = list(range(1, 200))
        self.scheduler = SchedulerSide(
            one_part(store), SHAPE, Seeds(CONTEXT), lambda name: [[self.table]], cake=door, ranks=2
        )
        self.workers = [WorkerSide(one_part(store), SHAPE, rank=rank) for rank in range(2)]
        for worker, memory in zip(self.workers, self.memory, strict=True):
            worker.register([PartCopier([Device(list(memory))])])

    def step(self, request: Request, tokens: int) -> None:
        scheduled = {request.request_id: tokens} if tokens else {}
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled, total_num_scheduled_tokens=tokens, preempted_req_ids=set()
        )
        plan, start = self.scheduler.plan(output), request.num_computed_tokens
        request.num_computed_tokens += tokens
        for rank, worker in enumerate(self.workers):
            worker.begin(plan)
            for block in range(start // BLOCK, request.num_computed_tokens // BLOCK):
                self.memory[rank][:, self.table[block]] = kv_of(WORDS, block) ^ rank
        time.sleep(0.02)
        found = None
        for worker in self.workers:
            worker.end()
            said = worker.outcome()
            assert said is not None or not worker._backward, "vLLM would take the other rank's word for it"
            found = said if found is None else found.aggregate(said) if said is not None else found
        if found is not None:
            self.scheduler.update(found)
        time.sleep(0.04)

    def wrong_blocks(self, rank: int) -> list[int]:
        return [
            block
            for block in range(TOKENS // BLOCK)
            if not (self.memory[rank][:, self.table[block]] == kv_of(WORDS, block) ^ rank).all()
        ]

    def close(self) -> None:
        for worker in self.workers:
            worker.close(1.0)
        self.scheduler.close()


def test_a_request_goes_on_only_behind_what_all_ranks_have_placed() -> None:
    """One rank's last value is lost, and it has nothing to say in the first step; the other one has."""
    with MemoryStore(1 << 22) as store:
        first, engine = Request("first", WORDS), Ranks(store, Door())
        engine.scheduler.new(first)
        engine.scheduler._loads = False
        engine.step(first, TOKENS)
        while engine.scheduler.saving:
            engine.step(first, 0)
        engine.scheduler.finished(first)
        engine.close()

        engine, second = Ranks(store, Door()), Request("second", WORDS)
        while engine.scheduler.matched(second, 0)[0] is None:
            pass
        store.delete([hash_blocks(CONTEXT.digest(), WORDS, VALUE)[-1]])
        slow, fast = engine.workers[0]._load_found, engine.workers[1]._load_found
        count = [0]

        def slowly(*of: Any) -> Any:
            time.sleep(0.06)
            return slow(*of)

        def fast_at_first(*of: Any) -> Any:
            count[0] += 1
            time.sleep(0.5 if count[0] > 4 else 0.0)
            return fast(*of)

        engine.workers[0]._load_found = slowly  # type: ignore[method-assign]
        engine.workers[1]._load_found = fast_at_first  # type: ignore[method-assign]
        engine.scheduler.allocated(second, 0)
        assert engine.scheduler._known["second"].backward is not None
        while second.num_computed_tokens < TOKENS:
            engine.step(second, min(2 * VALUE, TOKENS - second.num_computed_tokens))
        assert [engine.wrong_blocks(rank) for rank in range(2)] == [[], []]
        engine.close()
