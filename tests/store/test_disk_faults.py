"""What a disk does to one: torn and flipped files, no room, readers beside a writer. Kills: test_disk_kills.py."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.contract.store_contract import key, value

from skymemory.errors import InvalidInput
from skymemory.store import disk as disk_store
from skymemory.store import disk_files
from skymemory.store.base import Presence
from skymemory.store.disk import DiskStore
from skymemory.store.disk_files import file_name

BUDGET_BYTES = 1 << 20


def test_a_new_process_finds_values_and_their_order_of_use(tmp_path: Path) -> None:
    size = BUDGET_BYTES // 4
    first = DiskStore(tmp_path, BUDGET_BYTES)
    first.put_many([(key(n), value(n, size)) for n in range(4)])
    first.get_many([key(3)])
    first.touch([key(1)])
    first.close()
    second = DiskStore(tmp_path, BUDGET_BYTES)
    assert second.lookup([key(n) for n in range(4)]) == [Presence.HIT] * 4
    assert second.stats()["used_bytes"] == BUDGET_BYTES
    second.put_many([(key(9), value(9, 2 * size))])  # 2, then 0: the end of the chain and then its beginning
    assert [found is Presence.HIT for found in second.lookup([key(n) for n in range(4)])] == [False, True, False, True]
    assert second.get_many([key(1), key(3)]) == [value(1, size), value(3, size)]
    second.close()


def test_the_order_of_use_is_written_each_second_and_at_the_end(tmp_path: Path) -> None:
    """What a kill loses of it is the last second's."""
    now_s = [0.0]
    store = DiskStore(tmp_path, BUDGET_BYTES, clock=lambda: now_s[0])
    store.put_many([(key(n), value(n, 100)) for n in range(4)])

    def order() -> list[int]:
        stamps = {n: (tmp_path / "values" / file_name(key(n))).stat().st_mtime_ns for n in range(4)}
        return sorted(stamps, key=stamps.__getitem__)

    now_s[0] = 2.0
    store.get_many([key(2)])
    assert order()[-1] == 2
    store.get_many([key(3)])
    store.get_many([key(0)])
    store.get_many([key(3)])
    assert order()[-1] == 2, "within the second"
    now_s[0] = 3.5
    store.get_many([key(1)])
    assert order() == [2, 0, 3, 1]
    store.get_many([key(2)])
    store.close()
    assert order() == [0, 3, 1, 2]


def test_one_value_read_without_a_lease_counts_as_any(tmp_path: Path) -> None:
    """A file that is gone, or replaced, between looking and reading; and one that is damaged."""
    store = DiskStore(tmp_path, BUDGET_BYTES)
    store.put_many([(key(n), value(n, 300)) for n in range(3)])
    (tmp_path / "values" / file_name(key(0))).unlink()
    file = tmp_path / "values" / file_name(key(1))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert [store.get_many([key(n)]) for n in range(4)] == [[None], [None], [value(2, 300)], [None]]
    assert (store.stats()["hits_total"], store.stats()["misses_total"]) == (1, 3)
    assert store.get_many([key(1)]) == [None] and not file.exists(), "what is damaged is dropped"
    with pytest.raises(InvalidInput):
        store.get_many([b"short"])
    store.close()
    with pytest.raises(InvalidInput):
        store.get_many([key(2)])


def test_a_smaller_budget_evicts_the_least_recently_used_at_the_start(tmp_path: Path) -> None:
    first = DiskStore(tmp_path, BUDGET_BYTES)
    first.put_many([(key(n), value(n)) for n in range(8)])
    first.close()
    second = DiskStore(tmp_path, 3000)
    assert second.prefix([key(n) for n in range(8)]) == 3 and second.stats()["entries"] == 3
    assert len(os.listdir(tmp_path / "values")) == 3
    second.close()


def _cut(to: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:to]


def _flip(at: int) -> Callable[[bytes], bytes]:
    def harm(data: bytes) -> bytes:
        flipped = bytearray(data)
        flipped[at] ^= 1
        return bytes(flipped)

    return harm


_HARMS: dict[str, Callable[[bytes], bytes]] = {
    "empty": _cut(0),
    "cut in the header": _cut(40),
    "cut at the header": _cut(64),
    "cut in the value": _cut(5000),
    "last byte cut": _cut(-1),
    "one byte more": lambda data: data + b"x",
    "magic flipped": _flip(0),
    "key flipped": _flip(9),
    "size flipped": _flip(41),
    "value's checksum flipped": _flip(57),
    "header's checksum flipped": _flip(61),
    "first byte flipped": _flip(64),
    "last byte flipped": _flip(-1),
    "zeros": lambda data: bytes(len(data)),
    "zeros behind the header": lambda data: data[:64] + bytes(len(data) - 64),
}


def _harm(path: Path, harm: Callable[[bytes], bytes]) -> None:
    file = path / "values" / key(1).hex()
    harmed = bytearray(file.read_bytes())
    file.write_bytes(harm(bytes(harmed)))


@pytest.mark.parametrize("harm", _HARMS.values(), ids=_HARMS)
@pytest.mark.parametrize("open_meanwhile", [True, False])
def test_a_broken_file_is_a_miss_counted_and_dropped(
    tmp_path: Path, harm: Callable[[bytes], bytes], open_meanwhile: bool
) -> None:
    store = DiskStore(tmp_path, BUDGET_BYTES)
    store.put_many([(key(n), value(n, 10_000)) for n in range(3)])
    if not open_meanwhile:
        store.close()
    _harm(tmp_path, harm)
    if not open_meanwhile:
        store = DiskStore(tmp_path, BUDGET_BYTES)
    got = store.get_many([key(n) for n in range(3)])
    if len(harm(bytes(10_064))) > 10_064 and open_meanwhile:
        assert got[1] == value(1, 10_000)  # what follows the value is not read
        return
    assert got == [value(0, 10_000), None, value(2, 10_000)]
    stats = store.stats()
    assert stats.get("torn_total", 0) + stats.get("unread{corrupt}_total", 0) == 1
    assert stats["entries"] == 2 and stats["used_bytes"] == 20_000
    assert store.lookup([key(1)]) == [Presence.MISS] and not (tmp_path / "values" / key(1).hex()).exists()
    assert store.put_many([(key(1), b"new")]) == [True] and store.get_many([key(1)]) == [b"new"]
    store.close()


def test_the_report_says_why_it_is_a_miss(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, BUDGET_BYTES)
    store.put_many([(key(1), value(1)), (key(2), value(2))])
    _harm(tmp_path, _flip(-1))
    (tmp_path / "values" / key(2).hex()).unlink()
    ticket = store.prepare_load([key(1), key(2), key(3)])
    store.complete_load(ticket)
    assert ticket.report is not None
    assert [report.reason for report in ticket.report.keys] == ["corrupt", "absent", "absent"]
    store.close()


def test_too_many_open_files_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(tmp_path, BUDGET_BYTES)
    store.put_many([(key(1), value(1))])
    with monkeypatch.context() as patch:
        patch.setattr(disk_files.os, "open", _raising(errno.EMFILE))
        assert store.get_many([key(1)]) == [None]
    assert store.stats()["unread{unreadable}_total"] == 1
    assert store.get_many([key(1)]) == [value(1)]
    store.close()


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES, errno.ENOMEM])
def test_what_cannot_be_opened_at_the_start_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    with DiskStore(tmp_path, BUDGET_BYTES) as store:
        store.put_many([(key(1), value(1)), (key(2), b"")])
    with monkeypatch.context() as patch:
        patch.setattr(disk_files, "stored_bytes", _raising(code))
        store = DiskStore(tmp_path, BUDGET_BYTES)
    with store:
        assert store.stats()["torn_total"] == 0 and store.stats()["used_bytes"] == 1000
        assert store.get_many([key(1), key(2)]) == [value(1), b""]


def _raising(code: int) -> Callable[..., int]:
    def fail(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    return fail


def test_a_full_disk_refuses_the_rest_of_the_chain_and_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(tmp_path, BUDGET_BYTES)
    room = [25_000]
    writev = os.writev

    def short_writes(fd: int, parts: list[memoryview]) -> int:
        """A disk with little room writes what fits, and then says that it is full."""
        if room[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = parts[0][: room[0]]
        room[0] -= part.nbytes
        return writev(fd, [part])

    with monkeypatch.context() as patch:
        patch.setattr(disk_files.os, "writev", short_writes)
        assert store.put_many([(key(n), value(n, 10_000)) for n in range(4)]) == [True, True, False, False]
    assert store.stats()["failed{ENOSPC}_total"] == 1 and store.stats()["used_bytes"] == 20_000
    assert len(os.listdir(tmp_path / "values")) == 2
    assert store.lookup([key(2)]) == [Presence.MISS]
    assert store.get_many([key(0), key(1)]) == [value(0, 10_000), value(1, 10_000)]
    assert store.put_many([(key(2), value(2, 10_000))]) == [True]
    store.close()


def test_what_is_not_sure_to_be_on_the_disk_is_not_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(tmp_path, BUDGET_BYTES, sync="each")
    with monkeypatch.context() as patch:
        patch.setattr(disk_files.os, "fdatasync", _raising(errno.EIO))
        assert store.put_many([(key(1), value(1))]) == [False]
    with monkeypatch.context() as patch:
        patch.setattr(disk_files.os, "fsync", _raising(errno.EIO))
        assert store.put_many([(key(1), value(1))]) == [False]
    assert store.stats()["failed{EIO}_total"] == 2
    assert store.put_many([(key(1), value(1))]) == [True]
    store.close()


def test_readers_see_old_or_new_while_a_writer_replaces(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, BUDGET_BYTES)
    versions = [value(n, 1000 * (n % 3 + 1)) for n in range(60)]
    store.put_many([(key(1), versions[0])])
    wrong: list[object] = []
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            (view,) = store.get_many([key(1)])
            if view is None or bytes(view) not in versions:
                wrong.append(view)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for version in versions:
        store.put_many([(key(1), version)])
    ended.set()
    for reader in readers:
        reader.join()
    assert wrong == []
    assert store.stats().get("unread{corrupt}_total", 0) == 0
    store.close()


def test_a_file_of_another_value_under_its_name_is_a_miss(tmp_path: Path) -> None:
    """Whole and sound, and of the same size: only the key in it differs."""
    store = DiskStore(tmp_path, BUDGET_BYTES)
    store.put_many([(key(n), value(n)) for n in (1, 2)])
    files = {n: tmp_path / "values" / disk_files.file_name(key(n)) for n in (1, 2)}
    files[2].unlink()
    files[2].write_bytes(files[1].read_bytes())
    assert store.get_many([key(1), key(2)]) == [value(1), None] and not files[2].exists()
    store.close()


def test_evicted_values_take_no_room_in_the_folder(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 3000)
    for number in range(12):
        assert store.put_many([(key(number), value(number))]) == [True]
    assert len(os.listdir(tmp_path / "values")) == store.stats()["entries"] < 12
    store.close()


def test_a_load_that_is_given_up_while_it_reads_lends_its_room_to_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(tmp_path, BUDGET_BYTES)
    store.put_many([(key(n), value(n)) for n in (1, 2)])
    read, kept = disk_store.read_file, []

    def give_up_first(*how: object) -> object:
        if not kept:
            kept.append(None)
            store.release(ticket)
            kept[:] = store.complete_load(store.prepare_load([key(2)]))
        return read(*how)

    monkeypatch.setattr(disk_store, "read_file", give_up_first)
    ticket = store.prepare_load([key(1)])
    assert store.complete_load(ticket) == [value(1)] and kept == [value(2)]
    store.close()


def test_released_rooms_are_used_again_and_kept_ones_are_not(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, BUDGET_BYTES)
    store.put_many([(key(1), value(1, 9000)), (key(2), value(2, 9000))])
    ticket = store.prepare_load([key(1)])
    (kept,) = store.complete_load(ticket)
    (other,) = store.complete_load(store.prepare_load([key(2)]))
    assert kept == value(1, 9000) and other == value(2, 9000)
    store.release(ticket)
    store.release(ticket)
    store.complete_load(store.prepare_load([key(2)]))
    assert kept == value(2, 9000)  # given back, and written over
    assert other == value(2, 9000)
    store.close()


def _fill(store: DiskStore, values: int, size: int) -> list[bytes]:
    for n in range(values):
        assert store.put_many([(key(n), value(n, size))]) == [True]
    return [key(n) for n in range(values)]


def _stored_bytes(path: Path) -> int:
    return sum(file.stat().st_size - disk_files.HEADER_BYTES for file in (path / "values").iterdir())


@pytest.mark.parametrize("fault", ["ENOSPC", "EDQUOT", "EIO", "EROFS"])
def test_a_write_that_fails_evicts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Of a disk that others have filled: all that could go for it does not make room for it."""
    store = DiskStore(tmp_path, 100_000)
    keys = _fill(store, 8, 10_000)
    with monkeypatch.context() as patch:
        patch.setattr(disk_files.os, "writev", _raising(getattr(errno, fault)))
        patch.setattr(
            disk_files.os, "statvfs", lambda path: os.statvfs_result((4096, 4096, 100, 0, 0, 0, 0, 0, 0, 255))
        )
        assert store.put_many([(key(99), value(99, 85_000))]) == [False]
    assert store.lookup(keys) == [Presence.HIT] * 8 and store.stats().get("evicted_total", 0) == 0
    assert store.get_many(keys) == [value(n, 10_000) for n in range(8)]
    assert store.put_many([(key(99), value(99, 85_000))]) == [True]
    assert store.stats()["used_bytes"] == _stored_bytes(tmp_path) <= 100_000
    store.close()


def test_on_a_full_disk_the_oldest_makes_room_for_the_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for the budget, and not for one value more while it is written."""
    store = DiskStore(tmp_path, 80_000)
    keys = _fill(store, 8, 10_000)
    writev = os.writev

    def write_within_the_budget(fd: int, parts: list[memoryview]) -> int:
        if _stored_bytes(tmp_path) + sum(part.nbytes for part in parts) > 81_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return writev(fd, parts)

    with monkeypatch.context() as patch:
        patch.setattr(disk_files.os, "writev", write_within_the_budget)
        patch.setattr(
            disk_files.os, "statvfs", lambda path: os.statvfs_result((4096, 4096, 100, 0, 0, 0, 0, 0, 0, 255))
        )
        assert store.put_many([(key(90), value(90, 10_000)), (key(91), value(91, 10_000))]) == [True] * 2
    assert store.lookup(keys) == [Presence.MISS] * 2 + [Presence.HIT] * 6
    assert store.get_many([key(90), key(91)]) == [value(90, 10_000), value(91, 10_000)]
    assert store.stats()["used_bytes"] == _stored_bytes(tmp_path) == 80_000
    store.close()


def test_a_folder_under_the_name_of_a_value_is_in_nobodys_way(tmp_path: Path) -> None:
    """It cannot be evicted: were it an entry, it would be the oldest, and nothing could be stored any more."""
    store = DiskStore(tmp_path, 80_000)
    keys = _fill(store, 8, 10_000)
    store.close()
    folder = tmp_path / "values" / key(50).hex()
    folder.mkdir()
    (folder / "a file").write_text("of another")
    os.utime(folder, (1, 1))
    store = DiskStore(tmp_path, 80_000)
    assert store.lookup([key(50), *keys]) == [Presence.MISS] + [Presence.HIT] * 8
    assert store.stats()["used_bytes"] == 80_000 and store.get_many([key(50)]) == [None]
    assert store.put_many([(key(50), b"vain")]) == [False]
    assert store.put_many([(key(100 + n), value(n, 10_000)) for n in range(8)]) == [True] * 8
    assert (folder / "a file").read_text() == "of another"
    store.close()


@pytest.mark.parametrize("whole", [False, True])
def test_a_folder_of_values_that_was_removed_is_made_again(tmp_path: Path, whole: bool) -> None:
    """As long as the directory is ours still: in place of a removed one another process may make its own."""
    store = DiskStore(tmp_path / "store", 80_000)
    keys = _fill(store, 8, 10_000)
    shutil.rmtree(tmp_path / "store" / ("." if whole else "values"))
    assert store.put_many([(key(99), value(99, 10_000))]) == [not whole]
    assert store.get_many(keys) == [None] * 8
    if not whole:
        assert store.get_many([key(99)]) == [value(99, 10_000)]
        assert store.put_many([(key(100 + n), value(n, 10_000)) for n in range(7)]) == [True] * 7
    store.close()


def test_what_cannot_be_removed_stays_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(tmp_path, 80_000)
    keys = _fill(store, 8, 10_000)
    with monkeypatch.context() as patch:
        patch.setattr(
            disk_files.StoreDirectory, "remove", staticmethod(lambda path: path.name.endswith(".part") and _gone(path))
        )
        assert store.put_many([(key(99), value(99, 30_000))]) == [False]
        assert store.stats()["unremoved_total"] >= 1
    assert store.get_many(keys) == [value(n, 10_000) for n in range(8)]
    assert store.put_many([(key(100 + n), value(n, 10_000)) for n in range(8)]) == [True] * 8
    assert store.stats()["used_bytes"] == _stored_bytes(tmp_path) == 80_000
    store.close()


def _gone(path: Path) -> bool:
    path.unlink()
    return True


def test_what_is_in_the_way_is_read_until_the_new_is_written(tmp_path: Path) -> None:
    """An uncompleted store evicts nothing; what is leased meanwhile stays."""
    store = DiskStore(tmp_path, 80_000)
    keys = _fill(store, 8, 10_000)
    ticket = store.prepare_store([(key(99), value(99, 40_000))])
    assert store.lookup([*keys, key(99)]) == [Presence.HIT] * 8 + [Presence.PENDING]
    lease = store.prepare_load(keys[:6])
    assert store.complete_store(ticket) == [False]
    assert store.complete_load(lease) == [value(n, 10_000) for n in range(6)]
    store.release(lease)
    assert store.lookup(keys) == [Presence.HIT] * 8
    first, second = (store.prepare_store([(key(n), value(n, 40_000))]) for n in (100, 101))
    assert store.complete_store(first) == [True] and store.lookup([key(101)]) == [Presence.PENDING]
    assert store.complete_store(second) == [True]
    assert store.stats()["used_bytes"] == _stored_bytes(tmp_path) == 80_000
    store.close()
