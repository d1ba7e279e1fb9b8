"""What a hit costs of a model with sliding windows: bytes and time, for 26 layers, five with a window to one without.

`python benchmarks/windows.py` stores 8,192 tokens of keys and values of Gemma 3 1B's shape (bfloat16, one head of 256)
and loads them, from memory and from disk; the model itself is narrow, and computes them once. Prints the median of
each way's loads.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from skymemory import KVCManager, open_store

LAYERS, HEAD_DIM, TOKENS, RUNS = 26, 256, 8192, 7


def model_of(window: int) -> Gemma3ForCausalLM:
    kinds = ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(LAYERS)]
    config = Gemma3TextConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        vocab_size=512,
        max_position_embeddings=2 * TOKENS,
        sliding_window=window,
        layer_types=kinds,
        dtype="bfloat16",
    )
    return Gemma3ForCausalLM(config).to(torch.bfloat16).eval()


def main() -> None:
    torch.set_num_threads(1)
    ids = torch.randint(3, 500, (1, TOKENS + 16), generator=torch.Generator().manual_seed(1))
    print("| window | store | MB of a hit | ms |\n| ---: | --- | ---: | ---: |")
    for window in (512, 1024):
        model = model_of(window)
        for kind in ("memory", "disk"):
            with tempfile.TemporaryDirectory() as folder:
                address = "memory://" if kind == "memory" else f"disk://{Path(folder) / 'store'}?budget=4GB"
                with open_store(address) as store, KVCManager(model, None, store, weights="w") as kvc:
                    kvc.add_blocks_ids(ids[:, :TOKENS])
                    kvc.blocks.compute.took(1000, 1000.0)  # else loading is given up for computing, which is narrow
                    results = [kvc.get_cache_ids(ids).result for _ in range(RUNS)]
                assert all(result.cached_tokens == TOKENS for result in results)
                took_ms = 1e3 * statistics.median(result.total_s for result in results[1:])
                print(f"| {window} | {kind} | {results[-1].size_bytes / 1e6:.1f} | {took_ms:.1f} |")


if __name__ == "__main__":
    main()
