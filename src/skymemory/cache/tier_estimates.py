"""How long a load over several tiers would take: each tier says it for the keys it is the nearest for."""

from __future__ import annotations

import math
from collections.abc import Sequence

from skymemory.cache.outbound import Outbound
from skymemory.cache.tier import Tier


def estimate_load_s(tiers: Sequence[Tier], outbound: Outbound, keys: Sequence[bytes], now_s: float) -> float:
    """Seconds, summed over tiers; infinite when a key is in none. Reads no values and, as tiers do, asks nobody."""
    rest = list(dict.fromkeys(keys))
    total_s = 0.0
    for tier in tiers:
        if tier.number == 1 and rest:
            moving = outbound.get(rest)
            rest = [key for key in rest if key not in moving]
        trusted = [key for key in rest if key not in tier.doubts]
        if not trusted or not tier.usable(trusted):
            continue
        told = tier.ask(lambda tier=tier, trusted=trusted: _estimate(tier, trusted, now_s))  # type: ignore[misc]
        if told is not None:
            seconds, there = told
            total_s += seconds
            rest = [key for key in rest if key not in there]
    return math.inf if rest else total_s


def _estimate(tier: Tier, keys: list[bytes], now_s: float) -> tuple[float, set[bytes]]:
    """Of those of ``keys`` that the tier does not know to be absent."""
    if (seconds := tier.store.estimate_load_s(keys, now_s)) < math.inf:
        return seconds, set(keys)
    there = [key for key in keys if tier.store.estimate_load_s([key], now_s) < math.inf]
    return (tier.store.estimate_load_s(there, now_s) if there else 0.0), set(there)
