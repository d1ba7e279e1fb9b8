"""The index journal between processes and threads: removed under an open client, written at once, out of room."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from skymemory.index.block_info import BlockInfo
from skymemory.store.shared_index import SharedIndex

INFO = BlockInfo(1, 10, 0, 0.0, 0, 0, "rotation_hop", 10)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def add(index: SharedIndex, number: int) -> None:
    index.add([key(number)], [INFO], 0, None)


def test_a_journal_that_was_removed_is_begun_anew_by_whoever_has_it_open(tmp_path: Path) -> None:
    path = tmp_path / "run" / "index"
    old = SharedIndex(path)
    add(old, 1)
    path.unlink()
    path.parent.rmdir()
    add(old, 2)
    assert len(old) == 2 and not path.parent.exists()
    path.parent.mkdir()
    new = SharedIndex(path)
    add(new, 3)
    assert old.infos([key(1), key(2), key(3)]) == [None, None, INFO]
    add(old, 4)
    assert new.infos([key(4)]) == [INFO]


def test_threads_that_share_an_index_lose_nothing(tmp_path: Path) -> None:
    index = SharedIndex(tmp_path / "index")
    threads = [
        threading.Thread(target=lambda first=first: [add(index, first + n) for n in range(50)])
        for first in (0, 1000, 2000, 3000)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(index) == len(SharedIndex(tmp_path / "index")) == 200


def test_a_record_that_was_not_written_whole_is_forgotten_and_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, other = SharedIndex(tmp_path / "index"), SharedIndex(tmp_path / "index")
    add(index, 1)
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:20]))
    add(index, 2)
    monkeypatch.undo()
    assert index.infos([key(1), key(2)]) == other.infos([key(1), key(2)]) == [INFO, None]
    add(other, 3)
    assert index.infos([key(1), key(2), key(3)]) == [INFO, None, INFO]
