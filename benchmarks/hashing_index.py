"""Block hashing and the radix index at full size: `python benchmarks/hashing_index.py [--json FILE]`.

Prints a table of medians (and the 99th percentile) of repeated runs, each over prompts drawn with the seed.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import pickle
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import psutil

import skymemory
from skymemory import native
from skymemory.index.radix import BlockInfo, RadixIndex
from skymemory.kv.block import hash_blocks
from skymemory.kv.value import DEFAULT_CHUNK_BYTES
from skymemory.store.sky.probing import PrefixSearch

HASHED_BLOCKS = (16, 128)
INFO = BlockInfo(480, 2_949_184, 0x1234ABCD, 1_700_000_000.0, 4, 1, "rotation_hop", 10, bytes(32))


def timed(run: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median and 99th percentile, in seconds."""
    run()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds)), float(np.percentile(seconds, 99))


def timed_over(calls: list[Callable[[], object]]) -> tuple[float, float]:
    """Each call once, so that nothing is warm but what a server would have warm."""
    seconds = []
    for call in calls:
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds)), float(np.percentile(seconds, 99))


def chains(rng: np.random.Generator, blocks: int, shape: str) -> list[tuple[int, bytes | None, list[bytes]]]:
    """Chains of ``blocks`` hashes in all: (start, parent, hashes).

    ``long``: prompts of 1,000 blocks. ``chat``: 100 shared system prompts of 8 blocks, under each of them
    conversations of 8 to 40 blocks, every other one of which branches off an earlier one at a random turn.
    """

    def fresh(count: int) -> list[bytes]:
        raw = rng.bytes(32 * count)
        return [raw[at : at + 32] for at in range(0, len(raw), 32)]

    if shape == "long":
        return [(0, None, fresh(1000)) for _ in range(blocks // 1000)]
    found: list[tuple[int, bytes | None, list[bytes]]] = [(0, None, fresh(8)) for _ in range(100)]
    total = 800
    grown = list(found)
    while total < blocks:
        start, _, hashes = grown[int(rng.integers(len(grown)))] if rng.random() < 0.5 else found[int(rng.integers(100))]
        cut = int(rng.integers(1, len(hashes) + 1))
        length = min(int(rng.integers(8, 41)), blocks - total)
        grown.append((start + cut, hashes[cut - 1], fresh(length)))
        total += length
    return grown


def walk_naive(hashes: list[bytes], present: dict[bytes, int]) -> int:
    """What a plain dictionary costs: one lookup per block."""
    for at, block_hash in enumerate(hashes):
        if block_hash not in present:
            return at
    return len(hashes)


def copies(hashes: list[bytes]) -> list[bytes]:
    """The same hashes as new objects, as a request brings them (no remembered hash, no identity)."""
    raw = b"".join(hashes)
    return [raw[at : at + 32] for at in range(0, len(raw), 32)]


def vllm_hashes(digest: Callable[[bytes], bytes], tokens: list[int], block_tokens: int) -> list[bytes]:
    """What vLLM 0.32 hashes of a request, with its ``sha256`` or ``xxhash``: a pickle for each block."""
    previous, hashes = bytes(32), []
    for at in range(0, len(tokens) - block_tokens + 1, block_tokens):
        block = previous, tuple(tokens[at : at + block_tokens]), None
        previous = digest(pickle.dumps(block, protocol=pickle.HIGHEST_PROTOCOL))
        hashes.append(previous)
    return hashes


def vllm_digests() -> dict[str, Callable[[bytes], bytes]]:
    digests: dict[str, Callable[[bytes], bytes]] = {"SHA-256": lambda data: hashlib.sha256(data).digest()}
    try:
        import xxhash
    except ImportError:
        print("the xxhash library is not installed: vLLM's is left out", file=sys.stderr)
    else:
        digests["xxhash"] = xxhash.xxh3_128_digest
    return digests


def measure_hashing(results: dict[str, object], rng: np.random.Generator, repeats: int) -> None:
    """Ours and vLLM's in turns."""
    context = hashlib.sha256(b"benchmark").digest()
    tokens = rng.integers(0, 32_000, 128 * 1000)
    listed = tokens.tolist()
    calls: dict[str, Callable[[], object]] = {}
    for size in HASHED_BLOCKS:
        calls[f"numpy, blocks of {size}"] = partial(hash_blocks, context, tokens, size)
        calls[f"list, blocks of {size}"] = partial(hash_blocks, context, listed, size)
        for name, digest in vllm_digests().items():
            calls[f"list, blocks of {size}, vLLM's {name}"] = partial(vllm_hashes, digest, listed, size)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - began)
    for name, its in seconds.items():
        middle, late = float(np.median(its)), float(np.percentile(its, 99))
        results[f"hash 128k tokens, {name} [ms]"] = scale((middle, late), 1e3)
    value = rng.bytes(2_949_184)
    checksums = native.crc32_chunks(value, DEFAULT_CHUNK_BYTES)
    results["checksums of 480 chunks, 2.9 MB [ms]"] = scale(
        timed(lambda: native.crc32_chunks(value, DEFAULT_CHUNK_BYTES), repeats), 1e3
    )
    results["value checksum from 481 chunks' [us]"] = scale(
        timed(lambda: native.crc32_join(checksums.data, DEFAULT_CHUNK_BYTES, len(value)), repeats), 1e6
    )


def measure_index(results: dict[str, object], rng: np.random.Generator, blocks: int, queries: int) -> None:
    def resident() -> int:
        gc.collect()
        return psutil.Process().memory_info().rss

    for shape in ("long", "chat"):
        grown = chains(rng, blocks, shape)
        before = resident()
        index = RadixIndex()
        infos = [INFO] * 1000
        began = time.perf_counter()
        for start, parent, hashes in grown:
            index.add(hashes, infos[: len(hashes)], start, parent)
        took = time.perf_counter() - began
        assert len(index) == blocks
        name = f"{blocks:,} blocks, {shape}"
        results[f"{name}: add [us per block]"] = round(took / blocks * 1e6, 2)
        results[f"{name}: memory [bytes per block, hashes included]"] = round((resident() - before) / blocks)
        if shape == "long":
            measure_queries(results, rng, index, [hashes for _, _, hashes in grown], queries)
        del index, grown


def measure_queries(
    results: dict[str, object], rng: np.random.Generator, index: RadixIndex, prompts: list[list[bytes]], queries: int
) -> None:
    picked = [prompts[int(at)] for at in rng.integers(0, len(prompts), queries)]
    full = [copies(hashes) for hashes in picked]
    cuts = rng.integers(0, 1001, queries)
    missing = [bytes(rng.bytes(32)) for _ in range(1000)]
    part = [copies(hashes[:cut] + missing[cut:]) for hashes, cut in zip(picked, cuts, strict=True)]
    absent = [copies(missing) for _ in range(queries)]

    def asks(prompts: list[list[bytes]]) -> list[Callable[[], object]]:
        return [lambda hashes=hashes: index.longest_prefix(hashes) for hashes in prompts]  # type: ignore[misc]

    results["prefix of 1,000, all present [us]"] = scale(timed_over(asks(full)), 1e6)
    results["prefix of 1,000, part present [us]"] = scale(timed_over(asks(part)), 1e6)
    results["prefix of 1,000, none present [us]"] = scale(timed_over(asks(absent)), 1e6)
    assert all(index.longest_prefix(h) == cut for h, cut in zip(part, cuts, strict=True))
    plain = dict.fromkeys(index, 0)
    again = [copies(hashes) for hashes in picked]
    results["(a plain dictionary, one lookup per block) [us]"] = scale(
        timed_over([lambda hashes=hashes: walk_naive(hashes, plain) for hashes in again]),
        1e6,  # type: ignore[misc]
    )
    holes = []
    for hashes in picked:
        for at in rng.integers(0, 1000, 5):
            index.remove(hashes[int(at)])
            holes.append(hashes[int(at)])
    holey = [copies(hashes) for hashes in picked]
    gone = set(holes)
    expected = [next((at for at, h in enumerate(hashes) if h in gone), 1000) for hashes in holey]
    results["prefix of 1,000, five holes in every prompt [us]"] = scale(timed_over(asks(holey)), 1e6)
    assert [index.longest_prefix(h) for h in holey] == expected

    began = time.perf_counter()
    for hashes in picked:
        for at, block_hash in enumerate(hashes):
            if block_hash not in index:
                index.add([block_hash], [INFO], at, hashes[at - 1] if at else None)
    results["fill one hole [us]"] = round((time.perf_counter() - began) / max(1, len(gone)) * 1e6, 1)
    assert all(index.longest_prefix(h) == 1000 for h in holey)


def measure_search(results: dict[str, object]) -> None:
    for verify in (True, False):
        search = PrefixSearch(1000, verify=verify)
        while not search.done:
            search.answer({at: at < 777 for at in search.next_probe()})
        assert search.result == 777
        results[f"probing search, 777 of 1,000 present, verify={verify} [probes, rounds]"] = [
            search.probes,
            search.rounds,
        ]


def scale(seconds: tuple[float, float], factor: float) -> list[float]:
    return [round(value * factor, 2) for value in seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks in the index (a multiple of 1,000)")
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--seed", type=int, default=20240601)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    results: dict[str, object] = {}
    measure_hashing(results, rng, options.repeats)
    measure_search(results)
    measure_index(results, rng, options.blocks, options.queries)
    width = max(len(name) for name in results)
    print(f"{'measure'.ljust(width)}  median, p99")
    for name, value in results.items():
        shown = ", ".join(f"{one:g}" for one in value) if isinstance(value, list) else value
        print(f"{name.ljust(width)}  {shown}")
    if options.json:
        about = {
            "seed": options.seed,
            "blocks": options.blocks,
            "skymemory": skymemory.__version__,
            "python": sys.version.split()[0],
            "numpy": np.__version__,
            "native": native.NATIVE,
            "machine": platform.machine(),
        }
        options.json.write_text(json.dumps({"about": about, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
