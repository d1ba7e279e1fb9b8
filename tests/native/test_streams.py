"""Values and requests from stream sockets: compiled and twin alike, however the stream is cut."""

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


def received(
    module: ModuleType, head: bytes, size_bytes: int, tail_bytes: int, pieces: list[bytes], *, ends: bool
) -> tuple[bytes, bytes] | str:
    """What ``receive_all`` makes of ``pieces``, each sent alone, with what follows; the kind of its error."""
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
        tail = bytearray(tail_bytes)
        return bytes(module.receive_all(ours.fileno(), head, size_bytes, 10.0, tail)), bytes(tail)
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
    st.integers(0, 3),
    st.lists(st.integers(1, 70_000), max_size=8),
    st.integers(-2, 2),
    st.booleans(),
)
def test_both_make_the_same_of_any_stream(
    head: bytes, size: int, tail: int, cuts: list[int], more: int, ends: bool
) -> None:
    data = random.Random(size).randbytes(max(0, size + tail + more))
    pieces, at = [], 0
    for cut in cuts:
        pieces.append(data[at : at + cut])
        at += cut
    pieces.append(data[at:])
    twin, fast = (received(module, head, size, tail, pieces, ends=ends) for module in IMPLEMENTATIONS)
    broken = "ConnectionError" if ends else "BlockingIOError"
    assert twin == fast == ((head + data[:size], data[size : size + tail]) if len(data) >= size + tail else broken)


def test_a_stream_that_drips_ends_at_its_time(impl: ModuleType) -> None:
    ours, theirs = socket.socketpair()
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.01):
            theirs.send(b"x")

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 300_000))
        began_s = time.monotonic()
        with pytest.raises(TimeoutError, match="did not come in time"):
            impl.receive_all(ours.fileno(), b"", 1 << 20, 0.2, bytearray(2))
        assert 0.2 <= time.monotonic() - began_s < 5
    finally:
        stop.set()
        dripping.join()
        ours.close()
        theirs.close()


def test_a_size_below_nothing_is_refused(impl: ModuleType) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ValueError, match="-1 bytes"):
        impl.receive_all(ours.fileno(), b"", -1, 1.0, bytearray(2))
    with pytest.raises(OSError, match="descriptor"):
        impl.receive_all(-1, b"", 1, 1.0, bytearray(2))


# --- the words of a request ---


def requests() -> st.SearchStrategy[bytes]:
    """Requests as clients write them, some with a byte changed, cut or added."""
    word = st.binary(max_size=12)
    whole = st.lists(word, max_size=5).map(
        lambda words: b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(one), one) for one in words)
    )
    pieces = st.sampled_from([b"*2\r\n", b"*", b"$", b"$3\r\n", b"\r\n", b"\n", b"0", b"12345678901234", b"-1", b"abc"])
    return st.lists(whole | pieces | st.binary(max_size=3), max_size=5).map(b"".join)


@pytest.mark.skipif(len(IMPLEMENTATIONS) < 2, reason="the compiled helper was not built")
@settings(max_examples=400)
@given(requests(), st.integers(0, 12), st.integers(0, 3), st.integers(0, 4), st.integers(0, 12), st.integers(0, 30))
def test_both_find_the_same_words(
    data: bytes, at: int, missing: int, most_words: int, most_bytes: int, room_bytes: int
) -> None:
    given_to = (at, missing, most_words, most_bytes, room_bytes)
    twin, fast = (module.request_words(bytearray(data), *given_to) for module in IMPLEMENTATIONS)
    assert twin == fast


def test_the_words_of_a_request(impl: ModuleType) -> None:
    data = b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$5\r\nvalue\r\n*1\r\n"
    assert impl.request_words(data, 0, 0, 10, 10, 100) == ([b"SET", b"k", b"value"], len(data) - 4, 0)
    assert impl.request_words(data, 0, 0, 10, 4, 100) == ([b"SET", b"k"], 20, 1), "a large word is left"
    assert impl.request_words(data, 0, 0, 10, 10, 4) == ([b"SET", b"k"], 20, 1), "there is room for four bytes"
    assert impl.request_words(data, 20, 1, 10, 10, 100) == ([b"value"], 31, 0), "the rest, later"
    assert impl.request_words(data[:-6], 20, 1, 10, 10, 100) == ([], 20, 1), "it lacks its end"
    assert impl.request_words(data, 0, 0, 2, 10, 100) == ([], 0, 0), "too many words"
    assert impl.request_words(data, len(data) + 5, 1, 2, 10, 100) == ([], len(data) + 5, 1)
    with pytest.raises(ValueError, match="below 0"):
        impl.request_words(data, -1, 0, 10, 10, 100)
