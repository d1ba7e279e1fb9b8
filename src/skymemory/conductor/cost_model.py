"""Cost model: seconds of a prefill, a decoding step and a transfer, by a model's shape and a machine's speed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skymemory.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a transformer that determine its operations and the bytes of its weights and KV cache."""

    name: str
    layers: int
    width: int
    """Hidden size."""
    kv_heads: int
    head_dim: int
    value_bytes: int = 2
    """Bytes of a number, in weights and KV."""
    attention_flops: float = 4.0
    """Operations per layer, pair of tokens (halved by causality) and unit of width."""
    weight_flops: float = 22.0
    """Operations per layer, token and unit of width squared."""
    parameters: float = 0.0
    """Number of weights; 0: derived from ``weight_flops``."""

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.value_bytes

    @property
    def weight_bytes(self) -> float:
        parameters = self.parameters or self.weight_flops / 2 * self.layers * self.width**2
        return parameters * self.value_bytes


@dataclass(frozen=True, slots=True)
class Machine:
    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    network_bytes_per_s: float

    def __post_init__(self) -> None:
        if not (self.flops_per_s > 0 and self.memory_bytes_per_s > 0 and self.network_bytes_per_s > 0):
            raise InvalidInput(f"machine {self.name!r}: expected speeds above 0")


def shape_of(name: str, config: Mapping[str, Any], value_bytes: int | None = None) -> ModelShape:
    """Return the shape described by a ``config.json`` of transformers.

    ``value_bytes`` is the size of the serving data type; by default that of the saved data type, else 2.
    """
    try:
        layers, width = int(config["num_hidden_layers"]), int(config["hidden_size"])
        heads, inner = int(config["num_attention_heads"]), int(config["intermediate_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInput(f"{name}: expected a model's config.json with its layers, heads and widths") from error
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or width // heads)
    if min(layers, width, heads, inner, kv_heads, head_dim) < 1:
        raise InvalidInput(f"{name}: expected layers, heads and widths of at least 1")
    of_layer = 2 * width * head_dim * (heads + kv_heads) + 3 * width * inner
    words = int(config.get("vocab_size") or 0) * width * (1 if config.get("tie_word_embeddings") else 2)
    stored = {"float32": 4, "bfloat16": 2, "float16": 2}.get(str(config.get("dtype") or config.get("torch_dtype")), 2)
    return ModelShape(
        name,
        layers,
        width,
        kv_heads,
        head_dim,
        value_bytes or stored,
        attention_flops=2.0 * heads * head_dim / width,
        weight_flops=2.0 * of_layer / width**2,
        parameters=float(layers * of_layer + words),
    )


LLAMA_70B = ModelShape("LLaMA-70B", layers=80, width=8192, kv_heads=8, head_dim=128, parameters=70e9)
QWEN_7B = ModelShape(
    "Qwen2.5-7B",
    layers=28,
    width=3584,
    kv_heads=4,
    head_dim=128,
    attention_flops=2.0,
    weight_flops=254 / 7,
    parameters=7.615e9,
)

EIGHT_A800 = Machine("8×A800", flops_per_s=8 * 312e12, memory_bytes_per_s=16e12, network_bytes_per_s=4 * 200e9 / 8)
EIGHT_A100 = Machine("8×A100", flops_per_s=8 * 312e12, memory_bytes_per_s=8 * 2.039e12, network_bytes_per_s=100e9)
FOUR_A100 = Machine("4×A100", flops_per_s=4 * 312e12, memory_bytes_per_s=4 * 2.039e12, network_bytes_per_s=100e9)
EIGHT_H800 = Machine("8×H800", flops_per_s=8 * 989e12, memory_bytes_per_s=8 * 3.35e12, network_bytes_per_s=400e9)
"""Eight H100-SXM5-80GB with an NVLink of 400 GB/s instead of 900."""
ONE_L4 = Machine("L4", flops_per_s=121e12, memory_bytes_per_s=300e9, network_bytes_per_s=2e9)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Costs of a model on a machine.

    Raises:
        InvalidInput: shares outside (0, 1], or negative times.
    """

    shape: ModelShape
    machine: Machine
    mfu: float
    """Model FLOPS utilisation: reached share of the machine's speed."""
    fixed_s: float = 0.0
    """Seconds in addition to the operations."""
    decode_fixed_s: float = 0.0
    """Seconds in addition to reading and computing."""
    memory_share: float = 1.0
    network_share: float = 1.0
    cached_token_s: float = 0.0
    """Seconds per cached token of a prompt: hashing, lookup, placement."""
    decode_request_s: float = 0.0
    """Seconds per request of a batch: sampling, sending."""

    def __post_init__(self) -> None:
        for name, share in (("mfu", self.mfu), ("memory_share", self.memory_share)):
            if not 0 < share <= 1:
                raise InvalidInput(f"{name} {share:g} is a share of the machine's speed: expected above 0, at most 1")
        if not 0 < self.network_share <= 1:
            raise InvalidInput(f"network_share {self.network_share:g}: expected above 0, at most 1")
        if min(self.fixed_s, self.decode_fixed_s, self.cached_token_s, self.decode_request_s) < 0:
            raise InvalidInput("fixed_s, decode_fixed_s, cached_token_s and decode_request_s: expected 0 or more")

    def prefill_flops(self, tokens: float, cached: float = 0) -> float:
        """Return the operations of a prefill, at least of one token: ``l·(a·(n² − p²)·d + b·(n − p)·d²)`` for n tokens,
        p of them cached, and l layers of width d (Mooncake, FAST'25).
        """
        cached = max(0, min(cached, tokens - 1))
        shape = self.shape
        # Token i attends to i tokens. The sum over computed tokens is half of n² − p²; the half is part of ``a``.
        pairs = (tokens * tokens - cached * cached) * shape.width
        weights = (tokens - cached) * shape.width * shape.width
        return shape.layers * (shape.attention_flops * pairs + shape.weight_flops * weights)

    def prefill_s(self, tokens: float, cached: float = 0) -> float:
        beside_s = self.fixed_s + self.cached_token_s * max(0, min(cached, tokens - 1))
        return self.prefill_flops(tokens, cached) / (self.machine.flops_per_s * self.mfu) + beside_s

    def decode_step_s(self, batch: int, kv_tokens: float) -> float:
        """Return the seconds of a step, a token for each request of a batch with ``kv_tokens`` of context in total."""
        fixed_s, read_s, read_per_token_s, flops_s, flops_per_token_s = self.decode_parts(batch)
        return fixed_s + max(read_s + read_per_token_s * kv_tokens, flops_s + flops_per_token_s * kv_tokens)

    def decode_parts(self, batch: int) -> tuple[float, float, float, float, float]:
        """Return the parts of a step's seconds ``fixed + max(read + read_per_token·T, flops + flops_per_token·T)`` in
        this order, with T tokens of context: it reads memory while it computes.
        """
        shape = self.shape
        memory = self.machine.memory_bytes_per_s * self.memory_share
        flops = self.machine.flops_per_s * self.mfu
        # The two lines over the context tokens T: reading weights and KV, and computing one token per request.
        weights = batch * shape.layers * shape.weight_flops * shape.width * shape.width
        return (
            self.decode_fixed_s + batch * self.decode_request_s,
            shape.weight_bytes / memory,
            shape.kv_bytes_per_token / memory,
            weights / flops,
            2 * shape.layers * shape.attention_flops * shape.width / flops,
        )

    def kv_bytes(self, tokens: int) -> int:
        return tokens * self.shape.kv_bytes_per_token

    def at(self, mfu: float, fixed_s: float = 0.0) -> CostModel:
        return replace(self, mfu=mfu, fixed_s=fixed_s)

    def decoding_as(self, other: CostModel) -> CostModel:
        """Return these prefills with the memory and decoding constants of ``other``."""
        machine = replace(self.machine, memory_bytes_per_s=other.machine.memory_bytes_per_s)
        return replace(
            self,
            machine=machine,
            memory_share=other.memory_share,
            decode_fixed_s=other.decode_fixed_s,
            decode_request_s=other.decode_request_s,
        )


LLAMA_70B_8xA800 = CostModel(LLAMA_70B, EIGHT_A800, mfu=0.5)
"""Mooncake's; the utilisation is our choice."""


# Transfers of KV. Prefills load and store KV layer by layer while they compute (Mooncake §5.2). ``stored_s`` and
# ``loaded_s`` return the visible time; ``pipelined_s`` is a chunked prefill over several machines.


@dataclass(frozen=True, slots=True)
class Medium:
    """Memory or link from which KV is loaded."""

    name: str
    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or not self.latency_s >= 0 or math.isinf(self.latency_s):
            raise InvalidInput(f"medium {self.name!r}: expected a rate above 0 and a finite latency of 0 or more")

    def seconds(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes / self.bytes_per_s if size_bytes > 0 else 0.0


DRAM = Medium("dram", 100e9)
SSD = Medium("ssd", 6e9, 1e-4)


def network_of(cost: CostModel, latency_s: float = 1e-4) -> Medium:
    return Medium("network", cost.machine.network_bytes_per_s * cost.network_share, latency_s)


def stored_s(transfer_s: float, compute_s: float, layers: int) -> float:
    """Return the seconds that layer-by-layer storing adds to a prefill."""
    return max(0.0, transfer_s - compute_s * (layers - 1) / layers) + transfer_s / layers


def loaded_s(transfer_s: float, compute_s: float, layers: int) -> float:
    return max(transfer_s, compute_s) + min(transfer_s, compute_s) / layers


def pipelined_s(chunks_s: Sequence[float], machines: int) -> float:
    """Return the seconds of a pipeline; ``chunks_s`` are those of a single machine."""
    return sum(chunks_s) + (machines - 1) * max(chunks_s, default=0.0)


# Machines with published prefills and decoding steps. Decoding constants are fitted to the published steps
# (``cost_fit.fit_decode``), prefills if at least three lengths were published (``cost_fit.fit_prefill``). The points,
# errors and held-out points are in ``tests/lab/test_cost_presets.py`` and docs/guide/fitting.md.

LLAMA_70B_8xA100 = CostModel(
    replace(LLAMA_70B, attention_flops=24.3),
    EIGHT_A100,
    mfu=0.542,
    fixed_s=0.0466,
    memory_share=0.194,
    decode_request_s=3.27e-4,
)
"""LLaMA-2-70B in vLLM on a DGX-A100, eight A100-80GB: 43 to 72 ms per step.

Source: ``data/perf_model.csv`` of github.com/Mutinifni/splitwise-sim at 8f99e7d (Patel et al., "Splitwise", ISCA 2024),
tensor parallel 8. Without batches of long contexts, reading and fixed time are not separated.
"""

LLAMA_70B_4xA100 = CostModel(
    LLAMA_70B, FOUR_A100, mfu=0.55, fixed_s=0.05, memory_share=0.6145, decode_fixed_s=0.00215, decode_request_s=1.093e-4
)
"""LLaMA-2-70B in LMDeploy's TurboMind 0.1.0a1 on four A100-80GB: 29 to 55 ms per step.

Source: ``docs/en/benchmark/a100_fp16.md`` of github.com/InternLM/lmdeploy at 3e391df, "Static Inference Benchmark".
"""

LLAMA_70B_8xH800 = CostModel(
    replace(LLAMA_70B, attention_flops=62.9),
    EIGHT_H800,
    mfu=0.588,
    fixed_s=0.0446,
    memory_share=0.187,
    decode_fixed_s=0.00168,
    decode_request_s=2.82e-4,
)
"""LLaMA-2-70B in vLLM on a DGX-H100, eight H100-80GB: 28 to 50 ms per step.

No published steps on H800 were found; it has less than half the NVLink. Source as for ``LLAMA_70B_8xA100``.
"""

QWEN_7B_L4 = CostModel(
    QWEN_7B, ONE_L4, mfu=0.55, fixed_s=0.06, memory_share=0.9395, decode_fixed_s=0.00406, decode_request_s=2.54e-4
)
"""Qwen2.5-7B-Instruct (16 bits) in vLLM 0.8.5 on one L4: 58 to 76 ms per step.

Source: ``raw/`` and ``results/summary.csv`` of github.com/ree2raz/inference-bench at 6219100, regime "short".
"""

PRESETS: Mapping[str, CostModel] = {
    "llama-70b-8xa800": LLAMA_70B_8xA800,
    "llama-70b-8xa100": LLAMA_70B_8xA100,
    "llama-70b-4xa100": LLAMA_70B_4xA100,
    "llama-70b-8xh800": LLAMA_70B_8xH800,
    "qwen-7b-l4": QWEN_7B_L4,
}
"""Cost models by their ``--cost`` name. The first is not measured."""
