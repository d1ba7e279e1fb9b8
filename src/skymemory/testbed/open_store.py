"""From an address to a store: one tier, or several as one. Engines, verbs and benchmarks open what users name."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qsl

from skymemory.cache.tier import TierSettings
from skymemory.cache.tiers import TieredStore
from skymemory.errors import InvalidInput, SkyMemoryError
from skymemory.store.admission import AdmittingStore
from skymemory.store.base import Store
from skymemory.store.disk.store import DiskStore
from skymemory.store.memory import MemoryStore
from skymemory.store.policies import DEFAULT_POLICY
from skymemory.store.quota import TenantStore
from skymemory.store.redis.store import RedisStore
from skymemory.testbed.connect import open_constellation, sealed
from skymemory.testbed.hierarchy_plan import HierarchyPlan, read_file, read_options
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

    ``memory`` or ``memory://4GiB`` (in this process; ``?policy=lru`` and the others of ``store.policies``),
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
        )  # fmt: skip
    if kind == "disk":
        _no_others(options, ("budget", "name", "policy", "sync"), where)
        if not place or "budget" not in options:
            raise InvalidInput(f"store {where!r}: expected disk:///directory?budget=SIZE[&sync=each]")
        return DiskStore(
            Path(place), parse_size(options["budget"]), name=_name(kind, options, where),
            policy=options.get("policy", DEFAULT_POLICY), sync=options.get("sync", "never"),  # type: ignore[arg-type]
        )  # fmt: skip
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
