"""Messages that an engine still has, asked for again over its replay socket.

A ROUTER at the engine's end: asked with an empty frame and a number (8 bytes, big-endian), it sends every message it
keeps from that number on, then the number -1 with nothing behind it. It drops what its own queue cannot take, so an
answer may have holes: whoever reads it minds the numbers.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

import zmq
import zmq.asyncio

from skymemory.router.kv_messages import MAX_MESSAGE_BYTES, SEQUENCE_BYTES

TIMEOUT_S = 2.0
"""For the next messages: the engine looks at the socket between two batches, and every 0.1 s when it has none."""
BETWEEN_S = 0.5
"""Once it answers, it sends all at once. Its last word may be among what it dropped."""
QUEUE_MESSAGES = 20_000
"""More than engines keep: what they send at once should not be dropped for our slowness."""
AT_ONCE = 64
END = b"\xff" * SEQUENCE_BYTES


class NoReplay(Exception):
    """The answer did not come, or stopped short of its end."""


async def replay(
    context: zmq.asyncio.Context, endpoint: str, first: int, timeout_s: float = TIMEOUT_S
) -> AsyncGenerator[list[tuple[int, bytes]], None]:
    """Numbers and payloads of what the engine at ``endpoint`` keeps from ``first`` on, up to ``AT_ONCE`` together.

    Raises:
        NoReplay: nothing within ``timeout_s`` of what came last, or an answer that is none.
    """
    socket = context.socket(zmq.DEALER)
    answers: zmq.Socket[bytes] = zmq.Socket(shadow=socket.underlying)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
        try:
            socket.connect(endpoint)
            answers.send_multipart([b"", first.to_bytes(SEQUENCE_BYTES, "big")], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise NoReplay(f"{endpoint}: {error}") from error
        wait_s = timeout_s
        while True:
            if not await socket.poll(round(wait_s * 1000)):
                raise NoReplay(f"{endpoint} did not answer in {wait_s:g} s")
            wait_s = min(timeout_s, BETWEEN_S)
            messages, ended = _waiting(answers, endpoint)
            if messages:
                yield messages
            if ended:
                return
    finally:
        socket.close(linger=0)


def _waiting(socket: zmq.Socket[bytes], endpoint: str) -> tuple[list[tuple[int, bytes]], bool]:
    """What is here, and whether that was the end."""
    messages: list[tuple[int, bytes]] = []
    while len(messages) < AT_ONCE:
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            break
        if len(frames) < 2 or len(frames[-2]) != SEQUENCE_BYTES:
            raise NoReplay(f"{endpoint} answered with {len(frames)} frames that are no message")
        if frames[-2] == END:
            return messages, True
        messages.append((int.from_bytes(frames[-2], "big"), frames[-1]))
    return messages, False
