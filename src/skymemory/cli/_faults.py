"""``skymemory constellation disable``, ``enable`` and ``revive``: things die and come back."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from skymemory.cli._options import add_run_dir, argument
from skymemory.errors import InvalidInput

if TYPE_CHECKING:
    from skymemory.cli.main import Subparsers
    from skymemory.constellation.torus import SatelliteId
    from skymemory.testbed.plan import ConstellationPlan


def _satellite(text: str) -> SatelliteId:
    from skymemory.constellation.torus import SatelliteId

    found = re.fullmatch(r"(\d{1,4}),(\d{1,4})", text)
    if found is None:
        raise InvalidInput(f"{text!r} is not a satellite: expected its plane and slot, such as 2,9")
    return SatelliteId(int(found[1]), int(found[2]))


def add_parsers(verbs: Subparsers) -> None:
    for verb, what in (("disable", "let satellites die"), ("enable", "let dead satellites come back, empty")):
        parser = verbs.add_parser(verb, help=what)
        parser.add_argument(
            "satellites", nargs="*", type=argument(_satellite), metavar="PLANE,SLOT", help="counted from 0"
        )
        parser.add_argument("--plane", action="append", type=int, default=[], metavar="N", help="a whole plane")
        if verb == "enable":
            parser.add_argument("--all", action="store_true", help="every satellite")
        add_run_dir(parser)
    revive = verbs.add_parser("revive", help="start the dead host processes of this computer again, empty")
    add_run_dir(revive)


def _check_some_are_named(args: argparse.Namespace) -> None:
    if not (args.satellites or args.plane):
        raise InvalidInput(
            "which satellites? name them as PLANE,SLOT or a plane with --plane; "
            f"see `skymemory constellation {args.action} --help`"
        )


def _chosen(args: argparse.Namespace, plan: ConstellationPlan) -> list[SatelliteId]:
    from skymemory.constellation.torus import SatelliteId

    for plane in args.plane:
        if not 0 <= plane < plan.planes:
            raise InvalidInput(f"no plane {plane}: expected 0 to {plan.planes - 1}")
    return [
        *args.satellites,
        *(SatelliteId(plane, slot) for plane in args.plane for slot in range(plan.slots_per_plane)),
    ]


def disable(args: argparse.Namespace) -> int:
    from skymemory.testbed import outages
    from skymemory.testbed.run_directory import RunDirectory

    _check_some_are_named(args)
    directory = RunDirectory(args.run_dir)
    dead = outages.disable(directory, _chosen(args, directory.running_plan()))
    print(f"{_satellites(len(dead))} disabled")
    return 0


def enable(args: argparse.Namespace) -> int:
    from skymemory.testbed import outages
    from skymemory.testbed.run_directory import RunDirectory

    if not args.all:
        _check_some_are_named(args)
    elif args.satellites or args.plane:
        raise InvalidInput("--all and some by name: leave one of them out")
    directory = RunDirectory(args.run_dir)
    dead = outages.enable(directory, None if args.all else _chosen(args, directory.running_plan()))
    print(f"{_satellites(len(dead))} disabled" if dead else "no satellite is disabled")
    return 0


def _satellites(count: int) -> str:
    return "1 satellite is" if count == 1 else f"{count} satellites are"


def revive(args: argparse.Namespace) -> int:
    from skymemory.testbed.run_directory import RunDirectory
    from skymemory.testbed.supervisor import revive as start_again

    hosts = start_again(RunDirectory(args.run_dir))
    print(f"started again, empty: {', '.join(hosts)}" if hosts else "no host process is dead")
    return 0
