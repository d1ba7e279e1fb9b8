"""One connection between two replicas: who is there, and frames that are whole and in order.

The one that was called (the *teller*) sends 32 random bytes; the caller (the *listener*) answers with 32 of its own,
the number of its key, and a MAC over both; the teller answers with its MAC. Each direction then has a key of its own,
made of the shared secret and both numbers, so that nothing said on one connection is of use on another. A frame is its
length (4 bytes, little-endian), a body, and 16 bytes of HMAC-SHA-256 over the frame's number and the body. Without a
key ring the MACs are made with a secret that everybody knows: they then only find damage.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import struct

from skymemory.errors import InvalidInput
from skymemory.keys import KeyRing
from skymemory.router.replicas import MAC_BYTES, mac_of, secret_of

MAX_BODY_BYTES = 16 << 20
_MAGIC = b"SKYGOSS1"
_NONCE_BYTES = 32
_HELLO = struct.Struct(f"<8s{_NONCE_BYTES}s")
_ANSWER = struct.Struct(f"<{_NONCE_BYTES}sH{MAC_BYTES}s")
_LENGTH = struct.Struct("<I")
_PURPOSE = b"skymemory router replicas, gossip"
_NO_SECRET = b"nobody keeps this"


class NotAuthentic(Exception):
    """Who is at the other end has another key, or changed what was sent."""


class Channel:
    """Frames both ways over a connection on which both have shown that they know the key."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        sending: bytes,
        receiving: bytes,
        timeout_s: float,
    ) -> None:
        self._reader, self._writer = reader, writer
        self._sending, self._receiving = sending, receiving
        self._sent = self._received = 0
        self._timeout_s = timeout_s

    async def send(self, body: bytes) -> None:
        mac = mac_of(self._sending, self._sent.to_bytes(8, "little"), body)
        self._sent += 1
        self._writer.write(_LENGTH.pack(len(body)) + body + mac)
        async with asyncio.timeout(self._timeout_s):
            await self._writer.drain()

    async def receive(self) -> bytes:
        """The next frame's body.

        Raises:
            NotAuthentic: a frame that is damaged, out of order or too large.
            TimeoutError: none came in time.
            OSError, asyncio.IncompleteReadError: the connection ended.
        """
        async with asyncio.timeout(self._timeout_s):
            (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if size > MAX_BODY_BYTES:
                raise NotAuthentic(f"a frame of {size} bytes")
            body = await self._reader.readexactly(size)
            given = await self._reader.readexactly(MAC_BYTES)
        if not hmac.compare_digest(mac_of(self._receiving, self._received.to_bytes(8, "little"), body), given):
            raise NotAuthentic("a frame that is damaged or forged")
        self._received += 1
        return body


async def meet_listener(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keys: KeyRing | None, timeout_s: float
) -> Channel:
    """The teller's side. Raises as ``Channel.receive``."""
    ours = os.urandom(_NONCE_BYTES)
    writer.write(_HELLO.pack(_MAGIC, ours))
    async with asyncio.timeout(timeout_s):
        await writer.drain()
        theirs, key_id, given = _ANSWER.unpack(await reader.readexactly(_ANSWER.size))
    secret = _secret(keys, key_id)
    if not hmac.compare_digest(mac_of(secret, b"listener", ours, theirs), given):
        raise NotAuthentic("whoever called does not know the key")
    writer.write(mac_of(secret, b"teller", ours, theirs))
    sending, receiving = _directions(secret, ours, theirs)
    return Channel(reader, writer, sending, receiving, timeout_s)


async def meet_teller(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keys: KeyRing | None, now_s: float, timeout_s: float
) -> Channel:
    """The listener's side. Raises as ``Channel.receive``."""
    ours = os.urandom(_NONCE_BYTES)
    key_id = 0 if keys is None else keys.active(now_s).key_id
    async with asyncio.timeout(timeout_s):
        magic, theirs = _HELLO.unpack(await reader.readexactly(_HELLO.size))
        if magic != _MAGIC:
            raise NotAuthentic("whoever listens there is no replica of ours")
        secret = _secret(keys, key_id)
        writer.write(_ANSWER.pack(ours, key_id, mac_of(secret, b"listener", theirs, ours)))
        await writer.drain()
        given = await reader.readexactly(MAC_BYTES)
    if not hmac.compare_digest(mac_of(secret, b"teller", theirs, ours), given):
        raise NotAuthentic("whoever listens there does not know the key")
    receiving, sending = _directions(secret, theirs, ours)
    return Channel(reader, writer, sending, receiving, timeout_s)


def _secret(keys: KeyRing | None, key_id: int) -> bytes:
    if keys is None:
        if key_id != 0:
            raise NotAuthentic("whoever called has a key, and we have none")
        return _NO_SECRET
    secret = secret_of(keys, key_id, _PURPOSE)
    if secret is None:
        raise NotAuthentic(f"whoever called uses key {key_id}, which we do not have")
    return secret


def _directions(secret: bytes, teller: bytes, listener: bytes) -> tuple[bytes, bytes]:
    """Keys of what the teller says, and of what the listener says."""
    both = hmac.digest(secret, teller + listener, "sha256")
    return hmac.digest(both, b"told", "sha256"), hmac.digest(both, b"asked", "sha256")


def check_reach(host: str, keys: KeyRing | None, here: bool) -> None:
    """
    Raises:
        InvalidInput: an address beyond this computer, without keys.
    """
    if keys is None and not here:
        raise InvalidInput(
            f"replicas at {host!r} are beyond this computer: give all of them a file of keys (skymemory keys new), "
            "else whoever reaches the port can steer requests"
        )
