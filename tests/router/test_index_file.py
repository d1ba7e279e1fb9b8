"""An index in a file: found again, whole or not at all, and never another's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.router.replica_tools import KIND, chain, save_index

from skymemory.conductor.prefix_index.approximate import ApproximatePrefixIndex
from skymemory.errors import InvalidInput
from skymemory.router.prefix_state import load_index

SAVER = """
import sys
from pathlib import Path
from tests.router.replica_tools import KIND, chain, save_index
from skymemory.conductor.prefix_index.approximate import ApproximatePrefixIndex
index = ApproximatePrefixIndex(1000)
for number in range(20):
    index.learn(number % 2, chain(number))
save_index(Path(sys.argv[1]), index, KIND, {"a": 0, "b": 1})
"""


def test_the_next_process_knows_what_this_one_did(tmp_path: Path) -> None:
    path = tmp_path / "index"
    index = ApproximatePrefixIndex(1000)
    assert load_index(path, index, KIND, {"a": 0}) == 0
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([".", *sys.path])}
    subprocess.run([sys.executable, "-c", SAVER, str(path)], env=environment, check=True, timeout=240)
    assert load_index(path, index, KIND, {"b": 0, "c": 1}) == 200
    assert [index.match(chain(number), [0, 1]) for number in range(4)] == [[0, 0], [20, 0], [0, 0], [20, 0]]
    assert [entry.name for entry in tmp_path.iterdir()] == ["index"], "nothing half-written is left"


def test_a_file_that_cannot_be_used_says_why_and_leaves_an_empty_index(tmp_path: Path) -> None:
    path = tmp_path / "index"
    index = ApproximatePrefixIndex(1000)
    index.learn(0, chain(1))
    size = save_index(path, index, KIND, {"a": 0})
    whole = path.read_bytes()
    assert len(whole) == size
    with pytest.raises(InvalidInput, match="index: a snapshot of blocks of kind 'tokens 16'"):
        load_index(path, ApproximatePrefixIndex(9), "characters 64", {"a": 0})
    for damaged in (whole[:-1], whole[:50] + bytes([whole[50] ^ 1]) + whole[51:], b""):
        path.write_bytes(damaged)
        fresh = ApproximatePrefixIndex(1000)
        with pytest.raises(InvalidInput, match=r"damaged|not a snapshot"):
            load_index(path, fresh, KIND, {"a": 0})
        assert fresh.blocks_of(0) == 0
    with pytest.raises(InvalidInput, match="cannot be read"):
        load_index(tmp_path, index, KIND, {"a": 0})
    with pytest.raises(InvalidInput, match="cannot be saved"):
        save_index(tmp_path / "nowhere" / "index", index, KIND, {"a": 0})


def test_a_write_that_fails_leaves_the_file_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "index"
    index = ApproximatePrefixIndex(1000)
    index.learn(0, chain(1))
    save_index(path, index, KIND, {"a": 0})
    index.learn(0, chain(2))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InvalidInput, match="No space left"):
        save_index(path, index, KIND, {"a": 0})
    monkeypatch.undo()
    assert [entry.name for entry in tmp_path.iterdir()] == ["index"]
    fresh = ApproximatePrefixIndex(1000)
    assert load_index(path, fresh, KIND, {"a": 0}) == 20
