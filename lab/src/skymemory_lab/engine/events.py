"""KV events over ZeroMQ in vLLM's format: topic, sequence number (8 bytes, big-endian) and msgpack; with replay."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from skymemory.errors import InvalidInput

REPLAY_BATCHES = 10_000
_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_POLL_S = 0.05
_LINGER_MS = 200


class KVPublisher:
    """Publisher of KV events in its own thread: a PUB socket for new batches, a ROUTER socket for replay.

    A replay request holds a sequence number. The answer is the kept batches from it on, then the number -1.
    """

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str) -> None:
        self._topic = topic.encode()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._publish = self._context.socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER)
        for socket, address in ((self._publish, endpoint), (self._replay, replay_endpoint)):
            socket.setsockopt(zmq.LINGER, _LINGER_MS)
            try:
                socket.bind(address)
            except zmq.ZMQError as error:
                self._context.destroy(linger=0)
                raise InvalidInput(f"KV events cannot be published at {address!r}: {error}") from error
        # The addresses bound: the system replaces a wildcard port.
        self.at = self._publish.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_at = self._replay.getsockopt_string(zmq.LAST_ENDPOINT)
        self._queue: queue.SimpleQueue[KVEventBatch | None] = queue.SimpleQueue()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=REPLAY_BATCHES)
        self._thread = threading.Thread(target=self._run, name="kv events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[KVEvent]) -> None:
        if events:
            self._queue.put(KVEventBatch(time.time(), list(events), 0))

    def close(self) -> None:
        """Send the queued batches and stop. Idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        encoder, number = msgspec.msgpack.Encoder(), 0
        while True:
            while self._replay.poll(0):
                self._answer(self._replay.recv_multipart())
            try:
                batch = self._queue.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if batch is None:
                break
            at, payload = number.to_bytes(8, "big"), encoder.encode(batch)
            number += 1
            self._kept.append((at, payload))
            self._publish.send_multipart((self._topic, at, payload))
        self._context.destroy(linger=_LINGER_MS)

    def _answer(self, frames: list[bytes]) -> None:
        # Frames of a REQ socket: the client's identity, an empty delimiter, the first number wanted.
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        client, _, first = frames
        for at, payload in self._kept:
            if at >= first:  # big-endian: bytes sort like their numbers
                self._replay.send_multipart((client, b"", at, payload))
        self._replay.send_multipart((client, b"", _END_OF_REPLAY, b""))


# --- vLLM's events (``vllm/distributed/kv_events.py``) ---


MEDIUM = "GPU"
"""Name by vLLM, also on CPUs."""


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    """Consecutive blocks of a prompt, now cached. ``extra_keys``: an entry per block, the first with the salt."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True):
    pass


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, omit_defaults=True):
    """Events of one engine step. ``ts``: Unix time."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None


def event_hash(block_hash: bytes) -> int:
    """Return the last 64 bits, as vLLM."""
    return int.from_bytes(block_hash[-8:], "big")
