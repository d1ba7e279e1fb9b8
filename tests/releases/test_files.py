"""Files of an older release are read by this one, and this one's by the older; nothing is lost on either side."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.releases.conftest import Release

from skymemory.index.radix import BlockInfo
from skymemory.store.sky import shared_index
from skymemory.store.sky.shared_index import SharedIndex

SCRIPT = str(Path(__file__).parent / "files.py")
INFO = BlockInfo(3000, 10, 5, 1.5, 3, -2, "rotation_hop", 300)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
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


_WRITES_ON_REQUEST = """
import sys
from pathlib import Path
from skymemory.index.radix import BlockInfo
from skymemory.store.shared_index import SharedIndex
index = SharedIndex(Path(sys.argv[1]))
print("open", len(index), flush=True)
sys.stdin.readline()
index.add([bytes(31) + b"o"], [BlockInfo(3000, 10, 5, 1.5, 3, -2, "rotation_hop", 300)], 0, None)
print("written", flush=True)
sys.stdin.readline()
index.add([bytes(31) + b"p"], [BlockInfo(3000, 10, 5, 1.5, 3, -2, "rotation_hop", 300)], 0, None)
"""


def test_what_an_older_release_writes_while_the_journal_is_replaced_is_not_lost(
    older: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks whether its journal is the present one before it waits for the lock, and not after."""
    path = tmp_path / "index"
    monkeypatch.setattr(shared_index, "COMPACT_BYTES", 20_000)
    index = SharedIndex(path, born=True)
    index.add([bytes(31) + b"a"], [INFO], 0, None)
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITES_ON_REQUEST, str(path)],
        env=older.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdin is not None and writer.stdout is not None
    assert writer.stdout.readline().split() == ["open", "1"]
    rename, waited = Path.rename, []

    def rename_while_it_waits(new: Path, target: Path) -> Path:
        if not waited:
            writer.stdin.write("\n")  # type: ignore[union-attr]
            writer.stdin.flush()  # type: ignore[union-attr]
            until_s = time.monotonic() + 30
            while not waited:
                assert time.monotonic() < until_s
                waited.extend(re.findall(rf"-> FLOCK .* {writer.pid} ", Path("/proc/locks").read_text("ascii")))
        return rename(new, target)

    monkeypatch.setattr(Path, "rename", rename_while_it_waits)
    for number in range(200):
        keys = [bytes([number]) * 32, bytes([number + 1]) * 32]
        index.add(keys, [INFO] * 2, 0, None)
        index.remove(keys)
    assert waited and path.stat().st_size < 40_000
    assert writer.stdout.readline() == "written\n"
    assert index.infos([bytes(31) + b"o"]) == [INFO] and index.journal_state.complete
    writer.communicate("\n", timeout=20)
    asked = [bytes(31) + name for name in (b"a", b"o", b"p")]
    another = SharedIndex(path)
    for one in (index, another):
        assert one.infos(asked) == [INFO] * 3 and one.journal_state.complete
        one.close()
