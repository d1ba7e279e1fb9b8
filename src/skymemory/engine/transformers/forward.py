"""Calls of a model: the argument for its cache, and those of this package's own passes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel

from skymemory.engine.transformers.kv_cache import SkyCache

_CACHE_ARGUMENTS = ("cache", "past_key_values")  # names of the argument, newest first


def cache_argument(model: torch.nn.Module) -> str:
    return _cache_argument(type(model).forward)


def cache_option(model: torch.nn.Module, cache: object) -> dict[str, Any]:
    return {cache_argument(model): cache}


def find_cache(args: Sequence[object], kwargs: Mapping[str, object]) -> SkyCache | None:
    for value in kwargs.values():
        if isinstance(value, SkyCache):
            return value
    for value in args:
        if isinstance(value, SkyCache):
            return value
    return None


def forward_options(model: PreTrainedModel) -> dict[str, Any]:
    """Return the option for only the last token's logits, if any."""
    return {"logits_to_keep": 1} if "logits_to_keep" in _parameters(type(model).forward) else {}


def at_positions(model: PreTrainedModel, start: int, tokens: int, rows: int = 1) -> dict[str, torch.Tensor]:
    """Return ``position_ids``, if the model takes them: some models do not count on from the cache (Bamba)."""
    if "position_ids" not in _parameters(type(model).forward):
        return {}
    return {"position_ids": torch.arange(start, start + tokens, device=model.device).expand(rows, -1)}


@lru_cache(maxsize=16)
def _cache_argument(forward: Callable[..., Any]) -> str:
    # A forward with neither name passes its arguments on to a model of this release, whose generate names it.
    # transformers 5.24 renamed ``past_key_values`` to ``cache``.
    for named in (_parameters(forward), _parameters(GenerationMixin.prepare_inputs_for_generation)):
        if accepted := [name for name in _CACHE_ARGUMENTS if name in named]:
            return accepted[0]
    return _CACHE_ARGUMENTS[0]


@lru_cache(maxsize=16)
def _parameters(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)
