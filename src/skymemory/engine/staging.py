"""Batched copies of blocks between host and device memory.

A copy per layer and block would cost a launch and a wait each: blocks are gathered, copied together through pinned
memory on a separate stream, and scattered. The same code works on CPU, for tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from skymemory.kv.block import KVLayout

_AT_ONCE_BYTES = 64 << 20


class Staging:
    """Copies blocks into ``rooms``, keys and values on one device: each (layers, kv_heads, tokens, width)."""

    def __init__(self, rooms: Sequence[torch.Tensor], layout: KVLayout) -> None:
        self._rooms = rooms
        self._layout = layout
        self._device = rooms[0].device
        self._host: torch.Tensor | None = None
        self._waiting: list[int] = []
        self._sent: list[tuple[torch.Tensor, Any]] = []
        """Host buffers that a running copy reads, with the event of its end."""

    def place(self, index: int, block: memoryview) -> None:
        """Stage block ``index`` for the next ``flush``."""
        if self._host is None or len(self._waiting) == len(self._host):
            self.flush()
            self._host = _pinned(self._layout, self._device)
        self._host[len(self._waiting)].numpy()[:] = np.frombuffer(block, np.uint8)
        self._waiting.append(index)

    def flush(self) -> None:
        """Copy the staged blocks; the device's current stream waits for the copy."""
        if self._host is None or not self._waiting:
            return
        on_cuda = self._device.type == "cuda"
        stream = torch.cuda.Stream(self._device) if on_cuda else None
        with torch.cuda.stream(stream) if on_cuda else nullcontext():
            there = self._host[: len(self._waiting)].to(self._device, non_blocking=True)
            where = torch.tensor(self._waiting, device=self._device)
            for room, part in zip(self._rooms, _split(there, self._layout), strict=True):
                blocks = room[:, :, : room.shape[2] // self._layout.block_tokens * self._layout.block_tokens]
                blocks.unflatten(2, (-1, self._layout.block_tokens))[:, :, where] = part.permute(1, 2, 0, 3, 4)
        if stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(stream)
            event = stream.record_event()
            self._sent = [(host, end) for host, end in self._sent if not end.query()] + [(self._host, event)]
            self._host = None
        self._waiting = []


class Gathered:
    """Reads blocks from ``layers`` on one device: keys and values of one sequence, each (kv_heads, tokens, width)."""

    def __init__(self, layers: Sequence[tuple[torch.Tensor, torch.Tensor]], layout: KVLayout) -> None:
        self._layers = layers
        self._layout = layout
        self._first = 0
        self._host: np.ndarray[Any, np.dtype[np.uint8]] = np.zeros((0, layout.block_bytes), np.uint8)

    def read(self, index: int, out: memoryview) -> None:
        """Copy out block ``index``; fetches the blocks behind it as well, for the next calls."""
        if not self._first <= index < self._first + len(self._host):
            self._gather(index)
        out[:] = self._host[index - self._first].data

    def _gather(self, first: int) -> None:
        layout, tokens = self._layout, self._layout.block_tokens
        held = min(int(self._layers[0][0].shape[1]) // tokens - first, max(1, _AT_ONCE_BYTES // layout.block_bytes))
        span = slice(first * tokens, (first + held) * tokens)
        parts = [
            torch.stack([pair[which][:, span] for pair in self._layers])
            .unflatten(2, (held, tokens))
            .permute(2, 0, 1, 3, 4)
            .reshape(held, layout.layers, -1)
            for which in range(2)
        ]
        block = torch.cat(parts, dim=2).contiguous().view(torch.uint8).reshape(held, layout.block_bytes)
        self._first, self._host = first, block.cpu().numpy()


def _pinned(layout: KVLayout, device: torch.device) -> torch.Tensor:
    shape = (max(1, _AT_ONCE_BYTES // layout.block_bytes), layout.block_bytes)
    return torch.empty(shape, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _split(blocks: torch.Tensor, layout: KVLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of ``blocks`` (number, bytes), each (number, layers, kv_heads, tokens, width)."""
    dtype = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[layout.dtype]
    layers = blocks.view(dtype).view(len(blocks), layout.layers, -1)
    of_keys, of_values = layout.widths
    keys = layout.kv_heads * layout.block_tokens * of_keys
    shape = (len(blocks), layout.layers, layout.kv_heads, layout.block_tokens)
    return layers[..., :keys].reshape(*shape, of_keys), layers[..., keys:].reshape(*shape, of_values)
