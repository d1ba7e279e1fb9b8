"""``passes`` and ``shells`` as they are called."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from sgp4.exporter import export_tle
from tests.constellation.synthetic import shell

from skymemory.cli.main import main


@pytest.fixture
def tle(tmp_path: Path) -> Path:
    elements, _, _ = shell(random.Random(1), 6, 12, 2, gap_share=0.1)
    path = tmp_path / "sky.tle"
    lines = [line for one in elements for line in (one.name, *export_tle(one.satrec))]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_passes_of_a_file_as_text_and_as_json(tle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["passes", "--lat", "-33.9", "--lon", "18.4", "--tle", str(tle), "--hours", "6", "--mask", "10"]
    assert main(asked) == 0
    text = capsys.readouterr().out
    assert "65 satellites of sky.tle above 10° over 33.9° S 18.4° E, 6 h from 2025-06-" in text
    assert "in sight      at least" in text and "the first 20:" in text and len(text.splitlines()) < 27
    assert main([*asked, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["satellites"] == 65 and len(printed["passes"]) > 20
    assert f"passes        {len(printed['passes'])}, the first 20:" in text
    whole = [one for one in printed["passes"] if one["rise"] and one["set"]]
    assert all(one["rise"] < one["culmination"] < one["set"] and one["elevation_deg"] >= 10 for one in whole)


def test_a_place_that_nothing_sees_is_said_with_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["passes", "--lat", "89", "--lon", "0", "--preset", "kuiper-b", "--hours", "1"]
    assert main(asked) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "none of 784 satellites of kuiper-b above 25° over 89° N 0° E in 1 h: the highest, plane" in said.err
    assert main([*asked, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["passes"] == []


def test_elements_of_another_month_are_refused(tle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["passes", "--lat", "20", "--lon", "18", "--tle", str(tle), "--hours", "3", "--start"]
    assert main([*asked, "2025-07-01T00:00"]) == 0
    assert "15 days from --start: times may be off by minutes" in capsys.readouterr().err
    assert main([*asked, "2025-09-15T00:00"]) == 2
    assert "91 days from --start: expected at most 30" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lat", "91", "--lon", "0"], "latitude 91: expected"),
        (["--lat", "0", "--lon", "361"], "longitude 361: expected"),
        (["--lat", "north", "--lon", "0"], "'north': expected a number"),
        (["--lat", "0", "--lon", "0", "--mask", "90"], "elevation mask 90"),
        (["--lat", "0", "--lon", "0", "--hours", "-1"], "-1 hours: expected more than 0"),
        (["--lat", "0", "--lon", "0", "--start", "noon"], "expected 'now' or a time in UTC"),
        (["--lat", "0", "--lon", "0", "--preset", "starlink-c"], "did you mean 'starlink-"),
        (["--lat", "0", "--lon", "0", "--preset", "testbed-19x5"], "no orbits of its own"),
        (["--lat", "0", "--lon", "0", "--tle", "absent.tle"], "cannot read absent.tle"),
        (["--lat", "0", "--lon", "0", "--skip-bad"], "--skip-bad without --tle"),
        (["--lat", "0", "--lon", "0", "--tle", "a", "--preset", "kuiper-a"], "not allowed with"),
        (["--lon", "0"], "required: --lat"),
    ],
)
def test_passes_answers_wrong_input(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["passes", *words]) == 2
    assert message in capsys.readouterr().err


def test_shells_of_a_file_add_up(tle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shells", str(tle)]) == 0
    text = capsys.readouterr().out
    assert "65 satellites: 65 in 1 shells, 0 left out" in text and "delta, F 2" in text
    assert main(["shells", str(tle), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    (found,) = printed["shells"]
    assert (found["planes"], found["slots_per_plane"], found["gaps"], found["phase"]) == (6, 12, 7, 2)
    assert sum(one is not None for plane in found["placed"] for one in plane) == 65
    assert [one["after_s"] for one in found["drift"]] == [86_400.0, 604_800.0]


def test_a_bad_file_is_refused_with_its_line_or_read_without_it(tle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = tle.read_text().splitlines()
    lines[4] = lines[4][:-1] + str((int(lines[4][-1]) + 1) % 10)
    tle.write_text("\n".join(lines))
    assert main(["shells", str(tle)]) == 2
    assert f"{tle}: line 5: checksum" in capsys.readouterr().err
    assert main(["shells", str(tle), "--skip-bad"]) == 0
    text = capsys.readouterr().out
    assert "64 satellites: 64 in 1 shells" in text
    assert "skipped       1 bad records, the first: line 5: checksum" in text
    for content, message in (
        (b"", "it is empty"),
        (b"<!doctype html><p>", "a web page (HTML)"),
        (b"\xff\xfe\x00", "it is UTF-16, expected UTF-8"),
    ):
        tle.write_bytes(content)
        assert main(["shells", str(tle)]) == 2
        assert message in capsys.readouterr().err
    # Satellites, but in no planes.
    tle.write_text("\n".join(lines[6:12]))
    assert main(["shells", str(tle)]) == 1
    assert "no shell in" in capsys.readouterr().err
