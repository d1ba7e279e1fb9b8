"""Stores by address: one tier, or a hierarchy of tiers from a TOML file or an address."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from skymemory.cache.tiers.store import HierarchySettings, TieredStore
from skymemory.cache.tiers.tier import TierSettings
from skymemory.circuit_breaker import BreakerConfig
from skymemory.constellation.visibility import GroundHost
from skymemory.errors import InvalidInput, SkyMemoryError, quoted
from skymemory.eviction import DEFAULT_POLICY
from skymemory.files import check_readable, read_toml
from skymemory.kv.value import is_sound_block
from skymemory.store.base import Store
from skymemory.store.disk import DiskStore
from skymemory.store.host.arena import default_folder
from skymemory.store.host.client import HostStore
from skymemory.store.host.server import ServedArena
from skymemory.store.memory import MemoryStore
from skymemory.store.redis import RedisStore
from skymemory.store.wrappers import AdmittingStore, TenantStore
from skymemory.testbed.connect import open_constellation, sealed
from skymemory.testbed.key_file import KeyFollower
from skymemory.units import parse_duration, parse_number, parse_size

EXPECTED = (
    "memory[://SIZE], host:[//SIZE|///FOLDER], disk:///DIRECTORY?budget=SIZE, redis://HOST[:PORT][/DB], "
    "unix:///REDIS.sock, constellation[://RUN_DIR][?index=no&access=gateway&lat=52.5&lon=13.4], tiers:///FILE.toml or "
    "tiers:?tier=ADDRESS&tier=ADDRESS"
)

_PASSWORD = re.compile(r"(://[^/?:@]*:)[^/?]*@")
_YES, _NO = ("yes", "1", "on"), ("no", "0", "off")
_RULES = ("admit", "tenant", "quota", "seal")


def open_store(where: str = "constellation") -> Store:
    """Open a store by its address.

    Single stores (all but ``constellation`` accept ``name=NAME``):

    - ``memory`` or ``memory://4GiB``: in this process; ``?policy=lru``.
    - ``host:`` or ``host:///folder``: memory that another process of this computer shares; ``?timeout=2s``.
    - ``host://4GiB``: shares it from this process; ``?at=FOLDER``, ``&keep=yes`` (values outlive the process),
      ``&policy=lru``.
    - ``disk:///directory?budget=60GiB``: one process at a time; ``&sync=each``, ``&policy=lru``.
    - ``redis://host:6379/0``, ``rediss://host?ca=FILE`` (TLS) or ``unix:///run/redis.sock``: ``?timeout=2s``.
    - ``constellation`` (this user's) or ``constellation:///run/dir``: ``?index=no&access=gateway``, and
      ``&lat=52.5&lon=13.4`` for another place than the plan's.

    Hierarchies, the nearest first: ``tiers:?tier=memory://4GiB&tier=disk:///directory?budget=60GiB`` (an ``&`` within a
    tier's address is ``%26``), or ``tiers:///file.toml``.

    Every address accepts ``?admit=second`` (stores only values offered twice), ``?tenant=NAME&quota=SIZE`` and
    ``?seal=FILE`` (encrypts values with a key file).

    Raises:
        InvalidInput: an invalid address.
        NoConstellation: no constellation runs there.
    """
    return _open(where)


def _open(where: str, is_nearest: bool = False) -> Store:
    """Open a store; ``is_nearest``: as the first of several tiers."""
    kind, place, pairs = _parts(where)
    rules = {name: value for name, value in pairs if name in _RULES}
    options = [(name, value) for name, value in pairs if name not in _RULES]
    if kind == "tiers":
        return _ruled(_open_tiers(place, options, rules, where), rules, where)
    if kind == "host":
        if is_nearest and rules and _is_shared_here(place):
            raise _refused(where, f"its clients would not know of farther tiers: no {', '.join(rules)} here")
        return _ruled(_open_host(place, options, where, is_nearest), rules, where)
    return _ruled(_open_one(kind, place, dict(options), where), rules, where)


def without_password(address: str) -> str:
    return _PASSWORD.sub(r"\1***@", address)


def kinds_of(where: str) -> list[str]:
    """Return the kinds of an address's stores, the nearest first, without opening them."""
    kind, place, pairs = _parts(where)
    if kind != "tiers":
        return [kind]
    options = [(name, value) for name, value in pairs if name not in _RULES]
    plan = read_file(Path(place)) if place else read_options(options, where)
    return [_parts(tier.address)[0] for tier in plan.tiers]


def is_of_one_process(where: str) -> bool:
    """Return True if only the process that opens this address has its values."""
    kind, place, _ = _parts(where)
    return kind in ("memory", "disk", "tiers") or (kind == "host" and _is_shared_here(place))


def host_address(where: str) -> str | None:
    """Return the address that attaches to the arena that this store's process serves; None if it serves none."""
    kind, place, pairs = _parts(where)
    if kind == "tiers":
        options = [(name, value) for name, value in pairs if name not in _RULES]
        plan = read_file(Path(place)) if place else read_options(options, where)
        return next((found for tier in plan.tiers if (found := host_address(tier.address))), None)
    if kind != "host" or not _is_shared_here(place):
        return None
    folder = dict(pairs).get("at")
    return f"host://{folder}" if folder else "host:"


def how_to_share(where: str) -> str:
    """Return in words how several processes use a store of one process."""
    try:
        arena = host_address(where)
    except InvalidInput:  # its file is not here
        arena = None
    listen = "" if arena else " --listen unix:///run/sky.sock"
    return f"serve it by `skymemory store serve '{where}'{listen}`, and give {arena or 'unix:///run/sky.sock'}"


def _is_shared_here(place: str) -> bool:
    return bool(place) and not place.startswith("/")


def _parts(where: str) -> tuple[str, str, list[tuple[str, str]]]:
    head, _, query = where.partition("?")
    kind, _, place = head.partition(":")
    return kind, place.removeprefix("//"), parse_qsl(query, keep_blank_values=True)


def _refused(where: str, why: str) -> InvalidInput:
    return InvalidInput(f"store {quoted(where, 160)}: {why}")


def _ruled(store: Store, rules: dict[str, str], where: str) -> Store:
    """Wrap a store as an address's rules demand: sealed, with a quota, with admission."""
    try:
        if rules.get("admit", "all") not in ("all", "second"):
            raise _refused(where, f"admit={quoted(rules['admit'])}: expected all or second")
        if bool(rules.get("tenant")) != ("quota" in rules):
            raise _refused(where, "expected tenant=NAME&quota=SIZE together")
        # Innermost wrapper first. Admission is asked first, then the quota (of plain bytes); accepted values are
        # sealed.
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
            raise _refused(where, "expected disk:///directory?budget=SIZE[&sync=each]")
        return DiskStore(
            Path(place),
            parse_size(options["budget"]),
            name=_name(kind, options, where),
            policy=options.get("policy", DEFAULT_POLICY),
            sync=options.get("sync", "never"),  # type: ignore[arg-type]
        )
    if kind in ("redis", "rediss", "unix"):
        _no_others(options, ("name", "timeout", "ca") if kind == "rediss" else ("name", "timeout"), where)
        timeout_s = parse_duration(options.get("timeout", "2s"))
        _check_redis(kind, place, where)
        ca = options.get("ca", "")
        if ca:
            check_readable(Path(ca))
        return RedisStore(f"{kind}://{place}", name=_name("redis", options, where), timeout_s=timeout_s, ca=ca)
    if kind == "constellation":
        _no_others(options, ("index", "access", "lat", "lon"), where)
        index = options.get("index", "yes")
        if index not in _YES + _NO:
            raise _refused(where, f"index={quoted(index)}: expected yes or no")
        use_index = index in _YES
        run_dir, ground = Path(place) if place else None, _ground(options, where)
        return open_constellation(run_dir, use_index=use_index, access=options.get("access"), ground=ground)
    if kind == "tcp":
        raise _refused(where, f"write redis://{place} for a store daemon that listens there")
    raise _refused(where, f"expected {EXPECTED}")


_TO_SHARE, _TO_ATTACH = ("at", "keep", "name", "policy"), ("name", "timeout")


def _open_host(place: str, given: list[tuple[str, str]], where: str, is_nearest: bool) -> Store:
    options = dict(given)
    if len(options) < len(given):
        raise _refused(where, "expected each option once")
    if not _is_shared_here(place):
        if options.keys() & (set(_TO_SHARE) - set(_TO_ATTACH)):
            raise _refused(where, "at, keep and policy are the owner's, host://SIZE: attach by host: or host:///FOLDER")
        _no_others(options, _TO_ATTACH, where)
        timeout_s = parse_duration(options.get("timeout", "2s"))
        if timeout_s <= 0.0:
            raise _refused(where, f"timeout={quoted(options['timeout'])}: expected a time above 0, such as 2s")
        name = _name("host", options, where)
        return HostStore(Path(place) if place else default_folder(), name=name, timeout_s=timeout_s)
    if "timeout" in options:
        raise _refused(where, "timeout is a client's, host: or host:///FOLDER: host://SIZE shares memory from here")
    _no_others(options, _TO_SHARE, where)
    keep, at = options.get("keep", "no"), options.get("at", str(default_folder()))
    if keep not in _YES + _NO:
        raise _refused(where, f"keep={quoted(keep)}: expected yes or no")
    if not at.startswith("/"):
        raise _refused(where, f"at={quoted(at)}: expected a folder from the root on, such as /dev/shm/sky")
    try:
        budget_bytes = parse_size(place)
    except InvalidInput as error:
        raise _refused(where, f"{error}; host:///FOLDER attaches to the owner of a folder") from error
    return ServedArena(
        Path(at),
        budget_bytes,
        name=_name("host", options, where),
        policy=options.get("policy", DEFAULT_POLICY),
        keep=keep in _YES,
        is_nearest=is_nearest,
    )


def _ground(options: dict[str, str], where: str) -> GroundHost | None:
    if "lat" not in options and "lon" not in options:
        return None
    try:
        return GroundHost(parse_number(options["lat"]), parse_number(options["lon"]))
    except (KeyError, ValueError) as error:
        raise _refused(where, "expected lat=DEGREES_NORTH&lon=DEGREES_EAST together") from error
    except InvalidInput as error:
        raise _refused(where, f"{error}") from error


def _check_redis(kind: str, place: str, where: str) -> None:
    """Check the database: redis-py takes an invalid database for 0."""
    if kind == "unix":
        if not place:
            raise _refused(where, "expected unix:///REDIS.sock")
        return
    _, _, database = place.partition("/")
    if database and not (database.isascii() and database.isdigit()):
        raise _refused(where, f"database {quoted(database)}: expected {kind}://HOST[:PORT][/DB], DB a number")


def _name(kind: str, options: dict[str, str], where: str) -> str:
    name = options.get("name", kind)
    if not name.isidentifier():
        raise _refused(where, f"name={quoted(name)}: expected letters, digits and _, as in metric names")
    return name


def _no_others(options: dict[str, str], known: tuple[str, ...], where: str) -> None:
    for option in options:
        if option not in known:
            raise _refused(where, f"unknown option {quoted(option)}, expected {', '.join(known)}")


def _open_tiers(place: str, options: list[tuple[str, str]], rules: dict[str, str], where: str) -> Store:
    """Open a hierarchy of tiers, or none of them after an error."""
    if place and options:
        raise _refused(where, f"unknown option {quoted(options[0][0])}: write it into the file")
    plan = read_file(Path(place)) if place else read_options(options, where)
    if "seal" in rules and any(tier.settings.verify for tier in plan.tiers):
        raise _refused(where, "seal and verify exclude each other: sealed values are not blocks")
    tiers: list[tuple[Store, TierSettings]] = []
    try:
        for tier in plan.tiers:
            if _parts(tier.address)[0] == "tiers":
                raise InvalidInput(f"{tier.address!r} is a hierarchy itself: list its tiers instead")
            is_nearest = not tiers and len(plan.tiers) > 1
            if tiers and host_address(tier.address):
                raise InvalidInput(f"{tier.address!r} shares memory alone or as the first tier: list it first")
            tiers.append((_open(tier.address, is_nearest), tier.settings))
        return TieredStore(tiers, plan.settings)
    except BaseException as error:
        for store, _ in tiers:
            store.close()
        if isinstance(error, SkyMemoryError):
            raise type(error)(f"tier {_number(plan, tiers)}{error}") from error
        raise


def _number(plan: HierarchyPlan, opened: list[tuple[Store, TierSettings]]) -> str:
    return f"{len(opened) + 1}: " if len(opened) < len(plan.tiers) else ""


@dataclass(frozen=True, slots=True)
class PlannedTier:
    address: str
    settings: TierSettings


@dataclass(frozen=True, slots=True)
class HierarchyPlan:
    """Hierarchy of tiers, the nearest first, as in a TOML file. Only `store` is required::

    promote = "second hit"          # always | second hit | never
    demote = true
    write_back = true
    load_deadline = "10s"
    close_deadline = "10s"
    outbound = "256MiB"             # values in transfer between tiers
    in_flight = "256MiB"            # expected bytes of loads from tiers with threads

    [[tier]]
    store = "memory://4GiB"

    [[tier]]
    store = "disk:///var/cache/skymemory?budget=60GiB"

    [[tier]]
    store = "constellation"
    ask_deadline = "500ms"          # lookups, leases, pins, deletions
    load_deadline = "5s"
    store_deadline = "10s"
    threads = 2
    local = false                   # true (default for memory, host://SIZE): in the caller's thread, no deadlines
    verify = "blocks"               # delete corrupt blocks (only if all values are KV blocks)
    breaker = { failures = 3, first_wait = "500ms", last_wait = "30s" }
    """

    tiers: tuple[PlannedTier, ...]
    settings: HierarchySettings


Reader = Callable[[Any], Any]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidInput(f"expected text in quotes, got {value!r}")
    return value


def _switch(value: Any) -> bool:
    switch = value if isinstance(value, bool) else {"yes": True, "no": False}.get(str(value))
    if switch is None:
        raise InvalidInput(f"expected true or false (in an address: yes or no), got {value!r}")
    return switch


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


def _read(table: dict[str, Any], known: dict[str, tuple[str, Reader]]) -> dict[str, Any]:
    """Return a table's settings by field name; ``known`` has the field and parser of each key."""
    settings = {}
    for name, value in table.items():
        if name not in known:
            raise InvalidInput(f"unknown setting {name!r}, expected {', '.join(known)}")
        field, reader = known[name]
        try:
            settings[field] = reader(value)
        except InvalidInput as error:
            raise InvalidInput(f"{name}: {error}") from error
    return settings


def _tier(table: dict[str, Any]) -> PlannedTier:
    address = table.pop("store", None)
    if not isinstance(address, str):
        raise InvalidInput('a tier without store; expected an address, such as store = "memory://4GiB"')
    kind, place, _ = _parts(address)
    is_here = kind == "memory" or (kind == "host" and _is_shared_here(place))
    settings = {"local": is_here, **_read(table, _OF_A_TIER)}
    return PlannedTier(address, TierSettings(**settings))


def _plan(table: dict[str, Any], tiers: Any) -> HierarchyPlan:
    if not isinstance(tiers, list) or not tiers or not all(isinstance(tier, dict) for tier in tiers):
        raise InvalidInput('no tiers; expected some, the nearest first: [[tier]] with store = "memory://4GiB", ...')
    settings = HierarchySettings(**_read(table, _OF_THE_WHOLE))
    planned = []
    for number, tier in enumerate(tiers, 1):
        try:
            planned.append(_tier(dict(tier)))
        except InvalidInput as error:
            raise InvalidInput(f"tier {number}: {error}") from error
    return HierarchyPlan(tuple(planned), settings)


def read_file(path: Path) -> HierarchyPlan:
    """Read the plan in a TOML file."""
    content = read_toml(path)
    tiers = content.pop("tier", None)
    try:
        return _plan(content, tiers)
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error}") from error


def read_options(options: list[tuple[str, str]], where: str) -> HierarchyPlan:
    """Read the plan in ``tiers:?tier=...&tier=...&promote=second-hit``; tiers have default settings."""
    settings = {name: value for name, value in options if name != "tier"}
    tiers = [{"store": value} for name, value in options if name == "tier"]
    if not tiers:
        raise _refused(where, "expected tiers:///FILE.toml, or tiers:?tier=ADDRESS&tier=ADDRESS")
    try:
        return _plan(settings, tiers)
    except InvalidInput as error:
        raise _refused(where, f"{error}") from error
