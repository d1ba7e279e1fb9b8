"""Fields of OpenAI's and vLLM's that change an answer, through the door: each does what it says."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.lab.door import Door
from tests.lab.engine.test_http import some_ids

pytestmark = pytest.mark.engine
START = "The git commit command can be used to"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


def text(door: Door, prompt: Any, max_tokens: int = 12, **more: Any) -> str:
    return str(door.complete(prompt, max_tokens, **more)["choices"][0]["text"])


def words(ready: Any, ids: list[int], new: int, **more: Any) -> str:
    """What transformers' own ``generate`` says with these options."""
    prompt = torch.tensor([ids])
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": new, "do_sample": False, **more}
    return str(ready.tokenizer.decode(ready.model.generate(prompt, **options)[0, len(ids) :], skip_special_tokens=True))


@pytest.mark.brief()
def test_top_k_and_min_p_of_one_token_are_greedy(door: Door) -> None:
    greedy = text(door, "The file")
    assert text(door, "The file", temperature=2.0, top_k=1, seed=1) == greedy
    assert text(door, "The file", temperature=2.0, min_p=1.0, seed=1) == greedy
    assert text(door, "The file", temperature=2.0, seed=1) != greedy


@pytest.mark.brief()
def test_repetition_penalty_and_bias_are_as_transformers_has_them(door: Door, ready: Any) -> None:
    ids = some_ids(40, seed=3)
    plain = text(door, ids, 12)
    penalised = text(door, ids, 12, repetition_penalty=1.4)
    assert penalised == words(ready, ids, 12, repetition_penalty=1.4) != plain
    first = ready.tokenizer(plain, add_special_tokens=False)["input_ids"][0]
    bias = {(first,): -4.0, (777,): 3.0}
    biased = text(door, ids, 12, logit_bias={"777": 3, str(first): -4})
    assert biased == words(ready, ids, 12, sequence_bias=bias) != plain


@pytest.mark.brief()
def test_frequency_and_presence_penalties_end_a_loop(door: Door) -> None:
    def kinds(**more: Any) -> int:
        answer = door.complete("Debian is", 20, ignore_eos=True, logprobs=0, **more)
        return len(set(answer["choices"][0]["logprobs"]["tokens"]))

    looping = kinds()
    assert looping < kinds(presence_penalty=2.0) and looping < kinds(frequency_penalty=2.0)


@pytest.mark.brief()
def test_a_stop_token_ends_the_answer_and_is_shown_only_where_asked_for(door: Door) -> None:
    answer = door.complete(START, 20, logprobs=0)["choices"][0]["logprobs"]["tokens"]
    tokenizer = door.engine.thread._tokenizer
    at = next(at for at in range(8, 20) if answer[at] not in answer[:at] and answer[at].strip())
    ids = [number for number in range(8192) if tokenizer.decode([number]) == answer[at]]
    stopped = door.complete(START, 20, stop_token_ids=ids)
    whole = text(door, START, 20)
    assert stopped["choices"][0]["finish_reason"] == "stop" and stopped["usage"]["completion_tokens"] == at + 1
    shown = stopped["choices"][0]["text"]
    assert whole.startswith(shown) and not shown.endswith(answer[at])
    kept = text(door, START, 20, stop_token_ids=ids, include_stop_str_in_output=True)
    assert kept.startswith(shown) and kept.endswith(answer[at].strip())
    later = door.complete(START, 20, stop_token_ids=ids, min_tokens=at + 1)
    assert later["usage"]["completion_tokens"] > at + 1


@pytest.mark.brief()
def test_a_stop_text_does_not_count_before_min_tokens(door: Door) -> None:
    whole = text(door, START, 20)
    stop = "diff` command"
    assert whole.count(stop) == 1
    assert text(door, START, 20, stop=stop) == whole[: whole.index(stop)]
    assert text(door, START, 20, stop=stop, include_stop_str_in_output=True) == whole[: whole.index(stop) + len(stop)]
    assert text(door, START, 20, stop=stop, min_tokens=20) == whole


def test_min_tokens_bars_the_end_of_text(door: Door) -> None:
    eos = next(iter(door.engine.thread._eos))
    at_once = {"logit_bias": {str(eos): 100}}
    assert door.complete("The file", 20, **at_once)["usage"]["completion_tokens"] == 1
    assert door.complete("The file", 20, **at_once, min_tokens=7)["usage"]["completion_tokens"] == 8
    assert door.complete("The file", 20, **at_once, ignore_eos=True)["usage"]["completion_tokens"] == 20


def test_only_allowed_tokens_are_said(door: Door) -> None:
    answer = door.complete("The file", 20, allowed_token_ids=[700, 701], logprobs=0)["choices"][0]["logprobs"]["tokens"]
    tokenizer = door.engine.thread._tokenizer
    assert set(answer) <= {tokenizer.decode([700]), tokenizer.decode([701])}


@pytest.mark.brief("False")
@pytest.mark.parametrize("chat", [False, True])
def test_several_choices_of_one_prompt(door: Door, chat: bool) -> None:
    asked = {"messages": [{"role": "user", "content": "What is git?"}]} if chat else {"prompt": "The file"}
    path = CHATS if chat else COMPLETIONS
    body = {**asked, "max_tokens": 6, "seed": 3, "n": 3, "ignore_eos": True}
    whole = door.ask(path, body).body
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    alone = [door.ask(path, {**body, "n": 1, "seed": 3 + at}).body["choices"][0] for at in range(3)]
    said = [choice["message"]["content"] if chat else choice["text"] for choice in whole["choices"]]
    assert said == [choice["message"]["content"] if chat else choice["text"] for choice in alone]
    assert len(set(said)) == 3
    assert whole["usage"]["completion_tokens"] == 18
    assert whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] + 18
    chunks = door.stream(path, {**body, "stream_options": {"include_usage": True}})
    streamed = ["", "", ""]
    for chunk in chunks[:-1]:
        choice = chunk["choices"][0]
        streamed[choice["index"]] += choice["delta"]["content"] if chat else choice["text"]
    assert streamed == said and chunks[-1]["usage"]["completion_tokens"] == 18


def test_logprobs_of_a_completion_are_the_models(door: Door, ready: Any) -> None:
    ids = some_ids(30, seed=4)
    answer = door.complete(ids, 6, logprobs=3, temperature=0)["choices"][0]
    logprobs = answer["logprobs"]
    assert len(logprobs["tokens"]) == 6 and logprobs["text_offset"][0] == 0
    with torch.inference_mode():
        expected = ready.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    best = expected.topk(3)
    assert logprobs["token_logprobs"][0] == pytest.approx(float(best.values[0]), abs=1e-4)
    assert list(logprobs["top_logprobs"][0].values()) == pytest.approx(best.values.tolist(), abs=1e-4)
    assert list(logprobs["top_logprobs"][0]) == [ready.tokenizer.decode([token]) for token in best.indices.tolist()]
    assert all(-9999.0 <= value <= 0.0 for value in logprobs["token_logprobs"])


def test_logprobs_of_a_chat_streamed_are_those_of_the_whole(door: Door) -> None:
    body = {"messages": [{"role": "user", "content": "Füße 日本"}], "max_tokens": 16, "seed": 2, "temperature": 1.5}
    body |= {"logprobs": True, "top_logprobs": 2, "ignore_eos": True}
    whole = door.ask(CHATS, body).body["choices"][0]["logprobs"]["content"]
    assert len(whole) == 16 and all(len(token["top_logprobs"]) == 2 for token in whole)
    assert all(token["bytes"] == list(token["token"].encode()) and token["logprob"] <= 0 for token in whole)
    assert any(not math.isclose(token["logprob"], token["top_logprobs"][0]["logprob"]) for token in whole)
    chunks = door.stream(CHATS, body)
    streamed = [token for chunk in chunks for token in chunk["choices"][0]["logprobs"]["content"]]

    def flat(tokens: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [one for token in tokens for one in (token, *token["top_logprobs"])]

    # The second prompt comes from the cache: its prefill is shorter, and may be rounded otherwise.
    pairs = list(zip(flat(streamed), flat(whole), strict=True))
    assert all((one["token"], one["bytes"]) == (other["token"], other["bytes"]) for one, other in pairs)
    assert all(one["logprob"] == pytest.approx(other["logprob"], abs=1e-4) for one, other in pairs)


def test_usage_comes_with_every_chunk_where_asked_for(door: Door) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = door.stream(COMPLETIONS, {"prompt": "The file", "max_tokens": 6, "seed": 1, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 6 and counts[0] == 1


def test_special_tokens_are_added_and_shown_as_asked(door: Door) -> None:
    def prompt_tokens(**more: Any) -> int:
        return int(door.complete("The file", 1, **more)["usage"]["prompt_tokens"])

    assert prompt_tokens() == prompt_tokens(add_special_tokens=True) == prompt_tokens(add_special_tokens=False) + 1
    eos = next(iter(door.engine.thread._eos))
    only = {"allowed_token_ids": [eos], "ignore_eos": True}
    assert text(door, "The file", 3, **only) == "" != text(door, "The file", 3, **only, skip_special_tokens=False)


def test_an_answer_has_the_clients_number(door: Door) -> None:
    assert door.complete("a", 1, request_id="mine")["id"] == "cmpl-mine"


def test_one_model_can_be_looked_up(door: Door) -> None:
    listed = door.ask("/v1/models").body["data"][0]
    assert door.ask("/v1/models/small").body == listed
    for path in ("/v1/models/other", "/v1/models/org/other"):
        missing = door.ask(path)
        assert (missing.status, missing.body["error"]["code"]) == (404, "model_not_found")
