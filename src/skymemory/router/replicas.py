"""Router replicas that share their prefix index and their requests through a Redis or Valkey server.

1. A background task exchanges deltas of the index, and messages about requests; no request waits.
2. A stream (``XADD``, ``XREAD``), bounded in entries and time, holds the latest deltas. A new replica reads all.
3. A second stream has the messages about requests. Only new ones are read; a replica that misses some asks for a
   snapshot.
4. Without the server each replica keeps its deltas, and retries with a back-off.
"""

from __future__ import annotations

import asyncio
import hmac
import importlib
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

from skymemory.conductor.prefix_index.replicated import Delta, SharedPrefixIndex, pack_delta, unpack_deltas
from skymemory.conductor.sharing.replica_state import Cursor, ReplicaState
from skymemory.errors import InvalidInput, missing_extra
from skymemory.keys import MAX_KEY_ID, KeyRing
from skymemory.pacing import Backoff

MAX_PAUSE_S = 5.0
_ENTRY_BYTES = 64 << 10
_READ_ENTRIES = 64
_REQUEST_ENTRIES = 1000
_BATCH = 16  # deltas per turn of the event loop: about a millisecond
_PURPOSE = b"skymemory router replicas, Redis"
_MAC_BYTES = 16
_KEY_ID_DIGITS = len(str(MAX_KEY_ID))


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """Settings of the stream in Redis, which keeps the latest ``entries``, for ``ttl_s`` after the last."""

    interval_s: float = 0.1
    timeout_s: float = 1.0
    entries: int = 20_000
    ttl_s: float = 3600.0


@dataclass(slots=True)
class ReplicaStatus:
    """State of the exchange with other replicas."""

    kind: str = "redis"
    degraded: str = "not connected yet"  # reason why nothing is exchanged, or empty
    sent: int = 0  # updates, in total
    received: int = 0
    lost: int = 0  # own deltas dropped because too many were unsent
    refused: int = 0  # damaged or unauthenticated entries


class RedisReplicas:
    """Task that exchanges deltas, within ``2 * interval_s`` and a round trip.

    Each ``kind`` of blocks has its own stream. With ``keys``, entries need a valid MAC; without, every client of the
    server is trusted.

    Raises:
        MissingExtra: redis-py is not installed.
    """

    def __init__(
        self,
        index: SharedPrefixIndex | None,
        url: str,
        kind: str,
        *,
        keys: KeyRing | None = None,
        settings: StreamSettings = StreamSettings(),
        state: ReplicaState | None = None,
    ) -> None:
        """``index`` and ``state`` are shared, if any."""
        try:
            redis: Any = importlib.import_module("redis.asyncio")
            retry, backoff = importlib.import_module("redis.asyncio.retry"), importlib.import_module("redis.backoff")
        except ModuleNotFoundError as error:
            raise missing_extra("sharing state through Redis", "redis", "redis") from error
        try:
            self._redis = redis.Redis.from_url(
                url,
                decode_responses=False,
                socket_timeout=settings.timeout_s,
                socket_connect_timeout=settings.timeout_s,
                # redis-py's own retries, with pauses of up to ten seconds, would hide that the server is down.
                retry=retry.Retry(backoff.NoBackoff(), 0),
            )
        except ValueError as error:
            raise InvalidInput(f"replicas at {url!r}: {error}: expected redis://HOST[:PORT][/DB]") from None
        self._failures: tuple[type[Exception], ...] = (
            importlib.import_module("redis").RedisError,
            OSError,
            TimeoutError,
        )
        self._index, self._keys = index, keys
        self._stream = f"skymemory:replicas:{kind}".encode()
        self._life_key = self._stream + b":life"  # key of a random value, which is lost with the data
        self._server_life: bytes | None = None
        self._state, self._cursor = state, Cursor(has_deltas=False)
        self._requests_stream = self._stream + b":requests"
        self._last_requests_id: bytes | None = None  # None: begin with the next entry
        self._own_id = os.urandom(16) if state is None else state.own_id  # marks own entries
        self._settings = settings
        self._next_to_send = 0  # index in the log of deltas
        self._last_entry_id = b"0-0"
        self.status = ReplicaStatus()
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Send pending deltas, if possible, then disconnect."""
        self._closing = True  # redis-py can swallow a cancellation
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            if not self.status.degraded:
                with suppress(*self._failures):
                    async with asyncio.timeout(self._settings.timeout_s):
                        await self._send()
                        if self._state is not None:
                            await self._publish(self._state.leaving())
        with suppress(*self._failures):
            await self._redis.aclose()

    async def _run(self) -> None:
        pauses = Backoff(2 * self._settings.interval_s, MAX_PAUSE_S)
        while not self._closing:
            try:
                await self._check_stream()
                await self._send()
                await self._receive()
                if self._state is not None:
                    await self._exchange_requests(self._state)
                self.status.degraded, pause_s, pauses.failures = "", self._settings.interval_s, 0
            except self._failures as error:
                since = time.strftime("%H:%M:%SZ", time.gmtime())
                if not self.status.degraded or self.status.degraded == "not connected yet":
                    self.status.degraded = f"Redis does not answer since {since} ({type(error).__name__}: {error})"
                pause_s, self._last_requests_id = pauses.next_s(), None
            await asyncio.sleep(pause_s)

    async def _check_stream(self) -> None:
        """Detect that the server lost its data: read and send all again."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.set(self._life_key, os.urandom(16), nx=True)
            pipe.get(self._life_key)
            _, life = await pipe.execute()
        if life != self._server_life:
            if self._server_life is not None:
                self._last_entry_id = b"0-0"
                self._last_requests_id = None
                self._next_to_send = 0 if self._index is None else self._index.log_start
            self._server_life = life

    # `_next_to_send` advances only after the server's answer. After a timeout, whose outcome is unknown, deltas may be
    # sent twice. This is harmless: learning known blocks again only moves them to the end of the LRU order.

    async def _send(self) -> None:
        index = self._index
        while index is not None and self._next_to_send < index.log_end:
            deltas = index.since(self._next_to_send)
            if deltas is None:
                self.status.lost += index.log_start - self._next_to_send
                self._next_to_send = index.log_start
                continue
            for payload, count in _entries(deltas):
                await self._add(self._stream, payload, self._settings.entries)
                self._next_to_send += count
                self.status.sent += count

    async def _add(self, stream: bytes, payload: bytes, most_entries: int) -> None:
        fields = {b"from": self._own_id, b"deltas": payload}
        if self._keys is not None:
            key = self._keys.active(time.time())
            fields[b"key"] = str(key.key_id).encode()
            fields[b"mac"] = _mac(key.derive(_PURPOSE), stream, self._own_id, payload)
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.xadd(stream, fields, maxlen=most_entries, approximate=True)
            pipe.expire(stream, max(1, round(self._settings.ttl_s)))
            await pipe.execute()

    async def _receive(self) -> None:
        while self._index is not None:
            entries = await self._read(self._stream, self._last_entry_id)
            for number, fields in entries:
                self._last_entry_id = number
                if (payload := self._payload(self._stream, fields)) is None:
                    continue
                try:
                    self.status.received += await _absorb(self._index, unpack_deltas(payload))
                except InvalidInput:
                    self.status.refused += 1
            if len(entries) < _READ_ENTRIES:
                return

    async def _read(self, stream: bytes, after: bytes) -> list[tuple[bytes, dict[bytes, bytes]]]:
        reply = await self._redis.xread({stream: after}, count=_READ_ENTRIES)
        streams = list(reply.values()) if isinstance(reply, dict) else [entries for _, entries in reply or ()]
        return [entry for stream in streams for entry in _flat(stream)]

    def _payload(self, stream: bytes, fields: dict[bytes, bytes]) -> bytes | None:
        """Return the payload of another replica's entry; None if it is this one's, or not authentic."""
        sender, payload = fields.get(b"from", b""), fields.get(b"deltas", b"")
        if sender == self._own_id:
            return None
        if self._keys is not None:
            key_id, mac = fields.get(b"key", b""), fields.get(b"mac", b"")
            key = self._keys.find(int(key_id) if key_id.isdigit() and len(key_id) <= _KEY_ID_DIGITS else 0)
            expected = key and _mac(key.derive(_PURPOSE), stream, sender, payload)
            if not expected or not hmac.compare_digest(expected, mac):
                self.status.refused += 1
                return None
        return payload

    # Messages about requests. What lies in the stream longer than this replica was away would be counted as new, so it
    # is skipped; the gap then asks for a snapshot.

    async def _exchange_requests(self, state: ReplicaState) -> None:
        if self._last_requests_id is None:
            newest = await self._redis.xrevrange(self._requests_stream, count=1)
            self._last_requests_id = newest[0][0] if newest else b"0-0"
        for message in state.next_messages(self._cursor, time.monotonic()):
            await self._publish(message)
        while True:
            entries = await self._read(self._requests_stream, self._last_requests_id)
            for number, fields in entries:
                self._last_requests_id = number
                payload = self._payload(self._requests_stream, fields)
                if payload is not None:
                    await self._take_message(state, payload)
                    await asyncio.sleep(0)
            if len(entries) < _READ_ENTRIES:
                return

    async def _publish(self, message: bytes) -> None:
        await self._add(self._requests_stream, message, _REQUEST_ENTRIES)

    async def _take_message(self, state: ReplicaState, message: bytes) -> None:
        try:
            if state.is_wanted(message):
                self._cursor.change = None
            _, answer = state.receive(message, time.monotonic())
        except InvalidInput:
            self.status.refused += 1
            return
        if answer is not None:
            await self._publish(answer)


async def _absorb(index: SharedPrefixIndex, deltas: Iterable[Delta]) -> int:
    """Absorb deltas in batches; before an error, the preceding deltas are absorbed."""
    remaining, count = iter(deltas), 0
    while batch := list(islice(remaining, _BATCH)):
        index.absorb(batch)
        count += len(batch)
        await asyncio.sleep(0)
    return count


def _mac(secret: bytes, *parts: bytes) -> bytes:
    """Return 16 bytes of HMAC-SHA-256 over the parts, each preceded by its length."""
    message = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hmac.digest(secret, message, "sha256")[:_MAC_BYTES]


def _entries(deltas: list[Delta]) -> Iterator[tuple[bytes, int]]:
    payload, count = bytearray(), 0
    for delta in deltas:
        payload += pack_delta(delta)
        count += 1
        if len(payload) >= _ENTRY_BYTES:
            yield bytes(payload), count
            payload.clear()
            count = 0
    if count:
        yield bytes(payload), count


def _flat(reply: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    while reply and isinstance(reply[0], list):
        reply = reply[0]
    return [] if reply is None else [(number, fields) for number, fields in reply]
