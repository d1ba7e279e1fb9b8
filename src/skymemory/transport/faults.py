"""Fault injection from a seed, without I/O: per datagram, and over time (satellites, planes and links fail and come
back).
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.errors import InvalidInput

DEFAULT_REORDER_DELAY_S = 0.002

_MOST_BITS = 8


class FaultInjector:
    """Fractions (0 to 1) of datagrams lost, duplicated, reordered (delayed), or damaged.

    Damage is 1 to 8 flipped bits or, in a quarter of the cases, a truncation.
    """

    def __init__(
        self,
        loss: float = 0.0,
        duplicate: float = 0.0,
        reorder: float = 0.0,
        corrupt: float = 0.0,
        seed: int = 0,
        reorder_delay_s: float = DEFAULT_REORDER_DELAY_S,
    ) -> None:
        for name, share in (("loss", loss), ("duplicate", duplicate), ("reorder", reorder), ("corrupt", corrupt)):
            if not 0.0 <= share <= 1.0:
                raise InvalidInput(f"fault {name} {share}: expected a fraction from 0 to 1")
        if not 0.0 <= reorder_delay_s < 3600.0:
            raise InvalidInput(f"reorder delay {reorder_delay_s} s: expected 0 to 3600")
        self._loss, self._duplicate, self._reorder, self._corrupt = loss, duplicate, reorder, corrupt
        self._reorder_delay_s = reorder_delay_s
        self._random = Random(seed)
        self._draw = self._random.random
        self.datagrams = self.lost = self.duplicated = self.reordered = self.corrupted = 0

    @property
    def active(self) -> bool:
        return max(self._loss, self._duplicate, self._reorder, self._corrupt) > 0

    @property
    def injected(self) -> int:
        return self.lost + self.duplicated + self.reordered + self.corrupted

    def apply(self, data: bytes) -> list[tuple[bytes, float]]:
        """Return the copies of a datagram that arrive: ``(bytes, extra seconds)``."""
        self.datagrams += 1
        if self._loss > 0 and self._draw() < self._loss:
            self.lost += 1
            return []
        flights = [self._fly(data)]
        if self._duplicate > 0 and self._draw() < self._duplicate:
            self.duplicated += 1
            flights.append(self._fly(data))
        return flights

    def _fly(self, data: bytes) -> tuple[bytes, float]:
        extra_s = 0.0
        if self._reorder > 0 and self._draw() < self._reorder:
            self.reordered += 1
            extra_s = self._reorder_delay_s * (1.0 - self._draw())
        if data and self._corrupt > 0 and self._draw() < self._corrupt:
            self.corrupted += 1
            data = self._damage(data)
        return data, extra_s

    def _damage(self, data: bytes) -> bytes:
        if self._random.random() < 0.25:
            return data[: self._random.randrange(len(data))]
        damaged = bytearray(data)
        bits = self._random.sample(range(8 * len(data)), self._random.randint(1, min(_MOST_BITS, 8 * len(data))))
        for bit in bits:
            damaged[bit // 8] ^= 1 << bit % 8
        return bytes(damaged)


@dataclass(frozen=True, slots=True)
class FaultEvent:
    """Fault at ``time_s``: satellites die, or a link is cut; with ``over``, they come back, empty."""

    time_s: float
    satellites: tuple[SatelliteId, ...] = ()
    link: tuple[SatelliteId, SatelliteId] | None = None
    over: bool = False


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Mean time between faults of each kind (0: never), and duration, 0.5 to 1.5 ``lasts_s``."""

    satellite_every_s: float = 0.0
    plane_every_s: float = 0.0
    link_every_s: float = 0.0
    lasts_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("satellite_every_s", "plane_every_s", "link_every_s", "lasts_s"):
            if not 0.0 <= getattr(self, name) < 1e9:
                raise InvalidInput(f"{name} {getattr(self, name)}: expected 0 to 1e9 seconds")


def seeded_faults(torus: Torus, rates: FaultRates, until_s: float, seed: int, begin_s: float = 0.0) -> list[FaultEvent]:
    """Return faults by time, the same for the same seed; their ends may follow ``until_s``."""
    random = Random(seed)
    events: list[FaultEvent] = []
    busy_until_s: dict[object, float] = {}

    def fail(time_s: float, satellites: tuple[SatelliteId, ...], link: tuple[SatelliteId, SatelliteId] | None) -> None:
        parts: tuple[object, ...] = satellites or (link,)
        end_s = time_s + rates.lasts_s * (0.5 + random.random())
        if any(busy_until_s.get(part, begin_s) > time_s for part in parts):
            return
        busy_until_s.update(dict.fromkeys(parts, end_s))
        events.append(FaultEvent(time_s, satellites, link))
        events.append(FaultEvent(end_s, satellites, link, over=True))

    everyone = torus.satellites()
    starts: list[tuple[float, str]] = []
    for kind, every_s in (
        ("satellite", rates.satellite_every_s),
        ("plane", rates.plane_every_s),
        ("link", rates.link_every_s),
    ):
        time_s = begin_s
        while every_s and (time_s := time_s + random.expovariate(1 / every_s)) < until_s:
            starts.append((time_s, kind))
    for time_s, kind in sorted(starts):
        satellite = random.choice(everyone)
        if kind == "plane":
            fail(time_s, tuple(SatelliteId(satellite.plane, slot) for slot in range(torus.slots_per_plane)), None)
        elif kind == "satellite":
            fail(time_s, (satellite,), None)
        else:
            fail(time_s, (), (satellite, random.choice((torus.east(satellite), torus.south(satellite)))))
    return sorted(events, key=lambda event: event.time_s)
