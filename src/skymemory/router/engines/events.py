"""KV events of engines over ZMQ, for the prefix index of ``precise``.

``EventsWatch`` follows the servers; ``KvEvents`` has a subscription (``follower``) for each, whose messages are applied
in order (``feed``).

All runs in the router's event loop, an engine for ``follower.SLICE_S`` per turn. A flood fills the socket's bounded
queue; then the publisher drops messages.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import zmq.asyncio
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from skymemory.conductor.picker import Scorer
from skymemory.conductor.prefix_index.precise import PreciseIndex
from skymemory.conductor.strategies.registry import DEFAULT, STRATEGIES
from skymemory.errors import InvalidInput
from skymemory.router.backends import Backends, KnownServer
from skymemory.router.engines.feed import Feed, FeedState
from skymemory.router.engines.follower import EventSource, Follower, ReplayTimeouts
from skymemory.router.router_metrics import Family, family
from skymemory.router.settings import Settings
from skymemory.router.tasks import cancel

LOOK_S = 0.5
log = logging.getLogger("skymemory.router")
Followed = tuple[int, str, EventSource]
"""Slot, model, endpoint, replay endpoint, topic."""


def event_index(scorer: Scorer) -> PreciseIndex | None:
    index = getattr(scorer, "index", None)
    return index if isinstance(index, PreciseIndex) else None


def strategy_options(settings: Settings) -> Mapping[str, Any]:
    """Return the strategy's options, with the prompts' ``block_tokens`` if it has that option.

    Raises:
        InvalidInput: both are set and differ, so that no block would match.
    """
    for name in ("index", "cost"):
        if name in settings.options:  # these are arguments of ``named``, not options
            raise InvalidInput(f"options: no strategy has an option {name!r}")
    named = STRATEGIES.get(settings.strategy or DEFAULT)
    if named is None or all(field.name != "block_tokens" for field in dataclasses.fields(named.settings)):
        return settings.options
    prompt_block = settings.prompts.block_tokens
    block_tokens = settings.options.get("block_tokens", prompt_block)
    if block_tokens != prompt_block:
        raise InvalidInput(
            f"options: block_tokens is {block_tokens}, and prompts: block_tokens is {prompt_block}; "
            "both must be the engines' block size"
        )
    return {**settings.options, "block_tokens": prompt_block}


def check_events(settings: Settings, scorer: Scorer) -> None:
    """Refuse KV events without a tokenizer."""
    if event_index(scorer) is not None and settings.prompts.tokenizer is None:
        raise InvalidInput(
            f"strategy {scorer.name!r} uses KV events, which name the tokens of blocks: it needs the engines' "
            "tokenizer (--tokenizer PATH)"
        )


class EventsWatch(Collector):
    def __init__(self, scorer: Scorer, backends: Backends) -> None:
        self._index = event_index(scorer)
        self._strategy = scorer.name
        self._backends = backends
        self._followed: dict[str, Followed] = {}
        self._warned: set[tuple[str, str]] = set()
        self._events: KvEvents | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def feeds(self) -> Mapping[str, Feed]:
        return {} if self._events is None else self._events.feeds

    def start(self) -> None:
        if self._index is not None:
            self._events = KvEvents(self._index)
        self._task = asyncio.create_task(self._keep_following(), name="KV events")

    async def stop(self) -> None:
        await cancel([self._task])
        if self._events is not None:
            await self._events.close()

    async def _keep_following(self) -> None:
        while True:
            self.follow()
            await asyncio.sleep(LOOK_S)

    def follow(self) -> None:
        """Subscribe to current servers, and end other subscriptions."""
        events = self._events
        # The index only knows servers that prefill.
        known_now = {name: known for name, known in self._backends.known.items() if self._backends.prefills(known)}
        for name in [name for name in self._followed if name not in known_now or not known_now[name].backend.events]:
            del self._followed[name]
            if events is not None:
                events.unfollow(name)
        for name, known in known_now.items():
            if events is None:
                if known.backend.events:
                    self._warn(name, f"its KV events are ignored: strategy {self._strategy!r} does not use them")
                continue
            wanted = self._wanted(known)
            if wanted is None or self._followed.get(name) == wanted:
                continue
            self._followed[name] = wanted
            slot, model, source = wanted
            try:
                events.follow(name, slot, source, model=model)
            except InvalidInput as error:
                log.error("%s", error)

    def _wanted(self, known: KnownServer) -> Followed | None:
        """Return the wanted subscription; None: none, or the model is unknown."""
        backend, name = known.backend, known.backend.name
        if not backend.events:
            why = f"strategy {self._strategy!r} uses KV events, and `events`, their address, is missing"
            self._warn(name, f"{why}: no prompt will match there")
            return None
        models = backend.models or tuple(model for model, entry in known.models.items() if not entry.get("parent"))
        if not models:
            return None  # its models are not known yet
        if len(models) > 1:
            self._warn(name, f"it serves several models or names of one: only prompts for {models[0]!r} will match")
        return known.server.slot, models[0], EventSource(backend.events, backend.replay, backend.topic)

    def _warn(self, server: str, what: str) -> None:
        if (server, what) not in self._warned:
            self._warned.add((server, what))
            log.warning("server %s: %s", server, what)

    def collect(self) -> Iterator[Metric]:
        feeds, index = list(self.feeds.items()), self._index

        def of(kind: Family, name: str, text: str, value: Callable[[Feed], float]) -> Metric:
            rows = (((server,), value(feed)) for server, feed in feeds)
            return family(kind, f"skymemory_router_server_events_{name}", text, ("server",), rows)

        is_complete, blocks = "1: every message of its events was applied", "Blocks in its cache, by its events"
        yield of(GaugeMetricFamily, "whole", is_complete, lambda feed: feed.state is FeedState.WHOLE)
        yield of(GaugeMetricFamily, "blocks", blocks, lambda feed: 0 if index is None else index.blocks_of(feed.slot))
        batches, gaps = "Batches of events that were applied", "Gaps in the sequence of batches"
        yield of(CounterMetricFamily, "batches", batches, lambda feed: feed.counts.batches)
        yield of(CounterMetricFamily, "gaps", gaps, lambda feed: feed.counts.gaps)
        losses = "Gaps that were not filled: its blocks were forgotten"
        yield of(CounterMetricFamily, "losses", losses, lambda feed: feed.counts.losses)
        reasons = {"malformed": "malformed", "too-long": "too_long", "blocks": "refused"}
        rows = (((name, why), getattr(feed.counts, field)) for name, feed in feeds for why, field in reasons.items())
        text, labels = "Messages refused: malformed, too long, or with blocks of another size", ("server", "reason")
        yield family(CounterMetricFamily, "skymemory_router_server_events_refused", text, labels, rows)


class KvEvents:
    """Followers of engines. Bound to one event loop."""

    def __init__(self, index: PreciseIndex, pace: ReplayTimeouts | None = None) -> None:
        self.feeds: dict[str, Feed] = {}
        self._index = index
        self._pace = ReplayTimeouts() if pace is None else pace
        self._context = zmq.asyncio.Context()
        self._turn = asyncio.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def follow(self, server: str, slot: int, source: EventSource, *, model: str) -> Feed:
        """Subscribe. ``model``: as requests name it."""
        self.unfollow(server)
        feed = Feed(server, slot, model, self._index)
        follower = Follower(feed, source, self._pace, self._context, self._turn)
        self.feeds[server] = feed
        task = self._tasks[server] = asyncio.create_task(follower.run(), name=f"KV events of {server}")
        task.add_done_callback(lambda _: follower.close())
        return feed

    def unfollow(self, server: str) -> None:
        """Unsubscribe, and forget the blocks, before another server gets the slot."""
        task = self._tasks.pop(server, None)
        if task is not None:
            task.cancel()
            self._index.forget(self.feeds.pop(server).slot)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for server in list(self._tasks):
            self.unfollow(server)
        await cancel(tasks)
        await asyncio.sleep(0)  # followers close their sockets in callbacks of their tasks
        self._context.destroy(linger=0)
