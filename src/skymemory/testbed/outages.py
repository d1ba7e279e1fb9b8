"""Satellites that an operator has disabled: a file in the run directory that the hosts read when they are told to.

What should be dead is written down, so a host that starts later knows it too; SIGHUP says that it has changed.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Collection, Iterable

from skymemory.constellation.torus import SatelliteId
from skymemory.errors import ConstellationError, InvalidInput
from skymemory.files import read_bounded, write_private
from skymemory.testbed.child import send_signal
from skymemory.testbed.control import ping_all
from skymemory.testbed.plan import ConstellationPlan
from skymemory.testbed.run_directory import RunDirectory

_MAX_FILE_BYTES = 1 << 22
_PATIENCE_S = 3.0
_PING_S = 0.15
"""A satellite that does not answer in this (and a round trip) is taken to be dead while we wait for it to be."""


def read_outages(directory: RunDirectory) -> frozenset[SatelliteId]:
    """The satellites that are to be dead. Raises ``InvalidInput`` for a damaged file."""
    path = directory.outages_path
    try:
        found = json.loads(read_bounded(path, _MAX_FILE_BYTES))
    except FileNotFoundError:
        return frozenset()
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path}: not JSON: {error}; `skymemory constellation enable --all` replaces it") from error
    match found:
        case {"disabled": list(pairs)} if all(_is_pair(pair) for pair in pairs):
            return frozenset(SatelliteId(*pair) for pair in pairs)
    raise InvalidInput(f"{path}: expected an object with a list of [plane, slot] as disabled")


def _is_pair(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(type(part) is int and part >= 0 for part in pair)


def disable(directory: RunDirectory, satellites: Collection[SatelliteId]) -> frozenset[SatelliteId]:
    """Let these die: they neither answer nor forward, and what they hold is lost. All that are dead then.

    Raises:
        InvalidInput: a satellite that the constellation has not, or one whose host runs on another computer.
        ConstellationError: a host did not do as it was told.
    """
    return _change(directory, satellites, alive=False)


def enable(directory: RunDirectory, satellites: Collection[SatelliteId] | None) -> frozenset[SatelliteId]:
    """Let these (None: all) come back, empty. All that are still dead then. Raises as ``disable``."""
    return _change(directory, satellites, alive=True)


def _change(directory: RunDirectory, satellites: Collection[SatelliteId] | None, alive: bool) -> frozenset[SatelliteId]:
    with directory.locked():
        plan = directory.running_plan()
        if satellites is None:
            changed: Collection[SatelliteId] = plan.torus.satellites()
            before: frozenset[SatelliteId] = frozenset()
        else:
            changed, before = satellites, read_outages(directory)
        hosts = _hosts_of(plan, changed, directory, everywhere=satellites is None)
        dead = before - set(changed) if alive else before | set(changed)
        write_private(directory.outages_path, json.dumps({"disabled": sorted(dead)}) + "\n")
        living = directory.living()
        for host in hosts & living.keys():
            send_signal(living[host], signal.SIGHUP)
        _await(plan, [one for host in hosts & living.keys() for one in _mine(plan, host) if one in changed], alive)
    return frozenset(dead)


def _mine(plan: ConstellationPlan, host: str) -> Iterable[SatelliteId]:
    return [satellite for satellite, _ in plan.addresses_of(plan.host_named(host))]


def _hosts_of(
    plan: ConstellationPlan, satellites: Collection[SatelliteId], directory: RunDirectory, everywhere: bool
) -> set[str]:
    """The hosts that run these satellites, all of them on this computer."""
    unknown = [one for one in satellites if one not in plan.torus]
    if unknown:
        raise InvalidInput(
            f"no satellite {unknown[0].plane},{unknown[0].slot}: expected plane 0 to {plan.planes - 1} and slot 0 to "
            f"{plan.slots_per_plane - 1}"
        )
    hosts = {host.name for host in plan.hosts if not set(_mine(plan, host.name)).isdisjoint(satellites)}
    elsewhere = [
        host for host in hosts if directory.read_record(host) is None and not plan.host_named(host).is_loopback
    ]
    if elsewhere and not everywhere:
        raise InvalidInput(
            f"{elsewhere[0]} runs on another computer: say this there, with the run directory of its host"
        )
    return hosts - set(elsewhere)


def _await(plan: ConstellationPlan, satellites: list[SatelliteId], alive: bool) -> None:
    """Until they all answer, or none does."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while satellites:
        answers = ping_all(plan, _PING_S, satellites)
        satellites = [one for one in satellites if (answers[one] is not None) != alive]
        if satellites and time.monotonic() > deadline_s:
            first = satellites[0]
            raise ConstellationError(
                f"{len(satellites)} satellites {'do not answer' if alive else 'still answer'}, the first is plane "
                f"{first.plane}, slot {first.slot}: see the log of its host in the run directory"
            )
