"""Forward passes of our own: the model is asked as ``generate`` asks it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from transformers import PreTrainedModel


def forward_options(model: PreTrainedModel) -> dict[str, Any]:
    """Ask for the logits of the last token only, where the model can be asked."""
    return {"logits_to_keep": 1} if "logits_to_keep" in _parameters(type(model).forward) else {}


def at_positions(model: PreTrainedModel, start: int, tokens: int, rows: int = 1) -> dict[str, torch.Tensor]:
    """Say where the ``tokens`` behind the first ``start`` are, where the model can be said it: not all of them count
    on from what their cache holds (Bamba begins at 0 again).
    """
    if "position_ids" not in _parameters(type(model).forward):
        return {}
    return {"position_ids": torch.arange(start, start + tokens, device=model.device).expand(rows, -1)}


@lru_cache(maxsize=16)
def _parameters(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)
