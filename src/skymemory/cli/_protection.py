"""``--auth`` and ``--keys`` of the verbs that make a plan, and what a plan for other computers needs of them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from skymemory.errors import InvalidInput

if TYPE_CHECKING:
    from skymemory.testbed.plan import ConstellationPlan


def add_auth(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--auth", choices=("off", "on", "every"),
        help="MACs on commands (on), on every packet, or none (default: on, with keys made for it)",
    )  # fmt: skip
    parser.add_argument(
        "--keys", type=Path, metavar="FILE", help="the keys, as `skymemory keys new` makes them (default: new ones)"
    )


def auth_of(args: argparse.Namespace) -> dict[str, str]:
    """The fields ``auth`` and ``keys_file`` of a plan. New keys lie in the run directory, or beside the plan: a
    reader of the plan looks for them there.
    """
    from skymemory.testbed.key_file import read_keys
    from skymemory.testbed.run_directory import RunDirectory

    insecure = getattr(args, "insecure", False) and args.keys is None
    auth = args.auth or ("off" if insecure else "on")
    if auth == "off":
        if args.keys is not None:
            raise InvalidInput("--keys with --auth off: leave one of them out")
        return {}
    if args.keys is not None:
        read_keys(args.keys)
        return {"auth": auth, "keys_file": str(args.keys.absolute())}
    if args.action == "plan":
        keys_path = args.out.absolute().with_suffix(".keys")
        if keys_path == args.out.absolute():
            raise InvalidInput(
                f"--out {args.out}: the plan's keys go into a file of this name; call the plan otherwise"
            )
        return {"auth": auth, "keys_file": str(keys_path)}
    return {"auth": auth, "keys_file": str(RunDirectory(args.run_dir).keys_path)}


def check_plan(plan: ConstellationPlan, insecure: bool) -> None:
    """Refuse a plan that lets other computers in without keys; make the keys that it needs and are not there yet."""
    from skymemory.testbed.key_file import new_keys, read_keys
    from skymemory.testbed.protection import check_exposure

    for host in plan.hosts:
        check_exposure(plan, host, None, insecure)
    if plan.auth != "off":
        path = Path(plan.keys_file)
        if path.exists():
            read_keys(path)
        else:
            new_keys(path)


def say_how_to_share(plan: ConstellationPlan, path: Path, insecure: bool) -> None:
    flag = " --insecure" if insecure and plan.auth == "off" else ""
    if plan.auth == "off":
        print(f"wrote {path}; copy it to each computer and run there:")
    else:
        print(f"wrote {path}, whose keys are in {plan.keys_file}: copy both to one folder of each computer, the keys")
        print("in secret, and run there:")
    for number, host in enumerate(plan.hosts):
        print(f"  on {host.ip}: skymemory satellite --plan {path.name} --host {number}{flag}")
    if flag:
        print("packets are not authenticated: keep these addresses on a network of your own")
