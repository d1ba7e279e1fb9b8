"""A process that uses the constellation is stopped at any moment: its neighbours on the computer go on."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.end_to_end.in_process import skymemory

from skymemory import open_store
from skymemory.store.base import Store

_WRITER = """
import sys
from skymemory import open_store
store = open_store(sys.argv[1])
print(flush=True)
for number in range(10**9):
    keys = [(10**6 + number % 20 * 100 + at).to_bytes(32, "big") for at in range(8)]
    store.put_many([(key, bytes(300)) for key in keys])
    store.delete(keys)
"""
_HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
fcntl.flock(file, fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()
"""
MOST_S = 2.0


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    code, _, err = skymemory("constellation", "up", "--run-dir", str(tmp_path / "run"), "--base-port", "auto")
    assert code == 0, err
    yield tmp_path / "run"
    skymemory("constellation", "down", "--run-dir", str(tmp_path / "run"))


class Neighbour:
    """What other processes do meanwhile, and how long the longest of each took."""

    def __init__(self, run_dir: Path, seed: int) -> None:
        self.run_dir = run_dir
        self.store = open_store(f"constellation://{run_dir}")
        self.values: dict[bytes, bytes] = {}
        self.longest_s: dict[str, float] = {}
        self.misses = 0
        self._dice = random.Random(seed)

    def _timed(self, what: str, call: Callable[[], object]) -> object:
        began_s = time.monotonic()
        found = call()
        self.longest_s[what] = max(self.longest_s.get(what, 0.0), time.monotonic() - began_s)
        return found

    def go_on(self) -> None:
        key, value = self._dice.randbytes(32), self._dice.randbytes(self._dice.choice((100, 60_000)))
        assert self._timed("put", lambda: self.store.put_many([(key, value)])) == [True]
        self.values[key] = value
        self._read(self.store, "get")
        fresh = self._timed("new client", lambda: open_store(f"constellation://{self.run_dir}"))
        assert isinstance(fresh, Store)
        self._read(fresh, "get by a new client")
        fresh.close()

    def _read(self, store: Store, what: str) -> None:
        asked = [*self._dice.sample([*self.values], min(3, len(self.values))), [*self.values][-1]]
        found = self._timed(what, lambda: store.get_many(asked))
        assert isinstance(found, list)
        for key, got in zip(asked, found, strict=True):
            assert got is None or bytes(got) == self.values[key], "a wrong value"
            self.misses += got is None

    def status(self) -> dict[str, object]:
        code, out, err = self._timed(  # type: ignore[misc]
            "status", lambda: skymemory("constellation", "status", "--json", "--run-dir", str(self.run_dir))
        )
        assert code == 0, err
        return json.loads(out)  # type: ignore[no-any-return]


def child(code: str, *words: str) -> subprocess.Popen[bytes]:
    found = subprocess.Popen([sys.executable, "-c", code, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert found.stdout is not None and found.stdout.readline()
    return found


@pytest.mark.slow
def test_a_lock_that_is_never_given_back_costs_no_neighbour_more_than_two_seconds(run_dir: Path) -> None:
    neighbour = Neighbour(run_dir, 1)
    neighbour.go_on()
    holder = child(_HOLDER, str(run_dir / "index"))
    try:
        holder.send_signal(signal.SIGSTOP)
        for _ in range(10):
            neighbour.go_on()
        assert neighbour.status()["index"]["complete"] is False  # type: ignore[index]
    finally:
        holder.kill()
        holder.communicate()
    assert neighbour.misses == 0 and max(neighbour.longest_s.values()) < MOST_S, neighbour.longest_s
    assert neighbour.status()["index"]["complete"] is True  # type: ignore[index]
    neighbour.store.close()


@pytest.mark.slow
def test_two_hundred_stops_of_a_busy_writer_stop_no_neighbour(run_dir: Path) -> None:
    neighbour, dice = Neighbour(run_dir, 2), random.Random(3)
    writer = child(_WRITER, f"constellation://{run_dir}")
    try:
        for number in range(200):
            time.sleep(dice.uniform(0.0, 0.02))
            writer.send_signal(signal.SIGSTOP)
            neighbour.go_on()
            if number % 10 == 0:
                neighbour.status()
            writer.send_signal(signal.SIGCONT)
    finally:
        writer.kill()
        writer.communicate()
    print(neighbour.longest_s, neighbour.store.stats()["index_written_beside"])
    assert neighbour.misses == 0 and max(neighbour.longest_s.values()) < MOST_S, neighbour.longest_s
    neighbour.store.close()
