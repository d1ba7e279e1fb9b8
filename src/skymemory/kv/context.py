from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field

from skymemory.errors import InvalidInput, not_utf8

ENCODING_VERSION = 1
DEFAULT_BLOCK_TOKENS = 128
_MAX_BLOCK_TOKENS = 2**32 - 1
_PREFIX = struct.Struct("<8sI")
_LENGTH = struct.Struct("<I")
_FIXED = struct.Struct("<BI")


@dataclass(frozen=True, slots=True)
class CacheContext:
    """Identity of a KV cache. Contexts that differ in any field share no block.

    The digest seeds the chain of block hashes (the paper's null hash, §3.1), so any change invalidates (§3.3). Of the
    codec only the permission of loss is included: a block may be re-encoded.
    """

    model: str
    weights: str
    """Revision or digest."""
    tokenizer: str
    """Revision or digest."""
    kv_dtype: str
    layout: str
    """Text of ``KVLayout.describe``."""
    lossless: bool = True
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    adapter: str = ""
    tenant_salt: bytes = field(default=b"", repr=False)
    """Secret that separates tenants; never printed."""

    def __post_init__(self) -> None:
        for name in ("model", "weights", "tokenizer", "kv_dtype", "layout", "adapter"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise InvalidInput(f"cache context: {name} must be text, got {type(value).__name__}")
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise not_utf8(f"cache context: {name}", error) from None
        if not isinstance(self.lossless, bool):
            raise InvalidInput(f"cache context: lossless must be True or False, got {self.lossless!r}")
        tokens = self.block_tokens
        if isinstance(tokens, bool) or not isinstance(tokens, int) or not 1 <= tokens <= _MAX_BLOCK_TOKENS:
            raise InvalidInput(f"cache context: block_tokens must be a whole number from 1 on, got {tokens!r}")
        if not isinstance(self.tenant_salt, bytes):
            raise InvalidInput(f"cache context: tenant_salt must be bytes, got {type(self.tenant_salt).__name__}")

    def encode(self) -> bytes:
        """Return the bytes to hash: tag, version, then every field, variable parts with their length: injective."""
        texts = (self.model, self.weights, self.tokenizer, self.kv_dtype, self.layout, self.adapter)
        parts = [_PREFIX.pack(b"skycache", ENCODING_VERSION), _FIXED.pack(self.lossless, self.block_tokens)]
        for raw in (*(text.encode() for text in texts), self.tenant_salt):
            parts += (_LENGTH.pack(len(raw)), raw)
        return b"".join(parts)

    def digest(self) -> bytes:
        return hashlib.sha256(self.encode()).digest()

    def describe(self) -> dict[str, str | int | bool]:
        """Return digest and fields for users and logs, without the salt."""
        return {
            "model": self.model,
            "weights": self.weights,
            "tokenizer": self.tokenizer,
            "kv_dtype": self.kv_dtype,
            "layout": self.layout,
            "lossless": self.lossless,
            "block_tokens": self.block_tokens,
            "adapter": self.adapter,
            "tenant_salted": bool(self.tenant_salt),
            "digest": self.digest().hex(),
        }
