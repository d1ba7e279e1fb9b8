"""Which tokens a cache holds: seen when the model is called, never assumed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache

from skymemory.engine.kv_cache import TORCH_DTYPES, SkyCache, Tokens
from skymemory.errors import InvalidInput
from skymemory.kv.layout import KVLayout

TokenIds: TypeAlias = Sequence[int] | torch.Tensor | npt.NDArray[np.integer[Any]]
"""One sequence of token ids: flat, or a tensor of shape (n,) or (1, n)."""


class Witness:
    """Sees which tokens the model puts into our caches, so that no block is ever stored under a wrong name."""

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("past_key_values")
        if isinstance(cache, SkyCache) and cache.witness is self:
            ids = kwargs.get("input_ids", args[0] if args else None)
            cache.note(ids, plain=_is_plain(cache.get_seq_length(), ids, kwargs))


def _is_plain(start: int, ids: torch.Tensor | None, options: dict[str, Any]) -> bool:
    """Whether the model is given one sequence at consecutive positions from ``start`` on, with nothing masked."""
    if ids is None or options.get("inputs_embeds") is not None or ids.dim() != 2 or ids.shape[0] != 1:
        return False
    end = start + ids.shape[1]
    if ids.shape[1] == 1 and ids.device.type != "cpu":
        return True  # a decoding step: what could be wrong was seen at the prefill, and looking would stall the device
    mask, positions = options.get("attention_mask"), options.get("position_ids")
    if mask is not None and (mask.dim() != 2 or mask.shape[1] != end or not bool(mask.all())):
        return False
    return positions is None or (
        positions.shape[-1] == ids.shape[1]
        and bool((positions.reshape(-1, ids.shape[1])[-1] == torch.arange(start, end, device=ids.device)).all())
    )


def flat_ids(ids: TokenIds) -> Tokens:
    """Token ids as a flat int64 array; InvalidInput for anything but one sequence of whole numbers."""
    array = ids.detach().cpu().numpy() if isinstance(ids, torch.Tensor) else np.asarray(ids)
    if array.ndim == 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidInput(f"token ids must be one sequence of whole numbers, got shape {array.shape} of {array.dtype}")
    return array.astype(np.int64)


def shared_prefix(held: Tokens | None, ids: Tokens) -> int:
    """Number of leading tokens that both have."""
    if held is None:
        return 0
    length = min(len(held), len(ids))
    differing = np.flatnonzero(held[:length] != ids[:length])
    return int(differing[0]) if len(differing) else length


def foreign_length(cache: Cache, layout: KVLayout) -> int:
    """Tokens held by a cache that is not ours; InvalidInput if it cannot be one of this model and a single sequence."""
    expected = (1, layout.kv_heads, layout.head_dim)
    lengths = set()
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            shape = tuple(tensor.shape) if tensor is not None else ()
            if (
                len(shape) != 4
                or (shape[0], shape[1], shape[3]) != expected
                or tensor.dtype != TORCH_DTYPES[layout.dtype]
            ):
                raise InvalidInput(
                    f"a cache with tensors of shape {shape}, expected (1, {layout.kv_heads}, tokens, {layout.head_dim})"
                    f" of {layout.dtype}: one sequence, as this model writes it"
                )
            lengths.add(shape[2])
    if len(cache.layers) != layout.layers or len(lengths) != 1:
        raise InvalidInput(
            f"a cache of {len(cache.layers)} layers with {sorted(lengths)} tokens, expected {layout.layers}"
        )
    return int(lengths.pop())
