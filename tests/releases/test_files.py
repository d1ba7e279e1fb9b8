"""Files of an older release are read by this one, and this one's by the older; nothing is lost on either side."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.releases.conftest import Release

SCRIPT = str(Path(__file__).parent / "files.py")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("first", ["older", "newer"])
def test_what_one_release_writes_the_other_reads(first: str, older: Release, newer: Release, tmp_path: Path) -> None:
    writer, reader = (older, newer) if first == "older" else (newer, older)
    writer.run(SCRIPT, "write", str(tmp_path))
    before = contents(tmp_path)
    reader.run(SCRIPT, "check", str(tmp_path))
    after = contents(tmp_path)
    changed = {name for name in before if after.get(name) != before[name]}
    assert changed <= {"index", "disk/lock", "sealed/lock"}  # the journal was added to, the locks name a process
    writer.run(SCRIPT, "check-again", str(tmp_path))


def test_an_older_release_is_what_it_is_taken_for(older: Release) -> None:
    """That it would have deleted what a later one writes is why later versions are misses here."""
    said = older.run("-c", "import skymemory.errors as errors; print(sorted(vars(errors)))").stdout
    assert not re.search("LaterVersion|LaterFile", said)
