"""KV events: they add up to what the cache holds, on the wire as vLLM has it."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

zmq = pytest.importorskip("zmq")

from tests.lab.door import PATIENCE_S, Door, open_door  # noqa: E402
from tests.lab.engine.test_http import some_ids  # noqa: E402
from tests.lab.engine.test_limits import BLOCK, BLOCK_BYTES  # noqa: E402

from skymemory.errors import InvalidInput  # noqa: E402
from skymemory_lab.engine.events import (  # noqa: E402
    AllBlocksCleared,
    KVPublisher,
)
from skymemory_lab.engine.run import EngineSettings  # noqa: E402

pytestmark = pytest.mark.engine
ANYWHERE = "tcp://127.0.0.1:*"


@dataclass
class Listener:
    """A subscriber that knows nothing of our classes: msgpack as it comes."""

    socket: Any
    numbers: list[int]
    topics: set[bytes]
    held: dict[int, tuple[int | None, tuple[int, ...]]]
    """Hash → parent's hash and tokens."""
    salted: list[Any]

    def listen(self) -> None:
        """Take what is there, until nothing comes for a while."""
        while self.socket.poll(300):
            topic, number, payload = self.socket.recv_multipart()
            self.topics.add(topic)
            self.numbers.append(int.from_bytes(number, "big"))
            batch = msgspec.msgpack.decode(payload)
            assert abs(batch["ts"] - time.time()) < 60 and batch["data_parallel_rank"] == 0
            for event in batch["events"]:
                self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.held.clear()
        elif event["type"] == "BlockRemoved":
            for block in event["block_hashes"]:
                del self.held[block]
        else:
            assert event["medium"] == "GPU", "as vLLM says on processors, too: what lies there costs no loading"
            size, parent = event["block_size"], event["parent_block_hash"]
            assert parent is None or parent in self.held
            assert len(event["token_ids"]) == size * len(event["block_hashes"])
            for at, block in enumerate(event["block_hashes"]):
                self.held[block] = (parent, tuple(event["token_ids"][at * size : (at + 1) * size]))
                parent = block
            if event.get("extra_keys"):
                self.salted.append(event["extra_keys"])


@pytest.fixture
def listening() -> Iterator[tuple[Door, Listener]]:
    settings = EngineSettings(cache_bytes=10 * (BLOCK_BYTES + 128), kv_events=ANYWHERE, kv_replay=ANYWHERE)
    with open_door(settings) as door, zmq.Context() as context:
        assert door.engine.publisher is not None
        (listening,) = door.ask("/kv_event_sources").body
        assert (listening["endpoint"], listening["data_parallel_rank"]) == (door.engine.publisher.at, 0)
        assert listening["replay_endpoint"] == door.engine.publisher.replay_at and listening["topic"].startswith("kv@")
        socket = context.socket(zmq.SUB)
        socket.setsockopt(zmq.LINGER, 0)
        socket.subscribe(b"kv@")
        socket.connect(door.engine.publisher.at)
        time.sleep(0.2)  # until the subscription is there
        yield door, Listener(socket, [], set(), {}, [])
        socket.close()


def test_events_add_up_to_what_the_cache_holds(listening: tuple[Door, Listener]) -> None:
    door, listener = listening
    first, second = some_ids(6 * BLOCK + 1, seed=1), some_ids(7 * BLOCK + 1, seed=2)
    door.cached(first)
    listener.listen()
    chain = list(listener.held.values())
    assert [tokens for _, tokens in chain] == [tuple(first[at : at + BLOCK]) for at in range(0, 6 * BLOCK, BLOCK)]
    assert [parent for parent, _ in chain] == [None, *list(listener.held)[:-1]]
    door.cached(second)
    door.cached([*first[: 2 * BLOCK], *second])
    listener.listen()
    assert len(listener.held) == door.engine.caches.held_blocks == 10
    door.cached(second, cache_salt="mine")
    listener.listen()
    assert listener.salted == [[["mine"], *[None] * 6]]
    assert len(listener.held) == door.engine.caches.held_blocks
    door.ask("/reset_prefix_cache", {})
    listener.listen()
    assert listener.held == {} and door.engine.caches.held_blocks == 0
    assert listener.numbers == list(range(len(listener.numbers))) and listener.topics == {b"kv@127.0.0.1@small"}


def test_what_was_missed_is_sent_again() -> None:
    publisher = KVPublisher(ANYWHERE, ANYWHERE, "kv@x@y")
    try:
        for _ in range(5):
            publisher.publish([AllBlocksCleared()])
        with zmq.Context() as context:
            deadline_s, numbers = time.monotonic() + PATIENCE_S, [-1]
            while len(numbers) < 4 and time.monotonic() < deadline_s:  # until all five went out
                asker = _asked_from(context, publisher, 2)
                numbers = []
                while not numbers or numbers[-1] != -1:
                    assert asker.poll(PATIENCE_S * 1000)
                    _, number, payload = asker.recv_multipart()
                    numbers.append(struct.unpack(">q", number)[0])
                    if payload:
                        assert msgspec.msgpack.decode(payload)["events"] == [{"type": "AllBlocksCleared"}]
                asker.close()
        assert numbers == [2, 3, 4, -1]
    finally:
        publisher.close()
        publisher.close()


def _asked_from(context: Any, publisher: KVPublisher, number: int) -> Any:
    """A DEALER that has asked as a REQ socket would, and takes more than one answer."""
    asker = context.socket(zmq.DEALER)
    asker.setsockopt(zmq.LINGER, 0)
    asker.connect(publisher.replay_at)
    asker.send_multipart((b"", number.to_bytes(8, "big")))
    return asker


def test_an_unavailable_endpoint_is_reported() -> None:
    with pytest.raises(InvalidInput, match="nowhere"):
        KVPublisher("nowhere", ANYWHERE, "kv@x@y")
