"""A model that generates with a cache and without, and a manager of small blocks for it."""

from __future__ import annotations

from typing import Any

import torch

from skymemory import KVCManager
from skymemory.cache.cake.cake import CakeSettings

BLOCK = 16


def generate(model: Any, tokenizer: Any, prompt: str, cache: Any = None, new: int = 12, **options: Any) -> list[int]:
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    out = model.generate(**inputs, past_key_values=cache, max_new_tokens=new, do_sample=False, **options)
    return out[0].tolist()


def manager(model: Any, tokenizer: Any, store: Any = None, **options: Any) -> KVCManager:
    return KVCManager(model, tokenizer, store, block_tokens=BLOCK, **options)


def cake(model: Any, store: Any = None, loading: str = "cake", step_tokens: int = 2 * BLOCK, **options: Any) -> Any:
    """A manager that loads from both ends, or with one of its sides."""
    settings = options.pop("settings", None) or CakeSettings(step_tokens=step_tokens)
    return manager(model, None, store, weights="w", loading=loading, cake=settings, **options)


def tokens_of(model: Any, ids: Any, cache: Any = None) -> list[int]:
    """The prompt and eight greedy tokens."""
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    return model.generate(ids, past_key_values=cache, **options)[0].tolist()
