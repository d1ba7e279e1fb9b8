"""Time to first token against prompt length, with the cache in the sky and without: `python benchmarks/ttft.py`.

The model has TinyLlama-1.1B's shape (random weights, bfloat16). Beside each figure stands what it is held to:
1.25 × (forward pass of the uncached tail alone + the cache's bytes at the rate at which Redis gives them in this run).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers.utils import logging

from _bench import constellation, median_s, print_table, redis_server, write_json
from skymemory.engine.huggingface import KVCManager
from skymemory.engine.inputs import shipped_document
from skymemory.engine.kv_cache import SkyCache
from skymemory.engine.models import build_tinyllama, train_tokenizer
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.testbed.connect import expected_round_trip_s, store_of

TAIL_TOKENS = 16
BOUND = 1.25


def first_token(model: torch.nn.Module, ids: torch.Tensor, cache: SkyCache | None = None) -> int:
    start = cache.begin() if cache is not None else 0
    with torch.inference_mode():
        out = model(input_ids=ids[:, start:], past_key_values=cache, use_cache=True, logits_to_keep=1)
    return int(out.logits[0, -1].argmax())


def redis_bytes_per_s(value_bytes: int) -> float | None:
    """Rate of GETs of one block's bytes, warm."""
    with redis_server() as port:
        if port is None:
            return None
        import redis

        client = redis.Redis(port=port)
        client.set("block", os.urandom(value_bytes))
        for _ in range(20):
            client.get("block")
        seconds = median_s(lambda: client.get("block"), 60)
        client.close()
        return value_bytes / seconds


def measure(kvc: KVCManager, model: torch.nn.Module, ids: torch.Tensor, repeats: int) -> dict[str, float]:
    """Seconds with the cache: median TTFT, the tail's forward pass alone, and the parts of fetching."""
    kvc.add_blocks_ids(ids)
    with_s, tail_s, fetch_s, decode_s = [], [], [], []
    for _ in range(repeats + 2):  # two to warm buffers
        began = time.perf_counter()
        cache = kvc.get_cache_ids(ids)
        ready = time.perf_counter()
        first_token(model, ids, cache)
        done = time.perf_counter()
        if cache.result.cached_tokens < ids.shape[1] - TAIL_TOKENS - 1:
            raise SystemExit(f"not served from the sky: {cache.result.describe()}")
        with_s.append(done - began)
        tail_s.append(done - ready)
        fetch_s.append(cache.result.seconds.get("fetch", 0.0))
        decode_s.append(cache.result.seconds.get("decode", 0.0))
        size_bytes = cache.result.size_bytes
        del cache
    middle = {
        name: statistics.median(times[2:])
        for name, times in (("with_s", with_s), ("tail_s", tail_s), ("fetch_s", fetch_s), ("decode_s", decode_s))
    }
    return {**middle, "bytes": size_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 4096])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.set_verbosity_error()
    tokenizer = train_tokenizer(4096)
    model = build_tinyllama(args.seed)
    document = tokenizer(shipped_document(), return_tensors="pt").input_ids
    rate = redis_bytes_per_s(2_883_648)
    print(f"Redis GET of one block: {rate / 1e6:.0f} MB/s" if rate else "no Redis", file=sys.stderr)
    rows = []
    for scale, label in ((0.0, "off"), (1.0, "real")):
        with constellation(delay_scale=scale, memory_per_satellite_bytes=64 << 20) as (plan, folder):
            store = store_of(plan, index=SharedIndex(folder / "index", born=True))
            with KVCManager(model, tokenizer, store=store, weights=f"random {args.seed}") as kvc:
                for length in args.lengths:
                    ids = document[:, : length + TAIL_TOKENS]
                    first_token(model, ids[:, :64])
                    repeats = max(1, min(args.repeats, 4096 // length))
                    without_s = median_s(lambda ids=ids: first_token(model, ids), repeats)
                    found = measure(kvc, model, ids, args.repeats)
                    bound_s = BOUND * (found["tail_s"] + found["bytes"] / rate) if rate else None
                    rows.append(
                        {
                            "delay": label,
                            "rtt_s": expected_round_trip_s(plan, "los"),
                            "tokens": length,
                            "without_s": without_s,
                            **found,
                            "bound_s": bound_s,
                            "share": found["with_s"] / without_s,
                        }
                    )
            store.close()
    print_table(
        f"TTFT, TinyLlama shape, tail of {TAIL_TOKENS} tokens",
        ["delay", "tokens", "without", "with", "share", "tail", "fetch", "rebuild", "MB", "MB/s", "bound", "of bound"],
        [
            [
                row["delay"],
                str(row["tokens"]),
                f"{row['without_s']:.3f} s",
                f"{row['with_s'] * 1e3:.0f} ms",
                f"{row['share']:.1%}",
                f"{row['tail_s'] * 1e3:.0f} ms",
                f"{row['fetch_s'] * 1e3:.0f} ms",
                f"{row['decode_s'] * 1e3:.0f} ms",
                f"{row['bytes'] / 1e6:.0f}",
                f"{row['bytes'] / row['fetch_s'] / 1e6:.0f}",
                f"{row['bound_s'] * 1e3:.0f} ms" if row["bound_s"] else "-",
                f"{row['with_s'] / row['bound_s']:.2f}" if row["bound_s"] else "-",
            ]
            for row in rows
        ],
    )
    write_json(args.json, "ttft", args.seed, rows)


if __name__ == "__main__":
    main()
