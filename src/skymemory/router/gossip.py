"""Replicas that tell each other what they learnt, without a server between: each calls all others.

A listener says which *life* of the teller it knows (16 random bytes, new at every start) and up to which delta. The
teller goes on from there, or, where it no longer keeps that much or had another life, first tells its whole state. So a
lost connection costs nothing but time, and a gap is never passed over.

Bodies of frames, little-endian: from the listener once *life 16 | number 8 | kind of blocks, UTF-8*; from the teller
*what 1 | number 8 | life 16 in the first, else deltas*: 0 welcome (goes on from ``number``), 1 a part of what comes,
2 end of the state (which is that of ``number``), 3 deltas up to before ``number``, 4 blocks of another kind.
"""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from skymemory.conductor.prefix_index.deltas import Delta, pack_delta, unpack_deltas
from skymemory.conductor.prefix_index.shared import SharedPrefixIndex
from skymemory.errors import InvalidInput
from skymemory.keys import KeyRing
from skymemory.router.gossip_wire import Channel, NotAuthentic, check_reach, meet_listener, meet_teller
from skymemory.router.replicas import ReplicaStatus, loopback, split_address, take_in

INTERVAL_S = 0.05
HEARTBEAT_S = 1.0
TIMEOUT_S = 5.0
MAX_PAUSE_S = 5.0
MAX_CONNECTIONS = 64
_LIFE_BYTES = 16
_SUBSCRIBE = struct.Struct(f"<{_LIFE_BYTES}sQ")
_TOLD = struct.Struct("<BQ")
_WELCOME, _PART, _STATE_END, _DELTAS, _OTHER_KIND = range(5)
_FRAME_BYTES = 64 << 10
_FAILURES = (OSError, TimeoutError, asyncio.IncompleteReadError, NotAuthentic, InvalidInput)


@dataclass(slots=True)
class _Peer:
    address: str
    life: bytes = bytes(_LIFE_BYTES)
    """Of which we have everything before ``number``; zeros: of none."""
    number: int = 0
    beginning: bytes = b""
    """The life whose state is being told."""
    trouble: str = "not reached yet"
    full_states: int = 0
    ourselves: bool = False


class GossipReplicas:
    """``listen`` and ``peers`` are ``HOST:PORT``; our own address among the peers is left out when it answers.

    ``slots`` gives the slots whose state is told. Beyond this computer ``keys`` are needed.

    Raises:
        InvalidInput: an address that is none, or one beyond this computer and no keys.
    """

    def __init__(
        self,
        index: SharedPrefixIndex,
        slots: Callable[[], Sequence[int]],
        listen: str,
        peers: Sequence[str],
        kind: str,
        *,
        keys: KeyRing | None = None,
        interval_s: float = INTERVAL_S,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        for address in (listen, *peers):
            host, _ = split_address(address)
            check_reach(host, keys, loopback(host))
        self._index, self._slots, self._kind, self._keys = index, slots, kind, keys
        self._listen = listen
        self.peers = [_Peer(address) for address in peers]
        self.life = os.urandom(_LIFE_BYTES)
        self.port = 0
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._sent = self._received = self._refused = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    async def start(self) -> None:
        host, port = split_address(self._listen)
        try:
            self._server = await asyncio.start_server(self._serve, host, port)
        except OSError as error:
            raise InvalidInput(f"replicas cannot be awaited at {self._listen}: {error}") from None
        self.port = self._server.sockets[0].getsockname()[1]
        for peer in self.peers:
            self._keep(asyncio.create_task(self._follow(peer)))

    def add_peer(self, address: str) -> None:
        """One more replica to listen to, from now on."""
        host, _ = split_address(address)
        check_reach(host, self._keys, loopback(host))
        self.peers.append(_Peer(address))
        self._keep(asyncio.create_task(self._follow(self.peers[-1])))

    async def close(self) -> None:
        self._closing = True
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def status(self) -> ReplicaStatus:
        troubles = [f"{peer.address}: {peer.trouble}" for peer in self.peers if peer.trouble and not peer.ourselves]
        return ReplicaStatus("gossip", "; ".join(troubles), self._sent, self._received, 0, self._refused)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._tasks) >= MAX_CONNECTIONS + len(self.peers):
            writer.close()
            return
        self._keep(task)
        try:
            channel = await meet_listener(reader, writer, self._keys, self._timeout_s)
            await self._tell(channel)
        except (NotAuthentic, InvalidInput, struct.error):
            self._refused += 1
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _tell(self, channel: Channel) -> None:
        asked = await channel.receive()
        life, number = _SUBSCRIBE.unpack_from(asked)
        if asked[_SUBSCRIBE.size :] != self._kind.encode():
            await channel.send(_TOLD.pack(_OTHER_KIND, 0) + self._kind.encode())
            raise InvalidInput("a replica of other blocks")
        if life != self.life:
            number = -1
        await channel.send(_TOLD.pack(_WELCOME, max(0, number)) + self.life)
        spoken_s = time.monotonic()
        while not self._closing:
            deltas = self._index.since(number)
            if deltas is None:
                number = self._index.told
                await self._send_all(channel, _STATE_END, number, self._index.state(self._slots()))
            elif deltas:
                number += len(deltas)
                # What a frame brings may be taken twice, if the connection breaks; it is never left out.
                await self._send_all(channel, _DELTAS, number, deltas)
                self._sent += len(deltas)
            elif time.monotonic() - spoken_s > min(HEARTBEAT_S, self._timeout_s / 4):
                await channel.send(_TOLD.pack(_DELTAS, number))
            else:
                await asyncio.sleep(self._interval_s)
                continue
            spoken_s = time.monotonic()

    async def _send_all(self, channel: Channel, what: int, number: int, deltas: Iterable[Delta]) -> None:
        """In frames of about ``_FRAME_BYTES``: the last says ``what``, for only then is all there."""
        body = bytearray()
        for delta in deltas:
            if len(body) >= _FRAME_BYTES:
                await channel.send(_TOLD.pack(_PART, number) + body)
                await asyncio.sleep(0)
                body.clear()
            body += pack_delta(delta)
        await channel.send(_TOLD.pack(what, number) + body)

    async def _follow(self, peer: _Peer) -> None:
        pause_s = self._interval_s
        while not (peer.ourselves or self._closing):
            try:
                await self._listen_to(peer)
            except _FAILURES as error:
                if isinstance(error, NotAuthentic | InvalidInput):
                    self._refused += 1
                said = str(error) or type(error).__name__
                pause_s = self._interval_s if not peer.trouble else min(MAX_PAUSE_S, 2 * pause_s)
                peer.trouble = said
            await asyncio.sleep(pause_s)

    async def _listen_to(self, peer: _Peer) -> None:
        async with asyncio.timeout(self._timeout_s):
            reader, writer = await asyncio.open_connection(*split_address(peer.address))
        try:
            channel = await meet_teller(reader, writer, self._keys, time.time(), self._timeout_s)
            await channel.send(_SUBSCRIBE.pack(peer.life, peer.number) + self._kind.encode())
            while not peer.ourselves:
                await self._hear(peer, await channel.receive())
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _hear(self, peer: _Peer, body: bytes) -> None:
        if len(body) < _TOLD.size:
            raise InvalidInput("a frame without a head")
        what, number = _TOLD.unpack_from(body)
        rest = body[_TOLD.size :]
        if what == _OTHER_KIND:
            raise InvalidInput(f"its blocks are {rest.decode(errors='replace')!r}, ours {self._kind!r}")
        if what == _WELCOME:
            peer.ourselves = rest == self.life
            peer.beginning, peer.trouble = rest, ""
            return
        self._received += await take_in(self._index, unpack_deltas(rest))
        if what == _STATE_END:
            peer.full_states += 1
            peer.life = peer.beginning
        if what in (_STATE_END, _DELTAS):
            peer.number = number
