"""KV events of the servers behind a proxy, for strategies whose index they feed."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import zmq.asyncio
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from skymemory.conductor.fleet import Server
from skymemory.conductor.prefix_index.precise import PreciseIndex
from skymemory.conductor.strategies.base import Scorer
from skymemory.conductor.strategies.named import DEFAULT, STRATEGIES
from skymemory.errors import InvalidInput
from skymemory.router.engines.feed import Feed, FeedState, Index
from skymemory.router.engines.follower import Follower, Pace
from skymemory.router.settings import Backend, Settings
from skymemory.router.tasks import cancel

LOOK_S = 0.5
"""Between two looks at which servers there are, and which models they serve."""
log = logging.getLogger("skymemory.router")
Followed = tuple[int, str, str, str, str]
"""Slot, model, endpoint, replay endpoint, topic."""


class Publisher(Protocol):
    """A server that may say where its events are."""

    @property
    def backend(self) -> Backend: ...
    @property
    def server(self) -> Server: ...
    @property
    def models(self) -> Mapping[str, Mapping[str, Any]]:
        """What it lists at /v1/models, by id."""
        ...


class Publishers(Protocol):
    @property
    def known(self) -> Mapping[str, Publisher]: ...


def event_index(scorer: Scorer) -> PreciseIndex | None:
    """The index of a strategy that events feed."""
    index = getattr(scorer, "index", None)
    return index if isinstance(index, PreciseIndex) else None


def strategy_options(settings: Settings) -> Mapping[str, Any]:
    """The strategy's options, with the size that prompts are cut by where it wants to know that of the engines' blocks.

    Raises:
        InvalidInput: the two are said and differ. Nothing would ever match.
    """
    for name in ("index", "cost"):
        if name in settings.options:  # arguments of `named` that are no options
            raise InvalidInput(f"options: no strategy has an option {name!r}")
    named = STRATEGIES.get(settings.strategy or DEFAULT)
    if named is None or all(field.name != "block_tokens" for field in dataclasses.fields(named.settings)):
        return settings.options
    cut = settings.prompts.block_tokens
    said = settings.options.get("block_tokens", cut)
    if said != cut:
        raise InvalidInput(
            f"options: block_tokens is {said}, and prompts are cut into blocks of {cut} (prompts: block_tokens); "
            "both must be the engines' block size"
        )
    return {**settings.options, "block_tokens": cut}


def check_events(settings: Settings, scorer: Scorer) -> None:
    """
    Raises:
        InvalidInput: the strategy goes by events, and prompts are not read in the engines' tokens.
    """
    if event_index(scorer) is not None and settings.prompts.tokenizer is None:
        raise InvalidInput(
            f"strategy {scorer.name!r} goes by events, in which engines tell their blocks' tokens: prompts have to be "
            "read with the engines' tokenizer (--tokenizer PATH)"
        )


class EventsWatch:
    """Follows the events of every backend that says where they are, and lets go of who left."""

    def __init__(self, scorer: Scorer, backends: Publishers) -> None:
        self._index = event_index(scorer)
        self._strategy = scorer.name
        self._backends = backends
        self._followed: dict[str, Followed] = {}
        self._told: set[tuple[str, str]] = set()
        self._events: KvEvents | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def feeds(self) -> Mapping[str, Feed]:
        return {} if self._events is None else self._events.feeds

    def start(self) -> None:
        if self._index is not None:
            self._events = KvEvents(self._index)
        self._task = asyncio.create_task(self._look_on(), name="KV events")

    async def stop(self) -> None:
        await cancel([self._task])
        if self._events is not None:
            await self._events.close()

    async def _look_on(self) -> None:
        while True:
            self.follow()
            await asyncio.sleep(LOOK_S)

    def follow(self) -> None:
        """Hear those that are there now, and nobody else."""
        events = self._events
        known_now = self._backends.known
        for name in [each for each in self._followed if each not in known_now or not known_now[each].backend.events]:
            del self._followed[name]
            if events is not None:
                events.unfollow(name)
        for name, known in self._backends.known.items():
            if events is None:
                if known.backend.events:
                    self._tell(name, f"its events are not read: strategy {self._strategy!r} does not go by them")
                continue
            wanted = self._wanted(known)
            if wanted is None or self._followed.get(name) == wanted:
                continue
            self._followed[name] = wanted
            slot, model, endpoint, replay, topic = wanted
            try:
                events.follow(name, slot, endpoint, model=model, replay_endpoint=replay, topic=topic)
            except InvalidInput as error:
                log.error("%s", error)

    def _wanted(self, known: Publisher) -> Followed | None:
        backend, name = known.backend, known.backend.name
        if not backend.events:
            why = f"strategy {self._strategy!r} goes by events, and where it publishes them (`events`) is not said"
            self._tell(name, f"{why}: no prompt will be known to be cached there")
            return None
        models = backend.models or tuple(each for each, entry in known.models.items() if not entry.get("parent"))
        if not models:
            return None  # until it has told which it serves
        if len(models) > 1:
            self._tell(name, f"it serves one model by several names: prompts are matched for {models[0]!r} only")
        return known.server.slot, models[0], backend.events, backend.replay, backend.topic

    def _tell(self, server: str, what: str) -> None:
        if (server, what) not in self._told:
            self._told.add((server, what))
            log.warning("server %s: %s", server, what)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """For Prometheus."""
        labels, prefix = ["server"], "skymemory_router_server_events_"
        whole = GaugeMetricFamily(f"{prefix}whole", "1: every message of its events was heard", labels=labels)
        blocks = GaugeMetricFamily(f"{prefix}blocks", "Blocks that it holds, by its events", labels=labels)
        batches = CounterMetricFamily(f"{prefix}batches", "Batches of events that were applied", labels=labels)
        gaps = CounterMetricFamily(f"{prefix}gaps", "Times that batches were missing", labels=labels)
        losses = CounterMetricFamily(f"{prefix}losses", "Times that all was forgotten for a loss", labels=labels)
        text = "Messages that were not taken: cannot be read, are too long, or have blocks of another size"
        refused = CounterMetricFamily(f"{prefix}refused", text, labels=[*labels, "reason"])
        for name, feed in self.feeds.items():
            whole.add_metric([name], feed.state is FeedState.WHOLE)
            blocks.add_metric([name], self._index.blocks_of(feed.slot) if self._index is not None else 0)
            batches.add_metric([name], feed.counts.batches)
            gaps.add_metric([name], feed.counts.gaps)
            losses.add_metric([name], feed.counts.losses)
            counts = feed.counts
            for reason, count in (
                ("malformed", counts.malformed),
                ("too-long", counts.too_long),
                ("blocks", counts.refused),
            ):
                refused.add_metric([name, reason], count)
        yield from (whole, blocks, batches, gaps, losses, refused)


# Engines' KV events over ZMQ: one subscription per engine, gaps filled over its replay socket, restarts noticed.
#
# Everything happens in the router's event loop, in slices of ``kv_follower.SLICE_S`` of which one engine has one per
# turn
# of the loop: a flood waits in the socket's bounded queue, is dropped by the publisher when that is full, and is a gap
# then.


class KvEvents:
    """Follows engines from ``follow`` until ``unfollow`` or ``close``. Lives in one event loop."""

    def __init__(self, index: Index, pace: Pace | None = None) -> None:
        self.feeds: dict[str, Feed] = {}
        self._index = index
        self._pace = Pace() if pace is None else pace
        self._context = zmq.asyncio.Context()
        self._turn = asyncio.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def follow(
        self, server: str, slot: int, endpoint: str, *, model: str, replay_endpoint: str = "", topic: str = ""
    ) -> Feed:
        """Hear ``endpoint`` (``tcp://host:5557``) for the server of ``slot``.

        Args:
            model: that it serves, by the name that requests give.
            replay_endpoint: where the engine hands out messages again (vLLM: ``replay_endpoint`` of its
                ``--kv-events-config``); without one, whatever is lost costs all that is known of the server.
            topic: what the messages' topics begin with; empty: all of them.

        Raises:
            InvalidInput: an endpoint that is none.
        """
        self.unfollow(server)
        feed = Feed(server, slot, model, self._index)
        follower = Follower(feed, endpoint, replay_endpoint, topic, self._pace, self._context, self._turn)
        self.feeds[server] = feed
        task = self._tasks[server] = asyncio.create_task(follower.run(), name=f"KV events of {server}")
        task.add_done_callback(lambda _: follower.close())
        return feed

    def unfollow(self, server: str) -> None:
        """Hear it no more, and believe nothing of it. Who leaves goes before who comes: slots are given again."""
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
