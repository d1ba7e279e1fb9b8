"""The power is cut at any moment: what was acknowledged is found, nothing wrong is served, everything opens."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from tests.contract.power_cuts import Recorder
from tests.contract.store_contract import key

from skymemory.errors import InvalidInput
from skymemory.index.radix import BlockInfo
from skymemory.keys import KeyRing
from skymemory.store.disk import DiskStore
from skymemory.store.sky import shared_index
from skymemory.store.sky.shared_index import SharedIndex, create_journal
from skymemory.testbed.key_file import new_keys, new_secret, read_keys, write_keys

KEYS = 6
_IN_MEMORY = "/dev/shm"
"""Thousands of directories take minutes on a disk."""
GARBAGE = bytes(range(0, 256, 9)) + b"\xff"
Allowed = dict[int, set[bytes | None]]


@dataclass
class History:
    """What may be found of each key after so many changes of the recorder."""

    recorder: Recorder
    moments: list[tuple[int, Allowed]] = field(default_factory=list)

    def note(self, allowed: Allowed) -> None:
        self.moments.append((len(self.recorder), {number: set(values) for number, values in allowed.items()}))

    def allowed(self, at: int) -> Allowed:
        """Of two notes at one number the later one holds: nothing was changed between them."""
        return [allowed for changes, allowed in self.moments if changes <= at][-1]


def use_disk(folder: Path, seed: int, sync: str) -> History:
    """Put, replace and delete values in three lives of a store."""
    dice = random.Random(seed)
    history = History(Recorder(folder))
    allowed: Allowed = {number: {None} for number in range(KEYS)}
    kept = sync == "each"
    with history.recorder.recording():
        history.note(allowed)
        for _ in range(3):
            store = DiskStore(folder / "a" / "b" / "store", 1 << 20, sync=sync)  # type: ignore[arg-type]
            for _ in range(5):
                numbers = dice.sample(range(KEYS), dice.choice((1, 1, 2)))
                values = [dice.randbytes(dice.choice((0, 10, 500, 3000))) for _ in numbers]
                removes = dice.random() < 0.25
                for number, value in zip(numbers, values, strict=True):
                    allowed[number].add(None if removes else value)
                    if kept is False:
                        allowed[number].add(None)
                history.note(allowed)
                if removes:
                    store.delete([key(number) for number in numbers])
                else:
                    assert all(store.put_many([(key(n), value) for n, value in zip(numbers, values, strict=True)]))
                for number, value in zip(numbers, values, strict=True):
                    if kept:
                        allowed[number] = {None if removes else value}
                history.note(allowed)
            store.close()
    return history


def check_disk(history: History, at: int, folder: Path, sync: str) -> None:
    store = DiskStore(folder / "a" / "b" / "store", 1 << 20, sync=sync)  # type: ignore[arg-type]
    found = {number: store.get_many([key(number)])[0] for number in range(KEYS)}
    allowed = history.allowed(at)
    wrong = {
        number: got for number, got in found.items() if (None if got is None else bytes(got)) not in allowed[number]
    }
    assert not wrong, f"cut after {at} changes: {wrong}"
    assert store.put_many([(key(99), b"after")]) == [True]
    store.close()
    store = DiskStore(folder / "a" / "b" / "store", 1 << 20)
    assert store.get_many([key(99), *map(key, found)]) == [b"after", *found.values()]
    store.close()


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda fd: None)


def cut(recorder: Recorder, seeds: range, cuts: int, tmp_path: Path, check: Callable[[int, Path], None]) -> None:
    """Cut the power at ``cuts`` moments for each seed, evenly over all changes (0: at every one), and ``check``."""
    for seed in seeds:
        dice = random.Random(seed)
        step = len(recorder) / cuts if cuts else 1.0
        for number in range(cuts or len(recorder) + 1):
            at = min(len(recorder), int((number + dice.random()) * step)) if cuts else number
            folder = Path(tempfile.mkdtemp(dir=_IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else tmp_path))
            recorder.leave(at, dice, folder)
            try:
                check(at, folder)
            except BaseException as error:
                error.add_note(f"seed {seed}, cut after {at} of {len(recorder)} changes")
                raise
            finally:
                shutil.rmtree(folder)


def cut_disk(tmp_path: Path, sync: str, seeds: range, cuts: int) -> int:
    (tmp_path / "disk").mkdir()
    history = use_disk(tmp_path / "disk", seeds.start, sync)
    cut(history.recorder, seeds, cuts, tmp_path, lambda at, folder: check_disk(history, at, folder, sync))
    return len(seeds) * (cuts or len(history.recorder) + 1)


@pytest.mark.parametrize("sync", ["each", "never"])
def test_a_disk_store_keeps_what_it_acknowledged(tmp_path: Path, sync: str) -> None:
    cut_disk(tmp_path, sync, range(1), 35)


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["each", "never"])
def test_a_disk_store_keeps_what_it_acknowledged_at_every_moment(tmp_path: Path, sync: str) -> None:
    total = 0
    for story in range(20):
        (tmp_path / str(story)).mkdir()
        total += cut_disk(tmp_path / str(story), sync, range(100 * story, 100 * story + 5), 0)
    assert total > (10_000 if sync == "each" else 5_000)


BLOCKS = 20
"""Enough that part of a journal is not by chance a former one."""
INFO = BlockInfo(1, 10, 0, 0.0, 0, 0, "rotation_hop", 10)


def use_journal(folder: Path, seed: int) -> tuple[Recorder, list[tuple[int, dict[int, BlockInfo]]]]:
    """Add and remove, also while another holds the lock, until the journal has been replaced a few times."""
    dice, recorder = random.Random(seed), Recorder(folder)
    states: list[tuple[int, dict[int, BlockInfo]]] = [(0, {})]
    now: dict[int, BlockInfo] = {}
    path = folder / "index"
    with recorder.recording(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_index, "COMPACT_BYTES", 400)
        patch.setattr(shared_index, "LOCK_WAIT_S", 0.0)
        create_journal(path)
        index = SharedIndex(path)
        for turn in range(100):
            holder = os.open(path, os.O_RDWR) if turn % 10 in (5, 6) else -1
            if holder >= 0:
                fcntl.flock(holder, fcntl.LOCK_EX)
            number = dice.randrange(BLOCKS)
            if dice.random() < 0.7:
                now[number] = replace(INFO, value_bytes=turn + 1)
                index.add([key(number)], [now[number]], 0, None)
            else:
                now.pop(number, None)
                index.remove([key(number)])
            if holder >= 0:
                os.close(holder)
            states.append((len(recorder), dict(now)))
        index.close()
    assert sum(change.what == "rename" for change in recorder.changes) > 1
    assert any(change.path == "index.late" for change in recorder.changes)
    return recorder, states


def cut_journal(tmp_path: Path, seeds: range, cuts: int) -> None:
    (tmp_path / "run").mkdir()
    recorder, states = use_journal(tmp_path / "run", seeds.start)

    def check(at: int, folder: Path) -> None:
        index = SharedIndex(folder / "index")
        found = {n: info for n in range(BLOCKS) if (info := index.infos([key(n)])[0]) is not None}
        for number, info in found.items():
            assert any(state.get(number) == info for _, state in states), "it was never entered"
        # An index that takes itself for complete may be an earlier one, but no mixture.
        assert not index.journal_state.complete or found in [state for _, state in states]
        index.add([key(50)], [INFO], 0, None)
        later = SharedIndex(folder / "index")
        assert later.infos([key(50)]) == [INFO]
        index.close()
        later.close()

    cut(recorder, seeds, cuts, tmp_path, check)


def test_a_journal_is_a_former_one_or_incomplete(tmp_path: Path) -> None:
    cut_journal(tmp_path, range(2), 100)


@pytest.mark.slow
def test_a_journal_is_a_former_one_or_incomplete_at_every_moment(tmp_path: Path) -> None:
    for story in range(10):
        (tmp_path / str(story)).mkdir()
        cut_journal(tmp_path / str(story), range(100 * story, 100 * story + 3), 0)


def cut_keys(tmp_path: Path, seeds: range, cuts: int) -> None:
    (tmp_path / "keys").mkdir()
    recorder = Recorder(tmp_path / "keys")
    moments: list[tuple[int, set[KeyRing | None]]] = [(0, {None})]
    with recorder.recording():
        path = tmp_path / "keys" / "sky.keys"
        ring = new_keys(path)
        moments[0][1].add(ring)
        moments.append((len(recorder), {ring}))
        for turn in range(4):
            later = ring.with_key(new_secret(), turn + 1.0)
            moments.append((len(recorder), {ring, later}))
            write_keys(later, path)
            moments.append((len(recorder), {later}))
            ring = later

    def check(at: int, folder: Path) -> None:
        try:
            (folder / "sky.keys").chmod(0o600)
            found: KeyRing | None = read_keys(folder / "sky.keys")
        except FileNotFoundError:
            found = None
        allowed = [allowed for changes, allowed in moments if changes <= at][-1]
        assert found in allowed

    cut(recorder, seeds, cuts, tmp_path, check)


def test_key_files_are_the_old_or_the_new_ones(tmp_path: Path) -> None:
    cut_keys(tmp_path, range(3), 0)


@pytest.mark.slow
def test_key_files_are_the_old_or_the_new_ones_by_many_dice(tmp_path: Path) -> None:
    cut_keys(tmp_path, range(60), 0)


def flipped(at: int, bits: int) -> bytes:
    sound = bytearray(b"skymemory disk store 1\n")
    sound[at] ^= bits
    return bytes(sound)


@pytest.mark.parametrize(
    "found",
    [b"", bytes(23), bytes(4096), b"skymemory dis", b"skymemory" + bytes(14), GARBAGE]
    + [flipped(0, 1), flipped(11, 1), flipped(22, 2), flipped(21, 1)],
)
def test_a_torn_format_is_written_again_beside_values_of_ours(
    tmp_path: Path, found: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "store"
    with DiskStore(path, 1 << 20) as store:
        store.put_many([(key(1), b"dear")])
    (path / "lost+found").mkdir()  # a stranger that a check of the file system has made
    (path / "format").write_bytes(found)
    with DiskStore(path, 1 << 20) as store:
        assert store.get_many([key(1)]) == [b"dear"]
    assert (path / "format").read_text() == "skymemory disk store 1\n"
    assert ("was damaged" in caplog.text) is bool(found)


@pytest.mark.parametrize("found", [b"another program 1\n", b"skymemory disk store 2\n"])
def test_a_format_of_others_is_not_written_over(tmp_path: Path, found: bytes) -> None:
    with DiskStore(tmp_path, 1 << 20) as store:
        store.put_many([(key(1), b"dear")])
    (tmp_path / "format").write_bytes(found)
    with pytest.raises(InvalidInput, match="expected 'skymemory disk store 1'"):
        DiskStore(tmp_path, 1 << 20)
    assert (tmp_path / "format").read_bytes() == found


@pytest.mark.parametrize("found", [bytes(23), GARBAGE])
@pytest.mark.parametrize("beside", ["values of others", "a later release's value", "another file"])
def test_a_torn_format_beside_what_is_not_ours_is_left_alone(tmp_path: Path, found: bytes, beside: str) -> None:
    (tmp_path / "format").write_bytes(found)
    (tmp_path / "values").mkdir()
    file = tmp_path / "values" / key(1).hex()
    if beside == "values of others":
        file.write_bytes(b"a file named by its digest, of another program")
    elif beside == "a later release's value":
        file.write_bytes(b"SKYVAL\x00\x02" + bytes(100))
    else:
        (tmp_path / "thesis.tex").write_text("x")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(InvalidInput):
        DiskStore(tmp_path, 1 << 20)
    assert (tmp_path / "format").read_bytes() == found
    assert sorted(path.name for path in tmp_path.rglob("*") if path.name != "lock") == before
