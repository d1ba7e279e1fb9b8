"""A chat as one prompt: by the model's own template, or a plain one where it has none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from skymemory.serving.api_errors import ApiError


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]]) -> tuple[str, bool]:
    """The text of the chat up to where the assistant answers, and whether special tokens are still to be added.

    Raises:
        ApiError: messages that are not text with a role, or that the model's template refuses.
    """
    told = [_message(at, message) for at, message in enumerate(messages)]
    if not told:
        raise ApiError("'messages' is empty: at least one is needed", param="messages")
    if not getattr(tokenizer, "chat_template", None):
        return plain_chat(told), True
    try:
        text = tokenizer.apply_chat_template(told, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program of the model's; it raises what it likes
        raise ApiError(f"the model's chat template refuses the messages: {error}", param="messages") from error
    return str(text), False


def plain_chat(messages: Sequence[dict[str, str]]) -> str:
    """``role: text`` in paragraphs. A chat that goes on begins with all of the chat before and its answer."""
    return "".join(f"{message['role']}: {message['content']}\n\n" for message in messages) + "assistant:"


def _message(at: int, message: dict[str, Any]) -> dict[str, str]:
    role, content = message.get("role"), message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if len(parts) != len(content) or not all(isinstance(part, str) for part in parts):
            raise ApiError(f"messages[{at}] has parts that are not text, and this model reads text", param="messages")
        content = "\n".join(str(part) for part in parts)
    if not isinstance(role, str) or not isinstance(content, str):
        raise ApiError(f"messages[{at}] must have 'role' and 'content', both texts", param="messages")
    return {"role": role, "content": content}
