"""Settings from a TOML file and from flags, by the schema in `settings`; a key that it does not know is an error."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from skymemory.errors import InvalidInput
from skymemory.files import read_bounded
from skymemory.router.picker_settings import PickerSettings
from skymemory.router.settings import (
    AdmissionSettings,
    Backend,
    Health,
    Limits,
    Prompts,
    ReplicaSettings,
    Retries,
    Settings,
    Timeouts,
)

SECTIONS: Mapping[str, type[Any]] = {
    "prompts": Prompts,
    "limits": Limits,
    "timeouts": Timeouts,
    "health": Health,
    "retries": Retries,
    "replicas": ReplicaSettings,
    "admission": AdmissionSettings,
    "picker": PickerSettings,
}
T = TypeVar("T")


def read_settings(file: Path | None, flags: Mapping[str, Any] | None = None) -> Settings:
    """What stands in ``file``, and over it what ``flags`` say (a table of the same form).

    Raises:
        InvalidInput: it cannot be read, has a key that we do not know, or a value that is none.
    """
    table: dict[str, Any] = {} if file is None else _toml(file)
    where = "the flags" if file is None else str(file)
    try:
        return settings_from(_over(table, flags or {}))
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}") from error


def settings_from(table: Mapping[str, Any]) -> Settings:
    sections = {name: _filled(kind, _table(table.get(name, {}), name), name) for name, kind in SECTIONS.items()}
    options = _table(table.get("options", {}), "options")
    backends = table.get("backends", [])
    if not isinstance(backends, list):
        raise InvalidInput("backends: expected [[backends]] tables, one for each")
    read = [_filled(Backend, _backend(each), f"backends, number {at}") for at, each in enumerate(backends, 1)]
    own = {key: value for key, value in table.items() if key not in {*SECTIONS, "options", "backends"}}
    return _filled(Settings, own, "", backends=tuple(read), options=dict(options), **sections)


def known_keys(kind: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    """Fields of a part of the schema by the keys under which they are written."""
    return {field.metadata["key"]: field for field in dataclasses.fields(kind) if "key" in field.metadata}


def _filled(kind: type[T], table: Mapping[str, Any], where: str, **more: Any) -> T:
    fields = known_keys(kind)
    values = dict(more)
    for key, value in table.items():
        place = f"{where}: {key}" if where else key
        if key not in fields:
            sections = [*SECTIONS, "options", "backends"] if kind is Settings else []
            raise InvalidInput(f"{place}: there is no such setting; {_suggestion(key, [*fields, *sections])}")
        try:
            values[fields[key].name] = fields[key].metadata["read"](value)
        except InvalidInput as error:
            raise InvalidInput(f"{place}: {error}") from error
    try:
        return kind(**values)
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}" if where else str(error)) from error


def _suggestion(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(sorted(known))}"


def _table(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidInput(f"{name}: expected a table, [{name}]")
    return value


def _backend(value: object) -> Mapping[str, Any]:
    """A table, or only its address."""
    return {"url": value} if isinstance(value, str) else _table(value, "backends")


def _toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_bounded(file).decode("utf-8"))
    except OSError as error:
        raise InvalidInput(f"{str(file)!r} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{str(file)!r} is not TOML: {error}") from error


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Tables are joined, all else is replaced by what is said above."""
    joined = dict(below)
    for key, value in above.items():
        old = joined.get(key)
        joined[key] = _over(old, value) if isinstance(value, Mapping) and isinstance(old, Mapping) else value
    return joined
