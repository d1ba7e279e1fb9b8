"""Many clients of one store for `data_path.py sizes`, by the Python that has the store's own client.

They are forked from one process, which carries out orders, a line of JSON each: ``clients``, how many, opened with
``arguments``; values of ``size_bytes``, each written and read back; a ``verb`` by all at the same time, ``runs`` times.
What a client needs is imported before the fork. All values lie in one piece of shared memory, each client's begins at
another place.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import importlib
import json
import mmap
import multiprocessing
import os
import random
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Verb = Callable[[], Any]
OpenValue = Callable[[str, memoryview], tuple[Verb, Verb]]
"""Of a name and a value: how it is read and how it is written over an open connection."""
APART_BYTES = 64
OPENING_TRIES, OPENING_PAUSE_S = 30, 0.5


class Failed(Exception):
    """A value was not read or not written: counted, since under load that is an answer."""


def redis_store(port: int) -> OpenValue:
    import redis

    peer = redis.Redis(port=port, socket_read_size=256 << 10)
    return lambda name, value: (lambda: peer.get(name), lambda: peer.set(name, value))


def memcached_store(port: int) -> OpenValue:
    """By its text protocol over one connection: the least that a client can do."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def open_value(name: str, value: memoryview) -> tuple[Verb, Verb]:
        get, head = f"get {name}\r\n".encode(), f"set {name} 0 0 {len(value)}\r\n".encode()
        begin, end = len(f"VALUE {name} 0 {len(value)}\r\n"), len("\r\nEND\r\n")
        answer = memoryview(bytearray(begin + len(value) + end))

        def read() -> memoryview:
            sock.sendall(get)
            at = 0
            while at < len(answer):
                at += sock.recv_into(answer[at:])
            return answer[begin:-end]

        def write() -> None:
            sent = sock.sendmsg([head, value, b"\r\n"])
            if sent != len(head) + len(value) + 2 or sock.recv(64) != b"STORED\r\n":
                raise Failed("memcached did not store the value")

        return read, write

    return open_value


def sky_store(folder: str, access: str) -> OpenValue:
    from skymemory.testbed.connect import open_constellation

    store = open_constellation(Path(folder), access=access)

    def open_value(name: str, value: memoryview) -> tuple[Verb, Verb]:
        key = hashlib.sha256(name.encode()).digest()

        def read() -> memoryview:
            (found,) = store.get_many([key])
            if found is None or len(found) != len(value):
                raise Failed(f"the value did not come back: {store.stats()}")
            return memoryview(found)

        def write() -> None:
            if store.put_many([(key, value)]) != [True]:
                raise Failed(f"the value was not stored: {store.stats()}")

        return read, write

    return open_value


def lmcache_store(port: int, most_bytes: int) -> OpenValue:
    """LMCache's own connector for ``lm://``. It does not wait for the server after a write: asking whether it is there
    does. Its socket delays small packets until others are acknowledged: ours does not.
    """
    import torch
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.memory_management import MemoryFormat
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.connector.lm_connector import LMCServerConnector
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

    shape = (1, 2, 256, 1, 1)
    metadata = LMCacheMetadata("none", 1, 1, 0, 0, torch.uint8, shape, chunk_size=256, role="worker")
    config = LMCacheEngineConfig.from_defaults(local_cpu=False, max_local_cpu_size=(2 * most_bytes + (4 << 20)) / 2**30)
    memory = LocalCPUBackend(config, metadata, "cpu")
    loop = asyncio.new_event_loop()
    connector = LMCServerConnector("127.0.0.1", port, loop, memory)
    connector.client_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    held: list[Any] = []

    def open_value(name: str, value: memoryview) -> tuple[Verb, Verb]:
        while held:
            held.pop().ref_count_down()
        key = CacheEngineKey("none", 1, 0, int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]), torch.uint8)
        written = memory.allocate(torch.Size((1, 1, 1, len(value))), torch.uint8, MemoryFormat.KV_2LTD)
        memoryview(written.byte_array).cast("B")[:] = value
        held.append(written)

        def read() -> memoryview:
            found = loop.run_until_complete(connector.get(key))
            found.ref_count_down()  # stays what it is until the next read
            return memoryview(found.byte_array).cast("B")

        async def put() -> bool:
            await connector.put(key, written)
            return bool(await connector.exists(key))

        def write() -> None:
            if not loop.run_until_complete(put()):
                raise Failed("LMCache's server did not store the value")

        return read, write

    return open_value


def mooncake_store(master: str) -> OpenValue:
    """Mooncake's own client, from and into memory that it knows: a value is stored in another process, over TCP."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    if store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master):
        raise SystemExit("Mooncake's client found no master")
    known: list[int] = []

    def open_value(name: str, value: memoryview) -> tuple[Verb, Verb]:
        while known:
            store.unregister_buffer(known.pop())
        room = memoryview(mmap.mmap(-1, len(value)))
        for memory in (value, room):
            known.append(ctypes.addressof((ctypes.c_char * len(value)).from_buffer(memory)))
            if store.register_buffer(known[-1], len(value)):
                raise SystemExit("Mooncake does not know the memory")
        source, target = known

        def read() -> memoryview:
            if store.get_into(name, target, len(value)) != len(value):
                raise Failed("Mooncake did not give the value back")
            return room

        def write() -> None:
            if store.upsert_from(name, source, len(value)):
                raise Failed("Mooncake did not store the value")

        return read, write

    return open_value


STORES: dict[str, tuple[Callable[..., OpenValue], str]] = {
    "redis": (redis_store, "redis"),
    "memcached": (memcached_store, "socket"),
    "sky": (sky_store, "skymemory.testbed.connect"),
    "lmcache": (lmcache_store, "lmcache.v1.storage_backend.connector.lm_connector"),
    "mooncake": (mooncake_store, "mooncake.store"),
}
"""By kind: how a store is opened, and what is imported for it."""


def check(read: Verb, write: Verb, value: memoryview) -> None:
    """Writes the value and reads it back, at the latest when others have done so."""
    for last in [False] * OPENING_TRIES + [True]:
        try:
            write()
            found = read()
        except Failed:
            if last:
                raise
            time.sleep(OPENING_PAUSE_S)  # after a timeout some fail at once for a while
            continue
        if found != value:
            raise SystemExit("another value came back")
        return


def serve(pipe: Connection, kind: str, arguments: list[Any], pool: memoryview, number: int) -> None:
    """The whole of a client: answers each order with the seconds of the processor that it took, and its failures."""
    open_value = STORES[kind][0](*arguments)
    read: Verb = lambda: None  # noqa: E731
    write = read
    pipe.send((0.0, 0))
    while (order := pipe.recv()) is not None:
        began_s, failed = time.process_time(), 0
        if "size_bytes" in order:
            value = pool[APART_BYTES * number :][: order["size_bytes"]]
            read, write = open_value(f"{len(value)}-{number}", value)
            check(read, write, value)
        else:
            run = read if order["verb"] == "read" else write
            for _ in range(order["runs"]):
                try:
                    run()
                except Failed:
                    failed += 1
        pipe.send((time.process_time() - began_s, failed))


class Clients:
    def __init__(self, kind: str, most_bytes: int, most_clients: int) -> None:
        self._kind = kind
        importlib.import_module(STORES[kind][1])
        self._pool = memoryview(mmap.mmap(-1, most_bytes + APART_BYTES * most_clients))
        self._pool[:] = random.Random(1).randbytes(len(self._pool))
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def carry_out(self, order: dict[str, Any]) -> dict[str, float]:
        began_s = time.perf_counter()
        if "clients" in order:
            self._start(order["clients"], order["arguments"])
        for pipe in self._pipes:
            if "clients" not in order:
                pipe.send(order)
        answers = [pipe.recv() for pipe in self._pipes]
        return {
            "seconds": time.perf_counter() - began_s,
            "processor_s": sum(processor_s for processor_s, _ in answers),
            "failed": sum(failed for _, failed in answers),
        }

    def _start(self, count: int, arguments: list[Any]) -> None:
        """New ones in the place of all that were: they give their memory back."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
            process.kill()
        self._pipes, self._processes = [], []
        context = multiprocessing.get_context("fork")
        for number in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(theirs, self._kind, arguments, self._pool, number), daemon=True
            )
            process.start()
            theirs.close()  # before the next fork: only so its end is noticed
            self._pipes.append(ours)
            self._processes.append(process)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    kind, most_bytes, most_clients = sys.argv[1:]
    clients = Clients(kind, int(most_bytes), int(most_clients))
    for line in sys.stdin:
        print(json.dumps(clients.carry_out(json.loads(line))), file=answers)
    clients.carry_out({"clients": 0, "arguments": []})


if __name__ == "__main__":
    main()
