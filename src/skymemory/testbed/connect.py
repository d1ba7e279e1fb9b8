"""Stores over running constellations; configuration of satellites and clients from a plan."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from skymemory.constellation.orbit import Shell
from skymemory.constellation.torus import SatelliteId
from skymemory.constellation.visibility import GroundHost, plane_move_period_s, slot_move_period_s
from skymemory.errors import ConstellationError, InvalidInput, cannot_listen
from skymemory.keys import KeyRing
from skymemory.placement.fan_out import BEAM_BYTES_PER_S, FanOut, round_trips_of
from skymemory.placement.locate import Moves
from skymemory.protocol.auth import Authority
from skymemory.protocol.client.gateway import Access, access_named
from skymemory.protocol.client.machine import ClientConfig
from skymemory.protocol.clock import STRATEGY_CODES, MoveClock, SkyMap
from skymemory.store.base import Store
from skymemory.store.sealed import SealedStore
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.store.sky.store import ConstellationStore, SkySettings
from skymemory.testbed.key_file import KeyFollower
from skymemory.testbed.plan import ConstellationPlan, HostShare, follower_of
from skymemory.testbed.run_directory import RunDirectory
from skymemory.transport.faults import FaultInjector
from skymemory.transport.udp_client import UdpClient
from skymemory.transport.udp_host import HostSpec
from skymemory.transport.udp_socket import source_address


def expected_round_trip_s(
    plan: ConstellationPlan, access: str, now_s: float | None = None, ground: GroundHost | None = None
) -> float:
    """Return the round trip to the farthest satellite of the box."""
    round_trip_s, moves = _round_trips(plan, access, now_s, ground)
    placement = sky_of(plan).placement(STRATEGY_CODES[plan.strategy], plan.servers)  # type: ignore[index]
    return max(map(round_trip_s, placement.box_satellites(moves)))


def _round_trips(
    plan: ConstellationPlan, access: str, now_s: float | None = None, ground: GroundHost | None = None
) -> tuple[Callable[[SatelliteId], float], Moves]:
    """Return a function that estimates a satellite's round trip in seconds, and the box's moves now."""
    # The delay follows the path of a packet: a beam to each satellite (ideal), or a beam to the gateway and links
    # from there. An onboard host has no beam.
    shell, sky, clock = shell_of(plan), sky_of(plan), clock_of(plan)
    sky_s, moves = 0.0, (0, 0)
    if plan.time_scale:
        now_s = time.time() if now_s is None else now_s
        sky_s, moves = clock.sky_s(now_s), clock.moves(now_s)
    sight, centre = plan.sight(ground), sky.centre_at(moves)
    access, in_sight = access_named(access), sight.in_sight(centre, sky_s)
    gateway = plan.torus.living(centre) if access == "onboard" or not in_sight else in_sight[0]
    # With no satellite in sight, assume the beam to the next that rises: it has the maximum length.
    beam_s = sight.one_way_s(gateway, centre, sky_s) if in_sight else sight.longest_s
    if access == "onboard":
        beam_s = 0.0

    def round_trip_s(satellite: SatelliteId) -> float:
        if access == "ideal" or (access == "hybrid" and satellite in in_sight):
            return 2 * sight.one_way_s(satellite, centre, sky_s) * plan.delay_scale
        links_s = shell.route_one_way_s(plan.torus, gateway, satellite)
        return 2 * (beam_s + links_s) * plan.delay_scale

    return round_trip_s, moves


def check_access(plan: ConstellationPlan, access: str) -> Access:
    """Return ``access`` if clients of this plan can use it: boxes move differently on board and on the ground."""
    chosen = access_named(access)
    if (chosen == "onboard") != (plan.access == "onboard"):
        raise InvalidInput(
            f"access {access!r} to a constellation with access {plan.access!r}: its box moves differently; start it "
            f"with `skymemory constellation up --access {access}`"
        )
    return chosen


def open_constellation(
    run_dir: Path | None = None,
    *,
    use_index: bool = True,
    access: str | None = None,
    give_up_s: float = 0.8,
    ground: GroundHost | None = None,
) -> ConstellationStore:
    """Return the store over the constellation of ``run_dir``, to be closed by the caller.

    Without ``use_index`` satellites are queried. ``ground`` replaces the host's place; the box stays.

    Raises:
        NoConstellation: no constellation runs there.
        InvalidInput: an access that does not fit the plan's, or a place although the preset is no orbit.
    """
    directory = RunDirectory(run_dir)
    plan = directory.running_plan()
    chosen = check_access(plan, access or plan.access)
    index = SharedIndex(directory.index_path) if use_index else None
    store = store_of(plan, access=chosen, index=index, give_up_s=give_up_s, ground=ground)
    store.synchronise()
    return store


def sealed(store: Store, keys: KeyFollower) -> SealedStore:
    """Return ``store`` with its values encrypted by a file's current keys."""

    def ring() -> KeyRing:
        keys.refresh()
        return keys.authority.ring

    return SealedStore(store, ring, time.time)


def store_of(
    plan: ConstellationPlan,
    *,
    access: str | None = None,
    index: SharedIndex | None = None,
    give_up_s: float = 0.8,
    ground: GroundHost | None = None,
) -> ConstellationStore:
    access = access or plan.access
    expected_s = expected_round_trip_s(plan, access, ground=ground)
    client = client_of(plan, check_access(plan, access), expected_s, give_up_s, ground)
    return ConstellationStore(client, sky_of(plan, ground), settings_of(plan, access, ground), index=index)


def settings_of(plan: ConstellationPlan, access: str | None = None, ground: GroundHost | None = None) -> SkySettings:
    memory_bytes, lazy = plan.memory_per_satellite_bytes, plan.memory_policy.lazy
    fan_out = fan_out_of(plan, access or plan.access, ground) if plan.by_size else None
    return SkySettings(plan.strategy, plan.servers, plan.chunk_bytes, memory_bytes, lazy, plan.replicas, fan_out)


def fan_out_of(plan: ConstellationPlan, access: str, ground: GroundHost | None = None) -> FanOut:
    """Return what decides over how many servers values are spread."""
    sky, code = sky_of(plan), STRATEGY_CODES[plan.strategy]  # type: ignore[index]
    round_trip_s, moves = _round_trips(plan, access, ground=ground)
    # With a beam for each satellite several satellites transmit concurrently; through a gateway all share its beam.
    # The plan's delay scale applies to the whole link: without delays it transmits as fast as this computer.
    beams = access_named(access) in ("ideal", "hybrid")
    chunk_s = plan.chunk_bytes / BEAM_BYTES_PER_S * plan.delay_scale if beams else 0.0
    if plan.links is not None and plan.links.down_bit_s is not None and beams:
        chunk_s = plan.chunk_bytes / plan.links.bytes_per_s("down")
    round_trips_s = round_trips_of(partial(sky.placement, code), plan.servers, moves, round_trip_s, plan.replicas)
    return FanOut(round_trips_s, chunk_s, plan.memory_per_satellite_bytes, plan.replicas)


BIND_SETTING = "SKYMEMORY_BIND"
_LEAST_ROUND_TRIPS = 3


def shell_of(plan: ConstellationPlan) -> Shell:
    return plan.constellation.shell


def sky_of(plan: ConstellationPlan, ground: GroundHost | None = None) -> SkyMap:
    shell = shell_of(plan)
    links_s = shell.isl_one_way_s("slot"), shell.isl_one_way_s("plane")
    return SkyMap(plan.torus, plan.centre, *links_s, plan.sight(ground))


def clock_of(plan: ConstellationPlan) -> MoveClock:
    """Return the clock of the box's moves: by the host's ground track on real orbits, else by the shell's periods."""
    shell = shell_of(plan)
    pushed = (plan.pushed_slot_moves, plan.pushed_plane_moves)
    if plan.access == "onboard":
        return MoveClock(plan.epoch_s, pushed=pushed)
    periods_s = slot_move_period_s(shell), plane_move_period_s(shell)
    return MoveClock(plan.epoch_s, *periods_s, plan.time_scale, pushed, plan.ground.track(plan.constellation))


def tolerated_skew_s(plan: ConstellationPlan) -> float:
    """Return half a slot move: satellites then differ by at most a move."""
    if plan.time_scale == 0 or plan.access == "onboard":
        return math.inf
    return slot_move_period_s(shell_of(plan)) / plan.time_scale / 2


def host_spec(
    plan: ConstellationPlan, host: HostShare, listen: str | None = None, authority: Authority | None = None
) -> HostSpec:
    """Return the configuration of a host process; ``listen`` replaces the address to bind."""
    mine = {satellite: (listen or ip, port) for satellite, (ip, port) in plan.addresses_of(host)}
    faults = plan.faults
    return HostSpec(
        mine=mine,
        everyone=plan.addresses(),
        sky=sky_of(plan),
        shell=shell_of(plan),
        clock=clock_of(plan),
        memory_bytes=plan.memory_per_satellite_bytes,
        delay_scale=plan.delay_scale,
        links=plan.links,
        sight_at=plan.sight if plan.constellation.fixed_centre is None else None,
        replacement=plan.memory_policy.replacement,
        eviction=plan.memory_policy.satellites(plan.replicas),
        onboard=plan.torus.living(plan.centre) if plan.access == "onboard" else None,
        faults=FaultInjector(
            loss=faults.loss,
            duplicate=faults.duplicate,
            reorder=faults.reorder,
            corrupt=faults.corrupt,
            seed=faults.seed + plan.hosts.index(host),
        )
        if faults.any
        else None,
        authority=authority,
        unix_at_boot_s=plan.unix_at_boot_s,
    )


def worst_round_trip_s(plan: ConstellationPlan, satellites: Iterable[SatelliteId]) -> float:
    shell, torus = shell_of(plan), plan.torus
    centre = plan.centre
    slants_s = [shell.slant_one_way_s(*torus.delta(centre, satellite), plane=centre.plane) for satellite in satellites]
    return 2 * max(slants_s) * plan.delay_scale


def control_client(plan: ConstellationPlan, give_up_s: float) -> UdpClient:
    """Return a client with direct links to all satellites, so that a dead host hides no other."""
    return client_of(plan, "ideal", worst_round_trip_s(plan, plan.torus.satellites()), give_up_s)


_ANNOUNCED_TO = 3


def client_of(
    plan: ConstellationPlan,
    access: Access,
    expected_rtt_s: float,
    give_up_s: float,
    ground: GroundHost | None = None,
) -> UdpClient:
    keys = follower_of(plan)
    config = ClientConfig(
        ground=int.from_bytes(os.urandom(4), "big") | 1,  # 0 means no ground host
        access=access,
        expected_rtt_s=expected_rtt_s,
        give_up_s=max(give_up_s, _LEAST_ROUND_TRIPS * expected_rtt_s),
        authority=keys.authority if keys is not None else None,
        links=plan.links,
    )
    refresh = keys.refresh if keys is not None else lambda: math.inf
    sky, clock, addresses = sky_of(plan, ground), clock_of(plan), plan.addresses()
    announced = [
        endpoint
        for host in (plan.hosts if ground is not None and plan.delay_scale > 0 else ())
        for endpoint in [address for _, address in plan.addresses_of(host)][:_ANNOUNCED_TO]
    ]
    bind_ip = bind_ip_of(plan)
    try:
        return UdpClient(config, sky, clock, addresses, bind_ip, refresh, ground, announced, plan.unix_at_boot_s)
    except OSError as error:
        raise ConstellationError(cannot_listen(bind_ip, error)) from error


def bind_ip_of(plan: ConstellationPlan) -> str:
    """Return the address for clients to bind: ``$SKYMEMORY_BIND``, else our source address towards the hosts.

    Raises:
        ConstellationError: no route to any host.
    """
    chosen = os.environ.get(BIND_SETTING)
    if chosen:
        return plan.parse_own_ip(chosen, f"${BIND_SETTING}")
    if all(host.is_loopback for host in plan.hosts):
        return "::1" if plan.is_ipv6 else "127.0.0.1"
    ip = source_address(host.ip for host in plan.hosts)
    if ip is None:
        raise ConstellationError(
            f"no route to any host of the constellation, such as {plan.hosts[0].ip}: connect this computer to their "
            f"network, or set ${BIND_SETTING} to the address to bind"
        )
    return ip
