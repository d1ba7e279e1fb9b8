"""langchain and litellm by Responses and Messages: the modes that are asked for by name, and their newest."""

from __future__ import annotations

import asyncio
from typing import Any

import litellm
from checks import KEY, MODEL, URL, check, check_of_tools, main
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

ROOT = URL.removesuffix("/v1")
WORDS = [{"role": "user", "content": "say git is a tool"}]
TURNS = [("system", "You answer shortly."), ("human", "say git is a tool")]
litellm.suppress_debug_info = True


@tool
def look(at: str) -> str:
    """Looks somewhere."""
    return f"{at} is white"


def by_responses(**more: Any) -> Any:
    return ChatOpenAI(base_url=URL, api_key=KEY, model=MODEL, max_retries=0, use_responses_api=True, **more)


def by_messages(**more: Any) -> Any:
    return ChatAnthropic(base_url=ROOT, api_key=KEY, model=MODEL, max_retries=0, max_tokens=12, **more)


def speaks(model: Any) -> None:
    whole = model.invoke(TURNS)
    assert whole.text and whole.usage_metadata["input_tokens"] > 0
    chunks = list(model.stream(TURNS))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]


def calls(model: Any) -> None:
    bound, turns = model.bind_tools([look]), [("human", 'call look {"at": "a wall"}')]
    for asked in (bound.invoke(turns), _joined(bound.stream(turns))):
        assert [(call["name"], call["args"]) for call in asked.tool_calls] == [("look", {"at": "a wall"})]
        results = [ToolMessage(look.invoke(call["args"]), tool_call_id=call["id"]) for call in asked.tool_calls]
        assert bound.invoke([*turns, asked, *results]).text == "heard a wall is white"


def _joined(chunks: Any) -> Any:
    total = None
    for chunk in chunks:
        total = chunk if total is None else total + chunk
    return total


@check
def langchain_by_responses() -> None:
    speaks(by_responses(temperature=0, max_tokens=12))


@check
def langchain_by_responses_in_its_newest_form() -> None:
    speaks(by_responses(temperature=0, max_tokens=12, output_version="v1"))


@check
def langchain_by_messages() -> None:
    speaks(by_messages(temperature=0))


@check_of_tools
def langchain_calls_tools_by_responses() -> None:
    calls(by_responses())
    calls(by_responses(output_version="v1"))


@check_of_tools
def langchain_calls_tools_by_messages() -> None:
    calls(by_messages())


@check
def litellm_by_responses() -> None:
    asked = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": KEY, "input": WORDS, "max_output_tokens": 12}
    whole = litellm.responses(**asked, temperature=0)
    text = whole.output[0].content[0].text
    assert text and whole.usage.input_tokens > 0
    events = list(litellm.responses(**asked, temperature=0, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text


@check
def litellm_completions_by_responses() -> None:
    asked = {"model": f"openai/responses/{MODEL}", "api_base": URL, "api_key": KEY, "messages": WORDS, "max_tokens": 16}
    whole = litellm.completion(**asked, temperature=0)
    text = whole.choices[0].message.content
    assert text and whole.usage.prompt_tokens > 0
    chunks = list(litellm.completion(**asked, temperature=0, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text


@check
def litellm_by_messages() -> None:
    asked = {"model": f"anthropic/{MODEL}", "api_base": ROOT, "api_key": KEY, "messages": WORDS, "max_tokens": 12}
    whole = litellm.completion(**asked, temperature=0)
    text = whole.choices[0].message.content
    assert text and whole.usage.prompt_tokens > 0
    chunks = list(litellm.completion(**asked, temperature=0, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text

    async def natively() -> None:
        message = await litellm.anthropic.messages.acreate(**{**asked, "temperature": 0})
        assert message["content"][0]["text"] == text

    asyncio.run(natively())


@check_of_tools
def litellm_calls_tools() -> None:
    function = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
    turns = [{"role": "user", "content": 'call look {"at": "a wall"}'}]
    for model, base in ((f"openai/responses/{MODEL}", URL), (f"anthropic/{MODEL}", ROOT)):
        asked: dict[str, Any] = {"model": model, "api_base": base, "api_key": KEY, "messages": turns, "max_tokens": 16}
        asked["tools"] = [{"type": "function", "function": function}]
        call = litellm.completion(**asked).choices[0].message.tool_calls[0]
        assert call.function.name == "look" and "a wall" in call.function.arguments
        chunks = list(litellm.completion(**asked, stream=True))
        built = litellm.stream_chunk_builder(chunks, messages=turns)
        assert "a wall" in built.choices[0].message.tool_calls[0].function.arguments


main()
