"""Values from stream sockets: compiled and twin alike, however the stream is cut."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.native.conftest import IMPLEMENTATIONS


def received(module: ModuleType, head: bytes, size_bytes: int, pieces: list[bytes], *, ends: bool) -> bytes | str:
    """What ``receive_all`` makes of ``pieces``, each sent alone; the kind of its error."""
    ours, theirs = socket.socketpair()

    def send() -> None:
        for piece in pieces:
            theirs.sendall(piece)
            time.sleep(0)
        if ends:
            theirs.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 20_000))
        return bytes(module.receive_all(ours.fileno(), head, size_bytes, 10.0))
    except (OSError, ValueError) as error:
        return type(error).__name__
    finally:
        sender.join()
        ours.close()
        theirs.close()


@pytest.mark.skipif(len(IMPLEMENTATIONS) < 2, reason="the compiled helper was not built")
@settings(max_examples=60)
@given(
    st.binary(max_size=40),
    st.integers(0, 200_000),
    st.lists(st.integers(1, 70_000), max_size=8),
    st.integers(-2, 2),
    st.booleans(),
)
def test_both_make_the_same_of_any_stream(head: bytes, size: int, cuts: list[int], more: int, ends: bool) -> None:
    data = random.Random(size).randbytes(max(0, size + more))
    pieces, at = [], 0
    for cut in cuts:
        pieces.append(data[at : at + cut])
        at += cut
    pieces.append(data[at:])
    twin, fast = (received(module, head, size, pieces, ends=ends) for module in IMPLEMENTATIONS)
    broken = "ConnectionError" if ends else "BlockingIOError"
    assert twin == fast == (head + data[:size] if len(data) >= size else broken)


def test_a_stream_that_drips_ends_at_its_time(impl: ModuleType) -> None:
    ours, theirs = socket.socketpair()
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.01):
            theirs.send(b"x")

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 50_000))
        began_s = time.monotonic()
        with pytest.raises(TimeoutError, match="did not come in time"):
            impl.receive_all(ours.fileno(), b"", 1 << 20, 0.2)
        assert 0.2 <= time.monotonic() - began_s < 5
    finally:
        stop.set()
        dripping.join()
        ours.close()
        theirs.close()


def test_a_size_below_nothing_is_refused(impl: ModuleType) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ValueError, match="-1 bytes"):
        impl.receive_all(ours.fileno(), b"", -1, 1.0)
    with pytest.raises(OSError, match="descriptor"):
        impl.receive_all(-1, b"", 1, 1.0)
