"""Names and options as files, flags and URLs give them: registries by name, and what an unknown name may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from skymemory.errors import InvalidInput

_SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
Build = TypeVar("Build")


def suggestion(word: str, known: Collection[str]) -> str:
    """How the error about an unknown ``word`` ends: the nearest of the known words, or all of them."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}" if known else "there are none"


def converted(what: str, value: object, default: object) -> object:
    """``value`` as the type of ``default``: a switch, a whole number, a number or a word. Text is read as a flag's.

    Raises:
        InvalidInput: it cannot be read so; ``what`` begins the sentence.
    """
    wanted = type(default)
    if wanted is str and isinstance(value, str):
        return value
    if wanted is bool:
        switch = _SWITCHES.get(value.lower()) if isinstance(value, str) else value
        if isinstance(switch, bool):
            return switch
    elif wanted is not str and isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            number = float(value)
            if wanted is float:
                return number
            if number == int(number):
                return int(number)
        except (ValueError, OverflowError):
            pass
    expected = {bool: "true or false", int: "a whole number", str: "a word"}.get(wanted, "a number")
    raise InvalidInput(f"{what} is {value!r}; expected {expected}, such as {default}")


@dataclass(frozen=True, slots=True)
class NoSettings:
    """Of an entry without options."""


@dataclass(frozen=True, slots=True)
class Entry(Generic[Build]):
    description: str
    """One line, for help."""
    settings: type[Any]
    """A frozen dataclass: its options, with their defaults."""
    build: Build


class Registry(Mapping[str, Entry[Build]]):
    """Implementations of one interface by name, each with its options by name.

    ``kind`` is what errors call an entry, such as "routing strategy".
    """

    def __init__(self, kind: str, entries: Mapping[str, Entry[Build]]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> Entry[Build]:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def entry(self, name: str) -> Entry[Build]:
        """
        Raises:
            InvalidInput: there is none of that name.
        """
        found = self._entries.get(name)
        if found is None:
            raise InvalidInput(f"no {self.kind} {name!r}; {suggestion(name, tuple(self._entries))}")
        return found

    def options_of(self, name: str) -> dict[str, Any]:
        """The options of an entry, with their defaults.

        Raises:
            InvalidInput: there is none of that name.
        """
        return defaults_of(self.entry(name).settings)

    def settings(self, name: str, options: Mapping[str, object]) -> Any:
        """An entry's settings with these options set.

        Raises:
            InvalidInput: no entry or option of that name, or a value that it cannot have.
        """
        return self.entry(name).settings(**read_options(f"{self.kind} {name!r}", options, self.options_of(name)))


def defaults_of(settings: type[Any]) -> dict[str, Any]:
    made = settings()
    return {field.name: getattr(made, field.name) for field in fields(made)}


def read_options(owner: str, options: Mapping[str, object], known: Mapping[str, object]) -> dict[str, Any]:
    """Options converted to the types of their defaults. ``owner`` is named in errors.

    Raises:
        InvalidInput: an option that is not among the known ones, or a value that it cannot have.
    """
    read = {}
    for option, value in options.items():
        if option not in known:
            raise InvalidInput(f"{owner} has no option {option!r}; {suggestion(option, tuple(known))}")
        read[option] = converted(f"option {option!r} of {owner}", value, known[option])
    return read
