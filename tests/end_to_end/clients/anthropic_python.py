"""Anthropic's client in Python: messages whole, streamed, with its helpers, counted; tools where engines call them."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
from anthropic import Anthropic, AsyncAnthropic
from checks import KEY, MODEL, SMALL_KEY, URL, check, check_of_tools, main

ROOT = URL.removesuffix("/v1")
client = Anthropic(base_url=ROOT, api_key=KEY, max_retries=0, timeout=60)
ASKED: dict[str, Any] = {
    "model": MODEL,
    "system": "You answer shortly. " * 20,
    "messages": [{"role": "user", "content": "say git is a tool"}],
    "max_tokens": 12,
}
LOOK: dict[str, Any] = {
    "name": "look",
    "description": "Looks somewhere.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
}


@check
def whole() -> None:
    message = client.messages.create(**ASKED)
    assert message.type == "message" and message.role == "assistant" and message.content[0].text
    assert message.stop_reason in ("end_turn", "max_tokens") and message.usage.output_tokens >= 1


@check
def cached_tokens_are_reported() -> None:
    # Before it may be read from a cache it has to be in that of the one server that gets all of these.
    usages = [client.messages.create(**ASKED).usage for _ in range(4)]
    assert usages[-1].cache_read_input_tokens > usages[-1].input_tokens > 0


@check
def streamed_says_the_same_as_whole() -> None:
    asked = {**ASKED, "extra_body": {"temperature": 0}}  # newer clients have no such parameter
    expected = client.messages.create(**asked)
    kinds, text = [], ""
    for event in client.messages.create(**asked, stream=True):
        kinds.append(event.type)
        if event.type == "content_block_delta":
            text += event.delta.text
    assert text == expected.content[0].text
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == text
        final = stream.get_final_message()
    assert final.stop_reason == expected.stop_reason and final.usage.output_tokens == expected.usage.output_tokens
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens > 0


@check
def blocks_and_turns() -> None:
    turns: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "say one", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "text", "text": "one"}]},
        {"role": "user", "content": "say two"},
    ]
    system: list[Any] = [{"type": "text", "text": "You answer shortly.", "cache_control": {"type": "ephemeral"}}]
    assert client.messages.create(model=MODEL, max_tokens=4, messages=turns, system=system).content


@check
def counted() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=ASKED["messages"], system=ASKED["system"])
    usage = client.messages.create(**ASKED).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


@check
def many_at_once() -> None:
    async def ask_all() -> None:
        async with AsyncAnthropic(base_url=ROOT, api_key=KEY, max_retries=0) as many:
            answers = await asyncio.gather(*(many.messages.create(**ASKED) for _ in range(12)))
            assert all(answer.content for answer in answers)

    asyncio.run(ask_all())


@check
def errors() -> None:
    stranger = Anthropic(base_url=ROOT, api_key="sk-wrong", max_retries=0)
    for asking, changed, kind, word in (
        (stranger, {}, anthropic.AuthenticationError, "authentication_error"),
        (client, {"model": "claude"}, anthropic.NotFoundError, "not_found_error"),
        (client, {"messages": [{"role": "robot", "content": "x"}]}, anthropic.BadRequestError, "invalid_request_error"),
    ):
        try:
            asking.messages.create(**{**ASKED, **changed})
        except kind as error:
            assert error.body["type"] == "error" and error.body["error"]["type"] == word  # type: ignore[index]
        else:
            raise AssertionError(f"{changed} was taken")


@check
def a_token_in_place_of_a_key() -> None:
    assert Anthropic(base_url=ROOT, auth_token=KEY, api_key=None, max_retries=0).messages.create(**ASKED).content


@check
def over_quota_is_reported() -> None:
    hasty = Anthropic(base_url=ROOT, api_key=SMALL_KEY, max_retries=0)
    try:
        for _ in range(60):
            hasty.messages.create(**{**ASKED, "max_tokens": 1})
    except anthropic.RateLimitError as error:
        assert error.body["error"]["type"] == "rate_limit_error"  # type: ignore[index]
        assert int(error.response.headers["retry-after"]) >= 1
    else:
        raise AssertionError("no RateLimitError")


@check_of_tools
def tools() -> None:
    turns: list[Any] = [{"role": "user", "content": 'call look {"at": "a wall"}'}]
    first = client.messages.create(model=MODEL, max_tokens=99, messages=turns, tools=[LOOK])
    assert first.stop_reason == "tool_use"
    call = next(block for block in first.content if block.type == "tool_use")
    assert call.name == "look" and call.input == {"at": "a wall"}
    turns.append({"role": "assistant", "content": first.content})
    turns.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "white"}]})
    last = client.messages.create(model=MODEL, max_tokens=99, messages=turns, tools=[LOOK])
    assert last.content[0].text == "heard white"


@check_of_tools
def tools_streamed() -> None:
    turns: list[Any] = [{"role": "user", "content": 'call look {"at": "a wall"} and look {"at": "a door"}'}]
    with client.messages.stream(model=MODEL, max_tokens=99, messages=turns, tools=[LOOK]) as stream:
        final = stream.get_final_message()
    assert [block.input["at"] for block in final.content] == ["a wall", "a door"] and final.stop_reason == "tool_use"


@check_of_tools
def thinking() -> None:
    turns: list[Any] = [{"role": "user", "content": "think hard"}]
    with client.messages.stream(model=MODEL, max_tokens=99, messages=turns) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text"] and final.content[0].thinking == "hard"


main()
