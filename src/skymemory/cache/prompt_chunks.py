"""A prompt cut into prefill steps: the chunks of the Cake paper, each made of several blocks of the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skymemory.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Consecutive tokens that are computed in one step or loaded at once."""

    first_token: int
    tokens: int
    size_bytes: int = 0
    """What loading it would move; 0 is allowed."""
    loadable: bool = False
    """All its tokens are in blocks that the store says it has."""
    resident: bool = False
    """Already in memory: neither to compute nor to load."""


def cut_prompt(
    prompt_tokens: int,
    *,
    step_tokens: int,
    block_tokens: int,
    stored_blocks: Sequence[int | None],
    resident_tokens: int = 0,
) -> tuple[PromptChunk, ...]:
    """Chunks of a prompt, in order, covering every token once.

    ``stored_blocks`` has the stored bytes of each full block, None where the store has none (or is shorter).
    A chunk ends after ``step_tokens``, where the resident prefix ends, and where stored blocks give way to holes,
    so that a hole costs no chunk beside it. The tokens behind the last full block are always computed.
    Raises InvalidInput where sizes are not positive or a step is not a whole number of blocks.
    """
    if prompt_tokens < 1 or step_tokens < 1 or block_tokens < 1 or step_tokens % block_tokens:
        raise InvalidInput(
            f"a prompt of {prompt_tokens} tokens, steps of {step_tokens}, blocks of {block_tokens}: "
            "all must be positive, and a step a whole number of blocks"
        )
    if not 0 <= resident_tokens <= prompt_tokens or resident_tokens % block_tokens:
        raise InvalidInput(f"resident_tokens is {resident_tokens}: not whole blocks of {block_tokens} in the prompt")

    def block_bytes(token: int) -> int | None:
        block = token // block_tokens
        whole = (block + 1) * block_tokens <= prompt_tokens
        return stored_blocks[block] if whole and block < len(stored_blocks) else None

    chunks: list[PromptChunk] = []
    first = 0
    if resident_tokens:
        chunks.append(PromptChunk(0, resident_tokens, resident=True))
        first = resident_tokens
    while first < prompt_tokens:
        limit = min((first // step_tokens + 1) * step_tokens, prompt_tokens)
        size = block_bytes(first)
        loadable, total, end = size is not None, size or 0, min(first + block_tokens, limit)
        while end < limit and ((size := block_bytes(end)) is not None) == loadable:
            total += size or 0
            end = min(end + block_tokens, limit)
        chunks.append(PromptChunk(first, end - first, total, loadable))
        first = end
    return tuple(chunks)
