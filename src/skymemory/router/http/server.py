"""A proxy as a process: it listens, follows its settings file, and stops without dropping what it has begun."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import Callable
from pathlib import Path

import aiohttp
from aiohttp import web

from skymemory.conductor.fleet import Fleet
from skymemory.conductor.picker import Picker
from skymemory.conductor.scheduler import Scheduler
from skymemory.errors import InvalidInput
from skymemory.keys import KeyRing
from skymemory.router.knowledge import Knowledge, ReplicaFigures
from skymemory.router.prompt_reader import prompt_reader
from skymemory.router.proxy import Proxy
from skymemory.router.proxy_admission import rule_of
from skymemory.router.proxy_backends import Backends
from skymemory.router.proxy_events import EventsWatch
from skymemory.router.proxy_health import HealthWatch
from skymemory.router.proxy_metrics import ProxyMetrics
from skymemory.router.setting_values import host_and_port
from skymemory.router.settings import Settings
from skymemory.router.settings_follow import follow
from skymemory.router.upstream import KEEP_S

log = logging.getLogger("skymemory.router")

LINGER_S = 2.0
"""How long the rest of a body that was refused is read, so that its sender gets to see the refusal."""
MAX_HEADER_BYTES = 32_768
_LOOPBACK = ("127.", "::1", "localhost")


class ProxyServer:
    """A listening proxy. Made and closed within one event loop."""

    def __init__(self, settings: Settings, keys: KeyRing | None = None) -> None:
        self.settings = settings
        fleet = Fleet()
        self.knowledge = Knowledge(settings, fleet, keys)
        self.picker = Picker(fleet, self.knowledge.scorer, settings.seed)
        self.scheduler = Scheduler(self.picker, admission=rule_of(settings))
        self.metrics = ProxyMetrics(self.picker.fleet)
        self.backends = Backends(self.picker, self.metrics, settings.health, settings.timeouts.connect_s)
        self.reader = prompt_reader(settings, self.backends.adapters)
        self.events = EventsWatch(self.knowledge.scorer, self.backends)
        self.metrics.registry.register(self.events)
        self.metrics.registry.register(ReplicaFigures(self.knowledge))
        self.port = 0

    async def start(self) -> None:
        """
        Raises:
            OSError: it cannot listen there.
            InvalidInput: a backend's certificates cannot be read.
        """
        settings = self.settings
        self.backends.set(settings.backends)
        self._probes = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_S), cookie_jar=aiohttp.DummyCookieJar()
        )
        watch = self._watch = HealthWatch(self._probes, self.backends, self.picker.fleet)
        self.proxy = Proxy(settings, self.scheduler, self.reader, watch, self.backends, self.metrics, self.knowledge)
        quiet = logging.getLogger("skymemory.router.http")
        quiet.disabled = True  # bytes that are not HTTP are answered with 400, not with a traceback in the log
        self._http = web.Server(
            self.proxy.handle,
            handler_cancellation=True,
            keepalive_timeout=settings.timeouts.keep_alive_s,
            lingering_time=LINGER_S,
            max_field_size=MAX_HEADER_BYTES,
            max_line_size=MAX_HEADER_BYTES,
            access_log=None,
            logger=quiet,
        )
        host, port = host_and_port(settings.listen)
        try:
            await self.knowledge.start()
            self._listener = await asyncio.get_running_loop().create_server(self._http, host, port, backlog=1024)
        except BaseException:
            await self.knowledge.close(keep=False)
            await self._probes.close()
            raise
        self.port = self._listener.sockets[0].getsockname()[1]
        if not host.startswith(_LOOPBACK):
            log.warning("listening beyond this computer, without TLS or authentication of its own")
        watch.follow()
        self.events.start()

    def reset(self, settings: Settings) -> None:
        """Take up changed settings, as far as that goes without a restart."""
        fixed = [
            name
            for name in ("listen", "strategy", "options", "prompts", "seed", "state", "cost", "replicas", "admission")
            if getattr(settings, name) != getattr(self.settings, name)
        ]
        if settings.timeouts.keep_alive_s != self.settings.timeouts.keep_alive_s:
            fixed.append("timeouts: keep_alive")
        if fixed:
            log.warning("changed settings that wait for a restart: %s", ", ".join(fixed))
        self.proxy.reset(settings)
        log.info("settings taken up: %d servers", len(settings.backends))

    async def drain(self, bound_s: float) -> bool:
        """Accept nobody, finish what was begun, for ``bound_s`` at most. Whether all of it could end."""
        self.proxy.draining = True
        self._listener.close()
        deadline_s = asyncio.get_running_loop().time() + bound_s
        while True:
            for connection in self._http.connections:
                if connection not in self.proxy.busy:
                    connection.close()
            if not self.proxy.busy:
                return True
            if asyncio.get_running_loop().time() >= deadline_s:
                log.warning("%d requests are cut off: they did not end in %g s", len(self.proxy.busy), bound_s)
                return False
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        self.proxy.stopping = True
        self._listener.close()
        await self._watch.stop()
        await self.events.stop()
        with contextlib.suppress(asyncio.TimeoutError):
            await self._http.shutdown(0.1)
        await self.knowledge.close()
        self.backends.close()
        await self._probes.close()


async def serve(
    read: Callable[[], Settings],
    file: Path | None,
    say: Callable[[str], None],
    read_keys: Callable[[Path], KeyRing],
) -> int:
    """Run until SIGTERM or SIGINT, then drain; a second one stops at once. SIGHUP, or a change of ``file``, reads anew.

    Returns the exit code: 0, or 1 where requests had to be cut off.
    """
    settings = read()
    key_file = settings.replicas.keys
    server = ProxyServer(settings, None if key_file is None else read_keys(key_file))
    loop = asyncio.get_running_loop()
    told_to_stop, at_once = asyncio.Event(), asyncio.Event()

    def stop() -> None:
        (at_once if told_to_stop.is_set() else told_to_stop).set()

    def reload() -> None:
        try:
            server.reset(read())
            server.metrics.reloads.labels("taken").inc()
        except InvalidInput as error:
            server.metrics.reloads.labels("refused").inc()
            log.error("the settings stay as they were: %s", error)
        except Exception:  # the file is followed on, whatever was in it
            server.metrics.reloads.labels("refused").inc()
            log.exception("the settings were not taken up whole")

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGHUP, reload)
    await server.start()
    gc.freeze()  # what stands now stays: the collector need not look at it in the middle of a request
    host, _ = host_and_port(settings.listen)
    say(f"listening on http://{f'[{host}]' if ':' in host else host}:{server.port}: {len(settings.backends)} servers, "
        f"{server.picker.scorer.name}")  # fmt: skip
    following = asyncio.create_task(follow(file, reload)) if file is not None else None
    try:
        await told_to_stop.wait()
        draining = asyncio.create_task(server.drain(server.proxy.settings.drain_s))
        hurrying = asyncio.create_task(at_once.wait())
        await asyncio.wait((draining, hurrying), return_when=asyncio.FIRST_COMPLETED)
        hurrying.cancel()
        draining.cancel()
        ended = draining.done() and not draining.cancelled() and draining.result()
    finally:
        if following is not None:
            following.cancel()
        await server.close()
    return 0 if ended else 1
