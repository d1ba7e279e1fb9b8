"""Measurements of ``skymemory demo``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skymemory.engine.transformers.forward import cache_option
from skymemory.engine.transformers.huggingface import KVCManager
from skymemory.engine.transformers.identity import weights_digest
from skymemory.engine.transformers.kv_cache import CacheSource
from skymemory.engine.transformers.layer_reports import LayerReports
from skymemory.engine.transformers.models import ready_model, ready_tinyllama
from skymemory.engine.transformers.quantizers import codec_of, one_thread
from skymemory.errors import CodecUnavailable, InvalidInput
from skymemory.kv.codec.codec_base import measure
from skymemory.kv.context import DEFAULT_BLOCK_TOKENS as BLOCK_TOKENS
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.store.sky.store import ConstellationStore
from skymemory.testbed.connect import store_of
from skymemory.testbed.control import rotate
from skymemory.testbed.plan import ConstellationPlan
from skymemory.testbed.run_directory import RunDirectory
from skymemory.text import Table, write
from skymemory.units import format_duration, format_size
from skymemory_lab.demo.estimate import TimedRun
from skymemory_lab.demo.sizing import CODECS, Size

TAIL_TOKENS = 12
# Table 3 of the paper: seconds of 30 tokens on a Jetson Nano without and with the cache.
_PAPER = {"quanto8": (6.2, 4.9), "hqq8": (10.2, 7.8)}
_NAMES = {"raw": "none", "quanto8": "Optimum Quanto", "hqq8": "HQQ"}

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class CodecRow:
    """A codec's line of table 3, in seconds; TTFT includes the lookup."""

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
    """Streamer of transformers that notes the time of the first new token."""

    def __init__(self) -> None:
        self.began_s = time.perf_counter()
        self.first_s = 0.0
        self._puts = 0

    def put(self, value: torch.Tensor) -> None:
        self._puts += 1
        if self._puts == 2:  # the first put is the prompt
            self.first_s = time.perf_counter() - self.began_s

    def end(self) -> None:
        """Do nothing: no output is buffered."""


class Generated(NamedTuple):
    tokens: list[int]
    first_s: float
    seconds: float


def _generate(model: PreTrainedModel, ids: torch.Tensor, new_tokens: int, cache: Any) -> Generated:
    """Generate greedily, in a time that includes the call of ``cache``."""
    clock = _FirstToken()
    options = cache_option(model, cache()) if cache is not None else {}
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        streamer=clock,
        **options,
    )
    return Generated(out[0, ids.shape[1] :].tolist(), clock.first_s, time.perf_counter() - clock.began_s)


def _last_logits(model: PreTrainedModel, ids: torch.Tensor, cache: Any = None) -> torch.Tensor:
    start = cache.begin() if cache is not None else 0
    with torch.inference_mode():
        out = model(input_ids=ids[:, start:], logits_to_keep=1, **cache_option(model, cache))
    return out.logits[0, -1].float()


@contextmanager
def _store(plan: ConstellationPlan, directory: RunDirectory) -> Iterator[ConstellationStore]:
    store = store_of(plan, index=SharedIndex(directory.index_path))
    try:
        yield store
    finally:
        store.close()


# One codec after the other, over the same constellation:
# 1. Generate with an empty cache: the time without it (get_cache finds nothing; its cost is included).
# 2. Store the computed blocks with add_blocks. The first time, the constellation then moves by a slot, so every codec
#    is read back across a migration.
# 3. Generate again with the cache: the time with it, and the tokens that came from the satellites.
# 4. Compute the logits once more, which generate() does not return.
class Table3:
    """Measurements, each a part named as in ``sizing.parts``."""

    def __init__(
        self, args: argparse.Namespace, size: Size, plan: ConstellationPlan, directory: RunDirectory, run: TimedRun
    ) -> None:
        self._args = args
        self._size = size
        self._plan = plan
        self._directory = directory
        self._run = run
        self._say = run.progress.say

    def check_identity(self, document: str) -> bool:
        """Check that the small model gives the same greedy tokens with and without the cache."""
        with self._run.part("the identity check: a small trained model with and without the cache", "identity"):
            ready = ready_model("small", dtype="float32")
            model, tokenizer = ready.model, ready.tokenizer
            ids = tokenizer(document, return_tensors="pt").input_ids[:, : 4 * BLOCK_TOKENS + TAIL_TOKENS]
            with (
                one_thread(),
                _store(self._plan, self._directory) as store,
                KVCManager(model, tokenizer, store=store) as kvc,
            ):
                computed, _, _ = _generate(model, ids, 30, None)
                kvc.add_blocks_ids(ids)
                sky, _, _ = _generate(model, ids, 30, lambda: kvc.get_cache_ids(ids))
                cached = kvc.last.cached_tokens
        self._say(
            f"{ready.words} in float32: {cached} of {ids.shape[1]} tokens from the sky, 30 greedy "
            f"tokens {'identical' if computed == sky else 'DIFFERENT'} with and without the cache"
        )
        prompt_end, answer = (
            " ".join(tokenizer.decode(part).split()) for part in (ids[0, -TAIL_TOKENS:].tolist(), sky)
        )
        self._say(f'it goes on: "… {prompt_end}" → "{answer} …"')
        return computed == sky and cached > 0

    def rows(self, document: str) -> tuple[list[CodecRow], dict[str, Any]]:
        """Return a row per installed codec, and the result of the move between storing and reading."""
        model, tokenizer = self._load()
        ids = self._prompt_ids(tokenizer, document)
        reports = LayerReports(model)
        # The first call of a model allocates memory and selects kernels, which no row should include.
        with (
            self._run.part("warm-up: the model computes a block", "warm-up") as wait,
            reports.to(wait.on_progress, 2, 0.7),
        ):
            _generate(model, ids[:, :BLOCK_TOKENS], 2, None)
        # Hashed once: gigabytes of weights take seconds, and each manager would hash them again.
        with self._run.part("hashing the weights", "digest"):
            revision = weights_digest(model)
        rows: list[CodecRow] = []
        rotation: dict[str, Any] = {}
        reference, block = None, b""
        for codec in CODECS:
            with _store(self._plan, self._directory) as store:
                try:
                    # Blocks of a context may be in any codec; a separate salt keeps the three runs apart.
                    with self._run.part(f"{codec}: examining the model", f"{codec}: manager"):
                        manager = KVCManager(
                            model, tokenizer, store=store, codec=codec, weights=revision, tenant_salt=codec.encode()
                        )
                except CodecUnavailable as error:
                    self._run.estimate.skip(f"{codec}: ")
                    self._say(f"{codec}: left out, {error}")
                    continue
                with manager as kvc:
                    # The disclosure's example: the first generate computes, add_blocks stores the result.
                    computed = self._generated(ids, kvc, reports, codec, "without the cache", "")
                    with self._run.part(f"{codec}: encoding and storing blocks", f"{codec}: storing"):
                        stored = kvc.add_blocks_ids(ids)
                    self._say(f"{codec}: computed in {format_duration(computed.first_s)}; {stored.describe()}")
                    if reference is None:
                        words = "the logits without the cache, for comparison"
                        with self._run.part(words, "reference") as wait, reports.to(wait.on_progress):
                            reference = _last_logits(model, ids)
                    if not rotation:
                        with self._run.part("the constellation moves by one slot", "rotation"):
                            rotation = _rotate(self._plan, self._say)
                            block = _first_block(kvc, ids)  # as computed: the first codec is lossless
                    with self._run.part(f"{codec}: the codec's error", f"{codec}: error of the codec"):
                        rms_error = measure(codec_of(codec), block, kvc.layout).rms_error
                    sky = self._generated(ids, kvc, reports, codec, "with the cache", " from the sky")
                    result = kvc.last
                    with self._run.part(f"{codec}: the logits with the cache", f"{codec}: logits"):
                        logits = _last_logits(model, ids, kvc.get_cache_ids(ids))
                    value_bytes = stored.size_bytes // max(1, stored.stored_blocks)
                    chunks = -(-value_bytes // self._plan.chunk_bytes)
                    rows.append(
                        CodecRow(
                            codec,
                            computed.first_s,
                            computed.seconds,
                            sky.first_s,
                            sky.seconds,
                            result.cached_tokens,
                            result.prompt_tokens,
                            value_bytes,
                            chunks,
                            min(self._plan.servers, chunks),
                            result.retransmitted,
                            rms_error,
                            float((logits - reference).abs().max()),
                            _common(computed.tokens, sky.tokens),
                            self._size.new_tokens,
                        )
                    )
                    fetch_s = result.seconds.get("fetch", 0.0)
                    self._say(
                        f"{codec}: {result.cached_tokens} of {result.prompt_tokens} tokens back from the sky, "
                        f"{format_size(result.size_bytes)} in {format_duration(fetch_s)}; first token after "
                        f"{format_duration(sky.first_s)}"
                    )
        return rows, rotation

    def _generated(
        self, ids: torch.Tensor, kvc: KVCManager, reports: LayerReports, codec: str, way: str, suffix: str
    ) -> Generated:
        run, new_tokens = self._run, self._size.new_tokens
        first, later = f"{codec}: first token{suffix}", f"{codec}: other tokens{suffix}"
        first_s, later_s = run.estimate.seconds_of(first), run.estimate.seconds_of(later)
        words = f"{codec}: {new_tokens} tokens {way}"
        share = first_s / max(1e-9, first_s + later_s)
        with run.part(words, first, later) as wait, reports.to(wait.on_progress, new_tokens, share):
            generated = _generate(kvc.model, ids, new_tokens, lambda: kvc.get_cache_ids(ids))
        run.on_part(first, generated.first_s)
        run.on_part(later, generated.seconds - generated.first_s)
        return generated

    def _load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        args, size = self._args, self._size
        with self._run.part("making the model's weights", "model") as wait:
            if args.model is None:
                ready = ready_tinyllama(size.shape.layers, seed=args.seed, dtype=size.dtype, report=wait.on_progress)
            else:
                ready = ready_model(args.model, seed=args.seed, dtype=size.dtype, report=wait.on_progress)
        parameters = sum(parameter.numel() for parameter in ready.model.parameters())
        self._say(
            f"{ready.words}: {parameters / 1e9:.2f} G parameters in {size.dtype}, ready in {wait.seconds:.1f} s; "
            f"{torch.get_num_threads()} threads"
        )
        return ready.model, ready.tokenizer

    def _prompt_ids(self, tokenizer: PreTrainedTokenizerBase, document: str) -> torch.Tensor:
        ids = tokenizer(document, return_tensors="pt").input_ids
        if ids.shape[1] < min(self._size.tokens, BLOCK_TOKENS + 1):
            raise InvalidInput(
                f"the document has {ids.shape[1]} tokens: at least {BLOCK_TOKENS + 1} are needed to fill a block of "
                f"{BLOCK_TOKENS} and leave one to compute"
            )
        return ids[:, : self._size.tokens]


def _first_block(kvc: KVCManager, ids: torch.Tensor) -> bytes:
    out = bytearray(kvc.layout.block_bytes)
    cache = kvc.get_cache_ids(ids)
    cache.begin()
    CacheSource(cache, kvc.layout).read(0, memoryview(out))
    return bytes(out)


def _rotate(plan: ConstellationPlan, say: Say) -> dict[str, Any]:
    rotation = rotate(plan, 1, 0)
    say(
        f"rotated by one slot: {rotation.chunks_migrated} chunks handed over within their planes in "
        f"{format_duration(rotation.seconds)}, everything else stayed"
    )
    return asdict(rotation)


def _common(computed_tokens: list[int], sky_tokens: list[int]) -> int:
    # Return the number of equal leading tokens.
    return next(
        (at for at, (a, b) in enumerate(zip(computed_tokens, sky_tokens, strict=False)) if a != b),
        min(len(computed_tokens), len(sky_tokens)),
    )


_COLUMNS = ("quantization", "TTFT without", "with", "", "total without", "with", "")
_MORE = ("block", "chunks", "sats", "resent", "rms error", "|Δlogit|", "same")


def print_table_3(rows: Sequence[CodecRow], caption: Sequence[str]) -> None:
    """Print table 3 for this machine, in blocks if the terminal is narrow."""
    if not rows:
        return
    print()
    write("\n".join(("Table 3, here, in seconds without and with the cache", *caption)))
    print()
    Table((*_COLUMNS, *_MORE), [cells for row in rows for cells in _cells(row)]).print()
    print()
    write("TTFT: to the first new token; total: to the last.")
    write("rms error: of the codec on a block's keys and values, read back.")
    write(
        "|Δlogit|: largest difference at the first new token from computing everything at once (in bfloat16 the split "
        "of the prefill alone changes rounding); same: leading tokens equal to those without the cache.",
    )


def _cells(row: CodecRow) -> Iterator[list[str]]:
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
