"""KVLayout: the shape and dtype of one block's keys and values, and its bytes as numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from skymemory.errors import InvalidInput
from skymemory.kv.chunk import Buffer

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_MAX_NUMBER = 2**31 - 1


@dataclass(frozen=True, slots=True)
class KVLayout:
    """One block: ``(layers, 2, kv_heads, block_tokens, head_dim)`` in C order, 2 = key, value; little-endian.

    Where values have another width than keys (``value_dim``; 0: the same): for each layer its keys,
    ``(kv_heads, block_tokens, head_dim)``, and behind them its values, ``(kv_heads, block_tokens, value_dim)``.

    Values are per block, not cumulative: 2 · 22 · 4 · 64 · 128 · 2 B = 2.88 MB for
    TinyLlama-1.1B in 16 bit (paper §5).
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str
    value_dim: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "block_tokens"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= _MAX_NUMBER:
                raise InvalidInput(f"KV layout: {name} must be a whole number from 1 on, got {number!r}")
        if self.value_dim == self.head_dim:
            object.__setattr__(self, "value_dim", 0)  # one representation per layout
        if isinstance(self.value_dim, bool) or not isinstance(self.value_dim, int) or self.value_dim < 0:
            raise InvalidInput(f"KV layout: value_dim must be a whole number from 0 on, got {self.value_dim!r}")
        if self.dtype not in ITEM_BYTES:
            raise InvalidInput(f"KV layout: dtype {self.dtype!r} is not one of {', '.join(ITEM_BYTES)}")

    @property
    def widths(self) -> tuple[int, int]:
        """Widths of a head's key and of its value."""
        return self.head_dim, self.value_dim or self.head_dim

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Raises InvalidInput if keys and values differ in width: such a block is not a single array."""
        if self.value_dim:
            raise InvalidInput(f"a block of {self} is not a single array: its keys and values differ in width")
        return (self.layers, 2, self.kv_heads, self.block_tokens, self.head_dim)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return self.layers * self.kv_heads * sum(self.widths) * self.item_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block before any codec."""
        return self.token_bytes * self.block_tokens

    def describe(self) -> str:
        """A stable text for :attr:`CacheContext.layout`; changes exactly when the bytes of a block would."""
        if self.value_dim:
            return (
                f"kv2[layers={self.layers},kv_heads={self.kv_heads},tokens={self.block_tokens},"
                f"key_dim={self.head_dim},value_dim={self.value_dim}]{self.dtype}-le"
            )
        return (
            f"kv1[layers={self.layers},2,kv_heads={self.kv_heads},tokens={self.block_tokens},"
            f"head_dim={self.head_dim}]{self.dtype}-le"
        )


def to_float32(raw: Buffer, dtype: str) -> npt.NDArray[np.float32]:
    """The numbers in ``raw`` as a flat float32 array; exact for all three dtypes."""
    if dtype not in ITEM_BYTES:
        raise InvalidInput(f"dtype {dtype!r} is not one of {', '.join(ITEM_BYTES)}")
    if memoryview(raw).nbytes % ITEM_BYTES[dtype]:
        raise InvalidInput(f"{memoryview(raw).nbytes} bytes are not a whole number of {dtype}")
    if dtype == "bfloat16":
        widened = np.frombuffer(raw, dtype="<u2").astype(np.uint32) << np.uint32(16)
        return widened.view(np.float32)
    return np.frombuffer(raw, dtype="<f4" if dtype == "float32" else "<f2").astype(np.float32)
