"""What stands on top of the `openai` client: litellm and langchain-openai, with their own reading of errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import litellm
from checks import KEY, MODEL, MOST_ASKED, SMALL_KEY, URL, check, main
from langchain_openai import ChatOpenAI, OpenAI

WORDS = [{"role": "user", "content": "What is git?"}]


def ask(**more: Any) -> Any:
    return litellm.completion(
        **{
            "model": f"openai/{MODEL}",
            "api_base": URL,
            "api_key": KEY,
            "messages": WORDS,
            "max_tokens": 6,
            "num_retries": 0,
            "max_retries": 0,
            **more,
        },
    )


def raised(kind: type[Exception], do: Callable[[], Any]) -> Any:
    try:
        do()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


@check
def litellm_whole_and_streamed() -> None:
    whole = ask(temperature=0)
    assert whole.choices[0].message.content and whole.usage.prompt_tokens > 0
    chunks = list(ask(temperature=0, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    built = litellm.stream_chunk_builder(chunks, messages=WORDS)
    assert built.usage.completion_tokens == whole.usage.completion_tokens


@check
def litellm_async() -> None:
    async def both() -> None:
        made = {
            "model": f"openai/{MODEL}",
            "api_base": URL,
            "api_key": KEY,
            "messages": WORDS,
            "max_tokens": 4,
        }
        answers = await asyncio.gather(*(litellm.acompletion(**made) for _ in range(6)))
        assert all(answer.choices[0].finish_reason in ("stop", "length") for answer in answers)
        stream = await litellm.acompletion(**made, stream=True)
        assert [chunk async for chunk in stream]

    asyncio.run(both())


@check
def litellm_text_completion() -> None:
    made = {
        "model": f"text-completion-openai/{MODEL}",
        "api_base": URL,
        "api_key": KEY,
        "prompt": "git is",
        "max_tokens": 4,
    }
    assert litellm.text_completion(**made).choices[0].text
    assert "".join(chunk.choices[0].text or "" for chunk in litellm.text_completion(**made, stream=True))


@check
def litellm_errors() -> None:
    assert raised(litellm.AuthenticationError, lambda: ask(api_key="sk-wrong"))
    assert raised(litellm.NotFoundError, lambda: ask(model="openai/gpt-5"))
    assert raised(litellm.BadRequestError, lambda: ask(max_tokens=-3))
    raised(litellm.ContextWindowExceededError, lambda: ask(messages=[{"role": "user", "content": "x " * 50_000}]))

    def until_refused() -> None:
        for _ in range(MOST_ASKED):
            ask(api_key=SMALL_KEY, max_tokens=1)

    raised(litellm.RateLimitError, until_refused)


@check
def langchain_chat() -> None:
    model = ChatOpenAI(
        base_url=URL, api_key=KEY, model=MODEL, max_tokens=6, temperature=0, max_retries=0, stream_usage=True
    )
    whole = model.invoke([("system", "You answer shortly."), ("human", "What is git?")])
    assert whole.content and whole.usage_metadata["input_tokens"] > 0
    chunks = list(model.stream([("system", "You answer shortly."), ("human", "What is git?")]))
    assert "".join(chunk.content for chunk in chunks) == whole.content
    usages = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert usages
    assert len(model.batch(["one", "two", "three"])) == 3


@check
def langchain_async_events() -> None:
    async def listen() -> None:
        model = ChatOpenAI(base_url=URL, api_key=KEY, model=MODEL, max_tokens=4, max_retries=0)
        kinds = [event["event"] async for event in model.astream_events("What is git?", version="v2")]
        assert kinds[0] == "on_chat_model_start" and kinds[-1] == "on_chat_model_end"
        assert (await model.ainvoke("What is make?")).content is not None

    asyncio.run(listen())


@check
def langchain_completion() -> None:
    model = OpenAI(base_url=URL, api_key=KEY, model=MODEL, max_tokens=4, max_retries=0)
    assert isinstance(model.invoke("git is"), str)
    assert "".join(model.stream("git is")) is not None


@check
def langchain_honours_a_wait() -> None:
    model = ChatOpenAI(base_url=URL, api_key=SMALL_KEY, model=MODEL, max_tokens=1, max_retries=3)
    for _ in range(24):
        model.invoke("x")


main()
