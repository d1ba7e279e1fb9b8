"""Element sets: every form gives the same satellites, bad ones an error with their line."""

from __future__ import annotations

import csv
import io
import json
import math
import random
from xml.sax.saxutils import escape

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sgp4.api import Satrec
from sgp4.exporter import export_omm, export_tle
from tests.constellation.synthetic import EPOCH_UNIX_S, element_set

from skymemory.constellation.tle import (
    ElementSet,
    error_reason,
    mean_elements,
    read_elements,
    teme_states,
)
from skymemory.constellation.visibility import GroundHost, place_m, place_up, sidereal_angle_rad
from skymemory.errors import InvalidInput, MissingExtra

SOME = [
    element_set(number, node_rad=number % 6, argument_rad=number % 5, bstar=1e-4)
    for number in (5, 44_713, 99_999, 100_000, 270_123, 339_999)
]
LINES = [export_tle(one.satrec) for one in SOME]
TEXT = "".join(f"{one.name}\n{first}\n{second}\n" for one, (first, second) in zip(SOME, LINES, strict=True))


def omm(one: ElementSet) -> dict[str, str]:
    return {key: str(value) for key, value in export_omm(one.satrec, one.name).items()}


def as_csv(records: list[dict[str, str]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(records[0]))
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue()


def as_xml(records: list[dict[str, str]]) -> str:
    mean = (
        "EPOCH",
        "MEAN_MOTION",
        "ECCENTRICITY",
        "INCLINATION",
        "RA_OF_ASC_NODE",
        "ARG_OF_PERICENTER",
        "MEAN_ANOMALY",
    )
    meta = ("OBJECT_NAME", "OBJECT_ID", "CENTER_NAME", "REF_FRAME", "TIME_SYSTEM", "MEAN_ELEMENT_THEORY")

    def part(tag: str, record: dict[str, str], keys: list[str]) -> str:
        return f"<{tag}>{''.join(f'<{key}>{escape(record[key])}</{key}>' for key in keys if key in record)}</{tag}>"

    body = ""
    for record in records:
        rest = [key for key in record if key not in (*mean, *meta)]
        data = part("meanElements", record, [*mean]) + part("tleParameters", record, rest)
        body += f"<omm><body><segment>{part('metadata', record, [*meta])}<data>{data}</data></segment></body></omm>"
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<ndm>{body}</ndm>'


OMM = [omm(one) for one in SOME]
FORMS = {
    "names": TEXT,
    "no names": "".join(f"{first}\n{second}\n" for first, second in LINES),
    "three lines": "".join(f"0 {one.name}\r\n{a}\r\n{b}\r\n" for one, (a, b) in zip(SOME, LINES, strict=True)),
    "blank lines": "\ufeff\n" + TEXT.replace("\nS", "\n\n\nS"),
    "csv": as_csv(OMM),
    "json": json.dumps(OMM),
    "json with numbers": json.dumps(
        [{key: float(value) if key == "MEAN_MOTION" else value for key, value in one.items()} for one in OMM]
    ),
    "xml": as_xml(OMM),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_satellites(form: str) -> None:
    read = read_elements(FORMS[form]).elements
    assert [one.number for one in read] == [one.number for one in SOME]
    assert [one.name for one in read] == ["" if form == "no names" else one.name for one in SOME]
    times = EPOCH_UNIX_S + np.array([0.0, 3_000.0, 86_400.0])
    expected, _, _ = teme_states([ElementSet("", 0, "", Satrec.twoline2rv(*lines)) for lines in LINES], times)
    found, _, errors = teme_states(read, times)
    assert not errors.any()
    # Two lines round angles to 0.0001°, which is 12 m.
    assert np.abs(found - expected).max() < 100
    assert abs(read[0].epoch_unix_s - EPOCH_UNIX_S) < 1e-3


def test_a_number_too_large_for_two_lines_and_an_epoch_without_a_fraction() -> None:
    record = {**OMM[0], "NORAD_CAT_ID": "799500123", "EPOCH": "2025-06-15T15:06:40Z"}
    (read,) = read_elements(json.dumps(record)).elements
    assert read.number == 799_500_123 and read.epoch_unix_s == pytest.approx(EPOCH_UNIX_S, abs=1e-4)


FIRST, SECOND = LINES[1]
OTHER_FIRST, OTHER_SECOND = LINES[2]


def resummed(line: str) -> str:
    worth = sum(int(letter) if letter.isdigit() else letter == "-" for letter in line[:68])
    return f"{line[:68]}{worth % 10}"


NEWER = resummed(FIRST[:22] + "9" + FIRST[23:])
BAD_LINES = {
    "checksum": (
        f"a\n{FIRST}\n{SECOND[:68]}{(int(SECOND[68]) + 1) % 10}\n",
        r"line 3: checksum \d, but its digits give",
    ),
    "truncated": (f"{FIRST[:60]}\n{SECOND}\n", "line 1: truncated, 60 characters: expected 69"),
    "too long": (f"{FIRST}\n{SECOND}0\n", "line 2: too long, 70"),
    "other pair": (f"{FIRST}\n{OTHER_SECOND}\n", "line 2: line 2 of satellite 99999 behind line 1 of satellite 44713"),
    "near number": (
        f"{FIRST}\n{resummed(SECOND[:6] + '4' + SECOND[7:])}\n",
        "line 2: line 2 of satellite 44714 behind line 1 of satellite 44713",
    ),
    "two epochs": (
        f"{FIRST}\n{SECOND}\n{NEWER}\n{SECOND}\n",
        r"line 3: a second element set of satellite \(44713\), after line 1",
    ),
    "no line 2": (
        f"{FIRST}\n{OTHER_FIRST}\n{OTHER_SECOND}\n",
        "line 1: line 1 of satellite 44713 has no line 2 behind it",
    ),
    "no line 1": (
        f"{SECOND}\n{OTHER_FIRST}\n{OTHER_SECOND}\n",
        "line 1: line 2 of satellite 44713 has no line 1 before",
    ),
    "cut": (f"{FIRST}\n{SECOND}\nname\n{OTHER_FIRST}\n", "line 4: .* the file is cut"),
    "name only": (f"{FIRST}\n{SECOND}\nname\n", "line 3: 'name' is not an element set"),
    "answer": ("No GP data found\n", "line 1: 'No GP data found' is not an element set"),
    "letters": (f"{FIRST}\n{resummed(SECOND[:10] + 'x' + SECOND[11:])}\n", "line 2: inclination in columns 9 to 16 is"),
    "range": (f"{FIRST}\n{resummed(SECOND[:8] + '181.0000' + SECOND[16:])}\n", "inclination is 181: expected 0 to 180"),
    "alpha-5": (
        f"{resummed(FIRST[:2] + 'I0001' + FIRST[7:])}\n{resummed(SECOND[:2] + 'I0001' + SECOND[7:])}\n",
        "catalogue number 'I0001': expected five digits",
    ),
    "hyperbola": (f"{FIRST}\n{resummed(SECOND[:52] + '00.00000000' + SECOND[63:])}\n", "mean motion is 0"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_bad_lines_are_refused_with_their_number_or_skipped(name: str) -> None:
    text, message = BAD_LINES[name]
    with pytest.raises(InvalidInput, match=message):
        read_elements(text)
    good = "".join(f"{first}\n{second}\n" for first, second in LINES[3:])
    kept = read_elements(good + text, skip_bad=True)
    assert len(kept.skipped) >= 1 and {one.number for one in SOME[3:]} <= {one.number for one in kept.elements}
    if name == "two epochs":
        assert kept.elements[-1].epoch_unix_s > read_elements(f"{FIRST}\n{SECOND}\n").elements[0].epoch_unix_s


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is empty"),
        (" \n\r\n", "it is empty"),
        ("<!DOCTYPE html>\n<html><body>503</body></html>", r"a web page \(HTML\)"),
        ("<html>", r"a web page \(HTML\)"),
        ('<!DOCTYPE x [<!ENTITY a "b">]><ndm/>', "document type"),
        ("<ndm><omm>", "not XML"),
        ("<ndm></ndm>", "no element set in it"),
        ("<omm><segment><metadata/></segment></omm>", "not Orbit Mean-Elements Messages"),
        ('{"error": "You must be logged in"}', "not a list of records"),
        ('[{"a": 1', "not JSON"),
        ("[1]", "record 1: NORAD_CAT_ID is missing"),
        ("[]", "no element set in it"),
        (json.dumps([OMM[0], {**OMM[1], "MEAN_MOTION": ""}]), "record 2: MEAN_MOTION is missing"),
        (json.dumps([{**OMM[0], "ECCENTRICITY": "nan"}]), "record 1: ECCENTRICITY is 'nan': expected a number"),
        (json.dumps([{**OMM[0], "ECCENTRICITY": "1.5"}]), "record 1: SGP4 refuses these elements: mean eccentricity"),
        (json.dumps([{**OMM[0], "EPOCH": "yesterday"}]), "record 1: .*yesterday"),
        (json.dumps([{**OMM[0], "TIME_SYSTEM": "TAI"}]), "record 1: TIME_SYSTEM is 'TAI': expected UTC"),
        (json.dumps([{**OMM[0], "INCLINATION": "-3"}]), "record 1: INCLINATION is -3: expected 0 to 180"),
        (as_csv([OMM[0], OMM[1], OMM[0]]), r"line 4: a second element set of S5 \(5\), after line 2"),
        (as_csv(OMM)[: as_csv(OMM).index("S44713") + 50], "line 3: .* is missing"),
    ],
)
def test_what_is_no_file_of_element_sets_says_what_it_is(text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        read_elements(text)


def test_without_sgp4_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skymemory.constellation.tle.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install .*\[tle\]"):
        read_elements(TEXT)


@given(st.integers(0, len(TEXT) - 1), st.sampled_from(" 0123456789-+.AIR:e_\n\té"))
def test_a_changed_character_changes_no_satellite_unnoticed(at: int, letter: str) -> None:
    """In a line's columns any other digit or letter is refused; only names may differ, and what counts the same."""
    changed = TEXT[:at] + letter + TEXT[at + 1 :]
    try:
        read = read_elements(changed).elements
    except InvalidInput:
        return
    expected = {one.number: one for one in read_elements(TEXT).elements}
    for one in read:
        same = expected[one.number].satrec
        for name in ("ecco", "inclo", "nodeo", "argpo", "mo", "no_kozai", "bstar", "jdsatepoch"):
            # A minus sign counts as a 1 does, a blank as a zero: no checksum sees those apart.
            if letter not in "-1 0+":
                assert getattr(one.satrec, name) == getattr(same, name)


@given(st.text(st.sampled_from(' 012AS.-\n<{[,"MEAN_MOTION'), max_size=80))
def test_any_text_is_answered(text: str) -> None:
    with pytest.raises(InvalidInput):
        read_elements(text)


def test_a_satellite_that_decays_has_an_error_and_the_others_their_numbers() -> None:
    falling = element_set(7, node_rad=1, argument_rad=1, altitude_m=160e3, bstar=0.05)
    times = EPOCH_UNIX_S + np.array([0.0, 20 * 86400.0])
    position, _, errors = teme_states([SOME[0], falling], times)
    assert errors[0] == 0 and errors[1] != 0 and np.isfinite(position[0]).all()
    assert error_reason(int(errors[1])) and error_reason(77) == "SGP4 error 77"
    assert list(mean_elements([SOME[0], falling], float(times[1])).error > 0) == [False, True]


def test_earth_fixed_positions_are_those_of_skyfield() -> None:
    """An independent chain: TEME, GCRS with precession and nutation, ITRS."""
    skyfield = pytest.importorskip("skyfield.api")
    scale = skyfield.load.timescale(builtin=True)
    draw = random.Random(3)
    for one in SOME[:3]:
        satellite = skyfield.EarthSatellite.from_satrec(one.satrec, scale)
        for _ in range(3):
            place = skyfield.wgs84.latlon(draw.uniform(-90, 90), draw.uniform(-180, 180), draw.uniform(0, 4000))
            here = GroundHost(place.latitude.degrees, place.longitude.degrees)
            up = place_up(here)
            assert np.abs(place_m(here) + place.elevation.m * up - place.itrs_xyz.m).max() < 1e-3
            assert np.linalg.norm(up) == pytest.approx(1.0)
            unix_s = EPOCH_UNIX_S + draw.uniform(0, 86400)
            moment = scale.utc(2025, 6, 15, 15, 6, 40 + unix_s - EPOCH_UNIX_S)
            theirs = satellite.at(moment).frame_xyz(skyfield.itrs if hasattr(skyfield, "itrs") else _itrs()).m
            position, _, _ = teme_states([one], np.array([unix_s]))
            # UT1 and UTC differ by up to 0.1 s in 2025: 50 m at this radius.
            angle = sidereal_angle_rad(unix_s, 0.0)
            cosine, sine = math.cos(angle), math.sin(angle)
            turn = np.array([[cosine, sine, 0.0], [-sine, cosine, 0.0], [0.0, 0.0, 1.0]])
            assert np.abs(turn @ position[0, 0] - theirs).max() < 80


def _itrs() -> object:
    from skyfield.framelib import itrs

    return itrs
