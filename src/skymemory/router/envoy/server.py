"""An endpoint picker as it runs: the gRPC door, the endpoints behind it and what they say of themselves."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import aiohttp

from skymemory.conductor.admission.named import weights_of
from skymemory.conductor.fleet import Fleet
from skymemory.conductor.picker import Picker
from skymemory.conductor.scheduler import Scheduler
from skymemory.errors import InvalidInput
from skymemory.keys import KeyRing
from skymemory.router.admission import rule_of
from skymemory.router.backends import Backends
from skymemory.router.deferred import ended
from skymemory.router.engines.events import EventsWatch, event_index
from skymemory.router.engines.metrics import MetricsWatch
from skymemory.router.envoy.endpoints import FileSource, NameSource, SettingsSource, Source, completed
from skymemory.router.envoy.ext_proc_server import Certificate, PickerServer, from_files, self_signed
from skymemory.router.envoy.metrics import Collects, MetricsPage
from skymemory.router.envoy.picker_service import Desk, DeskSettings
from skymemory.router.prefix_state import Knowledge, ReplicaFigures
from skymemory.router.prompts.reader import prompt_reader
from skymemory.router.settings import PickerSettings, Settings, follow


class EndpointPicker:
    """``run`` until the event is set. ``say`` gets lines for whoever looks on."""

    def __init__(
        self,
        desk: Desk,
        source: Source,
        settings: Settings,
        say: Callable[[str], None],
        knowledge: Knowledge | None = None,
        certificate: Certificate | None = None,
    ) -> None:
        """``knowledge``: what feeds the desk's strategy beyond requests; None: nothing does."""
        picker = settings.picker
        self.settings = self.at_start = settings
        self.desk = desk
        self._source = source
        self._say = say
        self._endpoints = desk.backends
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
            self._watch = MetricsWatch(
                self.desk.picker.fleet,
                session,
                every_s=self.settings.health.metrics_every_s,
                read=self._endpoints.reported,
            )
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
        self.settings, self.desk.settings, self._endpoints.health = settings, desk_settings, settings.health
        self._watch.every_s = settings.health.metrics_every_s
        for name in self._endpoints.known if looks_anew else ():
            self._ask_load(name)
        self._look.set()

    async def _keep_looking(self) -> None:
        known = False
        while True:
            self._look.clear()
            self._endpoints.let_go()
            endpoints = await self._source.endpoints()
            if endpoints is not None:
                told = [completed(backend, self.settings.picker) for backend in endpoints]
                came, left = self._endpoints.set(told)
                for name in left:
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


# An endpoint picker as settings ask for it: the desk and what stands around it.


TOKENIZED_ELSEWHERE_BYTES = 16 << 10
"""About 5 ms of a tokenizer's time: a thread costs a twentieth of that."""
READ_ELSEWHERE_BYTES = 256 << 10
"""About 0.7 ms where there is no tokenizer: a body as long as may be keeps a thread for 50 ms."""
_TAKEN_UP = {
    "refresh_s",
    "events_port",
    "replay_port",
    "model",
    "fallbacks",
    "max_requests",
    "max_streams",
    "tell_decisions",
}


def endpoint_picker(settings: Settings, say: Callable[[str], None], keys: KeyRing | None = None) -> EndpointPicker:
    """
    Raises:
        InvalidInput: what cannot be meant, or a file that cannot be read.
    """
    source = _source(settings, say)
    fleet = Fleet()
    knowledge = Knowledge(settings, fleet, keys)
    _check_events(settings, knowledge)
    picker = Picker(fleet, knowledge.scorer, settings.seed)
    backends = Backends(picker, settings.health, are_checked=False)
    reader = prompt_reader(settings, backends.adapters)
    beside = READ_ELSEWHERE_BYTES if settings.prompts.tokenizer is None else TOKENIZED_ELSEWHERE_BYTES
    scheduler = Scheduler(picker, admission=rule_of(settings))
    desk = Desk(scheduler, reader, backends, desk_settings(settings), reads_elsewhere_bytes=beside)
    configure_queue(desk, settings)
    return EndpointPicker(desk, source, settings, say, knowledge, _certificate(settings.picker))


def configure_queue(desk: Desk, settings: Settings) -> None:
    desk.queue.configure(settings.queue, weights_of("weights", settings.admission.options.get("weights", {})))


def desk_settings(settings: Settings) -> DeskSettings:
    picker = settings.picker
    return DeskSettings(
        fallbacks=picker.fallbacks,
        most_body_bytes=settings.limits.max_body_bytes,
        most_streams=picker.max_streams,
        most_requests=picker.max_requests or None,
        tell_decisions=picker.tell_decisions,
    )


def needs_restart(now: Settings, then: Settings) -> list[str]:
    """What differs between the two, and cannot be taken up by a picker that runs."""
    parts = ("strategy", "options", "prompts", "seed", "state", "cost", "replicas", "admission")
    fixed = [name for name in parts if getattr(now, name) != getattr(then, name)]
    if now.limits.max_body_bytes > then.limits.max_body_bytes:
        fixed.append("limits: max_body, above what it was at the start")
    return fixed + [
        f"picker: {each.metadata['key']}"
        for each in fields(PickerSettings)
        if each.name not in _TAKEN_UP and getattr(now.picker, each.name) != getattr(then.picker, each.name)
    ]


def _source(settings: Settings, say: Callable[[str], None]) -> Source:
    picker = settings.picker
    if [bool(settings.backends), picker.endpoints is not None, bool(picker.discover)].count(True) != 1:
        raise InvalidInput(
            "name the model servers in one way: --endpoint IP:PORT (or [[backends]]), --endpoints FILE or "
            "--discover NAME:PORT"
        )
    if picker.endpoints is not None:
        try:
            return FileSource(picker.endpoints, say)
        except OSError as error:
            raise InvalidInput(f"endpoints: {str(picker.endpoints)!r}: {error.strerror}") from error
    return NameSource(picker.discover, say) if picker.discover else SettingsSource(settings.backends)


def _check_events(settings: Settings, knowledge: Knowledge) -> None:
    """A strategy that goes by events needs them; the others have no use for them."""
    picker, name = settings.picker, knowledge.scorer.name
    if event_index(knowledge.scorer) is None:
        if picker.events_port or picker.replay_port:
            raise InvalidInput(f"strategy {name!r} has no use for events (--kv-events)")
        return
    own = picker.endpoints is not None or any(backend.events for backend in settings.backends)
    if not own and not picker.events_port:
        raise InvalidInput(
            f"strategy {name!r} goes by the events of engines' caches: say where endpoints publish them, each its own "
            "(`events`), or all at one port (--kv-events PORT)"
        )
    unnamed = [backend.url for backend in settings.backends if not backend.models]
    if not picker.model and (unnamed or picker.discover):
        raise InvalidInput(f"strategy {name!r} goes by events: say which model endpoints serve (--model, or `models`)")


def _certificate(picker: PickerSettings) -> Certificate | None:
    if picker.tls_cert is not None and picker.tls_key is not None:
        return from_files(picker.tls_cert, picker.tls_key, picker.tls_client_ca)
    return self_signed() if picker.self_signed else None


# An endpoint picker as a process: it follows its settings, and stops without dropping what it has begun.


log = logging.getLogger("skymemory.router")


def reload(picker: EndpointPicker, read: Callable[[], Settings]) -> None:
    """Read the settings anew. Those that cannot be meant change nothing."""
    try:
        settings = read()
        fixed = needs_restart(settings, picker.at_start)
        picker.reset(settings, desk_settings(settings))
        configure_queue(picker.desk, settings)
    except InvalidInput as error:
        picker.desk.counters.add("reloads_total", label="refused")
        log.error("the settings stay as they were: %s", error)
        return
    picker.desk.counters.add("reloads_total", label="taken")
    if fixed:
        log.warning("changed settings that wait for a restart: %s", ", ".join(fixed))
    log.info("settings taken up")


async def serve(
    read: Callable[[], Settings],
    file: Path | None,
    say: Callable[[str], None],
    read_keys: Callable[[Path], KeyRing],
    started: Callable[[EndpointPicker], None],
) -> None:
    """Run until SIGTERM or SIGINT. SIGHUP, or a change of ``file``, reads anew.

    Raises:
        SkyMemoryError: an address cannot be bound, or what is set up cannot be meant.
    """
    settings = read()
    key_file = settings.replicas.keys
    picker = endpoint_picker(settings, say, None if key_file is None else read_keys(key_file))
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, lambda: reload(picker, read))
    following = None if file is None else asyncio.create_task(follow(lambda: [file], lambda: reload(picker, read)))
    try:
        await picker.run(stop, lambda: started(picker))
    finally:
        await ended([following])
