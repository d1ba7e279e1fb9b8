"""Messages between replicas of a router: MessagePack, bounded, with ages instead of times, as clocks differ.

A replica numbers its changes. ``Changes`` carries some of them, ``Snapshot`` its state instead of all before
``next_number``. A replica that misses some asks for a snapshot (``Wanted``).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from skymemory.errors import InvalidInput

VERSION = 1
MAX_MESSAGE_BYTES = 4 << 20
MAX_NAME = 4096
MAX_COUNT = 2**53
SENDER_BYTES = 16
_Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
_Tokens = Annotated[float, msgspec.Meta(ge=0.0, le=2.0**53)]
_Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
_Sender = Annotated[bytes, msgspec.Meta(min_length=SENDER_BYTES, max_length=SENDER_BYTES)]


class Booking(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Request that a replica sent to a server and that is not answered."""

    number: _Count
    """Number of the request, unique to its sender."""
    server: _Name
    age_s: _Seconds
    """Seconds since it was sent."""
    left_s: _Seconds
    """Seconds from now for which it counts at most."""
    work_s: _Seconds
    """Estimated seconds of its prefill, alone."""
    ttft_s: _Seconds
    """Estimated seconds from sending to the first byte."""
    prompt_tokens: _Count
    backlog_tokens: _Count
    """Prompt tokens that the server is believed to lack."""
    output_tokens: _Count
    """Expected tokens of the answer; 0: unknown."""
    streams: bool
    computes: bool
    """True until its first byte."""
    blocks: bytes = b""
    """Leading block hashes of its prompt until the first byte, eight bytes each."""


class FirstByte(msgspec.Struct, frozen=True, array_like=True, tag=2):
    number: _Count
    age_s: _Seconds


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=3):
    number: _Count
    age_s: _Seconds


class Measured(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Prefill whose duration a replica has measured, or the means of some."""

    server: _Name
    tokens: _Tokens
    cached: _Tokens
    seconds: _Seconds


ChangeMessage = Booking | FirstByte | Ended | Measured


class Changes(msgspec.Struct, frozen=True, array_like=True, tag="changes"):
    version: int
    sender: _Sender
    first: _Count
    """Number of the first change."""
    changes: tuple[ChangeMessage, ...]
    deltas: bytes = b""
    """Packed deltas of the prefix index (``replicated.pack_delta``)."""


class Snapshot(msgspec.Struct, frozen=True, array_like=True, tag="snapshot"):
    version: int
    sender: _Sender
    next_number: _Count
    bookings: tuple[Booking, ...]
    measured: tuple[Measured, ...] = ()


class Wanted(msgspec.Struct, frozen=True, array_like=True, tag="wanted"):
    """Request to the replica ``of`` for a snapshot."""

    version: int
    sender: _Sender
    of: _Sender


class Left(msgspec.Struct, frozen=True, array_like=True, tag="left"):
    """The sender stops."""

    version: int
    sender: _Sender


Message = Changes | Snapshot | Wanted | Left
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


def pack_message(message: Message) -> bytes:
    return _encode(message)


def unpack_message(data: bytes) -> Message:
    """Return the message in ``data``.

    Raises:
        InvalidInput: too long, no valid message, or of another version.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise InvalidInput(f"a message of {len(data)} bytes: expected at most {MAX_MESSAGE_BYTES}")
    try:
        message: Message = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"an invalid message of a replica: {error}") from None
    if message.version != VERSION:
        raise InvalidInput(f"a message of version {message.version}: this release reads version {VERSION}")
    return message
