"""Both sides of the connector against each other: what one engine saves another loads, and nothing wrong is saved."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.vllm.engine import BLOCK, CONTEXT, LAYER_BYTES, LAYERS, LAYOUT, SHAPE, SIZE, Engine, Request, one_part
from tests.engine.vllm.queued import QueuedDevice

from skymemory.engine.vllm.copier import CpuCopier, PartCopier, TorchCopier
from skymemory.engine.vllm.plan import LoadRequest, Piece, StepPlan
from skymemory.engine.vllm.scheduler import LoadRate
from skymemory.engine.vllm.worker import WorkerSide, _BackwardJob, _Closed, _Job
from skymemory.kv.block import hash_blocks
from skymemory.store.base import LoadTicket, StoreTicket
from skymemory.store.memory import MemoryStore

VALUE = BLOCK * SIZE
pytestmark = pytest.mark.usefixtures("place")


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return [int(one) for one in np.random.default_rng(seed).integers(0, 1000, tokens)]


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    with MemoryStore(1 << 20) as store:
        yield store


def filled(store: MemoryStore, tokens: list[int]) -> None:
    """By an engine of its own, which is gone afterwards."""
    engine, request = Engine(store), Request("first", tokens)
    assert engine.matched(request) == (0, False)
    engine.admit(request)
    engine.step((request, len(tokens)))
    engine.close()
    assert store.stats()["entries"] == len(tokens) // VALUE


@pytest.mark.parametrize("local", [0, BLOCK, VALUE, 3 * BLOCK])
@pytest.mark.parametrize("tokens", [VALUE, VALUE + 1, 5 * VALUE, 5 * VALUE + 3, 5 * VALUE + BLOCK])
def test_what_one_engine_saved_another_loads(store: MemoryStore, tokens: int, local: int) -> None:
    """All but the last block's worth: its last token is computed; behind what vLLM has already."""
    words = prompt(tokens)
    filled(store, words)
    engine, request = Engine(store), Request("second", words)
    expected = min(tokens // VALUE * VALUE, (tokens - 1) // BLOCK * BLOCK) - local
    found, beside = engine.matched(request, local)
    assert (found, beside) == ((expected, True) if expected > 0 else (0, False))
    engine.admit(request, found, local)
    for block in range(local // BLOCK):
        engine.memory[:, engine.tables["second"][block]] = 7  # its own: not to be written
    if found:
        engine.until_loaded(request)
    for block in range(local // BLOCK):
        assert (engine.memory[:, engine.tables["second"][block]] == 7).all()
    for block in range(local // BLOCK, (local + found) // BLOCK):
        from tests.engine.vllm.engine import kv_of

        assert (engine.memory[:, engine.tables["second"][block]] == kv_of(words, block)).all()
    assert not engine.invalid
    engine.close()


def test_values_are_saved_once_and_with_their_place(store: MemoryStore) -> None:
    words = prompt(4 * VALUE)
    engine, one, two = Engine(store), Request("one", words), Request("two", words)
    for request in (one, two):
        engine.matched(request)
        engine.admit(request)
    engine.step((one, 2 * VALUE + 1), (two, 2 * VALUE + 1))
    engine.step((one, 2 * VALUE - 1), (two, 2 * VALUE - 1))
    engine.close()
    assert store.stats()["stored_total"] == 4
    keys = hash_blocks(CONTEXT.digest(), words, VALUE)
    assert store.prefix(keys) == 4


def test_tokens_that_are_generated_are_saved_when_they_are_known(store: MemoryStore) -> None:
    engine, request = Engine(store), Request("one", prompt(VALUE))
    engine.matched(request)
    engine.admit(request)
    engine.step((request, VALUE))
    for token in range(BLOCK):
        request.all_token_ids.append(token)
        engine.step((request, 1))
    engine.close()
    assert store.stats()["entries"] == 1  # half of the second value


def test_a_request_that_takes_no_part_is_left_alone(store: MemoryStore) -> None:
    engine = Engine(store)
    engine.seeds.of = lambda request, generation="": None  # type: ignore[method-assign]
    request = Request("one", prompt(VALUE + 1))
    assert engine.matched(request) == (0, False)
    engine.admit(request)
    engine.step((request, VALUE + 1))
    engine.close()
    assert store.stats()["entries"] == 0


class Lossy(MemoryStore):
    """Loads of the given keys bring nothing, or hang until ``go``."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.lost: set[bytes] = set()
        self.hangs = False
        self.go = threading.Event()

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        values = super().complete_load(ticket)
        if self.hangs:
            self.go.wait(30)
        return [None if key in self.lost else value for key, value in zip(ticket.keys, values, strict=True)]


@pytest.mark.parametrize("lost", [0, 2, 4])
def test_blocks_of_a_lost_value_and_behind_it_are_reported_and_computed(lost: int) -> None:
    words = prompt(5 * VALUE + 1)
    with Lossy() as store:
        filled(store, words)
        keys = hash_blocks(CONTEXT.digest(), words, VALUE)
        engine, request = Engine(store), Request("second", words + prompt(3 * VALUE, 1))
        found, _ = engine.matched(request)
        assert found == 5 * VALUE
        store.lost = {keys[lost]}
        engine.admit(request, found)
        table = engine.tables["second"]
        engine.until_loaded(request)
        assert engine.invalid == set(table[lost * SIZE : 5 * SIZE])
        # vLLM computes from the first invalid block on.
        request.num_computed_tokens = lost * VALUE
        assert engine.matched(request, lost * VALUE) == (0, False), "not loaded again"
        store.lost = set()
        store.delete(keys[lost:])
        engine.step((request, request.num_tokens - lost * VALUE))
        engine.close()
        again = Engine(store)
        later = Request("third", request.all_token_ids)
        found, _ = again.matched(later)
        assert found == 8 * VALUE
        again.admit(later, found)
        again.until_loaded(later)
        assert again.sound(later, found) and not again.invalid
        again.close()


def test_what_the_store_has_lost_is_saved_again(store: MemoryStore) -> None:
    words = prompt(3 * VALUE)
    keys = hash_blocks(CONTEXT.digest(), words, VALUE)
    engine = Engine(store)
    for name in ("one", "two"):
        request = Request(name, words)
        engine.matched(request)
        engine.admit(request)
        engine.step((request, 3 * VALUE))
        while store.prefix(keys) < 3:
            time.sleep(0.001)
        store.delete(keys)
    engine.close()


def test_a_damaged_value_is_a_miss(store: MemoryStore) -> None:
    words = prompt(3 * VALUE + 1)
    filled(store, words)
    keys = hash_blocks(CONTEXT.digest(), words, VALUE)
    (view,) = store.get_many(keys[1:2])
    assert view is not None
    raw = bytearray(view)
    raw[-1] ^= 1
    store.put_many([(keys[1], raw)])
    engine, request = Engine(store), Request("second", words)
    found, _ = engine.matched(request)
    engine.admit(request, found)
    engine.until_loaded(request)
    assert engine.invalid == set(engine.tables["second"][SIZE : 3 * SIZE])
    assert engine.scheduler.counts()["failed_loads corrupt"] == 1
    engine.close()


@pytest.mark.impatient
def test_a_load_that_hangs_is_given_up_and_writes_no_block_of_who_comes_next() -> None:
    words = prompt(3 * VALUE + 1)
    with Lossy() as store:
        filled(store, words)
        engine, request = Engine(store), Request("second", words)
        engine.worker._compute.record(1000, 0.01)  # computing takes no time at all
        found, _ = engine.matched(request)
        store.hangs = True
        engine.admit(request, found)
        engine.until_loaded(request)
        assert engine.invalid == set(engine.tables["second"][: 3 * SIZE])
        engine.memory[:] = 9
        store.hangs = False
        store.go.set()
        while engine.worker._loaders._running:
            time.sleep(0.001)
        assert (engine.memory[:] == 9).all()
        engine.close()


def test_a_store_that_does_not_answer_look_ups_costs_half_a_second_once() -> None:
    class Hanging(MemoryStore):
        go = threading.Event()

        def prefix(self, keys: Sequence[bytes]) -> int:
            self.go.wait(30)
            return super().prefix(keys)

    now_s = [0.0]
    with Hanging(1 << 20) as store:
        engine = Engine(store, clock=lambda: now_s[0])
        request = Request("one", prompt(VALUE + 1))
        assert engine.scheduler.matched(request, 0) == (None, False)
        now_s[0] = 0.6
        assert engine.scheduler.matched(request, 0) == (0, False)
        store.go.set()
        engine.close()


def test_a_fault_in_a_lookup_is_a_miss_that_is_logged_and_counted(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    words = prompt(VALUE + 1)
    filled(store, words)
    engine = Engine(store)
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler._parts.first, "prefix", lambda keys: 1 / 0)
        assert engine.matched(Request("one", words)) == (0, False)
    assert engine.scheduler.counts()["lookups_failed"] == 1 and "division by zero" in caplog.text
    assert engine.matched(Request("two", words)) == (VALUE, True)
    engine.close()


class Distant(MemoryStore):
    """All that is asked of it takes a while."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.prefix_s = self.load_s = self.store_s = 0.0
        self.asked = 0

    def prefix(self, keys: Sequence[bytes]) -> int:
        time.sleep(self.prefix_s)
        self.asked += 1
        return super().prefix(keys)

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        time.sleep(self.load_s)
        return super().complete_load(ticket)

    def complete_store(self, ticket: StoreTicket) -> list[bool]:
        time.sleep(self.store_s)
        return super().complete_store(ticket)


def test_the_first_lookup_of_a_distant_store_is_waited_for() -> None:
    """It was greeted at the start; computing takes so little time that an unknown store would be waited for 20 ms."""
    words = prompt(3 * VALUE + 1)
    with Distant() as store:
        filled(store, words)
        store.prefix_s, store.asked = 0.4, 0
        engine, request = Engine(store), Request("second", words)
        engine.scheduler._compute.record(1000, 0.001)
        until_s = time.monotonic() + 60
        while store.asked < 3:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        store.prefix_s = 0.1  # the rest is for a busy computer
        assert engine.matched(request) == (3 * VALUE, True)
        assert "lookups_given_up" not in engine.scheduler.counts()
        engine.close()


def computes(engine: Engine, name: str, words: list[int]) -> None:
    request = Request(name, words)
    assert engine.matched(request) == (0, False)
    engine.admit(request)
    engine.step((request, len(words)))
    engine.release(request)


def test_an_engine_without_requests_goes_on_until_its_saves_are_done_and_counted() -> None:
    with Distant() as store:
        store.store_s = 0.1
        engine = Engine(store)
        computes(engine, "one", prompt(3 * VALUE))
        assert engine.scheduler.saving
        steps = 0
        while engine.scheduler.saving:
            engine.step()
            steps += 1
        assert engine.scheduler.counts()["saved_values"] == 3 and store.stats()["entries"] == 3
        assert steps < 100, "a step waits for a save"
        engine.close()


def test_a_store_that_takes_nothing_is_not_waited_for_without_end() -> None:
    now_s = [0.0]
    with Distant() as store:
        store.store_s = 0.2
        engine = Engine(store, clock=lambda: now_s[0])
        computes(engine, "one", prompt(3 * VALUE))
        assert engine.scheduler.saving
        now_s[0] = 31.0
        assert not engine.scheduler.saving
        engine.close()


@pytest.mark.impatient
@pytest.mark.parametrize("read_back", [True, False])
def test_where_loading_is_slower_than_computing_no_prompt_or_one_waits_for_it(read_back: bool) -> None:
    """What an engine has saved it reads back once; without that, the first load is given up and teaches the rate."""
    words = prompt(3 * VALUE + 1)
    with Distant() as store:
        filled(store, words)
        store.load_s = 0.2
        engine = Engine(store)
        engine.worker._saver._reads_back = read_back
        computes(engine, "one", prompt(4 * VALUE, 1))
        while engine.scheduler.saving:
            engine.step()
        for side in (engine.scheduler, engine.worker):
            side._compute.record(100_000, 100.0)  # 24 ms for the prompt
        if not read_back:
            second = Request("second", words)
            assert engine.matched(second) == (3 * VALUE, True)
            engine.admit(second, 3 * VALUE)
            engine.until_loaded(second)
            assert engine.invalid
            engine.release(second)
        assert engine.matched(Request("third", words)) == (0, False)
        assert engine.scheduler.counts()["slower_than_computing_tokens"] == 3 * VALUE
        engine.close()


def test_a_load_that_would_wait_for_others_is_compared_with_what_they_leave_it(store: MemoryStore) -> None:
    """Of requests that come together, as many are loaded as come sooner than they are computed."""
    prompts = [prompt(3 * VALUE + 1, seed) for seed in range(4)]
    for words in prompts:
        engine = Engine(store)
        computes(engine, "before", words)
        engine.close()
    engine = Engine(store)
    engine.scheduler._loading.record(3 * LAYOUT.block_bytes, 0.010)
    engine.scheduler._compute.record(100_000, 100.0)  # 24 ms for each of them
    requests = [Request(str(seed), words) for seed, words in enumerate(prompts)]
    found = []
    for request in requests[:3]:
        found.append(engine.matched(request)[0])
        engine.admit(request, found[-1])
    assert found == [3 * VALUE, 3 * VALUE, 0], "the third one would come in 30 ms"
    for request in requests[:2]:
        engine.until_loaded(request)
    assert not engine.scheduler._under_way and not engine.invalid
    assert engine.matched(requests[3]) == (3 * VALUE, True)
    engine.admit(requests[3], 3 * VALUE)
    engine.scheduler.finished(requests[3])  # given up by its client
    assert not engine.scheduler._under_way
    engine.close()


def test_the_estimate_of_a_load_has_a_fixed_part_and_one_by_bytes() -> None:
    both, alike, odd = LoadRate(), LoadRate(), LoadRate()
    assert both.seconds(1) is None
    for _ in range(5):
        for size in (1_000_000, 4_000_000):
            both.record(size, 0.05 + size / 100e6)
            odd.record(size, 0.1 / size)
        alike.record(4_000_000, 0.08)
    assert both.seconds(16_000_000) == pytest.approx(0.21)
    assert alike.seconds(16_000_000) == pytest.approx(0.32), "nothing is known of a fixed part"
    larger = odd.seconds(16_000_000)
    assert larger is not None and larger > 0, "noise does not make it negative"
    before = both.seconds(4_000_000)
    both.record(0, 5.0)
    both.passed_over()
    assert before is not None and both.seconds(4_000_000) == pytest.approx(0.98 * before)


@pytest.mark.impatient
def test_behind_a_store_that_stood_still_the_next_prompt_is_loaded_and_behind_one_that_became_slow_it_is_not() -> None:
    words = prompt(6 * VALUE + 1)
    with Lossy() as store:
        filled(store, words)
        engine = Engine(store)
        for side in (engine.scheduler, engine.worker):
            side._compute.record(100_000, 100.0)  # 48 ms for the prompt

        def asked(name: str, *, beside: str = "") -> bool:
            """Whether it was loaded."""
            requests = [Request(one, words) for one in (name, beside) if one]
            for request in requests:
                found, _ = engine.matched(request)
                if not found:
                    return False
                engine.admit(request, found)
            for request in requests:
                engine.until_loaded(request)
                engine.release(request)
            invalid, engine.invalid = engine.invalid, set()
            return not invalid

        assert asked("one") and asked("two")
        store.hangs = True
        assert not asked("alone"), "it is given up"
        store.hangs = False
        store.go.set()
        assert asked("next")
        store.go.clear()
        store.hangs = True
        assert not asked("three", beside="four"), "they are given up"
        store.hangs = False
        store.go.set()
        assert asked("five") and asked("six")
        store.go.clear()
        store.hangs = True
        assert not asked("seven") and not asked("eight")
        engine.scheduler.counts()
        assert not asked("nine")
        assert engine.scheduler.counts()["slower_than_computing_tokens"] == 6 * VALUE
        store.go.set()
        engine.close()


def test_a_full_queue_drops_and_the_value_is_saved_when_it_comes_again(store: MemoryStore) -> None:
    words = prompt(4 * VALUE)
    engine, request = Engine(store), Request("one", words)
    saver = engine.worker._saver
    saver._held_bytes.change(1 << 40)
    engine.matched(request)
    engine.admit(request)
    engine.step((request, 4 * VALUE))
    engine.release(request)
    saver._held_bytes.change(-(1 << 40))
    again = Request("two", words)
    engine.matched(again)
    engine.admit(again)
    engine.step((again, 4 * VALUE))
    engine.close()
    assert store.prefix(hash_blocks(CONTEXT.digest(), words, VALUE)) == 4


def test_a_value_that_cannot_be_copied_out_stops_no_step_and_keeps_no_place(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(store)
    engine.worker._saver._held_bytes.limit_bytes = 1
    (copier,), (request, later) = (
        engine.worker._copiers,
        (Request(name, prompt(VALUE, n)) for n, name in enumerate("ab")),
    )
    with monkeypatch.context() as patch:
        patch.setattr(copier, "read", lambda blocks, out: 1 / 0)
        engine.matched(request)
        engine.admit(request)
        engine.step((request, VALUE))
    assert engine.scheduler.counts()["refused_values"] == 1 and not engine.scheduler.saving
    engine.matched(later)
    engine.admit(later)
    engine.step((later, VALUE))
    engine.close()
    assert store.stats()["entries"] == 1


def test_what_waits_is_saved_when_the_engine_stops(store: MemoryStore) -> None:
    engine, request = Engine(store), Request("one", prompt(6 * VALUE))
    engine.matched(request)
    engine.admit(request)
    engine.step((request, 6 * VALUE))
    engine.close()
    assert store.stats()["entries"] == 6


def test_the_tenant_the_adapter_and_the_image_are_in_the_key() -> None:
    from types import SimpleNamespace

    engine = Engine(MemoryStore(1 << 20))
    words = prompt(2 * VALUE)
    plain = engine.scheduler._of(Request("a", words))
    image = SimpleNamespace(identifier="cat", mm_position=SimpleNamespace(offset=VALUE + 1))
    seen = engine.scheduler._of(Request("b", words))
    assert plain is not None and seen is not None and plain.keys == seen.keys
    request = Request("c", words)
    request.mm_features = [image]
    with_image = engine.scheduler._of(request)
    assert with_image is not None
    assert with_image.keys[0] == plain.keys[0] and with_image.keys[1] != plain.keys[1]
    engine.close()


@given(st.lists(st.integers(0, 15), min_size=1, max_size=6, unique=True), st.integers(0, 3), st.integers(1, 3))
def test_the_copier_writes_what_it_read(blocks: list[int], skipped: int, seed: int) -> None:
    """Into other blocks, of part of a value; all others stay."""
    dice = np.random.default_rng(seed)
    memory = dice.integers(0, 256, (LAYERS, 16, LAYER_BYTES), np.uint8)
    copier = CpuCopier(list(memory))
    value = bytearray(copier.block_bytes * len(blocks))
    copier.read(blocks, memoryview(value))
    other = dice.integers(0, 256, memory.shape, np.uint8)
    before = other.copy()
    rest = blocks[skipped:]
    CpuCopier(list(other)).write(rest, memoryview(value), skipped, len(blocks), copier.mark())
    assert (other[:, rest] == memory[:, rest]).all()
    untouched = [at for at in range(16) if at not in rest]
    assert (other[:, untouched] == before[:, untouched]).all()


def test_a_value_has_the_layouts_size() -> None:
    assert LAYOUT.block_bytes == SIZE * CpuCopier(list(np.zeros((LAYERS, 4, LAYER_BYTES), np.uint8))).block_bytes


def jobs_of(device: QueuedDevice) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], _Job, _BackwardJob]:
    """Two loads of three values into the same blocks."""
    memory = np.zeros((LAYERS, 8, LAYER_BYTES), np.uint8)
    copier = PartCopier([TorchCopier([torch.from_numpy(memory).view(torch.int64)], SIZE, device, 1 << 16)])
    load = LoadRequest("one", (Piece(0, (b"a", b"b", b"c"), 0, 0, ((1, 2, 3, 4, 5, 6),)),), 6 * BLOCK)
    after = copier.mark()
    return memory, _Job(load, [copier], after, SIZE, 0.0, 1.0), _BackwardJob(load, [copier], after, SIZE, 0.0, 0)


def test_a_load_that_is_closed_has_written_what_it_was_going_to() -> None:
    memory, job, _ = jobs_of(QueuedDevice(1))
    job.place(0, memoryview(bytes([7]) * LAYOUT.block_bytes))
    assert not memory.any(), "only queued"
    job.close()
    assert (memory[:, 1:3] == 7).all()
    with pytest.raises(_Closed):
        job.place(1, memoryview(bytes([7]) * LAYOUT.block_bytes))


def test_the_fence_is_raised_when_what_lies_below_is_written_and_a_value_counts_when_it_is() -> None:
    memory, _, job = jobs_of(QueuedDevice(1))
    job.place(2, memoryview(bytes([7]) * LAYOUT.block_bytes))
    job.place(1, memoryview(bytes([7]) * LAYOUT.block_bytes))
    assert not memory.any(), "only queued"
    job.on_value(2, "", 1)
    assert job.lowest == 4 and (memory[:, 5:7] == 7).all()
    job.raise_fence(2)  # above those
    job.raise_fence(4)
    assert (memory[:, 3:5] == 7).all()


def test_a_step_takes_what_the_device_takes_not_what_queuing_it_takes(store: MemoryStore) -> None:
    device = QueuedDevice(1)
    worker = WorkerSide(one_part(store), SHAPE)
    view = torch.zeros((LAYERS, 8, LAYER_BYTES), dtype=torch.uint8)
    worker.register([PartCopier([TorchCopier([view], SIZE, device, 1 << 16)])])
    worker.begin(StepPlan(tokens=4))
    device.give("compute", lambda: time.sleep(0.05))
    worker.end()
    assert worker.outcome() is None, "not known yet"
    device.go_on(10)
    worker.begin(StepPlan())
    worker.end()
    outcome = worker.outcome()
    assert outcome is not None and outcome.step_tokens == 4 and outcome.step_s >= 0.05
    worker.close(0)
