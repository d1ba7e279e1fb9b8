"""Settings that several verbs read from their files."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from skymemory.config import duration, number, setting, text, whole_numbers
from skymemory.errors import InvalidInput, quoted
from skymemory.units import parse_rate

_LEAST_IDS = 16


def rate(value: object) -> float | None:
    """Parse bits per second, such as ``"300Mbit"``; None for ``"none"``."""
    if value == "none":
        return None
    bit_s = number(value) if isinstance(value, int | float) else parse_rate(text(value))
    if bit_s <= 0:
        raise InvalidInput(f'{quoted(value)}: expected a rate above 0, such as "300Mbit", or "none"')
    return bit_s


def pair(value: object) -> tuple[int, int]:
    numbers = whole_numbers(value)
    if len(numbers) != 2 or numbers[0] > numbers[1]:
        raise InvalidInput(f"{quoted(value)}: expected the first and the last, such as [300, 1000]")
    return numbers[0], numbers[1]


def token_ids(value: object) -> tuple[int, int]:
    """Parse a range of token ids, large enough that random prompts share no prefix by chance."""
    first, last = pair(value)
    if last - first + 1 < _LEAST_IDS:
        raise InvalidInput(f"{quoted(value)}: expected a range of at least {_LEAST_IDS}, such as [300, 1000]")
    return first, last


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Place of the host, and rates of its links."""

    lat: float | None = setting("lat", number, None, "latitude of the host; default: the preset's")
    lon: float | None = setting("lon", number, None, "longitude of the host; default: the preset's")
    mask_deg: float = setting("mask", number, 25.0, "lowest elevation of a beam, degrees")
    up_bit_s: float | None = setting(
        "up", rate, 300e6, 'rate of a beam up, in bit/s, such as "300Mbit"; "none": no limit'
    )
    down_bit_s: float | None = setting("down", rate, 1.2e9, "rate of a beam down")
    isl_bit_s: float | None = setting("isl", rate, 20e9, "rate of a link between satellites")
    server_s: float = setting("server_time", duration, 20e-6, "a satellite's time for a chunk")


def add_outputs(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--out",
        action="append",
        type=Path,
        default=[],
        metavar="FILE",
        help=f"write {what} to a .csv file, or draw it to a .png, .svg or .pdf file; may be repeated",
    )


def outputs(paths: Sequence[Path]) -> tuple[Path | None, Path | None]:
    """Return the table's file and the drawing's."""
    from skymemory_lab.view.drawing import drawing_path

    tables = [path for path in paths if path.suffix == ".csv"]
    drawings = [drawing_path(path) for path in paths if path not in tables]
    if max(len(tables), len(drawings)) > 1:
        raise InvalidInput("--out: expected at most one .csv file and one drawing")
    return (*tables, None)[0], (*drawings, None)[0]
