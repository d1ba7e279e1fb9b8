"""Loaded tokens count as used when vLLM's scheduler goes on behind them, and else by reason."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.engine.vllm.engine import BLOCK, SIZE, Door, Engine, Request

from skymemory.engine.vllm.plan import COUNTS, WITH_REASON
from skymemory.store.memory import MemoryStore

pytestmark = pytest.mark.usefixtures("place")

VALUE = BLOCK * SIZE
TOKENS = list(range(5 * VALUE + 3))


@pytest.fixture
def store() -> Any:
    """With five values of the prompt."""
    store = MemoryStore()
    engine = Engine(store)
    first = Request("first", TOKENS)
    engine.matched(first)
    engine.admit(first)
    engine.step((first, len(TOKENS)))
    while engine.scheduler.saving:
        engine.step()
    engine.release(first)
    engine.close()
    return store


def loading(engine: Engine) -> Request:
    """A request whose prompt has been loaded."""
    request = Request("again", TOKENS)
    tokens, _ = engine.matched(request)
    assert tokens == 5 * VALUE
    engine.admit(request, tokens)
    engine.until_loaded(request)
    return request


def counts(engine: Engine) -> dict[str, int]:
    names = ("loaded_tokens", "used_tokens", "unused_tokens", "requested_tokens")
    return {name: count for name, count in engine.scheduler.counts().items() if name.startswith(names)}


def test_what_the_scheduler_goes_on_behind_is_used(store: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(store)
    request = loading(engine)
    assert counts(engine) == {"requested_tokens": 5 * VALUE}, "nothing has been saved yet"
    engine.step((request, 3))
    engine.step((request, 1))
    engine.release(request)
    assert counts(engine) == {"loaded_tokens": 5 * VALUE, "used_tokens": 5 * VALUE} and not caplog.records
    engine.close()


@pytest.mark.parametrize("behind", [0, 2 * VALUE])
def test_what_it_computes_all_the_same_is_not(store: Any, behind: int, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(store)
    request = loading(engine)
    request.num_computed_tokens = behind
    engine.step((request, len(TOKENS) - behind))
    found = counts(engine)
    assert (found["loaded_tokens"], found.get("used_tokens", 0)) == (5 * VALUE, behind)
    assert found["unused_tokens computed all the same"] == 5 * VALUE - behind
    engine.release(request)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "again, though they were loaded" in record.getMessage()
    engine.close()


def test_of_a_load_that_failed_what_came_before_is_used(store: Any) -> None:
    engine = Engine(store)
    request = Request("again", TOKENS)
    tokens, _ = engine.matched(request)
    lost = engine.scheduler._known["again"].keys[3]
    store.delete([lost])
    engine.admit(request, tokens)
    engine.until_loaded(request)
    request.num_computed_tokens = 3 * VALUE  # as vLLM does where blocks are reported
    engine.step((request, len(TOKENS) - 3 * VALUE))
    assert counts(engine) == {"requested_tokens": 5 * VALUE, "loaded_tokens": 3 * VALUE, "used_tokens": 3 * VALUE}
    engine.release(request)
    engine.close()


def test_a_request_that_ends_has_used_nothing(store: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(store)
    request = loading(engine)
    engine.release(request)
    found = counts(engine)
    assert (found["loaded_tokens"], found["used_tokens"]) == (5 * VALUE, 0)
    assert found["unused_tokens the request ended"] == 5 * VALUE and not caplog.records
    engine.close()


def test_cake_uses_what_it_met(store: Any) -> None:
    engine = Engine(store, cake=Door())
    request = Request("again", TOKENS)
    assert engine.matched(request) == (0, False)
    engine.admit(request)
    jumps = engine.scheduler._cake.jumps
    while not jumps and request.num_computed_tokens < len(TOKENS):
        time.sleep(0.01)  # for the loading side
        engine.step((request, min(BLOCK, len(TOKENS) - request.num_computed_tokens)))
    found = engine.scheduler.counts()
    assert found.get("used_tokens", 0) == found.get("cake_tokens", 0) == sum(end - start for start, end in jumps)
    assert jumps or engine.device is not None
    unused = found.get("unused_tokens computed meanwhile", 0)
    assert found.get("loaded_tokens", 0) == found.get("used_tokens", 0) + unused
    engine.release(request)
    engine.close()


def test_each_count_is_described() -> None:
    assert {"loaded_tokens", "used_tokens", "unused_tokens"} <= COUNTS.keys() and COUNTS.keys() >= WITH_REASON
