"""What looking costs: at a model before each use, and at each call of it with a cache, in µs.

`python benchmarks/guard.py` builds TinyLlama's 22 layers, narrow (the number of modules counts, not their size), and
prints medians: of the look that comes at each load, first forward pass and store, and of all that a call waits for.
`--json docs/benchmarks/guard.json` keeps them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from _bench import write_json
from skymemory import KVCManager
from skymemory.engine.transformers.identity import Care
from skymemory.engine.transformers.kv_cache import SkyCache
from skymemory.engine.transformers.models import TINYLLAMA_SHAPE, build_llama

RUNS = 200
PROMPT_TOKENS = 4096


def median_us(call: Callable[[], object]) -> float:
    took_s = []
    for _ in range(RUNS):
        began_s = time.perf_counter()
        call()
        took_s.append(time.perf_counter() - began_s)
    return 1e6 * statistics.median(took_s)


def step_of(cache: SkyCache) -> dict[str, Any]:
    held = cache.get_seq_length()
    return {
        "input_ids": torch.tensor([[5]]),
        "past_key_values": cache,
        "logits_to_keep": 1,
        "attention_mask": torch.ones((1, held + 1), dtype=torch.long),
        "position_ids": torch.tensor([[held]]),
    }


def guard_s(kvc: KVCManager, call: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """What the guard takes of a call, and what the model is given then."""
    began_s = time.perf_counter()
    seen = kvc._guard(kvc.model, (), call)
    return time.perf_counter() - began_s, call if seen is None else seen[1]


def step_s(kvc: KVCManager, cache: SkyCache) -> float:
    """What it takes of a decoding step, behind another one: the processor's caches are the model's."""
    took_s, given = guard_s(kvc, step_of(cache))
    cache.guard = None  # it was seen
    with torch.inference_mode():
        kvc.model(**given)
    cache.guard = kvc._guard
    cache.on_pass_end()
    return took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    shape = {
        **TINYLLAMA_SHAPE,
        "hidden_size": 64,
        "intermediate_size": 64,
        "vocab_size": 512,
        "max_position_embeddings": 8192,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    model = build_llama(shape)
    modules = sum(1 for _ in model.modules())
    ids = torch.randint(3, 500, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
    with KVCManager(model) as kvc:
        kvc.add_blocks_ids(ids)
        look = median_us(lambda: kvc._identity.same(kvc.context))
        step_look = median_us(lambda: kvc._identity.same(kvc.context, Care.STEP))
        prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "logits_to_keep": 1}
        prompt["position_ids"] = torch.arange(PROMPT_TOKENS)[None]
        firsts = []
        for _ in range(20):
            cache = kvc.get_cache_ids(ids)
            firsts.append(1e6 * guard_s(kvc, {**prompt, "past_key_values": cache})[0])
        cache = kvc.get_cache_ids(ids)
        held = cache.begin()
        model(ids[:, held:], past_key_values=cache)
        steps = [1e6 * step_s(kvc, cache) for _ in range(RUNS)]
        again = 1e6 * statistics.median(guard_s(kvc, step_of(cache))[0] for _ in range(RUNS))
    row = {
        "modules": modules,
        "prompt_tokens": PROMPT_TOKENS,
        "look_us": look,
        "step_look_us": step_look,
        "first_call_us": statistics.median(firsts),
        "step_us": statistics.median(steps),
        "step_again_us": again,
    }
    print(
        f"{modules} modules, prompts of {PROMPT_TOKENS} tokens: a look at the model {look:.0f} us, at a step "
        f"{step_look:.0f} us; all of the guard at the first call {row['first_call_us']:.0f} us, at a decoding step "
        f"{row['step_us']:.0f} us, {again:.0f} us where the one before was just now"
    )
    write_json(args.json, "guard", 1, [row])


if __name__ == "__main__":
    main()
