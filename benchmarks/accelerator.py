"""Time to first token on an accelerator: computed, loaded, or both: `python benchmarks/accelerator.py [--json FILE]`.

Models of TinyLlama-1.1B's and of Llama-3-8B's shape (random weights, bfloat16), prompts of several lengths. Each prompt
is computed by the model alone; then its blocks are stored and read back through the transformers manager, from a store
in this process's memory and from a constellation of processes (a beam to each of ten servers, no delays: what the
loopback carries), as a prefix and by Cake. Beside it stands how many of eight tokens, and of the first logits how far,
agree with the model alone when it computes in the same two steps (a prefix, then the tail of 16 tokens); kernels choose
their order of additions by the shapes, so Cake's other steps may differ in the last bits. Every figure is the median of
the repeats.

Needs torch, transformers and numpy, and no other package. Without an accelerator it says so; `--device cpu --models
small` tries the same on one that has none.

`--host-tier` measures the host tier instead, in four minutes at most: bytes copied into an arena and back are compared;
GB/s of loads and saves by size of value; the time to the first token of 8,192 tokens of Llama-3-8B's shape, computed
and from the arena. Without an accelerator, or with `--dry-run`, all is small and on the CPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache
from transformers.utils import logging

from _bench import constellation, host_owner, print_table, write_json
from block_copier import arena_rows
from skymemory.engine.transformers.huggingface import KVCManager
from skymemory.engine.transformers.kv_cache import SkyCache
from skymemory.engine.transformers.models import SMALL_SHAPE, TINYLLAMA_SHAPE, build_llama
from skymemory.store.base import Store
from skymemory.store.host.client import HostStore
from skymemory.store.memory import MemoryStore
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.testbed.connect import store_of

TAIL_TOKENS = 16
LLAMA_8B_SHAPE: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
"""Llama-3-8B's, with a smaller vocabulary: 131 KB of KV per token."""
MODELS = {"small": SMALL_SHAPE, "tinyllama-1.1b": TINYLLAMA_SHAPE, "llama-8b": LLAMA_8B_SHAPE}


def seconds(act: Callable[[], Any], repeats: int, device: str) -> float:
    times = []
    for _ in range(repeats + 1):  # one to warm
        began_s = time.perf_counter()
        act()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times[1:])


def first_logits(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    start = cache.begin() if isinstance(cache, SkyCache) else cache.get_seq_length()
    with torch.inference_mode():
        out = model(input_ids=ids[:, start:], past_key_values=cache, use_cache=True, logits_to_keep=1)
    return out.logits[0, -1].float()


def first_token(model: Any, ids: torch.Tensor, cache: Any) -> int:
    return int(first_logits(model, ids, cache).argmax())


def answer(model: Any, ids: torch.Tensor, cache: Any) -> list[int]:
    with torch.inference_mode():
        out = model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False, pad_token_id=2)
    return [int(token) for token in out[0, ids.shape[1] :]]


def alone(model: Any, ids: torch.Tensor) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=ids[:, :-TAIL_TOKENS], past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


def loaded(model: Any, store: Store, ids: torch.Tensor, repeats: int, device: str) -> dict[str, Any]:
    """Medians of the time to the first token, as a prefix and by Cake, and what agrees with the model alone."""
    found: dict[str, Any] = {}
    expected, logits = answer(model, ids, alone(model, ids)), first_logits(model, ids, alone(model, ids))
    for loading in ("prefix", "cake"):
        with KVCManager(model, store=store, weights="random 0", loading=loading) as kvc:  # type: ignore[arg-type]
            kvc.add_blocks_ids(ids)
            found["page_locked"] = kvc._memory is not None and kvc._memory.wait(60)
            got = answer(model, ids, kvc.get_cache_ids(ids))
            found[f"{loading}_same_tokens"] = sum(a == b for a, b in zip(got, expected, strict=True))
            apart = (first_logits(model, ids, kvc.get_cache_ids(ids)) - logits).abs().max() / logits.std()
            found[f"{loading}_logits_apart"] = round(float(apart), 5)
            found[f"{loading}_s"] = seconds(lambda: first_token(model, ids, kvc.get_cache_ids(ids)), repeats, device)
            result = kvc.last
            found[f"{loading}_cached_tokens"] = result.cached_tokens
            found[f"{loading}_fetch_s"] = result.seconds.get("fetch", 0.0)
            found["bytes"] = max(found.get("bytes", 0), result.size_bytes)
    return found


def measured(which: str, device_name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one model; it is let go of afterwards."""
    shape = {**MODELS[which], "max_position_embeddings": max(args.lengths) + 64}
    model = build_llama(shape, args.seed, dtype="bfloat16", weight_std=0.1 if which == "small" else 0.02)
    model = model.to(args.device)  # type: ignore[arg-type]
    per_layer = 2 * shape["num_key_value_heads"] * shape["hidden_size"] // shape["num_attention_heads"]
    label = {
        "device": device_name,
        "model": which,
        "kv_bytes_per_token": shape["num_hidden_layers"] * per_layer * model.dtype.itemsize,
    }
    drawn = torch.Generator().manual_seed(args.seed)
    ids = torch.randint(3, shape["vocab_size"], (1, max(args.lengths) + TAIL_TOKENS), generator=drawn)
    ids = ids.to(args.device)
    rows: list[dict[str, Any]] = []

    def compute(tokens: int) -> int:
        return first_token(model, ids[:, : tokens + TAIL_TOKENS], DynamicCache(config=model.config))

    for length in args.lengths:
        computed_s = seconds(partial(compute, length), args.repeats, args.device)
        rows.append({**label, "way": "computed", "tokens": length, "ttft_s": computed_s})
        print(f"{which}, {length} tokens: computed in {computed_s * 1e3:.1f} ms", file=sys.stderr, flush=True)
    with constellation(delay_scale=0.0, memory_per_satellite_bytes=512 << 20) as (plan, folder):
        sky = store_of(plan, index=SharedIndex(folder / "index", born=True))
        for length in args.loaded:
            for where, store in (("memory", MemoryStore(8 << 30)), ("constellation", sky)):
                found = loaded(model, store, ids[:, : length + TAIL_TOKENS], args.repeats, args.device)
                rows.append({**label, "way": where, "tokens": length, **found})
                print(f"{which}, {length} tokens from {where}: {found}", file=sys.stderr, flush=True)
        sky.close()
    return rows


def ttft_rows(store: Store, place: str, which: str, tokens: int, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a model's time to the first token, computed and loaded from ``store``."""
    shape = {**MODELS[which], "max_position_embeddings": tokens + 64}
    model = build_llama(shape, args.seed, dtype="bfloat16", weight_std=0.1 if which == "small" else 0.02)
    model = model.to(place)  # type: ignore[arg-type]
    yield {"way": "model built", "model": which}
    drawn = torch.Generator().manual_seed(args.seed)
    ids = torch.randint(3, shape["vocab_size"], (1, tokens + TAIL_TOKENS), generator=drawn).to(place)
    computed_s = seconds(lambda: first_token(model, ids, DynamicCache(config=model.config)), args.repeats, place)
    yield {"way": "computed", "model": which, "tokens": tokens, "ttft_s": computed_s}
    found = loaded(model, store, ids, args.repeats, place)
    yield {"way": "host", "model": which, "tokens": tokens, "of_computing": found["prefix_s"] / computed_s, **found}


def host_tier(args: argparse.Namespace) -> None:
    """Measure the host tier; at the time limit write what there is, and end."""
    dry = args.dry_run or not torch.cuda.is_available()
    place, which, tokens = ("cpu", "small", 256) if dry else ("cuda", "llama-8b", 8192)
    sizes, values, budget = ([64 << 10], 8, "24MiB") if dry else ([512 << 10, 3 << 20, 12 << 20], 64, "3GiB")
    name = "CPU" if dry else torch.cuda.get_device_name(0)
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append({"device": name, **row})
        shown = [f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()]
        print(f"{time.perf_counter() - began_s:5.1f} s  {', '.join(shown)}", file=sys.stderr, flush=True)

    def give_up() -> None:  # whatever the device does
        print(f"not done in {args.limit_s:g} s", file=sys.stderr, flush=True)
        write_json(args.json, "accelerator_host_tier", args.seed, [*rows, {"way": "time limit"}])
        process.terminate()
        process.wait(10)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    began_s = time.perf_counter()
    print(f"{name}{', a dry run' if dry else ''}", file=sys.stderr, flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="skymemory-", dir="/dev/shm") as folder,
        host_owner(Path(folder), budget) as process,
        HostStore(Path(folder)) as store,
    ):
        limit = threading.Timer(args.limit_s, give_up)
        limit.daemon = True
        limit.start()
        for row in arena_rows(store, place, sizes, values, args.repeats):
            add(row)
        for row in ttft_rows(store, place, which, tokens, args):
            add(row)
        limit.cancel()
    write_json(args.json, "accelerator_host_tier", args.seed, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["tinyllama-1.1b", "llama-8b"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--loaded", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--host-tier", action="store_true", help="measure the host tier instead")
    parser.add_argument("--dry-run", action="store_true", help="of the host tier, small and on the CPU")
    parser.add_argument("--limit-s", type=float, default=240.0, help="time of --host-tier")
    args = parser.parse_args()
    if args.host_tier:
        logging.set_verbosity_error()
        host_tier(args)
        return
    if args.device != "cpu" and not torch.cuda.is_available():
        sys.exit("no accelerator: this benchmark needs one (--device cpu tries it without)")
    logging.set_verbosity_error()
    name = "CPU" if args.device == "cpu" else torch.cuda.get_device_name(0)
    rows: list[dict[str, Any]] = []
    for which in args.models:
        rows += measured(which, name, args)
        write_json(args.json, "accelerator", args.seed, rows)
    print_table(
        f"TTFT on {name}, ms",
        ["model", "tokens", "computed", "memory", "by Cake", "constellation", "by Cake", "MB"],
        [table_row(rows, which, length) for which in args.models for length in args.lengths],
    )
    write_json(args.json, "accelerator", args.seed, rows)


def table_row(rows: list[dict[str, Any]], model: str, tokens: int) -> list[str]:
    its = {row["way"]: row for row in rows if (row["model"], row["tokens"]) == (model, tokens)}

    def ms(way: str, what: str) -> str:
        return f"{its[way][what] * 1e3:.1f}" if way in its else "-"

    return [
        model,
        str(tokens),
        ms("computed", "ttft_s"),
        *(ms(way, f"{loading}_s") for way in ("memory", "constellation") for loading in ("prefix", "cake")),
        f"{its['memory']['bytes'] / 1e6:.0f}" if "memory" in its else "-",
    ]


if __name__ == "__main__":
    main()
