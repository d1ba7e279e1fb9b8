"""``skymemory satellite``: one host's share of a constellation, as one process."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from skymemory.cli._options import add_run_dir

if TYPE_CHECKING:
    from skymemory.cli.main import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "satellite",
        help="run one host's share of a constellation here",
        description="Run the satellites of one host of a plan, until Ctrl-C. `skymemory constellation up` starts "
        "one such process per host on this computer; for several computers write one plan with "
        "`skymemory constellation plan`, copy it to each, and run this there.",
    )
    parser.add_argument("--plan", type=Path, required=True, metavar="FILE", help="the plan all hosts share")
    parser.add_argument(
        "--host", required=True, metavar="HOST", help="which host of the plan: its name or number (from 0)"
    )
    parser.add_argument(
        "--listen", metavar="IP", help="the address to bind, if not the plan's (behind address translation: 0.0.0.0)"
    )
    parser.add_argument(
        "--insecure", action="store_true", help="listen beyond this computer although the plan asks for no MACs"
    )
    add_run_dir(parser)
    parser.add_argument("--supervisor-fd", type=int, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    from skymemory.testbed.host_process import run_host
    from skymemory.testbed.plan import check_ip
    from skymemory.testbed.plan_file import load_plan
    from skymemory.testbed.run_directory import RunDirectory

    plan = load_plan(args.plan)
    if args.listen is not None:
        check_ip(args.listen, "--listen")
    run_host(
        plan,
        plan.host_named(args.host),
        listen=args.listen,
        say=print,
        directory=RunDirectory(args.run_dir) if args.run_dir else None,
        supervisor_fd=args.supervisor_fd,
        insecure=args.insecure,
    )
    return 0
