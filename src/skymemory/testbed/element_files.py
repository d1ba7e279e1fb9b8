"""Files of element sets, and the shells in them as constellations."""

from __future__ import annotations

from pathlib import Path

from skymemory.constellation.clustering import cluster
from skymemory.constellation.presets import Preset
from skymemory.constellation.tle import ElementFile, read_elements
from skymemory.errors import InvalidInput, cannot_read
from skymemory.files import MAX_TABLE_BYTES, read_text


def flown_shell(path: Path, number: int, skip_bad: bool) -> Preset:
    """Return a shell of a file of element sets as a constellation; ``skymemory shells`` shows its ``number``."""
    shells = cluster(read_element_file(path, skip_bad).elements).shells
    if not 1 <= number <= len(shells):
        known = f"1 to {len(shells)}, as `skymemory shells {path}` lists them" if shells else "a file with one"
        raise InvalidInput(f"no shell {number} in {path}: expected {known}")
    return shells[number - 1].flown(f"{path.stem} shell {number}").preset()


def read_element_file(path: Path, skip_bad: bool) -> ElementFile:
    try:
        text = read_text(path, MAX_TABLE_BYTES)
    except OSError as error:
        raise InvalidInput(cannot_read(path, error)) from error
    except InvalidInput as error:
        raise InvalidInput(f"{error}; expected two-line elements, or OMM as CSV, JSON or XML") from error
    try:
        return read_elements(text, skip_bad=skip_bad)
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error}") from None
