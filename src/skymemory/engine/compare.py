"""Compares next-token logits with and without the cache: equal in float32, within rounding in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from skymemory.engine.huggingface import KVCManager
from skymemory.engine.prompts import TokenIds, flat_ids


@dataclass(frozen=True, slots=True)
class LogitDistance:
    """Next-token logits with the cache against those without, in the units of the logits."""

    max_abs: float
    rms: float
    spread: float
    """Standard deviation of the logits, for comparison with ``rms``."""
    same_choice: bool
    """Whether greedy decoding would choose the same next token."""
    choice_margin: float
    """Lead of the best token over the second without the cache."""

    def describe(self) -> str:
        """One line for people and logs."""
        choice = "same" if self.same_choice else "another"
        return (
            f"logits differ by {self.rms:.2g} rms, {self.max_abs:.2g} at most (their spread is {self.spread:.2g}); "
            f"{choice} next token, which led by {self.choice_margin:.2g}"
        )


def logit_distance(without: torch.Tensor, with_cache: torch.Tensor) -> LogitDistance:
    """Distance between two rows of logits of one vocabulary."""
    reference, other = without.detach().float().flatten(), with_cache.detach().float().flatten()
    difference = (reference - other).abs()
    best = reference.topk(2).values
    return LogitDistance(
        max_abs=float(difference.max()),
        rms=float(difference.square().mean().sqrt()),
        spread=float(reference.std()),
        same_choice=bool(reference.argmax() == other.argmax()),
        choice_margin=float(best[0] - best[1]),
    )


def next_token_logits(model: PreTrainedModel, ids: TokenIds, kvc: KVCManager | None = None) -> torch.Tensor:
    """Logits of the token after ``ids``; with ``kvc``, from the prefix it has and the rest computed."""
    tokens = torch.from_numpy(flat_ids(ids)).to(model.device)[None]
    cache = kvc.get_cache_ids(ids) if kvc is not None else None
    start = cache.begin() if cache is not None else 0
    with torch.inference_mode():
        return model(input_ids=tokens[:, start:], past_key_values=cache, use_cache=cache is not None).logits[0, -1]


def measure_logit_distance(kvc: KVCManager, ids: TokenIds) -> LogitDistance:
    """Runs the model of ``kvc`` over ``ids`` without and with its cache, and compares the next-token logits."""
    return logit_distance(next_token_logits(kvc.model, ids), next_token_logits(kvc.model, ids, kvc))
