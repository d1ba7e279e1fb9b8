"""A predictor's habits in a file, so that they outlive the process: written whole or not at all, read strictly.

JSON, readable by its owner only: it tells which prompts come when, by their hashes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from skymemory.cache.habit import KEPT_DAYS, Habit
from skymemory.cache.predictor import Predictor
from skymemory.errors import InvalidInput, LaterFile
from skymemory.files import open_file, write_private

FORMAT_VERSION = 1
MAX_FILE_BYTES = 64 << 20
"""Four times what 100,000 blocks take, so that a wrong file fills no memory."""
_MOST_KEY_DIGITS = 128


def save_habits(predictor: Predictor, path: Path) -> None:
    """Replace the file with what the predictor knows, at once. Raises ``OSError``."""
    found = {
        "version": FORMAT_VERSION,
        "zone": predictor.zone,
        "habits": [
            {
                "time_s": habit.time_s, "day": habit.day, "first_day": habit.first_day, "seen": habit.seen,
                "keys": [key.hex() for key in habit.keys],
            }
            for habit in predictor.habits
        ],
    }  # fmt: skip
    write_private(path, json.dumps(found), durable=True)


def load_habits(predictor: Predictor, path: Path) -> None:
    """Give a fresh predictor what the file knows.

    Raises:
        InvalidInput: the file cannot be read, is no habits file, or was learned in another time zone; LaterFile if a
            later release wrote it.
    """
    zone, habits = read_habits(path)
    if zone != predictor.zone:
        raise InvalidInput(f"{path}: its times are of {_zone(zone)}, not of {_zone(predictor.zone)}; use that zone")
    predictor.restore(habits)


def read_habits(path: Path) -> tuple[str | None, list[Habit]]:
    """The time zone and the habits in the file. Raises ``InvalidInput``."""
    try:
        with open_file(path) as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error
    try:
        found = json.loads(text) if len(text) <= MAX_FILE_BYTES else None
    except (ValueError, RecursionError):
        found = None
    match found:
        case {"version": int(version)} if version > FORMAT_VERSION:
            raise LaterFile(f"{path}: a habits file of version {version}, which a later release wrote")
        case {"version": 1, "zone": None | str() as zone, "habits": list(entries)}:
            return zone, [_habit(entry, f"{path}, habit {number}") for number, entry in enumerate(entries, start=1)]
    raise InvalidInput(f"{path}: not a habits file of version {FORMAT_VERSION}, or damaged")


def _habit(entry: Any, where: str) -> Habit:
    match entry:
        case {
            "time_s": int() | float() as time_s, "day": int(day), "first_day": int(first_day), "seen": int(seen),
            "keys": [_, *_] as texts,
        }:  # fmt: skip
            sound = math.isfinite(time_s) and abs(day) < 1 << 40 and first_day <= day
            if sound and seen & 1 and 0 < seen < 1 << KEPT_DAYS and all(map(_is_key, texts)):
                return Habit(tuple(bytes.fromhex(text) for text in texts), float(time_s), day, first_day, seen)
    raise InvalidInput(f"{where}: expected time_s, day, first_day, seen and keys as this version writes them")


def _is_key(text: Any) -> bool:
    if not isinstance(text, str) or not 0 < len(text) <= _MOST_KEY_DIGITS:
        return False
    try:
        return bool(bytes.fromhex(text))
    except ValueError:
        return False


def _zone(name: str | None) -> str:
    return "UTC" if name is None else name
