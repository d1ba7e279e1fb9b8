"""Chains of block hashes as they are handed over: whether one makes sense, and one as bytes."""

from __future__ import annotations

from collections.abc import Sequence

from skymemory.errors import InvalidInput, MalformedPacket
from skymemory.kv.block import HASH_BYTES, MAX_DEPTH
from skymemory.kv.chunk import Buffer


def check_chain(hashes: Sequence[bytes], start: int, parent: bytes | None) -> None:
    """Raises :class:`InvalidInput` unless ``hashes`` can stand at depths ``start``, … behind ``parent``.

    ``parent`` is None exactly when ``start`` is 0; no block comes twice, for its hash names all before it.
    """
    if not 0 <= start <= MAX_DEPTH - len(hashes) or (start == 0) != (parent is None):
        raise InvalidInput(
            f"a chain of {len(hashes)} blocks at depth {start} with {'no' if parent is None else 'a'} parent: "
            "depth 0 has none, every other has one"
        )
    chain = hashes if parent is None else [parent, *hashes]
    for key in chain:
        if not isinstance(key, bytes) or len(key) != HASH_BYTES:
            raise InvalidInput(f"a block hash must be {HASH_BYTES} bytes, got {key!r}")
    if len(set(chain)) != len(chain):
        raise InvalidInput("a chain with the same block twice: a block's hash names all before it")


def split_hashes(data: Buffer) -> tuple[bytes, ...]:
    """Concatenated hashes, apart again."""
    raw = bytes(data)
    if len(raw) % HASH_BYTES:
        raise MalformedPacket(f"{len(raw)} bytes are not a whole number of {HASH_BYTES}-byte hashes")
    return tuple(raw[at : at + HASH_BYTES] for at in range(0, len(raw), HASH_BYTES))
