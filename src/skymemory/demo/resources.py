"""Cores, memory and speed of plain Python that this process has: of the computer and its control group, now."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Cores that this process may use: by its affinity and by the quota of its control group."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    words = _words(cgroup / "cpu.max") or [
        *_words(cgroup / "cpu/cpu.cfs_quota_us"),
        *_words(cgroup / "cpu/cpu.cfs_period_us"),
    ]
    if len(words) != 2 or not all(word.isdigit() for word in words) or not int(words[1]):
        return affinity  # "max", or -1: no quota
    return max(1, min(affinity, math.ceil(int(words[0]) / int(words[1]))))


def free_memory_bytes(cgroup: Path = _CGROUP, meminfo: Path = Path("/proc/meminfo")) -> int:
    """Memory that may be taken: what the system has available, and what the control group leaves. 8 GiB if unknown."""
    found = [int(line.split()[1]) * 1024 for line in _lines(meminfo) if line.startswith("MemAvailable:")]
    for limit, used, stat in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        words = [*_words(cgroup / limit), *_words(cgroup / used)]
        if len(words) == 2 and all(word.isdigit() for word in words):
            # Pages of files without recent use count as used, and are given up where memory is wanted.
            files = [line.split()[1] for line in _lines(cgroup / stat) if line.startswith("inactive_file ")]
            found.append(max(0, int(words[0]) - int(words[1]) + sum(map(int, files))))
    return min(found) if found else 8 << 30


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


_LOOP = 4_000_000
_REFERENCE_LOOP_S = 0.12
"""Seconds of ``_LOOP`` additions on the computer on which the demos' constants were measured."""


def slowdown(clock: Callable[[], float] = time.perf_counter) -> float:
    """Time of plain Python now, relative to the reference computer: long enough for others to have their turns.
    ``clock``: ``time.thread_time`` where these are not to count.
    """
    began_s = clock()
    total = 0
    for number in range(_LOOP):
        total += number
    return (clock() - began_s) / _REFERENCE_LOOP_S


def contention(processes: int) -> float:
    """How much longer ``processes`` of ours that compute at once take than on a core for each: by the cores that they
    may use, and by the programs that run there now.
    """
    others = math.inf
    for _ in range(5):  # the least of some looks: a program that ran for a moment slows none
        running = _words(Path("/proc/loadavg"))[3:4]
        others = min(others, int(running[0].split("/")[0]) - 1 if running else 0)
        time.sleep(0.05)
    cores = usable_cores()
    return max(1.0, (processes + others * cores / (os.cpu_count() or cores)) / cores)
