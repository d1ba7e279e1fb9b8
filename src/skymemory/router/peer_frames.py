"""Frames on a connection between two routers.

Each side begins with ``MAGIC`` and a frame with its ``Hello``. A frame is a length (4 bytes, little-endian) and a
message; with keys, a MAC of 16 bytes over both sides' nonces, the frame's number and the message follows.
"""

from __future__ import annotations

import hmac
import os
import struct
import time
from asyncio import StreamReader
from dataclasses import dataclass
from typing import Annotated

import msgspec

from skymemory.conductor.sharing.messages import MAX_MESSAGE_BYTES, SENDER_BYTES, VERSION
from skymemory.errors import InvalidInput
from skymemory.keys import KeyRing

MAGIC = b"SKYROUT\n"
_LENGTH = struct.Struct("<I")
_MAC_BYTES = 16
_NONCE_BYTES = 16
_MAX_HELLO_BYTES = 1024
_PURPOSE = b"skymemory router replicas, peers"


class Hello(msgspec.Struct, frozen=True, array_like=True):
    version: int
    sender: Annotated[bytes, msgspec.Meta(min_length=SENDER_BYTES, max_length=SENDER_BYTES)]
    kind: Annotated[str, msgspec.Meta(max_length=256)]
    """How prompts are cut into blocks."""
    nonce: Annotated[bytes, msgspec.Meta(min_length=_NONCE_BYTES, max_length=_NONCE_BYTES)]
    key_id: Annotated[int, msgspec.Meta(ge=0, le=2**32)] = 0
    """Key of the frames that it sends; 0: none."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Hello).decode


class NotAccepted(InvalidInput):
    """The other side is no replica that this router can exchange with."""


def greeting(sender: bytes, kind: str, keys: KeyRing | None) -> tuple[Hello, bytes]:
    """Return this side's hello, and its bytes."""
    key_id = 0 if keys is None else keys.active(time.time()).key_id
    hello = Hello(VERSION, sender, kind, os.urandom(_NONCE_BYTES), key_id)
    packed = _encode(hello)
    return hello, MAGIC + _LENGTH.pack(len(packed)) + packed


async def read_greeting(reader: StreamReader) -> Hello:
    """Read the other side's hello; the caller limits the time.

    Raises:
        NotAccepted: another protocol or version.
        EOFError: the connection ended.
    """
    magic = await reader.readexactly(len(MAGIC))
    if magic != MAGIC:
        raise NotAccepted(f"another protocol: it begins with {magic.hex()}")
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if size > _MAX_HELLO_BYTES:
        raise NotAccepted(f"a hello of {size} bytes")
    try:
        hello = _decode(await reader.readexactly(size))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NotAccepted(f"an invalid hello: {error}") from None
    if hello.version != VERSION:
        raise NotAccepted(f"a router of version {hello.version} of the exchange; this release has version {VERSION}")
    return hello


@dataclass(slots=True)
class FrameCodec:
    """Frames of both directions, after the hellos."""

    own: Hello
    other: Hello
    _send_key: bytes = b""
    _receive_key: bytes = b""
    _sent: int = 0
    _received: int = 0

    @classmethod
    def of(cls, own: Hello, other: Hello, keys: KeyRing | None) -> FrameCodec:
        """Return the codec.

        Raises:
            NotAccepted: other blocks, or an unknown key.
        """
        if other.kind != own.kind:
            raise NotAccepted(f"a router with blocks of kind {other.kind!r}; this router's are {own.kind!r}")
        if keys is None:
            if other.key_id:
                raise NotAccepted("a router with keys; this router has none (replicas: keys)")
            return cls(own, other)
        send_key, receive_key = keys.find(own.key_id), keys.find(other.key_id)
        if send_key is None or receive_key is None:
            raise NotAccepted(f"a router with key {other.key_id}, which this router's file of keys lacks")
        return cls(own, other, send_key.derive(_PURPOSE), receive_key.derive(_PURPOSE))

    def pack(self, message: bytes) -> bytes:
        mac = _mac(self._send_key, self.own, self.other, self._sent, message)
        self._sent += 1
        return _LENGTH.pack(len(message)) + message + mac

    async def read(self, reader: StreamReader) -> bytes:
        """Read a message; the caller limits the time.

        Raises:
            NotAccepted: too long, or not authentic.
            EOFError: the connection ended.
        """
        (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if size > MAX_MESSAGE_BYTES:
            raise NotAccepted(f"a message of {size} bytes")
        message = await reader.readexactly(size)
        if self._receive_key:
            expected = _mac(self._receive_key, self.other, self.own, self._received, message)
            if not hmac.compare_digest(expected, await reader.readexactly(_MAC_BYTES)):
                raise NotAccepted("a message that is not authentic")
        self._received += 1
        return message


def _mac(secret: bytes, sender: Hello, receiver: Hello, number: int, message: bytes) -> bytes:
    # Both nonces and the number make each MAC fresh; the ids differ by direction.
    if not secret:
        return b""
    head = sender.sender + sender.nonce + receiver.sender + receiver.nonce + number.to_bytes(8, "little")
    return hmac.digest(secret, head + message, "sha256")[:_MAC_BYTES]
