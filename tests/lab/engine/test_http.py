"""The engine as its clients see it: the same tokens with and without its cache, and what it says of that."""

from __future__ import annotations

import random
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests.lab.door import Door

from skymemory.conductor.picker import PrefillTotals
from skymemory.router.engines.engine_metrics import read_metrics

pytestmark = pytest.mark.engine
BLOCK = 16


def some_ids(count: int, seed: int = 1) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(3, 8000) for _ in range(count)]


def said(ready: Any, ids: list[int], new: int) -> str:
    """What transformers' own ``generate`` says, greedily, without any of our caches."""
    prompt = torch.tensor([ids])
    out = ready.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, do_sample=False)
    return str(ready.tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True))


@pytest.mark.brief()
def test_the_same_tokens_with_and_without_the_cache_and_as_transformers_says(door: Door, ready: Any) -> None:
    ids = some_ids(100)
    expected = said(ready, ids, 24)
    first = door.complete(ids, 24)
    again = door.complete(ids, 24)
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 96}
    assert first["choices"][0]["text"] == again["choices"][0]["text"] == expected
    assert again["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": 100,
        "completion_tokens": 24,
        "total_tokens": 124,
        "prompt_tokens_details": None,
    }


def test_cached_tokens_are_whole_blocks_and_never_all_of_a_prompt(door: Door) -> None:
    ids, other = some_ids(5 * BLOCK), some_ids(100, seed=2)
    assert door.cached(ids) == 0
    assert door.cached([*ids[:40], *other]) == 2 * BLOCK
    assert door.cached([*ids, *other]) == 5 * BLOCK
    assert door.cached(ids) == 5 * BLOCK - 1  # the last token is computed, or there would be no answer
    assert door.cached([*other[:3], *ids]) == 0
    assert door.cached(ids[: BLOCK - 1]) == 0


def test_the_next_turn_of_a_chat_finds_the_turn_before(door: Door) -> None:
    chat = [{"role": "system", "content": "You answer in one word. " * 12}, {"role": "user", "content": "What is git?"}]
    ask = {"messages": chat, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    first = door.ask("/v1/chat/completions", ask).body
    answer = first["choices"][0]["message"]
    assert answer["role"] == "assistant" and first["object"] == "chat.completion"
    known = first["usage"]["prompt_tokens"]
    chat = [*chat, answer, {"role": "user", "content": "And cmake?"}]
    second = door.ask("/v1/chat/completions", {**ask, "messages": chat}).body
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached % BLOCK == 0 and known // BLOCK * BLOCK <= cached < second["usage"]["prompt_tokens"]


@pytest.mark.brief()
def test_answers_are_kept_too(door: Door, ready: Any) -> None:
    prompt = torch.tensor([some_ids(40)])
    out = ready.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False)
    door.complete(some_ids(40), 24)
    # The last token of an answer was said, and never put in.
    assert door.cached([*out[0].tolist()[:-1], *some_ids(30, seed=2)]) == 48
    assert door.metric("vllm:num_requests_running") == 0


@pytest.mark.slow
@pytest.mark.seeded
def test_salts_share_nothing(door: Door) -> None:
    ids = some_ids(70)
    assert [door.cached(ids, cache_salt=salt) for salt in ("a", "b", "")] == [0, 0, 0]
    assert [door.cached(ids, cache_salt=salt) for salt in ("a", "b", "")] == [64, 64, 64]
    for number in range(12):  # more than managers are kept for
        assert door.cached(ids, cache_salt=f"other {number}") == 0
    assert door.cached(ids, cache_salt="a") == 64


@pytest.mark.brief()
@pytest.mark.parametrize("chat", [False, True])
def test_streamed_is_what_whole_would_be(door: Door, chat: bool) -> None:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    asked = {"messages": [{"role": "user", "content": "git commit — wie heißt das?"}]} if chat else {"prompt": "The "}
    body = {**asked, "max_tokens": 20, "temperature": 0.8, "seed": 5}
    whole = door.ask(path, body).body
    chunks = door.stream(path, {**body, "stream_options": {"include_usage": True}})
    texts = [chunk["choices"][0]["delta"]["content"] if chat else chunk["choices"][0]["text"] for chunk in chunks[:-1]]
    kind = {"text": "".join(texts)} if not chat else {"message": {"role": "assistant", "content": "".join(texts)}}
    assert len(texts) > 5
    assert whole["choices"][0] == {
        "index": 0,
        **kind,
        "logprobs": None,
        "finish_reason": chunks[-2]["choices"][0]["finish_reason"],
        "stop_reason": None,
    }
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 20
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chat == ("role" in chunks[0]["choices"][0].get("delta", {}))


@pytest.mark.brief()
def test_a_seed_fixes_what_is_drawn(door: Door) -> None:
    def drawn(**more: Any) -> str:
        return str(door.complete("The file", 10, **{"temperature": 1.0, **more})["choices"][0]["text"])

    assert drawn(seed=1) == drawn(seed=1) != drawn(seed=2)
    assert drawn(seed=1, top_p=1e-9) == drawn(seed=2, top_p=1e-9) == drawn(temperature=0)
    assert len({drawn() for _ in range(4)}) > 1


@pytest.mark.brief()
def test_an_answer_ends_before_a_stop_text(door: Door) -> None:
    text = door.complete("The file", 40)["choices"][0]["text"]
    stop = text[20:26]
    choice = door.complete("The file", 40, stop=["never said", stop])["choices"][0]
    assert choice["text"] == text[: text.index(stop)] and choice["finish_reason"] == "stop"
    chunks = door.stream("/v1/completions", {"prompt": "The file", "max_tokens": 40, "temperature": 0, "stop": stop})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    assert door.complete("The file", 40, stop="never said")["choices"][0]["text"] == text


@pytest.mark.slow
@pytest.mark.seeded
def test_several_at_once_are_answered_as_if_alone(door: Door) -> None:
    prompts = [some_ids(50 + 37 * number, seed=number) for number in range(5)]
    alone = [door.complete(prompt, 8)["choices"][0]["text"] for prompt in prompts]
    door.ask("/reset_prefix_cache", {})
    with ThreadPoolExecutor(5) as pool:
        together = list(pool.map(lambda prompt: door.complete(prompt, 8)["choices"][0]["text"], prompts))
    assert together == alone


def test_models_and_health(door: Door) -> None:
    models = door.ask("/v1/models").body
    assert models["object"] == "list" and [model["id"] for model in models["data"]] == ["small"]
    assert models["data"][0]["max_model_len"] == 8192
    assert door.ask("/health").status == 200


def test_metrics_are_vllms_and_move(door: Door) -> None:
    ids = some_ids(100, seed=9)
    before = {
        name: door.metric(f"vllm:{name}")
        for name in (
            "prefix_cache_queries_total",
            "prefix_cache_hits_total",
            "generation_tokens_total",
            "time_to_first_token_seconds_count",
        )
    }
    door.complete(ids, 3)
    door.complete(ids, 3)
    grown = {name: door.metric(f"vllm:{name}") - value for name, value in before.items()}
    assert list(grown.values()) == [200, 96, 6, 2]
    assert door.metric("vllm:num_requests_waiting", model_name="small") == 0
    blocks = str(door.engine.caches.capacity_blocks)
    assert door.metric("vllm:cache_config_info", block_size="16", num_gpu_blocks=blocks) == 1


def test_metrics_report_what_prefills_take_as_routers_learn_it(door: Door) -> None:
    ids = some_ids(100, seed=10)
    before = _prefills(door)
    began_s = time.perf_counter()
    door.complete(ids, 3)
    door.complete(ids, 3)
    took_s = time.perf_counter() - began_s
    after = _prefills(door)
    assert (after.requests - before.requests, after.tokens - before.tokens) == (2, 200)
    assert after.computed - before.computed == 104, "of the second prompt six blocks of 16 came from the cache"
    assert 0.0 < after.seconds - before.seconds < took_s


def _prefills(door: Door) -> PrefillTotals:
    """As a router reads them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{door.port}/metrics") as page:
        return read_metrics(page.read(), 0.0).report.prefills or PrefillTotals(0, 0, 0, 0.0)
