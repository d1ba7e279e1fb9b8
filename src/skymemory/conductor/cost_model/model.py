"""Seconds that a prefill and a decoding step take: from a model's shape and a machine's speed.

A prefill of ``n`` tokens of which ``p`` are cached computes ``l·(a·(n² − p²)·d + b·(n − p)·d²)`` floating-point
operations, with ``l`` layers of width ``d``, ``a`` = 4 (attention) and ``b`` = 22 (weights); the machine does
``flops_per_s`` of them times the share of its speed that the model reaches, which is an input and to be fitted from
a run (Mooncake, FAST'25). Its example, 128k tokens of which 95 % are cached, comes out 91.5 % below nothing cached
("92 %").

A decoding step of a batch reads all weights once and the KV of every request in it, and does one token's operations
for each: it takes the longer of the two, beside something fixed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from skymemory.conductor.cost_model.shapes import EIGHT_A800, LLAMA_70B, Machine, ModelShape
from skymemory.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class CostModel:
    """A model on a machine.

    Raises InvalidInput for a share of the machine's speed outside (0, 1] and for negative fixed time.
    """

    shape: ModelShape
    machine: Machine
    mfu: float
    """Part of the machine's floating-point speed that is reached."""
    fixed_s: float = 0.0
    """What every prefill takes beside its operations: launching, sampling."""
    decode_fixed_s: float = 0.0
    """What every decoding step takes beside reading and computing."""
    memory_share: float = 1.0
    """Part of the memory's speed that decoding reaches."""
    network_share: float = 1.0
    """Part of the network's speed that transfers of KV reach."""
    cached_token_s: float = 0.0
    """What each cached token of a prompt takes all the same: being hashed, looked up, put in its place."""
    decode_request_s: float = 0.0
    """What each request of a batch adds to a decoding step beside reading and computing: choosing, sending."""

    def __post_init__(self) -> None:
        for name, share in (("mfu", self.mfu), ("memory_share", self.memory_share)):
            if not 0 < share <= 1:
                raise InvalidInput(f"{name} {share:g} is a part of the machine's speed: above 0, at most 1")
        if not 0 < self.network_share <= 1:
            raise InvalidInput(f"network_share {self.network_share:g} is a part of its speed: above 0, at most 1")
        if min(self.fixed_s, self.decode_fixed_s, self.cached_token_s, self.decode_request_s) < 0:
            raise InvalidInput("neither a prefill nor a decoding step can take less than 0 s beside its operations")

    def prefill_flops(self, tokens: float, cached: float = 0) -> float:
        """Operations of a prefill of ``tokens`` with the first ``cached`` of them cached; one is always computed."""
        cached = max(0, min(cached, tokens - 1))
        shape = self.shape
        pairs = (tokens * tokens - cached * cached) * shape.width
        weights = (tokens - cached) * shape.width * shape.width
        return shape.layers * (shape.attention_flops * pairs + shape.weight_flops * weights)

    def prefill_s(self, tokens: float, cached: float = 0) -> float:
        """Seconds of that prefill, alone on the machine."""
        beside_s = self.fixed_s + self.cached_token_s * max(0, min(cached, tokens - 1))
        return self.prefill_flops(tokens, cached) / (self.machine.flops_per_s * self.mfu) + beside_s

    def decode_step_s(self, batch: int, kv_tokens: float) -> float:
        """Seconds of one step that gives each of ``batch`` requests a token; ``kv_tokens``: of all their contexts."""
        fixed_s, read_s, read_per_token_s, flops_s, flops_per_token_s = self.decode_parts(batch)
        return fixed_s + max(read_s + read_per_token_s * kv_tokens, flops_s + flops_per_token_s * kv_tokens)

    def decode_parts(self, batch: int) -> tuple[float, float, float, float, float]:
        """A step as ``fixed + max(read + read_per_token·T, flops + flops_per_token·T)``, T the contexts' tokens."""
        shape = self.shape
        memory = self.machine.memory_bytes_per_s * self.memory_share
        flops = self.machine.flops_per_s * self.mfu
        weights = batch * shape.layers * shape.weight_flops * shape.width * shape.width
        return (
            self.decode_fixed_s + batch * self.decode_request_s,
            shape.weight_bytes / memory,
            shape.kv_bytes_per_token / memory,
            weights / flops,
            2 * shape.layers * shape.attention_flops * shape.width / flops,
        )

    def decode_run_s(self, batch: int, kv_tokens: float, steps: int) -> float:
        """Seconds of ``steps`` steps of the same batch, whose contexts grow by ``batch`` tokens with each.

        The sum of ``decode_step_s(batch, kv_tokens + i·batch)`` for i from 0 to ``steps - 1``, in closed form: each
        part is linear in i, and the steps are cut where the greater part changes.
        """
        if steps <= 0 or batch <= 0:
            return 0.0
        fixed_s, read_s, read_per_token_s, flops_s, flops_per_token_s = self.decode_parts(batch)
        reading = (read_s + read_per_token_s * kv_tokens, read_per_token_s * batch)
        computing = (flops_s + flops_per_token_s * kv_tokens, flops_per_token_s * batch)
        first, then = (reading, computing) if reading[0] >= computing[0] else (computing, reading)
        cut = steps
        if then[1] > first[1]:
            cut = min(steps, math.floor((first[0] - then[0]) / (then[1] - first[1])) + 1)
        return steps * fixed_s + _sum(*first, 0, cut) + _sum(*then, cut, steps)

    def kv_bytes(self, tokens: int) -> int:
        return tokens * self.shape.kv_bytes_per_token

    def at(self, mfu: float, fixed_s: float = 0.0) -> CostModel:
        """The same model and machine at another part of its speed."""
        return replace(self, mfu=mfu, fixed_s=fixed_s)

    def decoding_as(self, other: CostModel) -> CostModel:
        """These prefills, with the memory and the decoding constants of ``other``, a model of the same shape."""
        machine = replace(self.machine, memory_bytes_per_s=other.machine.memory_bytes_per_s)
        return replace(
            self,
            machine=machine,
            memory_share=other.memory_share,
            decode_fixed_s=other.decode_fixed_s,
            decode_request_s=other.decode_request_s,
        )


def _sum(start: float, slope: float, begin: int, end: int) -> float:
    """Of ``start + slope·i`` for i from ``begin`` to ``end - 1``."""
    count = end - begin
    return count * (start + slope * (begin + end - 1) / 2)


LLAMA_70B_8xA800 = CostModel(LLAMA_70B, EIGHT_A800, mfu=0.5)
"""Mooncake's model and machine. Half of the machine's speed is our choice; the paper does not say its own. Its decoding
is the least that the memory allows; ``presets`` has machines whose decoding was measured."""
