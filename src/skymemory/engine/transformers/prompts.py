"""Prompts in all their forms as token ids."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skymemory.engine.transformers.kv_cache import Tokens
from skymemory.errors import InvalidInput

if TYPE_CHECKING:
    from transformers import ProcessorMixin


_log = logging.getLogger(__name__)

_MEDIA_TOKEN = re.compile("(image|video|audio|vision|visual|speech|media).*(token|patch)_(ids?|index)$")

TokenIds: TypeAlias = Sequence[int] | torch.Tensor | npt.NDArray[np.integer[Any]]
"""Sequence of token ids: flat, or a tensor of shape (n,) or (1, n)."""

Prompt: TypeAlias = "str | TokenIds | Sequence[Mapping[str, Any]] | Mapping[str, Any]"
"""Text; token ids; the messages of a chat; or a mapping with ``input_ids`` (and ``attention_mask``) or
``sequences``.
"""


def prompt_ids(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None, template: Mapping[str, Any]
) -> Tokens:
    """Return the token ids of ``prompt``, without left padding; ``template``: arguments of ``apply_chat_template``.

    A chat gets a generation prompt unless it ends with an answer.

    Raises:
        InvalidInput: an unknown form, several prompts, or no tokenizer.
    """
    if template and not _is_chat(prompt):
        raise InvalidInput(f"{', '.join(sorted(template))}: only for chats, and the prompt is not a list of messages")
    if isinstance(prompt, str):
        ids = flat_ids(_needed(tokenizer)(text=prompt)["input_ids"])
        bos = getattr(getattr(tokenizer, "tokenizer", tokenizer), "bos_token_id", None)
        if bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:
            _log.warning(
                "a prompt begins with two BOS tokens: its text came from a template, and the tokenizer adds another. "
                "Pass the messages, or the ids of apply_chat_template, as the prompt."
            )
        return ids
    if _is_chat(prompt):
        chat: Any = prompt
        if odd := next((message for message in chat if not isinstance(message, Mapping)), None):
            raise InvalidInput(f"each message of a chat must be a mapping with its role and content, got {type(odd)}")
        options = {"add_generation_prompt": chat[-1].get("role") != "assistant", **template}
        encoded = _needed(tokenizer).apply_chat_template(chat, **{**options, "tokenize": True, "return_dict": True})
        return flat_ids(encoded["input_ids"])
    if isinstance(prompt, Mapping):
        named = next((name for name in ("input_ids", "sequences") if name in prompt), None)
        if named is None:
            raise InvalidInput(
                f"a mapping with {', '.join(map(str, prompt)) or 'nothing'}: pass one with input_ids, as a tokenizer "
                "gives it, or with sequences, as generate does; the messages of a chat are a list"
            )
        ids = flat_ids(prompt[named])
        mask = prompt.get("attention_mask")
        return ids if mask is None else ids[(_flat(mask) != 0).argmax() :]
    return flat_ids(prompt)


def _is_chat(prompt: Prompt) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], Mapping)


def _needed(tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None) -> PreTrainedTokenizerBase | ProcessorMixin:
    if tokenizer is None:
        raise InvalidInput("no tokenizer was given: pass one to KVCManager, or token ids as the prompt")
    return tokenizer


def flat_ids(ids: TokenIds) -> Tokens:
    """Return the ids of a single sequence of whole numbers as a flat int64 array."""
    array = _flat(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidInput(
            f"one prompt at a time: token ids must be one sequence of whole numbers, got {array.dtype} of shape "
            f"{array.shape}; {_OF_A_BATCH}"
        )
    return array.astype(np.int64)


_OF_A_BATCH = "for a batch get the cache of the beginning that its rows share"


def _flat(values: Any) -> npt.NDArray[Any]:
    try:
        array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    except ValueError as error:
        raise InvalidInput(f"one prompt at a time: got rows of different lengths; {_OF_A_BATCH}") from error
    return array[0] if array.ndim == 2 and array.shape[0] == 1 else array


def shared_prefix(known_ids: Tokens, ids: Tokens) -> int:
    """Count the equal leading tokens."""
    length = min(len(known_ids), len(ids))
    differing = np.flatnonzero(known_ids[:length] != ids[:length])
    return int(differing[0]) if len(differing) else length


def media_tokens(model: PreTrainedModel) -> list[int]:
    return sorted({*_media_tokens(vars(model.config)), *_media_tokens(model.config.to_dict())})


def _media_tokens(fields: Mapping[Any, Any]) -> Iterator[int]:
    # Yield ids of placeholders for images, video and sound in a model's configuration.
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _media_tokens(value)
        elif _MEDIA_TOKEN.search(str(name)):
            several = value if isinstance(value, list | tuple) else [value]
            yield from (token for token in several if isinstance(token, int) and not isinstance(token, bool))
