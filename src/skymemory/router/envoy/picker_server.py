"""Endpoint picker as a process.

1. ``serve`` reads the settings and builds an ``EndpointPicker``.
2. ``run`` listens and refreshes the endpoints. It is ready once it knows endpoints and has loaded the index.
3. SIGHUP or a changed file reloads some settings; SIGTERM drains.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path

import aiohttp
from prometheus_client.registry import Collector

from skymemory.conductor.admission.registry import weights_of
from skymemory.conductor.picker import Fleet, Picker
from skymemory.conductor.scheduler import Scheduler
from skymemory.errors import InvalidInput, os_reason
from skymemory.keys import KeyRing
from skymemory.router.admission import rule_of
from skymemory.router.backends import Backends
from skymemory.router.decoding import alone_schedulers, decode_picker, forecast_of
from skymemory.router.engines.engine_metrics import MetricsWatch, fetch
from skymemory.router.engines.events import EventsWatch, event_index
from skymemory.router.envoy.endpoints import (
    BothSources,
    EndpointSource,
    FileSource,
    NameSource,
    SettingsSource,
    completed,
)
from skymemory.router.envoy.ext_proc import PickerService
from skymemory.router.envoy.ext_proc_server import PickerServer
from skymemory.router.envoy.picker_metrics import MetricsPage
from skymemory.router.prefix_state import PrefixState, ReplicaFigures
from skymemory.router.prompts.reader import PromptReader
from skymemory.router.settings import PREFILL, REFUSE, PickerSettings, Settings
from skymemory.router.tasks import cancel, follow
from skymemory.router.tls import PemCertificate, from_files, self_signed

log = logging.getLogger("skymemory.router")

TOKENIZED_IN_THREAD_BYTES = 16 << 10
"""Length of about 5 ms of tokenizing, twenty times the cost of a thread."""
IN_THREAD_BYTES = 256 << 10
"""Length of about 0.7 ms of reading."""
_RELOADED = {
    "refresh_s",
    "events_port",
    "replay_port",
    "model",
    "fallbacks",
    "max_requests",
    "max_streams",
    "tell_decisions",
}


class EndpointPicker:
    """Endpoint picker that runs until an event is set."""

    def __init__(
        self,
        service: PickerService,
        source: EndpointSource,
        settings: Settings,
        say: Callable[[str], None],
        prefix_state: PrefixState | None = None,
        certificate: PemCertificate | None = None,
    ) -> None:
        picker = settings.picker
        self.settings = self.at_start = settings
        self.service = service
        self._source = source
        self._say = say
        self._endpoints = service.backends
        self._prefix_state = prefix_state
        self._events = EventsWatch(service.picker.scorer, self._endpoints)
        self._refresh = asyncio.Event()
        self._begun = False  # the endpoints are known, and the index is loaded
        self.server = PickerServer(service, picker.listen, certificate, picker.health_listen or None)
        collectors: list[Collector] = [self._events]
        if prefix_state is not None:
            collectors.append(ReplicaFigures(prefix_state))
        self.metrics = MetricsPage(service, picker.metrics_listen, collectors) if picker.metrics_listen else None

    async def run(self, stop: asyncio.Event, started: Callable[[], None] | None = None) -> None:
        async with aiohttp.ClientSession() as session:
            self._watch = MetricsWatch(
                self._endpoints.server,
                partial(fetch, session),
                every_s=self.settings.health.metrics_every_s,
                read=self._endpoints.reported,
            )
            refreshing: asyncio.Task[None] | None = None
            try:
                await self.server.start()
                if self.metrics is not None:
                    await self.metrics.start()
                if started is not None:
                    started()
                refreshing = asyncio.create_task(self._keep_refreshing())
                stopping = asyncio.create_task(stop.wait())
                # An unexpected exception of refreshing ends the picker, which is better than a picker with outdated
                # endpoints.
                done, _ = await asyncio.wait({refreshing, stopping}, return_when=asyncio.FIRST_COMPLETED)
                stopping.cancel()
                if refreshing in done:
                    refreshing.result()
            finally:
                await cancel([refreshing])
                await self.server.stop(self.settings.drain_s if self.service.streams else 0)
                if self.metrics is not None:
                    await self.metrics.stop()
                await self._watch.close()
                await self._events.stop()
                if self._prefix_state is not None:
                    await self._prefix_state.close(keep=self._begun)

    def reset(self, settings: Settings) -> None:
        """Apply changed settings that need no restart.

        Raises:
            InvalidInput: a backend is not an endpoint for Envoy; nothing has changed.
        """
        if isinstance(self._source, SettingsSource):
            self._source.set(settings.backends)
        has_new_page = settings.health.metrics_path != self.settings.health.metrics_path
        self.settings, self.service.settings, self._endpoints.health = settings, settings.picker, settings.health
        self.service.most_body_bytes = settings.limits.max_body_bytes
        self.service.split_from = settings.disaggregation.split_from
        self.service.refuses_unknown_paths = settings.unknown_paths == REFUSE
        self._watch.every_s = settings.health.metrics_every_s
        for name in self._endpoints.known if has_new_page else ():
            self._watch_load(name)
        self._refresh.set()

    async def _keep_refreshing(self) -> None:
        """Read the endpoints periodically; after the first time, the picker is ready."""
        known = False
        while True:
            self._refresh.clear()
            self._endpoints.remove_drained()
            current = await self._source.endpoints()
            if current is not None:
                endpoints = [completed(backend, self.settings.picker) for backend in current]
                added, removed = self._endpoints.set(endpoints)
                for name in removed:
                    self._watch.unfollow(name)
                for name in added:
                    self._watch_load(name)
                if known:
                    self._events.follow()
                if added or removed or not known:
                    self._say(f"{len(endpoints)} endpoints: {len(added)} added, {len(removed)} removed")
                if not known:
                    known = True
                    await self._begin()
            try:
                async with asyncio.timeout(self.settings.picker.refresh_s):
                    await self._refresh.wait()
            except TimeoutError:
                pass

    async def _begin(self) -> None:
        if self._prefix_state is not None:
            await self._prefix_state.start()
        self._begun = True
        self._events.start()
        await self.server.ready()

    def _watch_load(self, name: str) -> None:
        path = self.settings.health.metrics_path
        if path:
            self._watch.follow(name, f"http://{name}{path}")
        else:
            self._watch.unfollow(name)


def endpoint_picker(settings: Settings, say: Callable[[str], None], keys: KeyRing | None = None) -> EndpointPicker:
    source = _source(settings, say)
    splits, fleet = settings.splits, Fleet()
    prefix_state = PrefixState(settings, fleet, keys)
    _check_events(settings, prefix_state)
    picker = Picker(fleet, prefix_state.scorer, settings.seed)
    decode = decode_picker(settings) if splits else None
    prefix_state.connect(each for each in (picker, decode) if each is not None)
    backends = Backends(picker, settings.health, are_checked=False, decode=decode)
    reader = PromptReader(settings, backends.adapters)
    thread_bytes = IN_THREAD_BYTES if settings.prompts.tokenizer is None else TOKENIZED_IN_THREAD_BYTES
    scheduler = Scheduler(picker, decode, rule_of(settings), forecast_of(decode))
    service = PickerService(
        scheduler, reader, backends, settings.picker, settings.limits.max_body_bytes, thread_bytes=thread_bytes
    )
    service.refuses_unknown_paths = settings.unknown_paths == REFUSE
    if decode is not None:
        service.alone = alone_schedulers(scheduler, settings.seed)[1]
        service.split_from = settings.disaggregation.split_from
    configure_queue(service, settings)
    return EndpointPicker(service, source, settings, say, prefix_state, _certificate(settings.picker))


def configure_queue(service: PickerService, settings: Settings) -> None:
    service.queue.configure(settings.queue, weights_of("weights", settings.admission.options.get("weights", {})))


def needs_restart(now: Settings, then: Settings) -> list[str]:
    """Return changed settings that are not reloaded."""
    parts = ("strategy", "options", "prompts", "seed", "state", "cost", "replicas", "admission")
    fixed = [name for name in parts if getattr(now, name) != getattr(then, name)]
    if now.splits != then.splits:
        fixed.append("backends: role")
    if now.limits.max_body_bytes > then.limits.max_body_bytes:
        fixed.append("limits: max_body, above its value at the start")
    return fixed + [
        f"picker: {setting.metadata['key']}"
        for setting in fields(PickerSettings)
        if setting.name not in _RELOADED and getattr(now.picker, setting.name) != getattr(then.picker, setting.name)
    ]


def _source(settings: Settings, say: Callable[[str], None]) -> EndpointSource:
    picker = settings.picker
    if [bool(settings.backends), picker.endpoints is not None, bool(picker.discover)].count(True) != 1:
        raise InvalidInput(
            "name the model servers in one way: --endpoint IP:PORT (or [[backends]]), picker: endpoints or "
            "--discover NAME:PORT"
        )
    if picker.endpoints is not None:
        try:
            return FileSource(picker.endpoints, say)
        except OSError as error:
            raise InvalidInput(f"endpoints: {str(picker.endpoints)!r}: {os_reason(error)}") from error
    if not picker.discover:
        return SettingsSource(settings.backends)
    answering = NameSource(picker.discover, say)
    if not picker.discover_prefill:
        return answering
    return BothSources(answering, NameSource(picker.discover_prefill, say, PREFILL))


def _check_events(settings: Settings, prefix_state: PrefixState) -> None:
    picker, name = settings.picker, prefix_state.scorer.name
    if event_index(prefix_state.scorer) is None:
        if picker.events_port or picker.replay_port:
            raise InvalidInput(
                f"strategy {name!r} does not use KV events: leave out picker: events_port and replay_port"
            )
        return
    own = picker.endpoints is not None or any(backend.events for backend in settings.backends)
    if not own and not picker.events_port:
        raise InvalidInput(
            f"strategy {name!r} needs the engines' KV events: name the address of each endpoint (`events`), or one "
            "port for all (picker: events_port)"
        )
    unnamed = [backend.url for backend in settings.backends if not backend.models]
    if not picker.model and (unnamed or picker.discover):
        raise InvalidInput(
            f"strategy {name!r} needs KV events, and so the endpoints' model (picker: model, or `models`)"
        )


def _certificate(picker: PickerSettings) -> PemCertificate | None:
    if picker.tls_cert is not None and picker.tls_key is not None:
        return from_files(picker.tls_cert, picker.tls_key, picker.tls_client_ca)
    return self_signed() if picker.self_signed else None


def reload(picker: EndpointPicker, read: Callable[[], Settings]) -> None:
    try:
        settings = read()
        fixed = needs_restart(settings, picker.at_start)
        picker.reset(settings)
        configure_queue(picker.service, settings)
    except InvalidInput as error:
        picker.service.counters.add("reloads_total", label="refused")
        log.error("settings not reloaded (the former ones stay in force): %s", error)
        return
    picker.service.counters.add("reloads_total", label="taken")
    if fixed:
        log.warning("changed settings that need a restart: %s", ", ".join(fixed))
    log.info("settings applied")


async def serve(
    read: Callable[[], Settings],
    file: Path | None,
    say: Callable[[str], None],
    read_keys: Callable[[Path], KeyRing],
    started: Callable[[EndpointPicker], None],
) -> None:
    """Run until SIGTERM or SIGINT. SIGHUP, or a change of ``file``, reloads."""
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
        await cancel([following])
