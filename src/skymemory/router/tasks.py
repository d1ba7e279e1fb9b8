"""Background tasks, and watched files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

LOOK_S = 1.0
Stamp = tuple[int, int, int]
"""Modification time, size and inode (a replaced file has another)."""


async def cancel(tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def follow(files: Callable[[], Iterable[Path]], changed: Callable[[], None]) -> None:
    """Poll files, and call ``changed`` after a change. ``files`` is called each time; new files are not reported."""
    known = {file: _stamp_or_none(file) for file in files()}
    while True:
        await asyncio.sleep(LOOK_S)
        current = {file: _stamp_or_none(file) for file in files()}
        has_changed = any(
            current_stamp is not None and file in known and current_stamp != known[file]
            for file, current_stamp in current.items()
        )
        known = {
            file: known.get(file) if current_stamp is None else current_stamp for file, current_stamp in current.items()
        }
        if has_changed:
            changed()


def stamp(file: Path) -> Stamp:
    status = file.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


def _stamp_or_none(file: Path) -> Stamp | None:
    try:
        return stamp(file)
    except OSError:
        return None  # the file is being replaced
