"""From an address to a store: one tier, or several as one. Engines, verbs and benchmarks open what users name."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from skymemory.cache.tiers.breaker import BreakerConfig
from skymemory.cache.tiers.store import HierarchySettings, TieredStore
from skymemory.cache.tiers.tier import TierSettings
from skymemory.errors import InvalidInput, SkyMemoryError
from skymemory.eviction.policies import DEFAULT_POLICY
from skymemory.files import read_bounded
from skymemory.kv.value import is_sound_block
from skymemory.store.base import Store
from skymemory.store.disk import DiskStore
from skymemory.store.memory import MemoryStore
from skymemory.store.redis import RedisStore
from skymemory.store.wrappers import AdmittingStore, TenantStore
from skymemory.testbed.connect import open_constellation, sealed
from skymemory.testbed.key_file import KeyFollower
from skymemory.units import parse_duration, parse_size

EXPECTED = (
    "memory[://SIZE], disk:///DIRECTORY?budget=SIZE, redis://HOST[:PORT][/DB], unix:///REDIS.sock, "
    "constellation[://RUN_DIR][?index=no&access=gateway], tiers:///FILE.toml or tiers:?tier=ADDRESS&tier=ADDRESS"
)

_YES, _NO = ("yes", "1", "on"), ("no", "0", "off")
_RULES = ("admit", "tenant", "quota", "seal")
"""Options that say what of the writes is stored, and how, whatever the store is."""


def open_store(where: str = "constellation") -> Store:
    """A store by its address.

    ``memory`` or ``memory://4GiB`` (in this process; ``?policy=lru`` and the others of ``eviction.policies``),
    ``disk:///directory?budget=60GiB`` (one process at a time; ``&sync=each`` for power cuts, ``&policy=`` as above),
    ``redis://host:6379/0`` or ``unix:///run/redis.sock`` (``?timeout=2s``), ``constellation`` (this user's, as started
    by ``skymemory constellation up``), ``constellation:///run/dir`` or
    ``constellation:///run/dir?index=no&access=gateway``. All but the last take ``name=NAME``, what reports and metrics
    call them.

    Several as one: ``tiers:?tier=memory://4GiB&tier=disk:///directory?budget=60GiB``, the nearest first (an ``&``
    within a tier's address is written ``%26``), or ``tiers:///file.toml`` (``hierarchy_plan``).

    Each may end in ``?admit=second`` (what is offered once is not stored), ``?tenant=NAME&quota=SIZE`` (so many bytes
    at most for this tenant) and ``?seal=FILE`` (values are sealed with the tenant's keys in that file, which
    `skymemory keys new` makes).

    Raises:
        InvalidInput: an address that is none; the message says what was expected.
        NoConstellation: none is running there.
    """
    kind, place, pairs = _parts(where)
    rules = {name: value for name, value in pairs if name in _RULES}
    rest = [(name, value) for name, value in pairs if name not in _RULES]
    store = _open_tiers(place, rest, rules, where) if kind == "tiers" else _open_one(kind, place, dict(rest), where)
    return _ruled(store, rules, where)


def _parts(where: str) -> tuple[str, str, list[tuple[str, str]]]:
    """Kind, place and options of an address; the options in order, for tiers have one."""
    head, _, query = where.partition("?")
    kind, _, place = head.partition(":")
    return kind, place.removeprefix("//"), parse_qsl(query, keep_blank_values=True)


def _ruled(store: Store, rules: dict[str, str], where: str) -> Store:
    """The store behind its rules about writes."""
    try:
        if rules.get("admit", "all") not in ("all", "second"):
            raise InvalidInput(f"store {where!r}: admit={rules['admit']}: expected all or second")
        if bool(rules.get("tenant")) != ("quota" in rules):
            raise InvalidInput(f"store {where!r}: a quota is a tenant's: expected tenant=NAME&quota=SIZE")
        if "seal" in rules:
            store = sealed(store, KeyFollower(Path(rules["seal"])))
        if "quota" in rules:
            store = TenantStore(store, rules["tenant"], parse_size(rules["quota"]))
        return AdmittingStore(store) if rules.get("admit") == "second" else store
    except BaseException:
        store.close()
        raise


def _open_one(kind: str, place: str, options: dict[str, str], where: str) -> Store:
    if kind == "memory":
        _no_others(options, ("name", "policy"), where)
        return MemoryStore(
            parse_size(place or "1GiB"), name=_name(kind, options, where), policy=options.get("policy", DEFAULT_POLICY)
        )
    if kind == "disk":
        _no_others(options, ("budget", "name", "policy", "sync"), where)
        if not place or "budget" not in options:
            raise InvalidInput(f"store {where!r}: expected disk:///directory?budget=SIZE[&sync=each]")
        return DiskStore(
            Path(place),
            parse_size(options["budget"]),
            name=_name(kind, options, where),
            policy=options.get("policy", DEFAULT_POLICY),
            sync=options.get("sync", "never"),  # type: ignore[arg-type]
        )
    if kind in ("redis", "rediss", "unix"):
        _no_others(options, ("name", "timeout"), where)
        timeout_s = parse_duration(options.get("timeout", "2s"))
        _check_redis(kind, place, where)
        return RedisStore(f"{kind}://{place}", name=_name("redis", options, where), timeout_s=timeout_s)
    if kind == "constellation":
        _no_others(options, ("index", "access"), where)
        index = options.get("index", "yes")
        if index not in _YES + _NO:
            raise InvalidInput(f"store {where!r}: index={index}: expected yes or no")
        use_index = index in _YES
        return open_constellation(Path(place) if place else None, use_index=use_index, access=options.get("access"))
    raise InvalidInput(f"store {where!r}: expected {EXPECTED}")


def _check_redis(kind: str, place: str, where: str) -> None:
    """redis-py takes what is no database for the first one, and joins the digits of two."""
    if kind == "unix":
        if not place:
            raise InvalidInput(f"store {where!r}: expected unix:///REDIS.sock")
        return
    _, _, database = place.partition("/")
    if database and not (database.isascii() and database.isdigit()):
        raise InvalidInput(f"store {where!r}: database {database!r}: expected {kind}://HOST[:PORT][/DB], DB a number")


def _name(kind: str, options: dict[str, str], where: str) -> str:
    name = options.get("name", kind)
    if not name.isidentifier():
        raise InvalidInput(
            f"store {where!r}: name={name}: expected letters, digits and _, for metrics are called by it"
        )
    return name


def _no_others(options: dict[str, str], known: tuple[str, ...], where: str) -> None:
    for option in options:
        if option not in known:
            raise InvalidInput(f"store {where!r}: unknown option {option!r}, expected {', '.join(known)}")


def _open_tiers(place: str, options: list[tuple[str, str]], rules: dict[str, str], where: str) -> Store:
    """The hierarchy; what was opened before a tier that cannot be is closed again."""
    if place and options:
        raise InvalidInput(f"store {where!r}: unknown option {options[0][0]!r}: write it into the file")
    plan = read_file(Path(place)) if place else read_options(options, where)
    if "seal" in rules and any(tier.settings.verify for tier in plan.tiers):
        raise InvalidInput(f"store {where!r}: sealed values do not look like blocks: seal without verify")
    tiers: list[tuple[Store, TierSettings]] = []
    try:
        for tier in plan.tiers:
            if _parts(tier.address)[0] == "tiers":
                raise InvalidInput(f"{tier.address!r} is a hierarchy itself: name its tiers instead")
            tiers.append((open_store(tier.address), tier.settings))
        return TieredStore(tiers, plan.settings)
    except BaseException as error:
        for store, _ in tiers:
            store.close()
        if isinstance(error, SkyMemoryError):
            raise type(error)(f"tier {_number(plan, tiers)}{error}") from error
        raise


def _number(plan: HierarchyPlan, opened: list[tuple[Store, TierSettings]]) -> str:
    """Which of the plan's tiers it was; nothing where all opened and do not go together."""
    return f"{len(opened) + 1}: " if len(opened) < len(plan.tiers) else ""


@dataclass(frozen=True, slots=True)
class PlannedTier:
    address: str
    settings: TierSettings


@dataclass(frozen=True, slots=True)
class HierarchyPlan:
    """A file of several tiers as one, in TOML: settings of the whole, then ``tiers``, the nearest first.

    All but `store` may be left out::

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
