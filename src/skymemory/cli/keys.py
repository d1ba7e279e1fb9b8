"""``skymemory keys``: files of secret keys, for commands to satellites or for a tenant's payloads."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from skymemory.cli._options import duration
from skymemory.units import format_duration

if TYPE_CHECKING:
    from skymemory.cli.main import Subparsers
    from skymemory.keys import KeyRing


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "keys",
        help="make, rotate and retire secret keys",
        description="Files of secret keys, readable by their owner only. Whoever uses one follows it: a change counts "
        "within a second and no satellite has to be started again. On several computers, copy the file to all of them "
        "before a new key's time comes.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    new = actions.add_parser("new", help="make a file with one new key")
    new.add_argument("file", type=Path, metavar="FILE")
    rotate = actions.add_parser("rotate", help="add a new key: accepted at once, used from some seconds on")
    rotate.add_argument("file", type=Path, metavar="FILE")
    rotate.add_argument(
        "--after", type=duration, default=10.0, metavar="TIME", help="when it is used (default: after 10s)"
    )
    retire = actions.add_parser("retire", help="accept old keys no longer")
    retire.add_argument("file", type=Path, metavar="FILE")
    retire.add_argument("ids", type=int, nargs="*", metavar="ID", help="which (default: all older than the one in use)")
    show = actions.add_parser("show", help="which keys a file has, without the secrets")
    show.add_argument("file", type=Path, metavar="FILE")


def _print_ring(path: Path, ring: KeyRing) -> None:
    now_s = time.time()
    active = ring.active(now_s)
    for key in ring.keys:
        if key == active:
            state = "in use"
        elif key.from_s > now_s:
            state = f"accepted, in use in {format_duration(key.from_s - now_s)}"
        else:
            state = "accepted, no longer used"
        print(f"key {key.key_id:>5}  {state}")


def run(args: argparse.Namespace) -> int:
    from skymemory.testbed.key_file import new_keys, new_secret, read_keys, write_keys

    path: Path = args.file
    if args.action == "new":
        ring = new_keys(path)
    else:
        ring = read_keys(path)
    if args.action == "rotate":
        ring = ring.with_key(new_secret(), time.time() + args.after)
        write_keys(ring, path)
    elif args.action == "retire":
        now_s = time.time()
        active = ring.active(now_s)
        ids = set(args.ids) or {key.key_id for key in ring.keys if key.from_s <= now_s and key != active}
        ring = ring.without(ids, now_s)
        write_keys(ring, path)
    _print_ring(path, ring)
    return 0
