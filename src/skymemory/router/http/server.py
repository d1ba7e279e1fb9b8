"""A proxy as a process: it listens, follows its settings file, and stops without dropping what it has begun."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from weakref import WeakKeyDictionary

import aiohttp

from skymemory.conductor.fleet import Fleet
from skymemory.conductor.picker import Picker
from skymemory.conductor.scheduler import Scheduler
from skymemory.errors import InvalidInput
from skymemory.keys import KeyRing
from skymemory.router.admission import rule_of
from skymemory.router.backends import Backends
from skymemory.router.deferred import Afterwards
from skymemory.router.engines.events import EventsWatch
from skymemory.router.http.connection import Connection
from skymemory.router.http.gate import OwnCertificate
from skymemory.router.http.health import HealthWatch
from skymemory.router.http.metrics import ProxyMetrics
from skymemory.router.http.proxy import Proxy
from skymemory.router.http.upstream import KEEP_S, Pools
from skymemory.router.prefix_state import Knowledge, ReplicaFigures
from skymemory.router.prompts.reader import prompt_reader
from skymemory.router.setting_values import host_and_port
from skymemory.router.settings import Settings, follow

log = logging.getLogger("skymemory.router")

BACKLOG = 4096
"""Connections that may wait to be accepted: bursts of clients come all at once."""
LAST_CALL_S = 0.5
"""When draining: for a request on a connection on which nothing is asked. Whoever asks often has asked by then."""
HANDSHAKE_S = 2.0
"""When draining: for a client to agree upon TLS."""
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
        self.pools = Pools()
        self.backends = Backends(self.picker, settings.health)
        self.backends.ejected, self.backends.left = self._ejected, self._left
        self.reader = prompt_reader(settings, self.backends.adapters)
        self.events = EventsWatch(self.knowledge.scorer, self.backends)
        self.metrics.registry.register(self.events)
        self.metrics.registry.register(ReplicaFigures(self.knowledge))
        self.port = 0
        self._greeting: WeakKeyDictionary[Connection, float] = WeakKeyDictionary()
        """Connections over TLS, and when they came."""

    async def start(self) -> None:
        """
        Raises:
            OSError: it cannot listen there.
            InvalidInput: certificates or the file of API keys cannot be read.
        """
        settings, loop = self.settings, asyncio.get_running_loop()
        self.pools.set(settings.backends, settings.timeouts.connect_s)
        self.backends.set(settings.backends)
        door = settings.door
        self._certificate = (
            None if door.tls_cert is None or door.tls_key is None else OwnCertificate(door.tls_cert, door.tls_key)
        )
        after = Afterwards(lambda: self.metrics.faults.labels("account").inc())
        after.when = loop.call_soon
        host, port = host_and_port(settings.listen)
        self._probes = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_S), cookie_jar=aiohttp.DummyCookieJar()
        )
        try:
            watch = self._watch = HealthWatch(
                self._probes, self.backends, self.pools.access, self.picker.fleet, self._faulted
            )
            self.proxy = Proxy(
                settings,
                self.scheduler,
                self.reader,
                watch,
                self.backends,
                self.pools,
                self.metrics,
                self.knowledge,
                after,
            )
            await self.knowledge.start()
            self._listener = await loop.create_server(
                self._connection,
                host,
                port,
                backlog=BACKLOG,
                ssl=None if self._certificate is None else self._certificate.context,
            )
        except BaseException:
            await self.knowledge.close(keep=False)
            await self._probes.close()
            raise
        self.port = self._listener.sockets[0].getsockname()[1]
        missing = [
            what for what, has in (("TLS", settings.door.tls_cert), ("API keys", settings.door.api_keys)) if not has
        ]
        if missing and not host.startswith(_LOOPBACK):
            log.warning("listening beyond this computer without %s of its own", " and ".join(missing))
        watch.follow()
        self.events.start()

    def _ejected(self, name: str) -> None:
        self.metrics.of(name).ejections += 1

    def _left(self, name: str) -> None:
        self.pools.drop(name)
        self.metrics.forget(name)

    def _faulted(self) -> None:
        self.metrics.faults.labels("health").inc()

    def reset(self, settings: Settings) -> None:
        """Take up changed settings, as far as that goes without a restart.

        Raises:
            InvalidInput: certificates or the file of API keys cannot be read; all stays as it was.
        """
        fixed = [
            name
            for name in ("listen", "strategy", "options", "prompts", "seed", "state", "cost", "replicas", "admission")
            if getattr(settings, name) != getattr(self.settings, name)
        ]
        door = settings.door
        if (door.tls_cert is None) != (self._certificate is None):
            fixed.append("door: tls_cert")
        if fixed:
            log.warning("changed settings that wait for a restart: %s", ", ".join(fixed))
        pair = None
        if self._certificate is not None and door.tls_cert is not None and door.tls_key is not None:
            pair = door.tls_cert, door.tls_key
            self._certificate.check(*pair)  # all is taken up, or nothing
        self.proxy.reset(settings)
        if self._certificate is not None and pair is not None:
            self._certificate.read(*pair)
        log.info("settings taken up: %d servers", len(settings.backends))

    async def drain(self, bound_s: float) -> bool:
        """Accept nobody, finish what was begun, for ``bound_s`` at most. Whether all of it could end.

        Begun is whatever a client may have sent a request on: a connection that is idle, one that the kernel had
        accepted for us, one whose TLS is being agreed upon.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + bound_s
        self.proxy.drain(min(LAST_CALL_S, bound_s / 4))
        context = None if self._certificate is None else self._certificate.context
        greeted = asyncio.gather(
            *(
                loop.connect_accepted_socket(
                    self._connection, each, ssl=context, ssl_handshake_timeout=None if context is None else HANDSHAKE_S
                )
                for each in self._stop_listening()
            ),
            return_exceptions=True,
        )
        while not greeted.done() or self._is_greeting(loop.time()) or self.proxy.connections:
            if loop.time() >= deadline_s:
                greeted.cancel()
                busy = sum(connection.current is not None for connection in self.proxy.connections)
                log.warning("%d requests are cut off: they did not end in %g s", busy, bound_s)
                return False
            await asyncio.sleep(0.02)
        return True  # connections are gone when what was written has gone out, too

    def _connection(self) -> Connection:
        loop = asyncio.get_running_loop()
        connection = Connection(self.proxy, loop)
        if self._certificate is not None:
            self._greeting[connection] = loop.time()
        return connection

    def _is_greeting(self, now_s: float) -> bool:
        """Whether TLS is being agreed upon with somebody. Nobody says when that fails: it takes so long at most."""
        return any(not each.made and now_s - since_s < HANDSHAKE_S for each, since_s in self._greeting.items())

    def _stop_listening(self) -> list[socket.socket]:
        """Connections that the kernel had accepted and we had not: closing the socket that listens would reset them."""
        doubles = [socket.socket(fileno=os.dup(each.fileno())) for each in self._listener.sockets]
        self._listener.close()
        accepted: list[socket.socket] = []
        for double in doubles:
            with double, contextlib.suppress(OSError):  # BlockingIOError: that was all
                double.setblocking(False)
                while True:
                    accepted.append(double.accept()[0])
        for each in accepted:
            each.setblocking(False)
        return accepted

    async def close(self) -> None:
        self._listener.close()
        await self._watch.stop()
        await self.events.stop()
        self.proxy.stop()
        await self.knowledge.close()
        self.pools.close()
        await self._probes.close()


def raise_open_files() -> None:
    """As many open files as this process may have: a request under way takes two, and many systems begin with 1,024."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(OSError, ValueError):  # "unlimited" is more than some systems let it be
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


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
    raise_open_files()
    await server.start()
    gc.freeze()  # what stands now stays: the collector need not look at it in the middle of a request
    host, _ = host_and_port(settings.listen)
    scheme = "http" if settings.door.tls_cert is None else "https"
    address = f"{f'[{host}]' if ':' in host else host}:{server.port}"
    say(f"listening on {scheme}://{address}: {len(settings.backends)} servers, {server.picker.scorer.name}")

    def followed() -> list[Path]:
        # The key too: chain and key are seldom written at once, and when the chain is seen they may be no pair yet.
        settings, door = server.proxy.settings, server.proxy.settings.door
        keys = (each.api_key_file for each in settings.backends)
        return [each for each in (file, door.api_keys, door.tls_cert, door.tls_key, *keys) if each is not None]

    following = asyncio.create_task(follow(followed, reload))
    try:
        await told_to_stop.wait()
        draining = asyncio.create_task(server.drain(server.proxy.settings.drain_s))
        hurrying = asyncio.create_task(at_once.wait())
        await asyncio.wait((draining, hurrying), return_when=asyncio.FIRST_COMPLETED)
        hurrying.cancel()
        draining.cancel()
        ended = draining.done() and not draining.cancelled() and draining.result()
    finally:
        following.cancel()
        await server.close()
    return 0 if ended else 1
