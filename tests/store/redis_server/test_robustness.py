"""Clients that stall, drip and flood, stores that fail, writers that meet: what the daemon promises all the same."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import redis
from tests.contract.store_contract import key, value
from tests.store.redis_server.daemons import Forgetful, serving, until

from skymemory.errors import SkyMemoryError
from skymemory.store.base import Buffer, LoadTicket, StoreTicket
from skymemory.store.memory import MemoryStore
from skymemory.store.named_values import put_named
from skymemory.store.redis import NAMESPACE, TRAILER_BYTES, trailer_of
from skymemory.store.redis_server import commands, lifetimes
from skymemory.store.redis_server import daemon as daemon_module
from skymemory.store.redis_server.commands import Commands
from skymemory.store.redis_server.daemon import Daemon, ServerLimits
from skymemory.store.redis_server.protocol import LARGE_BYTES


def connect(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(60)
    sock.connect(path)
    return sock


def request(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


@pytest.mark.parametrize("cut", [5, 30, -30, -15, -14, -10, -3, -2, -1])
@pytest.mark.parametrize("size_bytes", [LARGE_BYTES - TRAILER_BYTES, 40_000, 100_000])
def test_a_block_that_comes_in_parts_is_stored_without_its_trailer(short: Path, size_bytes: int, cut: int) -> None:
    """Whatever the first read has of it: the trailer, a part of it, the line's end behind it."""
    block = value(3, size_bytes)
    whole, wrong = (
        request(b"SET", NAMESPACE + key(1), block + trailer_of(key(of), memoryview(block))) for of in (1, 2)
    )
    with MemoryStore(1 << 24) as memory, serving(memory, short) as (path, _, _), connect(path) as sock:
        for sent, answer in ((wrong, b"-ERR a block's value ends in"), (whole, b"+OK\r\n"), (b"PING\r\n", b"+PONG")):
            at = cut if len(sent) > abs(cut) else 2
            sock.sendall(sent[:at])
            time.sleep(0.02)
            sock.sendall(sent[at:])
            assert sock.recv(1000).startswith(answer)
            assert (memory.get_many([key(1)])[0] is None) == (sent is wrong)
        assert memory.get_many([key(1)]) == [block]


# --- clients that are slow in the middle of something ---


@pytest.mark.parametrize("size", [40_000, 100_000], ids=["of one read", "of several"])
def test_a_value_whole_but_for_its_end_is_not_held_for_ever(short: Path, size: int) -> None:
    with MemoryStore(1 << 24) as memory, serving(memory, short, ServerLimits(stall_s=0.2)) as (path, _, commands):
        with connect(path) as sock:
            sock.sendall(request(b"SET", b"k", bytes(size))[:-2])
            until(lambda: commands.budget.used_bytes > 0)
            assert sock.recv(100) == b""
        until(lambda: commands.budget.used_bytes == 0)
        assert redis.Redis(unix_socket_path=path).info()["stalled_connections"] == 1


@pytest.mark.parametrize("size", [200, 1_000_000], ids=["small", "large"])
def test_a_client_that_sends_a_byte_now_and_then_is_ended(
    short: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte comes within the stall; all of it does not at the least rate."""
    monkeypatch.setattr(daemon_module, "LEAST_BYTES_PER_S", 10 << 20)
    with MemoryStore(1 << 24) as memory, serving(memory, short, ServerLimits(stall_s=0.3)) as (path, _, commands):
        with connect(path) as sock:
            head = b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n" % size
            with pytest.raises(OSError):
                for at, byte in enumerate(head + bytes(size - 1)):
                    sock.sendall(bytes([byte]))
                    time.sleep(0.02)
                    assert at < 500, "it may go on forever"
        until(lambda: commands.budget.used_bytes == 0)


def test_a_client_that_reads_a_byte_now_and_then_is_ended(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_module, "LEAST_BYTES_PER_S", 100 << 20)
    with MemoryStore(1 << 24) as memory, serving(memory, short, ServerLimits(stall_s=0.3)) as (path, _, commands):
        redis.Redis(unix_socket_path=path).set("large", value(1, 8 << 20))
        with connect(path) as sock:
            sock.sendall(request(b"GET", b"large"))
            until(lambda: commands.budget.used_bytes > 0)
            received_bytes = 0
            while commands.budget.used_bytes:
                received_bytes += len(sock.recv(20_000))
                time.sleep(0.02)
                assert received_bytes < 4 << 20, "it may read all of it at this pace"


@pytest.fixture
def secured(short: Path) -> Iterator[tuple[Callable[[], socket.socket], Callable[[], socket.socket], Commands]]:
    """A plain connection to a daemon with TLS, one with TLS, and its commands."""
    from skymemory.router.tls import self_signed

    pair = self_signed()
    (short / "chain.pem").write_bytes(pair.chain)
    (short / "key.pem").write_bytes(pair.key)
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(short / "chain.pem", short / "key.pem")
    theirs = ssl.create_default_context(cafile=str(short / "chain.pem"))
    theirs.check_hostname = False
    with MemoryStore(1 << 24) as memory:
        commands = Commands(memory)
        daemon = Daemon(commands, ServerLimits(stall_s=0.3), ours)
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        thread = threading.Thread(target=daemon.serve, args=([listener],))
        thread.start()

        def plain() -> socket.socket:
            return socket.create_connection(("127.0.0.1", port), 10)

        yield plain, lambda: theirs.wrap_socket(plain()), commands
        daemon.stop()
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.slow
def test_who_is_silent_over_tls_is_ended_in_a_request_and_not_between(
    secured: tuple[Callable[[], socket.socket], Callable[[], socket.socket], Commands],
) -> None:
    plain, with_tls, commands = secured
    with plain() as silent:
        assert silent.recv(100) == b""  # no handshake
    with plain() as wrong:
        wrong.sendall(b"PING\r\n")
        until(lambda: commands.counters.get("tls_failures") == 1)
    with with_tls() as stalls:
        stalls.sendall(request(b"SET", b"k", bytes(100_000))[:-50])
        assert stalls.recv(100) == b""
    until(lambda: commands.budget.used_bytes == 0)
    with with_tls() as idle:
        for _ in range(2):
            idle.sendall(request(b"SET", b"k", value(1, 3_000_000)) + request(b"GET", b"k"))
            expected = b"+OK\r\n$3000000\r\n" + value(1, 3_000_000) + b"\r\n"
            got = bytearray()
            while len(got) < len(expected):
                got += idle.recv(1 << 20)
            assert got == expected
            time.sleep(0.7)
    assert commands.counters.get("stalled_connections") == 2


# --- clients that ask for memory ---


def test_before_auth_a_client_may_say_little(short: Path) -> None:
    with MemoryStore(1 << 20) as memory, serving(memory, short, password=b"secret") as (path, _, _):
        for flood in (b"*11\r\n", b"*2\r\n$4\r\nAUTH\r\n$16385\r\n"):
            with connect(path) as sock:
                sock.sendall(flood)
                assert sock.recv(100).startswith(b"-ERR Protocol error: invalid")
        with connect(path) as sock:
            sock.sendall(request(b"AUTH", b"secret") + request(b"EXISTS", *[b"k"] * 20))
            assert sock.makefile("rb").read(9) == b"+OK\r\n:0\r\n"


def test_many_small_arguments_count_too(short: Path) -> None:
    with MemoryStore(1 << 26) as memory, serving(memory, short, in_flight_bytes=2 << 20) as (path, _, commands):
        words = [b"MSET", *(word for number in range(60) for word in (b"k%d" % number, bytes(30_000)))]
        with connect(path) as sock:
            sock.sendall(request(*words)[:-5])
            until(lambda: commands.budget.used_bytes > 1_600_000)
            sock.sendall(request(*words)[-5:])
            assert sock.recv(100) == b"+OK\r\n"
        until(lambda: commands.budget.used_bytes == 0)


def test_a_client_that_finds_no_room_for_its_value_hears_so(short: Path) -> None:
    """And is not reset while its value is still on its way."""
    limits = ServerLimits(stall_s=0.5)
    with (
        MemoryStore(1 << 26) as memory,
        serving(memory, short, limits, in_flight_bytes=5 << 20) as (path, _, commands),
        connect(path) as holds,
        connect(path) as refused,
    ):
        large = memoryview(request(b"SET", b"k", bytes(4 << 20)))
        holds.sendall(large[: 1 << 20])
        until(lambda: commands.budget.used_bytes > 0)
        answered = threading.Event()

        def goes_on() -> None:
            """Slowly: else it is given up, and there is room, before the other is refused."""
            for at in range(1 << 20, len(large), 4096):
                holds.sendall(large[at : at + 4096])
                if answered.wait(0.02):
                    return

        slow = threading.Thread(target=goes_on)
        slow.start()
        refused.sendall(request(b"SET", b"k", bytes(16 << 20)))
        said = refused.makefile("rb").readline()
        answered.set()
        slow.join()
        assert said.startswith(b"-BUSY too many bytes in flight")
    assert commands.counters.get("busy") == 1


@pytest.mark.parametrize("key", [b"k" * 5000, b"", b"\0bytes:k"], ids=["long", "empty", "taken"])
@pytest.mark.parametrize("size", [100, 3_000_000])
def test_a_key_that_is_none_is_said(short: Path, key: bytes, size: int, caplog: pytest.LogCaptureFixture) -> None:
    with MemoryStore(1 << 24) as memory, serving(memory, short) as (path, _, _), connect(path) as sock:
        sock.sendall(request(b"SET", key, bytes(size)))
        assert sock.recv(5) == b"-ERR " and not caplog.records
    assert memory.stats()["entries"] == 0


def test_a_key_that_is_no_text_is_no_other_s(short: Path) -> None:
    with MemoryStore(1 << 24) as memory, serving(memory, short) as (path, _, _):
        client = redis.Redis(unix_socket_path=path)
        assert client.set(b"\xff", b"odd")
        with pytest.raises(redis.ResponseError, match="use another"):
            client.get("\0bytes:ÿ".encode())
        assert client.get(b"\xff") == b"odd"


# --- lifetimes ---


def test_a_lifetime_ends_with_its_value(short: Path) -> None:
    """Neither a value stored afterwards, here or by another door, nor its NX know of it."""
    with MemoryStore(1 << 20) as memory, serving(memory, short) as (path, _, _):
        client = redis.Redis(unix_socket_path=path)
        for name in ("a", "b", "c"):
            assert client.set(name, b"mortal", px=60)
        assert client.set("a", b"stays") and client.ttl("a") == -1
        client.delete("b")
        memory.delete(list(memory._values)[-1:])
        put_named(memory, "c", b"by another door")
        assert client.set("d", b"v", nx=True, px=60)
        time.sleep(0.1)
        assert client.mget("a", "b", "c", "d") == [b"stays", None, b"by another door", None]
        assert client.set("d", b"again", nx=True) and client.touch("b") == 0 and client.expire("a", -1) == 1
        assert client.get("a") is None


class Unsaying(MemoryStore):
    """Expires values, and cannot say when, as satellites."""

    left_s = None  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [MemoryStore, Unsaying])
def test_no_lifetime_is_forgotten(short: Path, monkeypatch: pytest.MonkeyPatch, kind: type[MemoryStore]) -> None:
    """Where they cannot be known, more are refused: INCR would else make a value last."""
    for module in (lifetimes, commands):
        monkeypatch.setattr(module, "MAX_GIVEN", 10)
    given = 30 if kind is MemoryStore else 10
    with kind(1 << 20) as memory, serving(memory, short) as (path, _, _):
        client = redis.Redis(unix_socket_path=path)
        for number in range(30):
            if number < given:
                assert client.set(f"k{number}", b"1", ex=1000)
            else:
                with pytest.raises(redis.ResponseError, match="more than 10 lifetimes"):
                    client.set(f"k{number}", b"1", ex=1000)
        for number in range(given):
            name = f"k{number}"
            assert client.ttl(name) == 1000 and client.incr(name) == 2 and client.ttl(name) == 1000
        assert client.persist("k0") == 1 and client.ttl("k0") == -1 and client.set("again", b"v", ex=1000)


def test_lifetimes_of_another_door_are_known(short: Path) -> None:
    with MemoryStore(1 << 20) as memory, serving(memory, short) as (path, _, _):
        client = redis.Redis(unix_socket_path=path)
        client.set("k", b"1")
        assert memory.expire(memory.stored_keys(), 500.0) == [True] and client.ttl("k") == 500
        assert client.incr("k") == 2 and client.ttl("k") == 500


@pytest.mark.parametrize("kind", [MemoryStore, Forgetful])
def test_a_lease_ends_with_the_lifetime_of_its_value(short: Path, kind: type[MemoryStore]) -> None:
    """A lifetime that ended is a miss, not a promise that was broken."""
    with kind(1 << 20) as memory, serving(memory, short) as (path, _, _):
        client = redis.Redis(unix_socket_path=path, retry=None)
        client.mset({"other": b"v", "later": b"v"})
        client.set("k", b"v", px=60)
        assert client.exists("other") == client.exists("k") == client.exists("later") == 1
        assert client.pexpire("later", 60)
        time.sleep(0.1)
        assert client.get("k") is None and client.get("later") is None and client.get("other") == b"v"


def test_a_value_whose_lifetime_is_not_promised_is_not_stored(short: Path) -> None:
    class Unpromising(MemoryStore):
        def expire(self, keys: Sequence[bytes], ttl_s: float) -> list[bool]:
            return [False] * len(keys)

    with Unpromising(1 << 20) as memory, serving(memory, short) as (path, _, _):
        client = redis.Redis(unix_socket_path=path)
        with pytest.raises(redis.ResponseError, match="did not promise the lifetime: nothing stored"):
            client.set("k", b"v", ex=10)
        assert client.get("k") is None and client.set("k", b"v") and client.expire("k", 10) == 0


# --- leases ---


class Gated(Forgetful):
    """A load that has read its values waits."""

    def __init__(self, budget_bytes: int) -> None:
        super().__init__(budget_bytes)
        self.waits, self.gate = threading.Event(), threading.Event()
        self.gate.set()

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        found = super().complete_load(ticket)
        self.waits.set()
        assert self.gate.wait(60)
        return found


@pytest.mark.parametrize("now", [b"new", None])
def test_a_value_read_while_another_was_written_is_not_leased(short: Path, now: bytes | None) -> None:
    with Gated(1 << 20) as memory, serving(memory, short) as (path, _, _):
        client = redis.Redis(unix_socket_path=path)
        client.set("k", b"old")
        memory.gate.clear()
        asked = threading.Thread(target=redis.Redis(unix_socket_path=path).exists, args=("k",))
        asked.start()
        assert memory.waits.wait(60)
        assert client.set("k", now) if now else client.delete("k") == 1
        memory.gate.set()
        asked.join(60)
        assert client.get("k") == now


def test_a_failing_store_leaves_no_lease_and_no_booking(short: Path) -> None:
    class Failing(MemoryStore):
        fails = False

        def sizes(self, keys: Sequence[bytes]) -> list[int | None]:
            if self.fails:
                raise SkyMemoryError("the tier fell over")
            return super().sizes(keys)

    with Failing(1 << 20) as memory, serving(memory, short) as (path, _, commands):
        client = redis.Redis(unix_socket_path=path, retry=None)
        client.set("k", b"v")
        assert client.exists("k") == 1 and memory.stats()["open_leases"] == 1
        memory.fails = True
        with pytest.raises(redis.ResponseError, match="fell over"):
            client.get("k")
        assert memory.stats()["open_leases"] == 0 and commands.budget.used_bytes == 0


def test_only_one_of_many_stores_a_new_key(short: Path) -> None:
    with MemoryStore(1 << 20) as memory, serving(memory, short) as (path, _, _):
        wins: list[int] = []

        def work(worker: int) -> None:
            client = redis.Redis(unix_socket_path=path)
            for number in range(50):
                if client.set(f"k{number}", b"%d" % worker, nx=True):
                    wins.append(number)

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(wins) == list(range(50))


# --- beginnings and ends ---


def test_a_system_without_threads_costs_one_connection(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def fails(thread: threading.Thread) -> None:
        if thread.name.startswith("client-"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with MemoryStore(1 << 20) as memory, serving(memory, short) as (path, daemon, _):
        monkeypatch.setattr(threading.Thread, "start", fails)
        with connect(path) as sock:
            assert sock.recv(100) == b"-ERR max number of clients reached\r\n" and sock.recv(1) == b""
        monkeypatch.undo()
        assert daemon.connections == 0
        assert redis.Redis(unix_socket_path=path).info()["refused_connections"] == 1


class Slow(MemoryStore):
    """A store takes its time, and says when it is done."""

    begun = threading.Event()
    stored: tuple[tuple[bytes, Buffer], ...] = ()

    def complete_store(self, ticket: StoreTicket) -> list[bool]:
        self.begun.set()
        time.sleep(0.4)
        done = super().complete_store(ticket)
        self.stored += ticket.items
        return done


def test_the_end_waits_for_commands_and_sends_their_replies(short: Path) -> None:
    with Slow(1 << 24) as memory:
        with serving(memory, short) as (path, daemon, _), connect(path) as sock, connect(path) as idle:
            idle.sendall(b"PING\r\n")
            assert idle.recv(7) == b"+PONG\r\n"  # a connection that is not accepted yet would be reset
            sock.sendall(request(b"SET", b"k", bytes(100_000)))
            assert memory.begun.wait(60)
            daemon.stop()
            assert sock.recv(100) == b"+OK\r\n" and sock.recv(1) == b"" and idle.recv(1) == b""
        assert len(memory.stored) == 1 and daemon.connections == 0


@pytest.mark.slow
def test_a_client_that_does_not_read_holds_up_the_end_for_a_moment(short: Path) -> None:
    with MemoryStore(1 << 26) as memory:
        memory_client_options = {"unix_socket_path": str(short / "store.sock")}
        with serving(memory, short) as (path, _, commands):
            redis.Redis(**memory_client_options).set("large", bytes(16 << 20))
            sock = connect(path)
            sock.sendall(request(b"GET", b"large"))
            until(lambda: commands.budget.used_bytes > 0)
            began_s = time.monotonic()
        assert time.monotonic() - began_s < 6
        sock.close()


# --- memory ---


def test_no_argument_but_a_value_is_large(short: Path) -> None:
    with MemoryStore(1 << 24) as memory, serving(memory, short) as (path, _, commands):
        client = redis.Redis(unix_socket_path=path, retry=None)
        for words in (("CLIENT", "SETNAME", "x" * 40_000), ("HELLO", "3", "SETNAME", "x" * 40_000), ("y" * 40_000,)):
            with pytest.raises(redis.ResponseError, match=r"no value|unknown command"):
                client.execute_command(*words)
        for words in (("CLIENT", "SETNAME", "x" * 1025), ("HELLO", "2", "SETNAME", "a b"), ("KEYS", "*" * 1025)):
            with pytest.raises(redis.ResponseError, match=r"Client names cannot contain|expected at most 1024"):
                client.execute_command(*words)
        assert client.execute_command("CLIENT", "SETNAME", "x" * 1024) and client.ping()
        assert commands.budget.used_bytes == 0


@pytest.mark.brief()
@pytest.mark.parametrize("verb", [b"KEYS *", b"SCAN 0", b"MULTI\r\nKEYS *\r\nEXEC"])
def test_names_that_are_listed_count_as_in_flight(short: Path, verb: bytes) -> None:
    """Sixteen clients that do not read them hold no more than one may."""
    names = [b"%0512d" % number for number in range(4000)]  # 2 MB: more than a socket takes
    limits = ServerLimits(stall_s=60.0)
    with MemoryStore(1 << 24) as memory, serving(memory, short, limits, in_flight_bytes=3 << 20) as (path, _, commands):
        client = redis.Redis(unix_socket_path=path)
        client.mset(dict.fromkeys(names, b"v"))
        slow = [connect(path) for _ in range(16)]
        slow[0].sendall(verb + b"\r\n")
        until(lambda: commands.budget.used_bytes > 2_000_000)
        for sock in slow[1:]:
            sock.sendall(verb + b"\r\n")
        ends_s = time.monotonic() + 0.5
        while time.monotonic() < ends_s:
            assert commands.budget.used_bytes <= 3 << 20
            time.sleep(0.02)
        for sock in slow:
            sock.close()
        until(lambda: commands.budget.used_bytes == 0)
        assert sorted(client.keys("*")) == names
