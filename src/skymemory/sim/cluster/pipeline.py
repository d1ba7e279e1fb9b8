"""Chunked pipeline parallelism: a prefill in chunks that go through several machines, each with a part of the layers.

A chunk takes the same time at every machine, a machine works on one chunk at a time and in order, and a chunk begins at
a machine when it has left the one before. For a pipeline that is empty that comes to ``Σ τ + (X - 1)·max τ``
(``cost_model.transfer.pipelined_s``); behind another request's longer chunks it can be later, which is followed here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from skymemory.conductor.cost_model import CostModel
from skymemory.errors import InvalidInput


class Pipeline:
    """``machines`` that hold the layers in equal parts; chunks of at most ``chunk_tokens``."""

    def __init__(self, cost: CostModel, machines: int, chunk_tokens: int) -> None:
        if machines < 1 or chunk_tokens < 1:
            raise InvalidInput(f"{machines} machines and chunks of {chunk_tokens} tokens; both are at least 1")
        self._cost, self.machines, self.chunk_tokens = cost, machines, chunk_tokens
        self._speed = cost.machine.flops_per_s * cost.mfu * machines
        self._free_s = [0.0] * machines

    def chunks_s(self, begin: int, end: int) -> list[float]:
        """Seconds of each chunk of tokens ``begin`` to ``end - 1`` of a prompt, at one machine."""
        if end <= begin:
            return []
        flops = self._cost.prefill_flops
        if self.machines == 1:
            return [flops(end, begin) / self._speed]
        cuts = [*range(begin, end, self.chunk_tokens), end]
        return [flops(cut, before) / self._speed for before, cut in itertools.pairwise(cuts)]

    def pass_through(self, chunks_s: Sequence[float], begin_s: float) -> tuple[float, float]:
        """Chunks enter at ``begin_s``, when the first machine is free: when that is free again, and when all is done.

        Without any, at once.
        """
        free_s = self._free_s
        done_s = begin_s
        for chunk_s in chunks_s:
            done_s = begin_s
            for machine, before_s in enumerate(free_s):
                done_s = (before_s if before_s > done_s else done_s) + chunk_s
                free_s[machine] = done_s
        return (max(begin_s, free_s[0]) if chunks_s else begin_s), done_s

    def hold(self, until_s: float) -> None:
        """The first machine can begin nothing before then."""
        self._free_s[0] = max(self._free_s[0], until_s)

    def clear(self) -> None:
        """It died."""
        self._free_s = [0.0] * self.machines
