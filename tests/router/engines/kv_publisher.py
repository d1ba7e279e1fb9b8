"""An engine's cache and its events, in a process of its own: ``python -m tests.router.engines.kv_publisher OPTIONS``.

Publishes as vLLM does (PUB with topic, number and batch; a ROUTER that replays), and loses, doubles and swaps what it
publishes by seed. One line of JSON says its ports; each line it reads is an order, and each answered by a line:
``{"publish": N}``, ``{"clear": true}``, ``{"drop": true}`` (lose all that follows) or
``{"held": true}``, which reports the blocks that it holds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import OrderedDict, deque
from typing import Any

import msgspec
import zmq


class BlockStored(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None


class BlockRemoved(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    block_hashes: list[int | bytes]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class Engine:
    """Chains of blocks over a small alphabet, so that prefixes are shared.

    Of those that nothing follows, the one used least lately goes first.
    """

    def __init__(self, seed: int, capacity: int, block_tokens: int, host: int = 0) -> None:
        self.dice = random.Random(seed)
        self.life = os.urandom(8)
        """Block hashes of one life mean nothing in another."""
        self.capacity = capacity
        self.block_tokens = block_tokens
        self.held: OrderedDict[tuple[int, ...], bytes] = OrderedDict()
        self.host_blocks = host
        self.host: OrderedDict[bytes, None] = OrderedDict()
        """Names of copies in the host's memory, reported as vLLM's offloading connector does: without tokens."""

    def serve(self) -> list[Any]:
        """One prompt: what the cache has of it is used, the rest computed and stored."""
        events: list[Any] = []
        path: list[tuple[int, ...]] = []
        chain: tuple[int, ...] = ()
        for _ in range(self.dice.randint(1, 6)):
            chain = (*chain, self.dice.randint(0, 2))
            path.append(chain)
        known = [chain for chain in path if chain in self.held]
        new = path[len(known) :]
        for chain in known:
            self.held.move_to_end(chain)
        while len(self.held) + len(new) > self.capacity:
            parents = {chain[:-1] for chain in self.held}
            oldest = next(chain for chain in self.held if chain not in parents)
            events.append(BlockRemoved([self.held.pop(oldest)], "GPU"))
        if new:
            for chain in new:
                self.held[chain] = self.life + bytes(chain)
            tokens = [token for chain in new for token in [chain[-1]] * self.block_tokens]
            hashes: list[int | bytes] = [self.held[chain] for chain in new]
            parent = self.held[known[-1]] if known else None
            events.append(BlockStored(hashes, parent, tokens, self.block_tokens, None, "GPU"))
            events += self.offload(hashes)
        return events

    def offload(self, hashes: list[int | bytes]) -> list[Any]:
        """Every block is copied as it is stored; the oldest copies go, and each removal follows its storing."""
        events: list[Any] = []
        for name in hashes:
            if self.host_blocks and isinstance(name, bytes) and name not in self.host:
                self.host[name] = None
                events.append(BlockStored([name], None, [], 0, None, "CPU"))
        while len(self.host) > self.host_blocks:
            events.append(BlockRemoved([self.host.popitem(last=False)[0]], self.dice.choice(("CPU", "cpu"))))
        return events

    def clear(self) -> list[Any]:
        self.held.clear()
        self.host.clear()
        return [AllBlocksCleared()]


PATIENCE_MS = 60_000


class Publisher:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.engine = Engine(options.seed, options.capacity, options.block_tokens, options.host)
        self.dice = random.Random(options.seed + 1)
        context = zmq.Context()
        self.pub = context.socket(zmq.XPUB)  # as PUB, and says who subscribes
        self.pub.setsockopt(zmq.XPUB_VERBOSE, 1)
        self.pub.setsockopt(zmq.SNDHWM, options.hwm)
        self.pub.setsockopt(zmq.LINGER, 0)
        self.pub.bind(f"tcp://127.0.0.1:{options.port or '*'}")
        self.router = context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.LINGER, 0)
        self.router.bind(f"tcp://127.0.0.1:{options.replay_port or '*'}")
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=options.buffer)
        self.number = 0
        self.late: list[list[bytes]] = []
        self.dropping = False

    def run(self) -> None:
        ports = [int(s.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1]) for s in (self.pub, self.router)]
        print(json.dumps(ports), flush=True)
        poller = zmq.Poller()
        poller.register(sys.stdin.fileno(), zmq.POLLIN)
        poller.register(self.router, zmq.POLLIN)
        orders = b""
        while True:
            ready = dict(poller.poll())
            if self.router in ready:
                self.replay()
            if sys.stdin.fileno() in ready:
                more = os.read(sys.stdin.fileno(), 65536)
                if not more:
                    return
                orders += more
                while b"\n" in orders:
                    order, _, orders = orders.partition(b"\n")
                    print(json.dumps(self.obey(json.loads(order))), flush=True)

    def obey(self, order: dict[str, Any]) -> Any:
        if "publish" in order:
            for _ in range(order["publish"]):
                self.publish(self.engine.serve())
                if self.router.poll(0):
                    self.replay()
        if "clear" in order:
            self.publish(self.engine.clear())
        if "hear" in order:  # a subscription: what is published before it is lost
            heard = False
            while not heard and self.pub.poll(PATIENCE_MS):
                heard = self.pub.recv()[:1] == b"\x01"
        if "drop" in order:
            self.dropping = order["drop"]
        held = {*self.engine.held.values(), *self.engine.host}
        return {"number": self.number, "held": [name.hex() for name in held]}

    def publish(self, events: list[Any]) -> None:
        payload = msgspec.msgpack.encode(Batch(time.time(), events, 0))
        frames = [self.options.topic.encode(), self.number.to_bytes(8, "big"), payload]
        self.buffer.append((self.number, payload))
        self.number += 1
        options = self.options
        if self.dropping or self.dice.random() < options.lose:
            return
        if self.dice.random() < options.swap:
            self.late.append(frames)
            return
        self.pub.send_multipart(frames)
        if self.dice.random() < options.double:
            self.pub.send_multipart(frames)
        for late in self.late:
            self.pub.send_multipart(late)
        self.late.clear()

    def replay(self) -> None:
        client, _, first = self.router.recv_multipart()
        for number, payload in self.buffer:
            if number >= int.from_bytes(first, "big"):
                self.router.send_multipart([client, b"", number.to_bytes(8, "big"), payload])
        self.router.send_multipart([client, b"", b"\xff" * 8, b""])


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name, default in (
        ("seed", 0),
        ("capacity", 60),
        ("hwm", 100_000),
        ("buffer", 10_000),
        ("block-tokens", 4),
        ("host", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("lose", "double", "swap"):
        parser.add_argument(f"--{name}", type=float, default=0.0)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--replay-port", type=int, default=0)
    parser.add_argument("--topic", default="kv@10.0.0.1:8000@small")
    return parser.parse_args()


if __name__ == "__main__":
    Publisher(options()).run()
