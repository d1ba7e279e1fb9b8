"""Whose directory a disk store may take: one process's at a time, and only one that is its own."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
from tests.contract.store_contract import key, value

from skymemory.errors import InvalidInput
from skymemory.store.disk.store import DiskStore

BUDGET_BYTES = 1 << 20


def test_one_process_at_a_time(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, BUDGET_BYTES)
    with pytest.raises(InvalidInput, match=f"open already.*{os.getpid()}"):
        DiskStore(tmp_path, BUDGET_BYTES)
    store.put_many([(key(1), value(1))])
    store.close()
    again = DiskStore(tmp_path, BUDGET_BYTES)
    assert again.get_many([key(1)]) == [value(1)]
    again.close()


def test_a_refused_directory_is_not_left_locked(tmp_path: Path) -> None:
    (tmp_path / "format").write_text("skymemory disk store 99\n")
    with pytest.raises(InvalidInput, match="expected 'skymemory disk store 1'"):
        DiskStore(tmp_path, BUDGET_BYTES)
    with open(tmp_path / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_directory_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(InvalidInput, match=r"thesis.tex"):
        DiskStore(tmp_path, BUDGET_BYTES)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_what_is_no_directory_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InvalidInput, match="no disk store at"):
            DiskStore(path, BUDGET_BYTES)
    with pytest.raises(InvalidInput, match="sync"):
        DiskStore(tmp_path / "disk", BUDGET_BYTES, sync="sometimes")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="budget"):
        DiskStore(tmp_path / "disk", 0)


def test_names_that_are_not_ours_stay(tmp_path: Path) -> None:
    DiskStore(tmp_path, BUDGET_BYTES).close()
    for name in ("README", "A" * 64, "z" * 64):
        (tmp_path / "values" / name).write_text("x")
    (tmp_path / "values" / f"{key(1).hex()}.7.part").write_text("x")
    DiskStore(tmp_path, BUDGET_BYTES).close()
    assert sorted(os.listdir(tmp_path / "values")) == ["A" * 64, "README", "z" * 64]
