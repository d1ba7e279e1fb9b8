"""Another gateway where the nearest is silent."""

from __future__ import annotations

from collections.abc import Container, Iterable

from skymemory.constellation.torus import SatelliteId, Torus

_MOST_CANDIDATES = 25


def next_gateway(candidates: Iterable[SatelliteId], suspects: Container[SatelliteId]) -> SatelliteId | None:
    """The first candidate (the best come first) that is not suspect; the first of all if all are; None of none."""
    first = None
    for candidate in candidates:
        if candidate not in suspects:
            return candidate
        first = first or candidate
    return first


def around(centre: SatelliteId, torus: Torus) -> list[SatelliteId]:
    """The satellites nearest to ``centre`` by links, itself first: who may stand in for it."""
    ordered = sorted(torus.satellites(), key=lambda satellite: (torus.hops(centre, satellite), satellite))
    return ordered[:_MOST_CANDIDATES]
