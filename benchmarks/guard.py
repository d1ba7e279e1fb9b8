"""What looking costs: at a model before each use, and at each call of it with a cache, in µs.

`python benchmarks/guard.py` builds TinyLlama's 22 layers, narrow (the number of modules counts, not their size), and
prints medians: of the look that comes at each load, first forward pass and store, and of a decoding step's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from skymemory import KVCManager
from skymemory.engine.models import TINYLLAMA_SHAPE, build_llama

RUNS = 200
PROMPT_TOKENS = 4096


def median_us(call: Callable[[], object]) -> float:
    took_s = []
    for _ in range(RUNS):
        began_s = time.perf_counter()
        call()
        took_s.append(time.perf_counter() - began_s)
    return 1e6 * statistics.median(took_s)


def main() -> None:
    shape = {**TINYLLAMA_SHAPE, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 512,
             "max_position_embeddings": 8192, "num_attention_heads": 4, "num_key_value_heads": 4}  # fmt: skip
    model = build_llama(shape)
    modules = sum(1 for _ in model.modules())
    ids = torch.randint(3, 500, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
    with KVCManager(model) as kvc:
        kvc.add_blocks_ids(ids)
        look = median_us(lambda: kvc._identity.same(kvc.context))
        step_look = median_us(lambda: kvc._identity.same(kvc.context, closely=False))
        prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "logits_to_keep": 1}
        prompt["position_ids"] = torch.arange(PROMPT_TOKENS)[None]
        firsts = []
        for _ in range(20):
            cache = kvc.get_cache_ids(ids)
            given = {**prompt, "past_key_values": cache}
            began_s = time.perf_counter()
            kvc._guard(model, (), given)
            firsts.append(1e6 * (time.perf_counter() - began_s))
        step = {
            "input_ids": torch.tensor([[5]]), "past_key_values": cache, "logits_to_keep": 1,
            "attention_mask": torch.ones((1, PROMPT_TOKENS)), "position_ids": torch.tensor([[PROMPT_TOKENS - 1]]),
        }  # fmt: skip
        steps = median_us(lambda: kvc._guard(model, (), step))
    print(f"{modules} modules, prompts of {PROMPT_TOKENS} tokens: a look at the model {look:.0f} us, "
          f"{step_look:.0f} us at a step; the first call's "
          f"guard {statistics.median(firsts):.0f} us with it; a decoding step's {steps:.0f} us")  # fmt: skip


if __name__ == "__main__":
    main()
