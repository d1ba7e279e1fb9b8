"""Whether a model goes on from a cache as if it had computed it: tried, before anybody relies on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from skymemory.engine.kv_cache import CacheSource, LayerKind, RoomPool, SkyCache, groups_of
from skymemory.engine.prompts import media_tokens
from skymemory.engine.states import States
from skymemory.errors import UnsupportedModel
from skymemory.kv.layout import KVLayout

_BLOCK_TOKENS = 4
_FRONT_BLOCKS, _TOKENS = 4, 24
_TOLERANCE = {"float32": 0.02}
"""Of the spread of the logits; in 16 bits rounding is of that order, and a wrong position far beyond it."""
_TOLERANCE_16_BIT = 0.5


def check_goes_on(model: PreTrainedModel, layout: KVLayout, kinds: Sequence[LayerKind], states: States) -> None:
    """Run over a few tokens at once, and over the same in two parts with our cache between them.

    Raises UnsupportedModel where the next word differs by more than rounding, or the second part cannot be run.
    """
    name = type(model).__name__
    try:
        whole, parts = _both_ways(model, dataclasses.replace(layout, block_tokens=_BLOCK_TOKENS), kinds, states)
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
        raise UnsupportedModel(f"{name} cannot go on from a cache of ours: {error}") from error
    spread, differs = float(whole.std()), float((whole - parts).abs().max())
    if not differs <= _TOLERANCE.get(layout.dtype, _TOLERANCE_16_BIT) * spread:
        raise UnsupportedModel(
            f"{name} goes on from a cache with other results than it has at once (its next word's logits differ by "
            f"{differs:.2g}, their spread is {spread:.2g}): it cannot be served from one"
        )


def _both_ways(
    model: PreTrainedModel, layout: KVLayout, kinds: Sequence[LayerKind], states: States
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next word's logits after a few tokens, computed at once and in two parts."""
    front = _FRONT_BLOCKS * _BLOCK_TOKENS
    media = set(media_tokens(model))
    words = [one for one in range(min(512, model.config.get_text_config(decoder=True).vocab_size)) if one not in media]
    drawn = torch.randint(0, len(words), (1, _TOKENS), generator=torch.Generator().manual_seed(1))
    ids = torch.tensor(words)[drawn].to(model.device)
    with torch.inference_mode():
        whole = model(input_ids=ids, use_cache=True).logits[0, -1].float()
        first, second = (
            SkyCache(layout, _TOKENS, model.device, RoomPool(keep=2), kinds, states, front) for _ in range(2)
        )
        model(input_ids=ids[:, :front], past_key_values=first, use_cache=True)
        for group, room in zip(groups_of(kinds), second.groups, strict=True):
            block = bytearray(group.layout(layout).block_bytes)
            source = CacheSource(first, group.layout(layout), group.layers)
            for index in range(_FRONT_BLOCKS):
                source.read(index, memoryview(block))
                room.place(index, memoryview(block))
        first.stop()
        second.stops = first.stops
        second.fill(ids[0, :front].cpu().numpy())
        parts = model(input_ids=ids[:, front:], past_key_values=second, use_cache=True).logits[0, -1].float()
    return whole, parts
