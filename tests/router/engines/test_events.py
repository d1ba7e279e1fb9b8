"""Events of an engine in another process: whatever is lost, doubled or swapped, what is believed is what it holds."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from skymemory import native
from skymemory.conductor.prefix_index.events import AllCleared, BlocksRemoved, BlocksStored, EventBatch
from skymemory.conductor.prefix_index.precise import PreciseIndex
from skymemory.conductor.request import seed as prefix_seed
from skymemory.errors import InvalidInput
from skymemory.router.engines.events import KvEvents
from skymemory.router.engines.feed import Feed, FeedState
from skymemory.router.engines.follower import EventSource, ReplayTimeouts
from skymemory.router.engines.wire import MAX_MESSAGE_BYTES

SLOT = 3
BLOCK_TOKENS = 4


class Held:
    """Keeps engines' own names of the blocks they hold: what an index must come to, however it does it.

    It is strict about what the index is promised: batches in order, and nothing unannounced.
    """

    def __init__(self) -> None:
        self.held: dict[int, set[bytes]] = {}
        self.next: dict[int, int] = {}
        self.begun = 0
        self.troubled = ""

    def follow(self, slot: int, model: str) -> None:
        assert model == "small"
        self.held[slot], self.next[slot] = set(), 0
        self.begun += 1

    def trouble(self, slot: int) -> str:
        return self.troubled

    def forget(self, slot: int) -> None:
        self.held.pop(slot, None)
        self.next.pop(slot, None)

    def resume_empty(self, slot: int, sequence: int) -> None:
        self.held[slot], self.next[slot] = set(), sequence

    def apply(self, slot: int, batch: EventBatch, replayed: bool = False, more: bool = False) -> None:
        if slot not in self.next:
            raise InvalidInput("no client follows it")
        assert batch.sequence == self.next[slot]
        self.next[slot] += not more
        held = self.held[slot]
        for event in batch.events:
            if isinstance(event, BlocksStored):
                if event.block_tokens != BLOCK_TOKENS:
                    self.troubled = f"blocks of {event.block_tokens} tokens"
                    raise InvalidInput(self.troubled)
                held |= {name for name in event.hashes if isinstance(name, bytes)}
            elif isinstance(event, BlocksRemoved):
                held -= {name for name in event.hashes if isinstance(name, bytes)}
            elif isinstance(event, AllCleared):
                held.clear()


class Publisher:
    """The process, and orders to it."""

    def __init__(self, **options: object) -> None:
        words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        root = Path(__file__).parents[3]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.router.engines.kv_publisher", *words],
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.port, self.replay_port = self.read()

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def replay_endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.replay_port}"

    def read(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def order(self, **what: object) -> set[bytes]:
        """The blocks it holds afterwards."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        answer = self.read()
        self.number = answer["number"]
        return {bytes.fromhex(name) for name in answer["held"]}

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)


@contextmanager
def a_publisher(**options: object) -> Iterator[Publisher]:
    publisher = Publisher(**options)
    try:
        yield publisher
    finally:
        publisher.kill()


async def until(true: Callable[[], bool], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not true():
            await asyncio.sleep(0.005)


async def heard(events: KvEvents, publisher: Publisher, replay: bool, topic: str = "") -> Feed:
    again = publisher.replay_endpoint if replay else ""
    feed = events.follow("a", SLOT, EventSource(publisher.endpoint, again, topic), model="small")
    await until(lambda: feed.connected)
    publisher.order(hear=1)
    return feed


def run(scene: Callable[[KvEvents, Held], Any], **options: Any) -> None:
    async def play() -> None:
        held = Held()
        events = KvEvents(held, ReplayTimeouts(**options))
        try:
            await scene(events, held)
        finally:
            await events.close()
            assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("KV events")]

    asyncio.run(play())


def test_what_is_published_is_believed() -> None:
    async def scene(events: KvEvents, held: Held) -> None:
        with a_publisher() as publisher:
            feed = await heard(events, publisher, replay=False)
            truth = publisher.order(publish=200)
            await until(lambda: feed.counts.batches == 200)
            assert held.held[SLOT] == truth and len(truth) == 60
            assert feed.state is FeedState.WHOLE and held.begun == 1
            publisher.order(clear=True)
            await until(lambda: not held.held[SLOT])

    run(scene)


def test_others_have_their_turns_while_a_long_message_is_taken_and_a_longer_one_is_not() -> None:
    class Slow(Held):
        def apply(self, slot: int, batch: EventBatch, replayed: bool = False, more: bool = False) -> None:
            time.sleep(0.0005)
            turns_at.append(turns)
            super().apply(slot, batch, replayed, more)

    turns, turns_at = 0, list[int]()

    async def play() -> None:
        nonlocal turns
        held, context = Slow(), zmq.Context()
        events, publisher = KvEvents(held, ReplayTimeouts()), context.socket(zmq.XPUB)
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        try:
            feed = events.follow("a", SLOT, EventSource(f"tcp://127.0.0.1:{port}"), model="small")
            await until(lambda: feed.connected and bool(publisher.poll(0)))
            names = [number.to_bytes(8, "big") for number in range(10_000)]
            stored = ["BlockStored", names, None, [1] * len(names) * BLOCK_TOKENS, BLOCK_TOKENS, None]
            publisher.send_multipart([b"", bytes(8), msgspec.msgpack.encode([1.0, [stored]])])
            async with asyncio.timeout(60):
                while not feed.counts.batches:
                    turns += 1
                    await asyncio.sleep(0)
            assert held.held[SLOT] == set(names)
            assert len(turns_at) > 100 and turns_at[-1] - turns_at[0] > len(turns_at) // 8, "a few blocks in each turn"
            publisher.send_multipart([b"", (1).to_bytes(8, "big"), bytes(MAX_MESSAGE_BYTES + 1)])
            await until(lambda: feed.counts.too_long == 1)
            assert not held.held[SLOT] and feed.connected
            publisher.send_multipart([b"", (2).to_bytes(8, "big"), msgspec.msgpack.encode([1.0, [stored]])])
            await until(lambda: feed.counts.batches == 2, 20)
            assert held.held[SLOT] == set(names) and feed.state is FeedState.PARTIAL
        finally:
            await events.close()
            context.destroy(linger=0)

    asyncio.run(play())


@pytest.mark.parametrize("seed", range(2))
def test_loss_doubling_and_disorder_are_mended_by_replay(seed: int) -> None:
    async def scene(events: KvEvents, held: Held) -> None:
        with a_publisher(seed=seed, lose=0.1, double=0.1, swap=0.1) as publisher:
            feed = await heard(events, publisher, replay=True)
            for _ in range(5):
                truth = publisher.order(publish=60)
                await until(lambda truth=truth: held.held.get(SLOT) == truth)  # type: ignore[misc]
            assert feed.counts.gaps and feed.counts.old and feed.counts.replayed
            assert (feed.counts.losses, feed.counts.restarts, held.begun) == (0, 0, 1)
            assert feed.state is FeedState.WHOLE and feed.counts.batches == 300

    # The last message of a burst may be lost: the probe finds it.
    run(scene, probe_s=0.1, patience_s=0.01)


@pytest.mark.parametrize("seed", range(2))
def test_without_replay_nothing_false_is_believed_after_a_loss(seed: int) -> None:
    async def scene(events: KvEvents, held: Held) -> None:
        with a_publisher(seed=seed, lose=0.02, swap=0.05) as publisher:
            feed = await heard(events, publisher, replay=False)
            for _ in range(6):
                truth = publisher.order(publish=50)
                await asyncio.sleep(0.05)
            publisher.order(drop=False)
            await until(lambda: not feed.order.gap)
            if feed.order.next == publisher.number:
                assert held.held[SLOT] <= truth
            assert feed.counts.losses == held.begun - 1 > 0 and feed.state is FeedState.PARTIAL

    run(scene, patience_s=0.01)


def test_swapped_messages_are_put_in_order_without_a_loss() -> None:
    async def scene(events: KvEvents, held: Held) -> None:
        with a_publisher(seed=5, swap=0.2, double=0.2) as publisher:
            feed = await heard(events, publisher, replay=False)
            publisher.order(publish=299)
            await until(lambda: feed.counts.batches >= 290)
            truth = publisher.order(clear=True)
            await asyncio.sleep(0.1)
            assert feed.counts.losses == 0 and feed.counts.old
            assert held.held[SLOT] == truth or feed.order.gap or publisher.number > feed.counts.batches

    run(scene, patience_s=30.0)


@pytest.mark.parametrize(("host", "blocks"), [(0, 60), (150, 163)])
def test_the_precise_index_matches_what_the_engine_holds(host: int, blocks: int) -> None:
    """With ``host`` copies in the host's memory it holds there what its GPU evicted."""

    async def play() -> None:
        index = PreciseIndex(BLOCK_TOKENS)
        events = KvEvents(index, ReplayTimeouts(probe_s=0.1, patience_s=0.01))
        try:
            with a_publisher(seed=9, lose=0.1, double=0.1, swap=0.1, host=host) as publisher:
                feed = await heard(events, publisher, replay=True)
                publisher.order(publish=199)
                truth = publisher.order(publish=1)
                await until(lambda: feed.counts.batches == 200)
                held = {name[8:] for name in truth}
                assert index.blocks_of(SLOT) == len(held) == blocks
                dice = random.Random(9)
                for _ in range(300):
                    prompt = bytes(dice.randrange(3) for _ in range(6))
                    expected = next((at for at in range(6) if prompt[: at + 1] not in held), 6)
                    tokens = np.repeat(np.frombuffer(prompt, np.uint8), BLOCK_TOKENS).astype("<u4").tobytes()
                    chain = native.chain_hashes(tokens, 4 * BLOCK_TOKENS, prefix_seed("small", "", ""))
                    assert index.match(chain, [SLOT]) == [expected]
        finally:
            await events.close()

    asyncio.run(play())


@pytest.mark.parametrize("replay", [True, False])
def test_an_engine_that_restarts_is_believed_to_hold_nothing_of_before(replay: bool) -> None:
    async def scene(events: KvEvents, held: Held) -> None:
        first = Publisher(seed=1)
        try:
            feed = await heard(events, first, replay)
            before = first.order(publish=50)
            await until(lambda: held.held.get(SLOT) == before)
            first.kill()
            await until(lambda: not feed.connected)
            assert feed.state is FeedState.LOST
            with a_publisher(seed=2, port=first.port, replay_port=first.replay_port) as second:
                # More than before: by its numbers alone what comes looks like the next of the first life.
                truth = second.order(publish=70)
                await until(lambda: feed.connected)
                if replay:
                    await until(lambda: held.held.get(SLOT) == truth)
                    assert feed.counts.restarts == 1 and feed.state is FeedState.WHOLE
                else:
                    await until(lambda: held.begun == 2)
                    # A slow publisher is heard while it is still at its first 70.
                    assert not held.held.get(SLOT) or feed.counts.batches > 50
                    assert not held.held.get(SLOT, set()) & before
                    second.order(hear=1)
                    second.order(publish=1)
                    await until(lambda: feed.state is FeedState.PARTIAL or feed.counts.batches > 50)
                assert not held.held.get(SLOT, set()) & before
        finally:
            first.kill()

    run(scene)


def test_an_engine_that_is_not_there_yet_is_waited_for() -> None:
    async def scene(events: KvEvents, held: Held) -> None:
        with a_publisher() as publisher:
            port, replay_port = publisher.port, publisher.replay_port
        ours, again = (f"tcp://127.0.0.1:{each}" for each in (port, replay_port))
        feed = events.follow("a", SLOT, EventSource(ours, again), model="small")
        await asyncio.sleep(0.3)
        assert feed.state is FeedState.WAITING
        with a_publisher(port=port, replay_port=replay_port) as publisher:
            truth = publisher.order(publish=20)
            await until(lambda: held.held.get(SLOT) == truth)

    run(scene)


def test_who_comes_late_asks_for_what_was_before() -> None:
    async def scene(events: KvEvents, held: Held) -> None:
        with a_publisher(buffer=100) as publisher:
            truth = publisher.order(publish=80)
            feed = await heard(events, publisher, replay=True)
            await until(lambda: held.held.get(SLOT) == truth)
            assert feed.state is FeedState.WHOLE
        with a_publisher(buffer=50) as publisher:
            publisher.order(publish=80)
            feed = await heard(events, publisher, replay=True)
            await until(lambda: feed.counts.batches == 50)
            assert feed.state is FeedState.PARTIAL

    run(scene)


def test_who_was_forgotten_by_others_is_heard_from_the_start_again() -> None:
    async def scene(events: KvEvents, held: Held) -> None:
        with a_publisher() as publisher:
            feed = await heard(events, publisher, replay=True)
            publisher.order(publish=30)
            await until(lambda: feed.counts.batches == 30)
            del held.held[SLOT], held.next[SLOT]  # as a strategy does when a server comes back
            truth = publisher.order(publish=1)
            await until(lambda: held.held.get(SLOT) == truth)
            assert not feed.errors and feed.state is FeedState.WHOLE

    run(scene)


def test_of_who_is_heard_no_more_nothing_is_believed() -> None:
    async def scene(events: KvEvents, held: Held) -> None:
        with a_publisher() as publisher:
            feed = await heard(events, publisher, replay=True)
            publisher.order(publish=30)
            await until(lambda: feed.counts.batches == 30)
            events.unfollow("a")
            publisher.order(publish=30)
            await asyncio.sleep(0.1)
            assert SLOT not in held.held and feed.counts.batches == 30 and not events.feeds

    run(scene)


def test_only_the_topic_that_was_asked_for_is_heard() -> None:
    async def scene(events: KvEvents, held: Held) -> None:
        with a_publisher(topic="kv@10.0.0.1:8000@other") as publisher:
            feed = await heard(events, publisher, replay=False, topic="kv@10.0.0.1:8000@small")
            publisher.order(publish=20)
            await asyncio.sleep(0.2)
            assert feed.counts.batches == 0 and feed.state is FeedState.WAITING

    run(scene)


@pytest.mark.brief()
@pytest.mark.parametrize("replay", [True, False])
def test_a_flood_never_holds_the_loop_and_what_it_drops_is_found(replay: bool) -> None:
    async def scene(events: KvEvents, held: Held) -> None:
        # Short queues at both ends: the publisher drops most of what it floods with.
        with a_publisher(hwm=50, lose=0.0) as publisher:
            feed = await heard(events, publisher, replay)
            loop = asyncio.get_running_loop()
            flood = loop.run_in_executor(None, lambda: publisher.order(publish=2500))
            lags = []
            while not flood.done():
                began = time.thread_time()  # this thread's own: a busy machine holds a loop, too
                await asyncio.sleep(0.001)
                lags.append(time.thread_time() - began)
            await flood
            truth = publisher.order(publish=1)
            if replay:
                async with asyncio.timeout(60):
                    while held.held.get(SLOT) != truth:
                        await asyncio.sleep(1.0)
                        if held.held.get(SLOT) != truth:  # the last one may have been dropped as well as any
                            truth = publisher.order(publish=1)
            else:
                async with asyncio.timeout(60):
                    while feed.order.next != publisher.number or feed.order.gap:
                        truth = publisher.order(publish=1)  # the one before may have been dropped, too
                        await asyncio.sleep(0.1)
                assert held.held[SLOT] <= truth
            assert feed.counts.batches > 100
            lags.sort()
            assert lags[len(lags) * 9 // 10] < 0.05, lags[-10:]

    run(scene, queue_messages=50, probe_s=0.2, patience_s=0.01)


def test_what_waits_is_taken_a_slice_at_a_time() -> None:
    async def scene(events: KvEvents, held: Held) -> None:
        with a_publisher() as publisher:
            feed = await heard(events, publisher, replay=False)
            truth = publisher.order(publish=2000)  # nothing is read meanwhile: this is the loop's own thread
            turns = 0
            while feed.counts.batches < 2000:
                await asyncio.sleep(0)
                turns += feed.counts.batches > 0
            assert turns >= 10 and held.held[SLOT] == truth

    run(scene)


def test_a_last_message_that_was_dropped_is_found_by_asking() -> None:
    async def scene(events: KvEvents, held: Held) -> None:
        with a_publisher() as publisher:
            feed = await heard(events, publisher, replay=True)
            publisher.order(publish=5)
            publisher.order(drop=True)
            truth = publisher.order(publish=5)
            await until(
                lambda: held.held[SLOT] == truth and feed.counts.replayed >= 5
            )  # the last one may change nothing
            assert feed.counts.gaps == feed.counts.losses == 0

    run(scene, probe_s=0.2)


def test_another_life_is_seen_by_its_numbers_alone() -> None:
    """A proxy between may hide that a connection was made again."""
    held = Held()
    feed = Feed("a", SLOT, "small", held)
    for number in range(3):
        feed.offer(number, msgspec.msgpack.encode([1.0, [["BlockRemoved", [number]]]]))
    feed.offer(1, msgspec.msgpack.encode([1.0, [["BlockRemoved", [1]]]]))
    assert (feed.counts.old, feed.counts.restarts, held.begun) == (1, 0, 1)
    feed.offer(0, msgspec.msgpack.encode([2.0, [["AllBlocksCleared"]]]))
    assert (feed.counts.restarts, held.begun, feed.counts.batches, feed.state) == (1, 2, 4, FeedState.LOST)


def test_blocks_of_another_size_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(events: KvEvents, held: Held) -> None:
        with a_publisher(block_tokens=8) as publisher:
            feed = await heard(events, publisher, replay=False)
            publisher.order(publish=20)
            await until(lambda: feed.counts.batches == 20)
            assert feed.counts.refused and feed.errors["blocks"] == "blocks of 8 tokens"

    run(scene)
    assert sum("blocks of 8 tokens" in record.getMessage() for record in caplog.records) == 1


def test_a_medium_of_unknown_name_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    index = PreciseIndex(1)
    feed = Feed("a", SLOT, "small", index)
    media = ["GPU", "tape", "tape", "cpu", "Punched cards", "tape"] + [f"other {number}" for number in range(100)]
    for number, medium in enumerate(media):
        feed.offer(number, msgspec.msgpack.encode([1.0, [["BlockStored", [1], None, [7], 1, None, medium]]]))
    said = [record.getMessage() for record in caplog.records]
    assert said[:2] == [
        f"events of a: unknown medium {name!r}, treated as the slowest" for name in ("tape", "Punched cards")
    ]
    assert len(said) == 8 and index.counters.get("events_of_unknown_media") == 104


def test_it_goes_as_well_in_the_loop_that_the_router_runs_in() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def play() -> None:
        held = Held()
        events = KvEvents(held, ReplayTimeouts(probe_s=0.1, patience_s=0.01))
        with a_publisher(seed=3, lose=0.1, double=0.1, swap=0.1) as publisher:
            await heard(events, publisher, replay=True)
            truth = publisher.order(publish=100)
            await until(lambda: held.held.get(SLOT) == truth)
        await events.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(play())


def test_an_endpoint_that_is_none_is_refused() -> None:
    async def scene(events: KvEvents, held: Held) -> None:
        with pytest.raises(InvalidInput, match="is no ZMQ endpoint"):
            events.follow("a", SLOT, EventSource("nonsense"), model="small")

    run(scene)
