"""The training loop: how long, how fast, from which checkpoint; and how well the model predicts held-out text."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tools.small_model.batches import Batches
from tools.small_model.loss import ChunkedCrossEntropy
from tools.small_model.muon import Muon

SHAPE: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""6.5 million parameters; heads of 64 in groups of two, so that its KV cache is made as a large model's is."""


_LONGEST_WAIT = 5.0  # seconds on the clock for a second of processor time


@dataclass(frozen=True, slots=True)
class Plan:
    """How to train. The rate rises over ``warm_up``, stays, and falls to nothing over the last ``decay`` of the run.

    The run is over after ``tokens`` or ``minutes`` of training, whichever comes first.
    """

    tokens: int = 16_000_000
    minutes: float = 60.0
    seed: int = 1
    batch_tokens: int = 4096
    micro_tokens: int = 4096
    matrix_rate: float = 0.015
    other_rate: float = 0.003
    warm_up: float = 0.01
    decay: float = 0.6
    lengths: tuple[tuple[float, int], ...] = ((0.0, 256), (0.5, 512), (0.8, 1024), (0.92, 2048))


@dataclass(slots=True)
class Progress:
    """Where a run is: saved with every checkpoint."""

    tokens: int = 0
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    pieces: dict[str, int] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)

    def fraction(self, plan: Plan) -> float:
        """How much of the plan is done, 0 to 1, by tokens or by time: the larger."""
        return min(1.0, max(self.tokens / plan.tokens, self.wall_seconds / 60 / plan.minutes))


def rate_factor(fraction: float, plan: Plan) -> float:
    """What the learning rates are multiplied by at this fraction of the run."""
    return max(0.0, min(1.0, (fraction + 1e-4) / plan.warm_up, (1 - fraction) / plan.decay))


def sequence_length(fraction: float, plan: Plan) -> int:
    """How many tokens a sequence has at this fraction of the run: longer towards the end."""
    return [length for start, length in plan.lengths if fraction >= start][-1]


class Run:
    """One model in training on ``stream`` (uint16 ids), with its optimisers and its progress."""

    def __init__(self, plan: Plan, stream: np.ndarray, shape: dict[str, Any] | None = None) -> None:
        torch.manual_seed(plan.seed)
        self.plan, self.progress, self._stream = plan, Progress(), stream
        self.model = LlamaForCausalLM(LlamaConfig(**(shape or SHAPE)))
        matrices = [p for name, p in self.model.named_parameters() if p.dim() == 2 and ".layers." in name]
        others = [p for name, p in self.model.named_parameters() if not (p.dim() == 2 and ".layers." in name)]
        self._optimisers: list[torch.optim.Optimizer] = [
            Muon(matrices, plan.matrix_rate, weight_decay=0.01),
            torch.optim.AdamW(others, plan.other_rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self._batches: dict[int, Batches] = {}

    def step(self) -> float:
        """One step of the optimisers; returns its loss in nats per token."""
        began, cpu_began = time.perf_counter(), time.process_time()
        fraction = self.progress.fraction(self.plan)
        for optimiser in self._optimisers:
            rate = self.plan.matrix_rate if isinstance(optimiser, Muon) else self.plan.other_rate
            for group in optimiser.param_groups:
                group["lr"] = rate * rate_factor(fraction, self.plan)
        length = sequence_length(fraction, self.plan)
        if length not in self._batches:
            self._batches[length] = Batches(self._stream, length, self.plan.seed)
        rows, rounds = self.plan.micro_tokens // length, self.plan.batch_tokens // self.plan.micro_tokens
        total = 0.0
        for _ in range(rounds):
            first = self.progress.pieces.get(str(length), 0)
            loss = batch_loss(self.model, *self._batches[length].batch(first, rows)) / rounds
            loss.backward()
            total += float(loss.detach())
            self.progress.pieces[str(length)] = first + rows
        for optimiser in self._optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.progress.tokens += self.plan.batch_tokens
        cpu_seconds = time.process_time() - cpu_began
        # A machine that sleeps, or a process that is stopped, does not train: such waits are not on the clock.
        self.progress.wall_seconds += min(time.perf_counter() - began, _LONGEST_WAIT * cpu_seconds)
        self.progress.cpu_seconds += cpu_seconds
        return total

    def save(self, path: Path) -> None:
        """Write a checkpoint, complete or not at all."""
        state = {
            "model": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self._optimisers],
            "progress": asdict(self.progress),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, path)
        path.with_suffix(".json").write_text(json.dumps(asdict(self.progress), indent=1) + "\n")

    def load(self, path: Path) -> None:
        """Continue from a checkpoint of the same shape."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimiser, saved in zip(self._optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.progress = Progress(**state["progress"])

    def train(
        self,
        checkpoint: Path,
        measure: Callable[[LlamaForCausalLM], float],
        report: Callable[[Progress, float, float | None], None],
        *,
        save_every_s: float = 180.0,
        measure_every: float = 0.05,
    ) -> None:
        """Step until the plan is done, saving and measuring now and then; saves when interrupted, and re-raises."""
        smooth, saved_at, measured = float("nan"), time.monotonic(), self.progress.fraction(self.plan)
        try:
            while (fraction := self.progress.fraction(self.plan)) < 1:
                loss = self.step()
                smooth = loss if math.isnan(smooth) else 0.97 * smooth + 0.03 * loss
                bits = None
                if fraction - measured >= measure_every:
                    measured, bits = fraction, measure(self.model)
                    self.progress.history.append(
                        {
                            "tokens": self.progress.tokens,
                            "wall_s": round(self.progress.wall_seconds, 1),
                            "cpu_s": round(self.progress.cpu_seconds, 1),
                            "bits_per_byte": round(bits, 4),
                        }
                    )
                report(self.progress, smooth, bits)
                if time.monotonic() - saved_at > save_every_s:
                    self.save(checkpoint)
                    saved_at = time.monotonic()
        finally:
            self.save(checkpoint)


def batch_loss(model: LlamaForCausalLM, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean nats per token of ``targets`` after ``inputs``, both int64 (rows, length); the body runs in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(inputs, use_cache=False).last_hidden_state
    return ChunkedCrossEntropy.apply(hidden.flatten(0, 1).bfloat16(), model.lm_head.weight, targets.flatten())


@torch.no_grad()
def bits_per_byte(
    model: LlamaForCausalLM, documents: list[np.ndarray], byte_counts: list[int], window: int = 1024
) -> float:
    """Bits per UTF-8 byte of ``documents`` (ids beginning with ``<s>``), cut in windows with no context between them.

    Every token after a document's ``<s>`` is counted, a window's first being predicted from the one before it alone.
    """
    nats = 0.0
    for ids in documents:
        for start in range(0, len(ids) - 1, window):
            piece = torch.from_numpy(ids[start : start + window + 1].astype(np.int64))
            nats += float(batch_loss(model, piece[None, :-1], piece[None, 1:])) * (len(piece) - 1)
    return nats / math.log(2) / sum(byte_counts)
