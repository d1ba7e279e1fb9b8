"""Reader of an OpenAI request: hashed blocks of the prompt, model, session, tenant.

1. Responses and Messages are read as chat completions (``apis``). The engine validates all fields that do not matter
   here.
2. The prompt becomes bytes: 64 bytes of UTF-8 per block (16 tokens of an estimated 4 bytes) or, with a tokenizer, the
   engine's blocks of tokens.
3. Blocks are hashed in a chain, whose seed is model, adapter and salt.
4. Headers and fields name session, tenant, priority and promised times.
"""

from __future__ import annotations

import hashlib
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import numpy as np

from skymemory import native
from skymemory.conductor import request
from skymemory.conductor.request import HEAD_BYTES, Prompt, Request, Slo
from skymemory.errors import quoted
from skymemory.router.api_error import ApiError
from skymemory.router.api_keys import MOST_PRIORITY
from skymemory.router.apis.reading import is_whole, reason_of
from skymemory.router.apis.translation import API_PATHS, COUNT_TOKENS, prompt_body
from skymemory.router.prompts.item_limits import check_items
from skymemory.router.settings import AdmissionSettings, Settings

if TYPE_CHECKING:
    from skymemory.router.prompts.tokenizing import PromptTokenizer

COMPLETIONS = "/v1/completions"
CHAT_COMPLETIONS = "/v1/chat/completions"
CHAT_PATHS = frozenset((COMPLETIONS, CHAT_COMPLETIONS))
PROMPT_PATHS = CHAT_PATHS | API_PATHS
BYTES_PER_TOKEN = 4
MAX_NAME_LETTERS = 256
TOKEN_BYTES = 4
"""Size of a hashed token: unsigned, little-endian."""
MAX_OUTPUT_TOKENS = 1 << 24
"""Limit counted for an answer, so that sums do not lose small numbers."""
MAX_ANSWERS, _ANSWERS_DIGITS = 1 << 20, 7
IMAGE_BYTES = 2048
"""Size counted for a part that is not text: 512 tokens, a rough estimate."""
LONG_PROMPTS_BYTES = 131_072
"""Length (JSON) above which only the beginning of the first prompt is decoded."""
_NO_HASHES = np.empty(0, dtype=np.uint64)
_seed = lru_cache(maxsize=1024)(request.seed)


class PromptReader:
    """Reader of requests. ``adapters`` maps LoRA adapters to base models; it may change at any time."""

    def __init__(self, settings: Settings = Settings(), adapters: Mapping[str, str] | None = None) -> None:  # noqa: B008 - never changed
        prompts, admission, queues = settings.prompts, settings.admission, settings.queue.most_requests > 0
        self.adapters: Mapping[str, str] = {} if adapters is None else adapters
        self.max_body_bytes = settings.limits.max_body_bytes
        self._tokenizer: PromptTokenizer | None = None
        self._block_bytes, self._block_tokens = prompts.block_bytes, prompts.block_bytes / BYTES_PER_TOKEN
        if prompts.tokenizer is not None:
            from skymemory.router.prompts.tokenizing import PromptTokenizer

            self._tokenizer = PromptTokenizer(prompts.tokenizer)
            self._block_bytes, self._block_tokens = prompts.block_tokens * TOKEN_BYTES, float(prompts.block_tokens)
        self._max_blocks = prompts.max_blocks
        self._session_header = prompts.session_header.lower()
        self._cookie_begin = f"{prompts.session_cookie}="
        # Tenants, priorities and promises cost time to read, so each is only read if something uses it.
        self._clients = clients_of(admission) if admission.fair or queues else None
        self._promises = queues or admission.ttft_s > 0
        self._slo = slo_of(admission)
        self._pieces = settings.strategy == "simhash"  # it needs hashes of pieces, too

    def read(
        self,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        client: str = "",
        most_new: int | None = None,
        *,
        is_counted: bool = False,
    ) -> Request:
        """Read a request.

        Args:
            headers: by lower-case names.
            client: address, which identifies the session if nothing better does.
            most_new: letters that may be tokenized; None: any number.
            is_counted: the body is known to hold few items (``is_read_in_loop``).

        Raises:
            ApiError: a path without prompts (404), too large (413), unreadable or too many items (400).
            TooMuchNewText: ``most_new`` would be exceeded.
        """
        path = path.partition("?")[0]
        if path not in PROMPT_PATHS:
            raise ApiError(
                404, f"{path} takes no prompt; prompts go to {', '.join(sorted(PROMPT_PATHS - {COUNT_TOKENS}))}"
            )
        if len(body) > self.max_body_bytes:
            raise ApiError(413, f"the body has {len(body)} bytes; at most {self.max_body_bytes} are allowed")
        if not is_counted:
            check_items(body, path == COMPLETIONS)
        if path in API_PATHS:
            path, body = CHAT_COMPLETIONS, prompt_body(path, body)
        fields, texts = (read_body(body), _NO_TEXTS) if self._tokenizer is not None else _read_without_texts(body)
        model, adapter = self._model_and_adapter(fields)
        salt = fields.cache_salt or ""
        prompts = 1
        if path != COMPLETIONS:
            data, tokens = self._chat(fields, texts, salt, most_new)
        elif (data := texts.get(_PROMPT, b"")) != b"":
            tokens = _tokens(data)
        else:
            data, tokens, prompts = self._completion(fields, salt, most_new)
        clients = self._clients
        return Request(
            self._prompt(data, tokens, _seed(model, adapter, salt)),
            model=model,
            adapter=adapter,
            salt=salt,
            session=self._session(headers, fields, client)[:MAX_NAME_LETTERS],
            output_tokens=output_limit(fields),
            tenant="" if clients is None else clients.tenant(headers, _name_of(fields.user)),
            streams=bytes(fields.stream).strip() == b"true",
            priority=0 if clients is None else clients.priority(headers, bytes(fields.priority)),
            slo=promised(headers, self._slo) if self._promises else None,
            answers=1 if prompts == 1 and not (bytes(fields.n) or bytes(fields.best_of)) else _answers(fields, prompts),
        )

    def tokens_of(self, text: str) -> list[int]:
        """Return the tokens of a text within a prompt. It needs a tokenizer."""
        assert self._tokenizer is not None
        tokens: list[int] = np.frombuffer(self._tokenizer.text_tokens(text, False), dtype="<u4").tolist()
        return tokens

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    def _prompt(self, data: bytes, tokens: int, start: int) -> Prompt:
        """Hash the prompt's blocks. ``start``: seed of the chain."""
        hashed = (
            data[: self._max_blocks * self._block_bytes] if len(data) > self._max_blocks * self._block_bytes else data
        )
        return Prompt(
            native.chain_hashes(hashed, self._block_bytes, start),
            native.piece_hashes(hashed, self._block_bytes, start) if self._pieces else _NO_HASHES,
            self._block_tokens,
            max(1, tokens),
            data[:HEAD_BYTES],
        )

    def _completion(self, body: Body, salt: str, most_new: int | None) -> tuple[bytes, int, int]:
        """Return bytes of the first prompt, which alone is matched; the tokens and number of all."""
        raw = bytes(body.prompt)
        if len(raw) >= LONG_PROMPTS_BYTES and raw[:1] == b"[":
            first, more, count = first_prompt(body, self._max_blocks * self._block_bytes // TOKEN_BYTES)
            if not isinstance(first, str) or self._tokenizer is None:
                data = text_bytes(first) if isinstance(first, str) else token_bytes(first)
                return data, more + (_tokens(data) if isinstance(first, str) else len(first)), count
            data = self._tokenizer.text_tokens(first, True, salt, most_new)
            return data, more + len(data) // TOKEN_BYTES, count
        if self._tokenizer is None:
            prompts = prompts_of(body)
            return prompts[0], sum(map(_tokens, prompts)), len(prompts)
        packed = [
            self._tokenizer.text_tokens(prompt, True, salt, most_new)
            if isinstance(prompt, str)
            else token_bytes(prompt)
            for prompt in read_prompts(body)
        ]
        return packed[0], sum(map(len, packed)) // TOKEN_BYTES, len(packed)

    def _chat(self, body: Body, texts: Mapping[int, bytes], salt: str, most_new: int | None) -> tuple[bytes, int]:
        if self._tokenizer is None:
            data, size_bytes = chat_bytes(body, max(HEAD_BYTES, self._max_blocks * self._block_bytes), texts)
            return data, -(-size_bytes // BYTES_PER_TOKEN)
        data = self._chat_tokens(body, self._tokenizer, salt, most_new)
        return data, len(data) // TOKEN_BYTES

    def _chat_tokens(self, body: Body, tokenizer: PromptTokenizer, salt: str, most_new: int | None) -> bytes:
        """Return a chat's tokens by the template. If it fails, use the flat text: equal chats still match."""
        read_messages(body)
        messages: list[dict[str, Any]] = anything(body.messages, "messages")
        tools = anything(body.tools, "tools") if bytes(body.tools) else None
        more = anything(body.chat_template_kwargs, "chat_template_kwargs") if bytes(body.chat_template_kwargs) else None
        text = tokenizer.chat_text(messages, tools or None, more if isinstance(more, dict) else None)
        if text is None:
            return tokenizer.text_tokens(chat_bytes(body)[0].decode("utf-8", "replace"), True, salt, most_new)
        return tokenizer.text_tokens(text, False, salt, most_new)

    def _model_and_adapter(self, body: Body) -> tuple[str, str]:
        model, adapter = body.model or "", body.lora_adapter or ""
        if len(model) > MAX_NAME_LETTERS or len(adapter) > MAX_NAME_LETTERS:
            param, name = ("model", model) if len(model) > MAX_NAME_LETTERS else ("lora_adapter", adapter)
            raise ApiError(400, f"`{param}` has {len(name)} letters; at most {MAX_NAME_LETTERS} are allowed", param)
        if adapter:
            return model, adapter
        base = self.adapters.get(model)  # requests may name an adapter as their model
        return (model, "") if base is None else (base or model, model)

    def _session(self, headers: Mapping[str, str], body: Body, client: str) -> str:
        if session := headers.get(self._session_header):
            return session
        if cookies := headers.get("cookie"):
            for cookie in cookies.split(";"):
                if cookie.lstrip().startswith(self._cookie_begin):
                    return cookie.lstrip()[len(self._cookie_begin) :].strip()
        if body.user:
            return _name_of(body.user)
        return client or headers.get("x-forwarded-for", "").partition(",")[0].strip()


def _name_of(user: str | float | None) -> str:
    return user if isinstance(user, str) else "" if not user else quoted(user)


def _tokens(data: bytes) -> int:
    return -(-len(data) // BYTES_PER_TOKEN)


def without_prompt(tokens: int = 0) -> Request:
    return Request(Prompt(_NO_HASHES, _NO_HASHES, 16.0, tokens))


def output_limit(body: Body) -> int | None:
    """Return the limit of output tokens, at most ``MAX_OUTPUT_TOKENS``; None: no limit.

    Raises:
        ApiError: 400, it is not an integer of 64 bits.
    """
    limit = None if body.max_tokens is None else whole_number(body.max_tokens, "max_tokens")
    if body.max_completion_tokens is not None:
        limit = whole_number(body.max_completion_tokens, "max_completion_tokens")
    # A negative limit means no limit to some engines (llama.cpp), and must not be a credit to a tenant's quota.
    if limit is None or limit < 0:
        return None
    return limit if limit < MAX_OUTPUT_TOKENS else MAX_OUTPUT_TOKENS


def _answers(body: Body, prompts: int) -> int:
    counts = [_count(bytes(raw), name) for name, raw in (("n", body.n), ("best_of", body.best_of))]
    return min(prompts * max((1, *counts)), MAX_ANSWERS)


def _count(raw: bytes, param: str) -> int:
    """Return a number of answers, which engines also take as a text."""
    if raw in (b"", b"null", b"false", b"true"):
        return 1
    digits = raw[1:-1].strip() if raw.startswith(b'"') else raw
    if digits.isdigit():
        return int(digits) if len(digits) <= _ANSWERS_DIGITS else MAX_ANSWERS
    try:
        value = _anything.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        value = raw.decode("utf-8", "replace")
    if isinstance(value, int | float):
        return min(whole_number(value, param) or 0, MAX_ANSWERS)
    raise ApiError(400, f"`{param}` is {quoted(value)}; expected a whole number", param)


def whole_number(value: float | None, param: str) -> int | None:
    """Return an integer: JSON does not distinguish 16 from 16.0.

    Raises:
        ApiError: 400, it is not whole, or has more than 64 bits.
    """
    if value is None:
        return None
    if is_whole(value):
        return int(value)
    raise ApiError(400, f"`{param}` is {quoted(value)}; expected a whole number of at most 64 bits", param)


def clients_of(settings: AdmissionSettings) -> Clients:
    return Clients(settings.tenant_header.lower(), settings.priority_header.lower(), settings.objectives)


def slo_of(settings: AdmissionSettings) -> Slo | None:
    return Slo(settings.ttft_s, settings.tbt_s or math.inf) if settings.ttft_s else None


# Headers
#
# In addition to the headers that the operator names, the headers of Kubernetes gateways are read. In the Gateway API
# inference extension (its docs on InferenceObjective and on flow control, v1) ``x-gateway-inference-fairness-id`` is
# the tenant, and ``x-gateway-inference-objective`` names an objective, whose priority the picker looks up (higher goes
# first; 0 for an unknown name). In llm-d (its guide on predicted latency) ``x-slo-ttft-ms`` and ``x-slo-tpot-ms`` are
# the promised times in milliseconds. Later releases of llm-d spell all four with ``x-llm-d-``.

FAIRNESS_HEADERS = ("x-gateway-inference-fairness-id", "x-llm-d-inference-fairness-id")
OBJECTIVE_HEADERS = ("x-gateway-inference-objective", "x-llm-d-inference-objective")
TTFT_HEADERS = ("x-slo-ttft-ms", "x-llm-d-slo-ttft-ms")
TPOT_HEADERS = ("x-slo-tpot-ms", "x-llm-d-slo-tpot-ms")
MAX_SLO_MS = 1e12
_KEY_DIGITS = 16
_priority = msgspec.json.Decoder(int | float | None)
_WHOLE = re.compile(r"[+-]?[0-9]{1,19}")
_DECIMAL = re.compile(r"[0-9]{1,19}(\.[0-9]{0,19})?([eE][+-]?[0-9]{1,2})?")


@dataclass(frozen=True, slots=True)
class Clients:
    """Reader of a client's tenant and priority."""

    tenant_header: str = ""
    priority_header: str = ""
    # Priorities of objectives; None: the inference extension's headers are not read.
    objectives: Mapping[str, int] | None = None

    def tenant(self, headers: Mapping[str, str], user: str) -> str:
        """Return the tenant by its header, or else a digest of its API key, or ``user``."""
        if self.tenant_header and (tenant := headers.get(self.tenant_header)):
            return tenant[:MAX_NAME_LETTERS]
        if self.objectives is not None and (tenant := _first(headers, FAIRNESS_HEADERS)):
            return tenant[:MAX_NAME_LETTERS]
        if key := headers.get("authorization") or headers.get("x-api-key"):
            return _digest(key)
        return user[:MAX_NAME_LETTERS]

    def priority(self, headers: Mapping[str, str], field: bytes) -> int:
        """Return the priority by header or objective (higher goes first), else the body's (vLLM's: lower goes first).

        Raises:
            ApiError: 400, it is not an integer of 64 bits.
        """
        if self.priority_header and (value := headers.get(self.priority_header)) is not None:
            if not _WHOLE.fullmatch(value.strip()):
                raise ApiError(
                    400,
                    f"{self.priority_header} is {value[:40]!r}; expected a whole number, {-MOST_PRIORITY} to "
                    f"{MOST_PRIORITY}",
                )
            return _clamped(int(value))
        if self.objectives is not None and (objective := _first(headers, OBJECTIVE_HEADERS)) is not None:
            return self.objectives.get(objective, 0)
        if not self.priority_header or not field:
            return 0
        return _clamped(-(whole_number(_decoded(_priority, field, "priority"), "priority") or 0))

    def has_priority(self, headers: Mapping[str, str]) -> bool:
        if self.priority_header and self.priority_header in headers:
            return True
        return self.objectives is not None and _first(headers, OBJECTIVE_HEADERS) is not None


def promised(headers: Mapping[str, str], default: Slo | None = None) -> Slo | None:
    """Return the promised times by the headers or, if missing or 0, by ``default``.

    Raises:
        ApiError: 400, a header is not a number of milliseconds.
    """
    ttft_s, tbt_s = _seconds(headers, TTFT_HEADERS), _seconds(headers, TPOT_HEADERS)
    if not ttft_s and not tbt_s:
        return default
    if default is not None:
        return Slo(ttft_s or default.ttft_s, tbt_s or default.tbt_s)
    return Slo(ttft_s or math.inf, tbt_s or math.inf)


def _seconds(headers: Mapping[str, str], names: tuple[str, ...]) -> float | None:
    value = _first(headers, names)
    if value is None:
        return None
    milliseconds = float(value) if _DECIMAL.fullmatch(value.strip()) else -1.0
    if not 0 <= milliseconds <= MAX_SLO_MS:
        raise ApiError(400, f"{names[0]} is {value[:40]!r}; expected milliseconds up to {MAX_SLO_MS:,.0f}, such as 500")
    return milliseconds / 1000 or None


def _first(headers: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((value for name in names if (value := headers.get(name)) is not None), None)


def _clamped(level: int) -> int:
    return max(-MOST_PRIORITY, min(MOST_PRIORITY, level))


@lru_cache(maxsize=4096)
def _digest(key: str) -> str:
    return "key-" + hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()[:_KEY_DIGITS]


# The body

TokenIds = list[Annotated[int, msgspec.Meta(ge=0, lt=2**32)]]
T = TypeVar("T")


class Message(msgspec.Struct):
    """Turn of a chat, without small or changing fields."""

    role: str = ""
    content: str | list[msgspec.Raw] | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()


class LongMessage(msgspec.Struct):
    role: str = ""
    content: msgspec.Raw = msgspec.Raw()
    tool_calls: msgspec.Raw = msgspec.Raw()


class Body(msgspec.Struct):
    """Fields of a request that the router reads."""

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
    n: msgspec.Raw = msgspec.Raw()
    best_of: msgspec.Raw = msgspec.Raw()


class _Part(msgspec.Struct):
    type: str = ""
    text: str | None = None


_body = msgspec.json.Decoder(Body)
_messages = msgspec.json.Decoder(list[Message])
_long_messages = msgspec.json.Decoder(list[LongMessage])
_content = msgspec.json.Decoder(str | list[msgspec.Raw] | None)
_part = msgspec.json.Decoder(_Part)
_text = msgspec.json.Decoder(str)
_texts = msgspec.json.Decoder(list[str])
_ids = msgspec.json.Decoder(TokenIds)
_ids_lists = msgspec.json.Decoder(list[TokenIds])
_anything = msgspec.json.Decoder()
STARTS_WITH_NUMBER = re.compile(rb"\s*\[\s*[-\d]")
_STARTS_WITH_LIST = re.compile(rb"\s*\[\s*\[")
_NUMBER_BYTES = 12
_ESCAPE_BYTES = 6
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
_PROMPT = -1  # key of the prompt in `native.cut_texts`
_NO_TEXTS: Mapping[int, bytes] = MappingProxyType({})
_PATH = re.compile(r" - at `\$\.?([^`]*)`")


def read_body(body: bytes) -> Body:
    """Decode a body.

    Raises:
        ApiError: 400, no JSON object, or a field of the wrong type.
    """
    return _decoded(_body, body)


def _read_without_texts(body: bytes) -> tuple[Body, Mapping[int, bytes]]:
    remainder, texts = native.cut_texts(body)
    try:
        return read_body(remainder), texts
    except ApiError:
        return read_body(body), _NO_TEXTS  # decode the original, so that the error names the right position


def prompts_of(body: Body) -> list[bytes]:
    """Return a completion's prompts as bytes: UTF-8, or token numbers.

    Raises:
        ApiError: 400, there is no prompt, or it is neither text nor tokens.
    """
    return [text_bytes(prompt) if isinstance(prompt, str) else token_bytes(prompt) for prompt in read_prompts(body)]


def read_prompts(body: Body) -> list[str] | list[list[int]]:
    raw = bytes(body.prompt)
    if not raw or raw == b"null":
        if bytes(body.prompt_embeds):
            return [""]
        raise ApiError(
            400, "the body has no `prompt`: expected a text, or a list of texts or of token numbers", "prompt"
        )
    if raw[:1] == b'"':
        return [_decoded(_text, raw, "prompt")]
    if STARTS_WITH_NUMBER.match(raw):
        return [_decoded(_ids, raw, "prompt")]
    prompts: list[str] | list[list[int]] = (
        _decoded(_ids_lists, raw, "prompt") if _STARTS_WITH_LIST.match(raw) else _decoded(_texts, raw, "prompt")
    )
    if not prompts:
        raise ApiError(400, "`prompt` is an empty list", "prompt")
    return prompts


def first_prompt(body: Body, most_tokens: int) -> tuple[str | list[int], int, int]:
    """Read only the first of several prompts, or the beginning of a list of token numbers.

    Returns:
        The first prompt, or at least about ``most_tokens`` of its tokens; an estimate of the other tokens; the number
        of prompts.
    """
    raw = bytes(body.prompt)
    _, texts, commas, other_count, first_end = native.json_counts(raw)
    if STARTS_WITH_NUMBER.match(raw):
        first = _first_tokens(raw, most_tokens)
        return first, commas + 1 - len(first), 1
    first_raw = raw[1:first_end].strip()
    if _STARTS_WITH_LIST.match(raw):
        first = _first_tokens(first_raw, most_tokens)
        return first, commas + 1 - len(first), other_count + 1
    if texts != other_count + 1:
        return read_prompts(body)[0], 0, other_count + 1  # it is not a list of texts: the decoder reports what it is
    rest_bytes = max(0, len(raw) - first_end - 3 * other_count)
    return _decoded(_text, first_raw, "prompt"), -(-rest_bytes // BYTES_PER_TOKEN), other_count + 1


def _first_tokens(raw: bytes, most_tokens: int) -> list[int]:
    cut = most_tokens * _NUMBER_BYTES
    if len(raw) > cut and (end := raw.rfind(b",", 0, cut)) > 0:
        raw = raw[:end] + b"]"
    return _decoded(_ids, raw, "prompt")


def read_messages(body: Body) -> list[Message]:
    if not bytes(body.messages):
        also = "; `prompt` is of /v1/completions" if bytes(body.prompt) else ""
        raise ApiError(400, f"the body has no `messages`: expected a list of them{also}", "messages")
    return _decoded(_messages, bytes(body.messages), "messages")


def chat_bytes(body: Body, most_bytes: int = sys.maxsize, texts: Mapping[int, bytes] = _NO_TEXTS) -> tuple[bytes, int]:
    """Return a chat as bytes, at least the first ``most_bytes``, and its full length.

    Each earlier state of the conversation is a prefix. Tools come first, as in templates; control characters, which
    JSON cannot hold unescaped, separate the texts.
    """
    parts = [b"\x02tools\x03", bytes(body.tools)] if bytes(body.tools) not in (b"", b"null", b"[]") else []
    size_bytes = sum(map(len, parts))
    is_long = len(body.messages) > LONG_PROMPTS_BYTES
    messages: Sequence[Message | LongMessage] = _long_messages_of(body) if is_long else read_messages(body)
    for number, message in enumerate(messages):
        for piece, undecoded_bytes in _message_bytes(message, most_bytes, texts.get(number)):
            if size_bytes < most_bytes:
                parts.append(piece)
            size_bytes += len(piece) + undecoded_bytes
    return b"".join(parts), size_bytes


def _long_messages_of(body: Body) -> list[LongMessage]:
    return _decoded(_long_messages, memoryview(body.messages), "messages")


def _message_bytes(message: Message | LongMessage, most_bytes: int, text: bytes | None) -> Iterator[tuple[bytes, int]]:
    """Yield bytes, and how many are not decoded. ``text``: the content, if decoded before."""
    yield b"\x02" + text_bytes(message.role) + b"\x03", 0
    content = message.content
    if text is not None:
        yield text[:most_bytes], max(0, len(text) - most_bytes)
        content = None
    elif isinstance(content, msgspec.Raw):
        raw = bytes(content)
        if raw[:1] == b'"':
            yield _text_begin(raw, most_bytes)
            content = None
        else:
            content = _decoded(_content, raw, "messages.content") if raw else None
    if isinstance(content, str):
        yield text_bytes(content), 0
    elif content is not None:
        for part in content:
            yield part_bytes(part), 0
    if bytes(message.tool_calls) not in (b"", b"null", b"[]"):
        yield b"\x04" + bytes(message.tool_calls), 0


def _text_begin(raw: bytes, most_bytes: int) -> tuple[bytes, int]:
    """Decode at least ``most_bytes`` of a text (UTF-8); return also how many bytes are not decoded."""
    end = most_bytes * _ESCAPE_BYTES
    if len(raw) <= end:
        return text_bytes(_decoded(_text, raw, "messages.content")), 0
    while raw[end] & 0xC0 == 0x80:
        end -= 1  # do not split a letter
    escape = raw.rfind(b"\\", end - 2 * _ESCAPE_BYTES, end)
    if escape >= 0:
        before = raw[:escape].rstrip(b"\\")
        if (escape - len(before)) % 2 == 0:
            end = escape - _ESCAPE_BYTES if _HIGH_SURROGATE.fullmatch(raw, escape - _ESCAPE_BYTES, escape) else escape
    return text_bytes(_decoded(_text, raw[:end] + b'"', "messages.content")), len(raw) - end - 1


def part_bytes(raw: msgspec.Raw) -> bytes:
    """Return a part's text; an image's digest, repeated, stands for its many tokens."""
    data = bytes(raw)
    if data[:1] == b'"':
        return text_bytes(_decoded(_text, data, "messages"))
    part = _decoded(_part, data, "messages")
    if part.text is not None:
        return text_bytes(part.text)
    return digest_of(data) * (IMAGE_BYTES // 64)


def digest_of(raw: bytes) -> bytes:
    return hashlib.blake2b(raw, digest_size=32).hexdigest().encode("ascii")


def anything(raw: msgspec.Raw, param: str) -> Any:
    return _decoded(_anything, bytes(raw), param)


def text_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def token_bytes(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype="<u4").tobytes()


def _decoded(decoder: msgspec.json.Decoder[T], raw: bytes | memoryview, param: str | None = None) -> T:
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        place = _PATH.search(str(error))
        field = ".".join(part for part in (param, place[1] if place else "") if part) or None
        # msgspec reports numbers with more digits than Python reads as out of range.
        hint = "; expected a number of at most 64 bits" if "out of range" in str(error) else ""
        raise ApiError(400, f"invalid request body: {error}{hint}", field) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not JSON: {reason_of(error, raw)}", param) from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply", param) from error
