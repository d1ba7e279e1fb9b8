"""Blocks of vLLM's KV cache, copied out of its tensors and into them.

A value is ``(layers, blocks, bytes of one block of one layer)``, packed. The bytes of a block are vLLM's own and are
never looked into.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from skymemory.errors import InvalidInput


class BlockCopier(Protocol):
    """Copies whole blocks. Writing a request's blocks may run beside the forward of others."""

    @property
    def block_bytes(self) -> int:
        """Of one block over all layers."""

    def read(self, blocks: Sequence[int], out: memoryview) -> None:
        """Copy ``blocks`` into ``out``; they may be overwritten as soon as this returns."""

    def write(self, blocks: Sequence[int], value: memoryview, skipped: int, of: int) -> None:
        """Copy into ``blocks`` what ``value``, of ``of`` blocks, has for them behind its first ``skipped`` ones."""


class CpuCopier:
    """For tensors in this process's memory."""

    def __init__(self, layers: Sequence[npt.NDArray[np.uint8]]) -> None:
        """``layers``: for each a view ``(blocks, bytes)`` of its tensor."""
        self._layers = layers
        self._layer_bytes = int(layers[0].shape[1])

    @property
    def block_bytes(self) -> int:
        return self._layer_bytes * len(self._layers)

    def read(self, blocks: Sequence[int], out: memoryview) -> None:
        rows = np.frombuffer(out, np.uint8).reshape(len(self._layers), len(blocks), self._layer_bytes)
        for layer, row in zip(self._layers, rows, strict=True):
            np.take(layer, blocks, axis=0, out=row, mode="clip")  # "raise" would copy through a buffer

    def write(self, blocks: Sequence[int], value: memoryview, skipped: int, of: int) -> None:
        rows = np.frombuffer(value, np.uint8).reshape(len(self._layers), of, self._layer_bytes)
        for layer, row in zip(self._layers, rows[:, skipped : skipped + len(blocks)], strict=True):
            layer[list(blocks)] = row


def copier_of(caches: Mapping[str, Any], blocks: int) -> BlockCopier:
    """For the tensors that vLLM registers, by name of their layers.

    Raises InvalidInput where a block is not a contiguous piece of memory, or the device is not supported.
    """
    import torch

    layers = []
    for name in sorted(caches, key=_natural):
        tensor = caches[name]
        if tensor.device.type != "cpu":
            raise InvalidInput(f"the KV cache is on {tensor.device}: this connector copies from a CPU's memory only")
        if tensor.shape[0] != blocks or not tensor.is_contiguous():
            raise InvalidInput(
                f"the KV cache of {name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}: expected "
                f"{blocks} blocks first, each contiguous"
            )
        layers.append(tensor.view(torch.uint8).reshape(blocks, -1).numpy())
    sizes = {layer.shape[1] for layer in layers}
    if len(sizes) != 1:
        raise InvalidInput(f"blocks of {sorted(sizes)} bytes in different layers: expected one size")
    return CpuCopier(layers)


def _natural(name: str) -> list[object]:
    """Layer 2 before layer 10, in every process."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
