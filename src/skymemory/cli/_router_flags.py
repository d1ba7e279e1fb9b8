"""Flags of `route` and `epp` as a settings file would say them."""

from __future__ import annotations

from typing import Any

from skymemory.errors import InvalidInput


def said(table: dict[str, Any]) -> dict[str, Any]:
    """Without what was not said."""
    tables = {key: said(value) if isinstance(value, dict) else value for key, value in table.items()}
    return {key: value for key, value in tables.items() if value is not None and value != {}}


def option(text: str) -> tuple[str, object]:
    """``name=value``; a value that reads as a number, true or false is one."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidInput(f"--option {text!r}: expected NAME=VALUE")
    if value in ("true", "false"):
        return name, value == "true"
    for read in (int, float):
        try:
            return name, read(value)
        except ValueError:
            continue
    return name, value
