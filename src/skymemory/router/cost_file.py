"""A cost model by name, or from a file, such as ``skymemory fit`` writes."""

from __future__ import annotations

from pathlib import Path

from skymemory.conductor.cost_model import PRESETS, CostModel
from skymemory.conductor.cost_model.written import parse
from skymemory.errors import InvalidInput
from skymemory.files import read_bounded


def read_cost(file: Path) -> CostModel:
    """The cost model in ``file``: JSON or TOML; or the preset of that name, where there is no such file.

    Raises:
        InvalidInput: it cannot be read, or is none.
    """
    if str(file) in PRESETS and not file.exists():
        return PRESETS[str(file)]
    try:
        return parse(read_bounded(file).decode("utf-8"))
    except (OSError, UnicodeDecodeError, InvalidInput) as error:
        words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        named = f"; or one of {', '.join(PRESETS)}" if isinstance(error, FileNotFoundError) else ""
        raise InvalidInput(f"cost model {file}: {words}{named}") from error
