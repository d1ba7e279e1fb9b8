"""Options of the ground's side of a constellation: where the host is, how it moves, what it sees, how it talks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from skymemory.cli._options import argument
from skymemory.errors import InvalidInput
from skymemory.files import MAX_TABLE_BYTES, read_bounded

if TYPE_CHECKING:
    from skymemory.constellation.trajectory import Waypoint
    from skymemory.testbed.ground import Ground

ACCESS_CHOICES = ("los", "gateway", "onboard", "hybrid")
"""``protocol.pointing.ACCESS_MODES``, spelled out so that the help needs no import of it."""
_DEFAULT_PLACE = (40.0, -75.0)


def _place(text: str) -> tuple[float, float]:
    try:
        latitude_deg, longitude_deg = (float(word) for word in text.split(","))
    except ValueError as error:
        raise InvalidInput(f"{text!r} is no place: expected LATITUDE,LONGITUDE in degrees such as 40,-75") from error
    return latitude_deg, longitude_deg


def add_ground_options(parser: argparse.ArgumentParser) -> None:
    """How satellites are reached, from where."""
    parser.add_argument(
        "--access", choices=ACCESS_CHOICES, default="los",
        help="how the host reaches satellites: a beam to each of the box (los, default), all through the nearest in "
        "sight (gateway), a beam to those in sight and the others through it (hybrid), or it is a satellite (onboard)",
    )  # fmt: skip
    ground = parser.add_argument_group("ground", "where the host is; of the presets with real orbits")
    ground.add_argument(
        "--host-at", type=argument(_place), metavar="LAT,LON",
        help="degrees north and east (default: 40,-75; write --host-at=-33.9,18.4 for the south)",
    )  # fmt: skip
    ground.add_argument(
        "--host-path", type=Path, metavar="FILE",
        help="the host moves: lines of `seconds latitude longitude`, seconds of the satellites' time from now",
    )  # fmt: skip
    ground.add_argument(
        "--mask", type=float, default=25.0, metavar="DEG", help="lowest elevation of a beam (default: 25)"
    )
    ground.add_argument(
        "--gateway", choices=("nearest", "climbing"),
        help="which satellite in sight: the nearest (default), or the nearest on the box's branch of the orbits",
    )  # fmt: skip


def ground_of(args: argparse.Namespace) -> Ground:
    """What ``add_ground_options`` was told."""
    from skymemory.constellation.trajectory import parse_waypoints
    from skymemory.testbed.ground import Ground

    _check_has_an_orbit(args)
    waypoints: tuple[Waypoint, ...] = ()
    if args.host_path is not None:
        try:
            lines = read_bounded(args.host_path, MAX_TABLE_BYTES).decode("utf-8").splitlines()
        except OSError as error:
            raise InvalidInput(f"cannot read the waypoints {args.host_path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise InvalidInput(f"{args.host_path}: not a text file, so no waypoints") from error
        waypoints = parse_waypoints(lines, str(args.host_path))
    latitude_deg, longitude_deg = args.host_at or _DEFAULT_PLACE
    gateway = args.gateway or "nearest"
    return Ground(latitude_deg, longitude_deg, mask_deg=args.mask, gateway=gateway, waypoints=waypoints)


def _check_has_an_orbit(args: argparse.Namespace) -> None:
    """Refuse options that change nothing where the preset has a fixed centre, and two that exclude each other."""
    from skymemory.constellation.presets import PRESETS, preset_named

    if args.host_at is not None and args.host_path is not None:
        raise InvalidInput("--host-at and --host-path: a host stands or moves, leave one of them out")
    if preset_named(args.preset).fixed_centre is None:
        return
    for option, value in (("--host-at", args.host_at), ("--host-path", args.host_path), ("--gateway", args.gateway)):
        if value is not None:
            real = ", ".join(name for name, preset in PRESETS.items() if preset.fixed_centre is None)
            raise InvalidInput(
                f"{option} changes nothing in {args.preset}, whose box lies where the paper has it: "
                f"leave it out, or choose --preset {real}"
            )
