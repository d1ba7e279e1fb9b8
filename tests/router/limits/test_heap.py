"""Free memory goes back to the system: at once after growth, ever more rarely while there is little."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymemory.router.limits.heap import FIRST_S, GROWN_BYTES, MOST_S, TrimTimes

MIB = 1 << 20


def test_a_process_that_grew_is_trimmed_at_once() -> None:
    times = TrimTimes()
    assert times.is_due(100 * MIB, 0.0)
    times.on_trim(100 * MIB, 100 * MIB, 0.0)
    assert not times.is_due(125 * MIB, 1.0)
    assert times.is_due(200 * MIB, 1.0)


def test_what_shrinks_little_is_trimmed_ever_more_rarely() -> None:
    times = TrimTimes()
    times.on_trim(100 * MIB, 60 * MIB, 0.0)
    now_s, waits = 0.0, []
    times.on_trim(1000 * MIB, 1000 * MIB, now_s)
    for _ in range(6):
        begin_s = now_s
        while not times.is_due(1000 * MIB, now_s):
            now_s += 1.0
        waits.append(now_s - begin_s)
        times.on_trim(1000 * MIB, 1000 * MIB, now_s)
    assert waits == [2 * FIRST_S, 4 * FIRST_S, 8 * FIRST_S, MOST_S, MOST_S, MOST_S]


@given(sizes=st.lists(st.integers(0, 4000), min_size=1, max_size=300))
def test_a_process_stays_above_its_least_size_for_a_bounded_time(sizes: list[int]) -> None:
    times, least, above_s = TrimTimes(), float("inf"), 0.0
    for second, size in enumerate(sizes):
        if times.is_due(size * MIB, float(second)):
            times.on_trim(size * MIB, size * MIB, float(second))
            least, above_s = min(least, size * MIB), 0.0
        above_s = above_s + 1.0 if size * MIB > least + GROWN_BYTES else 0.0
        assert above_s <= MOST_S + 1.0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="malloc_trim is glibc's")
def test_fragments_go_back_to_the_system() -> None:
    """Half of many small objects are freed, so that the heap cannot shrink by itself."""
    script = """
import time
from skymemory.router.limits.heap import resident_bytes, trimmed_heap
kept = [bytes(20_000) for _ in range(20_000)]
del kept[::2]
held, until_s = [b"" for _ in range(10)], time.monotonic() + 20
full = resident_bytes()
kept = kept[::40]
before = resident_bytes()
with trimmed_heap():
    while resident_bytes() > 0.5 * full and time.monotonic() < until_s:
        time.sleep(0.05)
print(before / full > 0.8, resident_bytes() / full)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    is_kept, share = done.stdout.split()
    assert is_kept == "True", "else this test shows nothing"
    assert float(share) < 0.5
