"""A disk that is smaller than the store's budget: what is stored later displaces what is worth less."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.contract.store_contract import key, value

from skymemory.store import disk_files
from skymemory.store.base import Presence
from skymemory.store.disk import DiskStore

SIZE_BYTES = 10_000


class SmallDisk:
    """Injects ENOSPC or EDQUOT: the files below ``path`` may have ``room_bytes``."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch, room_bytes: int, code: int = errno.ENOSPC) -> None:
        self.path, self.room_bytes, self.code = path, room_bytes, code
        self.refused = 0
        writev = os.writev

        def write(fd: int, parts: list[memoryview]) -> int:
            wanted_bytes = sum(part.nbytes for part in parts)
            if self.used_bytes + wanted_bytes > self.room_bytes:
                self.refused += 1
                raise OSError(self.code, os.strerror(self.code))
            return writev(fd, parts)

        def status(_: object) -> os.statvfs_result:
            # A quota is not seen here.
            free_bytes = 1 << 40 if code == errno.EDQUOT else max(0, self.room_bytes - self.used_bytes)
            return os.statvfs_result((1, 1, self.room_bytes, free_bytes, free_bytes, 9, 9, 9, 0, 255))

        patch.setattr(disk_files.os, "writev", write)
        patch.setattr(disk_files.os, "statvfs", status)

    @property
    def used_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.path.iterdir())


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


@pytest.fixture
def store(tmp_path: Path, clock: list[float]) -> DiskStore:
    return DiskStore(tmp_path, 60 * SIZE_BYTES, clock=lambda: clock[0])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_on_a_full_disk_new_values_displace_old_ones(
    tmp_path: Path, store: DiskStore, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    disk = SmallDisk(tmp_path / "values", monkeypatch, 31 * (SIZE_BYTES + 64), code)
    for number in range(60):
        assert store.put_many([(key(number), value(number, SIZE_BYTES))]) == [True]
    found = store.lookup([key(number) for number in range(60)])
    assert found[-30:] == [Presence.HIT] * 30 and store.stats()["entries"] >= 30
    assert store.get_many([key(59)]) == [value(59, SIZE_BYTES)]
    assert store.stats()["room_bytes"] == 31 * SIZE_BYTES and store.stats()["budget_bytes"] == 60 * SIZE_BYTES
    assert disk.refused == 1, "the room is remembered"
    store.close()


def test_the_room_is_looked_at_again(
    tmp_path: Path, store: DiskStore, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SmallDisk(tmp_path / "values", monkeypatch, 10 * (SIZE_BYTES + 64))
    for number in range(20):
        assert store.put_many([(key(number), value(number, SIZE_BYTES))]) == [True]
    disk.room_bytes *= 10
    assert store.stats()["room_bytes"] == 10 * SIZE_BYTES
    clock[0] += 61.0
    for number in range(20, 60):
        assert store.put_many([(key(number), value(number, SIZE_BYTES))]) == [True]
    assert store.stats()["entries"] == 50 and store.stats()["room_bytes"] == 60 * SIZE_BYTES
    store.close()


@pytest.mark.brief()
def test_values_of_other_sizes_find_room(tmp_path: Path, store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    SmallDisk(tmp_path / "values", monkeypatch, 20 * (SIZE_BYTES + 64))
    for number in range(300):
        assert store.put_many([(key(number), value(number, 1000))]) == [True]
    assert store.put_many([(key(900), value(900, 15 * SIZE_BYTES))]) == [True]
    assert store.put_many([(key(901), value(901, 100))]) == [True]
    assert store.put_many([(key(902), value(902, 18 * SIZE_BYTES))]) == [True]
    assert store.get_many([key(902)]) == [value(902, 18 * SIZE_BYTES)]
    store.close()


def test_what_is_pinned_or_read_stays_and_what_cannot_fit_evicts_nothing(
    tmp_path: Path, store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    SmallDisk(tmp_path / "values", monkeypatch, 10 * (SIZE_BYTES + 64))
    for number in range(10):
        assert store.put_many([(key(number), value(number, SIZE_BYTES))]) == [True]
    assert store.pin([key(0), key(1)], 3600.0) == [True] * 2
    ticket = store.prepare_load([key(2)])
    assert store.put_many([(key(50), value(50, 8 * SIZE_BYTES))]) == [False]
    assert store.lookup([key(number) for number in range(10)]) == [Presence.HIT] * 10
    assert store.put_many([(key(51), value(51, 7 * SIZE_BYTES))]) == [True]
    assert store.complete_load(ticket) == [value(2, SIZE_BYTES)]
    assert store.get_many([key(0), key(1), key(51)])[:2] == [value(0, SIZE_BYTES), value(1, SIZE_BYTES)]
    store.close()


def test_a_disk_that_stays_full_costs_a_bounded_number_of_values(
    tmp_path: Path, store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others take what is freed."""
    for number in range(30):
        assert store.put_many([(key(number), value(number, SIZE_BYTES))]) == [True]
    with monkeypatch.context() as patch:
        disk = SmallDisk(tmp_path / "values", patch, 0)
        assert store.put_many([(key(99), value(99, SIZE_BYTES))]) == [False]
        assert disk.refused <= 4
    assert store.stats()["entries"] >= 27 and store.stats()["failed{ENOSPC}_total"] == 1
    store.close()


_FILL = """
import json, os, sys
from pathlib import Path
from skymemory.store.disk import DiskStore
store = DiskStore(Path(sys.argv[1]) / "store", 64 << 20, sync=sys.argv[2])
def key(n): return n.to_bytes(4, "big") * 8
value = {n: os.urandom(int(sys.argv[3])) for n in range(60)}
stored = [store.put_many([(key(n), value[n])])[0] for n in value]
read = [store.get_many([key(n)])[0] for n in value]
wrong = sum(got is not None and bytes(got) != value[n] for n, got in zip(value, read))
store.close()
again = DiskStore(Path(sys.argv[1]) / "store", 64 << 20)
print(json.dumps({"stored": sum(stored), "wrong": wrong, "last": read[-1] is not None,
    "found": sum(got is not None for got in read), "again": again.stats()["entries"]}))
"""


@pytest.mark.brief("never-1-30000-29")
@pytest.mark.parametrize(("mib", "size_bytes", "least"), [(16, 512 << 10, 28), (8, 100_000, 58), (1, 30_000, 29)])
@pytest.mark.parametrize("sync", ["never", "each"])
def test_on_a_real_file_system_that_is_smaller_than_the_budget(
    tmp_path: Path, mib: int, size_bytes: int, least: int, sync: str
) -> None:
    mount = f'mount -t tmpfs -o size={mib}m none "$1" && shift && exec "$@"'
    namespace = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh", str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run([*namespace, "true"], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here: user namespaces are not allowed")
    command = [*namespace, sys.executable, "-c", _FILL, str(tmp_path), sync, str(size_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["stored"] == 60 and found["last"] and found["wrong"] == 0
    assert found["again"] == found["found"] >= least
