"""``skymemory kv``: values by name in any store; ``prefetch``: recurring prompts that a habits file expects."""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

from skymemory.cli._options import add_json, add_run_dir, argument, duration
from skymemory.errors import CommandsRefused, InvalidInput, SkyMemoryError, cannot_read, quoted
from skymemory.files import read_bounded, write_output
from skymemory.text import write_line
from skymemory.units import format_duration, format_size, parse_duration

if TYPE_CHECKING:
    from skymemory.cache.predictor import Expectation, Predictor
    from skymemory.cli.main import Subparsers
    from skymemory.store.base import Store


class NotStored(SkyMemoryError): ...


_MAX_VALUE_BYTES = 2**32 - 1  # largest value that the wire's 32 bits can state


def _lifetime(text: str) -> float:
    seconds = parse_duration(text)
    if not seconds:
        raise InvalidInput(f"{text!r}: expected a time above 0, such as 30m")
    return seconds


def _printable(name: str) -> str:
    """Escape control characters: a stored name must not control the terminal."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in name)


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("kv", help="store files in the constellation by name, and read them back")
    verbs = parser.add_subparsers(dest="kv_verb", metavar="put|get|pin|delete|list", required=True)
    put = verbs.add_parser("put", help="store a file under its name, or under --key")
    add = put.add_argument
    add("file", type=Path, metavar="FILE", help="the file to store")
    add("--key", help="the name to store it under (default: the file's name)")
    add(
        "--ttl", type=argument(_lifetime), metavar="TIME", help="lifetime of the value, such as 30m (default: no limit)"
    )
    pin = verbs.add_parser("pin", help="keep a value from being evicted for a time")
    pin.add_argument("key", metavar="KEY")
    how_long = pin.add_mutually_exclusive_group()
    how_long.add_argument(
        "--ttl", type=argument(_lifetime), default=3600.0, metavar="TIME", help="how long (default: 1h)"
    )
    how_long.add_argument("--off", action="store_true", help="unpin the value")
    get = verbs.add_parser("get", help="read a value back")
    get.add_argument("key", metavar="KEY", help="the name it was stored under, not a path")
    get.add_argument("-o", "--out", help="file to write; - is standard output (default: the key's name)")
    delete = verbs.add_parser("delete", help="delete a value")
    delete.add_argument("key", metavar="KEY")
    verbs.add_parser("list", help="list names and sizes of the values")
    for verb in verbs.choices.values():
        verb.add_argument(
            "--store",
            metavar="ADDRESS",
            help="a store (default: this user's constellation), such as tiers:///etc/skymemory/tiers.toml, "
            "redis://host, disk:///directory?budget=1GiB or constellation:///run/dir?access=gateway&index=no",
        )
        add_json(verb)
    for verb in (put, get):
        verb.add_argument(
            "--seal", type=Path, metavar="FILE", help="the tenant's key file, to encrypt and decrypt the value"
        )
    _add_prefetch(subparsers)


def run(args: argparse.Namespace) -> int:
    if args.verb == "prefetch":
        return _prefetch(args)
    from skymemory.testbed.connect import sealed
    from skymemory.testbed.key_file import KeyFollower

    keys = KeyFollower(args.seal) if getattr(args, "seal", None) else None
    store = _open(args)
    try:
        edge = store if keys is None else sealed(store, keys)
        if args.kv_verb == "get":
            return _get(args, store, edge)
        if args.kv_verb == "put":
            return _put(args, store, edge)
        return {"pin": _pin, "delete": _delete, "list": _list}[args.kv_verb](args, store)
    # A refused command looks like a miss or a timeout from the store. If satellites refused this client, its keys or
    # its clock are the cause, and the error should say so.
    except (InvalidInput, CommandsRefused):
        raise
    except SkyMemoryError as error:
        stats = store.stats()
        if stats.get("client_operations_failed{refused}") or stats.get("client_refusals_unproved"):
            raise CommandsRefused(f"{error}; ") from error
        raise
    finally:
        store.close()


def _open(args: argparse.Namespace) -> Store:
    """Open the store; InvalidInput if it cannot do what the verb needs."""
    from skymemory.store.base import Expiring
    from skymemory.store.named_values import Listing, unwrap_store
    from skymemory.testbed.connect import open_constellation
    from skymemory.testbed.open_store import open_store

    if args.store is None:
        return open_constellation()
    store = open_store(args.store)
    # Checked at the innermost store: wrappers (quota, rate limit) have these methods even if it lacks them.
    only_there = "list" if args.kv_verb == "list" else "--ttl" if args.kv_verb == "put" and args.ttl else ""
    if only_there and not isinstance(unwrap_store(store), Listing if only_there == "list" else Expiring):
        store.close()
        supported = "a constellation and disk do" if only_there == "list" else "a single tier does"
        raise InvalidInput(f"{only_there}: {store.name} does not support it; {supported}")
    return store


def _say(args: argparse.Namespace, facts: dict[str, object], text: str, to_stderr: bool = False) -> int:
    stream = sys.stderr if to_stderr else sys.stdout
    if args.json:
        print(json.dumps(facts), file=stream)
    else:
        write_line(_printable(text), stream)
    return 0


def _put(args: argparse.Namespace, store: Store, edge: Store) -> int:
    from skymemory.store.memory import MemoryStore
    from skymemory.store.named_values import NOT_PROMISED, NamedValues, unwrap_store

    try:
        data = read_bounded(args.file, _MAX_VALUE_BYTES, pipes=True)
    except OSError as error:
        raise InvalidInput(cannot_read(args.file, error)) from error
    key = args.file.name if args.key is None else args.key
    if not key:
        raise InvalidInput("--key is empty: expected a name")
    if isinstance(unwrap_store(store), MemoryStore):
        raise InvalidInput(
            "--store memory:// is this command's own memory, and ends with it: expected a store that stays, such as "
            "disk://FOLDER, redis://HOST or a constellation"
        )
    result = NamedValues(edge).put(key, data, ttl_s=args.ttl)
    if result.reason == NOT_PROMISED:
        raise SkyMemoryError(f"{quoted(key)}: {NOT_PROMISED}: try again")
    if not result.ok:
        raise SkyMemoryError(
            f"{quoted(key)} was not stored in {_called(store)}: {result.reason}"
            + ("; see `skymemory constellation status`" if args.store is None else "")
        )
    facts: dict[str, object] = {
        "key": key,
        "bytes": len(data),
        "seconds": result.seconds,
        "retransmitted_chunks": result.retransmitted,
        **_probing(store),
    }
    text = f"stored {key}: {format_size(len(data))} in {format_duration(result.seconds)}, {result.retransmitted} resent"
    if args.ttl is not None:
        facts["ttl_s"] = args.ttl
        text += f", expires in {format_duration(args.ttl)}"
    return _say(args, facts, text)


def _pin(args: argparse.Namespace, store: Store) -> int:
    from skymemory.store.named_values import NamedValues

    values = NamedValues(store)
    # Checked first: ``pin`` fails in the same way for an absent value and for a value that a satellite will not pin.
    if args.key not in values:
        raise NotStored(f"{quoted(args.key)} is not in {_called(store)}")
    ttl_s = 0.0 if args.off else args.ttl
    if not values.pin(args.key, ttl_s):
        raise SkyMemoryError(
            f"{quoted(args.key)} is not pinned: a satellite with chunks of it does not answer, lacks them, or has half "
            "of its memory pinned; unpin other values with --off, or start the satellites with more memory"
        )
    facts: dict[str, object] = {"key": args.key, "pinned": not args.off, "ttl_s": ttl_s}
    text = f"{args.key} may be evicted again" if args.off else f"pinned {args.key} for {format_duration(args.ttl)}"
    return _say(args, facts, text)


def _called(store: Store) -> str:
    return f"the {store.name}" if store.name == "constellation" else f"the store {store.name!r}"


def _probing(store: Store) -> dict[str, int | float]:
    stats = store.stats()
    return {name: stats.get(f"index_{name}", 0) for name in ("keys_probed", "values_adopted")}


def _get(args: argparse.Namespace, store: Store, edge: Store) -> int:
    from skymemory.reasons import Miss
    from skymemory.store.named_values import get_named

    result = get_named(edge, args.key)
    if result.value is None:
        if result.reason == Miss.SEALED:
            raise NotStored(f"{quoted(args.key)} is sealed: read it with --seal FILE, the keys that it was sealed with")
        if result.reason == Miss.NOT_AUTHENTIC:
            raise NotStored(
                f"{quoted(args.key)} does not open with {args.seal}: it was sealed with other keys, or not at all"
            )
        if result.reason == Miss.UNKNOWN_KEY:
            raise NotStored(
                f"{quoted(args.key)} was sealed with a later key than {args.seal} has: copy the newer key file here"
            )
        raise NotStored(f"{quoted(args.key)} is not in {_called(store)} ({result.reason}){_key_hint(args.key)}")
    facts: dict[str, object] = {
        "key": args.key,
        "bytes": len(result.value),
        "seconds": result.seconds,
        "retransmitted_chunks": result.retransmitted,
        **_probing(store),
    }
    text = (
        f"read {args.key}: {format_size(len(result.value))} in {format_duration(result.seconds)}, "
        f"{result.retransmitted} chunks requested again"
    )
    if facts["keys_probed"]:
        text += ", located by asking the satellites"
    # Only the value goes to standard output, so that it can be piped; the report goes to standard error.
    if args.out == "-":
        sys.stdout.buffer.write(result.value)
        return _say(args, facts, text, to_stderr=True)
    # Only the last part of the key: a stored name such as ../../.bashrc must not choose the target.
    out = Path(args.out or Path(args.key).name)
    try:
        write_output(out, result.value)
    except OSError as error:
        raise InvalidInput(f"cannot write {out}: {error.strerror}; choose another file with --out") from error
    return _say(args, {**facts, "file": str(out)}, f"{text}, written to {out}")


def _key_hint(key: str) -> str:
    name = Path(key).name
    return f"; keys are names, not paths: did you mean {name!r}?" if name and name != key else ""


def _delete(args: argparse.Namespace, store: Store) -> int:
    from skymemory.store.named_values import NamedValues

    deleted = NamedValues(store).delete(args.key)
    if deleted is None:
        raise NotStored(
            f"{_called(store)} did not confirm the deletion of {quoted(args.key)}: delete it again when "
            "all satellites answer"
        )
    if not deleted:
        raise NotStored(f"{quoted(args.key)} is not in {_called(store)}")
    return _say(args, {"key": args.key, "deleted": True}, f"deleted {args.key}")


def _list(args: argparse.Namespace, store: Store) -> int:
    from skymemory.store.named_values import NamedValues

    values = NamedValues(store).names()
    if args.json:
        print(json.dumps([{"key": value.name, "bytes": value.size_bytes, "chunks": value.chunks} for value in values]))
        return 0
    for value in values:
        write_line(f"{format_size(value.size_bytes):>10}  {value.chunks:>6} chunks  {_printable(value.name)}")
    if not values:
        write_line("no named values", sys.stderr)
    return 0


def _add_prefetch(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "prefetch",
        help="show which recurring prompts are expected, and prefetch them now",
        description="Show which recurring prompts a habits file (of PrefetchScheduler) expects, and when. A prompt is "
        "identified by the hashes of its first and last block.",
    )
    add = parser.add_argument
    add("habits", type=Path, metavar="FILE", help="the habits file")
    add("--within", type=duration, default=86_400.0, metavar="TIME", help="how far to look ahead (default: 24h)")
    add(
        "--now",
        action="store_true",
        help="copy the expected blocks to the satellites that will be overhead then (strategy hop only)",
    )
    add_run_dir(parser)
    add_json(parser)


def _prefetch(args: argparse.Namespace) -> int:
    from skymemory.cache.predictor import Predictor
    from skymemory.cache.prefetching import read_habits

    zone, habits = read_habits(args.habits)
    # Twice the size of the file: restoring must not evict habits.
    predictor = Predictor(zone=zone, capacity_blocks=max(1, 2 * sum(len(habit.keys) for habit in habits)))
    predictor.restore(habits)
    now_s = time.time()
    expected = predictor.expected(now_s, args.within)
    near = _bring_expected_near(expected, args.run_dir) if args.now else None
    if args.json:
        print(json.dumps(_prefetch_facts(predictor, expected, near)))
        return 0
    recurring = sum(habit.recurs for habit in habits)
    write_line(f"{len(habits):,} prompts, {recurring:,} of them seen on more than one day; times in {zone or 'UTC'}")
    for number, prompt in enumerate(expected):
        near_text = "" if near is None else f"  near {near[number]}"
        write_line(
            f"{_wall(prompt, zone):%a %Y-%m-%d %H:%M}  {len(prompt.keys):>6,} blocks  {_label(prompt)}{near_text}"
        )
    if not expected:
        write_line(f"nothing is expected within {format_duration(args.within)}")
    return 0


def _bring_expected_near(expected: list[Expectation], run_dir: Path | None) -> list[int]:
    """Prefetch expected prompts; return each's number of blocks near."""
    from skymemory.store.base import bring_near
    from skymemory.testbed.connect import open_constellation

    store = open_constellation(run_dir)
    try:
        return [sum(bring_near(store, expectation.keys, expectation.at_s)) for expectation in expected]
    finally:
        store.close()


def _prefetch_facts(predictor: Predictor, expected: list[Expectation], near: list[int] | None) -> dict[str, object]:
    habits = predictor.habits
    return {
        "zone": predictor.zone or "UTC",
        "habits": len(habits),
        "recurring": sum(habit.recurs for habit in habits),
        "expected": [
            {
                "at_s": expectation.at_s,
                "at": _wall(expectation, predictor.zone).isoformat(timespec="seconds"),
                "blocks": len(expectation.keys),
                "first": expectation.keys[0].hex(),
                "last": expectation.keys[-1].hex(),
                "weight": expectation.weight,
                **({} if near is None else {"near": near[number]}),
            }
            for number, expectation in enumerate(expected)
        ],
    }


def _wall(expectation: Expectation, zone: str | None) -> datetime:
    return datetime.fromtimestamp(expectation.at_s, ZoneInfo(zone or "UTC"))


def _label(expectation: Expectation) -> str:
    return f"{expectation.keys[0].hex()[:12]}…{expectation.keys[-1].hex()[:12]}"
