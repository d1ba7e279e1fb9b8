"""Element sets of real satellites, as two lines or as OMM (CCSDS 502.0).

They are valid only with SGP4, so the package ``sgp4`` does all mechanics, in TEME (true equator, mean equinox).
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from skymemory.config import parse_json
from skymemory.errors import InvalidInput, missing_extra

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

UNIX_EPOCH_JULIAN_DAYS = 2440587.5

_LINE_LENGTH = 69
# A minus sign counts as one, digits count their value, all else nothing.
_CHECKSUM_WORTH = bytes(c - 48 if 48 <= c <= 57 else int(c == 45) for c in range(256))
# A blank between fields; without it sgp4 would read on into the next field.
_FIRST_COLUMNS = re.compile(r"1 .{5}\S .{8} .{14} .{10} .{8} .{8} [ 0-9] [ 0-9]{4}\d")
_SECOND_COLUMNS = re.compile(r"2 .{5} .{8} .{8} .{7} .{8} .{8} .{11}[ 0-9]{5}\d")
_EXPONENT = re.compile(r"[ +-][0-9 ]{5}[+-][0-9]| {8}")
_LARGEST_ALPHA5 = 339_999
# I and O look like digits.
_NUMBER = re.compile(r"[ 0-9]{4}[0-9]|[A-HJ-NP-Z][0-9]{4}")
_OMM_FIXED = {"MEAN_ELEMENT_THEORY": ("SGP4", "SGP/SGP4"), "REF_FRAME": ("TEME",), "TIME_SYSTEM": ("UTC",)}
_OMM_NUMBERS = (
    "NORAD_CAT_ID",
    "MEAN_MOTION",
    "ECCENTRICITY",
    "INCLINATION",
    "RA_OF_ASC_NODE",
    "ARG_OF_PERICENTER",
    "MEAN_ANOMALY",
    "BSTAR",
    "MEAN_MOTION_DOT",
)
_OMM_OPTIONAL = {
    "CLASSIFICATION_TYPE": "U",
    "OBJECT_ID": "",
    "EPHEMERIS_TYPE": "0",
    "ELEMENT_SET_NO": "0",
    "REV_AT_EPOCH": "0",
    "MEAN_MOTION_DDOT": "0",
}


@dataclass(frozen=True, slots=True, eq=False)
class ElementSet:
    """Mean elements of a satellite, and their place in the file."""

    name: str
    number: int
    """NORAD catalogue number."""
    where: str
    satrec: Any = field(repr=False)
    """Record of ``sgp4``. Propagating changes it, so threads must not share it."""

    @property
    def epoch_unix_s(self) -> float:
        days = self.satrec.jdsatepoch - UNIX_EPOCH_JULIAN_DAYS
        return float(days * 86400.0 + self.satrec.jdsatepochF * 86400.0)

    def __str__(self) -> str:
        return f"{self.name or 'satellite'} ({self.number})"


@dataclass(frozen=True, slots=True)
class ElementFile:
    """Sets in the order of the file, a satellite's newest only, and the reasons for skipped records."""

    elements: tuple[ElementSet, ...]
    skipped: tuple[str, ...] = ()


def read_elements(text: str, *, skip_bad: bool = False) -> ElementFile:
    """Return the element sets of a text: two-line (with or without names), or OMM as CSV, JSON or XML.

    ``skip_bad`` skips and lists bad records and all but a satellite's newest set.

    Raises:
        InvalidInput: a bad record (with its line), or no element set.
        MissingExtra: ``sgp4`` is not installed.
    """
    if find_spec("sgp4") is None:
        raise missing_extra("reading element sets", "sgp4", "tle")
    text = text.removeprefix("\ufeff")
    start = text.lstrip()
    if not start:
        raise InvalidInput("it is empty: expected two-line elements, or OMM as CSV, JSON or XML")
    skipped: list[str] = []
    refuse: Callable[[str], None] = skipped.append if skip_bad else _refuse
    if start[0] == "<":
        records = _omm(_xml_records(start), refuse)
    elif start[0] in "[{":
        records = _omm(_json_records(start), refuse)
    elif "MEAN_MOTION" in start.partition("\n")[0]:
        records = _omm(_csv_records(start), refuse)
    else:
        records = _two_line(text.splitlines(), refuse)
    newest: dict[int, ElementSet] = {}
    for record in records:
        other = newest.get(record.number)
        if other is not None:
            # Only one of two sets of a satellite can be current, and a cluster would count the satellite twice.
            refuse(
                f"{record.where}: a second element set of {record}, after {other.where}: "
                "expected one of each satellite, the newest"
            )
        if other is None or record.epoch_unix_s > other.epoch_unix_s:
            newest[record.number] = record
    if not newest:
        reasons = f"; the first of {len(skipped)} bad records: {skipped[0]}" if skipped else ""
        raise InvalidInput(f"no element set in it: expected two-line elements, or OMM as CSV, JSON or XML{reasons}")
    return ElementFile(tuple(newest.values()), tuple(skipped))


def _refuse(reason: str) -> None:
    raise InvalidInput(f"{reason} (or leave bad records out: --skip-bad, in a file skip_bad = true)")


def _two_line(lines: Sequence[str], refuse: Callable[[str], None]) -> Iterator[ElementSet]:
    """Yield the element sets of two-line text; ``refuse`` gets the reason for each bad record, and may raise."""
    from sgp4.api import SGP4_ERRORS, Satrec

    name = ""
    named_at = 0
    first: tuple[int, str] | None = None
    for at, raw in enumerate(lines, 1):
        line = raw.rstrip()
        if not line:
            continue
        kind = line[:2] if line[:2] in ("1 ", "2 ") else ""
        if first is not None and kind != "2 ":
            refuse(f"line {first[0]}: line 1 of satellite {first[1][2:7].strip()} has no line 2 behind it")
            first = None
        if not kind:
            if name:
                refuse(f"line {named_at}: {name[:40]!r} is not an element set, and none follows it")
            # Space-Track's three-line form has "0 " before the name.
            name, named_at = line.removeprefix("0 ").strip(), at
        elif kind == "1 ":
            first = at, line
        elif first is None:
            refuse(f"line {at}: line 2 of satellite {line[2:7].strip()} has no line 1 before it")
            name = ""
        else:
            (first_at, first_line), first = first, None
            wrong = _wrong_line(first_at, first_line, _FIRST_FIELDS) or _wrong_line(at, line, _SECOND_FIELDS)
            if not wrong and first_line[2:7] != line[2:7]:
                wrong = (
                    f"line {at}: line 2 of satellite {line[2:7].strip()} behind line 1 of satellite "
                    f"{first_line[2:7].strip()}: expected two lines of one satellite"
                )
            if wrong:
                refuse(wrong)
            else:
                satrec = Satrec.twoline2rv(first_line, line)
                if satrec.error:
                    refuse(f"line {first_at}: SGP4 refuses these elements: {SGP4_ERRORS[satrec.error]}")
                else:
                    yield ElementSet(name, int(satrec.satnum), f"line {first_at}", satrec)
            name = ""
    if first is not None:
        refuse(f"line {first[0]}: line 1 of satellite {first[1][2:7].strip()} has no line 2 behind it: the file is cut")
    elif name:
        refuse(f"line {named_at}: {name[:40]!r} is not an element set, and none follows it")


def _fraction(text: str) -> float:
    return float(f"0.{int(text):0{len(text)}d}")


def _exponent(text: str) -> float:
    """Check a number such as `` 12345-3`` (0.12345e-3)."""
    if not _EXPONENT.fullmatch(text):
        raise ValueError(text)
    return 0.0


@dataclass(frozen=True, slots=True)
class _Field:
    """Columns of a two-line set, with a parser and limits of the value."""

    start: int
    stop: int
    what: str
    read: Callable[[str], float] = float
    least: float = -math.inf
    most: float = math.inf


# Columns as in Space Track Report 3, from 0; only the fields that SGP4 reads.
_FIRST_FIELDS = (
    _Field(18, 20, "year of the epoch"),
    _Field(20, 32, "day of the epoch", float, 1, 367),
    _Field(33, 43, "first derivative of the mean motion"),
    _Field(44, 52, "second derivative of the mean motion", _exponent),
    _Field(53, 61, "drag term B*", _exponent),
)
_SECOND_FIELDS = (
    _Field(8, 16, "inclination", float, 0, 180),
    _Field(17, 25, "right ascension of the node", float, 0, 360),
    _Field(26, 33, "eccentricity", _fraction),
    _Field(34, 42, "argument of perigee", float, 0, 360),
    _Field(43, 51, "mean anomaly", float, 0, 360),
    _Field(52, 63, "mean motion", float, 0.01, 18),
)


def _wrong_line(at: int, line: str, fields: Sequence[_Field]) -> str | None:
    if len(line) != _LINE_LENGTH:
        cut = "truncated" if len(line) < _LINE_LENGTH else "too long"
        return f"line {at}: {cut}, {len(line)} characters: expected {_LINE_LENGTH}"
    if not line.isascii():
        return f"line {at}: a letter that is not ASCII"
    checksum = sum(line[:-1].encode().translate(_CHECKSUM_WORTH)) % 10
    if line[-1] != str(checksum):
        return f"line {at}: checksum {line[-1]}, but its digits give {checksum}: the line is damaged, download it again"
    if not _NUMBER.fullmatch(line[2:7]):
        return f"line {at}: catalogue number {line[2:7]!r}: expected five digits, or a letter (not I, O) and four"
    if not (_FIRST_COLUMNS if line[0] == "1" else _SECOND_COLUMNS).fullmatch(line):
        return f"line {at}: columns out of place: expected a blank between fields, as in the two-line format"
    for field_ in fields:
        text = line[field_.start : field_.stop]
        try:
            value = field_.read(text)
        except ValueError:
            return (
                f"line {at}: {field_.what} in columns {field_.start + 1} to {field_.stop} is {text!r}: "
                "expected a number"
            )
        if not field_.least <= value <= field_.most:
            return f"line {at}: {field_.what} is {value:g}: expected {field_.least:g} to {field_.most:g}"
    return None


Record = tuple[str, Mapping[str, Any]]


def _omm(records: Iterator[Record], refuse: Callable[[str], None]) -> Iterator[ElementSet]:
    """Yield the element sets of OMM records (place in the file, values); ``refuse`` as in ``_two_line``."""
    from sgp4 import omm
    from sgp4.api import SGP4_ERRORS, Satrec

    for where, raw in records:
        values = {key: value for key, value in raw.items() if value not in (None, "")}
        try:
            for key, expected in _OMM_FIXED.items():
                if str(values.get(key, expected[0])).upper() not in expected:
                    raise InvalidInput(f"{key} is {values[key]!r}: expected {expected[0]}")
            for key in _OMM_NUMBERS:
                _finite(key, values[key])
            number = int(values["NORAD_CAT_ID"])
            # strptime in sgp4 needs a fraction; some writers append the zone, which is always UTC.
            epoch = str(values["EPOCH"]).removesuffix("Z")
            values["EPOCH"] = epoch if "." in epoch else f"{epoch}.0"
            datetime.fromisoformat(values["EPOCH"])
            # sgp4's record has room only for numbers of two-line sets; analysts' numbers are larger.
            small = {"NORAD_CAT_ID": number if 0 <= number <= _LARGEST_ALPHA5 else 0}
            satrec = Satrec()
            omm.initialize(satrec, {**_OMM_OPTIONAL, **values, **small})
            if not 0 <= satrec.inclo <= math.pi:
                raise InvalidInput(f"INCLINATION is {values['INCLINATION']}: expected 0 to 180")
            if satrec.error:
                raise InvalidInput(f"SGP4 refuses these elements: {SGP4_ERRORS[satrec.error]}")
        except KeyError as error:
            refuse(f"{where}: {error.args[0]} is missing: expected an Orbit Mean-Elements Message")
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            refuse(f"{where}: {error}")
        else:
            yield ElementSet(str(values.get("OBJECT_NAME", "")), number, where, satrec)


def _finite(key: str, value: Any) -> None:
    try:
        finite = math.isfinite(float(value))
    except (TypeError, ValueError, OverflowError):
        finite = False
    if not finite:
        raise InvalidInput(f"{key} is {value!r}: expected a number")


def _csv_records(text: str) -> Iterator[Record]:
    from sgp4 import omm

    rows = omm.parse_csv(io.StringIO(text, newline=""))
    try:
        for row in rows:
            yield f"line {rows.line_num}", row
    except csv.Error as error:
        raise InvalidInput(f"line {rows.line_num} is not CSV: {error}") from error


def _json_records(text: str) -> Iterator[Record]:
    document = parse_json(text)
    if isinstance(document, dict) and "MEAN_MOTION" in document:
        document = [document]
    if not isinstance(document, list):
        raise InvalidInput("JSON, but not a list of records: expected Orbit Mean-Elements Messages")
    for at, record in enumerate(document, 1):
        yield f"record {at}", record if isinstance(record, dict) else {}


def _xml_records(text: str) -> Iterator[Record]:
    from sgp4 import omm

    head = text[:2000].lower()
    if "<html" in head or "<!doctype html" in head:
        raise InvalidInput(
            "a web page (HTML), not element sets: the download answered with an error or asked for a login"
        )
    if "<!doctype" in head or "<!entity" in text.lower():
        raise InvalidInput("XML with a document type: expected Orbit Mean-Elements Messages, which have none")
    try:
        for at, record in enumerate(omm.parse_xml(io.StringIO(text)), 1):
            yield f"record {at}", record
    except ElementTree.ParseError as error:
        raise InvalidInput(f"not XML: {error}") from error
    except (AttributeError, TypeError) as error:
        raise InvalidInput(
            "XML, but not Orbit Mean-Elements Messages (metadata, meanElements, tleParameters)"
        ) from error


@dataclass(frozen=True, slots=True)
class MeanElements:
    """Mean elements by SGP4 at a common time: secular terms with drag, no periodic terms.

    ``axis_m`` is Brouwer's semi-major axis; ``error`` is SGP4's code, 0 if valid.
    """

    inclination_rad: Array
    node_rad: Array
    argument_rad: Array
    """Mean argument of latitude: perigee plus mean anomaly."""
    eccentricity: Array
    axis_m: Array
    error: NDArray[np.int64]


def mean_elements(elements: Sequence[ElementSet], unix_s: float) -> MeanElements:
    import numpy as np

    day, fraction = julian_days(np.array([unix_s]))
    rows = np.empty((len(elements), 5))
    errors = np.zeros(len(elements), dtype=np.int64)
    for row, element_set in enumerate(elements):
        satrec = element_set.satrec
        errors[row] = satrec.sgp4(float(day[0]), float(fraction[0]))[0]
        rows[row] = (satrec.im, satrec.Om, satrec.om + satrec.mm, satrec.em, satrec.am * satrec.radiusearthkm * 1000)
    return MeanElements(rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3], rows[:, 4], errors)


def julian_days(unix_s: Array) -> tuple[Array, Array]:
    """Return the Julian day in two parts; a single number would be exact to 40 µs only."""
    import numpy as np

    day = np.floor(unix_s / 86400.0)
    return day + UNIX_EPOCH_JULIAN_DAYS, (unix_s - day * 86400.0) / 86400.0


def teme_states(elements: Sequence[ElementSet], unix_s: Array) -> tuple[Array, Array, NDArray[np.int64]]:
    """Return positions (m) and velocities (m/s) in TEME, shape ``(satellites, times, 3)``, and SGP4's first errors (0:
    none).
    """
    import numpy as np
    from sgp4.api import SatrecArray

    day, fraction = julian_days(unix_s)
    errors, position_km, velocity_km_s = SatrecArray([element_set.satrec for element_set in elements]).sgp4(
        day, fraction
    )
    return 1000.0 * position_km, 1000.0 * velocity_km_s, np.max(errors, axis=1).astype(np.int64)


def error_reason(code: int) -> str:
    from sgp4.api import SGP4_ERRORS

    return str(SGP4_ERRORS.get(code, f"SGP4 error {code}"))
