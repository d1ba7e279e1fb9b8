"""Seconds that a prefill takes, and bytes that its KV needs: from a model's shape and a machine's speed.

A prefill of ``n`` tokens of which ``p`` are cached computes ``l·(a·(n² − p²)·d + b·(n − p)·d²)`` floating-point
operations, with ``l`` layers of width ``d``, ``a`` = 4 (attention) and ``b`` = 22 (weights); the machine does
``flops_per_s`` of them times the share of its speed that the model reaches, which is an input and to be fitted from
a run (Mooncake, FAST'25). Its example, 128k tokens of which 95 % are cached, comes out 91.5 % below nothing cached
("92 %").
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from skymemory.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a transformer its costs depend on."""

    name: str
    layers: int
    width: int
    kv_heads: int
    head_dim: int
    value_bytes: int = 2
    """Bytes of one number in the KV cache."""
    attention_flops: float = 4.0
    """``a``: per layer, per pair of tokens (halved: each sees those before it) and per unit of width."""
    weight_flops: float = 22.0
    """``b``: per layer, per token and per unit of width squared."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.value_bytes


@dataclass(frozen=True, slots=True)
class Machine:
    """One serving instance: what its accelerators do together."""

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    network_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class CostModel:
    """A model on a machine.

    Raises InvalidInput for a share of the machine's speed outside (0, 1] and for negative fixed time.
    """

    shape: ModelShape
    machine: Machine
    mfu: float
    """Part of the machine's floating-point speed that a prefill reaches."""
    fixed_s: float = 0.0
    """What every prefill takes beside its operations: launching, sampling."""

    def __post_init__(self) -> None:
        if not 0 < self.mfu <= 1:
            raise InvalidInput(f"mfu {self.mfu:g} is a part of the machine's speed: above 0, at most 1")
        if self.fixed_s < 0:
            raise InvalidInput(f"a prefill cannot take {self.fixed_s:g} s beside its operations; 0 or more")

    def prefill_flops(self, tokens: float, cached: float = 0) -> float:
        """Operations of a prefill of ``tokens`` with the first ``cached`` of them cached; one is always computed."""
        cached = max(0, min(cached, tokens - 1))
        shape = self.shape
        pairs = (tokens * tokens - cached * cached) * shape.width
        weights = (tokens - cached) * shape.width * shape.width
        return shape.layers * (shape.attention_flops * pairs + shape.weight_flops * weights)

    def prefill_s(self, tokens: float, cached: float = 0) -> float:
        """Seconds of that prefill, alone on the machine."""
        return self.prefill_flops(tokens, cached) / (self.machine.flops_per_s * self.mfu) + self.fixed_s

    def kv_bytes(self, tokens: int) -> int:
        return tokens * self.shape.kv_bytes_per_token

    def at(self, mfu: float, fixed_s: float = 0.0) -> CostModel:
        """The same model and machine at another part of its speed."""
        return replace(self, mfu=mfu, fixed_s=fixed_s)


LLAMA_70B = ModelShape("LLaMA-70B", layers=80, width=8192, kv_heads=8, head_dim=128)
EIGHT_A800 = Machine("8×A800", flops_per_s=8 * 312e12, memory_bytes_per_s=16e12, network_bytes_per_s=4 * 200e9 / 8)
LLAMA_70B_8xA800 = CostModel(LLAMA_70B, EIGHT_A800, mfu=0.5)
"""Mooncake's model and machine. Half of the machine's speed is our choice; the paper does not say its own."""
