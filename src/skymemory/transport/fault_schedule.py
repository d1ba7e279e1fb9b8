"""What breaks when: satellites, whole planes and links fail and come back, drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class FaultEvent:
    """At ``time_s`` these satellites die (or, ``over``, come back empty), or this link is cut (or mended)."""

    time_s: float
    satellites: tuple[SatelliteId, ...] = ()
    link: tuple[SatelliteId, SatelliteId] | None = None
    over: bool = False


@dataclass(frozen=True, slots=True)
class FaultRates:
    """How often each kind of fault begins, on average, in the whole constellation, and how long each lasts.

    ``every_s`` 0: never. Durations are drawn evenly from half to one and a half of ``lasts_s``.
    """

    satellite_every_s: float = 0.0
    plane_every_s: float = 0.0
    link_every_s: float = 0.0
    lasts_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("satellite_every_s", "plane_every_s", "link_every_s", "lasts_s"):
            if not 0.0 <= getattr(self, name) < 1e9:
                raise InvalidInput(f"{name} {getattr(self, name)}: expected 0 to 1e9 seconds")


def seeded_faults(torus: Torus, rates: FaultRates, until_s: float, seed: int, begin_s: float = 0.0) -> list[FaultEvent]:
    """Faults from ``begin_s`` to ``until_s`` in the order of time: the same for the same seed.

    What fails is not drawn again before it is back; whatever fails, comes back (maybe after ``until_s``).
    """
    random = Random(seed)
    events: list[FaultEvent] = []
    busy_until_s: dict[object, float] = {}

    def happen(
        time_s: float, satellites: tuple[SatelliteId, ...], link: tuple[SatelliteId, SatelliteId] | None
    ) -> None:
        parts: tuple[object, ...] = satellites or (link,)
        end_s = time_s + rates.lasts_s * (0.5 + random.random())
        if any(busy_until_s.get(part, begin_s) > time_s for part in parts):
            return
        busy_until_s.update(dict.fromkeys(parts, end_s))
        events.append(FaultEvent(time_s, satellites, link))
        events.append(FaultEvent(end_s, satellites, link, over=True))

    everyone = torus.satellites()
    begun: list[tuple[float, str]] = []
    for kind, every_s in (
        ("satellite", rates.satellite_every_s), ("plane", rates.plane_every_s), ("link", rates.link_every_s)
    ):  # fmt: skip
        time_s = begin_s
        while every_s and (time_s := time_s + random.expovariate(1 / every_s)) < until_s:
            begun.append((time_s, kind))
    for time_s, kind in sorted(begun):
        here = random.choice(everyone)
        if kind == "plane":
            happen(time_s, tuple(SatelliteId(here.plane, slot) for slot in range(torus.slots_per_plane)), None)
        elif kind == "satellite":
            happen(time_s, (here,), None)
        else:
            happen(time_s, (), (here, random.choice((torus.east(here), torus.south(here)))))
    return sorted(events, key=lambda event: event.time_s)
