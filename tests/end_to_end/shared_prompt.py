"""One prompt of one model: stored by the process of the test, read by another, which runs this file."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from skymemory import KVCManager, open_store
from skymemory.engine.inputs import shipped_document
from skymemory.engine.transformers.models import build_small, load_tokenizer, train_tokenizer

_CHARACTERS, _NEW_TOKENS = 3000, 20


@dataclass
class Speaker:
    """The model with its prompt; the same in every process that has the tokenizer."""

    model: Any
    tokenizer: Any
    prompt: str

    def answer(self, cache: Any = None) -> list[int]:
        inputs = self.tokenizer(self.prompt, return_tensors="pt", return_token_type_ids=False)
        out = self.model.generate(**inputs, past_key_values=cache, max_new_tokens=_NEW_TOKENS, do_sample=False)
        tokens: list[int] = out[0, inputs.input_ids.shape[1] :].tolist()
        return tokens

    def manager(self, place: str) -> KVCManager:
        return KVCManager(self.model, self.tokenizer, store=open_store(place))


def save_tokenizer(folder: Path) -> None:
    train_tokenizer(1024).save_pretrained(str(folder / "tokenizer"))


def speaker(folder: Path) -> Speaker:
    tokenizer = load_tokenizer(folder / "tokenizer")
    return Speaker(build_small(vocab_size=len(tokenizer)), tokenizer, shipped_document()[:_CHARACTERS])


def add(folder: Path, place: str) -> list[int]:
    """Store the prompt's blocks out of an answer; what it says without a cache."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the other process, so that sums come in the same order
    one = speaker(folder)
    plain = one.answer()
    with one.manager(place) as kvc:
        tokens = one.answer(kvc.get_cache(one.prompt))
        result = kvc.add_blocks(one.prompt)
        kvc.store.close()
    torch.set_num_threads(threads)
    assert result.stored_blocks == result.blocks > 3 and result.prefilled_tokens == 0, result
    assert tokens == plain
    return plain


def main(folder: Path) -> None:
    """Of three lookups: tokens from the cache, seconds, and whether the answer is the plain one, a line of input."""
    torch.set_num_threads(1)
    one = speaker(folder)
    plain = json.loads(input())
    for place in ("constellation", "constellation://?index=no", "constellation"):
        with one.manager(place) as kvc:
            began_s = time.perf_counter()
            cache = kvc.get_cache(one.prompt)
            seconds = time.perf_counter() - began_s
            sys.stdout.write(f"{cache.result.cached_tokens} {seconds} {one.answer(cache) == plain}\n")
            sys.stdout.flush()
        if "no" in place:
            input()  # until a host is dead


if __name__ == "__main__":
    main(Path(sys.argv[1]))
