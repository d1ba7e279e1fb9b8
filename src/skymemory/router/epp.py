"""An endpoint picker as it runs: the gRPC door, the endpoints behind it and what they say of themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import aiohttp

from skymemory.router.desk import Desk
from skymemory.router.endpoints import Source, update
from skymemory.router.ext_proc_server import Certificate, PickerServer
from skymemory.router.picker_metrics import MetricsPage
from skymemory.router.watch import MetricsWatch


@dataclass(frozen=True, slots=True)
class PickerPlan:
    """Where it listens (``ip:port``, port 0 for a free one) and how often it looks around."""

    listen: str = "127.0.0.1:9002"
    health_listen: str | None = None
    metrics_listen: str | None = None
    certificate: Certificate | None = None
    refresh_s: float = 5.0
    """How often the endpoints' source is asked."""
    metrics_path: str | None = "/metrics"
    """Where endpoints tell of their load; None: they are not asked."""
    grace_s: float = 30.0
    """How long requests under way may take once it is told to stop."""


class EndpointPicker:
    """``run`` until the event is set. ``say`` gets lines for whoever looks on."""

    def __init__(self, desk: Desk, source: Source, plan: PickerPlan, say: Callable[[str], None]) -> None:
        self._desk = desk
        self._source = source
        self._plan = plan
        self._say = say
        self.server = PickerServer(desk, plan.listen, plan.certificate, plan.health_listen)
        self.metrics = None if plan.metrics_listen is None else MetricsPage(desk, plan.metrics_listen)

    async def run(self, stop: asyncio.Event, started: Callable[[], None] | None = None) -> None:
        """
        Raises:
            SkyMemoryError: an address cannot be bound.
        """
        async with aiohttp.ClientSession() as session:
            watch = MetricsWatch(self._desk.picker.fleet, session)
            looking: asyncio.Task[None] | None = None
            try:
                await self.server.start()
                if self.metrics is not None:
                    await self.metrics.start()
                if started is not None:
                    started()
                looking = asyncio.create_task(self._keep_looking(watch))
                stopping = asyncio.create_task(stop.wait())
                # A fault of the look-out is a fault of the picker, and not a picker with yesterday's endpoints.
                done, _ = await asyncio.wait({looking, stopping}, return_when=asyncio.FIRST_COMPLETED)
                stopping.cancel()
                if looking in done:
                    looking.result()
            finally:
                if looking is not None:
                    looking.cancel()
                    with suppress(asyncio.CancelledError):
                        await looking
                await self.server.stop(self._plan.grace_s if self._desk.streams else 0)
                if self.metrics is not None:
                    await self.metrics.stop()
                await watch.close()

    async def _keep_looking(self, watch: MetricsWatch) -> None:
        known = False
        while True:
            endpoints = await self._source.endpoints()
            if endpoints is not None:
                came, left = update(self._desk.picker, endpoints)
                for name in left:
                    self._desk.ejection.forget(name)
                    watch.unfollow(name)
                for name in came:
                    if self._plan.metrics_path is not None:
                        watch.follow(name, f"http://{name}{self._plan.metrics_path}")
                if came or left or not known:
                    self._say(f"{len(endpoints)} endpoints: {len(came)} came, {len(left)} left")
                if not known:
                    known = True
                    await self.server.ready()
            await asyncio.sleep(self._plan.refresh_s)
