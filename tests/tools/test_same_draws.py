"""The default run draws the same examples whatever else was imported; the profile `fresh` does not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DRAWN = Path(__file__).with_name("drawn.py")


def drawn(*options: str, **environment: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", str(DRAWN), *options],
        capture_output=True,
        text=True,
        cwd=DRAWN.parents[2],
        env={**os.environ, **environment},
        timeout=240,
    )
    found = re.search(r"drawn: ([0-9a-f]{64})", ran.stdout)
    assert ran.returncode == 0 and found is not None, ran.stdout + ran.stderr
    return found[1]


@pytest.mark.brief()
def test_the_same_everywhere() -> None:
    alone = drawn(PYTHONHASHSEED="1", CI="")
    beside_others = drawn(
        "-p",
        "skymemory.protocol.satellite.machine",
        "-p",
        "skymemory.constellation.orbit",
        PYTHONHASHSEED="2",
        CI="true",
    )
    assert alone == beside_others


@pytest.mark.brief()
def test_fresh_draws_by_its_seed() -> None:
    fresh = ("--hypothesis-profile=fresh", "--hypothesis-seed")
    first = drawn(*fresh, "1")
    assert first == drawn(*fresh, "1") != drawn(*fresh, "2")
