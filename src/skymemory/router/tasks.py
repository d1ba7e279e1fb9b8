"""Background tasks: cancelling them, and following files that change while the router runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

LOOK_S = 1.0
"""Period of checking followed files for changes."""
Stamp = tuple[int, int, int]
"""Changes with a file's content: time of change, size, inode (a replaced file has another)."""


async def cancel(tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    """Cancel and await them; their exceptions are dropped."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def follow(files: Callable[[], Iterable[Path]], changed: Callable[[], None]) -> None:
    """Call ``changed`` whenever one of ``files`` has changed.

    The list is read again each time. A file that is new in it is not reported: it was read with the settings.
    """
    seen = {file: _stamp_or_none(file) for file in files()}
    while True:
        await asyncio.sleep(LOOK_S)
        now = {file: _stamp_or_none(file) for file in files()}
        is_other = any(found is not None and file in seen and found != seen[file] for file, found in now.items())
        seen = {file: seen.get(file) if found is None else found for file, found in now.items()}
        if is_other:
            changed()


def stamp(file: Path) -> Stamp:
    found = file.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _stamp_or_none(file: Path) -> Stamp | None:
    try:
        return stamp(file)
    except OSError:
        return None  # it is being replaced
