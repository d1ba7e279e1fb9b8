"""Engines' KV events over ZMQ: one subscription per engine, gaps filled over its replay socket, restarts noticed.

Everything happens in the router's event loop, in slices of ``kv_follower.SLICE_S`` of which one engine has one per turn
of the loop: a flood waits in the socket's bounded queue, is dropped by the publisher when that is full, and is a gap
then.
"""

from __future__ import annotations

import asyncio

import zmq.asyncio

from skymemory.router.kv_feed import Feed, Index
from skymemory.router.kv_follower import Follower, Pace
from skymemory.router.tasks import ended


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
        await ended(tasks)
        await asyncio.sleep(0)  # followers close their sockets in callbacks of their tasks
        self._context.destroy(linger=0)
