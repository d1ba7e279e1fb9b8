"""Subscription to an engine: reads messages in slices, fills gaps from its replay socket, detects restarts.

Publishers drop messages while disconnected, and may pass the expected number after a restart. So after a lost
connection nothing is applied until the replay begins with the last message received; without a replay socket the blocks
are forgotten.

The replay socket is a ROUTER. A request is an empty frame and a number (8 bytes, big-endian). The answer has the
messages kept from there, then the number -1 with an empty payload. It may have gaps.
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

TIMEOUT_S = 2.0
"""Timeout of a replay: engines check the socket between batches, or every 0.1 s."""
BETWEEN_S = 0.5
"""Timeout of its next messages: engines send them at once, and may drop the end mark."""
QUEUE_MESSAGES = 20_000
"""Queue of a replay: more than engines keep."""
AT_ONCE = 64
END = b"\xff" * SEQUENCE_BYTES
SLICE_S = 0.001
REPLAYS = 64
"""Limit of replays for a gap, if each fills some of it."""
SILENCES = 3
_CHANGES = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_log = logging.getLogger("skymemory.router")


class NoReplay(Exception): ...


async def replay(
    context: zmq.asyncio.Context, endpoint: str, first: int, timeout_s: float = TIMEOUT_S
) -> AsyncGenerator[list[tuple[int, bytes]], None]:
    """Yield numbers and payloads from ``first`` on, up to ``AT_ONCE`` at a time.

    Raises:
        NoReplay: no message within ``timeout_s``, or a malformed answer.
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
                raise NoReplay(f"{endpoint} did not answer within {wait_s:g} s")
            wait_s = min(timeout_s, BETWEEN_S)
            messages, is_complete = _waiting(answers, endpoint)
            if messages:
                yield messages
            if is_complete:
                return
    finally:
        socket.close(linger=0)


def _waiting(socket: zmq.Socket[bytes], endpoint: str) -> tuple[list[tuple[int, bytes]], bool]:
    """Return the replayed messages that have arrived, and True after their end."""
    messages: list[tuple[int, bytes]] = []
    while len(messages) < AT_ONCE:
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            break
        if len(frames) < 2 or len(frames[-2]) != SEQUENCE_BYTES:
            raise NoReplay(f"{endpoint} sent a malformed message of {len(frames)} frames")
        if frames[-2] == END:
            return messages, True
        messages.append((int.from_bytes(frames[-2], "big"), frames[-1]))
    return messages, False


@dataclass(frozen=True, slots=True)
class ReplayTimeouts:
    patience_s: float = 0.05  # time for a missing message to arrive before a replay is requested
    probe_s: float = 10.0  # silence after which a replay is requested: the last message may have been dropped
    replay_timeout_s: float = TIMEOUT_S
    queue_messages: int = 256  # queue of the socket; further messages wait at the engine (vLLM keeps 100,000)


@dataclass(frozen=True, slots=True)
class EventSource:
    """Addresses of an engine's KV events (``tcp://host:5557``).

    Without ``replay_endpoint`` (vLLM's ``--kv-events-config``) each loss forgets all blocks.
    """

    endpoint: str
    replay_endpoint: str = ""
    topic: str = ""  # prefix; empty: all


class Follower:
    def __init__(
        self,
        feed: Feed,
        source: EventSource,
        pace: ReplayTimeouts,
        context: zmq.asyncio.Context,
        one_at_a_time: asyncio.Lock,
    ) -> None:
        self._feed = feed
        self._replay_endpoint = source.replay_endpoint
        self._pace = pace
        self._context = context
        self._one_at_a_time = one_at_a_time
        self._early: tuple[int, bytes] | None = None  # first message of a new connection, for `_resume_feed`
        self._resume = False  # a new connection must be resumed
        self._gap_since_s: float | None = None
        self._heard_s = time.monotonic()  # time of the last message
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
        # Messages are read without waiting, through blocking shadow sockets: a future per message would cost more than
        # applying it.
        self._messages: zmq.Socket[bytes] = zmq.Socket(shadow=self._socket.underlying)
        self._changes: zmq.Socket[bytes] = zmq.Socket(shadow=self._monitor.underlying)
        self._socket.subscribe(source.topic)
        try:
            self._socket.connect(source.endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise InvalidInput(
                f"events of {feed.server}: {source.endpoint!r} is no ZMQ endpoint ({error}); expected tcp://HOST:PORT"
            ) from error
        self._poller = zmq.asyncio.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    async def run(self) -> None:
        while True:
            try:
                await self._turn()
            except Exception:  # no message of an engine may end the subscription
                _log.exception("events of %s", self._feed.server)
                self._feed.unsure()
                self._resume = self._feed.connected
                await asyncio.sleep(1.0)

    async def _turn(self) -> None:
        if not (self._resume or self._feed.wiped or self._feed.busy):  # else there is work without a message
            wait_s = self._pace.patience_s if self._feed.order.gap else self._pace.probe_s
            await self._poller.poll(round(wait_s * 1000) + 1)
        self._check_connection()
        if self._feed.wiped:
            self._feed.from_the_start()
            self._resume = self._feed.connected
        if self._resume:
            await self._resume_feed()
        await self._read()
        await self._fill_gap()
        await self._probe()

    async def _read(self) -> None:
        more = True
        while more:
            async with self._one_at_a_time:
                more = self._slice()
                await asyncio.sleep(0)

    def _slice(self) -> bool:
        """Apply messages for ``SLICE_S``; return True if more may wait."""
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
            # The event of a new connection arrives before its first message.
            self._check_connection()
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

    def _check_connection(self) -> None:
        """Read from the monitor if the engine is connected; a new connection must be resumed."""
        while True:
            try:
                frames = self._changes.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._feed.connected = parse_monitor_message(frames)["event"] != zmq.EVENT_DISCONNECTED
            self._resume = self._feed.connected

    async def _resume_feed(self) -> None:
        """Find out by a replay if the engine restarted, and what was missed."""
        self._resume = False
        feed, early = self._feed, self._early
        self._early = None
        try:
            if not self._replay_endpoint:
                feed.unsure()
            elif not feed.has_applied or not await self._same_life():
                if feed.has_applied:
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
        """Apply the replay if it begins with the last message received."""
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
                if self._feed.order.crowded:  # a gap in the replay: the next replay begins there
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

    async def _fill_gap(self) -> None:
        """Wait for missing messages, then request a replay, then give them up."""
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
        # A replay may be incomplete (the engine's queue was full), so continue while each replay fills some of the gap.
        # A silent engine may be busy, and is asked again. An engine that answers without the messages has dropped them.
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
        """Request a replay after a long silence: the last message may be lost."""
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
