"""Options by name, as they come from files and flags: for whatever has a name and a dataclass of settings."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from skymemory.errors import InvalidInput

_SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def nearest(word: str, words: Iterable[str]) -> str:
    """`` (did you mean 'that'?)``, or nothing where none comes near."""
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def converted(what: str, value: object, default: object) -> object:
    """``value`` as what ``default`` is: a switch, a whole number, a number or a word.

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
