"""Options that several commands share, and parsers of user input."""

from __future__ import annotations

import argparse
import errno
import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from skymemory.config import Schema, filled, overlaid
from skymemory.errors import InvalidInput, missing_extra, os_reason, quoted
from skymemory.files import read_toml
from skymemory.units import parse_duration, parse_fraction, parse_size

T = TypeVar("T")


def argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Wrap ``parse`` as an argparse ``type=`` that keeps its error message."""

    def parse_argument(text: str) -> T:
        try:
            return parse(text)
        except InvalidInput as error:
            raise argparse.ArgumentTypeError(str(error).replace(repr(text), quoted(text))) from error
        except (ValueError, OverflowError) as error:  # Python's own limit of digits
            raise argparse.ArgumentTypeError(f"{quoted(text)}: expected a number of fewer digits") from error

    return parse_argument


size = argument(parse_size)
fraction = argument(parse_fraction)
duration = argument(parse_duration)


_SETTING = "settings."


def add_settings_file(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--settings", type=Path, metavar="FILE", help=what)


def add_setting(parser: argparse.ArgumentParser) -> Callable[..., argparse.Action]:
    """Return a function that adds an option for a key of the settings file, such as ``limits.max_body``."""

    def add(option: str, key: str, **how: Any) -> argparse.Action:
        return parser.add_argument(option, dest=_SETTING + key, default=None, **how)

    return add


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the given options of ``add_setting`` as nested tables."""
    tables: dict[str, Any] = {}
    for name, value in vars(args).items():
        if name.startswith(_SETTING) and value is not None:
            *sections, key = name.removeprefix(_SETTING).split(".")
            table = tables
            for section in sections:
                table = table.setdefault(section, {})
            table[key] = value
    return tables


def add_rare_settings(parser: argparse.ArgumentParser, kind: type[Schema]) -> None:
    """Add ``--settings FILE`` for the keys of ``kind``, parsed to an instance."""

    def read(name: str) -> Schema:
        return filled(kind, read_toml(Path(name)), name)

    parser.add_argument(
        "--settings",
        type=argument(read),
        default=kind(),
        metavar="FILE",
        help="further settings in TOML: docs/reference/settings.md",
    )


def read_settings(args: argparse.Namespace, read: Callable[[Mapping[str, Any]], T]) -> T:
    """Return what ``read`` makes of the settings file, overridden by options."""
    content = {} if args.settings is None else read_toml(args.settings)
    try:
        return read(overlaid(content, given_settings(args)))
    except InvalidInput as error:
        if args.settings is None:
            raise
        raise InvalidInput(f"{args.settings}: {error}") from error


def add_run_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="where the constellation's plan, pid files and logs are "
        "(default: $SKYMEMORY_RUN_DIR, else a folder for this user)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def add_satellite_kind(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--satellite",
        choices=("python", "c", "mixed"),
        default="python",
        help="run satellites in Python, those in C that `make flight` builds, or in C on every second host (mixed)",
    )


def check_serving_installed(model: str | None = None) -> None:
    """Check without imports that an engine can serve ``model``; else MissingExtra."""
    from skymemory.engine.inputs import check_engine_installed

    check_engine_installed(model, "serving", {"router": ("aiohttp", "msgspec", "prometheus_client", "zmq")})


def check_router_installed(*more: str, extras: str = "router") -> None:
    _check_installed("this verb", "aiohttp", "msgspec", "prometheus_client", *more, extras=extras)


def _check_installed(what: str, *packages: str, extras: str = "router") -> None:
    if absent := [name for name in packages if find_spec(name) is None]:
        raise missing_extra(what, ", ".join(absent), extras)


_ADVICE = {
    errno.ENOSPC: "free some of the disk, or choose another folder",
    errno.EDQUOT: "free some of this user's quota, or choose another folder",
    errno.EFBIG: "raise this shell's limit (ulimit -f), or choose another file system",
    errno.EROFS: "choose a folder that can be written",
}


def os_error(error: OSError) -> str:
    reason = os_reason(error)
    # Not for a file that this program refuses to read.
    if error.errno in _ADVICE and reason == os.strerror(error.errno):
        reason += f": {_ADVICE[error.errno]}"
    return reason if error.filename is None else f"{os.fsdecode(error.filename)}: {reason}"
