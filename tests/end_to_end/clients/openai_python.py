"""The `openai` client in Python."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import openai
from checks import KEY, MODEL, MOST_ASKED, SMALL_KEY, URL, check, main
from openai import AsyncOpenAI, OpenAI

client = OpenAI(base_url=URL, api_key=KEY, max_retries=0, timeout=60)
WORDS = [{"role": "user", "content": "What is git?"}]


def raised(kind: type[Exception], ask: Callable[[], Any]) -> Any:
    try:
        ask()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


@check
def chat() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=WORDS, max_completion_tokens=8, temperature=0)
    assert answer.object == "chat.completion" and answer.model == MODEL and answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].message.content
    assert answer.usage is not None and 1 <= answer.usage.completion_tokens <= 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@check
def chat_streamed_says_the_same_as_whole() -> None:
    whole = client.chat.completions.create(model=MODEL, messages=WORDS, max_tokens=12, temperature=0)
    text, finish, usage = "", None, None
    for chunk in client.chat.completions.create(
        model=MODEL, messages=WORDS, max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}
    ):
        assert chunk.object == "chat.completion.chunk"
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content and finish == whole.choices[0].finish_reason
    assert usage is not None and whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )


@check
def the_stream_helper_puts_a_chat_together() -> None:
    with client.chat.completions.stream(model=MODEL, messages=WORDS, max_tokens=8) as stream:
        kinds = {event.type for event in stream}
        final = stream.current_completion_snapshot
    assert "content.delta" in kinds and final.choices[0].message.content


@check
def a_chat_in_parts_with_a_system_message() -> None:
    parts = [
        {"role": "system", "content": "You answer shortly."},
        {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "make?"}]},
        {"role": "assistant", "content": "A tool."},
        {"role": "user", "content": "For what?"},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=parts, max_tokens=4, n=2, user="me", seed=3)
    assert [choice.index for choice in answer.choices] == [0, 1]


@check
def completion() -> None:
    answer = client.completions.create(model=MODEL, prompt="git is", max_tokens=6, logprobs=2, stop=["\n\n\n"])
    assert answer.object == "text_completion" and answer.choices[0].logprobs is not None
    text = "".join(
        chunk.choices[0].text
        for chunk in client.completions.create(model=MODEL, prompt="git is", max_tokens=6, temperature=0, stream=True)
    )
    whole = client.completions.create(model=MODEL, prompt="git is", max_tokens=6, temperature=0)
    assert text == whole.choices[0].text


@check
def a_stream_that_is_left_takes_nothing_along() -> None:
    for _ in range(5):
        stream = client.chat.completions.create(model=MODEL, messages=WORDS, max_tokens=400, stream=True)
        next(iter(stream))
        stream.close()
    assert client.chat.completions.create(model=MODEL, messages=WORDS, max_tokens=2).choices


@check
def many_at_once_by_the_async_client() -> None:
    async def ask() -> None:
        async with AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0, timeout=60) as several:

            async def one(number: int) -> str:
                words = [{"role": "user", "content": f"Number {number}?"}]
                if number % 2:
                    answer = await several.chat.completions.create(model=MODEL, messages=words, max_tokens=5)
                    return answer.choices[0].finish_reason
                finish = ""
                stream = await several.chat.completions.create(model=MODEL, messages=words, max_tokens=5, stream=True)
                async for chunk in stream:
                    finish = chunk.choices[0].finish_reason or finish
                return finish

            became = await asyncio.gather(*(one(number) for number in range(24)))
            assert set(became) <= {"stop", "length"}, became

    asyncio.run(ask())


@check
def models() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    found = client.models.retrieve(MODEL)
    assert found.id == MODEL and found.object == "model" and isinstance(found.created, int) and found.owned_by
    for unknown in ("gpt-5", "org/model", "a model?"):
        error = raised(openai.NotFoundError, lambda unknown=unknown: client.models.retrieve(unknown))
        assert error.code == "model_not_found" and unknown in error.message, error


@check
def a_model_that_does_not_exist() -> None:
    error = raised(
        openai.NotFoundError, lambda: client.chat.completions.create(model="gpt-5", messages=WORDS, max_tokens=2)
    )
    assert error.code == "model_not_found" and error.type == "invalid_request_error" and "gpt-5" in error.message
    error = raised(
        openai.NotFoundError,
        lambda: client.completions.create(model="gpt-5", prompt="x", max_tokens=2, stream=True),
    )
    assert error.code == "model_not_found"


@check
def a_wrong_key() -> None:
    stranger = OpenAI(base_url=URL, api_key="sk-sky-wrong", max_retries=0)
    for ask in (
        lambda: stranger.chat.completions.create(model=MODEL, messages=WORDS),
        lambda: stranger.models.list(),
        lambda: stranger.models.retrieve(MODEL),
    ):
        error = raised(openai.AuthenticationError, ask)
        assert error.code == "invalid_api_key" and error.status_code == 401 and "sk-sky-wrong" not in error.message


@check
def what_cannot_be_meant() -> None:
    error = raised(
        openai.BadRequestError,
        lambda: client.chat.completions.create(model=MODEL, messages=WORDS, temperature=9),
    )
    assert error.type == "invalid_request_error" and error.param == "temperature", error
    error = raised(openai.BadRequestError, lambda: client.completions.create(model=MODEL, prompt="x " * 50_000))
    assert error.code == "context_length_exceeded", error
    # A path that is not served says so, and is not taken for a server's fault.
    raised(openai.NotFoundError, lambda: client.responses.retrieve("resp_1"))
    raised(openai.NotFoundError, lambda: client.files.list())


@check
def what_was_said_of_a_request_can_be_read() -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=WORDS, max_tokens=2, extra_headers={"x-skymemory-decision": "1"}
    )
    assert "server" in raw.headers["x-skymemory-decision"] and raw.parse().choices


@check
def over_quota_is_reported_and_its_wait_honoured() -> None:
    def ask(of: OpenAI) -> Any:
        return of.completions.create(model=MODEL, prompt="x", max_tokens=1)

    hasty = OpenAI(base_url=URL, api_key=SMALL_KEY, max_retries=0)
    for _ in range(MOST_ASKED):
        try:
            ask(hasty)
        except openai.RateLimitError:
            break
    else:
        raise AssertionError("never refused")
    error = raised(openai.RateLimitError, lambda: ask(hasty))
    assert error.code == "rate_limit_exceeded" and error.type == "requests"
    wait_s = int(error.response.headers["retry-after-ms"]) / 1000
    assert 0 < wait_s <= 3 and error.response.headers["x-ratelimit-limit-requests"] == "20"
    began_s = time.monotonic()
    assert ask(OpenAI(base_url=URL, api_key=SMALL_KEY, max_retries=1)).choices
    assert time.monotonic() - began_s > wait_s - 1, (
        "it had waited for as long as the header said, and was served at once then"
    )


main()
