"""Requests that a client sends without waiting are one call of the store, with the same replies."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract.store_contract import key, value
from tests.store.redis_server.daemons import serving, until

from skymemory.store.base import LoadTicket, StoreTicket
from skymemory.store.memory import MemoryStore
from skymemory.store.redis import NAMESPACE, RedisStore, trailer_of
from skymemory.store.redis_server.commands import RUN_VALUES
from skymemory.store.redis_server.daemon import ServerLimits


class Counting(MemoryStore):
    """Not read and written in place as a plain memory store; counts the values of each call."""

    def __init__(self, budget_bytes: int) -> None:
        super().__init__(budget_bytes)
        self.loads: list[int] = []
        self.puts: list[int] = []

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        self.loads.append(len(ticket.keys))
        return super().complete_load(ticket)

    def complete_store(self, ticket: StoreTicket) -> list[bool]:
        self.puts.append(len(ticket.items))
        return super().complete_store(ticket)


@contextmanager
def talking(path: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(path)
        yield sock


def request(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


@pytest.mark.parametrize("size", [100, 100_000])
def test_a_pipeline_is_few_calls_of_the_store(short: Path, size: int) -> None:
    with Counting(1 << 28) as store, serving(store, short) as (path, _, commands), RedisStore(f"unix://{path}") as one:
        items = [(key(number), value(number, size)) for number in range(40)]
        assert one.put_many(items) == [True] * 40
        assert sum(store.puts) == 40 and max(store.puts) > 1, store.puts  # as many as the client was ahead
        keys = [key(99), *(key(number) for number in range(40))]
        for _ in range(2):  # the first load learns how large values are
            store.loads.clear()
            got = one.get_many(keys)
            assert got[0] is None and [bytes(each) for each in got[1:] if each is not None] == [v for _, v in items]
        assert store.loads == [41]
        assert commands.counters.as_dict()["stored"] == 40
        until(lambda: commands.budget.used_bytes == 0)  # given back once the replies are sent


def test_a_run_ends_by_number_and_by_bytes(short: Path) -> None:
    with Counting(1 << 28) as store, serving(store, short) as (path, _, _):
        pipe = redis.Redis(unix_socket_path=path).pipeline(transaction=False)
        for number in range(200):
            pipe.get(f"small {number}")
        assert pipe.execute() == [None] * 200
        assert max(store.loads) <= RUN_VALUES and sum(store.loads) == 200
        large = value(1, 5 << 20)
        for number in range(4):
            pipe.set(f"large {number}", large)
        assert pipe.execute() == [True] * 4 and max(store.puts) <= 2
        store.loads.clear()
        for number in range(4):
            pipe.get(f"large {number}")
        assert pipe.execute() == [large] * 4 and store.loads == [2, 2]


KEYS = [b"a", b"b", NAMESPACE + key(1)]
steps = st.lists(
    st.tuples(
        st.sampled_from(["GET", "GET", "GET", "SET", "SET", "SET", "DEL", "MGET", "SETEX", "STRLEN", "NONE"]),
        st.integers(0, 2),
        st.sampled_from([0, 3, 40_000]),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(steps=steps, cuts=st.lists(st.integers(1, 5000), max_size=6))
def test_replies_are_those_of_one_request_after_the_other(pipelines: str, steps: list[Any], cuts: list[int]) -> None:
    held: dict[bytes, bytes] = {}
    data, expected = request(b"DEL", *KEYS), b""
    for number, (verb, at, size) in enumerate(steps):
        name = KEYS[at]
        text = value(number, size)
        if name.startswith(NAMESPACE):
            text += trailer_of(key(1), memoryview(text))
        if verb in ("SET", "SETEX"):
            data += request(b"SET", name, text, *((b"EX", b"1000") if verb == "SETEX" else ()))
            held[name] = text
            expected += b"+OK\r\n"
        elif verb == "DEL":
            data += request(b"DEL", name)
            expected += b":%d\r\n" % (held.pop(name, None) is not None)
        elif verb == "STRLEN":
            data += request(b"STRLEN", name)
            expected += b":%d\r\n" % len(held.get(name, b""))
        elif verb == "NONE":
            data += request(b"LPUSH", name)
            expected += b"-ERR unknown command 'LPUSH'"
        else:
            data += request(*([b"MGET", name, b"c"] if verb == "MGET" else [b"GET", name]))
            expected += b"*2\r\n" if verb == "MGET" else b""
            expected += b"$%d\r\n%s\r\n" % (len(held[name]), held[name]) if name in held else b"$-1\r\n"
            expected += b"$-1\r\n" if verb == "MGET" else b""
    with talking(pipelines) as sock:

        def send() -> None:
            rest = data
            for cut in cuts:
                sock.sendall(rest[:cut])
                rest = rest[cut:]
            sock.sendall(rest)
            sock.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        replies = b"".join(iter(lambda: sock.recv(1 << 20), b""))
        sender.join()
    said = replies.partition(b"\r\n")[2]  # behind the reply to DEL
    end = said.find(b", expected one of")
    while end >= 0:
        said = said[:end] + said[said.index(b"\r\n", end) + 2 :]
        end = said.find(b", expected one of")
    assert said == expected


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp())
    try:
        with Counting(1 << 26) as store, serving(store, folder) as (path, _, commands):
            yield path
            until(lambda: commands.budget.used_bytes == 0)
    finally:
        shutil.rmtree(folder)


def test_one_bad_value_costs_no_other_its_place(short: Path) -> None:
    """A block whose trailer is wrong, and a value that can never fit."""
    with Counting(1 << 20) as store, serving(store, short) as (path, _, _), talking(path) as sock:
        good = [(key(number), value(number, 50_000)) for number in range(3)]
        words = [request(b"SET", NAMESPACE + k, v + trailer_of(k, memoryview(v))) for k, v in good]
        words.insert(1, request(b"SET", NAMESPACE + key(9), value(9, 40_000)))
        words.insert(3, request(b"SET", b"huge", bytes(2 << 20)))
        sock.sendall(b"".join(words))
        replies = [sock.recv(4096)]
        while sum(reply.count(b"\r\n") for reply in replies) < 5:
            replies.append(sock.recv(4096))
        first, second, third, fourth, fifth, _ = b"".join(replies).split(b"\r\n")
        assert (first, third, fifth) == (b"+OK",) * 3
        assert b"mark and a CRC" in second and b"does not fit" in fourth, (second, fourth)
        assert [bytes(one or b"") for one in store.get_many([k for k, _ in good])] == [v for _, v in good]


def test_a_reply_waits_for_no_request_that_is_half_here(short: Path) -> None:
    with Counting(1 << 24) as store, serving(store, short) as (path, _, _), talking(path) as sock:
        begin = b"*3\r\n$3\r\nSET\r\n$1\r\nb\r\n"
        for begun in (begin, begin + b"$50000\r\nxxx", b"*2\r\n$3\r\nGE"):
            sock.sendall(request(b"SET", b"a", b"1") + begun)
            assert sock.recv(100) == b"+OK\r\n"
            sock.close()
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(60)
            sock.connect(path)
        sock.close()


def test_pipelines_of_many_clients_wait_for_no_room_that_they_hold(short: Path) -> None:
    """Each holds values that are not stored yet, and wants room for the next."""
    rng = random.Random(1)
    with (
        Counting(1 << 26) as store,
        serving(store, short, in_flight_bytes=400_000, wait_s=20.0) as (path, _, commands),
    ):
        answers: list[list[Any]] = []

        def write(number: int) -> None:
            pipe = redis.Redis(unix_socket_path=path).pipeline(transaction=False)
            for at in range(12):
                pipe.set(f"{number} {at}", bytes(rng.randrange(100_000, 150_000)))
            answers.append(pipe.execute())

        threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert answers == [[True] * 12] * 6
        until(lambda: commands.budget.used_bytes == 0)


def test_a_client_that_goes_in_the_middle_loses_nothing_that_came_whole(short: Path) -> None:
    """The rest of the second value is more than one read, so that the first waits for it."""
    with Counting(1 << 24) as store, serving(store, short) as (path, _, commands):
        with talking(path) as sock:
            begun = b"*3\r\n$3\r\nSET\r\n$1\r\nb\r\n$50000\r\n" + bytes(30_000)
            sock.sendall(request(b"SET", b"a", bytes(40_000)) + begun)
        until(lambda: commands.counters.as_dict().get("stored") == 1)
        until(lambda: commands.connected == 0 and commands.budget.used_bytes == 0)
        assert store.puts == [1]


# --- a client that reads nothing before all is sent ---


@pytest.mark.brief(every=3)
@pytest.mark.parametrize("kind", [MemoryStore, Counting])
@pytest.mark.parametrize("large", [200_000, 3 << 20])
def test_a_pipeline_may_be_written_whole_before_a_reply_is_read(
    short: Path, kind: type[MemoryStore], large: int
) -> None:
    """Its replies, and its requests, are more than the socket takes in either direction."""
    with kind(1 << 27) as store, serving(store, short) as (path, _, commands), talking(path) as sock:
        texts = [value(number, large) for number in range(4)]
        sock.sendall(b"".join(request(b"SET", b"%d" % number, text) for number, text in enumerate(texts)))
        assert read(sock, 4 * 5) == b"+OK\r\n" * 4
        words, replies = list[bytes](), list[bytes]()
        for turn in range(8):
            number = turn % 4
            words += [request(b"GET", b"%d" % number), request(b"SET", b"%d" % number, texts[(turn + 1) % 4])]
            replies += [b"$%d\r\n%s\r\n" % (large, texts[number]), b"+OK\r\n"]
            texts[number] = texts[(turn + 1) % 4]
        sock.sendall(b"".join(words))
        assert read(sock, sum(map(len, replies))) == b"".join(replies)
        until(lambda: commands.budget.used_bytes == 0)


@pytest.mark.brief()
def test_many_small_requests_are_written_before_a_reply_is_read(short: Path) -> None:
    with MemoryStore(1 << 24) as store, serving(store, short) as (path, _, commands), talking(path) as sock:
        sock.sendall(request(b"SET", b"a", bytes(1000)) + request(b"GET", b"a") * 20_000)
        assert read(sock, 5 + 20_000 * 1009) == b"+OK\r\n" + (b"$1000\r\n" + bytes(1000) + b"\r\n") * 20_000
        until(lambda: commands.budget.used_bytes == 0)


def test_what_is_read_ahead_is_bounded_and_who_reads_nothing_is_ended(short: Path) -> None:
    with (
        MemoryStore(1 << 24) as store,
        serving(store, short, ServerLimits(stall_s=0.5), in_flight_bytes=3 << 20) as (path, _, commands),
        talking(path) as sock,
    ):
        sock.sendall(request(b"SET", b"a", bytes(1 << 20)))
        assert read(sock, 5) == b"+OK\r\n"
        with pytest.raises(ConnectionError):
            for _ in range(100):
                sock.sendall(request(b"GET", b"a") + request(b"SET", b"a", bytes(1 << 20)))
                assert commands.budget.used_bytes <= 3 << 20
        until(lambda: commands.budget.used_bytes == 0 and commands.connected == 0)
        assert redis.Redis(unix_socket_path=path).info()["stalled_connections"] == 1


def read(sock: socket.socket, size_bytes: int) -> bytes:
    """This many bytes."""
    parts = bytearray()
    while len(parts) < size_bytes and (part := sock.recv(1 << 20)):
        parts += part
    return bytes(parts)
