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
from skymemory.router.kv_events import KvEvents
from skymemory.router.picker_metrics import MetricsPage
from skymemory.router.proxy_events import event_index
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
    events_port: int | None = None
    """Where each endpoint publishes what its cache holds, for a strategy whose index such events feed."""
    replay_port: int | None = None
    model: str = ""
    """That the endpoints serve; blocks of events are seeded with it."""


class EndpointPicker:
    """``run`` until the event is set. ``say`` gets lines for whoever looks on."""

    def __init__(self, desk: Desk, source: Source, plan: PickerPlan, say: Callable[[str], None]) -> None:
        self._desk = desk
        self._source = source
        self._plan = plan
        self._say = say
        self._events: KvEvents | None = None
        self.server = PickerServer(desk, plan.listen, plan.certificate, plan.health_listen)
        self.metrics = None if plan.metrics_listen is None else MetricsPage(desk, plan.metrics_listen)

    async def run(self, stop: asyncio.Event, started: Callable[[], None] | None = None) -> None:
        """
        Raises:
            SkyMemoryError: an address cannot be bound.
        """
        async with aiohttp.ClientSession() as session:
            watch = MetricsWatch(self._desk.picker.fleet, session)
            index = event_index(self._desk.picker.scorer)
            self._events = KvEvents(index) if index is not None and self._plan.events_port else None
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
                if self._events is not None:
                    await self._events.close()

    async def _keep_looking(self, watch: MetricsWatch) -> None:
        known = False
        while True:
            endpoints = await self._source.endpoints()
            if endpoints is not None:
                came, left = update(self._desk.picker, endpoints)
                for name in left:
                    self._desk.ejection.forget(name)
                    self._leave(name, watch)
                for name in came:
                    self._meet(name, watch)
                if came or left or not known:
                    self._say(f"{len(endpoints)} endpoints: {len(came)} came, {len(left)} left")
                if not known:
                    known = True
                    await self.server.ready()
            await asyncio.sleep(self._plan.refresh_s)

    def _meet(self, name: str, watch: MetricsWatch) -> None:
        plan = self._plan
        if plan.metrics_path is not None:
            watch.follow(name, f"http://{name}{plan.metrics_path}")
        if self._events is not None:
            host, slot = name.rpartition(":")[0], self._desk.picker.fleet.servers[name].slot
            replay = f"tcp://{host}:{plan.replay_port}" if plan.replay_port else ""
            endpoint = f"tcp://{host}:{plan.events_port}"
            self._events.follow(name, slot, endpoint, model=plan.model, replay_endpoint=replay)

    def _leave(self, name: str, watch: MetricsWatch) -> None:
        watch.unfollow(name)
        if self._events is not None:
            self._events.unfollow(name)
