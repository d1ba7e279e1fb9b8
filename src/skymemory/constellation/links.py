"""Capacity of links: rates, other traffic, queues, planned outages, rain.

``up`` and ``down`` are the directions of a beam (each host has its own to each satellite), ``isl`` a direction of a
link between satellites. All is a pure function of the time since the epoch and a seed, so hosts, clients and the
simulator agree.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Literal

from skymemory.config import duration, filled, known_keys, setting, size, suggestion, table, text, whole_number
from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.errors import InvalidInput
from skymemory.units import EARTH_RADIUS_M, SPEED_OF_LIGHT_M_S, parse_rate

LinkClass = Literal["up", "down", "isl"]
LINK_CLASSES: tuple[LinkClass, ...] = ("up", "down", "isl")
DATAGRAM_OVERHEAD_BYTES = 28
LEAST_BUFFER_BYTES = 65_536
LOST = -1.0

_WHOLE_CLASSES: dict[str, tuple[str, ...]] = {
    "up": ("up",),
    "down": ("down",),
    "isl": ("isl",),
    "beams": ("up", "down"),
}
_SATELLITE = re.compile(r"(\d{1,4}),(\d{1,4})(?:-(\d{1,4}),(\d{1,4}))?")
_FADE_STEPS = ((0.0, 1.0), (3.0, 0.5), (6.0, 0.25), (9.0, 0.125))
"""Decibels beyond the fade margin, and the remaining share of the rate; then the beam is out."""
_LEAST_ELEVATION_DEG = 5.0
"""Elevation below which the path through rain no longer grows (ITU-R P.618)."""


def _rate(value: object) -> float:
    rate = parse_rate(value) if isinstance(value, str) else value
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 1e3 <= rate <= 1e15:
        raise InvalidInput(f'{value!r}: expected a rate from "1kbit" (per second) upwards, such as "200Mbit"')
    return float(rate)


def _share(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise InvalidInput(f"{value!r}: expected the share of other traffic, at least 0 and less than 1")
    return float(value)


def _number(least: float, most: float) -> Callable[[object], float]:
    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise InvalidInput(f"{value!r}: expected a number from {least:g} to {most:g}")
        return float(value)

    return read


@dataclass(frozen=True, slots=True)
class Outage:
    """Planned outage, in seconds after the epoch.

    ``link`` is a class (``up``, ``down``, ``isl``, or ``beams``: both ways), ``2,9`` (a satellite's links) or
    ``2,9-2,10`` (a link).
    """

    link: str = setting("link", text, "", "which")
    from_s: float = setting("from", duration, 0.0, "first second after the epoch")
    to_s: float = setting("to", duration, 0.0, "last")

    def __post_init__(self) -> None:
        if self.link not in _WHOLE_CLASSES and not _SATELLITE.fullmatch(self.link):
            raise InvalidInput(
                f"outage of {self.link!r}: expected {', '.join(_WHOLE_CLASSES)}, a satellite such as 2,9, or a link "
                "such as 2,9-2,10"
            )
        if not self.from_s < self.to_s:
            raise InvalidInput(
                f"outage of {self.link} from {self.from_s:g} s to {self.to_s:g} s: expected an end after its begin"
            )

    @property
    def classes(self) -> tuple[str, ...]:
        return _WHOLE_CLASSES.get(self.link, LINK_CLASSES)

    @property
    def satellites(self) -> frozenset[SatelliteId]:
        """Satellites at which all affected links end; empty: any."""
        return frozenset() if self.link in _WHOLE_CLASSES else _satellites_of(self.link)

    def hits(self, kind: LinkClass, satellites: tuple[SatelliteId, ...]) -> bool:
        return kind in self.classes and self.satellites <= set(satellites)

    def check(self, torus: Torus) -> None:
        if self.link in _WHOLE_CLASSES:
            return
        named = _satellites_of(self.link)
        for satellite in named:
            if satellite not in torus:
                raise InvalidInput(
                    f"outage of {self.link}: no satellite {satellite.plane},{satellite.slot}: expected plane 0 to "
                    f"{torus.planes - 1} and slot 0 to {torus.slots_per_plane - 1}, and none of the gaps"
                )
        if len(named) == 2:
            first, other = sorted(named)
            if other not in torus.neighbours(first):
                near = ", ".join(f"{plane},{slot}" for plane, slot in sorted(set(torus.neighbours(first)) - {first}))
                raise InvalidInput(
                    f"outage of {self.link}: these two have no link: expected one of {first.plane},{first.slot} "
                    f"with {near}"
                )


@lru_cache(maxsize=256)
def _satellites_of(link: str) -> frozenset[SatelliteId]:
    numbers = [int(number) for number in re.findall(r"\d+", link)]
    return frozenset(SatelliteId(*numbers[at : at + 2]) for at in range(0, len(numbers), 2))


# --- Rain: attenuation per kilometre by ITU-R P.838-3, and an effective path through the rain ---

_Terms = tuple[tuple[float, float, float], ...]
_K_H: _Terms = (
    (-5.33980, -0.10008, 1.13098),
    (-0.35351, 1.26970, 0.45400),
    (-0.23789, 0.86036, 0.15354),
    (-0.94158, 0.64552, 0.16817),
)
_K_V: _Terms = (
    (-3.80595, 0.56934, 0.81061),
    (-3.44965, -0.22911, 0.51059),
    (-0.39902, 0.73042, 0.11899),
    (0.50167, 1.07319, 0.27195),
)
_A_H: _Terms = (
    (-0.14318, 1.82442, -0.55187),
    (0.29591, 0.77564, 0.19822),
    (0.32177, 0.63773, 0.13164),
    (-5.37610, -0.96230, 1.47828),
    (16.1721, -3.29980, 3.43990),
)
_A_V: _Terms = (
    (-0.07771, 2.33840, -0.76284),
    (0.56727, 0.95545, 0.54039),
    (-0.20238, 1.14520, 0.26809),
    (-48.2991, 0.791669, 0.116226),
    (48.5833, 0.791459, 0.116479),
)


def _fitted(terms: _Terms, slope: float, offset: float, frequency_ghz: float) -> float:
    lg = math.log10(frequency_ghz)
    return sum(a * math.exp(-(((lg - b) / c) ** 2)) for a, b, c in terms) + slope * lg + offset


@lru_cache(maxsize=64)
def rain_coefficients(frequency_ghz: float) -> tuple[float, float]:
    """Return ``k`` and ``alpha`` of ITU-R P.838-3 (equations 2 to 5) for circular polarization, 1 to 1000 GHz.

    The attenuation in dB/km is ``k · R ** alpha`` at ``R`` mm/h.
    """
    k_h = 10 ** _fitted(_K_H, -0.18961, 0.71147, frequency_ghz)
    k_v = 10 ** _fitted(_K_V, -0.16398, 0.63297, frequency_ghz)
    alpha_h = _fitted(_A_H, 0.67849, -1.95537, frequency_ghz)
    alpha_v = _fitted(_A_V, -0.053739, 0.83433, frequency_ghz)
    # Circular polarization is a tilt of 45°: the terms with cos(2 · tilt) = 0 and the elevation vanish.
    k = (k_h + k_v) / 2
    return k, (k_h * alpha_h + k_v * alpha_v) / (2 * k)


@dataclass(frozen=True, slots=True)
class Rain:
    """Rain over a host's place: spells of ``spell_s`` are wet with probability ``share``, with exponentially
    distributed rate.
    """

    mm_h: float = setting("rate", _number(0.1, 200.0), 10.0, "mean rain rate of a wet spell, mm/h")
    share: float = setting("share", _number(0.0, 1.0), 0.05, "share of the spells that are wet")
    spell_s: float = setting("spell", duration, 600.0, "length of a spell")
    down_ghz: float = setting("down_ghz", _number(1.0, 100.0), 20.0, "carrier of the downlink, GHz (Ka band)")
    up_ghz: float = setting("up_ghz", _number(1.0, 100.0), 30.0, "carrier of the uplink, GHz")
    margin_db: float = setting("margin_db", _number(0.0, 60.0), 6.0, "fade without a lower rate, dB")
    height_km: float = setting("height_km", _number(0.5, 6.0), 3.0, "where rain begins, above the ground")

    def __post_init__(self) -> None:
        if not self.spell_s > 0:
            raise InvalidInput(f"spell {self.spell_s:g}: expected more than 0 s")

    def rate_mm_h(self, at_s: float, place: str, seed: int) -> float:
        return _drawn(self, math.floor(at_s / self.spell_s), place, seed)

    def fade_db(self, kind: LinkClass, rate_mm_h: float, elevation_deg: float) -> float:
        """Return the fade in dB, on the slant path below the rain height.

        Since rain is patchy the path is times ``1 / (1 + path · cos(elevation) / L0)``, ``L0 = 35 · exp(−0.015 R)`` km
        (ITU-R P.618).
        """
        if rate_mm_h <= 0:
            return 0.0
        elevation_rad = math.radians(max(elevation_deg, _LEAST_ELEVATION_DEG))
        slant_km = self.height_km / math.sin(elevation_rad)
        reach_km = 35.0 * math.exp(-0.015 * min(rate_mm_h, 100.0))
        path_km = slant_km / (1.0 + slant_km * math.cos(elevation_rad) / reach_km)
        k, alpha = rain_coefficients(self.up_ghz if kind == "up" else self.down_ghz)
        return float(k * rate_mm_h**alpha * path_km)

    def factor(self, kind: LinkClass, rate_mm_h: float, elevation_deg: float) -> float:
        beyond_db = self.fade_db(kind, rate_mm_h, elevation_deg) - self.margin_db
        return next((share for step_db, share in _FADE_STEPS if beyond_db <= step_db), 0.0)


@lru_cache(maxsize=1024)
def _drawn(rain: Rain, spell: int, place: str, seed: int) -> float:
    digest = hashlib.sha256(f"{seed}/{place}/{spell}".encode()).digest()
    is_wet, amount = ((int.from_bytes(digest[at : at + 8], "big") + 0.5) / 2**64 for at in (0, 8))
    return -rain.mm_h * math.log(amount) if is_wet < rain.share else 0.0


def elevation_deg(altitude_m: float, one_way_s: float) -> float:
    """Return a satellite's elevation by height and light time."""
    slant_m, radius_m = one_way_s * SPEED_OF_LIGHT_M_S, EARTH_RADIUS_M + altitude_m
    sine = (radius_m**2 - EARTH_RADIUS_M**2 - slant_m**2) / (2 * EARTH_RADIUS_M * max(slant_m, 1.0))
    return math.degrees(math.asin(max(-1.0, min(1.0, sine))))


# --- The links of a plan ---


def _outages(value: object) -> tuple[Outage, ...]:
    if not isinstance(value, list | tuple):
        raise InvalidInput(f'{value!r}: expected [[outage]] tables with link = "isl", from = "10s", to = "30s"')
    return tuple(filled(Outage, table(outage), f"outage {number}") for number, outage in enumerate(value, 1))


def _elevations(value: object) -> tuple[tuple[float, float], ...]:
    pairs = (
        [tuple(pair) if isinstance(pair, list | tuple) else () for pair in value]
        if isinstance(value, list | tuple)
        else []
    )
    numbers = all(len(pair) == 2 and all(type(part) in (int, float) for part in pair) for pair in pairs)
    if not pairs or not numbers or not all(0 <= pair[0] <= 90 and 0 <= pair[1] <= 1 for pair in pairs):
        raise InvalidInput(
            f"{value!r}: expected pairs of elevation in degrees and share of the rate, [[25, 0.4], [50, 1]]"
        )
    if pairs != sorted(pairs) or len({pair[0] for pair in pairs}) < len(pairs):
        raise InvalidInput(f"{value!r}: expected ascending elevations, each once")
    return tuple((float(low), float(share)) for low, share in pairs)


def _rain(value: object) -> Rain | None:
    return None if value is None else filled(Rain, table(value), "")


def _load(value: object) -> tuple[tuple[str, float], ...]:
    shares = table(value)
    for name in shares:
        if name not in LINK_CLASSES:
            raise InvalidInput(f"{name}: no class of links; {suggestion(name, LINK_CLASSES)}")
    return tuple((name, _named(name, share)) for name, share in sorted(shares.items()))


def _named(name: str, share: object) -> float:
    try:
        return _share(share)
    except InvalidInput as error:
        raise InvalidInput(f"{name}: {error}") from error


@dataclass(frozen=True, slots=True)
class Links:
    """Rates of links in bit/s (None: unlimited), and what reduces them.

    ``elevations`` pairs a lowest elevation with a share of a beam's rate; below the first the beam is out. In a
    handover gap answers on the old beam still arrive.
    """

    up_bit_s: float | None = setting("up", _rate, None, "rate of a beam upwards")
    down_bit_s: float | None = setting("down", _rate, None, "rate of a beam downwards")
    isl_bit_s: float | None = setting("isl", _rate, None, "rate of a link between satellites, each way")
    load: tuple[tuple[str, float], ...] = setting("load", _load, (), "share of other traffic by class")
    buffer_bytes: int = setting("buffer", size, 8 << 20, "bytes that may wait in each direction of each link")
    handover_gap_s: float = setting("handover_gap", duration, 0.0, "silence after a change of the gateway")
    outages: tuple[Outage, ...] = setting("outage", _outages, (), "planned outages")
    elevations: tuple[tuple[float, float], ...] = setting(
        "elevations", _elevations, (), "share of the rate by elevation"
    )
    rain: Rain | None = setting("rain", _rain, None, "weather over the hosts")  # noqa: RUF009 - frozen
    seed: int = setting("seed", whole_number, 0, "of the weather")

    def __post_init__(self) -> None:
        if self.buffer_bytes < LEAST_BUFFER_BYTES:
            raise InvalidInput(
                f"buffer of {self.buffer_bytes} bytes: expected at least {LEAST_BUFFER_BYTES}, a datagram"
            )
        if not 0 <= self.handover_gap_s <= 10:
            raise InvalidInput(f"handover_gap {self.handover_gap_s:g} s: expected 0 to 10 s")

    @classmethod
    def read(cls, table: Mapping[str, Any], where: str) -> Links:
        """Return the links of a table; ``where`` begins error messages."""
        return filled(cls, table, where)

    def as_table(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults, as ``read`` takes them."""
        default, entries = Links(), {}
        for key, field in known_keys(Links).items():
            value = getattr(self, field.name)
            if value == getattr(default, field.name):
                continue
            if field.name == "outages":
                value = [_table_of(outage) for outage in value]
            elif isinstance(value, Rain):
                value = _table_of(value)
            elif field.name == "load":
                value = dict(value)
            elif isinstance(value, tuple):
                value = [list(pair) for pair in value]
            entries[key] = value
        return entries

    def bytes_per_s(self, kind: LinkClass) -> float:
        rates = {"up": self.up_bit_s, "down": self.down_bit_s, "isl": self.isl_bit_s}
        bit_s = rates[kind]
        return math.inf if bit_s is None else bit_s * (1.0 - dict(self.load).get(kind, 0.0)) / 8

    def factor(
        self,
        kind: LinkClass,
        satellites: tuple[SatelliteId, ...],
        at_s: float,
        elevation: Callable[[], float] = lambda: 90.0,
        place: str = "",
    ) -> float:
        """Return the share of a link's rate ``at_s`` seconds after the epoch, for a beam's ``elevation`` (degrees)."""
        for outage in self.outages:
            if outage.from_s <= at_s < outage.to_s and outage.hits(kind, satellites):
                return 0.0
        share = 1.0
        if kind == "isl":
            return share
        if self.elevations:
            height_deg = elevation()
            share = next((rate_share for low, rate_share in reversed(self.elevations) if height_deg >= low), 0.0)
        if self.rain is not None and share and (mm_h := self.rain.rate_mm_h(at_s, place, self.seed)):
            share *= self.rain.factor(kind, mm_h, elevation())
        return share


def _table_of(weather: Outage | Rain) -> dict[str, Any]:
    return {field_.metadata["key"]: getattr(weather, field_.name) for field_ in fields(weather)}


# --- Queues ---


class LinkCounts:
    """Counters of a class of links; ``outage``: packets lost while a link is out."""

    __slots__ = ("bytes", "carried", "dropped", "longest_s", "outage")

    def __init__(self) -> None:
        self.bytes = self.carried = self.dropped = self.outage = 0
        self.longest_s = 0.0


class LinkQueue:
    """Queue of one direction of a link; its only state is when the transmitter is free."""

    __slots__ = ("_buffer_bytes", "_counts", "_factor", "bytes_per_s", "free_s")

    def __init__(
        self, bytes_per_s: float, buffer_bytes: int, counts: LinkCounts, factor: Callable[[float], float] | None
    ) -> None:
        self.bytes_per_s = bytes_per_s
        self.free_s = -math.inf
        self._buffer_bytes = buffer_bytes
        self._counts = counts
        self._factor = factor

    def leaves_s(self, datagram_bytes: int, now_s: float, urgent: bool = False) -> float:
        """Return when a datagram that arrives now is completely sent; ``LOST`` if never.

        ``urgent`` datagrams (routing protocols) overtake the queue.
        """
        free_s = self.free_s
        start_s = free_s if free_s > now_s and not urgent else now_s
        bytes_per_s, counts = self.bytes_per_s, self._counts
        if self._factor is not None:
            share = self._factor(start_s)
            if not share:
                counts.outage += 1
                return LOST
            bytes_per_s *= share
        counts.carried += 1
        counts.bytes += datagram_bytes
        if bytes_per_s == math.inf:
            return start_s
        wait_s = start_s - now_s
        if wait_s:
            if wait_s * bytes_per_s + datagram_bytes > self._buffer_bytes:
                counts.carried -= 1
                counts.bytes -= datagram_bytes
                counts.dropped += 1
                return LOST
            if wait_s > counts.longest_s:
                counts.longest_s = wait_s
        takes_s = (datagram_bytes + DATAGRAM_OVERHEAD_BYTES) / bytes_per_s
        self.free_s = (free_s if free_s > start_s else start_s) + takes_s
        return start_s + takes_s

    def queued_bytes(self, now_s: float) -> float:
        return (self.free_s - now_s) * self.bytes_per_s if self.free_s > now_s else 0.0


Sight = Callable[[SatelliteId, Any, float], float]
"""Elevation (degrees) of a satellite above a host at a time."""


class LinkQueues:
    """Queues of many links, created when first used."""

    def __init__(
        self,
        links: Links,
        epoch_s: float = 0.0,
        elevation: Sight | None = None,
        place: Callable[[Any], str] = lambda host: "",
        onboard: SatelliteId | None = None,
    ) -> None:
        """``onboard``: satellite that carries the hosts, without a beam."""
        self.links = links
        self._onboard = onboard
        self.counts: dict[LinkClass, LinkCounts] = {kind: LinkCounts() for kind in LINK_CLASSES}
        self._epoch_s = epoch_s
        self._elevation = elevation
        self._place = place
        self._queues: dict[tuple[Any, Any], LinkQueue] = {}
        self._kinds: dict[tuple[Any, Any], LinkClass] = {}

    def of(self, sender: Any, receiver: Any) -> LinkQueue:
        queue = self._queues.get((sender, receiver))
        return queue if queue is not None else self._made(sender, receiver)

    def _made(self, sender: Any, receiver: Any) -> LinkQueue:
        from_sky, to_sky = isinstance(sender, SatelliteId), isinstance(receiver, SatelliteId)
        kind: LinkClass = "isl" if from_sky and to_sky else "down" if from_sky else "up"
        satellites = tuple(end for end in (sender, receiver) if isinstance(end, SatelliteId))
        links, epoch_s, elevation_of = self.links, self._epoch_s, self._elevation
        host = receiver if kind == "down" else sender
        place = "" if kind == "isl" else self._place(host)

        def factor(now_s: float) -> float:
            def elevation() -> float:
                return 90.0 if elevation_of is None else elevation_of(satellites[0], host, now_s)

            return links.factor(kind, satellites, now_s - epoch_s, elevation, place)

        hit = any(outage.hits(kind, satellites) for outage in links.outages)
        varies = hit or (kind != "isl" and (bool(links.elevations) or links.rain is not None))
        bytes_per_s = links.bytes_per_s(kind)
        if kind != "isl" and satellites[0] == self._onboard:
            varies, bytes_per_s = False, math.inf
        queue = LinkQueue(bytes_per_s, links.buffer_bytes, self.counts[kind], factor if varies else None)
        self._queues[sender, receiver], self._kinds[sender, receiver] = queue, kind
        return queue

    def figures(self, now_s: float) -> dict[str, int]:
        waiting = self.queued_bytes(now_s)
        lost = {f"link_{kind}_lost": counts.dropped + counts.outage for kind, counts in self.counts.items()}
        return lost | {f"link_{kind}_queued_bytes": waiting[kind] for kind in LINK_CLASSES}

    def forget(self, host: Any) -> None:
        for ends in [ends for ends in self._queues if host in ends]:
            del self._queues[ends], self._kinds[ends]

    def queued_bytes(self, now_s: float) -> dict[LinkClass, int]:
        by_class: dict[LinkClass, float] = dict.fromkeys(LINK_CLASSES, 0.0)
        for ends, queue in self._queues.items():
            by_class[self._kinds[ends]] += queue.queued_bytes(now_s)
        return {kind: round(waiting) for kind, waiting in by_class.items()}
