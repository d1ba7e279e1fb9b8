"""How long the model takes for a prompt's tokens: its forward passes are timed, also those of other callers.

Before the first of them it is estimated by the largest of its matrices, for nothing else is known of this machine.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

import torch

from skymemory.cache.patience import ComputeRate

_ROWS = 64
_RUNS = 3


def estimated_token_s(model: torch.nn.Module) -> float | None:
    """Seconds that a token of a prompt takes at least: the largest matrix multiplied with ``_ROWS`` tokens, and all the
    others at its speed. None where there is none that can be multiplied.

    Not counted are attention, all that is no matrix, and what a layer takes to begin: of a small model it says too
    little. The embedding is looked up and the head is for the last token only, so they do not count either.
    """
    apart = {
        weight
        for module in (_part(model, "get_input_embeddings"), _part(model, "get_output_embeddings"))
        if (weight := getattr(module, "weight", None)) is not None
    }
    matrices = [one for one in model.parameters() if one.dim() == 2 and one.is_floating_point() and one not in apart]
    largest = max(matrices, key=torch.Tensor.numel, default=None)
    if largest is None or largest.is_meta:
        return None
    rows = torch.ones((_ROWS, largest.shape[1]), dtype=largest.dtype, device=largest.device)
    took_s = []
    with torch.inference_mode():
        for _ in range(_RUNS):
            began_s = time.perf_counter()
            _ = torch.nn.functional.linear(rows, largest)[0, 0].item()  # which waits for the device
            took_s.append(time.perf_counter() - began_s)
    times: float = sum(one.numel() for one in matrices) / largest.numel()
    return min(took_s) / _ROWS * times


def _part(model: torch.nn.Module, name: str) -> object:
    get = getattr(model, name, None)
    return get() if callable(get) else None


class ComputeClock:
    """Hooks on ``model`` that tell ``rate`` of its passes.

    On the processor only: elsewhere a pass returns long before its work is done, and to wait would stall the device.
    """

    _model: weakref.ref[torch.nn.Module] | None = None
    """None: a model was copied or pickled, and its copy is not timed."""

    def __init__(self, model: torch.nn.Module, rate: ComputeRate) -> None:
        self._rate = rate
        self._model = weakref.ref(model)
        if (token_s := estimated_token_s(model)) is not None:
            rate.assume(token_s)
        self._begun = threading.local()
        self._hooks = [
            model.register_forward_pre_hook(self._begins, with_kwargs=True),
            model.register_forward_hook(self._ends, with_kwargs=True),
        ]

    def remove(self) -> None:
        self._model = None  # a pass that has begun calls them still, without what it was given
        for hook in self._hooks:
            hook.remove()

    def __reduce__(self) -> tuple[object, tuple[type[ComputeClock]]]:
        return ComputeClock.__new__, (ComputeClock,)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begins(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: object = None) -> None:
        if self._model is not None and self._model() is module:
            self._begun.at_s = time.perf_counter()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _ends(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Any, output: object = None) -> None:
        if self._model is None or self._model() is not module:
            return
        began_s: float | None = getattr(self._begun, "at_s", None)
        if began_s is None:  # a pass that had begun before the hooks came
            return
        self._begun.at_s = None
        given = kwargs.get("input_ids", args[0] if args else None)
        if isinstance(given, torch.Tensor) and given.device.type == "cpu":
            self._rate.took(given.numel(), time.perf_counter() - began_s)
