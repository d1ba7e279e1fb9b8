"""How the values of settings are written: whole numbers, sizes, durations, addresses, lists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from skymemory.errors import InvalidInput
from skymemory.units import parse_duration, parse_size


def setting(key: str, read: Callable[[object], Any], default: Any, says: str) -> Any:
    """A field of the schema: the key it is written by, how what is written there is read, and what it is."""
    return field(default=default, metadata={"key": key, "read": read, "says": says})


def text(value: object) -> str:
    if not isinstance(value, str):
        raise InvalidInput(f"{value!r}: expected text in quotes")
    return value


def texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise InvalidInput(f"{value!r}: expected a list of texts")
    return tuple(value)


def whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidInput(f"{value!r}: expected a whole number, 0 or more")
    return value


def integer(value: object) -> int:
    """A whole number that may be below 0."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidInput(f"{value!r}: expected a whole number")
    return value


def positive(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise InvalidInput(f"{value!r}: expected a number above 0")
    return float(value)


def wholes(value: object) -> tuple[int, ...]:
    """A list of whole numbers."""
    if not isinstance(value, list | tuple):
        raise InvalidInput(f"{value!r}: expected a list of whole numbers")
    return tuple(whole(each) for each in value)


def table(value: object) -> dict[str, object]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise InvalidInput(f"{value!r}: expected a table")
    return dict(value)


def whole_by_name(value: object) -> dict[str, int]:
    """A table of whole numbers, which may be negative."""
    numbers = table(value)
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int):
            raise InvalidInput(f"{name} is {number!r}: expected a whole number")
    return {name: int(str(number)) for name, number in numbers.items()}


def yes_or_no(value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(f"{value!r}: expected true or false")
    return value


def duration(value: object) -> float:
    """Seconds, or words such as ``"30s"``."""
    if isinstance(value, str):
        return parse_duration(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise InvalidInput(f"{value!r}: expected a duration, such as 30s")
    return float(value)


def size(value: object) -> int:
    """Bytes, or words such as ``"16MiB"``."""
    return parse_size(value) if isinstance(value, str) else whole(value)


def path(value: object) -> Path:
    return Path(text(value)).expanduser()


def address(value: object) -> str:
    """``http://host:port`` with nothing behind it but a path that requests are put under."""
    url = text(value).rstrip("/")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and url.isascii()
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment or parts.username is not None:
        raise InvalidInput(f"{value!r} is not the address of a server: expected one such as http://127.0.0.1:8001")
    return url


def host_and_port(listen: str) -> tuple[str, int]:
    """Of ``127.0.0.1:8080``, ``[::1]:8080`` or ``:8080`` (this computer only, too)."""
    host, colon, port = listen.rpartition(":")
    try:
        number = int(port)
    except ValueError:
        number = -1
    if not colon or not 0 <= number < 65536:
        raise InvalidInput(f"{listen!r} is not an address to listen at: expected one such as 127.0.0.1:8080")
    return host.strip("[]") or "127.0.0.1", number
