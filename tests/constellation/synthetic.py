"""Constellations of element sets whose planes, slots and gaps are known."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from sgp4.api import WGS72, Satrec

from skymemory.constellation.tle import ElementSet

EPOCH_UNIX_S = 1_750_000_000.0
_SGP4_ZERO_UNIX_S = -631_238_400.0  # 1949-12-31, from which sgp4init counts days
_EQUATOR_M, _MU_M3_MIN2 = 6_378_135.0, 3.986008e14 * 3600


@dataclass(frozen=True)
class Made:
    """A shell as it was made; ``gaps`` are (plane, slot)."""

    planes: int
    slots: int
    phase: int
    gaps: frozenset[tuple[int, int]]
    node0_deg: float


def element_set(
    number: int,
    *,
    node_rad: float,
    argument_rad: float,
    altitude_m: float = 550e3,
    inclination_deg: float = 53.0,
    eccentricity: float = 1e-4,
    bstar: float = 0.0,
    ndot_rev_day2: float = 0.0,
    epoch_unix_s: float = EPOCH_UNIX_S,
    at_unix_s: float = EPOCH_UNIX_S,
) -> ElementSet:
    """Elements of ``epoch_unix_s`` of a satellite that is at these mean angles at ``at_unix_s``."""
    motion = math.sqrt(_MU_M3_MIN2 / (_EQUATOR_M + altitude_m) ** 3)
    perigee = random.Random(number).uniform(0, 2 * math.pi)

    def built(node: float, argument: float) -> Satrec:
        satrec = Satrec()
        satrec.classification, satrec.intldesg = "U", "19074A"
        days = (epoch_unix_s - _SGP4_ZERO_UNIX_S) / 86400
        anomaly = (argument - perigee) % (2 * math.pi)
        ndot = ndot_rev_day2 * 2 * math.pi / 1440**2
        inclination = math.radians(inclination_deg)
        satrec.sgp4init(
            WGS72, "i", number, days, bstar, ndot, 0.0, eccentricity, perigee, inclination, anomaly, motion, node
        )
        return satrec

    rates = built(0.0, 0.0)
    minutes = (epoch_unix_s - at_unix_s) / 60
    node = (node_rad + rates.nodedot * minutes) % (2 * math.pi)
    satrec = built(node, argument_rad + (rates.mdot + rates.argpdot) * minutes)
    return ElementSet(f"S{number}", number, f"record {number}", satrec)


def shell(
    draw: random.Random,
    planes: int,
    slots: int,
    phase: int,
    *,
    gap_share: float,
    node_jitter_deg: float = 0.3,
    slot_jitter: float = 0.2,
    star: bool = False,
    first_number: int = 1,
    at_unix_s: float = EPOCH_UNIX_S,
    **orbit: float,
) -> tuple[list[ElementSet], Made, dict[int, tuple[int, int]]]:
    """Element sets of a Walker shell, how it was made, and the (plane, slot) of each by its number."""
    node0_deg = draw.uniform(0, 360)
    round_deg = 180 if star else 360
    cells = [(plane, slot) for plane in range(planes) for slot in range(slots)]
    gaps = frozenset(draw.sample(cells, round(gap_share * len(cells))))
    elements, truth = [], {}
    for number, (plane, slot) in enumerate(sorted(set(cells) - gaps), first_number):
        node_deg = node0_deg + round_deg * plane / planes + draw.uniform(-node_jitter_deg, node_jitter_deg)
        turns = (slot + phase * plane / planes + draw.uniform(-slot_jitter, slot_jitter)) / slots
        elements.append(
            element_set(
                number,
                node_rad=math.radians(node_deg),
                argument_rad=2 * math.pi * turns,
                epoch_unix_s=at_unix_s + draw.uniform(-40_000, 40_000),
                at_unix_s=at_unix_s,
                **orbit,
            )
        )
        truth[number] = plane, slot
    return elements, Made(planes, slots, phase, gaps, node0_deg), truth
