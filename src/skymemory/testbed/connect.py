"""From a run directory (or a plan) to a store: how engines, verbs and demos reach a running constellation."""

from __future__ import annotations

import time
from pathlib import Path

from skymemory.constellation.presets import preset_named
from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput
from skymemory.keys import KeyRing
from skymemory.protocol.motion import STRATEGY_CODES
from skymemory.protocol.pointing import ACCESS_MODES, Access
from skymemory.store.base import Store
from skymemory.store.constellation import ConstellationStore
from skymemory.store.sealed import SealedStore
from skymemory.store.shared_index import SharedIndex
from skymemory.store.sky_settings import SkySettings
from skymemory.testbed.key_file import KeyFollower
from skymemory.testbed.plan import ConstellationPlan
from skymemory.testbed.run_directory import RunDirectory
from skymemory.testbed.wiring import client_of, clock_of, shell_of, sky_of


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


def sealed(store: Store, keys: KeyFollower) -> SealedStore:
    """The store with its values sealed for the tenant of these keys."""

    def ring() -> KeyRing:
        keys.refresh()
        return keys.authority.ring

    return SealedStore(store, ring, time.time)


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
