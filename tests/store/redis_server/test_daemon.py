"""The store daemon over real sockets: redis-py and our own client, leases, limits, clients that stall or lie."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis
from tests.contract.store_contract import StoreContract, Tier, key, value
from tests.store.redis_server.daemons import Forgetful, daemon, serving, until

from skymemory.addresses import ListenAddress
from skymemory.errors import InvalidInput
from skymemory.store.memory import MemoryStore
from skymemory.store.named_values import get_named, put_named
from skymemory.store.redis import RedisStore
from skymemory.store.redis_server import daemon as daemon_module
from skymemory.store.redis_server.commands import Commands
from skymemory.store.redis_server.daemon import Daemon, ServerLimits, listen_at


@pytest.fixture(scope="module")
def running() -> Iterator[str]:
    """The socket of a daemon in a process of its own."""
    with daemon("memory://64MiB") as path:
        yield path


class TestOurClientThroughIt(StoreContract):
    """The contract, through the daemon over a memory store; asked by another client, too."""

    can = frozenset[str]()

    @pytest.fixture
    def tier(self, running: str) -> Iterator[Tier]:
        with RedisStore(f"unix://{running}") as store:
            for number in range(80):
                store.delete([key(number)])
            yield Tier(store, pins=False, leases=False, another=lambda: RedisStore(f"unix://{running}"))


def test_a_daemon_that_takes_no_more_connections_is_not_waited_for(short: Path) -> None:
    """It is stopped, and its queue is full: its socket is in use all the same."""
    path = short / "stopped"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0)
        waiting = []
        with pytest.raises(BlockingIOError):
            while True:
                waiting.append(socket.socket(socket.AF_UNIX))
                waiting[-1].setblocking(False)
                waiting[-1].connect(str(path))
        with pytest.raises(OSError, match="in use"):
            listen_at(ListenAddress(path=str(path)))
        for client in waiting:
            client.close()
    listen_at(ListenAddress(path=str(path))).close()


def test_blocks_are_the_store_s_own(short: Path) -> None:
    """What one process stores in the daemon another finds in the store itself, and the other way round."""
    with MemoryStore(1 << 24) as memory, serving(memory, short) as (path, _, _), RedisStore(f"unix://{path}") as client:
        assert client.put_many([(key(1), value(1)), (key(2), value(2, 100_000))]) == [True, True]
        assert [bytes(one) for one in memory.get_many([key(1), key(2)]) if one is not None] == [
            value(1),
            value(2, 100_000),
        ]
        memory.put_many([(key(3), value(3, 70_000))])
        (found,) = client.get_many([key(3)])
        assert found == value(3, 70_000)
        assert memory.sizes([key(2), key(4)]) == client.sizes([key(2), key(4)]) == [100_000, None]
        assert client.server_info()["store"] == "memory"


def test_names_are_named_values(short: Path) -> None:
    with MemoryStore(1 << 24) as memory, serving(memory, short) as (path, _, _):
        client = redis.Redis(unix_socket_path=path)
        for size in (0, 5, 40_000):
            assert client.set(f"name {size}", value(size, size))
            assert get_named(memory, f"name {size}").value == value(size, size)
            assert client.get(f"name {size}") == value(size, size) and client.strlen(f"name {size}") == size
        put_named(memory, "é", b"from the other door")
        assert client.get("é") == b"from the other door"
        odd = b"\xff\xfe\0"
        assert client.set(odd, b"odd") and client.get(odd) == b"odd" and client.get(b"\xff\xfe") is None


@pytest.mark.parametrize("protocol", [2, 3])
def test_the_commands_as_redis_py_asks_them(short: Path, protocol: int) -> None:
    with MemoryStore(1 << 24) as memory, serving(memory, short) as (path, _, _):
        client = redis.Redis(unix_socket_path=path, protocol=protocol, client_name="me")
        assert client.ping() and client.client_getname() in (b"me", "me")
        assert client.mset({"a": b"1", "b": b"2"}) and client.mget("a", "c", "b") == [b"1", None, b"2"]
        assert client.exists("a", "b", "c") == 2 and client.touch("a", "c") == 1 and client.dbsize() == 2
        assert client.delete("a", "c") == 1 and client.unlink("b") == 1 and client.get("a") is None
        assert client.set("k", b"v", nx=True) and client.set("k", b"w", nx=True) is None and client.get("k") == b"v"
        assert client.ttl("k") == -1 and client.ttl("absent") == -2
        assert client.expire("k", 100) and 99 <= client.ttl("k") <= 100
        assert client.set("k", b"x", px=40) and client.get("k") == b"x"
        time.sleep(0.06)
        assert client.get("k") is None and client.exists("k") == 0 and client.ttl("k") == -2
        assert client.info()["store"] == "memory" and client.config_get("save") == {"save": ""}
        for wrong in (
            ("FLUSHALL",),
            ("GET",),
            ("SET", "k", "v", "KEEPTTL", "EX", "1"),
            ("SELECT", "1"),
            ("SET", "k", "v", "EX", "0"),
        ):
            with pytest.raises(redis.ResponseError):
                client.execute_command(*wrong)
        assert client.ping()
        with client.pipeline(transaction=False) as pipe:
            for number in range(500):
                pipe.set(f"p{number}", value(number, 100))
                pipe.get(f"p{number}")
            assert pipe.execute()[1::2] == [value(number, 100) for number in range(500)]


def test_a_lease_protects_from_eviction(short: Path) -> None:
    with MemoryStore(400_000) as memory, serving(memory, short) as (path, _, _):
        client = redis.Redis(unix_socket_path=path)
        client.set("leased", value(0, 100_000))
        client.set("other", value(1, 100_000))
        assert client.exists("leased") == 1
        for number in range(20):
            client.set(f"flood {number}", value(number, 100_000))
        assert client.exists("other") == 0 and client.get("leased") == value(0, 100_000)
        for number in range(20):
            client.set(f"flood {number}", value(number, 100_000))
        assert client.get("leased") is None  # the GET ended the lease


def test_where_the_store_leases_nothing_the_daemon_holds_the_value(short: Path) -> None:
    with Forgetful(1 << 24) as memory, serving(memory, short, held_bytes=150_000) as (path, _, commands):
        client = redis.Redis(unix_socket_path=path)
        client.set("a", value(1, 100_000))
        client.set("b", value(2, 100_000))
        assert client.exists("a") == 1 and client.exists("a") == 1
        assert client.exists("b") == 0  # the memory for held values is full
        memory.lose()
        assert client.get("a") == value(1, 100_000) and commands.leases.held_bytes == 0
        assert client.get("a") is None and client.get("b") is None


def test_a_leased_get_that_misses_ends_the_connection(short: Path) -> None:
    with Forgetful(1 << 24) as memory, serving(memory, short) as (path, _, commands):
        commands.leases._protects = True
        client = redis.Redis(unix_socket_path=path, retry=None)
        client.set("a", b"v")
        assert client.exists("a") == 1
        memory.lose()
        with pytest.raises(redis.ConnectionError):
            client.get("a")
        assert commands.counters.get("lost_leases") == 1 and client.get("a") is None


def test_leases_end_by_themselves(short: Path) -> None:
    now = [0.0]
    with MemoryStore(1 << 20) as memory, serving(memory, short, clock=lambda: now[0]) as (path, _, _):
        client = redis.Redis(unix_socket_path=path)
        client.set("a", b"v")
        assert client.exists("a") == 1 and memory.stats()["open_leases"] == 1
        now[0] = 31.0
        client.set("b", b"v")
        assert client.exists("b") == 1 and memory.stats()["open_leases"] == 1


def test_a_password(short: Path) -> None:
    with MemoryStore(1 << 20) as memory, serving(memory, short, password=b"secret") as (path, _, _):
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(unix_socket_path=path, retry=None).ping()
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(unix_socket_path=path, password="wrong", retry=None).ping()
        for protocol in (2, 3):
            assert redis.Redis(unix_socket_path=path, password="secret", protocol=protocol).ping()
        # A large value before AUTH: not received.
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(path)
            sock.sendall(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$50000\r\n")
            assert sock.recv(100).startswith(b"-ERR Protocol error: invalid bulk length, expected 0 to 16384")


def test_too_many_connections(short: Path) -> None:
    with MemoryStore(1 << 20) as memory, serving(memory, short, ServerLimits(connections=2)) as (path, daemon, _):
        first, second = redis.Redis(unix_socket_path=path), redis.Redis(unix_socket_path=path)
        assert first.ping() and second.ping()
        with pytest.raises(redis.ConnectionError, match=r"max number of clients|Broken pipe|closed"):
            redis.Redis(unix_socket_path=path, retry=None).ping()
        first.close()
        until(lambda: daemon.connections == 1)
        assert redis.Redis(unix_socket_path=path).ping()


def test_a_client_that_stalls_in_the_middle_of_a_value_is_disconnected(short: Path) -> None:
    with MemoryStore(1 << 24) as memory, serving(memory, short, ServerLimits(stall_s=0.2)) as (path, _, commands):
        other = redis.Redis(unix_socket_path=path)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(path)
            sock.sendall(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$50000\r\nabc")
            assert other.set("other", value(1, 100_000))  # no other client waits for it
            assert sock.recv(100) == b""
        until(lambda: commands.budget.used_bytes == 0)
        # One that does not read what it asked for: as soon as the socket is full.
        other.set("large", value(1, 4 << 20))
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(path)
            sock.sendall(b"*2\r\n$3\r\nGET\r\n$5\r\nlarge\r\n")
            until(lambda: commands.budget.used_bytes > 0)
            assert other.get("other") == value(1, 100_000)
            until(lambda: commands.budget.used_bytes == 0)
        # One that is idle between requests stays.
        time.sleep(0.4)
        assert other.ping()


def test_bytes_in_flight_are_bounded(short: Path) -> None:
    """While one client reads slowly, others wait for room, and are refused in the end."""
    options = {"in_flight_bytes": 5 << 20, "wait_s": 0.3}
    with (
        MemoryStore(1 << 24) as memory,
        serving(memory, short, ServerLimits(stall_s=5), **options) as (path, _, commands),
    ):
        other = redis.Redis(unix_socket_path=path)
        other.set("large", value(1, 4 << 20))
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(path)
            sock.sendall(b"*2\r\n$3\r\nGET\r\n$5\r\nlarge\r\n")
            until(lambda: commands.budget.used_bytes > 0)
            with pytest.raises(redis.ResponseError, match="in flight"):
                other.get("large")
            assert other.ping()
        until(lambda: commands.budget.used_bytes == 0)
        assert other.get("large") == value(1, 4 << 20)


def test_hostile_bytes_end_their_connection_only(short: Path) -> None:
    with MemoryStore(1 << 20) as memory, serving(memory, short, ServerLimits(value_bytes=1 << 20)) as (path, _, _):
        for data in (b"*1\r\n:5\r\n", b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$2000000000000\r\n", b"x" * 70_000):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(path)
                sock.sendall(data)
                assert sock.makefile("rb").read().startswith(b"-ERR Protocol error: ")
        assert redis.Redis(unix_socket_path=path).ping()


def test_a_socket_file_that_was_left_is_replaced_and_one_in_use_is_not(short: Path) -> None:
    address = ListenAddress.parse(f"unix://{short / 'a.sock'}", unix=True)
    left = listen_at(address)
    left.close()
    assert (short / "a.sock").exists()
    second = listen_at(address)
    with pytest.raises(OSError, match="in use"):
        listen_at(address)
    second.close()


def test_of_daemons_that_start_at_once_at_a_socket_that_was_left_one_listens_there(short: Path) -> None:
    address = ListenAddress.parse(f"unix://{short / 'a.sock'}", unix=True)

    def listens(_: int) -> socket.socket | None:
        try:
            return listen_at(address)
        except OSError as error:
            assert error.errno == errno.EADDRINUSE
            return None

    with ThreadPoolExecutor(8) as pool:
        for _ in range(40):
            (one,) = (found for found in pool.map(listens, range(8)) if found is not None)
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(address.path)
            one.close()


def test_who_holds_the_folder_s_lock_holds_no_daemon_up(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_module, "_REPLACED_S", 0.05)
    holder = os.open(short, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    listen_at(ListenAddress.parse(f"unix://{short / 'a.sock'}", unix=True)).close()
    os.close(holder)


@pytest.mark.brief(every=3)
@pytest.mark.parametrize("text", ["/tmp/a.sock", "unix://", "tcp://127.0.0.1", "tcp://a:99999", "http://a:1"])
def test_an_address_that_is_none(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"expected HOST:PORT.*unix:PATH"):
        ListenAddress.parse(text, unix=True)


@pytest.mark.slow
@pytest.mark.seeded
def test_a_signal_that_does_not_interrupt_the_main_thread_ends_it() -> None:
    """As one does that comes right before it waits; here another thread gets it."""
    with MemoryStore(1 << 20) as store:
        served = Daemon(Commands(store), ServerLimits())
        before = signal.signal(signal.SIGUSR1, lambda *_: served.stop())
        timers = [
            threading.Timer(0.3, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)),
            threading.Timer(60.0, served.stop),
        ]
        try:
            for timer in timers:
                timer.start()
            served.serve([])
            assert timers[1].is_alive(), "the signal ended it"
        finally:
            signal.signal(signal.SIGUSR1, before)
            for timer in timers:
                timer.cancel()
                timer.join()
