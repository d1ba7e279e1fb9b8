"""Secret keys by number. Each purpose derives its own key, so that sharing a ring weakens neither."""

from __future__ import annotations

import hmac
import math
from dataclasses import dataclass, field

from skymemory.errors import InvalidInput

SECRET_BYTES = 32
MAX_KEY_ID = 0xFFFF
MAX_KEYS = 16


@dataclass(frozen=True, slots=True)
class SecretKey:
    """Secret key. ``key_id``: 1 to 65,535. ``from_s``: Unix time of its first use; it is accepted before, because every
    host must know it by then.
    """

    key_id: int
    secret: bytes = field(repr=False)
    from_s: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.key_id <= MAX_KEY_ID:
            raise InvalidInput(f"key id {self.key_id}: expected 1 to {MAX_KEY_ID}")
        if not math.isfinite(self.from_s):
            raise InvalidInput(f"key {self.key_id} is used from {self.from_s}: expected Unix time in seconds")
        if len(self.secret) != SECRET_BYTES:
            raise InvalidInput(f"key {self.key_id} has {len(self.secret)} bytes: expected {SECRET_BYTES}")

    def derive(self, purpose: bytes) -> bytes:
        """Derive 32 bytes: HMAC-SHA-256 of the purpose."""
        return hmac.digest(self.secret, purpose, "sha256")


@dataclass(frozen=True, slots=True)
class KeyRing:
    """Accepted keys, by ascending time of use."""

    keys: tuple[SecretKey, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.keys) <= MAX_KEYS:
            raise InvalidInput(f"{len(self.keys)} keys in a ring: expected 1 to {MAX_KEYS}; retire old ones")
        ids = [key.key_id for key in self.keys]
        if len(set(ids)) != len(ids):
            raise InvalidInput(f"two keys share an id: {', '.join(map(str, ids))}")
        if list(self.keys) != sorted(self.keys, key=lambda key: key.from_s):
            raise InvalidInput("keys out of order: expected ascending times of use")

    def find(self, key_id: int) -> SecretKey | None:
        return next((key for key in self.keys if key.key_id == key_id), None)

    def may_come(self, key_id: int) -> bool:
        """Return True if an unknown id may be a later key's."""
        # Serial number arithmetic, as in RFC 1982: ids wrap around, and half of them count as later.
        return 0 < (key_id - self.keys[-1].key_id) % MAX_KEY_ID <= MAX_KEY_ID // 2

    def active(self, now_s: float) -> SecretKey:
        """Return the latest key in use, or else the first."""
        return next((key for key in reversed(self.keys) if key.from_s <= now_s), self.keys[0])

    def with_key(self, secret: bytes, from_s: float) -> KeyRing:
        last, used_ids = self.keys[-1], {key.key_id for key in self.keys}
        later, earlier = range(last.key_id + 1, MAX_KEY_ID + 1), range(1, last.key_id)
        key_id = next(key_id for key_id in (*later, *earlier) if key_id not in used_ids)
        return KeyRing((*self.keys, SecretKey(key_id, secret, max(from_s, last.from_s))))

    def without(self, key_ids: set[int], now_s: float) -> KeyRing:
        """Return the ring without these keys; raise ``InvalidInput`` for unknown keys and the key in use."""
        unknown = key_ids - {key.key_id for key in self.keys}
        if unknown:
            known = ", ".join(str(key.key_id) for key in self.keys)
            raise InvalidInput(f"no key {min(unknown)} in the ring: it has {known}")
        if self.active(now_s).key_id in key_ids:
            raise InvalidInput(f"key {self.active(now_s).key_id} is in use: rotate first, then retire it")
        return KeyRing(tuple(key for key in self.keys if key.key_id not in key_ids))


def first_ring(secret: bytes) -> KeyRing:
    return KeyRing((SecretKey(1, secret),))
