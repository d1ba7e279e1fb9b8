"""Recurrent states (linear attention, convolutions), copied after a forward pass, stored, restored."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from skymemory.cache.blocks import BlockCache
from skymemory.errors import MalformedPacket
from skymemory.kv.block import KVLayout, Tokens

_ITEM_BYTES = 4


@dataclass(frozen=True, slots=True)
class _State:
    """Place and shape of a state in a model's cache: state ``number`` of a ``kind``, "conv" or "recurrent",
    in a layer.
    """

    layer: int
    kind: str
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def of(self, layers: Sequence[Any]) -> torch.Tensor:
        tensor: torch.Tensor = getattr(layers[self.layer], f"{self.kind}_states")[self.number]
        return tensor


class States:
    """All recurrent states of a model's cache, which ``take`` and ``put`` convert to bytes; ``layers``: after
    a pass.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._states = [
            _State(at, kind, number, tuple(state.shape), state.dtype)
            for at, layer in enumerate(layers)
            for kind in ("conv", "recurrent")
            for number, state in getattr(layer, f"{kind}_states", {}).items()
            if state is not None
        ]
        self.size_bytes = sum(state.dtype.itemsize * int(np.prod(state.shape)) for state in self._states)

    def __bool__(self) -> bool:
        return bool(self._states)

    @property
    def kinds(self) -> list[str]:
        return sorted({state.kind for state in self._states})

    def of(self, layers: Sequence[Any], kind: str) -> list[torch.Tensor]:
        return [state.of(layers) for state in self._states if state.kind == kind]

    def layout(self, block_tokens: int) -> KVLayout:
        width = -(-self.size_bytes // (2 * block_tokens * _ITEM_BYTES))
        return KVLayout(1, 1, width, block_tokens, "float32")

    def describe(self) -> str:
        digest = hashlib.sha256(repr(self._states).encode()).hexdigest()[:32]
        return f"states1[{self.size_bytes} bytes, {digest}]"

    def take(self, layers: Sequence[Any]) -> bytes:
        """Copy the first row's states."""
        return b"".join(
            state.of(layers)[:1].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            for state in self._states
        )

    def put(self, layers: Sequence[Any], data: bytes | memoryview, device: torch.device) -> None:
        """Restore states from the bytes of ``take``. Raises MalformedPacket for too few bytes."""
        if len(data) < self.size_bytes:
            raise MalformedPacket(f"states of {len(data)} bytes, expected {self.size_bytes}")
        at = 0
        for state in self._states:
            size = state.dtype.itemsize * int(np.prod(state.shape))
            with torch.inference_mode(False):  # writable in any mode
                part = torch.frombuffer(bytearray(data[at : at + size]), dtype=state.dtype).view(state.shape).to(device)
            at += size
            layer = layers[state.layer]
            getattr(layer, f"{state.kind}_states")[state.number] = part
            getattr(layer, f"is_{state.kind}_states_initialized")[state.number] = True
            layer.has_previous_state[state.number] = True
            layer.dtype, layer.device = state.dtype, device
            if state.kind == "conv":
                layer.conv_kernel_size[state.number] = state.shape[-1]


def repeat(layer: Any, repeats: int) -> None:
    for kind in ("conv", "recurrent"):
        states = getattr(layer, f"{kind}_states", {})
        for number, state in states.items():
            if state is not None:
                states[number] = state.repeat_interleave(repeats, dim=0)


def forget(layer: Any) -> None:
    """Reset a layer's states."""
    # transformers' ``reset`` zeroes tensors that keep their rows and, if made in inference mode, may be written in that
    # mode only.
    for kind in ("conv", "recurrent"):
        for number in range(layer.number_of_states):
            getattr(layer, f"{kind}_states")[number] = None
            getattr(layer, f"is_{kind}_states_initialized")[number] = False
            layer.has_previous_state[number] = False


class StoredStates:
    """Recurrent states in a store, as blocks with their own context.

    A state cannot be split by blocks: that at a block's end is stored under its hash.
    """

    def __init__(self, states: States, blocks: BlockCache) -> None:
        self._states = states
        self._blocks = blocks

    def find(self, ids: Tokens, blocks: int) -> list[int]:
        """Return the blocks with stored states, in descending order."""
        hashes = self._blocks.hashes(ids)[:blocks]
        missing = set(self._blocks.missing(hashes)) if hashes else set()
        return [index for index in reversed(range(len(hashes))) if index not in missing]

    def load(self, ids: Tokens, index: int) -> bytes:
        """Return the states at the end of block ``index``; empty if not loaded."""
        sink = _One()
        self._blocks.fetch(self._blocks.hashes(ids)[index], sink)
        return sink.held[: self._states.size_bytes]

    def save(self, ids: Tokens, by_block: dict[int, bytes]) -> None:
        hashes = self._blocks.hashes(ids)
        wanted = sorted(index for index in by_block if index < len(hashes))
        missing = self._blocks.missing([hashes[index] for index in wanted]) if wanted else []
        if missing:
            self._blocks.save(hashes, [wanted[at] for at in missing], _Source(by_block))


class _Source:
    """Source of states by block, padded to the size of a block."""

    def __init__(self, by_block: dict[int, bytes]) -> None:
        self._by_block = by_block

    def read(self, index: int, out: memoryview) -> None:
        state = self._by_block[index]
        out[: len(state)] = state
        out[len(state) :] = bytes(len(out) - len(state))


class _One:
    held = b""

    def place(self, index: int, block: memoryview) -> None:
        self.held = bytes(block)
