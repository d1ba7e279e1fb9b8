"""A cost model from a file, such as ``skymemory fit`` writes."""

from __future__ import annotations

from pathlib import Path

from skymemory.conductor.cost_model import CostModel
from skymemory.conductor.cost_model.written import parse
from skymemory.errors import InvalidInput
from skymemory.files import read_bounded


def read_cost(file: Path) -> CostModel:
    """The cost model in ``file``: JSON or TOML.

    Raises:
        InvalidInput: it cannot be read, or is none.
    """
    try:
        return parse(read_bounded(file).decode("utf-8"))
    except (OSError, UnicodeDecodeError, InvalidInput) as error:
        words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InvalidInput(f"cost model {file}: {words}") from error
