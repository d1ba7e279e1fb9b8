"""Measurement of this computer's speed."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from skymemory.engine.transformers.identity import weights_digest
from skymemory.engine.transformers.kv_cache import TORCH_DTYPES
from skymemory.engine.transformers.models import TINYLLAMA_SHAPE, build_llama
from skymemory_lab.demo.resources import free_memory_bytes, slowdown, usable_cores
from skymemory_lab.demo.sizing import DTYPES, PROBED_TOKENS, ComputerSpeeds

_WIDTH = TINYLLAMA_SHAPE["hidden_size"]
_SLICE_S = 0.06  # least time of a measurement: many turns of the scheduler
_FEW_TOKENS = 64


def measure_speeds() -> ComputerSpeeds:
    """Measure, and leave torch with the fastest number of threads."""
    threads = _best_threads(usable_cores())
    torch.set_num_threads(threads)
    linear_s = {dtype: _linear_s(dtype, PROBED_TOKENS // 4) for dtype in DTYPES}
    faster = min(linear_s, key=lambda dtype: linear_s[dtype])
    # A real layer is measured in the faster type; in the other type it takes longer by the ratio of linears of its
    # shape. A single token reads all weights, so its times relate like those of single-row linears, which memory
    # limits.
    started_s = time.perf_counter()
    model = build_llama({**TINYLLAMA_SHAPE, "num_hidden_layers": 1, "vocab_size": 64}, dtype=faster)
    build_s = time.perf_counter() - started_s
    started_s = time.perf_counter()
    weights_digest(model)
    digest_s = (time.perf_counter() - started_s) * 2 / DTYPES[faster]
    tokens = PROBED_TOKENS if linear_s[faster] < 0.02 else PROBED_TOKENS // 4
    ids = torch.zeros((1, tokens), dtype=torch.long)
    with torch.inference_mode():
        model(input_ids=ids[:, :_FEW_TOKENS], logits_to_keep=1)  # selects kernels
        layer_s = _seconds(lambda: model(input_ids=ids, logits_to_keep=1)) * PROBED_TOKENS / tokens
        cache = model(input_ids=ids[:, :_FEW_TOKENS], logits_to_keep=1).past_key_values
        token_s = _seconds(lambda: model(input_ids=ids[:, :1], past_key_values=cache, logits_to_keep=1))
    row_s = {dtype: _linear_s(dtype, 1, copies=4) for dtype in DTYPES}
    return ComputerSpeeds(
        prefill_s={dtype: layer_s * linear_s[dtype] / linear_s[faster] for dtype in DTYPES},
        decode_s={dtype: token_s * row_s[dtype] / row_s[faster] for dtype in DTYPES},
        build_s=build_s,
        digest_s=digest_s,
        slowdown=slowdown(),
        threads=threads,
        free_bytes=free_memory_bytes(),
    )


def _best_threads(cores: int) -> int:
    """Return the fastest number of threads: below ``cores`` if other programs run."""
    times = {}
    for threads in sorted({cores, max(1, cores // 2), max(1, cores - 1), 1}, reverse=True):
        torch.set_num_threads(threads)
        times[threads] = _linear_s("float32", _FEW_TOKENS)
        if threads == 1 and times[1] > 0.5:
            break
    return min(times, key=lambda threads: times[threads])


def _linear_s(dtype: str, tokens: int, copies: int = 1) -> float:
    """Return the seconds of a linear of the model's width; with ``copies`` its weights come from memory."""
    kind = TORCH_DTYPES[dtype]
    weights = [torch.full((_WIDTH, _WIDTH), 0.01, dtype=kind) for _ in range(copies)]
    inputs = torch.full((tokens, _WIDTH), 0.01, dtype=kind)

    def compute() -> None:
        for weight in weights:
            torch.nn.functional.linear(inputs, weight)

    with torch.inference_mode():
        torch.nn.functional.linear(inputs[:1], weights[0])
        return _seconds(compute) / copies


def _seconds(compute: Callable[[], object]) -> float:
    started_s, runs = time.perf_counter(), 0
    while True:
        compute()
        runs += 1
        elapsed_s = time.perf_counter() - started_s
        if elapsed_s >= _SLICE_S:
            return elapsed_s / runs
