"""The reader of prompts that a router's settings ask for."""

from __future__ import annotations

from collections.abc import Mapping

from skymemory.router.clients import Clients
from skymemory.router.prompts import PromptReader
from skymemory.router.settings import Settings


def prompt_reader(settings: Settings, adapters: Mapping[str, str]) -> PromptReader:
    prompts = settings.prompts
    tokenizer = None
    if prompts.tokenizer is not None:
        from skymemory.router.tokenizing import PromptTokenizer

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
        clients=Clients(settings.admission.tenant_header.lower(), settings.admission.priority_header.lower())
        if settings.admission.fair
        else None,
    )
