"""From the body of an OpenAI request to what a router knows of it.

Blocks are either 64 bytes of UTF-8 (16 tokens, estimated at 4 bytes each), which needs nothing but the body, or the
engine's own blocks of tokens, where its tokenizer is known. Hashes are chained and seeded by model, adapter and salt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from skymemory import native
from skymemory.conductor import request
from skymemory.conductor.request import HEAD_BYTES, Prompt, Request, Slo
from skymemory.router.bad_request import BadRequest
from skymemory.router.clients import Clients, promised
from skymemory.router.prompts.bodies import (
    TOKEN_BYTES,
    Body,
    anything,
    chat_bytes,
    prompts_of,
    read_body,
    read_messages,
    read_prompts,
    token_bytes,
)
from skymemory.router.settings import AdmissionSettings, Settings

if TYPE_CHECKING:
    from skymemory.router.prompts.tokenizing import PromptTokenizer


COMPLETIONS = "/v1/completions"
CHAT_COMPLETIONS = "/v1/chat/completions"
PROMPT_PATHS = frozenset((COMPLETIONS, CHAT_COMPLETIONS))
BYTES_PER_TOKEN = 4
BLOCK_BYTES = 64
MAX_BLOCKS = 8192
"""Blocks of a prompt that are hashed at most: 128k tokens in blocks of 16. What is behind them does not steer."""
MAX_BODY_BYTES = 16 << 20
MAX_NAME_LETTERS = 256
"""Of a model, an adapter and a session: they are kept, and told in headers."""
SESSION_HEADER = "x-session-id"
SESSION_COOKIE = "session"


class PromptReader:
    """Reads requests. ``adapters`` may change meanwhile: names of LoRA adapters, and the models they are for."""

    def __init__(
        self,
        *,
        block_bytes: int = BLOCK_BYTES,
        tokenizer: PromptTokenizer | None = None,
        block_tokens: int = 16,
        max_blocks: int = MAX_BLOCKS,
        max_body_bytes: int = MAX_BODY_BYTES,
        adapters: Mapping[str, str] | None = None,
        session_header: str = SESSION_HEADER,
        session_cookie: str = SESSION_COOKIE,
        clients: Clients | None = None,
        pieces: bool = True,
        promises: bool = False,
        slo: Slo | None = None,
    ) -> None:
        """
        Args:
            promises: whether headers say what a request is promised; ``slo`` is what all are, where they do not.
            pieces: whether blocks are hashed each for itself, too: one strategy compares them (simhash).
            clients: where tenants and priorities are said; None: they are not read.
            tokenizer: blocks are ``block_tokens`` of its tokens; without one they are ``block_bytes`` of text.
        """
        self.adapters: Mapping[str, str] = {} if adapters is None else adapters
        self._tokenizer = tokenizer
        self._block_bytes = block_bytes if tokenizer is None else block_tokens * TOKEN_BYTES
        self._block_tokens = block_bytes / BYTES_PER_TOKEN if tokenizer is None else float(block_tokens)
        self._max_blocks = max_blocks
        self.max_body_bytes = max_body_bytes
        self._session_header = session_header.lower()
        self._cookie_begin = f"{session_cookie}="
        self._clients = clients
        self._pieces = pieces
        self._promises = promises
        self._slo = slo

    def read(
        self, path: str, headers: Mapping[str, str], body: bytes, client: str = "", most_new: int | None = None
    ) -> Request:
        """
        Args:
            most_new: letters that may be tokenized anew; None: all there are.
            path: of the request, with or without a query.
            headers: by lower-case names, or whatever the case where the mapping does not mind.
            client: its address, which stands for its session where nothing better does.

        Raises:
            BadRequest: it is not a request for a completion (404), too large (413), or cannot be read (400).
            NotKnown: it would take longer than ``most_new`` allows (only with a tokenizer).
        """
        path = path.partition("?")[0]
        if path not in PROMPT_PATHS:
            raise BadRequest(404, f"{path} takes no prompt; prompts go to {COMPLETIONS} or {CHAT_COMPLETIONS}")
        if len(body) > self.max_body_bytes:
            raise BadRequest(413, f"the body has {len(body)} bytes; at most {self.max_body_bytes} are taken")
        read = read_body(body)
        model, adapter = self._model_and_adapter(read)
        salt = read.cache_salt or ""
        data, tokens = (
            self._completion(read, salt, most_new) if path == COMPLETIONS else self._chat(read, salt, most_new)
        )
        clients, user = self._clients, str(read.user or "")
        limit = read.max_completion_tokens if read.max_completion_tokens is not None else read.max_tokens
        return Request(
            self._prompt(data, tokens, _seed(model, adapter, salt)),
            model=model,
            adapter=adapter,
            salt=salt,
            session=self._session(headers, read, client)[:MAX_NAME_LETTERS],
            output_tokens=None if limit is None or not math.isfinite(limit) else int(limit),
            tenant="" if clients is None else clients.tenant(headers, user),
            streams=bytes(read.stream).strip() == b"true",
            priority=0 if clients is None else clients.priority(headers, bytes(read.priority)),
            slo=promised(headers, self._slo) if self._promises else None,
        )

    def _prompt(self, data: bytes, tokens: int, start: int) -> Prompt:
        hashed = (
            data[: self._max_blocks * self._block_bytes] if len(data) > self._max_blocks * self._block_bytes else data
        )
        return Prompt(
            native.chain_hashes(hashed, self._block_bytes, start),
            native.piece_hashes(hashed, self._block_bytes, start) if self._pieces else _NO_PIECES,
            self._block_tokens,
            max(1, tokens),
            data[:HEAD_BYTES],
        )

    def _completion(self, body: Body, salt: str, most_new: int | None) -> tuple[bytes, int]:
        """Bytes of the first prompt (others do not share its place in a cache), tokens of all of them."""
        if self._tokenizer is None:
            prompts = prompts_of(body)
            return prompts[0], sum(map(_tokens, prompts))
        packed = [
            self._tokenizer.text_tokens(each, True, salt, most_new) if isinstance(each, str) else token_bytes(each)
            for each in read_prompts(body)
        ]
        return packed[0], sum(map(len, packed)) // TOKEN_BYTES

    def _chat(self, body: Body, salt: str, most_new: int | None) -> tuple[bytes, int]:
        if self._tokenizer is None:
            data = chat_bytes(body)
            return data, _tokens(data)
        data = self._chat_tokens(body, self._tokenizer, salt, most_new)
        return data, len(data) // TOKEN_BYTES

    def _chat_tokens(self, body: Body, tokenizer: PromptTokenizer, salt: str, most_new: int | None) -> bytes:
        """As the engine's template has it. Where it has none, or refuses, tokens of the flat text: the engine will say
        what is wrong, and until then equal chats are equal.
        """
        read_messages(body)
        messages: list[dict[str, Any]] = anything(body.messages, "messages")
        tools = anything(body.tools, "tools") if bytes(body.tools) else None
        more = anything(body.chat_template_kwargs, "chat_template_kwargs") if bytes(body.chat_template_kwargs) else None
        text = tokenizer.chat_text(messages, tools or None, more if isinstance(more, dict) else None)
        if text is None:
            return tokenizer.text_tokens(chat_bytes(body).decode("utf-8", "replace"), True, salt, most_new)
        return tokenizer.text_tokens(text, False, salt, most_new)

    def _model_and_adapter(self, body: Body) -> tuple[str, str]:
        model, adapter = body.model or "", body.lora_adapter or ""
        if len(model) > MAX_NAME_LETTERS or len(adapter) > MAX_NAME_LETTERS:
            param, name = ("model", model) if len(model) > MAX_NAME_LETTERS else ("lora_adapter", adapter)
            raise BadRequest(400, f"`{param}` has {len(name)} letters; at most {MAX_NAME_LETTERS} are taken", param)
        if adapter:
            return model, adapter
        base = self.adapters.get(model)
        return (model, "") if base is None else (base or model, model)

    def _session(self, headers: Mapping[str, str], body: Body, client: str) -> str:
        """Its header, else its cookie, else the user that it names, else the address it comes from."""
        if session := headers.get(self._session_header):
            return session
        if cookies := headers.get("cookie"):
            for cookie in cookies.split(";"):
                if cookie.lstrip().startswith(self._cookie_begin):
                    return cookie.lstrip()[len(self._cookie_begin) :].strip()
        if body.user:
            return str(body.user)
        return client or headers.get("x-forwarded-for", "").partition(",")[0].strip()


_NO_PIECES = np.empty(0, dtype=np.uint64)
_seed = lru_cache(maxsize=1024)(request.seed)


def _tokens(data: bytes) -> int:
    return -(-len(data) // BYTES_PER_TOKEN)


# The reader of prompts that a router's settings ask for.


def prompt_reader(settings: Settings, adapters: Mapping[str, str]) -> PromptReader:
    prompts, admission, queues = settings.prompts, settings.admission, settings.queue.most_requests > 0
    tokenizer = None
    if prompts.tokenizer is not None:
        from skymemory.router.prompts.tokenizing import PromptTokenizer

        tokenizer = PromptTokenizer(prompts.tokenizer)
    return PromptReader(
        block_bytes=prompts.block_bytes,
        tokenizer=tokenizer,
        block_tokens=prompts.block_tokens,
        max_blocks=prompts.max_blocks,
        max_body_bytes=settings.limits.max_body_bytes,
        adapters=adapters,
        session_header=prompts.session_header,
        session_cookie=prompts.session_cookie,
        clients=Clients(admission.tenant_header.lower(), admission.priority_header.lower(), admission.objectives)
        if admission.fair or queues
        else None,
        promises=queues or admission.ttft_s > 0,
        slo=slo_of(admission),
        pieces=settings.strategy == "simhash",
    )


def slo_of(said: AdmissionSettings) -> Slo | None:
    """To all requests; None: nothing is."""
    return Slo(said.ttft_s, said.tbt_s or math.inf) if said.ttft_s else None


__all__ = ["CHAT_COMPLETIONS", "COMPLETIONS", "PROMPT_PATHS", "BadRequest", "PromptReader"]
