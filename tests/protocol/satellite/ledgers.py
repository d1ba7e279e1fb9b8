"""Whether the ledgers of satellites balance, by their housekeeping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from skymemory.protocol.satellite.memory import CAUSES

Named = TypeVar("Named")


def unaccounted_bytes(figures: Mapping[str, int]) -> int:
    """Bytes that came and are neither held nor gone with a cause, by a satellite's housekeeping: 0 if it balances."""
    came = figures["bytes_set"] + figures["bytes_migrated_in"]
    return came - figures["memory_used_bytes"] - sum(figures[f"bytes_{cause}"] for cause in CAUSES)


def open_books(satellites: Mapping[Named, Mapping[str, int]]) -> dict[Named, int]:
    """The satellites whose ledgers do not balance, with the difference in bytes; empty if all is well."""
    gaps = {name: unaccounted_bytes(figures) for name, figures in satellites.items()}
    return {name: gap for name, gap in gaps.items() if gap}


def total(satellites: Mapping[Named, Mapping[str, int]]) -> dict[str, int]:
    """The sum of all satellites' ledgers."""
    names = ["bytes_set", "bytes_migrated_in", "memory_used_bytes", *(f"bytes_{cause}" for cause in CAUSES)]
    return {name: sum(figures[name] for figures in satellites.values()) for name in names}
