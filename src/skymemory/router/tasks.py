"""Tasks that run until they are told to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any


async def ended(tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    """Cancel them and wait until they are gone; what they raise meanwhile is nobody's concern any more."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
