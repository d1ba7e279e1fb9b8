"""Polls the servers: health checks for ejection and return, model lists, and load (by ``MetricsWatch``)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from skymemory.errors import connection_reason
from skymemory.router.backends import Backends, KnownServer
from skymemory.router.engines.metrics import MetricsWatch, NoAnswer, fetch
from skymemory.router.tasks import cancel
from skymemory.router.tls import Access

log = logging.getLogger("skymemory.router")

MAX_MODELS_BYTES = 4 << 20


class _ModelList(msgspec.Struct):
    data: list[dict[str, Any]] = []


_models = msgspec.json.Decoder(_ModelList)


class HealthWatch:
    """One task per server, and one for its metrics: a slow page delays no check, a dead server no other server's."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        backends: Backends,
        access: Mapping[str, Access],
        on_fault: Callable[[], None],
    ) -> None:
        """``access``: TLS and keys by server. ``on_fault``: called for each unexpected exception."""
        self._session = session
        self._backends = backends
        self._access = access
        self._on_fault = on_fault
        self._metrics = MetricsWatch(
            backends.server, session, every_s=backends.health.metrics_every_s, read=backends.reported
        )
        self._tasks: dict[KnownServer, asyncio.Task[None]] = {}

    def follow(self) -> None:
        """Watch the present servers, and no others."""
        wanted = set(self._backends.known.values())
        for known in self._tasks.keys() - wanted:
            self._tasks.pop(known).cancel()
            if known.backend.name not in self._backends.known:
                self._metrics.unfollow(known.backend.name)
        health = self._backends.health
        has_new_period = self._metrics.every_s != health.metrics_every_s
        self._metrics.every_s = health.metrics_every_s
        for known in wanted:
            name = known.backend.name
            if known not in self._tasks:
                self._tasks[known] = asyncio.create_task(self._check_forever(known), name=f"health of {name}")
            watched = self._metrics.watched.get(name)
            if not health.metrics_path:
                self._metrics.unfollow(name)
                continue
            wanted_page = known.backend.url + health.metrics_path, self._access.get(name, Access())
            if has_new_period or watched is None or (watched.url, watched.access) != wanted_page:
                self._metrics.follow(name, *wanted_page)

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        self._tasks.clear()
        await cancel(tasks)
        await self._metrics.close()

    async def _check_forever(self, known: KnownServer) -> None:
        models_due_s = 0.0
        while True:
            health = self._backends.health
            began_s = time.monotonic()
            try:
                if await self._is_well(known) and began_s >= models_due_s:
                    # A failure is no reason to ask sooner.
                    models_due_s = began_s + health.models_every_s
                    with contextlib.suppress(NoAnswer, ValueError, msgspec.MsgspecError):
                        self._backends.lists(known.backend.name, await self.models_of(known))
                if self._backends.remove_drained():
                    self.follow()
            except Exception:
                self._on_fault()
                log.exception("health check of server %s", known.backend.name)
            await asyncio.sleep(max(0.0, health.every_s - (time.monotonic() - began_s)))

    async def _is_well(self, known: KnownServer) -> bool:
        health, name = self._backends.health, known.backend.name
        try:
            async with asyncio.timeout(health.timeout_s):
                url, access = known.backend.url + health.path, self._access.get(name, Access())
                async with self._session.get(
                    URL(url, encoded=True), headers=access.headers, allow_redirects=False, ssl=access.tls or True
                ) as answer:
                    if 200 <= answer.status < 300:
                        self._backends.checked(name)
                        return True
                    self._backends.failed(name, f"{health.path} answered {answer.status}", time.monotonic())
        except TimeoutError:
            self._backends.failed(name, f"{health.path}: no answer within {health.timeout_s:g} s", time.monotonic())
        except aiohttp.ClientConnectorError as error:
            # Only a refused connection means that the process, and its cache, is gone: an unknown name or a wrong
            # certificate does not.
            refused = isinstance(getattr(error, "os_error", None), ConnectionRefusedError)
            self._backends.failed(name, connection_reason(error), time.monotonic(), gone=refused)
        except (aiohttp.ClientError, OSError) as error:
            self._backends.failed(name, f"{health.path}: {connection_reason(error)}", time.monotonic())
        return False

    async def models_of(self, known: KnownServer) -> dict[str, Mapping[str, Any]]:
        """A server's /v1/models, by id.

        Raises:
            NoAnswer, ValueError, msgspec.MsgspecError: no answer, or no such list.
        """
        url, access = known.backend.url + "/v1/models", self._access.get(known.backend.name, Access())
        timeout_s = self._backends.health.timeout_s
        body = await fetch(self._session, url, access, timeout_s=timeout_s, max_bytes=MAX_MODELS_BYTES)
        return {entry["id"]: entry for entry in _models.decode(body).data if isinstance(entry.get("id"), str)}
