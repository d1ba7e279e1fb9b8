"""Several stores as one, each behind threads, a deadline and a circuit breaker of its own."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """``TieredStore`` was documented to be here; it stays so for one release."""
    if name == "TieredStore":
        from skymemory.cache.tiers.store import TieredStore

        return TieredStore
    raise AttributeError(name)
