"""A model that generates with a cache and without, and a manager of small blocks for it."""

from __future__ import annotations

from typing import Any

from skymemory import KVCManager

BLOCK = 16


def generate(model: Any, tokenizer: Any, prompt: str, cache: Any = None, new: int = 12, **options: Any) -> list[int]:
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    out = model.generate(**inputs, past_key_values=cache, max_new_tokens=new, do_sample=False, **options)
    return out[0].tolist()


def manager(model: Any, tokenizer: Any, store: Any = None, **options: Any) -> KVCManager:
    return KVCManager(model, tokenizer, store, block_tokens=BLOCK, **options)
