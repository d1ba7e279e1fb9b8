"""Time to first token against prompt length, with the cache in the host tier, in the sky and without:
`python benchmarks/ttft.py`.

The model has TinyLlama-1.1B's shape (random weights, bfloat16 or ``--dtype``). Beside each figure stands its goal:
1.25 × (forward pass of the uncached tail alone + the cache's bytes at the rate at which Redis gives them in this run).

The rival is a safetensors file of the prompt's keys and values on tmpfs, mapped into transformers' cache by hand, and
the same tail; the two take turns and must give the same token. Ratio: ours / theirs, the median of the turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.cache_utils import Cache, DynamicCache
from transformers.utils import logging

from _bench import constellation, host_owner, median_s, print_table, redis_server, write_json
from skymemory.engine.inputs import shipped_document
from skymemory.engine.transformers.huggingface import KVCManager
from skymemory.engine.transformers.kv_cache import SkyCache
from skymemory.engine.transformers.models import build_tinyllama, train_tokenizer
from skymemory.store.base import Store
from skymemory.store.host.client import HostStore
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.testbed.connect import expected_round_trip_s, store_of

TAIL_TOKENS = 16
BOUND = 1.25
STORES = ("host", "off", "real")


def first_token(model: torch.nn.Module, ids: torch.Tensor, cache: Cache | None = None) -> int:
    start = 0 if cache is None else cache.begin() if isinstance(cache, SkyCache) else cache.get_seq_length()
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


@contextmanager
def file_of(cache: SkyCache, tokens: int) -> Iterator[Path]:
    """The first ``tokens`` of every layer in a safetensors file on tmpfs, contiguous as the file wants them."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="skymemory-ttft-") as folder:
        path = Path(folder) / "prompt.safetensors"
        keys = {f"{at}.k": layer.keys[:, :, :tokens].contiguous() for at, layer in enumerate(cache.layers)}
        values = {f"{at}.v": layer.values[:, :, :tokens].contiguous() for at, layer in enumerate(cache.layers)}
        save_file(keys | values, path)
        yield path


def from_file(model: torch.nn.Module, path: Path) -> DynamicCache:
    """The file's tensors as layers, mapped: what reads and copies them is the model's first pass."""
    cache = DynamicCache(config=model.config)
    with safe_open(path, "pt") as file:
        for at, layer in enumerate(cache.layers):
            keys, values = file.get_tensor(f"{at}.k"), file.get_tensor(f"{at}.v")
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
    return cache


def measure(kvc: KVCManager, model: torch.nn.Module, ids: torch.Tensor, repeats: int) -> dict[str, float]:
    """Seconds with the cache: median TTFT, the tail's forward pass alone, and the parts of fetching; the rival's TTFT
    and the median of the turns' ratios; processor seconds of this process for both.
    """
    kvc.add_blocks_ids(ids)
    cache = kvc.get_cache_ids(ids)
    first_token(model, ids, cache)
    with file_of(cache, ids.shape[1] - TAIL_TOKENS) as path:
        del cache
        return turns(kvc, model, ids, repeats, path)


def turns(kvc: KVCManager, model: torch.nn.Module, ids: torch.Tensor, repeats: int, path: Path) -> dict[str, float]:
    with_s, tail_s, fetch_s, decode_s, file_s, with_cpu_s, file_cpu_s = [], [], [], [], [], [], []
    for _ in range(repeats + 2):  # two to warm buffers
        cpu, began = time.process_time(), time.perf_counter()
        theirs = first_token(model, ids, from_file(model, path))
        file_s.append(time.perf_counter() - began)
        file_cpu_s.append(time.process_time() - cpu)
        cpu, began = time.process_time(), time.perf_counter()
        cache = kvc.get_cache_ids(ids)
        ready = time.perf_counter()
        ours = first_token(model, ids, cache)
        done = time.perf_counter()
        with_cpu_s.append(time.process_time() - cpu)
        if ours != theirs:
            raise SystemExit(f"token {ours} with the cache, {theirs} from the file")
        if cache.result.cached_tokens < ids.shape[1] - TAIL_TOKENS - 1:
            raise SystemExit(f"not served from the store: {cache.result.describe()}")
        with_s.append(done - began)
        tail_s.append(done - ready)
        fetch_s.append(cache.result.seconds.get("fetch", 0.0))
        decode_s.append(cache.result.seconds.get("decode", 0.0))
        size_bytes = cache.result.size_bytes
        del cache
    figures = {
        "with_s": with_s,
        "tail_s": tail_s,
        "fetch_s": fetch_s,
        "decode_s": decode_s,
        "file_s": file_s,
        "of_file": [ours / theirs for ours, theirs in zip(with_s, file_s, strict=True)],
        "with_cpu_s": with_cpu_s,
        "file_cpu_s": file_cpu_s,
    }
    return {**{name: statistics.median(all_of_it[2:]) for name, all_of_it in figures.items()}, "bytes": size_bytes}


@contextmanager
def store_named(label: str) -> Iterator[tuple[Store, float]]:
    """The store, and the seconds of its round trip."""
    with ExitStack() as stack:
        if label == "host":
            made = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="skymemory-ttft-"))
            stack.enter_context(host_owner(Path(made), "1GiB"))
            yield stack.enter_context(HostStore(Path(made))), 0.0
            return
        delays = 1.0 if label == "real" else 0.0
        running = constellation(delay_scale=delays, memory_per_satellite_bytes=64 << 20)
        plan, folder = stack.enter_context(running)
        store = store_of(plan, index=SharedIndex(folder / "index", born=True))
        yield stack.enter_context(store), expected_round_trip_s(plan, "los")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 4096])
    parser.add_argument("--stores", choices=STORES, nargs="+", default=STORES, help="the host tier, or a sky's delays")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.set_verbosity_error()
    tokenizer = train_tokenizer(4096)
    model = build_tinyllama(args.seed, dtype=args.dtype)
    document = tokenizer(shipped_document(), return_tensors="pt").input_ids
    rate = redis_bytes_per_s(2_883_648 if args.dtype == "bfloat16" else 5_767_232)
    print(f"Redis GET of one block: {rate / 1e6:.0f} MB/s" if rate else "no Redis", file=sys.stderr)
    rows = []
    for label in args.stores:
        named = f"random {args.seed}"
        with store_named(label) as (store, rtt_s), KVCManager(model, tokenizer, store=store, weights=named) as kvc:
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
                        "dtype": args.dtype,
                        "rtt_s": rtt_s,
                        "tokens": length,
                        "without_s": without_s,
                        **found,
                        "bound_s": bound_s,
                        "share": found["with_s"] / without_s,
                    }
                )
    print_table(
        f"TTFT, TinyLlama shape, tail of {TAIL_TOKENS} tokens",
        [
            "store",
            "tokens",
            "without",
            "with",
            "share",
            "tail",
            "fetch",
            "rebuild",
            "MB",
            "MB/s",
            "bound",
            "of bound",
            "file",
            "of file",
        ],
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
                f"{row['file_s'] * 1e3:.0f} ms",
                f"{row['of_file']:.2f}",
            ]
            for row in rows
        ],
    )
    write_json(args.json, "ttft", args.seed, rows)


if __name__ == "__main__":
    main()
