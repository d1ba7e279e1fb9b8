"""Lifetimes of keys, as clients set them and as TTL reports them."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skymemory.store.accounting import Deadlines
from skymemory.store.base import Expiring, Lasting, Store
from skymemory.store.named_values import unwrap_store

MAX_GIVEN = 1 << 16
"""Limit of lifetimes that the store cannot report."""


class Lifetimes:
    """Lifetimes as the store reports them, else (satellites) as set here. Thread-safe."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        inner: object = unwrap_store(store)
        self._expiring = inner if isinstance(inner, Expiring) else None
        self._lasting = inner if isinstance(inner, Lasting) else None
        self._clock = clock
        self._given = Deadlines()
        self._lock = threading.Lock()

    @property
    def can_be_given(self) -> bool:
        return self._expiring is not None

    @property
    def is_full(self) -> bool:
        with self._lock:
            self._given.pop_expired(self._clock())  # drops the ended lifetimes
            return len(self._given) >= MAX_GIVEN

    def left_s(self, key: bytes) -> float:
        return self.all_left_s([key])[0]

    def all_left_s(self, keys: Sequence[bytes]) -> list[float]:
        if self._lasting is not None:
            return self._lasting.left_s(keys)
        now_s = self._clock()
        return [self._given.of(key) - now_s for key in keys]

    def give(self, keys: Sequence[bytes], ttl_s: float) -> bool:
        """Set lifetimes (infinite: never); True if all are promised."""
        if self._lasting is not None:
            return all(self._lasting.expire(keys, ttl_s))
        if self._expiring is None or (ttl_s < math.inf and self.is_full):
            return False
        now_s = self._clock()
        promised = all(self._expiring.expire(keys, ttl_s))
        with self._lock:
            for key in keys:
                self._given.give(key, now_s + ttl_s if promised else math.inf)
        return promised

    def end(self, keys: Sequence[bytes]) -> None:
        mortal = [] if self._lasting is not None else [key for key in keys if self._given.of(key) < math.inf]
        if mortal:
            self.give(mortal, math.inf)

    def forget(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._given.forget(key)


@dataclass(frozen=True, slots=True)
class Options:
    condition: bytes = b""  # NX, XX, or empty
    get: bool = False  # also return the previous value
    ttl_s: float | None = None
    """Lifetime; 0 or less: it has already ended."""
    persist: bool = False  # remove the lifetime
    keeps: bool = False  # keep the previous lifetime


INT64_BYTES = 20
_INT64 = re.compile(rb"0|-?[1-9][0-9]*")
_UNIT_MS = {b"EX": 1000, b"PX": 1, b"EXAT": 1000, b"PXAT": 1}


def options_of(words: Sequence[bytes], allowed: frozenset[bytes], unix_s: float) -> Options | None:
    """Return the options; None for an invalid combination, ValueError for an invalid lifetime."""
    condition, get, ttl_s, lifetime = b"", False, None, b""
    remaining = list(words)
    while remaining:
        option = remaining.pop(0).upper()
        if option not in allowed:
            return None
        if option in (b"NX", b"XX"):
            if condition not in (b"", option):
                return None
            condition = option
        elif option == b"GET":
            get = True
        elif lifetime not in (b"", option):
            return None
        else:
            lifetime = option
            if option in _UNIT_MS:
                if not remaining:
                    return None
                number = parse_integer(remaining.pop(0))
                if number <= 0:
                    raise ValueError("invalid expire time")
                ttl_s = ttl_of(number, option, unix_s)
    return Options(condition, get, ttl_s, persist=lifetime == b"PERSIST", keeps=lifetime == b"KEEPTTL")


def ttl_of(number: int, unit: bytes, unix_s: float) -> float:
    """Return the seconds left of an EX, PX, EXAT or PXAT; ValueError beyond 64 bits."""
    is_time, ms = unit.endswith(b"AT"), number * _UNIT_MS[unit]
    if not -(1 << 63) <= ms < (1 << 63) - (0 if is_time else int(unix_s * 1000)):
        raise ValueError("invalid expire time")
    return ms / 1000 - (unix_s if is_time else 0.0)


def parse_integer(word: bytes) -> int:
    """Return a whole number of 64 bits; else ValueError."""
    if len(word) > INT64_BYTES or _INT64.fullmatch(word) is None or not -(1 << 63) <= int(word) < 1 << 63:
        raise ValueError("value is not an integer or out of range")
    return int(word)


LIFETIMES = frozenset(_UNIT_MS)
