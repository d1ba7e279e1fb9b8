"""Background tasks that run until they are cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any


async def cancel(tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    """Cancel and await them; their exceptions are dropped."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
