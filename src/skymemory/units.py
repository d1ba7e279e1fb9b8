"""Physical constants; sizes and durations as people write them."""

from __future__ import annotations

import math
import re

from skymemory.errors import InvalidInput, quoted

SPEED_OF_LIGHT_M_S = 299_792_458.0
EARTH_RADIUS_M = 6_371_000.0
EARTH_MU_M3_S2 = 3.986004418e14

_SIZE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
# Unlike in sizes, "m" alone means minutes.
_DURATION_UNITS = {
    "us": 1e-6,
    "µs": 1e-6,
    "ms": 1e-3,
    "": 1.0,
    "s": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}
_RATE_UNITS = {"": 1, "bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}
_MOST = 2.0**63
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Zµ]*)\s*")


LARGEST_WHOLE = 2**64 - 1
_LONGEST_WHOLE = 32
"""Characters that suffice; Python itself refuses 4,300 digits."""


def parse_whole(text: str) -> int:
    """Parse a whole number of at most 64 bits, such as ``1_000``."""
    word = text.strip()
    try:
        number = int(word[:_LONGEST_WHOLE])
    except ValueError:
        raise InvalidInput(f"{quoted(text)}: expected a whole number") from None
    if len(word) > _LONGEST_WHOLE or abs(number) > LARGEST_WHOLE:
        raise InvalidInput(f"{quoted(text)}: expected a whole number of at most 64 bits")
    return number


def parse_number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise InvalidInput(f"{quoted(text)}: expected a number") from None
    if not math.isfinite(number):
        raise InvalidInput(f"{quoted(text)}: expected a finite number")
    return number


def _parse(text: str, units: dict[str, float] | dict[str, int], what: str, example: str) -> float:
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2].lower() not in units:
        known = ", ".join(unit for unit in units if unit)
        raise InvalidInput(f"{quoted(text)} is not a {what}: expected a number and one of {known}, such as {example}")
    value = float(match[1]) * units[match[2].lower()]
    if value > _MOST:  # the limit of 64 bits in C and in files
        raise InvalidInput(f"{quoted(text)} is not a {what}: expected at most 2^63, such as {example}")
    return value


def parse_size(text: str) -> int:
    """Parse ``"64MiB"``, ``"6KB"``, ``"1.5g"`` or ``"4096"`` to bytes."""
    return int(_parse(text, _SIZE_UNITS, "size", "64MiB"))


def parse_rate(text: str) -> float:
    """Parse ``"200Mbit"``, ``"1.2 Gbit/s"`` or ``"64000"`` to bits per second."""
    return _parse(text.strip().removesuffix("/s"), _RATE_UNITS, "rate", "200Mbit")


def parse_duration(text: str) -> float:
    """Parse ``"30s"``, ``"5ms"``, ``"2h"`` or ``"1.5"`` to seconds."""
    return _parse(text, _DURATION_UNITS, "duration", "30s")


def parse_fraction(text: str) -> float:
    """Parse a share between 0 and 1: ``"1%"`` or ``"0.01"``."""
    number = text.strip().removesuffix("%").strip()
    try:
        share = float(number) / (100.0 if text.strip().endswith("%") else 1.0)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        raise InvalidInput(f"{quoted(text)} is not a share: expected 0 to 1 or 0% to 100%, such as 1%")
    return share


def format_size(size_bytes: float) -> str:
    """Format ``2_883_584`` as ``"2.8 MiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def format_duration(seconds: float) -> str:
    """Format ``0.00123`` as ``"1.23 ms"``."""
    magnitude = abs(seconds)
    if magnitude >= 1 or magnitude == 0:
        return f"{seconds:.2f} s"
    if magnitude >= 1e-3:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds * 1e6:.1f} µs"


_SCALE = re.compile(r"(?:[x×]\s*([0-9.]+)|([0-9.]+)\s*[x×])")


def parse_delay(text: str) -> float:
    """Parse a factor on the delays: ``real`` → 1, ``off`` → 0, ``x2`` (or ``×2``, ``2x``) → 2."""
    word = text.strip().lower()
    if word in ("real", "off"):
        return 1.0 if word == "real" else 0.0
    match = _SCALE.fullmatch(word)
    try:
        scale = float(match[1] or match[2]) if match else -1.0
    except ValueError:
        scale = -1.0
    if not 0.0 <= scale <= 1000.0:
        raise InvalidInput(f"delay {quoted(text)}: expected real, off, or a factor up to 1000 such as x2")
    return scale
