"""A settings file that is followed while a router runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

LOOK_S = 1.0
"""Between two looks at the file."""


async def follow(file: Path, changed: Callable[[], None]) -> None:
    """Call ``changed`` whenever ``file`` is another than it was."""
    seen = look(file)
    while True:
        await asyncio.sleep(LOOK_S)
        now = look(file)
        if now is not None and now != seen:
            seen = now
            changed()


def look(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None  # while it is being replaced
    return found.st_mtime_ns, found.st_size, found.st_ino
