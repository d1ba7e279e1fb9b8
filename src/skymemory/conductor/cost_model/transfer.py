"""Seconds that KV takes between memories: by medium, and how much of it a prefill hides.

Prefills load and store their KV layer by layer, while they compute (Mooncake §5.2). What then remains visible of a
transfer is in ``stored_s`` and ``loaded_s``; ``pipelined_s`` is a prefill in chunks over several machines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from skymemory.conductor.cost_model.model import CostModel
from skymemory.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Medium:
    """Where KV can be loaded from, or the way it goes."""

    name: str
    bytes_per_s: float
    latency_s: float = 0.0
    """Before the first byte."""

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or not self.latency_s >= 0 or math.isinf(self.latency_s):
            raise InvalidInput(f"medium {self.name!r} needs a rate above 0 and a latency of 0 or more")

    def seconds(self, size_bytes: float) -> float:
        """For ``size_bytes``, alone on the way."""
        return self.latency_s + size_bytes / self.bytes_per_s if size_bytes > 0 else 0.0


DRAM = Medium("dram", 100e9)
"""To the accelerators of the same machine: eight of them, each over its own link."""
SSD = Medium("ssd", 6e9, 1e-4)


def network_of(cost: CostModel, latency_s: float = 1e-4) -> Medium:
    """From one machine's memory to another's."""
    return Medium("network", cost.machine.network_bytes_per_s * cost.network_share, latency_s)


def stored_s(transfer_s: float, compute_s: float, layers: int) -> float:
    """Seconds by which storing layer by layer lengthens a prefill of ``compute_s``.

    A layer's KV goes as soon as it is computed: what is not hidden behind the other layers, and the last layer's own.
    """
    return max(0.0, transfer_s - compute_s * (layers - 1) / layers) + transfer_s / layers


def loaded_s(transfer_s: float, compute_s: float, layers: int) -> float:
    """Seconds of a prefill whose cached part is loaded layer by layer while it computes."""
    return max(transfer_s, compute_s) + min(transfer_s, compute_s) / layers


def pipelined_s(chunks_s: Sequence[float], machines: int) -> float:
    """Seconds of chunks that go through ``machines``, each with its part of the layers; per chunk, at one of them.

    The first machine works on all chunks in turn, and the last is ``machines - 1`` of the longest behind it.
    """
    return sum(chunks_s) + (machines - 1) * max(chunks_s, default=0.0)


def reuse_pays_bytes_per_s(cost: CostModel, cached: int) -> float:
    """The rate above which loading ``cached`` tokens is faster than computing them (Mooncake, FAST'25 §2).

    ``2·d·s / (gqa·(a·p·d + b·d²))`` of the machine's speed, with ``s`` bytes a number and ``gqa`` heads per KV head.
    """
    seconds = cost.prefill_flops(cached) / (cost.machine.flops_per_s * cost.mfu)
    return cost.kv_bytes(cached) / seconds
