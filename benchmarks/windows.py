"""What a hit costs of a model with sliding windows: bytes and time, for 26 layers, five with a window to one without.

`python benchmarks/windows.py` stores 8,192 tokens of keys and values of Gemma 3 1B's shape (bfloat16, one head of 256)
and loads them, from memory and from disk; the model itself is narrow, and computes them once. Beside it the same where
no layer has a window. Prints the median of each way's loads; `--json docs/benchmarks/windows.json` keeps them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from _bench import print_table, write_json
from skymemory import KVCManager, open_store

LAYERS, HEAD_DIM, TOKENS, RUNS = 26, 256, 8192, 7


def model_of(window: int | None) -> Gemma3ForCausalLM:
    kinds = ["sliding_attention" if window and layer % 6 != 5 else "full_attention" for layer in range(LAYERS)]
    config = Gemma3TextConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        vocab_size=512,
        max_position_embeddings=2 * TOKENS,
        sliding_window=window or TOKENS,
        layer_types=kinds,
        dtype="bfloat16",
    )
    return Gemma3ForCausalLM(config).to(torch.bfloat16).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ids = torch.randint(3, 500, (1, TOKENS + 16), generator=torch.Generator().manual_seed(1))
    rows: list[dict[str, Any]] = []
    for window in (512, 1024, None):
        model = model_of(window)
        for kind in ("memory", "disk"):
            with tempfile.TemporaryDirectory() as folder:
                address = "memory://" if kind == "memory" else f"disk://{Path(folder) / 'store'}?budget=4GB"
                with open_store(address) as store, KVCManager(model, None, store, weights="w") as kvc:
                    kvc.add_blocks_ids(ids[:, :TOKENS])
                    kvc.blocks.compute.record(1000, 1000.0)  # else loading is given up for computing, which is narrow
                    results = [kvc.get_cache_ids(ids).result for _ in range(RUNS)]
                assert all(result.cached_tokens == TOKENS for result in results)
                took_s = statistics.median(result.total_s for result in results[1:])
                rows.append({"window": window, "store": kind, "size_bytes": results[-1].size_bytes, "load_s": took_s})
    table = [
        [str(row["window"] or "none"), row["store"], f"{row['size_bytes'] / 1e6:.1f}", f"{1e3 * row['load_s']:.1f}"]
        for row in rows
    ]
    print_table(f"A hit of {TOKENS:,} tokens", ["window", "store", "MB", "ms"], table)
    write_json(args.json, "windows", 1, rows)


if __name__ == "__main__":
    main()
