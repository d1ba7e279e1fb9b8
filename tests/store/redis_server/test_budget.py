"""Who pays where clients hold all room: they that do not move what they hold, not they that wait."""

from __future__ import annotations

import math
import socket
import threading
import time
from pathlib import Path

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from tests.contract.store_contract import value
from tests.store.redis_server.daemons import Elsewhere, connected, request, serving, until

from skymemory.pacing import ByteBudget
from skymemory.store.memory import MemoryStore
from skymemory.store.redis_server import budget as budget_module
from skymemory.store.redis_server.budget import BLAMED_S, BudgetWaiter, MemoryClaim, Room, SharedBudget
from skymemory.store.redis_server.daemon import ServerLimits

MIB = 1 << 20


def claim(held_bytes: int = 0, due_s: float = math.inf, *, waits: bool = False) -> MemoryClaim:
    return MemoryClaim(lambda: None, held_bytes, due_s, waits)


def room(*held: MemoryClaim, limit_bytes: int = 100, want_bytes: int = 50, newcomer: MemoryClaim | None = None) -> Room:
    """All of it is held by ``held``, and a newcomer waits since the time 0, for a share after 15."""
    made = Room(ByteBudget(limit_bytes), 15.0)
    for each in held:
        held_bytes, each.held_bytes = each.held_bytes, 0
        made.change(each, held_bytes)
    made.add(BudgetWaiter(newcomer or claim(waits=True), want_bytes, 0.0))
    return made


def test_the_largest_that_is_overdue_pays() -> None:
    small, large, larger_but_moving = claim(20, 3.0), claim(30, 4.0), claim(50, 9.0)
    full = room(small, large, larger_but_moving)
    assert full.payer(2.9) is None and full.payer(3.0) is small and full.payer(4.0) is large
    assert full.payer(9.0) is larger_but_moving


def test_what_is_on_its_way_is_waited_for() -> None:
    paying = claim(40, 1.0)
    full = room(paying, claim(60, 1.0))
    paying.is_ended = True
    assert full.payer(20.0) is None


def test_a_client_that_the_daemon_works_for_does_not_pay() -> None:
    assert room(claim(100)).payer(1e9) is None


def test_who_moves_pays_beyond_a_share_and_only_after_a_while() -> None:
    holds = claim(80, 100.0), claim(20, 100.0)
    assert room(*holds, want_bytes=30).payer(14.9) is None
    assert room(*holds, want_bytes=30).payer(15.0) is holds[0]
    assert room(*holds, want_bytes=34).payer(15.0) is None, "it wants more than a share itself"
    equals = claim(33, 100.0), claim(33, 100.0), claim(33, 100.0)
    assert room(*equals, want_bytes=25).payer(99.0) is equals[0]
    assert room(claim(25, 1e9), claim(25, 1e9), claim(25, 1e9), claim(25, 1e9), want_bytes=10).payer(99.0) is not None


def test_where_all_wait_for_one_another_the_largest_is_refused() -> None:
    first, second = claim(30, waits=True), claim(70, waits=True)
    assert room(first, second, newcomer=first).payer(0.0) is second
    assert room(second, first, newcomer=second).payer(0.0) is second


@given(
    st.lists(st.tuples(st.integers(1, 50), st.floats(0, 60), st.booleans()), min_size=1, max_size=8),
    st.integers(1, 100),
    st.floats(0, 60),
)
def test_a_client_pays_in_the_end(held: list[tuple[int, float, bool]], want_bytes: int, now_s: float) -> None:
    """And never one that is not overdue, while a newcomer has waited for less than a while."""
    claims = [claim(size, due_s, waits=waits) for size, due_s, waits in held]
    full = room(*claims, limit_bytes=sum(size for size, _, _ in held), want_bytes=want_bytes)
    payer = full.payer(now_s)
    if payer is not None and now_s < 15.0:
        assert payer.due_s <= now_s or all(each.waits for each in claims)
    assert full.payer(60.0) is not None


def at(address: str) -> MemoryClaim:
    return MemoryClaim(lambda: None, waits=True, address=address)


def test_clients_at_an_address_where_others_gave_way_are_behind() -> None:
    overdue = MemoryClaim(lambda: None, 100, 1.0, address="there")
    full = room(overdue, newcomer=at("there"))
    full.add(BudgetWaiter(at("here"), 90, 1.0))
    assert full.first(1.0).claim.address == "there"
    full.blame(overdue, 1.0)
    assert full.first(1.0).claim.address == "here"
    assert full.first(30.0).claim.address == "here", "however long others have waited"
    full.remove(full.first(30.0))
    assert full.first(30.0).claim.address == "there"
    full.add(BudgetWaiter(at("here"), 90, 1.0 + BLAMED_S))
    assert full.first(1.0 + BLAMED_S).claim.address == "there", "that is forgotten"


def test_who_gives_way_though_it_moved_is_not_to_blame() -> None:
    holds = MemoryClaim(lambda: None, 100, 50.0, address="there")
    full = room(holds, newcomer=at("there"))
    full.blame(holds, 16.0)
    full.add(BudgetWaiter(at("here"), 90, 15.0))
    assert full.first(16.0).claim.address == "there"


def test_each_that_gives_way_halves_the_time_of_others_at_its_address() -> None:
    def overdue_at_s(full: Room, holder: MemoryClaim) -> float:
        return next(step / 1000 for step in range(20_000) if full.payer(step / 1000) is holder)

    here, there = (MemoryClaim(lambda: None, 100, 10.0, address=at, allowed_s=2.0) for at in ("here", "there"))
    full = room(here)
    for times in (1.0, 0.5, 0.25, 0.125, 0.0625, 0.0625):
        assert overdue_at_s(full, here) == pytest.approx(10.0 - 2.0 * (1 - times), abs=0.002)
        full.blame(here, 10.0)
    assert overdue_at_s(room(there), there) == 10.0


def test_readers_that_do_not_read_hold_up_a_newcomer_for_seconds_however_many_they_are(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixty ask before it for as much as may be in flight: a patience of 0.3 s for each would be 18 s."""
    monkeypatch.setattr(budget_module, "SLOW_S", 0.3)
    monkeypatch.setattr(budget_module, "LEAST_SHARED_BYTES_PER_S", 100 * MIB)
    with (
        Elsewhere(128 * MIB) as store,
        serving(store, short, ServerLimits(stall_s=60.0), in_flight_bytes=40 * MIB, wait_s=60.0) as (path, _, commands),
    ):
        client = redis.Redis(unix_socket_path=path, retry=None, socket_timeout=60.0)
        large = value(1, 32 * MIB)
        client.set("large", large)
        readers = [socket.socket(socket.AF_UNIX) for _ in range(60)]
        for reader in readers:
            reader.connect(path)
            reader.sendall(request(b"GET", b"large"))
        until(lambda: len(commands.budget._room.waiting) == 59)
        began_s = time.monotonic()
        assert client.get("large") == large
        assert time.monotonic() - began_s < 12.0
        for reader in readers:
            reader.close()


def test_small_values_never_wait_and_large_ones_wait_in_order() -> None:
    budget = SharedBudget(1000)
    mine, other = claim(), claim()
    assert budget.take(mine, 1 << 20, 0.0) and not budget.take(other, 1 << 20, 0.01)
    assert budget.take(other, 0, 0.0) and budget.take(other, 60_000, 0.0)
    budget.give_back(mine, 1 << 20)
    assert not budget.take(mine, 1 << 20, 0.01)
    budget.give_back(other, 60_000)
    assert budget.take(mine, 1 << 20, 0.0)

    order: list[int] = []
    waiters = [
        threading.Thread(target=lambda at=at: budget.take(claim(), 100_000 + at, 60.0) and order.append(at))  # type: ignore[misc]
        for at in range(3)
    ]
    for at, waiter in enumerate(waiters):
        waiter.start()
        until(lambda at=at: len(budget._room.waiting) == at + 1)  # type: ignore[misc]
    holders = [mine]
    for _ in range(3):
        budget.give_back(holders[-1], holders[-1].held_bytes)
        until(lambda: len(order) == len(holders))
        holders.append(next(iter(budget._room.holders)))
    assert order == [0, 1, 2]


def test_who_comes_later_is_not_served_before_those_that_wait() -> None:
    """Though there is room for what it wants."""
    budget = SharedBudget(400_000)
    holds = claim()
    assert budget.take(holds, 200_000, 0.0)
    served: list[bool] = []
    waiter = threading.Thread(target=lambda: served.append(budget.take(claim(), 300_000, 60.0)))
    waiter.start()
    until(lambda: bool(budget._room.waiting))
    assert not budget.take(claim(), 150_000, 0.0)
    budget.give_back(holds, 200_000)
    waiter.join(60)
    assert served == [True]


def test_twenty_readers_that_do_not_read_cost_others_no_value(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold all the room; those who come afterwards read and write at once, and none hears BUSY."""
    monkeypatch.setattr(budget_module, "SLOW_S", 0.1)
    monkeypatch.setattr(budget_module, "LEAST_SHARED_BYTES_PER_S", 10 * MIB)
    with (
        Elsewhere(128 * MIB) as store,
        serving(store, short, ServerLimits(stall_s=60.0), in_flight_bytes=40 * MIB, wait_s=60.0) as (path, _, commands),
    ):
        client = redis.Redis(unix_socket_path=path, retry=None)
        large = value(1, 4 * MIB)
        client.set("large", large)
        readers = [socket.socket(socket.AF_UNIX) for _ in range(20)]
        for reader in readers:
            reader.connect(path)
            reader.sendall(request(b"GET", b"large"))
        until(lambda: commands.budget.used_bytes > 36 * MIB)
        for number in range(5):
            assert client.get("large") == large and client.set(f"other {number}", large)
        assert commands.counters.get("busy") == 0 and client.info()["ended_for_room"] >= 1
        for reader in readers:
            reader.close()
        until(lambda: commands.budget.used_bytes == 0)


@pytest.mark.parametrize("size", [3 * MIB, 12 * MIB], ids=["in one call", "in parts"])
def test_writers_that_stop_in_the_middle_cost_others_no_value(
    short: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget_module, "SLOW_S", 0.1)
    monkeypatch.setattr(budget_module, "LEAST_SHARED_BYTES_PER_S", 20 * MIB)
    with (
        MemoryStore(128 * MIB) as store,
        serving(store, short, ServerLimits(stall_s=60.0), in_flight_bytes=12 * MIB, wait_s=60.0) as (path, _, commands),
    ):
        writers = [socket.socket(socket.AF_UNIX) for _ in range(12 * MIB // size)]
        for writer in writers:
            writer.connect(path)
            writer.sendall(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n" % size + bytes(100_000))
        until(lambda: commands.budget.used_bytes == 12 * MIB)
        client = redis.Redis(unix_socket_path=path, retry=None)
        large = value(1, size)
        assert client.set("large", large) and client.get("large") == large
        assert commands.counters.get("busy") == 0 and client.exists("k") == 0
        for writer in writers:
            writer.close()


def test_who_waits_with_multi_open_pays_too(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_module, "SLOW_S", 0.1)
    with (
        MemoryStore(64 * MIB) as store,
        serving(store, short, ServerLimits(stall_s=60.0), in_flight_bytes=4 * MIB, wait_s=60.0) as (path, _, commands),
        connected(path) as idle,
    ):
        idle.sendall(request(b"MULTI") + request(b"SET", b"k", bytes(3 * MIB)))
        said = idle.makefile("rb")
        assert said.readline() == b"+OK\r\n" and said.readline() == b"+QUEUED\r\n"
        client = redis.Redis(unix_socket_path=path, retry=None)
        assert client.set("large", bytes(2 * MIB)) and said.readline() == b""
        assert client.exists("k") == 0 and commands.counters.get("busy") == 0


def test_who_reads_slowly_is_served_to_the_end_while_there_is_room(short: Path) -> None:
    with MemoryStore(64 * MIB) as store, serving(store, short) as (path, _, commands), connected(path) as slow:
        redis.Redis(unix_socket_path=path).set("large", bytes(3 * MIB))
        slow.sendall(request(b"GET", b"large"))
        received = 0
        while received < 3 * MIB:
            received += len(slow.recv(64 << 10))
        assert commands.budget.ended_clients == 0


@pytest.mark.brief()
def test_a_value_that_is_too_large_is_refused_before_it_is_sent(short: Path) -> None:
    """The error is there before the value; the value is read over, and the connection goes on."""
    limits = ServerLimits(value_bytes=MIB)
    with MemoryStore(64 * MIB) as store, serving(store, short, limits, in_flight_bytes=2 * MIB) as (path, _, commands):
        with connected(path) as sock:
            said = sock.makefile("rb")
            for head in (b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n", b"*5\r\n$4\r\nMSET\r\n$1\r\na\r\n$1\r\n1\r\n$1\r\nk\r\n"):
                sock.sendall(head + b"$5242880\r\n")
                assert said.readline().startswith(b"-ERR a value of 5242880 bytes: expected at most 1048576, --largest")
                assert commands.budget.used_bytes == 0
                sock.sendall(bytes(5242880) + b"\r\n" + request(b"GET", b"k"))
                assert said.readline() == b"$-1\r\n"
            sock.sendall(
                b"*5\r\n$3\r\nSET\r\n$1\r\nk\r\n$2000000\r\n" + bytes(2_000_000) + b"\r\n$2\r\nEX\r\n$2000000\r\n"
            )
            assert said.readline().startswith(b"-ERR a value of 2000000 bytes")
            sock.sendall(bytes(2_000_000) + b"\r\n" + request(b"PING"))
            assert said.readline() == b"+PONG\r\n"
        client = redis.Redis(unix_socket_path=path, retry=None)
        for pipe in (client.pipeline(), client.pipeline(transaction=False)):
            pipe.set("a", 1).set("k", bytes(5 * MIB)).set("b", 2)
            with pytest.raises(redis.ResponseError, match="a value of 5242880 bytes"):
                pipe.execute()
        assert client.mget("a", "k", "b") == [b"1", None, b"2"]
        with pytest.raises(redis.ResponseError, match="unknown command 'APPEND'"):
            client.append("k", bytes(5 * MIB))
        assert client.ping() and commands.counters.get("connections") == 2
