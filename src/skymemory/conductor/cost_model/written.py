"""A cost model as a file has it: JSON, or TOML of the same tables."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any, TypeVar

from skymemory.conductor.cost_model.model import CostModel
from skymemory.conductor.cost_model.shapes import Machine, ModelShape
from skymemory.errors import InvalidInput

FORMAT = "skymemory-cost/1"
T = TypeVar("T")


def dump(cost: CostModel, notes: Mapping[str, Any] | None = None) -> str:
    """``cost`` as JSON; ``notes``: where it comes from, which no reader looks at."""
    return json.dumps({"format": FORMAT, **asdict(cost), "notes": dict(notes or {})}, indent=1) + "\n"


def parse(text: str) -> CostModel:
    """What ``dump`` wrote, or the same as TOML.

    Raises:
        InvalidInput: it is neither, lacks something, or has what no cost model has.
    """
    try:
        table = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"neither JSON nor TOML: {error}") from error
    if table.get("format") != FORMAT:
        raise InvalidInput(f"not a cost model: expected format = {FORMAT!r}, as `skymemory fit` writes it")
    numbers = {name: value for name, value in table.items() if name not in ("format", "notes", "shape", "machine")}
    shape = _filled(ModelShape, _table(table, "shape"), "shape")
    machine = _filled(Machine, _table(table, "machine"), "machine")
    return _filled(CostModel, {**numbers, "shape": shape, "machine": machine}, "")


def _table(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = table.get(name)
    if not isinstance(found, dict):
        raise InvalidInput(f"{name}: expected a table")
    return found


def _filled(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    """``kind`` with ``values``, each of which must be what the field is."""
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    place = f"{where}: " if where else ""
    for name, value in values.items():
        if name not in known:
            raise InvalidInput(f"{place}no key {name!r}; there are {', '.join(known)}")
        wanted = {"str": str, "int": int, "float": (int, float)}.get(str(known[name].type))
        if wanted is not None and (isinstance(value, bool) or not isinstance(value, wanted)):  # type: ignore[arg-type]
            raise InvalidInput(f"{place}{name} is {value!r}; expected {known[name].type}")
    missing = [name for name, field in known.items() if field.default is MISSING and name not in values]
    if missing:
        raise InvalidInput(f"{place}lacks {', '.join(missing)}")
    return kind(**values)
