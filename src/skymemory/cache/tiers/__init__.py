"""Hierarchy of stores, each with its own threads, deadlines and circuit breaker."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Return ``TieredStore``, which was documented in this package, for another release."""
    if name == "TieredStore":
        from skymemory.cache.tiers.store import TieredStore

        return TieredStore
    raise AttributeError(name)
