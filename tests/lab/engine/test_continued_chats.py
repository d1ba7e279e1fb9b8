"""An answer that has begun goes on, as vLLM continues a chat's last message."""

from __future__ import annotations

from typing import Any

import pytest
from tests.lab.door import Door

from skymemory_lab.engine.requests import render_chat

pytestmark = pytest.mark.engine
CHATS = "/v1/chat/completions"
ASKED = {
    "role": "user",
    "content": "The git command shows the differences between two commits of a repository, or between",
}
CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}


def answer(door: Door, messages: list[dict[str, str]], tokens: int, **more: Any) -> dict[str, Any]:
    reply = door.ask(CHATS, {"messages": messages, "max_tokens": tokens, "temperature": 0, **more})
    assert reply.status == 200, reply.body
    return dict(reply.body)


@pytest.mark.brief()
def test_the_rest_of_an_answer_is_what_would_have_come(door: Door) -> None:
    whole = answer(door, [ASKED], 24)["choices"][0]["message"]["content"]
    for tokens in (14, 17, 20):
        begun = answer(door, [ASKED], tokens)["choices"][0]["message"]["content"]
        rest = answer(door, [ASKED, {"role": "assistant", "content": begun}], 24 - tokens, **CONTINUED)
        assert begun + rest["choices"][0]["message"]["content"] == whole, tokens
        assert rest["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.parametrize("field", ["continue_final_message", "add_generation_prompt"])
def test_one_field_without_the_other_is_refused(door: Door, field: str) -> None:
    reply = door.ask(CHATS, {"messages": [ASKED], field: CONTINUED[field]})
    assert reply.status == 400 and reply.body["error"]["param"] == field
    assert "both" in reply.body["error"]["message"]


def test_a_template_leaves_the_last_message_open(ready: Any) -> None:
    tokenizer = ready.tokenizer
    before, tokenizer.chat_template = (
        tokenizer.chat_template,
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>"
        "{% endif %}",
    )
    try:
        begun = [ASKED, {"role": "assistant", "content": "two"}]
        assert render_chat(tokenizer, begun, True)[0].endswith("<assistant>two")
        assert render_chat(tokenizer, [ASKED])[0].endswith("<assistant>")
    finally:
        tokenizer.chat_template = before
