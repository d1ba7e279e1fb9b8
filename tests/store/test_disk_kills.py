"""A process with a disk store that is killed at any moment, or that the kernel lets write no more."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.contract.store_contract import key

from skymemory.store.disk import DiskStore

_WRITER = """
import random, sys
from pathlib import Path
from skymemory.store.disk import DiskStore
store = DiskStore(Path(sys.argv[1]), 16 << 20, sync=sys.argv[3])
dice = random.Random(int(sys.argv[2]))
for turn in range(10**9):
    # Contents follow from key and version, so that the judge can distinguish a right value from a wrong one.
    numbers = dice.sample(range(30), 3)
    items = [(n.to_bytes(4, "big") * 8, turn.to_bytes(4, "big") + random.Random(n * 10**6 + turn).randbytes(100_000))
             for n in numbers]
    assert store.put_many(items) == [True] * 3
    print(turn, *numbers, flush=True)
"""


@pytest.mark.parametrize(("sync", "kills"), [pytest.param("never", 14, marks=pytest.mark.slow), ("each", 4)])
def test_a_kill_at_any_moment_loses_only_what_was_not_acknowledged(tmp_path: Path, sync: str, kills: int) -> None:
    acknowledged: dict[int, set[int]] = {}
    dice = random.Random(9)
    turns = lives = 0
    # On a disk that takes long to sync a life may have no time for a second turn: then others follow.
    while lives < kills or (turns <= lives and lives < 4 * kills):
        # A directory of its own for each life would never meet the remains of the one before: all lives share one.
        turns += _one_life(tmp_path / "disk", sync, lives, dice.uniform(0.0, 0.4), acknowledged)
        lives += 1
    assert turns > lives  # the kills met a writer at work


def _one_life(path: Path, sync: str, seed: int, patience_s: float, acknowledged: dict[int, set[int]]) -> int:
    """Start a writer, kill it after ``patience_s`` of writing, and check all it left. Returns its acknowledgements."""
    # Its dice are known, so the order of its puts is too: a turn that was begun and not acknowledged may be there.
    child = subprocess.Popen([sys.executable, "-c", _WRITER, path, str(seed), sync], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    lines = [child.stdout.readline()]
    time.sleep(patience_s)
    child.send_signal(signal.SIGKILL)
    lines += child.stdout.readlines()
    child.wait()
    done = [[int(word) for word in line.split()] for line in lines if line.endswith("\n")]
    writer_dice = random.Random(seed)
    began = [writer_dice.sample(range(30), 3) for _ in range(len(done) + 1)]
    assert began[:-1] == [numbers for _, *numbers in done]
    for turn, *numbers in done:
        for number in numbers:
            acknowledged[number] = {turn}
    for number in began[-1]:
        acknowledged.setdefault(number, {-1}).add(len(done))
    store = DiskStore(path, 16 << 20)
    got = store.get_many([key(number) for number in range(30)])
    for number, view in enumerate(got):
        if number not in acknowledged:
            assert view is None
        elif view is None:
            assert -1 in acknowledged[number], f"{number} was acknowledged and is gone"
        else:
            turn = int.from_bytes(view[:4], "big")
            assert turn in acknowledged[number]
            assert view[4:] == random.Random(number * 10**6 + turn).randbytes(100_000)
            acknowledged[number] = {turn}
    assert store.stats().get("torn_total", 0) == 0
    assert not [name for name in os.listdir(path / "values") if name.endswith(".part")]
    store.close()
    return len(done)


_LIMITED = """
import resource, sys
from pathlib import Path
from skymemory.store.disk import DiskStore
store = DiskStore(Path(sys.argv[1]), 1 << 20)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
key = lambda n: bytes([n]) * 32
print(store.put_many([(key(1), bytes(10_000)), (key(2), bytes(60_000)), (key(3), bytes(10_000))]))
print(store.stats()["failed{EFBIG}_total"], store.get_many([key(1)]) == [bytes(10_000)])
"""


def test_the_kernel_refuses_to_write_on_and_the_process_lives(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", _LIMITED, tmp_path], capture_output=True, text=True, timeout=240)
    assert ran.stdout.splitlines() == ["[True, False, False]", "1 True"], ran.stderr
    assert len(os.listdir(tmp_path / "values")) == 1
