"""Prefill and decode apart: one engine stores a prompt's values while it computes, another loads them meanwhile."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.engine.vllm.engine import BLOCK, CONTEXT, LAYER_BYTES, LAYERS, LAYOUT, SHAPE, SIZE, Door, Engine, Request
from tests.engine.vllm.test_both_sides import filled, prompt

from skymemory.engine.vllm.copier import CpuCopier, PartCopier
from skymemory.engine.vllm.plan import Loaded, StepPlan, WorkerOutcome, rank_key
from skymemory.engine.vllm.transfer_params import TransferParams
from skymemory.engine.vllm.waiting import DelayedCalls, PollInterval
from skymemory.engine.vllm.worker import WorkerSide
from skymemory.errors import InvalidInput
from skymemory.kv.block import hash_blocks
from skymemory.kv.value import PAYLOAD_AT, block_header
from skymemory.reasons import Miss
from skymemory.store.base import KeyReport, LoadReport, LoadTicket
from skymemory.store.memory import MemoryStore

VALUE = BLOCK * SIZE
HAND_OVER = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
TAKE_OVER = {"do_remote_prefill": True}
pytestmark = pytest.mark.usefixtures("place")


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    with MemoryStore(1 << 20) as store:
        yield store


def producer(store: MemoryStore, **more: Any) -> Engine:
    return Engine(store, loads=False, **more)


def consumer(store: MemoryStore, **more: Any) -> Engine:
    return Engine(store, saves=False, **more)


def asked(engine: Engine, request: Request, params: Any) -> Request:
    """It has come, with these parameters."""
    request.kv_transfer_params = params
    engine.scheduler.new(request)
    return request


def stepped_until(engine: Engine, true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end_s
        engine.step()


def counts(engine: Engine, into: dict[str, int]) -> dict[str, int]:
    """All counts so far."""
    for name, count in engine.scheduler.counts().items():
        into[name] = into.get(name, 0) + count
    return into


@pytest.mark.parametrize(
    ("params", "read"),
    [
        (None, TransferParams()),
        ({}, TransferParams()),
        (HAND_OVER, TransferParams(hands_over=True)),
        ({"do_remote_prefill": True, "sky_tokens": 0, "remote_port": 5}, TransferParams(takes_over=True, tokens=0)),
        ({"sky_tokens": 8}, TransferParams(takes_over=True, tokens=8)),
        ({"do_remote_prefill": True, "sky_wait_ms": 20.5}, TransferParams(takes_over=True, wait_s=0.0205)),
    ],
)
def test_parameters(params: Any, read: TransferParams) -> None:
    assert TransferParams.read(params) == read


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ("yes", "expected a JSON object"),
        ([1], "expected a JSON object"),
        ({"do_remote_prefill": 1}, "do_remote_prefill is 1: expected true or false"),
        ({"do_remote_decode": "true"}, "do_remote_decode is 'true'"),
        ({"sky_tokens": -1}, "sky_tokens is -1: expected a whole number"),
        ({"sky_tokens": True}, "sky_tokens is True"),
        ({"sky_tokens": 1.5}, "sky_tokens is 1.5"),
        ({"sky_wait_ms": float("nan")}, "sky_wait_ms is nan: expected milliseconds"),
        ({"sky_wait_ms": "5"}, "sky_wait_ms is '5'"),
        ({"sky_wait_ms": -(10**400)}, "sky_wait_ms is -1000"),
    ],
)
def test_parameters_that_are_malformed_are_logged_and_the_request_is_answered(
    params: Any, said: str, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(InvalidInput, match=said):
        TransferParams.read(params)
    engine = Engine(store)
    request = asked(engine, Request("one", prompt(2 * VALUE + 1)), params)
    assert engine.matched(request) == (0, False)
    engine.admit(request)
    engine.step((request, request.num_tokens))
    assert engine.scheduler.finished(request) is None
    assert [record.levelno for record in caplog.records if said in record.message] == [logging.WARNING]
    engine.close()


def test_a_number_of_milliseconds_that_no_float_holds_is_a_long_time() -> None:
    assert TransferParams.read({"sky_wait_ms": 10**400}).wait_s == 1e9


def test_a_prompt_is_loaded_while_another_engine_computes_it(store: MemoryStore) -> None:
    """Both steps are sent at once; after each chunk its values come, and at most those of the last are left."""
    words = prompt(8 * VALUE + 3)
    one, two, seen = producer(store), consumer(store), dict[str, int]()
    first, second = asked(one, Request("p", words), HAND_OVER), asked(two, Request("d", words), TAKE_OVER)
    assert two.matched(second) == (8 * VALUE, True), "nothing is stored yet"
    two.admit(second, 8 * VALUE)
    assert one.matched(first) == (0, False)
    one.admit(first)
    for chunk in range(4):
        stepped_until(two, lambda chunk=chunk: counts(two, seen).get("waited_values", 0) == 2 * chunk)  # type: ignore[misc]
        assert not two.finished
        one.step((first, 2 * VALUE))
    one.step((first, 3))
    assert one.scheduler.finished(first) == {"sky_tokens": 8 * VALUE}
    two.until_loaded(second)
    assert two.sound(second, 8 * VALUE) and not two.invalid
    counts(two, seen)
    assert (seen["waited_loads"], seen["waited_values"], seen.get("waits_given_up", 0)) == (1, 8, 0)
    assert not [name for name in seen if name.startswith("failed_loads")] and "lookups" not in seen
    one.close()
    two.close()


@pytest.mark.parametrize(
    ("tokens", "more", "local", "expected"),
    [
        (3 * VALUE + 1, {}, 0, 3 * VALUE),
        (3 * VALUE, {}, 0, 3 * VALUE - BLOCK),  # the last token is computed
        (3 * VALUE + 1, {"sky_tokens": 2 * VALUE}, 0, 2 * VALUE),
        (3 * VALUE + 1, {"sky_tokens": 2 * VALUE + 1}, BLOCK, 2 * VALUE - BLOCK),
        (3 * VALUE + 1, {"sky_tokens": 1 << 40}, 2 * VALUE, VALUE),
        (3 * VALUE + 1, {"sky_tokens": 0}, 0, 0),
        (3 * VALUE + 1, {"sky_tokens": VALUE}, VALUE, 0),
        (VALUE - 1, {}, 0, 0),
    ],
)
def test_what_is_waited_for(store: MemoryStore, tokens: int, more: dict[str, Any], local: int, expected: int) -> None:
    words = prompt(tokens)
    engine = consumer(store)
    request = asked(engine, Request("d", words), TAKE_OVER | more)
    for _ in range(2):  # there were no free blocks
        assert engine.matched(request, local) == (expected, expected > 0)
    filled(store, words)
    engine.admit(request, expected, local)
    if expected:
        engine.until_loaded(request)
    blocks = range(local // BLOCK, (local + expected) // BLOCK)
    table = engine.tables["d"]
    from tests.engine.vllm.engine import kv_of

    assert all((engine.memory[:, table[at]] == kv_of(words, at)).all() for at in blocks) and not engine.invalid
    assert engine.scheduler._waiting_since_s == {}
    engine.close()


@pytest.mark.parametrize("came", [0, 1, 3])
@pytest.mark.parametrize("by", ["setting", "request"])
def test_where_no_more_comes_the_rest_is_computed(store: MemoryStore, came: int, by: str) -> None:
    """As when the other engine is killed: what came counts, and a smaller patience of the request's wins."""
    words = prompt(4 * VALUE + 1)
    keys = hash_blocks(CONTEXT.digest(), words, VALUE)
    filled(store, words)
    store.delete(keys[came:])
    engine, now_s, seen = consumer(store, wait_s=0.1 if by == "setting" else 30.0), [0.0], dict[str, int]()
    engine.worker._clock = engine.scheduler._clock = lambda: now_s[0]
    request = asked(engine, Request("d", words), TAKE_OVER | {"sky_wait_ms": 10_000 if by == "setting" else 100})
    assert engine.matched(request) == (4 * VALUE, True)
    engine.admit(request, 4 * VALUE)
    engine.step()
    stepped_until(engine, lambda: counts(engine, seen).get("waited_values", 0) == came)
    now_s[0] += 0.09
    engine.step()
    assert not engine.finished
    now_s[0] += 0.02
    engine.until_loaded(request)
    assert engine.invalid == set(engine.tables["d"][came * SIZE : 4 * SIZE])
    assert engine.sound(request, came * VALUE)
    counts(engine, seen)
    assert seen["waits_given_up"] == seen["failed_loads not stored in time"] == 1 and seen["waiting_ms"] >= 100
    assert seen["recomputed_tokens"] == (4 - came) * VALUE
    assert engine.matched(request) == (0, False), "vLLM asks again where nothing came"
    engine.close()


def test_each_value_that_comes_begins_the_deadline_again(store: MemoryStore) -> None:
    words = prompt(4 * VALUE + 1)
    keys = hash_blocks(CONTEXT.digest(), words, VALUE)
    filled(store, words)
    values = [bytes(value) for value in store.get_many(keys) if value is not None]
    store.delete(keys)
    engine, now_s, seen = consumer(store, wait_s=5.0), [0.0], dict[str, int]()
    engine.worker._clock = lambda: now_s[0]
    request = asked(engine, Request("d", words), TAKE_OVER)
    engine.matched(request)
    engine.admit(request, 4 * VALUE)
    for number, (key, value) in enumerate(zip(keys, values, strict=True), 1):
        engine.step()
        now_s[0] += 4.9
        engine.step()
        assert not engine.finished
        store.put_many([(key, value)])
        stepped_until(engine, lambda number=number: counts(engine, seen).get("waited_values") == number)  # type: ignore[misc]
    engine.until_loaded(request)
    assert engine.sound(request, 4 * VALUE) and not engine.invalid
    engine.close()


class Failing(MemoryStore):
    """As a daemon that is gone."""

    reason: Miss | None = None

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        values = super().complete_load(ticket)
        if not self.reason:
            return values
        ticket.report = LoadReport(tuple(KeyReport(reason=self.reason) for _ in values), 0.0)
        return [None] * len(values)


@pytest.mark.parametrize("reason", [Miss.UNREACHABLE, Miss.CORRUPT])
def test_a_store_that_fails_ends_the_wait(reason: Miss) -> None:
    words = prompt(3 * VALUE + 1)
    with Failing(1 << 20) as store:
        filled(store, words)
        store.reason = reason
        engine = consumer(store, wait_s=30.0)
        request = asked(engine, Request("d", words), TAKE_OVER)
        engine.matched(request)
        engine.admit(request, 3 * VALUE)
        engine.until_loaded(request)
        assert engine.invalid == set(engine.tables["d"][: 3 * SIZE])
        seen = engine.scheduler.counts()
        assert seen[f"failed_loads {reason}"] == 1 and seen.get("waits_given_up", 0) == 0
        engine.close()


class Hanging(MemoryStore):
    """Loads of these keys hang until ``go``."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.keys: set[bytes] = set()
        self.go = threading.Event()

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        if self.keys & set(ticket.keys):
            self.go.wait(30)
        return super().complete_load(ticket)


@pytest.mark.parametrize("hangs", [False, True])
def test_loads_that_wait_hold_up_no_other(hangs: bool) -> None:
    """Many of them, whose values never come, or whose store hangs; an ordinary load and a step go on."""
    words = prompt(3 * VALUE + 1)
    with Hanging() as store:
        filled(store, words)
        engine = consumer(store, wait_s=30.0)
        engine.free = list(range(1, 64))
        for number in range(8):
            missing = prompt(VALUE + 1, 100 + number)
            store.keys |= set(hash_blocks(CONTEXT.digest(), missing, VALUE)) if hangs else set()
            request = asked(engine, Request(f"waits {number}", missing), TAKE_OVER)
            assert engine.matched(request) == (VALUE, True)
            engine.admit(request, VALUE)
        engine.step()
        ordinary = asked(engine, Request("ordinary", words), None)
        assert engine.matched(ordinary) == (3 * VALUE, True)
        engine.admit(ordinary, 3 * VALUE)
        engine.until_loaded(ordinary)
        assert engine.finished == {"ordinary"} and engine.sound(ordinary, 3 * VALUE)
        store.go.set()
        engine.close()


def test_a_request_that_is_aborted_ends_its_load_and_nothing_is_written_any_more(store: MemoryStore) -> None:
    """vLLM frees its blocks when the workers report the load's end: another request has them then."""
    words = prompt(4 * VALUE + 1)
    keys = hash_blocks(CONTEXT.digest(), words, VALUE)
    filled(store, words)
    values = [bytes(value) for value in store.get_many(keys) if value is not None]
    store.delete(keys[1:])
    engine, seen = consumer(store, wait_s=30.0), dict[str, int]()
    request = asked(engine, Request("d", words), TAKE_OVER)
    engine.matched(request)
    engine.admit(request, 4 * VALUE)
    stepped_until(engine, lambda: counts(engine, seen).get("waited_values") == 1)
    engine.scheduler.finished(request)
    engine.step()
    assert engine.finished == {"d"} and not engine.invalid and not engine.worker._jobs
    engine.sound(request, 0)  # what the device was given is done
    engine.memory[:] = 9
    store.put_many(list(zip(keys, values, strict=True)))
    time.sleep(0.1)  # twice the longest pause
    assert (engine.memory[:] == 9).all()
    assert not engine.worker._waiters._later and not engine.scheduler._known
    assert not engine.scheduler._waiting_since_s
    counts(engine, seen)
    assert not [name for name in seen if name.startswith("failed_loads")] and "recomputed_tokens" not in seen
    engine.step()
    assert engine.finished == {"d"}
    engine.close()


def test_neither_cake_nor_computing_comes_instead_of_waiting(store: MemoryStore) -> None:
    words = prompt(24 * VALUE + 3)
    filled(store, words)
    engine = consumer(store, cake=Door(), blocks=128)
    engine.scheduler._loading.record(LAYOUT.block_bytes, 1.0)
    engine.scheduler._compute.record(100_000, 0.1)
    request = asked(engine, Request("d", words), TAKE_OVER)
    assert engine.matched(request) == (24 * VALUE, True)
    engine.admit(request, 24 * VALUE)
    engine.until_loaded(request)
    assert engine.sound(request, 24 * VALUE)
    assert engine.scheduler._loading.seconds(LAYOUT.block_bytes) == 1.0, "waiting says nothing of the store"
    engine.close()


@pytest.mark.parametrize("by", ["setting", "request", "role"])
def test_without_patience_it_is_looked_up_as_ever(store: MemoryStore, by: str) -> None:
    words = prompt(3 * VALUE + 1)
    filled(store, words[: 2 * VALUE])
    engine = Engine(store, wait_s=0.0 if by == "setting" else 5.0, loads=by != "role")
    request = asked(engine, Request("d", words), TAKE_OVER | ({"sky_wait_ms": 0} if by == "request" else {}))
    assert engine.matched(request) == ((0, False) if by == "role" else (2 * VALUE, True))
    engine.close()


def test_after_a_preemption_it_is_looked_up_as_ever(store: MemoryStore) -> None:
    words = prompt(3 * VALUE + 1)
    filled(store, words)
    engine = consumer(store)
    request = asked(engine, Request("d", words), TAKE_OVER)
    found, _ = engine.matched(request)
    engine.admit(request, found)
    engine.until_loaded(request)
    engine.step((request, 1))
    request.all_token_ids += prompt(VALUE, 1)  # generated, and not stored
    engine.step(preempted=request)
    assert engine.matched(request) == (3 * VALUE, True)
    assert engine.scheduler.counts()["lookups"] == 1
    engine.close()


def test_what_the_store_has_lost_is_saved_again_for_who_takes_over_and_what_it_has_is_not(store: MemoryStore) -> None:
    """An engine that only saves would never learn of it: the other would wait for nothing, each time."""
    words = prompt(4 * VALUE + 1)
    keys = hash_blocks(CONTEXT.digest(), words, VALUE)
    engine, seen = producer(store), dict[str, int]()
    for name, lost in (("one", keys), ("two", keys[2:]), ("three", [])):
        store.delete(lost)
        request = asked(engine, Request(name, words), HAND_OVER)
        assert engine.matched(request) == (0, False)
        engine.admit(request)
        engine.step((request, len(words)))
        assert engine.scheduler.finished(request) == {"sky_tokens": 4 * VALUE}
        engine.free += engine.tables.pop(name)
        stepped_until(engine, lambda: not engine.scheduler.saving)
        assert store.prefix(keys) == 4
    counts(engine, seen)
    assert (seen["saved_values"], seen.get("present_values", 0)) == (6, 0)
    engine.close()


def test_values_for_which_there_is_no_room_are_not_promised_and_saved_when_they_come_again(store: MemoryStore) -> None:
    words = prompt(6 * VALUE + 1)
    engine = producer(store)
    request = asked(engine, Request("one", words), HAND_OVER)
    assert engine.matched(request) == (0, False)
    engine.admit(request)
    engine.step((request, 2 * VALUE))
    saver = engine.worker._saver
    with saver._changed:
        saver._held_bytes.change(1 << 40)
    engine.step((request, 2 * VALUE))
    with saver._changed:
        saver._held_bytes.change(-(1 << 40))
    engine.step((request, 2 * VALUE + 1))
    assert engine.scheduler.finished(request) == {"sky_tokens": 2 * VALUE}
    again = asked(engine, Request("two", words), None)
    engine.admit(again)
    engine.step((again, len(words)))
    engine.close()
    assert store.prefix(hash_blocks(CONTEXT.digest(), words, VALUE)) == 6


@pytest.mark.parametrize("tokens", [1, VALUE - 1, VALUE, 2 * VALUE + 1])
def test_whole_values_are_handed_over(store: MemoryStore, tokens: int) -> None:
    words = prompt(tokens)
    for engine, answers in ((producer(store), True), (consumer(store), False)):
        request = asked(engine, Request("p", words), HAND_OVER)
        assert engine.matched(request)[0] == 0 or not answers
        engine.admit(request)
        engine.step((request, tokens))
        request.all_token_ids.append(7)
        answer = {"sky_tokens": tokens // VALUE * VALUE} if answers else None
        assert engine.scheduler.finished(request) == answer
        engine.close()


def test_a_load_of_several_ranks_waits_for_all_and_counts_once(store: MemoryStore) -> None:
    ours, theirs = Loaded(2, Miss.NOT_IN_TIME, 10, 0.5, 8, True), Loaded(3, None, 20, 0.2, 0, True)
    both = WorkerOutcome({"d": ours}).aggregate(WorkerOutcome({"d": theirs})).loaded["d"]
    assert (both.lost, both.reason, both.waited) == (2, Miss.NOT_IN_TIME, True)
    engine = consumer(store)
    for number, ranks in enumerate(((ours, ours), (theirs, ours), (ours, theirs))):  # in steps of their own
        request = asked(engine, Request(name := f"d{number}", prompt(3 * VALUE + 1)), TAKE_OVER)
        engine.matched(request)
        engine.admit(request, 3 * VALUE)
        for one in ranks:
            engine.scheduler.update(WorkerOutcome({name: one}))
        seen = engine.scheduler.counts()
        assert (seen["waits_given_up"], seen["recomputed_tokens"]) == (1, 8)
    engine.close()


def test_each_rank_waits_for_its_own_part_of_a_value(store: MemoryStore) -> None:
    """The other engine's second rank is killed behind its first value: two of the first rank's have come by then."""
    words = prompt(3 * VALUE + 1)
    filled(store, words)
    keys = hash_blocks(CONTEXT.digest(), words, VALUE)
    (value,) = store.get_many(keys[:1])
    assert value is not None
    payload = bytes(value[PAYLOAD_AT:])
    store.put_many([(key := rank_key(keys[0], 1), block_header(key, LAYOUT, 0, payload) + payload)])
    store.delete(keys[2:])
    engine = consumer(store, wait_s=0.1)
    second = WorkerSide(engine.worker._parts, SHAPE, rank=1)
    second.register([PartCopier([CpuCopier(list(np.zeros((LAYERS, 64, LAYER_BYTES), np.uint8)))])])
    request = asked(engine, Request("d", words), TAKE_OVER)
    engine.matched(request)
    engine.admit(request, 3 * VALUE)
    output = SimpleNamespace(num_scheduled_tokens={}, total_num_scheduled_tokens=0, preempted_req_ids=None)
    plan, invalid, finished = engine.scheduler.plan(output), set[int](), Counter[str]()
    for side in (engine.worker, second):
        side.begin(plan)
    end_s = time.monotonic() + 20
    while finished["d"] < 2:
        assert time.monotonic() < end_s
        for side in (engine.worker, second):
            side.end()
            finished.update(side.finished())
            invalid |= side.invalid_blocks()
            if (outcome := side.outcome()) is not None:
                engine.scheduler.update(outcome)
            side.begin(StepPlan())
    assert invalid == set(engine.tables["d"][1 * SIZE : 3 * SIZE])
    seen = engine.scheduler.counts()
    assert (seen["waited_values"], seen["waits_given_up"]) == (3, 1)
    second.close(0)
    engine.close()


@example([(0, 0.0)] * 9)
@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 20), st.floats(0, 1)), max_size=40))
def test_the_pace_of_questions(answers: list[tuple[int, float]]) -> None:
    """From 2 ms to 50 ms while nothing comes, at once while all comes; never for more than 16 values."""
    pace, before_s = PollInterval(), 0.0
    for values, seconds in answers:
        wanted = pace.values
        pause_s = pace.on_values(min(values, wanted), seconds)
        assert 1 <= pace.values <= min(16, 2 * wanted)
        if not values:
            assert pause_s == pytest.approx(min(0.05, max(0.002, 2 * before_s)))
            assert pace.values == 1
        elif values >= wanted:
            assert pause_s == 0
            assert pace.values > wanted or wanted == 16 or seconds > 0.25
        before_s = pause_s if not values else 0.0


def test_delayed_calls_are_begun_in_their_order_and_not_after_the_end() -> None:
    calls, begun = DelayedCalls("test", 1, 8), list[str]()
    calls.call(lambda: begun.append("late"), 1.0)
    calls.call(lambda: begun.append("sooner"), 0.5)
    calls.call(lambda: begun.append("now"))
    end_s = time.monotonic() + 60
    while len(begun) < 3:
        assert time.monotonic() < end_s
        time.sleep(0.001)
    assert begun == ["now", "sooner", "late"]
    calls.call(lambda: begun.append("never"), 0.5)
    calls.close()
    calls.call(lambda: begun.append("never"))
    time.sleep(0.6)
    assert len(begun) == 3
