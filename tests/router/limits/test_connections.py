"""Clients' connections in virtual time: which is closed, and that no busy or honest one is."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymemory.router.limits.connections import LATE_S, ConnectionTable, Seat, State


class Door:
    """A table as the proxy keeps it: what is closed leaves at once."""

    def __init__(self, most: int) -> None:
        self.table: ConnectionTable[str] = ConnectionTable(most)
        self.seats: dict[str, Seat[str]] = {}
        self.closed: list[str] = []
        self.now_s = 0.0

    def open(self, name: str, address: str) -> None:
        self.seats[name] = self.table.open(name, address, self.now_s)
        while self.table.is_over:
            victim = self.table.victim(self.now_s)
            self.leave(name if victim is None else victim.owner)
            self.closed.append(name if victim is None else victim.owner)

    def move(self, name: str, state: State) -> None:
        if name in self.seats:
            self.table.move(self.seats[name], state, self.now_s)

    def rest(self, name: str) -> None:
        if name in self.seats:
            self.table.mark_idle(self.seats[name], self.now_s)

    def leave(self, name: str) -> None:
        self.table.close(self.seats.pop(name))


def test_who_pays_in_which_order() -> None:
    door = Door(8)
    for name, state in (
        ("busy", State.BUSY),
        ("late body", State.BODY),
        ("unread", State.UNREAD),
        ("used", State.KEPT),
        ("idle for longest", State.IDLE),
        ("idle", State.IDLE),
        ("late head", State.HEAD),
    ):
        door.open(name, "a")
        door.move(name, state)
        door.now_s += 0.1
    door.now_s += LATE_S
    for number in range(8):
        door.open(f"new {number}", "a")
        if number == 0:
            door.move("new 0", State.BODY)
    assert door.closed == ["late head", "idle for longest", "idle", "used", "unread", "late body", "new 1"]
    assert "busy" in door.seats


def test_in_each_state_the_address_with_the_most_pays() -> None:
    door = Door(120)
    for number in range(100):
        door.open(f"idle {number}", "balancer")
        door.move(f"idle {number}", State.IDLE)
    for number in range(20):
        door.open(f"half {number}", "attacker")
    door.now_s += LATE_S
    for number in range(20):
        door.open(f"client {number}", f"10.0.0.{number}")
        door.move(f"client {number}", State.BUSY)
    assert door.closed == [f"half {number}" for number in range(20)], "not the many idle ones of a load balancer"


@pytest.mark.brief()
def test_nine_thousand_half_heads_cost_others_nothing() -> None:
    """From one address, in bursts; clients of the same address open connections, ask, pause and ask again."""
    dice, door = random.Random(1), Door(8192)
    half = kept = lost = 0
    clients: dict[str, float] = {}
    for step in range(400):
        door.now_s += 0.05
        for _ in range(200):
            door.open(f"half {half}", "a")
            half += 1
        name = f"client {step}"
        door.open(name, "a")
        door.now_s += 0.005
        lost += name not in door.seats
        door.seats[name].is_busy = True
        clients[name] = door.now_s + dice.uniform(0.05, 2.0)
        for each, until_s in list(clients.items()):
            if until_s <= door.now_s:
                door.rest(each)
                kept += each in door.seats
                lost += each not in door.seats
                del clients[each]
    assert lost == 0 and kept > 300
    assert all(name.startswith("half") for name in door.closed)
    assert door.table.count == len(door.seats) == 8192


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["open", "move", "rest", "begin", "close"]),
        st.integers(0, 30),
        st.sampled_from(list(State)),
        st.floats(0, 1),
    ),
    max_size=200,
)


@given(STEPS, st.integers(1, 10))
def test_counts_close_and_no_busy_seat_is_taken(steps: list[tuple[str, int, State, float]], most: int) -> None:
    door = Door(most)
    for what, number, state, wait_s in steps:
        door.now_s += wait_s
        name = str(number)
        if what == "open" and name not in door.seats:
            busy = {each for each, seat in door.seats.items() if seat.state is State.BUSY or seat.is_busy}
            door.open(name, str(number % 3))
            assert busy <= door.seats.keys()
        elif what == "move":
            door.move(name, state)
        elif what == "rest":
            door.rest(name)
        elif what == "begin" and name in door.seats:
            door.seats[name].is_busy = True
        elif what == "close" and name in door.seats:
            door.leave(name)
        assert door.table.count == len(door.seats) <= most
    for name in list(door.seats):
        door.leave(name)
    assert door.table.count == 0 and door.table.victim(door.now_s + 9) is None
    assert all(not queue._by_holder for queue in door.table._queues)


def test_the_longest_idle_pays_whatever_was_idle_before() -> None:
    """Kept connections ask again and again; the one that did not for longest is closed, and a busy one never."""
    door = Door(50)
    for number in range(50):
        door.open(str(number), "a")
        door.rest(str(number))
        door.rest(str(number))
    dice = random.Random(2)
    idle_since = dict.fromkeys(door.seats, 0.0)
    busy: set[str] = set()
    for step in range(2_000):
        door.now_s += 0.01
        name = dice.choice(sorted(door.seats.keys() - busy))
        if step % 3 and len(busy) < 20:
            door.seats[name].is_busy = True
            busy.add(name)
        elif busy:
            name = busy.pop()
            door.rest(name)
            idle_since[name] = door.now_s
        if step % 20 == 0:
            door.closed.clear()
            new = f"new {step}"
            door.open(new, "a")
            [closed] = door.closed
            assert closed not in busy
            older = [each for each in door.seats.keys() - busy - {new} if idle_since[each] < idle_since[closed] - 5.0]
            assert not older, "among those of about the same age any may be the one"
            door.rest(new)
            door.rest(new)
            idle_since[new] = door.now_s


def test_a_slow_reader_is_named_when_it_has_not_read_for_a_while() -> None:
    door = Door(5)
    door.open("a", "a")
    door.move("a", State.UNREAD)
    assert door.table.slow_reader(door.now_s) is None
    door.now_s += LATE_S
    seat = door.table.slow_reader(door.now_s)
    assert seat is not None and seat.owner == "a"
    door.move("a", State.BUSY)
    assert door.table.slow_reader(door.now_s) is None
