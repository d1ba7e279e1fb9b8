"""Block of a prompt: its hash, its place, and the layout of its bytes."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from skymemory import native
from skymemory.errors import InvalidInput, not_utf8

Buffer = bytes | bytearray | memoryview
BlockHash = bytes
"""SHA-256, chained: a hash names its complete prefix."""
HASH_BYTES = 32
MAX_DEPTH = 2**32 - 1
TOKEN_BYTES = 4
_MAX_TOKEN = 2**32 - 1
_KEY_TAG = b"skymemory general key, version 1"
_POSITION = struct.Struct("<I")

Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a block: ``depth`` blocks precede it, ``parent`` is the last of them, None exactly at depth 0 (else
    InvalidInput).
    """

    depth: int
    parent: BlockHash | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.depth <= MAX_DEPTH or (self.depth == 0) != (self.parent is None):
            raise InvalidInput(
                f"a block at depth {self.depth} with {'no' if self.parent is None else 'a'} parent: depth 0 has none, "
                "every other has one"
            )
        if self.parent is not None:
            _check_digest(self.parent, "parent")


def places_in(hashes: Sequence[BlockHash], indices: Sequence[int]) -> list[Place]:
    return [Place(index, hashes[index - 1] if index else None) for index in indices]


def hash_blocks(
    context_digest: bytes, tokens: Tokens, block_tokens: int, content: Mapping[int, bytes] | None = None
) -> list[BlockHash]:
    """Return the hashes of the full blocks of ``tokens``.

    ``h_i = SHA-256(h_{i-1} || tokens_i)``, tokens as unsigned 32-bit little-endian, ``h_{-1}`` the context digest (the
    paper's §3.1: null).

    ``content``: 32-byte digest of an image or sound, by the token position of its first placeholder. Its block's hash
    gets ``|| offset in the block as u32 || digest``, in order of position.

    Raises InvalidInput for tokens that are not integers in 0 .. 2^32-1 or not one-dimensional.
    """
    _check_digest(context_digest, "context digest")
    if isinstance(block_tokens, bool) or not isinstance(block_tokens, int) or block_tokens < 1:
        raise InvalidInput(f"block_tokens must be a whole number from 1 on, got {block_tokens!r}")
    raw = _token_bytes(tokens)
    count, block_bytes = len(raw) // TOKEN_BYTES, block_tokens * TOKEN_BYTES
    chain = [context_digest]
    for block, media in (_fold(content, count, block_tokens) if content else {}).items():
        if block == count // block_tokens:
            break  # the tail fills no block
        begin, end = block * block_bytes, (block + 1) * block_bytes
        chain += native.chain_sha256(raw[(len(chain) - 1) * block_bytes : begin], block_bytes, chain[-1])
        chain.append(hashlib.sha256(b"".join((chain[-1], raw[begin:end], media))).digest())
    chain += native.chain_sha256(raw[(len(chain) - 1) * block_bytes :], block_bytes, chain[-1])
    return chain[1:]


def key_hash(namespace_digest: bytes, key: str) -> bytes:
    """Return ``SHA-256(tag || namespace || UTF-8 key)``; the tag distinguishes it from block hashes."""
    _check_digest(namespace_digest, "namespace digest")
    if not isinstance(key, str) or not key:
        raise InvalidInput(f"a key must be non-empty text, got {key!r}")
    try:
        return hashlib.sha256(_KEY_TAG + namespace_digest + key.encode()).digest()
    except UnicodeEncodeError as error:
        raise not_utf8(f"key {key!r}", error) from None


def _token_bytes(tokens: Tokens) -> bytes | memoryview:
    """Return tokens as unsigned 32-bit little-endian."""
    if (packed := native.pack_tokens(tokens)) is not None:
        return packed
    try:
        array = np.asarray(tokens)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidInput(f"tokens must be a flat sequence of whole numbers ({error})") from None
    if array.ndim != 1:
        raise InvalidInput(f"tokens must have one dimension, got shape {array.shape}: pass one prompt at a time")
    if array.size == 0:
        return b""
    if array.dtype.kind not in "iu":
        raise InvalidInput(f"tokens must be whole numbers in 0..{_MAX_TOKEN}, got {array.dtype}")
    if array.dtype.itemsize > TOKEN_BYTES or array.dtype.kind == "i":
        low, high = int(array.min()), int(array.max())
        if low < 0 or high > _MAX_TOKEN:
            raise InvalidInput(f"tokens must be in 0..{_MAX_TOKEN}, got {low if low < 0 else high}")
    return np.ascontiguousarray(array, dtype="<u4").view(np.uint8).data


def _fold(content: Mapping[int, bytes], count: int, block_tokens: int) -> dict[int, bytes]:
    """Return what to hash for the media in each block."""
    folded: dict[int, bytes] = {}
    for position in sorted(content):
        if isinstance(position, bool) or not isinstance(position, int) or not 0 <= position < count:
            raise InvalidInput(f"content at token {position!r} is outside the prompt's {count} tokens")
        _check_digest(content[position], f"content digest at token {position}")
        block, offset = divmod(position, block_tokens)
        folded[block] = folded.get(block, b"") + _POSITION.pack(offset) + content[position]
    return folded


def _check_digest(digest: bytes, what: str) -> None:
    if not isinstance(digest, bytes) or len(digest) != HASH_BYTES:
        actual = f"{len(digest)} bytes" if isinstance(digest, bytes) else type(digest).__name__
        raise InvalidInput(f"{what} must be {HASH_BYTES} bytes, got {actual}")


# --- the layout of a block's keys and values ---

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_MAX_NUMBER = 2**31 - 1


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Layout of a block: ``(layers, 2, kv_heads, block_tokens, head_dim)`` in C order, 2 = key, value; little-endian.

    If values have another width (``value_dim``; 0: the same), each layer has its keys, ``(kv_heads, block_tokens,
    head_dim)``, then its values, ``(kv_heads, block_tokens, value_dim)``. Sizes are per block: 2.88 MB for
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
            object.__setattr__(self, "value_dim", 0)  # a single representation per layout
        if isinstance(self.value_dim, bool) or not isinstance(self.value_dim, int) or self.value_dim < 0:
            raise InvalidInput(f"KV layout: value_dim must be a whole number from 0 on, got {self.value_dim!r}")
        if self.dtype not in ITEM_BYTES:
            raise InvalidInput(f"KV layout: dtype {self.dtype!r} is not one of {', '.join(ITEM_BYTES)}")

    @property
    def widths(self) -> tuple[int, int]:
        return self.head_dim, self.value_dim or self.head_dim

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Shape as a single array; InvalidInput if keys and values differ in width."""
        if self.value_dim:
            raise InvalidInput(f"a block of {self} is not a single array: its keys and values differ in width")
        return (self.layers, 2, self.kv_heads, self.block_tokens, self.head_dim)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        return self.layers * self.kv_heads * sum(self.widths) * self.item_bytes

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_tokens

    def describe(self) -> str:
        """Return a text that changes exactly when a block's bytes would."""
        if self.value_dim:
            return (
                f"kv2[layers={self.layers},kv_heads={self.kv_heads},tokens={self.block_tokens},"
                f"key_dim={self.head_dim},value_dim={self.value_dim}]{self.dtype}-le"
            )
        return (
            f"kv1[layers={self.layers},2,kv_heads={self.kv_heads},tokens={self.block_tokens},"
            f"head_dim={self.head_dim}]{self.dtype}-le"
        )


@dataclass(frozen=True, slots=True)
class OpaqueLayout:
    """Layout of a block that only engines of the same kind can read. ``packing`` names all that its bytes depend on."""

    packing: str
    block_tokens: int
    block_bytes: int

    def __post_init__(self) -> None:
        for name in ("block_tokens", "block_bytes"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise InvalidInput(f"opaque layout: {name} must be a whole number from 1 on, got {number!r}")

    def describe(self) -> str:
        return f"opaque1[tokens={self.block_tokens},bytes={self.block_bytes}]{self.packing}"


def to_float32(raw: Buffer, dtype: str) -> npt.NDArray[np.float32]:
    """Return the numbers as a flat float32 array; exact for all three dtypes."""
    if dtype not in ITEM_BYTES:
        raise InvalidInput(f"dtype {dtype!r} is not one of {', '.join(ITEM_BYTES)}")
    if memoryview(raw).nbytes % ITEM_BYTES[dtype]:
        raise InvalidInput(f"{memoryview(raw).nbytes} bytes are not a whole number of {dtype}")
    if dtype == "bfloat16":
        widened = np.frombuffer(raw, dtype="<u2").astype(np.uint32) << np.uint32(16)
        return widened.view(np.float32)
    return np.frombuffer(raw, dtype="<f4" if dtype == "float32" else "<f2").astype(np.float32)
