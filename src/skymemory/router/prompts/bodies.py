"""What of the body of an OpenAI request tells where it should go; the rest is the engine's business and not looked at.

Only what cannot be read as a prompt is refused here. The engine judges everything else, with its own words.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from skymemory.router.bad_request import BadRequest

TOKEN_BYTES = 4
"""A token is hashed as its number: unsigned, little-endian."""
IMAGE_BYTES = 2048
"""What is not text, such as an image, is taken for in a chat: its digest, repeated; 512 tokens, we guess."""

TokenIds = list[Annotated[int, msgspec.Meta(ge=0, lt=2**32)]]
T = TypeVar("T")


class Message(msgspec.Struct):
    """A turn. What is left out of it (a tool's name, reasoning) is small, or changes with the content."""

    role: str = ""
    content: str | list[msgspec.Raw] | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()


class Body(msgspec.Struct):
    """The fields of /v1/completions and /v1/chat/completions that matter to a router."""

    model: str | None = None
    prompt: msgspec.Raw = msgspec.Raw()
    prompt_embeds: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    cache_salt: str | None = None
    lora_adapter: str | None = None
    user: str | int | float | None = None
    priority: msgspec.Raw = msgspec.Raw()
    max_tokens: int | float | None = None
    max_completion_tokens: int | float | None = None
    chat_template_kwargs: msgspec.Raw = msgspec.Raw()
    stream: msgspec.Raw = msgspec.Raw()


class _Part(msgspec.Struct):
    type: str = ""
    text: str | None = None


_body = msgspec.json.Decoder(Body)
_messages = msgspec.json.Decoder(list[Message])
_part = msgspec.json.Decoder(_Part)
_text = msgspec.json.Decoder(str)
_texts = msgspec.json.Decoder(list[str])
_ids = msgspec.json.Decoder(TokenIds)
_ids_lists = msgspec.json.Decoder(list[TokenIds])
_anything = msgspec.json.Decoder()
_STARTS_WITH_NUMBER = re.compile(rb"\s*\[\s*[-\d]")
_STARTS_WITH_LIST = re.compile(rb"\s*\[\s*\[")
_PATH = re.compile(r" - at `\$\.?([^`]*)`")


def read_body(body: bytes) -> Body:
    """
    Raises:
        BadRequest: 400, it is not a JSON object, or a field that matters is of another type.
    """
    return _decoded(_body, body)


def prompts_of(body: Body) -> list[bytes]:
    """The prompts of a completion, each as bytes: UTF-8, or token numbers of ``TOKEN_BYTES``.

    Raises:
        BadRequest: 400, there is none, or it is neither text nor tokens.
    """
    raw = bytes(body.prompt)
    if raw[:1] == b'"' and raw.isascii() and b"\\" not in raw:
        return [raw[1:-1]]  # nothing is escaped: the text is what stands between the quotes
    return [text_bytes(prompt) if isinstance(prompt, str) else token_bytes(prompt) for prompt in read_prompts(body)]


def read_prompts(body: Body) -> list[str] | list[list[int]]:
    """The prompts of a completion: texts, or token numbers. At least one."""
    raw = bytes(body.prompt)
    if not raw or raw == b"null":
        if bytes(body.prompt_embeds):
            return [""]
        raise BadRequest(400, "the body has no `prompt`", "prompt")
    if raw[:1] == b'"':
        return [_decoded(_text, raw, "prompt")]
    if _STARTS_WITH_NUMBER.match(raw):
        return [_decoded(_ids, raw, "prompt")]
    prompts: list[str] | list[list[int]] = (
        _decoded(_ids_lists, raw, "prompt") if _STARTS_WITH_LIST.match(raw) else _decoded(_texts, raw, "prompt")
    )
    if not prompts:
        raise BadRequest(400, "`prompt` is an empty list", "prompt")
    return prompts


def read_messages(body: Body) -> list[Message]:
    if not bytes(body.messages):
        raise BadRequest(400, "the body has no `messages`", "messages")
    return _decoded(_messages, bytes(body.messages), "messages")


def chat_bytes(body: Body) -> bytes:
    """A chat as one stream of bytes, so made that a conversation's next turn begins with its turns so far.

    Tools come first, as templates have them; then each turn's role and content, marked off by bytes that JSON text
    cannot hold unescaped. Images, and all that is not text, are digests of ``IMAGE_BYTES``.
    """
    parts = [b"\x02tools\x03", bytes(body.tools)] if bytes(body.tools) not in (b"", b"null", b"[]") else []
    for message in read_messages(body):
        parts += (b"\x02", text_bytes(message.role), b"\x03")
        if isinstance(message.content, str):
            parts.append(text_bytes(message.content))
        elif message.content is not None:
            parts += [part_bytes(part) for part in message.content]
        if bytes(message.tool_calls) not in (b"", b"null", b"[]"):
            parts += (b"\x04", bytes(message.tool_calls))
    return b"".join(parts)


def part_bytes(raw: msgspec.Raw) -> bytes:
    """A part of a content: its text, or for an image (by address or in the request) a digest of what is said of it."""
    whole = bytes(raw)
    if whole[:1] == b'"':
        return text_bytes(_decoded(_text, whole, "messages"))
    part = _decoded(_part, whole, "messages")
    if part.text is not None:
        return text_bytes(part.text)
    return digest_of(whole) * (IMAGE_BYTES // 64)


def digest_of(raw: bytes) -> bytes:
    """64 letters and digits that stand for ``raw``."""
    return hashlib.blake2b(raw, digest_size=32).hexdigest().encode("ascii")


def anything(raw: msgspec.Raw, param: str) -> Any:
    return _decoded(_anything, bytes(raw), param)


def text_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def token_bytes(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype="<u4").tobytes()


def _decoded(decoder: msgspec.json.Decoder[T], raw: bytes, param: str | None = None) -> T:
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        place = _PATH.search(str(error))
        found = ".".join(part for part in (param, place[1] if place else "") if part) or None
        raise BadRequest(400, f"the body cannot be used: {error}", found) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(400, f"the body is not JSON: {error}", param) from error
    except RecursionError as error:
        raise BadRequest(400, "the body is nested too deeply", param) from error
