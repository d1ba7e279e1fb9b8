"""Whose directory a disk store may take: one process's at a time, and only one that is its own."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.contract.store_contract import key, value

from skymemory.errors import InvalidInput
from skymemory.store import disk_files
from skymemory.store.base import Presence
from skymemory.store.disk import DiskStore

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


def test_others_can_neither_read_nor_list_it(tmp_path: Path) -> None:
    (tmp_path / "found" / "values").mkdir(parents=True, mode=0o755)
    for path in (tmp_path / "made" / "deep", tmp_path / "found"):
        store = DiskStore(path, BUDGET_BYTES)
        store.put_many([(key(1), value(1))])
        modes = [one.stat().st_mode & 0o777 for one in (path, path / "values", path / "lock", path / "format")]
        assert modes == [0o700, 0o700, 0o600, 0o600]
        assert (path / "values" / key(1).hex()).stat().st_mode & 0o777 == 0o600
        store.close()


def test_a_directory_with_other_things_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    tmp_path.chmod(0o755)
    with pytest.raises(InvalidInput):
        DiskStore(tmp_path, BUDGET_BYTES)
    assert tmp_path.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("name", ["lock", "format", "values"])
@pytest.mark.parametrize("there", [True, False])
def test_a_link_in_its_place_is_neither_followed_nor_written_through(tmp_path: Path, name: str, there: bool) -> None:
    victim = tmp_path / "victim"
    if there:
        victim.mkdir() if name == "values" else victim.write_text("dear to its owner")
    store = tmp_path / "store"
    store.mkdir()
    (store / "format").write_text("skymemory disk store 1\n")
    (store / name).unlink(missing_ok=True)
    (store / name).symlink_to(victim)
    with pytest.raises(InvalidInput, match=name):
        DiskStore(store, BUDGET_BYTES)
    assert victim.exists() is there and (name == "values" or not there or victim.read_text() == "dear to its owner")


@pytest.mark.parametrize("name", ["lock", "format"])
def test_a_pipe_in_its_place_is_not_waited_for(tmp_path: Path, name: str) -> None:
    (tmp_path / "format").write_text("skymemory disk store 1\n")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(InvalidInput, match=f"{name} is not a regular file"):
        DiskStore(tmp_path, BUDGET_BYTES)


def _pipe(path: Path, elsewhere: Path) -> None:
    os.mkfifo(path)


def _link(path: Path, elsewhere: Path) -> None:
    path.symlink_to(elsewhere)


def _socket(path: Path, elsewhere: Path) -> None:
    os.mknod(path, 0o600 | stat.S_IFSOCK)


@pytest.mark.parametrize("plant", [_pipe, _link, _socket])
@pytest.mark.parametrize("running", [True, False])
def test_what_is_no_plain_file_among_the_values_is_a_miss_and_goes(
    tmp_path: Path, plant: Callable[[Path, Path], None], running: bool
) -> None:
    store = DiskStore(tmp_path / "store", BUDGET_BYTES)
    store.put_many([(key(1), value(1)), (key(2), value(2))])
    place, elsewhere = tmp_path / "store" / "values" / key(1).hex(), tmp_path / "elsewhere"
    place.rename(elsewhere)
    whole = elsewhere.read_bytes()
    plant(place, elsewhere)
    os.utime(elsewhere, ns=(5, 5))
    if not running:
        store.close()
        store = DiskStore(tmp_path / "store", BUDGET_BYTES)
    store.touch([key(1), key(2)])
    assert store.get_many([key(1), key(2)]) == [None, value(2)]
    assert store.lookup([key(1)]) == [Presence.MISS] and not os.path.lexists(place)
    assert elsewhere.read_bytes() == whole and elsewhere.stat().st_mtime_ns == 5
    assert store.put_many([(key(1), value(3))]) == [True] and store.get_many([key(1)]) == [value(3)]
    store.close()


def test_a_value_that_cannot_be_removed_is_not_said_to_be_deleted(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "store", BUDGET_BYTES)
    store.put_many([(key(1), value(1)), (key(2), value(2))])
    place = tmp_path / "store" / "values" / key(1).hex()
    place.rename(tmp_path / "elsewhere")
    place.mkdir()  # root may remove any file, but a directory is not one
    assert store.delete([key(1), key(2), key(3)]) == [None, True, False]
    place.rmdir()
    (tmp_path / "elsewhere").rename(place)
    assert store.get_many([key(1)]) == [value(1)] and store.delete([key(1)]) == [True]
    store.close()


@pytest.mark.parametrize("removed", ["all of it", "values and lock", "lock"])
def test_a_directory_that_another_process_has_taken_is_left_alone(tmp_path: Path, removed: str) -> None:
    """It was removed, or its lock, and opened again: what the other acknowledged stays, whatever the first one does."""
    path = tmp_path / "store"
    first = DiskStore(path, 10_000)
    first.put_many([(key(number), value(number, 2000)) for number in range(4)])
    if removed == "all of it":
        shutil.rmtree(path)
    else:
        (path / "lock").unlink()
    if removed == "values and lock":
        shutil.rmtree(path / "values")
    other = DiskStore(path, 20_000)
    assert other.put_many([(key(number), value(9, 2000)) for number in range(4)]) == [True] * 4
    before = sorted((path / "values").iterdir())
    ticket = first.prepare_store([(key(number), value(number, 3000)) for number in (1, 7)])
    assert first.complete_store(ticket) == [False, False] and "open it again" in ticket.reason
    assert first.delete([key(0)]) == [None] and first.expire([key(2)], 5.0) == [False]
    assert sorted((path / "values").iterdir()) == before
    first.close()
    assert other.get_many([key(number) for number in range(4)]) == [value(9, 2000)] * 4
    other.close()


def test_a_lock_that_was_removed_alone_is_made_again(tmp_path: Path) -> None:
    """What cleans up /tmp takes files that are old."""
    with DiskStore(tmp_path, BUDGET_BYTES) as store:
        (tmp_path / "lock").unlink()
        assert store.put_many([(key(1), value(1))]) == [True] and store.delete([key(1)]) == [True]
        with pytest.raises(InvalidInput, match="open already"):
            DiskStore(tmp_path, BUDGET_BYTES)


def test_a_delete_is_synced_where_the_key_was_evicted_just_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file would be back after a power cut."""
    done: list[str] = []
    with DiskStore(tmp_path, 5000, sync="each") as store:
        store.put_many([(key(1), value(1, 3000))])
        real = disk_files._sync_directory
        monkeypatch.setattr(disk_files, "_sync_directory", lambda path: done.append("sync") or real(path))
        store._evict([key(1)])
        assert store.delete([key(1)]) == [False] and done == ["sync"]
        assert store.delete([key(1)]) == [False] and done == ["sync"]
        store.put_many([(key(1), value(1, 3000))])
        store.expire([key(1)], 0.0)
        done.clear()
        assert store.delete([key(1)]) == [False] and done == ["sync"]


def test_a_torn_format_opens_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DiskStore(tmp_path, BUDGET_BYTES) as store:
        store.put_many([(key(1), value(1))])
    (tmp_path / "format").write_bytes(b"")

    def full(fd: int, data: bytes, at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with DiskStore(tmp_path, BUDGET_BYTES) as store:
            assert store.get_many([key(1)]) == [value(1)]
    with DiskStore(tmp_path, BUDGET_BYTES) as store:
        assert store.get_many([key(1)]) == [value(1)]
    assert (tmp_path / "format").read_text() == "skymemory disk store 1\n"


def test_a_lifetime_that_cannot_be_taken_away_is_not_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(fd: int, name: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with DiskStore(tmp_path, BUDGET_BYTES) as store:
        store.put_many([(key(1), value(1))])
        assert store.expire([key(1)], math.inf) == [True], "there was none"
        assert store.expire([key(1)], 1000.0) == [True]
        monkeypatch.setattr(os, "removexattr", fails)
        assert store.expire([key(1)], math.inf) == [False]
        assert 990 < store.left_s([key(1)])[0] <= 1000
