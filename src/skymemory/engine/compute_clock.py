"""How long the model takes for a prompt's tokens: its forward passes are timed, whoever calls it."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from skymemory.cache.pace import ComputeRate


class ComputeClock:
    """Hooks on ``model`` that tell ``rate`` of its passes.

    On the processor only: elsewhere a pass returns long before its work is done, and to wait would stall the device.
    """

    def __init__(self, model: torch.nn.Module, rate: ComputeRate) -> None:
        self._rate = rate
        self._begun = threading.local()
        self._hooks = [
            model.register_forward_pre_hook(self._begins, with_kwargs=True),
            model.register_forward_hook(self._ends, with_kwargs=True),
        ]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begins(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._begun.at_s = time.perf_counter()

    def _ends(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        given = kwargs.get("input_ids", args[0] if args else None)
        if isinstance(given, torch.Tensor) and given.device.type == "cpu":
            self._rate.took(given.numel(), time.perf_counter() - self._begun.at_s)
