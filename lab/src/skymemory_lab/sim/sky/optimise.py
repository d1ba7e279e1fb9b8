"""Search for the setting that serves a load of values best: access, placement, number of servers, chunk and window.

The physical model computes a grid at times over an orbit: the first half chooses, the second is reported. A value
counts as stored at its box's present place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Literal, NamedTuple

import numpy as np

from skymemory.constellation.presets import Preset
from skymemory.constellation.visibility import DEFAULT_MASK_DEG
from skymemory.errors import InvalidInput
from skymemory.placement.layout import Strategy, check_servers
from skymemory.protocol.client.gateway import Access
from skymemory_lab.sim.sky.bound import lower_bound_s
from skymemory_lab.sim.sky.physical import (
    LINKS,
    OPERATIONS,
    Floats,
    LinkRates,
    TransferSetting,
    Ways,
    latency_s,
    sight_of,
    ways_of,
)

Parameter = Literal["access", "strategy", "servers", "chunk_bytes", "window_bytes"]
PARAMETERS: tuple[Parameter, ...] = ("access", "strategy", "servers", "chunk_bytes", "window_bytes")
SERVERS = (1, 2, 4, 6, 9, 16, 25, 36, 49, 64, 81)
CHUNKS_BYTES = (1280, 3072, 6144, 12_288, 24_576, 49_152)
WINDOWS_BYTES = (1 << 20, 3 << 20, 12 << 20, 48 << 20)
TIMES = 48
# Difference below which latencies count as equal; then the smaller window and fewer servers win.
_SAME_S = 1e-5


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Settings to try, at ``times`` of an orbit. ``servers`` None: those of ``SERVERS`` that the shell has."""

    accesses: Sequence[Access] = ("gateway", "hybrid")
    strategies: Sequence[Strategy] = ("rotation_hop", "rotation", "cost", "hop")
    servers: Sequence[int] | None = None
    chunks_bytes: Sequence[int] = CHUNKS_BYTES
    windows_bytes: Sequence[int] = WINDOWS_BYTES
    times: int = TIMES


class Choice(NamedTuple):
    access: Access
    strategy: Strategy
    servers: int
    chunk_bytes: int
    window_bytes: int


@dataclass(frozen=True, slots=True)
class RequestMix:
    """Requests, of which ``put_share`` store a value; ``server_s`` is per chunk."""

    value_bytes: int
    server_s: float = 0.0
    put_share: float = 0.2
    requests_per_s: float = 0.0

    def __post_init__(self) -> None:
        TransferSetting(self.value_bytes, server_s=self.server_s)
        if not 0 <= self.put_share <= 1:
            raise InvalidInput(f"a share of puts of {self.put_share:g}: expected 0 to 1")
        if not 0 <= self.requests_per_s < math.inf:
            raise InvalidInput(f"{self.requests_per_s:g} requests a second: expected 0 or more")


@dataclass(frozen=True, slots=True)
class ChoiceOutcome:
    """Means over times, in seconds; ``seconds`` is a request of the mix, with waits."""

    choice: Choice
    seconds: float
    get_s: float
    set_s: float
    get_bound_s: float
    set_bound_s: float
    bound_s: float
    """Least time of a request of the mix."""
    wait_s: float  # in queues
    worst_s: float  # largest of ``seconds``
    utilisation: float  # of the busiest station: a link, a beam or the satellites
    busiest: str

    @property
    def carries(self) -> bool:
        return self.utilisation < 1

    @property
    def of_bound(self) -> float:
        return self.seconds / self.bound_s if self.bound_s else 1.0

    def row(self) -> dict[str, object]:
        figures = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "choice"}
        return {**self.choice._asdict(), **figures, "of_bound": self.of_bound}


@dataclass(frozen=True)
class Optimum:
    """Setting ``chosen`` on the first half of an orbit; outcomes except ``chosen_s`` are of the second."""

    chosen: ChoiceOutcome
    second: ChoiceOutcome | None  # best with another access, placement or number of servers
    chosen_s: float
    judged_best: ChoiceOutcome
    """Best setting of the second half."""
    curves: dict[Parameter, list[ChoiceOutcome]] = field(repr=False)
    settings: int  # number tried
    overloaded: int  # number that cannot carry the load
    seen_share: float  # share of the time with something in sight


def grid(preset: Preset, space: SearchSpace) -> Iterator[Choice]:
    """Yield the combinations; parked values (``hop``, ``baseline``) are for a host on board only."""
    servers = space.servers or [number for number in SERVERS if number <= preset.torus.size]
    for number in servers:
        check_servers(number, preset.torus)
    sizes = space.chunks_bytes, space.windows_bytes
    for access, strategy, number, chunk, window in product(space.accesses, space.strategies, servers, *sizes):
        stays = strategy in ("hop", "baseline")
        if stays == (access == "onboard") and window >= chunk:
            yield Choice(access, strategy, number, chunk, window)


def optimise(
    preset: Preset,
    rates: LinkRates,
    load: RequestMix,
    *,
    mask_deg: float = DEFAULT_MASK_DEG,
    space: SearchSpace = SearchSpace(),
    report: Callable[[str], None] = lambda line: None,
) -> Optimum:
    """Return the best choice for this load and the preset's host.

    Raises:
        InvalidInput: nothing is ever in sight, more servers than satellites, an empty grid, or no setting carries the
            load.
    """
    times = space.times
    if times < 4:
        raise InvalidInput(f"{times} times: expected at least 4, half of them to choose and half to judge")
    choices = list(grid(preset, space))
    if not choices:
        raise InvalidInput(
            "no setting to choose from: hop and baseline are for access onboard, the others for the ground"
        )
    period_s = preset.shell.period_s
    at_s = [period_s * (number + 0.5) / times for number in range(times)]
    sight = sight_of(preset, mask_deg, "climbing")
    first: dict[Choice, ChoiceOutcome] = {}
    later: dict[Choice, ChoiceOutcome] = {}
    seen_share = 0.0
    known: tuple[tuple[str, str, int], Ways] | None = None
    for choice in choices:
        box = choice.access, choice.strategy, choice.servers
        if known is None or known[0] != box:
            report(f"{choice.access}, {choice.strategy}, {choice.servers} servers")
            ways = ways_of(
                preset, sight, choice.access, at_s, strategy=choice.strategy, servers=choice.servers, exact_links=True
            )
            seen_share, known = max(seen_share, ways.seen_share), (box, ways)
            chosen_ways, judged_ways = (ways.of(ways.times_s < period_s / 2), ways.of(ways.times_s >= period_s / 2))
            if not len(chosen_ways.times_s) or not len(judged_ways.times_s):
                raise InvalidInput(
                    f"a satellite of {preset.name} is in sight in one half of the orbit only: expected both, to choose "
                    "in the first and to judge in the second; a lower elevation mask, or another place"
                )
        first[choice] = _outcome(choice, chosen_ways, rates, load)
        later[choice] = _outcome(choice, judged_ways, rates, load)
    able = sorted((outcome for outcome in first.values() if outcome.carries), key=_rank)
    if not able:
        least = min(first.values(), key=lambda outcome: outcome.utilisation)
        raise InvalidInput(
            f"no setting carries {load.requests_per_s:g} requests a second of {load.value_bytes} bytes: the best, "
            f"{_words(least.choice)}, uses its {least.busiest} to {least.utilisation:.0%}; expected less load, or "
            "faster links or servers"
        )
    best = able[0].choice
    # Another window or chunk alone would not be a different second way.
    other = next((outcome.choice for outcome in able if outcome.choice[:3] != best[:3]), None)
    curves = {name: _curve(name, best, later) for name in PARAMETERS}
    judged = [outcome for outcome in later.values() if outcome.carries] or [later[best]]
    return Optimum(
        later[best],
        None if other is None else later[other],
        first[best].seconds,
        min(judged, key=_rank),
        curves,
        len(choices),
        len(choices) - len(able),
        seen_share,
    )


def _rank(outcome: ChoiceOutcome) -> tuple[float, int, int]:
    # Return a key that sorts the best outcome first.
    return (
        (round(outcome.seconds / _SAME_S) if outcome.carries else math.inf),
        outcome.choice.window_bytes,
        outcome.choice.servers,
    )


def _words(choice: Choice) -> str:
    return f"{choice.access} to {choice.servers} servers ({choice.strategy}), chunks of {choice.chunk_bytes} bytes"


def _curve(name: Parameter, best: Choice, judged: dict[Choice, ChoiceOutcome]) -> list[ChoiceOutcome]:
    # Return an outcome for each value of the parameter, the others as in ``best``; an access has its best strategy.
    fixed = [other for other in PARAMETERS if other != name and (name, other) != ("access", "strategy")]
    best_by_value: dict[object, ChoiceOutcome] = {}
    for choice, outcome in judged.items():
        if any(getattr(choice, other) != getattr(best, other) for other in fixed):
            continue
        value = getattr(choice, name)
        if (
            choice == best
            or value not in best_by_value
            or (best_by_value[value].choice != best and _rank(outcome) < _rank(best_by_value[value]))
        ):
            best_by_value[value] = outcome
    return list(best_by_value.values())


def _outcome(choice: Choice, ways: Ways, rates: LinkRates, load: RequestMix) -> ChoiceOutcome:
    setting = TransferSetting(load.value_bytes, choice.chunk_bytes, load.server_s, choice.window_bytes)
    get_s, set_s = (latency_s(ways, setting, rates, operation) for operation in OPERATIONS)
    get_bound_s, set_bound_s = (
        float(lower_bound_s(ways, setting, rates, operation).mean()) for operation in OPERATIONS
    )
    wait_s, busiest, utilisation = waits_s(ways, setting, rates, load)
    put = load.put_share
    total_s = (1 - put) * get_s + put * set_s + wait_s
    return ChoiceOutcome(
        choice,
        float(total_s.mean()),
        float(get_s.mean()),
        float(set_s.mean()),
        get_bound_s,
        set_bound_s,
        (1 - put) * get_bound_s + put * set_bound_s,
        float(wait_s.mean()),
        float(total_s.max()),
        utilisation,
        busiest,
    )


def waits_s(ways: Ways, setting: TransferSetting, rates: LinkRates, load: RequestMix) -> tuple[Floats, str, float]:
    """Return a request's wait at each time (infinite if a station is full), the busiest station, its utilisation.

    A satellite, the gateway's link (a quarter of the links' traffic) and the beam are M/D/1 queues, with a mean wait of
    ρ / (2 (1 − ρ)) · service.
    """
    counts = setting.counts(ways.servers)
    used = len(counts)
    bits = 8.0 * setting.chunk_bytes * counts
    shared, far = ways.shared[:, :used], ways.hops[:, :used] > 0
    put, get = load.put_share, 1 - load.put_share
    stations: list[tuple[str, Floats | float, float]] = [("satellites", counts.max() * setting.server_s, 1.0)]
    if rates.isl_bit_s is not None:
        by_link = (bits * (shared & far)).sum(axis=1) / LINKS / rates.isl_bit_s
        stations += [("links to the gateway", by_link, get), ("links from the gateway", by_link, put)]
    if ways.access != "onboard":
        by_gateway, by_own = (bits * shared).sum(axis=1), np.where(shared, 0.0, bits).max(axis=1)
        for name, rate, share in (("beam down", rates.down_bit_s, get), ("beam up", rates.up_bit_s, put)):
            if rate is not None:
                stations.append((name, np.maximum(by_gateway, by_own) / rate, share))
    wait_s = np.zeros(len(ways.times_s))
    busiest, most = "satellites", 0.0
    for name, service_s, share in stations:
        used_share = load.requests_per_s * share * np.asarray(service_s)
        if (highest := float(np.max(used_share))) > most:
            busiest, most = name, highest
        if share:
            with np.errstate(divide="ignore"):
                queue_s = np.where(used_share < 1, used_share / (2 * np.maximum(1 - used_share, 0)) * service_s, np.inf)
            wait_s = wait_s + (1.0 if name == "satellites" else share) * queue_s
    return wait_s, busiest, most


def at_place(preset: Preset, latitude_deg: float | None, longitude_deg: float | None) -> Preset:
    if latitude_deg is None and longitude_deg is None:
        return preset
    if preset.fixed_centre is not None:
        raise InvalidInput(f"{preset.name} is a grid around its host, wherever it is: leave the place out")
    host = preset.host
    latitude = host.latitude_deg if latitude_deg is None else latitude_deg
    longitude = host.longitude_deg if longitude_deg is None else longitude_deg
    return replace(preset, host=type(host)(latitude, longitude))
