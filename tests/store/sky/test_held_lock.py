"""The index while another process holds its lock: a stopped one, or one that never lets go."""

from __future__ import annotations

import fcntl
import functools
import itertools
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.contract.store_contract import StoreContract, Tier
from tests.store.conftest import cut_off, simulated, store_over

from skymemory.index.journal import Record, RecordOp, encode_record
from skymemory.index.radix import BlockInfo
from skymemory.store.sky import shared_index
from skymemory.store.sky.shared_index import SharedIndex, create_journal, inspect_journal

INFO = BlockInfo(1, 10, 0, 0.0, 0, 0, "rotation_hop", 10)
NEVER_S = 0.0
"""A wait that a test need not sit through."""


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


@contextmanager
def held(path: Path) -> Iterator[None]:
    """The lock belongs to an open file, so that one of our own stands for another process."""
    fd = os.open(path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(fd)


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_index, "LOCK_WAIT_S", NEVER_S)
    create_journal(tmp_path / "index")
    return tmp_path / "index"


def beside(journal: Path) -> Path:
    return journal.with_name("index.late")


def test_what_is_stored_meanwhile_is_found_and_entered_when_the_lock_is_free(
    journal: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    sky = simulated()
    store, other = (store_over(sky, ground, SharedIndex(journal)) for ground in (1, 2))
    assert store.put_many([(key(1), b"before"), (key(2), b"deleted")]) == [True] * 2
    with held(journal):
        for number in (3, 4):
            assert store.put_many([(key(number), b"meanwhile")]) == [True]
        assert store.delete([key(2)]) == [True]
        late = store_over(sky, 3, SharedIndex(journal))
        for reader in (store, other, late):
            assert reader.get_many([key(1), key(2), key(3), key(9)]) == [b"before", None, b"meanwhile", None]
            assert reader.prefix([key(4), key(3), key(1), key(9)]) == 3
            assert reader.stats()["index_complete"] == 0
        assert store.stats()["index_locked_out"] == 1 and store.stats()["index_written_beside"] == 3
        assert other.put_many([(key(5), b"by another")]) == [True]
        assert store.get_many([key(5)]) == [b"by another"]
    assert [record.levelname for record in caplog.records if "lock of the index" in record.message] == ["WARNING"] * 2
    assert store.put_many([(key(6), b"after")]) == [True]
    assert store.stats()["index_locked_out"] == 0 and not beside(journal).exists()
    asked = late.stats()["index_probe_packets"]
    assert late.get_many([key(at) for at in range(1, 8)]) == [
        b"before", None, b"meanwhile", b"meanwhile", b"by another", b"after", None
    ]  # fmt: skip
    assert late.stats()["index_probe_packets"] == asked and late.stats()["index_complete"] == 1
    state = inspect_journal(journal)
    assert state is not None and state[0].complete and state[1] == 5
    assert "is free again" in caplog.text


def test_an_index_is_complete_again_without_another_put(journal: Path) -> None:
    index, reader = SharedIndex(journal), SharedIndex(journal)
    with held(journal):
        index.add([key(1)], [INFO], 0, None)
        assert not reader.journal_state.complete and not index.journal_state.complete
        assert index.infos([key(1)]) == [INFO], "its writer knows it without a question"
    assert reader.infos([key(1)]) == [INFO] and reader.complete and not beside(journal).exists()
    assert index.infos([key(1)]) == [INFO] and index.complete


def test_what_is_entered_after_a_lookup_was_not_absent_then(journal: Path) -> None:
    index, reader, other = SharedIndex(journal), SharedIndex(journal), SharedIndex(journal)
    with held(journal):
        index.add([key(1)], [INFO], 0, None)
        assert reader.infos([key(1)]) == [None]
    other.add([key(2)], [INFO], 0, None)
    assert not beside(journal).exists() and not reader.complete
    assert reader.infos([key(1)]) == [INFO] and reader.complete


def test_a_put_waits_for_a_lock_that_is_held_for_a_moment(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_index, "LOCK_WAIT_S", 60.0)
    index = SharedIndex(journal)
    with held(journal):
        writing = threading.Thread(target=index.add, args=([key(1)], [INFO], 0, None))
        writing.start()
        assert index.infos([key(1)]) == [None], "a reading thread of the same process does not wait behind it"
        assert not index.locked_out
    writing.join(60)
    assert not beside(journal).exists() and SharedIndex(journal).infos([key(1)]) == [INFO]
    assert index.written_beside == 0


def test_only_the_first_put_waits(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    now_s = [0.0]

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now_s[0] += seconds

    monkeypatch.setattr(shared_index, "LOCK_WAIT_S", 0.5)
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    index = SharedIndex(journal)
    with held(journal):
        index.infos([key(1)])
        index.remove([key(1)], patient=False)
        assert slept == []
        index.add([key(1)], [INFO], 0, None)
        assert 0.5 <= sum(slept) < 0.51
        slept.clear()
        index.add([key(2)], [INFO], 0, None)
        assert slept == []


def test_a_torn_tail_under_a_held_lock_is_not_waited_for(journal: Path) -> None:
    index = SharedIndex(journal)
    record = encode_record(Record(RecordOp.ADD, [key(1)], [INFO]))
    with held(journal):
        with journal.open("ab") as file:
            file.write(record[:-1])
        assert index.infos([key(1)]) == [None] and not index.complete
        assert journal.stat().st_size == inspect_size(journal), "the writer may be about to write the rest"
        with journal.open("ab") as file:
            file.write(record[-1:])
        assert index.infos([key(1)]) == [INFO] and index.complete
        with journal.open("ab") as file:
            file.write(b"torn")
    assert index.infos([key(1)]) == [INFO] and not index.complete, "no process was writing it"
    assert not SharedIndex(journal).journal_state.complete


def inspect_size(journal: Path) -> int:
    inspect_journal(journal)
    return journal.stat().st_size


@pytest.mark.parametrize("what", ["torn", "no room", "not a file"])
def test_records_that_were_lost_beside_the_journal_make_it_incomplete(
    journal: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    index = SharedIndex(journal)
    with held(journal):
        if what == "not a file":
            beside(journal).mkdir()
            index.add([key(1)], [INFO], 0, None)
            beside(journal).rmdir()
        else:
            if what == "torn":
                index.add([key(1)], [INFO], 0, None)
                os.truncate(beside(journal), beside(journal).stat().st_size - 1)
            else:
                with monkeypatch.context() as patch:
                    patch.setattr(os, "write", no_room)
                    index.add([key(1)], [INFO], 0, None)
        if what != "torn":
            assert index.unwritten == 1
    index.add([key(2)], [INFO], 0, None)
    late = SharedIndex(journal)
    assert not late.journal_state.complete and late.infos([key(2)]) == [INFO]
    assert not beside(journal).exists()


def no_room(fd: int, data: bytes) -> int:
    raise OSError(28, "no space left on device")


CALLS = ("write", "pwrite", "ftruncate", "rename", "unlink")
"""Those by which an index changes files."""


def killed_at(number: int, journal: Path, added: int, beside: int, after: bool) -> bool:
    """A child adds the key ``added``, and is killed at its call of this number (``after``: once that is done), right
    after another index has added ``beside``, if that is a key. Whether it came so far.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    try:
        real, calls = {name: getattr(os, name) for name in CALLS}, itertools.count(1)

        index, other = SharedIndex(journal), SharedIndex(journal)

        def called(name: str, *how: Any) -> Any:
            if next(calls) == number:
                for each in CALLS:
                    setattr(os, each, real[each])
                if beside:
                    other.add([key(beside)], [INFO], 0, None)
                if after:
                    real[name](*how)
                os.kill(os.getpid(), signal.SIGKILL)
            return real[name](*how)

        for name in CALLS:
            setattr(os, name, functools.partial(called, name))
        index.add([key(added)], [INFO], 0, None)
    finally:
        os._exit(0)


@pytest.mark.brief()
@pytest.mark.parametrize("after", [False, True], ids=["before a call", "after it"])
def test_a_kill_loses_no_record_beside_the_journal(journal: Path, after: bool) -> None:
    """Also none that another process writes there at the last moment."""
    for number in itertools.count(1):
        create_journal(journal)
        writer = SharedIndex(journal)
        with held(journal):
            writer.add([key(1)], [INFO], 0, None)
        assert beside(journal).exists()
        if not killed_at(number, journal, 2, 3, after):
            break
        found = SharedIndex(journal)
        assert found.infos([key(1), key(3)]) == [INFO, INFO] or not found.complete, number
        found.add([key(4)], [INFO], 0, None)
        last = SharedIndex(journal)
        assert last.infos([key(1), key(3), key(4)]) == [INFO] * 3 and last.complete, number
        assert not beside(journal).exists() and not journal.with_name("index.late.taken").exists()
    assert number > 4


def test_a_kill_loses_no_record_of_who_had_opened_the_file_before_it_was_taken(journal: Path) -> None:
    """It is written after the last look at that file, right before its removal."""
    child = os.fork()
    if not child:
        try:
            write, unlink = os.write, os.unlink
            opened, goes_on = threading.Event(), threading.Event()
            writer, taker = SharedIndex(journal), SharedIndex(journal)
            late = threading.Thread(target=lambda: writer.add([key(3)], [INFO], 0, None))

            def written(fd: int, data: bytes) -> int:
                if threading.current_thread() is late:
                    opened.set()
                    goes_on.wait(20)
                return write(fd, data)

            def removed(path: str) -> None:
                goes_on.set()
                late.join(20)
                unlink(path)
                os.kill(os.getpid(), signal.SIGKILL)

            os.write, os.unlink = written, removed  # type: ignore[assignment]
            with held(journal):
                late.start()
                opened.wait(20)
            taker.add([key(2)], [INFO], 0, None)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    index = SharedIndex(journal)
    assert index.infos([key(3)]) == [INFO] and index.complete


@pytest.mark.brief(every=3)
@pytest.mark.parametrize("after", [False, True], ids=["before a call", "after it"])
@pytest.mark.parametrize("where", ["journal", "beside"])
def test_a_kill_hides_no_loss(journal: Path, where: str, after: bool) -> None:
    for number in itertools.count(1):
        create_journal(journal)
        writer = SharedIndex(journal)
        writer.add([key(1)], [INFO], 0, None)
        damaged, size_bytes = journal, journal.stat().st_size
        if where == "beside":
            with held(journal):
                writer.add([key(5)], [INFO], 0, None)
            damaged, size_bytes = beside(journal), 0
        else:
            writer.add([key(5)], [INFO], 0, None)
        data = bytearray(damaged.read_bytes())
        data[size_bytes + 20] ^= 255
        damaged.write_bytes(data)
        if not killed_at(number, journal, 2, 0, after):
            break
        for _ in range(2):
            found = SharedIndex(journal)
            assert found.infos([key(1), key(5)]) == [INFO, None] and not found.complete, number
            found.add([key(4)], [INFO], 0, None)
    assert number > 2


def test_what_contradicts_the_journal_is_added_all_the_same(journal: Path) -> None:
    """Two writers, one of them without the lock, put one block in two places."""
    index, other = SharedIndex(journal), SharedIndex(journal)
    later = replace(INFO, value_bytes=11)
    with held(journal):
        index.add([key(1), key(2), key(3)], [INFO] * 3, 0, None)
        with journal.open("ab") as file:  # by the holder
            file.write(encode_record(Record(RecordOp.ADD, [key(3), key(2)], [later] * 2)))
        assert index.infos([key(2), key(3)]) == [later] * 2
    index.add([key(4)], [INFO], 0, None)
    for reader in (index, other, SharedIndex(journal)):
        assert all(reader.infos([key(at) for at in range(1, 5)])) and reader.complete


def raise_slot(entry: BlockInfo) -> BlockInfo:
    return replace(entry, slot_moves=entry.slot_moves + 1)


def test_a_swap_beside_a_held_lock_undoes_nothing_that_its_holder_writes(journal: Path) -> None:
    index, later = SharedIndex(journal), replace(INFO, value_crc=7)
    index.add([key(1)], [INFO], 0, None)
    with held(journal):
        assert not index.replace(key(1), INFO.__eq__, raise_slot) and index.locked_out
        assert index.infos([key(1)]) == [INFO]
        with journal.open("ab") as file:  # by the holder
            file.write(encode_record(Record(RecordOp.ADD, [key(1)], [later])))
    assert not index.replace(key(1), INFO.__eq__, raise_slot)
    for reader in (index, SharedIndex(journal)):
        assert reader.infos([key(1)]) == [later] and reader.complete


@pytest.mark.parametrize("seed", range(5))
def test_every_swap_that_was_done_counts(journal: Path, seed: int) -> None:
    """Three indices count in one entry, each with what it last read, while the lock comes and goes."""
    dice, indices = random.Random(seed), [SharedIndex(journal) for _ in range(3)]
    indices[0].add([key(1)], [INFO], 0, None)
    done = 0
    for _ in range(60):
        with held(journal) if dice.random() < 0.5 else nullcontext():
            for index in dice.sample(indices, 2):
                (seen,) = index.infos([key(1)])
                assert seen is not None
                done += index.replace(key(1), seen.__eq__, raise_slot)
    (last,) = SharedIndex(journal).infos([key(1)])
    assert last is not None and last.slot_moves == done > 0


def test_two_processes_that_swap_beside_a_stopped_one_lose_none(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third process is stopped again and again, now and then with the lock held."""
    monkeypatch.setattr(shared_index, "LOCK_WAIT_S", 0.01)
    index = SharedIndex(journal)
    index.add([key(1)], [INFO], 0, None)
    writer = subprocess.Popen([sys.executable, "-c", _WRITER, journal], stdout=subprocess.PIPE)
    counter = subprocess.Popen([sys.executable, "-c", _COUNTER, journal], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert writer.stdout is not None and writer.stdout.readline()
        assert counter.stdout is not None and counter.stdout.readline()
        done = 0
        for _ in range(20):
            time.sleep(0.002)
            writer.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, writer.pid, os.WSTOPPED)
            done += index.replace(key(1), lambda entry: True, raise_slot)
            writer.send_signal(signal.SIGCONT)
        counted, _ = counter.communicate(timeout=60)
    finally:
        for child in (writer, counter):
            child.kill()
            child.wait()
        assert writer.stdout is not None
        writer.stdout.close()
    (last,) = SharedIndex(journal).infos([key(1)])
    assert last is not None and last.slot_moves == done + int(counted)


_COUNTER = """
import sys, threading
from dataclasses import replace
from pathlib import Path
from skymemory.store.sky import shared_index
shared_index.LOCK_WAIT_S = 0.01
index, ends = shared_index.SharedIndex(Path(sys.argv[1])), threading.Event()
print(flush=True)
threading.Thread(target=lambda: (sys.stdin.read(), ends.set()), daemon=True).start()
done = 0
while not ends.is_set():
    done += index.replace(
        (1).to_bytes(32, "big"), lambda entry: True, lambda entry: replace(entry, slot_moves=entry.slot_moves + 1)
    )
print(done)
"""


def test_a_new_constellation_does_not_inherit_records(journal: Path) -> None:
    with held(journal):
        SharedIndex(journal).add([key(1)], [INFO], 0, None)
    create_journal(journal)
    fresh = SharedIndex(journal)
    assert fresh.infos([key(1)]) == [None] and fresh.complete


def test_a_removed_run_directory_is_no_error(journal: Path) -> None:
    index = SharedIndex(journal)
    with held(journal):
        journal.unlink()
        journal.parent.rmdir()
        index.add([key(1)], [INFO], 0, None)
        assert index.unwritten == 0


class TestWithAHeldLock(StoreContract):
    """The whole contract while another process never lets go of the index."""

    can = frozenset({"clock", "outage"})

    @pytest.fixture
    def tier(self, journal: Path) -> Iterator[Tier]:
        sky = simulated()
        with held(journal):
            store = store_over(sky, index=SharedIndex(journal))
            yield Tier(
                store,
                pins=False,
                leases=False,
                knows_absence=False,
                another=lambda: store_over(sky, 2, SharedIndex(journal)),
                later=lambda seconds: sky.settle(sky.now_s + seconds),
                outage=lambda: cut_off(sky),
            )
            store.close()


_WRITER = """
import sys
from pathlib import Path
from skymemory.index.radix import BlockInfo
from skymemory.store.sky import shared_index
shared_index.COMPACT_BYTES = 20_000
INFO = BlockInfo(1, 10, 0, 0.0, 0, 0, "rotation_hop", 10)
index = shared_index.SharedIndex(Path(sys.argv[1]))
print(flush=True)
for number in range(10**9):
    keys = [(10**6 + number % 50 * 1000 + at).to_bytes(32, "big") for at in range(20)]
    index.add(keys, [INFO] * 20, 0, None)
    index.remove(keys)
"""


def stop_a_busy_writer(journal: Path, stops: int, seed: int) -> tuple[int, float]:
    """Stop a process that writes all the time at random moments; how often that met it with the lock held, and the
    longest call of a neighbour, in seconds.
    """
    dice, blocked, longest_s = random.Random(seed), 0, 0.0
    neighbour = SharedIndex(journal)
    child = subprocess.Popen([sys.executable, "-c", _WRITER, journal], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline()
        for number in range(stops):
            time.sleep(dice.uniform(0.0, 0.01))
            child.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED)
            began_s = time.monotonic()
            neighbour.infos([key(number)])
            neighbour.add([key(number)], [INFO], 0, None)
            fresh = SharedIndex(journal)
            found, sure = fresh.infos([key(number)]), fresh.complete
            fresh.close()
            longest_s = max(longest_s, time.monotonic() - began_s)
            assert found == [INFO] or not sure, "an acknowledged record is said to be absent"
            assert neighbour.infos([key(number)]) == [INFO]
            blocked += neighbour.locked_out
            child.send_signal(signal.SIGCONT)
    finally:
        child.kill()
        child.wait()
        child.stdout.close() if child.stdout else None
    assert neighbour.journal_state.complete
    late = SharedIndex(journal)
    assert late.journal_state.complete and late.infos([key(number) for number in range(stops)]) == [INFO] * stops
    return blocked, longest_s


def test_a_stopped_writer_stops_no_other(tmp_path: Path) -> None:
    create_journal(tmp_path / "index")
    _, longest_s = stop_a_busy_writer(tmp_path / "index", 5, 1)
    assert longest_s < 2.0


@pytest.mark.slow
def test_two_hundred_stops_of_a_busy_writer(tmp_path: Path) -> None:
    create_journal(tmp_path / "index")
    blocked, longest_s = stop_a_busy_writer(tmp_path / "index", 200, 2)
    assert blocked, "no stop met it with the lock held"
    assert longest_s < 2.0
