"""From a run directory (or a plan) to a store: how engines, verbs and demos reach a running constellation."""

from __future__ import annotations

import time
from pathlib import Path
from urllib.parse import parse_qsl

from skymemory.constellation.presets import preset_named
from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput
from skymemory.keys import KeyRing
from skymemory.protocol.motion import STRATEGY_CODES
from skymemory.protocol.pointing import ACCESS_MODES, Access
from skymemory.store.admission import AdmittingStore
from skymemory.store.base import Store
from skymemory.store.constellation import ConstellationStore
from skymemory.store.disk.store import DiskStore
from skymemory.store.memory import MemoryStore
from skymemory.store.policies import DEFAULT_POLICY
from skymemory.store.quota import TenantStore
from skymemory.store.redis.store import RedisStore
from skymemory.store.sealed import SealedStore
from skymemory.store.shared_index import SharedIndex
from skymemory.store.sky_settings import SkySettings
from skymemory.testbed.key_file import KeyFollower
from skymemory.testbed.plan import ConstellationPlan
from skymemory.testbed.run_directory import RunDirectory
from skymemory.testbed.wiring import client_of, clock_of, shell_of, sky_of
from skymemory.units import parse_duration, parse_size


def expected_round_trip_s(plan: ConstellationPlan, access: str, now_s: float | None = None) -> float:
    """Round trip to the farthest server, by the geometry of now that the plan holds packets for."""
    shell, sky, clock = shell_of(plan), sky_of(plan), clock_of(plan)
    sky_s, moves = 0.0, (0, 0)
    if plan.time_scale:
        now_s = time.time() if now_s is None else now_s
        sky_s, moves = clock.sky_s(now_s), clock.moves(now_s)
    sight, centre = plan.ground.sight(preset_named(plan.preset)), sky.centre_at(moves)
    seen = sight.in_sight(centre, sky_s) or (centre,)
    gateway = centre if access == "onboard" else seen[0]
    beam_s = 0.0 if access == "onboard" else sight.one_way_s(gateway, centre, sky_s)
    slot_s, plane_s = shell.isl_one_way_s("slot"), shell.isl_one_way_s("plane")

    def one_way_s(satellite: SatelliteId) -> float:
        if access == "los" or (access == "hybrid" and satellite in seen):
            return sight.one_way_s(satellite, centre, sky_s)
        slots, planes = plan.torus.delta(gateway, satellite)
        return beam_s + abs(slots) * slot_s + abs(planes) * plane_s

    placement = sky.placement(STRATEGY_CODES[plan.strategy], plan.servers)  # type: ignore[index]
    return 2 * max(one_way_s(satellite) for satellite in placement.box_satellites(moves)) * plan.delay_scale


def check_access(plan: ConstellationPlan, access: str) -> Access:
    """``access`` if clients of this plan can have it.

    Raises:
        InvalidInput: no such mode; or one is on board and the other on the ground, where the box moves otherwise.
    """
    found = next((mode for mode in ACCESS_MODES if mode == access), None)
    if found is None:
        raise InvalidInput(f"access {access!r}: expected one of {', '.join(ACCESS_MODES)}")
    if (found == "onboard") != (plan.access == "onboard"):
        raise InvalidInput(
            f"access {access!r} to a constellation whose plan says {plan.access!r}: the box of a host on board stands "
            "still, that of one on the ground moves; start it with `skymemory constellation up --access ...`"
        )
    return found


def open_constellation(
    run_dir: Path | None = None,
    *,
    use_index: bool = True,
    access: str | None = None,
    give_up_s: float = 0.8,
) -> ConstellationStore:
    """The store over the constellation of ``run_dir`` (default: this user's).

    ``use_index=False`` does without the local index, as after its loss: the satellites are asked instead.
    ``access`` overrides the plan's. Close it after use.

    Raises:
        NoConstellation: none is running there.
    """
    directory = RunDirectory(run_dir)
    plan = directory.running_plan()
    chosen = check_access(plan, access or plan.access)
    index = SharedIndex(directory.index_path) if use_index else None
    store = store_of(plan, access=chosen, index=index, give_up_s=give_up_s)
    store.synchronise()
    return store


_RULES = ("admit", "tenant", "quota", "seal")
"""Options that say what of the writes is stored, and how, whatever the store is."""


def open_store(where: str = "constellation") -> Store:
    """A store by its address.

    ``memory`` or ``memory://4GiB`` (in this process; ``?policy=lru`` and the others of ``store.policies``),
    ``disk:///directory?budget=60GiB`` (one process at a time; ``&sync=each`` for power cuts, ``&policy=`` as above),
    ``redis://host:6379/0`` (``?timeout=2s``), ``constellation`` (this user's, as started by ``skymemory constellation
    up``), ``constellation:///run/dir`` or ``constellation:///run/dir?index=no&access=gateway``. Each may end in
    ``?admit=second`` (what is offered once is not stored), ``?tenant=NAME&quota=SIZE`` (so many bytes at most for this
    tenant) and ``?seal=FILE`` (values are sealed with the tenant's keys in that file: `skymemory keys new`).
    """
    address, _, query = where.partition("?")
    kind, _, place = address.partition("://")
    options = dict(parse_qsl(query, keep_blank_values=True))
    rules: dict[str, str] = {name: options.pop(name) for name in _RULES if name in options}
    return _ruled(_bare(kind, place, options, where), rules, where)


def _ruled(store: Store, rules: dict[str, str], where: str) -> Store:
    """The store behind its rules about writes."""
    try:
        if rules.get("admit", "all") not in ("all", "second"):
            raise InvalidInput(f"store {where!r}: admit={rules['admit']}: expected all or second")
        if ("tenant" in rules) != ("quota" in rules):
            raise InvalidInput(f"store {where!r}: a quota is a tenant's: expected tenant=NAME&quota=SIZE")
        if "seal" in rules:
            store = sealed(store, KeyFollower(Path(rules["seal"])))
        if "quota" in rules:
            store = TenantStore(store, rules["tenant"], parse_size(rules["quota"]))
        return AdmittingStore(store) if rules.get("admit") == "second" else store
    except InvalidInput:
        store.close()
        raise


def _bare(kind: str, place: str, options: dict[str, str], where: str) -> Store:
    if kind == "memory":
        _no_others(options, ("policy",), where)
        return MemoryStore(parse_size(place or "1GiB"), policy=options.get("policy", DEFAULT_POLICY))
    if kind == "disk":
        _no_others(options, ("budget", "policy", "sync"), where)
        if not place or "budget" not in options:
            raise InvalidInput(f"store {where!r}: expected disk:///directory?budget=SIZE[&sync=each]")
        return DiskStore(
            Path(place), parse_size(options["budget"]), policy=options.get("policy", DEFAULT_POLICY),
            sync=options.get("sync", "never"),  # type: ignore[arg-type]
        )  # fmt: skip
    if kind in ("redis", "rediss"):
        _no_others(options, ("timeout",), where)
        return RedisStore(f"{kind}://{place}", timeout_s=parse_duration(options.get("timeout", "2s")))
    if kind == "constellation":
        _no_others(options, ("index", "access"), where)
        use_index = options.get("index", "yes") not in ("no", "0", "off")
        return open_constellation(Path(place) if place else None, use_index=use_index, access=options.get("access"))
    raise InvalidInput(
        f"store {where!r}: expected memory[://SIZE], disk:///DIRECTORY?budget=SIZE, redis://HOST[:PORT][/DB] or "
        "constellation[://RUN_DIR][?index=no&access=gateway]"
    )


def sealed(store: Store, keys: KeyFollower) -> SealedStore:
    """The store with its values sealed for the tenant of these keys."""

    def ring() -> KeyRing:
        keys.refresh()
        return keys.authority.ring

    return SealedStore(store, ring, time.time)


def _no_others(options: dict[str, str], known: tuple[str, ...], where: str) -> None:
    for option in options:
        if option not in known:
            raise InvalidInput(f"store {where!r}: unknown option {option!r}, expected {', '.join(known) or 'none'}")


def store_of(
    plan: ConstellationPlan, *, access: str | None = None, index: SharedIndex | None = None, give_up_s: float = 0.8
) -> ConstellationStore:
    """The store over a constellation that runs by ``plan``; ``access`` overrides the plan's."""
    access = access or plan.access
    client = client_of(plan, check_access(plan, access), expected_round_trip_s(plan, access), give_up_s)
    settings = SkySettings(
        plan.strategy, plan.servers, plan.chunk_bytes, plan.memory_per_satellite_bytes, plan.memory_policy.lazy,
        plan.replicas,
    )  # fmt: skip
    return ConstellationStore(client, sky_of(plan), settings, index=index)
