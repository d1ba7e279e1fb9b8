"""``skymemory route --check``: tests every server's health, metrics, models and KV events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import aiohttp

from skymemory.conductor.prefix_index.precise import PreciseIndex
from skymemory.errors import InvalidInput
from skymemory.keys import KeyRing
from skymemory.router.engines.engine_metrics import NoAnswer, UnreadableMetrics, fetch, fetch_metrics
from skymemory.router.engines.events import KvEvents, event_index
from skymemory.router.engines.feed import Feed
from skymemory.router.engines.follower import EventSource, ReplayTimeouts
from skymemory.router.http.health import MAX_MODELS_BYTES
from skymemory.router.http.proxy_server import ProxyServer
from skymemory.router.settings import PREFILL, Backend, Settings
from skymemory.router.tls import Access, Authorities

EVENTS_S = 3.0


@dataclass(slots=True)
class ServerCheck:
    name: str
    url: str
    health: str = ""  # result of each check, in words
    metrics: str = ""
    models: list[str] = field(default_factory=list)
    events: str = ""
    problems: list[str] = field(default_factory=list)  # reasons why it gets no requests, or its cache stays unknown
    notes: list[str] = field(default_factory=list)  # minor findings

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


async def check(settings: Settings, keys: KeyRing | None = None) -> list[ServerCheck]:
    """Check all backends concurrently."""
    server = ProxyServer(settings, keys)
    server.check_files()
    by_events = event_index(server.prefix_state.scorer) is not None
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
        return list(
            await asyncio.gather(*(_check(session, settings, backend, by_events) for backend in settings.backends))
        )


@dataclass(frozen=True, slots=True)
class _Target:
    """Server under test."""

    session: aiohttp.ClientSession
    url: str
    access: Access
    timeout_s: float

    async def get(self, path: str) -> bytes:
        return await fetch(
            self.session, self.url + path, self.access, timeout_s=self.timeout_s, max_bytes=MAX_MODELS_BYTES
        )


async def _check(session: aiohttp.ClientSession, settings: Settings, backend: Backend, by_events: bool) -> ServerCheck:
    result = ServerCheck(backend.name, backend.url)
    try:
        access = Authorities().access(backend.url, backend.ca, backend.api_key_file)
        target = _Target(session, backend.url, access, settings.health.timeout_s)
        await target.get(settings.health.path)
        result.health = "answers"
    except InvalidInput as error:
        result.health = "is not asked"
        result.problems.append(str(error))
        return result
    except NoAnswer as error:
        result.health = "does not answer"
        result.problems.append(f"{settings.health.path}: {error}")
        return result
    await _check_metrics(target, settings, by_events, result)
    await _check_models(target, backend, result)
    if by_events and (backend.role == PREFILL or not settings.splits):
        await _check_events(target, settings, backend, result)
    elif backend.events:
        result.notes.append("its KV events are ignored: the strategy does not use them")
    return result


async def _check_metrics(target: _Target, settings: Settings, by_events: bool, result: ServerCheck) -> None:
    if not settings.health.metrics_path:
        return
    try:
        metrics = await fetch_metrics(
            partial(fetch, target.session), target.url + settings.health.metrics_path, access=target.access
        )
    except UnreadableMetrics as error:
        result.metrics = "cannot be read"
        result.notes.append(f"metrics: {error}")
        return
    report, cut = metrics.report, settings.prompts.block_tokens
    size = "" if report.cache_blocks is None else f": {report.cache_blocks} blocks of {report.block_tokens} tokens"
    result.metrics = f"{metrics.dialect}{size}"
    if metrics.missing:
        result.notes.append(f"metrics without {', '.join(metrics.missing)}")
    if settings.prompts.tokenizer is not None and report.block_tokens not in (None, cut):
        differs = f"its blocks have {report.block_tokens} tokens, and `block_tokens` is {cut}"
        (result.problems if by_events else result.notes).append(differs)


async def _check_models(target: _Target, backend: Backend, result: ServerCheck) -> None:
    try:
        listed = json.loads(await target.get("/v1/models"))["data"]
        result.models = [str(model["id"]) for model in listed]
    except (NoAnswer, ValueError, KeyError, TypeError) as error:
        result.notes.append(f"/v1/models: {error}")
        return
    for name in (*backend.models, *backend.adapters):
        if name not in result.models:
            result.problems.append(f"it does not list {name!r}, which the settings name for it")


async def _check_events(target: _Target, settings: Settings, backend: Backend, result: ServerCheck) -> None:
    if not backend.events:
        result.events = "not followed"
        sources = await _event_sources(target)
        result.problems.append(f"the strategy uses KV events, and `events`, their address, is missing{sources}")
        return
    models = backend.models or tuple(result.models)
    if not models:
        result.problems.append("its KV events cannot be used: it lists no model")
        return
    index = PreciseIndex(settings.prompts.block_tokens)
    events = KvEvents(index, ReplayTimeouts(replay_timeout_s=EVENTS_S / 2))
    try:
        source = EventSource(backend.events, backend.replay, backend.topic)
        feed = events.follow(backend.name, 0, source, model=models[0])
        await _settled(feed)
        if not feed.connected:
            result.events = "no publisher"
            result.problems.append(f"no publisher at {backend.events}")
            return
        result.events = f"{feed.state.value}: {index.blocks_of(0)} blocks, {feed.counts.batches} batches"
        result.problems += [f"events: {error}" for error in feed.errors.values()]
        if not backend.replay:
            result.notes.append("without `replay`, each lost message forgets all its blocks")
    except InvalidInput as error:
        result.problems.append(str(error))
    finally:
        await events.close()


async def _settled(feed: Feed) -> None:
    """Wait until no more batches arrive."""
    loop = asyncio.get_running_loop()
    end_s, before = loop.time() + EVENTS_S, -1
    while loop.time() < end_s:
        await asyncio.sleep(0.3)
        if feed.errors or (feed.connected and feed.counts.batches == before > 0):
            return
        before = feed.counts.batches


async def _event_sources(target: _Target) -> str:
    """Return a hint at which addresses vLLM (0.32 and later) publishes."""
    try:
        sources = json.loads(await target.get("/kv_event_sources"))
        endpoints: Sequence[str] = [str(source["endpoint"]) for source in sources]
    except (NoAnswer, ValueError, KeyError, TypeError):
        return ""
    return f"; it publishes at {', '.join(endpoints)}" if endpoints else ""
