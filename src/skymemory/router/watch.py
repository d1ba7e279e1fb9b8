"""Every engine looked at on a schedule of its own, so that one that hangs delays neither another nor a request.

What was read is put on ``Server.reported``; what could not be read ages there until ``Server.fresh_report`` no longer
hands it out. Reports are dated by the clock that routing asks with (``time.monotonic``).
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

from skymemory.conductor.fleet import Fleet
from skymemory.router.engine_metrics import EngineMetrics, UnreadableMetrics
from skymemory.router.scrape import MAX_BYTES, TIMEOUT_S, fetch_metrics
from skymemory.router.tasks import ended

EVERY_S = 0.5
SLOWEST_S = 10.0
"""An engine that keeps failing is asked ever more rarely, down to this."""
JITTER = 0.2
"""Part of the interval by which each look is put forward or off."""
_log = logging.getLogger("skymemory.router")


@dataclass(slots=True, eq=False)
class Watched:
    """One engine's metrics: where they are and how reading them goes."""

    server: str
    url: str
    tls: ssl.SSLContext | None = None
    dialect: str = ""
    """Empty until it was first read."""
    missing: tuple[str, ...] = ()
    error: str = ""
    """Why the last look failed; empty where it did not."""
    looks: int = 0
    failures: int = 0
    failures_in_a_row: int = 0
    last_s: float | None = None
    """When what was last read had been asked for."""
    complained: set[tuple[str, ...]] = field(default_factory=set)


class MetricsWatch:
    """Looks at engines from ``follow`` until ``unfollow`` or ``close``. Lives in one event loop.

    The first look comes at once.
    """

    def __init__(
        self,
        fleet: Fleet,
        session: aiohttp.ClientSession,
        *,
        every_s: float = EVERY_S,
        timeout_s: float = TIMEOUT_S,
        max_bytes: int = MAX_BYTES,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.watched: dict[str, Watched] = {}
        self._fleet = fleet
        self._session = session
        self.every_s = every_s
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._clock = clock
        self._dice = random.Random(seed)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def follow(self, server: str, url: str, tls: ssl.SSLContext | None = None) -> Watched:
        """Look at ``url`` for the server of that name from now on; what was followed for it before is let go.

        ``tls``: what its certificate is checked against, if not the system's authorities.
        """
        self.unfollow(server)
        watched = self.watched[server] = Watched(server, url, tls)
        self._tasks[server] = asyncio.create_task(self._look_on(watched), name=f"metrics of {server}")
        return watched

    def unfollow(self, server: str) -> None:
        task = self._tasks.pop(server, None)
        if task is not None:
            task.cancel()
            del self.watched[server]

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for server in list(self._tasks):
            self.unfollow(server)
        await ended(tasks)

    async def _look_on(self, watched: Watched) -> None:
        while True:
            await self._look(watched)
            wait_s = self.every_s * 2.0 ** min(watched.failures_in_a_row, 16)
            wait_s = min(wait_s, max(SLOWEST_S, self.every_s))
            await asyncio.sleep(wait_s * (1.0 + JITTER * (2.0 * self._dice.random() - 1.0)))

    async def _look(self, watched: Watched) -> None:
        watched.looks += 1
        try:
            metrics = await fetch_metrics(
                self._session,
                watched.url,
                timeout_s=self._timeout_s,
                max_bytes=self._max_bytes,
                clock=self._clock,
                tls=watched.tls,
            )
        except UnreadableMetrics as error:
            self._failed(watched, str(error))
        except Exception as error:  # one engine's answer must not end the watch over it
            self._failed(watched, f"{type(error).__name__}: {error}")
        else:
            self._read(watched, metrics)

    def _failed(self, watched: Watched, error: str) -> None:
        if not watched.failures_in_a_row:
            _log.warning("metrics of %s cannot be read: %s", watched.server, error)
        watched.error = error
        watched.failures += 1
        watched.failures_in_a_row += 1

    def _read(self, watched: Watched, metrics: EngineMetrics) -> None:
        if watched.failures_in_a_row:
            _log.info("metrics of %s can be read again", watched.server)
        watched.error, watched.failures_in_a_row = "", 0
        watched.dialect, watched.missing = metrics.dialect, metrics.missing
        watched.last_s = metrics.report.at_s
        if metrics.missing and metrics.missing not in watched.complained:
            watched.complained.add(metrics.missing)
            _log.warning(
                "%s speaks %s's dialect without %s: routing does without",
                watched.server,
                metrics.dialect,
                ", ".join(metrics.missing),
            )
        server = self._fleet.servers.get(watched.server)
        if server is not None:
            server.reported = metrics.report
