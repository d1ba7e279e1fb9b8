"""Block hashes: a 32-byte hash names a block of tokens and everything before it."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from skymemory.errors import InvalidInput

BlockHash = bytes
"""32 bytes, SHA-256. Because hashes are chained, one hash names its whole prefix."""
HASH_BYTES = 32
MAX_DEPTH = 2**32 - 1
TOKEN_BYTES = 4
_MAX_TOKEN = 2**32 - 1
_KEY_TAG = b"skymemory general key, version 1"
_POSITION = struct.Struct("<I")

Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Place:
    """A block's position in its prompt: ``depth`` blocks are before it, ``parent`` is the last of them.

    Raises InvalidInput for an invalid depth, and unless ``parent`` is None exactly at depth 0.
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
    """The places of the blocks ``indices`` of a prompt whose blocks are ``hashes``, the first one first."""
    return [Place(index, hashes[index - 1] if index else None) for index in indices]


def hash_blocks(
    context_digest: bytes, tokens: Tokens, block_tokens: int, content: Mapping[int, bytes] | None = None
) -> list[BlockHash]:
    """Hashes of the full blocks of ``tokens``; a prompt shorter than one block gives ``[]``.

    ``h_i = SHA-256(h_{i-1} || tokens_i)``, tokens as unsigned 32-bit little-endian, ``h_{-1}`` the context
    digest (the paper's §3.1 starts from a null hash).

    ``content`` is for prompts with images or audio, whose placeholders share token ids: position of the first
    placeholder (0-based token) → 32-byte digest of the medium. Each is folded into the block it falls in, as
    ``|| offset in the block as u32 || digest``, in order of position; later blocks inherit it by the chain.

    Raises :class:`InvalidInput` for tokens that are not whole numbers in 0 .. 2^32-1 or not one-dimensional.
    """
    _check_digest(context_digest, "context digest")
    if isinstance(block_tokens, bool) or not isinstance(block_tokens, int) or block_tokens < 1:
        raise InvalidInput(f"block_tokens must be a whole number from 1 on, got {block_tokens!r}")
    raw, count = _token_bytes(tokens)
    block_bytes = block_tokens * TOKEN_BYTES
    end = count // block_tokens * block_bytes
    folded = _fold(content, count, block_tokens) if content else {}
    sha256, previous, hashes = hashlib.sha256, context_digest, []
    if folded:
        for index, start in enumerate(range(0, end, block_bytes)):
            message = previous + raw[start : start + block_bytes] + folded.get(index, b"")
            previous = sha256(message).digest()
            hashes.append(previous)
        return hashes
    for start in range(0, end, block_bytes):
        previous = sha256(previous + raw[start : start + block_bytes]).digest()
        hashes.append(previous)
    return hashes


def key_hash(namespace_digest: bytes, key: str) -> bytes:
    """32-byte name of a text key of the general key-value store, in the namespace of ``namespace_digest``.

    ``SHA-256(tag || namespace || UTF-8 key)``; the tag keeps it apart from every block hash.
    """
    _check_digest(namespace_digest, "namespace digest")
    if not isinstance(key, str) or not key:
        raise InvalidInput(f"a key must be non-empty text, got {key!r}")
    try:
        return hashlib.sha256(_KEY_TAG + namespace_digest + key.encode()).digest()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"key {key!r} is not encodable as UTF-8 ({error.reason})") from None


def _token_bytes(tokens: Tokens) -> tuple[bytes, int]:
    """Tokens as packed u32 little-endian, and how many."""
    try:
        array = np.asarray(tokens)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidInput(f"tokens must be a flat sequence of whole numbers ({error})") from None
    if array.ndim != 1:
        raise InvalidInput(f"tokens must have one dimension, got shape {array.shape}: pass one prompt at a time")
    if array.size == 0:
        return b"", 0
    if array.dtype.kind not in "iu":
        raise InvalidInput(f"tokens must be whole numbers in 0..{_MAX_TOKEN}, got {array.dtype}")
    if array.dtype.itemsize > TOKEN_BYTES or array.dtype.kind == "i":
        low, high = int(array.min()), int(array.max())
        if low < 0 or high > _MAX_TOKEN:
            raise InvalidInput(f"tokens must be in 0..{_MAX_TOKEN}, got {low if low < 0 else high}")
    return array.astype("<u4").tobytes(), int(array.size)


def _fold(content: Mapping[int, bytes], count: int, block_tokens: int) -> dict[int, bytes]:
    """Block index → the bytes folded into its hash."""
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
        shown = f"{len(digest)} bytes" if isinstance(digest, bytes) else type(digest).__name__
        raise InvalidInput(f"{what} must be {HASH_BYTES} bytes, got {shown}")
