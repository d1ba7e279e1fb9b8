"""Measurements of ``skymemory demo``: outputs with and without the cache, then the paper's table 3, and its print.

Imports torch, which takes seconds: ``table3`` loads this file when its constellation is up.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skymemory.engine.huggingface import KVCManager
from skymemory.engine.identity import weights_digest
from skymemory.engine.kv_cache import CacheSource
from skymemory.engine.models import ready_model
from skymemory.engine.quantizers import codec_of, one_thread
from skymemory.errors import CodecUnavailable, InvalidInput
from skymemory.kv.codec.base import measure
from skymemory.kv.context import DEFAULT_BLOCK_TOKENS as BLOCK_TOKENS
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.store.sky.store import ConstellationStore
from skymemory.testbed.connect import store_of
from skymemory.testbed.control import rotate
from skymemory.testbed.plan import ConstellationPlan
from skymemory.testbed.run_directory import RunDirectory
from skymemory.text import Table, write
from skymemory.units import format_duration, format_size

TAIL_TOKENS = 12
"""What a question adds to a cached context."""
CODECS = ("raw", "quanto8", "hqq8")
_PAPER = {"quanto8": (6.2, 4.9), "hqq8": (10.2, 7.8)}
"""Table 3 of the paper: 30 tokens on a Jetson Nano without and with the cache, seconds."""
_NAMES = {"raw": "none (16 bit)", "quanto8": "Optimum Quanto", "hqq8": "HQQ"}

Say = Callable[[str], None]
"""Prints a finished step."""


@dataclass(frozen=True, slots=True)
class Row:
    """One codec's line of table 3. Seconds; TTFT is up to the first new token, looking up included."""

    codec: str
    plain_ttft_s: float
    plain_total_s: float
    sky_ttft_s: float
    sky_total_s: float
    tokens_from_sky: int
    prompt_tokens: int
    block_bytes: int
    chunks_per_block: int
    satellites: int
    retransmitted: int
    rms_error: float
    logit_distance: float
    same_tokens: int
    new_tokens: int


class _FirstToken:
    """A streamer that measures the time to the first new token."""

    def __init__(self) -> None:
        self.began_s = time.perf_counter()
        self.first_s = 0.0
        self._puts = 0

    def put(self, value: torch.Tensor) -> None:
        self._puts += 1
        if self._puts == 2:  # the first put is the prompt
            self.first_s = time.perf_counter() - self.began_s

    def end(self) -> None:
        """Nothing is buffered."""


def _generate(model: PreTrainedModel, ids: torch.Tensor, new_tokens: int, cache: Any) -> tuple[list[int], float, float]:
    """New tokens, seconds to the first and to the last of them; calling ``cache`` is part of the time."""
    clock = _FirstToken()
    options = {"past_key_values": cache()} if cache is not None else {}
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        streamer=clock,
        **options,
    )
    return out[0, ids.shape[1] :].tolist(), clock.first_s, time.perf_counter() - clock.began_s


def _last_logits(model: PreTrainedModel, ids: torch.Tensor, cache: Any = None) -> torch.Tensor:
    start = cache.begin() if cache is not None else 0
    with torch.inference_mode():
        out = model(input_ids=ids[:, start:], past_key_values=cache, logits_to_keep=1)
    return out.logits[0, -1].float()


def check_identity(plan: ConstellationPlan, directory: RunDirectory, say: Say, document: str) -> bool:
    """Whether the small trained model (float32) generates the same greedy tokens with and without the cache."""
    ready = ready_model("small", dtype="float32")
    model, tokenizer = ready.model, ready.tokenizer
    ids = tokenizer(document, return_tensors="pt").input_ids[:, : 4 * BLOCK_TOKENS + TAIL_TOKENS]
    with one_thread(), _store(plan, directory) as store, KVCManager(model, tokenizer, store=store) as kvc:
        plain, _, _ = _generate(model, ids, 30, None)
        kvc.add_blocks_ids(ids)
        sky, _, _ = _generate(model, ids, 30, lambda: kvc.get_cache_ids(ids))
        say(
            f"{ready.words} in float32: {kvc.last.cached_tokens} of {ids.shape[1]} tokens from the sky, 30 greedy "
            f"tokens {'identical' if plain == sky else 'DIFFERENT'} with and without the cache"
        )
        prompt_end, answer = (
            " ".join(tokenizer.decode(part).split()) for part in (ids[0, -TAIL_TOKENS:].tolist(), sky)
        )
        say(f'it goes on: "… {prompt_end}" → "{answer} …"')
        return plain == sky and kvc.last.cached_tokens > 0


@contextmanager
def _store(plan: ConstellationPlan, directory: RunDirectory) -> Iterator[ConstellationStore]:
    store = store_of(plan, index=SharedIndex(directory.index_path))
    try:
        yield store
    finally:
        store.close()


def _load(args: argparse.Namespace, say: Say) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    began_s = time.perf_counter()
    ready = ready_model(args.model or ("tinyllama-6-random" if args.quick else "tinyllama-random"), seed=args.seed)
    parameters = sum(parameter.numel() for parameter in ready.model.parameters())
    say(f"{ready.words}: {parameters / 1e9:.2f} G parameters, ready in {time.perf_counter() - began_s:.1f} s")
    return ready.model, ready.tokenizer


def _prompt_ids(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, document: str) -> torch.Tensor:
    wanted = args.tokens if args.tokens is not None else 4 * BLOCK_TOKENS + TAIL_TOKENS
    ids = tokenizer(document, return_tensors="pt").input_ids
    if ids.shape[1] < min(wanted, BLOCK_TOKENS + 1):
        raise InvalidInput(
            f"the document has {ids.shape[1]} tokens: at least {BLOCK_TOKENS + 1} are needed to fill a block of "
            f"{BLOCK_TOKENS} and leave one to compute"
        )
    return ids[:, :wanted]


# One codec after the other, over the same constellation:
# 1. generate with an empty cache: the time without it (get_cache finds nothing, so its cost is included);
# 2. add_blocks stores what was computed; the first time, the constellation then moves by one slot, so that every
#    codec is read back across a migration;
# 3. generate again with the cache: the time with it, and the tokens that came from the sky;
# 4. once more for the logits, which generate() does not give.
def table_rows(
    args: argparse.Namespace, plan: ConstellationPlan, directory: RunDirectory, say: Say, document: str
) -> tuple[list[Row], dict[str, Any]]:
    model, tokenizer = _load(args, say)
    ids = _prompt_ids(args, tokenizer, document)
    new_tokens = 10 if args.quick else 30
    # The first call of a model allocates and picks kernels; no row should pay for it.
    _generate(model, ids[:, :BLOCK_TOKENS], 2, None)  # warm-up
    rows: list[Row] = []
    moved: dict[str, Any] = {}
    reference, block = None, b""
    # Once: hashing gigabytes of weights takes seconds, and each manager would do it again.
    revision = weights_digest(model)
    for codec in CODECS:
        with _store(plan, directory) as store:
            try:
                # Blocks of one context may be in any codec; a salt each keeps the three runs apart.
                manager = KVCManager(
                    model, tokenizer, store=store, codec=codec, weights=revision, tenant_salt=codec.encode()
                )
            except CodecUnavailable as error:
                say(f"{codec}: left out, {error}")
                continue
            with manager as kvc:
                # Exactly the disclosure's example: the first generate computes, add_blocks stores what it computed.
                plain, plain_ttft_s, plain_total_s = _generate(model, ids, new_tokens, lambda: kvc.get_cache_ids(ids))
                stored = kvc.add_blocks_ids(ids)
                say(f"{codec}: computed in {plain_ttft_s:.2f} s; {stored.describe()}")
                if reference is None:
                    reference = _last_logits(model, ids)
                if not moved:
                    moved = _rotate(plan, say)
                    block = _first_block(kvc, ids)  # as computed: the first codec is the lossless one
                rms_error = measure(codec_of(codec), block, kvc.layout).rms_error
                sky, sky_ttft_s, sky_total_s = _generate(model, ids, new_tokens, lambda: kvc.get_cache_ids(ids))
                result = kvc.last
                distance = float((_last_logits(model, ids, kvc.get_cache_ids(ids)) - reference).abs().max())
                value_bytes = stored.size_bytes // max(1, stored.stored_blocks)
                chunks = -(-value_bytes // plan.chunk_bytes)
                rows.append(
                    Row(
                        codec,
                        plain_ttft_s,
                        plain_total_s,
                        sky_ttft_s,
                        sky_total_s,
                        result.cached_tokens,
                        result.prompt_tokens,
                        value_bytes,
                        chunks,
                        min(plan.servers, chunks),
                        result.retransmitted,
                        rms_error,
                        distance,
                        _common(plain, sky),
                        new_tokens,
                    )
                )
                fetch_s = result.seconds.get("fetch", 0.0)
                say(
                    f"{codec}: {result.cached_tokens} of {result.prompt_tokens} tokens back from the sky, "
                    f"{format_size(result.size_bytes)} in {format_duration(fetch_s)}; first token after "
                    f"{format_duration(sky_ttft_s)}"
                )
    return rows, moved


def _first_block(kvc: KVCManager, ids: torch.Tensor) -> bytes:
    """The bytes of the prompt's first block."""
    out = bytearray(kvc.layout.block_bytes)
    cache = kvc.get_cache_ids(ids)
    cache.begin()
    CacheSource(cache, kvc.layout).read(0, memoryview(out))
    return bytes(out)


def _rotate(plan: ConstellationPlan, say: Say) -> dict[str, Any]:
    """Moves the overhead point by one slot; the leaving column hands over its chunks."""
    rotation = rotate(plan, 1, 0)
    say(
        f"rotated by one slot: {rotation.chunks_migrated} chunks handed over within their planes in "
        f"{format_duration(rotation.seconds)}, everything else stayed"
    )
    return asdict(rotation)


def _common(plain: list[int], sky: list[int]) -> int:
    """Number of equal leading tokens."""
    return next((at for at, (a, b) in enumerate(zip(plain, sky, strict=False)) if a != b), min(len(plain), len(sky)))


_COLUMNS = ("quantization", "TTFT without", "with", "", "total without", "with", "")
_MORE = ("block", "chunks", "sats", "resent", "rms error", "|Δlogit|", "same")


def print_table_3(rows: Sequence[Row]) -> None:
    """The paper's table 3 on this machine, in one block where the terminal is wide enough, else in two."""
    if not rows:
        return
    prompt, new = rows[0].prompt_tokens, rows[0].new_tokens
    print()
    write(f"Table 3, here: {prompt} tokens of prompt, {new} generated; seconds without and with the cache")
    Table((*_COLUMNS, *_MORE), [cells for row in rows for cells in _cells(row)]).print()
    print()
    write("TTFT: to the first new token; total: to the last.")
    write("rms error: of the codec on a block's keys and values, read back.")
    write(
        "|Δlogit|: largest difference at the first new token from computing everything at once (in bfloat16 the split "
        "of the prefill alone changes rounding); same: leading tokens equal to those without the cache.",
    )


def _cells(row: Row) -> Iterator[list[str]]:
    """The row, and the paper's below it."""
    times = []
    for before_s, after_s in ((row.plain_ttft_s, row.sky_ttft_s), (row.plain_total_s, row.sky_total_s)):
        times += [f"{before_s:.2f}", f"{after_s:.2f}", _change(before_s, after_s)]
    yield [
        _NAMES[row.codec],
        *times,
        format_size(row.block_bytes),
        *(str(count) for count in (row.chunks_per_block, row.satellites, row.retransmitted)),
        f"{row.rms_error:.4f}",
        f"{row.logit_distance:.3f}",
        f"{row.same_tokens}/{row.new_tokens}",
    ]
    if row.codec in _PAPER:
        without, with_cache = _PAPER[row.codec]
        paper = [f"{without:.1f}", f"{with_cache:.1f}", _change(without, with_cache)]
        yield ["  the paper", "", "", "", *paper, *[""] * len(_MORE)]


def _change(before_s: float, after_s: float) -> str:
    return f"{(after_s / before_s - 1) * 100:+.0f}%"
