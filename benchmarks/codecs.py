"""Every codec's size, error and speed on one core, and what it does to text: `python benchmarks/codecs.py`.

Blocks of 128 tokens, bfloat16: of the shipped small model, which is trained, over the shipped document; of layers of
TinyLlama's shape with random weights likewise; and drawn ones of TinyLlama's shape whose neighbouring tokens are more
or less alike. Random and drawn numbers show sizes and speeds. The first table is quality: the trained model's
perplexity on held-out documents behind a context that went through the codec (see `_codec_quality.py`).
"""

from __future__ import annotations

import argparse
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from _bench import print_table, write_json
from _codec_quality import Quality, contexts, losses, quality, windows
from skymemory.engine.inputs import shipped_document
from skymemory.engine.transformers.huggingface import KVCManager
from skymemory.engine.transformers.kv_cache import CacheSource
from skymemory.engine.transformers.models import TINYLLAMA_SHAPE, build_llama, ready_model, train_tokenizer
from skymemory.engine.transformers.quantizers import codec_of
from skymemory.kv.block import KVLayout, to_float32
from skymemory.kv.codec.codec_base import measure

CODECS = ("raw", "quanto8", "hqq8", "cachegen-finest", "cachegen-fine", "cachegen", "cachegen-coarse")
PACKERS: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
    "zlib 1": (lambda raw: zlib.compress(raw, 1), zlib.decompress),
    "zlib 6": (lambda raw: zlib.compress(raw, 6), zlib.decompress),
}
try:
    import zstandard

    PACKERS["zstd 3"] = (zstandard.ZstdCompressor(3).compress, zstandard.ZstdDecompressor().decompress)
except ImportError:
    print("zstd: not measured, the package zstandard is not installed", file=sys.stderr)

Blocks = tuple[list[bytes], KVLayout]
SECOND_BLOCK = 1
"""The first block of a prompt has the attention sinks; the second is like all others."""


def blocks_of_model(shape: str, blocks: int) -> Blocks:
    """Blocks of keys and values that a model computed over the shipped document."""
    if shape == "small":
        ready = ready_model("small")
        model, tokenizer = ready.model, ready.tokenizer
    else:
        tokenizer = train_tokenizer(1024)
        model = build_llama({**TINYLLAMA_SHAPE, "num_hidden_layers": 3, "vocab_size": 1024}, dtype="bfloat16")
    ids = tokenizer(shipped_document(), return_tensors="pt")["input_ids"][:, : 128 * (blocks + SECOND_BLOCK)]
    with KVCManager(model, tokenizer) as kvc, torch.no_grad():
        layout = kvc.layout
        source = CacheSource(model(ids, use_cache=True).past_key_values, layout)
    found = []
    for index in range(SECOND_BLOCK, SECOND_BLOCK + blocks):
        room = bytearray(layout.block_bytes)
        source.read(index, memoryview(room))
        found.append(bytes(room))
    return found, layout


def drawn_blocks(correlation: float, blocks: int, seed: int) -> Blocks:
    """Gaussian numbers, each correlated with the same channel's of the token before; spreads and means per channel."""
    layout = KVLayout(6, 4, 64, 128, "bfloat16")
    dice = np.random.default_rng(seed)
    found = []
    for _ in range(blocks):
        noise = dice.standard_normal(layout.shape, np.float32)
        numbers = noise.copy()
        for token in range(1, layout.block_tokens):
            fresh = np.sqrt(1 - correlation**2) * noise[..., token, :]
            numbers[..., token, :] = correlation * numbers[..., token - 1, :] + fresh
        channel = (*layout.shape[:3], 1, layout.head_dim)
        numbers = numbers * np.exp(dice.normal(0, 0.5, channel)) + dice.normal(0, 2, channel)
        found.append((numbers.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes())
    return found, layout


def best_s(run: Callable[[], object], repeats: int) -> float:
    """The shortest of ``repeats`` runs: what the code costs where nothing else takes the core."""
    run()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def measure_codec(name: str, blocks: list[bytes], layout: KVLayout, repeats: int) -> dict[str, float]:
    codec = codec_of(name)
    reports = [measure(codec, block, layout) for block in blocks]
    spread = float(np.std(to_float32(b"".join(blocks), layout.dtype)))
    room = memoryview(bytearray(layout.block_bytes))
    payloads = [codec.encode(memoryview(block), layout) for block in blocks]
    encode_s = best_s(lambda: [codec.encode(memoryview(block), layout) for block in blocks], repeats)
    decode_s = best_s(lambda: [codec.decode(payload, layout, room) for payload in payloads], repeats)
    rms = float(np.sqrt(np.mean([report.rms_error**2 for report in reports])))
    return row(blocks, layout, sum(map(len, payloads)), rms / spread, encode_s, decode_s)


def measure_packer(name: str, blocks: list[bytes], layout: KVLayout, repeats: int) -> dict[str, float]:
    pack, unpack = PACKERS[name]
    packed = [pack(block) for block in blocks]
    assert [unpack(one) for one in packed] == blocks
    encode_s = best_s(lambda: [pack(block) for block in blocks], min(repeats, 2))
    decode_s = best_s(lambda: [unpack(one) for one in packed], repeats)
    return row(blocks, layout, sum(map(len, packed)), 0.0, encode_s, decode_s)


def row(
    blocks: list[bytes], layout: KVLayout, size: int, error: float, encode_s: float, decode_s: float
) -> dict[str, float]:
    """Bits per number; rms error in percent of the numbers' standard deviation; MB of the raw block per second."""
    raw = sum(map(len, blocks))
    return {
        "bits": round(8 * size * layout.item_bytes / raw, 3),
        "error_percent": round(100 * error, 2),
        "encode_mb_s": round(raw / encode_s / 1e6),
        "decode_mb_s": round(raw / decode_s / 1e6),
    }


def quality_rows(quick: bool) -> list[dict[str, Any]]:
    """The trained model's perplexity behind each codec; printed as a table."""
    ready = ready_model("small")
    chosen = windows(ready)[:: 8 if quick else 1]
    if not chosen:
        return []
    computed = contexts(ready.model, chosen)
    numbers = sum(layer.keys.numel() + layer.values.numel() for cache in computed for layer in cache.layers)
    found: dict[str, Quality] = {}
    lossless = None
    for name in CODECS:
        nats, size_bytes = losses(ready, name, chosen, computed)
        lossless = nats if lossless is None else lossless
        found[name] = quality(chosen, lossless, nats, 8 * size_bytes / numbers)
    smaller = {name: found["quanto8"].bits / one.bits for name, one in found.items()}
    documents = len({window.document for window in chosen})
    print_table(
        f"quality: {len(chosen)} windows of {documents} held-out documents, {ready.words}",
        ("codec", "bits", "x quanto8", "perplexity", "higher %", "+- %"),
        [
            (
                name,
                f"{one.bits:.3f}",
                f"{smaller[name]:.2f}",
                f"{one.perplexity:.3f}",
                f"{one.higher_percent:.2f}",
                f"{one.error_percent:.2f}",
            )
            for name, one in found.items()
        ],
    )
    return [
        {
            "source": "quality",
            "codec": name,
            "windows": len(chosen),
            "documents": documents,
            **{field: round(value, 4) for field, value in asdict(one).items()},
            "times_smaller_than_quanto8": round(smaller[name], 2),
        }
        for name, one in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=4, help="blocks per source")
    parser.add_argument("--quick", action="store_true", help="an eighth of the held-out windows, fewer repeats")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=20240601)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.quick:
        options.blocks, options.repeats = 2, 2
    sources = {
        "small trained model": blocks_of_model("small", options.blocks),
        "TinyLlama's shape, 3 layers": blocks_of_model("tinyllama", options.blocks),
        "drawn, tokens independent": drawn_blocks(0.0, options.blocks, options.seed),
        "drawn, correlation 0.9": drawn_blocks(0.9, options.blocks, options.seed),
    }
    rows = quality_rows(options.quick)
    for source, (blocks, layout) in sources.items():
        found = {name: measure_codec(name, blocks, layout, options.repeats) for name in CODECS}
        found |= {name: measure_packer(name, blocks, layout, options.repeats) for name in PACKERS}
        for name, figures in found.items():
            smaller = round(found["quanto8"]["bits"] / figures["bits"], 2)
            rows.append({"source": source, "codec": name, **figures, "times_smaller_than_quanto8": smaller})
        print_table(
            f"{source}: {len(blocks)} blocks of {layout.block_bytes:,} bytes, {layout.describe()}",
            ("codec", "bits", "x quanto8", "error %", "encode MB/s", "decode MB/s"),
            [
                (
                    one["codec"],
                    f"{one['bits']:.3f}",
                    f"{one['times_smaller_than_quanto8']:.2f}",
                    f"{one['error_percent']:.2f}",
                    f"{one['encode_mb_s']:,}",
                    f"{one['decode_mb_s']:,}",
                )
                for one in rows[-len(found) :]
            ],
        )
    write_json(options.json, "codecs", options.seed, rows)


if __name__ == "__main__":
    main()
