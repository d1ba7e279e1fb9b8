"""Exchange between routers over TCP, without Redis.

1. Each router listens, and connects to every address of its peers. It sends on the connections that it opened, and
   receives on those that it accepted; there it only asks for snapshots.
2. A peer that reads too slowly gets nothing until its backlog is sent, and then a snapshot if need be.
3. No request waits for any of this.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Sequence
from contextlib import suppress

from skymemory.addresses import format_address, host_and_port
from skymemory.conductor.sharing.replica_state import Cursor, ReplicaState
from skymemory.errors import InvalidInput, SkyMemoryError, cannot_listen
from skymemory.keys import KeyRing
from skymemory.pacing import Backoff
from skymemory.router.peer_frames import FrameCodec, NotAccepted, greeting, read_greeting
from skymemory.router.tasks import cancel

log = logging.getLogger("skymemory.router")

CONNECT_S = 2.0
"""Limit of connecting, and of waiting for a hello."""
IDLE_S = 10.0
"""Limit of an accepted connection without a message."""
STUCK_S = 5.0
"""Limit of a backlog that does not shrink to nothing."""
RESOLVE_S = 5.0
MAX_PAUSE_S = 2.0
OWN_ADDRESS_S = 30.0
"""Wait before an address that is this router's own is tried again."""
MAX_BACKLOG_BYTES = 1 << 20
MAX_ACCEPTED = 128
MAX_PEERS = 64
_LEAVE_S = 0.2
_FAILURES = (OSError, EOFError, TimeoutError, InvalidInput)


class PeerExchange:
    """Exchange with routers at ``peers``: addresses, or names that stand for all their addresses."""

    def __init__(
        self,
        state: ReplicaState,
        kind: str,
        listen: str,
        peers: Sequence[str],
        *,
        keys: KeyRing | None = None,
        every_s: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state, self._kind, self._keys, self.clock = state, kind, keys, clock
        self._listen, self._peers, self.every_s = listen, tuple(peers), every_s
        self._resolved: dict[str, set[tuple[str, int]]] = {}
        self._links: dict[tuple[str, int], _Link] = {}
        self._accepted: set[asyncio.Task[None]] = set()
        self._resolving: asyncio.Task[None] | None = None
        self._server: asyncio.Server | None = None
        self.refused = ""
        """Reason why a router was last refused, or empty."""
        self.port = 0

    async def start(self) -> None:
        """Listen, and connect in the background.

        Raises:
            SkyMemoryError: it cannot listen.
        """
        if self._listen:
            host, port = host_and_port(self._listen)
            try:
                self._server = await asyncio.start_server(self._accept, host, port)
            except OSError as error:
                raise SkyMemoryError(f"replicas: {cannot_listen(self._listen, error)}") from error
            self.port = self._server.sockets[0].getsockname()[1]
            log.info("replicas: listening at %s", format_address(host, self.port))
        self._resolving = asyncio.create_task(self._follow_peers(), name="peers")

    async def close(self) -> None:
        """Notify the peers that this router stops, and disconnect."""
        await cancel([self._resolving])
        if self._server is not None:
            self._server.close()
        await asyncio.gather(*(link.leave() for link in self._links.values()))
        await cancel(self._accepted)

    @property
    def connected(self) -> int:
        """Return the number of peers that get this router's changes."""
        return sum(link.is_connected for link in self._links.values())

    # Connections to peers

    async def _follow_peers(self) -> None:
        while True:
            addresses = await self._addresses()
            for address in self._links.keys() - addresses:
                await self._links.pop(address).stop()
            for address in sorted(addresses - self._links.keys())[: MAX_PEERS - len(self._links)]:
                self._links[address] = link = _Link(self, address)
                link.start()
            await asyncio.sleep(RESOLVE_S)

    async def _addresses(self) -> set[tuple[str, int]]:
        """Resolve the peers; keep the addresses of a name that cannot be resolved."""
        loop, addresses = asyncio.get_running_loop(), set[tuple[str, int]]()
        for peer in self._peers:
            host, port = host_and_port(peer)
            try:
                async with asyncio.timeout(CONNECT_S):
                    resolved = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                self._resolved[peer] = {(str(address[0]), port) for *_, address in resolved}
            except (OSError, TimeoutError):
                self._resolved.setdefault(peer, set())
            addresses |= self._resolved[peer]
        return addresses

    # Accepted connections

    async def _accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(self._accepted) >= MAX_ACCEPTED:
            writer.transport.abort()
            return
        self._accepted.add(task)
        try:
            codec = await self.greet(reader, writer)
            while True:
                async with asyncio.timeout(IDLE_S):
                    message = await codec.read(reader)
                sender, answer = self.state.receive(message, self.clock())
                if sender != codec.other.sender:
                    raise NotAccepted("a message of another router")
                if answer is not None and writer.transport.get_write_buffer_size() < MAX_BACKLOG_BYTES:
                    writer.write(codec.pack(answer))
                await asyncio.sleep(0)  # what is read already would not wait
        except InvalidInput as error:
            self.on_refused(writer, error)
        except (OSError, EOFError, TimeoutError):
            pass  # it connects again
        finally:
            self._accepted.discard(task)
            writer.transport.abort()

    async def greet(self, reader: StreamReader, writer: StreamWriter) -> FrameCodec:
        """Exchange hellos.

        Raises:
            NotAccepted: another protocol, version, kind of blocks or key.
        """
        hello, packed = greeting(self.state.own_id, self._kind, self._keys)
        writer.write(packed)
        async with asyncio.timeout(CONNECT_S):
            return FrameCodec.of(hello, await read_greeting(reader), self._keys)

    def on_refused(self, writer: StreamWriter, error: InvalidInput) -> None:
        if isinstance(error, NotAccepted):
            self.state.counts.refused += 1
        address = writer.get_extra_info("peername") or ("?", 0)
        reason = f"{address[0]}: {error}"
        if reason != self.refused:
            log.warning("replicas: a router is refused: %s", reason)
        self.refused = reason


class _Link:
    """Connection to one address of a peer, opened again when it ends."""

    def __init__(self, exchange: PeerExchange, address: tuple[str, int]) -> None:
        self._exchange, self._address = exchange, address
        self._task: asyncio.Task[None] | None = None
        self._connection: tuple[FrameCodec, StreamWriter] | None = None

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="peer")

    async def stop(self) -> None:
        await cancel([self._task])

    async def leave(self) -> None:
        """Notify the peer that this router stops, and disconnect."""
        if self._connection is not None:
            codec, writer = self._connection
            writer.write(codec.pack(self._exchange.state.leaving()))
            with suppress(*_FAILURES):
                async with asyncio.timeout(_LEAVE_S):
                    await writer.drain()
                    writer.write_eof()
        await self.stop()

    async def _run(self) -> None:
        pauses = Backoff(2 * self._exchange.every_s, MAX_PAUSE_S)
        while True:
            pause_s = None
            try:
                async with asyncio.timeout(CONNECT_S):
                    reader, writer = await asyncio.open_connection(*self._address)
            except _FAILURES:
                await asyncio.sleep(pauses.next_s() * random.uniform(0.5, 1.0))
                continue
            try:
                codec = await self._exchange.greet(reader, writer)
                if codec.other.sender == self._exchange.state.own_id:
                    pause_s = OWN_ADDRESS_S
                else:
                    pauses.failures = 0
                    await self._send(codec, reader, writer)
            except InvalidInput as error:
                self._exchange.on_refused(writer, error)
                pause_s = MAX_PAUSE_S
            except (OSError, EOFError, TimeoutError):
                pass
            except Exception:  # a fault of ours must not end the exchange for good
                log.exception("exchange with a router")
                pause_s = MAX_PAUSE_S
            finally:
                self._connection = None
                writer.transport.abort()
            await asyncio.sleep(pauses.next_s() if pause_s is None else pause_s)

    async def _send(self, codec: FrameCodec, reader: StreamReader, writer: StreamWriter) -> None:
        """Send until the connection ends or is stuck."""
        exchange, cursor = self._exchange, Cursor()
        self._connection = codec, writer
        answers = asyncio.create_task(self._read_answers(codec, reader, cursor))
        empty_s = exchange.clock()
        try:
            while not answers.done():
                now_s = exchange.clock()
                backlog_bytes = writer.transport.get_write_buffer_size()
                if not backlog_bytes:
                    empty_s = now_s
                elif now_s - empty_s > STUCK_S:
                    raise TimeoutError("the peer reads nothing")
                while writer.transport.get_write_buffer_size() < MAX_BACKLOG_BYTES:
                    messages = exchange.state.next_messages(cursor, now_s, 1)
                    if not messages:
                        break
                    writer.write(codec.pack(messages[0]))
                await asyncio.sleep(exchange.every_s)
            answers.result()
        finally:
            await cancel([answers])

    async def _read_answers(self, codec: FrameCodec, reader: StreamReader, cursor: Cursor) -> None:
        while True:
            # The task of the connection cancels this wait if the peer does not read.
            message = await codec.read(reader)
            if self._exchange.state.is_wanted(message):
                cursor.change = None
