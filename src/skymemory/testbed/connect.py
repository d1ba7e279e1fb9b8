"""From a run directory (or a plan) to a store: how engines, verbs and demos reach a running constellation."""

from __future__ import annotations

from pathlib import Path
from typing import cast
from urllib.parse import parse_qsl

from skymemory.errors import InvalidInput
from skymemory.protocol.motion import STRATEGY_CODES
from skymemory.store.base import Store
from skymemory.store.constellation import ConstellationStore
from skymemory.store.memory import MemoryStore
from skymemory.store.shared_index import SharedIndex
from skymemory.store.sky_settings import SkySettings
from skymemory.testbed.plan import ACCESS_MODES, ConstellationPlan
from skymemory.testbed.run_directory import RunDirectory
from skymemory.testbed.wiring import Access, client_of, shell_of, sky_of
from skymemory.units import parse_size


def expected_round_trip_s(plan: ConstellationPlan, access: str) -> float:
    """Round trip to the farthest server, by the geometry the plan holds packets for."""
    shell, sky = shell_of(plan), sky_of(plan)
    placement = sky.placement(STRATEGY_CODES[plan.strategy], plan.servers)  # type: ignore[index]
    offsets = [plan.torus.delta(plan.centre, satellite) for satellite in placement.box_satellites()]
    if access == "los":
        one_way_s = max(shell.slant_one_way_s(*offset) for offset in offsets)
    else:
        slot_s, plane_s = shell.isl_one_way_s("slot"), shell.isl_one_way_s("plane")
        one_way_s = shell.slant_one_way_s(0, 0) + max(abs(x) * slot_s + abs(y) * plane_s for x, y in offsets)
    return 2 * one_way_s * plan.delay_scale


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
    chosen = access or plan.access
    if chosen not in ACCESS_MODES:
        raise InvalidInput(f"access {chosen!r}: expected one of {', '.join(ACCESS_MODES)}")
    index = SharedIndex(directory.index_path) if use_index else None
    store = store_of(plan, access=chosen, index=index, give_up_s=give_up_s)
    store.synchronise()
    return store


def open_store(where: str = "constellation") -> Store:
    """A store by its address.

    ``memory`` or ``memory://4GiB`` (in this process), ``constellation`` (this user's, as started by
    ``skymemory constellation up``), ``constellation:///run/dir`` or
    ``constellation:///run/dir?index=no&access=gateway``.
    """
    kind, _, rest = where.partition("://")
    place, _, query = rest.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if kind == "memory":
        _no_others(options, (), where)
        return MemoryStore(parse_size(place)) if place else MemoryStore()
    if kind == "constellation":
        _no_others(options, ("index", "access"), where)
        use_index = options.get("index", "yes") not in ("no", "0", "off")
        return open_constellation(Path(place) if place else None, use_index=use_index, access=options.get("access"))
    raise InvalidInput(
        f"store {where!r}: expected memory[://SIZE] or constellation[://RUN_DIR][?index=no&access=gateway]"
    )


def _no_others(options: dict[str, str], known: tuple[str, ...], where: str) -> None:
    for option in options:
        if option not in known:
            raise InvalidInput(f"store {where!r}: unknown option {option!r}, expected {', '.join(known) or 'none'}")


def store_of(
    plan: ConstellationPlan, *, access: str = "los", index: SharedIndex | None = None, give_up_s: float = 0.8
) -> ConstellationStore:
    """The store over a constellation that runs by ``plan``."""
    client = client_of(plan, cast(Access, access), expected_round_trip_s(plan, access), give_up_s)
    settings = SkySettings(
        plan.strategy, plan.servers, plan.chunk_bytes, plan.memory_per_satellite_bytes, plan.memory_policy.lazy
    )  # fmt: skip
    return ConstellationStore(client, sky_of(plan), settings, index=index)
