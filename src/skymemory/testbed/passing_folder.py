"""A run directory for as long as a demo lasts. What a killed demo left behind is removed by the next one."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from skymemory.testbed.run_directory import RunDirectory

PREFIX = "skymemory-demo-"
_HELD = "held"
_YOUNG_S = 60.0
"""A folder younger than this may have been made just now by somebody who has not locked it yet."""


@contextmanager
def passing_folder(kind: str = "") -> Iterator[Path]:
    """A new temporary folder, gone at the end; those of this user that nobody holds any more go first."""
    remove_left_behind(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}"))
    handle = os.open(folder / _HELD, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)  # it ends with this process, however that ends
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def remove_left_behind(parent: Path, now_s: float | None = None) -> list[Path]:
    """Remove the folders in ``parent`` whose demo was killed, and whose satellites are gone; which they were."""
    now_s = time.time() if now_s is None else now_s
    removed = []
    for folder in sorted(parent.glob(f"{PREFIX}*")):
        with suppress(OSError):
            if _is_left_behind(folder, now_s):
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
    return removed


def _is_left_behind(folder: Path, now_s: float) -> bool:
    """Raises OSError where the folder cannot be looked at, or is just going."""
    status = folder.lstat()
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not is_ours or now_s - status.st_mtime < _YOUNG_S or RunDirectory(folder).living():
        return False
    handle = os.open(folder / _HELD, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
