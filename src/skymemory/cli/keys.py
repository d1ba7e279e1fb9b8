"""``skymemory keys``: files of secret keys (of a constellation or a tenant) and of a router's API keys."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from skymemory.cli._options import add_json, check_router_installed, duration
from skymemory.text import write_line
from skymemory.units import format_duration

if TYPE_CHECKING:
    from skymemory.cli.main import Subparsers
    from skymemory.keys import KeyRing


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "keys",
        help="make, rotate and retire secret keys",
        description="Manage files of secret keys, readable by their owner only. Processes reload a changed file within "
        "a second, without a restart. With several computers, copy the file to all of them before a new key is used.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    new = actions.add_parser("new", help="make a file with one new key")
    new.add_argument("file", type=Path, metavar="FILE", help="the key file")
    rotate = actions.add_parser("rotate", help="add a key: accepted at once, used after --after")
    rotate.add_argument("file", type=Path, metavar="FILE", help="the key file")
    rotate.add_argument(
        "--after", type=duration, default=10.0, metavar="TIME", help="delay until it is used (default: 10s)"
    )
    retire = actions.add_parser("retire", help="remove old keys")
    retire.add_argument("file", type=Path, metavar="FILE", help="the key file")
    retire.add_argument(
        "ids", type=int, nargs="*", metavar="ID", help="keys to remove (default: all older than the one in use)"
    )
    api = actions.add_parser(
        "api",
        help="add an API key to a router's file and print it",
        description="Make an API key for a tenant of a router. It is printed once; the file (TOML) keeps its SHA-256. "
        "Quotas go into the file's table [tenants.NAME]: requests_per_minute, tokens_per_minute, "
        "max_in_flight, priority, weight. To revoke a key, delete its lines.",
    )
    api.add_argument("file", type=Path, metavar="FILE", help="the key file")
    api.add_argument("tenant", metavar="TENANT")
    api.add_argument("--note", default="", metavar="TEXT", help="comment in the file, such as the owner")
    show = actions.add_parser("show", help="list the keys of a file, without the secrets")
    show.add_argument("file", type=Path, metavar="FILE", help="the key file")
    add_json(show)


def _print_ring(ring: KeyRing, as_json: bool) -> None:
    now_s = time.time()
    active = ring.active(now_s)
    if as_json:
        print(json.dumps([{"id": key.key_id, "from_s": key.from_s, "in_use": key == active} for key in ring.keys]))
        return
    for key in ring.keys:
        if key == active:
            state = "in use"
        elif key.from_s > now_s:
            state = f"accepted, in use in {format_duration(key.from_s - now_s)}"
        else:
            state = "accepted, no longer used"
        write_line(f"key {key.key_id:>5}  {state}")


def _add_api_key(path: Path, tenant: str, note: str) -> int:
    import os

    from skymemory.errors import InvalidInput, os_reason
    from skymemory.files import decode_text, read_bounded, write_private

    check_router_installed()
    from skymemory.router.api_keys import SECRET_BYTES, new_key, with_key

    key = new_key(os.urandom(SECRET_BYTES))
    try:
        table = decode_text(read_bounded(path)) if path.exists() else ""
        write_private(path, with_key(table, tenant, key, note), durable=True)
    except OSError as error:
        raise InvalidInput(f"{path}: {os_reason(error)}") from error
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error}") from None
    print(key)
    return 0


def run(args: argparse.Namespace) -> int:
    if args.action == "api":
        return _add_api_key(args.file, args.tenant, args.note)
    from skymemory.testbed.key_file import new_keys, new_secret, read_keys, write_keys

    path: Path = args.file
    if args.action == "new":
        ring = new_keys(path)
    else:
        ring = read_keys(path)
    if args.action == "rotate":
        ring = ring.with_key(new_secret(), time.time() + args.after)
        write_keys(ring, path)
    # Future keys stay: a rotation in progress on other computers must not lose its key.
    elif args.action == "retire":
        now_s = time.time()
        active = ring.active(now_s)
        ids = set(args.ids) or {key.key_id for key in ring.keys if key.from_s <= now_s and key != active}
        ring = ring.without(ids, now_s)
        write_keys(ring, path)
    _print_ring(ring, getattr(args, "json", False))
    return 0
