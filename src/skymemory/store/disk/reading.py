"""One value out of its file, and what is to be thought of it if it is not there."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from skymemory.errors import LaterVersion
from skymemory.kv.value import LATER_VERSION
from skymemory.store.disk.value_file import FAULTS_OF_THE_FILE, read_value, stored_bytes


@dataclass(frozen=True, slots=True)
class Reading:
    """``view`` is None for a miss, and ``reason`` then says why. ``lost``: it will be no better next time."""

    view: memoryview | None
    seconds: float = 0.0
    reason: str = ""
    lost: bool = False


ABSENT = Reading(None, reason="absent")
LATER = Reading(None, reason=LATER_VERSION)


def read_file(path: str, key: bytes, out: memoryview, clock: Callable[[], float]) -> Reading:
    """The value of ``key`` into ``out``, which is just as long."""
    started_s = clock()
    try:
        whole = read_value(path, key, out)
    except OSError as error:
        reason = "absent" if error.errno == errno.ENOENT else "unreadable"
        return Reading(None, clock() - started_s, reason, error.errno in FAULTS_OF_THE_FILE)
    if not whole:
        return Reading(None, clock() - started_s, "corrupt", lost=True)
    return Reading(out.toreadonly(), clock() - started_s)


def whole_value(path: str, key: bytes) -> bytes | None:
    """A value of any size, or None where the file does not hold it."""
    try:
        size_bytes = stored_bytes(Path(path), key)
        if size_bytes is None:
            return None
        value = bytearray(size_bytes)
        return bytes(value) if read_value(path, key, memoryview(value)) else None
    except (OSError, LaterVersion):
        return None
