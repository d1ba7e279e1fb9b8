"""Configuration from files, flags and URLs: registries, schemas, readers of values."""

from __future__ import annotations

import difflib
import json
import math
import sys
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from skymemory.errors import InvalidInput, quoted
from skymemory.units import LARGEST_WHOLE, parse_duration, parse_fraction, parse_size

_LARGEST = sys.float_info.max
_LARGEST_OF_JSON = 10**308
_SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
Build = TypeVar("Build")
Schema = TypeVar("Schema")


def suggestion(word: str, known: Collection[str]) -> str:
    """Return the end of an error: the nearest known word, or all."""
    # 0.5 (difflib's default is 0.6): half of the letters may differ, because known words are few and dissimilar.
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"expected one of {', '.join(dict.fromkeys(known))}" if known else "there are none"


def parse_toml(content: str) -> dict[str, Any]:
    """Return the tables of a TOML text.

    Raises:
        InvalidInput: no TOML, or a whole number of more than 64 bits.
    """
    try:
        tables = tomllib.loads(content)
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput(f"not TOML: {error}") from error
    except (ValueError, RecursionError) as error:  # Python's own limit of digits, or of nested brackets
        raise InvalidInput(f"not TOML: {_parsers_limit(error)}") from error
    _check_wholes(tables, "", LARGEST_WHOLE, "64 bits")
    return tables


def parse_json(content: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        InvalidInput: no JSON, or a whole number of more than 308 digits.
    """
    try:
        document = json.loads(content)
    except json.JSONDecodeError as error:
        if not content.strip():
            raise InvalidInput("not JSON: it is empty") from error
        raise InvalidInput(f"not JSON at line {error.lineno}, column {error.colno}: {error.msg.lower()}") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"not JSON: {error}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"not JSON: {_parsers_limit(error)}") from error
    # A larger limit than for TOML: tokenizers have a model_max_length of 10^30.
    _check_wholes(document, "", _LARGEST_OF_JSON, "308 digits")
    return document


def _parsers_limit(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "brackets within brackets, too deep"
    if "digits" in str(error):
        return "a whole number of more than 4,300 digits"
    return str(error)


def _check_wholes(node: Any, where: str, most: int, words: str) -> None:
    if isinstance(node, dict):
        for name, value in node.items():
            _check_wholes(value, f"{where}.{name}" if where else str(name), most, words)
    elif isinstance(node, list):
        for number, value in enumerate(node):
            _check_wholes(value, f"{where}[{number}]", most, words)
    elif isinstance(node, int) and abs(node) > most:
        named = f"{where}: " if where else ""
        raise InvalidInput(f"{named}{quoted(node)}: expected a whole number of at most {words}")


def converted(what: str, value: object, default: object) -> object:
    """Convert ``value`` to the type of ``default``; text is parsed like a flag.

    Raises:
        InvalidInput: another type; ``what`` begins the message.
    """
    wanted = type(default)
    if wanted is str and isinstance(value, str):
        return value
    if wanted is bool:
        switch = _SWITCHES.get(value.lower()) if isinstance(value, str) else value
        if isinstance(switch, bool):
            return switch
    # Booleans are refused as numbers explicitly: in Python each is an ``int``.
    elif wanted is not str and isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            number = float(value)
            # Infinity means that a limit is off. It is accepted only as a word, not as an overflow of too many
            # digits.
            if wanted is float and (math.isfinite(number) or str(value).lower().lstrip("+-") in ("inf", "infinity")):
                return number
            if wanted is int and number == int(number):
                return int(number)
        except (ValueError, OverflowError):
            pass
    expected = {bool: "true or false", int: "a whole number", str: "a word"}.get(wanted, "a number")
    raise InvalidInput(f"{what} is {quoted(value)}; expected {expected}, such as {default}")


@dataclass(frozen=True, slots=True)
class NoSettings: ...


@dataclass(frozen=True, slots=True)
class RegistryEntry(Generic[Build]):
    description: str
    settings: type[Any]
    """Dataclass of its options, with defaults."""
    build: Build


class Registry(Mapping[str, RegistryEntry[Build]]):
    """Registry of implementations by name; ``kind`` is the word for an entry in errors."""

    def __init__(self, kind: str, entries: Mapping[str, RegistryEntry[Build]]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> RegistryEntry[Build]:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def entry(self, name: str) -> RegistryEntry[Build]:
        """Return an entry; raise InvalidInput for an unknown name."""
        entry = self._entries.get(name)
        if entry is None:
            raise InvalidInput(f"no {self.kind} {name!r}; {suggestion(name, tuple(self._entries))}")
        return entry

    def options_of(self, name: str) -> dict[str, Any]:
        """Return options with defaults; raise InvalidInput for an unknown name."""
        return defaults_of(self.entry(name).settings)

    def settings(self, name: str, options: Mapping[str, object]) -> Any:
        """Return settings.

        Raises:
            InvalidInput: an unknown entry or option, or an invalid value.
        """
        return self.entry(name).settings(**read_options(f"{self.kind} {name!r}", options, self.options_of(name)))


def defaults_of(settings: type[Any]) -> dict[str, Any]:
    made = settings()
    return {field.name: getattr(made, field.name) for field in fields(made)}


def read_options(owner: str, options: Mapping[str, object], known: Mapping[str, object]) -> dict[str, Any]:
    """Convert options to the types of their defaults.

    Raises:
        InvalidInput: an unknown option, or an invalid value.
    """
    read = {}
    for option, value in options.items():
        if option not in known:
            raise InvalidInput(f"{owner} has no option {option!r}; {suggestion(option, tuple(known))}")
        read[option] = converted(f"option {option!r} of {owner}", value, known[option])
    return read


# Schemas: frozen dataclasses whose fields are ``setting``s, read from tables such as TOML's.


def setting(key: str, read: Callable[[object], Any], default: Any, says: str) -> Any:
    """Declare a schema's field: key, reader, default, and a line for the reference."""
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata={"key": key, "read": read, "says": says})
    return field(default=default, metadata={"key": key, "read": read, "says": says})


def known_keys(kind: type[Any]) -> dict[str, Field[Any]]:
    return {option.metadata["key"]: option for option in fields(kind) if "key" in option.metadata}


def filled(
    kind: type[Schema], table: Mapping[str, Any], where: str, sections: Iterable[str] = (), **more: Any
) -> Schema:
    """Build a schema from a table. ``where`` begins errors; ``sections`` are further keys to suggest.

    Raises:
        InvalidInput: an unknown key, or an invalid value.
    """
    known = known_keys(kind)
    values = dict(more)
    for key, value in table.items():
        place = f"{where}: {key}" if where else key
        if key not in known:
            raise InvalidInput(f"{place}: unknown setting; {suggestion(key, [*known, *sections])}")
        try:
            values[known[key].name] = known[key].metadata["read"](value)
        except InvalidInput as error:
            raise InvalidInput(f"{place}: {error}") from error
    try:
        return kind(**values)
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}" if where else str(error)) from error


def section(kind: type[Schema]) -> Callable[[object], Schema]:
    """Return a reader of a table with the keys of ``kind``."""
    return lambda value: filled(kind, table(value), "")


def overlaid(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables ``below`` with the values of ``above`` in their place."""
    merged = dict(below)
    for key, value in above.items():
        previous = merged.get(key)
        merged[key] = (
            overlaid(previous, value) if isinstance(value, Mapping) and isinstance(previous, Mapping) else value
        )
    return merged


def text(value: object) -> str:
    if not isinstance(value, str):
        raise InvalidInput(f"{quoted(value)}: expected text in quotes")
    return value


def one_of(*words: str) -> Callable[[object], str]:

    def read(value: object) -> str:
        if value not in words:
            raise InvalidInput(f"{value!r}: {suggestion(str(value), words)}")
        return str(value)

    return read


def texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise InvalidInput(f"{quoted(value)}: expected a list of texts")
    return tuple(value)


def whole_number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidInput(f"{quoted(value)}: expected a whole number, 0 or more")
    return value


def integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidInput(f"{quoted(value)}: expected a whole number")
    return value


def positive(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LARGEST:
        raise InvalidInput(f"{quoted(value)}: expected a number above 0")
    return float(value)


def number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
        raise InvalidInput(f"{quoted(value)}: expected a finite number")
    return float(value)


def share(value: object) -> float:
    if isinstance(value, str):
        return parse_fraction(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise InvalidInput(f"{quoted(value)}: expected a share from 0 to 1, such as 0.5")
    return float(value)


def whole_numbers(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise InvalidInput(f"{quoted(value)}: expected a list of whole numbers")
    return tuple(whole_number(item) for item in value)


def table(value: object) -> dict[str, object]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise InvalidInput(f"{quoted(value)}: expected a table")
    return dict(value)


def whole_by_name(value: object) -> dict[str, int]:
    numbers = table(value)
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int):
            raise InvalidInput(f"{name} is {quoted(number)}: expected a whole number")
    return {name: int(str(number)) for name, number in numbers.items()}


def yes_or_no(value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(f"{quoted(value)}: expected true or false")
    return value


def duration(value: object) -> float:
    if isinstance(value, str):
        return parse_duration(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LARGEST:
        raise InvalidInput(f"{quoted(value)}: expected a duration, such as 30s")
    return float(value)


def size(value: object) -> int:
    return parse_size(value) if isinstance(value, str) else whole_number(value)


def path(value: object) -> Path:
    return Path(text(value)).expanduser()
