"""What a hierarchy is to be, read from a file or from an address's options. Opens nothing.

A file (TOML): settings of the whole, then the tiers, the nearest first. All but `store` may be left out.

    promote = "second hit"          # always | second hit | never
    demote = true
    write_back = true
    load_deadline = "10s"
    close_deadline = "10s"
    outbound = "256MiB"             # values on their way between tiers
    in_flight = "256MiB"            # expected bytes of loads from tiers with threads

    [[tier]]
    store = "memory://4GiB"

    [[tier]]
    store = "disk:///var/cache/skymemory?budget=60GiB"

    [[tier]]
    store = "constellation"
    ask_deadline = "500ms"          # look-ups, leases, pins, deletions
    load_deadline = "5s"
    store_deadline = "10s"
    threads = 2
    local = false                   # true: called in the caller's thread, without deadlines; memory is
    verify = "blocks"               # delete what is not the block of its key (only where all values are KV blocks)
    breaker = { failures = 3, first_wait = "500ms", last_wait = "30s" }
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skymemory.cache.hierarchy_settings import HierarchySettings
from skymemory.cache.tier import TierSettings
from skymemory.cache.tier_breaker import BreakerConfig
from skymemory.cache.value import is_sound_block
from skymemory.errors import InvalidInput
from skymemory.files import read_bounded
from skymemory.units import parse_duration, parse_size


@dataclass(frozen=True, slots=True)
class PlannedTier:
    address: str
    settings: TierSettings


@dataclass(frozen=True, slots=True)
class HierarchyPlan:
    """``tiers``, the nearest first."""

    tiers: tuple[PlannedTier, ...]
    settings: HierarchySettings


Reader = Callable[[Any], Any]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidInput(f"expected a text in quotes, got {value!r}")
    return value


def _switch(value: Any) -> bool:
    """True and false of a file; yes and no of an address."""
    found = value if isinstance(value, bool) else {"yes": True, "no": False}.get(str(value))
    if found is None:
        raise InvalidInput(f"expected true or false (in an address: yes or no), got {value!r}")
    return found


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidInput(f"expected a whole number above 0, got {value!r}")
    return value


def _seconds(value: Any) -> float:
    return parse_duration(_text(value))


def _bytes(value: Any) -> int:
    return parse_size(_text(value))


def _verify(value: Any) -> Callable[[bytes, memoryview], bool] | None:
    if value not in ("blocks", "none"):
        raise InvalidInput(f"expected blocks or none, got {value!r}")
    return is_sound_block if value == "blocks" else None


def _breaker(value: Any) -> BreakerConfig:
    if not isinstance(value, dict):
        raise InvalidInput(f'expected {{ failures = 3, first_wait = "500ms", last_wait = "30s" }}, got {value!r}')
    return BreakerConfig(**_read(value, _OF_A_BREAKER))


_OF_A_BREAKER: dict[str, tuple[str, Reader]] = {
    "failures": ("failures", _count),
    "first_wait": ("first_wait_s", _seconds),
    "last_wait": ("last_wait_s", _seconds),
}
_OF_A_TIER: dict[str, tuple[str, Reader]] = {
    "ask_deadline": ("ask_deadline_s", _seconds),
    "load_deadline": ("load_deadline_s", _seconds),
    "store_deadline": ("store_deadline_s", _seconds),
    "threads": ("threads", _count),
    "local": ("local", _switch),
    "verify": ("verify", _verify),
    "breaker": ("breaker", _breaker),
}
_OF_THE_WHOLE: dict[str, tuple[str, Reader]] = {
    "promote": ("promote", lambda value: _text(value).replace("-", " ")),
    "demote": ("demote", _switch),
    "write_back": ("write_back", _switch),
    "load_deadline": ("load_deadline_s", _seconds),
    "close_deadline": ("close_deadline_s", _seconds),
    "outbound": ("outbound_bytes", _bytes),
    "in_flight": ("in_flight_bytes", _bytes),
}


def _read(given: dict[str, Any], known: dict[str, tuple[str, Reader]]) -> dict[str, Any]:
    """The settings that were given, under the names that the code has for them."""
    found = {}
    for name, value in given.items():
        if name not in known:
            raise InvalidInput(f"unknown setting {name!r}, expected {', '.join(known)}")
        field, reader = known[name]
        try:
            found[field] = reader(value)
        except InvalidInput as error:
            raise InvalidInput(f"{name}: {error}") from error
    return found


def _tier(given: dict[str, Any]) -> PlannedTier:
    address = given.pop("store", None)
    if not isinstance(address, str):
        raise InvalidInput('a tier needs its store\'s address, such as store = "memory://4GiB"')
    settings = {"local": address.partition(":")[0].partition("?")[0] == "memory", **_read(given, _OF_A_TIER)}
    return PlannedTier(address, TierSettings(**settings))


def _plan(whole: dict[str, Any], tiers: Any) -> HierarchyPlan:
    if not isinstance(tiers, list) or not tiers or not all(isinstance(tier, dict) for tier in tiers):
        raise InvalidInput('a hierarchy needs tiers, the nearest first: [[tier]] with store = "memory://4GiB", ...')
    settings = HierarchySettings(**_read(whole, _OF_THE_WHOLE))
    planned = []
    for number, tier in enumerate(tiers, 1):
        try:
            planned.append(_tier(dict(tier)))
        except InvalidInput as error:
            raise InvalidInput(f"tier {number}: {error}") from error
    return HierarchyPlan(tuple(planned), settings)


def read_file(path: Path) -> HierarchyPlan:
    """The plan in a TOML file.

    Raises:
        InvalidInput: it cannot be read, or something in it is not what was expected, which the message names.
    """
    try:
        content = tomllib.loads(read_bounded(path).decode("utf-8"))
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} is not TOML: {error}") from error
    tiers = content.pop("tier", None)
    try:
        return _plan(content, tiers)
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error}") from error


def read_options(options: list[tuple[str, str]], where: str) -> HierarchyPlan:
    """The plan in the options of ``tiers:?tier=...&tier=...&promote=second-hit``; tiers have their defaults there.

    Raises:
        InvalidInput: as ``read_file``.
    """
    whole = {name: value for name, value in options if name != "tier"}
    tiers = [{"store": value} for name, value in options if name == "tier"]
    if not tiers:
        raise InvalidInput(f"store {where!r}: expected tiers:///FILE.toml, or tiers:?tier=ADDRESS&tier=ADDRESS")
    try:
        return _plan(whole, tiers)
    except InvalidInput as error:
        raise InvalidInput(f"store {where!r}: {error}") from error
