"""Cores, memory and Python speed available to this process now."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = _CGROUP) -> int:
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    words = _words(cgroup / "cpu.max") or [
        *_words(cgroup / "cpu/cpu.cfs_quota_us"),
        *_words(cgroup / "cpu/cpu.cfs_period_us"),
    ]
    if len(words) != 2 or not all(word.isdigit() for word in words) or not int(words[1]):
        return affinity  # "max", or -1: no quota
    return max(1, min(affinity, math.ceil(int(words[0]) / int(words[1]))))


def free_memory_bytes(cgroup: Path = _CGROUP, meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return the memory available on the system and in the control group; 8 GiB if unknown."""
    limits_bytes = [int(line.split()[1]) * 1024 for line in _lines(meminfo) if line.startswith("MemAvailable:")]
    for limit, used, stat in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        words = [*_words(cgroup / limit), *_words(cgroup / used)]
        if len(words) == 2 and all(word.isdigit() for word in words):
            # Pages of files without recent use count as used, but are reclaimed on demand.
            files = [line.split()[1] for line in _lines(cgroup / stat) if line.startswith("inactive_file ")]
            limits_bytes.append(max(0, int(words[0]) - int(words[1]) + sum(map(int, files))))
    return min(limits_bytes) if limits_bytes else 8 << 30


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


_LOOP, _LOOPS = 1_000_000, 4
_REFERENCE_LOOP_S = 0.03  # seconds of ``_LOOP`` additions on the reference computer


def slowdown(clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the time of plain Python relative to the reference computer.

    ``time.thread_time`` as ``clock`` ignores other processes.
    """
    times_s = []
    for _ in range(_LOOPS):
        started_s = clock()
        total = 0
        for number in range(_LOOP):
            total += number
        times_s.append(clock() - started_s)
    return min(times_s) / _REFERENCE_LOOP_S


def contention(processes: float) -> float:
    """Return the slowdown of ``processes`` concurrent processes against a core each."""
    other_running = math.inf
    for _ in range(5):  # the least of several samples: a program that runs for a moment slows nothing
        running = _words(Path("/proc/loadavg"))[3:4]
        other_running = min(other_running, int(running[0].split("/")[0]) - 1 if running else 0)
        time.sleep(0.05)
    cores = usable_cores()
    return max(1.0, (processes + other_running * cores / (os.cpu_count() or cores)) / cores)
