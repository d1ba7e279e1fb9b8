"""vLLM resets its caches, since the weights are about to change: nothing of before is used, by whatever path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.engine.vllm.engine import BLOCK, CONTEXT, Door, Engine, Request
from tests.engine.vllm.test_both_sides import filled, prompt
from tests.engine.vllm.test_cake_in_vllm import TOKENS, VALUE, prefill

from skymemory.engine.vllm.transfer_params import TransferParams
from skymemory.errors import InvalidInput
from skymemory.kv.block import hash_blocks
from skymemory.store.memory import MemoryStore

pytestmark = pytest.mark.usefixtures("place")
WORDS = prompt(4 * VALUE + 1)


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    with MemoryStore(1 << 20) as store:
        yield store


def on(store: MemoryStore, **options: Any) -> Engine:
    """An engine that computes nothing because that seems quicker than to ask or to load."""
    engine = Engine(store, **options)
    engine.scheduler._compute.seconds = lambda tokens: None  # type: ignore[method-assign]
    return engine


def answered(engine: Engine, name: str, words: list[int]) -> int:
    """A request is loaded and computed as vLLM does it, and its blocks are those of the weights; the tokens loaded."""
    request = Request(name, words)
    external, _ = engine.matched(request)
    engine.admit(request, external)
    if external:
        engine.until_loaded(request)
    engine.step((request, request.num_tokens - request.num_computed_tokens))
    assert engine.sound(request, request.num_tokens) and not engine.invalid
    engine.release(request)
    saved(engine)
    return external


def saved(engine: Engine) -> None:
    for _ in range(1000):
        engine.step()
        if not engine.scheduler.saving:
            return
    raise AssertionError("it is saved without a limit")


def test_nothing_of_before_a_reset_is_loaded_and_what_comes_after_is_shared_no_more(store: MemoryStore) -> None:
    engine, other = on(store), on(store)
    assert answered(engine, "before", WORDS) == 0 and answered(other, "shared", WORDS) == 4 * VALUE
    for weights in (1, 2):
        assert engine.scheduler.reset()
        engine.weights = weights
        assert answered(engine, f"first {weights}", WORDS) == 0
        assert answered(engine, f"again {weights}", WORDS) == 4 * VALUE
    assert answered(other, "still", WORDS) == 4 * VALUE, "of the weights that it has"
    engine.close()
    other.close()


def half_computed(store: MemoryStore) -> tuple[Engine, Request]:
    engine, request = on(store), Request("kept", WORDS)
    engine.matched(request)
    engine.admit(request)
    engine.step((request, 2 * VALUE))
    return engine, request


def test_a_request_that_lost_its_blocks_is_computed_and_saved_again(store: MemoryStore) -> None:
    engine, request = half_computed(store)
    request.num_computed_tokens = 0  # vLLM preempts it
    assert engine.scheduler.reset()
    engine.weights = 7
    engine.step(preempted=request)
    assert engine.matched(request) == (0, False)
    engine.step((request, request.num_tokens))
    assert engine.sound(request, request.num_tokens)
    engine.release(request)
    saved(engine)
    assert answered(engine, "after", WORDS) == 4 * VALUE
    engine.close()


def test_a_request_that_keeps_its_blocks_saves_nothing_any_more(store: MemoryStore) -> None:
    """Half of them are of other weights: no other request may load that."""
    engine, request = half_computed(store)
    saved(engine)
    before = store.stats()["entries"]
    assert engine.scheduler.reset()
    engine.step((request, request.num_tokens - 2 * VALUE))
    saved(engine)
    assert store.stats()["entries"] == before == 2
    assert engine.scheduler.finished(request) is None
    engine.close()


def test_a_load_that_is_under_way_is_said(store: MemoryStore) -> None:
    filled(store, WORDS)
    engine, request = on(store), Request("loading", WORDS)
    external, _ = engine.matched(request)
    engine.admit(request, external)
    assert not engine.scheduler.reset()
    engine.until_loaded(request)
    engine.step((request, 1))
    saved(engine)
    assert store.stats()["entries"] == 4 and engine.matched(request) == (0, False)
    engine.close()


def test_cake_ends_with_a_reset(store: MemoryStore) -> None:
    words = prompt(TOKENS)
    filled(store, words)
    door = Door()
    engine, request = Engine(store, 128, cake=door), Request("second", words)
    engine.matched(request)
    engine.admit(request)
    engine.step((request, BLOCK))
    assert not engine.scheduler.reset(), "its blocks are written until the next step"
    prefill(engine, request, door, 0.0)
    assert not engine.worker._backward and not door.jumps and engine.sound(request, TOKENS)
    engine.close()


def handed_over(engine: Engine, name: str) -> Any:
    request = Request(name, WORDS, kv_transfer_params={"do_remote_decode": True})
    engine.matched(request)
    engine.admit(request)
    engine.step((request, request.num_tokens))
    saved(engine)
    return engine.scheduler.finished(request)


def test_a_decoding_engine_takes_over_what_the_prefilling_one_names(store: MemoryStore) -> None:
    one, two = on(store, loads=False), on(store, saves=False)
    for round_ in range(3):
        params = handed_over(one, f"p{round_}")
        assert params["sky_tokens"] == 4 * VALUE and ("sky_generation" in params) == (round_ > 0)
        request = Request(f"d{round_}", WORDS, kv_transfer_params=params)
        assert two.matched(request) == (4 * VALUE, True)
        two.admit(request, 4 * VALUE)
        two.until_loaded(request)
        assert two.sound(request, 4 * VALUE) and not two.invalid
        two.release(request)
        for engine in (one, two):
            assert engine.scheduler.reset()
            engine.weights = round_ + 1
    stale = Request("stale", WORDS, kv_transfer_params=params)
    assert two.matched(stale) == (0, False), "it was prefilled before this engine was reset"
    unnamed = Request("unnamed", WORDS, kv_transfer_params={"do_remote_prefill": True})
    assert two.matched(unnamed) == (0, False), "nothing is stored under this engine's generation: it is not waited for"
    one.close()
    two.close()


@pytest.mark.parametrize("generation", ["", "a" * 31, "A" * 32, "g" * 32, 5, ["a" * 32]])
def test_a_generation_is_a_number_of_ours(generation: object) -> None:
    with pytest.raises(InvalidInput, match=r"sky_generation is .*: expected 32 hexadecimal digits"):
        TransferParams.read({"do_remote_prefill": True, "sky_generation": generation})


def test_a_generation_is_random(store: MemoryStore) -> None:
    """Or two engines that were reset as often would share, whatever their weights are."""
    one, two = Engine(store), Engine(store)
    for engine in (one, two):
        engine.scheduler.reset()
    assert one.seeds.generation != two.seeds.generation
    seeds = {engine.seeds.of(Request("r", WORDS)) for engine in (one, two)} | {CONTEXT.digest()}
    assert len(seeds) == 3 and hash_blocks(CONTEXT.digest(), WORDS, VALUE)
    one.close()
    two.close()
