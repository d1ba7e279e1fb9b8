"""Options that several verbs share, and how people write sizes, shares and durations on a command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from skymemory.errors import InvalidInput
from skymemory.units import parse_duration, parse_fraction, parse_size

T = TypeVar("T")


def argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """``parse`` as an argparse ``type=``, keeping the message that says what was wrong and what was
    expected.
    """

    def parse_argument(text: str) -> T:
        try:
            return parse(text)
        except InvalidInput as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_argument


size = argument(parse_size)
"""``64MiB`` → bytes."""
fraction = argument(parse_fraction)
"""``1%`` or ``0.01`` → 0.01."""
duration = argument(parse_duration)
"""``30s`` → seconds."""


def add_run_dir(parser: argparse.ArgumentParser) -> None:
    """``--run-dir``: where the running constellation's plan, pid files, logs and index are."""
    parser.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="where the constellation's plan, pid files and logs are "
        "(default: $SKYMEMORY_RUN_DIR, else a folder of this user's)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """``--json``: the same answer for programs."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
