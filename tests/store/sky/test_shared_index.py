"""The index journal between processes and threads: removed under an open client, written at once, out of room."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract.forked import in_child
from tests.store.conftest import simulated, store_over

from skymemory.errors import InvalidInput
from skymemory.index.journal import Record, RecordOp, encode_record
from skymemory.index.radix import BlockInfo
from skymemory.kv.block import Place
from skymemory.native import crc32
from skymemory.store.sky import shared_index
from skymemory.store.sky.shared_index import COMPACT_BYTES, SharedIndex, create_journal, inspect_journal

INFO = BlockInfo(1, 10, 0, 0.0, 0, 0, "rotation_hop", 10)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def add(index: SharedIndex, number: int) -> None:
    index.add([key(number)], [INFO], 0, None)


@pytest.mark.parametrize("piece_bytes", [8, 64, 250, 1000])
@pytest.mark.parametrize("torn_bytes", [0, 5])
def test_a_journal_longer_than_a_piece_is_replayed_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int, torn_bytes: int
) -> None:
    path = tmp_path / "index"
    writer = SharedIndex(path, born=True)
    for at in range(0, 20, 2):
        writer.add([key(at), key(at + 1)], [INFO] * 2, 0, None)
        writer.remove([key(at)])
    if torn_bytes:
        with path.open("ab") as file:
            file.write(encode_record(Record(RecordOp.ADD, [key(99)], [INFO]))[:torn_bytes])
    monkeypatch.setattr(shared_index, "_PIECE_BYTES", piece_bytes)
    late = SharedIndex(path)
    assert late.infos([key(at) for at in range(20)]) == [None, INFO] * 10
    assert late.complete is (torn_bytes == 0)


def test_a_removed_journal_is_restarted_by_a_process_that_has_it_open(tmp_path: Path) -> None:
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


def test_a_journal_that_cannot_be_opened_is_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")

    def as_unprivileged() -> str:
        os.seteuid(65534) if os.geteuid() == 0 else tmp_path.chmod(0o500)
        with pytest.raises(InvalidInput) as caught:
            SharedIndex(tmp_path / "index")
        return str(caught.value)

    wrong = {tmp_path: "directory", tmp_path / "file" / "index": "File exists", tmp_path / "loop": "symbolic links"}
    for path, why in wrong.items():
        with pytest.raises(InvalidInput, match=f"index {path}.*{why}.*index=no"):
            SharedIndex(path)
    assert "Permission denied" in (said := in_child(as_unprivileged)) and str(tmp_path / "index") in said, said


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


def test_a_record_packed_ahead_gives_way_to_what_others_have_entered(tmp_path: Path) -> None:
    """It is packed while a value's packets are under way, and appended once they have arrived."""
    index, other = SharedIndex(tmp_path / "index"), SharedIndex(tmp_path / "index")
    later = replace(INFO, value_bytes=11)
    other.add([key(1), key(2), key(3)], [INFO] * 3, 0, None)
    known = index.record_of(key(3), later, None)
    assert known == encode_record(Record(RecordOp.ADD, [key(3)], [later], start=2, parent=key(2)))
    assert index.add_record(known)
    ahead = index.record_of(key(4), later, None)
    other.add([key(1), key(5), key(4)], [INFO] * 3, 0, None)
    before = (tmp_path / "index").read_bytes()
    assert not index.add_record(ahead)
    assert (tmp_path / "index").read_bytes() == before
    index.add_unplaced([key(4)], [later])
    assert index.record_of(key(6), INFO, Place(1, key(6))) == b"", "its own parent"
    for one in (index, other, SharedIndex(tmp_path / "index")):
        assert one.infos([key(at) for at in range(1, 6)]) == [INFO, INFO, later, later, INFO]
        assert one.before(key(4), 9) == [key(5), key(1)]


def test_while_one_process_writes_no_other_does(tmp_path: Path) -> None:
    """An index of its own stands for another process: the lock is that of the open file. What the one writes while the
    other is between its look at the journal and its record would else be skipped by the other forever.
    """
    index, other = SharedIndex(tmp_path / "index"), SharedIndex(tmp_path / "index")
    add(index, 1)
    writing = threading.Thread(target=add, args=(other, 2))

    def meanwhile(entry: BlockInfo) -> bool:
        writing.start()
        writing.join(0.2)
        return True

    assert index.replace(key(1), meanwhile, lambda entry: replace(entry, value_bytes=11))
    writing.join()
    for one in (index, other, SharedIndex(tmp_path / "index")):
        assert one.infos([key(1), key(2)]) == [replace(INFO, value_bytes=11), INFO]


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


def standing(path: Path) -> tuple[bool, int]:
    """Of a process that comes new to it."""
    index = SharedIndex(path)
    try:
        return index.journal_state.complete, len(index)
    finally:
        index.close()


def test_a_journal_knows_whether_it_began_with_its_constellation(tmp_path: Path) -> None:
    assert SharedIndex().complete and not SharedIndex(born=False).complete
    founded, late = tmp_path / "founded", tmp_path / "late"
    late.write_bytes(b"")
    create_journal(founded)
    for path in (founded, late):
        add(SharedIndex(path), 1)
    assert standing(founded) == (True, 1) and standing(late) == (False, 1)
    assert SharedIndex(late, born=True).journal_state.complete is False, "another process has written there before"
    assert inspect_journal(tmp_path / "none") is None and not (tmp_path / "none").exists()
    founded.unlink()
    assert standing(founded) == (False, 0)


@pytest.mark.parametrize("damage", ["a bit in the middle", "torn", "garbage behind", "all garbage", "emptied"])
def test_what_was_damaged_is_incomplete_for_every_client_from_then_on(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "index"
    create_journal(path)
    old = SharedIndex(path)
    for number in range(1, 6):
        add(old, number)
    whole = path.read_bytes()
    middle = len(whole) // 2
    path.write_bytes(
        {
            "a bit in the middle": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
            "torn": whole[:-7],
            "garbage behind": whole + os.urandom(50),
            "all garbage": os.urandom(len(whole)),
            "emptied": b"",
        }[damage]
    )
    kept = {"a bit in the middle": 2, "torn": 4, "garbage behind": 5, "all garbage": 0, "emptied": 0}[damage]
    assert standing(path) == (False, kept)
    assert standing(path) == (False, kept), "the damage has been cut off, and the word of it stays"
    add(SharedIndex(path), 9)
    assert standing(path) == (False, kept + 1)
    if damage in ("torn", "emptied"):
        assert len(old) == kept + 1 and not old.complete


def test_a_journal_shortened_between_two_records_is_noticed_by_a_reader_that_was_further(tmp_path: Path) -> None:
    path = tmp_path / "index"
    create_journal(path)
    old = SharedIndex(path)
    add(old, 1)
    after_one = path.stat().st_size
    add(old, 2)
    os.truncate(path, after_one)
    assert len(old) == 1 and not old.complete
    assert standing(path) == (False, 1)


def full(fd: int, data: bytes, *at: int) -> int:
    raise OSError(errno.ENOSPC, "no space left on device")


def test_with_no_room_left_the_journal_is_incomplete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "index"
    create_journal(path)
    index, other = SharedIndex(path), SharedIndex(path)
    add(index, 1)
    assert other.journal_state.complete
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        patch.setattr(os, "pwrite", full)
        add(index, 2)
        for one in (index, other, index):
            assert (one.journal_state.complete, len(one)) == (False, 1), "what was written is known still"
        assert not index.replace(key(1), lambda info: True, lambda info: info)
    assert index.unwritten >= 2
    assert standing(path) == (False, 1)
    add(index, 3)
    assert standing(path) == (False, 2) and len(other) == 2


def test_a_full_disk_on_the_ground_keeps_no_client_from_what_is_in_the_sky(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sky, path = simulated(), tmp_path / "index"
    create_journal(path)
    store, other = (store_over(sky, ground, SharedIndex(path)) for ground in (1, 2))
    assert store.put_many([(key(1), b"before")]) == [True]
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        patch.setattr(os, "pwrite", full)
        assert store.put_many([(key(2), b"meanwhile")]) == [True]
        for one in (store, other):
            assert one.get_many([key(1), key(2), key(3)]) == [b"before", b"meanwhile", None]
            assert one.prefix([key(2), key(1), key(3)]) == 2
        assert store.delete([key(1)]) == [True]
    assert store.get_many([key(1), key(2)]) == [None, b"meanwhile"]
    assert other.get_many([key(1), key(2)]) == [None, b"meanwhile"]
    assert store.stats()["index_unwritten"] > 0 and not store.stats()["index_complete"]


def test_what_probing_brought_is_written_down(tmp_path: Path) -> None:
    path = tmp_path / "index"
    index = SharedIndex(path)
    index.record_probes(10, 3)
    SharedIndex(path).record_probes(5, 1)
    assert (index.journal_state.keys_probed, index.journal_state.values_adopted) == (15, 4)


def test_a_value_without_a_place_is_entered_though_what_follows_it_says_where_it_stands(tmp_path: Path) -> None:
    index = SharedIndex(tmp_path / "index")
    index.add([key(6), key(7)], [INFO, INFO], 6, key(5))
    index.add_unplaced([key(5)], [INFO])
    index.add([key(4)], [INFO], 0, None)  # by a writer that does not know better
    for one in (index, SharedIndex(tmp_path / "index")):
        assert one.infos([key(4), key(5)]) == [INFO, INFO]
        assert one.longest_prefix([key(4), key(5), key(6), key(7)]) == 4
        assert one.longest_prefix([key(3), key(4), key(5)]) == 0
    index.add([key(4), key(5)], [INFO, INFO], 4, key(3))
    assert index.before(key(7), 9) == [key(6), key(5), key(4), key(3)] and index.before(key(7), 2) == [key(6), key(5)]
    index.add_unplaced([key(5)], [INFO])
    assert index.before(key(5), 9) == [key(4), key(3)], "a place that is known stays"


TREE = {0: None} | {n: (n - 1) // 2 if n % 3 else n - 1 for n in range(1, 24)}
"""Blocks and the one before each: a prompt's key names all before it."""


def path_to(number: int) -> list[int]:
    before = TREE[number]
    return [*(path_to(before) if before is not None else ()), number]


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["placed", "unplaced", "wrong", "remove"]),
            st.integers(0, 23),
            st.integers(1, 5),
            st.integers(0, 4),
        ),
        max_size=25,
    ),
    compact_bytes=st.sampled_from([100, shared_index.COMPACT_BYTES]),
)
def test_what_was_added_is_found_whatever_was_said_of_its_place(steps, compact_bytes: int) -> None:
    """Against a plain set of keys; also for another process, and for one that comes later."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(shared_index, "COMPACT_BYTES", compact_bytes):
        path = Path(folder) / "index"
        index, other = SharedIndex(path), SharedIndex(path)
        there: set[int] = set()
        for what, last, blocks, depth in steps:
            chain = path_to(last)
            part = chain[-blocks:]
            first = len(chain) - len(part)
            keys, infos = [key(n) for n in part], [INFO] * len(part)
            if what == "placed":
                index.add(keys, infos, first, key(chain[first - 1]) if first else None)
            elif what == "unplaced":
                index.add_unplaced(keys, infos)
            elif what == "wrong":  # a chain that another one hangs under, but somewhere else
                index.add(keys, infos, depth, key(99) if depth else None)
            else:
                index.remove(keys)
            there = there - set(part) if what == "remove" else there | set(part)
            for reader in (index, other):
                assert len(reader) == len(there)
                for n in range(24):
                    asked = path_to(n)
                    expected = next((at for at, one in enumerate(asked) if one not in there), len(asked))
                    assert reader.longest_prefix([key(one) for one in asked]) == expected
        late = SharedIndex(path)
        assert [info is not None for info in late.infos([key(n) for n in range(24)])] == [n in there for n in range(24)]
        for one in (index, other, late):
            one.close()


def chain(first: int, blocks: int) -> tuple[list[bytes], list[BlockInfo]]:
    return [key(first * 1000 + at) for at in range(blocks)], [replace(INFO, chunks=at + 1) for at in range(blocks)]


def churn(index: SharedIndex, prompts: range) -> None:
    """Prompts of 20 blocks come, and all but every fiftieth go again."""
    for prompt in prompts:
        keys, infos = chain(prompt, 20)
        index.add(keys[:15], infos[:15], 0, None)
        index.add(keys[15:], infos[15:], 15, keys[14])
        if prompt % 50:
            index.remove(keys)


def assert_churned(index: SharedIndex, prompts: range) -> None:
    for prompt in prompts:
        keys, infos = chain(prompt, 20)
        kept = not prompt % 50
        assert index.infos(keys) == (infos if kept else [None] * 20)
        assert index.longest_prefix(keys) == (20 if kept else 0)


@pytest.mark.brief()
def test_a_journal_is_no_longer_than_what_is_in_it_deserves(tmp_path: Path) -> None:
    path = tmp_path / "index"
    writer, follower, never_looked = SharedIndex(path, born=True), SharedIndex(path), SharedIndex(path)
    writer.record_probes(7, 3)
    largest = 0
    for first in range(0, 1500, 250):
        churn(writer, range(first, first + 250))
        largest = max(largest, path.stat().st_size)
        assert_churned(follower, range(first, first + 250))
    assert largest < 1.2 * COMPACT_BYTES and path.stat().st_mode & 0o777 == 0o600
    for one in (writer, follower, never_looked, SharedIndex(path)):
        assert len(one) == 600 and one.journal_state.complete
        assert (one.journal_state.keys_probed, one.journal_state.values_adopted) == (7, 3)
        assert_churned(one, range(1500))
    follower.add([key(5)], [INFO], 0, None)
    assert never_looked.infos([key(5)]) == [INFO], "who followed writes into the new one"
    assert os.listdir(tmp_path) == ["index"]


def test_an_incomplete_journal_stays_incomplete(tmp_path: Path) -> None:
    index = SharedIndex(tmp_path / "index")
    churn(index, range(700))
    small = (tmp_path / "index").stat().st_size < 700 * 2000
    assert small and not SharedIndex(tmp_path / "index").journal_state.complete


def test_a_journal_of_what_is_all_there_is_not_written_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skymemory.store.sky.shared_index.COMPACT_BYTES", 10_000)
    index = SharedIndex(tmp_path / "index", born=True)
    inodes = set()
    for prompt in range(500):
        index.add(*chain(prompt, 20), 0, None)
        inodes.add((tmp_path / "index").stat().st_ino)
    assert len(inodes) == 1 and len(SharedIndex(tmp_path / "index")) == 10_000


@pytest.mark.brief()
def test_where_a_new_journal_cannot_be_made_the_old_one_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "index"
    index = SharedIndex(path, born=True)
    (tmp_path / "index.new").mkdir()
    churn(index, range(700))
    assert path.stat().st_size > 700 * 2000
    assert_churned(SharedIndex(path), range(700))
    (tmp_path / "index.new").rmdir()
    churn(index, range(700, 1300))
    assert path.stat().st_size < 700 * 2000
    assert_churned(SharedIndex(path), range(1300))


_CHURNING = """
import sys
from dataclasses import replace
from pathlib import Path
import skymemory.store.sky.shared_index as module
from skymemory.errors import InvalidInput
from skymemory.index.radix import BlockInfo
module.COMPACT_BYTES, module.LOCK_WAIT_S = 10_000, 600.0
INFO = BlockInfo(1, 10, 0, 0.0, 0, 0, "rotation_hop", 10)
index = module.SharedIndex(Path(sys.argv[1]))
for prompt in range(int(sys.argv[2]), int(sys.argv[2]) + int(sys.argv[3])):
    keys = [(prompt * 1000 + at).to_bytes(32, "big") for at in range(20)]
    infos = [replace(INFO, chunks=at + 1) for at in range(20)]
    index.add(keys[:15], infos[:15], 0, None)
    index.add(keys[15:], infos[15:], 15, keys[14])
    if prompt % 50:
        index.remove(keys)
"""
"""As ``churn``, in a process of its own."""


@pytest.mark.brief()
def test_processes_that_write_at_once_lose_nothing_to_a_new_journal(tmp_path: Path) -> None:
    """Four take turns at the lock while the journal is replaced again and again, one of them killed in the midst."""
    path = tmp_path / "index"
    create_journal(path)
    children = [
        subprocess.Popen([sys.executable, "-c", _CHURNING, path, str(first), str(count)])
        for first, count in ((0, 60), (1000, 60), (2000, 60), (5000, 100_000))
    ]
    for child in children[:3]:
        assert child.wait(240) == 0
    children[3].kill()
    children[3].wait()
    whole = SharedIndex(path)
    assert whole.journal_state.complete
    for first in (0, 1000, 2000):
        assert_churned(whole, range(first, first + 60))
    churn(whole, range(20_000, 20_600))
    assert sorted(os.listdir(tmp_path)) == ["index"] and path.stat().st_size < 2 * COMPACT_BYTES + 600 * 2300


def test_what_is_appended_to_a_replaced_journal_is_taken_over_while_its_replacer_lives(tmp_path: Path) -> None:
    """As an older release does, that had looked before the journal was replaced and writes after it."""
    path = tmp_path / "index"
    index = SharedIndex(path, born=True)
    older = os.open(path, os.O_RDWR | os.O_APPEND)
    size_bytes = path.stat().st_size
    churn(index, range(700))
    assert not os.fstat(older).st_nlink and os.fstat(older).st_size > size_bytes
    first, second, third = (key(number) for number in (901, 902, 903))
    record = encode_record(Record(RecordOp.ADD, [first, second], [INFO] * 2))
    os.write(older, record[:-1])
    assert index.infos([first]) == [None], "it is only being written"
    os.write(older, record[-1:] + encode_record(Record(RecordOp.REMOVE, [first])))
    assert index.infos([first, second]) == [None, INFO]
    os.write(older, encode_record(Record(RecordOp.ADD, [third], [INFO])))
    index.close()
    os.close(older)
    late = SharedIndex(path)
    assert late.infos([first, second, third]) == [None, INFO, INFO] and late.journal_state.complete
    late.close()


def test_a_journal_with_records_of_a_later_release_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "index"
    index = SharedIndex(path, born=True)
    later = bytearray(encode_record(Record(RecordOp.CLEAR)))
    later[1] = 200
    later[8:12] = crc32(bytes(later[:8]) + bytes(4)).to_bytes(4, "little")
    with path.open("ab") as file:
        file.write(later)
    churn(index, range(700))
    assert path.stat().st_size > 700 * 2000 and bytes(later) in path.read_bytes()
    assert_churned(SharedIndex(path), range(700))


def test_the_capacity_is_kept_when_the_journal_is_another(tmp_path: Path) -> None:
    path, info = tmp_path / "index", BlockInfo(1, 1000, 1, 1.0, 0, 0, "hop", 1)
    create_journal(path)
    index = SharedIndex(path)
    index.assume_capacity(1000.0)
    create_journal(path)  # the constellation was started again
    for number in range(20):
        index.add_unplaced([bytes([number]) * 32], [info])
    assert index.bytes_by_servers()[1] < 2000
    index.close()
