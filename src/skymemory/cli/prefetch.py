"""``skymemory prefetch``: what a habits file knows and expects, and bringing it near now."""

from __future__ import annotations

import argparse
import json
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

from skymemory.cli._options import add_json, add_run_dir, duration
from skymemory.units import format_duration

if TYPE_CHECKING:
    from skymemory.cache.predictor import Expectation, Predictor
    from skymemory.cli.main import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "prefetch",
        help="what recurring prompts are expected when, and bring them near now",
        description="Show which recurring prompts a habits file (of PrefetchScheduler) expects, and when. A prompt is "
        "shown by the hash of its first and last block.",
    )
    parser.add_argument("habits", type=Path, metavar="FILE", help="the habits file")
    parser.add_argument(
        "--within", type=duration, default=86_400.0, metavar="TIME", help="look so far ahead (default: 24h)"
    )
    parser.add_argument(
        "--now",
        action="store_true",
        help="copy what is expected to the satellites that will be overhead then: parked values (strategy hop) only",
    )
    add_run_dir(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from skymemory.cache.predictor import Predictor
    from skymemory.cache.prefetching import read_habits

    zone, habits = read_habits(args.habits)
    predictor = Predictor(zone=zone, capacity_blocks=max(1, 2 * sum(len(habit.keys) for habit in habits)))
    predictor.restore(habits)
    now_s = time.time()
    expected = predictor.expected(now_s, args.within)
    near = _bring(expected, args.run_dir) if args.now else None
    if args.json:
        print(json.dumps(_facts(predictor, expected, near)))
        return 0
    recurring = sum(habit.recurs for habit in habits)
    print(f"{len(habits):,} prompts remembered, {recurring:,} of them on more than one day; times of {zone or 'UTC'}")
    for number, one in enumerate(expected):
        brought = "" if near is None else f"  near {near[number]}"
        print(f"{_wall(one, zone):%a %Y-%m-%d %H:%M}  {len(one.keys):>6,} blocks  {_name(one)}{brought}")
    if not expected:
        print(f"nothing is expected within {format_duration(args.within)}")
    return 0


def _bring(expected: list[Expectation], run_dir: Path | None) -> list[int]:
    """Per expectation, how many of its blocks will be near."""
    from skymemory.store.base import bring_near
    from skymemory.testbed.connect import open_constellation

    store = open_constellation(run_dir)
    try:
        return [sum(bring_near(store, one.keys, one.at_s)) for one in expected]
    finally:
        store.close()


def _facts(predictor: Predictor, expected: list[Expectation], near: list[int] | None) -> dict[str, object]:
    habits = predictor.habits
    return {
        "zone": predictor.zone or "UTC",
        "habits": len(habits),
        "recurring": sum(habit.recurs for habit in habits),
        "expected": [
            {
                "at_s": one.at_s,
                "at": _wall(one, predictor.zone).isoformat(timespec="seconds"),
                "blocks": len(one.keys),
                "first": one.keys[0].hex(),
                "last": one.keys[-1].hex(),
                "weight": one.weight,
                **({} if near is None else {"near": near[number]}),
            }
            for number, one in enumerate(expected)
        ],
    }


def _wall(one: Expectation, zone: str | None) -> datetime:
    return datetime.fromtimestamp(one.at_s, ZoneInfo(zone or "UTC"))


def _name(one: Expectation) -> str:
    return f"{one.keys[0].hex()[:12]}…{one.keys[-1].hex()[:12]}"
