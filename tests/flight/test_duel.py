"""The satellite in C does what the Python satellite does: the same packets and the same state, event by event."""

from __future__ import annotations

import os

import pytest
from tests.flight.traffic import Case, Duel

from skymemory.protocol.satellite.state import EvictionConfig

_ALL = EvictionConfig.of(["gossip", "periodic", "migration"])
_COPIES = EvictionConfig.of(["gossip-plane", "periodic", "migration"], sweep_s=5.0, replicas=2)
_GAPS = ((2, 2), (2, 4), (2, 5), (1, 3), (4, 0), (0, 6), (3, 2))
"""On both sides of the satellite (2, 3), where the box goes next, two in a row, and behind others."""
PACKETS = int(os.environ.get("SKYMEMORY_DUEL_PACKETS", "200000"))
"""Of all cases together; the nightly run has a million."""
CASES = {
    "plain": Case(),
    "lru": Case(replacement="lru", routing="alternate"),
    "lfuda": Case(replacement="lfuda", planes=2, slots=3),
    "policies": Case(eviction=_ALL, memory_bytes=30_000),
    "copies": Case(eviction=_COPIES),
    "late": Case(lateness=True, eviction=_ALL),
    "keys": Case(authority=True),
    "every_packet": Case(authority=True, every_packet=True, start_s=1_735_689_600.0),
    "signed_answers": Case(authority=True, signed_answers=True, eviction=_ALL, start_s=1_735_689_600.0),
    "still": Case(time_scale=0.0, start_s=1_735_689_600.0),
    "moving": Case(slot_period_s=2.5, memory_bytes=60_000, calm=True),
    "still_copies": Case(time_scale=0.0, memory_bytes=100_000, calm=True, eviction=_COPIES),
    "gaps": Case(gaps=_GAPS, most_planes=2, most_slots=3, eviction=_ALL, slot_period_s=5.0),
    "gaps_late": Case(gaps=_GAPS, most_planes=2, most_slots=3, routing="alternate", lateness=True, calm=True),
    "moving_gaps": Case(
        gaps=_GAPS, most_planes=2, most_slots=3, slot_period_s=3.0, memory_bytes=60_000, calm=True, eviction=_COPIES
    ),
    "seam": Case(seam=True, eviction=_ALL, memory_bytes=30_000),
    "seam_and_gaps": Case(
        gaps=((1, 3), (2, 4), (3, 0)), most_slots=2, most_planes=2, seam=True, eviction=_COPIES, slot_period_s=5.0
    ),
    "moving_copies": Case(slot_period_s=3.0, memory_bytes=60_000, calm=True, eviction=_COPIES),
}


@pytest.mark.brief("gaps_late", "lfuda", "seam_and_gaps", "copies", "late")
@pytest.mark.parametrize("name", CASES)
def test_random_traffic(name: str) -> None:
    Duel(CASES[name], seed=1).run(350)


@pytest.mark.brief(every=5)
@pytest.mark.parametrize("seed", range(1, 41))
def test_drawn_configurations(seed: int) -> None:
    """Grids of one satellite to 255 planes, tiny memories, largest chunks, many copies, new keys, clocks that jump."""
    Duel(Case.drawn(seed), seed).run(120)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_very_many_drawn_configurations() -> None:
    packets, seed = 0, 1000
    while packets < PACKETS / 10:
        duel = Duel(Case.drawn(seed), seed)
        duel.run(400)
        packets, seed = packets + duel.packets, seed + 1


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", CASES)
def test_very_many_packets(name: str) -> None:
    packets, seed = 0, 100
    while packets < PACKETS / len(CASES):
        duel = Duel(CASES[name], seed)
        duel.run(12_000 if PACKETS >= 1_000_000 else 3_000)
        packets, seed = packets + duel.packets, seed + 1
