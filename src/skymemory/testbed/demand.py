"""Which processes want the processor: they run, or wait for their turn. Such a process is late, not hung."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

SHARE = 0.3
"""So much of the time since the last look a busy process ran or waited to run."""


def wanted_s(pid: int) -> float | None:
    """Seconds that a process has run or waited for a processor since it started; None where the system does not tell.

    From the scheduler's figures; where a kernel keeps none, the time it ran, which is less.
    """
    try:
        ran_ns, waited_ns, _ = map(int, Path(f"/proc/{pid}/schedstat").read_text("ascii").split())
        if ran_ns:
            return (ran_ns + waited_ns) / 1e9
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None


def _is_runnable(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0] == "R"
    except (OSError, IndexError):
        return False


class Demand:
    """Looks again and again at the same processes, by name."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        now_s = time.monotonic()
        self._seen = {name: (now_s, wanted_s(pid)) for name, pid in pids.items()}

    def busy(self) -> set[str]:
        """Those that wanted the processor for most of the time since the last look."""
        found = set()
        now_s = time.monotonic()
        for name, pid in self._pids.items():
            since_s, before_s = self._seen[name]
            wanted = wanted_s(pid)
            self._seen[name] = now_s, wanted
            grew_s = wanted - before_s if wanted is not None and before_s is not None else 0.0
            # A wait counts only when it ends, and may have lasted since the last look.
            if grew_s >= SHARE * (now_s - since_s) > 0 or _is_runnable(pid):
                found.add(name)
        return found
