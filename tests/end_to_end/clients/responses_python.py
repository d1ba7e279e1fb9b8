"""Responses by the `openai` client in Python: whole, streamed, with its helpers, with tools where engines call them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
from checks import CALLS_TOOLS, KEY, MODEL, URL, check, check_of_tools, main
from openai import AsyncOpenAI, OpenAI

client = OpenAI(base_url=URL, api_key=KEY, max_retries=0, timeout=60)
ASKED: dict[str, Any] = {
    "model": MODEL,
    "instructions": "You answer shortly.",
    "input": "say git is a tool",
    "max_output_tokens": 12,
    "temperature": 0,
}
LOOK: dict[str, Any] = {
    "type": "function",
    "name": "look",
    "description": "Looks somewhere.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    "strict": False,
}


@check
def whole() -> None:
    answer = client.responses.create(**ASKED, metadata={"of": "a test"})
    assert answer.object == "response" and answer.status in ("completed", "incomplete") and answer.output_text
    assert answer.model == MODEL and answer.id.startswith("resp_") and answer.metadata == {"of": "a test"}
    usage = answer.usage
    assert usage is not None and usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens >= 0


@check
def turns_as_items() -> None:
    said: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "say one"}]}]
    first = client.responses.create(model=MODEL, input=said, max_output_tokens=4)
    said += [item.model_dump(exclude_none=True) for item in first.output]
    said.append({"role": "user", "content": "say two"})
    assert client.responses.create(model=MODEL, input=said, max_output_tokens=4, store=False).output_text


@check
def streamed_says_the_same_as_whole() -> None:
    expected = client.responses.create(**ASKED)
    kinds, text, numbers = [], "", []
    for event in client.responses.create(**ASKED, stream=True):
        kinds.append(event.type)
        numbers.append(event.sequence_number)
        if event.type == "response.output_text.delta":
            text += event.delta
    assert text == expected.output_text and numbers == list(range(len(numbers)))
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 1


@check
def the_stream_helper_puts_a_response_together() -> None:
    with client.responses.stream(**ASKED) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response() if CALLS_TOOLS else None  # a stream cut by its limit has none
    assert text and (final is None or final.output_text == text)


@check
def many_at_once() -> None:
    async def ask_all() -> None:
        async with AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0) as many:
            answers = await asyncio.gather(*(many.responses.create(**ASKED) for _ in range(12)))
            assert all(answer.output_text for answer in answers)
            stream = await many.responses.create(**ASKED, stream=True)
            assert [event async for event in stream]

    asyncio.run(ask_all())


@check
def errors() -> None:
    for changed, kind in (
        ({"previous_response_id": "resp_1"}, openai.BadRequestError),
        ({"model": "gpt-5"}, openai.NotFoundError),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, openai.BadRequestError),
    ):
        try:
            client.responses.create(**{**ASKED, **changed})
        except kind as error:
            assert error.body["message"]  # type: ignore[index]
        else:
            raise AssertionError(f"{changed} was taken")
    try:
        client.responses.retrieve("resp_1")
    except openai.NotFoundError as error:
        assert "stores no responses" in error.message


@check_of_tools
def tools() -> None:
    said: list[Any] = [{"role": "user", "content": 'call look {"at": "a wall"}'}]
    first = client.responses.create(model=MODEL, input=said, tools=[LOOK], tool_choice="auto")
    calls = [item for item in first.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [{"at": "a wall"}]
    said += [item.model_dump(exclude_none=True) for item in first.output]
    said += [{"type": "function_call_output", "call_id": call.call_id, "output": "white"} for call in calls]
    assert client.responses.create(model=MODEL, input=said, tools=[LOOK]).output_text == "heard white"


@check_of_tools
def tools_streamed() -> None:
    said = 'call look {"at": "a wall"} and look {"at": "a door"}'
    with client.responses.stream(model=MODEL, input=said, tools=[LOOK]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds.count("response.function_call_arguments.delta") > 2
    calls = [item for item in final.output if item.type == "function_call"]
    assert [json.loads(call.arguments)["at"] for call in calls] == ["a wall", "a door"]


@check_of_tools
def reasoning() -> None:
    answer = client.responses.create(model=MODEL, input="think hard", reasoning={"effort": "low"})
    assert [item.type for item in answer.output] == ["reasoning", "message"] and answer.output_text == "done"
    kinds = [event.type for event in client.responses.create(model=MODEL, input="think hard", stream=True)]
    assert "response.reasoning_text.delta" in kinds


main()
