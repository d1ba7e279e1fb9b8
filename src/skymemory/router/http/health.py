"""Polling of servers: health, model lists, and load."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from skymemory.router.backends import Backends, KnownServer
from skymemory.router.engines.engine_metrics import MetricsWatch, NoAnswer
from skymemory.router.http.pages import Pages, get_status, reason_of
from skymemory.router.http.upstream import UpstreamError
from skymemory.router.tasks import cancel
from skymemory.router.tls import Access

log = logging.getLogger("skymemory.router")

MAX_MODELS_BYTES = 4 << 20
REVIEW_S = 0.1
"""Period of the search for silent servers."""


class _ModelList(msgspec.Struct):
    data: list[dict[str, Any]] = []


_models = msgspec.json.Decoder(_ModelList)


class HealthWatch:
    """A task per server, and another for its metrics, so that no server delays another."""

    def __init__(
        self,
        backends: Backends,
        access: Mapping[str, Access],
        on_fault: Callable[[], None],
    ) -> None:
        self._pages = Pages()
        self._backends = backends
        self._access = access
        self._on_fault = on_fault
        self._metrics = MetricsWatch(
            backends.server, self._pages.fetch, every_s=backends.health.metrics_every_s, read=backends.reported
        )
        self._tasks: dict[KnownServer, asyncio.Task[None]] = {}
        self._wanted_checks: dict[str, asyncio.Event] = {}
        self._review_timer: asyncio.TimerHandle | None = None

    def check_now(self, name: str) -> None:
        """Check at once, again if a check is under way."""
        if (wanted := self._wanted_checks.get(name)) is not None:
            wanted.set()

    def follow(self) -> None:
        """Start and stop tasks, so that each current server is checked."""
        if self._review_timer is None:
            self._schedule_review()
        wanted = set(self._backends.known.values())
        self._pages.keep_only([known.backend.url for known in wanted])
        for name in self._wanted_checks.keys() - self._backends.known.keys():
            del self._wanted_checks[name]
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
        if self._review_timer is not None:
            self._review_timer.cancel()
            self._review_timer = None
        await cancel(tasks)
        await self._metrics.close()
        self._pages.close()

    def _schedule_review(self) -> None:
        self._review_timer = asyncio.get_running_loop().call_later(REVIEW_S, self._review)

    def _review(self) -> None:
        self._schedule_review()
        try:
            self._backends.review(time.monotonic())
        except Exception:
            self._on_fault()
            log.exception("review of servers")

    async def _check_forever(self, known: KnownServer) -> None:
        """Check a server periodically or when wanted, and read its models."""
        models_due_s = 0.0
        wanted = self._wanted_checks.setdefault(known.backend.name, asyncio.Event())
        while True:
            health = self._backends.health
            started_s = time.monotonic()
            wanted.clear()
            try:
                if await self._check_and_report(known) and started_s >= models_due_s:
                    # A failed request is not repeated sooner.
                    models_due_s = started_s + health.models_every_s
                    with contextlib.suppress(NoAnswer, ValueError, msgspec.MsgspecError):
                        self._backends.lists(known.backend.name, await self.models_of(known))
                if self._backends.remove_drained():
                    self.follow()
            except Exception:
                self._on_fault()
                log.exception("health check of server %s", known.backend.name)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, health.every_s - (time.monotonic() - started_s))):
                    await wanted.wait()

    async def _check_and_report(self, known: KnownServer) -> bool:
        name, started_s = known.backend.name, time.monotonic()
        why, is_reached, is_refused = await self._check_health(known)
        self._backends.on_check(name, why, started_s, time.monotonic(), is_refused=is_refused, is_reached=is_reached)
        return not why

    async def _check_health(self, known: KnownServer) -> tuple[str, bool, bool]:
        """Return a failure's reason (or empty), ``is_reached`` and ``is_refused``."""
        health, access = self._backends.health, self._access.get(known.backend.name, Access())
        try:
            status = await get_status(known.backend.url + health.path, access, health.timeout_s)
        except TimeoutError:
            return f"{health.path}: no answer within {health.timeout_s:g} s", True, False
        except UpstreamError as error:
            # Only a refused connection means that the process and its cache are gone; an unknown name or a wrong
            # certificate does not.
            why = reason_of(error)
            return f"{health.path}: {why}" if error.connected else why, error.connected, error.refused
        except ValueError as error:
            return f"{health.path}: {error}", True, False
        is_well = 200 <= status < 300
        return "" if is_well else f"{health.path} answered {status}", True, False

    async def models_of(self, known: KnownServer) -> dict[str, Mapping[str, Any]]:
        """Return a server's /v1/models, by id.

        Raises:
            NoAnswer, ValueError, msgspec.MsgspecError: no answer, or no such list.
        """
        url, access = known.backend.url + "/v1/models", self._access.get(known.backend.name, Access())
        timeout_s = self._backends.health.timeout_s
        body = await self._pages.fetch(url, access, timeout_s=timeout_s, max_bytes=MAX_MODELS_BYTES)
        return {entry["id"]: entry for entry in _models.decode(body).data if isinstance(entry.get("id"), str)}
