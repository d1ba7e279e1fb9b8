"""One engine's subscription: messages taken in slices, gaps filled over its replay socket, restarts noticed.

What the connection does matters as much as what it brings. A publisher drops what was sent while nobody was connected,
and one that restarted counts from 0 again, maybe past the number that we await. So after a connection was lost nothing
is believed until the engine's replay socket has shown the last message that was had; without such a socket what was
believed is forgotten.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from skymemory.errors import InvalidInput
from skymemory.router.engines.feed import Feed
from skymemory.router.engines.wire import MAX_RECEIVED_BYTES, SEQUENCE_BYTES, MalformedEvents, sequence_of

# Messages that an engine still has, asked for again over its replay socket.
#
# A ROUTER at the engine's end: asked with an empty frame and a number (8 bytes, big-endian), it sends every message it
# keeps from that number on, then the number -1 with nothing behind it. It drops what its own queue cannot take, so an
# answer may have holes: whoever reads it minds the numbers.


TIMEOUT_S = 2.0
"""For the next messages: the engine looks at the socket between two batches, and every 0.1 s when it has none."""
BETWEEN_S = 0.5
"""Once it answers, it sends all at once. Its last word may be among what it dropped."""
QUEUE_MESSAGES = 20_000
"""More than engines keep: what they send at once should not be dropped for our slowness."""
AT_ONCE = 64
END = b"\xff" * SEQUENCE_BYTES


class NoReplay(Exception):
    """The answer did not come, or stopped short of its end."""


async def replay(
    context: zmq.asyncio.Context, endpoint: str, first: int, timeout_s: float = TIMEOUT_S
) -> AsyncGenerator[list[tuple[int, bytes]], None]:
    """Numbers and payloads of what the engine at ``endpoint`` keeps from ``first`` on, up to ``AT_ONCE`` together.

    Raises:
        NoReplay: nothing within ``timeout_s`` of what came last, or an answer that is none.
    """
    socket = context.socket(zmq.DEALER)
    answers: zmq.Socket[bytes] = zmq.Socket(shadow=socket.underlying)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_RECEIVED_BYTES)
        socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
        try:
            socket.connect(endpoint)
            answers.send_multipart([b"", first.to_bytes(SEQUENCE_BYTES, "big")], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise NoReplay(f"{endpoint}: {error}") from error
        wait_s = timeout_s
        while True:
            if not await socket.poll(round(wait_s * 1000)):
                raise NoReplay(f"{endpoint} did not answer in {wait_s:g} s")
            wait_s = min(timeout_s, BETWEEN_S)
            messages, ended = _waiting(answers, endpoint)
            if messages:
                yield messages
            if ended:
                return
    finally:
        socket.close(linger=0)


def _waiting(socket: zmq.Socket[bytes], endpoint: str) -> tuple[list[tuple[int, bytes]], bool]:
    """What is here, and whether that was the end."""
    messages: list[tuple[int, bytes]] = []
    while len(messages) < AT_ONCE:
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            break
        if len(frames) < 2 or len(frames[-2]) != SEQUENCE_BYTES:
            raise NoReplay(f"{endpoint} answered with {len(frames)} frames that are no message")
        if frames[-2] == END:
            return messages, True
        messages.append((int.from_bytes(frames[-2], "big"), frames[-1]))
    return messages, False


SLICE_S = 0.001
REPLAYS = 64
"""Replays in a row for one gap, as long as each brings it further."""
SILENCES = 3
"""Replays in vain before an engine that is too busy to answer is given up."""
_CHANGES = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_log = logging.getLogger("skymemory.router")


@dataclass(frozen=True, slots=True)
class Pace:
    """How long is waited, and how much may wait."""

    patience_s: float = 0.05
    """For what is missing to come late, before it is asked for."""
    probe_s: float = 10.0
    """An engine that was silent for so long is asked whether that is so: the last message may have been dropped."""
    replay_timeout_s: float = TIMEOUT_S
    queue_messages: int = 256
    """That may wait in the socket, however long each is. More wait at the engine (vLLM keeps 100,000)."""


class Follower:
    """One engine's subscription."""

    def __init__(
        self,
        feed: Feed,
        endpoint: str,
        replay_endpoint: str,
        topic: str,
        pace: Pace,
        context: zmq.asyncio.Context,
        one_at_a_time: asyncio.Lock,
    ) -> None:
        self._feed = feed
        self._replay_endpoint = replay_endpoint
        self._pace = pace
        self._context = context
        self._one_at_a_time = one_at_a_time
        self._early: tuple[int, bytes] | None = None
        """Came on a connection of which it is not known yet what goes before."""
        self._resume = False
        """Connected, and not yet sure how what comes goes together with what was had."""
        self._gap_since_s: float | None = None
        self._heard_s = time.monotonic()
        self._socket = context.socket(zmq.SUB)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RCVHWM, pace.queue_messages),
            (zmq.MAXMSGSIZE, MAX_RECEIVED_BYTES),
            (zmq.RECONNECT_IVL, 100),
            (zmq.RECONNECT_IVL_MAX, 2000),
            (zmq.HEARTBEAT_IVL, 5000),
            (zmq.HEARTBEAT_TIMEOUT, 15000),
        ):
            self._socket.setsockopt(option, value)
        self._monitor = self._socket.get_monitor_socket(_CHANGES)
        # Messages are taken without waiting from the same sockets' blocking selves: a future for each would cost more
        # than what is in it.
        self._messages: zmq.Socket[bytes] = zmq.Socket(shadow=self._socket.underlying)
        self._changes: zmq.Socket[bytes] = zmq.Socket(shadow=self._monitor.underlying)
        self._socket.subscribe(topic)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise InvalidInput(f"events of {feed.server}: {endpoint!r} is no endpoint: {error}") from error
        self._poller = zmq.asyncio.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    async def run(self) -> None:
        while True:
            try:
                await self._turn()
            except Exception:  # nothing that an engine sends may end the listening to it
                _log.exception("events of %s", self._feed.server)
                self._feed.unsure()
                self._resume = self._feed.connected
                await asyncio.sleep(1.0)

    async def _turn(self) -> None:
        if not (self._resume or self._feed.wiped or self._feed.busy):
            wait_s = self._pace.patience_s if self._feed.order.gap else self._pace.probe_s
            await self._poller.poll(round(wait_s * 1000) + 1)
        self._mind_connection()
        if self._feed.wiped:
            self._feed.from_the_start()
            self._resume = self._feed.connected
        if self._resume:
            await self._go_on()
        await self._take()
        await self._mind_gap()
        await self._probe()

    async def _take(self) -> None:
        """What the socket has."""
        more = True
        while more:
            async with self._one_at_a_time:
                more = self._slice()
                await asyncio.sleep(0)

    def _slice(self) -> bool:
        """Some of it. Whether to go on."""
        end_s = time.perf_counter() + SLICE_S
        while time.perf_counter() < end_s:
            if self._feed.busy:
                self._feed.go_on(end_s)
                if self._feed.wiped:
                    return False
                continue
            if self._feed.order.crowded:
                return False
            try:
                frames = self._messages.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._heard_s = time.monotonic()
            # The news of a new connection is there before its first message is.
            self._mind_connection()
            try:
                _, number, payload = sequence_of(frames)
            except MalformedEvents as error:
                self._feed.broken(str(error))
                continue
            if self._resume:
                self._early = (number, payload)
                return False
            self._feed.offer(number, payload, end_s)
            if self._feed.wiped:
                return False
        return True

    def _mind_connection(self) -> None:
        while True:
            try:
                frames = self._changes.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._feed.connected = parse_monitor_message(frames)["event"] != zmq.EVENT_DISCONNECTED
            self._resume = self._feed.connected

    async def _go_on(self) -> None:
        """Just connected: find out whether this is the engine that was heard before, and what was missed."""
        self._resume = False
        feed, early = self._feed, self._early
        self._early = None
        try:
            if not self._replay_endpoint:
                feed.unsure()
            elif not feed.heard or not await self._same_life():
                if feed.heard:
                    feed.restarted()
                await self._replayed(0)
                feed.nothing_published()
        except NoReplay as error:
            feed.complain("replay", f"no replay: {error}")
            feed.unsure()
        if early is not None:
            feed.offer(*early, 0.0)
        self._heard_s = time.monotonic()

    async def _same_life(self) -> bool:
        """Whether the engine's replay begins with the last message that was had; if so, what follows is taken in."""
        last, same = (self._feed.order.next or 0) - 1, False
        async with aclosing(self._replay(last)) as answer:
            async for messages in answer:
                if not same:
                    number, payload = messages.pop(0)
                    if number != last or not self._feed.order.had(number, payload):
                        return False
                    same = True
                await self._offer_all(messages)
        self._feed.fine("replay")
        return same

    async def _replayed(self, first: int) -> None:
        async with aclosing(self._replay(first)) as answer:
            async for messages in answer:
                await self._offer_all(messages)
                if self._feed.order.crowded:  # behind a hole: asked for again from there
                    return
        self._feed.fine("replay")

    def _replay(self, first: int) -> AsyncGenerator[list[tuple[int, bytes]], None]:
        return replay(self._context, self._replay_endpoint, first, self._pace.replay_timeout_s)

    async def _offer_all(self, messages: list[tuple[int, bytes]]) -> None:
        self._feed.counts.replayed += len(messages)
        at = 0
        while at < len(messages) or self._feed.busy:
            async with self._one_at_a_time:
                end_s = time.perf_counter() + SLICE_S
                while (at < len(messages) or self._feed.busy) and time.perf_counter() < end_s:
                    if self._feed.busy:
                        self._feed.go_on(end_s)
                    else:
                        self._feed.offer(*messages[at], end_s)
                        at += 1
                await asyncio.sleep(0)

    async def _mind_gap(self) -> None:
        feed, order = self._feed, self._feed.order
        if not order.gap:
            self._gap_since_s = None
            return
        now_s = time.monotonic()
        if self._gap_since_s is None:
            self._gap_since_s = now_s
            feed.counts.gaps += 1
        if now_s - self._gap_since_s < self._pace.patience_s and not order.crowded:
            return
        self._gap_since_s = None
        silences = 0
        for _ in range(REPLAYS if self._replay_endpoint else 0):
            before = order.next
            try:
                await self._replayed(before or 0)
            except NoReplay as error:
                feed.complain("replay", f"no replay: {error}")
                silences += 1
            if not order.gap:
                return
            if order.next == before and not 0 < silences < SILENCES:
                break
        feed.lost()

    async def _probe(self) -> None:
        """Of an engine that was silent for long: was the last that it said dropped?"""
        feed = self._feed
        now_s = time.monotonic()
        if not self._replay_endpoint or not feed.connected or now_s - self._heard_s < self._pace.probe_s:
            return
        self._heard_s = now_s
        try:
            await self._replayed(feed.order.next or 0)
        except NoReplay as error:
            feed.complain("replay", f"no replay: {error}")

    def close(self) -> None:
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
