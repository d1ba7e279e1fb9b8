"""An endpoint picker as it runs: the gRPC door, the endpoints behind it and what they say of themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp

from skymemory.router.desk import Desk, DeskSettings
from skymemory.router.endpoints import SettingsSource, Source, completed
from skymemory.router.endpoints_known import Endpoints
from skymemory.router.ext_proc_server import Certificate, PickerServer
from skymemory.router.knowledge import Knowledge, ReplicaFigures
from skymemory.router.picker_metrics import Collects, MetricsPage
from skymemory.router.proxy_events import EventsWatch
from skymemory.router.settings import Settings
from skymemory.router.tasks import ended
from skymemory.router.watch import MetricsWatch


class EndpointPicker:
    """``run`` until the event is set. ``say`` gets lines for whoever looks on."""

    def __init__(
        self,
        desk: Desk,
        source: Source,
        settings: Settings,
        say: Callable[[str], None],
        endpoints: Endpoints | None = None,
        knowledge: Knowledge | None = None,
        certificate: Certificate | None = None,
    ) -> None:
        """``knowledge``: what feeds the desk's strategy beyond requests; None: nothing does."""
        picker = settings.picker
        self.settings = self.at_start = settings
        self.desk = desk
        self._source = source
        self._say = say
        self._endpoints = Endpoints(desk.picker) if endpoints is None else endpoints
        self._knowledge = knowledge
        self._events = EventsWatch(desk.picker.scorer, self._endpoints)
        self._look = asyncio.Event()
        self._begun = False
        self.server = PickerServer(desk, picker.listen, certificate, picker.health_listen or None)
        collectors: list[Collects] = [self._events]
        if knowledge is not None:
            collectors.append(ReplicaFigures(knowledge))
        self.metrics = MetricsPage(desk, picker.metrics_listen, collectors) if picker.metrics_listen else None

    async def run(self, stop: asyncio.Event, started: Callable[[], None] | None = None) -> None:
        """
        Raises:
            SkyMemoryError: an address cannot be bound.
        """
        async with aiohttp.ClientSession() as session:
            self._watch = MetricsWatch(self.desk.picker.fleet, session, every_s=self.settings.health.metrics_every_s)
            looking: asyncio.Task[None] | None = None
            try:
                await self.server.start()
                if self.metrics is not None:
                    await self.metrics.start()
                if started is not None:
                    started()
                looking = asyncio.create_task(self._keep_looking())
                stopping = asyncio.create_task(stop.wait())
                # A fault of the look-out is a fault of the picker, and not a picker with yesterday's endpoints.
                done, _ = await asyncio.wait({looking, stopping}, return_when=asyncio.FIRST_COMPLETED)
                stopping.cancel()
                if looking in done:
                    looking.result()
            finally:
                await ended([looking])
                await self.server.stop(self.settings.drain_s if self.desk.streams else 0)
                if self.metrics is not None:
                    await self.metrics.stop()
                await self._watch.close()
                await self._events.stop()
                if self._knowledge is not None:
                    await self._knowledge.close(keep=self._begun)

    def reset(self, settings: Settings, desk_settings: DeskSettings) -> None:
        """Take up changed settings, as far as that goes without a restart.

        Raises:
            InvalidInput: a backend that cannot be told to Envoy; all stays as it was.
        """
        if isinstance(self._source, SettingsSource):
            self._source.set(settings.backends)
        looks_anew = settings.health.metrics_path != self.settings.health.metrics_path
        self.settings, self.desk.settings = settings, desk_settings
        self._watch.every_s = settings.health.metrics_every_s
        for name in self._endpoints.known if looks_anew else ():
            self._ask_load(name)
        self._look.set()

    async def _keep_looking(self) -> None:
        known = False
        while True:
            self._look.clear()
            endpoints = await self._source.endpoints()
            if endpoints is not None:
                told = [completed(backend, self.settings.picker) for backend in endpoints]
                came, left = self._endpoints.update(told)
                for name in left:
                    self.desk.forget(name)
                    self._watch.unfollow(name)
                for name in came:
                    self._ask_load(name)
                if known:
                    self._events.follow()
                if came or left or not known:
                    self._say(f"{len(told)} endpoints: {len(came)} came, {len(left)} left")
                if not known:
                    known = True
                    await self._begin()
            try:
                async with asyncio.timeout(self.settings.picker.refresh_s):
                    await self._look.wait()
            except TimeoutError:
                pass

    async def _begin(self) -> None:
        """Endpoints are known: what was known of them is too, and Envoy may ask."""
        if self._knowledge is not None:
            await self._knowledge.start()
        self._begun = True
        self._events.start()
        await self.server.ready()

    def _ask_load(self, name: str) -> None:
        path = self.settings.health.metrics_path
        if path:
            self._watch.follow(name, f"http://{name}{path}")
        else:
            self._watch.unfollow(name)
