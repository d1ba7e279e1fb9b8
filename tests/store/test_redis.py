"""The Redis store over a real server: the contract, and a server that restarts, hangs, is full or lies."""

from __future__ import annotations

import math
import shutil
import signal
import socket
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.contract.store_contract import Clock, StoreContract, Tier, key, value
from tests.store.real_redis import RedisServer

from skymemory.errors import InvalidInput, MissingExtra, ValueTooLarge
from skymemory.kv.block import OpaqueLayout
from skymemory.kv.value import PAYLOAD_AT, block_header
from skymemory.store import redis
from skymemory.store.base import Presence
from skymemory.store.redis import NAMESPACE, RedisLink, RedisStore, opened, pack, trailer_of

PATIENCE_S = 10.0
"""For a server that answers: beside other programs it takes its time."""


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RedisServer]:
    directory = Path(tempfile.mkdtemp())  # a socket's path must be short
    server = RedisServer(directory)
    yield server
    server.stop()
    shutil.rmtree(directory)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    directory = Path(tempfile.mkdtemp())
    server = RedisServer(directory, "--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    yield server
    server.stop()
    shutil.rmtree(directory)


def until(true: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + 60
    while not true():
        assert time.monotonic() < ends_s
        time.sleep(0.005)


class TestRedis(StoreContract):
    can = frozenset({"clock", "outage"})

    @pytest.fixture
    def tier(self, shared_server: RedisServer) -> Iterator[Tier]:
        raw = RedisLink(shared_server.url, 2.0)
        raw.ask([pack(b"FLUSHALL")], 1)
        raw.close()
        clock = Clock()
        store = RedisStore(shared_server.url, timeout_s=PATIENCE_S, clock=clock)

        @contextmanager
        def outage() -> Iterator[None]:
            shared_server.process.send_signal(signal.SIGSTOP)
            store._link._timeout_s = 0.5
            yield
            store._link._timeout_s = PATIENCE_S
            shared_server.process.send_signal(signal.SIGCONT)
            clock.later(5.0)  # it rests after a timeout

        yield Tier(
            store,
            pins=False,
            leases=False,
            another=lambda: RedisStore(shared_server.url),
            later=clock.later,
            outage=outage,
        )
        store.close()


def _raw(server: RedisServer, *arguments: bytes) -> object:
    raw = RedisLink(server.url, 2.0)
    (reply,) = raw.ask([pack(*arguments)], 1)
    raw.close()
    return reply


def test_values_expire(server: RedisServer) -> None:
    store = RedisStore(server.url)
    store.put_many([(key(number), value(number)) for number in range(4)])
    assert store.expire([key(1), key(2), key(3), key(9)], 0.1) == [True, True, True, False]
    assert store.expire([key(2), key(0), key(9)], math.inf) == [True, True, False]
    store.put_many([(key(3), value(5))])
    time.sleep(0.15)
    assert store.get_many([key(number) for number in range(4)]) == [value(0), None, value(2), value(5)]
    assert store.expire([key(0)], 0.0) == [True] and store.lookup([key(0)]) == [Presence.MISS]
    server.stop()
    assert store.expire([key(2)], 1.0) == store.expire([key(2)], math.inf) == [False]
    store.close()


def test_more_values_than_go_at_once_come_back_in_order(server: RedisServer) -> None:
    store = RedisStore(server.url)
    items = [(key(n), value(n, 5000 + n)) for n in range(50)]
    assert store.put_many(items) == [True] * 50
    assert store.get_many([k for k, _ in items]) == [v for _, v in items]
    assert store.prefix([key(n) for n in range(700)]) == 50
    store.close()


@pytest.mark.parametrize("at", [0, 500, 999, 1000, 1003, 1007])
def test_a_flipped_byte_is_a_miss_counted_and_deleted(server: RedisServer, at: int) -> None:
    store = RedisStore(server.url)
    store.put_many([(key(1), value(1)), (key(2), value(2))])
    whole = bytearray(_raw(server, b"GET", NAMESPACE + key(1)))  # type: ignore[arg-type]
    whole[at] ^= 1
    _raw(server, b"SET", NAMESPACE + key(1), bytes(whole))
    ticket = store.prepare_load([key(1), key(2)])
    assert store.complete_load(ticket) == [None, value(2)]
    assert ticket.report is not None and ticket.report.keys[0].reason == "corrupt"
    assert store.stats()["failed{corrupt}_total"] == 1
    assert _raw(server, b"EXISTS", NAMESPACE + key(1)) == 0
    store.close()


def test_a_value_under_anothers_key_is_a_miss(server: RedisServer) -> None:
    store = RedisStore(server.url)
    store.put_many([(key(1), value(1))])
    _raw(server, b"RENAME", NAMESPACE + key(1), NAMESPACE + key(2))
    assert store.get_many([key(2)]) == [None]
    _raw(server, b"SET", NAMESPACE + key(3), b"short")
    _raw(server, b"LPUSH", NAMESPACE + key(4), b"not a string")
    assert store.lookup([key(3), key(4)]) == [Presence.MISS] * 2
    assert store.get_many([key(3), key(4)]) == [None, None]
    store.close()


def test_a_restarted_server_is_used_again(server: RedisServer) -> None:
    store = RedisStore(server.url)
    assert store.put_many([(key(1), value(1))]) == [True]
    server.stop()
    ticket = store.prepare_load([key(1), key(2)])
    assert store.complete_load(ticket) == [None, None]
    assert ticket.report is not None and {report.reason for report in ticket.report.keys} == {"unreachable"}
    assert store.put_many([(key(1), value(1))]) == [False]
    assert store.lookup([key(1)]) == [Presence.MISS] and store.delete([key(1)]) == [None]
    assert store.estimate_load_s([key(1)], 0.0) == math.inf
    server.start()
    assert store.put_many([(key(1), value(7))]) == [True]
    assert store.get_many([key(1)]) == [value(7)]
    store.close()


def test_a_server_that_hangs_costs_one_timeout(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    waits_s: list[float] = []
    begin = redis.CallDeadline.begin

    def begun(patience: redis.CallDeadline, timeout_s: float) -> None:
        if timeout_s != redis._PROBE_S:
            waits_s.append(timeout_s)
        begin(patience, timeout_s)

    clock = Clock()
    store = RedisStore(server.url, timeout_s=PATIENCE_S, clock=clock)
    assert store.put_many([(key(1), value(1))]) == [True]
    server.process.send_signal(signal.SIGSTOP)
    store._link._timeout_s = 0.2
    monkeypatch.setattr(redis.CallDeadline, "begin", begun)
    started_s = time.monotonic()
    for _ in range(5):
        assert store.get_many([key(1)]) == [None]
    assert time.monotonic() - started_s > 0.15 and waits_s == [0.2], "one timeout, then rest"
    server.process.send_signal(signal.SIGCONT)
    clock.now_s += redis._REST_S
    store._link._timeout_s = PATIENCE_S
    assert store.get_many([key(1)]) == [value(1)]  # and not the answer to an earlier question
    store.close()


def test_a_server_that_goes_on_is_used_at_once(server: RedisServer) -> None:
    """The clock stands still, so that no rest ends by itself."""
    store = RedisStore(server.url, timeout_s=PATIENCE_S, clock=Clock())
    assert store.put_many([(key(1), value(1))]) == [True]
    server.process.send_signal(signal.SIGSTOP)
    store._link._timeout_s = 0.2
    assert store.get_many([key(1)]) == [None]
    store._link._timeout_s = PATIENCE_S
    assert store.get_many([key(1)]) == [None], "it rests"
    server.process.send_signal(signal.SIGCONT)
    until(lambda: store.get_many([key(1)]) == [value(1)])
    store.close()


def test_a_server_that_answers_a_greeting_and_no_more_is_rested_from() -> None:
    asked: list[bytes] = []

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while data := connection.recv(65536):
                asked.extend(word for word in (b"PING", b"STRLEN") if word in data)
                if b"STRLEN" not in data:
                    connection.sendall(b"-ERR unknown\r\n" * data.count(b"*"))

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        store = RedisStore(f"redis://127.0.0.1:{listening.getsockname()[1]}?protocol=2", timeout_s=0.3, clock=Clock())
        until(lambda: store.lookup([key(1)]) == [Presence.MISS] and asked.count(b"STRLEN") == 2)
        for _ in range(20):
            assert store.lookup([key(1)]) == [Presence.MISS]
            time.sleep(0.01)
        assert asked.count(b"STRLEN") == 2 and asked.count(b"PING") == 1
        store.close()


def test_a_full_server_refuses_and_the_rest_goes_on(server: RedisServer) -> None:
    store = RedisStore(server.url)
    stored = store.put_many([(key(n), bytes(1 << 20)) for n in range(12)])
    assert stored[0] and not stored[-1] and sorted(stored, reverse=True) == stored
    assert store.stats()["failed{refused}_total"] == stored.count(False)
    assert store.prefix([key(n) for n in range(12)]) == stored.count(True)
    store.close()


def test_no_listener_is_a_miss_at_once() -> None:
    pytest.importorskip("redis")
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # bound, and not listening
        store = RedisStore(f"redis://127.0.0.1:{reserved.getsockname()[1]}/0")
        started_s = time.monotonic()
        assert store.get_many([key(1)]) == [None] and store.put_many([(key(1), b"x")]) == [False]
        assert time.monotonic() - started_s < 10
        store.close()


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of a server that does ``answer`` with every connection until that fails."""
    pytest.importorskip("redis")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve(connection: socket.socket) -> None:
            with suppress(OSError), connection:
                while connection.recv(1 << 16):
                    answer(connection)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=serve, args=server.accept()[:1], daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}/0"


STRANGE = (
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"$-7\r\n",
    b"*2\r\n",
    b"+OK\r\n",
    b":5\r\n",
    b"$-1\r\n",
    b"_\r\n",
    b"#t\r\n",
    b",abc\r\n",
    b"*1\r\n$2\r\nhi\r\n",
    b"%1\r\n*1\r\n+a\r\n:9\r\n",
    b"%1\r\n%0\r\n+b\r\n",
    b"|1\r\n+a\r\n+b\r\n+OK\r\n",
    b"$99999999999999999999\r\n",
    b"+\xff\xfe\r\n",
    b"\r\n",
    b"-NOAUTH x\r\n",
    b"!5\r\nERR a\r\n",
)
"""Answers to a greeting. Some pass for one, and then for a stored value."""


@pytest.mark.brief(every=5)
@pytest.mark.parametrize("banner", STRANGE)
@pytest.mark.parametrize("who", ["", ":word@", "user:word@"])
def test_who_does_not_speak_redis_is_a_miss(banner: bytes, who: str) -> None:
    passes = banner == b"+OK\r\n" and who != ""
    with answering(lambda connection: connection.sendall(banner)) as address:
        store = RedisStore(f"redis://{who}{address}", timeout_s=PATIENCE_S if passes else 0.1)
        assert store.get_many([key(1)]) == [None] and store.lookup([key(1)]) == [Presence.MISS]
        assert store.put_many([(key(1), b"x")]) == [passes]
        assert store.delete([key(1)]) in ([None], [False])
        store.close()


def test_a_greeting_that_is_no_map_is_counted() -> None:
    with answering(lambda connection: connection.sendall(b"+OK\r\n")) as address:
        store = RedisStore(f"redis://{address}")
        assert store.get_many([key(1)]) == [None] and store.stats()["strange_replies_total"] == 1
        store.close()


@pytest.mark.parametrize("greeted", [True, False])
def test_a_server_that_answers_byte_by_byte_costs_one_timeout(greeted: bool) -> None:
    """Each byte comes well before the next is given up, the answer never."""
    asked: list[float] = []

    def answer(connection: socket.socket) -> None:
        asked.append(time.monotonic())
        if greeted and len(asked) < 3:  # HELLO, then SETINFO twice
            connection.sendall(b"%1\r\n+proto\r\n:3\r\n" if len(asked) == 1 else b"+OK\r\n+OK\r\n")
            return
        connection.sendall(b"$1000\r\n")
        for _ in range(400):
            time.sleep(0.05)
            connection.sendall(b"x")

    with answering(answer) as address:
        store = RedisStore(f"redis://{address}", timeout_s=0.3)
        started_s = time.monotonic()
        assert store.get_many([key(1)]) == [None]
        assert time.monotonic() - started_s < 10, "not the 20 seconds that the bytes take"
        store.close()


def test_a_server_that_is_slow_and_not_broken_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes take longer than the timeout, at more than the least rate."""
    monkeypatch.setattr(redis, "MIN_BYTES_PER_S", 1e5)
    patience = redis.CallDeadline()
    here, there = socket.socketpair()
    with here, there:
        slow = redis._DeadlineSocket(here, patience)
        patience.begin(0.2)

        def send() -> None:
            for _ in range(10):
                there.sendall(bytes(10_000))
                time.sleep(0.05)

        sender = threading.Thread(target=send)
        sender.start()
        started_s = time.monotonic()
        got = 0
        while got < 100_000:
            got += len(slow.recv(1 << 16))
        assert time.monotonic() - started_s > 0.3
        sender.join()
        with pytest.raises(TimeoutError):
            patience.begin(0.0)
            slow.recv(1)


def test_an_interrupted_caller_leaves_no_reply_to_the_next(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RedisStore(server.url)
    store.put_many([(key(n), value(n)) for n in range(2)])
    reply, asked = store._link._reply, []

    def interrupted(connection: object) -> object:
        asked.append(1)
        if len(asked) == 1:
            raise KeyboardInterrupt
        return reply(connection)

    monkeypatch.setattr(store._link, "_reply", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.get_many([key(0)])
    assert store.get_many([key(1)]) == [value(1)]
    store.close()


def test_what_can_not_be_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("redis")
    for url in ("http://host", "redis://host:port/0"):
        with pytest.raises(InvalidInput):
            RedisStore(url)
    with pytest.raises(InvalidInput, match="timeout"):
        RedisStore("redis://localhost", timeout_s=0.0)
    store = RedisStore("redis://localhost")
    monkeypatch.setattr("skymemory.store.redis._LARGEST_BYTES", 10)
    with pytest.raises(ValueTooLarge, match="Redis"):
        store.put_many([(key(1), bytes(11))])
    store.close()
    monkeypatch.setitem(__import__("sys").modules, "redis", None)
    with pytest.raises(MissingExtra, match=r"pip install .*\[redis\]"):
        RedisStore("redis://localhost")


def test_large_pieces_are_sent_as_they_are() -> None:
    data = memoryview(bytes(10_000))
    pieces = pack(b"SET", b"k", (data, b"tail"))
    assert pieces[1] is data
    assert b"".join(pieces) == b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$10004\r\n" + bytes(10_000) + b"tail\r\n"


LAYOUT = OpaqueLayout("test", 32, 50)


@given(st.binary(min_size=50, max_size=50), st.integers(0, 177), st.integers(0, 255))
@example(bytes(50), 127, 1)
@example(bytes(50), 128, 1)
def test_a_blocks_trailer_is_made_of_its_headers_crc(payload: bytes, at: int, flips: int) -> None:
    """It is what reading the block would give; of a damaged one it is what makes the receiver notice."""
    block = bytearray(block_header(key(1), LAYOUT, 0, payload) + payload)
    whole = zlib.crc32(block, zlib.crc32(key(1))).to_bytes(4, "little")
    assert trailer_of(key(1), memoryview(block))[-4:] == whole
    assert opened(key(1), bytes(block) + trailer_of(key(1), memoryview(block))) == block
    under_another = trailer_of(key(2), memoryview(block))
    assert under_another[-4:] == zlib.crc32(block, zlib.crc32(key(2))).to_bytes(4, "little")
    block[at] ^= flips
    found = opened(key(1), bytes(block) + trailer_of(key(1), memoryview(block)))
    assert found == ("corrupt" if flips and at >= PAYLOAD_AT else block), "a damaged header is the reader's to find"
