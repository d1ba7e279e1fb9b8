"""The proxy process: listens, reloads its settings, and drains before it stops."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from skymemory.addresses import format_address, host_and_port
from skymemory.conductor.picker import Fleet, Picker
from skymemory.conductor.scheduler import Scheduler
from skymemory.errors import InvalidInput, SkyMemoryError, cannot_listen
from skymemory.keys import KeyRing
from skymemory.router.admission import rule_of
from skymemory.router.backends import Backends
from skymemory.router.decoding import alone_schedulers, decode_picker, forecast_of
from skymemory.router.engines.events import EventsWatch
from skymemory.router.http.access_control import AccessControl
from skymemory.router.http.connection import HttpConnection
from skymemory.router.http.elastic import ElasticRoles
from skymemory.router.http.exchange import Exchange, Exchanges
from skymemory.router.http.health import HealthWatch
from skymemory.router.http.listener import Listener
from skymemory.router.http.proxy import Proxy
from skymemory.router.http.sidecar import NamedPrefillers, SidecarExchange, SidecarProxy
from skymemory.router.http.two_steps import TwoStepExchange
from skymemory.router.http.upstream import Pools
from skymemory.router.limits.files import raise_open_files
from skymemory.router.limits.heap import trimmed_heap
from skymemory.router.prefix_state import PrefixState, ReplicaFigures
from skymemory.router.prompts.reader import PromptReader
from skymemory.router.request_account import DeferredWork
from skymemory.router.router_metrics import ProxyMetrics
from skymemory.router.settings import Settings
from skymemory.router.tasks import cancel, follow
from skymemory.router.tls import Certificate

log = logging.getLogger("skymemory.router")

LAST_CALL_S = 0.5
"""Idle time of draining connections: a request may be on its way."""
HANDSHAKE_S = 2.0
COLLECTED_OBJECTS = 20_000
"""Threshold of garbage collection: only connections leave cycles."""
_LOOPBACK = ("127.", "::1", "localhost")


class ProxyServer:
    def __init__(self, settings: Settings, keys: KeyRing | None = None) -> None:
        self.settings = settings
        fleet = Fleet()
        self.prefix_state = PrefixState(settings, fleet, keys)
        self.picker = Picker(fleet, self.prefix_state.scorer, settings.seed)
        decode = decode_picker(settings) if settings.splits else None
        self.prefix_state.connect(picker for picker in (self.picker, decode) if picker is not None)
        self.scheduler = Scheduler(self.picker, decode, rule_of(settings), forecast_of(decode))
        self.pools = Pools()
        self.backends = Backends(self.picker, settings.health, decode=decode)
        self.metrics = ProxyMetrics(
            fleet, decode.fleet if decode else None, self.backends.role_of, self.backends.policy.is_ejected
        )
        self.backends.on_ejected, self.backends.on_removed = self._ejected, self._removed
        self.reader = PromptReader(settings, self.backends.adapters)
        self.events = EventsWatch(self.prefix_state.scorer, self.backends)
        self.metrics.registry.register(self.events)
        self.roles: ElasticRoles | None = None
        if settings.has_elastic:
            self.roles = ElasticRoles(settings, self.backends, self.prefix_state.scorer)
            self.metrics.registry.register(self.roles)
        self._following: asyncio.Task[None] | None = None
        self.metrics.registry.register(ReplicaFigures(self.prefix_state))
        self.port = 0

    def check_files(self) -> None:
        """Check the files that ``start`` reads."""
        door = self.settings.door
        if door.tls_cert is not None and door.tls_key is not None:
            Certificate.check(door.tls_cert, door.tls_key)
        AccessControl.read(self.settings)

    async def start(self) -> None:
        """Listen, and watch the servers.

        Raises:
            SkyMemoryError: it cannot listen.
        """
        settings, loop = self.settings, asyncio.get_running_loop()
        self.pools.set(settings.backends, settings.timeouts.connect_s)
        self.backends.set(settings.backends)
        door = settings.door
        self._certificate = (
            None if door.tls_cert is None or door.tls_key is None else Certificate(door.tls_cert, door.tls_key)
        )
        deferred = DeferredWork(lambda: self.metrics.faults.labels("account").inc())
        deferred.schedule = loop.call_soon
        host, port = host_and_port(settings.listen)
        try:
            self._health = HealthWatch(self.backends, self.pools.access, self._faulted)
            self.backends.on_check_wanted = self._health.check_now
            self.proxy = self._proxy(deferred)
            await self.prefix_state.start()
            context = None if self._certificate is None else self._certificate.context
            connection = partial(HttpConnection, self.proxy, loop)
            proxy = self.proxy
            self._listener = Listener(connection, proxy.admit, context, lambda: proxy.head_s, proxy.close_idle)
            try:
                self.port = await self._listener.start(host, port)
            except OSError as error:
                raise SkyMemoryError(cannot_listen(settings.listen, error)) from error
        except BaseException:
            await self.prefix_state.close(keep=False)
            raise
        missing = [
            what for what, has in (("TLS", settings.door.tls_cert), ("API keys", settings.door.api_keys)) if not has
        ]
        if missing and not host.startswith(_LOOPBACK):
            log.warning("other computers can connect, and the router is set up with no %s", " and no ".join(missing))
        self._health.follow()
        self.events.start()
        self.backends.on_moved = self.events.follow
        if self.roles is not None:
            self._following = asyncio.create_task(self._follow_load(self.roles), name="roles")

    async def _follow_load(self, roles: ElasticRoles) -> None:
        while True:
            try:
                if roles.observe(time.monotonic()):
                    self._health.follow()
            except Exception:
                self.metrics.faults.labels("roles").inc()
                log.exception("roles of servers")
            await asyncio.sleep(roles.every_s)

    def _proxy(self, deferred: DeferredWork) -> Proxy:
        settings, scheduler = self.settings, self.scheduler
        least_load, alone = alone_schedulers(scheduler, settings.seed)
        exchanges = Exchanges(
            settings,
            AccessControl(),
            self.reader,
            scheduler,
            least_load,
            self.backends,
            self.pools,
            self.metrics,
            deferred,
            alone,
        )
        exchanges.random.seed(settings.seed)
        if settings.sidecar.engine:
            prefillers = NamedPrefillers(self.picker, self.pools, self.metrics)
            exchange = partial(SidecarExchange, prefillers)
            return SidecarProxy(exchanges, self._health, self.prefix_state, exchange)
        exchange_kind = TwoStepExchange if settings.splits else Exchange
        return Proxy(exchanges, self._health, self.prefix_state, exchange_kind, self.roles)

    def _ejected(self, name: str) -> None:
        self.metrics.of(name).ejections += 1

    def _removed(self, name: str) -> None:
        self.pools.drop(name)
        self.metrics.forget(name)

    def _faulted(self) -> None:
        self.metrics.faults.labels("health").inc()

    def reset(self, settings: Settings) -> None:
        """Apply changed settings that need no restart.

        Raises:
            InvalidInput: unreadable certificates or keys; nothing has changed.
        """
        fixed = [
            name
            for name in ("listen", "strategy", "options", "prompts", "seed", "state", "cost", "replicas", "admission")
            if getattr(settings, name) != getattr(self.settings, name)
        ]
        if settings.has_elastic and (self.roles is None or settings.elastic != self.settings.elastic):
            fixed.append("backends: elastic" if self.roles is None else "elastic")
        if settings.splits != self.settings.splits or settings.sidecar.engine != self.settings.sidecar.engine:
            # Roles make one fleet or two: servers may change roles, but roles cannot appear or vanish.
            fixed.append("backends: role" if not settings.sidecar.engine else "sidecar: engine")
        door = settings.door
        if (door.tls_cert is None) != (self._certificate is None):
            fixed.append("door: tls_cert")
        if fixed:
            log.warning("changed settings that need a restart: %s", ", ".join(fixed))
        pair = None
        if self._certificate is not None and door.tls_cert is not None and door.tls_key is not None:
            pair = door.tls_cert, door.tls_key
            self._certificate.check(*pair)  # before any change: apply all settings or none
        self.proxy.reset(settings)
        if self._certificate is not None and pair is not None:
            self._certificate.load(*pair)
        log.info("settings applied: %d servers", len(settings.backends))

    async def drain(self, bound_s: float) -> bool:
        """Stop accepting, and wait at most ``bound_s`` for connections, even those only in the kernel. Return True if
        all ended.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + bound_s
        self.proxy.drain(min(LAST_CALL_S, bound_s / 4))
        since_s = loop.time()
        self._listener.stop_accepting(HANDSHAKE_S)
        while self.proxy.connections or self._has_handshake(since_s):
            if loop.time() >= deadline_s:
                busy = sum(connection.current is not None for connection in self.proxy.connections)
                log.warning("%d requests are aborted: they did not end within %g s", busy, bound_s)
                return False
            await asyncio.sleep(0.02)
        return True  # a connection is removed when its write buffer is empty

    def _has_handshake(self, since_s: float) -> bool:
        return self._listener.is_setting_up and asyncio.get_running_loop().time() - since_s < HANDSHAKE_S

    async def close(self) -> None:
        self._listener.close()
        await cancel([self._following])
        await self._health.stop()
        await self.events.stop()
        self.proxy.stop()
        await self.prefix_state.close()
        self.pools.close()


async def serve(
    read: Callable[[], Settings], file: Path | None, say: Callable[[str], None], read_keys: Callable[[Path], KeyRing]
) -> int:
    """Run until SIGTERM or SIGINT, then drain; a second signal stops at once. SIGHUP, or a changed ``file``, reloads.
    Return the exit code: 1 if requests were aborted.
    """
    settings = read()
    key_file = settings.replicas.keys
    server = ProxyServer(settings, None if key_file is None else read_keys(key_file))
    loop = asyncio.get_running_loop()
    stopping, at_once = asyncio.Event(), asyncio.Event()

    def stop() -> None:
        (at_once if stopping.is_set() else stopping).set()

    def reload() -> None:
        try:
            server.reset(read())
            server.metrics.reloads.labels("taken").inc()
        except InvalidInput as error:
            server.metrics.reloads.labels("refused").inc()
            log.error("settings not reloaded (the former ones stay in force): %s", error)
        except Exception:  # keep following the file
            server.metrics.reloads.labels("refused").inc()
            log.exception("settings not fully reloaded")

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGHUP, reload)
    raise_open_files()
    await server.start()
    gc.freeze()  # long-lived objects: keep the collector from scanning them in the middle of a request
    gc.set_threshold(COLLECTED_OBJECTS)
    host, _ = host_and_port(settings.listen)
    scheme = "http" if settings.door.tls_cert is None else "https"
    say(
        f"listening on {scheme}://{format_address(host, server.port)}: {len(settings.backends)} servers, "
        f"{server.picker.scorer.name}"
    )

    def followed() -> list[Path]:
        # Include the key file: chain and key are seldom replaced at once, and the new chain may not fit the old key.
        settings, door = server.proxy.settings, server.proxy.settings.door
        keys = (backend.api_key_file for backend in settings.backends)
        return [path for path in (file, door.api_keys, door.tls_cert, door.tls_key, *keys) if path is not None]

    following = asyncio.create_task(follow(followed, reload))
    try:
        with trimmed_heap():
            await stopping.wait()
        draining = asyncio.create_task(server.drain(server.proxy.settings.drain_s))
        hurrying = asyncio.create_task(at_once.wait())
        await asyncio.wait((draining, hurrying), return_when=asyncio.FIRST_COMPLETED)
        hurrying.cancel()
        draining.cancel()
        is_drained = draining.done() and not draining.cancelled() and draining.result()
    finally:
        following.cancel()
        await server.close()
    return 0 if is_drained else 1
