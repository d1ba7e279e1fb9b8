"""GB/s of the CUDA block copier, beside plain copies of the same bytes between pinned memory and the device.

    python benchmarks/block_copier.py

Needs torch and a CUDA device, nothing of vLLM. The shape is Llama-3.1-8B's: 32 layers, 8 heads of 128, bfloat16, blocks
of 16 tokens, values of 128. Plain copies move one contiguous tensor by ``copy_(non_blocking=True)``, which is
cudaMemcpyAsync; the copier gathers and scatters scattered blocks as well.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from skymemory.engine.vllm.copier import copier_of

LAYERS, HEADS, TOKENS, WIDTH, BLOCKS, VALUE_BLOCKS = 32, 8, 16, 256, 1024, 8
ORDERS = {"LBHNC": (0, 1, 2, 3, 4), "LBNHC": (0, 1, 3, 2, 4), "BLHNC": (1, 0, 2, 3, 4), "BHLNC": (1, 2, 0, 3, 4)}
"""Of layer, block, head, token and content (keys beside values) in memory, as in vLLM 0.32."""


def caches_in(order: tuple[int, ...]) -> dict[str, Any]:
    shape = (LAYERS, BLOCKS, HEADS, TOKENS, WIDTH)
    raw = torch.zeros([shape[at] for at in order], dtype=torch.bfloat16, device="cuda")
    logical = raw.permute([order.index(at) for at in range(5)])
    return {f"layers.{at}": logical[at] for at in range(LAYERS)}


def gb_per_s(size_bytes: int, repeats: int, work: Callable[[], object]) -> float:
    """Median over ``repeats``, after one round that touches all memory."""
    took_s = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        work()
        torch.cuda.synchronize()
        took_s.append(time.perf_counter() - began_s)
    return size_bytes / statistics.median(took_s[1:]) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=32, help="values of each round")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} finds no CUDA device: nothing was measured")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.values} values a round")
    for name, order in ORDERS.items():
        print(f"{name}: {figures(caches_in(order), options.values, options.repeats)}", flush=True)


def figures(caches: dict[str, Any], values: int, repeats: int) -> str:
    copier = copier_of(caches, BLOCKS, VALUE_BLOCKS)
    value_bytes = copier.block_bytes * VALUE_BLOCKS
    outs: list[memoryview] = []
    while len(outs) < values:
        outs += copier.buffers(value_bytes)
    places = torch.randperm(BLOCKS)[: VALUE_BLOCKS * values].reshape(-1, VALUE_BLOCKS).tolist()
    device = torch.empty(values, value_bytes, dtype=torch.uint8, device="cuda")
    hosts = [torch.frombuffer(out, dtype=torch.uint8) for out in outs[:values]]

    def read() -> None:
        for blocks, out in zip(places, outs, strict=False):
            copier.read(blocks, out)

    def write() -> None:
        after = copier.mark()
        for blocks, out in zip(places, outs, strict=False):
            copier.write(blocks, out, 0, VALUE_BLOCKS, after)

    def plain_read() -> None:
        for host, row in zip(hosts, device, strict=True):
            host.copy_(row, non_blocking=True)

    def plain_write() -> None:
        for host, row in zip(hosts, device, strict=True):
            row.copy_(host, non_blocking=True)

    total = value_bytes * values
    ours, plain, in_ours, in_plain = (gb_per_s(total, repeats, work) for work in (read, plain_read, write, plain_write))
    return (
        f"values of {value_bytes >> 20} MiB, read {ours:.1f} GB/s (plain {plain:.1f}), write {in_ours:.1f} GB/s "
        f"(plain {in_plain:.1f}; the copier's host copies into pinned memory first)"
    )


if __name__ == "__main__":
    main()
